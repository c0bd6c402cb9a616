"""Packed rows: each family computes for a packed sequence what it computes for the sequence alone, values and gradients."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import redeqx
from redeqx.data import pack
from redeqx.models import cross_entropy
from redeqx.models.bamba import Bamba, BambaConfig
from redeqx.models.bart import Bart, BartConfig
from redeqx.models.bert import Bert, BertConfig, BertForMaskedLM
from redeqx.models.clip import CLIPText, CLIPTextConfig
from redeqx.models.deberta import Deberta, DebertaConfig
from redeqx.models.decoder import Factors
from redeqx.models.falcon_h1 import FalconH1, FalconH1Config
from redeqx.models.gemma import Gemma3, Gemma3Config
from redeqx.models.gpt2 import GPT2, GPT2Config
from redeqx.models.gpt_bigcode import GPTBigCode, GPTBigCodeConfig
from redeqx.models.gptj import GPTJ, GPTJConfig
from redeqx.models.granite_hybrid import GraniteMoeHybrid, GraniteMoeHybridConfig
from redeqx.models.lfm import Lfm2, Lfm2Config
from redeqx.models.llama import Llama, LlamaConfig
from redeqx.models.mamba import FalconMamba, FalconMambaConfig
from redeqx.models.mamba2 import Mamba2, Mamba2Config
from redeqx.models.mistral import Ministral3, Ministral3Config, Mistral, MistralConfig
from redeqx.models.modernbert import ModernBert, ModernBertConfig
from redeqx.models.nn import DynamicScaling, LongScaling, YarnScaling, check_segments
from redeqx.models.opt import OPT, OPTConfig
from redeqx.models.phi import Phi3, Phi3Config
from redeqx.models.qwen import Qwen2, Qwen2Config, Qwen3, Qwen3Config
from redeqx.models.qwen_next import Qwen3Next, Qwen3NextConfig
from redeqx.models.roberta import RobertaConfig, RobertaForMaskedLM
from redeqx.models.t5 import T5, T5Config, T5Encoder
from redeqx.transforms import attentions
from tests._tree import named_leaves
from tests.models.families._case import random_model

VOCAB, LENGTH, LONGEST = 64, 32, 24
SIZES = {"vocab_size": VOCAB, "n_positions": LONGEST, "d_model": 32, "n_layers": 2, "n_heads": 4, "init_std": 0.1}
LLAMA = {**SIZES, "d_mlp": 48, "n_kv_heads": 2}
TABLE = jnp.asarray(np.random.default_rng(1).normal(size=(VOCAB, 32)), jnp.float32)


def decoder_sums(model, row):
    given = {name: row[name] for name in ("mask", "segments") if name in row}
    loss = cross_entropy(model.hidden(row["tokens"], **given), row["labels"], head=model.logits, chunk_size=8)
    return loss.total, loss.weight


def encoder_sums(model, row):
    """The sum over tokens of the distance of a hidden state from a target that depends on the token."""
    given = {name: row[name] for name in ("mask", "segments") if name in row}
    numbers = jnp.mean((model(row["tokens"], **given) - TABLE[row["tokens"]]) ** 2, -1)
    is_token = row["segments"] > 0 if "segments" in row else row["mask"]
    return jnp.where(is_token, numbers, 0).sum(), is_token.sum(dtype=jnp.float32)


def pair_sums(model, row):
    source, target = row["source"], row["target"]
    if "segments" in source:
        given = {"segments": source["segments"], "decoder_segments": target["segments"]}
    else:
        given = {"mask": source["mask"], "decoder_mask": target["mask"]}
    hidden = model.hidden(source["tokens"], target["tokens"], **given)
    loss = cross_entropy(hidden, target["labels"], head=model.logits)
    return loss.total, loss.weight


@dataclasses.dataclass(frozen=True)
class Family:
    """A model, and the sums over the tokens of a row: of their losses, and of their weights."""

    name: str
    make: type
    config: object
    sums: object
    is_quick: bool = False

    @functools.cached_property
    def model(self):
        return eqx.filter_jit(self.make)(self.config.without_dropout(), key=jax.random.key(0))

    def loss_fn(self, model, batch, key=None):
        del key
        totals, weights = jax.vmap(self.sums, (None, 0))(model, batch)
        return redeqx.Loss(totals.sum(), weights.sum())


DELTA = {"mixer_layers": (0,), "state_groups": 2, "state_heads": 4, "state_size": 8, "state_value_size": 8}
MAMBA = {**DELTA, "state_value_size": 16, "n_experts": 4, "d_expert": 16, "d_shared": 48, "unrotated_layers": ()}
BESIDE = {**{key: value for key, value in DELTA.items() if key != "mixer_layers"}, "factors": Factors(key=0.7, gate=1.3)}
ALONE = {"vocab_size": VOCAB, "d_model": 32, "n_layers": 2, "state_groups": 2, "state_heads": 4, "state_value_size": 16}
SCANNED = {"vocab_size": VOCAB, "d_model": 32, "n_layers": 2, "state_size": 4, "state_value_size": 64}
EXPERTS = {"n_experts": 4, "n_chosen": 2, "d_expert": 16, "d_shared": 16}
T5_CONFIG = T5Config(
    vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, n_layers=2, n_decoder_layers=2, n_heads=4, n_buckets=8, max_distance=12
)
BOTH_SIDES = {"head_size": 8, "window": 5, "windowed_layers": (0,), "is_causal": False}
LONG = {"rope_scaling": LongScaling((1.0,) * 4, (2.0, 4.0, 6.0, 8.0), 10, 1.2)}
GROWING = {"head_size": 8, "rope_scaling": YarnScaling(4.0, 4, 1.0), "query_growth": 0.5}
BERT_CONFIG = BertConfig(**SIZES, d_ff=48)
FAMILIES = [
    Family("gpt2", GPT2, GPT2Config(**SIZES), decoder_sums, is_quick=True),
    Family("gptj", GPTJ, GPTJConfig(**SIZES, rope_share=0.5), decoder_sums),
    Family("opt", OPT, OPTConfig(**SIZES), decoder_sums),
    Family("opt-350m", OPT, OPTConfig(**SIZES, norm_places="sum", d_embedding=16), decoder_sums),
    Family("llama", Llama, LlamaConfig(**LLAMA), decoder_sums),
    Family("mistral", Mistral, MistralConfig(**LLAMA, window=5), decoder_sums),
    Family("phi3", Phi3, Phi3Config(**LLAMA, **LONG), decoder_sums, is_quick=True),
    Family("dynamic", Llama, LlamaConfig(**LLAMA, rope_scaling=DynamicScaling(4.0, 10)), decoder_sums),
    Family("ministral3", Ministral3, Ministral3Config(**LLAMA, **GROWING), decoder_sums),
    Family("embedding-gemma", Gemma3, Gemma3Config(**LLAMA, **BOTH_SIDES), decoder_sums),
    Family("qwen2", Qwen2, Qwen2Config(**LLAMA, window=5, windowed_layers=(1,)), decoder_sums),
    Family("qwen3", Qwen3, Qwen3Config(**LLAMA, head_size=8), decoder_sums),
    Family("qwen3-next", Qwen3Next, Qwen3NextConfig(**LLAMA, **DELTA, **EXPERTS, head_size=16), decoder_sums),
    Family("bamba", Bamba, BambaConfig(**LLAMA, **DELTA, head_size=8), decoder_sums),
    Family("falcon-h1", FalconH1, FalconH1Config(**LLAMA, **BESIDE), decoder_sums),
    Family("gpt-bigcode", GPTBigCode, GPTBigCodeConfig(**SIZES), decoder_sums),
    Family("mamba2", Mamba2, Mamba2Config(**ALONE), decoder_sums),
    Family("falcon-mamba", FalconMamba, FalconMambaConfig(**SCANNED), decoder_sums),
    Family("granite-4", GraniteMoeHybrid, GraniteMoeHybridConfig(**LLAMA, **MAMBA), decoder_sums),
    Family("lfm2", Lfm2, Lfm2Config(**LLAMA, mixer_layers=(0,)), decoder_sums),
    Family("bert", Bert, dataclasses.replace(BERT_CONFIG, has_pooler=False), encoder_sums),
    Family("bert-mlm", BertForMaskedLM, BERT_CONFIG, decoder_sums),
    Family("roberta-mlm", RobertaForMaskedLM, RobertaConfig(**SIZES, d_ff=48), decoder_sums),
    Family("modernbert", ModernBert, ModernBertConfig(**SIZES, d_ff=48, window=3, pad_token_id=0), encoder_sums),
    Family("deberta", Deberta, DebertaConfig(**SIZES, d_ff=48, n_buckets=8), encoder_sums),
    Family("clip-text", CLIPText, CLIPTextConfig(**SIZES, d_ff=48), encoder_sums),
    Family("t5-encoder", T5Encoder, T5_CONFIG, encoder_sums),
    Family("t5", T5, T5_CONFIG, pair_sums),
    Family("bart", Bart, BartConfig(**SIZES, n_decoder_layers=2, n_decoder_heads=4, d_ff=48, d_decoder_ff=48), pair_sums),
]  # fmt: skip


BY_NAME = {family.name: family for family in FAMILIES}


def sequences(family, n, seed=0):
    """Sequences of different lengths, or pairs of them."""
    rng = np.random.default_rng(seed)
    draw = lambda most: rng.integers(1, VOCAB, rng.integers(1, most + 1))  # noqa: E731
    if family.sums is pair_sums:
        return [{"source": draw(LONGEST), "target": draw(LONGEST // 2)} for _ in range(n)]
    return [draw(LONGEST) for _ in range(n)]


def packed(family, examples):
    length = {"source": LENGTH, "target": LENGTH // 2} if family.sums is pair_sums else LENGTH
    return list(pack(examples, length))


def stack(rows):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *rows)


def alone(family, examples):
    """Returns rows of one sequence each, padded on the right, with a mask in place of segments."""

    def pad(tokens, length):
        n = len(tokens)
        row = {
            "tokens": np.zeros(length, np.int32),
            "labels": np.full(length, -100, np.int32),
            "mask": np.arange(length) < n,
        }
        row["tokens"][:n], row["labels"][: n - 1] = tokens, tokens[1:]
        return row

    if family.sums is pair_sums:
        lengths = {"source": LONGEST, "target": LONGEST // 2}
        return [{side: pad(example[side], length) for side, length in lengths.items()} for example in examples]
    return [pad(example, LONGEST) for example in examples]


def total_and_gradient(family, rows):
    @eqx.filter_jit
    def compute(model, batch):
        def total_fn(model):
            loss = family.loss_fn(model, batch)
            return loss.total, loss.weight

        return eqx.filter_value_and_grad(total_fn, has_aux=True)(model)

    (total, weight), gradient = compute(family.model, stack(rows))
    return total, weight, named_leaves(gradient)


def assert_close(found, wanted, tolerance=1e-6):
    """Compares by the norm of each leaf, and those with a gradient near zero (the biases of keys) by the norm of all."""
    norm = np.sqrt(sum(float(np.sum(np.square(leaf))) for leaf in wanted.values()))
    assert found.keys() == wanted.keys()
    for name, leaf in wanted.items():
        error = np.linalg.norm(np.asarray(found[name], np.float64) - np.asarray(leaf, np.float64))
        assert error <= tolerance * max(np.linalg.norm(leaf), 0.1 * norm), (name, error / np.linalg.norm(leaf), error / norm)


# Segments reach attention and positions, which are those of other families here.
SAME = ("gptj", "opt", "llama", "qwen3", "bert", "bert-mlm", "clip-text", "t5-encoder")


@pytest.mark.parametrize(
    "family",
    [pytest.param(x, id=x.name, marks=[] if x.is_quick else pytest.mark.sweep) for x in FAMILIES if x.name not in SAME],
)
def test_packed_sequences_have_the_losses_and_gradients_of_sequences_alone(family):
    examples = sequences(family, 24)
    rows = packed(family, examples)
    assert len(rows) < 0.8 * len(examples)
    total, weight, gradient = total_and_gradient(family, rows)
    expected_total, expected_weight, expected_gradient = total_and_gradient(family, alone(family, examples))
    assert weight == expected_weight
    np.testing.assert_allclose(total, expected_total, rtol=1e-6)
    assert_close(gradient, expected_gradient)


# --- on a mesh ----------------------------------------------------------------------------------------------------------


def updated(family, rows, learning_rate, **shards):
    """Returns the leaves after one step on a mesh."""
    trainer = redeqx.Trainer(
        redeqx.Deployer(verbose=False, **shards),
        model=family.model,
        optimizer=optax.sgd(learning_rate),
        collate_fn=stack,
        loss_fn=family.loss_fn,
    )
    trainer.fit(rows, batch_size=len(rows), n_epochs=1)
    assert trainer.step == 1
    return named_leaves(eqx.filter(trainer.model, eqx.is_inexact_array))


MESHES = {
    "data=8": {},
    "data=2 fsdp=2 model=2": {"n_model_shards": 2, "n_fsdp_shards": 2},
    "data=4 sequence=2": {"n_sequence_shards": 2},
    "data=2 sequence=2 model=2": {"n_sequence_shards": 2, "n_model_shards": 2},
}
ON_A_MESH = [  # each mesh with one and with two sequences in a pair, causal or not, and with a window
    ("gpt2", "data=8"),
    ("gpt2", "data=4 sequence=2"),
    ("opt-350m", "data=2 sequence=2 model=2"),
    ("qwen2", "data=2 fsdp=2 model=2"),
    ("roberta-mlm", "data=2 sequence=2 model=2"),
    ("modernbert", "data=2 fsdp=2 model=2"),
    ("t5", "data=4 sequence=2"),
    ("t5", "data=2 fsdp=2 model=2"),
    ("bart", "data=2 fsdp=2 model=2"),
]


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "mesh"), ON_A_MESH)
def test_a_step_on_packed_rows_is_that_of_the_sequences_alone(name, mesh):
    family = BY_NAME[name]
    examples = sequences(family, 36)
    rows = packed(family, examples)
    assert len(rows) == 16
    _, weight, gradient = total_and_gradient(family, alone(family, examples))
    before = named_leaves(eqx.filter(family.model, eqx.is_inexact_array))
    # So large that the step changes a weight by about its own size: an error of the gradient is not hidden by the weight.
    norm = np.sqrt(sum(float(np.sum(np.square(leaf))) for leaf in gradient.values()))
    learning_rate = float(np.sqrt(sum(float(np.sum(np.square(leaf))) for leaf in before.values())) / (norm / weight))
    wanted = {name: leaf - learning_rate / weight * gradient[name] for name, leaf in before.items()}
    assert_close(updated(family, rows, learning_rate, **MESHES[mesh]), wanted)


# --- what segments mean -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", *(pytest.param(x, marks=pytest.mark.sweep) for x in ("qwen2", "bert", "gptj"))])
def test_no_token_sees_another_segment(name):
    model = BY_NAME[name].model
    call = eqx.filter_jit(lambda model, ids, segments: model(ids, segments=segments))
    segments = jnp.repeat(jnp.array([3, 1, 2, 0]), jnp.array([6, 9, 5, 4]), total_repeat_length=24)  # in any order
    ids = jnp.arange(1, 25)
    before, after = call(model, ids, segments), call(model, ids.at[8].set(50), segments)
    changed = np.any(np.asarray(before != after), axis=-1)
    assert not changed[:6].any() and not changed[15:].any() and changed[8:15].all()
    assert np.isfinite(before).all()
    # The numbers of the segments do not count.
    np.testing.assert_array_equal(before, call(model, ids, segments + 7))


def test_kernels_get_segments_and_a_causal_mask():
    def of(family, *rows, **options):
        return list(attentions(jax.make_jaxpr(lambda: family.model(*rows, **options))())[0])

    ids, segments = jnp.arange(8), jnp.repeat(jnp.arange(2), 4)
    assert of(BY_NAME["gpt2"], ids, segments=segments) == ["causal, segments, in blocks of queries"]
    assert of(BY_NAME["bert-mlm"], ids, segments=segments) == ["segments, in blocks of queries"]


@pytest.mark.sweep
def test_a_row_of_one_token_needs_no_kernel():
    model, ids = BY_NAME["gpt2"].model, jnp.array([5])
    np.testing.assert_allclose(model(ids, segments=jnp.array([1])), model(ids), rtol=1e-6, atol=1e-6)


@pytest.mark.sweep
def test_a_segment_with_more_tokens_than_positions_is_nan():
    """Only the segments' numbers say so. A row may be longer, as those of all tests here."""
    model, ids = BY_NAME["gpt2"].model, jnp.ones(LONGEST + 3, int)
    assert np.isnan(model(ids, segments=jnp.ones(LONGEST + 3, int))[LONGEST:]).all()
    assert np.isfinite(model(ids, segments=jnp.arange(LONGEST + 3) // LONGEST)).all()


def test_what_does_not_fit_together_is_refused():
    gpt2, t5, bert = (random_model(of.make, of.config.without_dropout()) for of in map(BY_NAME.get, ("gpt2", "t5", "bert")))
    ids, mask, segments = jnp.ones(4, int), jnp.ones(4, bool), jnp.ones(4, int)

    def refused(call, *args, **options):
        with pytest.raises(ValueError) as raised:
            call(*args, **options)
        return str(raised.value)

    both = "`mask`: expected None with `segments`, got [4]. Give padding another segment."
    assert refused(gpt2, ids, mask=mask, segments=segments) == both
    assert refused(bert, ids, mask=mask, segments=segments) == both
    assert "`decoder_mask`: expected None with `decoder_segments`, got [4]." in refused(
        t5, ids, ids, segments=segments, decoder_segments=segments, decoder_mask=mask
    )
    assert refused(t5, ids, ids, segments=segments) == (
        "`decoder_segments`: expected segments with `segments`, got None. Pass both, or neither."
    )
    assert refused(t5, ids, ids, decoder_segments=segments).startswith(
        "`segments`: expected segments with `decoder_segments`"
    )
    assert refused(check_segments, segments[:3], None, 4) == (
        "`segments`: expected integers, one for each of 4 tokens, got int32[3]. Pass those of `redeqx.data.pack`."
    )
    assert "one for each of 4 tokens, got float32[4]." in refused(check_segments, jnp.ones(4), None, 4)
    assert "`ids`: expected at most `n_positions`=24 tokens, got 25." in refused(gpt2, jnp.ones(25, int))
    captioner = eqx.filter_eval_shape(
        GPT2, dataclasses.replace(gpt2.config, has_cross_attention=True), key=jax.random.key(0)
    )
    assert "`segments`: expected None with a memory, got [4]." in refused(
        captioner, ids, segments=segments, memory=jnp.ones((3, 32))
    )
