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
from redeqx.transforms import GRADIENT


def cross_entropy(
    x: Float[Array, "*dims vocab"] | Float[Array, "*dims d"],
    labels: Shaped[Array, "..."],  # of integers; other dtypes raise below
    *,
    head: Callable[[Float[Array, "*chunk d"]], Float[Array, "*chunk vocab"]] | None = None,
    chunk_size: int | None = None,
    ignore_index: int = -100,
    z_loss: float = 0.0,
) -> Loss:
    """The cross-entropy of logits and labels: summed over the labels that count, with their number as the weight.

    It is computed in float32 for logits of any dtype. Logits that are sharded over the vocabulary remain sharded: each
    device reduces its part, and the devices exchange a few numbers for each token.

    ```python
    def loss_fn(model, batch, key):
        hidden = jax.vmap(model.hidden)(batch["ids"])  # [batch, seq, d]
        return cross_entropy(hidden, batch["labels"], head=model.logits, chunk_size=256)
    ```

    **Arguments:**

    - `x`: the logits, or the input of `head`.
    - `labels`: the correct token at each position, integers of any width. Labels equal to `ignore_index` do not count. Any
        other label outside the vocabulary makes the loss NaN.
    - `head`: maps hidden states to logits. Where the loss is differentiated, the gradient is made chunk by chunk with the
        value, so that logits are neither stored for the backward pass nor computed again.
    - `chunk_size`: the number of tokens, along the last dim of `labels`, whose logits are computed at once; None for all. It
        requires `head`.
    - `z_loss`: the coefficient of the squared log of the softmax's denominator, which is added to each token's loss to keep
        logits from drifting (1e-4 in arXiv:2204.02311). Its mean is returned as the metric `z_loss`, without a gradient of
        its own.

    Raises ValueError if the shapes do not match, for a `chunk_size` below 1, and for a `chunk_size` without `head`. Raises
    TypeError for labels that are not integers.
    """
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(
            f"`labels`: expected integers, got {labels.dtype}. Cast them with `labels.astype(jnp.int32)` if that is right."
        )
    # 8-bit labels can hold neither `ignore_index` nor the size of a larger vocabulary: -100 would be the label 156.
    labels = labels.astype(jnp.promote_types(labels.dtype, jnp.int32))
    if x.shape[:-1] != labels.shape:
        raise ValueError(
            f"`labels`: expected the shape of `x` without its last dim, {x.shape[:-1]}, got {labels.shape}. "
            "Cut both alike: the label of a token is the one after it."
        )
    if not labels.shape:  # one token
        x, labels = x[None], labels[None]
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"`chunk_size`: expected at least 1, got {chunk_size}. Pass None for all at once.")
    if chunk_size is not None and head is None:
        raise ValueError(
            "`head`: expected a function with `chunk_size`, got None. Pass hidden states, and `head=model.logits`."
        )

    weights: list[Array] = []
    apply = lambda x: x  # noqa: E731
    n_at_once = labels.shape[-1] if chunk_size is None else min(chunk_size, labels.shape[-1])
    if head is not None:
        # Of a lambda, as a method of a model of traced arrays cannot be hashed.
        apply, weights = jax.closure_convert(lambda x: head(x), x[..., :n_at_once, :])
    total, weight, penalty = _sums(_Chunks(apply, n_at_once, ignore_index, z_loss), x, labels, *weights)
    return Loss(total, weight, {"z_loss": (penalty, weight)} if z_loss else {})


