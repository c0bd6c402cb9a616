"""A text that becomes longer than the original ones changes the frequencies of all its tokens, also of cached ones."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from redeqx.models import from_pretrained, generate, stream
from redeqx.models.deepseek import DeepseekV2, DeepseekV2Config
from redeqx.models.lfm import Lfm2, Lfm2Config
from redeqx.models.nn import LongScaling
from redeqx.models.phi import Phi3, Phi3Config
from redeqx.models.phi_moe import Phimoe, PhimoeConfig
from tests.models.families._case import random_model

ORIGINAL, PROMPT, NEW = 16, 10, 12
LONG = LongScaling((1.0, 1.0), (1.5, 4.0), ORIGINAL, 1.1)
CONFIG = Phi3Config(
    vocab_size=40, n_positions=64, d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, d_mlp=24, rope_scaling=LONG,
    eos_token_id=None, pad_token_id=0,
)  # fmt: skip
IDS = np.random.default_rng(0).integers(3, 40, (3, PROMPT))
LEFT = np.arange(PROMPT) >= np.array([[0], [4], [1]])


class Ids(eqx.Module):
    ids: Array
    mask: Array
    index: Array


class WithoutCache(eqx.Module):
    """The model, run on the whole text for each token."""

    model: Any

    @property
    def config(self):
        return self.model.config

    def init_cache(self, length):
        return Ids(jnp.zeros(length, jnp.int32), jnp.zeros(length, bool), jnp.int32(0))

    def decode(self, ids, cache, *, mask=None):
        put = lambda old, new: jax.lax.dynamic_update_slice(old, new.astype(old.dtype), (cache.index,))  # noqa: E731
        all_ids, seen = put(cache.ids, ids), put(cache.mask, jnp.ones(len(ids)) if mask is None else mask)
        end = cache.index + len(ids)
        return self.model(all_ids, mask=seen)[end - 1], Ids(all_ids, seen, end)


@pytest.fixture(scope="module")
def model():
    return random_model(Phi3, CONFIG)


@pytest.fixture(scope="module")
def expected(model):
    return np.asarray(generate(WithoutCache(model), IDS, mask=LEFT, max_new_tokens=NEW))


def test_greedy_tokens_are_those_without_a_cache(model, expected):
    """Rows cross the original length in different steps."""
    np.testing.assert_array_equal(generate(model, IDS, mask=LEFT, max_new_tokens=NEW), expected)


@pytest.mark.sweep
@pytest.mark.parametrize("options", [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}], ids=str)
def test_searches_return_the_tokens_without_a_cache(model, options):
    given: dict[str, Any] = {"mask": LEFT, "max_new_tokens": NEW, "key": jax.random.key(1), **options}
    np.testing.assert_array_equal(generate(model, IDS, **given), generate(WithoutCache(model), IDS, **given))


SIZES: dict[str, Any] = {
    "vocab_size": 40, "n_positions": 64, "d_model": 16, "n_layers": 2, "n_heads": 4, "rope_scaling": LONG,
    "eos_token_id": None,
}  # fmt: skip
LATENT: dict[str, Any] = {"latent_size": 8, "query_latent_size": None, "plain_size": 4, "shared_rotary_size": 4}
OTHERS = [
    (Phimoe, PhimoeConfig(**SIZES, n_experts=4, n_kv_heads=2, d_mlp=8)),
    # No published model of these has such frequencies.
    (
        DeepseekV2,
        DeepseekV2Config(
            **SIZES, **LATENT, d_mlp=24, value_size=4, n_dense=1, n_experts=4, n_chosen=2, d_expert=8, d_shared=8
        ),
    ),
    (Lfm2, Lfm2Config(**SIZES, n_kv_heads=2, d_mlp=24, mixer_layers=(1,))),
]


@pytest.mark.sweep
@pytest.mark.parametrize(("cls", "config"), OTHERS, ids=["experts", "latents", "states"])
def test_other_layers_return_the_tokens_without_a_cache(cls, config):
    model = random_model(cls, config)
    given: dict[str, Any] = {"mask": LEFT, "max_new_tokens": NEW}
    expected = generate(WithoutCache(model), IDS, **given)
    draft = model if cls is Lfm2 else None  # whose states go back to an earlier token
    np.testing.assert_array_equal(generate(model, IDS, **given, assistant_model=draft), expected)


@pytest.mark.sweep
def test_a_stream_and_a_draft_do_not_change_the_tokens(model, expected):
    found = np.stack([*stream(model, IDS, mask=LEFT, max_new_tokens=NEW)], 1)
    np.testing.assert_array_equal(found, expected)
    rng = np.random.default_rng(1)
    noise = lambda leaf: leaf + 0.05 * rng.normal(size=leaf.shape).astype(leaf.dtype)  # noqa: E731
    draft = jax.tree.map(lambda leaf: noise(leaf) if eqx.is_inexact_array(leaf) else leaf, model)
    for one in (model, draft):
        found = generate(model, IDS, mask=LEFT, max_new_tokens=NEW, assistant_model=one, output_scores=True)
        np.testing.assert_array_equal(found.tokens, expected)
        assert (found.accepted == 1).all() == (one is model)


def test_only_a_text_that_may_cross_holds_two_caches(model):
    assert not model.init_cache(ORIGINAL).is_paired
    cache = model.init_cache(ORIGINAL + 1)
    assert cache.is_paired
    ids = jnp.arange(ORIGINAL + 1) % 7
    (logits, cache), all_logits = eqx.filter_jit(lambda cache: (model.decode(ids, cache), model(ids)))(cache)
    assert not cache.is_paired and cache.keys.ndim == 4
    np.testing.assert_allclose(logits, all_logits[-1], atol=1e-5)


@pytest.mark.parity
@pytest.mark.filterwarnings("default")
def test_transformers_generates_the_same_tokens(tmp_path):
    """Phi-3 only: the Phi-3.5-MoE of transformers 5.24 takes the short frequencies in any text."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    rope = {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": ORIGINAL, "factor": 4.0,
        "short_factor": [1.0] * 4, "long_factor": [1.5, 2.2, 2.9, 3.6],
    }  # fmt: skip
    config = transformers.Phi3Config(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, original_max_position_embeddings=ORIGINAL, pad_token_id=0,
        bos_token_id=1, eos_token_id=None, initializer_range=0.3, rope_parameters=rope,
    )  # fmt: skip
    torch.manual_seed(0)
    module = transformers.Phi3ForCausalLM(config).eval()
    module.save_pretrained(tmp_path)
    model, _ = from_pretrained(tmp_path)
    searches: list[dict[str, Any]] = [{}, {"num_beams": 3}]
    for options in searches:
        found = generate(model, IDS, mask=LEFT, max_new_tokens=30, eos_token_id=(), **options)
        # One by one, because transformers takes the longest text of a batch for the frequencies of all.
        for row, ids, is_token in zip(np.asarray(found), IDS, LEFT, strict=True):
            prompt = torch.tensor(ids[is_token])[None]
            given: dict[str, Any] = {
                "attention_mask": torch.ones_like(prompt),
                "max_new_tokens": 30,
                "do_sample": False,
                **options,
            }
            np.testing.assert_array_equal(row, module.generate(prompt, **given)[0, prompt.shape[1] :].numpy())
