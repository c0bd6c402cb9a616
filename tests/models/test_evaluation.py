"""The interface of lm-evaluation-harness, against a computation by hand, with its requests as stubs."""

import abc
import dataclasses
import sys
import types
from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import redeqx
from redeqx.models import generate
from redeqx.models.evaluation import HarnessLM, harness_lm
from redeqx.models.llama import Llama, LlamaConfig
from redeqx.models.nn import LongScaling
from redeqx.models.phi import Phi3, Phi3Config
from tests.models.families._case import random_model

LENGTH = 24
TEXT = "the cat sat on the mat. the dog sat on the log.\nA cat is no dog; a log is no mat.\n" * 4


@dataclass
class Instance:
    """As `lm_eval.api.instance.Instance`: arguments, and what else a request has."""

    args: tuple
    request_type: str = "loglikelihood"


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=280, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


@pytest.fixture(scope="module")
def model():
    config = LlamaConfig(
        vocab_size=288, n_positions=LENGTH, d_model=16, d_mlp=32, n_layers=1, n_heads=2, init_std=0.5, bos_token_id=None,
        eos_token_id=0,
    )  # fmt: skip
    return random_model(Llama, config, std=0.5)


@pytest.fixture(scope="module")
def lm(model, tokenizer):
    return HarnessLM(redeqx.Deployer(n_model_shards=2, verbose=False), model, tokenizer, batch_size=4)


@pytest.fixture(scope="module")
def log_probs(model):
    run = eqx.filter_jit(lambda ids: jax.nn.log_softmax(model(ids)))
    return lambda ids: np.asarray(run(jnp.asarray([*ids, *[0] * (LENGTH - len(ids))])))  # one shape; causal


@pytest.mark.sweep
def test_loglikelihood(lm, tokenizer, log_probs):
    pairs = [
        ("the cat", " sat"),
        ("the dog ", "sat on"),
        ("", "the"),
        ("the cat sat on the mat. " * 6, "the dog sat"),
        ("A", " cat is no dog"),
    ]
    best = int(np.argmax(log_probs(tokenizer.encode("the dog sat").ids)[len(tokenizer.encode("the dog sat").ids) - 1]))
    found = lm.loglikelihood([Instance(pair) for pair in pairs])
    for (context, continuation), (score, is_greedy) in zip(pairs, found, strict=True):
        whole = tokenizer.encode(context + continuation).ids if context else [0, *tokenizer.encode(continuation).ids]
        n = len(whole) - len(tokenizer.encode(context.rstrip()).ids) if context else len(whole) - 1
        text = whole[-LENGTH - 1 :]
        rows = log_probs(text[:-1])[len(text) - 1 - n : len(text) - 1]
        np.testing.assert_allclose(score, sum(row[id] for row, id in zip(rows, text[-n:], strict=True)), rtol=1e-4)
        assert is_greedy == all(row.argmax() == id for row, id in zip(rows, text[-n:], strict=True))
    assert len(whole) and not all(is_greedy for _, is_greedy in found)
    word = tokenizer.decode([best])
    if tokenizer.encode("the dog sat" + word).ids[-1] == best:  # the token that follows is greedy
        assert lm.loglikelihood([Instance(("the dog sat", word))])[0][1]


def test_padding_does_not_make_a_text_long(tokenizer):
    """LongRoPE has other frequencies for texts longer than 12 tokens; these are padded to more."""
    scaling = LongScaling((1.0, 1.0), (2.0, 4.0), 12, 1.1)
    config = Phi3Config(288, LENGTH, d_model=8, d_mlp=16, n_layers=1, n_heads=2, n_kv_heads=1, rope_scaling=scaling)
    model = random_model(Phi3, config)
    ids = tokenizer.encode("the cat sat").ids
    rows = jax.nn.log_softmax(eqx.filter_jit(model)(jnp.asarray(ids[:-1])))
    n = len(tokenizer.encode("the cat").ids)
    assert len(ids) < 12
    lm = HarnessLM(redeqx.Deployer(verbose=False), model, tokenizer)
    score = lm.loglikelihood([Instance(("the cat", " sat"))])[0][0]
    np.testing.assert_allclose(score, sum(rows[n - 1 + i, id] for i, id in enumerate(ids[n:])), rtol=1e-5)


def test_a_model_of_embeddings_is_refused(model, tokenizer):
    both_sides = random_model(Llama, dataclasses.replace(model.config, is_causal=False))
    with pytest.raises(ValueError, match="`model`: expected tokens that attend to those before them, got `is_causal`=False"):
        HarnessLM(redeqx.Deployer(verbose=False), both_sides, tokenizer)


