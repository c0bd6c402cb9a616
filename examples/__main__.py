"""Runs every example in full and prints their scores as a table: `python -m examples`, or `make examples`.

    python -m examples
    python -m examples meta_learning lora

Each run has its own process and folder, where `log.txt` holds its output. Exits with 1 if an example does not reach its
expected score.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

Scores = Mapping[str, float]


@dataclass(frozen=True)
class Run:
    """A full run: its command-line arguments, the format of its scores, the target, and the check whether it is reached."""

    command: str
    show: str  # a format string for the scores
    to_reach: str
    reaches: Callable[[Scores], bool] = lambda scores: True

    @property
    def name(self) -> str:
        return self.command.split()[0]


RUNS = (
    Run("classification_regression", "accuracy {test_accuracy:.2%}", ">= 98 %", lambda s: s["test_accuracy"] >= 0.98),
    Run("classification_regression --task diabetes", "R2 {test_r2:.3f}", "-"),
    Run(
        "text_to_text",
        "ROUGE-2 {test_rouge2:.3f}, ROUGE-L {test_rougeL:.3f}; copies {test_copy_rouge2:.3f}, {test_copy_rougeL:.3f}",
        "better than copies",
        lambda s: all(s[f"test_{name}"] > s[f"test_copy_{name}"] for name in ("rouge1", "rouge2", "rougeL")),
    ),
    Run("language_modeling", "{test_bits_per_byte:.3f} bits per byte", "<= 1.5", lambda s: s["test_bits_per_byte"] <= 1.5),
    Run("instruction_tuning", "exact replies {test_exact:.1%}", ">= 90 %", lambda s: s["test_exact"] >= 0.9),
    Run(
        "preference_optimization",
        "preferred {test_preferred:.1%}, reference {test_reference_preferred:.1%}; right {test_right:.1%}, reference "
        "{test_reference_right:.1%}",
        "30 points more preferred, at most 3 fewer right",
        lambda s: (
            s["test_preferred"] >= s["test_reference_preferred"] + 0.3
            and s["test_right"] >= s["test_reference_right"] - 0.03
        ),
    ),
    Run("reward_model", "accuracy {test_accuracy:.1%}", ">= 90 %", lambda s: s["test_accuracy"] >= 0.9),
    Run(
        "grpo",
        "reward {test_base_reward:.3f} -> {test_reward:.3f}, right {test_base_right:.1%} -> {test_right:.1%}, gap of "
        "log-probabilities {test_log_prob_gap:.0e}",
        "reward >= 0.9, gap <= 1e-5",
        lambda s: s["test_reward"] >= 0.9 and s["test_log_prob_gap"] <= 1e-5,
    ),
    Run("image_to_text", "exact {test_exact:.2%}", ">= 95 %", lambda s: s["test_exact"] >= 0.95),
    Run("text_to_image", "agreement {test_agreement:.2%}", ">= 90 %", lambda s: s["test_agreement"] >= 0.9),
    Run(
        "federated_learning",
        "accuracy {test_accuracy:.2%}, centralised {test_centralised_accuracy:.2%}",
        "within 2 points",
        lambda s: s["test_accuracy"] >= s["test_centralised_accuracy"] - 0.02,
    ),
    Run(
        "meta_learning",
        "error {test_error_before:.2f} -> {test_error_after:.3f}, pretrained {test_pretrained_error_after:.2f}",
        "<= 1/10, << pretrained",
        lambda s: s["test_ratio"] <= 0.1 and s["test_error_after"] < 0.5 * s["test_pretrained_error_after"],
    ),
    Run(
        "reinforcement_learning ppo --env CartPole-v1",
        "return {test_return:.1f}",
        ">= 475",
        lambda s: s["test_return"] >= 475,
    ),
    Run(
        "reinforcement_learning ppo --env Acrobot-v1",
        "return {test_return:.1f}",
        ">= -100",
        lambda s: s["test_return"] >= -100,
    ),
    Run("reinforcement_learning ddpg", "return {test_return:.1f}", ">= -250", lambda s: s["test_return"] >= -250),
    Run(
        "reinforcement_learning maddpg",
        "return {test_return:.1f}, independent {test_independent_return:.1f}, random {test_random_return:.1f}",
        "above both",
        lambda s: s["test_return"] > max(s["test_independent_return"], s["test_random_return"]),
    ),
    Run(
        "lora",
        "accuracy {test_lora_accuracy:.2%}, full {test_full_accuracy:.2%}, {test_trained_share:.2%} trained",
        "within 1 point, < 2 %",
        lambda s: s["test_lora_accuracy"] >= s["test_full_accuracy"] - 0.01 and s["test_trained_share"] < 0.02,
    ),
    Run(
        "private_training",
        "accuracy {test_accuracy_eps1:.2%}, {test_accuracy_eps3:.2%}, {test_accuracy_eps8:.2%} at epsilon 1, 3, 8; "
        "public {test_accuracy_public:.2%}",
        "-",
    ),
    Run(
        "adversarial_training",
        "distance {test_distance:.2f}, real {test_real_distance:.2f}, rarest digit {test_rarest_share:.1%}",
        "<= 1.5 x real, each digit >= 3 %",
        lambda s: s["test_distance"] <= 1.5 * s["test_real_distance"] and s["test_rarest_share"] >= 0.03,
    ),
    Run("bring_your_own", "accuracy {test_accuracy:.2%}", "-"),
)


@dataclass(frozen=True)
class Args:
    names: Annotated[tuple[str, ...], tyro.conf.Positional] = ()  # The examples to run. All by default.
    workdir: Path = Path("workdir/examples")  # Gets a folder for each invocation, with one folder for each run.


def read_scores(workdir: Path) -> dict[str, float]:
    """Returns the last scores of a run, from its `metrics.jsonl`."""
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text("utf-8").splitlines()]
    return next(line for line in reversed(lines) if any(name.startswith("test_") for name in line))


def execute(run: Run, workdir: Path) -> tuple[str, bool]:
    """Executes a run. Returns its formatted scores and whether they reach the target."""
    workdir.mkdir(parents=True)
    with (workdir / "log.txt").open("w") as log:
        command = [sys.executable, "-m", f"examples.{run.command.split()[0]}", *run.command.split()[1:]]
        process = subprocess.run([*command, "--workdir", str(workdir)], stdout=log, stderr=subprocess.STDOUT, check=False)
    if process.returncode:
        return f"failed: see {workdir / 'log.txt'}", False
    scores = read_scores(workdir)
    return run.show.format(**scores), run.reaches(scores)


def main(args: Args) -> int:
    known = {run.name for run in RUNS}
    if unknown := [name for name in args.names if name not in known]:
        raise ValueError(
            f"`names`: expected some of {', '.join(sorted(known))}, got {', '.join(unknown)}. Pass known names."
        )
    console = Console()
    table = Table("example", "result", "to reach", "reached", "time", "lines of main.py")
    folder = args.workdir / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    n_missed = 0
    for i, run in enumerate(run for run in RUNS if not args.names or run.name in args.names):
        start = time.monotonic()
        result, reached = execute(run, folder / f"{i:02}_{run.name}")
        minutes, seconds = divmod(round(time.monotonic() - start), 60)
        n_lines = len((Path(__file__).parent / run.name / "main.py").read_text("utf-8").splitlines())
        row = (run.command, result, run.to_reach, "yes" if reached else "NO", f"{minutes}:{seconds:02}", str(n_lines))
        console.print("  ".join(row))
        table.add_row(*row)
        n_missed += not reached
    console.print(table)
    return min(n_missed, 1)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, prog="python -m examples", description=__doc__)))
