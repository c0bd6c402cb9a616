"""Differential privacy: the budget and its noise, the samples, and the gradient."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dp_accounting
import equinox as eqx
import jax
import numpy as np
import optax
from dp_accounting.pld import PLDAccountant
from jaxtyping import Array, PRNGKeyArray, PyTree
from scipy.stats import binom

import redeqx
from examples._images import Labelled

# --- the budget ------------------------------------------------------------------------------------------------------


def steps_of(noise_multiplier: float, sampling_rate: float, n_steps: int) -> dp_accounting.DpEvent:
    """Returns the accountant's event: sums over Poisson samples, with noise of `noise_multiplier` times the clip norm."""
    step = dp_accounting.PoissonSampledDpEvent(sampling_rate, dp_accounting.GaussianDpEvent(noise_multiplier))
    return dp_accounting.SelfComposedDpEvent(step, n_steps)


def calibrate(epsilon: float, delta: float, sampling_rate: float, n_steps: int) -> float:
    """Returns the smallest noise multiplier within the budget."""

    def steps(noise_multiplier: float) -> dp_accounting.DpEvent:
        return steps_of(noise_multiplier, sampling_rate, n_steps)

    return float(dp_accounting.calibrate_dp_mechanism(PLDAccountant, steps, epsilon, delta, tol=1e-3))


def spent(noise_multiplier: float, delta: float, sampling_rate: float, n_steps: int) -> float:
    """Returns the epsilon for this noise."""
    return PLDAccountant().compose(steps_of(noise_multiplier, sampling_rate, n_steps)).get_epsilon(delta)


def hold_to(path: Path, terms: dict[str, float]) -> None:
    """Saves the values that a run's epsilon was computed from. Raises ValueError if the run started with other values.

    A resumed run draws the same samples and noise again, so resuming costs no privacy. With other noise in the remaining
    steps, the epsilon would be wrong.
    """
    if path.is_file():
        found = json.loads(path.read_text("utf-8"))
        if found != terms:
            raise ValueError(f"`{path}`: expected {terms}, as in this call, got {found}. Choose another `--workdir`.")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(terms), "utf-8")


# --- the samples -----------------------------------------------------------------------------------------------------


def room_for(n_examples: int, sampling_rate: float, n_steps: int, multiple: int) -> int:
    """Returns a number of rows that is enough for every sample of a run, except with a probability of one in a billion. It
    is rounded up to a multiple of `multiple`."""
    most = int(binom.isf(1e-9 / n_steps, n_examples, sampling_rate))
    return -(-max(1, most) // multiple) * multiple


def poisson_samples(examples: Labelled, rate: float, n_steps: int, n_rows: int, seed: tuple[int, ...]) -> Iterator:
    """Yields the examples of each sample in turn, padded to `n_rows` with rows of label -1, which have no weight.

    Each example is in a sample with probability `rate`, independently of the others, as the accountant assumes.

    Raises ValueError if a sample has more rows. Dropping some of them would change the mechanism.
    """
    rng = np.random.default_rng(seed)
    filling = (np.zeros_like(examples[0][0]), -1)
    for _ in range(n_steps):
        sample = [examples[i] for i in np.flatnonzero(rng.random(len(examples)) < rate)]
        if len(sample) > n_rows:
            raise ValueError(f"`--seed`: expected samples of at most {n_rows} images, got {len(sample)}. Choose another.")
        yield from sample + [filling] * (n_rows - len(sample))


# --- the gradient ----------------------------------------------------------------------------------------------------


def clipped_sums(
    loss_of_one: Callable[[Any, PyTree], Array], model: PyTree, batch: PyTree, clip_norm: float
) -> tuple[Array, PyTree]:
    """Returns the losses [rows], and the sum of the rows' gradients, each scaled down to a norm of at most `clip_norm`."""
    of_each = eqx.filter_vmap(eqx.filter_value_and_grad(loss_of_one), in_axes=(None, 0))
    losses, grads = of_each(model, batch)
    leaves, treedef = jax.tree.flatten(grads)
    sums, _ = optax.per_example_global_norm_clip(leaves, clip_norm)
    return losses, jax.tree.unflatten(treedef, jax.tree.leaves(sums))


def private_gradient(
    loss_of_one: Callable[[Any, PyTree], Array],
    model: PyTree,
    batch: PyTree,
    key: PRNGKeyArray,
    *,
    clip_norm: float,
    noise_multiplier: float,
    sample_size: float,
) -> tuple[redeqx.Loss, PyTree]:
    """Returns a `grad_fn`: the sum of clipped gradients and Gaussian noise, divided by the expected size of a sample.

    Dividing by the actual size would reveal information about the images in the sample. Written as for an undivided step:
    micro-batches share one noise.

    **Arguments:**

    - `loss_of_one`: maps `(model, row)` to a scalar, which is 0 for a padding row.
    - `sample_size`: the expected number of examples in a step.
    """
    losses, sums = clipped_sums(loss_of_one, model, batch, clip_norm)
    scale = noise_multiplier * clip_norm
    leaves, treedef = jax.tree.flatten(sums)
    keys = jax.random.split(key, len(leaves))
    noisy = [(x + scale * jax.random.normal(k, x.shape)) / sample_size for x, k in zip(leaves, keys, strict=True)]
    return redeqx.Loss(total=losses.sum(), weight=sample_size), jax.tree.unflatten(treedef, noisy)
