"""Time per generated token: `redeqx.models.generate` against a single decode step, and against transformers.

    python tests/benchmarks/generation.py [--rounds 5] [--new 64]

Prints milliseconds per token for prompts of several lengths: of one decode step as its own program (the lower bound: it
reads all weights and the whole cache once), of `generate` without its prefill, and of transformers' `generate` on torch with
its cache. The three alternate in one run; medians over the rounds are printed. The last column is the number of
compilations after the first call of each shape, which should be 0.
"""

import os

os.environ.setdefault("NPROC", "16")

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

from redeqx.models import from_pretrained, generate

BATCH, VOCAB, WIDTH, LAYERS, HEADS = 8, 8192, 384, 6, 6
PROMPTS = (16, 128, 512, 1024)


def seconds(fn: Callable[[], object]) -> float:
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new", type=int, default=64)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=2048, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, bos_token_id=0, eos_token_id=None
    )
    torch.manual_seed(0)
    module = transformers.GPT2LMHeadModel(config).eval()
    with tempfile.TemporaryDirectory() as folder:
        module.save_pretrained(folder)
        model = eqx.nn.inference_mode(from_pretrained(folder)[0])
    n_compiled = [0]
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration, **kwargs: n_compiled.__setitem__(
            0, n_compiled[0] + event.endswith("backend_compile_duration")
        )
    )

    print(f"GPT-2 of {LAYERS} layers, width {WIDTH}, vocabulary {VOCAB}, float32, {BATCH} rows")
    print(f"ms a token, median of {args.rounds}")
    print(f"{'prompt':>6}  {'step':>7}  {'redeqx':>7}  {'of step':>7}  {'torch':>7}  {'of torch':>8}  compiled again")
    rng = np.random.default_rng(0)
    for prompt in PROMPTS:
        prompts = [rng.integers(1, VOCAB, (BATCH, prompt)) for _ in range(args.rounds + 1)]
        step = decode_steps(model, prompts[0], args.new)
        times: dict[str, list[float]] = {"step": [], "redeqx": [], "torch": []}

        def ours(ids: np.ndarray, n: int) -> float:
            return seconds(lambda: generate(model, ids, max_new_tokens=n, eos_token_id=()).block_until_ready())

        def theirs(ids: np.ndarray, n: int) -> float:
            tensor = torch.tensor(ids)
            mask = torch.ones_like(tensor)
            with torch.no_grad():
                return seconds(lambda: module.generate(tensor, attention_mask=mask, max_new_tokens=n, do_sample=False))

        for ids in prompts[:1]:  # compile, warm up
            for fn in (ours, theirs):
                fn(ids, args.new), fn(ids, 1)
            step()
        before = n_compiled[0]
        for ids in prompts[1:]:
            times["step"].append(step())
            times["redeqx"].append((ours(ids, args.new) - ours(ids, 1)) / (args.new - 1))
            times["torch"].append((theirs(ids, args.new) - theirs(ids, 1)) / (args.new - 1))
        alone, redeqx, other = (1e3 * statistics.median(times[name]) for name in ("step", "redeqx", "torch"))
        again = n_compiled[0] - before
        ratios = redeqx / alone, redeqx / other
        print(f"{prompt:>6}  {alone:>7.2f}  {redeqx:>7.2f}  {ratios[0]:>7.2f}  {other:>7.2f}  {ratios[1]:>8.2f}  {again}")


def decode_steps(model: eqx.Module, ids: np.ndarray, n_new: int) -> Callable[[], float]:
    """Returns a function that runs single decode steps after the prompts, one call each, and returns seconds per step."""
    length = ids.shape[1] + n_new - 1
    begin = lambda ids: model.decode(ids, model.init_cache(length))  # noqa: E731
    axes = eqx.filter_eval_shape(begin, jnp.asarray(ids[0]))[1].axes()
    _, cache = jax.jit(jax.vmap(begin, out_axes=(0, axes)))(jnp.asarray(ids))
    decode = jax.vmap(lambda token, cache: model.decode(token, cache), (0, axes), (0, axes))
    one = jax.jit(lambda token, cache: decode(token, cache), donate_argnums=1)
    state = [cache]
    token = jnp.asarray(ids[:, -1:])

    def run() -> float:
        n = 8
        start = time.perf_counter()
        for _ in range(n):
            logits, state[0] = one(token, state[0])
            # Always the same slot, so that the cache never overflows.
            state[0] = eqx.tree_at(lambda c: c.index, state[0], jnp.int32(ids.shape[1]))
        logits.block_until_ready()
        return (time.perf_counter() - start) / n

    return run


if __name__ == "__main__":
    main()
