"""Cross-entropy over a vocabulary that is split among devices, or too large for all logits to exist at once.

Dims: seq = tokens of one example, d = width, vocab; dims = whatever comes before, a batch for one.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float, Int, Shaped

from redeqx import Loss


def cross_entropy(
    x: Float[Array, "*dims vocab"] | Float[Array, "*dims d"],
    labels: Shaped[Array, "..."],  # of integers; any others are told so below
    *,
    head: Callable[[Float[Array, "*chunk d"]], Float[Array, "*chunk vocab"]] | None = None,
    chunk_size: int | None = None,
    ignore_index: int = -100,
    z_loss: float = 0.0,
) -> Loss:
    """The cross-entropy of logits to labels, summed over the labels that count and weighed by their number.

    Computed in float32, whatever the logits are in. Logits that are split over the vocabulary stay split: each device
    reduces its part, and a few numbers a token are exchanged.

    ```python
    def loss_fn(model, batch, key):
        hidden = jax.vmap(model.hidden)(batch["ids"])  # [batch, seq, d]
        return cross_entropy(hidden, batch["labels"], head=model.logits, chunk_size=256)
    ```

    **Arguments:**

    - `x`: the logits, or, with `head`, what it makes them from.
    - `labels`: the right token of each, integers of any width; those equal to `ignore_index` do not count. Any other beyond
        the vocabulary makes the loss NaN.
    - `head`: from hidden states to logits. They are then made again in the backward pass, and not kept for it.
    - `chunk_size`: tokens of the last dim of `labels` to make logits of at once; all where None. Needs `head`.
    - `z_loss`: times the square of the log of the softmax's denominator, added to each token's loss, which keeps logits from
        drifting (arXiv:2204.02311 takes 1e-4). Its mean is then a metric, `z_loss`.

    Raises ValueError where shapes do not go together, for a `chunk_size` below 1, and for one without `head`; TypeError for
    labels that are not integers.
    """
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(
            f"`labels`: expected integers, got {labels.dtype}. Cast them with `labels.astype(jnp.int32)` if that is right."
        )
    # Bytes hold neither `ignore_index` nor the size of a larger vocabulary: -100 would be the label 156.
    labels = labels.astype(jnp.promote_types(labels.dtype, jnp.int32))
    if x.shape[:-1] != labels.shape:
        raise ValueError(
            f"`labels`: expected the shape of `x` without its last dim, {x.shape[:-1]}, got {labels.shape}. "
            "Cut both alike: the label of a token is the one after it."
        )
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"`chunk_size`: expected at least 1, got {chunk_size}. Pass None for all at once.")
    if chunk_size is not None and head is None:
        raise ValueError(
            "`head`: expected a function with `chunk_size`, got None. Pass hidden states, and `head=model.logits`."
        )

    @jax.checkpoint  # keeps what comes in, and neither the logits of `head` nor their exponentials in float32
    def sums(x: Array, labels: Array) -> tuple[Array, Array, Array]:
        return _sums(x if head is None else head(x), labels, ignore_index, z_loss)

    if chunk_size is None or chunk_size >= labels.shape[-1]:
        total, weight, penalty = sums(x, labels)
    else:
        n_padded = -labels.shape[-1] % chunk_size
        rows = [(0, 0)] * (labels.ndim - 1)
        labels = jnp.pad(labels, [*rows, (0, n_padded)], constant_values=ignore_index)
        x = jnp.pad(x, [*rows, (0, n_padded), (0, 0)])
        chunks = (
            rearrange(x, "... (n chunk) d -> n ... chunk d", chunk=chunk_size),
            rearrange(labels, "... (n chunk) -> n ... chunk", chunk=chunk_size),
        )

        def add(carry: tuple[Array, ...], chunk: tuple[Array, Array]) -> tuple[tuple[Array, ...], None]:
            return tuple(a + b for a, b in zip(carry, sums(*chunk), strict=True)), None

        first = jax.tree.map(lambda chunk: chunk[0], chunks)
        zeros = jax.tree.map(lambda sum: jnp.zeros(sum.shape, sum.dtype), jax.eval_shape(sums, *first))
        (total, weight, penalty), _ = jax.lax.scan(add, zeros, chunks)
    return Loss(total, weight, {"z_loss": (penalty, weight)} if z_loss else {})


def _sums(
    logits: Float[Array, "*dims vocab"], labels: Int[Array, "*dims"], ignore_index: int, z_loss: float
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
    """The summed loss, the number of labels that count, and the summed penalty."""
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    vocab = logits.shape[-1]
    log_sum = jax.nn.logsumexp(logits, axis=-1)
    # Compared and summed, not looked up: a lookup along a split dim, and the scatter that is its gradient, may make XLA
    # bring the logits together.
    is_label = jax.lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1) == labels[..., None]
    picked = jnp.sum(jnp.where(is_label, logits, 0.0), -1)
    counts = labels != ignore_index
    losses = jnp.where((labels >= 0) & (labels < vocab), log_sum - picked, jnp.nan)
    # The square of a logit above 1.8e19 is infinite, and 0 times that is NaN.
    penalties = z_loss * log_sum**2 if z_loss else jnp.zeros_like(log_sum)
    total = jnp.sum(jnp.where(counts, losses + penalties, 0.0))
    return total, counts.sum(dtype=total.dtype), jnp.sum(jnp.where(counts, penalties, 0.0))
