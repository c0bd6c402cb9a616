"""Quantised bases: their numbers, their uses, the plan, what is sent and what is kept, and training on a mesh."""

import importlib
import re
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import redeqx
from redeqx.models import lora
from redeqx.models.nn import LatentAttention
from tests._tree import named_leaves

# QLoRA (arXiv:2305.14314), appendix E.
NF4 = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]
D, WIDE, DEPTH = 128, 256, 3
BOTH = ("blocks.up", "blocks.down")  # an array by its whole path, and a layer


class Block(eqx.Module):
    """A user's block: a matrix `[in, out]` of its own, and a layer."""

    up: jax.Array
    down: eqx.nn.Linear

    def __init__(self, key):
        one, two = jax.random.split(key)
        self.up, self.down = 0.1 * jax.random.normal(one, (D, WIDE)), eqx.nn.Linear(WIDE, D, key=two)

    def __call__(self, x):
        return x + jax.vmap(self.down)(jax.nn.gelu(x @ self.up))


class Stacked(eqx.Module):
    blocks: Block
    head: eqx.nn.Linear

    def __init__(self, key):
        self.blocks = eqx.filter_vmap(Block)(jax.random.split(key, DEPTH))
        self.head = eqx.nn.Linear(D, 4, key=key)

    def __call__(self, x):
        arrays, static = eqx.partition(self.blocks, eqx.is_array)
        x, _ = jax.lax.scan(lambda x, block: (eqx.combine(block, static)(x), None), x, arrays)
        return jax.vmap(self.head)(x)


def loss_fn(model, batch, key):
    out = jax.vmap(model)(batch["x"].astype(model.head.weight.dtype))
    return jnp.mean((out - batch["y"]) ** 2)


def collate_fn(examples):
    return {key: np.stack([example[key] for example in examples]) for key in examples[0]}


RNG = np.random.default_rng(0)
EXAMPLES = [{"x": RNG.normal(size=(4, D)).astype("f"), "y": RNG.normal(size=(4, 4)).astype("f")} for _ in range(16)]


@pytest.fixture(scope="module")
def base():
    return eqx.filter_jit(Stacked)(jax.random.key(0))


def check_by_hand(found, weight, kind, block):
    """Compares codes, scales and numbers of a matrix with a quantisation in numpy, one block after the other."""
    codes, numbers = [], []
    blocks = np.asarray(weight, np.float32).reshape(-1, block)
    scales = np.abs(blocks).max(axis=1) / (127 if kind == "int8" else 1)
    np.testing.assert_allclose(np.ravel(found.scales), scales, rtol=2e-7)  # one rounding
    for values, scale in zip(blocks, scales, strict=True):
        if kind == "nf4":
            own = np.abs(values[:, None] / scale - NF4).argmin(1)
            codes += (own[::2] * 16 + own[1::2]).tolist()
            numbers += (np.float32(NF4)[own] * scale).tolist()
        else:
            codes += (values / scale).tolist()
    own = np.ravel(found.codes)
    if kind == "nf4":
        np.testing.assert_array_equal(own, codes)
    else:  # the nearest whole number; of a tie, either
        assert np.all(np.abs(own - np.array(codes)) <= 0.5 + 1e-4)
        numbers = own.reshape(-1, block) * scales[:, None]
    np.testing.assert_allclose(jnp.asarray(found), np.reshape(numbers, weight.shape), rtol=1e-6)


@pytest.mark.parametrize(
    ("kind", "size", "block"), [("nf4", None, 64), ("nf4", 32, 32), ("int8", None, WIDE), ("int8", 64, 64)]
)
def test_codes_and_numbers_are_those_of_a_hand_written_quantisation(kind, size, block, base):
    model = lora.quantise(base, where=lambda path, _: path.startswith("blocks."), kind=kind, block_size=size)
    for found, weight in ((model.blocks.up, base.blocks.up), (model.blocks.down.weight, base.blocks.down.weight)):
        assert found.codes.dtype == (jnp.uint8 if kind == "nf4" else jnp.int8) and found.scales.dtype == jnp.float32
        assert found.shape == weight.shape and found.codes.nbytes == weight.size // (2 if kind == "nf4" else 1)
        check_by_hand(found, weight, kind, block)
    plain = lora.dequantise(model)
    assert plain.blocks.up.shape == base.blocks.up.shape and plain.head.weight is base.head.weight
    x = jnp.asarray(EXAMPLES[0]["x"])
    np.testing.assert_array_equal(model(x), plain(x))


