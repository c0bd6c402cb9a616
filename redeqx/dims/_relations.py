"""How equations relate the dims of their operands and outputs: one table, by primitive.

A relation takes the names, the equation and its operands, unifies atoms, records along which dims entries are combined
(`Names.mix`), and returns the dims of each output.
"""

from collections.abc import Callable, Sequence
from typing import Any

from ._atoms import Dim, Value, flat, have_common_factors, size_of
from ._inference import Inference
from ._lookups import SCATTERS, gather, scatter
from ._loops import LOOPS

Dims = Sequence[Dim]
Outs = Sequence[Dims]
Relation = Callable[[Inference, Any, Sequence[Value]], Outs]

# Reductions over dims, whose result does not depend on the order of the entries. Not of indices, as `argmax`.
REDUCTIONS = tuple(f"reduce_{of}" for of in ("sum", "max", "min", "prod", "and", "or", "xor"))
CUMULATIVE = ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
# What depends on the order of the entries of a dim, besides reversals.
ORDERED = (*CUMULATIVE, "sort")


def relation_of(eqn: Any) -> Relation:
    """Returns how an equation without inner jaxprs relates dims."""
    found = _copies if eqn.primitive.name == "device_put" else _TABLE.get(eqn.primitive.name)
    is_known = eqn.primitive.name in _ELEMENTWISE and is_elementwise(eqn)
    return found or (_elementwise if is_known else lambda names, eqn, ins: names.give_up(eqn, ins))


# --- elementwise, and views ---------------------------------------------------------------------------------------------

