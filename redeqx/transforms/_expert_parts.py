"""Experts over the model axis: devices add up a token's outputs once, not once for each expert that the token was sent to.

The matrices of experts are split as those of an MLP: each device has a part of the hidden features of every expert. So the
device has a part of each output of `down`, and of each input's gradient. To add these up at once is to send the rows of all
choices: `k` for each token, of which the model makes one by a weighted sum. But that sum, and what is between, is linear.
So each device does it with its own part, and the devices add up tokens: `1 / k` of the bytes. In the backward pass it is the
copies of a token, one for each of its choices, whose gradients each device adds up first.

A part is an entry of a leading dim that the model axis splits: `[model shards, rows, d]`.

With `k < M / 2` for M shards, or `k < M` where the residual stream is split, sending tokens to the devices of whole experts
sends less (`_exchange_experts`).

`_group_matmuls` is the rule that applies this.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from ..dims import Related
from ..machine import MODEL
from ..tracing import PRODUCTS, Body, Tag, Tagged, has_tag, insides, n_bytes, plain
from ._constrain import split_over

# Equations that rearrange, repeat or cast their first operand.
_VIEWS = {"reshape", "transpose", "squeeze", "broadcast_in_dim", "tile", "copy", "gather", "convert_element_type"}
_LINEAR = {*_VIEWS, "neg", "reduce_sum"}
_ADDING = ("scatter-add", "scatter_add")


@dataclass(frozen=True)
class Parts(Tag):
    """The tag of a value in parts, `[model shards, ...]`. Equations that do not know the tag get their sum."""

    def release(self, value: Any) -> Any:
        return jnp.sum(value, 0, dtype=value.dtype)


@dataclass(frozen=True)
class Copies(Tag):
    """The tag of a value with its copies: the value is a pair of the plain one and `[model shards, ...]`. Gradients of the
    copies are added up over the devices where the copies are made, those of all products at once."""

    def release(self, value: Any) -> Any:
        return value[0]


@dataclass
class ExpertParts:
    """The values of a function of which each device of the model axis has a part or a copy."""

    mesh: Mesh
    begins: set[Any] = field(default_factory=set)  # the equations whose output is copied
    # Those that repeat tokens for their choices, before grouped matmuls that are split along outputs.
    copies: set[Any] = field(default_factory=set)
    # Other products of tokens that are copied, such as those of a router or of a shared expert, with the index of the
    # operand and the dim of the other one that is split.
    beside: dict[Any, tuple[int, int]] = field(default_factory=dict)
    # The grouped matmuls that are split along what they contract, and whose outputs are added up later.
    products: set[Any] = field(default_factory=set)
    # The linear equations after them, with the index of the operand that is in parts, and whether the output is too: that
    # of the last one is added up.
    sums: dict[Any, tuple[int, bool]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        body: Body,
        n_weights: int,
        columns: Sequence[Any],
        rows: Sequence[Any],
        dims: Mapping[Any, tuple[int | None, int | None]],
        mesh: Mesh,
    ) -> "ExpertParts":
        """Finds them in a function whose first `n_weights` inputs are weights. The model axis splits the grouped matmuls in
        `columns` along their outputs, those in `rows` along what they contract, and of all products the `dims` of both
        operands."""
        parts, weights = cls(mesh), body.closed.jaxpr.invars[:n_weights]
        for eqn in columns:
            chain = chain_before(body, eqn.invars[0], weights)
            sizes = [n_bytes(each.invars[0]) for each in chain]
            if chain and min(sizes) < n_bytes(eqn.invars[0]):
                n = len(sizes) - sizes[::-1].index(min(sizes))
                parts._copy(body, chain[:n], dims)
        for eqn in rows:
            chain = list(chain_after(body, eqn.outvars[0]))
            sizes = [n_bytes(each.outvars[0]) for each, _ in chain]
            if chain and min(sizes) < n_bytes(eqn.outvars[0]):
                n = sizes.index(min(sizes)) + 1
                parts.products.add(eqn)
                parts.sums.update({each: (place, i + 1 < n) for i, (each, place) in enumerate(chain[:n])})
        return parts

    def _copy(self, body: Body, chain: Sequence[Any], dims: Mapping[Any, tuple[int | None, int | None]]) -> None:
        """Notes the equations of a chain of copies, the last one first, and the products beside it."""
        self.copies.update(chain)
        begin = body.producer(chain[-1].invars[0])
        if begin is None or insides(begin) or begin.primitive.name in PRODUCTS:  # the first equation makes the copies
            return
        self.begins.add(begin)
        for eqn in (reader for each in chain for reader in body.readers(each.invars[0])):
            is_product = eqn is not None and eqn.primitive.name == "dot_general"
            found = [(side, dim) for side, dim in enumerate(dims.get(eqn, ()) if is_product else ()) if dim is not None]
            if len(found) == 1:
                ((side, dim),), related = found, Related(eqn)
                if dim in related.places(side) and dim not in related.partners(side):
                    self.beside[eqn] = 1 - side, dim

    def __contains__(self, eqn: Any) -> bool:
        return any(eqn in each for each in (self.begins, self.copies, self.beside, self.sums))

    def compute(self, eqn: Any, ins: Sequence[Any], fn: Callable[[Sequence[Any]], Sequence[Any]]) -> Sequence[Any]:
        """Returns the outputs of an equation that is no grouped matmul, and that `fn` computes for any operands."""
        if eqn in self.copies:
            x = ins[0] if has_tag(ins[0], Copies) else self._copied(plain(ins[0]))
            (out,) = fn([x.value[0], *ins[1:]])
            return [Copies().begin((out, self._each(fn, ins, 0, x.value[1])))]
        if eqn in self.begins:
            return [self._copied(plain(out)) for out in fn(ins)]
        if eqn in self.beside:
            place, dim = self.beside[eqn]
            is_copied = has_tag(ins[place], Copies)
            return [self._product(eqn, ins[place].value[1], plain(ins[1 - place]), place, dim)] if is_copied else fn(ins)
        place, continues = self.sums[eqn]
        if not has_tag(ins[place], Parts):  # another rule has computed what is before it
            return fn(ins)
        parts = self.in_parts(self._each(fn, ins, place, ins[place].value))
        return [parts if continues else plain(parts)]

    def _product(self, eqn: Any, copies: Any, weight: Any, place: int, dim: int) -> Any:
        """Returns a product of each copy with its part of a weight."""
        shape, out = weight.shape, eqn.outvars[0].aval
        of_parts = jnp.moveaxis(weight.reshape(*shape[:dim], len(copies), -1, *shape[dim + 1 :]), dim, 0)
        operands = (copies, self._split(of_parts))
        dims = Related(eqn).places(1 - place)

        def of_part(*operands: Any) -> Any:
            return eqn.primitive.bind(*(operands if place == 0 else operands[::-1]), **eqn.params)

        found = self._split(jax.vmap(of_part)(*operands))
        return jnp.moveaxis(found, 0, dims[dim]).reshape(out.shape)

    def in_parts(self, parts: jax.Array) -> Tagged:
        return Parts().begin(self._split(parts))

    def _copied(self, value: jax.Array) -> Tagged:
        copies = jnp.broadcast_to(value, (self.mesh.shape[MODEL], *value.shape))
        return Copies().begin((value, self._split(copies)))

    def _each(self, fn: Callable[[Sequence[Any]], Sequence[Any]], ins: Sequence[Any], place: int, values: Any) -> jax.Array:
        """Computes an equation for each entry of one of its operands."""
        return self._split(jax.vmap(lambda value: fn([*ins[:place], value, *ins[place + 1 :]])[0])(values))

    def _split(self, x: jax.Array) -> jax.Array:
        return split_over(x, self.mesh, {0: MODEL})


def chain_before(body: Body, atom: Any, weights: Collection[Any]) -> list[Any]:
    """Returns the equations that an operand comes from, the last one first, as long as they rearrange or repeat tokens."""
    chain: list[Any] = []
    while (eqn := body.producer(atom)) is not None and eqn.primitive.name in _VIEWS and _is_float(eqn.invars[0]):
        chain.append(eqn)
        atom = eqn.invars[0]
    if body.origin(atom) in weights:  # tokens are looked up in an embedding
        names = [each.primitive.name for each in chain]
        return chain[: len(names) - 1 - names[::-1].index("gather")] if "gather" in names else []
    return chain


def chain_after(body: Body, var: Any) -> Iterator[tuple[Any, int]]:
    """Yields the equations that a value goes to, with the index of the operand, as long as there is one and it is linear."""
    while len(readers := body.readers(var)) == 1 and (eqn := readers[0]) is not None:
        places = [i for i, atom in enumerate(eqn.invars) if atom is var]
        if len(places) != 1 or not _is_linear(body, eqn, places[0]):
            return
        yield eqn, places[0]
        (var,) = eqn.outvars


def _is_linear(body: Body, eqn: Any, place: int) -> bool:
    name = eqn.primitive.name
    if len(eqn.outvars) != 1 or not _is_float(eqn.outvars[0]):
        return False
    if name in _ADDING:
        return place == 2 and body.number(eqn.invars[0]) == 0
    return name == "mul" or (name in ("div", *_LINEAR) and place == 0)


def _is_float(atom: Any) -> bool:
    return jnp.issubdtype(atom.aval.dtype, jnp.floating)
