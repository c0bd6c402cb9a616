"""Instruction tuning: supervised fine-tuning on conversations, with a chat template and a loss on replies only.

    python -m examples.instruction_tuning

By default a small LLaMA is trained from scratch on conversations with one to three questions about numbers, in ChatML. A
system message says whether to reply with a number or a sentence. The test asks about numbers that it has not seen together,
and a reply is right if all of its text is.

Your own: `--data FILE.jsonl`, where each line is an object with `messages`, a list of objects with `role` and `content`. One
in twenty is held out, and its last reply is tested. `--pretrained FOLDER` is a published decoder for chats with its
tokenizer, whose own template is used; set `--learning-rate` to 1e-5 or so. With `--lora-rank 8`, adapters of its attention
are trained alone, at 1e-4 or so; they are saved as PEFT's, and merged into the saved model.

Several conversations are packed into a row of `--seq-len` tokens; they do not attend to each other.

2 CPU cores, with much other work, 9 minutes: 94.8 % of the replies to held-out questions are right to the letter.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import redeqx
from examples._chat import Chat, Message, learn_chat, load_chat_model, pad_left, save_chat_model
from examples._cli import Flags
from examples._questions import conversations
from examples._records import curve, draw_curves
from examples._texts import embedding_rows
from redeqx.data import pack
from redeqx.models import cross_entropy, generate, lora
from redeqx.models.llama import Llama, LlamaConfig
from redeqx.optimizers import decay_mask, muon

Conversation = list[Message]


@dataclass(frozen=True)
class Args(Flags):
    data: Path | None = None  # A .jsonl of conversations. Questions about numbers by default.
    pretrained: Path | None = None  # A Hugging Face folder of a decoder for chats. A small LLaMA by default.
    lora_rank: int | None = None  # Train only adapters of this rank on the attention's weights.
    workdir: Path = Path("workdir/instruction_tuning")  # For metrics, checkpoints, the model and the picture.
    n_train: int = 20_000  # Number of conversations to draw for training.
    n_test: int = 500  # Maximum number of conversations for validation, and for the test.
    n_ids: int = 384  # Size of the vocabulary of the small LLaMA.
    n_layers: int = 2
    d_model: int = 64
    n_heads: int = 4
    seq_len: int = 128  # Tokens of a row.
    max_new_tokens: int = 16  # Maximum number of tokens of a reply.
    n_epochs: int = 3
    batch_size: int = 16  # Rows of one update, on all devices together.
    learning_rate: float = 5e-3
    eval_every_n_steps: int = 300


def read_conversations(path: Path) -> list[Conversation]:
    """Reads a .jsonl of conversations, each of which ends with a reply."""
    found = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1):
        messages = json.loads(line).get("messages") or [{}]
        if any(not {"role", "content"} <= message.keys() for message in messages) or messages[-1]["role"] != "assistant":
            raise ValueError(
                f"`{path}` row {number}: expected `messages` with `role` and `content`, the last one by the assistant, got "
                f"{line[:60]!r}. Correct the row."
            )
        found.append(messages)
    if len(found) < 3:
        raise ValueError(f"`{path}`: expected conversations for training, validation and test, got {len(found)}. Add more.")
    return found


def read_parts(args: Args) -> tuple[list[Conversation], ...]:
    """Returns conversations for training, validation and test."""
    if args.data is None:
        train = conversations("train", args.n_train, args.seed)
        return train, conversations("validation", args.n_test, args.seed), conversations("test", args.n_test, args.seed)
    found = read_conversations(args.data)
    train = [messages for i, messages in enumerate(found) if i % 20 > 1]
    return train or found[2:], found[::20][: args.n_test], found[1::20][: args.n_test]


def make_model(args: Args, deployer: redeqx.Deployer, train: list[Conversation]) -> tuple[Any, Any, Chat]:
    """Returns the model, its config, and its tokenizer with the chat template."""
    if args.pretrained is not None:
        return load_chat_model(args.pretrained, deployer)
    chat = learn_chat(train[:2000], args.n_ids)
    config = LlamaConfig(
        vocab_size=embedding_rows(chat.tokenizer.get_vocab_size()), n_positions=args.seq_len, d_model=args.d_model,
        d_mlp=-(-8 * args.d_model // 96) * 32, n_layers=args.n_layers, n_heads=args.n_heads, is_tied=True,
        bos_token_id=None, eos_token_id=chat.ends[0], pad_token_id=0, init_std=0.05,
    )  # fmt: skip
    key = deployer.next_key()
    return deployer.init(lambda: Llama(config, key=key)), config, chat


def collate_fn(rows: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.stack([row[name] for row in rows]) for name in ("tokens", "labels", "segments")}


def loss_fn(model: Any, batch: dict[str, jax.Array], key: jax.Array) -> redeqx.Loss:
    """Returns the cross-entropy of the replies, summed over their tokens. Other labels are -100, which has no weight."""
    keys = jax.random.split(key, len(batch["tokens"]))
    run = lambda tokens, segments, key: model.hidden(tokens, segments=segments, key=key)  # noqa: E731
    hidden = jax.vmap(run)(batch["tokens"], batch["segments"], keys)
    return cross_entropy(hidden, batch["labels"], head=model.logits, chunk_size=256)


def pred_fn(model: Any, batch: dict[str, jax.Array], key: jax.Array, *, max_new_tokens: int) -> jax.Array:
    """Returns the tokens of greedy replies."""
    return generate(model, batch["ids"], mask=batch["mask"], max_new_tokens=max_new_tokens, do_sample=False)


def exact(examples: list[Conversation], replies: Sequence[str]) -> dict[str, float]:
    """Returns the share of replies that are those of the conversations."""
    return {"exact": float(np.mean([e[-1]["content"].strip() == r for e, r in zip(examples, replies, strict=True)]))}


def main(args: Args) -> dict[str, float]:
    """Trains, tests and saves the model. Returns the share of exact replies to held-out questions."""
    args.check_positive("n_train", "n_test", "max_new_tokens")
    if args.lora_rank is not None and args.pretrained is None:
        raise ValueError(f"`--lora-rank`: expected with `--pretrained`, got {args.lora_rank} alone. Pass a folder to adapt.")
    deployer = redeqx.Deployer(args.seed, args.n_model_shards, args.n_fsdp_shards, workdir=args.workdir)
    train, validation, test = read_parts(args)
    model, config, chat = make_model(args, deployer, train)
    trainable = {}
    if args.lora_rank is not None:
        model = lora.add(model, rank=args.lora_rank, where="*.attention.*", key=deployer.next_key())
        trainable = {"trainable": lora.trainable(model)}
    rows = pack([chat.encode(messages) for messages in train], args.seq_len)
    rows = rows[: max(1, len(rows) // args.batch_size) * args.batch_size]  # a smaller update would be compiled separately
    n_labels = sum(int((row["labels"] >= 0).sum()) for row in rows)
    share = n_labels / len(rows) / args.seq_len
    sizes = f"{len(train):,} conversations in {len(rows):,} rows; {share:.0%} of their tokens are replies"
    deployer.log_info(chat.render(test[0], False), title=f"{sizes}. A conversation")

    lr = deployer.get_lr_schedule_fn(
        len(rows), batch_size=args.batch_size, n_epochs=args.n_epochs, learning_rate=args.learning_rate,
        schedule_type="cosine", warmup_ratio=0.05,
    )  # fmt: skip
    optimizer = optax.adamw(lr, b2=0.95, weight_decay=0.01, mask=decay_mask)
    if args.pretrained is None:
        optimizer = muon(lr, weight_decay=0.01, rest=optimizer)
    trainer = redeqx.Trainer(
        deployer, model=model, optimizer=optax.chain(optax.clip_by_global_norm(1.0), optimizer), collate_fn=collate_fn,
        loss_fn=loss_fn, lr_schedule_fn=lr, **trainable,
    )  # fmt: skip
    width = max(len(chat.prompt(messages[:-1])) for messages in [*validation, *test])
    predictor = trainer.get_default_predictor(
        partial(pred_fn, max_new_tokens=args.max_new_tokens),
        collate_fn=lambda asked: pad_left([chat.prompt(messages[:-1]) for messages in asked], width),
        output_fn=lambda tokens: [chat.decode(ids) for ids in tokens],
    )
    trainer.fit(
        rows, batch_size=args.batch_size, n_epochs=args.n_epochs, eval_examples=validation, eval_loss=False,
        eval_batch_size=128, eval_predictor=predictor, eval_metric_fn=exact, eval_every_n_steps=args.eval_every_n_steps,
        save_last_ckpt=True, save_argmax_ckpt_by_metrics=["exact"],
    )  # fmt: skip

    trainer.load_ckpt("argmax_exact", load_opt_states=False)
    replies = predictor.predict(test, batch_size=128)
    model = trainer.model
    if args.lora_rank is not None:
        lora.save_adapter(model, args.workdir / "adapter", base=str(args.pretrained))
        model = lora.merge(model)
    folder = save_chat_model(model, config, chat, args.workdir / "model")
    draw_curves(
        args.workdir / "exact.png", {"validation": curve(args.workdir, "eval_exact")}, {}, xlabel="step",
        ylabel="exact replies", ylim=(0, 1),
    )  # fmt: skip
    lines = [f"{messages[-2]['content']}  {reply}" for messages, reply in zip(test[:5], replies, strict=False)]
    deployer.log_info("\n".join([*lines, str(args.workdir / "exact.png"), str(folder)]), title="replies, curve, model")
    scores = {f"test_{name}": value for name, value in exact(test, replies).items()}
    deployer.log_metrics(scores, trainer.step)
    return scores


def base_folder(args: Any, **changes: Any) -> Path:
    """Returns the folder of a model to tune further: the user's, or one that is trained here, once for each workdir."""
    folder = args.pretrained or args.workdir / "base" / "model"
    if args.pretrained is None and not (folder / "config.json").exists():
        shards = {"n_model_shards": args.n_model_shards, "n_fsdp_shards": args.n_fsdp_shards}
        main(replace(Args(), workdir=args.workdir / "base", seed=args.seed, **shards, **changes))
    return folder
