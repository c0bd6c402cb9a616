"""Quantised weights: codes of 4 or 8 bits, and a scale for each block of them, that become numbers where they are used.

Owns the codes (`quantise`), the array-like node of a model that holds them (`Quantised`) and the primitive that reads them
(`dequantise`). Plans split both leaves alike (`partition`), and a rule of `transforms` keeps the numbers from being stored.

Source: blocks with the 4-bit numbers NF4, QLoRA (arXiv:2305.14314), whose appendix E has the table. Two NF4 codes are one
byte, the first in the upper four bits. 8-bit codes are whole numbers from -127 to 127, as in LLM.int8() (arXiv:2208.07339).
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Float, Int8, UInt8

from ._promotion import promoting
from ._tree import PyTree, named_leaves

KINDS = ("nf4", "int8")
NF4 = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    np.float32,
)
_N_PER_CODE = {"nf4": 2, "int8": 1}  # numbers in one byte


class Quantised(eqx.Module):
    """A weight as codes and scales, in the place of an array of a model.

    It is used as the array that it stands for: `x @ weight.T`, `jnp.einsum("oi,i->o", weight, x)`, `weight[i]`. Each use
    reads the codes anew. It is a constant of training: no gradient flows into it. Functions of `jax.lax` do not accept it;
    there write `jnp.asarray(weight)`.

    **Arguments:**

    - `codes`: `[..., in / 2]` of two NF4 codes a byte, or `[..., in]` of 8-bit codes.
    - `scales`: `[..., blocks]`, float32: the factor of each block of `in / blocks` numbers along the last dim.
    - `kind`: `"nf4"` or `"int8"`.
    - `dtype`: of the numbers.
    """

    codes: UInt8[Array, "*dims bytes"] | Int8[Array, "*dims in"]
    scales: Float[Array, "*dims blocks"]
    kind: str = eqx.field(static=True)
    dtype: Any = eqx.field(static=True)

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.codes.shape[:-1], self.codes.shape[-1] * _N_PER_CODE[self.kind])

    @property
    def ndim(self) -> int:
        return len(self.codes.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def __jax_array__(self) -> Array:
        return dequantise(self)

    def __getitem__(self, index: Any) -> Array:
        """Reads only the codes of the entries, if the index does not reach the last dim."""
        parts = index if isinstance(index, tuple) else (index,)
        is_simple = all(isinstance(part, int | slice) or eqx.is_array(part) for part in parts)
        n_dims = sum(part.ndim if eqx.is_array(part) and part.dtype == bool else 1 for part in parts)
        if is_simple and n_dims < self.ndim:
            return dequantise(Quantised(self.codes[index], self.scales[index], self.kind, self.dtype))
        return dequantise(self)[index]

    def __len__(self) -> int:
        return self.shape[0]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(jax.Array, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(dequantise(self), name)


def _of_array(name: str) -> Callable[..., Any]:
    def operator(self: Quantised, *args: Any) -> Any:
        if name in ("__eq__", "__ne__") and not isinstance(self.codes, jax.Array | np.ndarray):
            return getattr(super(Quantised, self), name)(*args)  # of shapes, specs or masks: these are not numbers
        return getattr(dequantise(self), name)(*args)

    operator.__name__ = name
    return operator


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow", "matmul"):
    for _side in ("", "r"):
        setattr(Quantised, f"__{_side}{_name}__", _of_array(f"__{_side}{_name}__"))
for _name in ("pos", "neg", "abs", "round", "iter", "contains", "eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Quantised, f"__{_name}__", _of_array(f"__{_name}__"))


def is_quantised(node: Any) -> bool:
    return isinstance(node, Quantised)


def block_size_of(n: int, block_size: int | None) -> int:
    """Returns the size of the blocks of a dim of `n` numbers: the largest divisor that `n` and `block_size` have in common,
    or `n` if `block_size` is None."""
    return n if block_size is None else math.gcd(n, block_size)


def quantise(weight: Float[Array, "*dims in"], kind: str, block_size: int | None) -> Quantised:
    """Returns the codes and scales of a weight, or their shapes for a shape. A block is scaled by its largest magnitude."""
    encode = partial(_encode, kind=kind, size=block_size_of(weight.shape[-1], block_size))
    if isinstance(weight, jax.ShapeDtypeStruct):
        codes, scales = jax.eval_shape(encode, weight)
    else:
        codes, scales = jax.jit(encode)(weight)
    return Quantised(codes, scales, kind, jnp.dtype(weight.dtype))


def _encode(weight: Any, kind: str, size: int) -> tuple[Any, Any]:
    if weight.ndim > 2:  # one matrix of a stack after the other, which needs memory for the float32 numbers of only one
        return jax.lax.map(partial(_encode, kind=kind, size=size), weight)
    blocks = weight.astype(jnp.float32).reshape(*weight.shape[:-1], -1, size)
    scales = jnp.max(jnp.abs(blocks), axis=-1) / (127 if kind == "int8" else 1)
    scaled = blocks / jnp.where(scales == 0, 1, scales)[..., None]
    if kind == "int8":
        return jnp.round(scaled).astype(jnp.int8).reshape(weight.shape), scales
    codes = jnp.zeros(blocks.shape, jnp.uint8)
    for middle in (NF4[1:] + NF4[:-1]) / 2:
        codes += scaled > middle
    pairs = codes.reshape(*weight.shape[:-1], -1, 2)
    return pairs[..., 0] << 4 | pairs[..., 1], scales


# --- the primitive ----------------------------------------------------------------------------------------------------

dequantise_p = jex.Primitive("dequantise")
dequantise_p.def_impl(jax.jit(dequantise_p.bind, static_argnames=("kind", "dtype")))


def dequantise(weight: Quantised) -> Array:
    """Returns the numbers of a quantised weight: of each code its number, times its block's scale, rounded to `dtype`."""
    return dequantise_p.bind(weight.codes, weight.scales, kind=weight.kind, dtype=weight.dtype)


