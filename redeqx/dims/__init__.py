"""The dims of a traced function's values: which of them are rows, and what the function does with rows.

Owns the table of how primitives relate dims, the inference of names from it, the analysis of how each value depends on rows,
and the verdict `RowUse`. It is independent of meshes, plans and training. Open `_use.py` first, then `_names.py`.
"""

from ._draws import Factors as Factors, place_of_rows as place_of_rows
from ._equation import VIEWS as VIEWS, Related as Related, repeats as repeats, view as view
from ._lookups import SCATTERS as SCATTERS
from ._names import Inputs as Inputs, equations_of as equations_of
from ._positions import (
    ATTENTION as ATTENTION,
    BY_KEYS as BY_KEYS,
    CHUNKS as CHUNKS,
    RECURRENCE as RECURRENCE,
    Along as Along,
    Positions as Positions,
    positions_of as positions_of,
)
from ._relations import (
    CUMULATIVE as CUMULATIVE,
    ORDERED as ORDERED,
    REDUCTIONS as REDUCTIONS,
    is_elementwise as is_elementwise,
)
from ._split_rows import Spread as Spread, spread as spread
from ._use import (
    UNKNOWN as UNKNOWN,
    RowUse as RowUse,
    Whole as Whole,
    row_use as row_use,
    shapes_of_row as shapes_of_row,
    with_rows as with_rows,
)
