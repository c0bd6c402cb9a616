"""`generate`: equals transformers' searches, samples from the right distribution, and is the same on every mesh."""

import itertools
import json
import re
from types import SimpleNamespace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import redeqx
from redeqx.models import from_pretrained, generate
from redeqx.models.gpt2 import GPT2, GPT2Config
from redeqx.models.nn import Cache
from redeqx.models.t5 import T5, T5Config
from tests.models.families import _generation
from tests.models.families._case import fill, random_model, read_golden

VOCAB = 24
CONFIG = GPT2Config(VOCAB, 16, d_model=16, n_layers=2, n_heads=4, init_std=0.4, eos_token_id=None).without_dropout()


def plain(path, leaf):
    """Biases are zero and norms one, as in a new model, so that texts are not one token again and again."""
    name = jax.tree_util.keystr(path)
    return jnp.zeros_like(leaf) if name.endswith("bias") else jnp.ones_like(leaf) if "norm" in name else leaf


MODEL = jax.tree_util.tree_map_with_path(plain, random_model(GPT2, CONFIG, std=0.4))
IDS = np.random.default_rng(0).integers(0, VOCAB, (3, 5))
LEFT = np.arange(5) >= np.array([[0], [2], [4]])


@pytest.fixture(scope="module")
def golden(request, tmp_path_factory):
    """A case, its model with the weights of `fill`, and the stored tokens of transformers."""
    case = _generation.CASES[request.param]
    folder, record = tmp_path_factory.mktemp(case.name), read_golden(case)
    (folder / "config.json").write_text(json.dumps(record["config"]))
    fill(folder / record["file"], record["tensors"])
    return case, from_pretrained(folder)[0], _generation.read_golden(case.name)


# Every search, with one of three families; the first ones in the quick tests. The parity tests compare all families.
QUICK = [("gpt2-padded", "beams-penalties"), ("mistral", "greedy-penalties"), ("t5-padded", "beams-source")]
FAMILIES = ("gpt2-padded", "t5-padded", "mistral")
SWEPT = [
    pytest.param(family, search, marks=pytest.mark.sweep)
    for family, search in sorted({(FAMILIES[i % 3], search) for i, search in enumerate(_generation.SEARCHES)} - {*QUICK})
]


@pytest.mark.sweep
@pytest.mark.parametrize(("golden", "search"), [*QUICK, *SWEPT], indirect=["golden"], scope="module")
def test_generates_the_tokens_of_transformers(search, golden):
    case, model, expected = golden
    np.testing.assert_array_equal(_generation.ours(model, case, search), expected[search])


def greedy_by_hand(ids, mask, n):
    """Greedy decoding without a cache: calls the model on the whole text for every token."""
    call = jax.jit(jax.vmap(lambda ids, mask: MODEL(ids, mask=mask)))
    tokens, real = np.zeros((len(ids), 0), int), mask
    text = ids
    for _ in range(n):
        token = np.argmax(call(text, real)[:, -1], -1)[:, None]
        text, real = np.concatenate([text, token], 1), np.concatenate([real, np.ones_like(token, bool)], 1)
        tokens = np.concatenate([tokens, token], 1)
    return tokens


@pytest.mark.sweep
def test_greedy_equals_calls_without_a_cache():
    expected = greedy_by_hand(IDS, LEFT, 6)
    np.testing.assert_array_equal(generate(MODEL, IDS, mask=LEFT, max_new_tokens=6), expected)
    alone = generate(MODEL, IDS[1:2, 2:], max_new_tokens=6)  # padding changes nothing
    np.testing.assert_array_equal(alone, expected[1:2])


@pytest.mark.sweep
def test_rows_are_padded_after_the_end_and_may_all_end_early():
    free = np.asarray(generate(MODEL, IDS, max_new_tokens=6))
    eos = tuple({int(row[i]) for row, i in zip(free, (1, 3, 2), strict=True)})
    found = generate(MODEL, IDS, max_new_tokens=6, eos_token_id=eos, pad_token_id=VOCAB - 1)
    for row, wanted in zip(np.asarray(found), free, strict=True):
        end = min(i for i, token in enumerate(wanted) if token in eos)
        np.testing.assert_array_equal(row[: end + 1], wanted[: end + 1])
        assert np.all(row[end + 1 :] == VOCAB - 1)
    # Without a padding token, the end token is used.
    assert generate(MODEL, IDS, max_new_tokens=6, eos_token_id=eos)[0, -1] in (eos[0], free[0, -1])


