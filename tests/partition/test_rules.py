"""The two sharding rules, as functions of layer sizes."""

import itertools

import pytest

from redeqx.partition._rules import (
    IN,
    OUT,
    Layer,
    Split,
    alternate,
    attention,
    bias,
    embedding,
    in_calling_order,
    largest_free_dim,
    tie,
)

D, F = 8, 32


def fields(*sizes):
    return [Layer(f"layer{i}", *size, parent="module") for i, size in enumerate(sizes)]


def elements(*sizes):
    return [Layer(f"layer{i}", *size) for i, size in enumerate(sizes)]


def dims(layers, n_shards=4):
    splits = alternate(layers, n_shards)
    return [splits[layer.name].dim for layer in layers if layer is not None]


# --- the calling order ------------------------------------------------------------------------------------------------

UP, DOWN = (D, F), (F, D)


@pytest.mark.parametrize(
    "field_sizes, order",
    [
        ([], []),
        ([UP], [0]),
        ([UP, DOWN], [0, 1]),
        ([DOWN, UP], [1, 0]),  # sizes allow both orders: the layer that widens comes first
        ([UP, UP, DOWN], [0, 1, 2]),
        ([UP, DOWN, UP], [0, 1, 2]),
        ([DOWN, UP, UP], [1, 2, 0]),
        ([DOWN, UP, DOWN, UP], [1, 2, 3, 0]),
        ([(D, D), (D, D)], [0, 1]),  # neither widens
        ([(F, 16), (16, D), (D, 16), (16, F)], [0, 1, 2, 3]),  # an autoencoder, in its own order
        ([DOWN, (D, 16)], [0, 1]),
    ],
)
def test_calling_order(field_sizes, order):
    layers = fields(*field_sizes)
    assert in_calling_order(layers) == [layers[i] for i in order]


def test_swiglu_splits_do_not_depend_on_the_field_order():
    roles = {"gate": UP, "up": UP, "down": DOWN}
    for names in itertools.permutations(roles):
        layers = [Layer(name, *roles[name], parent="mlp") for name in names]
        splits = alternate(in_calling_order(layers), 4)
        assert {name: split.dim for name, split in splits.items()} == {"gate": OUT, "up": OUT, "down": IN}, names


# --- rule 1 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layers, expected",
    [
        (elements(UP), [OUT]),
        (elements(UP, DOWN), [OUT, IN]),
        (elements(UP, (F, F), (F, F), DOWN), [OUT, IN, OUT, IN]),
        (elements((D, D), (D, D), (D, D)), [OUT, IN, OUT]),
        (elements((F, 16), (16, D), (D, 16), (16, F)), [OUT, IN, OUT, IN]),
        (elements(UP, UP), [OUT, OUT]),  # sizes do not match: not consecutive
        (elements(UP, (16, D)), [OUT, OUT]),
        (fields(UP, UP, DOWN), [OUT, OUT, IN]),  # siblings take the same input
        ([*elements(UP), None, Layer("after", F, D)], [OUT, OUT]),  # after attention, activations are replicated
        ([None, *elements(UP, DOWN), None], [OUT, IN]),
        (elements((D, 6), (6, D)), [IN, OUT]),  # 6 outputs do not divide over 4, the 8 inputs do
        (elements((6, D), (D, 6)), [OUT, IN]),
        (elements((6, 6)), [None]),
        (elements((D, 1), (1, D)), [IN, OUT]),
        (elements((6, 6), (6, D), DOWN[::-1]), [None, OUT, IN]),
        ([], []),
    ],
)
def test_alternating(layers, expected):
    assert dims(layers) == expected


def test_all_siblings_after_a_split_layer_are_rows():
    layers = [Layer("up", D, F), Layer("a", F, D, parent="pair"), Layer("b", F, D, parent="pair")]
    assert dims(layers) == [OUT, IN, IN]


@pytest.mark.parametrize("groups, expected", [(4, OUT), (8, OUT), (2, None), (6, None)])
def test_convolution_groups_are_never_divided_between_shards(groups, expected):
    (split,) = alternate([Layer("conv", 24, 24, groups=groups)], 4).values()
    assert split.dim == expected
    assert split.reason.startswith("column: " if expected == OUT else "replicated: ") and f"{groups} groups" in split.reason


