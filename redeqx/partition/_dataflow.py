"""Applies the two rules in the order in which the traced loss computes.

1. Fully connected: consecutive layers alternate between dim 0 and dim 1 of their `[out, in]` weights.
2. Attention: query, key and value along dim 0, which is by heads, and output along dim 1.

They are Redco's (arXiv:2310.16355), after Megatron-LM (arXiv:1909.08053). Both follow from one fact. A matmul whose input is
replicated is split along its output dim (a column split). A matmul whose input is split is split along the contracted dim (a
row split), and its output is replicated again.

So this module follows the jaxpr of the loss, abstractly, equation by equation. For each value it tracks which dim is split
over the model axis, and which leaf caused the split. For each value that is a view of a parameter (transposed, sliced,
scaled) it tracks which dims of the parameter its dims are. The first use of a parameter with data decides the parameter's
split. Names and types do not matter: raw arrays, `einsum`, stacks under `scan`, and calls in an order other than that of the
fields are all followed. How an equation relates the dims of its operands and outputs is read from `dims`.

`_search` tries other splits where those of the rules cause traffic. Parameters that cannot be followed stay replicated,
with a reason that names the primitive.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from .._tree import is_key
from ..dims import ORDERED, REDUCTIONS, SCATTERS, VIEWS, Related, is_elementwise
from ..kernels import formula
from ..tracing import GROUPED, Trace, called, insides, once, shapes_in
from ._flow import Flow, Split, View
from ._pass import Pass


@once
def _related(closed: Any) -> Callable[[Any], Related]:
    """Returns how the equations of a function relate dims, found once for all passes over it."""
    del closed
    return cache(Related)


def follow(trace: Trace, n_shards: int, **kwargs: Any) -> Pass:
    """Follows a traced function. All inputs after the leaves count as data, except PRNG keys."""
    run = Pass(dict(zip(trace.names, trace.leaves, strict=True)), n_shards, _follow, _related(trace.closed), **kwargs)
    ins = [Flow(views=(View(name, tuple(range(len(leaf.shape)))),), grad=True) for name, leaf in run.leaves.items()]
    rest = trace.closed.jaxpr.invars[len(ins) :]
    ins += [Flow(data=not is_key(var.aval)) for var in rest]
    run.evaluate(trace.closed, ins)
    return run


@once
def values_by(closed: Any, splits: tuple[int | None, ...], n_shards: int) -> Pass:
    """Returns the pass over a closed jaxpr in normal form for given splits of its first inputs, the weights, over
    `n_shards`. Their names are their numbers. It has the dims that the model axis splits of each value that depends on data
    (`values`) and of both operands of each product (`operands`), the equations that take equal parts of such a dim
    (`resharded`), and others."""
    given = {str(i): Split(dim, "") for i, dim in enumerate(splits)}
    trace = Trace(tuple(given), tuple(shapes_in(closed)[: len(given)]), closed)
    return follow(trace, n_shards, splits=given, records_values=True)


def _follow(run: Pass, eqn: Any, ins: list[Flow]) -> list[Flow]:
    """Returns the `Flow` of each output of an equation."""
    name = eqn.primitive.name
    try:
        if (inner := called(eqn)) is not None:
            calls, run.calls = run.calls, (*run.calls, eqn)
            try:
                return run.evaluate(inner, ins)
            finally:
                run.calls = calls
        if name in _EQUATIONS:
            return _EQUATIONS[name](run, eqn, ins)
        if not ins or is_elementwise(eqn):
            return run.combine(eqn, ins)
    except Exception as error:
        # An unknown form of the primitive, such as that of another version of JAX: replicate its values instead of failing.
        run.errors[eqn] = f"{name}: {type(error).__name__}"
    return run.give_up(eqn, ins)


# --- products --------------------------------------------------------------------------------------------------------


def _conv(run: Pass, eqn: Any, ins: list[Flow]) -> list[Flow]:
    """A convolution is split by channels or by the batch. Each shard of channels in groups has whole groups."""
    groups = eqn.params["feature_group_count"]
    if eqn.params["batch_group_count"] > 1 or (groups > 1 and groups % run.n):
        return run.give_up(eqn, ins)
    return run.contract(eqn, ins)


def _ragged(run: Pass, eqn: Any, ins: list[Flow]) -> list[Flow]:
    """Rows in groups, each multiplied with the matrix of its group, such as tokens sorted by their experts.

    Rows are not split: a shard would have parts of groups of which it does not know the sizes. Neither are groups: a shard
    would need the rows of its groups, wherever they are. If a plan has split them nevertheless, these rows are sent to it.
    """
    if ins[-1].data and not ins[0].views:  # data says how many rows each group has, even of ones, as for a bias
        ins = [replace(ins[0], data=True), *ins[1:]]
    related = run.related(eqn)
    rows, group = related.combined(0, "order"), related.group
    whole = rows, [*(related.partners(0).get(dim) for dim in rows), group]
    flows = [
        run.gather(atom.aval, flow) if run.split(flow)[0] in dims and not run.is_open(flow) else flow
        for atom, flow, dims in zip(eqn.invars, ins, whole, strict=False)
    ]
    is_sent = group is not None and not run.is_open(ins[1]) and run.split(ins[1])[0] == group
    outs = run.contract(eqn, flows)
    if is_sent:  # each shard multiplies its own rows
        run.products.update({(each, at): 1 for each, at in run.products if each is eqn})
    return outs


def _reduce(run: Pass, eqn: Any, ins: list[Flow]) -> list[Flow]:
    related, (flow,) = run.related(eqn), ins
    dim, cause = run.split(flow)
    if flow.data and {dim, flow.tail} & set(related.combined()):
        run.add_collective("all-reduce", eqn.outvars[0].aval)
    return [Flow(dim=dim, cause=cause, broadcast=flow.broadcast, tail=flow.tail).through(related.source())]


def _along(run: Pass, eqn: Any, ins: list[Flow]) -> list[Flow]:
    """A cumulative sum or a sort requires that one dim is not split. Splits of the other dims stay."""
    along = run.related(eqn).combined()
    if any(run.split(flow)[0] in along or run.is_open(flow) for flow in ins):
        return run.give_up(eqn, ins)
    return run.combine(eqn, ins)


def _gather(run: Pass, eqn: Any, ins: list[Flow]) -> list[Flow]:
    """A lookup, such as rows of an embedding or the logit of a label."""
    related, sizes = run.related(eqn), eqn.params["slice_sizes"]
    table, indices = ins
    shape, aval = eqn.invars[0].aval.shape, eqn.outvars[0].aval
    of_table, of_indices = related.source(0), related.source(1)
    looked_up = [dim for dim in related.combined() if sizes[dim] == 1 != shape[dim]]
    kept = sorted(dim for dim in of_table if dim is not None and shape[dim] > 1)
    # The result is still a view of the parameter in two cases. First, if the indices do not depend on data: the lookup
    # selects a part of the table in some order, such as positions. Second, if the lookup selects a matrix for each token,
    # such as an expert's. This matrix is a weight, and its product decides the split. Splitting the table's rows would need
    # an all-reduce for each matrix.
    of_weights = bool(looked_up) and len(kept) > 1 and any(run.could_split(table, shape, dim) for dim in kept)
    if indices.data and not of_weights:
        run.looked_up.update(view.leaf for view in table.views)
    if (of_weights and run.split(table)[0] in (None, *of_table)) or (run.is_open(table) and not indices.data):
        return [table.through(of_table)]
    if run.is_open(table):
        # A table whose indices the model computes (experts' biases) may be split like the value that its rows are added to.
        # An embedding, whose indices come from the batch, may not.
        options = [*looked_up, *kept] if indices.grad else looked_up
        if not looked_up:
            run.decide(table, None, "replicated: data decides which slices of it are used", is_unknown=True)
        elif (dim := run.choose(table, shape, options)) is None:
            n_rows = shape[looked_up[0]]
            padded = -(-n_rows // run.n) * run.n
            why = f"replicated: {n_rows} rows do not divide over {run.n} shards; a table padded to {padded} rows would"
            run.decide(table, None, why if n_rows % run.n else run.why_replicated(table, (n_rows,), (0,)))
        elif dim in kept:
            run.decide(table, dim, "follows: values looked up in it are combined with values that have this split")
        else:
            run.decide(table, dim, f"embedding: {shape[dim]} rows over {run.n} shards")
    dim, cause = run.split(table)
    by, by_cause = run.split(indices)
    if dim is not None and dim in looked_up:  # each shard looks up the rows that it holds
        run.add_collective("all-reduce", aval)
    elif dim is not None and dim not in of_table:
        run.gather(eqn.invars[0].aval, table)
    elif dim is not None:
        return [Flow(dim=of_table.index(dim), cause=cause)]
    if by is not None and by in of_indices:
        return [Flow(dim=of_indices.index(by), cause=by_cause)]
    return [Flow(cause=cause)]


def _chosen(run: Pass, eqn: Any, ins: list[Flow]) -> list[Flow]:
    """Data selects among values. If all of them are parameters, so is the result, as for a `cond` under `vmap`."""
    cases = ins[1:]
    if any(flow.views for flow in cases) and not any(flow.data for flow in cases):
        return run.combine(eqn.replace(invars=eqn.invars[1:]), cases)
    return run.combine(eqn, ins)


def _joined(run: Pass, eqn: Any, ins: list[Flow]) -> list[Flow]:
    """A concatenation along a split dim moves the parts between devices."""
    axis, aval = eqn.params["dimension"], eqn.outvars[0].aval
    if not any(flow.data for flow in ins):
        same = len({view.leaf for flow in ins for view in flow.views}) == 1  # views of one parameter, as in `jnp.roll`
        view = ins[0].views[0] if same and ins[0].views else None
        kept = view and View(view.leaf, tuple(None if i == axis else dim for i, dim in enumerate(view.dims)))
        return [Flow(views=(kept,) if kept else ())]
    splits = [run.split(flow) for flow in ins]
    along = {dim for dim, _ in splits if dim is not None}
    if axis in along and len(along) == 1 and aval.shape[axis] % run.n == 0 and all(dim is not None for dim, _ in splits):
        run.add_collective("join", aval)
        run.reconsider(*(cause for _, cause in splits))
        return [Flow(dim=axis, cause=splits[0][1])]
    if axis in along:
        return run.give_up(eqn, ins)
    return run.combine(eqn, ins)


def _stacked(run: Pass, eqn: Any, ins: list[Flow]) -> list[Flow]:
    """A stack of values along a new dim, such as a model's blocks, has their split if it is the same for all."""
    related = run.related(eqn)
    flows = [flow.through(related.source(i)) for i, flow in enumerate(ins)]
    if not any(flow.data for flow in flows):
        views = tuple(dict.fromkeys(view for flow in flows for view in flow.views))
        return [Flow(views=views if all(flow.views for flow in flows) else ())]
    splits = [run.split(flow) for flow in flows]
    if len({dim for dim, _ in splits}) > 1:
        return run.give_up(eqn, ins)
    return [Flow(dim=splits[0][0], cause=splits[0][1])]


