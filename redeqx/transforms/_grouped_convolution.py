"""Grouped convolutions, which XLA's partitioners compute wrongly in two ways, both silent. This rule avoids them.

A convolution whose window does not slide (a kernel of size 1, or of the size of the input) is partitioned as a product, and
its groups are forgotten. If its channels are split over devices, its values are wrong, or it does not compile. A convolution
with a kernel for each row, as in StyleGAN, has the rows among its channels, so this happens on any mesh. It is computed as
the product that it is.

If the batch is split over some axes of a mesh and the convolution is replicated over another axis of n devices, the gradient
of its weight is n times too large. It is right if that axis splits something. So this rule splits the channels over the
model axis. Over the sequence axis, where it does not split the result's positions, it splits the rows; and if these do not
divide, the channels. Groups of zeros are added first if the channels do not divide.

Source: measured with jax 0.10.2 (the tests `test_xla_still_...` fail once it is fixed). Cost: resharding the input's
channels over these axes, which is a slice if they are replicated.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.sharding import Mesh

from ..dims import Positions
from ..machine import BATCH_AXES, MODEL, SEQUENCE, n_batch_shards
from ..tracing import Site, plain, run
from ._by_positions import ByPositions
from ._constrain import split_over

_COUNTS = ("feature_group_count", "batch_group_count")  # the second is the first's weight gradient, as in a user's `grad_fn`


@dataclass(frozen=True)
class FixGroupedConvolutions(ByPositions):
    """Computes grouped convolutions, and their gradients, correctly on a mesh.

    **Arguments:**

    - `is_differentiated`: whether the function is; else only its values must be right.
    """

    mesh: Mesh
    is_differentiated: bool = True
    corrects: ClassVar = True

    def claims(self, eqn: Any) -> bool:
        is_grouped = eqn.primitive.name == "conv_general_dilated" and any(eqn.params[count] > 1 for count in _COUNTS)
        if not is_grouped or self.mesh.size == 1:
            return False
        n = self.mesh.shape[MODEL] * self.mesh.shape[SEQUENCE]
        return (self.is_differentiated and n > 1) or _window(eqn) is not None

    def __call__(self, eqn: Any, ins: Sequence[Any], site: Site) -> Sequence[Any] | None:
        x, weight = map(plain, ins)
        if (window := _window(eqn)) is not None:
            return [_product(eqn, x, weight, window)]
        numbers = eqn.params["dimension_numbers"]
        (count,) = (count for count in _COUNTS if eqn.params[count] > 1)
        channels, n_groups = numbers.lhs_spec[int(count == "feature_group_count")], eqn.params[count]
        axes = self._axes(eqn, numbers.lhs_spec[0], channels)
        n_shards = math.prod(self.mesh.shape[axis] for axis in axes[channels])
        n_added = -n_groups % n_shards if x.shape[channels] % n_shards else 0
        x, weight = (
            _with_groups(x, channels, n_groups, n_added),
            _with_groups(weight, numbers.rhs_spec[0], n_groups, n_added),
        )
        x = split_over(x, self.mesh, axes)
        (out,) = run(eqn.replace(params={**eqn.params, count: n_groups + n_added}), [x, weight])
        dim = numbers.out_spec[1]
        return [jax.lax.slice_in_dim(out, 0, eqn.outvars[0].aval.shape[dim], axis=dim) if n_added else out]

    def _axes(self, eqn: Any, batch: int, channels: int) -> Mapping[int, tuple[str, ...]]:
        """Returns the mesh axes of the dims of an input to split, such that no axis is left over."""
        x, out = eqn.invars[0], eqn.outvars[0]
        axes = (*BATCH_AXES, MODEL) if x.aval.shape[batch] == 1 else (MODEL,)  # the rows may be among the channels
        n, positions = self.mesh.shape[SEQUENCE], self.positions or Positions()
        if n == 1 or any(out.aval.shape[dim] % n == 0 for dim in positions.dims.get(out, ())[:1]):
            return {channels: axes}
        if positions.rows_in(x, n_batch_shards(self.mesh) * n) == batch:
            return {batch: (*BATCH_AXES, SEQUENCE), channels: axes}
        return {channels: (SEQUENCE, *axes)}


def _window(eqn: Any) -> tuple[str, ...] | None:
    """Returns what the window does along each spatial dim: "meets" each entry of the input alone, "sums" all of them, or
    "spreads" the only one. None if it slides along one of them."""
    numbers, params, found = eqn.params["dimension_numbers"], eqn.params, []
    x, weight = (atom.aval.shape for atom in eqn.invars)
    for i, (dim, of_weight) in enumerate(zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], strict=True)):
        n, size, padding, stride = x[dim], weight[of_weight], tuple(params["padding"][i]), params["window_strides"][i]
        is_dense = (n == 1 or params["lhs_dilation"][i] == 1) and (size == 1 or params["rhs_dilation"][i] == 1)
        if is_dense and size == 1 and padding == (0, 0) and (stride == 1 or n == 1):
            found.append("meets")
        elif is_dense and size == n and padding == (0, 0):
            found.append("sums")
        elif is_dense and n == 1 and padding == (size - 1, size - 1) and stride == 1:
            found.append("spreads")
        else:
            return None
    return tuple(found)


def _product(eqn: Any, x: jax.Array, weight: jax.Array, window: Sequence[str]) -> jax.Array:
    """Returns a grouped convolution whose window does not slide, by a product for each group."""
    numbers, params = eqn.params["dimension_numbers"], eqn.params
    x, weight = jnp.transpose(x, numbers.lhs_spec), jnp.transpose(weight, numbers.rhs_spec)
    if params["batch_group_count"] > 1:
        x = rearrange(x, "(g n) i ... -> n g i ...", g=(n_groups := params["batch_group_count"]))
    else:
        x = rearrange(x, "n (g i) ... -> n g i ...", g=(n_groups := params["feature_group_count"]))
    weight = rearrange(weight, "(g o) i ... -> g o i ...", g=n_groups)
    spreading = [3 + i for i, does in enumerate(window) if does == "spreads"]
    x, weight = jnp.squeeze(x, spreading), jnp.flip(weight, spreading)
    weight = jnp.squeeze(weight, [3 + i for i, does in enumerate(window) if does == "meets"])
    n, g, i, o, *space = range(4 + len(window))
    in_x, in_weight, in_out = (
        [dim for dim, does in zip(space, window, strict=True) if does != unlike] for unlike in ("spreads", "meets", "sums")
    )
    out = jnp.einsum(
        *(x, [n, g, i, *in_x], weight, [g, o, i, *in_weight], [n, g, o, *in_out]),
        precision=params["precision"], preferred_element_type=params["preferred_element_type"],
    )  # fmt: skip
    out = jnp.expand_dims(
        rearrange(out, "n g o ... -> n (g o) ..."), [2 + i for i, does in enumerate(window) if does == "sums"]
    )
    return jnp.transpose(out, [numbers.out_spec.index(dim) for dim in range(out.ndim)]).astype(eqn.outvars[0].aval.dtype)


def _with_groups(x: jax.Array, dim: int, n_groups: int, n_added: int) -> jax.Array:
    """Returns an array with groups of zeros after those of a dim."""
    if not n_added:
        return x
    size = x.shape[dim] // n_groups * n_added
    return jnp.pad(x, [(0, size if i == dim else 0) for i in range(x.ndim)])
