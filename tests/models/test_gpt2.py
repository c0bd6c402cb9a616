"""Compares GPT-2 with an independent implementation in float64, and tests the behavior of a family."""

import dataclasses
import functools
import json
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redeqx.models import from_pretrained, generate, save_pretrained
from redeqx.models.gpt2 import GPT2, GPT2Config
from tests.models.families._case import is_shape, random_model

CONFIG = GPT2Config(vocab_size=53, n_positions=24, d_model=32, n_layers=3, n_heads=4)
NO_DROPOUT = dataclasses.replace(CONFIG, embedding_dropout=0.0, attention_dropout=0.0, residual_dropout=0.0)
IDS = jnp.array([5, 0, 52, 7, 7, 31, 2, 9, 44, 1, 17])


def make_model(config=CONFIG):
    return random_model(GPT2, config)


@functools.cache
def initial_model():
    config = GPT2Config(500, 256, 128, 8, 4).without_dropout()
    return eqx.filter_jit(GPT2)(config, key=jax.random.key(0))


@eqx.filter_jit
def run(module, x, key=None):
    return module(x, key=key)


def reference_logits(model, ids):
    """GPT-2 in float64 numpy, token by token and head by head, written from the paper's code."""
    w = jax.tree.map(lambda x: np.asarray(x, np.float64) if eqx.is_array(x) else x, model)
    config = model.config

    def norm(layer, row):
        row = (row - row.mean()) / np.sqrt(((row - row.mean()) ** 2).mean() + config.norm_eps)
        return row * layer.weight + layer.bias

    def gelu(row):
        return 0.5 * row * (1 + np.tanh(np.sqrt(2 / np.pi) * (row + 0.044715 * row**3)))

    def dense(layer, row):
        return layer.weight @ row + layer.bias

    rows = [w.embedding.weight[i] + w.positions[t] for t, i in enumerate(np.asarray(ids))]
    size = config.d_model // config.n_heads
    for i in range(config.n_layers):
        block = jax.tree.map(lambda x, i=i: x[i] if isinstance(x, np.ndarray) else x, w.stack.blocks)
        attention = block.attention
        normed = [norm(block.attention_norm, row) for row in rows]
        q, k, v = ([dense(layer, r) for r in normed] for layer in (attention.query, attention.key, attention.value))
        for t in range(len(rows)):
            heads = []
            for head in range(config.n_heads):
                part = slice(head * size, (head + 1) * size)
                scores = np.array([q[t][part] @ k[s][part] / math.sqrt(size) for s in range(t + 1)])
                weights = np.exp(scores - scores.max())
                weights /= weights.sum()
                heads.append(sum(weights[s] * v[s][part] for s in range(t + 1)))
            rows[t] = rows[t] + dense(attention.output, np.concatenate(heads))
        rows = [r + dense(block.mlp.down, gelu(dense(block.mlp.up, norm(block.mlp_norm, r)))) for r in rows]
    return np.stack([w.embedding.weight @ norm(w.norm, row) for row in rows])


def test_equals_an_independent_implementation():
    model = eqx.nn.inference_mode(make_model())
    np.testing.assert_allclose(run(model, IDS), reference_logits(model, IDS), rtol=1e-4, atol=1e-5)


def test_a_token_attends_only_to_earlier_tokens():
    model = eqx.nn.inference_mode(make_model())
    before, after = run(model, IDS), run(model, IDS.at[6].set(50))
    np.testing.assert_array_equal(before[:6], after[:6])
    assert not np.isclose(before[6:], after[6:]).all(axis=-1).any()


def test_dropout_depends_on_the_key_and_is_off_in_inference_mode():
    model = make_model()
    a, same, b = (run(model, IDS, jax.random.key(i)) for i in (0, 0, 1))
    np.testing.assert_array_equal(a, same)
    assert not np.allclose(a, b)
    with pytest.raises(RuntimeError, match="Dropout requires a key"):
        model(IDS)

    quiet = eqx.nn.inference_mode(model)
    np.testing.assert_array_equal(run(quiet, IDS), run(make_model(NO_DROPOUT), IDS, jax.random.key(0)))


