"""Attention as a JAX primitive: one equation in a jaxpr, lowered to the kernel of the target platform.

There are three primitives: the attention, its tangent (for forward mode, and transposed for reverse mode), and its gradient.
No kernel has second derivatives, so these use the dense formula. There may be any number of leading dims; those of an
optional operand may be 1, so that `jax.vmap` repeats nothing.

Source: "Autodidax" and "How JAX primitives work" in JAX's documentation.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import einops
import jax
import jax.numpy as jnp
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir

from .._promotion import promoting
from .._rounding import at_least_float32
from . import _blockwise, _cudnn, _sequence, _splash
from ._setting import AttentionSetting, Unsupported, pairs_of
from ._shared import log_fallback, make_aval

attention_p = jex.Primitive("attention")
_tangent_p = jex.Primitive("attention_tangent")
gradient_p = jex.Primitive("attention_gradient")


for _primitive in (attention_p, _tangent_p, gradient_p):
    _primitive.multiple_results = True
    _primitive.def_impl(jax.jit(_primitive.bind, static_argnames="setting"))


def _split_operands(
    setting: AttentionSetting, operands: Sequence[Any]
) -> tuple[Any, Any, Any, dict[str, Any], Sequence[Any]]:
    """Returns queries, keys, values, the optional operands by name, and all operands after them."""
    q, k, v, *rest = operands
    n = len(setting.names)
    return q, k, v, dict(zip(setting.names, rest[:n], strict=True)), rest[n:]


def _differentiable(setting: AttentionSetting) -> list[int]:
    """Returns the indices of the differentiable operands: of the optional ones, only a bias has real numbers."""
    return [0, 1, 2, *(3 + i for i, name in enumerate(setting.names) if name == "bias")]


# --- shapes -----------------------------------------------------------------------------------------------------------


@attention_p.def_abstract_eval
def _attention_shape(q: Any, k: Any, v: Any, *rest: Any, setting: AttentionSetting) -> list[Any]:
    *batch, n_queries, n_heads, _ = q.shape
    pair = (2,) * _may_be_in_ring(setting, (q, k, v, *rest))
    shapes = (*batch, n_queries, n_heads, v.shape[-1]), (*batch, n_heads, n_queries, *pair)
    return [make_aval(shape, dtype, q) for shape, dtype in zip(shapes, (q.dtype, at_least_float32(q.dtype)), strict=True)]


@_tangent_p.def_abstract_eval
def _tangent_shape(q: Any, k: Any, v: Any, *rest: Any, setting: AttentionSetting) -> list[Any]:
    return [make_aval((*q.shape[:-1], v.shape[-1]), q.dtype, q)]


@gradient_p.def_abstract_eval
def _gradient_shape(*operands: Any, setting: AttentionSetting) -> list[Any]:
    return [make_aval(operands[i].shape, operands[i].dtype, operands[0]) for i in _differentiable(setting)]


# --- the dense formula, for second derivatives ------------------------------------------------------------------------


def _dense(setting: AttentionSetting, *operands: Any) -> list[Any]:
    """Computes the outputs for all queries at once, by a formula that JAX differentiates."""
    one_block = SimpleNamespace(forward=partial(_blockwise.forward, block_size=operands[0].shape[-3]))
    return _forward(one_block, *operands, setting=_sequence.whole(setting))


def formula(eqn: Any) -> Any:
    """Returns the attention of an equation, or its gradient, as a closed jaxpr of products and a softmax, for analyses."""
    return _formula(eqn.primitive is gradient_p, eqn.params["setting"], tuple(var.aval for var in eqn.invars))


@cache  # equal layers and the trials of a plan share one trace
def _formula(is_gradient: bool, setting: AttentionSetting, avals: tuple[Any, ...]) -> Any:
    return jax.make_jaxpr(partial(_dense_gradient, setting=setting) if is_gradient else partial(_dense, setting))(*avals)


def _dense_fn(setting: AttentionSetting, operands: Sequence[Any]) -> tuple[Callable[..., Any], list[Any]]:
    """Returns the output of the dense formula as a function of the differentiable operands, and these operands."""
    places = _differentiable(setting)

    def fn(*args: Any) -> Any:
        values = {**dict(enumerate(operands)), **dict(zip(places, args, strict=True))}
        return _dense(setting, *values.values())[0]

    return fn, [operands[i] for i in places]


def _dense_tangent(*operands: Any, setting: AttentionSetting) -> list[Any]:
    fn, primals = _dense_fn(setting, operands[: 3 + len(setting.names)])
    return [jax.jvp(fn, primals, list(operands[-len(primals) :]))[1]]


def _dense_gradient(*operands: Any, setting: AttentionSetting) -> list[Any]:
    fn, primals = _dense_fn(setting, operands[: 3 + len(setting.names)])
    return list(jax.vjp(fn, *primals)[1](operands[-1]))


# --- derivatives ------------------------------------------------------------------------------------------------------


def _attention_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, setting: AttentionSetting) -> Any:
    out, log_sum = attention_p.bind(*primals, setting=setting)
    tangents_in = [ad.instantiate_zeros(tangents[i]) for i in _differentiable(setting)]
    (tangent,) = _tangent_p.bind(*primals, out, log_sum, *tangents_in, setting=setting)
    no_tangent = ad.Zero(jax.typeof(log_sum).to_tangent_aval())  # `log_sum` is never returned to the user
    return [out, log_sum], [tangent, no_tangent]


def _tangent_transpose(cotangents: Sequence[Any], *operands: Any, setting: AttentionSetting) -> list[Any]:
    (g,) = cotangents
    n_tangents = len(_differentiable(setting))
    primals, tangents = operands[: len(operands) - n_tangents], operands[len(operands) - n_tangents :]
    if type(g) is ad.Zero:
        return [None] * len(operands)
    grads = gradient_p.bind(*primals, g, setting=setting)
    wanted = [grad if ad.is_undefined_primal(x) else None for grad, x in zip(grads, tangents, strict=True)]
    return [*[None] * len(primals), *wanted]


def _jvp_by_formula(dense: Callable[..., list[Any]], primitive: Any) -> Callable[..., Any]:
    """Returns the JVP rule of a primitive, computed by the dense formula, which recomputes `out` and `log_sum`."""

    def jvp(primals: Sequence[Any], tangents: Sequence[Any], *, setting: AttentionSetting) -> Any:
        instantiated = tuple(map(ad.instantiate_zeros, tangents))
        outs = primitive.bind(*primals, setting=setting)
        return outs, list(jax.jvp(partial(dense, setting=setting), tuple(primals), instantiated)[1])

    return jvp


ad.primitive_jvps[attention_p] = _attention_jvp
ad.primitive_jvps[_tangent_p] = _jvp_by_formula(_dense_tangent, _tangent_p)
ad.primitive_jvps[gradient_p] = _jvp_by_formula(_dense_gradient, gradient_p)
ad.primitive_transposes[_tangent_p] = _tangent_transpose


# --- vmap -------------------------------------------------------------------------------------------------------------


def _batcher(primitive: Any, operands: Sequence[Any], dims: Sequence[int | None], *, setting: AttentionSetting) -> Any:
    """Adds a leading dim. Unbatched operands are broadcast, but optional ones that need no gradient get a dim of size 1."""
    size = next(x.shape[dim] for x, dim in zip(operands, dims, strict=True) if dim is not None)
    may_be_1 = set(range(3, 3 + len(setting.names)))
    if primitive is not attention_p:
        may_be_1 -= set(_differentiable(setting))
    moved = []
    for i, (x, dim) in enumerate(zip(operands, dims, strict=True)):
        if dim is not None:
            moved.append(jnp.moveaxis(x, dim, 0))
        else:
            moved.append(x[None] if i in may_be_1 else jnp.broadcast_to(x, (size, *x.shape)))
    outs = primitive.bind(*moved, setting=setting)
    return outs, [0] * len(outs)


for _primitive in (attention_p, _tangent_p, gradient_p):
    batching.primitive_batchers[_primitive] = partial(_batcher, _primitive)


# --- lowering to the kernel of each platform --------------------------------------------------------------------------


def _flatten_batch(x: Any, batch: Sequence[int]) -> Any:
    """Flattens the leading dims, some of which may be 1, to one: `B`, or 1 if all of them are 1."""
    n, leading = len(batch), x.shape[: len(batch)]
    if math.prod(leading) == 1:
        return x.reshape(1, *x.shape[n:])
    return jnp.broadcast_to(x, (*batch, *x.shape[n:])).reshape(math.prod(batch), *x.shape[n:])


def _to_kernel(kernel: Any, setting: AttentionSetting, operands: Sequence[Any]) -> list[Callable[[Any], Any]]:
    """Returns for each operand the function that converts it to the kernel's operand. Leading dims are flattened. If there
    are fewer key heads than devices, keys and values are repeated for kernels that run on each device."""
    q, k = operands[:2]
    flatten = partial(_flatten_batch, batch=q.shape[:-3])
    resolved = _resolve(kernel, setting, operands)
    by_xla = kernel is _blockwise and resolved == _sequence.whole(setting)
    n = 1 if by_xla else resolved.n_repeats(q.shape[-2], k.shape[-2])
    repeat = (lambda x: einops.repeat(flatten(x), "b s g h -> b s (g n) h", n=n)) if n > 1 else flatten
    return [repeat if i in (1, 2) else flatten for i in range(len(operands))]


def _resolve(kernel: Any, setting: AttentionSetting, operands: Sequence[Any]) -> AttentionSetting:
    """Returns the setting with the split that a kernel computes operands with."""
    return _sequence.resolve(setting, operands, segments_are_dense=kernel is _cudnn)


def _may_be_in_ring(setting: AttentionSetting, operands: Sequence[Any]) -> bool:
    """Whether some kernel computes operands in a ring. The primitive's log-sum-exps are then pairs, on all platforms."""
    return any(_resolve(kernel, setting, operands).in_ring for kernel in KERNELS.values())


