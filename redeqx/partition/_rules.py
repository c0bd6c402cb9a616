"""The two rules, as functions of layer sizes only: without arrays, devices or trees.

1. Fully connected: consecutive layers alternate between dim 0 and dim 1.
2. Attention: query, key and value along dim 0, output along dim 1.

From Redco (arXiv:2310.16355), after Megatron-LM (arXiv:1909.08053). Both follow from one fact. A layer whose input is
replicated splits its output dim (dim 0, a "column" split). A layer whose input is split splits its contracted dim (dim 1, a
"row" split), and its output is replicated again. Dims are those of Equinox's `[out, in]` weights.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

OUT = 0  # dim 0 of an `[out, in]` weight, and the rows of an embedding
IN = 1


@dataclass(frozen=True)
class Split:
    """The dim of a weight that the model axis splits, or None if the weight is replicated, and the reason."""

    dim: int | None
    reason: str

    def past(self, n_stacked: int) -> "Split":
        """Returns the split of a stack of layers, from that of one of them."""
        return self if self.dim is None else Split(n_stacked + self.dim, self.reason)


@dataclass(frozen=True)
class Layer:
    """The sizes of a fully connected layer, in features, or of a convolution, in channels."""

    name: str
    in_size: int
    out_size: int
    parent: str | None = None  # the module with this field; None for an element of a list, called after the one before it
    groups: int = 1  # of a convolution

    @property
    def widens(self) -> bool:
        return self.out_size > self.in_size


def in_calling_order(siblings: Sequence[Layer]) -> list[Layer]:
    """Reorders the layers of one module's fields into the calling order that their sizes suggest.

    If the sizes allow two orders (`down: f -> d` is declared before `up: d -> f`), the chain starts with the layer that
    widens. All other chains, such as a deep autoencoder's, stay in field order.
    """
    if len(siblings) > 1:
        first, second = siblings[:2]
        if second.widens and (second.in_size, second.out_size) == (first.out_size, first.in_size):
            return [*siblings[1:], first]
    return list(siblings)


def alternate(layers: Iterable[Layer | None], n_shards: int) -> dict[str, Split]:
    """Rule 1: returns the split of every fully connected layer, by its name.

    **Arguments:**

    - `layers`: in calling order. None stands for any module whose output is replicated (an attention, an embedding).
    - `n_shards`: the size of the model axis.
    """
    splits: dict[str, Split] = {}
    previous: Layer | None = None
    arrived: str | None = None  # the layer that split the previous layer's input; None if that input was replicated
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
            return Split(OUT, f"column: {layer.groups} groups, none cut in two")
        return Split(None, f"replicated: {layer.groups} groups do not divide over {n_shards} shards")
    if arrives is not None:
        return Split(IN, f"row: its input arrives split by `{arrives}`")
    if layer.out_size % n_shards == 0:
        return Split(OUT, "column: its input arrives replicated")
    if layer.in_size % n_shards == 0:
        return Split(IN, f"row: {layer.out_size} outputs do not divide over {n_shards} shards, its inputs do")
    return Split(
        None, f"replicated: neither {layer.out_size} outputs nor {layer.in_size} inputs divide over {n_shards} shards"
    )


def attention(
    query: Layer,
    key: Layer | None,
    value: Layer | None,
    output: Layer,
    n_shards: int,
    heads: int | None,
    kv_heads: int | None,
) -> dict[str, Split]:
    """Rule 2: returns the splits of an attention's four projections, by the layers' names. Without a projection of keys or
    values, there are three or two.

    A head is never split over two shards, so the number of heads must divide evenly. If the key/value heads do not (there
    are fewer of them than shards, in grouped-query attention), key and value are replicated, since the queries of every
    shard read them. Splitting them along their inputs sends 2.6 times the bytes (8 query heads, 2 key/value heads, 4 shards,
    compiled on CPU). If the query heads do not divide evenly, every shard computes the attention itself in full, and its
    projections are split along the other dim.

    **Arguments:**

    - `heads`, `kv_heads`: the numbers of query heads and of key/value heads; None if unknown, and then the numbers of
        features must divide evenly instead.
    """
    units = query.out_size if heads is None else heads
    of_keys = [layer for layer in (key, value) if layer is not None]
    kv_units = min((layer.out_size for layer in of_keys), default=1) if kv_heads is None else kv_heads
    if units % n_shards or output.in_size % n_shards:
        why = f"{units} {'features' if heads is None else 'heads'} do not divide over {n_shards} shards"
        flipped = {layer.name: _other(layer, IN, why, n_shards) for layer in (query, *of_keys)}
        return {**flipped, output.name: _other(output, OUT, why, n_shards)}
    known = "" if heads is not None else " (number of heads unknown)"

    def by_heads(role: str, n: int | None) -> Split:
        over = f"{n_shards} shards" if n is None else f"{n} heads over {n_shards} shards"
        return Split(OUT, f"attention: {role} by heads, {over}{known}")

    what = "features" if kv_heads is None else "heads"
    too_few = f"replicated: {kv_units} key/value {what} do not divide over {n_shards} shards, queries on each read them"
    of_roles = {
        layer.name: Split(None, too_few) if kv_units % n_shards else by_heads(role, kv_heads)
        for role, layer in (("key", key), ("value", value))
        if layer is not None
    }
    return {
        query.name: by_heads("query", heads),
        **of_roles,
        output.name: Split(IN, f"attention: output contracts the split heads{known}"),
    }


def _other(layer: Layer, dim: int, why: str, n_shards: int) -> Split:
    size = layer.out_size if dim == OUT else layer.in_size
    if size % n_shards == 0:
        return Split(dim, f"{'column' if dim == OUT else 'row'}: {why}, the other dim does")
    return Split(None, f"replicated: {why}, nor does the other dim")


def bias(weight: Split) -> Split:
    """Returns the split of a bias, which follows dim 0 of its layer's weight."""
    if weight.dim == OUT:
        return Split(OUT, "follows dim 0 of its weight")
    return Split(None, "replicated: added to a replicated output")


def follow(weight: Split, dims: Sequence[int | None]) -> Split:
    """Returns the split of an array that is split like a weight.

    **Arguments:**

    - `dims`: for each dim of the array, the dim of the weight with which it is split, or None.
    """
    if weight.dim is None:
        return Split(None, "replicated: follows its weight, which is replicated")
    if weight.dim not in dims:
        return Split(None, f"replicated: does not follow dim {weight.dim} of its weight")
    return Split(dims.index(weight.dim), f"follows dim {weight.dim} of its weight")


def embedding(n_rows: int, n_shards: int) -> Split:
    """Returns the split of an embedding: along its rows, the vocabulary. Split features need a gather after every lookup."""
    if n_rows % n_shards == 0:
        return Split(OUT, f"embedding: {n_rows} rows over {n_shards} shards")
    padded = -(-n_rows // n_shards) * n_shards
    return Split(
        None, f"replicated: {n_rows} rows do not divide over {n_shards} shards; a table padded to {padded} rows would"
    )


def largest_free_dim(shape: tuple[int, ...], taken: Collection[int | None], n_shards: int) -> int | None:
    """Returns the dim that the fsdp axis splits: the largest one that is not taken and divides evenly, or None.

    Of equal dims, the first is returned.

    **Arguments:**

    - `taken`: the dim that the model axis splits (or None), and the dims over which layers are stacked.
    """
    free = [dim for dim in range(len(shape)) if dim not in taken and shape[dim] and shape[dim] % n_shards == 0]
    return max(free, key=lambda dim: shape[dim], default=None)
