"""How a model is split over the mesh: the plan, with a reason for each leaf.

Owns the dataflow analysis that applies the two rules to a traced loss, the kinds of leaves, and the plan. It is independent
of optimizers, batches and files. Open `_plan.py` first, then `_dataflow.py`.
"""

from ._dataflow import values_by as values_by
from ._kinds import (
    KINDS as KINDS,
    Kind as Kind,
    current_kinds as current_kinds,
    kinds_of as kinds_of,
    using_kinds as using_kinds,
)
from ._overrides import Overrides as Overrides
from ._placement import is_on as is_on, place as place, shardings_like as shardings_like
from ._plan import (
    LeafPlan as LeafPlan,
    Plan as Plan,
    check_plan as check_plan,
    make_plan as make_plan,
    mark_read as mark_read,
)
from ._positions import describe_positions as describe_positions, inputs_of as inputs_of
from ._search import order as order
