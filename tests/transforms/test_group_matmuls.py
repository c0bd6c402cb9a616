"""Grouped matmuls in a user's function: which equations the rule replaces, and a mixture of experts on all meshes."""

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _mixtures import LanguageModel, T, loss_fn
from jax.sharding import NamedSharding, PartitionSpec as P

import redeqx
from redeqx.kernels import grouped_matmul
from redeqx.machine import make_mesh
from redeqx.tracing import insides, matmul_flops, transformed
from redeqx.transforms import GroupMatmuls, RematLoops
from tests._programs import assert_all_close, computed
from tests._tree import drawn

M, K, N, E, B = 24, 8, 12, 4, 3
RULE = GroupMatmuls(make_mesh(), ())


def draw(*shapes):
    return drawn([jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes], 1.0)


def names(fn, *args):
    """The primitives of a function's equations, also of those that each device computes."""

    def of(closed):
        for eqn in closed.jaxpr.eqns:
            yield eqn.primitive.name
            for inner in insides(eqn):
                yield from of(inner.closed)

    return list(of(jax.make_jaxpr(fn)(*args)))


def general(dims, ragged, groups, **kwargs):
    numbers = jax.lax.RaggedDotDimensionNumbers(dims, ragged, groups)
    return partial(jax.lax.ragged_dot_general, ragged_dot_dimension_numbers=numbers, **kwargs)


FORMS = {
    "plain": (jax.lax.ragged_dot, (M, K), (E, K, N), (E,)),
    "float32 output": (partial(jax.lax.ragged_dot, preferred_element_type=jnp.float32), (M, K), (E, K, N), (E,)),
    "transposed": (general((((1,), (2,)), ((), ())), [0], [0]), (M, K), (E, N, K), (E,)),
    "groups last": (general((((0,), (0,)), ((), ())), [1], [2]), (K, M), (K, N, E), (E,)),
    "two contracted dims": (general((((1, 2), (2, 1)), ((), ())), [0], [0]), (M, 2, 4), (E, 4, 2, N), (E,)),
    "two output dims": (general((((1,), (1,)), ((), ())), [0], [0]), (M, K), (E, K, 3, 4), (E,)),
    "gradient": (general((((0,), (0,)), ((), ())), [0], []), (M, K), (M, N), (E,)),
    "gradient, rows last": (general((((1,), (1,)), ((), ())), [1], []), (K, M), (N, M), (E,)),
    "mapped": (jax.vmap(jax.lax.ragged_dot), (B, M, K), (B, E, K, N), (B, E)),
    "mapped gradient": (general((((1,), (1,)), ((0,), (0,))), [1], []), (B, M, K), (B, M, N), (B, E)),
    "shared by a batch": (general((((2,), (1,)), ((), ())), [1], [0]), (B, M, K), (E, K, N), (B, E)),
    "gradient summed over a batch": (general((((0, 1), (0, 1)), ((), ())), [1], []), (B, M, K), (B, M, N), (B, E)),
}


def test_every_form_is_computed_by_the_primitive():
    one = jnp.array([[5, 0, 12, 4], [6, 6, 6, 6], [0, 24, 0, 0]])
    plain, changed = {}, {}
    for form, (fn, a, b, sizes) in FORMS.items():
        ruled, args = transformed(fn, [RULE]), (*draw(a, b), one[0] if len(sizes) == 1 else one)
        found = names(ruled, *args)
        assert "ragged_dot_general" not in found and any(name.startswith("grouped_matmul") for name in found), form
        flops = [matmul_flops(jax.make_jaxpr(each)(*args).jaxpr) for each in (ruled, fn)]
        assert flops[0] == flops[1], form
        plain[form], changed[form] = (fn, args), (ruled, args)
    found, wanted = computed(changed), computed(plain)
    assert {form: x.dtype for form, x in found.items()} == {form: x.dtype for form, x in wanted.items()}
    assert_all_close(found, wanted, rtol=1e-6, atol=1e-5)


def test_forms_without_a_primitive_are_computed_as_written():
    by_batch = general((((1,), (1,)), ((0,), (0,))), [0], [])
    integers = jnp.ones((M, K), int), jnp.ones((E, K, N), int)
    for fn, args in ((by_batch, draw((M, K), (M, K, N))), (jax.lax.ragged_dot, integers)):
        assert "ragged_dot_general" in names(transformed(fn, [RULE]), *args, jnp.array([5, 0, 12, 7]))


def layers(x, weights, sizes):
    def layer(x, weights):
        hidden = jnp.sin(jax.lax.ragged_dot(x, weights["up"], sizes))
        return x + jax.lax.ragged_dot(hidden, weights["down"], sizes), None

    return jnp.square(jax.lax.scan(layer, x, weights)[0]).sum()


