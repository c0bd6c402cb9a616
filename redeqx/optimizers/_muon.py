"""Muon: momentum with orthogonalized matrices, for the weight matrices of a model; another optimizer for the other leaves.

Owns the choice of leaves and the update. The iterations are those of `optax.contrib.scale_by_muon`; `_newton_schulz` owns
their distribution over devices.

Source: K. Jordan et al. 2024, *Muon: An optimizer for hidden layers in neural networks*; the constant root mean square of
updates and the weight decay, *Muon is Scalable for LLM Training* (arXiv:2502.16982).
"""

import fnmatch
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PyTree

from .._tree import array_leaves, map_named, nearest
from ..errors import check_flag, check_float_dtype, check_number, check_optimizer, filter_traceback
from ..partition import Kind, Plan, check_plan
from ._checks import check_numbers
from ._groups import decay_mask, kinds_by_name
from ._newton_schulz import Iterate, orthogonalize
from ._update import accepting

_PUBLISHED = ((3.4445, -4.7750, 2.0315),) * 5


class MuonState(NamedTuple):
    """The number of updates, and the moving average of gradients."""

    count: Int[Array, ""]
    mu: PyTree[Array]


@filter_traceback
def muon(
    learning_rate: optax.ScalarOrSchedule,
    plan: Plan | None = None,
    *,
    weight_decay: float = 0.0,
    beta: float = 0.95,
    nesterov: bool = True,
    ns_coeffs: Sequence[Sequence[float]] = _PUBLISHED,
    ns_dtype: Any = None,
    eps: float = 1e-8,
    consistent_rms: float | None = 0.2,
    mu_dtype: Any = None,
    rest: optax.GradientTransformation | None = None,
    exclude: Sequence[str] = (),
) -> optax.GradientTransformation:
    """Returns Muon for the weight matrices of a model's hidden layers, and `rest` for all other leaves: output heads,
    embeddings, convolutions, biases, norms.

    ```python
    trainer = redeqx.Trainer(..., optimizer=muon(3e-4, weight_decay=0.1))
    ```

    In leaves that stack matrices (layers of a scan, vmapped layers) each matrix is orthogonalized separately. In a Trainer
    the matrices are distributed over the devices of the mesh: the iterations need no collective, and every mesh computes the
    same numbers.

    **Arguments:**

    - `learning_rate`, `weight_decay`: for the matrices, and for the default `rest`.
    - `plan`: `deployer.plan(model, loss_fn, batch)`, for models whose matrices are not in Equinox layers.
    - `beta`, `nesterov`, `mu_dtype`: the momentum, and its dtype; None for that of the parameters.
    - `ns_coeffs`: the three coefficients of each Newton-Schulz iteration; by default five times the published ones.
    - `ns_dtype`: the dtype of the iterations: `"bfloat16"` as published; None for that of the gradients.
    - `eps`: added to norms.
    - `consistent_rms`: updates are scaled by `consistent_rms * sqrt(max(fan_in, fan_out))`, so that AdamW's rate and weight
        decay suit them. None scales as first published, by `sqrt(max(1, fan_out / fan_in))`; learning rates are then near
        0.02, and `rest` needs its own.
    - `rest`: AdamW with `b2=0.95` and weight decay as by `decay_mask`, by default.
    - `exclude`: globs over names of matrices that `rest` updates instead (`"patches.weight"`).

    Raises ValueError if no leaf is such a matrix, if a glob matches none, and for coefficients that are not triples.
    """
    check_plan(plan)
    check_numbers(learning_rate=learning_rate, weight_decay=weight_decay, beta=beta, eps=eps)
    check_flag(nesterov, "nesterov")
    check_number(consistent_rms, "consistent_rms", "a number above 0", lambda rms: rms > 0, "0.2 is usual.", optional=True)
    check_float_dtype(ns_dtype, "ns_dtype", "Pass 'bfloat16', or None for that of the gradients.")
    check_float_dtype(mu_dtype, "mu_dtype", "Pass 'bfloat16', or None for that of the parameters.")
    exclude = [exclude] if isinstance(exclude, str) else exclude
    if rest is not None:
        check_optimizer(rest, "rest")
    iterate = partial(_newton_schulz, coeffs=_triples(ns_coeffs), eps=eps, dtype=ns_dtype)

    of_matrices = optax.chain(
        _scale_by_muon(iterate, plan, beta, nesterov, consistent_rms, mu_dtype),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(learning_rate),
    )
    if rest is None:
        rest = optax.adamw(learning_rate, b2=0.95, weight_decay=weight_decay, mask=partial(decay_mask, plan=plan))

    def labels(params: PyTree) -> PyTree[str]:
        chosen = _matrices(params, plan, exclude)
        return map_named(lambda name, _: "matrices" if name in chosen else "rest", params)

    return optax.partition({"matrices": of_matrices, "rest": accepting(rest)}, labels)


