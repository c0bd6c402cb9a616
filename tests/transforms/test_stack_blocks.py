"""Which blocks are stacked into one scan, and that values and gradients are unchanged."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import redeqx
from redeqx.tracing import equations, transformed
from redeqx.transforms import FuseAttention, StackBlocks
from tests._programs import computed

D, N = 8, 5
rng = np.random.default_rng(0)
X = jnp.asarray(rng.normal(size=(4, D)), jnp.float32)
KEY = jax.random.key(0)


def weights(n=N, d=D):
    return [jnp.asarray(rng.normal(size=(d, d)) / d, jnp.float32) for _ in range(n)]


def scans(traced):
    return [eqn.params["length"] for eqn in equations(traced) if eqn.primitive.name == "scan"]


def stacked(fn, ws, *rest, expected, kinds=None, rules=()):
    """Checks the scans of the stacked `fn(weights, *rest)`. Returns it and the plain function, both with gradients, the
    arguments, and the trace of the first."""
    flat, treedef = jax.tree.flatten(ws)

    def flat_fn(flat, *rest):
        return fn(jax.tree.unflatten(treedef, flat), *rest)

    stacking = transformed(flat_fn, [StackBlocks(kinds or ["any"] * len(flat)), *rules])
    before, after = (jax.make_jaxpr(f)(flat, *rest) for f in (flat_fn, stacking))
    assert scans(after) == [*scans(before), *expected] if not scans(before) else scans(after) == expected
    return jax.value_and_grad(stacking), jax.value_and_grad(flat_fn), (flat, *rest), after


def check_all(cases):
    """Checks that values and gradients are unchanged, for functions of `stacked` by name."""
    found = computed({name: (stacking, args) for name, (stacking, _, args, _) in cases.items()})
    wanted = computed({name: (plain, args) for name, (_, plain, args, _) in cases.items()})
    for name, (value, grads) in wanted.items():
        np.testing.assert_allclose(found[name][0], value, rtol=1e-5, err_msg=name)
        for a, b in zip(found[name][1], grads, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * float(jnp.abs(b).max()), err_msg=name)


def check(fn, ws, *rest, **options):
    """Checks one function as above; returns the trace of the stacked one."""
    case = stacked(fn, ws, *rest, **options)
    check_all({fn.__name__: case})
    return case[-1]


# --- stacked blocks --------------------------------------------------------------------------------------------------


def unstacked(ws, x):
    for w in ws:
        x = x + jax.nn.gelu(x @ w)
    return jnp.sum(x**2)


def in_pairs(ws, x):
    for i, w in enumerate(ws):
        x = jnp.tanh(x @ w) if i % 2 else x + jnp.sin(x @ w)
    return jnp.sum(x)


def with_keys(ws, x):
    for w, key in zip(ws, jax.random.split(KEY, len(ws)), strict=True):
        x = x + jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x @ w, 0)
    return jnp.sum(x**2)


def with_indices(ws, x):
    """Keys by `fold_in`, rates that rise with the depth, and slices of one array."""
    table = jnp.sin(jnp.arange(len(ws) * D, dtype=x.dtype)).reshape(len(ws), D)
    for i, w in enumerate(ws):
        noise = jax.random.normal(jax.random.fold_in(KEY, i), x.shape)
        x = x + 0.1 * i * (x @ w) + 0.01 * noise + table[i]
    return jnp.sum(x**2)


def with_every_output(ws, x):
    hidden = []
    for w in ws:
        x = jnp.tanh(x @ w)
        hidden.append(x.mean())
    return jnp.sum(x) + jnp.stack(hidden).prod() + hidden[2]


def with_two_carries(ws, x):
    a, b = x, 2 * x
    for w in ws:
        a, b = b + jnp.tanh(a @ w), a
    return jnp.sum(a * b)


def jitted(ws, x):
    block = jax.jit(lambda x, w: x + jax.nn.relu(x @ w))
    return jnp.sum(functools.reduce(block, ws, x) ** 2)


def with_remat(ws, x):
    block = jax.checkpoint(lambda x, w: x + jnp.tanh(x @ w), policy=jax.checkpoint_policies.save_only_these_names("nothing"))
    return jnp.sum(functools.reduce(block, ws, x) ** 2)


def with_constants(ws, x):
    """Each block creates the same mask again, as a constant of its trace."""
    for w in ws:
        x = x + jnp.where(np.tril(np.ones((4, D), bool)), x @ w, 0)
    return jnp.sum(x**2)


def between_other_layers(ws, x):
    x = jnp.tanh(x @ ws[0])
    for w in ws[1:-1]:
        x = x + jnp.tanh(x @ w)
    return jnp.sum(jnp.sin(x @ ws[-1]) ** 2)


def in_two_lists(ws, x):
    half = len(ws) // 2
    for w in ws[:half]:
        x = x + jnp.tanh(x @ w)
    x = jnp.sort(x)
    for w in ws[half:]:
        x = x * jnp.cos(x @ w)
    return jnp.sum(x)


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, g: (3 * g,))  # differs from the derivative of `2 * x`


def with_custom_derivative(ws, x):
    for w in ws:
        x = x + jnp.tanh(doubled(x @ w))
    return jnp.sum(x**2)


EQUAL = [
    (unstacked, 5, [5]),
    (in_pairs, 8, [4]),
    (with_keys, 5, [5]),
    (with_indices, 5, [5]),
    (with_every_output, 5, [5]),
    (with_two_carries, 8, [4]),
    (jitted, 5, [5]),
    (with_remat, 5, [5]),
    (with_constants, 5, [5]),
    (between_other_layers, 7, [5]),
    (in_two_lists, 9, [4, 5]),
    (with_custom_derivative, 5, [5]),
]


@pytest.mark.parametrize("cases", [EQUAL[::2], EQUAL[1::2]])
def test_equal_blocks_become_one_scan(cases):
    check_all({fn.__name__: stacked(fn, weights(n), X, expected=expected) for fn, n, expected in cases})


def test_a_scan_carries_what_a_block_passes_on_and_stacks_nothing():
    """The sum of two embeddings is like a residual addition, but the two are no block's inputs."""

    def fn(ws, x):
        return jnp.sum(functools.reduce(lambda x, w: x + jnp.tanh(x @ w), ws, jnp.sin(x) + jnp.cos(x)) ** 2)

    traced = jax.make_jaxpr(transformed(fn, [StackBlocks(["any"] * N)]))(weights(), X)
    (scan,) = (eqn for eqn in equations(traced) if eqn.primitive.name == "scan")
    assert [var.aval.shape for var in scan.outvars] == [X.shape]


