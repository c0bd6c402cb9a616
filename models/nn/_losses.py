"""Cross-entropy for a vocabulary that is sharded, or too large to compute all logits at once.

Dims: seq = tokens of one example, d = width, vocab; dims = any leading dims, such as a batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Int, Shaped

from redeqx import Loss
from redeqx._rounding import at_least_float32
from redeqx.errors import wrong
from redeqx.transforms import GRADIENT, HEAD_INPUT, by_vocabulary, sum_gradient, with_own_rows


def cross_entropy(
    x: Float[Array, "*dims vocab"] | Float[Array, "*dims d"],
    labels: Shaped[Array, "..."],  # integers; other dtypes raise an error below
    *,
    head: Callable[[Float[Array, "*chunk d"]], Float[Array, "*chunk vocab"]] | None = None,
    chunk_size: int | None = None,
    ignore_index: int = -100,
    z_loss: float = 0.0,
) -> Loss:
    """Computes the cross-entropy of logits and labels: the sum over labels that are not ignored, and their number as weight.

    It is computed in float32 for logits of any dtype. Logits that are sharded over the vocabulary remain sharded: each
    device reduces its part, and the devices exchange a few numbers per token.

    ```python
    def loss_fn(model, batch, key):
        hidden = jax.vmap(model.hidden)(batch["ids"])  # [batch, seq, d]
        return cross_entropy(hidden, batch["labels"], head=model.logits, chunk_size=256)
    ```

    **Arguments:**

    - `x`: the logits, or the input of `head`.
    - `labels`: the correct token at each position, integers of any width. Labels equal to `ignore_index` are ignored. Any
        other label outside the vocabulary makes the loss NaN.
    - `head`: maps hidden states to logits. When the loss is differentiated, the gradient is computed with the value, chunk
        by chunk, so that logits are neither stored for the backward pass nor recomputed.
    - `chunk_size`: the number of tokens, along the last dim of `labels`, whose logits are computed at once; None for all. It
        requires `head`.
    - `z_loss`: the coefficient of the squared log of the softmax's denominator, which is added to each token's loss to keep
        logits from drifting (1e-4 in arXiv:2204.02311). Its mean is also returned as the metric `z_loss`, which has no
        gradient.

    Raises ValueError if the shapes do not match, for a `chunk_size` below 1, and for a `chunk_size` without `head`. Raises
    TypeError for labels that are not integers.
    """
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        rule = "integers"
        raise wrong("labels", rule, labels.dtype, "Cast them with `labels.astype(jnp.int32)` if that is right.", TypeError)
    # 8-bit labels cannot represent `ignore_index` or a larger vocabulary's size: in uint8, -100 would be the label 156.
    labels = labels.astype(jnp.promote_types(labels.dtype, jnp.int32))
    if x.shape[:-1] != labels.shape:
        rule = f"the shape of `x` without its last dim, {x.shape[:-1]}"
        raise wrong("labels", rule, labels.shape, "Cut both to the same length: the label of a token is the next token.")
    if not labels.shape:  # one token
        x, labels = x[None], labels[None]
    if chunk_size is not None and chunk_size < 1:
        raise wrong("chunk_size", "at least 1", chunk_size, "Pass None for all at once.")
    if chunk_size is not None and head is None:
        raise wrong("head", "a function with `chunk_size`", "None", "Pass hidden states, and `head=model.logits`.")

    weights: list[Array] = []
    apply = lambda x: x  # noqa: E731
    n_at_once = labels.shape[-1] if chunk_size is None else min(chunk_size, labels.shape[-1])
    if head is not None:
        # A lambda, because a method of a model with traced arrays cannot be hashed.
        apply, weights = jax.closure_convert(lambda x: head(x), x[..., :n_at_once, :])
        x = checkpoint_name(x, HEAD_INPUT)
    total, weight, penalty = _sums(_Chunks(apply, n_at_once, ignore_index, z_loss), x, labels, *weights)
    return Loss(total, weight, {"z_loss": (penalty, weight)} if z_loss else {})


@dataclass(frozen=True)
class _Chunks:
    """Computes the sums of `cross_entropy` over all tokens, chunk by chunk, and their gradients.

    **Arguments:**

    - `head`: maps hidden states and weights to logits.
    - `size`: the number of tokens in a chunk.
    """

    head: Callable[..., Array]
    size: int
    ignore_index: int
    z_loss: float

    def sums(self, x: Array, labels: Array, *weights: Array) -> tuple[Array, Array, Array]:
        """Returns the total loss, the number of labels that are not ignored, and the summed z-loss."""

        def chunk_fn(x: Array, labels: Array) -> tuple[Any, None]:
            return _loss_and_gradient(self.head(x, *weights), labels, self.ignore_index, self.z_loss)[:3], None

        return self._sum_over_chunks(chunk_fn, x, labels)[0]

    def sums_and_gradients(
        self, x: Array, labels: Array, *weights: Array, wanted: Sequence[bool]
    ) -> tuple[tuple[Array, Array, Array], list[Array | None]]:
        """Returns the sums, and the gradients of the total with respect to `x` and each weight; None if not wanted.

        Gradients of weights are summed over the chunks in float32 or wider.
        """

        def chunk_fn(x: Array, labels: Array) -> tuple[Any, Array | None]:
            inputs = [x, *weights]

            def logits_fn(*selected: Array) -> Array:
                given = iter(selected)
                return self.head(*(next(given) if is_wanted else x for x, is_wanted in zip(inputs, wanted, strict=True)))

            logits, vjp = jax.vjp(logits_fn, *(x for x, is_wanted in zip(inputs, wanted, strict=True) if is_wanted))
            *sums, gradient = _loss_and_gradient(by_vocabulary(logits), labels, self.ignore_index, self.z_loss)
            gradients = list(vjp(gradient.astype(logits.dtype)))
            x_gradient = with_own_rows(gradients.pop(0)) if wanted[0] else None
            weight_gradients = [g.astype(at_least_float32(g.dtype)) for g in gradients]
            return (tuple(sums), weight_gradients), x_gradient

        (sums, weight_gradients), x_gradient = self._sum_over_chunks(chunk_fn, x, labels)
        gradients = iter(weight_gradients)
        of_weights = zip(weights, wanted[1:], strict=True)
        return sums, [x_gradient, *(next(gradients).astype(w.dtype) if is_wanted else None for w, is_wanted in of_weights)]

    def _sum_over_chunks(self, chunk_fn: Callable[..., Any], x: Array, labels: Array) -> tuple[Any, Array | None]:
        """Calls `chunk_fn(x, labels)` on each chunk. Returns the sum of its first outputs, and its second outputs joined."""
        seq = labels.shape[-1]
        if self.size >= seq:
            return chunk_fn(x, labels)
        if n_padded := -seq % self.size:
            rows = [(0, 0)] * (labels.ndim - 1)
            labels = jnp.pad(labels, [*rows, (0, n_padded)], constant_values=self.ignore_index)
            # Real tokens: a head may have no derivative at 0. (`jnp.pad` with mode "edge" reads the first row of all dims.)
            x = jnp.concatenate([x, jnp.repeat(x[..., -1:, :], n_padded, axis=-2)], axis=-2)
        # Each chunk takes every n-th token: where devices have parts of the sequence, each has its part of every chunk.
        chunks = (
            rearrange(x, "... (chunk n) d -> n ... chunk d", chunk=self.size),
            rearrange(labels, "... (chunk n) -> n ... chunk", chunk=self.size),
        )

        def add(sums: Any, chunk: tuple[Array, Array]) -> tuple[Any, Array | None]:
            added, x_gradient = chunk_fn(*chunk)
            return jax.tree.map(jnp.add, sums, added), x_gradient

        first = jax.tree.map(lambda chunk: chunk[0], chunks)
        shapes = jax.eval_shape(lambda *first: chunk_fn(*first)[0], *first)
        zeros = jax.tree.map(lambda sum: jnp.zeros(sum.shape, sum.dtype), shapes)
        sums, x_gradient = jax.lax.scan(add, zeros, chunks)
        return sums, None if x_gradient is None else rearrange(x_gradient, "n ... chunk d -> ... (chunk n) d")[..., :seq, :]


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _sums(chunks: _Chunks, x: Array, labels: Array, *weights: Array) -> tuple[Array, Array, Array]:
    """Returns `chunks.sums`. When differentiated, it computes the gradients with the sums, from the same logits, so that
    logits are neither stored for the backward pass nor recomputed."""
    return chunks.sums(x, labels, *weights)


@partial(_sums.defjvp, symbolic_zeros=True)
def _sums_jvp(chunks: _Chunks, primals: Sequence[Array], tangents: Sequence[Any]) -> tuple[Any, Any]:
    x, labels, *weights = primals
    by_inputs = [tangents[0], *tangents[2:]]
    wanted = [not isinstance(tangent, SymbolicZero) for tangent in by_inputs]
    sums, gradients = chunks.sums_and_gradients(x, labels, *weights, wanted=wanted)
    total = jnp.zeros_like(sums[0])
    for i, (gradient, tangent) in enumerate(zip(gradients, by_inputs, strict=True)):
        if gradient is not None:
            gradient = checkpoint_name(sum_gradient(gradient, i + (i > 0)), GRADIENT)  # the labels are operand 1
            total += jnp.sum(gradient.astype(total.dtype) * tangent.astype(total.dtype))
    return sums, (total, jnp.zeros_like(sums[1]), jnp.zeros_like(sums[2]))


def _loss_and_gradient(
    logits: Float[Array, "*dims vocab"], labels: Int[Array, "*dims"], ignore_index: int, z_loss: float
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""], Float[Array, "*dims vocab"]]:
    """Returns the summed loss, the number of labels that are not ignored, the summed z-loss, and the gradient of the loss
    with respect to the logits."""
    logits = logits.astype(at_least_float32(logits.dtype))
    vocab = logits.shape[-1]
    log_sum = jax.nn.logsumexp(logits, axis=-1)
    # Compare and sum instead of a lookup: a lookup along a sharded dim, and the scatter that is its gradient, may make XLA
    # gather the logits. The barrier keeps XLA from hoisting ids and zeros of the logits' full shape out of the chunk loop.
    given = (jnp.arange(vocab, dtype=labels.dtype), jnp.zeros((), logits.dtype), labels)
    ids, zero, labels = jax.lax.optimization_barrier(given)
    is_counted = labels != ignore_index
    is_known = (labels >= 0) & (labels < vocab)
    is_label = ids == labels[..., None]
    picked = jnp.sum(jnp.where(is_label, logits, zero), -1)
    losses = jnp.where(is_known, log_sum - picked, jnp.nan)
    # The square of a logit above 1.8e19 is infinite, and 0 times infinity is NaN.
    penalties = z_loss * log_sum**2 if z_loss else jnp.zeros_like(log_sum)
    total = jnp.sum(jnp.where(is_counted, losses + penalties, 0.0))
    factor = 1.0 + 2.0 * z_loss * log_sum if z_loss else jnp.ones_like(log_sum)
    gradient = jnp.exp(logits - log_sum[..., None]) * factor[..., None] - is_label
    gradient = jnp.where((is_counted & is_known)[..., None], gradient, zero)
    return total, is_counted.sum(dtype=total.dtype), jnp.sum(jnp.where(is_counted, penalties, 0.0)), gradient
