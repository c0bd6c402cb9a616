"""Causal attention of a chunk of queries, by a kernel whose causal mask begins at the first query and the first key.

A chunk of queries begins at a later position if the positions are split. Its keys end where its queries end, so:

- it attends to its own keys causally and to all keys before them without a mask. The log-sum-exps merge the two;
- with a window it is prepended with dummy queries, so that there are as many queries as keys;
- if the kernel takes a dense mask anyway, the causal mask becomes a part of it.

Source of the merge: FlashAttention, arXiv:2205.14135. In the backward pass, each part takes the output and the
log-sum-exps of the whole.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from ._setting import MASK_VALUE, AttentionSetting, Unsupported, make_mask

Operands = dict[str, Any]
_DENSE = ("bias", "mask", "query_segments")


@dataclass(frozen=True)
class WithOffset:
    """A kernel that supports `AttentionSetting.offset`, made of one that does not.

    **Arguments:**

    - `attend`, `differentiate`: the forward and the backward pass of the kernel, as in `_blockwise`.
    """

    attend: Callable[..., tuple[Any, Any]]
    differentiate: Callable[..., list[Any]]

    def forward(self, setting: AttentionSetting, q: Any, k: Any, v: Any, extras: Operands) -> tuple[Any, Any]:
        """Same as `_blockwise.forward`."""
        if not setting.offset or not (setting.causal or setting.window):
            return self.attend(replace(setting, offset=0), q, k, v, extras)
        if any(name in extras for name in _DENSE):
            return self.attend(*_as_mask(setting, q, k, v, extras))
        _check_lengths(setting, q, k)
        if setting.window is not None:
            n = setting.offset
            out, log_sum = self.attend(replace(setting, offset=0), _prepend(q, n, 1), k, v, extras)
            return out[:, n:], log_sum[:, :, n:]
        outs, log_sums = [], []
        for part in _parts(setting, k, v, extras):
            out, log_sum = self.attend(part.setting, q, part.k, part.v, part.extras)
            if part.has_keys is not None:
                out = jnp.where(part.has_keys[:, None, None, None], out, 0)
                log_sum = jnp.where(part.has_keys[:, None, None], log_sum, MASK_VALUE)
            outs.append(out.astype(jnp.float32))
            log_sums.append(log_sum)
        total = jnp.logaddexp(*log_sums)
        weights = [jnp.swapaxes(jnp.exp(log_sum - total), 1, 2)[..., None] for log_sum in log_sums]
        return (outs[0] * weights[0] + outs[1] * weights[1]).astype(q.dtype), total

    def backward(
        self, setting: AttentionSetting, q: Any, k: Any, v: Any, extras: Operands, out: Any, log_sum: Any, g: Any
    ) -> list[Any]:
        """Same as `_blockwise.backward`."""
        if not setting.offset or not (setting.causal or setting.window):
            return self.differentiate(replace(setting, offset=0), q, k, v, extras, out, log_sum, g)
        if any(name in extras for name in _DENSE):
            return self.differentiate(*_as_mask(setting, q, k, v, extras), out, log_sum, g)
        _check_lengths(setting, q, k)
        if setting.window is not None:  # the dummy queries have no gradient, so they add nothing to that of keys and values
            n = setting.offset
            padded = _prepend(q, n, 1), k, v, extras, _prepend(out, n, 1), _prepend(log_sum, n, 2), _prepend(g, n, 1)
            dq, dk, dv = self.differentiate(replace(setting, offset=0), *padded)
            return [dq[:, n:], dk, dv]
        grads = []
        for part in _parts(setting, k, v, extras):
            d_part = self.differentiate(part.setting, q, part.k, part.v, part.extras, out, log_sum, g)
            if part.has_keys is not None:
                d_part = [jnp.where(part.has_keys[:, None, None, None], x, 0) for x in d_part]
            grads.append(d_part)
        (dq0, dk0, dv0), (dq1, dk1, dv1) = grads
        return [dq0 + dq1, jnp.concatenate([dk0, dk1], 1), jnp.concatenate([dv0, dv1], 1)]


@dataclass(frozen=True)
class _Part:
    """Some keys of a chunk of queries, and which rows have any of them; None for all rows."""

    setting: AttentionSetting
    k: Any
    v: Any
    extras: Operands
    has_keys: Any


def _parts(setting: AttentionSetting, k: Any, v: Any, extras: Operands) -> list[_Part]:
    """Returns the keys before the chunk, and those of the chunk itself."""
    n, lengths = setting.offset, extras.get("lengths")
    parts = []
    for start, stop in ((0, n), (n, k.shape[1])):
        of_part, has_keys = {}, None
        if lengths is not None:
            # A kernel may give NaN for a row without keys, so it gets one, and the result is dropped.
            of_part = {"lengths": jnp.clip(lengths - start, 1, stop - start)}
            has_keys = lengths > start
        part_setting = replace(setting, causal=start > 0, offset=0, names=tuple(of_part))
        parts.append(_Part(part_setting, k[:, start:stop], v[:, start:stop], of_part, has_keys))
    return parts


def _as_mask(setting: AttentionSetting, q: Any, k: Any, v: Any, extras: Operands) -> tuple[Any, ...]:
    """Returns the setting and the operands with the causal mask and the window as a part of the mask."""
    positions = setting.offset + jnp.arange(q.shape[1])
    mask: Any = make_mask(replace(setting, names=()), positions, k.shape[1], {})
    mask = mask[:, 0]
    extras = {**extras, "mask": extras["mask"] & mask if "mask" in extras else mask}
    return replace(setting, causal=False, window=None, offset=0, names=tuple(extras)), q, k, v, extras


def _check_lengths(setting: AttentionSetting, q: Any, k: Any) -> None:
    if setting.offset + q.shape[1] != k.shape[1]:
        raise Unsupported(f"its keys must end where its queries end, at {setting.offset + q.shape[1]}, not {k.shape[1]}")


def _prepend(x: Any, n: int, dim: int) -> Any:
    """Prepends `n` zeros to a dim."""
    return jnp.pad(x, [(n if i == dim else 0, 0) for i in range(x.ndim)])
