"""Language modeling: trains GPT-2 on text and compares its bits per byte with general-purpose compressors.

    python -m examples.language_modeling

The default data is the source of Python's standard library, split into training and held-out files and read as bytes.
Without an accelerator, eight devices are simulated, as data=4 x model=2. A run that is killed and restarted ends with the
same bits.

8 simulated devices on 2 CPU cores, some minutes: 1.486 bits per byte after 4 MB of text; 1.681 with `--optimizer adamw`. The
compressors, which have not seen that text, reach 2.028 (zlib) and 1.681 (lzma).

A published decoder (GPT-2, LLaMA, Mistral, Qwen, Gemma, ...) is trained on more text with

    python -m examples.language_modeling --data FOLDER --pretrained MODEL --optimizer adamw --learning-rate 1e-5

With `--pack`, several short files share a row, and none attends to another.
"""

import json
import lzma
import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import optax

import redeqx
from examples._cli import Flags
from examples._records import checkpoint, curve, draw_curves
from examples.language_modeling.texts import (
    Vocabulary,
    cut,
    first_bytes,
    load_vocabulary,
    pack_apart,
    prompt_of,
    read_files,
    read_texts,
)
from redeqx.models import Decoder, cross_entropy, from_pretrained, generate, save_pretrained
from redeqx.models.gpt2 import GPT2, GPT2Config
from redeqx.optimizers import decay_mask, muon


@dataclass(frozen=True)
class Args(Flags):
    data: Path | None = None  # A text file, or a folder of them. The standard library's source by default.
    pretrained: Path | None = None  # A Hugging Face folder of a decoder with its tokenizer.json. The result is saved too.
    tokenizer: Path | None = None  # A `tokenizer.json` of the tokenizers library. Bytes by default.
    train_bytes: int = 4_000_000  # Maximum number of bytes to train on. Raise it on better hardware.
    held_out_bytes: int = 200_000  # Maximum number of bytes to evaluate on.
    workdir: Path = Path("workdir/language_modeling")  # For metrics, checkpoints and the curve. A run resumes from it.
    n_layers: int = 2
    d_model: int = 128
    n_heads: int = 2
    seq_len: int = 128  # Tokens of one example.
    pack: bool = False  # Files are packed into rows, in which none attends to another; by default they are one long text.
    dropout: float = 0.0  # Rate of all three dropouts. A single pass over the text does better without.
    n_epochs: int = 1
    batch_size: int = 8  # Examples of one update, on all devices together.
    per_device_batch_size: int | None = None  # Rows of a micro-batch on one device. By default all of an update.
    optimizer: Literal["muon", "adamw"] = "muon"  # One learning rate suits both.
    learning_rate: float = 3e-3
    n_model_shards: int = 0  # Devices over which each layer is sharded. By default 2 simulated ones, or 1.
    n_sequence_shards: int = 1  # Devices over which the tokens of each row are sharded.
    simulate_devices: int = 8  # CPU devices to simulate on a machine without an accelerator.
    eval_every_n_steps: int = 1000
    save_every_n_steps: int = 250


def make_model(args: Args, deployer: redeqx.Deployer) -> tuple[Any, Any, Vocabulary]:
    """Makes a GPT-2 of the given sizes, or loads a folder's model. Also returns its config and its vocabulary."""
    if args.pretrained is not None:
        model, config = from_pretrained(args.pretrained, deployer=deployer, kind=Decoder)
        return model, config, load_vocabulary(args.tokenizer or args.pretrained, config.vocab_size)
    vocabulary = load_vocabulary(args.tokenizer)
    sizes = (vocabulary.n_ids, args.seq_len, args.d_model, args.n_layers, args.n_heads)
    # The published 0.02 is for a width of 768; narrower models learn faster with larger weights.
    init_std, rate = 0.02 * (768 / args.d_model) ** 0.5, args.dropout
    config = GPT2Config(
        *sizes, embedding_dropout=rate, attention_dropout=rate, residual_dropout=rate, init_std=init_std
    )  # fmt: skip
    key = deployer.next_key()
    return deployer.init(lambda: GPT2(config, key=key)), config, vocabulary


def collate_fn(examples: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.stack([example[name] for example in examples]) for name in examples[0]}


def loss_fn(model: Any, batch: dict[str, jax.Array], key: jax.Array) -> redeqx.Loss:
    """Returns the loss in nats, summed over tokens. A label of -100 has no weight.

    The segments of packed rows keep their texts apart. The logits of 256 tokens per row are computed at a time, since
    published models have large vocabularies.
    """
    keys = jax.random.split(key, len(batch["tokens"]))
    run = lambda row, key: model.hidden(row["tokens"], segments=row.get("segments"), key=key)  # noqa: E731
    hidden = jax.vmap(run)(batch, keys)
    return cross_entropy(hidden, batch["labels"], head=model.logits, chunk_size=256)


