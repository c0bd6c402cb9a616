"""Attention over split positions in a ring: keys and values travel from device to device, and are never gathered.

Each device attends with its own queries to the keys that it has just then, while it sends them on. The log-sum-exps, which
are pairs of numbers, merge the parts; in the backward pass each part takes the output and the log-sum-exps of the whole, and
the gradients of keys and values travel with them, in float32. With a causal mask each device has two chunks of positions, as
in `_chunks.py`, so that in each round all devices have the same work. The program is the same for any number of devices.

What a chunk of queries sees of a chunk of keys depends on their distance: nothing, all keys, or what the kernel masks, each
of which is a branch. With a window, keys travel no further than it reaches. Chunks are not computed either if their keys
are behind all lengths, or have no segment of the queries.

Source: Ring Attention, arXiv:2310.01889; the order of the chunks is that of zigzag ring attention.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._rounding import at_least_float32
from ._chunks import Layout, map_queries, of_columns
from ._dense import may_meet, span
from ._offset import merge
from ._setting import MASK_VALUE, NO_WEIGHTS, AttentionSetting, pairs_of

Operands = dict[str, Any]


@dataclass(frozen=True)
class Ring:
    """The passes of an attention on one device, inside `jax.shard_map`. They take its chunks, and return results for them.
    `kernel` computes a chunk of queries with one of keys, such as `_blockwise`; `layout` says which positions this device
    has. There are as many queries as keys if their distance matters."""

    kernel: Any
    layout: Layout

    def forward(self, q: Any, k: Any, v: Any, extras: Operands) -> tuple[Any, Any]:
        """Returns the output `[B, T, N, H]` and the log-sum-exps `[B, N, T, 2]`."""
        dtype, queries = at_least_float32(q.dtype), self._split(q)

        def attend(chunk: int, pair: _Pair, done: Any, sums: Any, k: Any, v: Any) -> tuple[Any, Any]:
            out, log_sum = self.kernel.forward(pair.setting, queries[chunk], k, v, pair.extras)
            part = pair.of_rows(out.astype(dtype), 0), pair.of_rows(pairs_of(log_sum), MASK_VALUE)
            return _merged(done, part), sums

        start = []
        for x in queries:
            shape = (*x.shape[:-1], v.shape[-1])
            largest = jnp.full((shape[0], shape[2], shape[1]), MASK_VALUE, dtype)
            start.append((jnp.zeros(shape, dtype), pairs_of(largest)))
        outs, log_sums = zip(*self._go_round(attend, start, [], [k, v], self._of_chunks(extras))[0], strict=True)
        return jnp.concatenate(outs, 1).astype(q.dtype), jnp.concatenate(log_sums, 2)

    def backward(self, q: Any, k: Any, v: Any, extras: Operands, out: Any, log_sum: Any, g: Any) -> list[Any]:
        """Returns the gradients of queries, keys, values and, if there is one, the bias."""
        queries, outs, log_sums, gs = (self._split(x, dim) for x, dim in ((q, 1), (out, 1), (pairs_of(log_sum), 2), (g, 1)))

        def differentiate(chunk: int, pair: _Pair, done: Any, sums: Any, k: Any, v: Any) -> tuple[Any, Any]:
            results = outs[chunk], pair.of_rows(log_sums[chunk], NO_WEIGHTS), pair.of_rows(gs[chunk], 0)
            dq, dk, dv, *d_bias = self.kernel.backward(pair.setting, queries[chunk], k, v, pair.extras, *results)
            new = [done[0] + dq, *(pair.add_columns(total, x) for total, x in zip(done[1:], d_bias, strict=True))]
            return new, [total + x for total, x in zip(sums, (dk, dv), strict=True)]

        chunks = self._of_chunks(extras)
        start = [
            [_zeros(q), *(_zeros(x[name]) for name in x if name == "bias")] for q, x in zip(queries, chunks, strict=True)
        ]
        done, d_kv = self._go_round(differentiate, start, [_zeros(k), _zeros(v)], [k, v], chunks)
        dqs, *d_biases = zip(*done, strict=True)
        grads = [jnp.concatenate(dqs, 1), *d_kv]
        grads += [jnp.concatenate(xs, 2) if extras["bias"].shape[2] > 1 else sum(xs) for xs in d_biases]
        likes = [q, k, v, *(extras[name] for name in extras if name == "bias")]
        return [x.astype(like.dtype) for x, like in zip(grads, likes, strict=True)]

    def _go_round(
        self, fn: Callable[..., Any], done: list[Any], sums: list[Any], kv: list[Any], extras: list[Operands]
    ) -> tuple[list[Any], list[Any]]:
        """Returns what `fn` makes of each chunk of queries, and the sums that belong to this device's keys.

        **Arguments:**

        - `fn`: `fn(chunk, pair, done, sums, k, v) -> done, sums`, of a chunk of queries and one of keys.
        - `done`: the initial result of each chunk of queries, which stays on the device.
        - `sums`: the initial sums for each key, in which all devices add: zeros.
        - `extras`: the optional operands of each chunk of queries.
        """
        rounds = self._rounds()
        kv = [self._send(x, rounds.start) for x in kv]

        def visit(carry: Any, i: Any) -> tuple[list[Any], list[Any]]:
            """Adds the pairs of chunks of round `i`. The sums of the rounds before travel meanwhile."""
            done, kv, sums = list(carry[0]), carry[1], carry[2]
            source, parts = (jax.lax.axis_index(self.layout.axis) - i) % self.layout.n, []
            for key_chunk, (k, v) in enumerate(zip(*map(self._split, kv), strict=True)):
                part = [_zeros(x) for x in (k, v)[: len(sums)]]
                for chunk in range(len(done)):
                    pair = self._index(jax.lax.axis_index(self.layout.axis), chunk), self._index(source, key_chunk)
                    call = partial(fn, chunk)
                    done[chunk], part = self._if_visible(call, *pair, extras[chunk], done[chunk], part, k, v)
                parts.append(part)
            new = [jnp.concatenate(xs, 1) for xs in zip(*parts, strict=True)]
            return done, [self._send(total, 1) + x for total, x in zip(sums, new, strict=True)]

        def step(carry: Any, i: Any) -> tuple[Any, None]:
            done, sums = visit(carry, i)
            return (done, [self._send(x, 1) for x in carry[1]], sums), None

        carry, _ = jax.lax.scan(step, (done, kv, sums), jnp.arange(rounds.start, rounds.stop - 1))
        done, sums = visit(carry, rounds.stop - 1)
        return done, [self._send(x, 1 - rounds.stop) for x in sums]

    def _send(self, x: Any, by: int) -> Any:
        """Sends an array to the device that is `by` places further, and returns that of the one as many before."""
        n = self.layout.n
        return jax.lax.ppermute(x, self.layout.axis, [(i, (i + by) % n) for i in range(n)]) if by % n else x

    # --- chunks -------------------------------------------------------------------------------------------------------

    def _split(self, x: Any, dim: int = 1) -> list[Any]:
        """Returns the chunks of a device's positions."""
        return jnp.split(x, 2, dim) if self.layout.is_zigzag else [x]

    def _of_chunks(self, extras: Operands) -> list[Operands]:
        """Returns the optional operands of each chunk of queries."""
        return [map_queries(extras, lambda x, dim, i=i: self._split(x, dim)[i]) for i in range(1 + self.layout.is_zigzag)]

    def _index(self, device: Any, chunk: int) -> Any:
        """Returns which of all chunks a device has as its first, or second; of a pair, the even one is the first."""
        if not self.layout.is_zigzag:
            return device
        last = 2 * self.layout.n - 1
        even = jnp.where(device % 2 == 0, device, last - device)
        return last - even if chunk else even

    def _rounds(self) -> range:
        """Returns the rounds: in round `i`, a device has the keys of the `i`-th device before it."""
        setting, n = self.layout.setting, self.layout.n
        if setting.window is None:
            return range(n)
        reach = -(-(setting.window - 1) * n // self.layout.n_queries)
        rounds = range(0 if setting.causal else -reach, reach + 1)
        return rounds if len(rounds) < n else range(n)

    def _seen(self, distance: int, size: int) -> AttentionSetting | None:
        """Returns the setting of a chunk of queries which is so many chunks after one of keys; None if it sees no key."""
        setting, nearest, furthest = self.layout.setting, (distance - 1) * size + 1, (distance + 1) * size - 1
        causal, window = setting.causal, setting.window
        if (causal and furthest < 0) or (window is not None and (nearest >= window or furthest <= -window)):
            return None
        if window is not None and furthest < window and (causal or nearest > -window):
            window = None
        causal = causal and (nearest < 0 or window is not None)
        is_masked = causal or window is not None
        return replace(setting, causal=causal, window=window, offset=distance * size if is_masked else 0)

    def _if_visible(
        self, fn: Callable[..., Any], chunk: Any, key_chunk: Any, extras: Operands, done: Any, sums: Any, k: Any, v: Any
    ) -> tuple[Any, Any]:
        """Returns `fn(pair, done, sums, k, v)`, or `done` and `sums` if these queries see none of the keys."""
        size, last = k.shape[1], self.layout.n * (1 + self.layout.is_zigzag) - 1
        settings: list[Any] = [None]  # the first branch computes nothing
        branches = []
        for distance in range(-last, last + 1) if self.layout.drops_keys else [0]:
            setting = self._seen(distance, size)
            settings += [] if setting in settings else [setting]
            branches.append(settings.index(setting))
        branch: Any = jnp.asarray(np.array(branches))[chunk - key_chunk + last] if self.layout.drops_keys else 1
        start = key_chunk * size
        if "lengths" in extras:
            branch = jnp.where(jnp.any(extras["lengths"] > start), branch, 0)
        if "query_segments" in extras:
            of_keys = jax.lax.dynamic_slice_in_dim(extras["key_segments"], start, size, 1)
            branch = jnp.where(may_meet(span(extras["query_segments"]), span(of_keys)), branch, 0)

        def compute(setting: Any, done: Any, sums: Any, k: Any, v: Any) -> tuple[Any, Any]:
            return fn(_Pair(setting, extras, start, size), done, sums, k, v)

        def unchanged(done: Any, sums: Any, *_: Any) -> tuple[Any, Any]:
            return done, sums

        fns = [unchanged, *(partial(compute, setting) for setting in settings[1:])]
        if isinstance(branch, int):
            return fns[branch](done, sums, k, v)
        return jax.lax.switch(branch, fns, done, sums, k, v)


@dataclass(frozen=True)
class _Pair:
    """A chunk of queries and one of keys: `size` keys from `start` on. `whole` are the optional operands of these queries
    and all keys."""

    setting: AttentionSetting
    whole: Operands
    start: Any
    size: int

    @property
    def extras(self) -> Operands:
        """The optional operands. A kernel may give NaN for a row without keys, so it gets one. `of_rows` removes it."""
        extras = of_columns(self.whole, self.start, self.size)
        return {name: jnp.maximum(x, 1) if name == "lengths" else x for name, x in extras.items()}

    def of_rows(self, x: Any, value: float) -> Any:
        """Puts a value in place of the rows that have none of these keys."""
        if "lengths" not in self.whole:
            return x
        return jnp.where((self.whole["lengths"] > self.start).reshape(-1, *[1] * (x.ndim - 1)), x, value)

    def add_columns(self, total: Any, x: Any) -> Any:
        """Adds the gradient of the bias of these keys to that of all keys."""
        old = jax.lax.dynamic_slice_in_dim(total, self.start, self.size, -1)
        return jax.lax.dynamic_update_slice_in_dim(total, old + x, self.start, -1)


def _merged(one: tuple[Any, Any], two: tuple[Any, Any]) -> tuple[Any, Any]:
    """Returns the output and the log-sum-exps, as pairs, of two parts of the keys together."""
    largest = jnp.maximum(one[1][..., 0], two[1][..., 0])
    out, log_total = merge([(out, pair[..., 0] - largest + pair[..., 1]) for out, pair in (one, two)])
    return out, jnp.stack([largest, log_total], -1)


def _zeros(x: Any) -> Any:
    return jnp.zeros(x.shape, at_least_float32(x.dtype))
