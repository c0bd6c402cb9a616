"""A training run, compiled for devices that need not be there: whether it fits, what it holds, sends and computes.

Nothing is allocated: models, optimizer states and batches are shapes with shardings, and what is known of a step is read
from its compiled program. Which machines there are is `_devices`; what a program holds and sends, `_buffers` and `_hlo`;
this room joins them to a verdict, and looks for what would help where a run does not fit.
"""

import io
import json
import os
import re
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import optax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import PyTree

from ._buffers import Buffer, bytes_moved, temporaries
from ._chips import GIB, Chip
from ._console import Console
from ._data import cut_rows
from ._devices import USABLE, Machine
from ._hlo import Collective, Module, collectives
from ._jaxprs import Change, keep_everything, matmul_flops, remat_loops
from ._mesh import make_mesh, n_batch_shards, replicated, split_rows
from ._plan import Plan
from ._step import Program, shard_bytes

EXIT_DOES_NOT_FIT = 3
_N_ROWS = 10  # of a table
_FOLDER = str(Path(__file__).parent)


@dataclass(frozen=True)
class Setting:
    """The numbers that decide how a run is laid out."""

    n_model_shards: int
    n_fsdp_shards: int
    per_device_batch_size: int
    accumulate_grad_batches: int
    remat: bool = False  # whether loops over layers were made to recompute, which the model does not do by itself

    def code(self) -> str:
        """What to write in a script."""
        lines = [
            f"Deployer(n_model_shards={self.n_model_shards}, n_fsdp_shards={self.n_fsdp_shards})",
            f"per_device_batch_size={self.per_device_batch_size}, accumulate_grad_batches={self.accumulate_grad_batches}",
        ]
        if self.remat:
            lines.append("jax.checkpoint on the body of the layers' scan (redeqx.models: remat=True)")
        return "; ".join(lines)


@dataclass(frozen=True)
class Job:
    """What is to be compiled, for any mesh and setting.

    **Arguments:**

    - `batch`: shapes of the first step's rows, as `collate_fn` returns them.
    - `make_plan`: `(mesh, micro_batch)` to the plan.
    - `make_program`: `(plan, change)` to the steps, whose operations name their weights.
    - `can_remat`: whether a change reaches the backward pass, which a user's own `grad_fn` takes by itself.
    - `eval_batch`: shapes of an evaluation's first rows; None where there is none.
    - `trace_predict`: `(program)` to the traced predict step of the evaluation; None where there is none.
    - `files`: bytes of each file of a checkpoint; empty where none is saved.
    """

    setting: Setting
    batch: PyTree
    make_plan: Callable[[Mesh, PyTree], Plan]
    make_program: Callable[[Plan, Change | None], Program]
    can_remat: bool = True
    eval_batch: PyTree | None = None
    eval_per_device_batch_size: int = 0
    trace_predict: Callable[[Program], Any] | None = None
    files: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """One compiled step, on one device.

    **Arguments:**

    - `needs`: bytes, with what of the run's state it is not given but stays in memory.
    - `is_refused`: whether the compiler itself refused; `needs` is then what it said, and nothing else is known.
    - `arguments`, `temporaries`, `outputs`, `code`: bytes as the compiler says; outputs that replace arguments left out.
    - `largest`: what it holds at its peak.
    - `flops`: of all devices together, by dtype: matmuls and convolutions, recomputation included.
    - `bytes_moved`: read from and written to memory.
    - `unread`: why the compiled program's text could not be read; what it would say is then not known: what is held at the
        peak, collectives, bytes moved. Empty where it could.
    """

    needs: int
    compile_seconds: float
    is_refused: bool = False
    arguments: int = 0
    temporaries: int = 0
    outputs: int = 0
    code: int = 0
    largest: tuple[Buffer, ...] = ()
    collectives: tuple[Collective, ...] = ()
    flops: Mapping[str, int] = field(default_factory=dict)
    bytes_moved: int = 0
    unread: str = ""


@dataclass(frozen=True)
class Estimate:
    """A roofline: what a step takes at the published rates of its devices, in seconds. A bound from below, not a forecast.

    **Arguments:**

    - `compute`, `memory`, `communication`: if that alone were to be done, with nothing overlapping.
    - `step`: the longer of the first two, and the third.
    - `mfu`: the model's own matmuls over what the devices could compute in that time.
    """

    compute: float
    memory: float
    communication: float
    step: float
    mfu: float