def _triples(coeffs: Any) -> tuple[tuple[float, float, float], ...]:
    given = np.shape(coeffs)
    if len(given) != 2 or given[1] != 3 or not given[0]:
        raise ValueError(
            f"`ns_coeffs`: expected three numbers for each iteration, got shape {given}. Pass `((a, b, c),) * 5`."
        )
    return tuple((float(a), float(b), float(c)) for a, b, c in coeffs)


def _matrices(params: PyTree, plan: Plan | None, exclude: Sequence[str]) -> set[str]:
    """Returns the names of the leaves that Muon updates."""
    kinds = kinds_by_name(params, plan)
    found = [name for name, kind in kinds.items() if kind.name == "matrix"]
    if kinds and not found:
        advice = "Choose another optimizer."
        if plan is None:
            advice = "Where its matrices are not in Equinox's layers, pass `deployer.plan(model, loss_fn, batch)` as `plan`."
        raise ValueError(f"`muon`: expected a model with hidden weight matrices, got none in {len(kinds)} leaves. {advice}")
    chosen = set(found)
    for pattern in exclude:
        matched = fnmatch.filter(found, pattern)
        if not matched:
            raise ValueError(f"`exclude`: expected globs over names of matrices, got {pattern!r}.{nearest(pattern, found)}")
        chosen -= set(matched)
    return chosen


def _scale_by_muon(
    iterate: Iterate, plan: Plan | None, beta: float, nesterov: bool, consistent_rms: float | None, mu_dtype: Any
) -> optax.GradientTransformationExtraArgs:
    """Replaces the gradients of matrices by their momentum, orthogonalized and scaled by shape.

    A Trainer passes the plan of its mesh to each update. This plan determines the shardings of leaves; the plan given here,
    which may be of another mesh, determines their kinds.
    """
    given = plan

    def init(params: PyTree) -> MuonState:
        return MuonState(jnp.zeros((), jnp.int32), optax.tree.zeros_like(params, dtype=mu_dtype))

    def update(updates: Any, state: Any, params: Any = None, *, plan: Plan | None = None, **extra: Any) -> Any:
        del params, extra
        count = optax.safe_increment(state.count)
        momentum = mu = optax.tree.update_moment(updates, state.mu, beta, 1)
        if nesterov:
            later = optax.tree.bias_correction(mu, beta, optax.safe_increment(count))
            momentum = jax.tree.map(
                lambda m, g: beta * m + (1 - beta) * g, later, optax.tree.bias_correction(updates, beta, count)
            )
        leaves = array_leaves(momentum)
        kinds = kinds_by_name(momentum, given)
        made = orthogonalize(leaves, kinds, given if plan is None else plan, iterate)
        scaled = map_named(lambda name, x: _scale(x.shape, kinds[name], consistent_rms) * made[name], momentum)
        return scaled, MuonState(jnp.asarray(count), jax.tree.map(lambda m, old: m.astype(old.dtype), mu, state.mu))

    return optax.GradientTransformationExtraArgs(init, update)


def _scale(shape: Sequence[int], kind: Kind, consistent_rms: float | None) -> Any:
    fan_out, fan_in = (math.prod(shape[dim] for dim in dims) for dims in (kind.outputs, kind.inputs))
    if consistent_rms is None:
        return math.sqrt(max(1.0, fan_out / fan_in))
    return consistent_rms * math.sqrt(max(fan_in, fan_out))


def _newton_schulz(
    x: Float[Array, "batch rows cols"], *, coeffs: Sequence[tuple[float, float, float]], eps: Any, dtype: Any
) -> Float[Array, "batch rows cols"]:
    """Maps each matrix `U S Vᵀ` to approximately `U Vᵀ`."""
    is_constant = len(set(coeffs)) == 1  # optax then unrolls the loop
    of_optax = optax.contrib.scale_by_muon(
        coeffs[0] if is_constant else tuple(coeffs), len(coeffs), beta=0.0, nesterov=False, eps=eps,
        weight_dimension_numbers=optax.contrib.MuonDimensionNumbers(1, 2),
    )  # fmt: skip
    with jax.named_scope("newton_schulz"):
        narrow = x if dtype is None else x.astype(dtype)
        made: Any = of_optax.update(narrow, of_optax.init(narrow))[0]
        return made.astype(x.dtype)
