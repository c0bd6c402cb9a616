"""Attention as a primitive of JAX: one equation in a trace, computed by the kernel of the platform that is compiled for.

Three primitives: the attention, its derivative in a direction (for forward mode, and to be transposed), and its gradient.
Second derivatives, which no kernel has, are those of the plain formula. Leading dims are any number; an optional operand may
have 1 in their place, so that `jax.vmap` repeats nothing.

Source: "Autodidax" and "How JAX primitives work" in JAX's documentation.
"""

import logging
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
from jax.sharding import PartitionSpec as P

from . import _blockwise, _cudnn, _splash
from ._setting import Refused, Setting

attention_p = jex.Primitive("attention")
_tangent_p = jex.Primitive("attention_tangent")
gradient_p = jex.Primitive("attention_gradient")

# Of operands that are differentiated; the others are integers and booleans.
_DIFFERENTIABLE = ("bias",)


def _bind(primitive: Any) -> Callable[..., Any]:
    """A primitive outside of any transformation: compiled, as each of JAX's own is."""

    @cache
    def compiled(setting: Setting) -> Callable[..., Any]:
        return jax.jit(partial(primitive.bind, setting=setting))

    return lambda *operands, setting: compiled(setting)(*operands)


for _primitive in (attention_p, _tangent_p, gradient_p):
    _primitive.multiple_results = True
    _primitive.def_impl(_bind(_primitive))


def _with_names(setting: Setting, operands: Sequence[Any]) -> tuple[Any, Any, Any, dict[str, Any], Sequence[Any]]:
    """Queries, keys, values, the optional operands by name, and what follows them."""
    q, k, v, *rest = operands
    n = len(setting.names)
    return q, k, v, dict(zip(setting.names, rest[:n], strict=True)), rest[n:]


def _n_differentiable(setting: Setting) -> int:
    return 3 + sum(name in _DIFFERENTIABLE for name in setting.names)


def _places(setting: Setting) -> list[int]:
    """The places of the operands that are differentiated."""
    return [0, 1, 2, *(3 + i for i, name in enumerate(setting.names) if name in _DIFFERENTIABLE)]


# --- shapes -----------------------------------------------------------------------------------------------------------


def _typed(shape: Sequence[int], dtype: Any, like: Any) -> Any:
    """The type of an array that varies over the axes of a mesh as another does, inside of `jax.shard_map`."""
    sharding = like.sharding.update(spec=P(*[None] * len(shape)))
    return like.update(shape=tuple(shape), dtype=jnp.dtype(dtype), weak_type=False, sharding=sharding)


@attention_p.def_abstract_eval
def _attention_shape(q: Any, k: Any, v: Any, *rest: Any, setting: Setting) -> list[Any]:
    *batch, n_queries, n_heads, _ = q.shape
    shapes = (*batch, n_queries, n_heads, v.shape[-1]), (*batch, n_heads, n_queries)
    return [_typed(shape, dtype, q) for shape, dtype in zip(shapes, (q.dtype, jnp.float32), strict=True)]


@_tangent_p.def_abstract_eval
def _tangent_shape(q: Any, k: Any, v: Any, *rest: Any, setting: Setting) -> list[Any]:
    return [_typed((*q.shape[:-1], v.shape[-1]), q.dtype, q)]


@gradient_p.def_abstract_eval
def _gradient_shape(*operands: Any, setting: Setting) -> list[Any]:
    return [_typed(operands[i].shape, operands[i].dtype, operands[0]) for i in _places(setting)]


# --- the plain formula, for second derivatives ------------------------------------------------------------------------


def _whole(setting: Setting, *operands: Any) -> list[Any]:
    """The outputs in a formula that JAX differentiates, all queries at once."""
    all_at_once = SimpleNamespace(forward=partial(_blockwise.forward, most=operands[0].shape[-3]))
    return _forward(all_at_once, *operands, setting=setting)


def formula(eqn: Any) -> Any:
    """The attention of an equation as a closed jaxpr of products and a softmax, for what looks into it."""
    return _formula(eqn.params["setting"], tuple(var.aval for var in eqn.invars))


@cache  # equal layers share one trace, and so do the trials of a plan
def _formula(setting: Setting, avals: tuple[Any, ...]) -> Any:
    return jax.make_jaxpr(partial(_whole, setting))(*avals)


def _plain(setting: Setting, *operands: Any) -> Any:
    return _whole(setting, *operands)[0]


def _of_places(setting: Setting, operands: Sequence[Any]) -> Callable[..., Any]:
    """The plain formula as a function of those operands that are differentiated."""

    def fn(*given: Any) -> Any:
        values = list(operands)
        for place, value in zip(_places(setting), given, strict=True):
            values[place] = value
        return _plain(setting, *values)

    return fn


