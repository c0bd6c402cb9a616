"""Searches for the cheapest splits of the leaves, starting from those of the two rules.

A first pass over the loss applies the rules. If an operation combines values with different splits, or a split value with a
replicated one, other splits are tried for the leaves that caused this. The cheapest choice wins. The cost counts bytes sent,
replicated bytes and repeated work (`_pass`).
"""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from .._tree import without_indices
from ..tracing import Trace
from ._dataflow import follow
from ._pass import Pass

# Alternative splits to try. Each follows the whole loss again, and so does the check of each kind of leaf that was changed.
MAX_TRIALS = 64
# Minimum saving of an alternative, relative to the cost of the plan. If it saves less, the rules' own choice stays: a row
# split whose input is replicated costs about the same by this count, but XLA then also splits the values before it.
MIN_SAVING = 1e-3
# Elements. Smaller leaves may stay replicated if that costs less, larger ones never: users enlarge an axis to save memory.
# So they hold at most this share of the model, too, unless a loop over time would send values in each iteration.
SMALL = 2**14
MAX_REPLICATED = 0.02


def order(
    trace: Trace,
    n_shards: int,
    followers: Mapping[str, tuple[str, Sequence[int | None]]] = MappingProxyType({}),
) -> Pass:
    """Applies the rules in the order of a traced loss, and returns the cheapest pass over it. All inputs after the model
    count as data, except PRNG keys. `followers` has the leaves that are split like a weight, by name: the weight's name, and
    for each dim of the leaf the matching dim of the weight, or None."""
    shapes = {name: tuple(leaf.shape) for name, leaf in zip(trace.names, trace.leaves, strict=True)}
    follows = {name: (weight, dims) for name, (weight, dims) in followers.items() if {name, weight} <= shapes.keys()}

    def run(forced: Mapping[str, int | None]) -> Pass:
        found = follow(trace, n_shards, forced=forced, follows=follows)
        found.add_replicated_leaves()
        return found

    max_replicated = MAX_REPLICATED * sum(map(math.prod, shapes.values()))
    best, n_trials, tried = run({}), 0, set[tuple[str, tuple[int, ...]]]()

    def attempt(forced: Mapping[str, int | None]) -> bool:
        nonlocal best, n_trials
        sizes = {leaf: math.prod(shapes[leaf]) for leaf, dim in {**best.forced, **forced}.items() if dim is None}
        if max(sizes.values(), default=0) >= SMALL:
            return False
        if sum(n for leaf, n in sizes.items() if leaf not in best.recurrent) > max_replicated:
            return False
        n_trials += 1
        trial = run({**best.forced, **forced})
        if trial.cost >= best.cost:
            return False
        best = trial
        return True

    # All at once, as next: keys alone would not match values that are still split over layers.
    sliced = [leaf for leaf in shapes if leaf in best.sliced]
    others = {leaf: [dim for dim in best.options.get(leaf, ()) if dim != best.splits[leaf].dim] for leaf in sliced}
    if forced := {leaf: dims[0] for leaf, dims in others.items() if dims}:
        attempt(forced)
    if best.recurrent:  # all at once: a single replicated one would still be combined with split outputs of the others
        attempt({leaf: None for leaf in shapes if leaf in best.recurrent})
    # Leaves whose names differ only in indices (of a list of blocks) are changed together, if shapes and splits are equal.
    patterns = {name: without_indices(name) for name in trace.names}
    alike = {name: (patterns[name], shapes[name]) for name in trace.names}
    while n_shards > 1 and n_trials < MAX_TRIALS:
        leaf = next((leaf for leaf in best.candidates if alike[leaf] not in tried), None)
        if leaf is None:
            break
        tried.add(alike[leaf])
        now = best.splits[leaf].dim
        same = [name for name, split in best.splits.items() if (alike[name], split.dim) == (alike[leaf], now)]
        others = (*best.options.get(leaf, ()), *([None] if leaf in best.gathered else []))
        found = [attempt(dict.fromkeys(same, dim)) for dim in others if dim != now]
        if any(found):
            tried = {alike[leaf]}
    for pattern in dict.fromkeys(patterns[leaf] for leaf in best.forced):
        trial = run({leaf: dim for leaf, dim in best.forced.items() if patterns[leaf] != pattern})
        best = trial if trial.cost * (1 - MIN_SAVING) <= best.cost else best
    return best
