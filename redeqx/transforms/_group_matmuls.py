"""Grouped matmuls: computes `jax.lax.ragged_dot` at the cost of its rows, on all platforms and over several devices.

XLA computes a `ragged_dot` of E groups as a matmul of all rows with all groups: on CPUs, and on NVIDIA GPUs (with jax 0.10.2
an H100's compiler makes 16 times the FLOPs of the rows for 16 groups, and `[groups, rows, d]` in memory); on TPUs, in the
gradient. Over several devices, each computes all rows. `redeqx.kernels` has a primitive that does neither, and this rule
computes every `ragged_dot` by it, and every gradient of one that the user's function itself contains.

Each device multiplies the rows of its own tokens, if they can stay there (`_sort_by_shard`), or an even part of the sorted
rows, which has few groups. Over the model axis, outputs are added up once a token (`_expert_parts`), or rows are
sent to the devices of whole experts (`_exchange_experts`), as the plan splits these.

Source: MegaBlocks (arXiv:2211.15841) for the work. Cost: the gradient of the matrices is summed over the devices that split
a batch. In tracing, one pass of the dataflow, for functions with grouped matmuls on a mesh with a model axis.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec as P

from ..dims import Inputs, Positions, positions_of
from ..kernels import GroupedSetting, grouped_gradient_p, grouped_matmul_p, pad
from ..machine import MODEL, n_shards
from ..partition import values_by
from ..tracing import GROUPED, Body, Rule, Site, as_fun, equations, has_tag, plain
from ._exchange_experts import Exchanges
from ._exchanged_rows import chosen_exchanges
from ._expert_parts import Copies, ExpertParts
from ._sort_by_shard import SortsByShard


@dataclass(frozen=True)
class GroupMatmuls(Rule):
    """The rule that computes grouped matmuls by the kernel of the target platform. `splits` is as for `Reshard`; `inputs`
    says what the function's inputs are, if a sequence axis splits positions."""

    mesh: Mesh
    splits: Sequence[int | None]
    inputs: Inputs | None = None

    def of(self, closed: Any) -> Rule | None:
        found = [eqn for eqn in equations(closed) if eqn.primitive.name in GROUPED]
        if not found:
            return None
        mesh = self.mesh
        rule = _GroupMatmuls(mesh, SortsByShard(mesh), ExpertParts(mesh), Exchanges(mesh))
        if mesh.size == 1:
            return rule
        body, n_weights, n_shards = Body(closed), len(self.splits), mesh.shape[MODEL]
        of_device = {eqn: form.of_device for eqn in found if (form := _form(eqn)) and form.shares_matrices}
        chosen = [each for each in chosen_exchanges(body, self.splits, mesh) if of_device.keys() >= each.matrices.keys()]
        exchanges, positions = Exchanges(mesh, chosen, of_device), Positions()
        if self.inputs is not None:
            positions = positions_of(closed, self.inputs)
        rule = replace(rule, exchanges=exchanges, sorts=SortsByShard.of(body, n_weights, mesh, positions, chosen))
        if n_shards == 1:
            return rule
        found = [eqn for eqn in found if eqn not in exchanges]
        dims = values_by(closed, tuple(self.splits), n_shards).operands
        rule = replace(rule, dims=dims)
        forms = [(eqn, form) for eqn in found if rule.claims(eqn) and (form := _form(eqn)) and form.shares_matrices]
        rows = [eqn for eqn, form in forms if rule.is_split(eqn, form.sides[0])]
        columns = [eqn for eqn, form in forms if rule.is_split(eqn, form.sides[1]) and eqn not in rows]
        return replace(rule, parts=ExpertParts.of(body, n_weights, columns, rows, dims, mesh))