@pytest.mark.parametrize(("kind", "code"), [("nf4", 0x77), ("int8", 0)])
def test_a_block_of_zeros_has_the_codes_of_zero(kind, code):
    """Nothing is divided by its scale, which is 0."""
    with jax.debug_nans(True):
        found = lora.quantise([jnp.zeros((2, 64))], where="0", kind=kind)[0]
    assert np.all(np.asarray(found.codes) == code) and not np.any(found.scales)


@pytest.mark.sweep
def test_a_quantised_weight_is_used_as_an_array():
    weight = jax.random.normal(jax.random.key(1), (2, 6, 16)).at[1, 2].set(0).astype(jnp.bfloat16)
    q = lora.quantise([weight], where="0", kind="nf4")[0]
    (numbers,) = lora.dequantise([q])
    assert (q.shape, q.ndim, q.size, q.dtype, len(q)) == ((2, 6, 16), 3, 192, jnp.bfloat16, 2) and numbers.dtype == q.dtype
    assert not np.any(numbers[1, 2])  # a block of zeros
    x = jnp.arange(16, dtype=jnp.bfloat16)
    uses = [
        lambda w: w[1] @ x,
        lambda w: x @ w[0].T,
        lambda w: x @ w.mT,
        lambda w: jnp.einsum("loi,i->lo", w, x),
        lambda w: 2 * w + x - w / 3,
        lambda w: w[jnp.array([1, 0, 1]), 3],
        lambda w: w[:, 1:3],
        lambda w: w[..., ::2],
        lambda w: w.astype(jnp.float32).sum(-1),
        lambda w: jax.vmap(lambda m: m @ x)(w),
    ]
    each = lambda w: [use(w) for use in uses]  # noqa: E731
    for run in (each, jax.jit(each)):
        for found, expected in zip(run(q), run(numbers), strict=True):
            assert found.dtype == expected.dtype
            np.testing.assert_allclose(found.astype(jnp.float32), expected.astype(jnp.float32), rtol=1e-2, atol=1e-6)
    shapes = eqx.filter_eval_shape(partial(lora.quantise, where="0"), [weight])[0]
    of_shape = lora.quantise([jax.ShapeDtypeStruct(weight.shape, weight.dtype)], where="0")[0]
    for own in (shapes, of_shape):
        assert (own.codes.shape, own.scales.shape, own.shape) == (q.codes.shape, q.scales.shape, q.shape)


