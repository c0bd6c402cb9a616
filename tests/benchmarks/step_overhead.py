"""Overhead of `Trainer.fit` over a hand-written `eqx.filter_jit` loop: per step in steady state, and of the first step.

Both sides have the same model, loss, optimizer, mesh, placement and data, and take turns in one process. `fit` shuffles,
collates, transfers batches and logs (console, `metrics.jsonl`, a tracker), and saves nothing. The loop's step also computes
the loss and the gradient norm, because `fit` logs them, but does not read them back; its batches are collated beforehand.

- *fit* is the time between the metrics of two steps; *whole call* is the time of `fit`, including set-up, per step.
- *flat* is the loop's step under `jax.jit` over flat lists of arrays: the least that a call of a step costs.
- Processor time is summed over all threads, including the step's own. The difference to *flat* is the host's other work;
  other programs on the machine affect it less than wall time.
- The first step is measured in fresh processes, from a model in memory to the end of the step, including compilation.
- Ratios and differences are computed within a round; printed are their medians and quartiles over the rounds.

    python tests/benchmarks/step_overhead.py              # one device, and 8 simulated ones as data=4 x model=2

Measured on 2 quiet cores, 30 November 2026, two rounds: fit over the loop 0.55 (GPT-2) and 0.86 (500 leaves) on one device,
0.89 (GPT-2) on eight; first steps 1.02, 1.09 and 1.05. On 29 November 0.62, 0.84 and 0.81, and 0.83 (500 leaves on eight),
first steps 1.04 to 1.22; on 27 November 0.53, 0.88, 0.86 and 0.81.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec as P

import redeqx
from redeqx._tree import map_named
from redeqx.models.gpt2 import GPT2, GPT2Config

MODEL_SHARDS = {1: 1, 8: 2}  # by number of devices
OPTIMIZER = optax.adamw(1e-3)


@dataclass(frozen=True)
class Case:
    """A model and its data, with `rows` per global batch and `steps` per turn."""

    name: str
    make_model: Callable[[], eqx.Module]
    loss_fn: Callable[..., Any]
    row: Callable[[np.random.Generator], np.ndarray]
    rows: int
    steps: int

    def examples(self, n_steps: int) -> list[np.ndarray]:
        rng = np.random.default_rng(0)
        return [self.row(rng) for _ in range(n_steps * self.rows)]


class Leaves(eqx.Module):
    """Five hundred arrays of eight numbers: little to compute, many arguments to pass."""

    leaves: list[jax.Array]

    def __init__(self):
        self.leaves = list(np.random.default_rng(0).normal(size=(500, 8)).astype(np.float32))
        self.leaves = [jnp.asarray(leaf) for leaf in self.leaves]


def leaves_loss(model: Any, batch: jax.Array, key: Any) -> jax.Array:
    return jnp.mean((batch @ sum(model.leaves)) ** 2)


def gpt2_loss(model: Any, ids: jax.Array, key: Any) -> jax.Array:
    logits = jax.vmap(model)(ids)
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], ids[:, 1:]).mean()


def small_gpt2() -> GPT2:
    """Creates a GPT-2 whose step takes about 50 ms on two cores."""
    config = GPT2Config(
        vocab_size=512,
        n_positions=64,
        d_model=128,
        n_layers=2,
        n_heads=4,
        embedding_dropout=0.0,
        attention_dropout=0.0,
        residual_dropout=0.0,
    )
    return GPT2(config, key=jax.random.key(0))


CASES = {
    case.name: case
    for case in (
        Case("gpt2", small_gpt2, gpt2_loss, lambda rng: rng.integers(0, 512, 64, np.int32), rows=16, steps=40),
        Case("500 leaves", Leaves, leaves_loss, lambda rng: rng.normal(size=8).astype(np.float32), rows=8, steps=200),
    )
}


# --- both sides ---------------------------------------------------------------------------------------------------------

# Trains `n_steps` steps; returns milliseconds per step, in wall and processor time, by the name of the measurement.
Turn = Callable[[int], dict[str, tuple[float, float]]]


def now() -> np.ndarray:
    """Returns milliseconds of wall and processor time."""
    return 1e3 * np.array([time.perf_counter(), time.process_time()])


class Clock:
    """A tracker that records when each step's metrics arrive."""

    def __init__(self):
        self.times: list[np.ndarray] = []

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.times.append(now())


