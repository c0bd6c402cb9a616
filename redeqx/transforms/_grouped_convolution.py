"""Grouped convolutions: fixes the gradient of their weights, which XLA computes wrongly under a model axis.

If the batch is split over some axes of a mesh and the convolution is replicated over another axis of n devices, the gradient
of a grouped (or depthwise) convolution's weight is n times too large. Both of XLA's partitioners have this silent error. The
gradient is right if the channels are split over that axis, so this rule splits them. If the axis does not divide the
channels, the rule computes the gradient from the patches of the input instead.

Source: measured with jax 0.10.2. Cost: resharding the input's channels over the model axis, which is a slice if they are
replicated. If the axis does not divide the channels: patches of the input in the backward pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from ..machine import MODEL
from ..tracing import Rule, Site, plain, run


@dataclass(frozen=True)
class FixGroupedConvolutions(Rule):
    """Computes grouped convolutions with correct gradients on a mesh with a model axis."""

    mesh: Mesh
    corrects: ClassVar = True

    def claims(self, eqn: Any) -> bool:
        return _is_grouped(eqn)

    def __call__(self, eqn: Any, ins: Sequence[Any], site: Site) -> Sequence[Any] | None:
        x, weight = map(plain, ins)
        return [_conv(eqn, x, weight, self.mesh)]


def _is_grouped(eqn: Any) -> bool:
    counts = ("feature_group_count", "batch_group_count")  # the second is the first's weight gradient
    return eqn.primitive.name == "conv_general_dilated" and any(eqn.params[count] > 1 for count in counts)


def _conv(eqn: Any, x: jax.Array, weight: jax.Array, mesh: Mesh) -> jax.Array:
    is_gradient = eqn.params["batch_group_count"] > 1  # as in a user's `grad_fn`; channels are in the batch dim
    channels = eqn.params["dimension_numbers"].lhs_spec[0 if is_gradient else 1]
    if x.shape[channels] % mesh.shape[MODEL]:
        return _conv_by_features(eqn, x, weight) if is_gradient else _conv_by_patches(eqn, x, weight)
    spec = [MODEL if dim == channels else P.UNCONSTRAINED for dim in range(x.ndim)]
    return run(eqn, [jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec))), weight])[0]


def _conv_by_features(eqn: Any, x: jax.Array, weight: jax.Array) -> jax.Array:
    """Computes a convolution with batch groups as one with feature groups."""
    params, groups = eqn.params, eqn.params["batch_group_count"]
    numbers = params["dimension_numbers"]
    x = rearrange(jnp.transpose(x, numbers.lhs_spec), "(g b) c ... -> b (g c) ...", g=groups)
    out = jax.lax.conv_general_dilated(
        x, jnp.transpose(weight, numbers.rhs_spec), params["window_strides"], params["padding"], params["lhs_dilation"],
        params["rhs_dilation"], feature_group_count=groups, precision=params["precision"],
        preferred_element_type=params["preferred_element_type"],
    )  # fmt: skip
    return jnp.transpose(out, sorted(range(out.ndim), key=lambda i: numbers.out_spec[i]))


def _conv_by_patches(eqn: Any, x: jax.Array, weight: jax.Array) -> jax.Array:
    """Computes a convolution whose weight gradient is a matmul of the input's patches with the output's gradient."""
    params, groups = eqn.params, eqn.params["feature_group_count"]
    numbers = params["dimension_numbers"]

    @jax.custom_vjp
    def conv(x: jax.Array, weight: jax.Array) -> jax.Array:
        return run(eqn, [x, weight])[0]

    def forward(x: jax.Array, weight: jax.Array) -> Any:
        return conv(x, weight), (x, weight)

    def backward(residuals: Any, gradient: jax.Array) -> Any:
        x, weight = residuals
        (of_x,) = jax.vjp(lambda x: run(eqn, [x, weight])[0], x)[1](gradient)
        kernel = jnp.transpose(weight, numbers.rhs_spec)  # [out, in, *space]
        patches = jax.lax.conv_general_dilated_patches(
            jnp.transpose(x, numbers.lhs_spec), kernel.shape[2:], params["window_strides"], params["padding"],
            params["lhs_dilation"], params["rhs_dilation"], precision=params["precision"],
        )  # fmt: skip
        patches = rearrange(patches, "b (g i) ... -> b g i (...)", g=groups)
        outputs = rearrange(jnp.transpose(gradient, numbers.out_spec), "b (g o) ... -> b g o (...)", g=groups)
        of_kernel = jnp.einsum("bgip,bgop->goi", patches, outputs, precision=params["precision"]).reshape(kernel.shape)
        inverse = sorted(range(kernel.ndim), key=lambda i: numbers.rhs_spec[i])
        return of_x, jnp.transpose(of_kernel, inverse).astype(weight.dtype)

    conv.defvjp(forward, backward)
    return conv(x, weight)
