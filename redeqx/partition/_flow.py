"""The split and the uses of a parameter, and the state of a value of the traced loss: which dim is split, or which parameter
it is a view of."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple


@dataclass(frozen=True)
class Split:
    """The dim of a leaf that the model axis splits, and the reason."""

    dim: int | None  # None for a replicated leaf
    reason: str
    is_unknown: bool = False  # whether the use of a replicated leaf is not known, so that it may be split in storage

    def followed(self, dims: Sequence[int | None], n_stacked: int) -> "Split":
        """Returns the split of a leaf that is split like this one, with this number of stacked dims. `dims` has, for each
        other dim of the leaf, the dim of this one with which it is split, or None."""
        if self.dim is None:
            return Split(None, "replicated: follows its weight, which is replicated")
        if (dim := self.dim - n_stacked) not in dims:
            return Split(None, f"replicated: does not follow dim {dim} of its weight")
        return Split(n_stacked + dims.index(dim), f"follows dim {dim} of its weight")


class Use(NamedTuple):
    """The dims of a leaf in a product of data and a view of it."""

    outputs: tuple[int, ...]  # the leaf's dims that the product's output has
    inputs: tuple[int, ...]  # those that it contracts


@dataclass(frozen=True)
class View:
    """A value that is a view of a parameter: transposed, sliced or scaled."""

    leaf: str  # the name of the parameter
    dims: tuple[int | None, ...]  # for each dim of the value, the dim of the leaf that is split if this dim is, or None

    def of(self, source: Sequence[int | None]) -> "View":
        """Returns the view whose dim `i` is this one's dim `source[i]`."""
        return View(self.leaf, tuple(None if dim is None else self.dims[dim] for dim in source))


@dataclass(frozen=True)
class Flow:
    """The tracked state of a value. The splits of the parameters that it is a view of determine its split, and then `dim`
    and `cause` do not count."""

    dim: int | None = None  # the dim that the model axis splits; None for a replicated value
    cause: str | None = None  # the leaf that caused the split, or the replication
    views: tuple[View, ...] = ()  # of parameters
    broadcast: frozenset[int] = frozenset()  # dims along which all entries are equal: slicing is free, even in the gradient
    data: bool = False  # whether it depends on data; not for a parameter that data selects among others
    grad: bool = False  # whether a gradient flows back through it
    tail: int | None = None  # a later dim that is split together with `dim`, if `dim` alone does not divide over the shards

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
