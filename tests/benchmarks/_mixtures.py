"""Mixtures of experts in the five ways in which people write them, as small language models, for tests of plans and rules.

Each is a function of a key that returns the layer's parameters, and `apply(parameters, x)` for `x` `[rows, T, D]`.
Letters: e experts, c places of an expert's buffer, d features, f hidden features, k choices of a token.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import Array

VOCAB, T, D, F, EXPERTS, TOP = 64, 16, 32, 64, 8, 2


class Mixture(NamedTuple):
    parameters: Any
    apply: Callable[[Any, Array], Array]


MIXTURES: dict[str, Callable[[Array], Mixture]] = {}


def mixture(make: Callable[[Array], Mixture]) -> Callable[[Array], Mixture]:
    MIXTURES[make.__name__] = make
    return make


def normal(key: Array, *shape: int) -> Array:
    return jax.random.normal(key, shape) * shape[-2] ** -0.5


def stacks(key: Array) -> dict[str, Array]:
    keys = jax.random.split(key, 3)
    return {
        "router": normal(keys[0], D, EXPERTS),
        "up": normal(keys[1], EXPERTS, D, F),
        "down": normal(keys[2], EXPERTS, F, D),
    }


def routed(x: Array, router: Array) -> tuple[Array, Array]:
    """The weights and the indices of the chosen experts."""
    weights, chosen = jax.lax.top_k(jax.nn.softmax(x @ router), TOP)
    return weights / weights.sum(-1, keepdims=True), chosen


@mixture
def one_hot(key: Array) -> Mixture:
    """GShard's: tokens go to and from the buffers of a row by products with one-hot tensors; those beyond are dropped."""

    def apply(p: Any, x: Array) -> Array:
        weights, chosen = routed(x, p["router"])
        n_places = 2 * TOP * T // EXPERTS
        mask = jax.nn.one_hot(chosen, EXPERTS).reshape(len(x), T * TOP, EXPERTS)
        place = ((jnp.cumsum(mask, 1) - 1) * mask).sum(-1).reshape(chosen.shape).astype(jnp.int32)
        mask, places = mask.reshape(*chosen.shape, EXPERTS), jax.nn.one_hot(place, n_places)
        dispatch = jnp.einsum("btke,btkc->btec", mask, places)
        combine = jnp.einsum("btk,btke,btkc->btec", weights, mask, places)
        buffers = jnp.einsum("btec,btd->ebcd", dispatch, x)
        hidden = jax.nn.relu(jnp.einsum("ebcd,edf->ebcf", buffers, p["up"]))
        return jnp.einsum("btec,ebcd->btd", combine, jnp.einsum("ebcf,efd->ebcd", hidden, p["down"]))

    return Mixture(stacks(key), apply)


@mixture
def sorted_tokens(key: Array) -> Mixture:
    """Dropless: all tokens are sorted by expert and multiplied by `ragged_dot`, with a gate."""
    keys = jax.random.split(key)

    def apply(p: Any, x: Array) -> Array:
        tokens = x.reshape(-1, D)
        weights, chosen = routed(tokens, p["router"])
        order = jnp.argsort(chosen.ravel())
        sizes = jnp.bincount(chosen.ravel(), length=EXPERTS)
        token = order // TOP
        inputs = tokens[token]
        gate, up = (jax.lax.ragged_dot(inputs, p[name], sizes) for name in ("gate", "up"))
        out = jax.lax.ragged_dot(jax.nn.silu(gate) * up, p["down"], sizes)
        return jnp.zeros_like(tokens).at[token].add(out * weights.ravel()[order][:, None]).reshape(x.shape)

    return Mixture({**stacks(keys[0]), "gate": normal(keys[1], EXPERTS, D, F)}, apply)


@mixture
def buffers_by_scatter(key: Array) -> Mixture:
    """Tokens of all rows are scattered into buffers of a capacity, with a bias; those beyond are dropped."""

    def apply(p: Any, x: Array) -> Array:
        tokens = x.reshape(-1, D)
        weights, chosen = routed(tokens, p["router"])
        expert = chosen.ravel()
        n_places = 2 * TOP * len(tokens) // EXPERTS
        ends = jnp.cumsum(jax.nn.one_hot(expert, EXPERTS, dtype=jnp.int32), 0)
        place = jnp.take_along_axis(ends, expert[:, None], 1)[:, 0] - 1
        copies = jnp.repeat(tokens, TOP, 0)
        buffers = jnp.zeros((EXPERTS, n_places, D)).at[expert, place].set(copies, mode="drop")
        hidden = jax.nn.gelu(jnp.einsum("ecd,edf->ecf", buffers, p["up"]) + p["bias"][:, None])
        out = jnp.einsum("ecf,efd->ecd", hidden, p["down"]).at[expert, place].get(mode="fill", fill_value=0)
        return (out.reshape(-1, TOP, D) * weights[..., None]).sum(1).reshape(x.shape)

    return Mixture({**stacks(key), "bias": jnp.zeros((EXPERTS, F))}, apply)


@mixture
def gathered_weights(key: Array) -> Mixture:
    """Each token looks up the weights of its experts."""

    def apply(p: Any, x: Array) -> Array:
        def of_token(x: Array) -> Array:
            weights, chosen = routed(x, p["router"])
            hidden = jax.nn.relu(jnp.einsum("d,kdf->kf", x, p["up"][chosen]))
            return jnp.einsum("k,kf,kfd->d", weights, hidden, p["down"][chosen])

        return jax.vmap(jax.vmap(of_token))(x)

    return Mixture(stacks(key), apply)


@mixture
def vmapped(key: Array) -> Mixture:
    """All experts, each an Equinox module, compute all tokens; the router weighs them."""
    keys = jax.random.split(key)
    experts = eqx.filter_vmap(lambda key: eqx.nn.MLP(D, D, F, 1, jax.nn.gelu, key=key))(jax.random.split(keys[0], EXPERTS))

    def apply(p: Any, x: Array) -> Array:
        weights, chosen = routed(x, p["router"])
        of_experts = (jax.nn.one_hot(chosen, EXPERTS) * weights[..., None]).sum(-2)
        outs = eqx.filter_vmap(lambda expert: jax.vmap(jax.vmap(expert))(x))(p["experts"])
        return jnp.einsum("ebtd,bte->btd", outs, of_experts)

    return Mixture({"router": normal(keys[1], D, EXPERTS), "experts": experts}, apply)


class LanguageModel(eqx.Module):
    """An embedding, a mixture with a residual connection, and a head."""

    embedding: Array
    mixture: Any
    head: Array
    apply: Callable[[Any, Array], Array] = eqx.field(static=True)

    def __init__(self, name: str, key: Array):
        keys = jax.random.split(key, 3)
        self.embedding, self.head = jax.random.normal(keys[0], (VOCAB, D)), normal(keys[1], D, VOCAB)
        self.mixture, self.apply = MIXTURES[name](keys[2])

    def __call__(self, ids: Array) -> Array:
        x = self.embedding[ids]
        return (x + self.apply(self.mixture, x)) @ self.head


def loss_fn(model: LanguageModel, batch: Array, key: Any = None) -> Array:
    logits = model(batch)[:, :-1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()
