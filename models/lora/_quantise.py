"""Quantised bases: replaces the weights of linear layers by codes of 4 or 8 bits, for adapters to be trained on.

The codes and their primitive are in `redeqx._quantised`, and adapters in `_adapters`.

Source: QLoRA (arXiv:2305.14314).
"""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax.numpy as jnp

from redeqx._quantised import KINDS, block_size_of, dequantise as as_array, is_quantised, map_quantised, quantise as encode
from redeqx._tree import ModelT, PyTree, is_array_like, map_named, named_leaves
from redeqx.errors import check_choice, check_count, filter_traceback, wrong

from ._adapters import globs_of, is_linear, selected

_MIN_BLOCK = 8  # numbers of a block, which has 4 bytes of scale
_NF4_BLOCK = 64  # that of QLoRA


@filter_traceback
def quantise(
    model: ModelT,
    *,
    where: str | Sequence[str] | Callable[[str, Any], bool],
    kind: str = "nf4",
    block_size: int | None = None,
) -> ModelT:
    """Replaces weights by codes of 4 or 8 bits and scales, which become numbers where the model uses them.

    A weight of `[..., out, in]`, or of any other order, is divided into blocks along its last dim. Each block is scaled by
    its largest magnitude. The model computes with the dequantised numbers, in the weight's dtype. They are not trained.

    **Arguments:**

    - `model`: any PyTree with `eqx.nn.Linear` layers, with or without adapters, or with matrices of its own. They may be
        stacked, sharded, or shapes (`jax.ShapeDtypeStruct`).
    - `where`: one or more globs over the paths of linear layers (`"*.attention.query"`), also of stacked ones and those of
        experts; each must match one. Other floating arrays with at least two dims, in no layer of `eqx.nn`, are only
        selected by their whole paths: they may be stacked vectors. Or a function of the path and the layer or array that
        returns True for those to quantise.
    - `kind`: `"nf4"`, two codes a byte and 0.5 bits of scale a number; or `"int8"`.
    - `block_size`: numbers of a block. The default is 64 for `"nf4"`, and a whole row for `"int8"`. If a row has no whole
        number of blocks, these are as long as the largest common divisor of both.

    Raises ValueError if nothing is selected, for a weight that is quantised already, and for one whose rows have an odd
    length or a common divisor with `block_size` below 8.
    """
    check_choice(kind, "kind", KINDS)
    check_count(block_size, "block_size", advice="Pass a positive number, or None.", optional=True)
    block_size = _NF4_BLOCK if block_size is None and kind == "nf4" else block_size
    candidates = _candidates(model)
    if not callable(where):
        whole = set(globs_of(where, "where", 'Write `"*.attention.query"`, say'))
        candidates = {path: node for path, node in candidates.items() if is_linear(node) or path in whole}
    picked = selected(candidates, where, "where", "a linear layer or matrix", "linear layers and matrices")

    def quantised(path: str, node: Any) -> Any:
        if path not in picked:
            return node
        weight = node.weight if is_linear(node) else node
        if is_quantised(weight):
            raise wrong(path, "a weight", f"one of {weight.kind}", "Leave it out.")
        n = weight.shape[-1]
        if (size := block_size_of(n, block_size)) < min(_MIN_BLOCK, n) or (kind == "nf4" and n % 2):
            rule = f"rows that divide into blocks of at least {_MIN_BLOCK} numbers"
            raise wrong(path, rule, f"rows of {n} and blocks of {size}", "Leave it out, or pass another `block_size`.")
        codes = encode(weight, kind, block_size)
        return eqx.tree_at(lambda layer: layer.weight, node, codes) if is_linear(node) else codes

    return map_named(quantised, model, is_leaf=lambda node: is_linear(node) or is_quantised(node))


def dequantise(model: ModelT) -> ModelT:
    """Returns the model with arrays in place of quantised weights, as it computes with them. What quantising has rounded off
    stays lost."""
    return map_quantised(as_array, model)


def _candidates(model: PyTree) -> dict[str, Any]:
    """Returns the linear layers and all other matrices by path."""

    def is_whole(node: Any) -> bool:
        return is_quantised(node) or (isinstance(node, eqx.Module) and type(node).__module__.startswith("equinox.nn"))

    def is_matrix(x: Any) -> bool:
        return is_array_like(x) and len(x.shape) >= 2 and jnp.issubdtype(x.dtype, jnp.floating)

    nodes = named_leaves(model, is_leaf=lambda node: is_linear(node) or is_whole(node))
    return {path: node for path, node in nodes.items() if is_linear(node) or is_quantised(node) or is_matrix(node)}
