"""`Cache`: what a decoder keeps of an example's earlier tokens: keys and values, and states of layers without attention.

Dims: seq = tokens of a call, groups x size = width of keys, groups x value_size = width of values, length = slots.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from redeqx._rounding import at_least_float32


class States(eqx.Module):
    """The states of one example after its tokens so far, for all layers of a decoder that have one in place of keys and
    values. As in a `Cache`, each of these layers writes its state and advances to the next.

    There is one slot, or one for each of the last tokens, in turn. Then the cache's `index` may go back by fewer tokens than
    there are slots, as in speculative decoding.
    """

    rows: tuple[Float[Array, "layers slots kept _"], ...]  # the last inputs of convolutions
    memory: Float[Array, "layers slots heads size value_size"] | None  # None for layers that have no more than these rows
    layer: Int[Array, ""]

    @classmethod
    def empty(cls, rows: tuple[tuple[int, ...], ...], memory: tuple[int, ...] | None, dtype: Any) -> "States":
        """Returns states of zeros in one slot, from the shapes of both without the slots. `memory` has at least float32."""
        make = lambda shape, dtype: jnp.zeros((shape[0], 1, *shape[1:]), dtype)  # noqa: E731
        kept = None if memory is None else make(memory, at_least_float32(dtype))
        return cls(tuple(make(shape, dtype) for shape in rows), kept, jnp.zeros((), jnp.int32))

    @property
    def n_slots(self) -> int:
        """The number of slots."""
        return self.rows[0].shape[1]

    def read(
        self, index: Int[Array, ""]
    ) -> tuple[tuple[Float[Array, "kept _"], ...], Float[Array, "heads size value_size"] | None]:
        """Returns the state of the next layer, before the token of this index."""

        def pick(array: Array) -> Array:
            array = jax.lax.dynamic_index_in_dim(array, self.layer, keepdims=False)
            return (
                array[0] if self.n_slots == 1 else jax.lax.dynamic_index_in_dim(array, index % self.n_slots, keepdims=False)
            )

        return jax.tree.map(pick, (self.rows, self.memory))

    def write(
        self,
        rows: tuple[Float[Array, "tokens kept _"], ...],
        memory: Float[Array, "tokens heads size value_size"] | None,
        index: Int[Array, ""],
    ) -> "States":
        """Writes the states of the next layer after each token, of which `index` is the first; with one slot, only that
        after the last token."""

        def put(old: Array, new: Array) -> Array:
            new = new.astype(old.dtype)
            if self.n_slots == 1:
                return jax.lax.dynamic_update_index_in_dim(old, new, self.layer, 0)
            return old.at[self.layer, (index + 1 + jnp.arange(len(new))) % self.n_slots].set(new)

        rows, memory = jax.tree.map(put, (self.rows, self.memory), (rows, memory))
        return States(rows, memory, self.layer + 1)

    def keep(self, n_slots: int) -> "States":
        """Returns the same states, from now on with so many slots."""
        repeat = lambda array: jnp.repeat(array, n_slots, axis=1)  # noqa: E731
        kept = jax.tree.map(repeat, (self.rows, self.memory))
        return eqx.tree_at(lambda s: (s.rows, s.memory), self, kept, is_leaf=lambda x: x is None)


class Cache(eqx.Module):
    """The keys and values of one example's tokens so far, for all layers of a decoder, with one slot for each token.

    Each call writes its tokens at the same slots in every row of a batch. Under `jax.vmap` (with `in_axes=axes()`) a write
    therefore remains one `dynamic_update_slice`. A decoder passes the cache from block to block. Each block writes its layer
    and advances to the next.

    If keys and values of layers have different shapes, there are arrays for each kind of layers (`of_kinds`). A decoder then
    says by `at` which of them a layer writes to.
    """

    keys: Float[Array, "*layers groups length size"] | tuple[Array, ...]
    values: Float[Array, "*layers groups length value_size"] | tuple[Array, ...]
    mask: Bool[Array, "*length"]  # True for slots that hold a token, not padding
    index: Int[Array, ""]  # the first slot of the current tokens, which is the number of slots filled before
    layer: Int[Array, ""]  # the layer that writes next
    memory: tuple[Array, Array] | None = None  # keys and values of a cross-attention, [layers groups source size] each
    memory_mask: Bool[Array, " source"] | None = None  # True for source positions that are attended to; None for all
    states: States | None = None  # of layers that have no keys and values; None if all have
    store: int | None = eqx.field(static=True, default=None)  # the kind of the layer that writes next
    is_paired: bool = eqx.field(static=True, default=False)  # whether there are two of all keys, values and states

    @classmethod
    def of_kinds(cls, sizes: Sequence[tuple[int, int, int]], length: int, dtype: Any) -> "Cache":
        """Returns a cache of `length` empty slots, for kinds of layers with different keys and values.

        **Arguments:**

        - `sizes`: the number of layers of each kind, their key/value heads, and the width of a head.
        """
        make = lambda: tuple(jnp.zeros((n, groups, length, size), dtype) for n, groups, size in sizes)  # noqa: E731
        zero = jnp.zeros((), jnp.int32)
        return cls(make(), make(), jnp.zeros(length, bool), zero, zero)

    @classmethod
    def empty(
        cls,
        n_layers: int,
        length: int,
        n_kv_heads: int,
        size: int,
        dtype: Any,
        *,
        value_size: int | None = None,
        memory: tuple[Array, Array] | None = None,
        memory_mask: Bool[Array, " source"] | None = None,
    ) -> "Cache":
        """Returns a cache of `length` empty slots, with or without a memory. Values have the width of keys by default."""
        keys, zero = jnp.zeros((n_layers, n_kv_heads, length, size), dtype), jnp.zeros((), jnp.int32)
        values = jnp.zeros((*keys.shape[:-1], size if value_size is None else value_size), dtype)
        return cls(keys, values, jnp.zeros(length, bool), zero, zero, memory, memory_mask)

    def begin(self, mask: Bool[Array, " seq"]) -> "Cache":
        """Reserves slots for `seq` more tokens, before any layer writes their keys and values.

        **Arguments:**

        - `mask`: True for tokens, False for padding.
        """
        mask = jax.lax.dynamic_update_slice(self.mask, mask, (self.index,))
        return eqx.tree_at(lambda c: (c.mask, *_layers(c)), self, (mask, *map(jnp.zeros_like, _layers(self))))

    def end(self, seq: int) -> "Cache":
        """Ends a call, after all layers have written `seq` tokens."""
        zeros = map(jnp.zeros_like, _layers(self))
        return eqx.tree_at(lambda c: (c.index, *_layers(c)), self, (self.index + seq, *zeros))

    def write(
        self, keys: Float[Array, "groups seq size"], values: Float[Array, "groups seq value_size"]
    ) -> tuple["Cache", Float[Array, "groups length size"], Float[Array, "groups length value_size"]]:
        """Writes the current tokens' keys and values for the next layer. Returns the cache, and all keys and values of that
        layer."""
        zero = jnp.zeros_like(self.layer)  # of the same dtype as the counters: in 64-bit mode a Python 0 is an int64
        start = (self.layer, zero, self.index, zero)
        old_keys, old_values = self._stored()
        all_keys = jax.lax.dynamic_update_slice(old_keys, keys[None].astype(old_keys.dtype), start)
        all_values = jax.lax.dynamic_update_slice(old_values, values[None].astype(old_values.dtype), start)
        cache = eqx.tree_at(lambda c: (*c._stored(), c.layer), self, (all_keys, all_values, self.layer + 1))
        pick = lambda array: jax.lax.dynamic_index_in_dim(array, self.layer, keepdims=False)  # noqa: E731
        return cache, pick(all_keys), pick(all_values)

    def at(self, store: int | None, layer: Int[Array, ""]) -> "Cache":
        """Returns the cache for a layer of one kind, whose index among these is `layer`; or with None for all layers."""
        return replace(self, store=store, layer=layer)

    def read(self) -> tuple[Float[Array, "groups length size"], Float[Array, "groups length value_size"]]:
        """Returns all keys and values of the last layer of the kind."""
        keys, values = self._stored()
        return keys[-1], values[-1]

    def _stored(self) -> tuple[Any, Any]:
        """The arrays of the kind, or of all layers."""
        of: Any = (lambda arrays: arrays) if self.store is None else lambda arrays: arrays[self.store]
        return of(self.keys), of(self.values)

    def read_memory(self) -> tuple[Float[Array, "groups source size"], Float[Array, "groups source size"]]:
        """Returns the cross-attention's keys and values of the layer that wrote last: its self-attention runs first."""
        assert self.memory is not None
        keys, values = self.memory
        pick = lambda array: jax.lax.dynamic_index_in_dim(array, self.layer - 1, keepdims=False)  # noqa: E731
        return pick(keys), pick(values)

    def keep(self, n: int) -> "Cache":
        """Returns the cache, from now on with the states after each of the last `n` tokens, so that `index` may go back by
        fewer."""
        return self if self.states is None else eqx.tree_at(lambda c: c.states, self, self.states.keep(n))

    def paired(self) -> "Cache":
        """Returns the cache with two of all keys, values and states: for a short text, and for the same one as part of a
        long one. `pair_axes` are the axes for `jax.vmap` over the two."""
        doubled = lambda axis, array: array if axis is None else jnp.stack([array] * 2, axis)  # noqa: E731
        axes = self.pair_axes()
        keys, values = jax.tree.map(lambda array: doubled(0, array), (self.keys, self.values))
        states = jax.tree.map(doubled, axes.states, self.states, is_leaf=lambda x: x is None)
        return replace(self, keys=keys, values=values, states=states, is_paired=True)

    def second(self) -> "Cache":
        """Returns the cache of a pair that is for a long text."""
        keys, values = jax.tree.map(lambda array: array[1], (self.keys, self.values))
        pick = lambda axis, array: array if axis is None else array[..., 1]  # noqa: E731
        states = jax.tree.map(pick, self.pair_axes().states, self.states, is_leaf=lambda x: x is None)
        return replace(self, keys=keys, values=values, states=states, is_paired=False)

    def pair_axes(self) -> "Cache":
        """Returns the axes for `jax.vmap` over the two of a pair, which share all else. That of states is the last, so that
        `keep` needs no rule for them."""
        axes = eqx.tree_at(lambda c: c.states, self, jax.tree.map(lambda _: -1, self.states), is_leaf=lambda x: x is None)
        axes = eqx.tree_at(lambda c: (c.keys, c.values), axes, jax.tree.map(lambda _: 0, (self.keys, self.values)))
        of_states = (lambda c: ()) if self.states is None else lambda c: (c.states.layer,)
        shared = lambda c: (c.mask, c.index, c.layer, c.memory, c.memory_mask, *of_states(c))  # noqa: E731
        return eqx.tree_at(shared, axes, replace_fn=lambda _: None, is_leaf=lambda x: x is None)

    def axes(self, *, shares_memory: bool = False) -> "Cache":
        """Returns `in_axes` and `out_axes` for `jax.vmap` over rows. Counters are shared; everything else is batched.

        **Arguments:**

        - `shares_memory`: whether all rows attend to the same memory, as the beams of one example do.
        """
        batched = jax.tree.map(lambda _: 0, self)
        of_memory = (lambda c: (c.memory, c.memory_mask)) if shares_memory else lambda c: ()
        of_states = (lambda c: ()) if self.states is None else lambda c: (c.states.layer,)
        shared = lambda c: (c.index, c.layer, *of_memory(c), *of_states(c))  # noqa: E731
        return eqx.tree_at(shared, batched, replace_fn=lambda _: None, is_leaf=lambda x: x is None)


