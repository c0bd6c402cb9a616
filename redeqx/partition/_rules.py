"""The two rules, on the sizes of layers: no arrays, no devices, no trees.

1. Fully connected: consecutive layers alternate between dim 0 and dim 1.
2. Attention: query, key and value along dim 0, output along dim 1.

From Redco (arXiv:2310.16355), after Megatron-LM (arXiv:1909.08053). Both are one fact: a layer whose input arrives whole
splits its output (dim 0, a "column" split), one whose input arrives split splits what it contracts (dim 1, a "row" split),
and its output is whole again. Dims are those of Equinox's `[out, in]` weights.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

OUT = 0  # dim 0 of an `[out, in]` weight, and the rows of an embedding
IN = 1


@dataclass(frozen=True)
class Split:
    """The dim that one weight splits over the model axis, None where it stays whole, and why."""

    dim: int | None
    reason: str


@dataclass(frozen=True)
class Layer:
    """A fully connected layer (or convolution, by its channels) as the rules see it.

    **Arguments:**

    - `name`: its path, for the reasons.
    - `in_size`, `out_size`: features (or channels).
    - `parent`: the module that holds it as a field; None for an element of a list, which follows the one before it.
    - `groups`: of a grouped convolution.
    """

    name: str
    in_size: int
    out_size: int
    parent: str | None = None
    groups: int = 1

    @property
    def widens(self) -> bool:
        return self.out_size > self.in_size


def in_calling_order(siblings: Sequence[Layer]) -> list[Layer]:
    """The layers that are fields of one module, from field order into the order that their sizes suggest.

    Where sizes allow two orders (`down: f -> d` declared before `up: d -> f`) the chain begins with the layer that widens. A
    longer chain that field order makes already, like an autoencoder's, stays as it is.
    """
    if len(siblings) > 1:
        first, second = siblings[:2]
        if second.widens and (second.in_size, second.out_size) == (first.out_size, first.in_size):
            return [*siblings[1:], first]
    return list(siblings)


def alternate(layers: Iterable[Layer | None], n_shards: int) -> dict[str, Split]:
    """Rule 1: the split of every fully connected layer, by its name.

    **Arguments:**

    - `layers`: in calling order; None stands for anything after which activations are whole (attention, an embedding).
    - `n_shards`: size of the model axis.
    """
    splits: dict[str, Split] = {}
    previous: Layer | None = None
    arrived: str | None = None  # the layer that had split the previous layer's input, None where that was whole
    for layer in layers:
        if layer is None:
            previous = None
            continue
        if previous is None:
            arrives = None
        elif layer.in_size == previous.out_size:
            arrives = previous.name if splits[previous.name].dim == OUT else None
        elif layer.parent is not None and layer.parent == previous.parent and layer.in_size == previous.in_size:
            arrives = arrived  # siblings, like `gate` and `up`, take the same input
        else:
            arrives = None
        splits[layer.name] = _fully_connected(layer, arrives, n_shards)
        previous, arrived = layer, arrives
    return splits


def _fully_connected(layer: Layer, arrives: str | None, n_shards: int) -> Split:
    if layer.groups > 1:
        if layer.groups % n_shards == 0:
            return Split(OUT, f"column: {layer.groups} groups, each whole on its shard")
        return Split(None, f"whole: {layer.groups} groups do not divide over {n_shards} shards")
    if arrives is not None:
        return Split(IN, f"row: its input arrives split by `{arrives}`")
    if layer.out_size % n_shards == 0:
        return Split(OUT, "column: its input arrives whole")
    if layer.in_size % n_shards == 0:
        return Split(IN, f"row: {layer.out_size} outputs do not divide over {n_shards} shards, its inputs do")
    return Split(None, f"whole: neither {layer.out_size} outputs nor {layer.in_size} inputs divide over {n_shards} shards")


def attention(
    query: Layer, key: Layer, value: Layer, output: Layer, n_shards: int, heads: int | None, kv_heads: int | None
) -> dict[str, Split]:
    """Rule 2: the splits of one attention's four projections, by the layers' names.

    A shard holds whole heads, so it is the heads that must divide. Key and value heads that do not (fewer than shards, in
    grouped-query attention) stay whole, since queries on every shard read them; split along their inputs they cost 2.6 times
    the bytes (8 heads over 2 key/value heads, 4 shards, compiled on CPU). Where the query heads do not divide, the attention
    itself is computed whole and its projections take the other dim.

    **Arguments:**

    - `heads`, `kv_heads`: the numbers of query heads and of key/value heads; None where unknown, and then only the sizes
        of the arrays are asked.
    """
    known = "" if heads is not None else " (number of heads unknown)"
    units = query.out_size if heads is None else heads
    kv_units = min(key.out_size, value.out_size) if kv_heads is None else kv_heads
    if units % n_shards or output.in_size % n_shards:
        why = f"{units} {'features' if heads is None else 'heads'} do not divide over {n_shards} shards"
        flipped = {layer.name: _other(layer, IN, why, n_shards) for layer in (query, key, value)}
        return {**flipped, output.name: _other(output, OUT, why, n_shards)}
    over = f"{units} heads over {n_shards} shards" if heads is not None else f"{n_shards} shards"
    splits = {
        query.name: Split(OUT, f"attention: query by heads, {over}{known}"),
        output.name: Split(IN, f"attention: output contracts the split heads{known}"),
    }
    for role, layer in (("key", key), ("value", value)):
        if kv_units % n_shards:
            what = "features" if kv_heads is None else "heads"
            reason = f"whole: {kv_units} key/value {what} do not divide over {n_shards} shards, queries on each read them"
            splits[layer.name] = Split(None, reason)
        else:
            over = f"{kv_units} heads over {n_shards} shards" if kv_heads is not None else f"{n_shards} shards"
            splits[layer.name] = Split(OUT, f"attention: {role} by heads, {over}{known}")
    return splits


def _other(layer: Layer, dim: int, why: str, n_shards: int) -> Split:
    size = layer.out_size if dim == OUT else layer.in_size
    if size % n_shards == 0:
        return Split(dim, f"{'column' if dim == OUT else 'row'}: {why}, the other dim does")
    return Split(None, f"whole: {why}, nor does the other dim")


def bias(weight: Split) -> Split:
    """A bias follows dim 0 of its layer's weight."""
    if weight.dim == OUT:
        return Split(OUT, "follows dim 0 of its weight")
    return Split(None, "whole: added to an output that is whole")


