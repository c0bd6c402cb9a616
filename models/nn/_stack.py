"""`Stack`: equal blocks applied in sequence, stored as one block with a leading layer dim.

This module owns how blocks are stored, scanned and rematerialized. It does not depend on what a block contains.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from redeqx._tree import named_leaves
from redeqx.errors import wrong

Block = TypeVar("Block", bound=eqx.Module)


class Stack(eqx.Module, Generic[Block]):
    """`n_layers` equal blocks, applied in sequence by one `jax.lax.scan`, so that compile time does not grow with depth.

    `stack.blocks` is one block whose arrays all have the shape `[n_layers, ...]`. It may also be the list that
    `stack.unstack()` returns: the blocks are then applied one by one, with the same result.
    """

    blocks: Block | list[Block]
    n_layers: int = eqx.field(static=True)
    remat: bool | Callable[..., Any] = eqx.field(static=True)

    def __init__(
        self,
        make_block: Callable[[PRNGKeyArray], Block],
        n_layers: int,
        *,
        remat: bool | Callable[..., Any] = False,
        key: PRNGKeyArray,
    ):
        """**Arguments:**

        - `make_block`: a function from a key to one block. All blocks share its non-array parts.
        - `n_layers`: the number of blocks, at least 1.
        - `remat`: whether the backward pass recomputes each block from its input instead of storing intermediate values. A
            policy of `jax.checkpoint_policies` selects values that are stored anyway.
        - `key`: split into one key for each block.

        Raises ValueError if `n_layers` is less than 1.
        """
        if n_layers < 1:
            raise wrong("n_layers", "at least 1", n_layers, "Omit the stack from such a model.")
        self.blocks = eqx.filter_vmap(make_block)(jax.random.split(key, n_layers))
        self.n_layers = n_layers
        self.remat = remat

    @classmethod
    def of(cls, blocks: Sequence[Block], *, remat: bool | Callable[..., Any] = False) -> "Stack[Block]":
        """Returns the stack of existing blocks, such as those from a file with numbered layers. `unstack` is the inverse.

        **Arguments:**

        - `blocks`: at least one block, all with the same structure, shapes, dtypes and non-array parts.
        - `remat`: as for `Stack`.

        Raises ValueError if there is no block, or if one differs from the first.
        """
        if not blocks:
            raise wrong("blocks", "at least 1", "0", "Omit the stack from such a model.")
        for i, block in enumerate(blocks):
            _check_alike(i, blocks[0], block)
        first, rest = eqx.partition(blocks[0], eqx.is_array)
        arrays = [first, *(eqx.filter(block, eqx.is_array) for block in blocks[1:])]
        stacked = eqx.combine(jax.tree.map(lambda *leaves: jnp.stack(leaves), *arrays), rest)
        # An abstract stack, so that no block is created only to be replaced.
        like = eqx.filter_eval_shape(cls, lambda key: blocks[0], len(blocks), remat=remat, key=jax.random.key(0))
        return eqx.tree_at(lambda stack: stack.blocks, like, stacked)

    def unstack(self) -> list[Block]:
        """Returns the blocks as a list, in order, each with its own arrays."""
        return [self[i] for i in range(self.n_layers)]

    def __getitem__(self, i: int) -> Block:
        """Returns the `i`-th block; a negative index counts from the end. Raises IndexError if it is out of range."""
        i = operator.index(i)
        if not -self.n_layers <= i < self.n_layers:
            raise IndexError(
                f"`stack[{i}]`: expected an index from {-self.n_layers} to {self.n_layers - 1}, got {i}. Count from 0."
            )
        if isinstance(self.blocks, list):
            return self.blocks[i]
        return jax.tree.map(lambda leaf: leaf[i] if eqx.is_array(leaf) else leaf, self.blocks)

    def __call__(self, x: Any, *args: Any, each: Any = None, key: PRNGKeyArray | None = None) -> Any:
        """Applies every block, first to last: `x = block(x, *args, key=...)`.

        **Arguments:**

        - `x`: what each block passes to the next: an array, or a PyTree of arrays, of constant shapes and dtypes.
        - `args`: passed to each block unchanged, such as a mask.
        - `each`: arrays `[n_layers, ...]`, or a PyTree of them, whose part for a block is its last argument; None for none.
        - `key`: split into one key for each block; None passes None to each, as in inference.
        """
        keys = None if key is None else jax.random.split(key, self.n_layers)
        if isinstance(self.blocks, list):
            for i, block in enumerate(self.blocks):
                own = () if each is None else (jax.tree.map(operator.itemgetter(i), each),)
                x = self._apply(block, x, (*args, *own), None if keys is None else keys[i])
            return x

        arrays, rest = eqx.partition(self.blocks, eqx.is_array)

        def body(x: Any, layer: tuple[Any, Any, Any]) -> tuple[Any, None]:
            arrays, key, own = layer
            return self._apply(eqx.combine(arrays, rest), x, args if own is None else (*args, own), key), None

        return jax.lax.scan(body, x, (arrays, keys, each))[0]

    def collect(self, x: Any, *args: Any, after: Sequence[int], key: PRNGKeyArray | None = None) -> list[Any]:
        """Applies every block as a call does, and returns what the numbers of blocks `after` have passed on; 0 is `x`."""
        keys = None if key is None else jax.random.split(key, self.n_layers)
        if isinstance(self.blocks, list):
            passed = [x]
            for i, block in enumerate(self.blocks):
                passed.append(self._apply(block, passed[-1], args, None if keys is None else keys[i]))
            return [passed[n] for n in after]

        arrays, rest = eqx.partition(self.blocks, eqx.is_array)

        def body(carry: tuple[Any, list[Any]], layer: tuple[Any, Any, Array]) -> tuple[Any, None]:
            (x, kept), (arrays, key, n_before) = carry, layer
            x = self._apply(eqx.combine(arrays, rest), x, args, key)
            choose = lambda n: lambda new, old: jnp.where(n_before + 1 == n, new, old)  # noqa: E731
            return (x, [jax.tree.map(choose(n), x, old) for n, old in zip(after, kept, strict=True)]), None

        return jax.lax.scan(body, (x, [x] * len(after)), (arrays, keys, jnp.arange(self.n_layers)))[0][1]

    def map(self, fn: Callable[[Block], Any]) -> Any:
        """Calls `fn(block)` for each block independently. The arrays of the results are stacked, `[n_layers, ...]`."""
        if isinstance(self.blocks, list):
            return jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(fn, self.blocks))
        return eqx.filter_vmap(fn)(self.blocks)

    def _apply(self, block: Any, x: Any, args: tuple[Any, ...], key: PRNGKeyArray | None) -> Any:
        if self.remat is False:
            return block(x, *args, key=key)
        policy = None if self.remat is True else self.remat
        # Inside a scan XLA cannot merge the recomputed block with the forward computation, so no barrier is needed.
        in_scan = not isinstance(self.blocks, list)
        apply = eqx.filter_checkpoint(
            lambda block, x, args, key: block(x, *args, key=key), policy=policy, prevent_cse=not in_scan
        )
        return apply(block, x, args, key)


def _check_alike(i: int, first: eqx.Module, block: eqx.Module) -> None:
    """Raises ValueError, with the leaf's name, if the `i`-th block cannot be stacked with the first."""
    wanted, got = named_leaves(first), named_leaves(block)
    if jax.tree.structure(block) != jax.tree.structure(first):
        differing = sorted(wanted.keys() ^ got.keys())
        raise ValueError(
            f"`blocks.{i}`: expected the structure of `blocks.0`, got another one"
            f"{' (`' + '`, `'.join(differing) + '`)' if differing else ''}. Stack only equal blocks."
        )
    for name, leaf in wanted.items():
        other = got[name]
        if _describe(leaf) != _describe(other):
            rule = f"{_describe(leaf)} as in `blocks.0`"
            raise wrong(f"blocks.{i}.{name}", rule, _describe(other), "Stack only equal blocks.")


def _describe(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}" if isinstance(leaf, Array) else repr(leaf)
