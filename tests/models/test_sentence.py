"""Sentence embeddings: each pooling against a hand-written computation, and folders of sentence-transformers."""

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from redeqx.models import from_pretrained, save_pretrained
from redeqx.models.bert import Bert, BertConfig
from redeqx.models.gemma import Gemma3, Gemma3Config
from redeqx.models.hf import ConfigReader
from redeqx.models.qwen import Qwen3, Qwen3Config
from redeqx.models.roberta import RobertaConfig, RobertaForMaskedLM
from redeqx.models.sentence import Dense, DenseConfig, SentenceEncoder
from tests.models.families._case import random_model

# Only in the sweep: these compile a tiny BERT, whose outputs `make test` compares in `test_golden.py`.
pytestmark = pytest.mark.sweep

CONFIG = BertConfig(41, 12, d_model=12, d_ff=20, n_layers=1, n_heads=3).without_dropout()
IDS = jnp.array([2, 7, 31, 7, 40, 3, 19])
MASK = jnp.arange(7) < 5


@pytest.fixture(scope="module")
def bert():
    return random_model(Bert, CONFIG)


def embed(model, mask=MASK):
    return np.asarray(eqx.filter_jit(lambda model, mask: model(IDS, mask=mask))(model, mask))


@pytest.mark.parametrize("mask", [MASK, MASK[::-1]], ids=["right", "left"])
def test_poolings(bert, mask):
    """With padding on either side, whose hidden states do not count."""
    hidden = np.asarray(bert(IDS, mask=mask), np.float64)[np.asarray(mask)]
    position = np.arange(1, 6)[:, None]
    wanted = {
        "weightedmean": (position * hidden).sum(0) / 15,
        "mean_sqrt_len_tokens": hidden.sum(0) / 5**0.5,
        "cls": hidden[0],
        "max": hidden.max(0),
        "mean": hidden.mean(0),
        "lasttoken": hidden[4],
    }
    found = embed(SentenceEncoder(bert, pooling=[*wanted], normalizes=False), mask)
    np.testing.assert_allclose(found, np.concatenate([*wanted.values()]), rtol=1e-4, atol=1e-5)
    found = embed(SentenceEncoder(bert, pooling=["lasttoken", "mean"]), mask)
    both = np.concatenate([wanted["lasttoken"], wanted["mean"]])
    np.testing.assert_allclose(found, both / np.linalg.norm(both), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"`pooling`: expected some of cls, max, .*, got \['median'\]\. Pass one"):
        SentenceEncoder(bert, pooling=["median"])


@pytest.mark.parametrize("mode", ["mean", "weightedmean"])
def test_sums_over_many_tokens_do_not_exceed_float16(mode):
    class Constant(eqx.Module):
        def __call__(self, ids, *, mask, key):
            del mask, key
            return jnp.full((len(ids), 2), 200.0, jnp.float16)

    found = SentenceEncoder(Constant(), pooling=[mode], normalizes=False)(jnp.arange(400), mask=jnp.arange(400) < 390)
    np.testing.assert_allclose(np.asarray(found), 200.0, rtol=1e-3)
    assert found.dtype == jnp.float16


def test_a_text_without_tokens_is_zero_and_has_a_gradient(bert):
    """As in sentence-transformers: a batch with such a row still has a loss."""
    model = SentenceEncoder(bert, pooling=["mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"])

    def loss(model):
        return model(IDS, mask=jnp.zeros(7, bool)).sum()

    value, grads = eqx.filter_jit(eqx.filter_value_and_grad(loss))(model)
    assert value == 0 and all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


def test_a_folder_is_read_as_it_was_written(bert, tmp_path):
    config = DenseConfig(24, 8, activation="torch.nn.modules.activation.ReLU")
    dense = [random_model(Dense, config), random_model(Dense, DenseConfig(8, 5, use_bias=False))]
    files = {"sentence_bert_config.json": b'{"max_seq_length": 9, "do_lower_case": false}'}
    model = SentenceEncoder(bert, pooling=["max", "cls"], dense=dense, max_length=9, files=files)
    model.save_pretrained(tmp_path)
    assert [module["path"] for module in json.loads((tmp_path / "modules.json").read_text())] == [
        "", "1_Pooling", "2_Dense", "3_Dense", "4_Normalize"
    ]  # fmt: skip
    assert json.loads((tmp_path / "2_Dense" / "config.json").read_text()).keys() == {
        "in_features", "out_features", "bias", "activation_function"
    }  # fmt: skip
    again = SentenceEncoder.from_pretrained(tmp_path)
    assert again.max_length == 9 and again.files == model.files and again.pooling == model.pooling
    np.testing.assert_array_equal(embed(again), embed(model))
    hidden = bert(IDS, mask=MASK)[:5]
    inner = jax.nn.relu(dense[0].linear(jnp.concatenate([hidden.max(0), hidden[0]])))
    outer = np.tanh(np.asarray(dense[1].linear.weight @ inner, np.float64))
    np.testing.assert_allclose(embed(again), outer / np.linalg.norm(outer), rtol=1e-4, atol=1e-5)


