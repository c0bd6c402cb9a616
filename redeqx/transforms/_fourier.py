"""Fourier transforms, of which XLA gives all rows to all devices before JAX 0.12, whatever splits them (jax-ml/jax#15680).

Each device then computes the transforms of the whole batch, after an all-gather of it: a model with such layers gains
nothing from more devices. This rule computes each transform under `jax.shard_map`, on the device's own entries of the dims
that are not transformed.

On CPUs, a transform also ends with an internal error there, if its operand or result has another layout in memory than its
dims have. XLA chooses such a layout next to convolutions and to collectives along another dim. So this rule sets the layout.

Source: measured with jax 0.10.2 (the test `test_xla_still_...`), not seen with 0.12. Cost: in tracing, one search for
positions and one pass of the dataflow, for functions with transforms. A transformed dim is gathered, as without the rule,
but positions are exchanged for rows if these divide.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import jax
from jax.custom_derivatives import linear_call
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh, PartitionSpec as P

from ..kernels import on_each_device
from ..machine import BATCH_AXES, MODEL, SEQUENCE, axes_of, n_batch_shards
from ..partition import values_by
from ..tracing import Site, equations, plain, run
from ._by_positions import ByPositions


@dataclass(frozen=True)
class SplitFourier(ByPositions):
    """Computes Fourier transforms by shards of the dims that are not transformed. `splits` is as for `Reshard`; `of_model`
    has, of one function, the dims that the model axis splits."""

    mesh: Mesh
    splits: tuple[int | None, ...]
    of_model: Mapping[Any, int | None] = field(default_factory=dict, compare=False, repr=False)

    def of(self, closed: Any) -> Self | None:
        if not any(map(self.claims, equations(closed))):
            return None
        n = self.mesh.shape[MODEL]
        return replace(super().of(closed), of_model=values_by(closed, self.splits, n).values if n > 1 else {})

    def claims(self, eqn: Any) -> bool:
        return eqn.primitive.name == "fft"

    def __call__(self, eqn: Any, ins: Sequence[Any], site: Site) -> Sequence[Any] | None:
        spec, (var,), is_cpu = self._spec(eqn), eqn.invars, self.mesh.devices.flat[0].platform == "cpu"
        of_in, of_out = (self._as_given(each, spec) for each in (var, *eqn.outvars))
        n_free = var.aval.ndim - len(eqn.params["fft_lengths"])

        def transform(x: jax.Array) -> jax.Array:
            if not is_cpu:
                return run(eqn, [x])[0]
            return _row_major(run(eqn, [_row_major(x)])[0])

        def transpose(gradient: jax.Array) -> jax.Array:
            own = jax.ShapeDtypeStruct((*gradient.shape[:n_free], *var.aval.shape[n_free:]), var.aval.dtype)
            return jax.linear_transpose(transform, own)(gradient)[0]

        def on_devices(fn: Callable[[jax.Array], jax.Array], before: P, after: P) -> Callable[[jax.Array], jax.Array]:
            return on_each_device(self.mesh, lambda x: _exchange(fn(_exchange(x, before, spec)), spec, after), before, after)

        forward, back = on_devices(transform, of_in, of_out), on_devices(transpose, of_out, of_in)

        @jax.custom_jvp
        def fn(x: jax.Array) -> jax.Array:
            return forward(x)

        @fn.defjvp
        def _(primals: Any, tangents: Any) -> Any:
            # The transpose that JAX derives from a `shard_map` sums gradients over the axes that split nothing.
            out = linear_call(lambda _, x: forward(x), lambda _, gradient: back(gradient), (), *tangents)
            return fn(*primals), out

        return [fn(plain(ins[0]))]

    def _spec(self, eqn: Any) -> P:
        """Returns the axes that split the dims that are not transformed, as far as these divide."""
        (var,), (out,), shape, n = eqn.invars, eqn.outvars, eqn.invars[0].aval.shape, self.mesh.shape
        free, positions = range(len(shape) - len(eqn.params["fft_lengths"])), self.positions.dims.get(out, ())
        axes: dict[int, Any] = {dim: SEQUENCE for dim in positions[:1] if dim in free and shape[dim] % n[SEQUENCE] == 0}
        n_rows = n_batch_shards(self.mesh)
        over, rows = BATCH_AXES, self.positions.rows_in(out, n_rows)
        if n[SEQUENCE] > 1 and not axes and self.positions.rows_in(out, n_rows * n[SEQUENCE]) is not None:
            over = (*BATCH_AXES, SEQUENCE)
        if rows is not None and rows in free and rows not in axes:
            axes[rows] = over
        dim = self.of_model.get(var)
        if dim is not None and dim in free and dim not in axes and shape[dim] % n[MODEL] == 0:
            axes[dim] = MODEL
        return P(*(axes.get(dim) for dim in range(len(shape))))

    def _as_given(self, var: Any, spec: P) -> P:
        """Returns the axes that split an operand or a result outside: of transformed positions, and not of so many rows. XLA
        would gather the positions for these."""
        n, shape = self.mesh.shape[SEQUENCE], var.aval.shape
        rows = [i for i, of in enumerate(spec) if SEQUENCE in axes_of(of)]
        positions = [i for i in self.positions.dims.get(var, ())[:1] if spec[i] is None and shape[i] % n == 0]
        if n == 1 or not rows or not positions:
            return spec
        axes = {positions[0]: SEQUENCE, rows[0]: tuple(axis for axis in axes_of(spec[rows[0]]) if axis != SEQUENCE)}
        return P(*(axes.get(i, of) for i, of in enumerate(spec)))


def _exchange(x: jax.Array, old: P, new: P) -> jax.Array:
    """Exchanges the parts of the dim that the sequence axis splits for parts of another one, inside of `jax.shard_map`."""
    if old == new:
        return x
    joined, split = (next(i for i, of in enumerate(spec) if SEQUENCE in axes_of(of)) for spec in (old, new))
    return jax.lax.all_to_all(x, SEQUENCE, split_axis=split, concat_axis=joined, tiled=True)


def _row_major(x: jax.Array) -> jax.Array:
    """Constrains the layout in memory of a value, and of its gradient."""
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))
