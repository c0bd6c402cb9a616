"""Recurrences of layers whose state is a small matrix of each head, in place of keys and values of all tokens.

A token first lets the matrix decay, then adds its value for its key. By the delta rule, the value replaces in part what the
matrix holds for the key. Then the token reads the matrix with its query. This module owns what such layers share:
projections, convolutions, the step of decoding, and the chunks that compute many tokens at once.

Sources: *Transformers are SSMs* (arXiv:2405.21060); *Parallelizing Linear Transformers with the Delta Rule*
(arXiv:2406.06484).

Dims: seq = tokens of one example, d = width, groups = heads of queries and keys, each = heads of values that one of them
serves, heads = groups x each, size, value = width of a head's keys and values, kernel = taps of a convolution, chunks,
places = tokens of a chunk.
"""

from abc import abstractmethod
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Bool, Float, Int

from redeqx._rounding import at_least_float32

from ._activations import ACTIVATIONS
from ._cache import Cache
from ._conv import convolve, last_rows, runs_of
from ._layers import linear

_HEADS = "groups each"
_READ = ("query", "key", "value")
_CHUNK = 64  # tokens that are computed with each other as in an attention; as in transformers


class Tokens(NamedTuple):
    """What a recurrence reads of each token, in at least float32."""

    queries: Float[Array, "seq groups size"]
    keys: Float[Array, "seq groups size"]
    values: Float[Array, "seq groups each value"]
    # The logarithm of the factor of a head's matrix, which is not positive. Of a Mamba-1, whose matrix has a factor for each
    # number: the step of each value, `[seq 1 value]`, that multiplies the rates.
    decay: Float[Array, "seq groups each"]
    strength: Float[Array, "seq groups each"] | None = None  # the share that the delta rule replaces; None without it