@pytest.mark.parametrize(
    "name",
    ["attention_dropout", *(pytest.param(x, marks=pytest.mark.sweep) for x in ("embedding_dropout", "residual_dropout"))],
)
def test_each_dropout_has_its_own_rate_and_keeps_the_mean(name):
    model = make_model(dataclasses.replace(NO_DROPOUT, **{name: 0.1}))
    quiet = run(eqx.nn.inference_mode(model), IDS)
    keys = jax.random.split(jax.random.key(0), 200)
    noisy = eqx.filter_jit(jax.vmap(lambda key: model(IDS, key=key)))(keys)
    assert noisy.std(0).mean() > 0.01
    # The network is not linear, so the mean is only approximately kept.
    assert abs((noisy.mean(0) - quiet).mean()) < 0.1 * noisy.std(0).mean()


def test_unstacked_equals_stacked():
    model = make_model(NO_DROPOUT)
    unstacked = eqx.tree_at(lambda m: m.stack.blocks, model, model.stack.unstack())
    np.testing.assert_allclose(run(unstacked, IDS), run(model, IDS), rtol=1e-5, atol=1e-5)


def loss_fn(model, ids, key):
    log_probs = jax.nn.log_softmax(model(ids[:-1], key=key))
    return -jnp.mean(jnp.take_along_axis(log_probs, ids[1:, None], axis=-1))


@pytest.mark.sweep
def test_remat_changes_neither_value_nor_gradients():
    plain, remat = make_model(NO_DROPOUT), make_model(dataclasses.replace(NO_DROPOUT, remat=True))
    results = [eqx.filter_jit(eqx.filter_value_and_grad(loss_fn))(m, IDS, jax.random.key(0)) for m in (plain, remat)]
    np.testing.assert_allclose(results[0][0], results[1][0], rtol=1e-6)
    for a, b in zip(*(jax.tree.leaves(grads) for _, grads in results), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
        assert np.any(a != 0)  # every leaf has a gradient


@pytest.mark.sweep
def test_initial_weights_are_those_of_the_papers_code():
    model = initial_model()
    blocks = model.stack.blocks
    wanted = {
        0.02: [
            model.embedding.weight,
            blocks.attention.query.weight,
            blocks.attention.key.weight,
            blocks.attention.value.weight,
            blocks.mlp.up.weight,
        ],
        0.01: [model.positions],
        0.02 / math.sqrt(16): [blocks.attention.output.weight, blocks.mlp.down.weight],
    }
    for std, weights in wanted.items():
        for weight in weights:
            assert weight.std() == pytest.approx(std, rel=0.02)
            assert abs(weight.mean()) < 5 * std / math.sqrt(weight.size)
    for layer in (blocks.attention.query, blocks.attention.key, blocks.attention.value, blocks.attention.output):
        assert np.all(layer.bias == 0)
    assert np.all(blocks.mlp.up.bias == 0)
    assert np.all(blocks.mlp.down.bias == 0)
    for norm in (blocks.attention_norm, blocks.mlp_norm, model.norm):
        assert np.all(norm.weight == 1)
        assert np.all(norm.bias == 0)
    # No two matrices or layers have the same values.
    draws = [w[i].ravel()[:100] for w in (*wanted[0.02][1:4], wanted[0.02 / math.sqrt(16)][0]) for i in range(8)]
    assert np.max(np.abs(np.corrcoef(draws) - np.eye(len(draws)))) < 0.5


def test_the_first_loss_is_that_of_uniform_predictions():
    ids = jax.random.randint(jax.random.key(1), (256,), 0, 500)
    assert eqx.filter_jit(loss_fn)(initial_model(), ids, None) == pytest.approx(math.log(500), abs=0.1)


@pytest.mark.parametrize(
    ("config", "n_parameters"),
    [
        (GPT2Config.of("124m"), 124_439_808),
        (GPT2Config.of("355m"), 354_823_168),
        (GPT2Config.of("774m"), 774_030_080),
        (GPT2Config.of("1.6b"), 1_557_611_200),
    ],
)
def test_presets_have_the_published_number_of_parameters(config, n_parameters):
    model = eqx.filter_eval_shape(GPT2, config, key=jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(model) if is_shape(leaf)) == n_parameters


def test_folders_of_gpt_sw3_are_read(tmp_path):
    model = eqx.nn.inference_mode(make_model())
    save_pretrained(model, CONFIG, tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, "model_type": "gpt-sw3"}))
    found, config = from_pretrained(tmp_path)
    assert type(found) is GPT2 and config == CONFIG
    assert eqx.tree_equal(eqx.nn.inference_mode(found), model)


