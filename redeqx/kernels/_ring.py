"""Attention over split positions in a ring: keys and values travel from device to device, and are never gathered.

Each device attends with its own queries to the keys that it has just then, while it sends them on. The log-sum-exps merge
the parts; in the backward pass each part takes the output and the log-sum-exps of the whole, and the gradients of keys
and values travel with them, in float32. With a causal mask each device has two chunks of positions, as in `_chunks.py`, so
that in each round all devices have the same work. The program is the same for any number of devices. Segments of all keys
are on each device, and chunks without a common one are not computed.

Source: Ring Attention, arXiv:2310.01889; the order of the chunks is that of zigzag ring attention.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from .._rounding import at_least_float32
from ._chunks import Layout
from ._dense import may_meet, span
from ._offset import merge
from ._setting import MASK_VALUE

Operands = dict[str, Any]


@dataclass(frozen=True)
class Ring:
    """The passes of an attention on one device, inside `jax.shard_map`. They take and return its own parts.

    **Arguments:**

    - `kernel`: what computes a chunk of queries with a chunk of keys, such as `_blockwise`.
    - `layout`: which positions this device has.
    """

    kernel: Any
    layout: Layout

    def forward(self, q: Any, k: Any, v: Any, extras: Operands) -> tuple[Any, Any]:
        """Returns the output `[B, T, N, H]` and the log-sum-exps `[B, N, T]`."""
        dtype, exchange, segments = at_least_float32(q.dtype), self.layout.exchange, self._segments(extras)
        queries = self._split(exchange(q, 1))

        def attend(chunk: int, setting: Any, extras: Operands, k: Any, v: Any, done: tuple[Any, Any]) -> tuple[Any, Any]:
            out, log_sum = self.kernel.forward(setting, queries[chunk], k, v, extras)
            return merge([done, (out.astype(dtype), log_sum)])

        def visit(carry: Any, i: Any) -> list[Any]:
            """Adds the keys and values that this device has in a round to the outputs."""
            done, kv = list(carry[0]), carry[1]
            for key_chunk, (k, v) in enumerate(zip(*map(self._split, kv), strict=True)):
                for chunk in range(len(done)):
                    fn, place = partial(attend, chunk), (self._source(i), chunk, key_chunk)
                    done[chunk] = self._if_visible(*place, segments, fn, k, v, unchanged=done[chunk])
            return done

        def step(carry: Any, i: Any) -> tuple[Any, None]:
            return (visit(carry, i), self._send(carry[1])), None

        start = []
        for x in queries:
            shape = (*x.shape[:-1], v.shape[-1])
            start.append((jnp.zeros(shape, dtype), jnp.full((shape[0], shape[2], shape[1]), MASK_VALUE, dtype)))
        last = self.layout.n - 1
        carry, _ = jax.lax.scan(step, (start, [exchange(k, 1), exchange(v, 1)]), jnp.arange(last))
        outs, log_sums = zip(*visit(carry, last), strict=True)
        out, log_sum = jnp.concatenate(outs, 1).astype(q.dtype), jnp.concatenate(log_sums, 2)
        return exchange(out, 1, back=True), exchange(log_sum, 2, back=True)

    def backward(self, q: Any, k: Any, v: Any, extras: Operands, out: Any, log_sum: Any, g: Any) -> list[Any]:
        """Returns the gradients of queries, keys and values."""
        exchange, segments = self.layout.exchange, self._segments(extras)
        results = [self._split(exchange(x, dim), dim) for x, dim in ((q, 1), (out, 1), (log_sum, 2), (g, 1))]

        def differentiate(chunk: int, setting: Any, extras: Operands, k: Any, v: Any, done: list[Any]) -> list[Any]:
            q, *others = (each[chunk] for each in results)
            grads = self.kernel.backward(setting, q, k, v, extras, *others)
            return [total + x.astype(total.dtype) for total, x in zip(done, grads, strict=True)]

        def visit(carry: Any, i: Any) -> tuple[list[Any], list[Any]]:
            """Adds to the gradients of the queries, and to those of the keys and values that this device has in a round."""
            dqs, kv, sums = carry
            dqs, d_chunks = list(dqs), []
            for key_chunk, (k, v) in enumerate(zip(*map(self._split, kv), strict=True)):
                d_kv = [_zeros(k), _zeros(v)]
                for chunk in range(len(dqs)):
                    fn, place = partial(differentiate, chunk), (self._source(i), chunk, key_chunk)
                    done = [dqs[chunk], *d_kv]
                    dqs[chunk], *d_kv = self._if_visible(*place, segments, fn, k, v, unchanged=done)
                d_chunks.append(d_kv)
            d_kv = [jnp.concatenate(xs, 1) for xs in zip(*d_chunks, strict=True)]
            return dqs, [total + x for total, x in zip(self._send(sums), d_kv, strict=True)]

        def step(carry: Any, i: Any) -> tuple[Any, None]:
            dqs, sums = visit(carry, i)
            return (dqs, self._send(carry[1]), sums), None

        kv, last = [exchange(k, 1), exchange(v, 1)], self.layout.n - 1
        start = [_zeros(x) for x in results[0]], kv, [_zeros(x) for x in kv]
        dqs, sums = visit(jax.lax.scan(step, start, jnp.arange(last))[0], last)
        grads = [jnp.concatenate(dqs, 1), *self._send(sums)]
        return [exchange(x.astype(like.dtype), 1, back=True) for x, like in zip(grads, (q, k, v), strict=True)]

    # --- chunks -------------------------------------------------------------------------------------------------------

    def _split(self, x: Any, dim: int = 1) -> list[Any]:
        """Returns the chunks of a device's positions."""
        return jnp.split(x, 2, dim) if self.layout.is_zigzag else [x]

    def _index(self, device: Any, chunk: int) -> Any:
        """Returns which of all chunks a device has as its first, or second; of a pair, the even one is the first."""
        if not self.layout.is_zigzag:
            return device
        last = 2 * self.layout.n - 1
        even = jnp.where(device % 2 == 0, device, last - device)
        return last - even if chunk else even

    def _segments(self, extras: Operands) -> tuple[list[Any], Any] | None:
        """Returns the segments of this device's chunks of queries, and those of all keys; None if there are none."""
        if not extras:
            return None
        return self._split(self.layout.exchange(extras["query_segments"], 1)), extras["key_segments"]

    def _if_visible(
        self, source: Any, chunk: int, key_chunk: int, segments: Any, fn: Callable[..., Any], *kv: Any, unchanged: Any
    ) -> Any:
        """Returns `fn(setting, extras, *kv, unchanged)`, or `unchanged` if this chunk of queries comes before these keys, or
        has no segment of theirs.

        **Arguments:**

        - `source`: the device whose keys these are.
        """
        setting, extras, keys = replace(self.layout.setting, causal=False), {}, self._index(source, key_chunk)
        order: Any = 1  # after the keys
        if self.layout.setting.causal:
            order = jnp.sign(self._index(jax.lax.axis_index(self.layout.axis), chunk) - keys)
        if segments is not None:
            size = kv[0].shape[1]
            of_queries, of_keys = segments[0][chunk], jax.lax.dynamic_slice_in_dim(segments[1], keys * size, size, 1)
            extras = {"query_segments": of_queries, "key_segments": of_keys}
            order = jnp.where(may_meet(span(of_queries), span(of_keys)), order, -1)
        elif not self.layout.setting.causal:
            return fn(setting, extras, *kv, unchanged)
        before, after = (lambda *operands: operands[-1]), partial(fn, setting, extras)
        same = partial(fn, self.layout.setting, extras)
        return jax.lax.switch(order + 1, [before, same, after], *kv, unchanged)

    # --- between devices ----------------------------------------------------------------------------------------------

    def _source(self, i: Any) -> Any:
        """Returns the device whose keys this one has in round `i`."""
        return (jax.lax.axis_index(self.layout.axis) - i) % self.layout.n

    def _send(self, xs: Sequence[Any]) -> list[Any]:
        """Sends arrays to the next device, and returns those of the one before."""
        pairs = [(i, (i + 1) % self.layout.n) for i in range(self.layout.n)]
        return [jax.lax.ppermute(x, self.layout.axis, pairs) for x in xs]


def _zeros(x: Any) -> Any:
    return jnp.zeros(x.shape, at_least_float32(x.dtype))