def test_constants_are_not_stacked():
    """Other rules must recognise a mask inside the scan, too."""
    traced = check(with_constants, weights(), X, expected=[N])
    (scan,) = (eqn for eqn in equations(traced) if eqn.primitive.name == "scan")
    masks = [var for var in scan.params["jaxpr"].jaxpr.invars if var.aval.dtype == bool]
    assert [var.aval.shape for var in masks] == [(4, D)]


# --- not stacked ----------------------------------------------------------------------------------------------------


def different_functions(ws, x):
    for w, fn in zip(ws, (jnp.sin, jnp.tanh, jnp.cos, jnp.exp, jnp.square), strict=True):
        x = fn(x @ w)
    return jnp.sum(x)


def reads_first_block(ws, x):
    """All blocks read a value of the first."""
    first = jnp.tanh(x @ ws[0])
    for w in ws:
        x = x + jnp.tanh(x @ w) * first
    return jnp.sum(x)


def reads_two_blocks_back(ws, x):
    before = x
    for w in ws:
        x, before = jnp.tanh(x @ w) + before, x
    return jnp.sum(x)


def one_shared_weight(ws, x):
    for _ in range(6):
        x = jnp.tanh(x @ ws[0])
    return jnp.sum(x)


def without_matmul(ws, x):
    for w in ws:
        x = jnp.tanh(x * w[0])
    return jnp.sum(x)


@jax.custom_jvp
def steeper(x, by):
    return x * by / by


@steeper.defjvp
def _(primals, tangents):
    return steeper(*primals), tangents[0] * primals[1]


def different_custom_derivatives(ws, x):
    """The custom derivative of each block has another scale; the values are equal."""

    def through(scale):
        @jax.custom_vjp
        def same(x):
            return x * 1.0

        same.defvjp(lambda x: (x * 1.0, None), lambda _, g: (scale * g,))
        return same

    for i, w in enumerate(ws):
        x = x + through(float(i))(x @ w)
    return jnp.sum(x**2)


