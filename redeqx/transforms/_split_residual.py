"""Split residual stream: between layers, each model shard has a part of the positions instead of all of them.

Source: Megatron's sequence parallelism (arXiv:2205.05198). The model axis splits the features between a column and a row
split. All other values with positions, such as the residual stream, norms and the saved carries of loops, are the same on
all of its shards. This rule splits their positions over the model axis too. The all-reduce after a row split becomes a
reduce-scatter there, and an all-gather before the next column split.

The plan's dataflow says which values are replicated over the model axis, and `dims.positions_of` which of their dims are
positions. Sizes and names do not matter. XLA does not find the rest by itself, so three kinds of values are constrained:
results of row splits, sums and lookups to their part of the positions; inputs of column splits to all positions; and what is
between the two to its features. Without the second XLA gathers weights, and without the third it exchanges hidden values.

What reads positions other than one by one, such as a loop over chunks of them, gets all of them, gathered once. Positions
that do not divide are left as they are.

Cost: the bytes of an all-gather and a reduce-scatter for those of an all-reduce, so none. Where the backward pass recomputes
a loop's body it gathers the inputs of column splits again: 11 bytes for 10, or 10 for 8 if it recomputes no products.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec as P

from ..dims import REDUCTIONS, VIEWS, Inputs, Positions, Related, is_elementwise, positions_of
from ..machine import MODEL, SEQUENCE
from ..partition import Plan, inputs_of, values_by
from ..tracing import (
    BY_WEIGHT,
    REMAT,
    Body,
    Env,
    Rule,
    Site,
    Tagged,
    Trace,
    insides,
    is_variable,
    once,
    or_as_written,
    scan_counts,
    variables,
)
from ._constrain import split_over, with_gradient
from ._exchanged_rows import chosen_exchanges

# Equations that, besides elementwise ones, leave the split of positions to XLA. Attention has a sharding of its own, and a
# reduction over positions needs no more than a sum over the shards.
_LEFT = {"attention", "attention_gradient", "optimization_barrier", "stack", "argmax", "argmin", *REDUCTIONS}
# Those that leave it to XLA if their output has all positions of the operand.
_REARRANGED = {*VIEWS, "concatenate", "pad", "split"}


@dataclass(frozen=True)
class Layout:
    """How the axes that split positions and features arrange a value."""

    positions: int  # the dim that is positions
    is_split: bool = False  # whether the model axis splits it
    features: int | None = None  # the dim that the model axis splits instead
    rows: int | None = None  # the dim that begins with rows, which XLA splits as before

    def constrain(self, x: Any, mesh: Mesh) -> Any:
        if self.is_split:
            return split_over(x, mesh, {self.positions: (SEQUENCE, MODEL)})
        axes = {self.features: MODEL, self.rows: P.UNCONSTRAINED, self.positions: SEQUENCE}
        return split_over(x, mesh, axes, None)


_Layouts = Mapping[Any, Mapping[int, Layout]]  # of some operands or outputs of equations, by their places


@dataclass(frozen=True)
class Residual:
    """The residual stream of a function: how some operands and outputs of its equations are arranged."""

    operands: _Layouts = field(default_factory=dict)
    outputs: _Layouts = field(default_factory=dict)
    lengths: Sequence[int] = ()  # the numbers of positions that the model axis splits
    left: Sequence[int] = ()  # those that it could split if they divided

    @property
    def split(self) -> set[Any]:
        """The variables whose positions the model axis splits."""
        return {eqn.outvars[i] for eqn, found in self.outputs.items() for i, each in found.items() if each.is_split}


@once
def residual_of(closed: Any, inputs: Inputs, splits: tuple[int | None, ...], mesh: Mesh) -> Residual:
    """Returns the residual stream of a closed jaxpr in normal form. It is empty without an attention over positions, and if
    no sum over the model axis has positions that divide. `splits` is as for `Reshard`."""
    positions = positions_of(closed, inputs)
    if not positions.are_compared:
        return Residual()
    exchanged = {eqn for each in chosen_exchanges(Body(closed), splits, mesh) for eqn in each.all}
    found = values_by(closed, splits, mesh.shape[MODEL])
    search = _Search(positions, found.values, found.operands, mesh, exchanged)
    search.visit(closed)
    if not search.summed:
        return Residual(left=sorted(search.left))
    return Residual(search.operands, search.outputs, sorted(search.summed), sorted(search.left))


def describe_residual(trace: Trace, plan: Plan) -> tuple[str, ...]:
    """Returns a sentence for each number of positions between layers of a traced loss: how the model axis splits them."""
    mesh, splits = plan.mesh, tuple(map(plan.model_dim, trace.names))
    search = partial(residual_of, trace.closed, inputs_of(trace), splits, mesh)
    found = or_as_written(search, Residual, "the search for the residual stream")
    n_model, n = mesh.shape[MODEL], mesh.shape[MODEL] * mesh.shape[SEQUENCE]
    by = f"{n_model} model shards" if n == n_model else f"{n // n_model} sequence x {n_model} model shards"
    split = [f"{size} in the residual stream: split over {by}" for size in found.lengths]
    whole = [f"{size} in the residual stream: {by} do not divide them, so each has all" for size in found.left]
    return (*split, *whole)


class _Search:
    """Visits the equations of a function, and arranges their operands and outputs."""

    def __init__(
        self,
        positions: Positions,
        values: Mapping[Any, int | None],
        products: Mapping[Any, Any],
        mesh: Mesh,
        exchanged: Collection[Any] = (),
    ):
        self.exchanged = exchanged  # equations whose rows are sent to experts: each device has those of its positions
        self.loops, self.values, self.products = positions.loops, values, products
        self.dims, self.rows = Env(positions.dims.items(), literal=lambda _: ()), dict(positions.rows)
        self.n = mesh.shape[SEQUENCE] * mesh.shape[MODEL]
        self.gathered: set[Any] = set()  # variables in loops whose values are gathered before the loop
        self.operands: dict[Any, dict[int, Layout]] = {}
        self.outputs: dict[Any, dict[int, Layout]] = {}
        self.summed, self.left = set[int](), set[int]()  # numbers of positions of the outputs of row splits

    def layout(self, atom: Any, features: int | None = None) -> Layout | None:
        """Returns the layout of a value of which each shard has all positions; None unless one dim is positions, and
        divides."""
        if len(dims := self.dims.get(atom, ())) != 1:
            return None
        size = atom.aval.shape[dims[0]]
        return None if not size or size % self.n else Layout(dims[0], features=features, rows=self.rows.get(atom))

    def is_replicated(self, atom: Any) -> bool:
        """Whether a value of positions and features is the same on all model shards."""
        dims = self.dims.get(atom, ())
        if len(dims) != 1 or self.values.get(atom, -1) is not None or atom in self.gathered:
            return False
        features = [size for i, size in enumerate(atom.aval.shape) if i not in dims and i != self.rows.get(atom)]
        return math.prod(features) > 1 and jnp.issubdtype(atom.aval.dtype, jnp.floating)

    def in_stream(self, atom: Any) -> Layout | None:
        """Returns the layout of a value of the residual stream; None for other values."""
        layout = self.layout(atom) if self.is_replicated(atom) else None
        return layout and replace(layout, is_split=True)

    def visit(self, closed: Any) -> None:
        for eqn in closed.jaxpr.eqns:
            name = eqn.primitive.name
            if eqn in self.exchanged:
                continue
            if name in BY_WEIGHT:
                self.visit_product(eqn)
            elif name == "scan" and eqn not in self.loops:
                self.visit_loop(eqn)
            elif name in (REMAT, "cond", "jit"):
                self.visit_inside(eqn)
            elif name in ("add", "gather"):  # the values of a lookup are a sum over the shards of the table
                self.gather(eqn, [0] if name == "gather" else [])
                self.split(eqn, range(1))
            elif name not in _LEFT and not is_elementwise(eqn):
                self.gather(eqn, [i for i, atom in enumerate(eqn.invars) if not self.keeps(eqn, atom)])

    def keeps(self, eqn: Any, atom: Any) -> bool:
        """Whether an output of an equation that is not elementwise has all positions of an operand."""
        if (layout := self.layout(atom)) is None:
            return True
        size, name = atom.aval.shape[layout.positions], eqn.primitive.name
        if name.startswith("custom_"):  # an activation does, a layer with weights needs all positions
            is_rearranged = all(self.in_stream(other) for other in variables(eqn.invars) if other.aval.shape)
        else:
            is_rearranged = name in _REARRANGED
        if name in ("slice", "dynamic_slice") and eqn.outvars[0].aval.shape[layout.positions] == 1:
            return True  # one position, such as that of a class token
        return is_rearranged and any([var.aval.shape[i] for i in self.dims.get(var, ())] == [size] for var in eqn.outvars)

    def gather(self, eqn: Any, operands: Iterable[int]) -> None:
        """Arranges all positions of operands that are in the stream."""
        for i in operands:
            if (layout := self.in_stream(eqn.invars[i])) is not None:
                self.operands.setdefault(eqn, {})[i] = replace(layout, is_split=False)

    def split(self, eqn: Any, outputs: Iterable[int]) -> None:
        """Splits outputs that are in the stream."""
        for i in outputs:
            if (layout := self.in_stream(eqn.outvars[i])) is not None:
                self.outputs.setdefault(eqn, {})[i] = layout

    def visit_product(self, eqn: Any) -> None:
        """A product of a value that has positions and a weight, which is split as a column or as a row."""
        sides = [i for i, atom in enumerate(eqn.invars) if self.dims.get(atom)]
        if len(sides) != 1 or eqn not in self.products:
            return
        (side,), (out,), split = sides, eqn.outvars, self.products[eqn]
        related = Related(eqn)
        summed = related.partners(side).keys() & related.combined(side) - related.places(side).keys()
        if split[side] in summed:
            if (layout := self.layout(eqn.invars[side], split[side])) is not None and self.in_stream(out) is not None:
                self.operands[eqn] = {side: layout}
                self.split(eqn, [0])
                self.summed.add(out.aval.shape[self.dims[out][0]])
            elif self.is_replicated(out):
                self.left.add(out.aval.shape[self.dims[out][0]])
        elif split[side] is None and split[1 - side] is not None:
            self.gather(eqn, [side])
            layout = self.layout(out, self.values.get(out))
            if eqn in self.operands and layout is not None and layout.features is not None:
                self.outputs[eqn] = {0: layout}

    def visit_inside(self, eqn: Any) -> None:
        """A call or a branch: the values inside are those outside."""
        for inner in insides(eqn):
            for var, operand in zip(inner.closed.jaxpr.invars, inner.operands, strict=True):
                self.follow(var, eqn.invars[operand])
            self.visit(inner.closed)
            for var, out in zip(eqn.outvars, inner.closed.jaxpr.outvars, strict=True):
                self.follow(var, out)

    def visit_loop(self, eqn: Any) -> None:
        """A loop over layers, which carries the stream. What each iteration reads as a whole is gathered before the loop."""
        (inner,), (n_consts, n_carry) = insides(eqn), scan_counts(eqn)
        for i, (var, atom, kind) in enumerate(zip(inner.closed.jaxpr.invars, eqn.invars, inner.kinds, strict=True)):
            self.follow(var, eqn.outvars[i - n_consts] if kind == "carry" else atom, is_slice=kind == "slice")
            if kind == "same" and self.in_stream(atom) is not None:
                self.gathered.add(var)
            elif kind == "carry" and (layout := self.in_stream(var)) is not None:
                self.operands.setdefault(eqn, {})[i] = layout
        self.gather(eqn, range(n_consts))
        self.split(eqn, range(n_carry))
        self.visit(inner.closed)

    def follow(self, var: Any, other: Any, *, is_slice: bool = False) -> None:
        """Gives a variable the dims of another one, or of its slices along dim 0."""
        if not is_variable(other):
            return
        if dims := [dim - is_slice for dim in self.dims.get(other, ()) if dim >= is_slice]:
            self.dims.setdefault(var, tuple(dims))
        if self.rows.get(other, -1) >= is_slice:
            self.rows.setdefault(var, self.rows[other] - is_slice)
        if other in self.gathered:
            self.gathered.add(var)


@dataclass(frozen=True)
class SplitResidual(Rule):
    """Splits the positions of the residual stream over the model axis. `splits` is as for `Reshard`, and
    `of_loops` as for `SplitPositions`."""

    mesh: Mesh
    inputs: Inputs
    splits: tuple[int | None, ...]
    of_loops: bool = False
    # For one function: its residual stream, and what was gathered: all readers of a value read one array, so that their
    # gradients are summed before they are sent.
    found: Residual = field(default_factory=Residual, compare=False, repr=False)
    gathered: dict[int, tuple[Any, Any]] = field(default_factory=dict, compare=False, repr=False)

    def residual(self, closed: Any) -> Residual:
        """Returns the residual stream of a function in normal form."""
        return residual_of(closed, self.inputs, self.splits, self.mesh)

    def of(self, closed: Any) -> Rule | None:
        found = self.residual(closed)
        return replace(self, found=found, gathered={}) if found.lengths else None

    def claims(self, eqn: Any) -> bool:
        is_loop = eqn.primitive.name == "scan"
        return is_loop == self.of_loops and (eqn in self.found.operands or eqn in self.found.outputs)

    def __call__(self, eqn: Any, ins: Sequence[Any], site: Site) -> Sequence[Any] | None:
        before, after = self.found.operands.get(eqn, {}), self.found.outputs.get(eqn, {})
        ins = [self.arrange(x, before[i]) if i in before else x for i, x in enumerate(ins)]
        is_sum = eqn.primitive.name in {*BY_WEIGHT, "gather"}
        outs = site.rest(eqn, ins)
        return [self.arrange(x, after[i], is_sum=is_sum) if i in after else x for i, x in enumerate(outs)]

    def arrange(self, x: Any, layout: Layout, *, is_sum: bool = False) -> Any:
        """Constrains a value. A tagged one, such as a weight, is left to its rule. Of a sum over the shards, each needs the
        gradient of all positions."""
        constrain = partial(layout.constrain, mesh=self.mesh)
        if isinstance(x, Tagged) or layout.features is not None or (layout.is_split and not is_sum):
            return constrain(x)
        other = replace(layout, is_split=not layout.is_split)
        constrain = with_gradient(constrain, partial(other.constrain, mesh=self.mesh))
        if layout.is_split:
            return constrain(x)
        if id(x) not in self.gathered:  # keeps `x` alive: its id is the key
            self.gathered[id(x)] = (x, constrain(x))
        return self.gathered[id(x)][1]
