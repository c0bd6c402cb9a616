"""The state of a value of the traced loss: which dim is split, or which parameter it is a view of."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class View:
    """A value that is a view of a parameter: transposed, sliced or scaled.

    **Arguments:**

    - `leaf`: the name of the parameter.
    - `dims`: for each dim of the value, the dim of the leaf that is split if this dim is split; None where there is none.
    """

    leaf: str
    dims: tuple[int | None, ...]

    def of(self, source: Sequence[int | None]) -> "View":
        """Returns the view whose dim `i` is this one's dim `source[i]`."""
        return View(self.leaf, tuple(None if dim is None else self.dims[dim] for dim in source))


@dataclass(frozen=True)
class Flow:
    """The tracked state of a value.

    **Arguments:**

    - `dim`: the dim that the model axis splits; None for a replicated value.
    - `cause`: the leaf that caused the split, or the replication.
    - `views`: the parameters that the value is a view of. The splits of these parameters then determine its split, and `dim`
        and `cause` do not count.
    - `tail`: a later dim that is split together with `dim`, if `dim` alone does not divide over the shards.
    - `broadcast`: dims along which all entries are equal, so that slicing is free, also in the gradient.
    - `data`: whether the value depends on data. A parameter that data selects among others still counts as a parameter.
    - `grad`: whether a gradient flows back through the value.
    """

    dim: int | None = None
    cause: str | None = None
    views: tuple[View, ...] = ()
    broadcast: frozenset[int] = frozenset()
    data: bool = False
    grad: bool = False
    tail: int | None = None

    def through(self, source: Sequence[int | None], new: Collection[int] = ()) -> "Flow":
        """Returns the flow of the value whose dim `i` is this one's dim `source[i]`. It is repeated along the dims `new`."""
        broadcast = {i for i, dim in enumerate(source) if dim in self.broadcast} | set(new)
        dim = source.index(self.dim) if self.dim is not None and self.dim in source else None
        views = tuple(view.of(source) for view in self.views)
        tail = source.index(self.tail) if dim is not None and self.tail is not None and self.tail in source else None
        return replace(self, dim=dim, views=views, broadcast=frozenset(broadcast), tail=tail)

    def views_without(self, dims: Collection[int]) -> tuple[View, ...]:
        """Returns the views with these dims of the value marked as unrelated to the leaves' dims."""
        if not dims:  # shared: a sum of many parameters has as many views, and copying them at each addition is quadratic
            return self.views
        return tuple(view.of([None if i in dims else i for i in range(len(view.dims))]) for view in self.views)