# A primitive of another package may keep the shape and mix its entries.
_ELEMENTWISE = {
    *("abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e"),
    *("bessel_i1e", "bitcast_convert_type", "cbrt", "ceil", "clamp", "clz", "complex", "conj"),
    *("convert_element_type", "copy", "cos", "cosh", "digamma", "div", "eq", "eq_to", "erf"),
    *("erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "igamma", "igamma_grad_a", "igammac", "imag"),
    *("integer_pow", "is_finite", "le", "le_to", "lgamma", "log", "log1p", "log2", "logistic", "lt", "lt_to", "max", "min"),
    *("mul", "mulhi", "name", "ne", "neg", "nextafter", "not", "one_minus_square", "or", "polygamma", "polynomial"),
    *("population_count", "pow", "random_clone"),
    *("real", "reduce_precision", "regularized_incomplete_beta", "rem", "reshard", "round", "rsqrt", "select_n"),
    *("sharding_constraint", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh"),
    *("sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "tile", "xor", "zeta"),
    *("nonbatchable", "nondifferentiable_backward", "nontraceable"),  # Equinox's, which return their operands
    "select_if_vmap",  # Equinox's `select_n` in loops, whose predicate may be known
}


def is_elementwise(eqn: Any) -> bool:
    """Whether each output entry of an equation without inner jaxprs depends only on the operands' entries at its position.
    Entries of a dim of size 1, and scalars, are at all positions, even of a `tile` along such dims."""
    name = eqn.primitive.name
    is_known = name != "tile" and (name in _TABLE or name in LOOPS or name in _NOT_FOLLOWED)
    if is_known or not eqn.outvars or eqn.effects:
        return False
    shape: Any = getattr(eqn.outvars[0].aval, "shape", None)
    return all(getattr(var.aval, "shape", None) == shape for var in eqn.outvars) and all(
        not own or (len(own) == len(shape) and all(n in (1, full) for n, full in zip(own, shape, strict=True)))
        for own in (atom.aval.shape for atom in eqn.invars)
    )


def _elementwise(names: Inference, eqn: Any, ins: Sequence[Value]) -> Outs:
    shape = eqn.outvars[0].aval.shape
    dims: list[Dim] = [()] * len(shape)
    for value in ins:
        if len(value.dims) != len(shape):
            continue
        for i, dim in enumerate(value.dims):
            if value.aval.shape[i] == shape[i] and dim:
                if dims[i]:
                    names.unify(dims[i], dim)
                else:
                    dims[i] = dim
    return [dims] * len(eqn.outvars)


def _copies(names: Inference, eqn: Any, ins: Sequence[Value]) -> Outs:
    return [value.dims for value in ins]


def _broadcast(names: Inference, eqn: Any, ins: Sequence[Value]) -> Outs:
    shape, to = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    old = {int(i): ins[0].dims[k] for k, i in enumerate(to) if ins[0].aval.shape[k] == shape[i]}
    return [[old[i] if i in old else names.dim(size) for i, size in enumerate(shape)]]


def _tile(names: Inference, eqn: Any, ins: Sequence[Value]) -> Outs:
    """A repeated dim is its copies, then the dim."""
    return [[(*names.dim(n), *dim) for n, dim in zip(eqn.params["reps"], ins[0].dims, strict=True)]]


def _without(dims: Dims, axes: Sequence[int]) -> Dims:
    removed = {axis % len(dims) for axis in axes}
    return [dim for i, dim in enumerate(dims) if i not in removed]


def _reshape(names: Inference, eqn: Any, ins: Sequence[Value]) -> Outs:
    """Regroups the atoms. An atom is divided where a dim ends inside it."""
    old, new = list(ins[0].dims), list(map(names.dim, eqn.outvars[0].aval.shape))
    if 0 in eqn.outvars[0].aval.shape:
        return [new]
    found: list[Dim] = []
    while old or new:  # one run of dims after the other, of equal sizes
        a, b = old[:1], new[:1]
        while (sizes := [size_of(_merged(run)) for run in (a, b)])[0] != sizes[1]:
            run, source = (a, old) if sizes[0] < sizes[1] else (b, new)
            run.append(source[len(run)])
        old, new = old[len(a) :], new[len(b) :]
        found.extend(b)
        if have_common_factors(_merged(a), _merged(b)):
            names.unify(_merged(a), _merged(b))
            continue
        for one in a:  # the new dims cut across the old ones
            names.mix("conflict", one)
    return [list(map(flat, found))]


def _merged(dims: Dims) -> Dim:
    return tuple(atom for dim in dims for atom in flat(dim))


def _dequantise(names: Inference, eqn: Any, ins: Sequence[Value]) -> Outs:
    """A byte of codes is one number or several, and a block of numbers has one scale."""
    (*dims, codes), (*same, blocks) = (value.dims for value in ins)
    names.unify_all(dims, same)
    shapes, n = [value.aval.shape for value in ins], eqn.outvars[0].aval.shape[-1]
    numbers = (*codes, *names.dim(n // shapes[0][-1])) if n > shapes[0][-1] else codes
    if shapes[1][-1] > 1:
        names.unify(numbers, (*blocks, *names.dim(n // shapes[1][-1])))
    return [[*dims, numbers]]


# --- parts and joins ----------------------------------------------------------------------------------------------------


def _slice(names: Inference, eqn: Any, ins: Sequence[Value]) -> Outs:
    shape, start = eqn.outvars[0].aval.shape, eqn.params["start_indices"]
    strides = eqn.params["strides"] or [1] * len(shape)
    return [[_part(names, dim, start[i], shape[i], strides[i]) for i, dim in enumerate(ins[0].dims)]]


def _part(names: Inference, dim: Dim, start: int, size: int, stride: int = 1) -> Dim:
    """Returns the dim of a slice. Complete entries of a stack (see `_concatenate`) keep their dims."""
    atoms = flat(dim)
    total = size_of(atoms)
    if size == total or not size:
        return dim if size else names.dim(0)
    if stride > 1 and total % stride == 0 and size == total // stride:  # one entry of each group
        outer, group = names.dim(size), names.dim(stride)
        if names.unify(dim, (*outer, *group)):
            names.mix("part", group)
            return outer
    inner = total // atoms[0].size
    if stride == 1 and len(atoms) > 1 and start % inner == 0 and size % inner == 0:
        return (*names.part(atoms[:1], size // inner), *atoms[1:])
    return names.part(dim, size)


def _split(names: Inference, eqn: Any, ins: Sequence[Value]) -> Outs:
    axis, outs, start = eqn.params["axis"], [], 0
    for size in eqn.params["sizes"]:
        outs.append([_part(names, dim, start, size) if i == axis else dim for i, dim in enumerate(ins[0].dims)])
        start += size
    return outs


def _replaced(how: str, replaced: Callable[[Any, int], bool]) -> Relation:
    """Returns the relation of equations that replace each dim of their operand for which `replaced(eqn, i)` holds."""

    def relation(names: Inference, eqn: Any, ins: Sequence[Value]) -> Outs:
        sizes = enumerate(eqn.outvars[0].aval.shape)
        dims = [names.part(ins[0].dims[i], size, how) if replaced(eqn, i) else ins[0].dims[i] for i, size in sizes]
        return [dims] * len(eqn.outvars)

    return relation


def _has_another_size(eqn: Any, dim: int) -> bool:
    return eqn.invars[0].aval.shape[dim] != eqn.outvars[0].aval.shape[dim]


def _windows(names: Inference, eqn: Any, ins: Sequence[Value]) -> Outs:
    slides = [n > 1 or _has_another_size(eqn, dim) for dim, n in enumerate(eqn.params["window_dimensions"])]
    for is_slid, first, *others in zip(slides, *(value.dims for value in ins if value.dims), strict=True):
        for dim in others:
            names.mix("window", dim) if is_slid else names.unify(first, dim)
    return _replaced("window", lambda eqn, dim: slides[dim])(names, eqn, ins)


def _dynamic_update_slice(names: Inference, eqn: Any, ins: Sequence[Value]) -> Outs:
    del eqn
    for i, (dim, update) in enumerate(zip(ins[0].dims, ins[1].dims, strict=True)):
        if ins[0].aval.shape[i] == ins[1].aval.shape[i]:
            names.unify(dim, update)
        else:
            names.mix("pick", dim)
            names.mix("into", update)
    return [ins[0].dims]


def _concatenate(names: Inference, eqn: Any, ins: Sequence[Value]) -> Outs:
    axis, shape = eqn.params["dimension"], eqn.outvars[0].aval.shape
    dims: list[Dim] = []
    for i in range(len(shape)):
        own = [value.dims[i] for value in ins]
        if i != axis:
            own = [dim for dim in own if dim] or [()]
            names.unify_all(own[:1] * len(own), own)
            dims.append(own[0])
        elif own[0] and all(flat(dim) == flat(own[0]) for dim in own):  # several values of one dim: a stack of them
            dims.append((*names.dim(len(ins)), *own[0]))
        else:
            joined = names.dim(shape[i])
            for dim in own:
                names.mix("join", dim)
                names.parts.append(("join", dim, joined))
            dims.append(joined)
    return [dims]


def _stack(names: Inference, eqn: Any, ins: Sequence[Value]) -> Outs:
    dims, axis = list(_unified(names, ins)), eqn.params["axis"]
    return [[*dims[:axis], names.dim(len(ins)), *dims[axis:]]]


def _unified(names: Inference, ins: Sequence[Value]) -> tuple[Dim, ...]:
    """Returns the dims that operands of one shape have in common."""
    for other in ins[1:]:
        names.unify_all(ins[0].dims, other.dims)
    return ins[0].dims


# --- reductions, and orders ---------------------------------------------------------------------------------------------


def _reduce(names: Inference, eqn: Any, ins: Sequence[Value]) -> Outs:
    """Also a collective over a named axis of `vmap`, which became a dim of each operand, and Equinox's reductions over every
    dim, those of `vmap` too."""
    axes, how = eqn.params.get("axes"), "sum" if eqn.primitive.name in ("reduce_sum", "psum") else "reduce"
    axes = range(len(ins[0].dims)) if axes is None else axes
    for value in ins:
        for i in axes:
            names.mix(how, value.dims[i])
    return [_without(value.dims, axes) for value in ins]


# Of values under `vmap`, Equinox's loops, diffrax and optimistix ask whether any row needs more work, such as another
# iteration; a row that does not is computed again or keeps its values. So no row's result depends on what is answered.
UNVMAPPED = ("unvmap_all", "unvmap_any", "unvmap_max")


def _ordered(names: Inference, eqn: Any, ins: Sequence[Value]) -> Outs:
    """Sorts, cumulative operations and reversals."""
    (axes,) = (eqn.params[key] for key in ("axis", "dimension", "dimensions") if key in eqn.params)
    dims = _unified(names, ins)
    for i in axes if isinstance(axes, tuple) else (axes,):
        names.mix("order", dims[i])
    return [dims] * len(eqn.outvars)


# The number of dims of the first operand's matrix or vector. All dims before are a batch.
_OF_MATRICES = {
    **dict.fromkeys(("cholesky", "eig", "eigh", "geqrf", "hessenberg", "lu", "qr", "schur", "svd", "tridiagonal"), 2),
    **dict.fromkeys(("geqp3", "householder_product", "ormqr"), 2),
    **dict.fromkeys(("lu_pivots_to_permutation", "tridiagonal_solve"), 1),
}


def _linear_algebra(names: Inference, eqn: Any, ins: Sequence[Value]) -> Outs:
    """Decompositions of a matrix, and what is computed with them."""
    n_batch = len(ins[0].dims) - _OF_MATRICES[eqn.primitive.name]
    for value in ins:
        names.unify_all(ins[0].dims[:n_batch], value.dims[:n_batch])
        for dim in value.dims[n_batch:]:
            names.mix("reduce", dim)
    return [[*ins[0].dims[:n_batch], *map(names.dim, var.aval.shape[n_batch:])] for var in eqn.outvars]


def _triangular_solve(names: Inference, eqn: Any, ins: Sequence[Value]) -> Outs:
    """Each column of the right-hand side is solved on its own; each of its rows, if the matrix is on the right."""
    matrix, given = ins
    names.unify_all(matrix.dims[:-2], given.dims[:-2])
    rows, columns = given.dims[-2:]
    solved = rows if eqn.params["left_side"] else columns
    for dim in (*matrix.dims[-2:], solved):
        names.mix("reduce", dim)
    new = names.dim(given.aval.shape[-2 if eqn.params["left_side"] else -1])
    return [[*given.dims[:-2], *((new, columns) if eqn.params["left_side"] else (rows, new))]]


def _batched(names: Inference, eqn: Any, ins: Sequence[Value]) -> Outs:
    """Equinox's `vmap` of a primitive that has no rule for it. Nothing is known of the dims that are not batched."""
    rest, batch, params = [list(value.dims) for value in ins], [], eqn.params
    while "__batch_axes" in params:
        of = [dims.pop(axis) for dims, axis in zip(rest, params["__batch_axes"], strict=True) if isinstance(axis, int)]
        names.unify_all(of[:1] * len(of), of)
        batch.append(of[0])
        params = dict(params["params"])
    for dim in (dim for dims in rest for dim in dims):
        names.mix("unknown", dim)
    return [[*batch, *map(names.dim, var.aval.shape[len(batch) :])] for var in eqn.outvars]


# --- products -----------------------------------------------------------------------------------------------------------


def _dot(names: Inference, eqn: Any, ins: Sequence[Value]) -> Outs:
    (contracted, _), _ = numbers = eqn.params["dimension_numbers"]
    dims = _product(names, ins, numbers)
    for a in contracted:
        names.mix("sum", ins[0].dims[a])
    return dims


def _ragged_dot(names: Inference, eqn: Any, ins: Sequence[Value]) -> Outs:
    """Rows in groups, each with a matrix of its own. In the gradient of the matrices, the rows of each group are summed."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = dot = numbers.dot_dimension_numbers
    groups = ins[2].dims[-1]
    for i in numbers.rhs_group_dimensions:
        names.unify(ins[1].dims[i], groups)
    (dims,) = _product(names, ins, dot, numbers.rhs_group_dimensions)
    for how, of in (("sum", contracted), ("order", numbers.lhs_ragged_dimensions)):
        for i in of:
            names.mix(how, ins[0].dims[i])
    is_sum = set(numbers.lhs_ragged_dimensions) <= set(contracted)
    return [[groups, *dims] if is_sum else dims]


def _grouped_matmul(names: Inference, eqn: Any, ins: Sequence[Value]) -> Outs:
    """The primitive of `kernels`, for rows `[batch, rows, k]` and matrices `[batch or 1, groups, k, n]`."""
    x, weights, sizes = (value.dims for value in ins)
    inputs, outputs = (3, 2) if eqn.params["setting"].transposed else (2, 3)
    names.unify_all((x[0], weights[1], x[2]), (sizes[0], sizes[1], weights[inputs]))
    if ins[1].aval.shape[0] == ins[0].aval.shape[0]:
        names.unify(x[0], weights[0])
    names.mix("sum", x[2])
    names.mix("order", x[1])
    return [[x[0], x[1], weights[outputs]]]


def _grouped_matmul_gradient(names: Inference, eqn: Any, ins: Sequence[Value]) -> Outs:
    """The gradient of the matrices, for rows `[batch, rows, k]` and `[batch, rows, n]`."""
    x, g, sizes = (value.dims for value in ins)
    names.unify_all((x[0], x[1], x[0]), (g[0], g[1], sizes[0]))
    is_summed = eqn.params["setting"].is_summed
    for dim in x[:2] if is_summed else x[1:2]:
        names.mix("sum", dim)
    names.mix("order", x[1])
    return [[names.dim(1) if is_summed else x[0], sizes[1], x[2], g[2]]]


def _product(names: Inference, ins: Sequence[Value], numbers: Any, groups: Sequence[int] = ()) -> Outs:
    """Unifies the contracted and the batch dims of two operands; the others of both follow the batch dims in the output."""
    (lc, rc), (lb, rb) = numbers
    left, right = (value.dims for value in ins[:2])
    names.unify_all((left[i] for i in (*lc, *lb)), (right[i] for i in (*rc, *rb)))
    return [[*(left[i] for i in lb), *_without(left, (*lc, *lb)), *_without(right, (*rc, *rb, *groups))]]


def _convolution(names: Inference, eqn: Any, ins: Sequence[Value]) -> Outs:
    numbers, shape = eqn.params["dimension_numbers"], eqn.outvars[0].aval.shape
    lhs, rhs, out = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    dims: list[Dim] = [()] * len(shape)
    x, kernel, x_shape = ins[0].dims, ins[1].dims, ins[0].aval.shape
    if (n := eqn.params["batch_group_count"]) > 1:  # the group is the first factor of rows and of output channels
        group, rows = names.dim(n), names.dim(x_shape[lhs[0]] // n)
        names.unify(x[lhs[0]], (*group, *rows))
        names.unify(kernel[rhs[0]], (*group, *names.dim(shape[out[1]] // n)))
        x = tuple(rows if i == lhs[0] else dim for i, dim in enumerate(x))
    dims[out[0]], dims[out[1]] = x[lhs[0]], kernel[rhs[0]]
    if (n := eqn.params["feature_group_count"]) == 1:
        names.unify(x[lhs[1]], kernel[rhs[1]])
        names.mix("sum", x[lhs[1]])
    else:  # the group is the first factor of both kinds of channels
        group, channels = names.dim(n), names.dim(x_shape[lhs[1]] // n)
        names.unify(x[lhs[1]], (*group, *channels))
        names.unify(kernel[rhs[0]], (*group, *names.dim(shape[out[1]] // n)))
        names.unify(channels, kernel[rhs[1]])
        names.mix("sum", channels)
    for k, (i, j, o) in enumerate(zip(lhs[2:], rhs[2:], out[2:], strict=True)):
        is_pointwise = ins[1].aval.shape[j] == 1 == eqn.params["window_strides"][k] and not any(eqn.params["padding"][k])
        dims[o] = x[i] if is_pointwise and x_shape[i] == shape[o] else names.part(x[i], shape[o], "window")
        names.mix("kernel", kernel[j])
    return [dims]


# --- draws --------------------------------------------------------------------------------------------------------------


def _draw(names: Inference, eqn: Any, ins: Sequence[Value]) -> Outs:
    """The dims of the keys, if there are any, then new ones, whose use names them."""
    keys = ins[0].dims if ins else ()
    return [[*keys, *map(names.dim, var.aval.shape[len(keys) :])] for var in eqn.outvars]


_NOT_FOLLOWED = ("pure_callback", "io_callback", "ffi_call", "pallas_call", "rng_bit_generator")

_TABLE: dict[str, Relation] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "transpose": lambda names, eqn, ins: [[ins[0].dims[i] for i in eqn.params["permutation"]]],
    "squeeze": lambda names, eqn, ins: [_without(ins[0].dims, eqn.params["dimensions"])],
    "optimization_barrier": _copies,
    "triangular_solve": _triangular_solve,
    "vprim": _batched,
    "concatenate": _concatenate,
    "stack": _stack,
    "tile": _tile,
    "dequantise": _dequantise,
    "slice": _slice,
    "split": _split,
    "dynamic_slice": _replaced("pick", _has_another_size),
    "dynamic_update_slice": _dynamic_update_slice,
    "pad": _replaced("part", lambda eqn, dim: any(eqn.params["padding_config"][dim])),
    "dot_general": _dot,
    "ragged_dot_general": _ragged_dot,
    "grouped_matmul": _grouped_matmul,
    "grouped_matmul_gradient": _grouped_matmul_gradient,
    "conv_general_dilated": _convolution,
    "gather": gather,
    "top_k": _replaced("order", lambda eqn, dim: dim == eqn.params.get("axis", -1) % len(eqn.outvars[0].aval.shape)),
    "fft": _replaced("fft", lambda eqn, dim: dim >= len(eqn.outvars[0].aval.shape) - len(eqn.params["fft_lengths"])),
    **dict.fromkeys(("iota", "rng_uniform", "random_bits", "random_split", "random_seed", "random_unwrap"), _draw),
    "random_wrap": lambda names, eqn, ins: [ins[0].dims[: len(eqn.outvars[0].aval.shape)]],
    **dict.fromkeys(("random_fold_in", "random_gamma", "threefry2x32"), _elementwise),
    **dict.fromkeys((*ORDERED, "rev"), _ordered),
    **dict.fromkeys(("psum", "pmax", "pmin", "argmax", "argmin"), _reduce),
    **dict.fromkeys((*REDUCTIONS, *UNVMAPPED), _reduce),
    **dict.fromkeys(("reduce_window_sum", "reduce_window_max", "reduce_window_min", "reduce_window"), _windows),
    **dict.fromkeys(("select_and_scatter_add", "select_and_gather_add"), _windows),
    **dict.fromkeys(SCATTERS, scatter),
    **dict.fromkeys(_OF_MATRICES, _linear_algebra),
}
