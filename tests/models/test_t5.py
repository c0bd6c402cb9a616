"""T5: relative positions, decoding, and folders whose config does not say what is tied."""

import dataclasses
import functools
import itertools
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from redeqx.kernels import attend
from redeqx.models import from_pretrained, save_pretrained
from redeqx.models.hf import ConfigReader
from redeqx.models.t5 import T5, T5Config, T5Encoder
from redeqx.models.t5._model import _buckets
from tests.models.families._case import is_shape, random_model

# Only in the sweep: `make test` compares the family's outputs with transformers' in `test_golden.py`.
pytestmark = pytest.mark.sweep

CONFIG = T5Config(
    vocab_size=47,
    d_model=16,
    d_kv=5,
    d_ff=24,
    n_layers=2,
    n_decoder_layers=3,
    n_heads=3,
    mlp="gated-gelu",
    n_buckets=8,
    max_distance=8,
)
IDS = jnp.array([5, 0, 46, 7, 7, 31, 2, 9, 44, 1, 17])
TARGET = jnp.array([0, 12, 12, 40, 3, 29, 8, 8, 1])
MASK = jnp.arange(11) < 8


@functools.cache
def make_model(config=CONFIG, cls=T5):
    return random_model(cls, config, std=0.4)


@eqx.filter_jit
def run(model, ids=IDS, decoder_ids=TARGET, mask=MASK, decoder_mask=None, key=None):
    return model(ids, decoder_ids, mask=mask, decoder_mask=decoder_mask, key=key)


@functools.cache
def quiet():
    return eqx.nn.inference_mode(make_model())


@functools.cache
def expected():
    return run(quiet())


# --- positions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n_buckets", "max_distance"), [(32, 128), (16, 128), (8, 8), (4, 8), (9, 100), (2, 3)])
def test_buckets_are_those_of_exact_arithmetic(n_buckets, max_distance):
    """Computed in integers: the k-th range begins where (distance / exact) ** ranges reaches (greatest / exact) ** k."""
    exact = n_buckets // 2
    ranges = n_buckets - exact
    for distance, bucket in enumerate(_buckets(n_buckets, max_distance)):
        if distance < exact:
            assert bucket == distance
        else:
            reached = [k for k in range(ranges) if distance**ranges * exact**k >= max_distance**k * exact**ranges]
            assert bucket == exact + reached[-1]


def test_relative_positions_of_encoder_and_decoder():
    positions = jnp.arange(40)
    both, back = (side.positions for side in (quiet().encoder, quiet().decoder))
    near, far = both(positions, positions), back(positions, positions)
    assert near.shape == far.shape == (3, 40, 40)
    # Four buckets in each direction: distance 0, distance 1, then ranges; the last one includes all distances from 8.
    for row, bucket in {20: 0, 19: 1, 12: 3, 0: 3, 21: 5, 28: 7, 39: 7}.items():
        np.testing.assert_array_equal(near[:, 20, row], both.table[bucket])
    for row, bucket in {20: 0, 19: 1, 17: 3, 12: 7, 0: 7}.items():
        np.testing.assert_array_equal(far[:, 20, row], back.table[bucket])


def test_padding_on_the_left_changes_nothing():
    pad = lambda x, n: jnp.concatenate([jnp.full(n, 3), x])  # noqa: E731
    padded = run(
        quiet(), pad(IDS[:8], 3), pad(TARGET, 2), mask=jnp.arange(11) >= 3, decoder_mask=jnp.arange(len(TARGET) + 2) >= 2
    )
    np.testing.assert_allclose(padded[2:], expected(), atol=1e-5)


def test_a_token_attends_only_to_earlier_tokens_and_not_to_padding():
    after = run(quiet(), decoder_ids=TARGET.at[5].set(20))
    np.testing.assert_array_equal(after[:5], expected()[:5])
    assert not np.isclose(after[5:], expected()[5:]).all(axis=-1).any()
    np.testing.assert_array_equal(run(quiet(), ids=IDS.at[9].set(20)), expected())
    assert not np.allclose(run(quiet(), ids=IDS.at[7].set(20)), expected())


