"""Packing: the share of padding, and real tokens a second of a training step, with packed rows and with a row for each text.

    NPROC=16 python tests/benchmarks/packing.py

The texts are the docstrings of Python's standard library, as bytes. One table packs them into rows of several lengths. The
other one takes steps of GPT-2 on them, by turns with a row for each text, padded to `--length`, and with packed rows. Only
tokens that are not padding count.
"""

import argparse
import ast
import statistics
import time

import jax
import numpy as np
import optax

import redeqx
from examples._texts import parse, standard_library
from redeqx.data import pack
from redeqx.models import cross_entropy
from redeqx.models.gpt2 import GPT2, GPT2Config


def docstrings(n):
    """Returns the first docstrings, as bytes."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (
        np.frombuffer(text.encode(), np.uint8)
        for _, tree in parse(standard_library())
        for node in ast.walk(tree)
        if isinstance(node, kinds) and (text := ast.get_docstring(node))
    )
    return [text for text, _ in zip(found, range(n), strict=False)]


def padding(rows):
    return float(np.mean([row["segments"] == 0 for row in rows]))


def print_padding(texts, lengths):
    sizes = [len(text) for text in texts]
    print(f"{len(texts)} texts, {np.mean(sizes):.0f} bytes on average, at most {max(sizes)}\n")
    print("| length | a row each | packed, a stream | packed, a list | texts a row | seconds of the list |")
    print("|---|---|---|---|---|---|")
    for length in lengths:
        fitting = [text for text in texts if len(text) <= length]
        alone = 1 - np.mean([len(text) for text in fitting]) / length
        start = time.perf_counter()
        rows = pack(fitting, length)
        seconds = time.perf_counter() - start
        stream = padding(pack(iter(fitting), length))
        shares = f"{alone:.1%} | {stream:.2%} | {padding(rows):.2%}"
        print(f"| {length} | {shares} | {len(fitting) / len(rows):.1f} | {seconds:.2f} |")


def collate_fn(rows):
    return {name: np.stack([row[name] for row in rows]) for name in ("tokens", "segments", "labels")}


def packed_loss_fn(model, batch, key):
    del key
    hidden = jax.vmap(lambda tokens, segments: model.hidden(tokens, segments=segments))(batch["tokens"], batch["segments"])
    return cross_entropy(hidden, batch["labels"], head=model.logits)


def padded_loss_fn(model, batch, key):
    """Needs no segments: padding is after the tokens of a row, and a token attends only to earlier ones."""
    del key
    return cross_entropy(jax.vmap(model.hidden)(batch["tokens"]), batch["labels"], head=model.logits)


class Steps:
    """Takes steps on some rows, one batch after another."""

    def __init__(self, rows, loss_fn, length, n_rows):
        config = GPT2Config(256, length, d_model=256, n_layers=4, n_heads=4).without_dropout()
        self.rows, self.n_rows, self.next = rows, n_rows, 0
        self.trainer = redeqx.Trainer(
            redeqx.Deployer(verbose=False),
            model=GPT2(config, key=jax.random.key(0)),
            optimizer=optax.adamw(1e-3),
            collate_fn=collate_fn,
            loss_fn=loss_fn,
        )

    def rate(self, n_steps):
        """Returns tokens a second of some steps."""
        batches = []
        for _ in range(n_steps):
            batches.append([self.rows[(self.next + i) % len(self.rows)] for i in range(self.n_rows)])
            self.next += self.n_rows
        start = time.perf_counter()
        for batch in batches:
            loss = self.trainer.update(batch)["loss"]
        jax.block_until_ready(loss)
        seconds = time.perf_counter() - start
        return sum((row["segments"] > 0).sum() for batch in batches for row in batch) / seconds


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--texts", type=int, default=8000)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    texts = docstrings(args.texts)
    print_padding(texts, (256, 512, 2048, 8192))

    fitting = [text for text in texts if len(text) <= args.length]
    rows = {"a row each": [pack([text], args.length)[0] for text in fitting], "packed": pack(fitting, args.length)}
    loss_fns = {"a row each": padded_loss_fn, "packed": packed_loss_fn}
    steps = {name: Steps(rows[name], loss_fns[name], args.length, args.rows) for name in rows}
    for each in steps.values():
        each.rate(1)  # compiles
    rates = [{name: each.rate(args.steps) for name, each in steps.items()} for _ in range(args.rounds)]
    print(f"\n{args.rows} rows of {args.length} tokens, GPT-2 (4 layers, width 256)\n")
    print("| rows | padding | tokens/s | over a row each |\n|---|---|---|---|")
    for name in rows:
        rate, ratio = (
            statistics.median(of) for of in ([x[name] for x in rates], [x[name] / x["a row each"] for x in rates])
        )
        print(f"| {name} | {padding(rows[name]):.1%} | {rate:,.0f} | {ratio:.1f} |")


if __name__ == "__main__":
    main()