def _written(run: Pass, eqn: Any, ins: list[Flow]) -> list[Flow]:
    """An update, such as of a cache at a position, keeps the split of a dim if the update spans all of it."""
    part = 1 if eqn.primitive.name == "dynamic_update_slice" else 2  # a scatter's second operand is the position
    related = run.related(eqn)
    written, places = related.combined(), {factors: i for i, factors in enumerate(related.ins[part])}
    spanned = {dim: places.get(factors) for dim, factors in enumerate(related.ins[0]) if dim not in written}
    splits = list(map(run.split, ins))
    (dim, cause), (of_part, by) = splits.pop(0), splits.pop(part - 1)
    if dim is None and of_part is not None:
        dim, cause = next((dim for dim, place in spanned.items() if place == of_part), None), by
    fits = dim in spanned and of_part in (spanned[dim], None) and all(of_position is None for of_position, _ in splits)
    fits = fits and (part == 1 or not any(map(run.is_open, ins)))  # no scatter into a parameter is followed
    return [Flow(dim=dim, cause=cause)] if fits else run.give_up(eqn, ins)


# --- loops and branches ------------------------------------------------------------------------------------------------


def _branches(run: Pass, eqn: Any, ins: list[Flow]) -> list[Flow]:
    outs = [run.evaluate(branch.closed, ins[1:]) for branch in insides(eqn)]
    return [_common(run, var.aval, flows) for var, flows in zip(eqn.outvars, zip(*outs, strict=True), strict=True)]