@dataclass(frozen=True)
class Tried:
    """Another setting of a run that does not fit: bytes that it needs, or at least needs where it was not compiled."""

    setting: Setting
    needs: int
    fits: bool
    is_bound: bool = False


@dataclass(frozen=True)
class DryRun:
    """What is known of a run before it runs. `print` it; `to_json` for programs.

    **Arguments:**

    - `held`: bytes a device of what lives through the run, by what it is.
    - `steps`: `"train"`, and of the evaluation `"eval"` and `"predict"`.
    - `files`: bytes of each file of a checkpoint.
    - `model_flops`: of a step's matmuls without recomputation, all devices together, by dtype.
    - `tried`: settings that were tried where this one does not fit.
    """

    machine: Machine
    setting: Setting
    plan: Plan
    held: Mapping[str, int]
    steps: Mapping[str, Step]
    files: Mapping[str, int]
    model_flops: Mapping[str, int]
    tried: tuple[Tried, ...] = ()

    @property
    def needs(self) -> int:
        """Bytes a device, at the peak of the step that needs most."""
        return max(step.needs for step in self.steps.values())

    @property
    def fits(self) -> bool:
        """Whether every device's memory holds the run; also where it is not known how much memory there is."""
        return _fits(self.machine, self.steps)

    @property
    def estimate(self) -> Estimate | None:
        """Of the train step; None where the devices' figures are not known, or not what the compiler made."""
        step, chip = self.steps["train"], self.machine.chip
        if chip is None or step.is_refused or step.unread:
            return None
        n = len(self.machine.devices)
        compute = sum((flops / n / _rate(chip, dtype) for dtype, flops in step.flops.items()), 0.0)
        memory = step.bytes_moved / chip.bandwidth
        devices = list(self.plan.mesh.devices.flat)
        communication = 0.0
        for each in step.collectives:
            is_local = len({devices[i].process_index for i in each.group}) == 1
            communication += each.moved / (chip.link if is_local or chip.network is None else chip.network)
        seconds = max(compute, memory) + communication
        ideal = sum((flops / n / _rate(chip, dtype) for dtype, flops in self.model_flops.items()), 0.0)
        return Estimate(compute, memory, communication, seconds, ideal / seconds if seconds else 0.0)

    # --- what it says ------------------------------------------------------------------------------------------------

    def show(self, console: Console) -> None:
        """Prints the report."""
        names = set(self.plan.leaves)
        console.header(self._head(), title=f"dry run on {self.machine.name}")
        console.table("bytes a device", ("what", "size"), [(what, _size(n)) for what, n in self._memory().items()])
        for name, step in self.steps.items():
            if step.is_refused:
                continue
            if step.unread:
                console.info(
                    f"the {name} step's program cannot be read, so its arrays and collectives are not known: {step.unread}"
                )
                continue
            sizes: dict[tuple[str, ...], list[int]] = defaultdict(list)
            for each in step.largest:
                sizes[_array(each), *_where(each, names)].append(each.bytes)
            most = sorted(sizes.items(), key=lambda item: -sum(item[1]))[:_N_ROWS]
            rows = [(_size(sum(of)), str(len(of)), *key) for key, of in most if sum(of) > 1e-3 * step.needs]
            console.table(
                f"largest temporaries at the peak of the {name} step", ("size", "n", "array", "layer", "line"), rows
            )
        train = self.steps["train"]
        if train.collectives:
            console.table(
                "collectives a train step", ("kind", "axis", "n", "a device sends", "layer", "line"), self._sent(names)
            )
        if not train.is_refused:
            bound = "" if self.estimate is None else "; an estimate from published figures: a bound, no forecast"
            console.header(self._work(), title="a train step" + bound)
        console.info(self.plan.explain(), title="plan")
        if self.tried:
            rows = [
                (
                    ("over " if tried.is_bound else "") + _size(tried.needs),
                    "fits" if tried.fits else "does not fit",
                    tried.setting.code(),
                )
                for tried in self.tried
            ]
            console.table("what was tried", ("needs", "", "setting"), rows)
        console.header({"verdict": self.verdict()}, title="fits" if self.fits else "does not fit")

    def __str__(self) -> str:
        text = io.StringIO()
        self.show(Console(None, file=text, terminal=False))
        return text.getvalue()

    def verdict(self) -> str:
        """Whether it fits, by how much, and what to do where it does not."""
        if self.machine.memory is None:
            return f"needs {_size(self.needs)} a device; how much there is, is not known"
        of = f"{_size(self.needs)} of {_size(self.machine.memory)} a device"
        if self.fits:
            spare = self.machine.memory - self.needs
            text = f"{of}, {_size(spare)} ({spare / self.machine.memory:.0%}) to spare"
            if self.machine.devices[0].platform == "gpu" and self.needs > 0.75 / USABLE * self.machine.memory:
                text += "; JAX takes 75 % of a GPU unless XLA_PYTHON_CLIENT_MEM_FRACTION (0.95, say) is set"
            return text
        at_least = "at least " if any(step.is_refused for step in self.steps.values()) else ""
        text = f"needs {at_least}{of}"
        helped = [tried.setting.code() for tried in self.tried if tried.fits]
        if helped:
            return text + ". What fits: " + "\n".join(helped)
        return text + (". Nothing that was tried fits: more devices, or a smaller model" if self.tried else "")

    def to_json(self) -> dict[str, Any]:
        """All of it as plain values: bytes, seconds, counts."""
        names = set(self.plan.leaves)
        steps = {}
        for name, step in self.steps.items():
            plain = {key: value for key, value in vars(step).items() if key not in ("largest", "collectives")}
            steps[name] = {
                **plain,
                "flops": dict(step.flops),
                "largest": [_plain(buffer, names) for buffer in step.largest],
                "collectives": [
                    {**_plain(each, names), "axes": list(each.axes(self.plan.mesh)), "moved": each.moved}
                    for each in step.collectives
                ],
            }
        return {
            "topology": self.machine.name,
            "n_devices": len(self.machine.devices),
            "n_hosts": self.machine.n_hosts,
            "device_kind": self.machine.devices[0].device_kind,
            "memory": self.machine.memory,
            "fits": self.fits,
            "needs": self.needs,
            "mesh": dict(self.plan.mesh.shape),
            "setting": asdict(self.setting),
            "held": dict(self.held),
            "steps": steps,
            "files": dict(self.files),
            "model_flops": dict(self.model_flops),
            "estimate": None if self.estimate is None else asdict(self.estimate),
            "tried": [asdict(tried) for tried in self.tried],
            "plan": {
                name: {"shape": list(leaf.shape), "dtype": str(leaf.dtype), "spec": str(leaf.spec), "reason": leaf.reason}
                for name, leaf in self.plan.leaves.items()
            },
        }

    def save(self, path: str | Path) -> None:
        """Writes `to_json` to a file."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n", "utf-8")

    def _head(self) -> dict[str, str]:
        machine, setting, mesh = self.machine, self.setting, self.plan.mesh
        memory = "memory not known" if machine.memory is None else f"{_size(machine.memory)} each"
        hosts = f", {machine.n_hosts} hosts" if machine.n_hosts > 1 else ""
        n_rows = setting.per_device_batch_size * n_batch_shards(mesh) * setting.accumulate_grad_batches
        return {
            "devices": f"{mesh.size} x {machine.devices[0].device_kind}, {memory}{hosts}",
            "mesh": " x ".join(f"{axis}={size}" for axis, size in mesh.shape.items()),
            "batch": f"{setting.per_device_batch_size} rows x {n_batch_shards(mesh)} batch shards x "
            f"{setting.accumulate_grad_batches} micro-batches = {n_rows} examples a step",
            "parameters": f"{self.plan.n_parameters:,}; {self.plan.summary()}",
            "compiled": ", ".join(f"{name} step {step.compile_seconds:.1f} s" for name, step in self.steps.items()),
        }

    def _memory(self) -> dict[str, int]:
        rows = dict(self.held)
        for name, step in self.steps.items():
            if not step.is_refused:
                like_weights = min(self._like_weights(step), step.temporaries)
                what = "gradients and copies of weights" if name == "train" else "copies of weights"
                rows[f"{name} step: {what}"] = like_weights
                rows[f"{name} step: activations and other temporaries"] = step.temporaries + step.outputs - like_weights
                if step.code:
                    rows[f"{name} step: program"] = step.code
            rows[f"{name} step: all" + (" (refused: at least)" if step.is_refused else "")] = step.needs
        rows.update({f"on disk, a checkpoint's {name}": size for name, size in self.files.items()})
        return {what: size for what, size in rows.items() if size}

    def _like_weights(self, step: Step) -> int:
        """Bytes at a step's peak of arrays in the shape of a weight as it lives or is used, or of a layer's slice of one."""
        shapes = set()
        for name, leaf in self.plan.leaves.items():
            for spec in (leaf.spec, self.plan.spec_in_use(name)):
                shape = NamedSharding(self.plan.mesh, spec).shard_shape(leaf.shape)
                shapes |= {_sides(shape), _sides(shape[1:])}
        return sum(
            buffer.bytes for buffer in step.largest if _sides(buffer.shape) in shapes and len(_sides(buffer.shape)) > 1
        )

    def _sent(self, names: set[str]) -> list[tuple[str, ...]]:
        sums: dict[tuple[str, ...], tuple[int, float]] = defaultdict(lambda: (0, 0.0))
        totals: dict[tuple[str, ...], tuple[int, float]] = defaultdict(lambda: (0, 0.0))
        n_arrays = Counter(each.instruction for each in self.steps["train"].collectives)
        for each in self.steps["train"].collectives:
            where = _where(each, names) if n_arrays[each.instruction] == 1 else ("several, sent together", "")
            key = (each.kind, "+".join(each.axes(self.plan.mesh)) or "none", *where)
            for table, row in ((sums, key), (totals, key[:2])):
                n, moved = table[row]
                table[row] = n + each.n_executions, moved + each.moved
        rows = [(kind, axis, f"{n:,}", _size(moved), "all", "") for (kind, axis), (n, moved) in totals.items()]
        most = sorted(sums.items(), key=lambda item: -item[1][1])[:_N_ROWS]
        return rows + [(*key[:2], f"{n:,}", _size(moved), *key[2:]) for key, (n, moved) in most]

    def _work(self) -> dict[str, str]:
        """What a train step computes, moves and sends; with times where the devices' figures are known."""
        step, estimate = self.steps["train"], self.estimate
        n = len(self.machine.devices)
        sent = sum(each.moved for each in step.collectives)
        rows = {
            "matmuls": f"{sum(step.flops.values()) / n:.3g} FLOPs a device",
            "memory": f"{_size(step.bytes_moved)} read and written a device",
            "collectives": f"{_size(sent)} sent a device",
        }
        if estimate is None:
            return rows
        times = (estimate.compute, estimate.memory, estimate.communication)
        rows = {what: f"{text}: {seconds:.3g} s" for (what, text), seconds in zip(rows.items(), times, strict=True)}
        return {**rows, "step": f"at least {estimate.step:.3g} s where nothing overlaps, MFU at most {estimate.mfu:.0%}"}