def test_other_blocks_are_not_stacked():
    others = ((different_functions, 5), (one_shared_weight, 5), (without_matmul, 5), (unstacked, 3),
              (different_custom_derivatives, 5))  # fmt: skip
    check_all({fn.__name__: stacked(fn, weights(n), X, expected=[]) for fn, n in others})


def test_blocks_that_read_other_blocks_are_stacked():
    """Two blocks back: in pairs. The first block may be read by all."""
    in_pairs_of_two = stacked(reads_two_blocks_back, weights(8), X, expected=[4])
    check_all({"two back": in_pairs_of_two, "the first": stacked(reads_first_block, weights(6), X, expected=[6])})


def test_blocks_of_different_sizes_are_not_stacked():
    ws = [jnp.asarray(rng.normal(size=(a, b)), jnp.float32) for a, b in zip([8, 6, 4, 6, 8], [6, 4, 6, 8, 3], strict=True)]

    def fn(ws, x):
        return jnp.sum(functools.reduce(lambda x, w: jnp.tanh(x @ w), ws, x))

    check(fn, ws, X, expected=[])


@pytest.mark.sweep
def test_differently_sharded_weights_are_not_stacked():
    check(unstacked, weights(6), X, expected=[], kinds=[0, 0, 0, 1, 1, 1])
    check(unstacked, weights(8), X, expected=[4], kinds=[0, 1] * 4)
    check(unstacked, weights(9), X, expected=[5], kinds=[0, 0, 0, 0, 0, 1, 2, 1, 2])


def test_custom_derivative_that_reads_an_operand_is_kept():
    def fn(ws, x):
        for w in ws:
            x = x + steeper(x @ w, jnp.float32(3))
        return jnp.sum(x**2)

    check(fn, weights(), X, expected=[N])


def test_blocks_with_effects_are_not_stacked(capsys):
    def fn(ws, x):
        for w in ws:
            x = x + jnp.tanh(x @ w)
            jax.debug.print("{}", x[0, 0])
        return jnp.sum(x)

    check(fn, weights(), X, expected=[])


def test_found_reports_the_number_of_blocks_and_the_source_line():
    (n, line), = StackBlocks(["any"] * N).found(jax.make_jaxpr(unstacked)(weights(), X))  # fmt: skip
    assert n == N and "test_stack_blocks.py:" in line


# --- with the other rules, on meshes ---------------------------------------------------------------------------------


class Block(eqx.Module):
    norm: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    dropout: eqx.nn.Dropout

    def __init__(self, d, key):
        keys = jax.random.split(key)
        self.norm, self.dropout = eqx.nn.LayerNorm(d), eqx.nn.Dropout(0.1)
        self.attention = eqx.nn.MultiheadAttention(4, d, key=keys[0])
        self.mlp = eqx.nn.MLP(d, d, 2 * d, 1, jax.nn.gelu, key=keys[1])

    def __call__(self, x, key):
        y = jax.vmap(self.norm)(x)
        mask = jnp.tril(jnp.ones((len(x), len(x)), bool))
        x = x + self.dropout(self.attention(y, y, y, mask=mask), key=key)
        return x + jax.vmap(self.mlp)(x)


class Decoder(eqx.Module):
    table: jax.Array
    blocks: list

    def __init__(self, key):
        first, *keys = jax.random.split(key, 5)
        self.table = 0.1 * jax.random.normal(first, (32, 16))
        self.blocks = [Block(16, key) for key in keys]

    def __call__(self, ids, key):
        x = self.table[ids]
        for block, own in zip(self.blocks, jax.random.split(key, len(self.blocks)), strict=True):
            x = block(x, own)
        return x @ self.table.T


def loss_fn(model, batch, key):
    keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(batch["row"])
    logits = jax.vmap(model)(batch["ids"], keys)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["ids"]).mean()


EXAMPLES = [{"ids": ids, "row": np.int32(i)} for i, ids in enumerate(rng.integers(0, 32, (16, 16)))]


