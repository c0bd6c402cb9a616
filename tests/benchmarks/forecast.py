"""Fits the rates of the expected times of `redeqx.dry_run` to published runs, and tests them on other published runs.

    python tests/benchmarks/forecast.py

Seconds of a step = FLOPs of matmuls / (rate * m) + FLOPs of attention / (rate * a), with the published rate of the chip, one
m for each chip, and one a for GPUs and one for TPUs, all at most 1, by least squares of the relative errors. FLOPs are those
of the recipe, with what it recomputes and without masked keys. Nothing is compiled. The runs are those of `recipes.py` and
more, taken in turns for two halves. Each half is forecast by the rates of the other.

`rank` is Spearman's correlation of seconds, which is high for any forecast, as steps take 2 to 98 s; *of rates* is that of
the FLOP/s that a chip reaches over its published ones.
"""

import argparse
from dataclasses import replace

import numpy as np
from recipes import LLAMA2_70B, RECIPES, TPU, Recipe, layer_flops

from redeqx.machine import GPUS, TPUS
from redeqx.models.llama import LlamaConfig

_8B, _70B = RECIPES["llama3.1-8b-v6e-8"], RECIPES["llama3.1-70b-v6e-32"]
_7X, _README = RECIPES["llama3.1-70b-tpu7x-64"], "AI-Hypercomputer/tpu-recipes, training/ironwood"
MORE = {
    "llama3.1-8b-v6e-16": replace(_8B, machine="v6e:4x4", seconds=3.393, source=f"{TPU}/Llama3.1-8B-MaxText/v6e-16"),
    "llama3.1-8b-v6e-32": replace(_8B, machine="v6e:4x8", seconds=3.495, source=f"{TPU}/Llama3.1-8B-MaxText/v6e-32"),
    "llama3.1-8b-v6e-64": replace(_8B, machine="v6e:8x8", rows=5, seconds=5.652, source=f"{TPU}/Llama3.1-8B-MaxText/v6e-64"),
    "llama3.1-8b-v6e-128": replace(
        _8B, machine="v6e:8x16", rows=4, seconds=4.602, source=f"{TPU}/Llama3.1-8B-MaxText/v6e-128"
    ),
    "llama3.1-8b-v6e-256": replace(
        _8B, machine="v6e:16x16", rows=4, seconds=4.546, source=f"{TPU}/Llama3.1-8B-MaxText/v6e-256"
    ),
    "llama3.1-70b-v6e-64": replace(_70B, machine="v6e:8x8", seconds=18.688, source=f"{TPU}/Llama3.1-70B-MaxText/v6e-64"),
    "llama3.1-70b-v6e-128": replace(
        _70B, machine="v6e:8x16", rows=4, seconds=34.786, source=f"{TPU}/Llama3.1-70B-MaxText/v6e-128"
    ),
    "llama3.1-70b-v6e-256": replace(
        _70B, machine="v6e:16x16", rows=5, seconds=42.656, source=f"{TPU}/Llama3.1-70B-MaxText/v6e-256"
    ),
    "llama2-70b-v6e-256": Recipe(
        LLAMA2_70B, "v6e:16x16", 2, 4096, 9.052, f"{TPU}/Llama2-70B-MaxText", ("attention", "out", "gate and up")
    ),
    "llama3.1-70b-tpu7x-256": replace(_7X, machine="tpu7x:4x8x8", seconds=12.27, source=_README),
    "llama3.1-405b-tpu7x-256": replace(
        _7X, config=LlamaConfig.of("llama3.1-405b"), machine="tpu7x:4x8x8", rows=3, seconds=98.34, source=_README
    ),
}
LEFT_OUT = ("qwen3-30b-a3b-h100", "mixtral-8x7b-v5p-128", "llama3-8b-262k-h100")  # experts, and products in fp8
RUNS = {**{name: run for name, run in RECIPES.items() if name not in LEFT_OUT}, **MORE}


