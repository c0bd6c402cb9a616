"""Errors: checks of the user's input before any work, and tracebacks that show the user's own frames.

Owns argument checks, the wrappers around the user's functions, and the reading of untrusted files. Knows nothing of
devices, models or training. Open `_arguments.py` first.
"""

from ._arguments import (
    alternatives as alternatives,
    as_metrics as as_metrics,
    check_alike as check_alike,
    check_alive as check_alive,
    check_choice as check_choice,
    check_count as check_count,
    check_examples_kind as check_examples_kind,
    check_flag as check_flag,
    check_float_dtype as check_float_dtype,
    check_folder as check_folder,
    check_function as check_function,
    check_integers as check_integers,
    check_key as check_key,
    check_model as check_model,
    check_model_function as check_model_function,
    check_number as check_number,
    check_optimizer as check_optimizer,
    check_path as check_path,
    check_predictor as check_predictor,
    check_readable_again as check_readable_again,
    check_state as check_state,
    check_type as check_type,
    wrong as wrong,
)
from ._names import check_names as check_names
from ._redco import (
    REDCO_DEPLOYER as REDCO_DEPLOYER,
    REDCO_PREDICTOR as REDCO_PREDICTOR,
    REDCO_PREDICTOR_ARGUMENTS as REDCO_PREDICTOR_ARGUMENTS,
    REDCO_TRAINER as REDCO_TRAINER,
    REDCO_TRAINER_ARGUMENTS as REDCO_TRAINER_ARGUMENTS,
    RedcoNames as RedcoNames,
)
from ._untrusted import (
    DamagedError as DamagedError,
    brief as brief,
    brief_name as brief_name,
    damaged as damaged,
    is_plain as is_plain,
    is_size as is_size,
    load_json as load_json,
    parse_json as parse_json,
    printable as printable,
    unreadable as unreadable,
)
from ._user_code import (
    FilteredTraceback as FilteredTraceback,
    Once as Once,
    RemoteTraceback as RemoteTraceback,
    check_not_traced as check_not_traced,
    example_note as example_note,
    filter_traceback as filter_traceback,
    is_ours as is_ours,
    note as note,
    warn as warn,
    with_batch_note as with_batch_note,
)
