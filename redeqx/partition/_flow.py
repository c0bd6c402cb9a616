"""What is known of a value of the traced loss, and how the uses of a parameter decide its split.

Owns the two rules as they meet values (`Pass.contract`, `Pass.meet`), and what a choice costs. Which primitive does what is
`_dataflow`'s.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.extend import core as jex

from ._rules import Split, follow

# What a plan costs, in bytes that a device sends in a step.
# Of a collective in a ring of n, for each byte of the whole array. A reduce-scatter is an all-gather backwards; `reshard`
# brings the equal parts of a split dim, as of a fused projection, onto all devices again (`transforms`), and `join` puts
# split parts one after the other; both forward and backward.
_MOVES: dict[str, Callable[[int], float]] = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reshard": lambda n: 2 / n,
    "join": lambda n: 1.0,
}
# Of each byte that a leaf keeps whole: itself, its gradient and two moments of it. An axis is raised for memory, so each
# counts as two that are sent.
_HELD = 8
_FLOPS_A_BYTE = 1000  # floating point operations in the time of one byte: a published figure of accelerators, about
_PASSES = 3  # of a matmul in a step: one forward, two backward


@dataclass(frozen=True)
class View:
    """A value that is a parameter seen otherwise.

    **Arguments:**

    - `leaf`: which one.
    - `dims`: for each dim of the value the dim of the leaf that is split by splitting it; None for others.
    """

    leaf: int
    dims: tuple[int | None, ...]

    def of(self, source: Sequence[int | None]) -> "View":
        """The view whose dim `i` is this one's dim `source[i]`."""
        return View(self.leaf, tuple(None if dim is None else self.dims[dim] for dim in source))


@dataclass(frozen=True)
class Flow:
    """What is known of a value.

    **Arguments:**

    - `dim`: which of its dims the model axis splits; None where it is whole.
    - `cause`: the leaf that split it, or made it whole.
    - `views`: the parameters that it is, which know for themselves how they are split.
    - `tail`: the dim after it that is split with it, where the shards do not divide `dim` alone.
    - `spread`: dims along which all its entries are alike, so that a shard of it costs nothing.
    - `data`: whether it depends on data; a parameter that data chooses among others still is a parameter.
    - `grad`: whether a gradient flows back through it.
    """

    dim: int | None = None
    cause: int | None = None
    views: tuple[View, ...] = ()
    spread: frozenset[int] = frozenset()
    data: bool = False
    grad: bool = False
    tail: int | None = None

    def seen(self, source: Sequence[int | None], new: Collection[int] = ()) -> "Flow":
        """The value whose dim `i` is this one's dim `source[i]`; `new` are dims along which it was repeated."""
        spread = {i for i, dim in enumerate(source) if dim in self.spread} | set(new)
        dim = source.index(self.dim) if self.dim is not None and self.dim in source else None
        views = tuple(view.of(source) for view in self.views)
        tail = source.index(self.tail) if dim is not None and self.tail is not None and self.tail in source else None
        return replace(self, dim=dim, views=views, spread=frozenset(spread), tail=tail)


@dataclass
class _Memo:
    """What loops were followed to, which stays known when a `Pass` is restored."""

    followed: dict[Any, tuple[list[Flow], dict[str, Any], float]] = field(default_factory=dict)


