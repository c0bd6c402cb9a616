"""Groups of leaves by kind, as masks and as optimizers: weight matrices, embeddings, biases, norms and so on.

Owns the functions over kinds. `partition` determines the kind of a leaf: without a plan by the types of Equinox layers, and
with the plan of a traced loss by what the loss computes with it, which also covers arrays outside of layers.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.tree_util as jtu
import optax
from jax.tree_util import GetAttrKey
from jaxtyping import PyTree

from .._tree import is_array_like, map_named, nearest, render
from ..errors import check_optimizer, filter_traceback
from ..partition import KINDS, Kind, Plan, check_plan, current_kinds, kinds_of

_DECAYING = ("matrix", "head", "embedding", "convolution")
_DEFAULT = "default"  # the group of all other kinds


def kinds(params: PyTree, plan: Plan | None = None) -> PyTree[str]:
    """Returns the kind of each leaf, in the structure of `params`: `"matrix"`, `"head"`, `"embedding"`, `"convolution"`,
    `"bias"`, `"norm"` or `"other"`.

    A matrix is the weight of a fully connected layer or of an attention projection, stacked or not; a head is one that
    computes the outputs. Without a plan, the head is the last matrix in field order that is not stacked, unless it has as
    many outputs as an embedding has features: the output layer is then assumed to be tied to the embedding.

    **Arguments:**

    - `params`: a model, or its trained leaves, as arrays or shapes.
    - `plan`: `deployer.plan(model, loss_fn, batch)`, for models with arrays outside of Equinox layers.

    Raises ValueError if the plan belongs to another model.
    """
    found = kinds_by_name(params, plan)
    return map_named(lambda name, leaf: found[name].name if name in found else "other", params)


def of_kind(*names: str, plan: Plan | None = None) -> Callable[[PyTree], PyTree[bool]]:
    """Returns the mask of the leaves of these kinds, for `optax.masked` and for each `mask` argument of optax.

    ```python
    optax.masked(optax.add_decayed_weights(0.1), of_kind("matrix", "head"))
    ```

    **Arguments:**

    - `names`: kinds, as returned by `kinds`.
    - `plan`: as for `kinds`.

    Raises ValueError for an unknown kind.
    """
    for name in names:
        _check_kind(name)
    return lambda params: jax.tree.map(lambda kind: kind in names, kinds(params, plan))


def decay_mask(params: PyTree, plan: Plan | None = None) -> PyTree[bool]:
    """Returns the mask of the leaves that should have weight decay: matrices (those of adapters and recurrent cells too),
    heads, embeddings and convolutions.

    Pass it as `optax.adamw(learning_rate, mask=decay_mask)`. A Trainer lets what the loss computes with a leaf decide, which
    covers arrays outside of layers; its header says how many leaves decay. The number of dims does not decide, because the
    biases of scanned layers also have two. Outside of a Trainer and without a plan, arrays of other modules decay if their
    field is called `weight`.

    **Arguments:**

    - `params`, `plan`: as for `kinds`; with a plan, pass `functools.partial(decay_mask, plan=plan)`.

    Raises ValueError if the plan belongs to another model.
    """
    of_loss = current_kinds() if plan is None else {}
    found = {**kinds_by_name(params, plan), **of_loss}

    def decays(path: tuple[Any, ...], leaf: Any) -> bool:
        kind = found.get(render(path))
        if plan is None and render(path) not in of_loss and kind is not None and kind.name == "other":
            return bool(path) and isinstance(path[-1], GetAttrKey) and path[-1].name == "weight"
        return kind is not None and kind.name in _DECAYING

    return jtu.tree_map_with_path(decays, params)


@filter_traceback
def groups(
    transforms: Mapping[str, optax.GradientTransformation],
    default: optax.GradientTransformation,
    *,
    plan: Plan | None = None,
) -> optax.GradientTransformation:
    """Returns an optimizer that updates each kind of leaf with its own optimizer.

    ```python
    optimizer = groups({"embedding": optax.adam(1e-2), "norm": optax.sgd(1e-3)}, default=optax.adamw(1e-3))
    ```

    **Arguments:**

    - `transforms`: an optimizer for each kind, by the names of `kinds`.
    - `default`: the optimizer of all other leaves.
    - `plan`: as for `kinds`.

    Raises ValueError for an unknown kind.
    """
    if not isinstance(transforms, Mapping):
        found = "an optimizer" if hasattr(transforms, "update") else type(transforms).__name__
        raise TypeError(
            f"`transforms`: expected a dict of an optimizer for each kind, got {found}. "
            'Write `groups({"embedding": optax.adam(1e-2)}, default=optax.adamw(1e-3))`.'
        )
    for name, transform in transforms.items():
        _check_kind(name)
        check_optimizer(transform, f"transforms[{name!r}]")
    check_optimizer(default, "default")
    check_plan(plan)

    def labels(params: PyTree) -> PyTree[str]:
        return jax.tree.map(lambda kind: kind if kind in transforms else _DEFAULT, kinds(params, plan))

    return optax.partition({**transforms, _DEFAULT: default}, labels)


def kinds_by_name(params: PyTree, plan: Plan | None) -> dict[str, Kind]:
    """Returns the kinds of the array leaves, by name; with a plan, the plan's.

    Raises ValueError if the plan lacks a leaf.
    """
    check_plan(plan)
    if plan is None:
        return kinds_of(params)
    names = [render(path) for path, leaf in jtu.tree_flatten_with_path(params)[0] if is_array_like(leaf)]
    for name in names:
        if name not in plan.leaves:
            raise ValueError(
                f"`plan`: expected the plan of this model, got one without `{name}`. "
                "Pass `deployer.plan(model, loss_fn, batch)` of the model that is trained."
            )
    return {name: plan[name].kind for name in names}


def _check_kind(name: Any) -> None:
    if name not in KINDS:
        near = nearest(name, KINDS) if isinstance(name, str) else ""
        raise ValueError(f"`{name}`: expected a kind of leaf.{near} Pass one of {', '.join(KINDS)}.")
