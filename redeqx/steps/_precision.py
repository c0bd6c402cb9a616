"""Precision: the dtypes of a step's computation, parameters and sums of gradients, and the rounding of updates.

A training update is often smaller than half the last digit of a bfloat16, so a bfloat16 parameter that is rounded to nearest
would never change. So bfloat16 parameters either have a float32 copy in the optimizer state (master), or are rounded up or
down at random, in proportion to the distance (stochastic rounding): correct on average, without a copy.

Source: mixed precision with master weights (arXiv:1710.03740); stochastic rounding (arXiv:2010.06192).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array

from .._rounding import to_bfloat16
from .._tree import PyTree
from ..errors import alternatives, check_choice
from ..machine import FP8_DEVICES, has_fp8
from ..optimizers import in_float32, widened, with_kept_dtypes, with_masters

FP8 = "fp8"


def _name(value: Any) -> Any:
    if isinstance(value, str) and value == FP8:
        return value
    try:
        return jnp.dtype(value).name
    except TypeError:
        return value


@dataclass(frozen=True)
class Precision:
    """The dtypes of a training step.

    ```python
    trainer = redeqx.Trainer(..., compute="bfloat16")
    half = redeqx.Precision("bfloat16", parameters="bfloat16", rounding="stochastic")
    trainer = redeqx.Trainer(..., compute=redeqx.Compute(half))
    ```

    **Arguments:**

    - `compute`: floating leaves of the model are cast to this dtype for the loss; None keeps their dtypes. With `"fp8"` the
        loss is computed in bfloat16, and its products with weights in 8-bit floating point: activations and weights in e4m3,
        gradients in e5m2, each scaled by its largest entry, forward and backward, with sums in float32. The first product,
        which reads the data, and the last, which makes the logits, stay in bfloat16, as their errors are not averaged by
        other layers. So do attention, products with a side that is not a multiple of 16, and predictions.
    - `parameters`: the dtype in which trained floating leaves are stored and saved: `"float32"` or `"bfloat16"`; None keeps
        their dtypes. Frozen leaves keep theirs.
    - `gradients`: the dtype in which a gradient is summed over rows and devices, if it is wider than the dtype in which its
        weight is computed. None sums in the latter, which in bfloat16 halves the bytes between devices; results then depend
        on the mesh in the last digit of bfloat16. Gradients of convolutions and of a `grad_fn` always use the latter.
        Micro-batches are summed in float32.
    - `rounding`: how bfloat16 parameters, as set by `parameters`, are updated. `"master"` keeps a float32 copy in the
        optimizer state. `"stochastic"` rounds up or down at random, with keys derived from the step and the leaf: the result
        is the same on every mesh and after a restart, if the update is the same bit for bit. In both cases the optimizer
        computes in float32 and keeps its state in float32.

    Losses and their weights are summed in float32, and so are the softmaxes and norms of `redeqx.models`, of `eqx.nn` and of
    fused attention. All other computation of a model is in `compute`: cast logits to float32 before a loss of your own.

    Raises ValueError for another dtype or rounding.
    """

    compute: Any = None
    parameters: Any = None
    gradients: Any = "float32"
    rounding: str = "master"

    def __post_init__(self) -> None:
        allowed = {
            "compute": ("float64", "float32", "bfloat16", "float16", FP8),
            "parameters": ("float32", "bfloat16"),
            "gradients": ("float32", "bfloat16", "float16"),
        }
        for name, names in allowed.items():
            value = getattr(self, name)
            check_choice(None if value is None else _name(value), f"Precision.{name}", (*names, None))
        check_choice(self.rounding, "Precision.rounding", ("master", "stochastic"))

    @classmethod
    def of(cls, value: Any, argument: str = "precision", others: str = "") -> "Precision":
        """Returns the precision of this name or dtype; a `Precision` itself; for None, that of the model's own dtypes.

        An error names the argument, and what `others` it takes.
        """
        if value is None:
            return AS_GIVEN
        if isinstance(value, Precision):
            return value
        name = _name(value)
        if isinstance(name, str) and name in _NAMED:
            return _NAMED[name]
        expected = f"{alternatives([*_NAMED])} or a `redeqx.Precision`{others}"
        raise ValueError(f"`{argument}`: expected {expected}, got {value!r}. Pass one of them.")

    @property
    def in_fp8(self) -> bool:
        """Whether products with weights are computed in fp8."""
        return isinstance(self.compute, str) and self.compute == FP8

    @property
    def dtype(self) -> Any:
        """The dtype to which floating leaves are cast for the loss; None to keep their dtypes."""
        name = "bfloat16" if self.in_fp8 else self.compute
        return None if name is None else jnp.dtype(name)

    @property
    def summed_in(self) -> Any:
        """The dtype of sums of gradients, for weights with a narrower dtype; None for the weights' dtype."""
        return None if self.gradients is None else jnp.dtype(self.gradients)

    @property
    def rounds(self) -> bool:
        """Whether parameters are narrower than float32, in which their updates are computed."""
        return self.parameters is not None and jnp.dtype(self.parameters).itemsize < 4

    def check(self, mesh: Mesh) -> None:
        """Raises ValueError for fp8 on devices that do not support it. CPUs emulate it."""
        device = mesh.devices.flat[0]
        if self.in_fp8 and device.platform != "cpu" and not has_fp8(device):
            raise ValueError(
                f"`precision`: expected a device that supports fp8 ({', '.join(FP8_DEVICES)}), got {device.device_kind}. "
                "Pass 'bfloat16' for this one."
            )

    def describe(self, dtypes: Sequence[Any]) -> str:
        """Describes the precision, for trained leaves of these dtypes."""
        stored = sorted({jnp.dtype(dtype).name for dtype in dtypes})
        words = [f"parameters {' and '.join(stored)}"]
        if self.rounds:
            words[0] += " with float32 copies" if self.rounding == "master" else " with stochastic rounding"
        computed = stored if self.dtype is None else [self.dtype.name]
        words.append(f"computed in {' and '.join(computed)}{' and fp8' if self.in_fp8 else ''}")
        summed = computed
        if self.gradients is not None:
            summed = sorted({jnp.promote_types(name, self.gradients).name for name in computed})
        words.append(f"gradients summed over devices in {' and '.join(summed)}")
        return ", ".join(words)

    # --- parameters ----------------------------------------------------------------------------------------------------

    def stored(self, leaves: Sequence[Any]) -> list[Any]:
        """Casts trained leaves, or their shapes, to the dtype in which they are stored."""
        return [leaf if self.parameters is None else cast(leaf, self.parameters) for leaf in leaves]

    def optimizer(self, optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
        """Returns an optimizer that computes in float32 even if its parameters are stored in a narrower dtype, and whose
        state keeps its dtypes."""
        if not self.rounds:
            return with_kept_dtypes(optimizer)
        return with_masters(optimizer) if self.rounding == "master" else in_float32(optimizer)

    def updated(self, params: PyTree, updates: PyTree, key: Array) -> PyTree:
        """Applies updates to parameters, which keep their dtypes, as those of `optax.apply_updates` do. `key` is that of the
        step."""
        if not self.rounds:
            return jax.tree.map(_in_dtype_of, params, eqx.apply_updates(params, updates))
        leaves, treedef = jax.tree.flatten(params)
        wide = jax.tree.leaves(eqx.apply_updates(widened(params), updates))

        def rounded(i: int, old: Array, new: Array) -> Array:
            if self.rounding == "stochastic" and old.dtype == jnp.bfloat16:
                return round_stochastically(new, jax.random.fold_in(key, i))
            return new.astype(old.dtype)

        return jax.tree.unflatten(treedef, [rounded(i, *pair) for i, pair in enumerate(zip(leaves, wide, strict=True))])


def _in_dtype_of(old: Array, new: Array) -> Array:
    is_real = jnp.issubdtype(new.dtype, jnp.complexfloating) and not jnp.issubdtype(old.dtype, jnp.complexfloating)
    return (new.real if is_real else new).astype(old.dtype)  # optax may make complex updates if other leaves are complex


AS_GIVEN = Precision(None, gradients=None)  # keeps the model's dtypes, and sums gradients as JAX does
_NAMED = {
    "float32": Precision("float32", parameters="float32"),
    "bfloat16": Precision("bfloat16", parameters="float32"),
    FP8: Precision(FP8, parameters="float32"),
}


def cast(leaf: Any, dtype: Any) -> Any:
    """Casts a floating leaf, or its shape; returns any other leaf unchanged."""
    if not jnp.issubdtype(leaf.dtype, jnp.floating) or leaf.dtype == jnp.dtype(dtype):
        return leaf
    if isinstance(leaf, np.ndarray) and 0 in leaf.strides:  # the zeros of a dry run, which take no memory
        repeated = tuple(slice(1) if stride == 0 else slice(None) for stride in leaf.strides)
        return np.broadcast_to(leaf[repeated].astype(dtype), leaf.shape)
    return leaf.update(dtype=dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf.astype(dtype)


def round_stochastically(x: Array, key: Array) -> Array:
    """Rounds float32 to bfloat16, up or down at random."""
    return to_bfloat16(x, jax.random.bits(key, x.shape, jnp.uint16))