def pred_fn(model: Any, prompts: jax.Array, key: jax.Array) -> jax.Array:
    """Returns the generated continuation of each prompt."""
    n_new = min(96, model.config.n_positions - prompts.shape[1])
    return generate(model, prompts, max_new_tokens=n_new, eos_token_id=(), do_sample=True, temperature=0.8, key=key)


def main(args: Args) -> dict[str, float]:
    """Trains and reports. Returns the held-out bits per byte."""
    n_model_shards = args.n_model_shards or (2 if jax.default_backend() == "cpu" and jax.device_count() > 1 else 1)
    shards = (n_model_shards, args.n_fsdp_shards, args.n_sequence_shards)
    deployer = redeqx.Deployer(args.seed, *shards, workdir=args.workdir)
    rows = args.per_device_batch_size
    n_micro = 1 if rows is None else deployer.get_accumulate_grad_batches(args.batch_size, rows)

    model, config, vocabulary = make_model(args, deployer)
    limits = (args.train_bytes, args.held_out_bytes)
    parts = read_files(args.data) if args.pack else [[text] for text in read_texts(args.data)]
    parts = [first_bytes(texts, n) for texts, n in zip(parts, limits, strict=True)]
    ids = [[vocabulary.encode(text) for text in texts] for texts in parts]
    train, held_out = (pack_apart(each, args.seq_len) if args.pack else cut(each[0], args.seq_len) for each in ids)
    # Only full updates: a smaller last one would be compiled separately.
    train = train[: max(1, len(train) // args.batch_size) * args.batch_size]
    deployer.log_info(deployer.plan(model, loss_fn, collate_fn(list(train[: args.batch_size]))).explain(), title="plan")

    lr = deployer.get_lr_schedule_fn(
        len(train), batch_size=args.batch_size, n_epochs=args.n_epochs, learning_rate=args.learning_rate,
        schedule_type="cosine", warmup_ratio=0.05, end_learning_rate=args.learning_rate / 10,
    )  # fmt: skip
    optimizer = optax.adamw(lr, b2=0.95, weight_decay=0.1, mask=decay_mask)
    if args.optimizer == "muon":  # for the matrices of the blocks; AdamW for all other leaves
        optimizer = muon(lr, weight_decay=0.1, rest=optimizer)
    trainer = redeqx.Trainer(
        deployer, model=model, optimizer=optax.chain(optax.clip_by_global_norm(1.0), optimizer), collate_fn=collate_fn,
        loss_fn=loss_fn, lr_schedule_fn=lr, accumulate_grad_batches=n_micro,
    )  # fmt: skip
    trainer.fit(
        train, batch_size=args.batch_size, n_epochs=args.n_epochs, eval_examples=held_out,
        eval_every_n_steps=args.eval_every_n_steps, save_every_n_steps=args.save_every_n_steps,
        save_last_ckpt=True, save_argmin_ckpt_by_metrics=["loss"],
    )  # fmt: skip

    held_out_bytes = "".join(parts[1]).encode()
    n_bytes = len(held_out_bytes)
    bits_per_nat = (
        sum(int((row["labels"] >= 0).sum()) for row in held_out) / n_bytes / math.log(2)
    )  # the loss is in nats per token
    packed = {"zlib": zlib.compress(held_out_bytes, 9), "lzma": lzma.compress(held_out_bytes, preset=9)}
    levels = {name: 8 * len(data) / n_bytes for name, data in packed.items()}
    name = "GPT-2" if args.pretrained is None else json.loads((args.pretrained / "config.json").read_text())["model_type"]
    scores = {name: trainer.eval_loss(held_out, batch_size=args.batch_size) * bits_per_nat, **levels}
    losses = {"train": curve(args.workdir, "loss"), "held out": curve(args.workdir, "eval_loss")}
    curves = {label: (steps, bits_per_nat * np.array(nats)) for label, (steps, nats) in losses.items()}
    draw_curves(args.workdir / "loss.png", curves, levels, xlabel="step", ylabel="bits per byte", ylim=(0, None))

    prompt = prompt_of(held_out[len(held_out) // 2])
    (new,) = trainer.get_default_predictor(pred_fn, collate_fn=np.array).predict([prompt], 1)
    sample = f"{vocabulary.decode(prompt)}[{vocabulary.decode(new.tolist())}]"
    deployer.log_info(sample, title=f"sample: held-out text, and in brackets what {name} adds")
    table = "\n".join(f"{name:8}{score:.3f}" for name, score in scores.items())
    deployer.log_info(table, title=f"bits per byte of {n_bytes:,} held-out bytes")
    files = [args.workdir / "loss.png", args.workdir / "metrics.jsonl"]
    files += [checkpoint(args.workdir, tag) for tag in ("last", "argmin_loss")]
    files += [] if args.pretrained is None else [save_pretrained(trainer.model, config, args.workdir / "model")]
    deployer.log_info("\n".join(map(str, files)), title="curve, metrics, last checkpoint, best")
    test_scores = {"test_bits_per_byte": scores[name]}
    deployer.log_metrics(test_scores, trainer.step)
    return test_scores