@dataclass
class Pass:
    """The loss followed once, from its first equation to its last.

    **Arguments:**

    - `forced`: the dim of some leaves, whatever the rules say.
    - `follow`: from an equation and what is known of its inputs to what is known of its outputs.
    - `decided`: the split of each leaf that data met, with the reason.
    - `options`: the dims of a leaf that could be split instead.
    - `doubts`: leaves whose choice cost more than the rules' own collectives, in their order.
    - `broken`: those among them whose output was needed whole.
    - `recurrent`: those among them that a loop feeds its own output.
    - `follows`: leaves that are cut along with another, and for each of their dims that of the other, stacked ones left out.
    - `products`: each product that was followed, how many shards compute all of it (None for parameters alone), and the
        equation whose line it has: its own, and a call around it with its own derivative, whose line that derivative has.
    - `calls`: the calls that are being followed.
    - `errors`: the primitive and the error of each equation, by its id, whose form is not known.
    - `resharded`: values that are split along a dim of which equal parts are taken, and that dim.
    """

    names: Sequence[str]
    leaves: Sequence[jax.ShapeDtypeStruct]
    n: int
    forced: Mapping[int, int | None]
    follow: Callable[["Pass", Any, list["Flow"]], list["Flow"]]
    decided: dict[int, Split] = field(default_factory=dict)
    options: dict[int, tuple[int, ...]] = field(default_factory=dict)
    stacked: dict[int, int] = field(default_factory=dict)
    doubts: dict[int, None] = field(default_factory=dict)
    broken: set[int] = field(default_factory=set)
    recurrent: set[int] = field(default_factory=set)
    follows: Mapping[int, tuple[int, Sequence[int | None]]] = field(default_factory=dict)
    resharded: dict[Any, int] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    products: dict[tuple[int, int], tuple[Any, int | None, Any]] = field(default_factory=dict)
    calls: tuple[Any, ...] = ()
    rows: dict[Any, int] = field(default_factory=dict)  # how many weights are split as rows since a value arrived split
    cost: float = 0.0
    times: int = 1
    reduced: set[Any] = field(default_factory=set)  # values whose gradient's sum is paid for
    memo: "_Memo" = field(default_factory=lambda: _Memo())

    def standing(self) -> "Pass":
        """A copy of all that it found so far."""
        found = {name: type(value)(value) for name, value in vars(self).items() if isinstance(value, dict | set)}
        return replace(self, **found)

    def restore(self, other: "Pass") -> None:
        """Forget what was found since."""
        vars(self).update(vars(other.standing()))

    def once(self, key: Any, follow: Callable[[], list[Flow]]) -> list[Flow]:
        """What `follow` returns, and what it finds, remembered for the same key in the same state.

        A loop is followed in several ways. One in another is followed again for each way of that one: without this, the cost
        would be exponential in the depth.
        """
        calls = tuple(map(id, self.calls))
        state = (frozenset(self.decided.items()), tuple(self.doubts), frozenset(self.stacked.items()), self.times, calls)
        if (key, state) in self.memo.followed:
            outs, found, cost = self.memo.followed[key, state]
            for name, values in found.items():
                getattr(self, name).update(values)
            self.cost += cost
        else:
            before = self.standing()
            outs = follow()
            found = {
                name: {k: v for k, v in value.items() if k not in was or was[k] is not v}
                if isinstance(value, dict)
                else value - was
                for name, value in vars(self).items()
                if isinstance(value, dict | set) and name not in ("rows", "reduced")
                for was in (vars(before)[name],)
            }
            self.memo.followed[key, state] = outs, found, self.cost - before.cost
        self.reduced, self.rows = set(), {}  # they are of the values inside
        return outs

    def evaluate(self, closed: Any, ins: Sequence[Flow]) -> list[Flow]:
        """What is known of a closed jaxpr's outputs."""
        jaxpr = closed.jaxpr
        env: dict[Any, Flow] = dict.fromkeys(jaxpr.constvars, Flow())
        env.update(zip(jaxpr.invars, ins, strict=True))
        self.reduced, self.rows = set(), {}
        for eqn in jaxpr.eqns:
            flows = [Flow() if isinstance(atom, jex.Literal) else env[atom] for atom in eqn.invars]
            known = {"data": any(f.data for f in flows), "grad": any(f.grad for f in flows)}
            outs = [replace(out, **known) for out in self.follow(self, eqn, flows)]
            env.update(zip(eqn.outvars, (replace(out, data=False) if out.views else out for out in outs), strict=True))
        return [Flow() if isinstance(atom, jex.Literal) else env[atom] for atom in jaxpr.outvars]

    # --- what a value is -----------------------------------------------------------------------------------------------

    def split(self, flow: Flow) -> tuple[int | None, int | None]:
        """The dim that is split, and the leaf that did it."""
        if not flow.views:
            return flow.dim, flow.cause
        for view in flow.views:
            split = self.decided.get(view.leaf)
            if split is not None and split.dim is not None and split.dim in view.dims:
                return view.dims.index(split.dim), view.leaf
        return None, None

    def is_open(self, flow: Flow) -> bool:
        """Whether it is a parameter that nothing has decided yet."""
        return any(view.leaf not in self.decided for view in flow.views)

    def name(self, leaf: int | None) -> str:
        return "" if leaf is None else f"`{self.names[leaf].removesuffix('.weight')}`"

    # --- what happens to it --------------------------------------------------------------------------------------------

    def pay(self, kind: str, aval: Any) -> None:
        self.cost += self.times * _MOVES[kind](self.n) * math.prod(aval.shape) * aval.dtype.itemsize

    def compute_whole(self, aval: Any, n_summed: int) -> None:
        """A product that every device computes whole, where each could do its share."""
        flops = 2 * _PASSES * math.prod(aval.shape) * n_summed
        self.cost += self.times * (1 - 1 / self.n) * flops / _FLOPS_A_BYTE

    def hold(self) -> None:
        """The leaves that stay whole."""
        for i, split in self.decided.items():
            if split.dim is None:
                self.cost += (1 - 1 / self.n) * _HELD * math.prod(self.leaves[i].shape) * self.leaves[i].dtype.itemsize

    def doubt(self, *leaves: int | None) -> None:
        self.doubts.update(dict.fromkeys(leaf for leaf in leaves if leaf is not None))

    def decide(self, flow: Flow, dim: int | None, reason: str) -> None:
        """Each open parameter that a value is gets split where dim `dim` of the value is."""
        for view in flow.views:
            if view.leaf not in self.decided:
                self.decided[view.leaf] = Split(None if dim is None else view.dims[dim], reason)

    def decide_as_declared(self, flow: Flow, leaf: int) -> None:
        of, dims = self.follows[leaf]
        n_stacked, weight = len(self.leaves[leaf].shape) - len(dims), self.decided[of]
        split = follow(weight if weight.dim is None else replace(weight, dim=weight.dim - n_stacked), dims)
        dim = None if split.dim is None else split.dim + n_stacked
        self.decide(flow, None if dim is None else flow.views[0].dims.index(dim), split.reason)

    def choose(self, flow: Flow, shape: Sequence[int], dims: Sequence[int]) -> int | None:
        """The first of some dims of an open parameter that can be split, or the one that is forced."""
        view = next(view for view in flow.views if view.leaf not in self.decided)
        possible = [i for i in dims if shape[i] and shape[i] % self.n == 0 and self.divides(view, i)]
        self.options[view.leaf] = tuple(dim for i in possible if (dim := view.dims[i]) is not None)
        if view.leaf in self.forced:
            dim = self.forced[view.leaf]
            return next((i for i in possible if view.dims[i] == dim), None)
        return possible[0] if possible else None

    def could_split(self, flow: Flow, shape: Sequence[int], dim: int) -> bool:
        """Whether an open parameter could be split along a dim of its value."""
        return shape[dim] % self.n == 0 and any(self.divides(view, dim) for view in flow.views)

    def divides(self, view: View, dim: int) -> bool:
        """Whether the leaf can be split where dim `dim` of its view is, which may be a part of one of its own."""
        of = view.dims[dim]
        return of is not None and self.leaves[view.leaf].shape[of] % self.n == 0

    def is_forced(self, flow: Flow) -> bool:
        return any(view.leaf in self.forced for view in flow.views)

    def why_whole(self, flow: Flow, shape: Sequence[int], dims: Sequence[int]) -> str:
        if self.is_forced(flow):
            return "whole: costs less than any split of it, which what follows would have to undo"
        for view in flow.views:
            if len(own := self.leaves[view.leaf].shape) == 1 and own[0] % self.n:  # a vector that holds weights
                padded = -(-own[0] // self.n) * self.n
                return f"whole: {own[0]} entries do not divide over {self.n} shards; a vector padded to {padded} would"
        return f"whole: no dim of {' x '.join(str(shape[i]) for i in sorted(dims))} divides over {self.n} shards"

    def gather(self, aval: Any, flow: Flow) -> Flow:
        """The value, whole."""
        dim, cause = self.split(flow)
        if dim is None:
            return flow
        self.pay("all-gather", aval)
        self.doubt(cause)
        self.broken.add(cause)  # pyright: ignore[reportArgumentType]
        return replace(flow, dim=None, views=(), tail=None)

    def cut(self, atom: Any, flow: Flow, dim: int) -> None:
        """A whole value is read by shards: that is free, but its gradient is gathered."""
        if flow.data and flow.grad and dim not in flow.spread:
            self.pay("all-gather", atom.aval)

    def sum_gradient(self, atom: Any, flow: Flow) -> None:
        """A whole value is read by all shards for different ends: its gradient is summed, once for all of them."""
        if flow.data and flow.grad and atom not in self.reduced:
            self.reduced.add(atom)
            self.pay("all-reduce", atom.aval)

    def see(self, eqn: Any, flow: Flow, source: Sequence[int | None], parts: Mapping[int, int]) -> Flow:
        """A value seen otherwise.

        **Arguments:**

        - `source`: for each dim of the output the dim of the operand that is split by splitting it, None for none.
        - `parts`: dims of the output that are equal parts of a dim of the operand, and of which.
        """
        dim, cause = self.split(flow)
        aval = eqn.outvars[0].aval
        repeated = eqn.primitive.name in ("broadcast_in_dim", "expand_dims")
        if flow.views and len(eqn.invars[0].aval.shape) == 1 and aval.shape and aval.shape[0] % self.n == 0:
            source = [0 if i == 0 else of for i, of in enumerate(source)]  # parts of a vector change places
        new = [i for i, d in enumerate(source) if repeated and (d is None or eqn.invars[0].aval.shape[d] != aval.shape[i])]
        if dim is not None and dim not in source:
            out = next((i for i, of in parts.items() if of == dim), None)
            if out is None:
                return self.gather(eqn.invars[0].aval, flow).seen(source, new)
            if flow.data:
                self.pay("reshard", aval)
                self.doubt(cause)
                self.resharded[eqn.invars[0]] = dim
            return replace(flow.seen(source, new), dim=out, cause=cause, views=())
        return flow.seen(source, new)

    def meet(self, eqn: Any, ins: Sequence[Flow]) -> list[Flow]:
        """An elementwise equation: a dim that is split in one operand is split in all."""
        shape = eqn.outvars[0].aval.shape
        full = [i for i, atom in enumerate(eqn.invars) if len(atom.aval.shape) == len(shape) > 0]
        spreads = {
            i: ins[i].spread | {dim for dim, size in enumerate(eqn.invars[i].aval.shape) if size != shape[dim]} for i in full
        }
        alike = frozenset(range(len(shape))).intersection(*spreads.values())
        if not any(ins[i].data for i in full):  # parameters alone: what comes out is one, seen otherwise
            views = tuple(
                View(view.leaf, tuple(None if dim in spreads[i] else of for dim, of in enumerate(view.dims)))
                for i in full
                for view in ins[i].views
            )
            return [Flow(views=views, spread=alike) for _ in eqn.outvars]
        splits = {i: self.split(ins[i]) for i in full}
        found = [(dim, cause) for dim, cause in splits.values() if dim is not None]
        dim, cause = found[0] if found else (None, None)
        for i, (other, by) in splits.items():
            if other not in (dim, None):
                self.doubt(cause)
                self.gather(eqn.invars[i].aval, ins[i])
            elif other is None and dim is not None and ins[i].data and ins[i].grad and dim not in spreads[i]:
                self.doubt(cause, by)
                self.cut(eqn.invars[i], ins[i], dim)
            if self.is_open(ins[i]):
                self.decide_beside(eqn, ins[i], eqn.invars[i].aval.shape, dim, cause)
        tail = next((ins[i].tail for i in full if splits[i][0] == dim is not None), None)
        return [Flow(dim=dim, cause=cause, spread=alike, tail=tail) for _ in eqn.outvars]

    def decide_beside(self, eqn: Any, flow: Flow, shape: Sequence[int], dim: int | None, cause: int | None) -> None:
        """A parameter that is added to data, or multiplies it entry by entry, as a bias or a scale."""
        with_ = "added to" if eqn.primitive.name in ("add", "add_any", "sub") else "meets entry by entry"
        if dim is None:
            self.decide(flow, None, f"whole: {with_} a value that is whole")
        elif self.could_split(flow, shape, dim):
            self.decide(flow, dim, f"follows: {with_} a value that is split by {self.name(cause)}")
        else:
            self.decide(flow, None, f"whole: {with_} a value that is split along another dim, by {self.name(cause)}")

    def give_up(self, eqn: Any, ins: Sequence[Flow]) -> list[Flow]:
        """An equation that is not followed gets whole values and gives whole values."""
        if not any(flow.data for flow in ins):  # as a decomposition of a weight, which may become products
            self.products.update({(id(eqn), id(at)): (eqn, None, at) for at in (eqn, *self.calls)})
        for atom, flow in zip(eqn.invars, ins, strict=True):
            self.gather(atom.aval, flow)
            self.decide(flow, None, f"whole: `{eqn.primitive.name}` computes with it, which is not followed")
        return [Flow() for _ in eqn.outvars]

    # --- the two rules -------------------------------------------------------------------------------------------------

    def contract(self, eqn: Any, ins: Sequence[Flow], pairs: Sequence[tuple[int, int]], outs: Sequence[Mapping[int, int]]):
        """A product that sums over dims of its two operands: a matmul or a convolution.

        **Arguments:**

        - `pairs`: dims of the operands that are summed over together.
        - `outs`: for each operand, from those of its dims that are in the output to where they are; a dim of both operands
            in one place is a batch.
        """
        summed = [dict(pairs), {b: a for a, b in pairs}]
        places = [{place: dim for dim, place in out.items()} for out in outs]

        def partner(side: int, dim: int) -> int | None:
            """The dim of the other operand that is split together with this one."""
            return summed[side].get(dim, places[1 - side].get(outs[side].get(dim, -1)))

        for side in (1, 0):  # the second operand is the weight of most matmuls; where both are, it is decided first
            if self.is_open(ins[side]):
                self.decide_weight(eqn, ins, side, partner, summed, outs)
        flows = list(ins)
        for side in (0, 1):
            if flows[side].tail in summed[side]:  # brought together for this product, and split by `dim` alone in it
                self.pay("all-gather", eqn.invars[side].aval)
                flows[side] = replace(flows[side], tail=None)
        (dim0, cause0), (dim1, cause1) = map(self.split, flows)
        if dim0 is not None and dim1 is not None and partner(0, dim0) != dim1:
            # Split along dims that do not go together: data is gathered rather than a weight, else what is smaller.
            sizes = [(bool(flow.views), math.prod(atom.aval.shape)) for atom, flow in zip(eqn.invars, flows, strict=False)]
            side = sizes.index(min(sizes))
            self.doubt(cause0, cause1)
            flows[side] = self.gather(eqn.invars[side].aval, flows[side])
            (dim0, cause0), (dim1, cause1) = [(None, None) if i == side else self.split(flows[i]) for i in (0, 1)]
        is_whole, is_data = dim0 is None and dim1 is None, any(flow.data for flow in ins)
        n_whole = (self.n if is_whole else 1) if is_data else None
        own = [call for call in self.calls if call.primitive.name.startswith("custom_vjp")]
        self.products.update({(id(eqn), id(at)): (eqn, n_whole, at) for at in (eqn, *own)})
        if is_whole:
            if is_data:
                sizes = [eqn.invars[0].aval.shape[dim] for dim in summed[0]]
                self.compute_whole(eqn.outvars[0].aval, math.prod(sizes))
            return [Flow()]
        side, dim, cause = (0, dim0, cause0) if dim0 is not None else (1, dim1, cause1)
        other, both = 1 - side, dim0 is not None and dim1 is not None
        meets = partner(side, dim)  # pyright: ignore[reportArgumentType]
        if not both and meets is not None:
            if flows[other].data and flows[other].grad:
                self.doubt(cause)
            self.cut(eqn.invars[other], flows[other], meets)
        if dim in summed[side]:
            self.pay("all-reduce", eqn.outvars[0].aval)
            made_by = next((view.leaf for flow in reversed(ins) for view in flow.views), None)
            return [Flow(cause=made_by)]
        if meets is None:
            self.sum_gradient(eqn.invars[other], flows[other])
        tail = outs[side].get(flows[side].tail)  # pyright: ignore[reportArgumentType]
        return [Flow(dim=outs[side][dim], cause=cause, tail=tail)]  # pyright: ignore[reportArgumentType]

    def decide_weight(
        self, eqn: Any, ins: Sequence[Flow], side: int, partner: Any, summed: Sequence[Mapping], outs: Sequence[Mapping]
    ) -> None:
        """The rules: a column where the other operand is whole, a row where it is split along what is summed over."""
        weight, data, shape = ins[side], ins[1 - side], eqn.invars[side].aval.shape
        if not data.data:
            return  # parameters alone make no activation
        if (leaf := weight.views[0].leaf) in self.follows and self.follows[leaf][0] in self.decided:
            self.decide_as_declared(weight, leaf)
            return
        free = [dim for dim in outs[side] if partner(side, dim) is None]
        arrived, cause = self.split(data)
        if arrived is None:
            dim = self.choose(weight, shape, [*free, *summed[side]])
            if dim is None:
                self.decide(weight, None, self.why_whole(weight, shape, [*free, *summed[side]]))
            elif dim in summed[side]:
                sizes = " x ".join(str(shape[i]) for i in free)
                why = f"{sizes} outputs do not divide over {self.n} shards, its inputs do"
                self.decide(weight, dim, f"row: {'costs less than a column' if self.is_forced(weight) else why}")
            else:
                self.decide(weight, dim, "column: its input arrives whole")
            return
        meets = partner(1 - side, arrived)
        if meets is None:
            self.decide(weight, None, f"whole: its input arrives split along another dim, by {self.name(cause)}")
            return
        row = meets in summed[side]
        if row:
            atom = eqn.invars[1 - side]
            self.rows[atom] = self.rows.get(atom, 0) + 1
            if self.rows[atom] > 1:  # whole, it would be read by columns, and summed over once
                self.doubt(cause)
        dim = self.choose(weight, shape, [meets, *free])
        kind = "row: its input arrives split by" if row else "follows: its input arrives split, alike, by"
        if dim == meets:
            self.decide(weight, dim, f"{kind} {self.name(cause)}")
        elif dim is not None:
            why = "costs less than a row" if self.is_forced(weight) else "what meets its input cannot be split"
            self.decide(weight, dim, f"column: {why}, though that arrives split by {self.name(cause)}")
        else:
            self.decide(weight, None, self.why_whole(weight, shape, [meets, *free]))