# --- decoding -------------------------------------------------------------------------------------------------------


@eqx.filter_jit
def begin(model, length):
    return model.init_cache(length, model.encode(IDS, mask=MASK), MASK)


@eqx.filter_jit
def decode(model, ids, cache, mask):
    return model.decode(ids, cache, mask=mask)


@pytest.mark.parametrize("n_padded", [0, 3])
def test_decoding_in_pieces_equals_a_call(n_padded):
    """Padding is on the left, in a part of the first piece."""
    cache, ids = begin(quiet(), 14), jnp.concatenate([jnp.full(n_padded, 3), TARGET])  # empty slots remain, masked
    mask = jnp.arange(len(ids)) >= n_padded
    for start, stop in itertools.pairwise((0, 4, 5, *range(9, len(ids) + 1))):
        logits, cache = decode(quiet(), ids[start:stop], cache, mask[start:stop])
        np.testing.assert_allclose(logits, expected()[stop - n_padded - 1], atol=1e-5)


def test_decodes_rows_under_vmap():
    model, masks = quiet(), jnp.stack([MASK, jnp.arange(11) < 4])

    def first(ids, mask):
        return model.decode(TARGET[:6], model.init_cache(9, model.encode(ids, mask=mask), mask))

    like = eqx.filter_eval_shape(first, IDS, MASK)[1]
    ids = jnp.stack([IDS, IDS])
    _, cache = jax.jit(jax.vmap(first, out_axes=(0, like.axes())))(ids, masks)
    step = jax.vmap(lambda ids, cache: model.decode(ids, cache), (None, like.axes()), (0, like.axes()))
    for i in range(6, 9):
        logits, cache = jax.jit(step)(TARGET[i : i + 1], cache)
    np.testing.assert_allclose(logits[0], expected()[-1], atol=1e-5)
    np.testing.assert_allclose(logits[1], run(model, mask=masks[1])[-1], atol=1e-5)


@pytest.mark.parametrize("labels", [[5, 9, 1, 40], [5, 9, 1, -100], [-100, -100, 7, 1]])
def test_shift_right(labels):
    config = dataclasses.replace(CONFIG, decoder_start_token_id=2, pad_token_id=3)
    wanted = [2, *(3 if label == -100 else label for label in labels[:-1])]
    np.testing.assert_array_equal(make_model(config).shift_right(jnp.array(labels)), wanted)


def test_shift_right_requires_a_padding_token():
    with pytest.raises(ValueError, match=r"`pad_token_id`: expected a token, got None\. Set it in the config"):
        make_model(dataclasses.replace(CONFIG, pad_token_id=None)).shift_right(jnp.array([1]))


# --- training -------------------------------------------------------------------------------------------------------


def test_dropout_depends_on_the_key_and_is_off_in_inference_mode():
    model = make_model()
    a, same, b = (run(model, key=jax.random.key(i)) for i in (0, 0, 1))
    np.testing.assert_array_equal(a, same)
    assert not np.allclose(a, b)
    with pytest.raises(RuntimeError, match="Dropout requires a key"):
        model(IDS, TARGET)


def test_every_dropout_of_the_original_has_its_own_key(monkeypatch):
    """Embeddings and outputs of encoder and decoder; weights and output of each attention; two in each MLP."""
    config = dataclasses.replace(CONFIG, n_layers=1, n_decoder_layers=1)
    sides = lambda model: (model.encoder.stack.blocks, model.decoder.stack.blocks)  # noqa: E731
    model = make_model(config)
    model = eqx.tree_at(sides, model, (model.encoder.stack.unstack(), model.decoder.stack.unstack()))
    keys = []

    def drop(self, x, *, key):
        keys.append(jax.random.key_data(key))
        return x

    def attend_and_note(q, k, v, extras, setting):
        keys.append(jax.random.key_data(extras["key"]))
        return attend(q, k, v, extras, setting)

    def drawn(key):
        model(IDS, TARGET, key=key)
        return jnp.stack(keys)

    monkeypatch.setattr(eqx.nn.Dropout, "__call__", drop)
    monkeypatch.setattr("redeqx.models.nn._attention.attend", attend_and_note)
    found = jax.jit(drawn)(jax.random.key(0))
    assert len(found) == len(np.unique(found, axis=0)) == (2 + 4) + (2 + 6)


