"""Language modelling: train GPT-2 on text, and hold its bits per byte against those of general compressors.

    python examples/language_modeling/main.py

The default data is the source of Python's standard library, cut into train and held-out files, read as bytes. Without an
accelerator eight devices are simulated, as data=4 x model=2. Killed and run again, it ends with the same bits.

8 simulated devices on 2 CPU cores, 2 min 20 s: 1.679 bits per byte after 4 MB of text. The compressors, which have
seen none of that text, reach 2.028 (zlib) and 1.681 (lzma).
"""

import json
import lzma
import math
import sysconfig
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jax.tree_util import tree_map_with_path
from matplotlib.figure import Figure

import redeqx
from redeqx.models.gpt2 import GPT2, GPT2Config

PROMPT = 32  # tokens of held-out text that the sample goes on from


@dataclass(frozen=True)
class Args:
    data: Path | None = None  # A text file, or a folder of them. The standard library's source by default.
    tokenizer: Path | None = None  # A `tokenizer.json`, of the tokenizers library. Bytes by default.
    train_bytes: int = 4_000_000  # At most so many bytes are trained on: raise it with the hardware.
    held_out_bytes: int = 200_000  # At most so many bytes are evaluated on.
    workdir: Path = Path("workdir/language_modeling")  # For metrics, checkpoints and the curve. A run resumes from it.
    n_layers: int = 2
    d_model: int = 128
    n_heads: int = 2
    seq_len: int = 128  # Tokens of one example.
    dropout: float = 0.0  # Of all three kinds. A single pass over the text does better without.
    n_epochs: int = 1
    batch_size: int = 8  # Examples of one update, over all devices.
    per_device_batch_size: int | None = None  # Rows of a micro-batch on one device; all of an update by default.
    learning_rate: float = 3e-3
    n_model_shards: int | None = None  # Devices that share each layer. By default 2 simulated ones, or 1.
    n_fsdp_shards: int = 1  # Devices that share parameters and optimizer state, each with rows of its own.
    eval_every_n_steps: int = 1000
    save_every_n_steps: int = 250
    seed: int = 0