def test_files_of_sentence_transformers_6(bert, tmp_path):
    """Poolings are named, in the order in which they are concatenated, and modules name what they read and write."""
    SentenceEncoder(bert, dense=[random_model(Dense, DenseConfig(24, 5))]).save_pretrained(tmp_path)
    before = json.loads((tmp_path / "1_Pooling" / "config.json").read_text())
    assert [name for name, value in before.items() if value is True] == ["include_prompt", "pooling_mode_mean_tokens"]

    def read(pooling, **others):
        names = {"module_input_name": "sentence_embedding", "module_output_name": "sentence_embedding"}
        text = {"method": "forward", "method_output_name": "last_hidden_state"}
        transformer = {"transformer_task": "feature-extraction", "modality_config": {"text": text}}
        contents = {
            "1_Pooling": {"embedding_dimension": 12, "include_prompt": True, "pooling_mode": pooling},
            "2_Dense": {"in_features": 24, "out_features": 5, "bias": True, **names},
            "3_Normalize": names,
            "sentence_bert_config.json": {**transformer, "module_output_name": "token_embeddings"},
        }
        for name, content in contents.items():
            path = tmp_path / name if name.endswith("json") else tmp_path / name / "config.json"
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps({**content, **others.get(path.parent.name, others.get(path.stem, {}))}))
        return SentenceEncoder.from_pretrained(tmp_path)

    for pooling in (["mean", "cls"], ["cls", "mean"]):
        model = read(pooling)
        wanted = SentenceEncoder(bert, pooling=pooling, dense=model.dense)
        np.testing.assert_array_equal(embed(model), embed(wanted))
    assert read("weightedmean").pooling == ("weightedmean",)
    for refused, others in {
        "`pooling_mode` of cls, max, .*, got 'median'": {},
        "2_Dense/config.json`: `use_residual`: expected False": {"2_Dense": {"use_residual": True}},
        "2_Dense/config.json`: `module_input_name`": {"2_Dense": {"module_input_name": "token_embeddings"}},
        "3_Normalize/config.json`: `module_output_name`": {"3_Normalize": {"module_output_name": "other"}},
        "`transformer_task`: expected 'feature-ex": {"sentence_bert_config": {"transformer_task": "fill-mask"}},
        "`module_output_name`: expected 'token_e": {"sentence_bert_config": {"module_output_name": "other"}},
    }.items():
        with pytest.raises(ValueError, match=refused):
            read("median" if not others else "mean", **others)


def test_the_transformer_has_no_head_whatever_the_folder_says_or_is_a_decoder(tmp_path):
    config = RobertaConfig(41, 12, d_model=12, d_ff=20, n_layers=1, n_heads=3)
    mlm = random_model(RobertaForMaskedLM, config)
    save_pretrained(mlm, config, tmp_path / "mlm")
    decoder = random_model(
        Qwen3, Qwen3Config(41, 12, d_model=12, d_mlp=20, n_layers=1, n_heads=2, n_kv_heads=1, head_size=6)
    )
    SentenceEncoder(decoder, pooling=["lasttoken"]).save_pretrained(tmp_path / "decoder")
    for name in ("modules.json", "1_Pooling"):
        (tmp_path / "mlm" / name).symlink_to(tmp_path / "decoder" / name)
    found = eqx.nn.inference_mode(SentenceEncoder.from_pretrained(tmp_path / "mlm"))
    hidden = eqx.nn.inference_mode(mlm).encoder(IDS, mask=MASK)[4]
    np.testing.assert_allclose(embed(found), hidden / np.linalg.norm(hidden), rtol=1e-4, atol=1e-5)
    hidden = decoder.hidden(IDS[:5])[4]
    found = SentenceEncoder.from_pretrained(tmp_path / "decoder")
    np.testing.assert_allclose(embed(found), hidden / np.linalg.norm(hidden), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("named", ["Qwen3ForCausalLM", "Qwen3Model"])
def test_a_decoder_without_an_output_head(named, tmp_path):
    """As in the folders of e5-mistral and Qwen3-Embedding: no head and no prefix, whatever class they name."""
    config = Qwen3Config(41, 12, d_model=12, d_mlp=20, n_layers=1, n_heads=2, n_kv_heads=1, head_size=6)
    whole = random_model(Qwen3, config)
    SentenceEncoder(whole, pooling=["lasttoken"]).save_pretrained(tmp_path)
    assert SentenceEncoder.from_pretrained(tmp_path).encoder.head is None  # a folder with a head, too
    tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, "architectures": [named]}))
    model = SentenceEncoder.from_pretrained(tmp_path)
    np.testing.assert_array_equal(model.encoder.hidden(IDS[:5]), whole.hidden(IDS[:5]))
    with pytest.raises(ValueError, match=r"`has_head`: expected True for logits, got False\. Call `hidden`"):
        model.encoder(IDS[:5])
    model.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["architectures"] == ["Qwen3Model"]
    again, config = from_pretrained(tmp_path / "again")
    assert not config.has_head and eqx.tree_equal(again, model.encoder)
    if named == "Qwen3ForCausalLM":
        with pytest.raises(ValueError, match=r"`lm_head.weight`: expected for `head.weight`, got none"):
            from_pretrained(tmp_path)