@dataclass(frozen=True, eq=False)
class _GroupMatmuls(Rule):
    """The rule for one function. `dims` are those of both operands of its products that the model axis splits."""

    mesh: Mesh
    sorts: SortsByShard
    parts: ExpertParts
    exchanges: Exchanges
    dims: Mapping[Any, tuple[int | None, int | None]] = field(default_factory=dict)

    @property
    def corrects(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether rows are in another order than in the sort, so that a product as it is written would be wrong."""
        return self.sorts.is_any

    def claims(self, eqn: Any) -> bool:
        if eqn in self.sorts or eqn in self.parts or eqn in self.exchanges:
            return True
        return eqn.primitive.name in GROUPED and _form(eqn) is not None

    def __call__(self, eqn: Any, ins: Sequence[Any], site: Site) -> Sequence[Any] | None:
        if eqn in self.exchanges:
            return self.exchanges.compute(eqn, ins, self.sorts)
        form = _form(eqn)
        if form is not None:
            copies = ins[0].value[1] if has_tag(ins[0], Copies) else None
            return self._product(eqn, form, list(map(plain, ins)), copies)

        def compute(ins: Sequence[Any]) -> Sequence[Any]:
            return self.sorts.compute(eqn, ins, site) if eqn in self.sorts else site.rest(eqn, ins)

        return self.parts.compute(eqn, ins, compute) if eqn in self.parts else compute(ins)

    def _product(self, eqn: Any, form: "_Form", values: list[Any], copies: Any) -> Sequence[Any]:
        is_row, is_column = (self.is_split(eqn, dims) for dims in form.sides)
        of_rows = None
        if self.sorts.is_product(eqn):
            values, of_rows = list(self.sorts.operands(eqn, *values)), self.sorts.axes(eqn)
        has_parts = is_row and eqn in self.parts.products
        has_copies = is_column and not is_row and copies is not None and form.shares_matrices
        values = [copies, *values[1:]] if has_copies else values
        division = _Division(self.mesh, of_rows, 0 if is_row else 1 if is_column else None, has_copies, has_parts)
        closed = jax.make_jaxpr(partial(form.compute, division))(*map(_shape_of, values))
        (out,) = as_fun(closed.replace(jaxpr=_at(closed.jaxpr, eqn.source_info)))(*values)
        return [self.parts.in_parts(out) if has_parts else out]

    def is_split(self, eqn: Any, dims: tuple[Sequence[int], Sequence[int]]) -> bool:
        """Whether the model axis splits one of these dims of the operands."""
        return any(dim in own for dim, own in zip(self.dims.get(eqn, ()), dims, strict=False))


def _shape_of(value: Any) -> Any:
    return jax.ShapeDtypeStruct(value.shape, value.dtype)


def _at(jaxpr: Any, source: Any) -> Any:
    """Returns a jaxpr whose equations, and those of a `shard_map`, have the line of another one."""

    def moved(eqn: Any) -> Any:
        inner = {"jaxpr": _at(eqn.params["jaxpr"], source)} if eqn.primitive.name == "shard_map" else {}
        return eqn.replace(source_info=source, params={**eqn.params, **inner})

    return jaxpr.replace(eqns=list(map(moved, jaxpr.eqns)))


@dataclass(frozen=True)
class _Division:
    """How the devices of a mesh share a product of rows `[B, M, K]` with `[W, E, K, N]`, or the gradient of the latter."""

    mesh: Mesh
    # The mesh axes that split `B`, and those that split `M` into the rows of shards, each with its own groups; None for
    # groups of all rows, which devices share as far as `B` divides, and else by rows.
    of_rows: tuple[Sequence[str], Sequence[str]] | None
    of_model: int | None  # 0 if the model axis splits `K`, 1 if it splits `N`, or None
    has_copies: bool  # whether each device of the model axis has a copy of the rows, in a leading dim
    has_parts: bool  # whether it has a part of the sum over `K`, in a leading dim of the output

    def compute(self, form: "_Form", a: Any, b: Any, sizes: Any) -> Any:
        """Returns the output, given `sizes` `[B, E]`, or `[B, shards, E]`."""
        primitive, setting, n_rows = form.primitive, form.setting, a.shape[-2]
        if self.mesh.size == 1:
            return primitive.bind(a, b, sizes, setting=setting)
        is_gradient, is_by_shard = primitive is grouped_gradient_p, self.of_rows is not None
        batch, rows = self._axes(a.shape[-3])
        n_outputs = b.shape[2 if is_gradient or setting.transposed else 3]
        inputs, outputs = (
            MODEL if self.of_model == i and self._n(MODEL) > 1 and n % self._n(MODEL) == 0 else None
            for i, n in enumerate((a.shape[-1], n_outputs))
        )
        a = pad(a, -2, self._n(*rows))
        if rows and not is_by_shard:
            setting = replace(setting, mean=n_rows / sizes.shape[-1])
        if is_gradient:
            b, of_b, out = pad(b, 1, self._n(*rows)), P(batch, rows, outputs), (None, inputs, outputs)
            summed, out = ((*batch, *rows), (None, *out)) if setting.is_summed else (rows, (batch, *out))
        else:
            of_b = P(batch if len(b) > 1 else None, None, *((outputs, inputs) if setting.transposed else (inputs, outputs)))
            summed, out = (MODEL,) if inputs else (), (batch, rows, outputs)

        def on_device(a: Any, b: Any, sizes: Any) -> Any:
            if is_by_shard:
                sizes = sizes[:, 0]
            elif rows:
                sizes = sizes_of_rows(sizes, jax.lax.axis_index(rows) * a.shape[-2], a.shape[-2])
            found = primitive.bind(a[0] if self.has_copies else a, b, sizes, setting=setting)
            return found[None] if summed else found

        specs = P(*[MODEL] * self.has_copies, batch, rows, inputs), of_b, P(batch, rows if is_by_shard else None)
        # The parts of a sum leave the devices: a sum on them would be one more in the derivative.
        used = {*batch, *rows, *filter(None, (inputs, outputs))}
        of_out = P(*[summed] * bool(summed), *out)
        run = jax.shard_map(on_device, mesh=self.mesh, in_specs=specs, out_specs=of_out, axis_names=used, check_vma=False)
        found = run(a, b, sizes)
        found = jax.lax.reduce_sum(found, (0,)) if summed and not self.has_parts else found
        return found if is_gradient else jax.lax.slice_in_dim(found, 0, n_rows, axis=-2)

    def _axes(self, n_batch: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Returns the mesh axes that split the batch and the rows. Those of size 1 are among them: what a spec does not name
        is summed in the derivative."""
        batch, rows = map(list, self.of_rows or ((), ()))
        for axis in (
            axis for axis in self.mesh.shape if axis not in (*batch, *rows, *([MODEL] if self._n(MODEL) > 1 else []))
        ):
            (rows if n_batch % self._n(*batch, axis) else batch).append(axis)
        return tuple(batch), tuple(rows)

    def _n(self, *axes: str) -> int:
        return n_shards(axes, self.mesh)


def sizes_of_rows(sizes: Any, first: Any, n: int) -> Any:
    """Returns how many rows of each group, of these sizes `[B, E]`, are among `n` consecutive ones."""
    return jnp.diff(jnp.clip(jnp.cumsum(sizes, axis=1) - first, 0, n), axis=1, prepend=0)


@dataclass(frozen=True)
class _Form:
    """A grouped matmul as a primitive computes it."""

    primitive: Any
    setting: GroupedSetting
    # For both operands their dims in the primitive's order: batch dims, then rows or groups, then K and N.
    orders: tuple[Sequence[int], Sequence[int]]
    lead: Sequence[int]  # the sizes of the batch dims; they are those of `sizes`, unless `sizes` has none
    n_leading: int  # batch dims of the second operand: all, or none for matrices that the batch shares
    shape: Sequence[int]  # of the output
    is_by_group: bool = True  # whether, in the gradient of the matrices, the groups come before the batch dims
    shares_matrices: bool = False  # whether it is a product, and all of the batch have the same matrices

    @property
    def sides(self) -> tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]:
        """The dims of both operands that are K, and those that are N: the first ones, if several are merged."""
        first, second = self.orders[0][len(self.lead) + 1 :], self.orders[1][self.n_leading + 1 :]
        n = len(second) - len(first)
        if self.primitive is grouped_gradient_p:
            inputs, outputs = (), second
        elif self.setting.transposed:
            inputs, outputs = second[n:], second[:n]
        else:
            inputs, outputs = second[: len(first)], second[len(first) :]
        return (first[:1], inputs[:1]), ((), outputs[:1])

    def compute(self, division: _Division, a: Any, b: Any, sizes: Any) -> Any:
        """Returns the output, or its parts."""
        n, n_batch = len(self.lead), math.prod(self.lead)

        def arranged(x: Any, order: Sequence[int]) -> Any:
            x = jnp.transpose(x, order)
            return x.reshape(n_batch, -1, math.prod(x.shape[n + 1 :]))

        a = jax.vmap(partial(arranged, order=self.orders[0]))(a) if division.has_copies else arranged(a, self.orders[0])
        if division.of_rows is None:
            sizes = jnp.broadcast_to(sizes, (*self.lead, sizes.shape[-1])).reshape(n_batch, -1)
        else:
            sizes = sizes.reshape(n_batch, -1, sizes.shape[-1])
        if self.primitive is grouped_gradient_p:
            out = division.compute(self, a, arranged(b, self.orders[1]), sizes)
            return (jnp.swapaxes(out, 0, 1) if self.is_by_group else out).reshape(self.shape)
        b = jnp.transpose(b, self.orders[1])
        sides = (-1, a.shape[-1]) if self.setting.transposed else (a.shape[-1], -1)
        b = b.reshape(math.prod(b.shape[: self.n_leading]), b.shape[self.n_leading], *sides)
        out = division.compute(self, a, b, sizes)
        return out.reshape(*([len(out)] if division.has_parts else []), *self.shape)

    def of_device(self, a: Any, b: Any, sizes: Any) -> Any:
        """Returns the output for rows that are all on one device, of all entries of the batch together: `sizes` are
        `[groups]`."""
        a, b, n = jnp.transpose(a, self.orders[0]), jnp.transpose(b, self.orders[1]), len(self.lead)
        size = math.prod(a.shape[n + 1 :])
        sides = (-1, size) if self.setting.transposed else (size, -1)
        matrices = b.reshape(1, b.shape[self.n_leading], *sides)
        out = grouped_matmul_p.bind(a.reshape(1, -1, size), matrices, sizes[None], setting=self.setting)
        return out.reshape(*a.shape[: n + 1], *self.shape[n + 1 :])


