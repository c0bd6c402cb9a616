"""Writes torch's outputs for every case to `tests/models/golden/`, so that `make test` can compare with them without torch.

python -m tests.models.families._make_golden [NAME ...]
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from tests.models.families import _generation
from tests.models.families._case import collect, golden_path, shapes, torch_folder, weights_file


def main(names: list[str]) -> None:
    for case in collect("CASES"):
        if names and case.name not in names:
            continue
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            outputs = case.run(torch_folder(case, Path(folder)), case.inputs).numpy()
            record = {
                "config": json.loads((Path(folder) / "config.json").read_text()),
                "file": weights_file(Path(folder)).name,
                "tensors": shapes(weights_file(Path(folder))),
                "shape": list(outputs.shape),
                "outputs": [float(f"{x:.7g}") for x in np.asarray(outputs, np.float64).ravel()],
            }
            if case.generates:
                module = torch_folder(case, Path(folder))
                tokens = {name: _generation.theirs(module, case, name).tolist() for name in _generation.searches(case)}
                path = _generation.golden_path(case.name)
                path.parent.mkdir(exist_ok=True)
                path.write_text(json.dumps(tokens, separators=(",", ":")) + "\n")
        golden_path(case).write_text(json.dumps(record, separators=(",", ":")) + "\n")
        print(f"{golden_path(case).name}: {golden_path(case).stat().st_size:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
