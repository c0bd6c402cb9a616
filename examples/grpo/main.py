"""Reinforcement learning with a reward that can be checked: GRPO (Shao et al. 2024, arXiv:2402.03300).

    python -m examples.grpo

By default a chat model is tuned on questions about numbers, as in `examples.instruction_tuning`, once for each workdir. Then
each step samples several replies to each of some questions with the model as it is, and makes those more likely whose reward
is larger than that of the others to the same question. One half of a reward is for the right number, the other for a
sentence. No one shows the model a right reply: it must find some by itself.

Samples are on-policy: the training step computes the log-probabilities of the sampled tokens again, all at once instead of
token by token with a cache, and `log_prob_gap` is the mean difference to those of sampling, about 3e-7. A larger one means
that the policy which is trained is not the one that has sampled.

Your own: `--data FILE.jsonl`, where each line is an object with `prompt` (a text, or a list of messages) and `answer`, with
which the last number of a reply is compared; `--pretrained FOLDER` is a decoder for chats with its tokenizer.

2 CPU cores, with much other work, 4 minutes after the base: the mean reward of sampled replies to held-out questions rises
from 0.702 to 0.956, and the share of right ones from 87.6 to 91.8 %. The largest gap is 1.6e-7.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import redeqx
from examples._chat import Chat, PolicyAndReference, load_chat_model, pad_left, save_chat_model
from examples._cli import Flags
from examples._records import curve, draw_curves
from examples.grpo.problems import Problem, is_right, problem_parts, rewards_of
from examples.instruction_tuning.main import base_folder
from redeqx.models import generate


@dataclass(frozen=True)
class Args(Flags):
    data: Path | None = None  # A .jsonl of problems with answers. Questions about numbers by default.
    pretrained: Path | None = None  # A Hugging Face folder of a decoder for chats. One that is tuned here by default.
    workdir: Path = Path("workdir/grpo")  # For metrics, checkpoints, the models and the picture. A run resumes from it.
    n_train: int = 5_000  # Maximum number of problems for training.
    n_test: int = 500  # Maximum number of problems for the test.
    n_steps: int = 100  # Updates, each on new samples.
    n_prompts: int = 32  # Problems of one update.
    group_size: int = 8  # Samples of each problem.
    max_new_tokens: int = 14  # Maximum number of tokens of a reply.
    clip: float = 0.2  # Relative change of a token's probability beyond which the objective is constant.
    kl_weight: float = 0.01  # Weight of the divergence from the model before.
    learning_rate: float = 3e-4  # It decays to 0.
    n_base_epochs: int = 3  # Epochs of the model's tuning on conversations.
    save_every_n_steps: int = 25


def log_probs(model: Any, prompt: dict[str, jax.Array], tokens: jax.Array, is_token: jax.Array) -> jax.Array:
    """Returns the log-probability of each token of a reply, [new], after a prompt that is padded on the left."""
    ids, mask = jnp.concatenate([prompt["ids"], tokens]), jnp.concatenate([prompt["mask"], is_token])
    hidden = model.hidden(ids, mask=mask)[len(prompt["ids"]) - 1 : -1]
    every = jax.nn.log_softmax(model.logits(hidden).astype(jnp.float32))
    return jnp.take_along_axis(every, tokens[:, None], axis=1)[:, 0]


def loss_fn(
    model: PolicyAndReference, batch: dict[str, Any], key: jax.Array, *, clip: float, kl_weight: float
) -> redeqx.Loss:
    """Returns the loss of GRPO (equation 3): each reply counts the same, and its tokens share its advantage."""
    weights = batch["is_token"].astype(jnp.float32)
    new = jax.vmap(partial(log_probs, model.policy))(batch["prompt"], batch["tokens"], batch["is_token"])
    ratios, advantages = jnp.exp(new - batch["log_probs"]), batch["advantage"][:, None]
    gains = jnp.minimum(ratios * advantages, jnp.clip(ratios, 1 - clip, 1 + clip) * advantages)
    metrics: dict[str, Any] = {"reward": jnp.sum(batch["reward"]), "tokens": jnp.sum(weights)}
    metrics["log_prob_gap"] = (jnp.sum(jnp.abs(new - batch["log_probs"]) * weights), jnp.sum(weights))
    if kl_weight:
        old = jax.vmap(partial(log_probs, model.reference))(batch["prompt"], batch["tokens"], batch["is_token"])
        kl = jnp.exp(old - new) - (old - new) - 1  # equation 4
        metrics["kl"] = (jnp.sum(kl * weights), jnp.sum(weights))
        gains -= kl_weight * kl
    lengths = jnp.maximum(jnp.sum(weights, axis=1), 1)
    return redeqx.Loss(-jnp.sum(gains * weights / lengths[:, None]), len(weights), metrics)


def pred_fn(
    model: PolicyAndReference, batch: dict[str, jax.Array], key: jax.Array, *, n: int, max_new_tokens: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the tokens of `n` sampled replies to each prompt, and their log-probabilities, both [batch, n, new]."""
    found = generate(
        model.policy, batch["ids"], mask=batch["mask"], max_new_tokens=max_new_tokens, do_sample=True,
        num_return_sequences=n, output_scores=True, key=key,
    )  # fmt: skip
    assert isinstance(found.tokens, jax.Array) and isinstance(found.log_probs, jax.Array)
    return found.tokens, found.log_probs


