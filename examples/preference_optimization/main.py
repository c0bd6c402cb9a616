"""Preference optimization: DPO (Rafailov et al. 2023, arXiv:2305.18290) with a frozen reference model.

    python -m examples.preference_optimization

By default a chat model is tuned on questions about numbers, as in `examples.instruction_tuning`, once for each workdir. It
replies with numbers as often as with sentences. Then it learns from pairs of replies that sentences are preferred to
numbers, and right answers to wrong ones. No reward is given and nothing is generated during training: the loss compares how
likely the policy and the reference find both replies.

Your own: `--data FILE.jsonl`, where each line is an object with `prompt` (a text, or a list of messages), `chosen` and
`rejected`; `--pretrained FOLDER` is a decoder for chats with its tokenizer.

2 CPU cores, with much other work, 5 minutes after the base: the share of sampled replies that are the preferred ones rises
from 47.5 to 90.5 %, that of right answers from 84.4 to 85.6 %, and 96 % of held-out pairs have their rewards in order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import redeqx
from examples._chat import PolicyAndReference, load_chat_model, pad_left, save_chat_model
from examples._cli import Flags
from examples._preferences import Pair, collate_pairs, encode_pair, pair_parts
from examples._questions import number_in
from examples._records import curve, draw_curves
from examples.instruction_tuning.main import base_folder
from redeqx.models import cross_entropy, generate


@dataclass(frozen=True)
class Args(Flags):
    data: Path | None = None  # A .jsonl of pairs. Replies to questions about numbers by default.
    pretrained: Path | None = None  # A Hugging Face folder of a decoder for chats. One that is tuned here by default.
    workdir: Path = Path("workdir/preference_optimization")  # For metrics, checkpoints, the models and the picture.
    n_train: int = 6_000  # Maximum number of pairs for training.
    n_test: int = 500  # Maximum number of pairs for validation, and for the test.
    seq_len: int = 48  # Tokens of a prompt with its reply.
    max_new_tokens: int = 16  # Maximum number of tokens of a generated reply.
    beta: float = 0.1  # How close the policy stays to the reference: the rewards are log-ratios times beta.
    nll_weight: float = 0.2  # Weight of the chosen replies' loss per token, which keeps them likely; 0 is plain DPO.
    n_epochs: int = 1
    batch_size: int = 32  # Pairs of one update, on all devices together.
    learning_rate: float = 3e-4
    n_base_epochs: int = 3  # Epochs of the model's tuning on conversations.
    eval_every_n_steps: int = 50


def log_prob(model: Any, ids: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the log-probability of the reply in one text, `ids` [seq]: of the labels that are not -100."""
    return -cross_entropy(model.hidden(ids[:-1]), labels[1:], head=model.logits).total


def log_probs(model: Any, batch: dict[str, jax.Array]) -> jax.Array:
    """Returns the log-probabilities of the chosen and the rejected replies, [pairs, 2]."""
    return jax.vmap(jax.vmap(lambda ids, labels: log_prob(model, ids, labels)))(batch["ids"], batch["labels"])


def loss_fn(
    model: PolicyAndReference, batch: dict[str, jax.Array], key: jax.Array, *, beta: float, nll_weight: float
) -> redeqx.Loss:
    """Returns the loss of DPO (equation 7), the share of pairs whose chosen reply has the larger reward, and the margin.

    The implicit reward of a reply is how much more likely the policy finds it than the reference does. DPO alone often makes
    both replies less likely. The last term is against that (arXiv:2404.19733).
    """
    policy = log_probs(model.policy, batch)
    rewards = beta * (policy - log_probs(model.reference, batch))
    margins = rewards[:, 0] - rewards[:, 1]
    losses = -jax.nn.log_sigmoid(margins) - nll_weight * policy[:, 0] / (batch["labels"][:, 0] >= 0).sum(-1)
    metrics = {"reward_accuracy": margins > 0, "reward_margin": margins, "reward_chosen": rewards[:, 0]}
    return redeqx.Loss(losses.sum(), len(losses), {name: x.sum(dtype=jnp.float32) for name, x in metrics.items()})