def _formula(codes: Any, scales: Any, *, kind: str, dtype: Any) -> Any:
    if kind == "nf4":
        codes = jnp.stack([codes >> 4, codes & 15], axis=-1)
        numbers = _nf4(codes).reshape(*codes.shape[:-2], -1)
    else:
        numbers = codes.astype(jnp.float32)
    blocks = numbers.reshape(*scales.shape, numbers.shape[-1] // scales.shape[-1]) * scales[..., None]
    return blocks.reshape(numbers.shape).astype(dtype)


def _nf4(codes: Any) -> Any:
    """Returns the numbers of NF4 codes, by a tree of selections: compilers fuse these into the use, unlike lookups."""
    numbers: list[Any] = list(NF4)
    for bit in range(4):
        is_set = (codes >> bit & 1).astype(bool)
        numbers = [jnp.where(is_set, high, low) for low, high in zip(numbers[::2], numbers[1::2], strict=True)]
    return numbers[0]


@dequantise_p.def_abstract_eval
def _shape(codes: Any, scales: Any, *, kind: str, dtype: Any) -> Any:
    del scales
    return codes.update(shape=(*codes.shape[:-1], codes.shape[-1] * _N_PER_CODE[kind]), dtype=dtype, weak_type=False)


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    del tangents  # a constant
    out = dequantise_p.bind(*primals, **params)
    return out, ad.Zero(jax.typeof(out).to_tangent_aval())


def _batch(operands: Any, dims: Any, **params: Any) -> Any:
    size = next(x.shape[dim] for x, dim in zip(operands, dims, strict=True) if dim is not None)
    moved = [
        jnp.broadcast_to(x, (size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)
        for x, dim in zip(operands, dims, strict=True)
    ]
    return dequantise_p.bind(*moved, **params), 0


ad.primitive_jvps[dequantise_p] = _jvp
batching.primitive_batchers[dequantise_p] = _batch
mlir.register_lowering(dequantise_p, mlir.lower_fun(promoting(_formula), multiple_results=False))


# --- models with quantised weights ------------------------------------------------------------------------------------


def map_quantised(fn: Callable[[Quantised], Any], tree: PyTree) -> PyTree:
    """Returns a model with each quantised weight replaced."""
    return jax.tree.map(lambda node: fn(node) if is_quantised(node) else node, tree, is_leaf=is_quantised)


def quantised_leaves(tree: PyTree) -> dict[str, Quantised]:
    """Returns the quantised weights of a model by name. Their leaves have the names `{name}.codes` and `{name}.scales`."""
    return {name: node for name, node in named_leaves(tree, is_leaf=is_quantised).items() if is_quantised(node)}
