"""Plans of mixtures of experts: which dim of each stack is split, and why."""

import jax
import jax.numpy as jnp
import pytest
from _mixtures import MIXTURES, LanguageModel, T, loss_fn

import redeqx
from redeqx.models.nn import MixtureOfExperts
from redeqx.partition import order
from redeqx.tracing import Trace

OWN = "experts: each shard holds its own"
COLUMN = "column: its input arrives replicated"
IDS = jax.ShapeDtypeStruct((16, T), jnp.int32)


def splits_of(model, loss, *args, n=4):
    found = order(Trace.of(loss, model, *args), n)
    assert not found.errors
    return {name: (split.dim, split.reason) for name, split in found.splits.items()}


def row(leaf):
    return f"row: its input arrives split by `{leaf}`"


PLANS = {
    "one_hot": {"up": (0, OWN), "down": (0, OWN)},
    "sorted_tokens": {"gate": (2, COLUMN), "up": (2, COLUMN), "down": (1, row("mixture.gate"))},
    "buffers_by_scatter": {
        "up": (0, OWN), "down": (0, OWN), "bias": (0, "follows: added to a value that is split by `mixture.up`"),
    },
    "gathered_weights": {"up": (2, COLUMN), "down": (1, row("mixture.up"))},
    "vmapped": {
        "experts.layers.0.weight": (0, OWN), "experts.layers.1.weight": (0, OWN),
        "experts.layers.0.bias": (0, "follows: added to a value that is split by `mixture.experts.layers.0`"),
        "experts.layers.1.bias": (0, "follows: added to a value that is split by `mixture.experts.layers.1`"),
    },
}  # fmt: skip


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("name", MIXTURES)
def test_plan_of_each_mixture(name, n):
    splits = splits_of(LanguageModel(name, jax.random.key(0)), loss_fn, IDS, n=n)
    own = {leaf.removeprefix("mixture."): split for leaf, split in splits.items() if leaf.startswith("mixture.")}
    router, why = own.pop("router")
    assert (router, why.split(":")[0]) == (None, "replicated")
    assert own == PLANS[name]


def test_plan_of_the_layer():
    layer = MixtureOfExperts(32, 64, 8, 2, d_shared=16, key=jax.random.key(0))
    batch = jax.ShapeDtypeStruct((16, T, 32), jnp.float32)
    splits = splits_of(layer, lambda layer, x: jnp.square(jax.vmap(layer)(x)[0]).sum(), batch)
    for part, first in (("experts", 1), ("shared", 0)):  # a stack of experts has one dim more
        for name in ("up", "gate"):
            assert splits[f"{part}.{name}.weight"] == (first, COLUMN)
        assert splits[f"{part}.down.weight"] == (first + 1, row(f"{part}.gate"))


def test_a_plan_explains_experts():
    deployer = redeqx.Deployer(n_model_shards=4, verbose=False)
    plan = deployer.plan(LanguageModel("one_hot", jax.random.key(0)), loss_fn, IDS)
    lines = [line for line in plan.explain().splitlines() if OWN in line]
    assert sorted(line.split()[0] for line in lines) == ["mixture.down", "mixture.up"]


@pytest.mark.parametrize("name", MIXTURES)
def test_a_stack_is_a_stack_of_matrices(name):
    """An optimizer such as Muon takes each expert's matrix by itself."""
    deployer = redeqx.Deployer(verbose=False)
    plan = deployer.plan(LanguageModel(name, jax.random.key(0)), loss_fn, IDS)
    stacks = {leaf: of.kind for leaf, of in plan.leaves.items() if len(of.shape) == 3}
    in_equinox = name == "vmapped"  # [experts, out, in]
    assert len(stacks) >= 2
    for kind in stacks.values():
        assert (kind.name, kind.outputs, kind.inputs) == ("matrix", *(((1,), (2,)) if in_equinox else ((2,), (1,))))


@pytest.mark.parametrize("equation", ["etd,edf->etf", "edf,etd->etf", "dte,dfe->tfe", "fed,etd->tef", "td,edf->etf"])
def test_a_stack_is_split_by_experts_wherever_the_dim_stands(equation):
    """Eight experts, whose number divides, with more hidden features, which divide too."""
    sizes = {"e": 8, "t": 4, "d": 12, "f": 64}
    of_first, of_second = equation.partition("->")[0].split(",")
    of_weight, of_data = (of_first, of_second) if "f" in of_first else (of_second, of_first)
    model, data = (jnp.zeros([sizes[dim] for dim in dims]) for dims in (of_weight, of_data))
    args = (lambda w, x: (w, x)) if of_weight == of_first else (lambda w, x: (x, w))
    splits = splits_of({"w": model}, lambda m, x: jnp.square(jnp.einsum(equation, *args(m["w"], x))).sum(), data)
    assert splits["w"][0] == of_weight.index("e")


def test_experts_that_do_not_divide_are_split_by_their_features():
    def loss(model, x):
        hidden = jax.nn.relu(jnp.einsum("etd,edf->etf", x, model["up"]))
        return jnp.einsum("etf,efd->etd", hidden, model["down"]).sum()

    model = {"up": jnp.zeros((6, 32, 64)), "down": jnp.zeros((6, 64, 32))}
    assert splits_of(model, loss, jnp.zeros((6, 4, 32))) == {"up": (2, COLUMN), "down": (1, row("up"))}


def test_gradients_of_grouped_products_are_followed():
    """A step of gradient descent inside the loss, as in meta-learning: the gradients of a stack are split as it is."""

    def inner(model, x):
        sizes = jnp.full(8, 4)
        return jnp.square(jax.lax.ragged_dot(jax.lax.ragged_dot(x, model["up"], sizes), model["down"], sizes)).sum()

    def loss(model, x):
        new = jax.tree.map(lambda w, g: w - 0.1 * g, model, jax.grad(inner)(model, x))
        return inner(new, x)

    model = {"up": jnp.zeros((8, 32, 64)), "down": jnp.zeros((8, 64, 32))}
    assert splits_of(model, loss, jnp.zeros((32, 32))) == {"up": (2, COLUMN), "down": (1, row("up"))}
