"""What makes training private: the budget and its noise, the samples, and the gradient."""

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
    """What the accountant is told: sums over Poisson samples, with noise of `noise_multiplier` times the clip norm."""
    step = dp_accounting.PoissonSampledDpEvent(sampling_rate, dp_accounting.GaussianDpEvent(noise_multiplier))
    return dp_accounting.SelfComposedDpEvent(step, n_steps)


def calibrate(epsilon: float, delta: float, sampling_rate: float, n_steps: int) -> float:
    """The least noise multiplier that keeps within the budget."""

    def steps(noise_multiplier: float) -> dp_accounting.DpEvent:
        return steps_of(noise_multiplier, sampling_rate, n_steps)

    return float(dp_accounting.calibrate_dp_mechanism(PLDAccountant, steps, epsilon, delta, tol=1e-3))


def spent(noise_multiplier: float, delta: float, sampling_rate: float, n_steps: int) -> float:
    """The epsilon of that noise."""
    return PLDAccountant().compose(steps_of(noise_multiplier, sampling_rate, n_steps)).get_epsilon(delta)


def hold_to(path: Path, terms: dict[str, float]) -> None:
    """Write down what the epsilon of a run was computed from; or raise where the run began from something else.

    A resumed run draws its samples and its noise again as they were, so going on costs nothing more. With other noise for
    the rest of the steps the epsilon would be wrong.
    """
    if path.is_file():
        found = json.loads(path.read_text("utf-8"))
        if found != terms:
            raise ValueError(f"`{path}`: expected {terms}, as asked for now, got {found}. Choose another `--workdir`.")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(terms), "utf-8")


# --- the samples -----------------------------------------------------------------------------------------------------


def room_for(n_examples: int, sampling_rate: float, n_steps: int, multiple: int) -> int:
    """Rows that hold every sample of a run but with a chance of one in a billion, rounded up to a multiple."""
    most = int(binom.isf(1e-9 / n_steps, n_examples, sampling_rate))
    return -(-max(1, most) // multiple) * multiple


def poisson_samples(examples: Labelled, rate: float, n_steps: int, n_rows: int, seed: tuple[int, ...]) -> Iterator:
    """The examples of sample after sample, each filled up to `n_rows` with rows of the label -1, which have no weight.

    An example is in a sample with probability `rate`, whichever others are: as the accountant assumes.

    Raises ValueError for a sample of more rows. To leave some of them out would be another mechanism.
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
    """The losses [rows], and the sum of the gradients of the rows, each first scaled down to `clip_norm` at most."""
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
    n_micro_batches: int = 1,
) -> tuple[redeqx.Loss, PyTree]:
    """A `grad_fn`: clipped gradients and Gaussian noise, summed, over the expected size of a sample.

    Its true size would tell of who is in it.

    **Arguments:**

    - `loss_of_one`: `(model, row)` to a scalar; 0 for a row that only fills the batch.
    - `sample_size`: how many examples a step is expected to have.
    - `n_micro_batches`: of a step. Each brings an equal share of the variance, and of the expected examples.
    """
    losses, sums = clipped_sums(loss_of_one, model, batch, clip_norm)
    weight = sample_size / n_micro_batches
    scale = noise_multiplier * clip_norm / n_micro_batches**0.5
    leaves, treedef = jax.tree.flatten(sums)
    keys = jax.random.split(key, len(leaves))
    noisy = [(x + scale * jax.random.normal(k, x.shape)) / weight for x, k in zip(leaves, keys, strict=True)]
    return redeqx.Loss(total=losses.sum(), weight=weight), jax.tree.unflatten(treedef, noisy)
