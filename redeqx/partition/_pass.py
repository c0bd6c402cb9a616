"""A pass over the traced loss: how each of its values is split, and the split of each parameter, decided by its first use.

Owns the two rules as applied to values (`Pass.contract`, `Pass.combine`), and the cost of a choice. `_dataflow` handles each
primitive.
"""

import math
from collections import UserDict
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import jax

from ..dims import Related
from ..tracing import Env
from ._flow import Flow, Split, Use, View

# The cost of a plan is the number of bytes that a device sends in a step. This table has the cost of a collective over a
# ring of n devices, for each byte of the full array. An all-gather in the forward pass is a reduce-scatter in the backward
# pass. `reshard` splits each equal part of a split dim over all devices, as for a fused projection (`transforms`). `join`
# concatenates along a split dim. The costs of these two include both passes.
_COLLECTIVE_COST: dict[str, Callable[[int], float]] = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reshard": lambda n: 2 / n,
    "join": lambda n: 1.0,
}
# The cost of each byte of a replicated leaf. The leaf, its gradient and two moments are 4 bytes. Users enlarge an axis to
# save memory, so each of these counts as two bytes sent.
_REPLICATED_COST = 8
_FLOPS_PER_BYTE = 1000  # FLOPs in the time of sending one byte, roughly, from published figures of accelerators
EXPERTS = "experts: each shard holds its own"  # why a stack of weights is split over its matrices
_PRODUCTS_PER_STEP = 3  # matmuls in a step for each one of the loss: one forward, two backward