def test_operators_of_a_quantised_weight_are_those_of_its_array():
    q = lora.quantise([jax.random.normal(jax.random.key(1), (3, 8))], where="0", kind="int8")[0]
    numbers = jnp.asarray(q)
    uses = [
        lambda w: jnp.stack([row * i for i, row in zip(range(1, 6), w, strict=False)]),  # which ends after the third row
        lambda w: jnp.where(w == numbers[1, 2], 1, 2),
        lambda w: (w != numbers) | (w > 0),
        lambda w: jnp.stack([w < 0.1, w <= 0.1, w >= numbers]),
        lambda w: w**2 + 2**w,
        lambda w: jnp.stack([w // 0.3, 2 // w, w % 0.3, 2 % w, *divmod(w, 2), +w, round(w, 1)]),
    ]
    each = lambda w: [use(w) for use in uses]  # noqa: E731
    for run in (each, jax.jit(each)):
        for found, expected in zip(run(q), run(numbers), strict=True):
            assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
            np.testing.assert_allclose(found, expected, rtol=1e-6)
    with pytest.raises(TypeError, match="unhashable"):
        hash(q)


def test_trees_with_quantised_weights_are_compared_as_trees(base):
    one, two = (lora.quantise(base, where=BOTH, kind=kind) for kind in ("int8", "nf4"))
    copy = jax.tree.map(jnp.copy, one)
    assert eqx.tree_equal(one, copy) and one == copy and not eqx.tree_equal(one, two) and one != two
    assert eqx.tree_equal(one.blocks.up, copy.blocks.up) and one.blocks.up is not None
    shapes = [jax.eval_shape(lambda: one.blocks.up) for _ in range(2)]
    masks = [jax.tree.map(lambda _: True, one.blocks.up) for _ in range(2)]
    for a, b in (shapes, masks):
        assert a == b and hash(a) == hash(b) and (a != b) is False


def trainer_of(base, kind, *, mesh=(1, 1), compute=None, **kwargs):
    model = lora.quantise(base, where=BOTH, kind=kind)
    model = lora.add(model, rank=4, where="blocks.down", key=jax.random.key(3))
    deployer = redeqx.Deployer(0, *mesh, verbose=False, **kwargs)
    trained = lora.trainable(model)
    optimizer = optax.sgd(0.5, momentum=0.9)
    return redeqx.Trainer(
        deployer,
        model=model,
        trainable=trained,
        optimizer=optimizer,
        collate_fn=collate_fn,
        loss_fn=loss_fn,
        compute=compute,
    )


def arrays(model):
    return {name: np.asarray(leaf) for name, leaf in named_leaves(model).items() if eqx.is_array(leaf)}


@pytest.mark.parametrize("kind", ["nf4", pytest.param("int8", marks=pytest.mark.sweep)])
def test_training_on_a_mesh_equals_training_on_one_device(kind, base, tmp_path):
    meshed = trainer_of(base, kind, mesh=(2, 2), workdir=tmp_path)
    single, plain = trainer_of(base, kind), None
    for trainer in (meshed, single):
        trainer.fit(EXAMPLES, n_epochs=2, batch_size=8)
    found, expected = arrays(meshed.model), arrays(single.model)
    changed = 0
    for name, leaf in expected.items():
        if ".lora_" in name:
            np.testing.assert_allclose(found[name], leaf, atol=1e-6, err_msg=name)
            changed += bool(np.any(leaf))
        else:
            assert found[name].tobytes() == leaf.tobytes(), name
    assert changed == 2
    # The same as a hand-written step on the dequantised numbers.
    plain = lora.dequantise(trainer_of(base, kind).model)
    mask = lora.trainable(plain)
    params, static = eqx.partition(plain, mask)
    optimizer = optax.sgd(0.5, momentum=0.9)
    loss_of = lambda params: loss_fn(eqx.combine(params, static), collate_fn(EXAMPLES[:8]), None)  # noqa: E731
    grads = jax.jit(jax.grad(loss_of))(params)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    one = trainer_of(base, kind, mesh=(2, 2))
    one.fit(EXAMPLES[:8], n_epochs=1, batch_size=8)
    wanted = arrays(optax.apply_updates(params, updates))
    assert set(wanted) == {"blocks.down.lora_a", "blocks.down.lora_b"} and np.any(wanted["blocks.down.lora_b"])
    for name, leaf in wanted.items():
        np.testing.assert_allclose(arrays(one.model)[name], leaf, atol=1e-6)
    # The plan: codes and scales are one weight; nothing frozen has a gradient or an optimizer state.
    specs = {name: leaf.spec for name, leaf in meshed.plan.leaves.items()}
    assert specs["blocks.up.codes"] == P(None, "fsdp", "model") and specs["blocks.down.weight.codes"] == P(
        None, "fsdp", "model"
    )
    last = "model" if kind == "nf4" else None  # int8 has one scale for a row
    assert specs["blocks.up.scales"] == specs["blocks.down.weight.scales"] == P(None, "fsdp", last)
    for name, leaf in named_leaves(meshed.model).items():
        assert not eqx.is_array(leaf) or leaf.sharding.spec == specs[name], name
    state = [leaf.shape for leaf in jax.tree.leaves(meshed.opt_state) if leaf.ndim]
    assert sorted(state) == sorted([(DEPTH, 4, WIDE), (DEPTH, D, 4)])
    # A checkpoint has codes and scales, and restores on another mesh.
    meshed.save_ckpt("last")
    other = trainer_of(base, kind, mesh=(1, 4), workdir=tmp_path)
    other.load_ckpt("last")
    for name, leaf in found.items():
        assert arrays(other.model)[name].tobytes() == leaf.tobytes(), name


@pytest.mark.sweep
def test_codes_are_gathered_not_numbers_and_nothing_is_kept_for_the_backward_pass(base, monkeypatch):
    for kind, dtype, n in (("nf4", "u8", WIDE // 2), ("int8", "s8", WIDE)):
        run = trainer_of(base, kind, mesh=(1, 8)).dry_run(EXAMPLES[:8], per_device_batch_size=1)
        gathers = [c for c in run.steps["train"].collectives if c.kind == "all-gather"]
        codes = [c for c in gathers if c.dtype == dtype]
        assert len(codes) == 4 and {(c.shape, c.n_executions) for c in codes} == {((D, n), DEPTH)}
        assert sorted(c.is_backward for c in codes) == [False, False, True, True]
        assert all(c.dtype == "f32" and c.shape == (D, 4 if kind == "nf4" else 1) for c in gathers if c not in codes)

    def temporaries(depth):
        monkeypatch.setattr("tests.models.lora.test_quantise.DEPTH", depth)
        trainer = trainer_of(Stacked(jax.random.key(0)), "nf4")
        return trainer.dry_run(EXAMPLES[:8], per_device_batch_size=1).steps["train"].temporaries

    # A layer keeps the outputs of its products, for 4 tokens. Its codes are 32 KiB, its numbers 256 KiB.
    assert temporaries(8) - temporaries(3) < 5 * 16 * 2**10


@pytest.mark.sweep
def test_bfloat16_computation_rounds_the_numbers_and_not_the_scales(base):
    trainer = trainer_of(base, "nf4", compute="bfloat16")
    half = jax.tree.map(
        lambda x: x.astype(jnp.bfloat16) if eqx.is_inexact_array(x) else x, lora.dequantise(trainer_of(base, "nf4").model)
    )
    expected = loss_fn(half, collate_fn(EXAMPLES[:8]), None)
    assert trainer.eval_loss(EXAMPLES[:8], per_device_batch_size=1) == pytest.approx(float(expected), rel=1e-3)
    trainer.fit(EXAMPLES[:8], n_epochs=1, batch_size=8)
    assert trainer.model.blocks.up.scales.dtype == jnp.float32 and trainer.model.blocks.up.dtype == jnp.float32


def test_merging_a_quantised_base_says_what_it_loses(base):
    model = lora.add(lora.quantise(base, where=BOTH), rank=2, where="blocks.down", key=jax.random.key(0))
    model = eqx.tree_at(lambda m: m.blocks.down.lora_b, model, jnp.ones((DEPTH, D, 2)))
    with pytest.warns(UserWarning, match="`blocks.down`: merges into dequantised weights, .* `lora.save_adapter`"):
        merged = lora.merge(model)
    down = model.blocks.down
    np.testing.assert_allclose(merged.blocks.down.weight, down.weight + down.lora_b @ down.lora_a, rtol=1e-6)
    assert merged.blocks.up is not None and merged.blocks.up.kind == "nf4"


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"where": "blocks.dwn"}, "matrix, got 'blocks.dwn'. Did you mean `blocks.down`?"),
        ({"where": "blocks.*", "kind": "fp4"}, "`kind`: expected 'nf4' or 'int8', got 'fp4'. Pass one of the two."),
        ({"where": "blocks.*", "block_size": 0}, "`block_size`: expected"),
        ({"where": BOTH, "block_size": 4}, "`blocks.up`: expected rows that divide into blocks of at least 8 numbers"),
        (
            {"where": lambda path, node: False},
            "`where`: expected a function that selects linear layers and matrices, got none.",
        ),
    ],
)
def test_errors(kwargs, message, base):
    with pytest.raises(ValueError, match=re.escape(message)):
        lora.quantise(base, **kwargs)