class Recurrence(eqx.Module):
    """A layer in place of an attention. The model family creates its projections.

    Its cost grows linearly with the text, and its cache does not grow. The state is computed in at least float32.
    """

    query: eqx.nn.Linear
    key: eqx.nn.Linear
    value: eqx.nn.Linear
    gate: eqx.nn.Linear  # its SiLU multiplies what heads return
    decay: eqx.nn.Linear
    # Of a causal convolution of each feature by itself; None for what is computed from values after theirs.
    query_taps: Float[Array, "*layers d_key kernel"] | None
    key_taps: Float[Array, "*layers d_key kernel"] | None
    value_taps: Float[Array, "*layers d_value kernel"]
    decay_bias: Float[Array, "*layers heads"]
    log_rate: Float[Array, "*layers heads"]
    norm: eqx.nn.RMSNorm | None  # of what heads return
    output: eqx.nn.Linear
    n_groups: int = eqx.field(static=True)
    n_heads: int = eqx.field(static=True)
    activation: str = eqx.field(static=True)  # after the convolutions
    # Of what the projections return: queries, keys, values, gates and decay.
    factors: tuple[float, ...] = eqx.field(static=True, kw_only=True, default=(1.0,) * 5)

    def __call__(
        self,
        x: Float[Array, "seq d"],
        *,
        mask: Bool[Array, " seq"] | None = None,
        segments: Int[Array, " seq"] | None = None,
        cache: Cache | None = None,
    ) -> tuple[Float[Array, "seq d"], Cache | None]:
        """Returns the output for each row of `x`, and the cache with this layer's state after them.

        **Arguments:**

        - `mask`: True for tokens, False for padding, whose rows are zero here; None if all are tokens.
        - `segments`: the segments of a packed row. Each run of equal numbers begins with an empty state.
        - `cache`: if given, it has the state before `x`.
        """
        x = x if mask is None else jnp.where(mask[:, None], x, 0)
        runs = runs_of(segments)
        taps = {name: getattr(self, f"{name}_taps") for name in _READ}
        rows = [self._projected(name, x) for name in _READ if taps[name] is not None]
        kept = self.value_taps.shape[-1] - 1  # earlier rows that a convolution reads
        if cache is None:
            rows = [jnp.pad(row, ((kept, 0), (0, 0))) for row in rows]
            tokens, added = self._tokens(x, self._convolved(rows, runs), mask)
            sizes = (*tokens.values.shape[1:3], tokens.keys.shape[-1], tokens.values.shape[-1])
            mixed, _ = self._in_chunks(tokens, jnp.zeros(sizes, tokens.values.dtype), runs)
        else:
            assert cache.states is not None
            before, memory = cache.states.read(cache.index)
            assert memory is not None
            rows = [jnp.concatenate([old.astype(row.dtype), row]) for old, row in zip(before, rows, strict=True)]
            tokens, added = self._tokens(x, self._convolved(rows, runs), mask)
            memory = rearrange(
                memory.astype(tokens.values.dtype), f"({_HEADS}) size value -> {_HEADS} size value", groups=self.n_groups
            )
            keeps_all = cache.states.n_slots > 1
            compute = self._by_token if keeps_all or len(x) == 1 else self._in_chunks
            mixed, memory = compute(tokens, memory, runs)
            last = tuple(last_rows(row, kept, keeps_all=keeps_all) for row in rows)
            memory = rearrange(memory, f"tokens {_HEADS} size value -> tokens ({_HEADS}) size value")
            cache = eqx.tree_at(lambda c: c.states, cache, cache.states.write(last, memory, cache.index))
        mixed = mixed if added is None else mixed + added
        gate = rearrange(self._projected("gate", x), "seq (heads value) -> seq heads value", heads=self.n_heads)
        mixed = self._gated(rearrange(mixed, f"seq {_HEADS} value -> seq ({_HEADS}) value"), gate.astype(mixed.dtype))
        return linear(self.output, rearrange(mixed.astype(x.dtype), "seq heads value -> seq (heads value)")), cache

    @abstractmethod
    def _tokens(
        self, x: Float[Array, "seq d"], convolved: tuple[Array, ...], mask: Bool[Array, " seq"] | None
    ) -> tuple[Tokens, Float[Array, "seq groups each value"] | None]:
        """Returns what the recurrence reads of each token, and what is added to its results; None for nothing.

        **Arguments:**

        - `x`: the input, in which padding is zero.
        - `convolved`: queries, keys and values, if they have convolutions.
        - `mask`: False for padding; None for all.
        """

    @abstractmethod
    def _gated(
        self, mixed: Float[Array, "seq heads value"], gate: Float[Array, "seq heads value"]
    ) -> Float[Array, "seq heads value"]:
        """Returns what the heads return, normalized and multiplied with the SiLU of `gate`."""

    def _projected(self, name: str, x: Float[Array, "seq d"]) -> Float[Array, "seq _"]:
        """Returns a projection times its factor. transformers has these factors in a buffer, of the dtype of the model, to
        which JAX rounds a number here, too."""
        found, factor = linear(getattr(self, name), x), self.factors[(*_READ, "gate", "decay").index(name)]
        return found if factor == 1 else found * factor

    def _convolved(self, rows: list[Float[Array, "kept_and_seq _"]], runs: Int[Array, " seq"] | None) -> tuple[Array, ...]:
        """Returns queries, keys and values by head after the convolutions, whose inputs are `rows`, with those of earlier
        tokens before them."""
        found = []
        for row, name in zip(rows, _READ[-len(rows) :], strict=True):
            sums, bias = convolve(row, getattr(self, f"{name}_taps"), runs), getattr(self, f"{name}_bias", None)
            sums = sums if bias is None else sums + bias.astype(sums.dtype)
            sums = ACTIVATIONS[self.activation](sums).astype(row.dtype).astype(sums.dtype)
            found.append(rearrange(sums, "seq (groups n) -> seq groups n", groups=self.n_groups))
        *others, values = found
        values = rearrange(values, "seq groups (each n) -> seq groups each n", each=self.n_heads // self.n_groups)
        return *others, values

    def _by_token(self, tokens: Tokens, memory: Array, runs: Int[Array, " seq"] | None) -> tuple[Array, Array]:
        """Returns what each token reads, and the memory after it."""
        return _by_token(tokens, memory, runs)

    def _in_chunks(self, tokens: Tokens, memory: Array, runs: Int[Array, " seq"] | None) -> tuple[Array, Array]:
        """Returns what all tokens read, and the memory after the last one."""
        return _in_chunks(tokens, memory, runs)

    def steps(self, x: Float[Array, "seq d"]) -> Float[Array, "seq groups each"]:
        """How long a token lets the matrices decay."""
        return self.by_group(jax.nn.softplus(_wide(self._projected("decay", x)) + _wide(self.decay_bias)))

    def rates(self) -> Float[Array, "groups each"]:
        """The logarithms of the decay in a step of length 1."""
        return self.by_group(-jnp.exp(_wide(self.log_rate)))

    def by_group(self, array: Float[Array, "*dims heads"]) -> Float[Array, "*dims groups each"]:
        """Returns numbers of each head by groups."""
        return rearrange(array, f"... ({_HEADS}) -> ... {_HEADS}", groups=self.n_groups)


def _wide(x: Float[Array, "*dims"]) -> Float[Array, "*dims"]:
    return x.astype(at_least_float32(x.dtype))


def _by_token(
    tokens: Tokens, memory: Float[Array, "groups each size value"], runs: Int[Array, " seq"] | None = None
) -> tuple[Float[Array, "seq groups each value"], Float[Array, "seq groups each size value"]]:
    """Returns what each token reads, and the memory after it."""
    assert runs is None

    def step(memory: Array, token: Tokens) -> tuple[Array, tuple[Array, Array]]:
        query, key, change, decay, strength = token
        memory = memory * jnp.exp(decay)[..., None, None]
        if strength is not None:
            change = (change - jnp.einsum("gk,gekv->gev", key, memory)) * strength[..., None]
        memory = memory + jnp.einsum("gk,gev->gekv", key, change)
        return memory, (jnp.einsum("gk,gekv->gev", query, memory), memory)

    if len(tokens.queries) == 1:
        return jax.tree.map(lambda array: array[None], step(memory, jax.tree.map(lambda array: array[0], tokens))[1])
    return jax.lax.scan(step, memory, tokens)[1]


def by_chunks(arrays: Any, seq: int, **options: str) -> Any:
    """Returns arrays of tokens `[seq, ...]` by chunks, `[chunks, places, ...]`. Padding has no strength and no decay, so it
    changes nothing."""
    places = min(_CHUNK, 1 << (seq - 1).bit_length())

    def split(x: Array) -> Array:
        padding = ((0, -seq % places), *[(0, 0)] * (x.ndim - 1))
        return rearrange(jnp.pad(x, padding, **options), "(chunks places) ... -> chunks places ...", places=places)

    return jax.tree.map(split, arrays)


def _in_chunks(
    tokens: Tokens, memory: Float[Array, "groups each size value"], runs: Int[Array, " seq"] | None
) -> tuple[Float[Array, "seq groups each value"], Float[Array, "1 groups each size value"]]:
    """Returns what all tokens read, and the memory after the last one.

    By the delta rule, what a token changes within a chunk depends on the changes of those before it: a triangular system.
    Its solution is a part that needs no memory, and one that is multiplied with the memory before the chunk. So only a few
    products of small matrices depend on the chunk before.
    """
    seq = len(tokens.queries)
    queries, keys, values, decay, strength = by_chunks(tokens, seq)
    places = queries.shape[1]
    total = rearrange(jnp.cumsum(decay, axis=1), "chunks places groups each -> chunks groups each places")
    sees, reads, keeps = jnp.tri(places, dtype=bool), None, None
    if runs is not None:
        run_of: Array = by_chunks(runs, seq, mode="edge")
        before = jnp.concatenate([run_of[:1, 0], run_of[:-1, -1]])
        sees = (sees & (run_of[:, :, None] == run_of[:, None]))[:, None, None]
        reads, keeps = ((run_of == other[:, None])[:, None, None] for other in (before, run_of[:, -1]))
    # The decay between two places. Infinite logarithms, as its gradient must be finite where the exponent is positive.
    between = jnp.exp(jnp.where(sees, total[..., None] - total[..., None, :], -jnp.inf))
    since, until = jnp.exp(total), jnp.exp(total[..., -1:] - total)  # the chunk's beginning and its end
    whole = since[..., -1]
    if reads is not None and keeps is not None:
        since, until, whole = jnp.where(reads, since, 0), jnp.where(keeps, until, 0), jnp.where(reads[..., -1], whole, 0)
    spread = "chunks places groups size -> chunks groups 1 places size"
    changes = rearrange(values, "chunks places groups each value -> chunks groups each places value")
    corrections = None
    if strength is not None:
        strength = rearrange(strength, "chunks places groups each -> chunks groups each places 1")
        alike = jnp.einsum("cigk,cjgk->cgij", keys, keys)[:, :, None]
        inverse = _inverse(jnp.tril(strength * alike * between, -1)[None])[0]
        changes = inverse @ (strength * changes)
        corrections = inverse @ (strength * since[..., None] * rearrange(keys, spread))
    keys, queries = rearrange(keys, spread), rearrange(queries, spread)
    scores = (queries @ keys.swapaxes(-1, -2)) * between

    def body(memory: Array, chunk: tuple[Any, ...]) -> tuple[Array, Array]:
        changes, corrections, scores, queries, keys, whole = chunk
        changes = changes if corrections is None else changes - corrections @ memory
        found = queries @ memory + scores @ changes
        return memory * whole[..., None, None] + keys.swapaxes(-1, -2) @ changes, found

    inputs = changes, corrections, scores, queries * since[..., None], keys * until[..., None], whole
    memory, found = jax.lax.scan(body, memory, inputs)
    return rearrange(found, "chunks groups each places value -> (chunks places) groups each value")[:seq], memory[None]


def _inverse(lower: Float[Array, "blocks *dims n n"]) -> Float[Array, "blocks *dims n n"]:
    """Returns the inverses of the identity plus strictly lower triangular matrices, whose size is a power of two.

    By halves: products of matrices are as exact as a substitution row by row, which would take `n` steps. The products have
    the highest precision, as errors of one enter the next. A power series would need no halves, but its terms grow beyond
    float32 if keys repeat.
    """
    n = lower.shape[-1]
    if n == 1:
        return jnp.ones_like(lower)
    half = n // 2
    # Along one dim at each level: XLA's CPU backend aborts at a product of arrays of 8 dims (jaxlib 0.10.2, 2026-11-26).
    first, last = jnp.split(_inverse(jnp.concatenate([lower[..., :half, :half], lower[..., half:, half:]])), 2)
    multiply = lambda a, b: jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)  # noqa: E731
    corner = -multiply(last, multiply(lower[..., half:, :half], first))
    top, bottom = jnp.concatenate([first, jnp.zeros_like(first)], -1), jnp.concatenate([corner, last], -1)
    return jnp.concatenate([top, bottom], -2)