def _forward(kernel: Any, *operands: Any, setting: AttentionSetting) -> list[Any]:
    batch, resolved = operands[0].shape[:-3], _resolve(kernel, setting, operands)
    converted = [convert(x) for convert, x in zip(_to_kernel(kernel, setting, operands), operands, strict=True)]
    q, k, v, extras, _ = _split_operands(setting, converted)
    out, log_sum = _sequence.forward(kernel, setting, resolved, q, k, v, extras)
    if not resolved.in_ring and _may_be_in_ring(setting, operands):
        log_sum = pairs_of(log_sum)
    return [x.reshape(*batch, *x.shape[1:]) for x in (out, log_sum)]


def _backward(kernel: Any, *operands: Any, setting: AttentionSetting) -> list[Any]:
    to_kernel = _to_kernel(kernel, setting, operands)
    converted = [convert(x) for convert, x in zip(to_kernel, operands, strict=True)]
    q, k, v, extras, (out, log_sum, g) = _split_operands(setting, converted)
    resolved = _resolve(kernel, setting, operands)
    grads = _sequence.backward(kernel, setting, resolved, q, k, v, extras, out, log_sum, g)
    from_kernel = [jax.linear_transpose(to_kernel[i], operands[i]) for i in _differentiable(setting)]
    return [convert(grad)[0] for convert, grad in zip(from_kernel, grads, strict=True)]