BASE = {"vocab_size": 64, "n_positions": 64, "d_model": 64, "n_heads": 4, "d_mlp": 64}
HEADS = {"n_kv_heads": 2, "head_size": 16}
ROUTED = {"n_experts": 16, "n_chosen": 2, "d_expert": 32, "n_dense": 1, "d_shared": 32}
STATES = {"state_groups": 2, "state_heads": 4, "state_size": 16, "state_value_size": 16}
LATENT = {"latent_size": 32, "query_latent_size": 32, "plain_size": 16, "shared_rotary_size": 16, "value_size": 16}
GROUPED = {"n_expert_groups": 4, "n_chosen_groups": 2}
MODELS = {  # each mixer and router, in stacks of so many layers that vectors of them would pass as matrices
    "gpt_oss.GptOss": {"n_layers": 16, **HEADS, "n_experts": 16, "n_chosen": 2},
    "deepseek_v3.DeepseekV3": {"n_layers": 9, **LATENT, **ROUTED, **GROUPED},
    "glm_moe.Glm4Moe": {"n_layers": 9, **HEADS, **ROUTED},
    "qwen_next.Qwen3Next": {"n_layers": 32, **HEADS, **STATES, **ROUTED, "n_dense": 0},
    "lfm.Lfm2": {"n_layers": 8, "n_kv_heads": 2, "mixer_layers": (0, 1, 2, 4, 5, 6)},
    "apertus.Apertus": {"n_layers": 8, "n_kv_heads": 2},
    "falcon_h1.FalconH1": {"n_layers": 8, "n_kv_heads": 2, **STATES},
}


