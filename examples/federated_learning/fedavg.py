"""Federated averaging: clients with their own data, and a gradient computed from their local training."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jaxtyping import Array, PRNGKeyArray, PyTree

import redeqx
from examples._images import Labelled

Client = tuple[np.ndarray, np.ndarray]  # images [rows, channels, height, width] and labels [rows]

LossOf = Callable[[Any, Array, Array], redeqx.Loss]  # a function of a model and the images and labels of one client

# --- clients ---------------------------------------------------------------------------------------------------------


def client_of(examples: Labelled) -> Client:
    """Returns a client that has all of these examples."""
    return np.stack([image for image, _ in examples]), np.array([label for _, label in examples], np.int32)


def cut_clients(examples: Labelled, n_clients: int, shards_per_client: int, seed: int) -> list[Client]:
    """Assigns each example to one client: examples are sorted by label and cut into shards, which are assigned at random."""
    n_shards = n_clients * shards_per_client
    if min(n_clients, shards_per_client) < 1 or n_shards > len(examples):
        raise ValueError(
            f"`--n-clients`, `--shards-per-client`: expected 1 to {len(examples)} shards in total, the number of training "
            f"images, got {n_clients} x {shards_per_client} = {n_shards}. Change one of them."
        )
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(examples))
    order = order[np.argsort([examples[i][1] for i in order], kind="stable")]
    shards = np.array_split(order, n_shards)
    dealt = rearrange(rng.permutation(n_shards), "(client shard) -> client shard", client=n_clients)
    return [client_of([examples[i] for shard in own for i in shards[shard]]) for own in dealt]


def draw_rounds(clients: Sequence[Client], n: int, n_rounds: int, seed: tuple[int, ...]) -> Iterator[Client]:
    """Yields the `n` clients of each round. They depend on the seed only, so that a resumed run draws the same ones."""
    rng = np.random.default_rng(seed)
    for _ in range(n_rounds):
        yield from (clients[i] for i in rng.choice(len(clients), n, replace=False))


# --- the gradient ----------------------------------------------------------------------------------------------------


def train_locally(
    loss_of: LossOf,
    model: PyTree,
    images: Array,
    labels: Array,
    key: PRNGKeyArray,
    *,
    epochs: int,
    batch_size: int,
    learning_rate: float,
) -> PyTree:
    """Returns the model after plain SGD on one client's images, which are shuffled in each epoch."""

    def shuffled(key: PRNGKeyArray) -> Array:
        # Padding is last, in separate batches that change nothing. A small client therefore takes fewer steps.
        return jnp.argsort(jnp.where(labels >= 0, jax.random.uniform(key, labels.shape), 2.0))

    orders = jax.vmap(shuffled)(jax.random.split(key, epochs))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def mean(params: PyTree, rows: Array) -> Array:
        loss = loss_of(eqx.combine(params, static), images[rows], labels[rows])
        return loss.total / jnp.maximum(loss.weight, 1)

    def step(params: PyTree, rows: Array) -> tuple[PyTree, None]:
        return jax.tree.map(lambda x, grad: x - learning_rate * grad, params, jax.grad(mean)(params, rows)), None

    batches = rearrange(orders, "epoch (step row) -> (epoch step) row", row=batch_size)
    return eqx.combine(jax.lax.scan(step, params, batches)[0], static)


def federated_gradient(
    loss_of: LossOf, model: PyTree, batch: dict[str, Array], key: PRNGKeyArray, **local: Any
) -> tuple[redeqx.Loss, PyTree]:
    """Returns a `grad_fn`: the model minus the average of the clients' models, weighted by their numbers of images.

    The loss is that of the model before the round.

    **Arguments:**

    - `batch`: `images` [clients, rows, ...] and `labels` [clients, rows], where -1 marks padding. The number of rows is a
        multiple of the local batch size.
    - `local`: the options of `train_locally`.
    """
    keys = jax.random.split(key, len(batch["labels"]))
    train = eqx.filter_vmap(partial(train_locally, loss_of, **local), in_axes=(None, 0, 0, 0))
    before = eqx.filter(model, eqx.is_inexact_array)
    after = eqx.filter(train(model, batch["images"], batch["labels"], keys), eqx.is_inexact_array)
    losses = jax.vmap(partial(loss_of, model))(batch["images"], batch["labels"])

    def moved(before: Array, after: Array) -> Array:
        return jnp.average(before - after, axis=0, weights=losses.weight)

    loss = redeqx.Loss(total=jnp.sum(losses.total), weight=jnp.sum(losses.weight))
    return loss, jax.tree.map(moved, before, after)
