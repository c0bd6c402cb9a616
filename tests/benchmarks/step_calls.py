"""Counts the calls and the files that one steady step of a fit passes through in the library.

    python tests/benchmarks/step_calls.py

A steady step is one whose program is compiled, without an evaluation or a save. Comprehensions are not counted. A move is a
call from a function of one file to a function of another.

30 November 2026: 37 calls of 32 functions in 10 files, 13 moves between files.
"""

import pathlib
import sys
from collections import Counter

import equinox as eqx
import jax
import numpy as np
import optax

import redeqx

FOLDER = pathlib.Path(redeqx.__file__).parent


def loss_fn(model, batch, key):
    return (jax.vmap(model)(batch) ** 2).mean()


def main() -> None:
    model, examples = eqx.nn.MLP(4, 2, 8, 2, key=jax.random.key(0)), np.ones((160, 4), np.float32)
    trainer = redeqx.Trainer(
        redeqx.Deployer(verbose=False), model=model, optimizer=optax.adam(1e-3), collate_fn=np.stack, loss_fn=loss_fn
    )
    calls: list[tuple[str, str, str | None]] = []
    steps = 0

    def profile(frame, event, arg):
        nonlocal steps
        if event != "call" or FOLDER not in (path := pathlib.Path(frame.f_code.co_filename)).parents:
            return
        name = frame.f_code.co_name
        if name == "queue" and path.name == "_engine.py":
            steps += 1
        if steps == 10 and not name.startswith("<"):  # one step, after those that compile
            caller = frame.f_back.f_code.co_filename
            calls.append((str(path.relative_to(FOLDER)), name, caller))

    sys.setprofile(profile)
    try:
        trainer.fit(examples, batch_size=8, n_epochs=1)
    finally:
        sys.setprofile(None)
    files = Counter(file for file, _, _ in calls)
    moves = sum(str(FOLDER / file) != caller for file, _, caller in calls)
    n_functions = len({call[:2] for call in calls})
    print(f"{len(calls)} calls of {n_functions} functions in {len(files)} files, {moves} moves between files")
    for file, n in files.most_common():
        print(f"{n:5} {file}: {', '.join(dict.fromkeys(name for of, name, _ in calls if of == file))}")


if __name__ == "__main__":
    main()
