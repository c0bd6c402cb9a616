"""How a loss uses positions, in words: what the sequence axis splits, what it cannot split, and where."""

from jax.sharding import Mesh

from ..dims import ATTENTION, BY_KEYS, CHUNKS, CUMULATIVE, RECURRENCE, Along, Inputs, positions_of
from ..machine import SEQUENCE
from ..tracing import Trace, shortened

# Operations that need all positions, by the names of their primitives.
_OF_ALL = ("sort", "fft", "reduce_window_sum", "reduce_window_max", "reduce_window_min")


def inputs_of(trace: Trace, n_state: int = 0) -> Inputs:
    """Returns what the inputs of a traced loss or prediction are: the leaves, `n_state` arrays, the batch and a key."""
    n_weights = len(trace.leaves)
    return Inputs(n_weights, n_state, len(trace.closed.jaxpr.invars) - n_weights - n_state - 1)


def describe_positions(trace: Trace, mesh: Mesh, n_state: int = 0, *, may_be_whole: bool = False) -> tuple[str, ...]:
    """Returns a sentence for each way in which a traced loss or prediction combines positions; none without a sequence axis.
    `n_state` arrays are between the model and the batch.

    Raises ValueError if it attends to a number of the batch's positions that does not divide over the axis, unless these
    `may_be_whole` on each device.
    """
    n = mesh.shape[SEQUENCE]
    if n == 1:
        return ()
    found = positions_of(trace.closed, inputs_of(trace, n_state)).along
    if not found:
        how = f"each device computes a part of the rows if these divide, and else {n} devices repeat the work of each other"
        return (f"none found in the batch: {how}",)
    wrong = [each for each in found if each.what == ATTENTION and each.is_given and each.size % n]
    if wrong and not may_be_whole:
        size, below = wrong[0].size, wrong[0].size // n * n
        of = f" of the batch's {wrong[0].in_batch}" if wrong[0].in_batch != size else ""
        fitting = " or ".join(str(length) for length in (below, below + n) if length)
        raise ValueError(
            f"`n_sequence_shards`: expected attention over a number of positions that {n} divides, got {size}{of}"
            f"{_at(wrong[0])}. Cut or pad the sequences, so that the model attends to {fitting} positions."
        )
    return tuple(_sentence(each, n) for each in found)


def _sentence(each: Along, n: int) -> str:
    size, by_chunks = (each.size, "") if each.chunked is None else (each.in_batch, " by chunks")
    place = f"{size} in {each.what}{'' if each.what == CHUNKS else by_chunks}"
    is_loop = each.what in (RECURRENCE, CHUNKS) or (each.what in _OF_ALL and each.chunked is None)
    divides = any(part % n == 0 for part in ([size] if each.chunked is None else each.chunked))
    if each.what == CHUNKS and divides:
        how = "each device computes a part of the rows if these divide, and else of each chunk"
    elif is_loop or (each.chunked is not None and not divides):
        why = "" if is_loop or not each.chunked else f"{n} devices do not divide the {each.chunked[0]} chunks, so "
        how = f"{why}each device computes all of them, for its part of the rows if these divide"
    elif each.what == BY_KEYS and each.chunked is None:
        how = (
            "each device sorts all keys, of its part of the rows if these divide; "
            "tokens for `ragged_dot` stay on their devices, other values are sent"
        )
    elif divides:
        sends_edges = each.has_windows or each.what == "slice"  # that of an associative scan
        sent = "" if each.chunked is not None else "totals" if each.what in CUMULATIVE else "edges" if sends_edges else ""
        how = f"split over {n} devices{', which send each other the ' * bool(sent)}{sent}"
    elif each.in_batch % n or each.has_windows or (each.is_given and each.what == ATTENTION):
        how = f"{n} devices do not divide them, so each computes all of them, for its part of the rows if these divide"
    else:
        how = f"{n} devices do not divide them, so XLA pads them"
    return f"{place}{_at(each)}: {how}"


def _at(each: Along) -> str:
    return f" at {shortened(each.line)}" if each.line else ""