@dataclass(frozen=True)
class _Chunks:
    """The sums of `cross_entropy` over all tokens, chunk by chunk, and their gradients.

    **Arguments:**

    - `head`: from hidden states and weights to logits.
    - `size`: the number of tokens in a chunk.
    """

    head: Callable[..., Array]
    size: int
    ignore_index: int
    z_loss: float

    def sums(self, x: Array, labels: Array, *weights: Array) -> tuple[Array, Array, Array]:
        """The total, the number of labels that count, and the summed z-loss."""

        def of_chunk(x: Array, labels: Array) -> tuple[Any, None]:
            return _of_logits(self.head(x, *weights), labels, self.ignore_index, self.z_loss)[:3], None

        return self._over_chunks(of_chunk, x, labels)[0]

    def sums_and_gradients(
        self, x: Array, labels: Array, *weights: Array, wanted: Sequence[bool]
    ) -> tuple[tuple[Array, Array, Array], list[Array | None]]:
        """The sums, and the gradient of the total by `x` and each weight; None where it is not wanted.

        Gradients by weights are summed over the chunks in float32 or wider.
        """

        def of_chunk(x: Array, labels: Array) -> tuple[Any, Array | None]:
            inputs = [x, *weights]

            def logits_of(*varied: Array) -> Array:
                given = iter(varied)
                return self.head(*(next(given) if is_wanted else x for x, is_wanted in zip(inputs, wanted, strict=True)))

            logits, pull = jax.vjp(logits_of, *(x for x, is_wanted in zip(inputs, wanted, strict=True) if is_wanted))
            *sums, slopes = _of_logits(logits, labels, self.ignore_index, self.z_loss)
            gradients = list(pull(slopes.astype(logits.dtype)))
            by_x = gradients.pop(0) if wanted[0] else None
            by_weights = [g.astype(jnp.promote_types(g.dtype, jnp.float32)) for g in gradients]
            return (tuple(sums), by_weights), by_x

        (sums, by_weights), by_x = self._over_chunks(of_chunk, x, labels)
        made = iter(by_weights)
        of_weights = zip(weights, wanted[1:], strict=True)
        return sums, [by_x, *(next(made).astype(w.dtype) if is_wanted else None for w, is_wanted in of_weights)]

    def _over_chunks(self, of_chunk: Callable[..., Any], x: Array, labels: Array) -> tuple[Any, Array | None]:
        """The sum over all chunks of the first output of `of_chunk(x, labels)`, and its second output for all tokens."""
        seq = labels.shape[-1]
        if self.size >= seq:
            return of_chunk(x, labels)
        n_padded = -seq % self.size
        rows = [(0, 0)] * (labels.ndim - 1)
        labels = jnp.pad(labels, [*rows, (0, n_padded)], constant_values=self.ignore_index)
        x = jnp.pad(x, [*rows, (0, n_padded), (0, 0)], mode="edge")  # real tokens: a head may have no derivative at 0
        chunks = (
            rearrange(x, "... (n chunk) d -> n ... chunk d", chunk=self.size),
            rearrange(labels, "... (n chunk) -> n ... chunk", chunk=self.size),
        )

        def add(sums: Any, chunk: tuple[Array, Array]) -> tuple[Any, Array | None]:
            added, by_x = of_chunk(*chunk)
            return jax.tree.map(jnp.add, sums, added), by_x

        first = jax.tree.map(lambda chunk: chunk[0], chunks)
        shapes = jax.eval_shape(lambda *first: of_chunk(*first)[0], *first)
        zeros = jax.tree.map(lambda sum: jnp.zeros(sum.shape, sum.dtype), shapes)
        sums, by_x = jax.lax.scan(add, zeros, chunks)
        return sums, None if by_x is None else rearrange(by_x, "n ... chunk d -> ... (n chunk) d")[..., :seq, :]


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _sums(chunks: _Chunks, x: Array, labels: Array, *weights: Array) -> tuple[Array, Array, Array]:
    """The sums. Where they are differentiated, the gradient is made with them, while the logits are there: they are neither
    kept for the backward pass nor computed again in it."""
    return chunks.sums(x, labels, *weights)


@partial(_sums.defjvp, symbolic_zeros=True)
def _sums_jvp(chunks: _Chunks, primals: Sequence[Array], tangents: Sequence[Any]) -> tuple[Any, Any]:
    x, labels, *weights = primals
    by_inputs = [tangents[0], *tangents[2:]]
    wanted = [not isinstance(tangent, SymbolicZero) for tangent in by_inputs]
    sums, gradients = chunks.sums_and_gradients(x, labels, *weights, wanted=wanted)
    total = jnp.zeros_like(sums[0])
    for gradient, tangent in zip(gradients, by_inputs, strict=True):
        if gradient is not None:
            gradient = checkpoint_name(gradient, GRADIENT)
            total += jnp.sum(gradient.astype(total.dtype) * tangent.astype(total.dtype))
    return sums, (total, jnp.zeros_like(sums[1]), jnp.zeros_like(sums[2]))


def _of_logits(
    logits: Float[Array, "*dims vocab"], labels: Int[Array, "*dims"], ignore_index: int, z_loss: float
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""], Float[Array, "*dims vocab"]]:
    """The summed loss, the number of labels that count, the summed z-loss, and the gradient of the first by the logits."""
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    vocab = logits.shape[-1]
    log_sum = jax.nn.logsumexp(logits, axis=-1)
    # Compare and sum instead of a lookup: a lookup along a sharded dim, and the scatter that is its gradient, may make XLA
    # gather the logits. The barrier keeps XLA from making the ids and zeros of all logits once, to be read for each chunk.
    given = (jnp.arange(vocab, dtype=labels.dtype), jnp.zeros((), logits.dtype), labels)
    ids, zero, labels = jax.lax.optimization_barrier(given)
    counts = labels != ignore_index
    is_known = (labels >= 0) & (labels < vocab)
    is_label = ids == labels[..., None]
    picked = jnp.sum(jnp.where(is_label, logits, zero), -1)
    losses = jnp.where(is_known, log_sum - picked, jnp.nan)
    # The square of a logit above 1.8e19 is infinite, and 0 times infinity is NaN.
    penalties = z_loss * log_sum**2 if z_loss else jnp.zeros_like(log_sum)
    total = jnp.sum(jnp.where(counts, losses + penalties, 0.0))
    times = 1.0 + 2.0 * z_loss * log_sum if z_loss else jnp.ones_like(log_sum)
    slopes = jnp.exp(logits - log_sum[..., None]) * times[..., None] - is_label
    slopes = jnp.where((counts & is_known)[..., None], slopes, zero)
    return total, counts.sum(dtype=total.dtype), jnp.sum(jnp.where(counts, penalties, 0.0)), slopes
