"""Reports of a text-to-text run: scores over steps, and outputs with their references."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

import redeqx

from .._records import checkpoint, curve
from .pairs import METRICS, Copy, Pair, best_copies, common_opening, copy_scores, rouge


def report(
    deployer: redeqx.Deployer, parts: tuple[Sequence[Pair], Sequence[Pair], Sequence[Pair]], outputs: Sequence[str]
) -> dict[str, float]:
    """Logs and draws the test scores with those of copying rules selected on validation. Returns the scores."""
    train, validation, test = parts
    workdir, folder, opening = deployer.workdir, deployer.local_workdir, common_opening(train)
    assert isinstance(workdir, Path) and folder is not None
    baselines = {"copied": best_copies(validation), f"{opening!r} + copied": best_copies(validation, opening)}
    reached, copied = rouge(test, outputs), [copy_scores(test, copies) for copies in baselines.values()]
    records = [{"source": s, "target": t, "output": o} for (s, t), o in zip(test, outputs, strict=True)]
    files = [draw(folder, baselines, test[:10], outputs[:10]), deployer.save_outputs(records, "test.jsonl")]
    files += [workdir / "model", *(checkpoint(workdir, f"argmax_{name}") for name in ("rouge2", "rougeL"))]

    table = {"": ("model", *baselines)}
    table |= {name: [f"{scores[name]:.2f}" for scores in (reached, *copied)] for name in METRICS}
    lines = [f"{name:8}" + "".join(f"{cell:>22}" for cell in cells) for name, cells in table.items()]
    chosen = "; ".join(f"{name}: {copy.name}" for name, copy in baselines["copied"].items())
    lines.append(f"copied by the rule that is best on validation; {chosen}")
    deployer.log_info("\n".join(lines), title=f"ROUGE F1 of {len(test):,} pairs of the test, in percent")
    deployer.log_info("\n".join(map(str, files)), title="picture, outputs, Hugging Face folder, best by ROUGE-2 and ROUGE-L")
    kinds = {"test": reached, "test_copy": copied[0], "test_opening_copy": copied[1]}
    return {f"{kind}_{name}": values[name] for kind, values in kinds.items() for name in METRICS}


def draw(workdir: Path, baselines: dict[str, dict[str, Copy]], pairs: Sequence[Pair], outputs: Sequence[str]) -> Path:
    """Draws `rouge.png`: validation scores over steps with those of copying rules as levels, and some texts of the test
    set."""
    figure = Figure(figsize=(14, 6), layout="constrained")
    curves, texts = figure.subplots(1, 2, width_ratios=(2, 3))
    for i, name in enumerate(METRICS):
        curves.plot(*curve(workdir, f"eval_{name}"), "o-", color=f"C{i}", label=name.replace("rouge", "ROUGE-"))
        for (kind, copies), style in zip(baselines.items(), ("--", ":"), strict=True):
            curves.axhline(copies[name].score, linestyle=style, color=f"C{i}", label=kind)
    curves.set(xlabel="step", ylabel="F1 on validation, %", ylim=(0, None))
    curves.legend(ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False, fontsize=8)
    blocks = []
    for (source, target), output in zip(pairs, outputs, strict=True):
        rows = {"source": source, "reference": target, "generated": output}
        blocks.append("\n".join(f"{name:11}{textwrap.shorten(text, 92)}" for name, text in rows.items()))
    texts.axis("off")
    texts.text(0, 1, "\n\n".join(blocks), va="top", family="monospace", fontsize=7.5, parse_math=False)
    figure.savefig(workdir / "rouge.png", dpi=150)
    return workdir / "rouge.png"