@pytest.mark.sweep
def test_the_program_does_not_grow_with_depth():
    def size(n_layers):
        model = make_model(dataclasses.replace(CONFIG, n_layers=n_layers))
        lowered = eqx.filter_jit(eqx.filter_value_and_grad(loss_fn)).lower(model, IDS, jax.random.key(0))
        return lowered.as_text().count("\n")

    assert size(24) == size(6)


def test_bfloat16_stays_bfloat16():
    model = eqx.nn.inference_mode(make_model())
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if eqx.is_array(x) else x, model)
    logits, wanted = run(half, IDS), run(model, IDS)
    assert logits.dtype == jnp.bfloat16
    assert jnp.abs(logits.astype(jnp.float32) - wanted).mean() < 0.05 * wanted.std()


def test_vmaps_over_a_batch():
    model = make_model()
    ids, keys = jnp.stack([IDS, IDS[::-1]]), jax.random.split(jax.random.key(0))
    batched = jax.jit(jax.vmap(lambda ids, key: model(ids, key=key)))(ids, keys)
    for i in range(2):
        np.testing.assert_allclose(batched[i], run(model, ids[i], keys[i]), rtol=1e-4, atol=1e-5)


def test_an_id_outside_the_vocabulary_gives_nan():
    model = eqx.nn.inference_mode(make_model())
    assert np.all(np.isnan(run(model, IDS.at[4].set(CONFIG.vocab_size))[4]))


def test_rejects_more_tokens_than_positions():
    with pytest.raises(ValueError, match=r"`ids`: expected at most `n_positions`=24 tokens, got 25\. Cut the example"):
        make_model()(jnp.zeros(25, int), key=jax.random.key(0))


@pytest.mark.parametrize("call", [lambda model: model(IDS), lambda model: generate(model, IDS[None], max_new_tokens=2)])
def test_rejects_cross_attention_without_a_memory(call):
    model = eqx.nn.inference_mode(make_model(dataclasses.replace(CONFIG, has_cross_attention=True)))
    with pytest.raises(ValueError, match=r"`memory`: expected one with `has_cross_attention`=True, got None\. Change one"):
        call(model)


@pytest.mark.parametrize("call", [lambda model, x: model(IDS, memory=x), lambda model, x: model.init_cache(4, x)])
def test_rejects_a_memory_without_cross_attention(call):
    model = eqx.nn.inference_mode(make_model())
    with pytest.raises(ValueError, match=r"`memory`: expected None with `has_cross_attention`=False, got \(5, 32\)\."):
        call(model, jnp.zeros((5, 32)))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("n_layers", 0, r"`n_layers`: expected at least 1, got 0"),
        ("n_heads", 5, r"`n_heads`: expected a divisor of `d_model`=32, got 5"),
        ("attention_dropout", 1.0, r"`attention_dropout`: expected a rate in \[0, 1\), got 1\.0"),
        ("residual_dropout", -0.1, r"`residual_dropout`: expected a rate in \[0, 1\), got -0\.1"),
    ],
)
def test_rejects_a_wrong_config(field, value, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **{field: value})
