"""GRPO: samples are on-policy on every mesh, the loss matches the formula, and rewards rise."""

import dataclasses
import json
from functools import partial

import equinox as eqx
import jax
import numpy as np
import pytest

import redeqx
from examples._chat import PolicyAndReference, load_chat_model, pad_left
from examples.grpo import main as grpo
from examples.grpo.problems import Problem, problem_parts, rewards_of
from redeqx.dry_run import DryRunDone
from tests.examples._folder import chat_folder
from tests.examples._run import run_example

GAP = 1e-4  # of log-probabilities with a cache and without one, in float32


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return chat_folder(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def loaded(folder):
    model, _, chat = load_chat_model(folder)
    return model, chat


PROBLEMS = [Problem([{"role": "user", "content": text}], "3") for text in ("What is 1 + 2?", "Say 3.")]


@pytest.fixture(scope="module")
def sampled(loaded):
    """Rows of sampled replies, three to each of two problems of different lengths."""
    model, chat = loaded
    prompts = pad_left([chat.prompt(problem.messages) for problem in PROBLEMS], 20)
    sample = eqx.filter_jit(partial(grpo.pred_fn, n=3, max_new_tokens=5))
    tokens, log_probs = sample(PolicyAndReference(model, model), prompts, jax.random.key(0))
    found = [*zip(np.asarray(tokens), np.asarray(log_probs), strict=True)]
    return grpo.collate_fn(grpo.experience(PROBLEMS, prompts, found, chat))


@pytest.mark.sweep
def test_training_computes_the_log_probabilities_of_sampling(loaded, sampled):
    model, _ = loaded
    new = eqx.filter_jit(jax.vmap(partial(grpo.log_probs, model)))(sampled["prompt"], sampled["tokens"], sampled["is_token"])
    assert sampled["is_token"].sum() > 6 and (sampled["log_probs"] < 0).any()
    np.testing.assert_allclose(new * sampled["is_token"], sampled["log_probs"], atol=GAP)
    # With the temperature of another distribution, or other weights, it would not be so.
    other = jax.tree.map(lambda x: 1.1 * x if eqx.is_inexact_array(x) else x, model)
    loss = eqx.filter_jit(partial(grpo.loss_fn, clip=0.2, kl_weight=0.0))
    gaps = [loss(PolicyAndReference(m, m), sampled, None).metrics["log_prob_gap"] for m in (model, other)]
    assert gaps[0][0] / gaps[0][1] < GAP and gaps[1][0] / gaps[1][1] > 100 * GAP


def test_loss_matches_the_formula(loaded, sampled):
    model, _ = loaded
    policy = jax.tree.map(lambda x: 1.05 * x if eqx.is_inexact_array(x) else x, model)
    batch = {**sampled, "advantage": np.array([1.0, -1, 0.5, 2, -0.5, -1], np.float32)}
    run = eqx.filter_jit(lambda m, ids, mask: jax.nn.log_softmax(m(ids, mask=mask)))
    expected, kls = 0.0, 0.0
    for i in range(6):
        row = jax.tree.map(lambda x, i=i: x[i], batch)
        ids = np.concatenate([row["prompt"]["ids"], row["tokens"]])
        mask = np.concatenate([row["prompt"]["mask"], row["is_token"]])
        new, old = (np.asarray(run(m, ids, mask)) for m in (policy, model))
        gains = []
        for t in range(int(row["is_token"].sum())):
            at, id = 19 + t, row["tokens"][t]
            ratio = np.exp(new[at, id] - row["log_probs"][t])
            gain = min(ratio * row["advantage"], np.clip(ratio, 0.8, 1.2) * row["advantage"])
            kl = np.exp(old[at, id] - new[at, id]) - (old[at, id] - new[at, id]) - 1
            gains.append(gain - 0.1 * kl)
            kls += kl
        expected -= np.mean(gains)
    found = eqx.filter_jit(partial(grpo.loss_fn, clip=0.2, kl_weight=0.1))(PolicyAndReference(policy, model), batch, None)
    np.testing.assert_allclose(found.total, expected, rtol=1e-3)
    np.testing.assert_allclose(found.metrics["kl"][0], kls, rtol=1e-3)
    assert found.weight == 6


def test_advantages_are_relative_to_the_group(loaded):
    _, chat = loaded
    replies = [chat.reply(PROBLEMS[0].messages, text) for text in ("3", "1 + 2 is 3.", "30", "three")]
    tokens = np.stack([np.pad(ids, (0, 12 - len(ids)), constant_values=5) for ids in replies])
    prompts = pad_left([chat.prompt(PROBLEMS[0].messages)], 20)
    rows = grpo.experience(PROBLEMS[:1], prompts, [(tokens, np.ones((4, 12), np.float32))], chat)
    assert [row["reward"] for row in rows] == [1, 1, 0.5, 0.5]
    np.testing.assert_allclose([row["advantage"] for row in rows], [1, 1, -1, -1], rtol=1e-3)
    assert [row["is_token"].sum() for row in rows] == [len(ids) for ids in replies]
    assert all(not row["tokens"][len(ids) :].any() for row, ids in zip(rows, replies, strict=True))
    same = grpo.experience(PROBLEMS[:1], prompts, [(tokens[[0, 0]], np.ones((2, 12), np.float32))], chat)
    assert [row["advantage"] for row in same] == [0, 0]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Problems with one answer: a reply is rewarded if the digit 7 is its last number."""
    path = tmp_path_factory.mktemp("problems") / "problems.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"Question {i}", "answer": 7}) + "\n" for i in range(40)), "utf-8")
    return path


@pytest.mark.sweep
def test_rewards_rise_on_a_mesh_and_samples_are_on_policy(folder, data, tmp_path):
    flags = ("--data", data, "--pretrained", folder, "--learning-rate", 2e-2, "--n-prompts", 8, "--max-new-tokens", 4)
    run = run_example("grpo", *flags, "--n-steps", 30, "--save-every-n-steps", 10, workdir=tmp_path)
    rewards, scores = run.series("reward"), run.metrics[-1]
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.1
    assert scores["test_reward"] > scores["test_base_reward"] and scores["test_log_prob_gap"] < GAP
    assert run.output.count("compiling train step") == 1 and (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.sweep
def test_reaches_the_dry_run(folder, data, tmp_path):
    args = grpo.Args(pretrained=folder, data=data, workdir=tmp_path / "run", n_prompts=8)
    with redeqx.described("cpu:8"), pytest.raises(DryRunDone) as done:
        grpo.main(dataclasses.replace(args, max_new_tokens=4))
    assert done.value.run.fits and not (tmp_path / "run").exists()


def test_problems_and_their_rewards(data, tmp_path):
    assert rewards_of(PROBLEMS[0], ["3", "1 + 2 is 3.", "3 or 4", "-3", ""]).tolist() == [1, 1, 0.5, 0.5, 0.5]
    (problem, *_), _ = problem_parts(None, 1, 1, 0)
    right = problem.answer
    replies = [f"It is {right}.", right, f"It is {right}", "It is 5.", "It is five."]
    assert rewards_of(problem, replies).tolist() == [1, 0.5, 0.5, 0.5, 0]
    train, test = problem_parts(data, 1000, 10, 0)
    assert (len(train), len(test)) == (38, 2) and train[0].answer == "7"
    train, test = problem_parts(None, 30, 10, 0)
    assert (len(train), len(test)) == (30, 10) and not {str(p.messages) for p in train} & {str(p.messages) for p in test}
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "a", "answer": "b"}\n{"prompt": "a"}\n', "utf-8")
    with pytest.raises(ValueError, match=rf"`{path}` row 2: expected `prompt`, a text or messages, and `answer`"):
        problem_parts(path, 1, 1, 0)