class DryRunDone(SystemExit):
    """Ends a script that is run dry, once its report is known."""

    def __init__(self, run: DryRun):
        super().__init__(0 if run.fits else EXIT_DOES_NOT_FIT)
        self.run = run


# --- compiling -------------------------------------------------------------------------------------------------------------


def dry_run(job: Job, machine: Machine, *, optimization: str | None = None, search: bool = True) -> DryRun:
    """Compiles the steps of a job for a machine.

    **Arguments:**

    - `optimization`: the compiler's level, `"O0"` to `"O3"`, or `"UNKNOWN"`, that of a run. By default that, but for TPUs
        `"O2"`, which takes the same memory in half the time; `"O1"` is faster still, and takes less.
    - `search`: whether to try other settings where the job's own does not fit. Each is one more compilation.
    """
    run = _compiled(job, machine, job.setting, optimization)
    if run.fits or not search:
        return run
    tried = []
    for setting in _candidates(job, machine):
        try:
            other = _compiled(job, machine, setting, optimization, only_train=True)
        except ValueError:
            continue  # heads or rows that do not divide so
        tried.append(Tried(setting, other.needs, other.fits, other.steps["train"].is_refused))
        if sum(each.fits for each in tried) == 2:
            break
    return replace(run, tried=tuple(tried))