def _common(run: Pass, aval: Any, flows: Sequence[Flow]) -> Flow:
    """Returns the flow of an output of several branches: it is split if all of them split it along the same dim."""
    splits = [run.split(flow) for flow in flows]
    if len({dim for dim, _ in splits}) == 1:
        dim, cause = splits[0]
        return Flow(dim=dim, cause=cause)
    for flow in flows:
        run.gather(aval, flow)
    return Flow()


def _loop(run: Pass, closed: Any, consts: Sequence[Flow], carry: Sequence[Flow], slices: Sequence[Flow]) -> list[Flow]:
    """Returns the flows of a loop's outputs. The carry has the same split at the start and at the end of each iteration.

    A carry that starts as a constant may start with the split that the body gives it, and a carry that starts split may be
    gathered before the loop, whichever costs least.
    """
    start = run.snapshot()
    if any(run.is_open(flow) for flow in carry):  # parameters in the carry: the first iteration decides their splits
        run.evaluate(closed, [*consts, *carry, *slices])
        leaves = [view.leaf for flow in carry for view in flow.views]
        start.splits |= {leaf: run.splits[leaf] for leaf in leaves if leaf in run.splits}
        start.options |= {leaf: run.options[leaf] for leaf in leaves if leaf in run.options}
        run.restore(start)
    carried = [Flow(*run.split(flow), data=flow.data, grad=flow.grad) for flow in carry]
    outs, returned = _iterate(run, closed, consts, carried, slices)
    best = run.snapshot(), outs
    as_returned = [
        replace(flow, dim=out.dim, cause=out.cause) if not initial.data and not initial.views and flow.dim is None else flow
        for initial, flow, out in zip(carry, carried, returned, strict=False)
    ]
    gathered = [replace(flow, dim=None) for flow in carried]
    for other in (as_returned, gathered):
        if other == carried:
            continue
        run.restore(start)
        if other is gathered:
            for var, flow in zip(closed.jaxpr.outvars, carried, strict=False):
                run.gather(var.aval, flow)
        outs, _ = _iterate(run, closed, consts, other, slices)
        if run.cost < best[0].cost:
            best = run.snapshot(), outs
    run.restore(best[0])
    return best[1]