def best_sequences(ids, n_new, length_penalty):
    """Returns all sequences of `n_new` tokens, sorted by their log-probability over `n_new ** length_penalty`."""
    texts = np.array([[*ids, *tail] for tail in itertools.product(range(VOCAB), repeat=n_new)])
    log_probs = jax.nn.log_softmax(jax.jit(jax.vmap(lambda ids: MODEL(ids)))(texts))
    steps = [log_probs[np.arange(len(texts)), len(ids) - 1 + i, texts[:, len(ids) + i]] for i in range(n_new)]
    scores = np.sum(steps, 0) / n_new**length_penalty
    return texts[np.argsort(-scores), len(ids) :]


@pytest.mark.sweep
def test_a_wide_beam_search_finds_the_best_sequences():
    best = best_sequences(IDS[0], 2, 1.0)
    found = generate(MODEL, IDS[:1], max_new_tokens=2, num_beams=VOCAB, num_return_sequences=5)
    np.testing.assert_array_equal(found[0], best[:5])


class Table(eqx.Module):
    """A model whose next token depends only on its position."""

    log_probs: jax.Array  # [places, vocab]

    def init_cache(self, length):
        return Cache.empty(1, length, 1, 1, jnp.float32)

    def decode(self, ids, cache, *, mask=None):
        return self.log_probs[cache.index + len(ids) - 1], cache.end(len(ids))


TABLE = Table(jnp.asarray(np.random.default_rng(1).normal(size=(16, VOCAB)), jnp.float32))


class Chain(Table):
    """A model whose next token is the one after the last, modulo 4."""

    def decode(self, ids, cache, *, mask=None):
        return -jnp.abs(jnp.arange(4.0) - (ids[-1] + 1) % 4), cache.end(len(ids))


def test_each_row_is_padded_after_its_own_end():
    found = generate(Chain(jnp.zeros(())), np.array([[0], [2], [1]]), max_new_tokens=5, eos_token_id=3, pad_token_id=9)
    assert found.tolist() == [[1, 2, 3, 9, 9], [3, 9, 9, 9, 9], [2, 3, 9, 9, 9]]


@pytest.mark.sweep
def test_beams_continue_with_the_cache_of_the_beam_that_they_extend():
    """With as many beams as texts without their last token, the search is exhaustive."""
    config = GPT2Config(4, 8, d_model=8, n_layers=1, n_heads=2, init_std=1.0, eos_token_id=None).without_dropout()
    model = random_model(GPT2, config, std=1.0)
    texts = np.array([[1, 2, *tail] for tail in itertools.product(range(4), repeat=3)])
    log_probs = np.asarray(jax.nn.log_softmax(jax.jit(jax.vmap(lambda ids: model(ids)))(texts)))
    scores = sum(log_probs[np.arange(64), 1 + i, texts[:, 2 + i]] for i in range(3))
    found = generate(model, texts[:1, :2], max_new_tokens=3, num_beams=16, num_return_sequences=8)
    np.testing.assert_array_equal(found[0], texts[np.argsort(-scores), 2:][:8])


def test_the_text_may_end_right_after_the_minimum():
    """As in transformers, the minimum counts tokens without the end."""
    p = np.tile([0.7, 0.2, 0.1], (6, 1))
    given: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 3, "eos_token_id": 0, "pad_token_id": 2}
    found = generate(Table(jnp.log(jnp.asarray(p, jnp.float32))), np.ones((1, 1), int), **given)
    assert found.tolist() == [[1, 1, 1, 0, 2, 2]]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"temperature": 0.5}, np.square([0.5, 0.3, 0.15, 0.05])),
        ({"top_k": 2}, [0.5, 0.3, 0, 0]),
        ({"top_p": 0.85, "temperature": 2.0}, np.sqrt([0.5, 0.3, 0.15, 0])),  # 0.38, 0.29, 0.21 and 0.12 before the cut
    ],
)
def test_samples_of_a_known_distribution(options, expected):
    model = Table(jnp.log(jnp.asarray([[0.5, 0.3, 0.15, 0.05]])))
    found = generate(model, np.ones((4000, 1), int), max_new_tokens=1, do_sample=True, key=jax.random.key(0), **options)
    share = np.bincount(np.asarray(found)[:, 0], minlength=4) / 4000
    np.testing.assert_allclose(share, expected / np.sum(expected), atol=0.03)
    assert np.all(share[np.equal(expected, 0)] == 0)


