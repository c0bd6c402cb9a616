"""Traced functions: analyses of jaxprs, and an interpreter that applies rules to them.

Owns the trace of a loss, the table of inner jaxprs, constant folding, the two engines of analysis, the table of products,
the uses of weights, and the interpreter. It is independent of meshes, plans and training. Open `_interpret.py` first, then
`_normal.py` and `_inner.py`; for an analysis `_flow.py` or `_fold.py`.
"""

from ._alike import alike as alike, derivative_of as derivative_of, same_array as same_array
from ._body import Body as Body
from ._flow import flow as flow, union as union
from ._fold import (
    Entered as Entered,
    about as about,
    entered as entered,
    expected_length as expected_length,
    fold as fold,
    is_rare as is_rare,
    rarely as rarely,
)
from ._inner import (
    CUSTOM_DERIVATIVES as CUSTOM_DERIVATIVES,
    REMAT as REMAT,
    Env as Env,
    Place as Place,
    all_inside as all_inside,
    as_array as as_array,
    as_fun as as_fun,
    called as called,
    equations as equations,
    evaluate as evaluate,
    insides as insides,
    is_variable as is_variable,
    n_bytes as n_bytes,
    n_iterations as n_iterations,
    run as run,
    scan_counts as scan_counts,
    shapes_in as shapes_in,
    variables as variables,
)
from ._interpret import (
    Group as Group,
    Rule as Rule,
    Site as Site,
    Tag as Tag,
    Tagged as Tagged,
    has_tag as has_tag,
    interpret as interpret,
    plain as plain,
    transformed as transformed,
)
from ._lines import (
    has_derivative_of as has_derivative_of,
    line_among as line_among,
    line_of as line_of,
    made_in as made_in,
    shortened as shortened,
)
from ._normal import normal as normal, once as once, restricted as restricted, without_remats as without_remats
from ._products import (
    BY_WEIGHT as BY_WEIGHT,
    GROUPED as GROUPED,
    PRODUCTS as PRODUCTS,
    kind_of_product as kind_of_product,
    matmul_flops as matmul_flops,
    product_flops as product_flops,
)
from ._trace import Trace as Trace
from ._unknown import or_as_written as or_as_written
from ._weight_uses import SPREAD as SPREAD, WeightUses as WeightUses