def loss_fn(model, key):
    log_probs = jax.nn.log_softmax(model(IDS, TARGET[:-1], mask=MASK, key=key))
    return -jnp.mean(jnp.take_along_axis(log_probs, TARGET[1:, None], axis=-1))


def test_remat_changes_neither_value_nor_gradients():
    plain = make_model(CONFIG.without_dropout())
    remat = make_model(dataclasses.replace(CONFIG.without_dropout(), remat=True))
    results = [eqx.filter_jit(eqx.filter_value_and_grad(loss_fn))(m, jax.random.key(0)) for m in (plain, remat)]
    np.testing.assert_allclose(results[0][0], results[1][0], rtol=1e-6)
    in_inference = jnp.take_along_axis(jax.nn.log_softmax(expected()[:-1]), TARGET[1:, None], axis=-1)
    np.testing.assert_allclose(results[0][0], -in_inference.mean(), rtol=1e-5)
    for a, b in zip(*(jax.tree.leaves(grads) for _, grads in results), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
        assert np.any(a != 0)  # every leaf has a gradient


def test_bfloat16_stays_bfloat16():
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if eqx.is_array(x) else x, quiet())
    logits = run(half)
    assert logits.dtype == jnp.bfloat16
    assert jnp.abs(logits.astype(jnp.float32) - expected()).mean() < 0.05 * expected().std()
    assert eqx.filter_eval_shape(begin, half, 9).keys.dtype == jnp.bfloat16


def test_initial_weights_are_those_of_the_papers_code():
    sizes = {"vocab_size": 300, "d_model": 64, "d_kv": 32, "d_ff": 96, "n_layers": 3, "n_decoder_layers": 3, "n_heads": 4}
    config = T5Config(**sizes, mlp="gated-silu", is_tied=False, n_buckets=64, max_distance=128, init_factor=0.5)
    model = eqx.filter_jit(T5)(config, key=jax.random.key(0))
    wanted = [(model.embedding, 1.0), (model.head, 64**-0.5)]
    for side in (model.encoder, model.decoder):
        block = side.stack.blocks
        assert side.positions.table.std() == pytest.approx(0.5 * 64**-0.5, rel=0.15)
        for attention in filter(None, (block.attention, block.cross_attention)):
            wanted += [(attention.query, (64 * 32) ** -0.5), (attention.key, 64**-0.5)]
            wanted += [(attention.value, 64**-0.5), (attention.output, 128**-0.5)]
        wanted += [(block.mlp.gate, 64**-0.5), (block.mlp.up, 64**-0.5), (block.mlp.down, 96**-0.5)]
        for norm in filter(None, (block.attention_norm, block.cross_norm, block.mlp_norm, side.norm)):
            assert np.all(norm.weight == 1)
            assert norm.bias is None
    for layer, std in wanted:
        assert layer.weight.std() == pytest.approx(0.5 * std, rel=0.05)
    draws = [layer.weight.reshape(-1)[:100] for layer, _ in wanted]
    assert np.max(np.abs(np.corrcoef(draws) - np.eye(len(draws)))) < 0.6


# --- configs and folders --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "n_parameters"),
    [
        ("small", 60_506_624),
        ("base", 222_903_552),
        ("large", 737_668_096),
        ("3b", 2_851_598_336),
        ("11b", 11_307_321_344),
        ("v1.1-small", 76_961_152),
        ("v1.1-base", 247_577_856),
        ("v1.1-large", 783_150_080),
        ("v1.1-xl", 2_849_757_184),
        ("v1.1-xxl", 11_135_332_352),
    ],
)
def test_presets_have_the_published_number_of_parameters(size, n_parameters):
    model = eqx.filter_eval_shape(T5, T5Config.of(size), key=jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(model) if is_shape(leaf)) == n_parameters