def pred_fn(model: PolicyAndReference, batch: dict[str, jax.Array], key: jax.Array, *, max_new_tokens: int) -> jax.Array:
    """Returns the tokens of the policy's sampled replies."""
    return generate(
        model.policy, batch["ids"], mask=batch["mask"], max_new_tokens=max_new_tokens, do_sample=True, key=key
    )  # fmt: skip


def score(pairs: Sequence[Pair], replies: Sequence[str]) -> dict[str, float]:
    """Returns the share of replies that are the preferred ones, and of those with the same number, which are right."""
    both = [*zip(pairs, replies, strict=True)]
    return {
        "right": float(np.mean([number_in(pair.chosen) == number_in(reply) for pair, reply in both])),
        "preferred": float(np.mean([pair.chosen.strip() == reply for pair, reply in both if pair.kind != "answers"])),
    }


def main(args: Args) -> dict[str, float]:
    """Tunes and tests. Returns the share of preferred replies, before and after, and the accuracy of the rewards."""
    deployer = redeqx.Deployer(args.seed, args.n_model_shards, args.n_fsdp_shards, workdir=args.workdir)
    folder = base_folder(args, n_epochs=args.n_base_epochs)
    policy, config, chat = load_chat_model(folder, deployer)
    train, validation, test = pair_parts(args.data, args.n_train, args.n_test, args.seed)
    train = train[: max(1, len(train) // args.batch_size) * args.batch_size]  # a smaller update would be compiled separately
    encode = partial(encode_pair, chat, seq_len=args.seq_len)

    model = PolicyAndReference(policy, policy)
    lr = deployer.get_lr_schedule_fn(
        len(train), batch_size=args.batch_size, n_epochs=args.n_epochs, learning_rate=args.learning_rate, warmup_ratio=0.1
    )
    trainer = redeqx.Trainer(
        deployer, model=model, trainable=model.trainable, collate_fn=collate_pairs,
        loss_fn=partial(loss_fn, beta=args.beta, nll_weight=args.nll_weight),
        optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adam(lr)), lr_schedule_fn=lr,
    )  # fmt: skip
    width = max(len(chat.prompt(pair.messages)) for pair in [*validation, *test])
    predictor = trainer.get_default_predictor(
        partial(pred_fn, max_new_tokens=args.max_new_tokens),
        collate_fn=lambda pairs: pad_left([chat.prompt(pair.messages) for pair in pairs], width),
        output_fn=lambda tokens: [chat.decode(ids) for ids in tokens],
    )
    held_out = [encode(pair) for pair in test]
    before = score(test, predictor.predict(test, batch_size=128))
    trainer.fit(
        [encode(pair) for pair in train], batch_size=args.batch_size, n_epochs=args.n_epochs, eval_batch_size=128,
        eval_examples=[encode(pair) for pair in validation], eval_every_n_steps=args.eval_every_n_steps,
        save_last_ckpt=True, save_argmin_ckpt_by_metrics=["loss"],
    )  # fmt: skip

    trainer.load_ckpt("argmin_loss", load_opt_states=False)
    after = score(test, predictor.predict(test, batch_size=128))
    metrics = trainer.eval_metrics(held_out, batch_size=128)
    saved = save_chat_model(trainer.model.policy, config, chat, args.workdir / "model")
    curves = {name: curve(args.workdir, f"eval_{name}") for name in ("reward_accuracy", "reward_margin")}
    draw_curves(args.workdir / "rewards.png", curves, {}, xlabel="step", ylabel="rewards of validation pairs")
    table = [f"{'':12}{'preferred':>12}{'right':>12}"]
    table += [f"{n:12}{s['preferred']:>12.1%}{s['right']:>12.1%}" for n, s in {"reference": before, "policy": after}.items()]
    deployer.log_info(
        "\n".join([*table, str(args.workdir / "rewards.png"), str(saved)]), title="sampled replies to the test"
    )
    scores = {f"test_{name}": value for name, value in after.items()}
    scores |= {f"test_reference_{name}": value for name, value in before.items()}
    scores |= {f"test_{name}": metrics[name] for name in ("reward_accuracy", "reward_margin")}
    deployer.log_metrics(scores, trainer.step)
    return scores
