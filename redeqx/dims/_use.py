"""What a loss does with the rows of its batch. Owns the verdict and its text; how it is found is the analysis' matter."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RowUse:
    """What a loss does with the rows of its batch.

    **Arguments:**

    - `kind`: "separable", the loss is a mean or a sum over rows; "after", it is one once `n_whole` values that depend on
      data alone were computed on the whole batch; "mixed", what it computes for a row depends on other rows; "unknown",
      the analysis has no answer. Only "separable" and "after" are proofs.
    - `degree`: 0 for a mean over rows, 1 for a sum.
    - `group`: that many consecutive rows belong together: preference pairs, or the samples of a prompt.
    - `n_whole`: the number of values that are computed on the whole batch.
    - `line`: `file:line` of the first equation that mixes rows, or of what is unknown.
    - `why`: what that equation does, such as "a reduction over rows".
    - `draws`: one sentence with its line for each random draw that cannot follow the rows.
    """

    kind: Literal["separable", "after", "mixed", "unknown"]
    degree: int
    group: int = 1
    n_whole: int = 0
    line: str = ""
    why: str = ""
    draws: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The verdict in one line, such as "separable after 2 values of the whole batch" or "mixed at train.py:41"."""
        if self.kind in ("mixed", "unknown"):
            where = f" at {self.line}" if self.line else ""
            reason = self.why and (f" ({self.why})" if where or self.kind == "mixed" else f": {self.why}")
            return f"{self.kind}{where}{reason}"
        said = "separable" if self.degree == 0 else "a sum"
        if self.kind == "after":
            said += f" after {self.n_whole} value{'s' * (self.n_whole != 1)} of the whole batch"
        return said + (f", {self.group} rows at a time" if self.group > 1 else "")
