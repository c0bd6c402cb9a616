"""The result of a dry run: the verdict, and the tables of its report.

Owns the text of the report. `_forecast` compiles the steps, and `_figures` computes the bounds on their time.
"""

import io
import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from jax.sharding import NamedSharding

from ..compiled import Collective, own_line, split_name, words_of
from ..dims import UNKNOWN
from ..machine import DEFAULT_CHIP, USABLE, Machine, mesh_text, n_batch_shards
from ..memory import AUTO, Loop, Row, Strategy, Tried, describe_saved, fastest, share_again
from ..monitor import Console, size_text, to_json
from ..partition import Plan
from ..storage import disk_path
from ..tracing import shortened
from ._expected import Expected, expected
from ._figures import Estimate, Step, estimate, hidden_share

_UNSURE = 0.15  # of a device's memory: how far an estimate may be from what is compiled
_N_ROWS = 10  # maximal number of rows in a table


@dataclass(frozen=True)
class DryRun:
    """The forecast of a run: its memory, computation and communication.

    `print` shows the report, and `to_json` returns it as plain values.

    **Arguments:**

    - `held`: bytes on each device that stay in memory during the whole run, by their kind.
    - `in_host`: bytes of the optimizer's state that are in host memory, for each device.
    - `n_tokens`: the tokens of a train step; None if its batch has none.
    - `steps`: the `"train"` step, and the `"eval"` and `"predict"` steps of the evaluation.
    - `files`: bytes of each file of a checkpoint.
    - `model_flops`: FLOPs of a step's matmuls without recomputation, by dtype, for all devices together.
    - `tried`: the other strategies that were tried because this one does not fit. After a search for the fastest, all
        that were tried.
    - `is_searched`: whether the fastest was searched for.
    - `saved`: what each loop saves for the backward pass.
    - `failed`: the reason for each part of the report that could not be computed. A step in it is not in `steps`.
    """

    machine: Machine
    strategy: Strategy
    plan: Plan
    held: Mapping[str, int]
    steps: Mapping[str, Step]
    files: Mapping[str, int]
    model_flops: Mapping[str, int]
    in_host: int = 0
    n_tokens: int | None = None
    tried: tuple[Tried, ...] = ()
    is_searched: bool = False
    saved: Sequence[Loop] = ()
    failed: Mapping[str, str] = field(default_factory=dict)

    @property
    def needs(self) -> int:
        """The bytes on each device at the peak of the step that needs most."""
        return max(step.needs for step in self.steps.values())

    @property
    def too_large(self) -> list[str]:
        """The names of the steps that do not fit into the memory of each device. None of them if its size is unknown."""
        limit = float("inf") if self.machine.memory is None else self.machine.memory
        return [name for name, step in self.steps.items() if step.is_refused or step.needs > limit]

    @property
    def fits(self) -> bool:
        """Whether the run fits into the memory of each device. True if the size of that memory is unknown."""
        return not self.too_large

    @property
    def estimate(self) -> Estimate | None:
        """The estimate of the train step, or None if the devices' published rates or the step's numbers are unknown."""
        step, chip = self.steps["train"], self.machine.chip
        if chip is None or step.is_refused or step.unread or step.is_estimate:
            return None
        return estimate(step, self.model_flops, chip, self.plan.mesh)

    @property
    def expected(self) -> Expected | None:
        """The expected time of the train step, or None if no published runs on these devices are known."""
        step, chip = self.steps["train"], self.machine.chip
        return None if chip is None or self.estimate is None else expected(step, self.estimate, chip, self.plan.mesh)

    @property
    def best(self) -> Tried | None:
        """The fastest of the other strategies that fits, or None if none was tried or none fits."""
        return fastest(self.tried)

    # --- the report --------------------------------------------------------------------------------------------------

    def show(self, console: Console) -> None:
        """Prints the report, with the verdict last."""
        train = self.steps["train"]
        console.header(self._head(), title="dry run on " + self.machine.name.replace("this", "this machine"))
        console.table("bytes a device", ("what", "size"), self._memory())
        for name, step in self.steps.items():
            if step.largest:
                self._show_largest(name, console)
        if self.saved:
            columns = ("", "a device", "what", "layer", "line", "why")
            rows = [(row.choice, size_text(row.n_bytes), *row[2:4], shortened(row.line), row.why) for row in self._saved()]
            # At `"matmuls"` no product is, not even of a loop inside a loop, of which only the results are known here.
            keeps_products = self.strategy.remat in ("auto", AUTO)
            again = "" if keeps_products else f"; {share_again(self.saved):.0%} of the forward pass is computed again"
            console.table(f"what loops save for the backward pass{again}", columns, rows)
        if train.collectives:
            columns = ("kind", "axis", "n", "a device sends", "behind matmuls", "layer", "line")
            console.table("collectives a train step", columns, self._sent())
        if not train.is_refused:
            bound = "" if self.estimate is None else "; bounds from the chip's published rates"
            console.header(self._work(), title="a train step" + bound)
        console.info(self.plan.explain(), title="plan")
        if self.tried:
            self._show_tried(console)
        unread = {f"{name} step: its arrays and collectives": step.unread for name, step in self.steps.items()}
        if failed := {**{what: why for what, why in unread.items() if why}, **self.failed}:
            console.header(failed, title="unknown, since it failed")
        console.header({"verdict": self.verdict()}, title="fits" if self.fits else "does not fit")

    def _show_largest(self, name: str, console: Console) -> None:
        step, names = self.steps[name], set(self.plan.leaves)
        sizes: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for each in step.largest:
            array = f"{each.dtype}[{', '.join(map(str, each.shape))}]"
            sizes[array, *_where(each, names)].append(each.bytes)
        most = sorted(sizes.items(), key=lambda item: -sum(item[1]))[:_N_ROWS]
        rows = [(size_text(sum(ns)), str(len(ns)), *key) for key, ns in most if sum(ns) > 1e-3 * step.needs]
        title = f"largest temporaries at the peak of the {name} step"
        if rows:
            console.table(title, ("size", "n", "array", "layer", "line"), rows)

    def _show_tried(self, console: Console) -> None:
        rows = []
        for tried in self.tried:
            needs = ("over " if tried.is_refused else "") + size_text(tried.needs)
            times = "" if tried.seconds is None else " to ".join(map(_seconds, tried.seconds))
            rows.append((needs, "fits" if tried.fits else "does not fit", times, tried.strategy.code()))
        console.table("what was tried", ("needs", "", "a step, at least", "strategy"), rows)

    def _repr_html_(self) -> str:
        """Returns the report for notebooks."""
        return f"<pre>{escape(str(self))}</pre>"

    def __str__(self) -> str:
        text = io.StringIO()
        self.show(Console(None, file=text, terminal=False))
        return text.getvalue()

    def verdict(self) -> str:
        """Returns a text: whether the run fits, how much memory it leaves, and what to do if it does not fit."""
        missing = " and the ".join(name for name in ("eval step", "predict step") if name in self.failed)
        return self._verdict() + (f"; not counted, as it failed to compile: the {missing}" if missing else "")

    def _verdict(self) -> str:
        if self.machine.memory is None:
            return f"needs {size_text(self.needs)} a device; the memory of a device is unknown"
        about = "about " if self.steps["train"].is_estimate else ""
        needed = f"{about}{size_text(self.needs)} of {size_text(self.machine.memory)} a device"
        if self.fits:
            spare = self.machine.memory - self.needs
            text = f"{needed}, {size_text(spare)} ({spare / self.machine.memory:.0%}) to spare"
            if self.is_searched and self.best is not None:
                text += f". {self._advice()}"
            text += self._caution(self.needs) if about else ""
            if self.machine.devices[0].platform == "gpu" and self.needs > 0.75 / USABLE * self.machine.memory:
                text += "; JAX uses 75 % of a GPU unless XLA_PYTHON_CLIENT_MEM_FRACTION is set, for example to 0.95"
            return text
        at_least = "at least " if any(step.is_refused for step in self.steps.values()) else ""
        largest = max(self.steps, key=lambda name: self.steps[name].needs)
        rows = "" if largest == "train" else f" for the {largest} step, whose rows `eval_per_device_batch_size` sets"
        text = f"needs {at_least}{needed}{rows}" + (f". {self._advice()}" if self.tried else "")
        return text + (self._caution(self.needs if self.best is None else self.best.needs) if about else "")

    def _caution(self, needs: int) -> str:
        """Returns what to say of an estimate of the bytes that a step needs."""
        assert self.machine.memory is not None
        is_near = abs(self.machine.memory - needs) < _UNSURE * self.machine.memory
        text = "; estimated from the trace, not compiled"
        return text + (f": {size_text(needs)} is too near to tell, so compile it" if is_near else "")

    def _advice(self) -> str:
        """Returns which of the tried strategies to use, or how much memory the nearest one lacks if none fits."""
        assert self.machine.memory is not None
        if self.best is not None:
            return ("Fastest that fits: " if self.is_searched else "What fits: ") + self.best.strategy.code()
        nearest = min(self.tried, key=lambda tried: (tried.is_refused, tried.needs))
        lacks = f"{'at least ' * nearest.is_refused}{size_text(nearest.needs - self.machine.memory)}"
        return (
            f"None of the tried strategies fits. The nearest lacks {lacks} a device: {nearest.strategy.code()}. "
            "Use more devices, larger ones, or a smaller model"
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the report as plain values: bytes, seconds, counts."""
        as_they_are = ("fits", "needs", "held", "in_host", "n_tokens", "files", "model_flops", "failed")
        return {
            **{name: getattr(self, name) for name in as_they_are},
            "topology": self.machine.name,
            "n_devices": len(self.machine.devices),
            "n_hosts": self.machine.n_hosts,
            "device_kind": self.machine.devices[0].device_kind,
            "memory": self.machine.memory,
            "mesh": dict(self.plan.mesh.shape),
            "strategy": asdict(self.strategy),
            "rows": self.plan.row_use.text,
            "steps": {name: self._plain_step(step) for name, step in self.steps.items()},
            "estimate": self.estimate and asdict(self.estimate),
            "expected": self.expected and asdict(self.expected),
            "tried": [{**asdict(tried), "code": tried.strategy.code()} for tried in self.tried],
            "best": self.best and self.best.strategy.code(),
            "saved": [row._asdict() for row in self._saved()],
            "plan": {
                name: {"shape": list(leaf.shape), "dtype": str(leaf.dtype), "spec": str(leaf.spec), "reason": leaf.reason}
                for name, leaf in self.plan.leaves.items()
            },
        }

    def _saved(self) -> list[Row]:
        chip, host = self.machine.chip or DEFAULT_CHIP, 0 if self.machine.devices[0].platform == "cpu" else math.inf
        return describe_saved(self.saved, self.strategy.remat, chip, host, self.plan.leaves.keys())

    def _plain_step(self, step: Step) -> dict[str, Any]:
        names, mesh = set(self.plan.leaves), self.plan.mesh
        return {
            **vars(step),
            "flops": dict(step.flops),
            "kinds": dict(step.kinds),
            "largest": [_plain(buffer, names) for buffer in step.largest],
            "collectives": [
                {**_plain(each, names), "axes": list(each.axes(mesh)), "moved": each.moved} for each in step.collectives
            ],
        }

    def save(self, path: str | Path) -> None:
        """Writes `to_json` to a file."""
        disk_path(path).write_text(json.dumps(json.loads(to_json(self.to_json())), indent=1) + "\n", "utf-8")

    def _head(self) -> dict[str, str]:
        machine, strategy, mesh = self.machine, self.strategy, self.plan.mesh
        memory = "unknown memory" if machine.memory is None else f"{size_text(machine.memory)} each"
        hosts = f", {machine.n_hosts} hosts" if machine.n_hosts > 1 else ""
        n_shards = n_batch_shards(mesh)
        micro_batch = strategy.per_device_batch_size * n_shards
        n_rows = micro_batch * strategy.accumulate_grad_batches
        n_examples = strategy.batch_size or n_rows
        groups = strategy.size(mesh).cut(n_examples, self.plan.row_use, mesh)
        if self.plan.row_use.kind == "mixed":
            batch = " and ".join(f"{group.n} micro-batches of {group.rows} rows" for group in groups) + " = "
        else:
            batch = f"{strategy.per_device_batch_size} rows x {n_shards} batch shards x "
            batch += f"{strategy.accumulate_grad_batches} micro-batches"
            batch += f" and {n_examples - n_rows} more rows = " if n_examples > n_rows else " = "
        batch = ("" if n_examples < n_rows else batch) + f"{n_examples} examples a step"
        if repeated := sum(group.size for group in groups if group.n_copies(mesh) > 1):
            batch += f"; each batch shard computes all {repeated} rows that do not divide over the {n_shards} shards"
        return {
            "devices": f"{mesh.size} x {machine.devices[0].device_kind}, {memory}{hosts}",
            "mesh": mesh_text(mesh.shape),
            "batch": batch,
            **({} if self.plan.row_use == UNKNOWN else {"rows": self.plan.row_use.text}),
            **({"positions": "; ".join(self.plan.positions)} if self.plan.positions else {}),
            "parameters": f"{self.plan.n_parameters:,}; {self.plan.summary()}",
            ("estimated" if self.steps["train"].is_estimate else "compiled"): ", ".join(
                f"{name} step {step.compile_seconds:.1f} s" for name, step in self.steps.items()
            ),
        }

    def _memory(self) -> list[tuple[str, str]]:
        rows = dict(self.held)
        for name, step in self.steps.items():
            if not step.is_refused:
                like_weights = min(self._like_weights(step), step.temporaries)
                what = "gradients and copies of weights" if name == "train" else "copies of weights"
                # The optimizer's state is no input of an evaluation.
                held = sum(n for kind, n in self.held.items() if name == "train" or kind != "optimizer state")
                rows[f"{name} step: batch"] = max(0, step.arguments - held)
                if name != "train":  # in memory, but no arguments of the step
                    own = step.arguments + step.temporaries + step.outputs + step.code + step.allowance
                    others = step.needs - own - self.held.get("optimizer state", 0)
                    rows[f"{name} step: averages of the weights"] = max(0, others)
                rows[f"{name} step: {what}"] = like_weights
                rows[f"{name} step: activations and other temporaries"] = step.temporaries + step.outputs - like_weights
                if step.code:
                    rows[f"{name} step: program"] = step.code
                if step.allowance:
                    rows[f"{name} step: estimate of cuDNN's workspace, which is chosen on the GPU"] = step.allowance
            rows[f"{name} step: all" + (" (refused: at least)" if step.is_refused else "")] = step.needs
        rows["in host memory: optimizer state"] = self.in_host
        rows.update({f"on disk, a checkpoint's {name}": size for name, size in self.files.items()})
        return [(what, size_text(size)) for what, size in rows.items() if size]

    def _like_weights(self, step: Step) -> int:
        """Counts the bytes, at a step's peak, of arrays with the shape of a weight's shard, as stored or as used, or of a
        layer's slice of a stacked weight."""
        shapes = set()
        for name, leaf in self.plan.leaves.items():
            for spec in (leaf.spec, self.plan.spec_in_use(name)):
                shape = NamedSharding(self.plan.mesh, spec).shard_shape(leaf.shape)
                shapes |= {_sides(shape), _sides(shape[1:])}
        sides = [(_sides(buffer.shape), buffer.bytes) for buffer in step.largest]
        return sum(n_bytes for of, n_bytes in sides if of in shapes and len(of) > 1)

    def _sent(self) -> list[tuple[str, ...]]:
        names, found = set(self.plan.leaves), self.steps["train"].collectives
        by_kind: dict[tuple[str, ...], list[Collective]] = defaultdict(list)
        by_layer: dict[tuple[str, ...], list[Collective]] = defaultdict(list)
        n_arrays = Counter(each.instruction for each in found)
        for each in found:
            kind = (each.kind, "+".join(each.axes(self.plan.mesh)) or "none")
            by_kind[kind].append(each)
            where = _where(each, names) if n_arrays[each.instruction] == 1 else ("several, sent together", "")
            by_layer[*kind, *where].append(each)
        most = sorted(by_layer.items(), key=lambda item: -sum(each.moved for each in item[1]))[:_N_ROWS]
        rows = [*(((*kind, "all", ""), group) for kind, group in by_kind.items()), *most]
        return [(*key[:2], *_sizes(group), *key[2:]) for key, group in rows]

    def _work(self) -> dict[str, str]:
        """Returns a train step's computation and traffic, with times if the devices' published rates are known."""
        step, estimate = self.steps["train"], self.estimate
        n = len(self.machine.devices)
        sent = sum(each.moved for each in step.collectives)

        def behind(share: float | None) -> str:
            return "" if share is None else f", {share:.0%} of them behind matmuls in the compiled order"

        rows = {
            "matmuls": f"{sum(step.flops.values()) / n:.3g} FLOPs a device",
            "memory": f"{size_text(step.bytes_moved)} read and written a device",
            "collectives": f"{size_text(sent)} sent a device{behind(hidden_share(step.collectives))}",
        }
        if step.host_bytes:
            rows["host"] = f"{size_text(step.host_bytes)} copied to and from the host a device{behind(step.host_hidden)}"
        if step.unread or step.is_estimate:
            return {"matmuls": rows["matmuls"]}
        if estimate is None:
            return rows
        times = (estimate.compute, estimate.memory, estimate.communication, estimate.host)
        rows = {what: f"{text}: {_seconds(seconds)}" for (what, text), seconds in zip(rows.items(), times, strict=False)}
        rows["step"] = (
            f"at least {_seconds(estimate.step)} where all of this overlaps (MFU {estimate.mfu:.0%}), "
            f"{_seconds(estimate.serial)} where nothing does ({estimate.serial_mfu:.0%})"
        )
        if (about := self.expected) is not None:
            unlike = f", but none of them had {', '.join(about.outside)}" if about.outside else ""
            rows["expected"] = (
                f"about {_seconds(about.seconds)} (MFU {about.mfu:.0%}), at the rates of published runs on this chip{unlike}"
            )
        if self.n_tokens and estimate.serial:
            at_best, serial = (self.n_tokens / seconds for seconds in (estimate.step, estimate.serial))
            rows["tokens"] = f"{self.n_tokens:,}: at most {at_best:,.0f} a second, {serial:,.0f} without overlap"
        return rows


# --- helpers ---------------------------------------------------------------------------------------------------------------


def _where(item: Any, names: set[str]) -> tuple[str, str]:
    """Returns the layer (or else the operation) and the line of code of an array or a collective."""
    layer = next((part for part in reversed(split_name(item.op_name)) if part in names), "")
    return layer or words_of(item.op_name), own_line(item.source)


def _sizes(found: list[Collective]) -> tuple[str, str, str]:
    """Returns how often collectives are executed, what a device sends for them, and the share behind matmuls."""
    hidden = hidden_share(found)
    n, moved = sum(each.n_executions for each in found), sum(each.moved for each in found)
    return f"{n:,}", size_text(moved), "" if hidden is None else f"{hidden:.0%}"


def _plain(item: Any, names: set[str]) -> dict[str, Any]:
    layer, line = _where(item, names)
    return {**{key: value for key, value in vars(item).items() if key != "source"}, "layer": layer, "line": line}


def _sides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the sorted sizes of a shape, without dims of size 1."""
    return tuple(sorted(size for size in shape if size != 1))


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s"
