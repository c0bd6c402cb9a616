"""DeBERTa beyond parity of outputs: presets, distances, folders and refusals."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redeqx.models import from_pretrained, save_pretrained
from redeqx.models.deberta import Deberta, DebertaConfig, DebertaForMaskedLM, DebertaForSequenceClassification
from redeqx.models.hf import ConfigReader
from tests.models.families._case import is_shape, random_model

CONFIG = DebertaConfig(41, 24, d_model=24, d_ff=40, n_layers=2, n_heads=3, n_buckets=4, dropout=0.2, attention_dropout=0.3)


@pytest.mark.parametrize(
    ("size", "n_parameters"),
    [("xsmall", 70_682_112), ("small", 141_304_320), ("base", 183_831_552), ("large", 434_012_160)],
)
def test_presets_have_the_published_number_of_parameters(size, n_parameters):
    model = eqx.filter_eval_shape(Deberta, DebertaConfig.of(size), key=jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(model) if is_shape(leaf)) == n_parameters


@pytest.mark.sweep
def test_attention_is_the_sum_of_three_products():
    """One block by hand. With four buckets, distances up to 2 have their own vectors, and others share one on each side."""
    config = dataclasses.replace(CONFIG.without_dropout(), n_layers=1)
    model = random_model(Deberta, config)
    ids = jnp.arange(3, 12)
    found = eqx.filter_jit(model)(ids)

    def normed(layer, x):
        centered = x - x.mean(-1, keepdims=True)
        return centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-7) * layer.weight + layer.bias

    block = jax.tree.map(lambda leaf: leaf[0] if eqx.is_array(leaf) else leaf, model.stack.blocks)
    x = normed(model.norm, np.asarray(model.embedding.weight)[3:12])
    vectors = normed(model.distance_norm, np.asarray(model.distances))
    layer = lambda layer, x: x @ np.asarray(layer.weight).T + np.asarray(layer.bias)  # noqa: E731
    heads = lambda x: x.reshape(len(x), 3, 8)  # noqa: E731
    attention = block.attention
    q, k, v = (heads(layer(part, x)) for part in (attention.query, attention.key, attention.value))
    far_q, far_k = (heads(layer(part, vectors)) for part in (attention.query, attention.key))
    mixed = np.zeros((9, 3, 8))
    for head in range(3):
        scores = np.zeros((9, 9))
        for i in range(9):
            for j in range(9):
                near = abs(i - j) <= 2
                steps = 0 if near else np.ceil(np.log(abs(i - j) / 2) / np.log(23 / 2)) + 2
                row = int(np.clip((i - j if near else np.sign(i - j) * steps) + 4, 0, 7))
                terms = q[i, head] @ k[j, head] + q[i, head] @ far_k[row, head] + k[j, head] @ far_q[row, head]
                scores[i, j] = terms / np.sqrt(3 * 8)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        mixed[:, head] = weights / weights.sum(-1, keepdims=True) @ v[:, head]
    x = normed(block.attention_norm, x + layer(attention.output, mixed.reshape(9, 24)))
    inner = np.asarray(jax.nn.gelu(layer(block.mlp.up, x), approximate=False))
    np.testing.assert_allclose(found, normed(block.mlp_norm, x + layer(block.mlp.down, inner)), rtol=1e-3, atol=1e-4)


def test_folders_round_trip_with_both_heads(tmp_path):
    for is_legacy in (True, False):
        config = dataclasses.replace(CONFIG, is_legacy=is_legacy, max_distance=9)
        model = random_model(DebertaForMaskedLM, config)
        save_pretrained(model, config, tmp_path / str(is_legacy))
        again, found = from_pretrained(tmp_path / str(is_legacy))
        assert found == config and isinstance(again, DebertaForMaskedLM)
        for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(model), strict=True):
            np.testing.assert_array_equal(a, b)
    encoder, _ = Deberta.from_pretrained(tmp_path / "False")
    np.testing.assert_array_equal(encoder.distances, model.encoder.distances)
    model = random_model(DebertaForSequenceClassification, CONFIG)
    save_pretrained(model, CONFIG, tmp_path / "classes")
    assert isinstance(from_pretrained(tmp_path / "classes")[0], DebertaForSequenceClassification)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"relative_attention": False}, r"`relative_attention`: expected True, which this family implements, got False"),
        ({"pos_att_type": "c2p"}, r"`pos_att_type`: expected c2p and p2c, which this family implements, got 'c2p'"),
        ({"conv_kernel_size": 3}, r"`conv_kernel_size`: expected 0, which this family implements, got 3"),
        ({"share_att_key": False}, r"`share_att_key`: expected True, which this family implements, got False"),
        ({"norm_rel_ebd": "none"}, r"`norm_rel_ebd`: expected 'layer_norm', which this family implements, got 'none'"),
        (
            {"position_biased_input": True},
            r"`position_biased_input`: expected False, which this family implements, got True",
        ),
        ({"type_vocab_size": 2}, r"`type_vocab_size`: expected 0, which this family implements, got 2"),
        ({"embedding_size": 7}, r"`embedding_size`: expected None or .*, which this family implements, got 7"),
    ],
)
def test_refuses_what_it_does_not_implement(fields, message):
    with pytest.raises(ValueError, match=message):
        DebertaConfig.from_hf(ConfigReader({**CONFIG.to_hf(), **fields}))
