"""Tasks for meta-learning: sinusoids, and Omniglot's characters. An example is a task: a support set and a query set."""

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import numpy as np
from einops import rearrange, repeat

from examples._images import read_image

N_STEPS, AFTER = 10, 5  # steps of adaptation at test time, and the number after which the error is reported
SHOWN = (0, 1, AFTER, N_STEPS)  # the numbers of steps whose results are printed and drawn
SIZE = 28  # height and width of characters after resizing, in pixels

Batch = dict[str, np.ndarray]  # support_x, support_y, query_x, query_y, each [tasks, points, ...]


class Tasks(Protocol):
    """A source of tasks. numpy draws them as the numbers from which `collate_fn` builds arrays."""

    def draw(self, n_tasks: int, n_query: int, seed: Sequence[int]) -> np.ndarray: ...

    def collate_fn(self, tasks: list[np.ndarray]) -> Batch: ...


@dataclass(frozen=True)
class Sinusoids:
    """y = amplitude * sin(x - phase), as in section 5.1 of the paper. A task is a row: amplitude, phase, then x."""

    n_shots: int

    def draw(self, n_tasks: int, n_query: int, seed: Sequence[int]) -> np.ndarray:
        rng = np.random.default_rng(seed)
        amplitudes, phases = rng.uniform(0.1, 5.0, (n_tasks, 1)), rng.uniform(0, np.pi, (n_tasks, 1))
        x = rng.uniform(-5, 5, (n_tasks, self.n_shots + n_query))
        return np.concatenate([amplitudes, phases, x], axis=1, dtype=np.float32)

    def collate_fn(self, tasks: list[np.ndarray]) -> Batch:
        rows = np.stack(tasks)[:, :, None]  # (tasks, 2 + points, 1)
        amplitudes, phases, x = rows[:, :1], rows[:, 1:2], rows[:, 2:]
        y, k = amplitudes * np.sin(x - phases), self.n_shots
        return {"support_x": x[:, :k], "support_y": y[:, :k], "query_x": x[:, k:], "query_y": y[:, k:]}


@dataclass(frozen=True)
class Characters:
    """Classification of `n_ways` characters from `n_shots` drawings of each. A task is a table of images, one row for each
    class."""

    images: np.ndarray  # (images, SIZE, SIZE) of uint8, ink is 255
    classes: list[np.ndarray]  # the images of each class
    n_ways: int
    n_shots: int

    def draw(self, n_tasks: int, n_query: int, seed: Sequence[int]) -> np.ndarray:
        rng = np.random.default_rng(seed)
        n_drawings = self.n_shots + n_query

        def one() -> list[np.ndarray]:
            chosen = rng.choice(len(self.classes), self.n_ways, replace=False)
            return [rng.choice(self.classes[i], n_drawings, replace=False) for i in chosen]

        return np.array([one() for _ in range(n_tasks)])

    def collate_fn(self, tasks: list[np.ndarray]) -> Batch:
        images = self.images[np.stack(tasks)].astype(np.float32) / 255
        support, query = np.split(images, [self.n_shots], axis=2)

        def points(part: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            labels = repeat(np.arange(self.n_ways, dtype=np.int32), "n -> b (n k)", b=len(part), k=part.shape[2])
            return rearrange(part, "b n k h w -> b (n k) 1 h w"), labels

        return dict(zip(("support_x", "support_y", "query_x", "query_y"), (*points(support), *points(query)), strict=True))


def omniglot(path: Path, n_ways: int, n_shots: int, n_query: int) -> tuple[Characters, Characters, Characters]:
    """Reads characters for training, validation and testing. No character is in two of these parts.

    In training, each rotation of a character by 90 degrees is a separate class. The other parts keep the original
    orientation.

    **Arguments:**

    - `path`: a folder with `alphabet/character/*.png`, or its .zip.

    Raises ValueError if there are too few characters, or too few drawings of one.
    """
    drawings = _read(path)
    if len(drawings) < 3 * n_ways:
        raise ValueError(
            f"`{path}`: expected at least {3 * n_ways} characters, {n_ways} each for training, validation and testing, got "
            f"{len(drawings)}. Pass a folder with `alphabet/character/*.png`, or lower --n-ways."
        )
    for name, found in drawings.items():
        if len(found) < n_shots + n_query:
            raise ValueError(
                f"`{path}` character {name!r}: expected at least {n_shots} drawings to adapt on + {n_query} queries, got "
                f"{len(found)}. Lower --n-shots or --n-query."
            )
    upright = np.stack([image for found in drawings.values() for image in found])
    images = np.concatenate([np.rot90(upright, turns, axes=(1, 2)) for turns in range(4)])
    ends = np.cumsum([len(found) for found in drawings.values()])
    classes = np.split(np.arange(len(upright)), ends[:-1])
    order = np.random.default_rng(0).permutation(len(classes))  # the same parts for every seed
    n = max(n_ways, len(classes) // 5)
    test, validation, train = ([classes[i] for i in part] for part in np.split(order, [n, 2 * n]))
    turned = [drawn + turns * len(upright) for turns in range(4) for drawn in train]
    train, validation, test = (Characters(images, part, n_ways, n_shots) for part in (turned, validation, test))
    return train, validation, test


def _read(path: Path) -> dict[str, list[np.ndarray]]:
    """Returns the drawings of each character, by the name of its folder, from a folder or a .zip of it."""
    if zipfile.is_zipfile(path):
        with TemporaryDirectory() as folder:
            zipfile.ZipFile(path).extractall(folder)
            return _read(Path(folder))
    if not path.is_dir():
        found = "a file of another kind" if path.exists() else "none"
        raise ValueError(f"`{path}`: expected a folder or a .zip of `alphabet/character/*.png`, got {found}. Pass one.")
    drawings: dict[str, list[np.ndarray]] = {}
    for file in sorted(path.rglob("*.png")):
        ink = 1 - read_image(file, SIZE, 1)[0]  # the files have black ink on white
        drawings.setdefault(file.parent.relative_to(path).as_posix(), []).append((255 * ink).round().astype(np.uint8))
    return drawings


# --- sizes --------------------------------------------------------------------------------------------------------------

RECIPES: dict[str, dict[str, Any]] = {
    "sinusoids": {
        "n_shots": 10, "n_query": 10, "width": 40, "inner_rate": 0.01, "tasks_per_epoch": 50_000, "n_epochs": 35,
        "batch_size": 100, "learning_rate": 3e-3, "n_validation_tasks": 1000,
    },
    "omniglot": {
        "n_shots": 1, "n_query": 5, "width": 32, "inner_rate": 0.4, "tasks_per_epoch": 3200, "n_epochs": 5,
        "batch_size": 16, "learning_rate": 3e-3, "n_validation_tasks": 200,
    },
}  # fmt: skip


def filled(args: Any) -> Any:
    """Returns the arguments of a run, with the values of RECIPES for those that are None."""
    recipe = RECIPES["sinusoids" if args.data is None else "omniglot"]
    args = replace(args, **{name: value for name, value in recipe.items() if getattr(args, name) is None})
    args.check_positive(*(name for name, value in vars(args).items() if type(value) is int and name != "seed"))
    return args
