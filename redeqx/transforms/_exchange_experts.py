"""Whole experts over the model axis: tokens are sent to the devices of their experts, and back.

If the plan splits a stack of experts by its matrices, each device of the model axis has some experts as a whole, and takes a
part of the tokens, which it sorts by itself (`_sort_by_shard`): nothing is sent for sorting but the keys. Between the first
grouped matmul and the last, each row is on the device of its expert (`_send_rows`), in as many passes as the imbalance
needs. What is between the two has to treat all rows alike, read nothing else that differs from row to row, and end in the
output of a grouped matmul.

With `M` shards and `k` choices of a token, `2 k / M` times the tokens are sent in a pass, where summing the parts of split
experts takes 2. The rest of the model gets the outputs split by tokens: if it needs all of them on each device, that is one
more. `_group_matmuls` is the rule that applies this.

Passes after the first one are computed again in the backward pass, and keep nothing.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec as P

from ..kernels import on_each_device
from ..machine import BATCH_AXES, MODEL, n_batch_shards
from ..tracing import Env, evaluate, is_variable, plain, rarely, run, variables
from ._exchanged_rows import Exchange, group_dim
from ._send_rows import Sending
from ._sort_by_shard import SortsByShard, each_of
from ._sorted_rows import SortedRows


class Exchanges:
    """The exchanges of a function, and the equations that these compute. `products` has, for each grouped matmul, a function
    of one device's rows, matrices and sizes."""

    def __init__(
        self,
        mesh: Mesh,
        exchanges: Sequence[Exchange] = (),
        products: Mapping[Any, Callable[..., Any]] = MappingProxyType({}),
    ):
        self.mesh, self._products = mesh, products
        self._exchanges = {eqn: each for each in exchanges for eqn in each.eqns}
        self._values: dict[Any, Any] = {}  # of variables that the equations between read

    def __contains__(self, eqn: Any) -> bool:
        return eqn in self._exchanges

    def compute(self, eqn: Any, ins: Sequence[Any], sorts: SortsByShard) -> Sequence[Any]:
        """Returns the outputs of an equation, whose operands are in the order of the shards."""
        exchange = self._exchanges[eqn]
        inside = {var for each in exchange.eqns for var in each.outvars}
        for atom, value in zip(eqn.invars, ins, strict=True):
            if is_variable(atom) and atom not in inside:
                self._values[atom] = plain(value)
        if eqn is not exchange.eqns[-1]:
            return [jnp.zeros(var.aval.shape, var.aval.dtype) for var in eqn.outvars]  # computed with the last one
        return [self._computed(exchange, sorts.positions(exchange.sort))]

    # --- on the devices of the experts ------------------------------------------------------------------------------------

    def _computed(self, exchange: Exchange, positions: jax.Array) -> jax.Array:
        """Returns the output of the equations between, for rows with these positions in the sort."""
        sort, n_experts = exchange.sort, exchange.n_experts
        sizes = self._values[exchange.products[0].invars[2]].astype(jnp.int32).reshape(*sort.lead, -1)
        search = partial(jnp.searchsorted, side="right", method="compare_all")
        experts = each_of(search, sort.lead)(jnp.cumsum(sizes, -1), positions).astype(jnp.int32)
        sending, rows = Sending(self.mesh, n_experts), self._spec(sort, experts.ndim)
        of_counts = P(BATCH_AXES, None, None)
        count = on_each_device(self.mesh, lambda experts: sending.count(experts.reshape(-1))[None], (rows,), of_counts)
        counts = count(experts)
        entries = [self._values[var] for var in exchange.entries]
        out = self._pass(exchange, sending, 0, experts, counts, *entries)

        n = math.prod(experts.shape) // (n_batch_shards(self.mesh) * sending.n_devices)
        per_device = counts.reshape(len(counts), sending.n_devices, sending.n_devices, -1).sum((1, 3))
        n_passes = -(-jnp.max(per_device) // n)

        def skip(*_: Any) -> jax.Array:
            return jnp.zeros_like(out)

        @jax.checkpoint
        def further(number: jax.Array, n_passes: jax.Array, *rest: jax.Array) -> jax.Array:
            compute = partial(self._pass, exchange, sending)
            with rarely():  # so that a dry run counts the first pass alone
                return jax.lax.cond(number < n_passes, compute, skip, number, *rest)

        def add(total: jax.Array, number: jax.Array) -> tuple[jax.Array, None]:
            return total + further(number, n_passes, experts, counts, *entries), None

        return jax.lax.scan(add, out, jnp.arange(1, sending.n_devices))[0]

    def _pass(
        self, exchange: Exchange, sending: Sending, number: Any, experts: jax.Array, counts: jax.Array, *entries: Any
    ) -> jax.Array:
        """Returns the output for the rows of a pass, and zeros for others."""
        sort, values = exchange.sort, Env(literal=lambda literal: literal.val)
        read = (var for eqn in exchange.eqns for var in variables(eqn.invars))
        values.update({var: self._values[var] for var in read if var in self._values})
        of_experts, of_counts = self._spec(sort, experts.ndim), P(BATCH_AXES, None, None)
        number = jnp.asarray(number, jnp.int32)

        def send(fn: Callable[..., Any], x: jax.Array, dim: int | None) -> jax.Array:
            def on_device(x: Any, experts: Any, counts: Any, number: Any) -> Any:
                experts = experts.reshape(-1)
                return fn(x.reshape(len(experts), -1), experts, counts[0], number).reshape(x.shape)

            spec = self._spec(sort, x.ndim, dim)
            run = on_each_device(self.mesh, on_device, (spec, of_experts, of_counts, P()), spec)
            return run(x, experts, counts, number)

        def sizes_of(experts: Any, counts: Any, number: Any) -> Any:
            return sending.sizes(counts[0], experts.size, number)[None, None]

        of_sizes = P(BATCH_AXES, MODEL, None)
        sizes = on_each_device(self.mesh, sizes_of, (of_experts, of_counts, P()), of_sizes)(experts, counts, number)
        for var, x in zip(exchange.entries, entries, strict=True):
            values[var] = send(sending.there, x, sort.dim(var))

        def compute(eqn: Any, ins: Sequence[Any]) -> Sequence[Any]:
            is_product = eqn in exchange.matrices
            return [self._product(exchange, eqn, ins[0], ins[1], sizes, of_sizes)] if is_product else run(eqn, ins)

        evaluate(exchange.eqns, values, compute)
        (var,) = exchange.eqns[-1].outvars
        return send(sending.back, values[var], sort.dim(var))

    def _product(self, exchange: Exchange, eqn: Any, a: Any, b: Any, sizes: Any, of_sizes: P) -> jax.Array:
        sort, dim = exchange.sort, group_dim(eqn)
        of_matrices = P(*(MODEL if i == dim else None for i in range(b.ndim)))
        (var,) = eqn.outvars
        specs = self._spec(sort, a.ndim, sort.dim(eqn.invars[0])), of_matrices, of_sizes
        out = self._spec(sort, len(var.aval.shape), sort.dim(var))
        compute = self._products[eqn]
        return on_each_device(self.mesh, lambda a, b, sizes: compute(a, b, sizes[0, 0]), specs, out)(a, b, sizes)

    def _spec(self, sort: SortedRows, n_dims: int, dim: int | None = None) -> P:
        """Returns the spec of a value whose rows are split over devices."""
        if sort.lead:
            return P(BATCH_AXES, MODEL, *[None] * (n_dims - 2))
        dim = dim or 0
        return P(*[None] * dim, (*BATCH_AXES, MODEL), *[None] * (n_dims - dim - 1))
