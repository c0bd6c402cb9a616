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
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from ..dims import Inputs, Positions, positions_of
from ..kernels import GroupedSetting, grouped_gradient_p, grouped_matmul_p
from ..machine import MODEL
from ..partition import values_by
from ..tracing import GROUPED, Body, Rule, Site, as_fun, equations, has_tag, plain
from ._exchange_experts import Exchanges
from ._exchanged_rows import chosen_exchanges
from ._expert_parts import Copies, ExpertParts
from ._sort_by_shard import SortsByShard

_PRIMITIVES = (grouped_matmul_p.name, grouped_gradient_p.name)


@dataclass(frozen=True)
class GroupMatmuls(Rule):
    """The rule that computes grouped matmuls by the kernel of the target platform.

    **Arguments:**

    - `rows`: the sharding of sorted rows `[rows, features]`.
    - `splits`: for each of the function's first inputs, the dim that the model axis splits, or None.
    - `inputs`: what the function's inputs are, if a sequence axis splits positions; else None.
    """

    rows: NamedSharding
    splits: Sequence[int | None]
    inputs: Inputs | None = None

    def of(self, closed: Any) -> Rule | None:
        found = [eqn for eqn in equations(closed) if eqn.primitive.name in GROUPED]
        if not found:
            return None
        mesh = self.rows.mesh
        assert isinstance(mesh, Mesh), "its devices are known"
        rule = _GroupMatmuls(self.rows, SortsByShard(mesh), ExpertParts(mesh), Exchanges(mesh))
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

    rows: NamedSharding
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
        if eqn.primitive.name in _PRIMITIVES:
            return eqn.params["setting"].split is None
        return eqn.primitive.name == "ragged_dot_general" and _form(eqn) is not None

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
        rows, is_by_shard = self.rows.spec[0], self.sorts.is_product(eqn)
        if is_by_shard:
            values, rows = list(self.sorts.operands(eqn, *values)), self.sorts.axes(eqn)
        is_row, is_column = (self.is_split(eqn, dims) for dims in form.sides)
        spec = P(rows, MODEL if is_row else None, MODEL if is_column and not is_row else None)
        setting = replace(form.setting, split=NamedSharding(self.rows.mesh, spec))
        how = _ALL
        if is_row and eqn in self.parts.products:
            how = _PARTS
        elif is_column and copies is not None:
            values, how = [copies, *values[1:]], _COPIES
        compute = partial(form.compute, setting, is_by_shard=is_by_shard, how=how)
        closed = jax.make_jaxpr(compute)(*(jax.ShapeDtypeStruct(value.shape, value.dtype) for value in values))
        at_line = [each.replace(source_info=eqn.source_info) for each in closed.jaxpr.eqns]
        (out,) = as_fun(closed.replace(jaxpr=closed.jaxpr.replace(eqns=at_line)))(*values)
        return [self.parts.in_parts(out) if how == _PARTS else out]

    def is_split(self, eqn: Any, dims: tuple[Sequence[int], Sequence[int]]) -> bool:
        """Whether the model axis splits one of these dims of the operands."""
        return any(dim in own for dim, own in zip(self.dims.get(eqn, ()), dims, strict=False))


# What each device of the model axis has: all of the product's operand and of the output, or their parts along features; a
# copy of the operand, in a leading dim; or a part of the sum that is the output, in a leading dim.
_ALL, _COPIES, _PARTS = "all", "copies", "parts"


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

    def compute(
        self, setting: GroupedSetting, a: Any, b: Any, sizes: Any, *, is_by_shard: bool = False, how: str = _ALL
    ) -> Any:
        """Returns the output; with `_PARTS` its parts, `[parts, ...]`. If `is_by_shard`, the rows are those of several
        shards, one after the other, and `sizes` are `[*batch, shards, E]`."""
        n, n_batch, n_shards = len(self.lead), math.prod(self.lead), sizes.shape[-2] if is_by_shard else 1
        if not is_by_shard:
            sizes = jnp.broadcast_to(sizes, (*self.lead, sizes.shape[-1]))

        def by_shard(x: Any) -> Any:  # `[batch, rows, ...]` as `[shards * batch, rows of a shard, ...]`
            x = x.reshape(n_batch, n_shards, -1, *x.shape[2:])
            return jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:])

        def joined(x: Any) -> Any:
            x = x.reshape(n_shards, n_batch, *x.shape[1:])
            return jnp.swapaxes(x, 0, 1).reshape(n_batch, -1, x.shape[-1])

        def arranged(a: Any) -> Any:
            a = jnp.transpose(a, self.orders[0])
            return by_shard(a.reshape(n_batch, -1, math.prod(a.shape[n + 1 :])))

        sizes = by_shard(sizes.reshape(n_batch, n_shards, -1))[:, 0]

        b = jnp.transpose(b, self.orders[1])
        if self.primitive is grouped_gradient_p:
            a = arranged(a)
            setting = replace(setting, is_summed=True) if is_by_shard else setting
            out = grouped_gradient_p.bind(a, b.reshape(*a.shape[:2], -1), sizes, setting=setting)
            return (jnp.swapaxes(out, 0, 1) if self.is_by_group else out).reshape(self.shape)
        a = jax.vmap(arranged)(a) if how == _COPIES else arranged(a)
        rest = b.shape[self.n_leading :]
        sides = (-1, a.shape[-1]) if setting.transposed else (a.shape[-1], -1)
        b = b.reshape(math.prod(b.shape[: self.n_leading]), rest[0], *sides)
        if how == _ALL:
            return joined(grouped_matmul_p.bind(a, b, sizes, setting=setting)).reshape(self.shape)
        out = jax.vmap(joined)(_by_parts(setting, a, b[0], sizes))
        if how == _COPIES:
            return jnp.moveaxis(out, 0, 2).reshape(self.shape)
        return out.reshape(len(out), *self.shape)

    def of_device(self, a: Any, b: Any, sizes: Any) -> Any:
        """Returns the output for rows that are all on one device, of all entries of the batch together: `sizes` are
        `[groups]`."""
        a, b, n = jnp.transpose(a, self.orders[0]), jnp.transpose(b, self.orders[1]), len(self.lead)
        size = math.prod(a.shape[n + 1 :])
        sides = (-1, size) if self.setting.transposed else (size, -1)
        matrices = b.reshape(1, b.shape[self.n_leading], *sides)
        out = grouped_matmul_p.bind(a.reshape(1, -1, size), matrices, sizes[None], setting=self.setting)
        return out.reshape(*a.shape[: n + 1], *self.shape[n + 1 :])


def _by_parts(setting: GroupedSetting, a: Any, matrices: Any, sizes: Any) -> Any:
    """Returns the product with each part of the matrices, `[parts, B, M, N of a part]`.

    The parts are along N if `a` is `[parts, B, M, K]`, and along K if it is `[B, M, K]`.
    """
    assert setting.split is not None
    n = setting.split.mesh.shape[MODEL]
    along = 2 if (a.ndim == 4) != setting.transposed else 1
    if a.ndim == 3:
        a = jnp.moveaxis(a.reshape(*a.shape[:2], n, -1), 2, 0)
    shape = matrices.shape
    stacks = jnp.moveaxis(matrices.reshape(*shape[:along], n, -1, *shape[along + 1 :]), along, 0)
    split = NamedSharding(setting.split.mesh, P(setting.split.spec[0], None, None, MODEL))
    operands = a.reshape(-1, *a.shape[2:]), stacks, jnp.tile(sizes, (n, 1))
    out = grouped_matmul_p.bind(*operands, setting=replace(setting, split=split))
    return out.reshape(n, -1, *out.shape[1:])


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