@pytest.mark.parametrize(("level", "n_again"), [("none", 0), ("matmuls", 0), ("full", 1)])
def test_loops_save_its_output_as_that_of_a_matmul(level, n_again):
    """In `"full"`, the backward pass of a layer computes `up` again, but not `down`, whose output it does not need."""
    x, up, down = draw((M, K), (2, E, K, N), (2, E, N, K))
    up, down = K**-0.5 * up, N**-0.5 * down
    rules = [RULE] if level == "none" else [RematLoops(level), RULE]
    step = jax.value_and_grad(transformed(layers, rules), (0, 1))
    args = x, {"up": up, "down": down}, jnp.array([5, 0, 12, 4])
    flops = 2 * 2 * 2 * M * K * N  # of two products in two layers
    assert matmul_flops(jax.make_jaxpr(step)(*args).jaxpr) == {"float32": 3 * flops + n_again * flops // 2}
    assert "ragged_dot_general" not in names(step, *args)
    found, want = (jax.jit(fn)(*args) for fn in (step, jax.value_and_grad(layers, (0, 1))))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6 * float(jnp.abs(b).max()))


def test_inside_branches_remats_and_derivatives():
    """JAX has no derivative of the gradient of a `ragged_dot`; the primitive has."""
    x, weights = draw((M, K), (E, K, K))
    weights, sizes = K**-0.5 * weights, jnp.array([5, 0, 12, 4])

    def fn(product, x, weights):
        inner = jax.grad(lambda w: jnp.sin(product(x, w, sizes)).sum())(weights)
        y = jax.checkpoint(lambda w: product(x, w, sizes))(inner)
        return jax.lax.cond(y.sum() > 0, lambda y: product(y, weights, sizes), lambda y: y, y).sum()

    ruled = transformed(partial(fn, jax.lax.ragged_dot), [RULE])
    assert "ragged_dot_general" not in names(jax.grad(ruled, (0, 1)), x, weights)
    by_formula = partial(fn, lambda x, weights, sizes: dense(weights, x, sizes))
    for a, b in zip(*(jax.jit(jax.grad(each, (0, 1)))(x, weights) for each in (ruled, by_formula)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6 * float(jnp.abs(b).max()))


# --- several devices -----------------------------------------------------------------------------------------------------

SIZES = {"skewed": [2, 15, 1, 6], "empty": [0, 10, 0, 12], "all in one": [0, 0, 21, 0], "rows outside": [10, 0, 4, 5]}


def dense(weights, x, sizes):
    """Multiplies all rows with all matrices, and picks those of each row's group."""
    group = jnp.sum(jnp.arange(len(x))[:, None] >= jnp.cumsum(sizes), 1)
    return jnp.einsum("me,mk,ekn->mn", jax.nn.one_hot(group, E), x, weights)


def of_groups(weights, x, sizes):
    return grouped_matmul(x, weights, sizes)


@partial(jax.jit, static_argnums=0)
def value_and_grads(fn, weights, x, sizes):
    """The output, and the gradients of a weighted sum of it."""

    def total(weights, x):
        out = fn(weights, x, sizes)
        return jnp.sum(out * jnp.cos(jnp.arange(out.size)).reshape(out.shape)), out

    return jax.grad(total, (0, 1), has_aux=True)(weights, x)


def check_on_mesh(mesh, split, fn, wanted, weights, x, sizes):
    """Compares values and gradients with those of a dense formula; returns the program."""
    ruled = transformed(fn, [GroupMatmuls(mesh, (split,))])
    weights, x = jax.device_put((weights, x), NamedSharding(mesh, P()))
    found, want = (value_and_grads(each, weights, x, jnp.array(sizes)) for each in (ruled, wanted))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6 * max(1.0, np.abs(b).max()))
    return value_and_grads.lower(ruled, weights, x, jnp.array(sizes)).compile().as_text()


OF_THREE = {"n_model_shards": 2, "n_fsdp_shards": 2}


@pytest.mark.parametrize(
    ("split", "n_rows", "shards"),
    [
        (2, M, OF_THREE),
        (1, 21, OF_THREE),
        pytest.param(None, 21, OF_THREE, marks=pytest.mark.sweep),
        pytest.param(1, M, {"n_model_shards": 2, "n_sequence_shards": 4}, marks=pytest.mark.sweep),
        pytest.param(2, M, {"n_model_shards": 4}, marks=pytest.mark.sweep),
    ],
)
def test_devices_share_the_rows(split, n_rows, shards):
    mesh = make_mesh(**shards)
    x, weights = draw((n_rows, K), (E, K, N))
    for sizes in list(SIZES.values())[:: 1 if n_rows == 21 else 3]:
        text = check_on_mesh(mesh, split, of_groups, dense, weights, x, sizes)
    # Each device has its own rows, and no more.
    assert f"[{-(-n_rows // (8 // shards['n_model_shards']))}," in text


@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.sweep), pytest.param(4, marks=pytest.mark.sweep)])
def test_devices_share_a_batch_of_rows(n):
    """Over 2 x 2 shards: 4 entries are split, of 3 the rows are, and of 2 both."""
    x, weights = draw((n, M, K), (E, K, N))
    wanted = jax.vmap(dense, (None, 0, 0))
    check_on_mesh(make_mesh(**OF_THREE), 2, of_groups, wanted, weights, x, list(SIZES.values())[:n])