KERNELS: dict[str, Any] = {"XLA": _blockwise, "cuDNN": _cudnn, "splash attention": _splash}
_NAMES = {"cuda": "cuDNN", "gpu": "cuDNN", "tpu": "splash attention"}  # by platform


def _or_blockwise(fn: Callable[..., list[Any]], name: str, *operands: Any, setting: AttentionSetting) -> list[Any]:
    """Computes `_forward` or `_backward` by a platform's kernel, or in plain XLA if the kernel does not support it."""
    reason = _unsupported_reason(name, setting, operands)
    if reason is None:
        try:
            return fn(KERNELS[name], *operands, setting=setting)
        except Unsupported as error:
            reason = str(error)
    log_fallback(f"attention is computed in blocks of queries, not by {name}", reason)
    return fn(_blockwise, *operands, setting=setting)


def _unsupported_reason(name: str, setting: AttentionSetting, operands: Sequence[Any]) -> str | None:
    kernel, operands = KERNELS[name], operands[: 3 + len(setting.names)]
    pairs = zip(_to_kernel(kernel, setting, operands), operands, strict=True)
    q, k, v, extras, _ = _split_operands(setting, [jax.eval_shape(convert, x) for convert, x in pairs])
    return kernel.unsupported_reason(_resolve(kernel, setting, operands), q, k, v, extras)


def kernel_of(platform: str, setting: AttentionSetting, operands: Sequence[Any]) -> str:
    """Describes how a platform computes attention of operands of these shapes, in the order of the primitive's."""
    name = _NAMES.get(platform, "XLA")
    reason = None if name == "XLA" else _unsupported_reason(name, setting, operands)
    how = _sequence.describe(setting, _resolve(KERNELS["XLA" if reason else name], setting, operands))
    if name == "XLA":
        return f"in blocks of queries{how}"
    return f"by {name}{how}" if reason is None else f"in blocks of queries{how}, not by {name}: {reason}"


def _register(primitive: Any, fn: Callable[..., list[Any]]) -> None:
    """Registers the lowering of the attention or its gradient for each platform. The compiler cannot partition splash
    attention: if several devices share arrays and the split is unknown, TPUs compute in blocks too."""
    in_blocks, by_cudnn, by_splash = (
        mlir.lower_fun(promoting(each), multiple_results=True)
        for each in (
            partial(fn, _blockwise),
            partial(_or_blockwise, fn, "cuDNN"),
            partial(_or_blockwise, fn, "splash attention"),
        )
    )

    def on_tpu(ctx: Any, *operands: Any, setting: AttentionSetting) -> Any:
        is_shared = getattr(ctx.module_context.axis_context, "num_devices", 1) != 1 and setting.split is None
        return (in_blocks if is_shared else by_splash)(ctx, *operands, setting=setting)

    mlir.register_lowering(primitive, in_blocks)
    mlir.register_lowering(primitive, by_cudnn, platform="cuda")
    mlir.register_lowering(primitive, on_tpu, platform="tpu")


_register(attention_p, _forward)
_register(gradient_p, _backward)
_cudnn.register_lowered(attention_p, gradient_p)
mlir.register_lowering(_tangent_p, mlir.lower_fun(promoting(_dense_tangent), multiple_results=True))
