"""The public `attention`: checks its arguments and binds the primitive."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from ..errors import check_count, check_number
from ._primitive import attention_p
from ._sequence import constrain_positions
from ._setting import AttentionSetting
from ._shared import default_precision


def attention(
    q: Float[Array, "*batch queries heads size"],
    k: Float[Array, "*batch keys groups size"],
    v: Float[Array, "*batch keys groups value_size"],
    *,
    causal: bool = False,
    window: int | None = None,
    lengths: Int[Array, "*batch"] | None = None,
    segments: Int[Array, "*batch keys"] | tuple[Array, Array] | None = None,
    bias: Float[Array, "..."] | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    key: PRNGKeyArray | None = None,
) -> Float[Array, "*batch queries heads value_size"]:
    """Computes softmax attention without materializing the weights of all queries for all keys.

    Arguments such as `causal` and `window` replace a mask, so that the platform's kernel can skip masked keys. The kernel is
    cuDNN's fused attention on NVIDIA GPUs in bfloat16 and float16, and splash attention on TPUs in bfloat16 and float32. On
    other platforms, and if these kernels do not support the arguments, plain XLA computes one block of queries after
    another. Positions may be split over devices, as by `Deployer(n_sequence_shards=)`: devices exchange them for heads, or
    gather the keys, or send them round, if heads do not divide. On several TPUs splash attention needs to know how arrays
    are split; `Trainer` and `Predictor` tell it. The platform is the one that is compiled for, so a dry run on a laptop
    uses the kernels of its target. `jax.vmap` and all derivatives work. Forward mode and second derivatives do materialize
    the weights of all queries for all keys. The softmax is in float32, or in float64 for arrays of float64; products have
    the precision of `jax.default_matmul_precision`.

    ```python
    out = redeqx.attention(q, k, v, causal=True)  # q: [batch, queries, heads, size]
    ```

    **Arguments:**

    - `q`, `k`, `v`: may have any leading dims, the same for all three. If `k` and `v` have fewer heads (`groups`), each is
        shared by `heads / groups` consecutive heads of `q`.
    - `causal`: whether query `i` attends only to keys `j <= i`.
    - `window`: a query attends to the last `window` keys, including its own position; without `causal`, also to the
        `window - 1` keys after it.
    - `lengths`: the number of keys that are attended to; the keys after them are padding.
    - `segments`: an integer per position; a query attends to the keys with the same integer, as in packed or padded rows.
        A pair if queries and keys have different ones.
    - `bias`: added to the scaled scores. Its shape broadcasts to `[*batch, heads, queries, keys]`.
    - `scale`: the factor of the scores; `size ** -0.5` by default.
    - `dropout`: the probability, in [0, 1), that a weight is set to zero; `key` draws which. No kernel's dropout takes a
        key, so plain XLA computes this on all platforms.

    A query whose keys are all masked gets the mean of all values; with cuDNN and splash attention its output is unspecified.

    Raises ValueError if shapes or dtypes do not agree, and for options out of range.
    """
    batch = _check_shapes(q, k, v)
    if window is not None:
        check_count(window, "window")
    check_number(dropout, "dropout", "a probability in [0, 1)", lambda dropout: 0 <= dropout < 1, "Pass 0 for none.")
    if dropout and key is None:
        raise ValueError("`key`: expected a PRNG key for `dropout`, got None. Pass one, or `dropout=0`.")
    extras: dict[str, Any] = {}
    if bias is not None:
        extras["bias"] = _expand_bias(bias, (*batch, q.shape[-2], q.shape[-3], k.shape[-3]))
    if lengths is not None:
        # Devices subtract their first keys: unsigned numbers would wrap around.
        extras["lengths"] = _check_integers("lengths", lengths, batch).astype(jnp.int32)
    if segments is not None:
        query_segments, key_segments = segments if isinstance(segments, tuple) else (segments, segments)
        extras["query_segments"] = _check_integers("segments", query_segments, (*batch, q.shape[-3]))
        extras["key_segments"] = _check_integers("segments", key_segments, (*batch, k.shape[-3]))
    if dropout:
        assert key is not None
        extras["key"] = jax.random.split(key, batch) if batch else key  # one per row
    factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
    return attend(q, k, v, extras, AttentionSetting(factor, causal, window, dropout, default_precision()))


def attend(q: Array, k: Array, v: Array, extras: dict[str, Any], setting: AttentionSetting) -> Array:
    """Computes attention without checking the operands. `extras` are the optional ones, by their names in
    `AttentionSetting`, which replace those of the setting."""
    dtype = jnp.result_type(q, k, v)
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    setting = replace(setting, names=tuple(extras))
    return constrain_positions(setting, attention_p.bind(q, k, v, *extras.values(), setting=setting)[0])


# --- checks -----------------------------------------------------------------------------------------------------------


def _check_shapes(q: Any, k: Any, v: Any) -> tuple[int, ...]:
    """Returns the leading dims; raises ValueError if shapes do not agree."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim < 3:
            raise ValueError(
                f"`{name}`: expected [*batch, positions, heads, size], got shape {tuple(x.shape)}. Add the missing dims."
            )
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"`{name}`: expected floating numbers, got {x.dtype}. Cast them with `.astype(jnp.float32)`.")
    if 0 in k.shape[-3:-1] or 0 in q.shape[-2:]:
        raise ValueError(
            f"`q`, `k`: expected at least one key and one head, got shapes {tuple(q.shape)} and {tuple(k.shape)}. Skip "
            "the attention in this case."
        )
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(
            f"`k`, `v`: expected the same leading dims, keys and heads, got shapes {tuple(k.shape)} and {tuple(v.shape)}. "
            "Pass a value for each key."
        )
    *batch, _, n_heads, size = q.shape
    if list(k.shape[:-3]) != batch or k.shape[-1] != size:
        raise ValueError(
            f"`q`, `k`: expected the same leading dims and head size, got shapes {tuple(q.shape)} and "
            f"{tuple(k.shape)}. The dims are [*batch, positions, heads, size]."
        )
    if n_heads % max(1, k.shape[-2]):
        raise ValueError(
            f"`k`: expected a number of heads that divides the {n_heads} of `q`, got {k.shape[-2]} (shapes {tuple(q.shape)} "
            f"and {tuple(k.shape)}). Each head of `k` is shared by the same number of heads of `q`."
        )
    return tuple(batch)