def read_texts(path: Path | None) -> tuple[str, str]:
    """The text to train on and the text held out: one file in twenty, always the same, or the first part of a lone one."""
    root = Path(sysconfig.get_paths()["stdlib"]) if path is None else path
    files = [root] if root.is_file() else [f for f in root.rglob("*" if path else "*.py") if f.is_file()]
    if path is None:  # leave out what is installed inside it, and the tests, which not every machine has
        foreign = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
        files = [f for f in files if not foreign & set(f.relative_to(root).parts)]
    texts = []
    # In the order of a hash of their names, so that the first bytes are a fair sample of all.
    for file in sorted(files, key=lambda f: (zlib.crc32(f.relative_to(root).as_posix().encode()), f)):
        try:
            texts.append(file.read_text("utf-8"))
        except UnicodeDecodeError:
            print(f"{file}: not UTF-8, left out")
    if len(texts) == 1:
        texts = [texts[0][: len(texts[0]) // 20], texts[0][len(texts[0]) // 20 :]]
    n_held_out = max(1, len(texts) // 20)
    train, held_out = "\n\n".join(texts[n_held_out:]), "\n\n".join(texts[:n_held_out])
    if min(len(train), len(held_out)) <= PROMPT:
        raise ValueError(f"`--data`: expected text to train on and to hold out, got {len(train)} characters in {root}.")
    return train, held_out


def load_tokenizer(path: Path | None) -> tuple[Callable[[str], list[int]], Callable[[list[int]], str], int]:
    """Text to ids, ids to text, and the number of ids."""
    if path is None:
        return lambda text: list(text.encode()), lambda ids: bytes(ids).decode(errors="replace"), 256
    from tokenizers import Tokenizer  # an extra of its own: bytes do without

    tokenizer = Tokenizer.from_file(str(path))
    n_ids = -(-tokenizer.get_vocab_size() // 64) * 64  # rounded up, so that shards divide the embedding
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids, tokenizer.decode, n_ids


def cut(ids: list[int], seq_len: int) -> np.ndarray:
    """Rows of seq_len + 1 tokens that overlap by one: each token but the first is predicted once. -1 fills the last row."""
    filled = np.pad(np.array(ids, np.int32), (0, -(len(ids) - 1) % seq_len), constant_values=-1)
    return np.lib.stride_tricks.sliding_window_view(filled, seq_len + 1)[::seq_len]


def collate_fn(examples: list[np.ndarray]) -> dict[str, np.ndarray]:
    rows = np.stack(examples)
    return {"ids": np.maximum(rows[:, :-1], 0), "labels": rows[:, 1:]}


def loss_fn(model: GPT2, batch: dict[str, jax.Array], key: jax.Array) -> redeqx.Loss:
    """Nats, summed over tokens; a label of -1 has no weight."""
    keys = jax.random.split(key, len(batch["ids"]))
    logits = jax.vmap(lambda ids, key: model(ids, key=key))(batch["ids"], keys)
    weights, labels = batch["labels"] >= 0, jnp.maximum(batch["labels"], 0)
    nats = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)
    return redeqx.Loss(total=jnp.sum(nats * weights), weight=jnp.sum(weights))


def pred_fn(model: GPT2, batch: dict[str, jax.Array], key: jax.Array) -> jax.Array:
    """Each row's first tokens, then what the model goes on with: it never sees a token that it has yet to replace."""

    def next_token(i: jax.Array, ids: jax.Array) -> jax.Array:
        logits = jax.vmap(model)(ids)[:, i - 1]
        return ids.at[:, i].set(jax.random.categorical(jax.random.fold_in(key, i), logits / 0.8))

    return jax.lax.fori_loop(PROMPT, batch["ids"].shape[1], next_token, batch["ids"])


def is_matrix(params: GPT2) -> GPT2:
    """Which leaves decay: the weights of layers. Their dims would not tell, for a stacked bias has two as well."""
    return tree_map_with_path(lambda path, _: path[-1].name == "weight" and "norm" not in path[-2].name, params)


def draw_curve(workdir: Path, bits_per_nat: float, levels: dict[str, float]) -> None:
    """`loss.png`: the losses in `metrics.jsonl` over steps, in bits per byte, with the compressors as levels."""
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, label, marker, alpha in (("loss", "train", "", 0.4), ("eval_loss", "held out", "o", 1.0)):
        steps, bits = np.array([(line["step"], line[name] * bits_per_nat) for line in lines if name in line]).T
        axes.plot(steps, bits, linewidth=1, marker=marker, alpha=alpha, label=label)
    for i, (name, level) in enumerate(levels.items(), start=2):
        axes.axhline(level, linestyle="--", linewidth=1, color=f"C{i}", label=f"{name}, held out")
    axes.set(xlabel="step", ylabel="bits per byte", ylim=(0, None))
    axes.legend()
    figure.savefig(workdir / "loss.png", dpi=150)


def main(args: Args) -> float:
    """Trains and reports; returns the held-out bits per byte."""
    n_model_shards = args.n_model_shards or (2 if jax.default_backend() == "cpu" and jax.device_count() > 1 else 1)
    deployer = redeqx.Deployer(args.seed, n_model_shards, args.n_fsdp_shards, workdir=args.workdir)
    rows = args.per_device_batch_size or max(1, args.batch_size // deployer.n_batch_shards)
    n_micro = deployer.get_accumulate_grad_batches(args.batch_size, rows)

    encode, decode, n_ids = load_tokenizer(args.tokenizer)
    limits = (args.train_bytes, args.held_out_bytes)
    texts = [t.encode()[:n].decode(errors="ignore") for t, n in zip(read_texts(args.data), limits, strict=True)]
    train, held_out = (cut(encode(text), args.seq_len) for text in texts)
    # Whole updates: a smaller last one would be compiled for itself.
    train = train[: max(1, len(train) // args.batch_size) * args.batch_size]

    sizes = (n_ids, args.seq_len, args.d_model, args.n_layers, args.n_heads)
    # The published 0.02 is for a width of 768; narrower models learn sooner from larger weights.
    config = GPT2Config(*sizes, args.dropout, args.dropout, args.dropout, init_std=0.02 * (768 / args.d_model) ** 0.5)
    key = deployer.next_key()
    model = deployer.init(lambda: GPT2(config, key=key))
    deployer.log_info(deployer.plan(model).explain(), title="plan")

    lr = deployer.get_lr_schedule_fn(
        len(train), rows, args.n_epochs, args.learning_rate, "cosine", warmup_ratio=0.05,
        end_learning_rate=args.learning_rate / 10, accumulate_grad_batches=n_micro,
    )  # fmt: skip
    adamw = optax.adamw(lr, b2=0.95, weight_decay=0.1, mask=is_matrix)
    trainer = redeqx.Trainer(
        deployer, model=model, optimizer=optax.chain(optax.clip_by_global_norm(1.0), adamw), collate_fn=collate_fn,
        loss_fn=loss_fn, lr_schedule_fn=lr, accumulate_grad_batches=n_micro,
    )  # fmt: skip
    trainer.fit(
        train, rows, args.n_epochs, eval_examples=held_out, eval_every_n_steps=args.eval_every_n_steps,
        save_every_n_steps=args.save_every_n_steps, save_last_ckpt=True, save_argmin_ckpt_by_metrics=["loss"],
    )  # fmt: skip

    text = texts[1].encode()
    bits_per_nat = int((held_out[:, 1:] >= 0).sum()) / len(text) / math.log(2)  # the loss is nats a token
    packed = {"zlib": zlib.compress(text, 9), "lzma": lzma.compress(text, preset=9)}
    levels = {name: 8 * len(data) / len(text) for name, data in packed.items()}
    scores = {"GPT-2": trainer.eval_loss(held_out, rows) * bits_per_nat, **levels}
    draw_curve(args.workdir, bits_per_nat, levels)

    (ids,) = trainer.get_default_predictor(pred_fn).predict(held_out[len(held_out) // 2 :][:1], 1)
    prompt, added = decode(ids[:PROMPT].tolist()), decode(ids[PROMPT:].tolist())
    deployer.log_info(f"{prompt}[{added}]", title="sample: held-out text, and in brackets what GPT-2 adds")
    table = "\n".join(f"{name:8}{score:.3f}" for name, score in scores.items())
    deployer.log_info(table, title=f"bits per byte of {len(text):,} held-out bytes")
    index = json.loads((args.workdir / "ckpts/index.json").read_text())
    files = ["loss.png", "metrics.jsonl", f"ckpts/{index['last']}", f"ckpts/{index['argmin_loss']}"]
    deployer.log_info("\n".join(str(args.workdir / file) for file in files), title="curve, metrics, last checkpoint, best")
    return scores["GPT-2"]


if __name__ == "__main__":
    redeqx.simulate_devices(8)
    main(tyro.cli(Args, description=__doc__))
