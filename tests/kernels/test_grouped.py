"""Grouped matmuls: values and all derivatives against a dense formula, any sizes of groups, errors."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _grouped_tiles import n_grouped_tiles
from jax.sharding import PartitionSpec as P

from redeqx.compiled import Module
from redeqx.kernels import grouped_gradient_p, grouped_matmul, grouped_matmul_p
from redeqx.machine import make_mesh
from redeqx.tracing import expected_length
from tests._programs import computed
from tests._tree import drawn

ROWS, K, N, GROUPS = 48, 8, 12, 4
SIZES = {
    "balanced": [12, 12, 12, 12],
    "skewed": [3, 30, 1, 14],
    "empty": [0, 24, 0, 24],
    "all in one": [0, 0, 48, 0],
    "rows outside": [10, 0, 7, 5],
    "no rows": [0, 0, 0, 0],
}


def dense(x, weights, sizes):
    """Multiplies all rows with all matrices, and picks those of each row's group."""
    group = jnp.sum(jnp.arange(x.shape[0])[:, None] >= jnp.cumsum(sizes), 1)
    return jnp.einsum("me,mk,ekn->mn", jax.nn.one_hot(group, len(sizes), dtype=x.dtype), x, weights)


def draw(*shapes):
    return drawn([jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes], 1.0)


@pytest.fixture
def operands():
    return draw((ROWS, K), (GROUPS, K, N))


@partial(jax.jit, static_argnums=0)
def value_and_grads(fn, x, weights, sizes):
    """The output, and the gradients of a weighted sum of it."""

    def total(x, weights):
        out = fn(x, weights, sizes).astype(jnp.float32)
        return jnp.sum(out * jnp.cos(jnp.arange(out.size)).reshape(out.shape)), out

    grads, out = jax.grad(total, (0, 1), has_aux=True)(x, weights)
    return out, grads


def assert_close(got, want, tolerance=1e-6):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * max(1.0, np.abs(b).max()))


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_values_and_gradients_are_those_of_the_dense_formula(operands, sizes):
    sizes = jnp.array(sizes)
    found = value_and_grads(grouped_matmul, *operands, sizes)
    assert_close(found, value_and_grads(dense, *operands, sizes))
    assert_close(found, value_and_grads(jax.lax.ragged_dot, *operands, sizes))


def test_transposed_matrices(operands):
    x, weights = operands
    sizes = jnp.array(SIZES["rows outside"])
    found, grads = value_and_grads(partial(grouped_matmul, transposed=True), x, jnp.swapaxes(weights, 1, 2), sizes)
    assert_close((found, (grads[0], jnp.swapaxes(grads[1], 1, 2))), value_and_grads(dense, x, weights, sizes))


@pytest.mark.parametrize("sizes", [SIZES["skewed"], SIZES["rows outside"]])
def test_bfloat16(operands, sizes):
    narrow = [x.astype(jnp.bfloat16) for x in operands]
    found = value_and_grads(grouped_matmul, *narrow, jnp.array(sizes))
    assert [x.dtype for x in found[1]] == [jnp.bfloat16] * 2
    wide = value_and_grads(dense, *(x.astype(jnp.float32) for x in narrow), jnp.array(sizes))
    assert_close(found, wide, 2**-7)


def test_forward_mode_and_second_derivatives(operands):
    sizes = jnp.array(SIZES["skewed"])
    tangents = draw((GROUPS, K, N), (ROWS, K))[::-1]

    def total(fn, x, weights):
        return jnp.sum(jnp.sin(fn(x, weights, sizes)))

    def push(fn):
        return jax.jvp(jax.grad(partial(total, fn), (0, 1)), operands, tangents)

    def of_squares(fn):
        return jax.grad(lambda x: jnp.sum(jax.grad(partial(total, fn))(x, operands[1]) ** 2))(operands[0])

    for derivative in (push, of_squares):
        found, want = (jax.jit(partial(derivative, fn))() for fn in (grouped_matmul, dense))
        assert_close(found, want, 2e-6)


