"""The ladder of settings: which settings make the same update with less memory, in which order they are tried, and which of
them need not be compiled.

A setting is how a run is distributed: shards, micro-batches, and what the loops of the loss compute again. All settings of a
ladder have the same examples in an update. `_forecast` compiles them; this module only computes with their numbers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from ..machine import GPUS, Chip
from ..training import REMATS, Setting
from ._figures import Estimate, matmul_seconds

# What recomputation costs: keeping only the outputs of matmuls may be faster than keeping everything, since a step that
# waits for its memory has less to read.
_COSTS = {"none": 0, "matmuls": 0, "full": 1, "offload": 2}
_TYPICAL = GPUS["a100-40gb"].chip  # its rates decide the order of settings for devices without published ones


@dataclass(frozen=True)
class Rung:
    """A setting that was compiled.

    **Arguments:**

    - `needs`: bytes on each device, as `Step.needs`. With `is_bound` they are a lower bound.
    - `held`: of those, bytes that stay in memory through the run.
    - `estimate`: of its train step; None if it is not known.
    """

    setting: Setting
    needs: int
    fits: bool
    is_bound: bool = False
    held: int = 0
    estimate: Estimate | None = None

    @property
    def seconds(self) -> float:
        """The time by which settings are compared: that of a step in which nothing overlaps; infinite if not known."""
        return float("inf") if self.estimate is None else self.estimate.serial


def fastest(rungs: Sequence[Rung]) -> Rung | None:
    """The fastest of those that fit, the first of equally fast ones; None if none fits."""
    return min((rung for rung in rungs if rung.fits), key=lambda rung: rung.seconds, default=None)


@dataclass(frozen=True)
class Ladder:
    """The settings for a job on a machine, by what is known before they are compiled.

    **Arguments:**

    - `own`: the setting of the script.
    - `flops`: of the matmuls of an update, by dtype, for each level of `REMATS` that is to be tried, or for
        the script's own alone, which may be `"auto"`.
    - `weights`: bytes of the parameters.
    - `state`: bytes of all arrays that stay in memory, not counting copies.
    - `opt_state`: of those, bytes of the optimizer's state that the host can hold.
    - `unrolls`: whether loops over small layers are written out, where weights are not gathered layer by layer.
    - `memory`: bytes of a device.
    - `chip`: the figures of a device; None if unknown.
    """

    own: Setting
    n_devices: int
    flops: Mapping[str, Mapping[str, int]]
    weights: int
    state: int
    memory: int
    chip: Chip | None
    opt_state: int = 0
    unrolls: bool = False

    def climb(self, own: Rung, measure: Callable[[Setting], Rung | None], *, to_fastest: bool) -> Iterator[Rung]:
        """The settings that had to be compiled, each as soon as it is.

        More shards of the model axis than the script has are tried only where nothing else fits: what their collectives take
        is not known before.

        **Arguments:**

        - `own`: the setting of the script.
        - `measure`: compiles a setting; None if it cannot be compiled.
        - `to_fastest`: whether to go on, once a setting fits, to those that may be faster, where estimates are known.
        """
        known = [own]
        groups: dict[int, list[Setting]] = {}
        for setting in self.settings():
            groups.setdefault(setting.n_model_shards, []).append(setting)
        for n_model, settings in sorted(groups.items()):
            if n_model < self.own.n_model_shards and not to_fastest:
                continue
            for setting in sorted(settings, key=self._order):
                best = fastest(known)
                is_enough = best is not None and (not to_fastest or best.estimate is None)
                if is_enough or (best is not None and n_model > self.own.n_model_shards):
                    return
                if setting == self.own or self._is_ruled_out(setting, known):
                    continue
                if (rung := measure(setting)) is not None:
                    known.append(rung)
                    yield rung

    def settings(self) -> Iterator[Setting]:
        """All settings that make the same update."""
        own, n = self.own, self.n_devices
        powers = [2**i for i in range(n.bit_length()) if n % 2**i == 0]
        for n_model in sorted({*powers, own.n_model_shards}):
            n_shards = n // n_model
            for n_fsdp in sorted({1, own.n_fsdp_shards, n_shards}):
                if n_shards % n_fsdp:
                    continue
                for n_micro_batches, rows in self._cuts(n_shards):
                    cut = replace(
                        own,
                        n_model_shards=n_model,
                        n_fsdp_shards=n_fsdp,
                        per_device_batch_size=rows,
                        accumulate_grad_batches=n_micro_batches,
                    )
                    offload = sorted({own.offload_opt_state, own.offload_opt_state or self.opt_state > 0})
                    for remat, in_host in product(self.flops, offload):
                        for unroll in (True, False) if self._unrolls(n_fsdp, remat) else (own.unroll,):
                            yield replace(cut, remat=remat, unroll=unroll, offload_opt_state=in_host)

    def _unrolls(self, n_fsdp_shards: int, remat: str) -> bool:
        """Whether loops are written out under a setting, unless it says otherwise."""
        return self.unrolls and n_fsdp_shards == 1 and remat in ("none", "matmuls")

    def _cuts(self, n_shards: int) -> Iterator[tuple[int, int]]:
        """The numbers of micro-batches into which the rows of an update can be cut, each with the rows of a shard."""
        own = self.own
        n_rows = own.per_device_batch_size * (self.n_devices // own.n_model_shards) * own.accumulate_grad_batches
        counts = {own.accumulate_grad_batches, *(2**i for i in range(n_rows.bit_length()))}
        for count in sorted(counts):
            if own.batch_size is not None:  # as `BatchSize.of` cuts it: a multiple of the devices
                micro_batch = -(-own.batch_size // count) // self.n_devices * self.n_devices
                if micro_batch:
                    yield count, micro_batch // n_shards
            elif n_rows % (n_shards * count) == 0:
                yield count, n_rows // (n_shards * count)

    def _order(self, setting: Setting) -> tuple[float, int, bool, int]:
        return self.at_least(setting), list(self.flops).index(setting.remat), not setting.unroll, setting.n_fsdp_shards

    def at_least(self, setting: Setting) -> float:
        """A time below that of a step in which nothing overlaps, in seconds: of its matmuls, of reading its weights for each
        micro-batch and its state once, of the collectives of its weights and gradients, of copies of what the host holds."""
        chip = self.chip or _TYPICAL
        n_model, n_fsdp, n_micro_batches = setting.n_model_shards, setting.n_fsdp_shards, setting.accumulate_grad_batches
        n_data = self.n_devices // (n_model * n_fsdp)
        weights = self.weights / n_model / 2  # in half precision
        moved = n_micro_batches * 2 * weights + 2 * self.state / (n_model * n_fsdp)
        # A ring: each weight is gathered in both passes and its gradient scattered; then the gradient's shards are summed.
        sent = 3 * weights * (n_fsdp - 1) / n_fsdp + 2 * weights / n_fsdp * (n_data - 1) / n_data
        seconds = matmul_seconds(self.flops[setting.remat], chip, self.n_devices)
        copied = 2 * self.opt_state / (n_model * n_fsdp) if setting.offload_opt_state else 0
        return seconds + moved / chip.bandwidth + n_micro_batches * sent / chip.link + copied / chip.host

    def _is_ruled_out(self, setting: Setting, known: Sequence[Rung]) -> bool:
        """Whether a setting cannot fit, or cannot be the fastest, by those that are known."""
        state = self.state - (self.opt_state if setting.offload_opt_state else 0)
        if state / (setting.n_model_shards * setting.n_fsdp_shards) > self.memory:
            return True
        if any(self._needs_at_least(setting, rung) > self.memory for rung in known if not rung.fits):
            return True
        best = fastest(known)
        if best is not None and self.at_least(setting) >= best.seconds:
            return True
        return any(_saves_no_time(setting, rung.setting) for rung in known if rung.fits)

    def _needs_at_least(self, setting: Setting, rung: Rung) -> float:
        """Bytes that a setting needs, by one that was compiled for the same mesh and recomputes as much or more: what is not
        held shrinks at most as the rows of a micro-batch do."""
        own, other = setting, rung.setting
        if (own.n_model_shards, own.n_fsdp_shards) != (other.n_model_shards, other.n_fsdp_shards):
            return 0
        if (own.offload_opt_state and not other.offload_opt_state) or (other.unroll and not own.unroll):
            return 0
        if own.remat != other.remat and REMATS.index(own.remat) > REMATS.index(other.remat):
            return 0
        share = min(1.0, own.per_device_batch_size / other.per_device_batch_size)
        return rung.held + (rung.needs - rung.held) * share


def _saves_no_time(setting: Setting, other: Setting) -> bool:
    """Whether a setting only saves memory over another one that fits: with as many shards, it has as many micro-batches or
    more, as much recomputation or more, and no less in loops or in the memory of the host. (More shards of the fsdp axis may
    save time too: that of the update.)"""
    if (setting.n_model_shards, setting.n_fsdp_shards) != (other.n_model_shards, other.n_fsdp_shards):
        return False
    if setting.accumulate_grad_batches < other.accumulate_grad_batches:
        return False
    if (other.offload_opt_state and not setting.offload_opt_state) or (setting.unroll and not other.unroll):
        return False
    return setting.remat == other.remat or _COSTS[setting.remat] > _COSTS[other.remat]
