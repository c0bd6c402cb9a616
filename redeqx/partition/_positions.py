"""How a loss uses positions, in words: what the sequence axis splits, what it cannot split, and where."""

from collections.abc import Sequence
from functools import partial

from jax.sharding import Mesh

from ..dims import ATTENTION, CHUNKS, RECURRENCE, Along, Positions, positions_of
from ..machine import SEQUENCE
from ..tracing import Trace, or_as_written, shortened


def describe_positions(trace: Trace, mesh: Mesh) -> tuple[str, ...]:
    """Returns a sentence for each way in which a traced loss combines positions; none without a sequence axis.

    Raises ValueError if it attends to a number of the batch's positions that does not divide over the axis.
    """
    n = mesh.shape[SEQUENCE]
    if n == 1:
        return ()
    n_weights = len(trace.leaves)
    n_batch = len(trace.closed.jaxpr.invars) - n_weights - 1  # the last input is the key
    search = partial(positions_of, trace.closed, n_weights, 0, n_batch)
    found = or_as_written(search, Positions, "the search for positions").along
    if not found:
        return (f"none found in the batch; the {n} sequence shards repeat the work of each other",)
    wrong = [each for each in found if each.what == ATTENTION and each.is_given and each.size % n]
    if wrong:
        size, below = wrong[0].size, wrong[0].size // n * n
        fitting = " or ".join(str(length) for length in (below, below + n) if length)
        raise ValueError(
            f"`n_sequence_shards`: expected attention over a number of positions that {n} divides, got {size}"
            f"{_at(wrong[0])}. Cut or pad the sequences, so that the model attends to {fitting} positions."
        )
    return tuple(_sentence(each, n) for each in found)


def _sentence(each: Along, n: int) -> str:
    if each.what == RECURRENCE:
        how = "each device computes all of them, for its part of the rows if these divide"
    elif each.what == CHUNKS:
        how = "each device computes a part of each chunk"
    elif each.size % n:
        how = f"{n} devices do not divide them, so XLA pads them"
    else:
        how = f"split over {n} devices"
    return f"{each.size} in {each.what}{_at(each)}: {how}"


def _at(each: Along) -> str:
    return f" at {shortened(each.line)}" if each.line else ""


def positions_note(sentences: Sequence[str]) -> list[str]:
    """Returns the sentences as one line of a table; no line without any."""
    return [f"positions: {'; '.join(sentences)}"] if sentences else []