def by_fit(case: Case, workdir: str, n_devices: int, model: Any) -> Turn:
    clock = Clock()
    deployer = redeqx.Deployer(n_model_shards=MODEL_SHARDS[n_devices], workdir=workdir, loggers=[clock])
    trainer = redeqx.Trainer(deployer, model=model, optimizer=OPTIMIZER, collate_fn=np.stack, loss_fn=case.loss_fn)

    def turn(n_steps: int) -> dict[str, tuple[float, float]]:
        examples = case.examples(n_steps)
        clock.times.clear()
        began = now()
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            trainer.fit(examples, case.rows // deployer.n_batch_shards, n_epochs=1, save_end=False)
        whole = now() - began
        # Metrics are read a few steps late; after that, they arrive at the rate of the steps.
        skipped = min(4, n_steps - 1)
        steady = (clock.times[-1] - clock.times[skipped]) / max(n_steps - 1 - skipped, 1)
        return {"fit": tuple(steady), "whole call": tuple(whole / n_steps)}

    return turn


def layout(case: Case, n_devices: int, model: Any) -> tuple[Any, Any, Any]:
    """Returns the shardings of parameters, optimizer state and batch under `fit`; a user would write these by hand."""
    deployer = redeqx.Deployer(n_model_shards=MODEL_SHARDS[n_devices], verbose=False)
    params = eqx.filter(model, eqx.is_array)
    plan = deployer.plan(model, case.loss_fn, np.stack(case.examples(1)))
    placed = map_named(lambda name, _: plan.sharding(name), params)
    whole = NamedSharding(deployer.mesh, P())
    opt_placed = optax.tree_utils.tree_map_params(
        OPTIMIZER,
        lambda _, where: where,
        jax.eval_shape(OPTIMIZER.init, params),
        placed,
        transform_non_params=lambda _: whole,
    )
    return placed, opt_placed, NamedSharding(deployer.mesh, P(("data", "fsdp")))


def make_step(case: Case, static: Any) -> Callable[..., Any]:
    """Returns `(params, opt_state, batch) -> (params, opt_state, loss, gradient norm)`."""

    def step(params: Any, opt_state: Any, batch: jax.Array) -> tuple[Any, Any, jax.Array, jax.Array]:
        loss, grads = jax.value_and_grad(lambda p: case.loss_fn(eqx.combine(p, static), batch, None))(params)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return eqx.apply_updates(params, updates), opt_state, loss, optax.tree_utils.tree_norm(grads)

    return step


def by_loop(case: Case, model: Any, where: tuple[Any, Any, Any]) -> Turn:
    placed, opt_placed, rows = where
    params, static = eqx.partition(model, eqx.is_array)
    step = make_step(case, static)

    @eqx.filter_jit(donate="all-except-first")
    def filtered(batch: jax.Array, model: Any, opt_state: Any) -> Any:
        params, opt_state, loss, norm = step(eqx.filter(model, eqx.is_array), opt_state, batch)
        # Without the constraint the sharding changes, and the step recompiles.
        pinned = jax.lax.with_sharding_constraint((params, opt_state), (placed, opt_placed))
        return eqx.combine(pinned[0], static), pinned[1], loss, norm

    params = jax.device_put(params, placed)
    state: Any = (eqx.combine(params, static), jax.jit(OPTIMIZER.init, out_shardings=opt_placed)(params))

    def turn(n_steps: int) -> dict[str, tuple[float, float]]:
        nonlocal state
        batches = np.split(np.stack(case.examples(n_steps)), n_steps)
        loss = None
        began = now()
        for batch in batches:
            *state, loss, _ = filtered(jax.device_put(batch, rows), *state)
        jax.block_until_ready((loss, eqx.filter(state, eqx.is_array)))
        return {"loop": tuple((now() - began) / n_steps)}

    return turn


def by_flat(case: Case, model: Any, where: tuple[Any, Any, Any]) -> Turn:
    placed, opt_placed, rows = where
    params, static = eqx.partition(model, eqx.is_array)
    treedefs = jax.tree.structure(params), jax.tree.structure(opt_placed)
    step = make_step(case, static)

    def flat(params: list[Any], opt_state: list[Any], batch: jax.Array) -> Any:
        trees = [jax.tree.unflatten(*pair) for pair in zip(treedefs, (params, opt_state), strict=True)]
        params, opt_state, loss, norm = step(*trees, batch)
        return jax.tree.leaves(params), jax.tree.leaves(opt_state), loss, norm

    shardings = (jax.tree.leaves(placed), jax.tree.leaves(opt_placed))
    flat = jax.jit(flat, donate_argnums=(0, 1), out_shardings=(*shardings, None, None))
    params = jax.device_put(params, placed)
    state = [jax.tree.leaves(params), jax.tree.leaves(jax.jit(OPTIMIZER.init, out_shardings=opt_placed)(params))]

    def turn(n_steps: int) -> dict[str, tuple[float, float]]:
        nonlocal state
        batches = np.split(np.stack(case.examples(n_steps)), n_steps)
        began = now()
        for batch in batches:
            *state, _, _ = flat(*state, jax.device_put(batch, rows))
        jax.block_until_ready(state)
        return {"flat": tuple((now() - began) / n_steps)}

    return turn


# --- processes: the number of devices is fixed when JAX starts, and a first step is first only once --------------------


def measure_steady(case: Case, n_devices: int, rounds: int) -> list[dict[str, tuple[float, float]]]:
    where = layout(case, n_devices, case.make_model())
    with tempfile.TemporaryDirectory() as workdir:
        turns = [  # one model each: steps donate their arguments
            by_loop(case, case.make_model(), where),
            by_fit(case, workdir, n_devices, case.make_model()),
            by_flat(case, case.make_model(), where),
        ]
        for turn in turns:
            turn(8)
        orders = [turns[i % len(turns) :] + turns[: i % len(turns)] for i in range(rounds)]  # another order in each round
        return [{name: ms for turn in order for name, ms in turn(case.steps).items()} for order in orders]


def measure_first(case: Case, n_devices: int, side: str) -> float:
    model = jax.block_until_ready(eqx.filter_jit(case.make_model)())
    where = layout(case, n_devices, model) if side == "loop" else None
    with tempfile.TemporaryDirectory() as workdir:
        began = time.perf_counter()
        turn = by_fit(case, workdir, n_devices, model) if where is None else by_loop(case, model, where)
        turn(1)
        return time.perf_counter() - began  # before `turn` frees its model and programs


def in_process(*arguments: Any) -> Any:
    """Runs this script in a fresh process; returns the JSON that it prints."""
    command = [sys.executable, __file__, *map(str, arguments)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=900).stdout)


