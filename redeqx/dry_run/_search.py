"""The search for settings that make the same update with less memory: their order, and which need not be compiled.

A setting defines how a run is distributed: shards, micro-batches, and recomputation in the loops of the loss. All settings
of a search have the same examples in an update. `_forecast` compiles them. This module only computes with their numbers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from ..dims import UNKNOWN, RowUse
from ..machine import GPUS, Chip
from ..training import REMATS, Setting
from ._figures import Estimate, matmul_seconds

# The relative cost of recomputation. Saving only the outputs of matmuls may be faster than saving everything, since a step
# that is bound by memory bandwidth then reads less.
_COSTS = {"none": 0, "matmuls": 0, "full": 1, "offload": 2}
_DEFAULT_CHIP = GPUS["a100-40gb"].chip  # decides the order of settings for devices without published rates


@dataclass(frozen=True)
class CompiledSetting:
    """A setting that was compiled.

    **Arguments:**

    - `needs`: bytes on each device, as `Step.needs`. A lower bound if `is_bound`.
    - `held`: the part of these bytes that stays in memory during the whole run.
    - `estimate`: the estimate of its train step, or None if unknown.
    """

    setting: Setting
    needs: int
    fits: bool
    is_bound: bool = False
    held: int = 0
    estimate: Estimate | None = None

    @property
    def seconds(self) -> float:
        """The time by which settings are compared: that of a step without overlap, or infinity if unknown."""
        return float("inf") if self.estimate is None else self.estimate.serial


def fastest(compiled: Sequence[CompiledSetting]) -> CompiledSetting | None:
    """Returns the fastest setting that fits (the first of equally fast ones), or None if none fits."""
    return min((each for each in compiled if each.fits), key=lambda each: each.seconds, default=None)


@dataclass(frozen=True)
class SearchSpace:
    """The settings to try for a job on a machine, with the numbers that are known before they are compiled.

    **Arguments:**

    - `own`: the setting of the script.
    - `flops`: FLOPs of the matmuls of an update, by dtype, for each level of `REMATS` to try, or only for the script's own
        level, which may be `"auto"`.
    - `weights`: bytes of the parameters.
    - `state`: bytes of all arrays that stay in memory, not counting copies.
    - `opt_state`: the part of these bytes that belongs to the optimizer's state and can be offloaded to the host.
    - `unrolls`: whether loops over small layers are unrolled if weights are not gathered layer by layer.
    - `rows`: what the loss does with rows; if it mixes them, other numbers of micro-batches make another update.
    - `memory`: bytes of a device.
    - `chip`: the figures of a device, or None if unknown.
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
    rows: RowUse = UNKNOWN

    def search(
        self, own: CompiledSetting, measure: Callable[[Setting], CompiledSetting | None], *, to_fastest: bool
    ) -> Iterator[CompiledSetting]:
        """Yields the settings that had to be compiled, each when it is compiled.

        More shards of the model axis than in the script are tried only if nothing else fits, because the time of their
        collectives is unknown before compilation.

        **Arguments:**

        - `own`: the setting of the script.
        - `measure`: compiles a setting. Returns None if it cannot be compiled.
        - `to_fastest`: whether to go on after a setting fits, to settings that may be faster, if estimates are known.
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
                if (compiled := measure(setting)) is not None:
                    known.append(compiled)
                    yield compiled

    def settings(self) -> Iterator[Setting]:
        """Yields all settings that make the same update."""
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
        """Whether loops are unrolled by default under a setting."""
        return self.unrolls and n_fsdp_shards == 1 and remat in ("none", "matmuls")

    def _cuts(self, n_shards: int) -> Iterator[tuple[int, int]]:
        """Yields the numbers of micro-batches that an update can be split into, each with the rows of a shard."""
        own = self.own
        n_rows = own.per_device_batch_size * (self.n_devices // own.n_model_shards) * own.accumulate_grad_batches
        counts = {own.accumulate_grad_batches, *(2**i for i in range(n_rows.bit_length()))}
        for count in sorted(counts):
            if own.batch_size is not None:  # as in `BatchSize.of`: a multiple of the number of devices
                rows = -(-own.batch_size // count) // self.n_devices * self.n_devices // n_shards
            else:
                rows = 0 if n_rows % (n_shards * count) else n_rows // (n_shards * count)
            is_same = count == own.accumulate_grad_batches or (self.rows.kind != "mixed" and rows % self.rows.group == 0)
            if rows and is_same:
                yield count, rows

    def _order(self, setting: Setting) -> tuple[float, int, bool, int]:
        return self.min_seconds(setting), list(self.flops).index(setting.remat), not setting.unroll, setting.n_fsdp_shards

    def min_seconds(self, setting: Setting) -> float:
        """Returns a lower bound on the time of a step without overlap, in seconds.

        It sums the times of the matmuls, of reading the weights for each micro-batch and the state once, of the collectives
        of weights and gradients, and of copies to and from the host.
        """
        chip = self.chip or _DEFAULT_CHIP
        n_model, n_fsdp, n_micro_batches = setting.n_model_shards, setting.n_fsdp_shards, setting.accumulate_grad_batches
        n_data = self.n_devices // (n_model * n_fsdp)
        weights = self.weights / n_model / 2  # in half precision
        moved = n_micro_batches * 2 * weights + 2 * self.state / (n_model * n_fsdp)
        # Ring collectives: two all-gathers of each weight and a reduce-scatter of its gradient over the fsdp axis, then an
        # all-reduce of the gradient's shards over the data axis.
        sent = 3 * weights * (n_fsdp - 1) / n_fsdp + 2 * weights / n_fsdp * (n_data - 1) / n_data
        seconds = matmul_seconds(self.flops[setting.remat], chip, self.n_devices)
        copied = 2 * self.opt_state / (n_model * n_fsdp) if setting.offload_opt_state else 0
        return seconds + moved / chip.bandwidth + n_micro_batches * sent / chip.link + copied / chip.host

    def _is_ruled_out(self, setting: Setting, known: Sequence[CompiledSetting]) -> bool:
        """Whether a setting cannot fit or cannot be the fastest, given the settings that were compiled."""
        state = self.state - (self.opt_state if setting.offload_opt_state else 0)
        if state / (setting.n_model_shards * setting.n_fsdp_shards) > self.memory:
            return True
        if any(self._min_bytes(setting, compiled) > self.memory for compiled in known if not compiled.fits):
            return True
        best = fastest(known)
        if best is not None and self.min_seconds(setting) >= best.seconds:
            return True
        return any(_saves_no_time(setting, compiled.setting) for compiled in known if compiled.fits)

    def _min_bytes(self, setting: Setting, compiled: CompiledSetting) -> float:
        """Returns a lower bound on the bytes that a setting needs, given a setting that was compiled.

        The bound is 0 unless that setting has the same mesh and recomputes as much or more. Temporaries shrink at most in
        proportion to the rows of a micro-batch.
        """
        own, other = setting, compiled.setting
        if (own.n_model_shards, own.n_fsdp_shards) != (other.n_model_shards, other.n_fsdp_shards):
            return 0
        if (own.offload_opt_state and not other.offload_opt_state) or (other.unroll and not own.unroll):
            return 0
        if own.remat != other.remat and REMATS.index(own.remat) > REMATS.index(other.remat):
            return 0
        share = min(1.0, own.per_device_batch_size / other.per_device_batch_size)
        return compiled.held + (compiled.needs - compiled.held) * share


def _saves_no_time(setting: Setting, other: Setting) -> bool:
    """Whether a setting only saves memory compared with another one that fits.

    This holds if it has the same shards, at least as many micro-batches, at least as much recomputation, and at least as
    much in loops and in host memory. (More shards of the fsdp axis may also save time, in the update.)
    """
    if (setting.n_model_shards, setting.n_fsdp_shards) != (other.n_model_shards, other.n_fsdp_shards):
        return False
    if setting.accumulate_grad_batches < other.accumulate_grad_batches:
        return False
    if (other.offload_opt_state and not setting.offload_opt_state) or (setting.unroll and not other.unroll):
        return False
    return setting.remat == other.remat or _COSTS[setting.remat] > _COSTS[other.remat]
