"""Grouped matmuls: computes `jax.lax.ragged_dot` at the cost of its rows, on all platforms and over several devices.

XLA computes a `ragged_dot` of E groups as a matmul of all rows with all groups: on CPUs, and on NVIDIA GPUs (with jax 0.10.2
an H100's compiler makes 16 times the FLOPs of the rows for 16 groups, and `[groups, rows, d]` in memory); on TPUs, in the
gradient. Over several devices, each computes all rows. `redeqx.kernels` has a primitive that does neither, and this rule
computes every `ragged_dot` by it, and every gradient of one that the user's function itself contains.

Source: MegaBlocks (arXiv:2211.15841) for the work. Cost: the sorted rows are split evenly over the devices that split a
batch, so each receives the rows of few groups; the gradient of the matrices is summed over these devices. In tracing, one
pass of the dataflow, for functions with grouped matmuls on a mesh with a model axis.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from ..kernels import GroupedSetting, grouped_gradient_p, grouped_matmul_p
from ..machine import MODEL
from ..partition import operand_dims
from ..tracing import Rule, Site, as_fun, equations, plain, run
from ._sort_by_shard import SortsByShard

_PRIMITIVES = (grouped_matmul_p.name, grouped_gradient_p.name)


@dataclass(frozen=True)
class GroupMatmuls(Rule):
    """The rule that computes grouped matmuls by the kernel of the target platform.

    **Arguments:**

    - `rows`: the sharding of sorted rows `[rows, features]`.
    - `splits`: for each of the function's first inputs, the dim that the model axis splits, or None.
    """

    rows: NamedSharding
    splits: Sequence[int | None]
    # For one function: for its grouped matmuls, the dims of both operands that the model axis splits.
    dims: Mapping[Any, tuple[int | None, int | None]] = field(default_factory=dict)
    sorts: SortsByShard | None = field(default=None, repr=False)

    def of(self, closed: Any) -> Rule | None:
        found = [eqn for eqn in equations(closed) if eqn.primitive.name in ("ragged_dot_general", *_PRIMITIVES)]
        if not found:
            return None
        mesh = self.rows.mesh
        assert isinstance(mesh, Mesh), "its devices are known"
        n_shards = mesh.shape[MODEL]
        dims = operand_dims(closed, found, self.splits, n_shards) if n_shards > 1 else {}
        return replace(self, dims=dims, sorts=SortsByShard.of(closed, len(self.splits), mesh))

    def claims(self, eqn: Any) -> bool:
        if self.sorts is not None and eqn in self.sorts:
            return True
        if eqn.primitive.name in _PRIMITIVES:
            return eqn.params["setting"].split is None
        return eqn.primitive.name == "ragged_dot_general" and _form(eqn) is not None

    def __call__(self, eqn: Any, ins: Sequence[Any], site: Site) -> Sequence[Any] | None:
        is_sorted = self.sorts is not None and self.sorts.is_product(eqn)
        if self.sorts is not None and eqn in self.sorts and not is_sorted:
            return self.sorts.compute(eqn, ins, site)
        values = list(map(plain, ins))
        if self.sorts is not None and is_sorted:
            values = list(self.sorts.operands(eqn, *values))
        if eqn.primitive.name in _PRIMITIVES:
            setting = self._with_split(eqn, eqn.params["setting"], _dims_of_primitive(eqn))
            if is_sorted:  # the shards are its batch
                setting = replace(setting, is_summed=eqn.primitive is grouped_gradient_p)
                values = [x.reshape(len(values[2]), -1, x.shape[2]) if x.ndim == 3 else x for x in values]
                (out,) = run(eqn.replace(params={"setting": setting}), values)
                return [out.reshape(eqn.outvars[0].aval.shape)]
            return run(eqn.replace(params={"setting": setting}), values)
        form = _form(eqn)
        assert form is not None, "it is claimed"
        compute = partial(form.compute, self._with_split(eqn, form.setting, form.dims), is_by_shard=is_sorted)
        closed = jax.make_jaxpr(compute)(*(jax.ShapeDtypeStruct(value.shape, value.dtype) for value in values))
        at_line = [each.replace(source_info=eqn.source_info) for each in closed.jaxpr.eqns]
        return as_fun(closed.replace(jaxpr=closed.jaxpr.replace(eqns=at_line)))(*values)

    def _with_split(self, eqn: Any, setting: GroupedSetting, dims: "_Dims") -> GroupedSetting:
        """Returns the setting with the split of rows, and of K or N if the model axis splits an operand along it."""
        split = self.dims.get(eqn, ())
        inputs, outputs = (
            any(dim in own for dim, own in zip(split, of_side, strict=False)) for of_side in (dims.inputs, dims.outputs)
        )
        spec = P(self.rows.spec[0], MODEL if inputs else None, MODEL if outputs and not inputs else None)
        return replace(setting, split=NamedSharding(self.rows.mesh, spec))


@dataclass(frozen=True)
class _Dims:
    """The dims of both operands that are K, and those that are N: the first ones, if several are merged."""

    inputs: tuple[tuple[int, ...], tuple[int, ...]]
    outputs: tuple[tuple[int, ...], tuple[int, ...]]


def _dims_of_primitive(eqn: Any) -> _Dims:
    if eqn.primitive is grouped_gradient_p:
        return _Dims(((2,), ()), ((), (2,)))
    inputs, outputs = (3, 2) if eqn.params["setting"].transposed else (2, 3)
    return _Dims(((2,), (inputs,)), ((), (outputs,)))


@dataclass(frozen=True)
class _Form:
    """A `ragged_dot_general` as a primitive computes it.

    **Arguments:**

    - `orders`: for both operands their dims in the primitive's order: batch dims, then rows or groups, then K and N.
    - `lead`: the sizes of the batch dims. They are those of `sizes`, unless `sizes` has none.
    - `n_leading`: the number of batch dims of the second operand: all, or none for matrices that the batch shares.
    - `shape`: of the output. In the gradient of the matrices, the groups come before the batch dims.
    """

    primitive: Any
    setting: GroupedSetting
    dims: _Dims
    orders: tuple[Sequence[int], Sequence[int]]
    lead: Sequence[int]
    n_leading: int
    shape: Sequence[int]

    def compute(self, setting: GroupedSetting, a: Any, b: Any, sizes: Any, *, is_by_shard: bool = False) -> Any:
        """Returns the output.

        **Arguments:**

        - `is_by_shard`: whether the rows are those of several shards, one after the other, and `sizes` has a size for each.
        """
        n, n_batch = len(self.lead), len(sizes) if is_by_shard else math.prod(self.lead)
        a, b = (jnp.transpose(x, order) for x, order in zip((a, b), self.orders, strict=True))
        a = a.reshape(n_batch, -1, math.prod(a.shape[n + 1 :]))
        if not is_by_shard:
            sizes = jnp.broadcast_to(sizes, (*self.lead, sizes.shape[-1])).reshape(n_batch, -1)
        if self.primitive is grouped_matmul_p:
            rest = b.shape[self.n_leading :]
            sides = (-1, a.shape[2]) if setting.transposed else (a.shape[2], -1)
            b = b.reshape(math.prod(b.shape[: self.n_leading]), rest[0], *sides)
            return grouped_matmul_p.bind(a, b, sizes, setting=setting).reshape(self.shape)
        out = grouped_gradient_p.bind(a, b.reshape(n_batch, a.shape[1], -1), sizes, setting=setting)
        return jnp.swapaxes(out, 0, 1).reshape(self.shape)


def _form(eqn: Any) -> _Form | None:
    """Returns how a primitive computes a `ragged_dot_general`; None for a form that it does not have."""
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
    common = {"lead": [lhs.shape[dim] for dim in lead], "shape": eqn.outvars[0].aval.shape}
    if is_gradient:
        first, second = [*lead, ragged, *free[0]], [*batch[1], *contracted[1], *free[1]]
        dims = _Dims((tuple(free[0][:1]), ()), ((), tuple(free[1][:1])))
        return _Form(grouped_gradient_p, setting, dims, (first, second), n_leading=len(lead), **common)
    is_transposed = bool(free[1]) and max(free[1]) < min(contracted[1], default=0)
    sides = [*free[1], *contracted[1]] if is_transposed else [*contracted[1], *free[1]]
    first, second = [*lead, ragged, *contracted[0]], [*batch[1], *numbers.rhs_group_dimensions, *sides]
    dims = _Dims((tuple(contracted[0][:1]), tuple(contracted[1][:1])), ((), tuple(free[1][:1])))
    setting = replace(setting, transposed=is_transposed)
    return _Form(grouped_matmul_p, setting, dims, (first, second), n_leading=len(batch[1]), **common)