@pytest.mark.parametrize(
    "config",
    [
        T5Config(),
        T5Config.of("v1.1-xl"),
        dataclasses.replace(CONFIG, eos_token_id=(1, 2), decoder_start_token_id=4, is_tied=False),
        dataclasses.replace(CONFIG, is_scaled=False),
        dataclasses.replace(CONFIG, is_scaled=False, model_type="mt5"),
    ],
)
def test_config_round_trip(config):
    assert T5Config.from_hf(ConfigReader(config.to_hf())) == config


def test_absent_keys_get_the_defaults_of_transformers():
    assert T5Config.from_hf(ConfigReader({"model_type": "t5"})) == T5Config()
    mt5 = T5Config.from_hf(ConfigReader({"model_type": "mt5", "tie_word_embeddings": False}))
    assert (mt5.vocab_size, mt5.d_ff, mt5.n_layers, mt5.n_decoder_layers, mt5.n_heads) == (250112, 1024, 8, 8, 6)
    assert (mt5.mlp, mt5.is_tied, mt5.is_scaled) == ("gated-gelu", False, False)
    flan = T5Config.from_hf(ConfigReader({"tie_word_embeddings": False, "num_layers": 8, "n_positions": 512}))
    assert (flan.n_decoder_layers, flan.is_tied, flan.is_scaled, flan.extra) == (8, False, False, {"n_positions": 512})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("feed_forward_proj", "gelu", "`feed_forward_proj`: expected 'relu' or 'gated-gelu' or 'gated-silu', .*got 'gelu'"),
        ("dense_act_fn", "silu", "`dense_act_fn`: expected 'relu', .*got 'silu'"),
        ("is_gated_act", True, "`is_gated_act`: expected False, .*got True"),
        ("is_decoder", True, "`is_decoder`: expected False, .*got True"),
        ("model_type", "umt5", "`model_type`: expected 't5' or 'mt5', .*got 'umt5'"),
    ],
)
def test_refuses_what_it_does_not_implement(key, value, message):
    with pytest.raises(ValueError, match=message):
        T5Config.from_hf(ConfigReader({key: value}))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("n_decoder_layers", 0, r"`n_decoder_layers`: expected at least 1, got 0"),
        ("dropout", 1.0, r"`dropout`: expected a rate in \[0, 1\), got 1\.0"),
        ("n_buckets", 3, r"`n_buckets`: expected at least 4, got 3"),
        ("max_distance", 4, r"`max_distance`: expected more than half of `n_buckets`=8, got 4"),
        ("mlp", "gelu", r"`mlp`: expected one of relu, gated-gelu, gated-silu, got 'gelu'"),
        ("model_type", "bart", r"`model_type`: expected 't5' or 'mt5', got 'bart'"),
        ("model_type", "mt5", r"`is_scaled`: expected False with `model_type`='mt5', got True"),
    ],
)
def test_rejects_a_wrong_config(field, value, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **{field: value})


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_head_in_the_file_is_used_whatever_the_config_says(tmp_path):
    config = dataclasses.replace(CONFIG, is_tied=False, is_scaled=False)
    save_pretrained(make_model(config), config, tmp_path)
    change_config(tmp_path, tie_word_embeddings=True)  # as transformers 5 writes it
    model, read = from_pretrained(tmp_path)
    assert read == config
    np.testing.assert_array_equal(model.head.weight, make_model(config).head.weight)


def test_without_a_head_in_the_file_the_embedding_is_used(tmp_path):
    save_pretrained(make_model(), CONFIG, tmp_path)
    change_config(tmp_path, tie_word_embeddings=False)
    model, config = from_pretrained(tmp_path)
    assert model.head is None
    assert config == CONFIG  # `scale_decoder_outputs` takes precedence


