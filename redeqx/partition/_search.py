"""Searches for the cheapest splits of the leaves, starting from those of the two rules.

A first pass over the loss applies the rules. If an operation combines values with different splits, or a split value with a
replicated one, other splits are tried for the leaves that caused this. The cheapest choice wins. The cost counts bytes sent,
replicated bytes and repeated work (`_flow`).
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from .._tree import without_indices
from ..tracing import Trace
from ._dataflow import follow
from ._flow import Pass
from ._rules import Split

# Alternative splits to try. Each follows the whole loss again, and so does the check of each kind of leaf that was changed.
MAX_TRIALS = 64
# Minimum saving of an alternative, relative to the cost of the plan. If it saves less, the rules' own choice stays: a row
# split whose input is replicated costs about the same by this count, but XLA then also splits the values before it.
MIN_SAVING = 1e-3
# Elements. Smaller leaves may stay replicated if that costs less, as long as no more of the model is replicated than by the
# field-order traversal (`_layers.split_in_field_order`).
SMALL = 2**14


@dataclass(frozen=True)
class Order:
    """The result of the dataflow analysis for each leaf that is used with data, by the leaf's name.

    **Arguments:**

    - `splits`: the dim that the model axis splits, counted from the leaf's first dim, and the reason.
    - `stacked`: the number of leading dims over which loops slice the leaf.
    - `cost`: the cost of a step, in bytes.
    - `errors`: how often a primitive had an unknown form, by the primitive and the error. Its values count as replicated.
    """

    splits: Mapping[str, Split]
    stacked: Mapping[str, int]
    cost: float
    errors: Mapping[str, int]


def order(
    trace: Trace,
    n_shards: int,
    followers: Mapping[str, tuple[str, Sequence[int | None]]] = MappingProxyType({}),
    max_replicated: int | None = None,
) -> Order:
    """Applies the rules in the order of a traced loss. All inputs after the model count as data, except PRNG keys.

    **Arguments:**

    - `n_shards`: size of the model axis.
    - `followers`: leaves that are split like a weight, by name: the weight's name, and for each dim of the leaf the matching
        dim of the weight, or None.
    - `max_replicated`: a leaf that could be split is replicated to save cost only if at most this many elements of the model
        are then replicated in total. No limit by default.
    """
    sizes = [math.prod(leaf.shape) for leaf in trace.leaves]
    index = {name: i for i, name in enumerate(trace.names)}
    follows = {
        index[name]: (index[weight], dims) for name, (weight, dims) in followers.items() if {name, weight} <= index.keys()
    }

    def run(forced: Mapping[int, int | None]) -> Pass:
        found = follow(trace, n_shards, forced=forced, follows=follows)
        found.add_replicated_leaves()
        return found

    # Leaves whose names differ only in indices (of a list of blocks) are changed together, if their splits are equal.
    alike: dict[str, list[int]] = {}
    patterns = [without_indices(name) for name in trace.names]
    for i, pattern in enumerate(patterns):
        alike.setdefault(pattern, []).append(i)

    def n_replicated(run: Pass) -> int:
        return sum(sizes[i] for i, split in run.decided.items() if split.dim is None)

    best, n_trials, tried = run({}), 0, set()

    def attempt(forced: Mapping[int, int | None]) -> bool:
        nonlocal best, n_trials
        unsplit = [leaf for leaf, dim in forced.items() if dim is None]
        if any(sizes[leaf] >= SMALL for leaf in unsplit):
            return False
        n_trials += 1
        trial = run({**best.forced, **forced})
        if trial.cost >= best.cost or (unsplit and max_replicated is not None and n_replicated(trial) > max_replicated):
            return False
        best = trial
        return True

    # All at once, as next: keys alone would not match values that are still split over layers.
    others = {leaf: [dim for dim in best.options.get(leaf, ()) if dim != best.decided[leaf].dim] for leaf in best.sliced}
    if forced := {leaf: dims[0] for leaf, dims in others.items() if dims}:
        attempt(forced)
    if best.recurrent:  # all at once: a single replicated one would still be combined with split outputs of the others
        attempt(dict.fromkeys(best.recurrent))
    while n_shards > 1 and n_trials < MAX_TRIALS:
        leaf = next((leaf for leaf in best.candidates if patterns[leaf] not in tried), None)
        if leaf is None:
            break
        tried.add(patterns[leaf])
        now, shape = best.decided[leaf].dim, trace.leaves[leaf].shape
        same = [i for i in alike[patterns[leaf]] if i in best.decided and best.decided[i].dim == now]
        same = [i for i in same if trace.leaves[i].shape == shape]
        others = (*best.options.get(leaf, ()), *([None] if leaf in best.gathered else []))
        found = [attempt(dict.fromkeys(same, dim)) for dim in others if dim != now]
        if any(found):
            tried = {patterns[leaf]}
    for pattern in dict.fromkeys(patterns[leaf] for leaf in best.forced):
        trial = run({leaf: dim for leaf, dim in best.forced.items() if patterns[leaf] != pattern})
        best = trial if trial.cost * (1 - MIN_SAVING) <= best.cost else best
    names = trace.names
    splits = {names[i]: split for i, split in best.decided.items()}
    return Order(splits, {names[i]: n for i, n in best.stacked.items()}, best.cost, Counter(best.errors.values()))