def test_a_folder_of_embedding_gemma(tmp_path):
    """Tokens attend to both sides, two layers follow the mean, and tensors have the names of a model without a head."""
    sizes = {"d_model": 12, "d_mlp": 20, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "head_size": 6}
    gemma = random_model(Gemma3, Gemma3Config(41, 12, **sizes, window=4, windowed_layers=(0,), is_causal=False))
    identity = {"use_bias": False, "activation": "torch.nn.modules.linear.Identity"}
    dense = [random_model(Dense, DenseConfig(*pair, **identity)) for pair in ((12, 20), (20, 12))]
    model = SentenceEncoder(gemma, dense=dense)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["Gemma3TextModel"]
    tensors = load_file(tmp_path / "model.safetensors")
    assert all(name.startswith("model.") for name in tensors)
    tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = embed(SentenceEncoder.from_pretrained(tmp_path))
    np.testing.assert_array_equal(found, embed(model))
    mean = gemma.hidden(IDS[:5]).mean(0)  # padding does not count
    wanted = np.asarray(dense[1].linear.weight @ (dense[0].linear.weight @ mean), np.float64)
    np.testing.assert_allclose(found, wanted / np.linalg.norm(wanted), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"`is_causal`: expected True to generate, got False\. Call `hidden`"):
        gemma.init_cache(8)


def test_gradients_reach_the_transformer_and_are_finite_at_zero(bert):
    def loss(model):
        return model(IDS, mask=MASK)[0]

    grads = eqx.filter_jit(eqx.filter_grad(loss))(SentenceEncoder(bert))
    assert np.any(np.asarray(grads.encoder.embedding.weight))
    layer = random_model(Dense, DenseConfig(12, 5, use_bias=False))
    zeros = jax.tree.map(jnp.zeros_like, layer)
    grads = eqx.filter_jit(eqx.filter_grad(loss))(SentenceEncoder(bert, dense=[zeros]))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


def test_refuses_what_it_does_not_implement(bert, tmp_path):
    SentenceEncoder(bert).save_pretrained(tmp_path)

    def refused(file, content):
        path = tmp_path / file
        before = path.read_text()
        path.write_text(json.dumps(content))
        with pytest.raises(ValueError) as raised:
            SentenceEncoder.from_pretrained(tmp_path)
        path.write_text(before)
        return str(raised.value)

    modules, pooling = (json.loads((tmp_path / name).read_text()) for name in ("modules.json", "1_Pooling/config.json"))
    lstm = {"idx": 3, "name": "3", "path": "3_LSTM", "type": "sentence_transformers.models.LSTM"}
    assert "expected a transformer, a pooling, then dense layers and one normalization, got" in refused(
        "modules.json", [*modules, lstm]
    )
    assert "expected a transformer, a pooling" in refused("modules.json", modules[1:])
    assert "expected a list of modules with a `type`" in refused("modules.json", {"0": modules[0]})
    assert "`include_prompt`: expected True" in refused("1_Pooling/config.json", {**pooling, "include_prompt": False})
    assert "`pooling_mode_new`: expected False" in refused("1_Pooling/config.json", {**pooling, "pooling_mode_new": True})
    assert "or a `pooling_mode_` that is true, got None." in refused("1_Pooling/config.json", {})
    (tmp_path / "modules.json").unlink()
    with pytest.raises(
        ValueError, match=r"modules\.json`: expected a file, got none\. Pass a folder of sentence-transformers"
    ):
        SentenceEncoder.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"`activation_function`: expected 'torch.nn.modules.activation.Tanh' or "):
        DenseConfig.from_hf(ConfigReader({"in_features": 3, "out_features": 4, "activation_function": "x"}))
    with pytest.raises(ValueError, match=r"expected the key `in_features`, got none"):
        DenseConfig.from_hf(ConfigReader({}))
