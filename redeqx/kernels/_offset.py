"""Causal attention of a chunk of queries, by a kernel whose causal mask begins at the first query and the first key.

A chunk of queries begins at a later position if the positions are split. Its keys end where its queries end, so:

- it attends to its own keys causally and to all keys before them without a mask. The log-sum-exps merge the two;
- with a window it is prepended with dummy queries, so that there are as many queries as keys;
- if the kernel takes a dense mask anyway, the causal mask becomes a part of it.

Source of the merge: FlashAttention, arXiv:2205.14135. In the backward pass, each part takes the output and the
log-sum-exps of the whole.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from .._rounding import at_least_float32
from ._setting import MASK_VALUE, AttentionSetting, Unsupported, make_mask, numbers_of

Operands = dict[str, Any]
_DENSE = ("bias", "mask", "query_segments")


@dataclass(frozen=True)
class WithOffset:
    """A kernel that supports `AttentionSetting.offset`, made of the forward and the backward pass of one that does not, as
    in `_blockwise`."""

    attend: Callable[..., tuple[Any, Any]]
    differentiate: Callable[..., list[Any]]

    def forward(self, setting: AttentionSetting, q: Any, k: Any, v: Any, extras: Operands) -> tuple[Any, Any]:
        """Same as `_blockwise.forward`."""
        parts = []
        for part in _parts(setting, q, k, v, extras):
            out, log_sum = self.attend(part.setting, part.prepended(q), part.k, part.v, part.extras)
            out, log_sum = part.without_dummies(out), part.without_dummies(log_sum, 2)
            if part.has_keys is not None:
                out = jnp.where(part.has_keys[:, None, None, None], out, 0)
                log_sum = jnp.where(part.has_keys[:, None, None], log_sum, MASK_VALUE)
            parts.append((out, log_sum))
        if len(parts) == 1:
            return parts[0]
        out, log_sum = merge(parts)
        return out.astype(q.dtype), log_sum

    def backward(
        self, setting: AttentionSetting, q: Any, k: Any, v: Any, extras: Operands, out: Any, log_sum: Any, g: Any
    ) -> list[Any]:
        """Same as `_blockwise.backward`."""
        grads, log_sum = [], numbers_of(log_sum)
        for part in _parts(setting, q, k, v, extras):
            # Dummy queries have no gradient, so they add nothing to those of keys and values.
            results = part.prepended(out), part.prepended(log_sum, 2), part.prepended(g)
            dq, *others = self.differentiate(part.setting, part.prepended(q), part.k, part.v, part.extras, *results)
            of_part = [part.without_dummies(dq), *others]
            if part.has_keys is not None:
                of_part = [jnp.where(part.has_keys[:, None, None, None], x, 0) for x in of_part]
            grads.append(of_part)
        if len(grads) == 1:
            return grads[0]
        (dq0, dk0, dv0), (dq1, dk1, dv1) = grads
        return [dq0 + dq1, jnp.concatenate([dk0, dk1], 1), jnp.concatenate([dv0, dv1], 1)]


def merge(parts: Sequence[tuple[Any, Any]]) -> tuple[Any, Any]:
    """Returns the output, in at least float32, and the log-sum-exps of two parts of the keys together."""
    (one, one_sum), (two, two_sum) = parts
    total = jnp.logaddexp(one_sum, two_sum)

    def weigh(out: Any, log_sum: Any) -> Any:
        return out.astype(at_least_float32(out.dtype)) * jnp.swapaxes(jnp.exp(log_sum - total), 1, 2)[..., None]

    return weigh(one, one_sum) + weigh(two, two_sum), total


@dataclass(frozen=True)
class _Part:
    """Some keys of a chunk of queries, to which `n_dummies` are prepended. `has_keys` says which rows have any of these
    keys; None for all."""

    setting: AttentionSetting
    k: Any
    v: Any
    extras: Operands
    n_dummies: int = 0
    has_keys: Any = None

    def prepended(self, x: Any, dim: int = 1) -> Any:
        """Prepends zeros to a dim of queries."""
        n = self.n_dummies
        return jnp.pad(x, [(n if i == dim else 0, 0) for i in range(x.ndim)]) if n else x

    def without_dummies(self, x: Any, dim: int = 1) -> Any:
        return x[(slice(None),) * dim + (slice(self.n_dummies, None),)] if self.n_dummies else x


def _parts(setting: AttentionSetting, q: Any, k: Any, v: Any, extras: Operands) -> list[_Part]:
    """Returns all keys as one part, if the kernel can compute them, or those before the chunk and those of the chunk."""
    n, n_keys, at_first = setting.offset, k.shape[1], replace(setting, offset=0)
    if not n or not (setting.causal or setting.window):
        return [_Part(at_first, k, v, extras)]
    if any(name in extras for name in _DENSE):
        mask: Any = make_mask(replace(setting, names=()), n + jnp.arange(q.shape[1]), n_keys, {})
        mask = mask[:, 0]
        extras = {**extras, "mask": extras["mask"] & mask if "mask" in extras else mask}
        return [_Part(replace(at_first, causal=False, window=None, names=tuple(extras)), k, v, extras)]
    if n + q.shape[1] != n_keys:
        raise Unsupported(f"its keys must end where its queries end, at {n + q.shape[1]}, not {n_keys}")
    if setting.window is not None:
        return [_Part(at_first, k, v, extras, n_dummies=n)]
    parts = []
    for start, stop in ((0, n), (n, n_keys)):
        of_part, has_keys = {}, None
        if (lengths := extras.get("lengths")) is not None:
            # A kernel may give NaN for a row without keys, so it gets one, and the result is dropped.
            of_part = {"lengths": jnp.clip(lengths - start, 1, stop - start)}
            has_keys = lengths > start
        part_setting = replace(at_first, causal=start > 0, names=tuple(of_part))
        parts.append(_Part(part_setting, k[:, start:stop], v[:, start:stop], of_part, has_keys=has_keys))
    return parts
