"""A rule that needs to know which values have positions that the sequence axis splits."""

from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Self

from ..dims import Inputs, Positions, positions_of
from ..tracing import Rule


@dataclass(frozen=True)
class ByPositions(Rule):
    """A rule that treats values without positions, as of an image, in another way. `inputs` says what the function's inputs
    are, if the sequence axis splits positions; without it, none of its values have `positions`."""

    _: KW_ONLY
    inputs: Inputs | None = None
    positions: Positions = field(default_factory=Positions, compare=False, repr=False)

    def of(self, closed: Any) -> Self:
        return self if self.inputs is None else replace(self, positions=positions_of(closed, self.inputs))