def _tangent(*operands: Any, setting: Setting) -> list[Any]:
    n, n_tangents = 3 + len(setting.names), _n_differentiable(setting)
    primals, tangents = operands[:n], operands[len(operands) - n_tangents :]
    fn = _of_places(setting, primals)
    return [jax.jvp(fn, [primals[i] for i in _places(setting)], list(tangents))[1]]


def _plain_gradient(*operands: Any, setting: Setting) -> list[Any]:
    primals, g = operands[: 3 + len(setting.names)], operands[-1]
    return list(jax.vjp(_of_places(setting, primals), *(primals[i] for i in _places(setting)))[1](g))


# --- derivatives ------------------------------------------------------------------------------------------------------


def _filled(primal: Any, tangent: Any) -> Any:
    return jnp.zeros_like(primal) if type(tangent) is ad.Zero else tangent


def _zero(value: Any) -> Any:
    return ad.Zero(jax.typeof(value).to_tangent_aval())


def _attention_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, setting: Setting) -> Any:
    out, log_sum = attention_p.bind(*primals, setting=setting)
    given = [_filled(primals[i], tangents[i]) for i in _places(setting)]
    (tangent,) = _tangent_p.bind(*primals, out, log_sum, *given, setting=setting)
    return [out, log_sum], [tangent, _zero(log_sum)]  # nothing outside reads the latter


def _tangent_transpose(cotangents: Sequence[Any], *operands: Any, setting: Setting) -> list[Any]:
    (g,) = cotangents
    n_tangents = _n_differentiable(setting)
    primals, given = operands[: len(operands) - n_tangents], operands[len(operands) - n_tangents :]
    if type(g) is ad.Zero:
        return [None] * len(operands)
    grads = gradient_p.bind(*primals, g, setting=setting)
    wanted = [grad if ad.is_undefined_primal(x) else None for grad, x in zip(grads, given, strict=True)]
    return [*[None] * len(primals), *wanted]


def _jvp_of(plain: Callable[..., list[Any]], primitive: Any) -> Callable[..., Any]:
    """The derivative of what a primitive computes, by the plain formula. That computes `out` and `log_sum` again."""

    def jvp(primals: Sequence[Any], tangents: Sequence[Any], *, setting: Setting) -> Any:
        outs = primitive.bind(*primals, setting=setting)
        moves = [i for i, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]
        n = 3 + len(setting.names)
        moves = [i for i in moves if i not in (n, n + 1) and jnp.issubdtype(primals[i].dtype, jnp.inexact)]

        def fn(*given: Any) -> list[Any]:
            values = list(primals)
            for place, value in zip(moves, given, strict=True):
                values[place] = value
            return plain(*values, setting=setting)

        if not moves:
            return outs, [_zero(out) for out in outs]
        return outs, list(jax.jvp(fn, [primals[i] for i in moves], [tangents[i] for i in moves])[1])

    return jvp


ad.primitive_jvps[attention_p] = _attention_jvp
ad.primitive_jvps[_tangent_p] = _jvp_of(_tangent, _tangent_p)
ad.primitive_jvps[gradient_p] = _jvp_of(_plain_gradient, gradient_p)
ad.primitive_transposes[_tangent_p] = _tangent_transpose


# --- vmap -------------------------------------------------------------------------------------------------------------


def _batcher(primitive: Any, operands: Sequence[Any], dims: Sequence[int | None], *, setting: Setting) -> Any:
    """One more leading dim. Operands that have none are repeated; optional ones get one of size 1 instead, where they have
    no gradient of their own."""
    size = next(x.shape[dim] for x, dim in zip(operands, dims, strict=True) if dim is not None)
    single = set(range(3, 3 + len(setting.names)))
    if primitive is not attention_p:
        single -= set(_places(setting))
    moved = []
    for i, (x, dim) in enumerate(zip(operands, dims, strict=True)):
        if dim is not None:
            moved.append(jnp.moveaxis(x, dim, 0))
        else:
            moved.append(x[None] if i in single else jnp.broadcast_to(x, (size, *x.shape)))
    outs = primitive.bind(*moved, setting=setting)
    return outs, [0] * len(outs)


for _primitive in (attention_p, _tangent_p, gradient_p):
    batching.primitive_batchers[_primitive] = partial(_batcher, _primitive)


# --- by platform ------------------------------------------------------------------------------------------------------


def _flat(x: Any, batch: Sequence[int]) -> Any:
    """An array with its leading dims, some of which may be 1, as one: `B`, or 1 where all of them are."""
    n, lead = len(batch), x.shape[: len(batch)]
    if math.prod(lead) == 1:
        return x.reshape(1, *x.shape[n:])
    return jnp.broadcast_to(x, (*batch, *x.shape[n:])).reshape(math.prod(batch), *x.shape[n:])


