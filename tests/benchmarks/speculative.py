"""Speculative decoding: time per token with a draft, against greedy decoding, and the share of tokens that are accepted.

    python tests/benchmarks/speculative.py [--rounds 5] [--new 64] [--batch 1]

The draft is the first layer of a GPT-2 of eight. Random weights agree on nothing, so the other layers are scaled down: the
less they change, the more often the draft is right. Prints, for several scales and numbers of proposed tokens, the accepted
share, milliseconds per token of both, and their ratio: above 1 the draft pays. Both alternate in one run; medians are
printed. All tokens are compared.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import numpy as np

from redeqx.models import generate
from redeqx.models.gpt2 import GPT2, GPT2Config

VOCAB, WIDTH, LAYERS, HEADS, PROMPT = 8192, 512, 8, 8, 64


def seconds(fn: Callable[[], jax.Array]) -> float:
    start = time.perf_counter()
    fn().block_until_ready()
    return time.perf_counter() - start


def pair(scale: float) -> tuple[GPT2, GPT2]:
    """Returns a model whose layers after the first are scaled, and its first layer as a model."""
    config = GPT2Config(VOCAB, 512, d_model=WIDTH, n_layers=LAYERS, n_heads=HEADS, init_std=0.05, eos_token_id=None)
    config = config.without_dropout()
    model = eqx.filter_jit(GPT2)(config, key=jax.random.key(0))
    draft = eqx.filter_eval_shape(GPT2, replace(config, n_layers=1), key=jax.random.key(0))
    is_matrix = lambda leaf: eqx.is_array(leaf) and leaf.ndim == 3  # noqa: E731
    model = jax.tree.map(lambda leaf: leaf.at[1:].multiply(scale) if is_matrix(leaf) else leaf, model)

    def first(leaf: Any, of_model: Any) -> Any:
        is_stacked = np.ndim(of_model) > 0 and np.shape(of_model) != leaf.shape
        return of_model[:1] if is_stacked else of_model

    leaves = map(first, jax.tree.leaves(draft), jax.tree.leaves(model))
    return model, jax.tree.unflatten(jax.tree.structure(draft), leaves)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1)
    args = parser.parse_args()
    print(f"GPT-2 of {LAYERS} layers, width {WIDTH}, vocabulary {VOCAB}, float32, {args.batch} rows; a draft of 1 layer")
    print(f"{'scale':>5}  {'proposed':>8}  {'accepted':>8}  {'greedy ms':>9}  {'draft ms':>8}  {'speedup':>7}")
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, (args.batch, PROMPT)) for _ in range(args.rounds + 1)]
    for scale in (0.1, 0.3, 1.0):
        model, draft = pair(scale)
        for proposed in (3, 6):

            def greedy(ids: np.ndarray, n: int = args.new, model: GPT2 = model) -> jax.Array:
                return generate(model, ids, max_new_tokens=n)

            def drafted(
                ids: np.ndarray, n: int = args.new, model: GPT2 = model, draft: GPT2 = draft, proposed: int = proposed
            ) -> jax.Array:
                return generate(model, ids, max_new_tokens=n, assistant_model=draft, num_assistant_tokens=proposed)

            times: dict[Callable, list[float]] = {greedy: [], drafted: []}
            for fn in times:  # compile
                for n in (args.new, 1):
                    fn(prompts[0], n)
            for ids in prompts[1:]:
                np.testing.assert_array_equal(greedy(ids), drafted(ids))
                for fn, found in times.items():
                    alone = [seconds(lambda n=n, fn=fn, ids=ids: fn(ids, n)) for n in (args.new, 1)]
                    found.append((alone[0] - alone[1]) / (args.new - 1))
            given = {"assistant_model": draft, "num_assistant_tokens": proposed, "output_scores": True}
            share = float(generate(model, prompts[1], max_new_tokens=args.new, **given).accepted.mean())
            one, other = (1e3 * statistics.median(found) for found in times.values())
            print(f"{scale:>5}  {proposed:>8}  {share:>8.2f}  {one:>9.2f}  {other:>8.2f}  {one / other:>7.2f}", flush=True)


if __name__ == "__main__":
    main()