def _iterate(
    run: Pass, closed: Any, consts: Sequence[Flow], carry: Sequence[Flow], slices: Sequence[Flow]
) -> tuple[list[Flow], list[Flow]]:
    """Returns the flows of a loop's outputs, and those of the carry that its body returns. The latter are from before that
    carry is resharded like the one that the body receives."""
    start, carried = run.snapshot(), list(carry)
    while True:
        outs = run.evaluate(closed, [*consts, *carried, *slices])
        returned = [Flow(*run.split(out)) for out in outs[: len(carried)]]
        # Only then splits: weights that are used with a carry are not decided before it is known to become data.
        kept = [
            replace(flow, data=flow.data or out.data, grad=flow.grad or out.grad)
            for flow, out in zip(carried, outs, strict=False)
        ]
        if kept == carried:
            kept = [
                flow if back.dim == flow.dim else Flow(data=flow.data, grad=flow.grad)
                for flow, back in zip(carried, returned, strict=True)
            ]
        if kept == carried:
            break
        run.restore(start)
        carried = kept
    for var, flow, out in zip(closed.jaxpr.outvars, carried, outs, strict=False):
        if run.split(out)[0] != flow.dim:
            run.gather(var.aval, out)
    return [*carried, *outs[len(carried) :]], returned


def _repeated(run: Pass, eqn: Any, ins: list[Flow]) -> list[Flow]:
    """A scan, or a while loop, which costs as much as one iteration. Its condition is a scalar that all devices compute."""
    *conditions, body = insides(eqn)
    consts, carry, sliced = (
        [i for i, own in zip(body.operands, body.kinds, strict=True) if own == kind] for kind in ("same", "carry", "slice")
    )
    run.looped.update(view.leaf for i in consts for view in ins[i].views)
    slices = []
    for i in sliced:
        flow, aval = ins[i], eqn.invars[i].aval
        dim, cause = run.split(flow)
        if dim == 0:
            run.sliced.update(() if cause is None else (cause,))
            flow = run.gather(aval, flow)
        for view in flow.views:
            if view.dims[0] is not None:
                run.stacked[view.leaf] = max(run.stacked.get(view.leaf, 0), view.dims[0] + 1)
        slices.append(flow.through(range(1, len(aval.shape))))
    outer, run.n_iterations = run.n_iterations, run.n_iterations * max(1, eqn.params.get("length", 1))
    try:
        outs = run.memoized(_loop, body.closed, [ins[i] for i in consts], [ins[i] for i in carry], slices)
    finally:
        run.n_iterations = outer
    for condition in conditions:
        run.evaluate(condition.closed, [*(ins[i] for i in condition.operands[: -len(carry)]), *outs])
    stacked = [Flow() if run.is_open(out) else Flow(*run.split(out)) for out in outs[len(carry) :]]
    return [*outs[: len(carry)], *(replace(out, dim=None if out.dim is None else out.dim + 1) for out in stacked)]


