"""Sampling: the processors that shape the distribution of the next token, in the order of `transformers`, and the draw.

Dims: rows = any leading dims, vocab.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ._options import Options


def distribution(logits: Float[Array, "*rows vocab"], options: Options) -> Float[Array, "*rows vocab"]:
    """Returns the logits of the distribution to sample from; -inf for tokens that are left out."""
    # A beam search must be able to continue if all end tokens are drawn.
    least = (len(options.eos) or 1) + 1 if options.num_beams > 1 else 1
    least = min(least, logits.shape[-1])
    if options.temperature != 1:
        logits = logits / options.temperature
    if options.top_k is not None and options.top_k < logits.shape[-1]:
        logits = jnp.where(logits < _top(logits, max(options.top_k, least)), -jnp.inf, logits)
    if options.top_p is not None and options.top_p < 1:
        logits = nucleus(logits, options.top_p, least)
    if options.min_p:
        p = jax.nn.softmax(logits)
        logits = _leave_out(logits, p < options.min_p * p.max(-1, keepdims=True), least)
    if options.typical_p is not None and options.typical_p < 1:
        logits = typical(logits, options.typical_p, least)
    if options.epsilon_cutoff:
        logits = _leave_out(logits, jax.nn.softmax(logits) < options.epsilon_cutoff, least)
    if options.eta_cutoff:
        entropy = _entropy(jax.nn.log_softmax(logits))
        eta = jnp.minimum(options.eta_cutoff, options.eta_cutoff**0.5 * jnp.exp(-entropy))
        logits = _leave_out(logits, jax.nn.softmax(logits) < eta, least)
    return logits


def nucleus(logits: Float[Array, "*rows vocab"], top_p: float, least: int = 1) -> Float[Array, "*rows vocab"]:
    """Returns the logits of the smallest set of most likely tokens whose probabilities sum to `top_p` (arXiv:1904.09751);
    -inf for the other tokens."""
    ordered = jnp.sort(logits, axis=-1, descending=True)
    before = jnp.cumsum(jax.nn.softmax(ordered), -1) - jax.nn.softmax(ordered)  # the probability of all likelier tokens
    is_kept = (before < top_p) | (jnp.arange(logits.shape[-1]) < least)
    lowest = jnp.min(jnp.where(is_kept, ordered, jnp.inf), -1, keepdims=True)
    return jnp.where(logits < lowest, -jnp.inf, logits)


def typical(logits: Float[Array, "*rows vocab"], mass: float, least: int = 1) -> Float[Array, "*rows vocab"]:
    """Returns the logits of the smallest set of tokens with a probability of `mass`, the most typical first: those whose
    information is closest to the entropy (arXiv:2202.00666); -inf for the other tokens."""
    log_p = jax.nn.log_softmax(logits)
    distance = jnp.abs(-log_p - _entropy(log_p))
    order = jnp.argsort(distance, axis=-1)
    ordered = jnp.take_along_axis(distance, order, -1)
    n_before = (jnp.cumsum(jnp.take_along_axis(jnp.exp(log_p), order, -1), -1) < mass).sum(-1, keepdims=True)
    last = jnp.clip(n_before, least - 1, logits.shape[-1] - 1)
    return jnp.where(distance > jnp.take_along_axis(ordered, last, -1), -jnp.inf, logits)


def _entropy(log_p: Float[Array, "*rows vocab"]) -> Float[Array, "*rows 1"]:
    p = jnp.exp(log_p)
    return -jnp.where(p > 0, p * log_p, 0.0).sum(-1, keepdims=True)


def _top(logits: Float[Array, "*rows vocab"], n: int) -> Float[Array, "*rows 1"]:
    """Returns the `n`-th largest logit."""
    return jax.lax.top_k(logits, min(n, logits.shape[-1]))[0][..., -1:]


def _leave_out(
    logits: Float[Array, "*rows vocab"], tokens: Bool[Array, "*rows vocab"], least: int
) -> Float[Array, "*rows vocab"]:
    """Returns the logits with -inf for these tokens, except the `least` most likely ones."""
    return jnp.where(tokens & (logits < _top(logits, least)), -jnp.inf, logits)