def _candidates(job: Job, machine: Machine) -> Iterator[Setting]:
    """Settings that need less memory for the same update, from those that cost least; later ones join what came before."""
    own = job.setting
    n_devices = len(machine.devices)
    n_data = n_devices // (own.n_model_shards * own.n_fsdp_shards)
    sharded = replace(own, n_fsdp_shards=own.n_fsdp_shards * n_data)
    seen = {own}
    rows = own.per_device_batch_size

    def smaller(setting: Setting, size: int) -> Setting:
        factor = setting.per_device_batch_size // size
        n = setting.accumulate_grad_batches * factor
        return replace(setting, per_device_batch_size=size, accumulate_grad_batches=n)

    remat = [replace(own, remat=True)] if job.can_remat else []
    halves = [size for size in (rows // 2, 1) if size >= 1 and rows % size == 0]
    base = replace(sharded, remat=job.can_remat)
    split = []
    n_model = own.n_model_shards * 2
    while n_devices % n_model == 0 and n_model <= n_devices:
        # The model axis shares its rows: fewer batch shards, each with more of them.
        factor = max(1, (n_data * own.n_fsdp_shards) // (n_devices // n_model))
        split.append(
            replace(
                own,
                n_model_shards=n_model,
                n_fsdp_shards=min(own.n_fsdp_shards, n_devices // n_model),
                per_device_batch_size=rows * factor,
            )
        )
        n_model *= 2
    ordered = [
        sharded,
        *remat,
        *(smaller(own, size) for size in halves),
        base,
        *(smaller(base, size) for size in halves),
        *split,
        *(replace(smaller(s, 1), remat=job.can_remat, n_fsdp_shards=n_devices // s.n_model_shards) for s in split),
    ]
    for setting in ordered:
        if setting not in seen:
            seen.add(setting)
            yield setting


def _compiled(job: Job, machine: Machine, setting: Setting, optimization: str | None, only_train: bool = False) -> DryRun:
    mesh = make_mesh(setting.n_model_shards, setting.n_fsdp_shards, machine.devices)
    micro_batch_size = setting.per_device_batch_size * n_batch_shards(mesh)
    groups = _groups(job.batch, micro_batch_size, mesh)
    micro_batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), groups[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the report shows the plan with its warnings
        plan = job.make_plan(mesh, micro_batch)
    program = job.make_program(plan, remat_loops if setting.remat else None)
    held = {
        "parameters": shard_bytes([*program.trained, *program.frozen]),
        "optimizer state": shard_bytes(program.opt_state),
        "model state": shard_bytes(program.state),
    }
    held = {what: size for what, size in held.items() if size}
    resident = sum(held.values())
    if only_train and machine.memory is not None and resident > machine.memory:
        step = Step(needs=resident, compile_seconds=0.0, is_refused=True)
        return DryRun(machine, setting, plan, held, {"train": step}, {}, {})

    def of_train(program: Program) -> Any:
        carried = (program.trained, program.opt_state, program.state, program.step)
        return program.train_step.trace(*carried, program.frozen, program.key, groups)

    i = jax.ShapeDtypeStruct((), "uint32")
    steps = {"train": _step(of_train(program), machine, optimization, 0)}
    model_flops: Mapping[str, int] = {}
    if not only_train:
        exact = of_train(job.make_program(plan, keep_everything)) if job.can_remat else of_train(program)
        model_flops = matmul_flops(exact.jaxpr.jaxpr)
        beside = held.get("optimizer state", 0)  # which an evaluation is not given, and which stays
        if job.eval_batch is not None:
            eval_groups = _groups(job.eval_batch, job.eval_per_device_batch_size * n_batch_shards(mesh), mesh)
            args = (program.trained, program.frozen, program.state, program.key, i, eval_groups)
            steps["eval"] = _step(program.eval_step.trace(*args), machine, optimization, beside)
        if job.trace_predict is not None:
            steps["predict"] = _step(job.trace_predict(program), machine, optimization, beside)
    return DryRun(machine, setting, plan, held, steps, job.files, model_flops)


def _groups(batch: PyTree, micro_batch_size: int, mesh: Mesh) -> tuple[PyTree, ...]:
    """The shapes of a batch as a step takes it, as `place_batch` lays it out."""
    n_rows = jax.tree.leaves(batch)[0].shape[0]
    made = []
    for group in cut_rows(n_rows, micro_batch_size, mesh.size):
        sharding = split_rows(mesh, dim=1) if group.rows % n_batch_shards(mesh) == 0 else replicated(mesh)
        made.append(
            jax.tree.map(
                lambda x, g=group, s=sharding: jax.ShapeDtypeStruct((g.n, g.rows, *x.shape[1:]), x.dtype, sharding=s), batch
            )
        )
    return tuple(made)


# How the TPU compiler says so: before it lays out memory, and after it has tried to.
_OUT_OF_MEMORY = re.compile(r"\(([\d.]+)([KMGT]?)\) exceeds available HBM|Exceeded hbm capacity by ([\d.]+)([KMGT]?)")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def _step(traced: Any, machine: Machine, optimization: str | None, beside: int) -> Step:
    """One traced step, compiled; `beside` are bytes that stay in memory while it runs."""
    flops = matmul_flops(traced.jaxpr.jaxpr)
    lowered = traced.lower()
    began = time.perf_counter()
    try:
        with _at_level(optimization or ("O2" if machine.devices[0].platform == "tpu" else "UNKNOWN")):
            compiled = lowered.compile(compiler_options=_options(machine))
    except jax.errors.JaxRuntimeError as error:
        found = _OUT_OF_MEMORY.search(str(error))
        if "RESOURCE_EXHAUSTED" not in str(error) or found is None:
            raise
        everything, unit, excess, unit_of_excess = found.groups()
        needs = float(everything or excess) * _UNITS[unit or unit_of_excess or ""] + beside
        needs = int(needs) + (0 if everything else machine.memory or 0)
        return Step(needs=needs, compile_seconds=time.perf_counter() - began, is_refused=True, flops=flops)
    seconds = time.perf_counter() - began
    memory = compiled.memory_analysis()
    outputs = max(0, memory.output_size_in_bytes - memory.alias_size_in_bytes)
    sizes = {
        "arguments": memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "outputs": outputs,
        "code": memory.generated_code_size_in_bytes,
    }
    step = Step(needs=sum(sizes.values()) + beside, compile_seconds=seconds, **sizes, flops=flops)
    try:
        text = compiled.as_text()
    except jax.errors.JaxRuntimeError as error:  # a libtpu newer than jaxlib writes what that cannot parse
        return replace(step, unread=str(error).splitlines()[0])
    module = Module.of(text)
    return replace(
        step,
        largest=tuple(buffer for buffer in temporaries(module) if buffer.bytes >= 2**10),
        collectives=tuple(each for each in collectives(text) if each.group_size > 1),
        bytes_moved=bytes_moved(module),
    )


def _options(machine: Machine) -> dict[str, Any] | None:
    if machine.devices[0].platform not in ("cuda", "gpu") or machine.name == "this":
        return None
    # Autotuning would time kernels on the GPU that is not there. Untuned, some of Triton's matmuls do not compile: cuBLAS's
    # take as much memory.
    return {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}


@contextmanager
def _at_level(optimization: str) -> Iterator[None]:
    before = getattr(jax.config, _LEVEL)
    jax.config.update(_LEVEL, optimization)
    try:
        yield
    finally:
        jax.config.update(_LEVEL, before)


_LEVEL = "jax_optimization_level"


# --- words -----------------------------------------------------------------------------------------------------------------


def _fits(machine: Machine, steps: Mapping[str, Step]) -> bool:
    if any(step.is_refused for step in steps.values()):
        return False
    return machine.memory is None or all(step.needs <= machine.memory for step in steps.values())


def _rate(chip: Chip, dtype: str) -> float:
    return chip.bfloat16 if dtype in ("bfloat16", "float16") else chip.float32


def _where(of: Any, names: set[str]) -> tuple[str, str]:
    """The layer and the line that an array or a collective comes from; the operation, where no layer's name is in it."""
    parts = re.split(r"[/()\s;:]+", of.op_name)
    layer = next((part for part in reversed(parts) if part in names), "")
    if not layer:
        layer = "/".join([part for part in parts if part and part not in _PLUMBING][-2:])
    lines = [line for line in of.source if not line.startswith((_FOLDER + os.sep + "_", *_LIBRARIES))]
    line = (lines or list(of.source[:1]) or [""])[0]
    # As it is imported: `redeqx/models/opt.py:318`.
    folder = max((path for path in sys.path if path and line.startswith(path + os.sep)), key=len, default="")
    return layer, line.removeprefix(folder + os.sep) if folder else line


_PLUMBING = {
    "jit",
    "jvp",
    "transpose",
    "vmap",
    "while",
    "body",
    "closed_call",
    "checkpoint",
    "rematted_computation",
    "remat2",
}
_LIBRARIES = tuple(str(Path(module.__file__).parent) for module in (jax, eqx, optax) if module.__file__)


def _plain(of: Any, names: set[str]) -> dict[str, Any]:
    layer, line = _where(of, names)
    return {**{key: value for key, value in vars(of).items() if key != "source"}, "layer": layer, "line": line}


def _sides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape whichever way it is turned."""
    return tuple(sorted(size for size in shape if size != 1))


def _array(buffer: Buffer) -> str:
    return f"{buffer.dtype}[{', '.join(map(str, buffer.shape))}]"


def _size(n_bytes: int | float) -> str:
    unit, size = next(((u, n) for u, n in (("GiB", GIB), ("MiB", 2**20)) if n_bytes >= n), ("KiB", 2**10))
    return f"{n_bytes / size:,.{2 if n_bytes < 10 * size else 1}f} {unit}"
