"""Short convolutions: of each feature by itself, over a token and the few before it; and a layer of one between two gates.

Source: *LFM2 Technical Report* (arXiv:2511.23404), for the layer.

Dims: seq = tokens of one example, d = width, kernel = taps of a convolution, kept = kernel - 1 earlier rows.
"""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from redeqx._rounding import at_least_float32

from ._cache import Cache
from ._layers import linear


def runs_of(segments: Int[Array, " seq"] | None) -> Int[Array, " seq"] | None:
    """Returns the number of the run of equal segments that each token is in; None for None."""
    return None if segments is None else jnp.cumsum(segments != jnp.roll(segments, 1))


def convolve(
    rows: Float[Array, "kept_and_seq width"], taps: Float[Array, "width kernel"], runs: Int[Array, " seq"] | None
) -> Float[Array, "seq width"]:
    """Returns the weighted sums of each row and the ones before it, in at least float32. As sums of a few shifted arrays
    they fuse, and a device that holds some of the features needs no others.

    **Arguments:**

    - `rows`: the inputs, with those of earlier tokens before them.
    - `runs`: the run of each token, which reads no rows of others; None for one run.
    """
    kernel = taps.shape[-1]
    seq = len(rows) - (kernel - 1)
    wide = at_least_float32(rows.dtype)
    found = jnp.zeros((seq, rows.shape[1]), wide)
    for i in range(kernel):
        term = rows[i : i + seq].astype(wide) * taps[:, i].astype(wide)
        if runs is not None:
            back = kernel - 1 - i
            same = jnp.pad(runs, (back, 0), constant_values=-1)[:seq] == runs
            term = jnp.where(same[:, None], term, 0)
        found += term
    return found


def last_rows(rows: Float[Array, "kept_and_seq width"], kept: int, *, keeps_all: bool) -> Float[Array, "tokens kept width"]:
    """Returns the rows that a convolution reads besides those of the next token: after the last token, or after each."""
    seq = len(rows) - kept
    ends = range(1, seq + 1) if keeps_all else [seq]
    return jnp.stack([rows[end : end + kept] for end in ends])


class ShortConv(eqx.Module):
    """A layer in place of an attention: a causal convolution of each feature by itself, whose inputs and outputs are
    multiplied with gates. Its state is the last inputs. The model family creates its projections."""

    value: eqx.nn.Linear
    gate_in: eqx.nn.Linear  # multiplies what the convolution reads
    gate_out: eqx.nn.Linear  # multiplies what it returns
    taps: Float[Array, "*layers d kernel"]
    output: eqx.nn.Linear

    def __call__(
        self,
        x: Float[Array, "seq d"],
        *,
        mask: Bool[Array, " seq"] | None = None,
        segments: Int[Array, " seq"] | None = None,
        cache: Cache | None = None,
    ) -> tuple[Float[Array, "seq d"], Cache | None]:
        """Returns the output for each row of `x`, and the cache with this layer's state after them. See `Recurrence` for the
        arguments."""
        x = x if mask is None else jnp.where(mask[:, None], x, 0)
        rows, kept = linear(self.gate_in, x) * linear(self.value, x), self.taps.shape[-1] - 1
        if cache is None:
            rows = jnp.pad(rows, ((kept, 0), (0, 0)))
        else:
            assert cache.states is not None
            (before,), _ = cache.states.read(cache.index)
            rows = jnp.concatenate([before.astype(rows.dtype), rows])
            last = last_rows(rows, kept, keeps_all=cache.states.n_slots > 1)
            cache = eqx.tree_at(lambda c: c.states, cache, cache.states.write((last,), None, cache.index))
        mixed = convolve(rows, self.taps, runs_of(segments)).astype(x.dtype)
        return linear(self.output, linear(self.gate_out, x) * mixed), cache