def test_copies_of_the_embedding_are_not_a_head(tmp_path):
    save_pretrained(make_model(), CONFIG, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in ("lm_head", "encoder.embed_tokens", "decoder.embed_tokens"):
        tensors[f"{name}.weight"] = tensors["shared.weight"]
    tensors["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = np.ones((8, 3), np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    model, config = from_pretrained(tmp_path)
    assert config.is_tied
    np.testing.assert_array_equal(model.embedding.weight, make_model().embedding.weight)


def test_the_encoder_loads_from_a_complete_t5(tmp_path):
    config = dataclasses.replace(CONFIG, is_tied=False)
    whole = eqx.nn.inference_mode(make_model(config))
    save_pretrained(whole, config, tmp_path / "whole")
    encoder, config = T5Encoder.from_pretrained(tmp_path / "whole")
    encoder = eqx.nn.inference_mode(encoder)
    wanted = eqx.filter_jit(T5.encode)(whole, IDS, mask=MASK)
    np.testing.assert_array_equal(eqx.filter_jit(encoder)(IDS, mask=MASK), wanted)

    save_pretrained(encoder, config, tmp_path / "alone")
    assert json.loads((tmp_path / "alone" / "config.json").read_text())["architectures"] == ["T5EncoderModel"]
    again, _ = from_pretrained(tmp_path / "alone")
    assert isinstance(again, T5Encoder)


def with_large_outputs(model):
    """Returns the model with MLPs whose outputs float16 does not have, although it has their weights and inner numbers."""
    mlps = [side.stack.blocks.mlp for side in (model.encoder, model.decoder)]
    where = lambda model: [  # noqa: E731
        leaf.weight
        for side in (model.encoder, model.decoder)
        for leaf in (side.stack.blocks.mlp.up, side.stack.blocks.mlp.down)
    ]
    return eqx.tree_at(where, model, [x for mlp in mlps for x in (10 * mlp.up.weight, 40000 * mlp.down.weight)])


def test_float16_is_finite_beyond_its_range(tmp_path):
    """The last layers of MLPs stay float32, as the residual stream; in files of float16 only the latter."""
    wide = eqx.nn.inference_mode(with_large_outputs(random_model(T5, CONFIG)))
    save_pretrained(wide, CONFIG, tmp_path / "wide")
    half = eqx.nn.inference_mode(from_pretrained(tmp_path / "wide", dtype="float16")[0])
    down = [side.stack.blocks.mlp.down.weight for side in (half.encoder, half.decoder)]
    leaves = jax.tree.leaves(eqx.filter(half, eqx.is_array))
    assert {leaf.dtype for leaf in down} == {jnp.dtype("float32")}
    assert sum(leaf.dtype != jnp.float16 for leaf in leaves) == len(down)
    expected = np.asarray(wide(IDS, TARGET))
    rounded = jax.tree.map(lambda leaf: leaf.astype("float16") if eqx.is_array(leaf) else leaf, half)
    for model in (half, rounded):
        found = eqx.filter_jit(model)(IDS, TARGET)
        assert found.dtype == jnp.float16
        np.testing.assert_allclose(found.astype("float32"), expected, atol=0.03 * np.abs(expected).max())
    save_pretrained(half, CONFIG, tmp_path / "half")
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "float16"
    for name, leaf in load_file(tmp_path / "half" / "model.safetensors").items():
        assert leaf.dtype == ("float32" if name.endswith(".wo.weight") else "float16"), name


@pytest.mark.parity
@pytest.mark.filterwarnings("default")
def test_float16_of_transformers(tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    wide = with_large_outputs(random_model(T5, CONFIG))
    save_pretrained(wide, CONFIG, tmp_path)
    theirs = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float16).eval()
    model = eqx.nn.inference_mode(from_pretrained(tmp_path, dtype="float16")[0])
    with torch.no_grad():
        ids, target = (torch.tensor(np.asarray(x))[None] for x in (IDS, TARGET))
        expected = theirs(input_ids=ids, decoder_input_ids=target).logits[0].float().numpy()
    found = np.asarray(model(IDS, TARGET).astype("float32"))
    assert np.isfinite(expected).all()
    np.testing.assert_allclose(found, expected, atol=0.03 * np.abs(expected).max())