def test_reason_of_each_split():
    layers = [*elements(UP, DOWN), None, Layer("odd", 6, 5), Layer("row", 8, 5)]
    assert {name: split.reason for name, split in alternate(layers, 4).items()} == {
        "layer0": "column: its input arrives replicated",
        "layer1": "row: its input arrives split by `layer0`",
        "odd": "replicated: neither 5 outputs nor 6 inputs divide over 4 shards",
        "row": "row: 5 outputs do not divide over 4 shards, its inputs do",
    }


# --- rule 2 -----------------------------------------------------------------------------------------------------------


def projections(out, kv_out=None, d=D):
    sizes = {"q": (d, out), "k": (d, kv_out or out), "v": (d, kv_out or out), "o": (out, d)}
    return [Layer(name, *size) for name, size in sizes.items()]


@pytest.mark.parametrize(
    "n_shards, heads, kv_heads, layers, expected",
    [
        (4, 8, 8, projections(64), {"q": OUT, "k": OUT, "v": OUT, "o": IN}),
        (4, None, None, projections(64), {"q": OUT, "k": OUT, "v": OUT, "o": IN}),
        (4, 8, 4, projections(64, 32), {"q": OUT, "k": OUT, "v": OUT, "o": IN}),
        (4, 8, 2, projections(64, 16), {"q": OUT, "k": None, "v": None, "o": IN}),  # fewer K/V heads than shards
        (4, 8, 1, projections(64, 8), {"q": OUT, "k": None, "v": None, "o": IN}),
        (4, 6, 6, projections(48), {"q": IN, "k": IN, "v": IN, "o": OUT}),  # 48 divides, 6 heads do not
        (4, 6, 6, projections(48, d=10), {"q": None, "k": None, "v": None, "o": None}),
        (1, 3, 3, projections(9, d=9), {"q": OUT, "k": OUT, "v": OUT, "o": IN}),
    ],
)
def test_attention(n_shards, heads, kv_heads, layers, expected):
    splits = attention(*layers, n_shards=n_shards, heads=heads, kv_heads=kv_heads)
    assert {name: split.dim for name, split in splits.items()} == expected


@pytest.mark.parametrize(
    "heads, kv_heads, role, reason",
    [
        (8, 8, "q", "attention: query by heads, 8 heads over 4 shards"),
        (8, 4, "v", "attention: value by heads, 4 heads over 4 shards"),
        (8, 2, "k", "replicated: 2 key/value heads do not divide over 4 shards, queries on each read them"),
        (8, 8, "o", "attention: output contracts the split heads"),
        (6, 6, "q", "row: 6 heads do not divide over 4 shards, the other dim does"),
        (6, 6, "o", "column: 6 heads do not divide over 4 shards, the other dim does"),
        (None, None, "k", "attention: key by heads, 4 shards (number of heads unknown)"),
    ],
)
def test_reasons_of_attention_splits(heads, kv_heads, role, reason):
    assert attention(*projections(96), n_shards=4, heads=heads, kv_heads=kv_heads)[role].reason == reason


def test_attention_with_unknown_heads_divides_features():
    splits = attention(*projections(6, d=9), n_shards=4, heads=None, kv_heads=None)
    assert splits["q"] == Split(None, "replicated: 6 features do not divide over 4 shards, nor does the other dim")


# --- followers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim, expected", [(OUT, OUT), (IN, None), (None, None)])
def test_bias_follows_dim_0(dim, expected):
    assert bias(Split(dim, "")).dim == expected


def test_embedding_is_split_by_rows_or_replicated():
    assert embedding(64, 4) == Split(OUT, "embedding: 64 rows over 4 shards")
    assert embedding(50257, 4) == Split(
        None, "replicated: 50257 rows do not divide over 4 shards; a table padded to 50260 rows would"
    )


@pytest.mark.parametrize(
    "shape, taken, expected",
    [
        ((8, 32), (), 1),
        ((8, 32), (1,), 0),
        ((32, 32), (None,), 0),  # the first of the equal dims
        ((64, 8, 16), (0,), 2),
        ((8, 30), (), 0),  # 30 does not divide
        ((6, 30), (), None),
        ((8,), (0,), None),
        ((0, 8), (), 1),
        ((0,), (), None),
        ((), (), None),
    ],
)
def test_largest_free_dim(shape, taken, expected):
    assert largest_free_dim(shape, taken, 4) == expected


def test_tied_leaf_has_the_split_of_the_leaf_it_shares():
    assert tie(Split(OUT, "embedding"), "embedding.weight") == Split(OUT, "tied: the same array as `embedding.weight`")
