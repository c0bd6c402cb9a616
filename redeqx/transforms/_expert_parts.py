"""Experts over the model axis: devices add up a token's outputs once, not once for each expert that the token was sent to.

The matrices of experts are split as those of an MLP: each device has a part of the hidden features of every expert. So the
device has a part of each output of `down`, and of each input's gradient. To add these up at once is to send the rows of all
choices: `k` for each token, of which the model makes one by a weighted sum. But that sum, and what is between, is linear.
So each device does it with its own part, and the devices add up tokens: `1 / k` of the bytes. In the backward pass it is the
copies of a token, one for each of its choices, whose gradients each device adds up first.

A part is an entry of a leading dim that the model axis splits: `[model shards, rows, d]`.

Compared with sending tokens to the devices of whole experts and back, by all-to-all: the rest of the model has all tokens on
all devices of the model axis, so these would have to gather the outputs. With `M` shards this sends `2 k / M + 1` times the
tokens, and the sum sends 2 times. Only with `k < M / 2` the former is less.

`_group_matmuls` is the rule that applies this.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from ..machine import MODEL
from ..tracing import Body, Tag, Tagged, has_tag, plain, variables

# Equations that rearrange, repeat or cast their first operand.
_VIEWS = {"reshape", "transpose", "squeeze", "broadcast_in_dim", "tile", "copy", "gather", "convert_element_type"}
_LINEAR = {*_VIEWS, "neg", "reduce_sum"}
_ADDING = ("scatter-add", "scatter_add")


@dataclass(frozen=True)
class Parts(Tag):
    """The tag of a value in parts, `[model shards, ...]`. Equations that do not know the tag get their sum."""

    def release(self, value: Any) -> Any:
        return jnp.sum(value, 0, dtype=value.dtype)


@dataclass
class ExpertParts:
    """The values of a function of which each device of the model axis has a part or a copy.

    **Attributes:**

    - `copies`: the equations that repeat tokens for their choices, before products that are split along their outputs.
    - `begins`: the values from which these start.
    - `products`: the products that are split along what they contract, and whose outputs are added up later.
    - `sums`: the linear equations after them, with the index of the operand that is in parts, and whether the output is too:
        that of the last one is added up.
    """

    mesh: Mesh
    copies: set[Any] = field(default_factory=set)
    begins: set[Any] = field(default_factory=set)
    products: set[Any] = field(default_factory=set)
    sums: dict[Any, tuple[int, bool]] = field(default_factory=dict)
    _copies: dict[Any, jax.Array] = field(default_factory=dict)

    @classmethod
    def of(cls, closed: Any, n_weights: int, columns: Sequence[Any], rows: Sequence[Any], mesh: Mesh) -> "ExpertParts":
        """Finds them in a closed jaxpr in normal form.

        **Arguments:**

        - `n_weights`: the number of the function's first inputs, which are weights.
        - `columns`, `rows`: the grouped matmuls that the model axis splits along their outputs, or along what they contract.
        """
        parts, body, weights = cls(mesh), Body(closed), closed.jaxpr.invars[:n_weights]
        for eqn in columns:
            chain = _before(body, eqn.invars[0], weights)
            sizes = [_size(each.invars[0]) for each in chain]
            if chain and min(sizes) < _size(eqn.invars[0]):
                n = sizes.index(min(sizes)) + 1
                parts.copies.update(chain[:n])
                parts.begins.add(chain[n - 1].invars[0])
        for eqn in rows:
            chain = list(_after(body, eqn.outvars[0]))
            sizes = [_size(each.outvars[0]) for each, _ in chain]
            if chain and min(sizes) < _size(eqn.outvars[0]):
                n = sizes.index(min(sizes)) + 1
                parts.products.add(eqn)
                parts.sums.update({each: (place, i + 1 < n) for i, (each, place) in enumerate(chain[:n])})
        return parts

    def __contains__(self, eqn: Any) -> bool:
        return eqn in self.copies or eqn in self.sums

    def compute(self, eqn: Any, ins: Sequence[Any], fn: Callable[[Sequence[Any]], Sequence[Any]]) -> Sequence[Any]:
        """Returns the outputs of an equation that is not a product.

        **Arguments:**

        - `fn`: computes the equation.
        """
        if eqn in self.copies:
            outs = fn(ins)
            if eqn.invars[0] in self.begins:
                value = plain(ins[0])
                self._copies[eqn.invars[0]] = self._split(jnp.broadcast_to(value, (self.mesh.shape[MODEL], *value.shape)))
            if (copies := self._copies.get(eqn.invars[0])) is not None:
                self._copies[eqn.outvars[0]] = self._each(fn, ins, 0, copies)
            return outs
        place, continues = self.sums[eqn]
        if not has_tag(ins[place], Parts):  # another rule has computed what is before it
            return fn(ins)
        parts = self.in_parts(self._each(fn, ins, place, ins[place].value))
        return [parts if continues else plain(parts)]

    def in_parts(self, parts: jax.Array) -> Tagged:
        return Parts().begin(self._split(parts))

    def copies_of(self, var: Any) -> jax.Array | None:
        """Returns the copies of the operand of a product, `[model shards, ...]`."""
        return self._copies.get(var)

    def _each(self, fn: Callable[[Sequence[Any]], Sequence[Any]], ins: Sequence[Any], place: int, values: Any) -> jax.Array:
        """Computes an equation for each entry of one of its operands."""
        return self._split(jax.vmap(lambda value: fn([*ins[:place], value, *ins[place + 1 :]])[0])(values))

    def _split(self, x: jax.Array) -> jax.Array:
        spec = P(MODEL, *[P.UNCONSTRAINED] * (x.ndim - 1))
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))


def _size(atom: Any) -> int:
    """Returns the number of bytes of a value."""
    return math.prod(atom.aval.shape) * atom.aval.dtype.itemsize


def _before(body: Body, atom: Any, weights: Sequence[Any]) -> list[Any]:
    """Returns the equations that an operand comes from, the last one first, as long as they rearrange or repeat tokens."""
    chain: list[Any] = []
    while (eqn := body.producer(atom)) is not None and eqn.primitive.name in _VIEWS and _is_float(eqn.invars[0]):
        chain.append(eqn)
        atom = eqn.invars[0]
    if body.origin(atom) in weights:  # tokens are looked up in an embedding
        names = [each.primitive.name for each in chain]
        return chain[: len(names) - 1 - names[::-1].index("gather")] if "gather" in names else []
    return chain


def _after(body: Body, var: Any) -> Iterator[tuple[Any, int]]:
    """Yields the equations that a value goes to, with the index of the operand, as long as there is one and it is linear."""
    while len(readers := body.readers(var)) == 1 and (eqn := readers[0]) is not None:
        places = [i for i, atom in enumerate(eqn.invars) if variables([atom]) and atom is var]
        if len(places) != 1 or not _is_linear(body, eqn, places[0]):
            return
        yield eqn, places[0]
        (var,) = eqn.outvars


def _is_linear(body: Body, eqn: Any, place: int) -> bool:
    name = eqn.primitive.name
    if len(eqn.outvars) != 1 or not _is_float(eqn.outvars[0]):
        return False
    if name in _ADDING:
        return place == 2 and _is_zero(body, eqn.invars[0])
    return name == "mul" or (name in ("div", *_LINEAR) and place == 0)


def _is_float(atom: Any) -> bool:
    return jnp.issubdtype(atom.aval.dtype, jnp.floating)


def _is_zero(body: Body, atom: Any) -> bool:
    """Whether a value is zero everywhere. Zeros are broadcast."""
    while variables([atom]):
        eqn = body.producer(atom)
        if eqn is None or eqn.primitive.name not in ("broadcast_in_dim", "convert_element_type"):
            return False
        atom = eqn.invars[0]
    return bool(atom.val == 0)
