"""Speculative decoding: a draft changes no token, whether the model agrees with it always, sometimes or never."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import redeqx
from redeqx.models import generate
from redeqx.models.gpt2 import GPT2, GPT2Config
from redeqx.models.lfm import Lfm2, Lfm2Config
from redeqx.models.llama import Llama, LlamaConfig
from redeqx.models.mistral import Mistral, MistralConfig
from redeqx.models.nn import DynamicScaling
from redeqx.models.qwen_next import Qwen3Next, Qwen3NextConfig
from redeqx.models.t5 import T5, T5Config
from tests.models.families._case import random_model

VOCAB, NEW = 24, 14
CONFIG = GPT2Config(VOCAB, 32, d_model=16, n_layers=2, n_heads=4, init_std=0.4, eos_token_id=None).without_dropout()
MODEL = eqx.filter_jit(GPT2)(CONFIG, key=jax.random.key(0))
IDS = np.random.default_rng(0).integers(0, VOCAB, (4, 5))
LEFT = np.arange(5) >= np.array([[0], [2], [4], [1]])


def noisy(model, std, seed=1):
    """A draft that agrees with the model more or less often."""
    rng = np.random.default_rng(seed)

    def add(leaf: Any) -> Any:
        return leaf + std * rng.normal(size=leaf.shape).astype(leaf.dtype) if eqx.is_inexact_array(leaf) else leaf

    return jax.tree.map(add, model)


@pytest.mark.sweep
def test_the_tokens_are_those_of_greedy_decoding():
    """The draft is the model itself, then noisy ones. Rows accept different numbers of tokens."""
    given: dict[str, Any] = {"mask": LEFT, "max_new_tokens": NEW}
    expected = np.asarray(generate(MODEL, IDS, **given))
    drafts = {0.0: MODEL, 0.05: noisy(MODEL, 0.05), 3.0: noisy(MODEL, 3.0)}
    shares = {}
    for std, draft in drafts.items():
        found = generate(MODEL, IDS, **given, assistant_model=draft, num_assistant_tokens=3, output_scores=True)
        np.testing.assert_array_equal(found.tokens, expected)
        shares[std] = np.asarray(found.accepted)
    np.testing.assert_array_equal(shares[0.0], 1)
    assert 0.1 < shares[0.05].mean() < 0.95 and len({*shares[0.05].tolist()}) > 1
    assert shares[3.0].mean() < 0.3


@pytest.mark.sweep
def test_options_and_ends_apply_to_each_token():
    given: dict[str, Any] = {"mask": LEFT, "max_new_tokens": NEW, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3}
    free = np.asarray(generate(MODEL, IDS, **given))
    given |= {
        "eos_token_id": (int(free[0, 4]), int(free[1, 9])),
        "pad_token_id": 0,
        "output_scores": True,
        "min_new_tokens": 3,
    }
    expected = generate(MODEL, IDS, **given)
    found = generate(MODEL, IDS, **given, assistant_model=noisy(MODEL, 0.05), num_assistant_tokens=4)
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    assert len({int(np.sum(row != 0)) for row in found.log_probs}) > 1
    np.testing.assert_allclose(found.log_probs, expected.log_probs, atol=1e-4)
    np.testing.assert_allclose(found.scores, expected.scores, atol=1e-4)


@pytest.mark.sweep
@pytest.mark.parametrize("family", ["mistral", "t5", "qwen3-next", "lfm2"])
def test_other_families(family):
    """Rotary positions with a window, an encoder-decoder, and layers with states in place of keys and values."""
    if family == "qwen3-next":
        cls = Qwen3Next
        config = Qwen3NextConfig(
            VOCAB, 32, d_model=16, n_layers=2, n_heads=4, head_size=8, mixer_layers=(0,), state_groups=2, state_heads=4,
            state_size=8, state_value_size=8, n_experts=4, n_chosen=2, d_expert=8, d_shared=8,
        )  # fmt: skip
    elif family == "lfm2":
        cls = Lfm2
        config = Lfm2Config(VOCAB, 32, d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, d_mlp=24, mixer_layers=(1,))
    elif family == "mistral":
        cls, config = Mistral, MistralConfig(VOCAB, 32, d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, d_mlp=24, window=6)
    else:
        cls, config = T5, T5Config(VOCAB, 16, 4, 32, 2, 2, 4)
    model = random_model(cls, config)
    given: dict[str, Any] = {"mask": LEFT, "max_new_tokens": NEW, "eos_token_id": ()}
    expected = np.asarray(generate(model, IDS, **given))
    found = generate(model, IDS, **given, assistant_model=noisy(model, 0.03), output_scores=True)
    np.testing.assert_array_equal(found.tokens, expected)
    assert 0.05 < float(jnp.mean(found.accepted)) < 1


def test_frequencies_may_change_with_each_token():
    config = LlamaConfig(VOCAB, 32, d_model=16, n_layers=2, n_heads=2, d_mlp=24, rope_scaling=DynamicScaling(8.0, 6))
    model = random_model(Llama, config, std=0.6)
    given: dict[str, Any] = {"max_new_tokens": NEW, "eos_token_id": (), "output_scores": True}
    expected = generate(model, IDS, **given)
    found = generate(model, IDS, **given, assistant_model=noisy(model, 0.05))
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_allclose(found.log_probs, expected.log_probs, atol=1e-3)


class Pair(eqx.Module):
    model: GPT2
    draft: GPT2


@pytest.mark.sweep
def test_on_a_mesh():
    pair, ids, mask = Pair(MODEL, noisy(MODEL, 0.05)), np.tile(IDS, (2, 1)), np.tile(LEFT, (2, 1))
    expected = np.asarray(generate(MODEL, ids, mask=mask, max_new_tokens=NEW))

    def pred_fn(model, batch, key):
        given = {"mask": batch["mask"], "max_new_tokens": NEW, "num_assistant_tokens": 3}
        return generate(model.model, batch["ids"], assistant_model=model.draft, **given)

    predictor = redeqx.Predictor(
        redeqx.Deployer(0, 2, 2, verbose=False),
        model=pair,
        collate_fn=lambda rows: {"ids": np.stack([i for i, _ in rows]), "mask": np.stack([m for _, m in rows])},
        pred_fn=pred_fn,
    )
    np.testing.assert_array_equal(np.stack(predictor.predict(list(zip(ids, mask, strict=True)), 1)), expected)


@pytest.mark.sweep
def test_in_a_dry_run():
    """For devices that are not there, `predict` returns zeros of the right shapes."""
    with redeqx.described("v5e:2x4"):
        deployer = redeqx.Deployer(0, 2, 2, verbose=False)
        pair = deployer.init(lambda: Pair(GPT2(CONFIG, key=jax.random.key(0)), GPT2(CONFIG, key=jax.random.key(1))))

        def pred_fn(model, batch, key):
            penalties: dict[str, Any] = {"repetition_penalty": 1.2, "no_repeat_ngram_size": 2, "bad_words_ids": [[1, 2]]}
            return {
                "beams": generate(model.model, batch, max_new_tokens=8, num_beams=2, output_scores=True, **penalties),
                "draft": generate(model.model, batch, max_new_tokens=8, assistant_model=model.draft, **penalties),
            }

        predictor = redeqx.Predictor(deployer, model=pair, collate_fn=np.stack, pred_fn=pred_fn)
        first = predictor.predict(list(np.tile(IDS, (2, 1))), batch_size=8)[0]
        assert first["beams"].tokens.shape == first["beams"].scores.shape == first["draft"].shape == (8,)


def test_errors():
    other = eqx.filter_eval_shape(GPT2, GPT2Config(VOCAB + 1, 32, d_model=16, n_layers=1, n_heads=4), key=jax.random.key(0))

    class Old(GPT2):
        def decode(self, ids, cache, *, mask=None):
            return super().decode(ids, cache, mask=mask)

    old = jax.tree.map(lambda leaf: leaf, MODEL)
    object.__setattr__(old, "__class__", Old)
    for model, options, error, message in [
        (MODEL, {"assistant_model": other}, ValueError, r"`assistant_model`: expected the vocabulary .* 24 tokens, got 25"),
        (MODEL, {"assistant_model": 3}, TypeError, r"`assistant_model`: expected a model of the same kind as GPT2, got int"),
        (MODEL, {"num_beams": 2}, ValueError, r"`num_beams`: expected none with `assistant_model`"),
        (MODEL, {"do_sample": True, "key": jax.random.key(0)}, ValueError, r"`do_sample`: expected none with"),
        (MODEL, {"num_assistant_tokens": 0}, ValueError, r"`num_assistant_tokens`: expected at least 1, got 0"),
        (
            MODEL,
            {"num_assistant_tokens": 15},
            ValueError,
            r"expected at most 14 after 18 tokens, .*=32, got 15",
        ),
        (old, {}, TypeError, r"`model`: expected a `decode\(ids, cache, \*, mask=None, every=False\)` .* in Old"),
    ]:
        with pytest.raises(error, match=message):
            generate(model, IDS, max_new_tokens=NEW, **{"assistant_model": MODEL, **options})
