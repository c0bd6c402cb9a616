"""Which sorts of tokens end in an exchange: whose rows can be computed on the devices of their experts, in any order.

`chosen_exchanges` finds them in a function by the split of its stacks of experts, and `expert_stacks` decides for a plan
which stacks are split so. `_exchange_experts` computes them.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from ..dims import Related, positions_of
from ..machine import MODEL, SEQUENCE, n_batch_shards
from ..partition import inputs_of
from ..tracing import GROUPED, Body, Trace, equations, n_bytes, or_as_written, variables
from ._expert_parts import chain_after, chain_before
from ._sorted_rows import RESHAPES, WITH_CASTS, SortedRows, is_constant_along, is_elementwise_inside, jaxprs_in

_BY_ROW = (*WITH_CASTS, "reduce_sum", "reduce_max")  # besides elementwise ones
# Equations whose output has the matrices of their first operand, maybe next to those of equal stacks of other layers.
_KEEPING = (*WITH_CASTS, "copy", "transpose", "stack", "concatenate")


@dataclass(frozen=True)
class Matrices:
    """A stack of matrices of a grouped matmul."""

    leaf: int  # of the function's weights
    dim: int  # that counts matrices


@dataclass(frozen=True, eq=False)
class Exchange:
    """A sort, and the equations between its first and its last grouped matmul."""

    sort: SortedRows
    eqns: Sequence[Any]  # in the order of the jaxpr; the output of the last one is the only value that others read
    entries: Sequence[Any]  # the rows that the equations read
    matrices: Mapping[Any, Matrices]  # those of each grouped matmul
    views: Sequence[Any]  # those before the sorted rows and after the output that repeat tokens, or add up copies of them
    n_token_bytes: int  # of the tokens, before they are repeated and after they are added up

    @property
    def n_experts(self) -> int:
        return self.products[0].invars[2].aval.shape[-1]

    @property
    def products(self) -> list[Any]:
        return [eqn for eqn in self.eqns if eqn.primitive.name in GROUPED]

    @property
    def all(self) -> set[Any]:
        """All equations that the exchange concerns."""
        return {*self.sort.roles, *self.eqns, *self.views}

    def sends_less(self, n_shards: int, *, splits_residual: bool) -> bool:
        """Whether exchanging rows sends fewer bytes than summing the parts of split experts.

        In a pass, the sum sends the tokens twice over, as an all-reduce or as a reduce-scatter with an all-gather. Rows are
        sent there and back; and if what follows needs all tokens on each device, these are gathered.
        """
        rows = sum(map(n_bytes, (*self.entries, *self.eqns[-1].outvars))) / n_shards
        return rows + (0 if splits_residual else self.n_token_bytes / 2) < self.n_token_bytes


def exchanges_in(body: Body, n_weights: int, mesh: Mesh) -> list[Exchange]:
    """Returns the sorts of a function whose rows could be sent to the devices of their experts. Its first `n_weights` inputs
    are weights."""
    found: list[Exchange] = []
    n_model = mesh.shape[MODEL]
    if n_model == 1 or mesh.shape[SEQUENCE] > 1:
        return found
    for jaxpr in jaxprs_in(body.closed):
        if not any(eqn.primitive.name in GROUPED for eqn in jaxpr.eqns):
            continue
        for eqn in jaxpr.eqns:
            sort = SortedRows.of(eqn, jaxpr, body, mesh, MODEL) if eqn.primitive.name == "sort" else None
            if sort is None or (sort.lead and sort.lead[0] % n_batch_shards(mesh)):
                continue
            exchange = _exchange_of(sort, jaxpr, body, n_weights)
            if exchange is not None and exchange.n_experts % n_model == 0:
                found.append(exchange)
    return found


def chosen_exchanges(body: Body, splits: Sequence[int | None], mesh: Mesh) -> list[Exchange]:
    """Returns the exchanges of a function whose stacks of matrices are split by matrices. `splits` are the dims of its first
    inputs that the model axis splits, or None."""
    if not any(eqn.primitive.name in GROUPED for eqn in body.eqns):
        return []
    found = exchanges_in(body, len(splits), mesh)
    return [each for each in found if all(splits[m.leaf] == m.dim for m in each.matrices.values())]


def expert_stacks(trace: Trace, mesh: Mesh, *, splits_residual: bool) -> dict[str, int | None]:
    """Returns the stacks of matrices of a traced loss's grouped matmuls: with the dim that counts experts for those to whose
    devices tokens are sent, where this sends fewer bytes, and None where the parts of a token's outputs are added up.
    `splits_residual`: whether the model axis splits positions between layers."""
    if mesh.shape[MODEL] == 1 or not any(eqn.primitive.name in GROUPED for eqn in equations(trace.closed)):
        return {}

    def search() -> dict[str, int | None]:
        body, n_weights = Body(trace.closed), len(trace.names)
        found = exchanges_in(body, n_weights, mesh)
        # A loss without attention has no stream to split (`_split_residual`).
        is_split = splits_residual and positions_of(trace.closed, inputs_of(trace)).are_compared
        chosen = [each for each in found if each.sends_less(mesh.shape[MODEL], splits_residual=is_split)]
        exchanged = {eqn: stack for each in chosen for eqn, stack in each.matrices.items()}
        products = [eqn for eqn in body.eqns if group_dim(eqn) is not None]
        stacks = [(eqn, stack) for eqn in products if (stack := _matrices_of(body, n_weights, eqn))]
        others = {stack.leaf for eqn, stack in stacks if eqn not in exchanged}
        return {trace.names[stack.leaf]: None if stack.leaf in others else stack.dim for _, stack in stacks}

    return or_as_written(search, dict[str, int | None], "the search for experts")


def _exchange_of(sort: SortedRows, jaxpr: Any, body: Body, n_weights: int) -> Exchange | None:
    """Returns the exchange of a sort; None if its equations do not fit."""
    products = [eqn for eqn in jaxpr.eqns if eqn in sort.roles and eqn.primitive.name in GROUPED]
    # Two products may read two views of the same rows, which are then sent, and got back, once.
    views = [view for eqn in products for view in _views_before(sort, body, eqn, products)]
    eqns = _between({*products, *views}, products[-1], jaxpr)
    read = [reader for eqn in eqns[:-1] for var in eqn.outvars for reader in body.readers(var)]
    if not {*read, *products} <= set(eqns):
        return None
    inside = {var for eqn in eqns for var in eqn.outvars}
    matrices, entries = dict[Any, Matrices](), dict[Any, None]()
    for eqn in eqns:
        operands = variables(eqn.invars)
        if eqn in products:
            stack = _matrices_of(body, n_weights, eqn)
            is_same = _unviewed(body, eqn.invars[2]) is _unviewed(body, products[0].invars[2])
            if stack is None or not is_same or not all(_is_first(sort, atom) for atom in (eqn.invars[0], *eqn.outvars)):
                return None
            matrices[eqn], operands = stack, operands[:1]
        elif not is_elementwise_inside(eqn, _BY_ROW) or eqn in sort.roles or not _keeps_rows(sort, eqn):
            return None
        for atom in (atom for atom in operands if atom not in inside):
            if sort.dim(atom) is None:
                if not is_constant_along(body, atom, range(len(sort.lead) + 1)):
                    return None
            elif not _is_first(sort, atom) or not jnp.issubdtype(atom.aval.dtype, jnp.floating):
                return None
            else:
                entries[atom] = None
    before = [chain_before(body, atom, body.closed.jaxpr.invars[:n_weights]) for atom in entries]
    after = [eqn for eqn, _ in chain_after(body, products[-1].outvars[0])]
    sizes = [
        min([n_bytes(atom), *(n_bytes(eqn.invars[0]) for eqn in found)]) for atom, found in zip(entries, before, strict=True)
    ]
    after_them = min(n_bytes(eqn.outvars[0]) for eqn in (products[-1], *after))
    views = [*chain.from_iterable(before), *after]
    return Exchange(sort, eqns, list(entries), matrices, views, max(sizes, default=0) + after_them)


def _between(starts: Collection[Any], last: Any, jaxpr: Any) -> list[Any]:
    """Returns the equations from some to the last one: those that depend on one of them, and on which the last depends."""
    after, before, eqns = set[Any](), set[Any](), list[Any]()
    for eqn in jaxpr.eqns:
        if eqn in starts or not after.isdisjoint(variables(eqn.invars)):
            after.update(eqn.outvars)
    for eqn in reversed(jaxpr.eqns):
        if (eqn is last or not before.isdisjoint(eqn.outvars)) and not after.isdisjoint(eqn.outvars):
            eqns.append(eqn)
            before.update(variables(eqn.invars))
    return eqns[::-1]


def _views_before(sort: SortedRows, body: Body, product: Any, products: Collection[Any]) -> list[Any]:
    """Returns the equations before one of some products that add or remove dims of size 1 of its rows, and of no others."""
    views, n, atom = list[Any](), 0, product.invars[0]
    while (view := body.producer(atom)) is not None and view.primitive.name in RESHAPES:
        if sort.dim(view.invars[0]) is None or not set(body.readers(atom)) <= {*products, *views}:
            break
        (atom,) = view.invars
        if n_bytes(atom) != n_bytes(view.outvars[0]):
            break
        views.append(view)
        n = len(views) if _is_first(sort, atom) else n
    return views[:n]


def _keeps_rows(sort: SortedRows, eqn: Any) -> bool:
    """Whether the outputs of a row-wise equation have the rows of its operands: it reduces features alone."""
    if any(sort.dim(var) is None for var in eqn.outvars):
        return False
    dims = [dim for atom in eqn.invars if (dim := sort.dim(atom)) is not None]
    return not eqn.primitive.name.startswith("reduce_") or min(eqn.params["axes"]) > max(dims)


def _is_first(sort: SortedRows, atom: Any) -> bool:
    """Whether the rows are before all features, after the batch."""
    shape, dim = atom.aval.shape, sort.dim(atom)
    if dim is None:
        return False
    return shape[: dim + 1] == (*sort.lead, sort.n) or (not sort.lead and shape[: dim + 1] == (1, sort.n))


def _unviewed(body: Body, atom: Any) -> Any:
    """Returns the value that a value of the same size is a view of."""
    while (eqn := body.producer(atom)) is not None and eqn.primitive.name in WITH_CASTS:
        if math.prod(eqn.invars[0].aval.shape) != math.prod(atom.aval.shape):
            break
        atom = eqn.invars[0]
    return atom


def group_dim(eqn: Any) -> int | None:
    """Returns the dim of the second operand of a grouped matmul that counts matrices; None for other equations."""
    return Related(eqn).group if eqn.primitive.name in GROUPED else None


def _matrices_of(body: Body, n_weights: int, eqn: Any) -> Matrices | None:
    """Returns the stack of matrices of a grouped matmul, if a weight has them unchanged, but for views, casts and loops over
    layers; None for others."""
    weights, atom, dim = body.closed.jaxpr.invars[:n_weights], eqn.invars[1], group_dim(eqn)
    if dim is None:
        return None
    while atom not in weights:
        if (outer := body.outer(atom)) is not None:
            atom, kind = outer
            if kind not in ("same", "slice"):
                return None
            dim += kind == "slice"
            continue
        view = body.producer(atom)
        if view is None or view.primitive.name not in _KEEPING or (before := Related(view).source()[dim]) is None:
            return None
        atom, dim = view.invars[0], before
    return Matrices(weights.index(atom), dim)