@pytest.mark.sweep
def test_vmap():
    n, found, wanted = 3, {}, {}
    for axes in ((0, None, 0), (0, 0, 0), (1, None, None), (None, 0, None), (None, None, 0)):
        shapes = zip([(ROWS, K), (GROUPS, K, N)], axes[:2], strict=True)
        x, weights = draw(*(shape if axis is None else (*shape[:axis], n, *shape[axis:]) for shape, axis in shapes))
        mapped = [SIZES[name] for name in ("skewed", "rows outside", "empty")]
        args = x, weights, jnp.array(SIZES["skewed"] if axes[2] is None else mapped)
        for cases, fn in ((found, grouped_matmul), (wanted, dense)):
            cases[str(axes)] = partial(value_and_grads.__wrapped__, jax.vmap(fn, axes)), args
    found, wanted = computed(found), computed(wanted)
    for name in wanted:
        assert_close(found[name], wanted[name])


def test_leading_dims_and_nested_vmap():
    x, weights = draw((2, 3, ROWS, K), (GROUPS, K, N))
    sizes = jnp.array([list(SIZES.values())[:3], list(SIZES.values())[3:]])
    want = value_and_grads(jax.vmap(jax.vmap(dense, (0, None, 0)), (0, None, 0)), x, weights, sizes)
    assert_close(value_and_grads(grouped_matmul, x, weights, sizes), want)
    nested = jax.vmap(jax.vmap(grouped_matmul, (0, None, 0)), (0, None, 0))
    assert_close(value_and_grads(nested, x, weights, sizes), want)


def test_gradients_by_example():
    x, weights = draw((3, ROWS, K), (GROUPS, K, N))
    sizes = jnp.array(list(SIZES.values())[:3])

    def by_example(fn):
        return jax.vmap(jax.grad(lambda w, x, s: jnp.sum(fn(x, w, s) ** 2)), (None, 0, 0))

    found, want = (jax.jit(by_example(fn))(weights, x, sizes) for fn in (grouped_matmul, dense))
    assert_close(found, want, 2e-6)


def test_infinite_rows_do_not_reach_other_groups(operands):
    x, weights = operands
    sizes = jnp.array(SIZES["skewed"])
    x = x.at[:3].set(jnp.inf).at[-14:].set(jnp.nan)
    out, (_, of_weights) = value_and_grads(grouped_matmul, x, weights, sizes)
    assert np.isfinite(out[3:34]).all()
    assert np.isfinite(of_weights[1:3]).all() and not np.isfinite(of_weights[3]).any()


@pytest.mark.parametrize("shapes", [((0, K), (GROUPS, K, N)), ((ROWS, 0), (GROUPS, 0, N)), ((ROWS, K), (GROUPS, K, 0))])
def test_dims_of_size_0(shapes):
    x, weights = map(jnp.ones, shapes)
    sizes = jnp.array(SIZES["no rows" if not len(x) else "balanced"])
    out, grads = value_and_grads(grouped_matmul, x, weights, sizes)
    assert out.shape == (len(x), weights.shape[2]) and not out.any()
    assert [g.shape for g in grads] == list(shapes)