def _form_of_primitive(eqn: Any) -> _Form:
    """Returns the form of an equation that is a primitive's already."""
    a, b = (var.aval.shape for var in eqn.invars[:2])
    shape = eqn.outvars[0].aval.shape
    is_shared = eqn.primitive is grouped_matmul_p and b[0] == 1
    orders = range(len(a)), range(len(b))
    return _Form(eqn.primitive, eqn.params["setting"], orders, a[:1], 1, shape, False, is_shared)


def _form(eqn: Any) -> _Form | None:
    """Returns how a primitive computes a grouped matmul; None for other equations, and for forms that it does not have."""
    if eqn.primitive in (grouped_matmul_p, grouped_gradient_p):
        return _form_of_primitive(eqn)
    if eqn.primitive.name != "ragged_dot_general":
        return None
    numbers, params = eqn.params["ragged_dot_dimension_numbers"], eqn.params
    (contracted, batch), (ragged,) = numbers.dot_dimension_numbers, numbers.lhs_ragged_dimensions
    lhs, rhs, sizes = (var.aval for var in eqn.invars)
    is_gradient = ragged in contracted[0]
    if (
        params["group_offset"] is not None
        or ragged in batch[0]
        or not all(jnp.issubdtype(x.dtype, jnp.floating) for x in (lhs, rhs))
    ):
        return None
    free = [
        [dim for dim in range(x.ndim) if dim not in (*own, *ofbatch)]
        for x, own, ofbatch in zip((lhs, rhs), contracted, batch, strict=True)
    ]
    free[1] = [dim for dim in free[1] if dim not in numbers.rhs_group_dimensions]
    along = list(contracted[0]) if is_gradient else free[0]  # the dims among which the rows are
    place = along.index(ragged)
    shared = along[:place]  # batch dims of the rows alone
    if along[place + 1 :] or (shared and batch[0]):
        return None
    lead = [*batch[0], *shared]
    if sizes.ndim > 1 and sizes.ndim - 1 != len(lead):
        return None
    dtype, precision = eqn.outvars[0].aval.dtype, params["precision"]
    setting = GroupedSetting(dtype, precision=precision, is_summed=is_gradient and not batch[0])
    common: dict[str, Any] = {"lead": [lhs.shape[dim] for dim in lead], "shape": eqn.outvars[0].aval.shape}
    if is_gradient:
        first, second = [*lead, ragged, *free[0]], [*batch[1], *contracted[1], *free[1]]
        return _Form(grouped_gradient_p, setting, (first, second), n_leading=len(lead), **common)
    is_transposed = bool(free[1]) and max(free[1]) < min(contracted[1], default=0)
    sides = [*free[1], *contracted[1]] if is_transposed else [*contracted[1], *free[1]]
    first, second = [*lead, ragged, *contracted[0]], [*batch[1], *numbers.rhs_group_dimensions, *sides]
    setting = replace(setting, transposed=is_transposed)
    common |= {"n_leading": len(batch[1]), "shares_matrices": not batch[1]}
    return _Form(grouped_matmul_p, setting, (first, second), **common)