def losses_and_leaves(n_model, n_fsdp, stack_blocks, remat="auto"):
    deployer = redeqx.Deployer(n_model_shards=n_model, n_fsdp_shards=n_fsdp, verbose=False)
    trainer = redeqx.Trainer(
        deployer,
        model=Decoder(jax.random.key(0)),
        optimizer=optax.sgd(0.1),
        collate_fn=lambda examples: jax.tree.map(lambda *rows: np.stack(rows), *examples),
        loss_fn=loss_fn,
        compute=redeqx.Compute(stack_blocks=stack_blocks, remat=remat),
    )
    losses = [trainer.update(EXAMPLES)["loss"] for _ in range(2)]
    return losses, jax.tree.leaves(eqx.filter(trainer.model, eqx.is_array))


@pytest.mark.sweep
def test_attention_is_fused_inside_the_scan():
    params, static = eqx.partition(Decoder(jax.random.key(0)), eqx.is_array)

    def fn(params, batch):
        return loss_fn(eqx.combine(params, static), batch, KEY)

    batch = jax.tree.map(lambda *rows: np.stack(rows), *EXAMPLES)
    traced = check(fn, params, batch, expected=[4], rules=[FuseAttention()])
    fused = [eqn for eqn in equations(traced) if eqn.primitive.name == "attention"]
    assert len(fused) == 1 and "causal=True" in str(fused[0].params)


@functools.cache
def unstacked_training():
    return losses_and_leaves(1, 1, False)


@pytest.mark.parametrize(
    ("n_model", "n_fsdp", "options"),
    [
        pytest.param(2, 2, {}, marks=pytest.mark.sweep),
        pytest.param(1, 8, {}, marks=pytest.mark.sweep),
        pytest.param(2, 4, {"remat": "matmuls"}, marks=pytest.mark.sweep),
        pytest.param(1, 4, {"remat": "full"}, marks=pytest.mark.sweep),
    ],
)
def test_training_on_meshes_equals_unstacked_training(n_model, n_fsdp, options):
    losses, leaves = losses_and_leaves(n_model, n_fsdp, True, **options)
    wanted, wanted_leaves = unstacked_training()
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    for a, b in zip(leaves, wanted_leaves, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


class Residual(eqx.Module):
    layers: list[eqx.nn.Linear]

    def __init__(self, n, key):
        self.layers = [eqx.nn.Linear(8, 8, key=each) for each in jax.random.split(key, n)]

    def __call__(self, x):
        for layer in self.layers:
            x = x + jax.nn.relu(layer(x))
        return x


@pytest.mark.parametrize(("n_model", "stacked"), [(1, True), (2, False)])
def test_alternating_splits_separate_blocks_only_where_the_axis_splits(n_model, stacked, capsys):
    model = Residual(4, jax.random.key(0))
    specs = {"layers.0.weight": ("model", None), "layers.1.weight": (None, "model")}
    overrides = {f"layers.{i}.weight": specs[f"layers.{i % 2}.weight"] for i in range(4)}
    deployer = redeqx.Deployer(n_model_shards=n_model)
    trainer = redeqx.Trainer(
        deployer,
        model=model,
        plan=deployer.plan(model, overrides=overrides),
        optimizer=optax.sgd(0.1),
        collate_fn=np.stack,
        loss_fn=lambda model, batch, key: jnp.mean(jax.vmap(model)(batch) ** 2),
        compute=redeqx.Compute(stack_blocks=True),
    )
    trainer.update(np.ones((16, 8), np.float32))
    assert ("4 equal blocks as one" in capsys.readouterr().out) is stacked


RECOMPUTED = [
    (4, None, "4 equal blocks as one"),
    (4, False, "4 equal blocks recompute nothing"),
    (3, None, "nothing is recomputed"),
]


@pytest.mark.parametrize(("n", "stack_blocks", "said"), RECOMPUTED)
def test_it_is_said_whether_layers_are_recomputed(n, stack_blocks, said, capsys):
    trainer = redeqx.Trainer(
        redeqx.Deployer(),
        model=Residual(n, jax.random.key(0)),
        optimizer=optax.sgd(0.1),
        collate_fn=np.stack,
        loss_fn=lambda model, batch, key: jnp.mean(jax.vmap(model)(batch) ** 2),
        compute=redeqx.Compute(remat="full", stack_blocks=stack_blocks),
    )
    trainer.update(np.ones((16, 8), np.float32))
    assert said in " ".join(capsys.readouterr().out.split())