def quartiles(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.2f} ({low:.2f}, {high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", choices=MODEL_SHARDS, default=list(MODEL_SHARDS))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=9, help="turns that each side takes, at least 2")
    parser.add_argument("--first-rounds", type=int, default=3, help="fresh processes for each side's first step; 0 for none")
    parser.add_argument("--measure", choices=("steady", "fit", "loop"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        case, n_devices = CASES[args.cases[0]], args.devices[0]
        redeqx.simulate_devices(n_devices)
        if args.measure == "steady":
            print(json.dumps(measure_steady(case, n_devices, args.rounds)))
        else:
            print(json.dumps(measure_first(case, n_devices, args.measure)))
        return

    for n_devices in args.devices:
        for name in args.cases:
            what = ("--devices", n_devices, "--cases", name, "--rounds", args.rounds)
            rounds = in_process("--measure", "steady", *what)
            print(f"\n{name}, {n_devices} device{'s' * (n_devices > 1)}, {args.rounds} rounds of {CASES[name].steps} steps")
            print(f"  {'':12}{'ms a step':28}{'over the loop':28}{'processor ms a step':28}minus flat")
            for side in ("flat", "loop", "fit", "whole call"):
                columns = (
                    quartiles([r[side][0] for r in rounds]),
                    quartiles([r[side][0] / r["loop"][0] for r in rounds]),
                    quartiles([r[side][1] for r in rounds]),
                    quartiles([r[side][1] - r["flat"][1] for r in rounds]),
                )
                print(f"  {side:12}" + "".join(f"{column:28}" for column in columns).rstrip(), flush=True)
            seconds = {
                side: [in_process("--measure", side, *what) for _ in range(args.first_rounds)] for side in ("loop", "fit")
            }
            if args.first_rounds > 1:
                ratio = statistics.median(seconds["fit"]) / statistics.median(seconds["loop"])
                each = ", ".join(f"{side} " + " ".join(f"{s:.2f}" for s in taken) for side, taken in seconds.items())
                print(f"  first step: {ratio:.2f}x the loop's; seconds: {each}", flush=True)


if __name__ == "__main__":
    main()
