"""Preference optimization and the reward model: their losses match the formulas, and both learn from a file of pairs."""

import dataclasses
import json

import equinox as eqx
import jax
import numpy as np
import pytest

import redeqx
from examples._chat import PolicyAndReference, load_chat_model
from examples._preferences import collate_pairs, encode_pair, make_pairs, pair_parts, read_pairs
from examples._questions import number_in
from examples.preference_optimization import main as dpo
from examples.reward_model import main as reward
from redeqx.dry_run import DryRunDone
from redeqx.models import from_pretrained
from tests.examples._folder import chat_folder
from tests.examples._run import run_example


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return chat_folder(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Pairs of which the sentence is always preferred."""
    rows = [
        {"prompt": pair.messages if i % 2 else pair.messages[0]["content"], "chosen": pair.chosen, "rejected": pair.rejected}
        for i, pair in enumerate(pair for pair in make_pairs("train", 900, 0) if pair.kind == "style")
    ]
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows[:200]), "utf-8")
    return path


@pytest.fixture(scope="module")
def encoded(folder):
    """Two models, a tokenizer and a batch of pairs."""
    model, _, chat = load_chat_model(folder)
    other = jax.tree.map(lambda x: 1.1 * x if eqx.is_inexact_array(x) else x, model)
    pairs = make_pairs("train", 4, 0)
    return model, other, chat, pairs, collate_pairs([encode_pair(chat, pair, 48) for pair in pairs])


@pytest.fixture(scope="module")
def by_hand(encoded):
    """The log-probabilities of the replies under both models, [2, pairs, 2]."""
    model, other, chat, pairs, _ = encoded
    run = eqx.filter_jit(lambda model, ids: jax.nn.log_softmax(model(ids)))

    def of_reply(model, pair, reply):
        prompt, ids = chat.prompt(pair.messages), chat.reply(pair.messages, reply)
        text = np.array([*prompt, *ids, *[0] * (48 - len(prompt) - len(ids))])
        return sum(run(model, text)[len(prompt) + i - 1, id] for i, id in enumerate(ids))

    replies = [[(pair, pair.chosen), (pair, pair.rejected)] for pair in pairs]
    return np.array([[[of_reply(m, *reply) for reply in both] for both in replies] for m in (model, other)])


@pytest.mark.sweep
def test_dpo_loss_and_its_gradient_in_the_policy_alone(encoded, by_hand):
    model, other, chat, pairs, batch = encoded
    trainable = PolicyAndReference(other, model).trainable
    found = eqx.filter_jit(dpo.loss_fn)(PolicyAndReference(other, model), batch, None, beta=0.3, nll_weight=0.5)
    rewards = 0.3 * (by_hand[1] - by_hand[0])
    margins = rewards[:, 0] - rewards[:, 1]
    lengths = [len(chat.reply(pair.messages, pair.chosen)) for pair in pairs]
    expected = np.log1p(np.exp(-margins)) - 0.5 * by_hand[1][:, 0] / lengths
    np.testing.assert_allclose(found.total, expected.sum(), rtol=1e-4)
    np.testing.assert_allclose(found.metrics["reward_margin"], margins.sum(), rtol=1e-3)
    np.testing.assert_allclose(found.metrics["reward_chosen"], rewards[:, 0].sum(), rtol=1e-3)
    assert found.metrics["reward_accuracy"] == (margins > 0).sum() and found.weight == 4
    assert jax.tree.leaves(trainable.policy) == [eqx.is_inexact_array(leaf) for leaf in jax.tree.leaves(model)]
    assert not any(jax.tree.leaves(trainable.reference))


def test_reward_is_read_from_the_last_token(encoded):
    model, _, chat, pairs, batch = encoded
    judge = reward.RewardModel(model, key=jax.random.key(1))
    found = np.asarray(eqx.filter_jit(reward.rewards)(judge, batch))
    hidden = eqx.filter_jit(model.hidden)
    for pair, ids, row in zip(pairs, batch["ids"], found, strict=True):
        for i, reply in enumerate((pair.chosen, pair.rejected)):
            n = len(chat.prompt(pair.messages)) + len(chat.reply(pair.messages, reply))
            assert ids[i][n - 1] in chat.ends
            np.testing.assert_allclose(row[i], judge.head.weight[0] @ hidden(ids[i])[n - 1], rtol=1e-4, atol=1e-5)
    loss = eqx.filter_jit(reward.loss_fn)(judge, batch, None)
    np.testing.assert_allclose(loss.total, np.log1p(np.exp(found[:, 1] - found[:, 0])).sum(), rtol=1e-4)
    assert loss.metrics["accuracy"] == (found[:, 0] > found[:, 1]).sum()
    assert reward.accuracies(pairs, found)["accuracy"] == np.mean(found[:, 0] > found[:, 1])


@pytest.mark.sweep
def test_dpo_prefers_the_chosen_replies_on_a_mesh(folder, data, tmp_path):
    flags = ("--data", data, "--pretrained", folder, "--n-epochs", 4, "--learning-rate", 1e-2, "--batch-size", 16)
    run = run_example("preference_optimization", *flags, "--eval-every-n-steps", 20, workdir=tmp_path)
    scores = run.metrics[-1]
    assert scores["test_reward_accuracy"] == 1 and scores["test_reward_margin"] > 0.5
    assert run.series("reward_accuracy")[0] == 0  # both are the same model
    assert "drift" not in run.output and (tmp_path / "rewards.png").read_bytes().startswith(b"\x89PNG")
    before, after = (from_pretrained(path)[0] for path in (folder, tmp_path / "model"))
    assert not np.array_equal(before.embedding.weight, after.embedding.weight)


@pytest.mark.sweep
def test_reward_model_learns_on_a_mesh(folder, data, tmp_path):
    flags = ("--data", data, "--pretrained", folder, "--n-epochs", 4, "--learning-rate", 1e-2, "--batch-size", 16)
    run = run_example("reward_model", *flags, "--eval-every-n-steps", 20, workdir=tmp_path)
    assert run.metrics[-1]["test_accuracy"] == 1
    assert (tmp_path / "accuracy.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.sweep
def test_reaches_the_dry_run(folder, data, tmp_path):
    with redeqx.described("cpu:8"), pytest.raises(DryRunDone) as done:
        dpo.main(dataclasses.replace(dpo.Args(), pretrained=folder, data=data, workdir=tmp_path / "run"))
    assert done.value.run.fits


def test_right_replies_are_preferred_and_sentences():
    pairs = make_pairs("test", 300, 0)
    for pair in pairs:
        if pair.kind == "style":
            assert pair.chosen.endswith(".") and pair.rejected == number_in(pair.chosen)
        else:
            assert number_in(pair.chosen) != number_in(pair.rejected)
            assert pair.chosen.endswith(".") and pair.rejected.endswith(".")
    assert 60 < sum(pair.kind == "style" for pair in pairs) < 140
    train, validation, test = pair_parts(None, 50, 20, 0)
    assert (len(train), len(validation), len(test)) == (50, 20, 20)


def test_pairs_of_a_file(data, encoded, tmp_path):
    train, validation, test = pair_parts(data, 1000, 5, 0)
    assert (len(train), len(validation), len(test)) == (180, 5, 5)
    assert train[0].messages[0]["role"] == "user"
    with pytest.raises(ValueError, match=r"`--seq-len`: expected at least \d+, for '.*', got 8\. "):
        encode_pair(encoded[2], train[0], 8)
    path = tmp_path / "bad.jsonl"
    path.write_text(data.read_text("utf-8").splitlines()[0] + '\n{"prompt": "a", "chosen": "b"}\n', "utf-8")
    with pytest.raises(ValueError, match=rf"`{path}` row 2: expected `prompt`, a text or messages, and the texts `chosen`"):
        read_pairs(path)