def _for_kernel(kernel: Any, setting: Setting, operands: Sequence[Any]) -> list[Callable[[Any], Any]]:
    """What turns each operand into that of a kernel: leading dims become one, and keys and values of fewer heads than there
    are devices are repeated for a kernel that runs on each."""
    q, k = operands[:2]
    flat = partial(_flat, batch=q.shape[:-3])
    n = 1 if kernel is _blockwise else setting.n_repeats(q.shape[-2], k.shape[-2])
    repeated = (lambda x: einops.repeat(flat(x), "b s g h -> b s (g n) h", n=n)) if n > 1 else flat
    return [repeated if i in (1, 2) else flat for i in range(len(operands))]


def _forward(kernel: Any, *operands: Any, setting: Setting) -> list[Any]:
    batch = operands[0].shape[:-3]
    given = [of(x) for of, x in zip(_for_kernel(kernel, setting, operands), operands, strict=True)]
    q, k, v, extras, _ = _with_names(setting, given)
    return [x.reshape(*batch, *x.shape[1:]) for x in kernel.forward(setting, q, k, v, extras)]


def _backward(kernel: Any, *operands: Any, setting: Setting) -> list[Any]:
    to_kernel = _for_kernel(kernel, setting, operands)
    given = [of(x) for of, x in zip(to_kernel, operands, strict=True)]
    q, k, v, extras, (out, log_sum, g) = _with_names(setting, given)
    grads = kernel.backward(setting, q, k, v, extras, out, log_sum, g)
    back = [jax.linear_transpose(to_kernel[i], operands[i]) for i in _places(setting)]
    return [of(grad)[0] for of, grad in zip(back, grads, strict=True)]


def _either(fn: Callable[..., list[Any]], kernel: Any, *operands: Any, setting: Setting) -> list[Any]:
    """`_forward` or `_backward` by a platform's kernel, or where that refuses in plain XLA."""
    try:
        return fn(kernel, *operands, setting=setting)
    except Refused as error:
        _tell(str(error))
        return fn(_blockwise, *operands, setting=setting)


@cache
def _tell(reason: str) -> None:
    """Log, once for each reason, that a kernel is not used."""
    logging.getLogger("redeqx").info("attention without its platform's kernel: %s", reason)


_KERNELS = {"cuda": (_cudnn, "cuDNN"), "gpu": (_cudnn, "cuDNN"), "tpu": (_splash, "splash attention")}


def _shapes_for(kernel: Any, setting: Setting, q: Any, k: Any, v: Any, extras: dict[str, Any]) -> tuple[Any, ...]:
    """The shapes that a kernel is given."""
    operands = [q, k, v, *extras.values()]
    pairs = zip(_for_kernel(kernel, setting, operands), operands, strict=True)
    q, k, v, *rest = (jax.eval_shape(of, x) for of, x in pairs)
    return q, k, v, dict(zip(extras, rest, strict=True))


def kernel_of(platform: str, setting: Setting, q: Any, k: Any, v: Any, extras: dict[str, Any]) -> str:
    """How attention of operands of these shapes is computed on a platform, in words."""
    if platform not in _KERNELS:
        return "in blocks of queries"
    kernel, name = _KERNELS[platform]
    reason = kernel.why_refused(setting, *_shapes_for(kernel, setting, q, k, v, extras))
    return f"by {name}" if reason is None else f"in blocks of queries, as {name} refuses: {reason}"


def dense_bytes(platform: str, setting: Setting, q: Any, k: Any, v: Any, extras: dict[str, Any]) -> int:
    """The bytes of the array of a number for each query and key that a platform's kernel is given; 0 for none."""
    kernel, _ = _KERNELS.get(platform, (None, ""))
    return _cudnn.dense_bytes(setting, *_shapes_for(kernel, setting, q, k, v, extras)) if kernel is _cudnn else 0


def _lowered(fn: Callable[..., list[Any]]) -> Callable[..., Any]:
    return mlir.lower_fun(fn, multiple_results=True)


def _splash_lowering(fn: Callable[..., list[Any]]) -> Callable[..., Any]:
    """By the kernel of TPUs, but where several devices share an array and nobody says how: it cannot be partitioned."""
    by_kernel, in_blocks = _lowered(partial(_either, fn, _splash)), _lowered(partial(fn, _blockwise))

    def lower(ctx: Any, *operands: Any, setting: Setting) -> Any:
        context = ctx.module_context.axis_context
        is_shared = getattr(context, "num_devices", 1) != 1 and setting.split is None
        return (in_blocks if is_shared else by_kernel)(ctx, *operands, setting=setting)

    return lower


for _primitive, _fn in ((attention_p, _forward), (gradient_p, _backward)):
    mlir.register_lowering(_primitive, _lowered(partial(_fn, _blockwise)))
    mlir.register_lowering(_primitive, _lowered(partial(_either, _fn, _cudnn)), platform="cuda")
    mlir.register_lowering(_primitive, _splash_lowering(_fn), platform="tpu")
_cudnn.lowers_for(attention_p, gradient_p)
mlir.register_lowering(_tangent_p, _lowered(_tangent))
