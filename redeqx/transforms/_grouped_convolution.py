"""Grouped convolutions: fixes the gradient of their weights, which XLA computes wrongly under a model axis.

If the batch is split over some axes of a mesh and the convolution is replicated over another axis of n devices, the gradient
of a grouped (or depthwise) convolution's weight is n times too large. Both of XLA's partitioners have this silent error. The
gradient is right if the channels are split over that axis, so this rule splits them. If the axis does not divide the
channels, groups of zeros are added first.

Source: measured with jax 0.10.2 (`test_xla_still_sums_the_gradient_too_often` fails once it is fixed). Cost: resharding the
input's channels over the model axis, which is a slice if they are replicated.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from ..machine import MODEL
from ..tracing import Rule, Site, plain, run
from ._constrain import split_over

_COUNTS = ("feature_group_count", "batch_group_count")  # the second is the first's weight gradient, as in a user's `grad_fn`


@dataclass(frozen=True)
class FixGroupedConvolutions(Rule):
    """Computes grouped convolutions with correct gradients on a mesh with a model axis."""

    mesh: Mesh
    corrects: ClassVar = True

    def claims(self, eqn: Any) -> bool:
        return eqn.primitive.name == "conv_general_dilated" and any(eqn.params[count] > 1 for count in _COUNTS)

    def __call__(self, eqn: Any, ins: Sequence[Any], site: Site) -> Sequence[Any] | None:
        x, weight = map(plain, ins)
        numbers, n_shards = eqn.params["dimension_numbers"], self.mesh.shape[MODEL]
        (count,) = (count for count in _COUNTS if eqn.params[count] > 1)
        channels, n_groups = numbers.lhs_spec[int(count == "feature_group_count")], eqn.params[count]
        n_added = -n_groups % n_shards if x.shape[channels] % n_shards else 0
        x, weight = (
            _with_groups(x, channels, n_groups, n_added),
            _with_groups(weight, numbers.rhs_spec[0], n_groups, n_added),
        )
        x = split_over(x, self.mesh, {channels: MODEL})
        (out,) = run(eqn.replace(params={**eqn.params, count: n_groups + n_added}), [x, weight])
        dim = numbers.out_spec[1]
        return [jax.lax.slice_in_dim(out, 0, eqn.outvars[0].aval.shape[dim], axis=dim) if n_added else out]


def _with_groups(x: jax.Array, dim: int, n_groups: int, n_added: int) -> jax.Array:
    """Returns an array with groups of zeros after those of a dim."""
    if not n_added:
        return x
    size = x.shape[dim] // n_groups * n_added
    return jnp.pad(x, [(0, size if i == dim else 0) for i in range(x.ndim)])