@pytest.mark.parametrize("num_beams", [1, 2])
def test_forced_tokens_replace_the_first_and_the_last(num_beams):
    """The first only if the prompt is a single token, as in transformers."""

    class Forced(Table):
        config = SimpleNamespace(forced_bos_token_id=1, forced_eos_token_id=2)

    p = np.tile([0.7, 0.1, 0.1, 0.1], (8, 1))
    model, options = Forced(jnp.log(jnp.asarray(p, jnp.float32))), {"max_new_tokens": 4, "num_beams": num_beams}
    assert generate(model, np.ones((1, 1), int), **options).tolist() == [[1, 0, 0, 2]]
    assert generate(model, np.ones((2, 3), int), **options).tolist() == [[0, 0, 0, 2]] * 2
    assert generate(model, np.ones((1, 1), int), **{**options, "max_new_tokens": 1}).tolist() == [[2]]


def test_early_stopping_never_continues_while_a_longer_text_can_win():
    """The end is likely after two tokens and unlikely later: a text that continues after the second wins by its length."""
    p = np.array([[0.4, 0.35, 0.25], [0.9, 0.06, 0.04], *[[0.01, 0.98, 0.01]] * 6])
    (n_new, vocab), eos = p.shape, 0
    texts = np.array(list(itertools.product(range(vocab), repeat=n_new)))
    ends = texts == eos
    lengths = np.where(ends.any(1), ends.argmax(1) + 1, n_new)
    log_probs = np.where(np.arange(n_new) < lengths[:, None], np.log(p)[np.arange(n_new), texts], 0).sum(1)
    scores = log_probs / lengths
    best = texts[scores.argmax()][: lengths[scores.argmax()]]

    def found(early_stopping):
        tokens = generate(
            Table(jnp.log(jnp.asarray(p, jnp.float32))),
            np.ones((1, 1), int),
            max_new_tokens=n_new,
            num_beams=2,
            early_stopping=early_stopping,
            eos_token_id=eos,
            pad_token_id=eos,
        )
        return tokens[0].tolist()

    assert found(False) == [1, *[eos] * (n_new - 1)]  # no running text has a better score so far than the finished ones
    assert found("never") == [*best, *[eos] * (n_new - len(best))]


# --- sampling --------------------------------------------------------------------------------------------------------


def frequencies(n=4000, **options):
    prompt = np.repeat(IDS[:1], n, 0)
    token = generate(MODEL, prompt, max_new_tokens=1, do_sample=True, key=jax.random.key(1), **options)[:, 0]
    return np.bincount(token, minlength=VOCAB) / n


def probabilities(temperature=1.0):
    return np.asarray(jax.nn.softmax(MODEL(jnp.asarray(IDS[0]))[-1] / temperature))


def assert_drawn_from(found, expected, n=4000):
    assert np.all(found[expected == 0] == 0)
    assert np.all(np.abs(found - expected) < 5 * np.sqrt(expected * (1 - expected) / n) + 1e-9)


@pytest.mark.parametrize("temperature", [0.5, *(pytest.param(t, marks=pytest.mark.sweep) for t in (1.0, 3.0))])
@pytest.mark.sweep
def test_samples_have_the_models_distribution(temperature):
    assert_drawn_from(frequencies(temperature=temperature), probabilities(temperature))


@pytest.mark.sweep
def test_top_k_keeps_the_most_likely_tokens():
    p = probabilities()
    kept = np.where(p >= np.sort(p)[-4], p, 0)
    assert_drawn_from(frequencies(top_k=4), kept / kept.sum())


@pytest.mark.parametrize("top_p", [0.01, 0.9])
@pytest.mark.sweep
def test_top_p_keeps_the_smallest_sufficient_set(top_p):
    p = probabilities()
    order = np.argsort(-p)
    n_kept = 1 + np.sum(np.cumsum(p[order]) < top_p)
    kept = np.zeros_like(p)
    kept[order[:n_kept]] = p[order[:n_kept]]
    assert_drawn_from(frequencies(top_p=top_p), kept / kept.sum())