def test_a_context_of_spaces_belongs_to_the_continuation(lm):
    spaces, whole = lm.loglikelihood([Instance(("\n", "the cat")), Instance(("", "\nthe cat"))])
    assert spaces == whole


def test_rolling_loglikelihood_counts_each_token_once(lm, tokenizer, log_probs):
    texts = ["the cat", TEXT[:160]]
    found = lm.loglikelihood_rolling([Instance((text,)) for text in texts])
    for text, score in zip(texts, found, strict=True):
        ids, expected, start = tokenizer.encode(text).ids, 0.0, 0
        while start < len(ids):
            end = min(start + LENGTH, len(ids))
            whole = [0, *ids][max(end - LENGTH, 0) : end + 1]  # as many tokens before the window as fit
            rows = log_probs(whole[:-1])[: len(whole) - 1][-(end - start) :]
            expected += sum(row[id] for row, id in zip(rows, ids[start:end], strict=True))
            start = end
        np.testing.assert_allclose(score, expected, rtol=1e-4)
    assert len(tokenizer.encode(texts[1]).ids) > LENGTH  # several windows


@pytest.mark.sweep
def test_generate_until(lm, model, tokenizer):
    contexts = ["the cat sat", "A log", "the dog sat on the"]
    options = {"until": ["\n"], "max_gen_toks": 6, "do_sample": False, "temperature": 0.0}
    other = {"until": "t", "max_gen_toks": 6}
    requests = [Instance((text, options)) for text in contexts] + [Instance((contexts[0], other))]
    found = lm.generate_until(requests)
    rows = [tokenizer.encode(text).ids for text in contexts]
    tokens = generate(model, rows, max_new_tokens=6, do_sample=False)
    texts = [tokenizer.decode([id for id in row.tolist() if id]).split("\n")[0] for row in tokens]
    assert found[:3] == texts
    assert found[3] == tokenizer.decode([id for id in tokens[0].tolist() if id]).split("t")[0]
    sampled = {"do_sample": True, "temperature": 0.9, "top_p": 0.9, "max_gen_toks": 6}
    assert isinstance(lm.generate_until([Instance((contexts[0], sampled))])[0], str)
    with pytest.raises(ValueError, match=r"`gen_kwargs`: expected no other options than those known, got num_beams\."):
        lm.generate_until([Instance((contexts[0], {"num_beams": 2}))])


def test_generate_until_needs_room_for_contexts(lm):
    with pytest.raises(ValueError, match=rf"`max_gen_toks`: expected 1 to {LENGTH - 1} tokens, .* got {LENGTH}\."):
        lm.generate_until([Instance(("A log", {"max_gen_toks": LENGTH}))])
    with pytest.warns(
        UserWarning, match="`max_gen_toks`: expected contexts of at most 2 tokens, .* got 1 of 2 that are longer"
    ):
        lm.generate_until([Instance((text, {"max_gen_toks": LENGTH - 2})) for text in ("A log is no mat", "A")])


def test_two_tokenizers_have_two_names_in_the_cache_of_the_harness(lm, model, tokenizer):
    other = Tokenizer.from_str(tokenizer.to_str())
    other.add_special_tokens(["<s>"])
    names = [HarnessLM(redeqx.Deployer(verbose=False), model, each).tokenizer_name for each in (tokenizer, other)]
    assert names[0] == lm.tokenizer_name != names[1]


def test_the_harness_takes_it(lm, model, tokenizer, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "lm_eval.api.model", None)
        with pytest.raises(ImportError, match="`harness_lm`: expected lm_eval, got no such package"):
            harness_lm(redeqx.Deployer(verbose=False), model, tokenizer)

    class LM(abc.ABC):
        """As `lm_eval.api.model.LM`: three abstract methods, and attributes that its own `__init__` sets."""

        def __init__(self):
            self._rank, self._world_size = 0, 1

        @abc.abstractmethod
        def loglikelihood(self, requests): ...

        @abc.abstractmethod
        def loglikelihood_rolling(self, requests): ...

        @abc.abstractmethod
        def generate_until(self, requests): ...

    stub = types.ModuleType("lm_eval.api.model")
    stub.LM = LM
    for name, module in {"lm_eval": types.ModuleType("lm_eval"), "lm_eval.api": types.ModuleType("lm_eval.api")}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", stub)
    render = lambda messages, prompts: f"{messages[0]['content']}{':' * prompts}"  # noqa: E731
    own = harness_lm(redeqx.Deployer(verbose=False), model, tokenizer, chat_template=render, max_length=8)
    assert isinstance(own, LM) and isinstance(own, HarnessLM) and own._rank == 0 and own.max_length == 8
    assert own.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=True) == "Hi:"
    with pytest.raises(ValueError, match="`chat_template`: expected a function for chats, got None"):
        lm.apply_chat_template([])
