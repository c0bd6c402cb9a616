"""Optimizers that know the layers of a model: Muon, AdamW with small moments, groups of leaves by kind; and averages.

Each is an optax transformation, for use in `optax.chain` and the like. Owns the computation of updates, and what optax's
states tell; `partition` owns the kinds and shardings of leaves. Open `_update.py` first, then `_averages.py` and `_muon.py`.

Public: `adamw`, `muon`, `ema`, `eval_params`, `with_eval_params`, `groups`, `kinds`, `of_kind`, `decay_mask`.
"""

from ._adamw import adamw as adamw
from ._averages import (
    ema as ema,
    eval_params as eval_params,
    has_eval_params as has_eval_params,
    with_eval_params as with_eval_params,
    with_new_copies as with_new_copies,
)
from ._decay import decaying as decaying
from ._groups import decay_mask as decay_mask, groups as groups, kinds as kinds, of_kind as of_kind
from ._muon import muon as muon
from ._schedules import lr_schedule as lr_schedule, warn_of_zero_rate as warn_of_zero_rate
from ._states import (
    as_hyperparam as as_hyperparam,
    as_number as as_number,
    check_kept_form as check_kept_form,
    check_opt_state as check_opt_state,
    find_hyperparam as find_hyperparam,
    follows_schedule as follows_schedule,
    hyperparam_values as hyperparam_values,
    hyperparams as hyperparams,
    injected as injected,
    injected_rate as injected_rate,
    kinds_of_states as kinds_of_states,
    n_updates as n_updates,
    paired_leaves as paired_leaves,
    short_names as short_names,
)
from ._update import (
    Update as Update,
    ascent as ascent,
    in_float32 as in_float32,
    widened as widened,
    with_kept_dtypes as with_kept_dtypes,
    with_masters as with_masters,
)
