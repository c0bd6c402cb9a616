"""What a run has written to its workdir: the values of a metric over steps, and its best checkpoint."""

import json
from pathlib import Path


def curve(workdir: Path, name: str) -> tuple[list[int], list[float]]:
    """Returns the steps at which a metric was recorded in `metrics.jsonl`, and its values."""
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text("utf-8").splitlines()]
    return [line["step"] for line in lines if name in line], [line[name] for line in lines if name in line]


def checkpoint(workdir: Path, tag: str) -> Path:
    """Returns the folder of a checkpoint by its name in the index, such as `argmin_loss`."""
    return workdir / "ckpts" / json.loads((workdir / "ckpts/index.json").read_text("utf-8"))[tag]