@pytest.mark.parametrize(
    ("split", "n_stacks"),
    [(3, 2), pytest.param(None, 2, marks=pytest.mark.sweep), pytest.param(3, 4, marks=pytest.mark.sweep)],
)
def test_stacks_of_matrices(split, n_stacks):
    """Each is for a half, or a quarter, of the batch."""
    x, weights = draw((n_stacks, 8 // n_stacks, M, K), (n_stacks, E, K, N))
    sizes = np.array([*SIZES.values()] * 2).reshape(*x.shape[:2], E)
    wanted = jax.vmap(jax.vmap(dense, (None, 0, 0)))
    check_on_mesh(make_mesh(**OF_THREE), split, jax.vmap(of_groups), wanted, weights, x, sizes)


# --- a mixture of experts that knows nothing of redeqx ------------------------------------------------------------------

MESHES = {
    "data=8": {},
    "fsdp=8": {"n_fsdp_shards": 8},
    "model=4": {"n_model_shards": 4},
    "data=2, fsdp=2, model=2": {"n_fsdp_shards": 2, "n_model_shards": 2},
    "sequence=2, model=2": {"n_sequence_shards": 2, "n_model_shards": 2},
}
QUICK = ("data=2, fsdp=2, model=2",)
IDS = np.random.default_rng(0).integers(0, 64, (16, T)).astype(np.int32)
LR = 0.5


@pytest.fixture(scope="module")
def by_hand():
    """The loss, and the model after one update, of a step of SGD on one device."""
    model = LanguageModel("sorted_tokens", jax.random.key(0))
    loss, grads = jax.jit(jax.value_and_grad(loss_fn))(model, IDS)
    return loss, jax.tree.map(lambda w, g: w - LR * g, model, grads)


@pytest.mark.filterwarnings("ignore:`loss_fn`. expected each of 8 devices")
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.sweep] * (name not in QUICK)) for name in MESHES])
def test_a_mixture_on_every_mesh(name, by_hand):
    mesh = MESHES[name]
    deployer = redeqx.Deployer(verbose=False, **mesh)
    model = LanguageModel("sorted_tokens", jax.random.key(0))
    trainer = redeqx.Trainer(deployer, model=model, optimizer=optax.sgd(LR), collate_fn=np.stack, loss_fn=loss_fn)
    program = trainer.compile(list(IDS), batch_size=16).as_text()
    loss = trainer.eval_loss(list(IDS), per_device_batch_size=16 // deployer.n_batch_shards)
    trainer.train(list(IDS), batch_size=16)
    want_loss, want = by_hand
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(trainer.model), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6 * float(jnp.abs(b).max()))
    # A tile has rows of a device, and the hidden features of its model shard; never all rows, nor all groups at once. Each
    # device sorts its own rows.
    n_rows = 16 * T * 2
    n_sorted = n_rows // deployer.n_batch_shards // mesh.get("n_sequence_shards", 1)
    tiles = re.findall(r"f32\[(\d+),(\d+)\]\S* dot\(", program)
    hidden = 64 // mesh.get("n_model_shards", 1)
    assert (str(tile_rows(n_sorted)), str(hidden)) in tiles
    assert f"[8,{n_rows}," not in program
    if n_sorted != 64:  # a size that weights have, too
        shapes = [tuple(map(int, dims.split(","))) for dims in re.findall(r"f32\[(\d+(?:,\d+)+)\]", program)]
        of_rows = [math.prod(shape) for shape in shapes if {n_sorted, n_rows}.intersection(shape)]
        assert 0 < max(of_rows) < n_sorted * 8 * min(32, hidden)  # no features of each row for all experts


def tile_rows(n_rows):
    """The rows of a tile for 8 groups: two tiles hold a group of 1.1 times the mean size."""
    return -(-int(0.55 * n_rows / 8) // 8) * 8


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:`loss_fn`. expected each of 8 devices")
def test_bfloat16_compute_and_a_users_own_grouped_matmul():
    """`redeqx.kernels.grouped_matmul` under `jax.vmap`, which `jax.lax.ragged_dot` with shared weights does not have."""
    x, weights = draw((16, M, K), (E, K, K))
    sizes = np.random.default_rng(0).multinomial(M, np.ones(E) / E, 16).astype(np.int32)
    rows = [{"x": np.asarray(each), "sizes": n} for each, n in zip(x, sizes, strict=True)]

    def loss_of(weights, batch, key=None):
        out = jax.vmap(grouped_matmul, (0, None, 0))(batch["x"].astype(weights.dtype), weights, batch["sizes"])
        return jnp.square(out.astype(jnp.float32)).mean()

    def collate(rows):
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def after(compute, **mesh):
        deployer = redeqx.Deployer(verbose=False, **mesh)
        trainer = redeqx.Trainer(
            deployer, model=weights, optimizer=optax.sgd(LR), collate_fn=collate, loss_fn=loss_of, compute=compute
        )
        trainer.train(rows, batch_size=16)
        return np.asarray(trainer.model)

    want = weights - LR * jax.grad(loss_of)(weights, collate(rows))
    np.testing.assert_allclose(after(None, n_fsdp_shards=2, n_model_shards=2), want, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(after("bfloat16", n_fsdp_shards=8), want, rtol=0.02, atol=0.02)