def collate_fn(rows: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *rows)


def until_end(tokens: np.ndarray, ends: tuple[int, ...]) -> np.ndarray:
    """Returns which tokens belong to the reply: all up to the first end, which is included."""
    return np.cumsum(np.isin(tokens, ends), axis=-1) - np.isin(tokens, ends) == 0


def experience(problems: list[Problem], prompts: dict[str, np.ndarray], sampled: list[Any], chat: Chat) -> list[Any]:
    """Returns a row for each sampled reply, with its reward, and its advantage over the other replies to its problem."""
    rows = []
    for i, (problem, (tokens, found)) in enumerate(zip(problems, sampled, strict=True)):
        rewards = rewards_of(problem, [chat.decode(ids) for ids in tokens])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        prompt = {name: array[i] for name, array in prompts.items()}
        for reply, chances, reward, advantage in zip(tokens, found, rewards, advantages, strict=True):
            is_token = until_end(reply, chat.ends)
            arrays = {"tokens": reply * is_token, "is_token": is_token, "log_probs": chances * is_token}
            rows.append({"prompt": prompt, **arrays, "reward": np.float32(reward), "advantage": np.float32(advantage)})
    return rows


def main(args: Args) -> dict[str, float]:
    """Trains and tests. Returns the mean reward of sampled replies, before and after, and the largest gap."""
    args.check_positive("n_prompts", "group_size", "max_new_tokens", "save_every_n_steps")
    deployer = redeqx.Deployer(args.seed, args.n_model_shards, args.n_fsdp_shards, workdir=args.workdir)
    policy, config, chat = load_chat_model(base_folder(args, n_epochs=args.n_base_epochs), deployer)
    train, test = problem_parts(args.data, args.n_train, args.n_test, args.seed)
    model = PolicyAndReference(policy, policy)
    lr = optax.linear_schedule(args.learning_rate, 0.0, args.n_steps)
    trainer = redeqx.Trainer(
        deployer, model=model, trainable=model.trainable, collate_fn=collate_fn,
        loss_fn=partial(loss_fn, clip=args.clip, kl_weight=args.kl_weight),
        optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adam(lr)), lr_schedule_fn=lr,
    )  # fmt: skip
    width = max(len(chat.prompt(problem.messages)) for problem in [*train, *test])

    def collate_prompts(problems: list[Problem]) -> dict[str, np.ndarray]:
        return pad_left([chat.prompt(problem.messages) for problem in problems], width)

    sample = partial(pred_fn, max_new_tokens=args.max_new_tokens)
    player = trainer.get_default_predictor(partial(sample, n=args.group_size), collate_fn=collate_prompts)
    tester = trainer.get_default_predictor(partial(sample, n=1), collate_fn=collate_prompts)

    def score() -> dict[str, float]:
        replies = [chat.decode(tokens[0]) for tokens, _ in tester.predict(test, batch_size=128)]
        both = [*zip(test, replies, strict=True)]
        rewards = [rewards_of(problem, [reply])[0] for problem, reply in both]
        return {"reward": float(np.mean(rewards)), "right": float(np.mean([is_right(*pair) for pair in both]))}

    before = score()
    first = trainer.resume()
    with deployer.progress(title="grpo", n_steps=args.n_steps, first_step=first) as progress:
        for step in range(first, args.n_steps):
            chosen = np.random.default_rng((args.seed, step)).choice(len(train), args.n_prompts, replace=False)
            problems = [train[i] for i in chosen]
            key = jax.random.fold_in(jax.random.key(args.seed), step)
            sampled = player.predict(problems, batch_size=args.n_prompts, key=key)
            rows = experience(problems, collate_prompts(problems), sampled, chat)
            metrics = trainer.update(rows)
            progress.update(step + 1, metrics=metrics, n_examples=len(rows))
            if (step + 1) % args.save_every_n_steps == 0 or step + 1 == args.n_steps:
                trainer.save_ckpt()
    after, saved = score(), save_chat_model(trainer.model.policy, config, chat, args.workdir / "model")
    draw_curves(
        args.workdir / "reward.png", {"training": curve(args.workdir, "reward")}, {"test": after["reward"]},
        xlabel="step", ylabel="reward",
    )  # fmt: skip
    gap = max(curve(args.workdir, "log_prob_gap")[1])
    lines = [f"{name}: {value:.1%} before, {after[name]:.1%} after" for name, value in before.items()]
    lines += [f"largest gap of log-probabilities {gap:.1e}", str(args.workdir / "reward.png"), str(saved)]
    deployer.log_info("\n".join(lines), title=f"sampled replies to {len(test)} test problems")
    scores = {f"test_{name}": value for name, value in after.items()}
    scores |= {f"test_base_{name}": value for name, value in before.items()} | {"test_log_prob_gap": gap}
    deployer.log_metrics(scores, trainer.step)
    return scores