@dataclass
class Pass:
    """One pass over the loss, from its first equation to its last."""

    leaves: Mapping[str, jax.ShapeDtypeStruct]
    n: int  # the size of the model axis
    follow: Callable[["Pass", Any, list[Flow]], list[Flow]]  # from an equation and its inputs' flows to its outputs'
    related: Callable[[Any], Related]  # how an equation relates dims

    # Given: the dim to split of some leaves, which overrides the rules; and for each leaf that is split like another one,
    # that leaf, and its dim for each dim of the follower, both without stacked dims.
    forced: Mapping[str, int | None] = field(default_factory=dict)
    follows: Mapping[str, tuple[str, Sequence[int | None]]] = field(default_factory=dict)

    # The result: the split of each leaf that was used with data, the number of leading dims over which loops slice it, and
    # the bytes that a device sends in a step.
    splits: dict[str, Split] = field(default_factory=dict)
    stacked: dict[str, int] = field(default_factory=dict)
    cost: float = 0.0

    # For the search: the dims along which a leaf could be split instead, and the leaves to try with other splits, since
    # theirs caused more collectives than the rules need, in the order of the loss.
    options: dict[str, tuple[int, ...]] = field(default_factory=dict)
    candidates: dict[str, None] = field(default_factory=dict)
    gathered: set[str] = field(default_factory=set)  # whose split output had to be gathered
    looped: set[str] = field(default_factory=set)  # that a loop reads as a whole in each iteration
    recurrent: set[str] = field(default_factory=set)  # candidates among them
    sliced: set[str] = field(default_factory=set)  # split over a dim of stacked layers, along which a loop slices

    # Facts for others, by equation; `uses` by leaf too. `products`: the number of shards that each compute all of a product
    # (None for one of parameters only), by it and by the equation that has its source line. A product inside a call with a
    # custom derivative has two: its own, and the call, whose line the derivative's products have. `operands`: the split dims
    # of both operands of each product. `resharded`: equations that take equal parts of a split dim of their operand, with
    # the dim. `errors`: the primitive and the error of each equation of an unknown form.
    uses: dict[tuple[str, Any], Use] = field(default_factory=dict)
    looked_up: set[str] = field(default_factory=set)  # leaves whose rows data selects
    products: dict[tuple[Any, Any], int | None] = field(default_factory=dict)
    operands: dict[Any, tuple[int | None, int | None]] = field(default_factory=dict)
    resharded: dict[Any, int] = field(default_factory=dict)
    errors: dict[Any, str] = field(default_factory=dict)
    # If `records_values`: the split dim of each value that depends on data, or None for a replicated one, by its variable.
    values: dict[Any, int | None] = field(default_factory=dict)
    records_values: bool = False

    # Where the pass is.
    calls: tuple[Any, ...] = ()  # the enclosing calls, outermost first
    n_iterations: int = 1  # of the enclosing loops
    n_row_reads: dict[Any, int] = field(default_factory=dict)  # of row-split weights, by the split value that they read
    reduced: set[Any] = field(default_factory=set)  # values whose gradient's all-reduce is counted
    # The results of loops that were followed. They survive `restore`.
    memo: MutableMapping[Any, tuple[list[Flow], dict[str, Any], float]] = field(default_factory=UserDict)

    def snapshot(self) -> "Pass":
        """Returns a copy of the pass, with everything found so far."""
        found = {name: type(value)(value) for name, value in vars(self).items() if isinstance(value, dict | set)}
        return replace(self, **found)

    def restore(self, other: "Pass") -> None:
        """Restores a snapshot."""
        vars(self).update(vars(other.snapshot()))

    def memoized(self, follow: Callable[..., list[Flow]], closed: Any, *flows: Sequence[Flow]) -> list[Flow]:
        """Memoizes `follow(self, closed, *flows)` in the same state: its result, and what it adds to this pass.

        A loop is followed several times, with different splits of its carry, and so are the loops inside it. Without
        memoization the time would be exponential in the depth.
        """
        splits, stacked = frozenset(self.splits.items()), frozenset(self.stacked.items())
        key = (id(closed.jaxpr), *map(tuple, flows), splits, tuple(self.candidates), stacked, self.n_iterations)
        key += tuple(map(id, self.calls))
        if key in self.memo:
            outs, found, cost = self.memo[key]
            for name, values in found.items():
                getattr(self, name).update(values)
            self.cost += cost
        else:
            before = self.snapshot()
            outs = follow(self, closed, *flows)
            found = {
                name: {k: v for k, v in value.items() if k not in was or was[k] is not v}
                if isinstance(value, dict)
                else value - was
                for name, value in vars(self).items()
                if isinstance(value, dict | set) and name not in ("n_row_reads", "reduced")
                for was in (vars(before)[name],)
            }
            self.memo[key] = outs, found, self.cost - before.cost
        return outs

    def evaluate(self, closed: Any, ins: Sequence[Flow]) -> list[Flow]:
        """Returns the flows of a closed jaxpr's outputs."""
        jaxpr = closed.jaxpr
        env = Env(zip(jaxpr.invars, ins, strict=True), literal=lambda _: Flow())
        env.update(dict.fromkeys(jaxpr.constvars, Flow()))
        around = self.reduced, self.n_row_reads  # by values of the enclosing jaxpr
        self.reduced, self.n_row_reads = set(), {}
        for eqn in jaxpr.eqns:
            flows = env.read(eqn.invars)
            known = {"data": any(f.data for f in flows), "grad": any(f.grad for f in flows)}
            outs = [replace(out, **known) for out in self.follow(self, eqn, flows)]
            env.update(zip(eqn.outvars, (replace(out, data=False) if out.views else out for out in outs), strict=True))
        self.reduced, self.n_row_reads = around
        if self.records_values:
            self.values.update((var, flow.dim) for var, flow in env.items() if flow.data and not flow.views)
        return env.read(jaxpr.outvars)

    # --- the state of a value ------------------------------------------------------------------------------------------

    def split(self, flow: Flow) -> tuple[int | None, str | None]:
        """Returns the dim that is split, and the leaf that caused it."""
        if not flow.views:
            return flow.dim, flow.cause
        for view in flow.views:
            split = self.splits.get(view.leaf)
            if split is not None and split.dim is not None and split.dim in view.dims:
                return view.dims.index(split.dim), view.leaf
        return None, None

    def is_open(self, flow: Flow) -> bool:
        """Whether the value is a view of a parameter whose split is not decided yet."""
        return any(view.leaf not in self.splits for view in flow.views)

    def name(self, leaf: str | None) -> str:
        return "" if leaf is None else f"`{leaf.removesuffix('.weight')}`"

    # --- costs and decisions -------------------------------------------------------------------------------------------

    def add_collective(self, kind: str, aval: Any) -> None:
        self.cost += self.n_iterations * _COLLECTIVE_COST[kind](self.n) * math.prod(aval.shape) * aval.dtype.itemsize

    def add_repeated_work(self, aval: Any, n_summed: int) -> None:
        """Adds the cost of a product that every device computes in full, instead of its share."""
        flops = 2 * _PRODUCTS_PER_STEP * math.prod(aval.shape) * n_summed
        self.cost += self.n_iterations * (1 - 1 / self.n) * flops / _FLOPS_PER_BYTE

    def add_replicated_leaves(self) -> None:
        """Adds the cost of the replicated leaves."""
        for name, split in self.splits.items():
            if split.dim is None:
                leaf = self.leaves[name]
                self.cost += (1 - 1 / self.n) * _REPLICATED_COST * math.prod(leaf.shape) * leaf.dtype.itemsize

    def reconsider(self, *leaves: str | None) -> None:
        self.candidates.update(dict.fromkeys(found := [leaf for leaf in leaves if leaf is not None]))
        self.recurrent.update(self.looped.intersection(found))

    def decide(self, flow: Flow, dim: int | None, reason: str, *, is_unknown: bool = False) -> None:
        """Decides the split of each undecided parameter that the value is a view of: along dim `dim` of the value."""
        for view in flow.views:
            if view.leaf not in self.splits:
                self.splits[view.leaf] = Split(None if dim is None else view.dims[dim], reason, is_unknown)

    def decide_as_declared(self, flow: Flow, leaf: str) -> None:
        """Splits a parameter like the weight that its class names."""
        weight, dims = self.follows[leaf]
        split = self.splits[weight].followed(dims, len(self.leaves[leaf].shape) - len(dims))
        self.decide(flow, None if split.dim is None else flow.views[0].dims.index(split.dim), split.reason)

    def choose(self, flow: Flow, shape: Sequence[int], dims: Sequence[int]) -> int | None:
        """Returns the first of these dims along which an undecided parameter can be split, or the forced one, else None."""
        view = next(view for view in flow.views if view.leaf not in self.splits)
        possible = [i for i in dims if shape[i] and shape[i] % self.n == 0 and self.divides(view, i)]
        self.options[view.leaf] = tuple(dim for i in possible if (dim := view.dims[i]) is not None)
        if view.leaf in self.forced:
            dim = self.forced[view.leaf]
            return next((i for i in possible if view.dims[i] == dim), None)
        return possible[0] if possible else None

    def could_split(self, flow: Flow, shape: Sequence[int], dim: int) -> bool:
        """Whether an undecided parameter could be split along a dim of the value."""
        return shape[dim] % self.n == 0 and any(self.divides(view, dim) for view in flow.views)

    def divides(self, view: View, dim: int) -> bool:
        """Whether the leaf can be split along dim `dim` of the view, which may be only a part of a dim of the leaf."""
        leaf_dim = view.dims[dim]
        return leaf_dim is not None and self.leaves[view.leaf].shape[leaf_dim] % self.n == 0

    def dims_of_leaf(self, view: View, shape: Sequence[int], dims: Sequence[int]) -> tuple[int, ...]:
        """Returns the dims of the leaf that make up these dims of a view, which may have merged several."""
        leaf, found = self.leaves[view.leaf].shape, []
        for i in dims:
            if (dim := view.dims[i]) is None:
                continue
            found.append(dim)
            size = leaf[dim]
            while size < shape[i] and dim + 1 < len(leaf):
                dim += 1
                found.append(dim)
                size *= leaf[dim]
        return tuple(sorted(found))

    def is_forced(self, flow: Flow) -> bool:
        return any(view.leaf in self.forced for view in flow.views)

    def why_replicated(self, flow: Flow, shape: Sequence[int], dims: Sequence[int]) -> str:
        if not dims:
            return "replicated: its input, in groups, arrives replicated"
        if self.is_forced(flow):
            return "replicated: costs less than any split of it, which later operations would undo"
        for view in flow.views:
            if len(own := self.leaves[view.leaf].shape) == 1 and own[0] % self.n:  # a flat vector of weights
                padded = -(-own[0] // self.n) * self.n
                return f"replicated: {own[0]} entries do not divide over {self.n} shards; a vector padded to {padded} would"
        return f"replicated: no dim of {' x '.join(str(shape[i]) for i in sorted(dims))} divides over {self.n} shards"

    def gather(self, aval: Any, flow: Flow) -> Flow:
        """All-gathers the value if it is split, and returns its new flow."""
        dim, cause = self.split(flow)
        if dim is None:
            return flow
        self.add_collective("all-gather", aval)
        self.reconsider(cause)
        self.gathered.add(cause)  # pyright: ignore[reportArgumentType]
        return replace(flow, dim=None, views=(), tail=None)

    def add_slice(self, atom: Any, flow: Flow, dim: int) -> None:
        """Adds the cost of slicing a replicated value: slicing is free, but its gradient needs an all-gather."""
        if flow.data and flow.grad and dim not in flow.broadcast:
            self.add_collective("all-gather", atom.aval)

    def add_gradient_sum(self, atom: Any, flow: Flow) -> None:
        """Adds one all-reduce of the gradient of a replicated value that each shard uses for another part of the output."""
        if flow.data and flow.grad and atom not in self.reduced:
            self.reduced.add(atom)
            self.add_collective("all-reduce", atom.aval)

    def apply_view(
        self, eqn: Any, flow: Flow, source: Sequence[int | None], parts: Mapping[int, int], output: int = 0
    ) -> Flow:
        """Returns the flow of output `output` of an equation, which is a view of its operand. For each dim of the output,
        `source` has the dim of the operand that is split if this dim is split, or None; `parts` maps those that are an equal
        part of a dim of the operand to that dim."""
        dim, cause = self.split(flow)
        aval = eqn.outvars[output].aval
        repeated = eqn.primitive.name == "broadcast_in_dim"
        is_vector = flow.views and len(eqn.invars[0].aval.shape) == 1
        if is_vector and 0 not in source and aval.shape and aval.shape[0] % self.n == 0:
            source = [0, *source[1:]]  # parts of a vector, maybe in another order
        new = [i for i, d in enumerate(source) if repeated and (d is None or eqn.invars[0].aval.shape[d] != aval.shape[i])]
        if dim is not None and dim not in source:
            out = next((i for i, operand_dim in parts.items() if operand_dim == dim), None)
            if out is None:
                return self.gather(eqn.invars[0].aval, flow).through(source, new)
            if flow.data:
                self.add_collective("reshard", aval)
                self.reconsider(cause)
                self.resharded[eqn] = dim
            return replace(flow.through(source, new), dim=out, cause=cause, views=())
        return flow.through(source, new)

    def combine(self, eqn: Any, ins: Sequence[Flow]) -> list[Flow]:
        """Returns the flows of an elementwise equation: a dim that is split in one operand is split in all operands."""
        shape = eqn.outvars[0].aval.shape
        full = [i for i, atom in enumerate(eqn.invars) if len(atom.aval.shape) == len(shape) > 0]
        broadcasts = {
            i: ins[i].broadcast | {dim for dim, size in enumerate(eqn.invars[i].aval.shape) if size != shape[dim]}
            for i in full
        }
        alike = frozenset(range(len(shape))).intersection(*broadcasts.values())
        if not any(ins[i].data for i in full):  # parameters only: the output is a view of them
            views = [ins[i].views_without(broadcasts[i]) for i in full]
            return [Flow(views=tuple(chain(*views)), broadcast=alike) for _ in eqn.outvars]
        splits = {i: self.split(ins[i]) for i in full}
        found = [(dim, cause) for dim, cause in splits.values() if dim is not None]
        dim, cause = found[0] if found else (None, None)
        for i, (other, by) in splits.items():
            if other not in (dim, None):
                self.reconsider(cause)
                self.gather(eqn.invars[i].aval, ins[i])
            elif other is None and dim is not None and ins[i].data and ins[i].grad and dim not in broadcasts[i]:
                self.reconsider(cause, by)
                self.add_slice(eqn.invars[i], ins[i], dim)
            if self.is_open(ins[i]):
                self.decide_elementwise(eqn, ins[i], eqn.invars[i].aval.shape, dim, cause)
        tail = next((ins[i].tail for i in full if splits[i][0] == dim is not None), None)
        return [Flow(dim=dim, cause=cause, broadcast=alike, tail=tail) for _ in eqn.outvars]

    def decide_elementwise(self, eqn: Any, flow: Flow, shape: Sequence[int], dim: int | None, cause: str | None) -> None:
        """Decides the split of a parameter that is combined elementwise with data, such as a bias or a scale."""
        with_ = "added to" if eqn.primitive.name in ("add", "add_any", "sub") else "combined elementwise with"
        if dim is None:
            self.decide(flow, None, f"replicated: {with_} a replicated value")
        elif self.could_split(flow, shape, dim):
            self.decide(flow, dim, f"follows: {with_} a value that is split by {self.name(cause)}")
        else:
            self.decide(flow, None, f"replicated: {with_} a value that is split along another dim, by {self.name(cause)}")

    def give_up(self, eqn: Any, ins: Sequence[Flow]) -> list[Flow]:
        """Handles an equation that is not followed: gathers its inputs, and treats its outputs as replicated."""
        if not any(flow.data for flow in ins):  # such as a decomposition of a weight, which XLA may expand to products
            self.products.update({(eqn, at): None for at in (eqn, *self.calls)})
        for atom, flow in zip(eqn.invars, ins, strict=True):
            self.gather(atom.aval, flow)
            why = f"replicated: `{eqn.primitive.name}` computes with it, which is not followed"
            self.decide(flow, None, why, is_unknown=True)
        return [Flow() for _ in eqn.outvars]

    # --- the two rules -------------------------------------------------------------------------------------------------

    def contract(self, eqn: Any, ins: Sequence[Flow]) -> list[Flow]:
        """Returns the flow of a product that sums over dims of its two operands: a matmul or a convolution."""
        related = self.related(eqn)
        outs, partners = [[of(side) for side in (0, 1)] for of in (related.places, related.partners)]  # maps of dims
        summed = [
            [dim for dim in related.combined(side) if dim in partners[side] and dim not in outs[side]] for side in (0, 1)
        ]
        for side, weight in enumerate(ins):
            if ins[1 - side].data and not weight.data:
                own = [dim for dim in outs[side] if dim not in partners[side]]
                for view in weight.views:
                    outputs, inputs = (
                        self.dims_of_leaf(view, eqn.invars[side].aval.shape, dims) for dims in (own, summed[side])
                    )
                    self.uses[view.leaf, eqn] = Use(outputs, inputs)
        for side in (1, 0):  # in most matmuls the second operand is the weight; if both are weights, it is decided first
            if self.is_open(ins[side]):
                self.decide_weight(eqn, ins, side, partners[1 - side], summed[side], outs[side])
        flows = list(ins)
        for side in (0, 1):
            if flows[side].tail in summed[side]:  # gathered along `tail`; in the product `dim` alone is split
                self.add_collective("all-gather", eqn.invars[side].aval)
                flows[side] = replace(flows[side], tail=None)
        (dim0, cause0), (dim1, cause1) = map(self.split, flows)
        if dim0 is not None and dim1 is not None and partners[0].get(dim0) != dim1:
            # The split dims do not match. Gather the data rather than a weight, and otherwise the smaller operand.
            sizes = [(bool(flow.views), math.prod(atom.aval.shape)) for atom, flow in zip(eqn.invars, flows, strict=False)]
            side = sizes.index(min(sizes))
            self.reconsider(cause0, cause1)
            flows[side] = self.gather(eqn.invars[side].aval, flows[side])
            (dim0, cause0), (dim1, cause1) = [(None, None) if i == side else self.split(flows[i]) for i in (0, 1)]
        self.operands[eqn] = dim0, dim1
        is_replicated, is_data = dim0 is None and dim1 is None, any(flow.data for flow in ins)
        n_replicated = (self.n if is_replicated else 1) if is_data else None
        own = [call for call in self.calls if call.primitive.name.startswith("custom_vjp")]
        self.products.update({(eqn, at): n_replicated for at in (eqn, *own)})
        if is_replicated:
            if is_data:
                sizes = [eqn.invars[0].aval.shape[dim] for dim in summed[0]]
                self.add_repeated_work(eqn.outvars[0].aval, math.prod(sizes))
            return [Flow()]
        side, dim, cause = (0, dim0, cause0) if dim0 is not None else (1, dim1, cause1)
        other, both = 1 - side, dim0 is not None and dim1 is not None
        matching = partners[side].get(dim)  # pyright: ignore[reportArgumentType]
        if not both and matching is not None:
            if flows[other].data and flows[other].grad:
                self.reconsider(cause)
            self.add_slice(eqn.invars[other], flows[other], matching)
        if dim in summed[side]:
            self.add_collective("all-reduce", eqn.outvars[0].aval)
            made_by = next((view.leaf for flow in reversed(ins) for view in flow.views), None)
            return [Flow(cause=made_by)]
        if matching is None:
            self.add_gradient_sum(eqn.invars[other], flows[other])
        tail = outs[side].get(flows[side].tail)  # pyright: ignore[reportArgumentType]
        return [Flow(dim=outs[side][dim], cause=cause, tail=tail)]  # pyright: ignore[reportArgumentType]

    def decide_weight(
        self, eqn: Any, ins: Sequence[Flow], side: int, partners: Mapping, summed: Sequence[int], outs: Mapping
    ) -> None:
        """The two rules: a column split if the other operand is replicated, a row split if its contracted dim is split."""
        weight, data, shape = ins[side], ins[1 - side], eqn.invars[side].aval.shape
        if not data.data:
            return  # the result of a product of parameters only is no activation
        if (leaf := weight.views[0].leaf) in self.follows and self.follows[leaf][0] in self.splits:
            self.decide_as_declared(weight, leaf)
            return
        free = [dim for dim in outs if dim not in partners.values()]
        # A batch dim of a matmul: a stack of experts, each with an input of its own. (Not the groups of a convolution.)
        experts = [dim for dim in outs if dim not in free] if eqn.primitive.name == "dot_general" else []
        arrived, cause = self.split(data)
        if arrived is None:
            possible = [*experts, *free, *summed]
            dim = self.choose(weight, shape, possible)
            if dim is None:  # without any possible one, a convolution in groups
                self.decide(weight, None, self.why_replicated(weight, shape, possible), is_unknown=not possible)
            elif dim in experts:
                self.decide(weight, dim, EXPERTS)
            elif dim in summed:
                sizes = " x ".join(str(shape[i]) for i in free)
                why = f"{sizes} outputs do not divide over {self.n} shards, its inputs do"
                self.decide(weight, dim, f"row: {'costs less than a column' if self.is_forced(weight) else why}")
            else:
                self.decide(weight, dim, "column: its input arrives replicated")
            return
        matching = partners.get(arrived)
        if matching is None:
            why = f"replicated: its input arrives split along another dim, by {self.name(cause)}"
            self.decide(weight, None, why, is_unknown=True)
            return
        row = matching in summed
        if row:
            atom = eqn.invars[1 - side]
            self.n_row_reads[atom] = self.n_row_reads.get(atom, 0) + 1
            if self.n_row_reads[atom] > 1:  # replicating the input would allow column splits, with one all-reduce in all
                self.reconsider(cause)
        dim = self.choose(weight, shape, [matching, *free])
        kind = "row: its input arrives split by" if row else "follows: its input arrives split in the same way by"
        if dim == matching and matching in experts:
            self.decide(weight, dim, EXPERTS)
            if cause is not None and (split := self.splits[cause]).reason.startswith("column:"):
                self.splits[cause] = Split(split.dim, EXPERTS)  # of the same experts, which all had one input
        elif dim == matching:
            self.decide(weight, dim, f"{kind} {self.name(cause)}")
        elif dim is not None:
            why = "costs less than a row" if self.is_forced(weight) else "the dim that matches its input cannot be split"
            self.decide(weight, dim, f"column: {why}, although its input arrives split by {self.name(cause)}")
        else:
            self.decide(weight, None, self.why_replicated(weight, shape, [matching, *free]))