def test_samples_depend_on_the_key_and_differ_within_one_prompt():
    draw = lambda seed, n: np.asarray(  # noqa: E731
        generate(TABLE, IDS, mask=LEFT, max_new_tokens=6, do_sample=True, num_return_sequences=n, key=jax.random.key(seed))
    )
    a, same, b = draw(0, 4), draw(0, 4), draw(1, 4)
    assert a.shape == (3, 4, 6)
    np.testing.assert_array_equal(a, same)
    assert not np.array_equal(a, b)
    assert all(len({tuple(sample) for sample in row}) > 1 for row in a)


def test_each_token_is_drawn_independently():
    """In a model with uniform probabilities, the next token does not depend on the previous one."""
    flat = Table(jnp.zeros((16, VOCAB)))
    prompt, n_new = np.repeat(IDS[:1], 100, 0), 8
    texts = np.asarray(
        generate(flat, prompt, max_new_tokens=n_new, do_sample=True, num_return_sequences=2, key=jax.random.key(2))
    )
    assert_drawn_from(np.bincount(texts.reshape(-1), minlength=VOCAB) / texts.size, np.full(VOCAB, 1 / VOCAB), texts.size)
    # Two independent draws are equal with probability 1 / VOCAB: for any two positions, samples or prompts.
    pairs = [(texts[..., i], texts[..., j]) for i, j in itertools.combinations(range(n_new), 2)]
    pairs += [(texts[:, 0], texts[:, 1]), (texts[:-1], texts[1:])]
    for one, other in pairs:
        share, bound = np.mean(one == other), 5 * np.sqrt(1 / VOCAB / one.size)
        assert abs(share - 1 / VOCAB) < bound


# --- on meshes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n_model", "n_fsdp"), [(2, 2), *(pytest.param(*mesh, marks=pytest.mark.sweep) for mesh in ((4, 1), (1, 8)))]
)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="greedy", marks=pytest.mark.sweep),
        pytest.param({"num_beams": 3, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2}, id="beams"),
        pytest.param({"do_sample": True, "top_p": 0.9, "key": jax.random.key(0)}, id="sample", marks=pytest.mark.sweep),
    ],
)
def test_tokens_are_the_same_in_pred_fn_on_a_mesh(n_model, n_fsdp, options):
    ids, mask = np.tile(IDS, (3, 1))[:8], np.tile(LEFT, (3, 1))[:8]
    expected = generate(MODEL, ids, mask=mask, max_new_tokens=4, **options)
    predictor = redeqx.Predictor(
        redeqx.Deployer(0, n_model, n_fsdp, verbose=False),
        model=MODEL,
        collate_fn=lambda rows: {"ids": np.stack([i for i, _ in rows]), "mask": np.stack([m for _, m in rows])},
        pred_fn=lambda model, batch, key: generate(model, batch["ids"], mask=batch["mask"], max_new_tokens=4, **options),
    )
    found = np.stack(predictor.predict(list(zip(ids, mask, strict=True)), batch_size=8))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.sweep
def test_samples_do_not_depend_on_the_batch_size():
    def pred_fn(model, batch, key):
        return generate(model, batch, max_new_tokens=6, do_sample=True, eos_token_id=2, key=key)

    ids, key = np.tile(IDS, (3, 1))[:5], jax.random.key(0)
    deployer = redeqx.Deployer(0, 2, 2, verbose=False)
    predictor = redeqx.Predictor(deployer, model=MODEL, collate_fn=np.stack, pred_fn=pred_fn)
    for batch_size in (2, 5):
        found = predictor.predict(list(ids), batch_size=batch_size, key=key)
        np.testing.assert_array_equal(found, pred_fn(MODEL, ids, key))


def test_each_shape_is_compiled_once():
    count = 0

    class Counting(Table):
        def decode(self, ids, cache, *, mask=None):
            nonlocal count
            count += 1
            return super().decode(ids, cache, mask=mask)

    model = Counting(TABLE.log_probs)
    generate(model, IDS, max_new_tokens=6)
    traced = count
    generate(model, IDS[::-1].copy(), max_new_tokens=6)
    generate(jax.tree.map(lambda x: 2 * x if eqx.is_array(x) else x, model), IDS, max_new_tokens=6)
    assert count == traced