# --- the work ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[128] * 16, [1000, 500, 250, *[22] * 13], [0] * 7 + [2048] + [0] * 8, [96, 160] * 8])
def test_the_work_is_that_of_the_rows_for_any_sizes(sizes):
    """The last tile of a group may have few rows of it. A `ragged_dot` multiplies 16 times as many rows as there are."""
    assert sum(sizes) <= 2048
    x, weights = jax.ShapeDtypeStruct((2048, 64), jnp.float32), jax.ShapeDtypeStruct((16, 64, 32), jnp.float32)
    compiled = jax.jit(grouped_matmul).lower(x, weights, jax.ShapeDtypeStruct((16,), jnp.int32)).compile()
    one_tile = compiled.cost_analysis()["flops"]  # which counts a loop of unknown length once
    (n_tiles,), size = n_grouped_tiles(jnp.array(sizes), 2048, "cpu")
    assert 2 * size * 64 * 32 <= one_tile <= 1.05 * 2 * size * 64 * 32
    assert one_tile * n_tiles <= 1.6 * 2 * sum(sizes) * 64 * 32
    assert one_tile * n_tiles >= 2 * sum(sizes) * 64 * 32
    assert "[16,2048" not in compiled.as_text()
    lines = [line for lines in Module.of(compiled.as_text()).computations.values() for line in lines]
    assert [expected_length(line.op_name) for line in lines if line.opcode == "while"] == [-(-2048 // size)]


@pytest.mark.parametrize("seed", range(3))
def test_eight_devices_multiply_the_rows_of_one(seed):
    """Each device has a part of the sorted rows, so parts of few groups: at most one tile more for each group and device."""
    random = np.random.default_rng(seed)
    sizes = jnp.array(random.multinomial(4096, random.dirichlet(np.ones(8))))
    one, eight = (n_grouped_tiles(sizes, 4096, "cpu", n)[0] for n in (1, 8))
    assert eight.shape == (8,) and 1 <= eight.sum() / one.sum() <= 1.5
    assert eight.max() <= 1.5 * one.sum() / 8 + 2


def test_both_gradients_are_computed_before_one_is_used(operands):
    """Rows are then not kept for the gradient of the matrices, while what is before the product is computed."""
    sizes = jnp.array(SIZES["skewed"])
    loss = lambda x, weights: jnp.sum(jnp.sin(grouped_matmul(jnp.sin(x), weights, sizes)))  # noqa: E731
    eqns = jax.make_jaxpr(jax.grad(loss, (0, 1)))(*operands).jaxpr.eqns
    made = {var: eqn.primitive for eqn in eqns for var in eqn.outvars}
    (barrier,) = [eqn for eqn in eqns if eqn.primitive.name == "optimization_barrier"]
    assert [made[var] for var in barrier.invars] == [grouped_matmul_p, grouped_gradient_p]
    assert "optimization_barrier" not in str(jax.make_jaxpr(jax.grad(loss))(*operands))  # nothing is to be waited for


# --- several devices -----------------------------------------------------------------------------------------------------


def test_inside_a_shard_map(operands):
    """Each device has its own groups, and gradients of shared weights are summed."""
    mesh = make_mesh()
    x, weights = draw((8, ROWS, K), (GROUPS, K, N))
    sizes = jnp.array([*SIZES.values(), *SIZES.values()][:8])
    on_devices = jax.shard_map(
        lambda x, w, s: grouped_matmul(x[0], w, s[0])[None],
        mesh=mesh,
        in_specs=(P("data"), P(), P("data")),
        out_specs=P("data"),
        check_vma=False,
    )
    want = value_and_grads(jax.vmap(dense, (0, None, 0)), x, weights, sizes)
    assert_close(value_and_grads(on_devices, x, weights, sizes), want)


# --- analyses ------------------------------------------------------------------------------------------------------------


def test_a_gradient_is_one_equation_for_each_operand(operands):
    jaxpr = jax.make_jaxpr(jax.grad(lambda x, w: grouped_matmul(x, w, jnp.array(SIZES["skewed"])).sum(), (0, 1)))(*operands)
    names = [eqn.primitive for eqn in jaxpr.eqns]
    assert names.count(grouped_matmul_p) == 2 and names.count(grouped_gradient_p) == 1


# --- errors --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "weights", "sizes", "message"),
    [
        (
            jnp.ones((ROWS, K + 1)),
            jnp.ones((GROUPS, K, N)),
            jnp.ones(GROUPS, int),
            r"`x`, `weights`: expected .* got shapes \(48, 9\)",
        ),
        (jnp.ones((ROWS, K)), jnp.ones((GROUPS, K, N)), jnp.ones(3, int), r"`group_sizes`: expected .* and \(3,\)"),
        (jnp.ones((ROWS, K)), jnp.ones((GROUPS, K, N)), jnp.ones(GROUPS), "`group_sizes`: expected integers, got float32"),
        (
            jnp.ones((ROWS, K), int),
            jnp.ones((GROUPS, K, N)),
            jnp.ones(GROUPS, int),
            "`x`: expected floating numbers, got int32",
        ),
    ],
)
def test_errors(x, weights, sizes, message):
    with pytest.raises(ValueError, match=message):
        grouped_matmul(x, weights, sizes)
