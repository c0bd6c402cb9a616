"""The search for a strategy: which ones make the same update, in which order they are tried, and which need not be compiled.

Only computes with numbers: the caller compiles a strategy and returns what it needs.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

from jax.extend import core as jex

from ..dims import UNKNOWN, RowUse
from ..machine import DEFAULT_CHIP, HOST_MEMORY, Chip
from ..tracing import matmul_flops
from ._saved import KEPT, Loop, saved_at
from ._strategy import AUTO, FIT, REMATS, Strategy, Tried, bytes_text, fastest, level_of, may_cut

# The relative cost of recomputation. Saving only the outputs of matmuls may be faster than saving everything, since a step
# that is bound by memory bandwidth then reads less.
_COSTS = {"none": 0, "matmuls": 0, FIT: 1, "full": 2, "offload": 3}
_MARGIN = 0.02  # of a device's memory, for what another choice changes besides the bytes that loops save
_N_TRIES = 3  # of bytes for what loops save


@dataclass(frozen=True)
class SearchSpace:
    """The strategies to try, with the numbers that are known before they are compiled."""

    own: Strategy  # that of the script
    n_devices: int
    # Of the matmuls of an update, by dtype, for each level of `REMATS` to try, or only for the script's own level, which may
    # be `"auto"`.
    flops: Mapping[str, Mapping[str, int]]
    weights: int  # bytes of the parameters
    state: int  # bytes of all arrays that stay in memory, not counting copies
    memory: int  # bytes of a device
    chip: Chip | None  # None if its figures are unknown
    frozen: int = 0  # bytes of the parameters that are not trained
    opt_state: int = 0  # the part of `state` that belongs to the optimizer and can be offloaded to the host
    unrolls: bool = False  # whether loops over small layers are unrolled if weights are not gathered layer by layer
    # Whether `remat="matmuls"` may split the residual stream over model shards, which it does not do by default, since it
    # sends more then.
    splits_residual: bool = False
    # What the loss does with rows, and whether layers have a state: if other micro-batches make another update, their number
    # stays.
    rows: RowUse = UNKNOWN
    has_state: bool = False
    is_running: bool = False  # the mesh and the rows on each device are fixed; micro-batches can still be divided
    # Returns what the loops of a strategy could save; None if bytes for that are no level to try.
    loops: Callable[[Strategy], Sequence[Loop]] | None = None
    estimate: Callable[[Strategy], int] | None = None  # about how many bytes a strategy needs, without compiling it
    has_host: bool = True  # whether the host has a memory of its own

    @classmethod
    def of(
        cls,
        own: Strategy,
        trace: Callable[[Strategy], Any],
        sizes: Any,
        platform: str,
        *,
        can_remat: bool = True,
        **known: Any,
    ) -> "SearchSpace":
        """Returns the strategies to try, with the numbers that traces give.

        **Arguments:**

        - `trace`: maps a strategy to the jaxpr of its train step.
        - `sizes`: has the bytes `weights`, `frozen`, `state` and `opt_state`.
        - `can_remat`: whether levels of recomputation make a difference.
        - `known`: the other fields.
        """
        if can_remat:
            own, flops, unrolls, splits = _levels_of(own, trace, platform)
        else:
            flops, unrolls, splits = {own.remat: matmul_flops(trace(own), with_masked=False)}, False, False
        known |= {"unrolls": unrolls, "splits_residual": splits, "has_host": platform != "cpu"}
        if len(flops) > 1 and "matmuls" in flops and known.get("loops") is not None:
            flops = {**flops, FIT: flops["matmuls"]}
            flops = {level: flops[level] for level in _COSTS if level in flops}
        opt_state = 0 if platform == "cpu" else sizes.opt_state  # CPU devices have no separate host memory
        known |= {"weights": sizes.weights, "frozen": sizes.frozen, "state": sizes.state, "opt_state": opt_state}
        return cls(own, flops=flops, **known)

    def search(self, own: Tried, measure: Callable[[Strategy], Tried | None], *, to_fastest: bool) -> Iterator[Tried]:
        """Yields the strategies that had to be compiled by `measure`, which returns None if one cannot be, each when it is
        compiled. With `to_fastest`, goes on after a strategy fits, to those that may be faster, if estimates are known.

        More shards of the model axis than in the script are tried only if nothing else fits, because the time of their
        collectives is unknown before compilation.
        """
        known = [own]
        groups: dict[int, list[Strategy]] = {}
        for strategy in self.strategies():
            groups.setdefault(strategy.n_model_shards, []).append(strategy)
        for n_model, strategies in sorted(groups.items()):
            if n_model < self.own.n_model_shards and not to_fastest:
                continue
            for strategy in sorted(strategies, key=self._order):
                best = fastest(known)
                is_enough = best is not None and (not to_fastest or best.seconds is None)
                if is_enough or (best is not None and n_model > self.own.n_model_shards):
                    return
                if strategy == self.own or self._is_ruled_out(strategy, known):
                    continue
                for tried in self._tried(strategy, known, measure):
                    known.append(tried)
                    yield tried

    def _tried(
        self, strategy: Strategy, known: Sequence[Tried], measure: Callable[[Strategy], Tried | None]
    ) -> Iterator[Tried]:
        """Yields what was compiled of one strategy: several numbers of bytes for what loops save, until one fits or saves
        nothing else than the one before, or than `"full"`."""
        if strategy.remat != FIT:
            yield from filter(None, [measure(strategy)])
            return
        loops = () if self.loops is None else self.loops(strategy)
        room, everything = self._room(strategy, loops, known), self._kept(loops, replace(strategy, remat="matmuls"))
        last = self._saved(loops, replace(strategy, remat="full"))
        for _ in range(_N_TRIES):
            if room is None or room <= 0 or not everything or room >= everything:
                return
            filling = replace(strategy, remat=bytes_text(room))
            before, last = last, self._saved(loops, filling)
            tried = None if last == before else measure(filling)
            if tried is None:
                return
            yield tried
            if tried.fits:
                return
            room -= (tried.needs - self.memory) + _MARGIN * self.memory

    def _room(self, strategy: Strategy, loops: Sequence[Loop], known: Sequence[Tried]) -> float | None:
        """Returns the bytes that a strategy leaves for what loops save: from a compiled one that differs in nothing else, or
        by an estimate."""
        for tried in reversed(known):
            own = self._kept(loops, tried.strategy) if replace(tried.strategy, remat=FIT) == strategy else None
            if own is not None:
                return (1 - _MARGIN) * self.memory - (tried.needs - own)
        if self.estimate is None:
            return None
        full = replace(strategy, remat="full")
        return (1 - _MARGIN) * self.memory - (self.estimate(full) - (self._kept(loops, full) or 0))

    def _kept(self, loops: Sequence[Loop], strategy: Strategy) -> int | None:
        """Returns the bytes that loops save on one device, if known."""
        saved = self._saved(loops, strategy)
        return None if saved is None else sum(each.n_bytes(KEPT) for each in saved)

    def _saved(self, loops: Sequence[Loop], strategy: Strategy) -> Sequence[Loop] | None:
        host = HOST_MEMORY - self._in_host(strategy) if self.has_host else 0
        return saved_at(loops, strategy.remat, self.chip or DEFAULT_CHIP, host)

    def _in_host(self, strategy: Strategy) -> float:
        """Returns the bytes of the optimizer's state in host memory, for one device."""
        n_stored = strategy.n_model_shards * strategy.n_fsdp_shards * strategy.n_sequence_shards
        return self.opt_state / n_stored if strategy.offload_opt_state else 0

    def strategies(self) -> Iterator[Strategy]:
        """Yields all strategies that make the same update."""
        own = self.own
        offload = sorted({own.offload_opt_state, own.offload_opt_state or self.opt_state > 0})
        for n_model, n_fsdp in self._meshes():
            for n_micro_batches, rows in self._cuts(self.n_row_devices // n_model):
                cut = replace(
                    own,
                    n_model_shards=n_model,
                    n_fsdp_shards=n_fsdp,
                    per_device_batch_size=rows,
                    accumulate_grad_batches=n_micro_batches,
                )
                for remat, in_host in product(self.flops, offload):
                    unrolls = self.unrolls and n_fsdp == 1 and remat in ("none", "matmuls")
                    unrolled = (True, False) if unrolls else (own.unroll,)
                    may_split = self.splits_residual and n_model > 1 and remat == "matmuls"
                    for unroll, split in product(unrolled, (None, True) if may_split else (own.split_residual,)):
                        options = {"unroll": unroll, "split_residual": split}
                        yield replace(cut, remat=remat, offload_opt_state=in_host, **options)

    @property
    def n_row_devices(self) -> int:
        """The number of devices without those that share rows over the sequence axis, which no strategy changes."""
        return self.n_devices // self.own.n_sequence_shards

    def _meshes(self) -> Iterator[tuple[int, int]]:
        own, n = self.own, self.n_row_devices
        if self.is_running:
            yield own.shards
            return
        for n_model in sorted({*_powers(n), own.n_model_shards}):
            for n_fsdp in sorted({1, own.n_fsdp_shards, n // n_model}):
                if n // n_model % n_fsdp == 0:
                    yield n_model, n_fsdp

    def _cuts(self, n_shards: int) -> Iterator[tuple[int, int]]:
        """Yields the numbers of micro-batches that an update can be split into, each with the rows of a shard."""
        own = self.own
        n_rows = own.per_device_batch_size * (self.n_row_devices // own.n_model_shards) * own.accumulate_grad_batches
        if self.is_running:
            counts = {own.accumulate_grad_batches * part for part in _powers(own.per_device_batch_size)}
        else:
            counts = {own.accumulate_grad_batches, *(2**i for i in range(n_rows.bit_length()))}
        for count in sorted(counts):
            if own.batch_size is not None and not self.is_running:  # as in `BatchSize.of`: a multiple of `n_row_devices`
                rows = -(-own.batch_size // count) // self.n_row_devices * self.n_row_devices // n_shards
            else:
                rows = 0 if n_rows % (n_shards * count) else n_rows // (n_shards * count)
            may = may_cut(self.rows, has_state=self.has_state) and rows % self.rows.group == 0
            if rows and (may or count == own.accumulate_grad_batches):
                yield count, rows

    def _order(self, strategy: Strategy) -> tuple[float, int, bool, bool, int]:
        remat = list(self.flops).index(strategy.remat)
        return self.min_seconds(strategy), remat, not strategy.unroll, self._is_split(strategy), strategy.n_fsdp_shards

    def min_seconds(self, strategy: Strategy) -> float:
        """Returns a lower bound on the time of a step without overlap, in seconds.

        It sums the times of the matmuls, of reading the weights for each micro-batch and the state that changes once, of the
        collectives of weights and gradients, and of copies to and from the host.
        """
        chip = self.chip or DEFAULT_CHIP
        n_model, n_micro_batches = strategy.n_model_shards, strategy.accumulate_grad_batches
        n_stored = strategy.n_fsdp_shards * strategy.n_sequence_shards
        n_data = self.n_devices // (n_model * n_stored)
        weights = self.weights / n_model / 2  # in half precision
        trained = weights - self.frozen / n_model / 2
        moved = n_micro_batches * 2 * weights + 2 * (self.state - self.frozen) / (n_model * n_stored)
        # Ring collectives: two all-gathers of each weight and a reduce-scatter of its gradient over the storage axes, then
        # an all-reduce of the gradient's shards over the data axis.
        sent = (2 * weights + trained) * (n_stored - 1) / n_stored + 2 * trained / n_stored * (n_data - 1) / n_data
        seconds = matmul_seconds(self.flops[strategy.remat], chip, self.n_devices)
        copied = 2 * self._in_host(strategy)
        return seconds + moved / chip.bandwidth + n_micro_batches * sent / chip.link + copied / chip.host

    def _is_ruled_out(self, strategy: Strategy, known: Sequence[Tried]) -> bool:
        """Whether a strategy cannot fit or cannot be the fastest, given those that were compiled."""
        state = self.state - (self.opt_state if strategy.offload_opt_state else 0)
        if state / (strategy.n_model_shards * strategy.n_fsdp_shards * strategy.n_sequence_shards) > self.memory:
            return True
        if any(self._min_bytes(strategy, tried) > self.memory for tried in known if not tried.fits):
            return True
        best = fastest(known)
        if best is not None and self.min_seconds(strategy) >= best.cost:
            return True
        cheaper = [tried.strategy for tried in known if tried.fits]
        return any(
            _saves_no_time(strategy, other) and (self._is_split(strategy) or not self._is_split(other)) for other in cheaper
        )

    def _is_split(self, strategy: Strategy) -> bool:
        """Whether the residual stream may be split over model shards, which saves memory and sends as much or more."""
        by_default = self.splits_residual and strategy.remat != "matmuls"  # see `Compute.splits_residual_on`
        return strategy.n_model_shards > 1 and (by_default if strategy.split_residual is None else strategy.split_residual)

    def _min_bytes(self, own: Strategy, tried: Tried) -> float:
        """Returns a lower bound on the bytes that a strategy needs, given one that was compiled.

        The bound is 0 unless that one has the same mesh and recomputes as much or more. Temporaries shrink at most in
        proportion to the rows of a micro-batch.
        """
        other = tried.strategy
        if own.shards != other.shards:
            return 0
        if (own.offload_opt_state and not other.offload_opt_state) or (other.unroll and not own.unroll):
            return 0
        if self._is_split(own) and not self._is_split(other):
            return 0
        if own.remat != other.remat:
            levels = [*REMATS[:2], FIT, *REMATS[2:]]  # bytes keep no more than all products
            if own.remat == FIT or levels.index(own.remat) > levels.index(level_of(other.remat)):
                return 0
        share = min(1.0, own.per_device_batch_size / other.per_device_batch_size)
        return tried.held + (tried.needs - tried.held) * share


def _saves_no_time(strategy: Strategy, other: Strategy) -> bool:
    """Whether a strategy only saves memory compared with another one that fits.

    This holds if it has the same shards, at least as many micro-batches, at least as much recomputation, and at least as
    much in loops and in host memory. (More shards of the fsdp axis may also save time, in the update.)
    """
    if strategy.shards != other.shards or strategy.accumulate_grad_batches < other.accumulate_grad_batches:
        return False
    if (other.offload_opt_state and not strategy.offload_opt_state) or (strategy.unroll and not other.unroll):
        return False
    return strategy.remat == other.remat or _COSTS[level_of(strategy.remat)] > _COSTS[level_of(other.remat)]


def _powers(n: int) -> list[int]:
    """Returns the powers of two that divide a number."""
    return [2**i for i in range(n.bit_length()) if n % 2**i == 0]


def matmul_seconds(flops: Mapping[str, int], chip: Chip, n_devices: int) -> float:
    """Returns a lower bound on the time of matmuls, in seconds, for the FLOPs by dtype of all devices together."""
    return sum((n / n_devices / chip.rate(dtype) for dtype, n in flops.items()), 0.0)


def _levels_of(
    own: Strategy, trace: Callable[[Strategy], Any], platform: str
) -> tuple[Strategy, Mapping[str, Mapping[str, int]], bool, bool]:
    """Returns the script's own strategy with its level of recomputation (`"auto"` is one of them), the FLOPs of a step's
    matmuls for each level that makes another program, whether loops are unrolled by default, and whether the level
    `"matmuls"` may split the residual stream, which it does not by default.

    If all levels make the same program, because the loss has no loops or has remats itself, only the own level is returned.
    Bytes as the own level make a program of their own.
    """
    content_of = cache(lambda strategy: _content(trace(strategy)))
    is_gpu = platform in ("cuda", "gpu")
    own_content = content_of(replace(own, remat=AUTO if own.remat == "auto" else own.remat))
    programs: dict[str, Any] = {}
    for remat in REMATS[:-1] if platform == "cpu" else REMATS:  # a CPU is its own host
        content = content_of(replace(own, remat=remat))
        if content not in programs.values():
            programs[remat] = content
    unrolls = is_gpu and content_of(replace(own, remat="none", unroll=False)) != programs["none"]
    same = [remat for remat, content in programs.items() if content == own_content]
    if len(programs) < 2:
        same, programs = [own.remat], {own.remat: own_content}
    splits = platform != "cpu" and own.n_model_shards > 1 and own.split_residual is None and "matmuls" in programs
    splits = splits and content_of(replace(own, remat="matmuls", split_residual=True)) != programs["matmuls"]
    levels = {remat: flops for remat, (flops, _) in programs.items()}
    return replace(own, remat=next(iter(same), own.remat)), levels, unrolls, splits


def _content(jaxpr: Any) -> tuple[Mapping[str, int], Counter[str]]:
    """Returns what two programs are compared by: their matmuls' FLOPs by dtype, and how often they have each primitive."""
    found, todo = Counter[str](), [jaxpr]
    while todo:
        eqns = todo.pop().eqns
        found.update(eqn.primitive.name for eqn in eqns)
        todo += [getattr(inner, "jaxpr", inner) for eqn in eqns for inner in jex.jaxprs_in_params(eqn.params)]
    return matmul_flops(jaxpr), found
