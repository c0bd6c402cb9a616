"""The numbers of a batch's rows, by which random draws belong to rows and not to the batch that computes them."""

from typing import NamedTuple

from jaxtyping import Array, UInt32


class RowNumbers(NamedTuple):
    """The numbers of a batch's rows.

    **Arguments:**

    - `numbers`: uint32 `[rows]`, the number of each row: in a step, its place in the whole update; in an evaluation or a
        prediction, its place in the whole call.
    - `total`: uint32 `[]`, how many rows the update or the call has.
    """

    numbers: UInt32[Array, " rows"]
    total: UInt32[Array, ""]
