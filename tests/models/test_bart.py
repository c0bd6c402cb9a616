"""BART: behavior beyond the outputs that `test_parity.py` and `test_golden.py` compare."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from redeqx.models import from_pretrained, save_pretrained
from redeqx.models.bart import Bart, BartConfig
from redeqx.models.hf import ConfigReader
from tests._tree import named_leaves
from tests.models.families._case import is_shape, random_model

# Only in the sweep: `make test` compares the family's outputs with transformers' in `test_golden.py`.
pytestmark = pytest.mark.sweep

# An encoder and a decoder that differ in all possible sizes.
CONFIG = BartConfig(
    vocab_size=43,
    n_positions=14,
    d_model=24,
    n_layers=2,
    n_decoder_layers=3,
    n_heads=4,
    n_decoder_heads=3,
    d_ff=40,
    d_decoder_ff=32,
    attention_dropout=0.1,
    activation_dropout=0.1,
)
NO_DROPOUT = CONFIG.without_dropout()
IDS, DECODER_IDS = jnp.array([5, 0, 42, 7, 7, 31, 2, 9]), jnp.array([2, 0, 17, 40, 3, 3, 21])
ALL, ALL_DECODER = jnp.ones(8, bool), jnp.ones(7, bool)


def make_model(config=CONFIG):
    return random_model(Bart, config)


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture(scope="module")
def logits(model):
    return run(eqx.nn.inference_mode(model), IDS, DECODER_IDS, ALL, ALL_DECODER)


@eqx.filter_jit
def run(model, ids, decoder_ids, mask=None, decoder_mask=None, key=None):
    return model(ids, decoder_ids, mask=mask, decoder_mask=decoder_mask, key=key)


@eqx.filter_jit
def decode(model, ids, cache, mask=None):
    return model.decode(ids, cache, mask=mask)


# --- positions and masks ----------------------------------------------------------------------------------------------


def test_decoding_in_pieces_after_left_padding_equals_a_call(model):
    model = eqx.nn.inference_mode(model)
    mask, decoder_mask = jnp.arange(8) < 6, jnp.arange(7) >= 2
    expected = run(model, IDS, DECODER_IDS, mask, decoder_mask)
    memory = eqx.filter_jit(lambda model: model.encode(IDS, mask=mask))(model)
    cache = model.init_cache(9, memory, memory_mask=mask)
    found = []
    for start, stop in ((0, 5), (5, 6), (6, 7)):
        last, cache = decode(model, DECODER_IDS[start:stop], cache, decoder_mask[start:stop])
        found.append(last)
    np.testing.assert_allclose(jnp.stack(found), expected[4:], atol=1e-4)
    assert int(cache.index) == 7


def test_padding_counts_in_positions_but_is_masked(model, logits):
    model = eqx.nn.inference_mode(model)
    right, left = jnp.concatenate([IDS, jnp.ones(3, int)]), jnp.concatenate([jnp.ones(3, int), IDS])
    before, after = jnp.arange(11) < 8, jnp.arange(11) >= 3
    np.testing.assert_allclose(run(model, right, DECODER_IDS, before, ALL_DECODER), logits, atol=1e-4)
    # On the left it shifts the positions of the tokens after it.
    moved = run(model, left, DECODER_IDS, after, ALL_DECODER)
    assert np.abs(moved - logits).max() > 1e-2
    np.testing.assert_allclose(run(model, left.at[0].set(30), DECODER_IDS, after, ALL_DECODER), moved, atol=1e-5)


def test_a_target_token_attends_only_to_earlier_tokens(model, logits):
    after = run(eqx.nn.inference_mode(model), IDS, DECODER_IDS.at[4].set(40), ALL, ALL_DECODER)
    np.testing.assert_allclose(after[:4], logits[:4], atol=1e-5)
    assert not np.isclose(after[4:], logits[4:]).all(axis=-1).any()


def test_rejects_more_tokens_than_positions(model):
    long = jnp.zeros(15, int)
    with pytest.raises(ValueError, match=r"`ids`: expected at most `n_positions`=14 tokens, got 15\. Cut the example"):
        model(long, DECODER_IDS)
    with pytest.raises(ValueError, match=r"`decoder_ids`: expected at most `n_positions`=14 tokens, got 15\. Cut"):
        eqx.nn.inference_mode(model)(IDS, long)
    with pytest.raises(ValueError, match=r"`length`: expected at most `n_positions`=14 tokens, got 15\. Cut"):
        model.init_cache(15, jnp.zeros((8, 24)))


# --- labels, and the bias of the logits -------------------------------------------------------------------------------


def test_shift_right_turns_labels_into_decoder_inputs(model):
    np.testing.assert_array_equal(model.shift_right(jnp.array([7, 8, 2, -100, -100])), [2, 7, 8, 2, 1])
    without = make_model(dataclasses.replace(CONFIG, pad_token_id=None))
    with pytest.raises(ValueError, match=r"`pad_token_id`: expected a token, got None\. Set it in the config\."):
        without.shift_right(jnp.array([7, 8]))


def test_logits_of_hidden_states_equal_a_call(model, logits):
    model = eqx.nn.inference_mode(model)
    hidden = eqx.filter_jit(lambda model: model.hidden(IDS, DECODER_IDS))(model)
    assert hidden.shape == (7, 24)
    np.testing.assert_allclose(model.logits(hidden), logits, atol=1e-5)


# --- training ---------------------------------------------------------------------------------------------------------


def test_dropout_depends_on_the_key_and_is_off_in_inference_mode(model, logits):
    a, same, b = (run(model, IDS, DECODER_IDS, key=jax.random.key(i)) for i in (0, 0, 1))
    np.testing.assert_array_equal(a, same)
    assert min(np.abs(x - y).mean() for x, y in ((a, b), (a, logits), (b, logits))) > 0.01
    with pytest.raises(RuntimeError, match="Dropout requires a key"):
        model(IDS, DECODER_IDS)


@pytest.mark.parametrize("name", ["dropout", "attention_dropout", "activation_dropout"])
def test_each_dropout_has_its_own_rate(name):
    block = make_model(dataclasses.replace(NO_DROPOUT, **{name: 0.1})).decoder.stack[0]
    x, memory = jax.random.normal(jax.random.key(1), (2, 7, 24))
    call = eqx.filter_jit(lambda block, key: block((x, None, None), None, memory, key=key)[0])
    quiet, noisy = (call(b, jax.random.key(0)) for b in (eqx.nn.inference_mode(block), block))
    assert np.abs(noisy - quiet).mean() > 0.01


def test_remat_changes_neither_value_nor_gradients():
    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def loss(model):
        log_probs = jax.nn.log_softmax(model(IDS, DECODER_IDS))
        return -jnp.mean(jnp.take_along_axis(log_probs[:-1], DECODER_IDS[1:, None], axis=-1))

    results = [loss(make_model(dataclasses.replace(NO_DROPOUT, remat=remat))) for remat in (False, True)]
    np.testing.assert_allclose(results[0][0], results[1][0], rtol=1e-6)
    plain, remat = (named_leaves(grads) for _, grads in results)
    for name, grad in plain.items():
        if eqx.is_array(grad):
            np.testing.assert_allclose(grad, remat[name], rtol=1e-4, atol=1e-6)
            # Every leaf has a gradient, except for the bias of the logits, which is not trained.
            assert np.any(grad != 0) == (name != "logits_bias"), name


def test_initial_weights_are_those_of_transformers_code():
    config = dataclasses.replace(NO_DROPOUT, d_model=96, d_ff=128, d_decoder_ff=128, init_std=0.03)
    model = eqx.filter_jit(Bart)(config, key=jax.random.key(0))
    for name, leaf in named_leaves(eqx.filter(model, eqx.is_array)).items():
        if "norm" in name and name.endswith("weight"):
            assert np.all(leaf == 1), name
        elif "bias" in name:
            assert np.all(leaf == 0), name
        else:
            assert leaf.std() == pytest.approx(config.init_std, rel=0.05), name
    assert np.all(model.embedding.weight[1] == 0)  # padding
    blocks = (model.encoder.stack.blocks, model.decoder.stack.blocks)
    draws = [getattr(block.attention, part).weight[i] for block in blocks for part in ("query", "key") for i in range(2)]
    draws = [*draws, model.decoder.stack.blocks.cross_attention.query.weight[0]]
    correlation = np.corrcoef([np.ravel(draw) for draw in draws])
    assert np.max(np.abs(correlation - np.eye(len(draws)))) < 0.1


@pytest.mark.parametrize(
    ("config", "n_parameters"), [(BartConfig.of("base"), 139_420_416), (BartConfig.of("large"), 406_291_456)]
)
def test_presets_have_the_published_number_of_parameters(config, n_parameters):
    model = eqx.filter_eval_shape(Bart, config, key=jax.random.key(0))
    assert model.logits_bias.size == config.vocab_size  # a buffer in the original, not counted
    assert sum(leaf.size for leaf in jax.tree.leaves(model) if is_shape(leaf)) == n_parameters + config.vocab_size


def test_bfloat16_stays_bfloat16(model, logits):
    @eqx.filter_jit
    def call_and_decode(model):
        memory = model.encode(IDS)
        return model(IDS, DECODER_IDS), memory, *model.decode(DECODER_IDS, model.init_cache(7, memory))

    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if eqx.is_array(x) else x, eqx.nn.inference_mode(model))
    found, memory, last, cache = call_and_decode(half)
    assert {x.dtype for x in (found, memory, last, cache.keys, cache.memory[0])} == {jnp.dtype(jnp.bfloat16)}
    assert jnp.abs(found.astype(jnp.float32) - logits).mean() < 0.05 * logits.std()


# --- configs and folders ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config", [CONFIG, BartConfig(), BartConfig.of("base"), BartConfig(is_scaled=True, activation="relu")]
)
def test_config_round_trip(config):
    assert BartConfig.from_hf(ConfigReader(config.to_hf())) == config


def test_absent_and_null_keys_and_old_spellings():
    assert BartConfig.from_hf(ConfigReader({})) == BartConfig()
    read = BartConfig.from_hf(ConfigReader({"forced_eos_token_id": None, "eos_token_id": [2, 5], "pad_token_id": None}))
    assert read == BartConfig(forced_eos_token_id=None, eos_token_id=(2, 5), pad_token_id=None)
    assert BartConfig.from_hf(ConfigReader(read.to_hf())) == read
    # As in folders from before transformers 4.3.
    old = {"force_bos_token_to_be_generated": True, "num_hidden_layers": 6, "normalize_before": False, "decoder_layers": 6}
    assert BartConfig.from_hf(ConfigReader(old)) == BartConfig(n_layers=6, n_decoder_layers=6, forced_bos_token_id=0)


def test_keys_that_change_nothing_are_kept():
    kept = {"encoder_layerdrop": 0.1, "classifier_dropout": 0.0}
    read = BartConfig.from_hf(ConfigReader({**CONFIG.to_hf(), **kept, "num_beams": 4}))
    assert read.extra == kept and read.generation.keys == {"num_beams": 4}


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("tie_word_embeddings", False, "True"),
        ("is_encoder_decoder", False, "True"),
        ("is_decoder", True, "False"),
        ("normalize_before", True, "False"),
        ("normalize_embedding", False, "True"),
        ("add_final_layer_norm", True, "False"),
        ("static_position_embeddings", True, "False"),
    ],
)
def test_refuses_what_it_does_not_implement(key, value, expected):
    with pytest.raises(ValueError) as error:
        BartConfig.from_hf(ConfigReader({**CONFIG.to_hf(), key: value}))
    assert str(error.value) == (
        f"`config.json`: `{key}`: expected {expected}, which this family implements, got {value!r}. "
        "Load another checkpoint, or write the model as your own module."
    )


def test_at_most_one_forced_end_token():
    with pytest.raises(TypeError) as error:
        BartConfig.from_hf(ConfigReader({**CONFIG.to_hf(), "forced_eos_token_id": [2, 3]}))
    assert str(error.value) == "`config.json`: `forced_eos_token_id`: expected int, got [2, 3]. Correct the file."


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("d_decoder_ff", 0, r"`d_decoder_ff`: expected at least 1, got 0\."),
        ("n_heads", 5, r"`n_heads`: expected a divisor of `d_model`=24, got 5\."),
        ("n_decoder_heads", 5, r"`n_decoder_heads`: expected a divisor of `d_model`=24, got 5\."),
        ("activation_dropout", 1.0, r"`activation_dropout`: expected a rate in \[0, 1\), got 1\.0\."),
        ("activation", "prelu", r"`activation`: expected 'gelu', .* or 'tanh', got 'prelu'\. Pass one of them"),
    ],
)
def test_rejects_a_wrong_config(field, value, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **{field: value})


def test_a_folder_of_the_base_model_loads_with_a_zero_logits_bias(tmp_path, model):
    """As bart-base and bart-large on the Hub: without the prefix, with copies of the embedding, and without the head."""
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if eqx.is_array(x) else x, model)
    save_pretrained(half, CONFIG, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    assert tensors.pop("final_logits_bias").shape == (1, 43)
    base = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file({**base, "encoder.embed_tokens.weight": base["shared.weight"]}, path)
    config_path = tmp_path / "config.json"
    config_path.write_text(config_path.read_text().replace("BartForConditionalGeneration", "BartModel"))

    loaded, config = from_pretrained(tmp_path)
    assert config == CONFIG
    assert not loaded.logits_bias.any()
    assert loaded.logits_bias.dtype == jnp.bfloat16
    for name, leaf in named_leaves(eqx.filter(loaded, eqx.is_array)).items():
        if name != "logits_bias":
            np.testing.assert_array_equal(leaf, named_leaves(half)[name], err_msg=name)

    del base["decoder.layernorm_embedding.bias"]
    save_file(base, path)
    with pytest.raises(
        ValueError, match=r"`model\.decoder\.layernorm_embedding\.bias`: expected for `decoder\.norm\.bias`, got"
    ):
        from_pretrained(tmp_path)