def products(run: Recipe) -> tuple[str, float, float]:
    """Returns the chip of a run, and the seconds of a device's matmuls and of its attention at the chip's published rate."""
    config, (first, second) = run.config, run.machine.split(":")[:2]
    # An H200 computes as an H100 does.
    chip = GPUS[second.replace("h200-141gb", "h100-80gb")].chip if first == "gpu" else TPUS[first]
    a_layer, again = layer_flops(run), run.recomputed or ()
    n = run.rows * run.tokens
    matmul = n * 3 * 2 * config.d_model * config.vocab_size
    attention = 0.0
    for what, flops in a_layer.items():
        # The gradient of attention has five products for the two of its value.
        times = (3.5 if what == "attention" else 3) + (what in again)
        if what == "attention":
            attention += n * config.n_layers * flops * times
        else:
            matmul += n * config.n_layers * flops * times
    return chip.kind, matmul / chip.bfloat16, attention / chip.bfloat16


def family(kind: str) -> str:
    return "attention, " + ("TPU" if kind.startswith("TPU") else "GPU")


def fit(names: list[str]) -> dict[str, float]:
    """Returns the seconds for a second at the published rate, by chip for matmuls, and by family for attention."""
    found = [(products(RUNS[name]), RUNS[name].seconds) for name in names]
    columns = sorted({kind for (kind, *_), _ in found} | {family(kind) for (kind, *_), _ in found})
    a = np.zeros((len(found), len(columns)))
    for row, ((kind, matmul, attention), seconds) in zip(a, found, strict=True):
        row[columns.index(kind)], row[columns.index(family(kind))] = matmul / seconds, attention / seconds
    x = np.ones(len(columns))
    for _ in range(10_000):  # coordinate descent, each at least 1
        for j in range(len(columns)):
            others = a @ x - a[:, j] * x[j]
            x[j] = max(1.0, a[:, j] @ (1 - others) / (a[:, j] @ a[:, j]))
    return dict(zip(columns, x.tolist(), strict=True))


def forecast(x: dict[str, float], run: Recipe) -> float | None:
    kind, matmul, attention = products(run)
    return None if kind not in x else x[kind] * matmul + x[family(kind)] * attention


def rank_correlation(a: list[float], b: list[float]) -> float:
    one, two = (np.argsort(np.argsort(each)) for each in (a, b))
    return float(np.corrcoef(one, two)[0, 1])


def report(names: list[str], x: dict[str, float]) -> None:
    found = [(name, RUNS[name].seconds, forecast(x, RUNS[name]), sum(products(RUNS[name])[1:])) for name in names]
    for name, seconds, seen, _ in found:
        text = "no other run of this chip" if seen is None else f"{seen:.2f} | {seen / seconds - 1:+.0%}"
        print(f"| {name} | {seconds:.2f} | {text} |")
    known = [(seconds, seen, ideal) for _, seconds, seen, ideal in found if seen is not None]
    errors = [abs(seen / seconds - 1) for seconds, seen, _ in known]
    ranks = rank_correlation([row[0] for row in known], [row[1] for row in known])
    rates = rank_correlation([row[2] / row[0] for row in known], [row[2] / row[1] for row in known])
    print(
        f"{len(known)} runs: median error {np.median(errors):.1%}, largest {max(errors):.0%}; "
        f"rank {ranks:.2f}, of rates {rates:.2f}\n"
    )


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    names = sorted(RUNS, key=lambda name: (products(RUNS[name])[0], name))
    for half, other in ((names[::2], names[1::2]), (names[1::2], names[::2])):
        print("| run | published, s | forecast, s | error |\n|---|---|---|---|")
        report(half, fit(other))
    print("Fitted to all:")
    report(names, fit(names))
    for name, seconds in fit(names).items():
        print(f"{name}: {1 / seconds:.2f}")


if __name__ == "__main__":
    main()