def follow(weight: Split, dims: Sequence[int | None]) -> Split:
    """The split of an array whose dims follow those of a weight."""
    if weight.dim is None:
        return Split(None, "whole: follows its weight, which is whole")
    if weight.dim not in dims:
        return Split(None, f"whole: does not follow dim {weight.dim} of its weight")
    return Split(dims.index(weight.dim), f"follows dim {weight.dim} of its weight")


def embedding(n_rows: int, n_shards: int) -> Split:
    """An embedding splits its rows, the vocabulary; never its features, which would gather every lookup."""
    if n_rows % n_shards == 0:
        return Split(OUT, f"embedding: {n_rows} rows over {n_shards} shards")
    padded = -(-n_rows // n_shards) * n_shards
    return Split(None, f"whole: {n_rows} rows do not divide over {n_shards} shards; a table padded to {padded} rows would")


def largest_free_dim(shape: tuple[int, ...], taken: Collection[int | None], n_shards: int) -> int | None:
    """The largest dim that is not taken and divides, the first of equals: what the fsdp axis splits. None if there is none.

    **Arguments:**

    - `taken`: the dim that the model axis splits (None where it splits none), and those over which layers are stacked.
    """
    free = [dim for dim in range(len(shape)) if dim not in taken and shape[dim] and shape[dim] % n_shards == 0]
    return max(free, key=lambda dim: shape[dim], default=None)


def tie(split: Split, name: str) -> Split:
    """The split of a leaf that is the same array as the leaf called `name`."""
    return replace(split, reason=f"tied: the same array as `{name}`")