def _layers(cache: Cache) -> tuple[Any, ...]:
    """Returns the counters of layers."""
    return (cache.layer,) if cache.states is None else (cache.layer, cache.states.layer)


class LatestKeys(eqx.Module):
    """The keys and values of the last layer of each kind, in place of a cache, in a model whose later layers share them."""

    keys: tuple[Float[Array, "_ seq _"], ...]
    values: tuple[Float[Array, "_ seq _"], ...]
    store: int | None = eqx.field(static=True, default=None)

    def at(self, store: int | None, layer: Int[Array, ""]) -> "LatestKeys":
        """Returns the same for a layer of one kind."""
        del layer
        return replace(self, store=store)

    def write(
        self, keys: Float[Array, "groups seq size"], values: Float[Array, "groups seq size"]
    ) -> tuple["LatestKeys", Float[Array, "groups seq size"], Float[Array, "groups seq size"]]:
        """Keeps the keys and values of a layer. Returns them, too."""
        new = (keys.astype(self.keys[0].dtype), values.astype(self.keys[0].dtype))
        latest = eqx.tree_at(lambda c: (c.keys[self.store], c.values[self.store]), self, new)
        return latest, keys, values

    def read(self) -> tuple[Float[Array, "groups seq size"], Float[Array, "groups seq size"]]:
        """Returns the keys and values of the last layer of the kind."""
        assert self.store is not None
        return self.keys[self.store], self.values[self.store]