# --- views -----------------------------------------------------------------------------------------------------------


def _viewed(run: Pass, eqn: Any, ins: list[Flow]) -> list[Flow]:
    """Follows a view of the first operand. Slices that are equal parts of a split dim may be split too."""
    outs, before, name = [], eqn.invars[0].aval.shape, eqn.primitive.name
    for i, var in enumerate(eqn.outvars):
        source, after = run.related(eqn).source(output=i), var.aval.shape
        cut = [dim for dim, src in enumerate(source) if src is None and after[dim]] if name in _SLICES else []
        parts = {dim: dim for dim in cut if after[dim] % run.n == 0 and (name == "split" or before[dim] % after[dim] == 0)}
        outs.append(run.apply_view(eqn, ins[0], source, parts, i))
    return outs


def _reshaped(run: Pass, eqn: Any, ins: list[Flow]) -> list[Flow]:
    """A reshape merges or separates dims. It maps a split of a dim to the output dim that has the dim's first factor.

    If that output dim does not divide over the shards, it may be split together with the next one. An example is two
    key/value heads over four shards, split together with the queries of each head.
    """
    related, flow, shape = run.related(eqn), ins[0], eqn.outvars[0].aval.shape
    places = related.places()
    source: list[int | None] = [None] * len(shape)
    tails: dict[int, int] = {}
    parts: dict[int, int] = {}
    for dim, factors in enumerate(related.ins[0]):
        if (to := places.get(dim)) is None:
            continue
        rest = [i for i, other in enumerate(related.outs[0]) if i != to and not set(factors).isdisjoint(other)]
        if shape[to] % run.n == 0 or related.outs[0][to] == factors:
            source[to] = dim
        elif rest and (shared := math.gcd(shape[to], run.n)) > 1 and shape[rest[0]] % (run.n // shared) == 0:
            source[to], tails[to] = dim, rest[0]
        elif rest and shape[rest[0]] % run.n == 0 and all(set(factors).issuperset(related.outs[0][i]) for i in rest):
            parts[rest[0]] = dim  # such as query, key and value of a fused projection
    out = run.apply_view(eqn, flow, source, parts)
    if out.views:
        return [replace(out, views=out.views_without(tails))]
    if out.dim is not None and out.tail is None and out.dim in tails:
        return [replace(out, tail=tails[out.dim])]
    return [out]


_SLICES = ("slice", "dynamic_slice", "split")


def _attention(run: Pass, eqn: Any, ins: list[Flow]) -> list[Flow]:
    """Follows an attention like the unfused products that it computes."""
    return run.evaluate(formula(eqn), ins)


def _dequantised(run: Pass, eqn: Any, ins: list[Flow]) -> list[Flow]:
    """Codes and scales become the weight that they stand for: a view of the codes, whose blocks no split may divide."""
    codes, scales = (atom.aval.shape for atom in eqn.invars)
    divides = (scales[-1] if scales[-1] > 1 else codes[-1]) % run.n == 0
    return [ins[0].through([*range(len(codes) - 1), len(codes) - 1 if divides else None])]


_EQUATIONS: dict[str, Callable[[Pass, Any, list[Flow]], list[Flow]]] = {
    **dict.fromkeys((*VIEWS - {"reshape"}, "split", "rev", "pad"), _viewed),
    **dict.fromkeys((*REDUCTIONS, "argmax", "argmin"), _reduce),
    "attention": _attention,
    "dequantise": _dequantised,
    "dot_general": Pass.contract,
    **dict.fromkeys(GROUPED, _ragged),
    "conv_general_dilated": _conv,
    "gather": _gather,
    "select_n": _chosen,
    "concatenate": _joined,
    "stack": _stacked,
    "reshape": _reshaped,
    **dict.fromkeys(("dynamic_update_slice", *SCATTERS), _written),
    "optimization_barrier": lambda run, eqn, ins: ins,  # output i is operand i
    **dict.fromkeys(("scan", "while"), _repeated),
    "cond": _branches,
    **dict.fromkeys(ORDERED, _along),
}
