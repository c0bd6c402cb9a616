"""Reports of a text-to-text run: test scores beside those of copying rules, and scores over steps."""

from collections.abc import Sequence
from pathlib import Path

import redeqx
from examples._records import checkpoint, curve, draw_curves
from examples.text_to_text.pairs import METRICS, Pair, best_copies, common_opening, copy_scores, rouge


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
    curves = {name: curve(folder, f"eval_{name}") for name in METRICS}
    levels = {f"{name}, {kind}": copies[name].score for name in METRICS for kind, copies in baselines.items()}
    draw_curves(folder / "rouge.png", curves, levels, xlabel="step", ylabel="F1 on validation, %", ylim=(0, None))
    files = [folder / "rouge.png", deployer.save_outputs(records, "test.jsonl")]
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