@pytest.mark.sweep
def test_dropout_is_turned_off():
    config = GPT2Config(VOCAB, 16, d_model=16, n_layers=2, n_heads=4, init_std=0.4, eos_token_id=None)
    noisy = jax.tree_util.tree_map_with_path(plain, random_model(GPT2, config, std=0.4))  # the weights of `MODEL`
    np.testing.assert_array_equal(generate(noisy, IDS, max_new_tokens=3), generate(MODEL, IDS, max_new_tokens=3))


@pytest.mark.sweep
def test_generates_up_to_the_last_position():
    found = generate(MODEL, IDS, max_new_tokens=11)  # 5 + 11 = 16, the number of positions
    np.testing.assert_array_equal(found, greedy_by_hand(IDS, np.ones_like(IDS, bool), 11))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 13}, r"`max_new_tokens`: expected at most 12 after 5 given ones, .*`n_positions`=16, got 13"),
        ({"max_new_tokens": 0}, r"`max_new_tokens`: expected at least 1, got 0"),
        ({"num_beams": 0}, r"`num_beams`: expected at least 1, got 0\. Pass a positive number"),
        ({"num_return_sequences": 0}, r"`num_return_sequences`: expected at least 1, got 0"),
        (
            {"num_beams": 2, "num_return_sequences": 3},
            r"`num_return_sequences`: expected at most `num_beams`=2, got 3\. Raise `num_beams`",
        ),
        ({"min_new_tokens": 5}, r"`min_new_tokens`: expected 0 to `max_new_tokens`=4, got 5"),
        ({"early_stopping": "often"}, r"`early_stopping`: expected True, False or 'never', got 'often'"),
        ({"temperature": 0.5}, r"`temperature`: expected 1\.0 without sampling, got 0\.5\. Pass `do_sample=True`"),
        ({"top_k": 3}, r"`top_k`: expected None without sampling, got 3"),
        ({"do_sample": True}, r"`key`: expected a key to sample with, got None"),
        (
            {"do_sample": True, "key": 0, "temperature": 0.0},
            r"`temperature`: expected more than 0, got 0\.0\. Pass `do_sample=False`",
        ),
        ({"do_sample": True, "key": 0, "temperature": float("nan")}, r"`temperature`: expected more than 0, got nan\."),
        ({"num_beams": 2, "length_penalty": float("nan")}, r"`length_penalty`: expected a finite number, got nan\."),
        ({"do_sample": True, "key": 0, "top_k": 0}, r"`top_k`: expected at least 1, got 0"),
        ({"do_sample": True, "key": 0, "top_p": 1.5}, r"`top_p`: expected a share in \(0, 1\], got 1\.5"),
        (
            {"mask": LEFT[:, ::-1]},
            r"`mask`: expected a token at the end of each prompt, got padding there in row 1\. Pad .* left",
        ),
        ({"mask": LEFT[:, 1:]}, r"`mask`: expected the shape of `inputs`, \(3, 5\), got \(3, 4\)"),
    ],
)
def test_bad_arguments(options, message):
    if "key" in options:
        options = {**options, "key": jax.random.key(0)}
    with pytest.raises(ValueError, match=message):
        generate(MODEL, IDS, **{"max_new_tokens": 4, **options})


def test_bad_prompts_and_models():
    with pytest.raises(ValueError, match=r"`inputs`: expected token ids of shape \(batch, prompt\), got int32 \(3,\)"):
        generate(MODEL, jnp.zeros(3, jnp.int32), max_new_tokens=1)
    t5 = eqx.filter_eval_shape(T5, T5Config(8, 4, 2, 4, 1, 1, 2), key=jax.random.key(0))
    for model, what in ((MODEL, "token ids"), (t5, "a batch of inputs of the encoder")):
        for shape in ((0, 3), (2, 0), (3,)):
            message = rf"`inputs`: expected {what}.*, got int32 {re.escape(str(shape))}\. Pass at least one row"
            with pytest.raises(ValueError, match=message):
                generate(model, jnp.zeros(shape, jnp.int32), max_new_tokens=1)
    with pytest.raises(TypeError, match=r"`model`: expected one with `init_cache` and `decode`, got MLP"):
        generate(eqx.nn.MLP(2, 2, 2, 1, key=jax.random.key(0)), IDS, max_new_tokens=1)