def _check_integers(name: str, x: Any, shape: tuple[int, ...]) -> Array:
    x = jnp.asarray(x)
    if tuple(x.shape) != shape or not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(
            f"`{name}`: expected integers of shape {shape}, got {x.dtype} of shape {tuple(x.shape)}. Pass one per entry."
        )
    return x


def _expand_bias(bias: Any, shape: tuple[int, ...]) -> Array:
    """Returns the bias with all dims of the scores: of full size along keys, of size 1 along other dims where it repeats."""
    bias = jnp.asarray(bias)
    if not jnp.issubdtype(bias.dtype, jnp.floating):
        raise ValueError(
            f"`bias`: expected floating numbers, which are added to the scores, got {bias.dtype}. Convert a mask by "
            "`jnp.where(mask, 0.0, -1e9)`, or pass `causal`, `window`, `lengths` or `segments` instead."
        )
    padded = (*(1,) * (len(shape) - bias.ndim), *bias.shape)
    if len(padded) != len(shape) or any(n not in (1, size) for n, size in zip(padded, shape, strict=True)):
        raise ValueError(
            f"`bias`: expected a shape that broadcasts to {shape}, [*batch, heads, queries, keys], got {tuple(bias.shape)}. "
            "Give it dims of size 1 where it repeats."
        )
    return jnp.broadcast_to(jnp.reshape(bias, padded), (*padded[:-1], shape[-1]))