@pytest.mark.parametrize("name", MODELS)
def test_globs_quantise_the_weights_of_layers_alone(name):
    """No router's correction, sinks, taps, rates or parameters of activations: stacked, these look like matrices."""
    file, _, cls = name.partition(".")
    module = importlib.import_module(f"redeqx.models.{file}")
    config = getattr(module, f"{cls}Config")(**BASE, **MODELS[name])
    model = eqx.filter_eval_shape(getattr(module, cls), config, key=jax.random.key(0))
    model = lora.quantise(model, where="stack.blocks.*", kind="int8")
    is_linear = lambda node: isinstance(node, eqx.nn.Linear)  # noqa: E731
    nodes = jax.tree_util.tree_leaves_with_path(model, is_leaf=is_linear)
    layers = [jax.tree_util.keystr(path, simple=True, separator=".") for path, node in nodes if is_linear(node)]
    found = [path.removesuffix(".codes") for path in named_leaves(model) if path.endswith(".codes")]
    assert found == [f"{path}.weight" for path in layers if path.startswith("stack.blocks.")]
    ids, cache = jnp.arange(1), eqx.filter_eval_shape(lambda model: model.init_cache(8), model)
    assert eqx.filter_eval_shape(lambda model, cache: model.decode(ids, cache)[0], model, cache).shape == (64,)


def test_codes_cannot_be_trained_or_quantised_again(base):
    model = lora.quantise(base, where="blocks.up")
    with pytest.raises(ValueError, match=r"`blocks.up`: expected a weight, got one of nf4. Leave it out\."):
        lora.quantise(model, where=BOTH)
    rest = {"model": model, "optimizer": optax.sgd(0.1), "collate_fn": collate_fn, "loss_fn": loss_fn}
    with pytest.raises(ValueError, match=r"`trainable`: expected .*, got `blocks.up` \(quantised\)"):
        mask = jax.tree.map(lambda x: jnp.issubdtype(x.dtype, jnp.floating), eqx.filter(model, eqx.is_array))
        redeqx.Trainer(redeqx.Deployer(verbose=False), trainable=mask, **rest).fit(EXAMPLES, n_epochs=1, batch_size=8)
    trainer = redeqx.Trainer(redeqx.Deployer(verbose=False), **rest)  # by default everything else is trained
    trainer.fit(EXAMPLES, n_epochs=1, batch_size=8)
    np.testing.assert_array_equal(trainer.model.blocks.up.scales, model.blocks.up.scales)
    assert np.any(np.asarray(trainer.model.blocks.down.weight) != np.asarray(base.blocks.down.weight))


def test_latent_attention_decodes_with_a_quantised_base():
    keys = iter(jax.random.split(jax.random.key(0), 5))
    linear = lambda out: eqx.nn.Linear(32, out, use_bias=False, key=next(keys))  # noqa: E731
    norm = eqx.nn.RMSNorm(32)
    layer = LatentAttention(None, None, linear(64), linear(48), norm, linear(32), linear(32), linear(32), 2, 16, 0.2)
    layer = lora.quantise(layer, where=("*key", "*value"), kind="nf4", block_size=16)
    assert not eqx.is_array(layer.key.weight) and not eqx.is_array(layer.value.weight)
    x = jax.random.normal(jax.random.key(1), (2, 32))
    # One token is computed from the latent vectors, as in a step of decoding, and several from each head's keys.
    found, expected = layer(x[:1])[0][0], layer(x, mask=jnp.tril(jnp.ones((2, 2), bool)))[0][0]
    np.testing.assert_allclose(found, expected, atol=1e-5)
