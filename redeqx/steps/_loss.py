"""The loss: a total and the weight that divides it, checked.

Totals and weights are summed over rows, devices and micro-batches, and divided once. So no result depends on how the work is
partitioned.
"""

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree


def _by_name(metrics: Any) -> Mapping[str, Any]:
    """Returns the metrics unchanged. Raises TypeError for anything but a dict by names."""
    if not isinstance(metrics, Mapping) or not all(isinstance(name, str) for name in metrics):
        got = f"names {[*metrics]}" if isinstance(metrics, Mapping) else type(metrics).__name__
        raise TypeError(f'`Loss.metrics`: expected a dict of sums by name, got {got}. Write {{"correct": n_correct}}.')
    return metrics


class Loss(eqx.Module):
    """A loss as a total, and the weight to divide it by.

    In an update both are those of the undivided batch. In an evaluation the totals and weights of its batches are summed,
    and divided once.

    **Arguments:**

    - `total`: a scalar, the sum over the rows (or tokens) of a batch.
    - `weight`: a scalar, the number of these rows (or tokens). It is not differentiated.
    - `metrics`: further sums by name, reported divided by `weight`; or pairs `(total, weight)` with their own weight. A
        metric that is no sum over rows is added up over micro-batches, and does not change the loss. The names `step`,
        `epoch`, `loss`, `grad_norm` and `learning_rate` are taken.
    """

    total: Any
    weight: Any
    metrics: Mapping[str, Any] = eqx.field(default_factory=dict, converter=_by_name)


_OF_LOSS = "Return a scalar or `redeqx.Loss(total, weight, metrics)`; with `model_state`, `(loss, state)`."
_OF_METRIC = "A metric is a scalar, a sum that is divided by `Loss.weight`, or a pair `(total, weight)`."
# Names of metrics that the library records.
_RESERVED = {"step", "epoch", "loss", "grad_norm", "learning_rate"}


def as_sums(loss: Any, n_rows: int, where: str = "loss_fn") -> tuple[Array, Array, dict[str, tuple[Array, Array]]]:
    """Returns a loss, a `Loss` or the mean over `n_rows` rows, as `(total, weight, {name: (total, weight)})`, all float32
    scalars (float64 in 64-bit mode). Raises TypeError for anything but numbers, ValueError for numbers that are not
    scalars."""
    dtype = jnp.zeros(()).dtype

    def scalar(name: str, value: Any, advice: str = _OF_LOSS) -> Array:
        if not eqx.is_array_like(value):
            raise TypeError(f"`{where}`: expected {name} to be a scalar, got {type(value).__name__}. {advice}")
        value = jnp.asarray(value)
        if value.shape != ():
            raise ValueError(
                f"`{where}`: expected {name} to be a scalar, got shape {value.shape}. "
                "Return its mean, or `redeqx.Loss(total=its sum, weight=its size)`."
            )
        if not jnp.issubdtype(value.dtype, jnp.number) or jnp.issubdtype(value.dtype, jnp.complexfloating):
            raise TypeError(f"`{where}`: expected {name} to be a real number, got {value.dtype}. Convert it to one.")
        return value.astype(dtype)

    def differentiable(name: str, value: Any) -> Array:
        if jnp.issubdtype(getattr(value, "dtype", type(value)), jnp.integer):
            raise TypeError(
                f"`{where}`: expected {name} to be a floating number, got an integer. No gradient flows through it."
            )
        return scalar(name, value)

    if not isinstance(loss, Loss):
        return differentiable("the loss", loss) * n_rows, jnp.asarray(n_rows, dtype), {}
    weight = jax.lax.stop_gradient(scalar("`Loss.weight`", loss.weight))
    metrics = {}
    for name, metric in loss.metrics.items():
        if name in _RESERVED:
            raise ValueError(
                f"`{where}`: expected names of metrics other than {sorted(_RESERVED)}, got {name!r}. Rename it."
            )
        pair = metric if isinstance(metric, tuple | list) and len(metric) == 2 else (metric, weight)
        total, over = (
            scalar(f"{of}metric {name!r}", x, _OF_METRIC) for of, x in zip(("", "the weight of "), pair, strict=True)
        )
        metrics[name] = (total, over)
    return differentiable("`Loss.total`", loss.total), weight, metrics


def n_rows(batch: PyTree) -> int:
    """Returns the number of rows of a batch."""
    return jax.tree.leaves(batch)[0].shape[0]
