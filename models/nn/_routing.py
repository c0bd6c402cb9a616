"""`Routing`: what the routers of experts did, and `add_routing`, which adds it to the loss and its metrics.

The routers themselves are in `_experts`.

Sources: Fedus et al. 2021, *Switch Transformers* (arXiv:2101.03961), for the balance loss; Zoph et al. 2022, *ST-MoE*
(arXiv:2202.08906), for the z-loss.
"""

from functools import reduce
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from redeqx import Loss
from redeqx.errors import wrong


class Routing(eqx.Module):
    """What a router did with each sequence. Each field is a sum over the sequence's tokens, float32 `[*dims]`.

    So fields of several sequences or layers are added up, and divided by `tokens` they are means; `add_routing` does both.

    **Arguments:**

    - `tokens`: the number of tokens that count.
    - `balance`: the balance loss, `experts * sum(f * p)`, where f is the number of a sequence's choices that fell on each
        expert, over its tokens, and p the mean probability that the router gave it. It is `n_chosen` if all experts get the
        same, as in Mixtral.
    - `z`: the square of the log of the softmax's denominator.
    - `dropped`: the share of a token's choices that exceed the capacity.
    - `imbalance`: the number of choices that the most frequent expert of the sequence got, over the mean of all experts.
    - `correction`: zero. Its gradient with respect to the router's correction is the number of choices that each expert got
        above the mean.
    """

    tokens: Float[Array, "*dims"]
    balance: Float[Array, "*dims"]
    z: Float[Array, "*dims"]
    dropped: Float[Array, "*dims"]
    imbalance: Float[Array, "*dims"]
    correction: Float[Array, "*dims"]


def add_routing(loss: Loss, routings: Any, *, balance_loss: float = 0.01, z_loss: float = 0.0) -> Loss:
    """Adds what the routers of a model did to its loss and its metrics.

    Each sequence's balance loss depends on its own tokens alone, and weighs its tokens. So the loss is a sum over sequences,
    and the same however a batch is cut into devices and micro-batches.

    **Arguments:**

    - `loss`: a sum over tokens with the number of tokens as weight, such as `cross_entropy`.
    - `routings`: a `Routing`, or any PyTree of them, such as a list with one for each layer. The fields may have any leading
        dims, such as those of a batch and of a scan over layers.
    - `balance_loss`, `z_loss`: coefficients. The losses of the layers are added up.

    Returns a loss with the metrics `balance_loss`, `router_z_loss`, `dropped` and `imbalance`, each a mean over tokens and
    layers, without the coefficients.
    """
    leaves = jax.tree.leaves(routings, is_leaf=lambda node: isinstance(node, Routing))
    if not leaves or not all(isinstance(leaf, Routing) for leaf in leaves):
        got = ", ".join(dict.fromkeys(type(leaf).__name__ for leaf in leaves)) or "none"
        raise wrong("routings", "a PyTree of `Routing`", got, "Pass what the layers return as second.", TypeError)
    total = reduce(lambda a, b: jax.tree.map(jnp.add, a, b), (jax.tree.map(jnp.sum, leaf) for leaf in leaves))
    added = balance_loss * total.balance + z_loss * total.z + total.correction
    of_metrics = {
        "balance_loss": total.balance,
        "router_z_loss": total.z,
        "dropped": total.dropped,
        "imbalance": total.imbalance,
    }
    metrics = {name: (value, total.tokens) for name, value in of_metrics.items()}
    return Loss(loss.total + added, loss.weight, {**loss.metrics, **metrics})
