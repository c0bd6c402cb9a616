"""AdamW with moments of two or four bytes per parameter instead of eight.

Owns the update; `_moments` owns the formats. It computes the same as `optax.adamw`, in float32, except that the moments are
rounded between updates.

Source: D. Kingma and J. Ba, *Adam* (arXiv:1412.6980); I. Loshchilov and F. Hutter, *Decoupled Weight Decay Regularization*
(arXiv:1711.05101).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, PyTree

from .._tree import named_leaves, nearest
from ..errors import filter_traceback
from ._checks import check_numbers
from ._groups import decay_mask
from ._moments import FORMATS, noises, read, write, zeros


class AdamState(NamedTuple):
    """The number of updates; both moments, in their parameters' shapes; and the scales of their blocks, or None."""

    count: Int[Array, ""]
    mu: PyTree[Array]
    nu: PyTree[Array]
    mu_scales: PyTree[Array | None]
    nu_scales: PyTree[Array | None]


@filter_traceback
def adamw(
    learning_rate: optax.ScalarOrSchedule,
    *,
    moments: str = "8bit",
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-4,
    mask: PyTree | Callable[[PyTree], PyTree[bool]] = decay_mask,
) -> optax.GradientTransformation:
    """Returns AdamW with compressed moments: 2.1 or 4 bytes per parameter, instead of the 8 of `optax.adamw`.

    ```python
    trainer = redeqx.Trainer(..., optimizer=adamw(3e-4, moments="8bit"))
    ```

    Moments are sharded like their parameters, and saved in the compressed format. They are rounded stochastically, with
    random numbers that depend only on the step and the leaf: a resumed run ends with the same bits.

    **Arguments:**

    - `learning_rate`: a number, or a schedule of updates.
    - `moments`: `"8bit"`, with a float32 scale for each block of 64 to 256 numbers, or `"bfloat16"`. Moments of leaves with
        fewer than 4096 numbers stay in float32.
    - `b1`, `b2`: the decay rates of the two moments.
    - `eps`: added to the root of the second moment.
    - `weight_decay`: multiplied by the learning rate.
    - `mask`: the leaves that decay, as for `optax.adamw`.

    Raises ValueError for another format, and TypeError for complex parameters, when the state is made.
    """
    if moments not in FORMATS:
        named = " or ".join(f"'{name}'" for name in FORMATS)
        raise ValueError(
            f"`moments`: expected {named}, got {moments!r}.{nearest(str(moments), FORMATS)} For float32 use `optax.adamw`."
        )
    check_numbers(learning_rate=learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay)
    if isinstance(mask, str):
        advice = f"Pass `redeqx.optimizers.of_kind({mask!r})`, for example"
        raise TypeError(f"`mask`: expected a function of the parameters or a PyTree of booleans, got {mask!r}. {advice}.")
    return optax.chain(
        _scale_by_adam(moments, b1, b2, eps),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


def _scale_by_adam(form: str, b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    def init(params: PyTree) -> AdamState:
        for name, leaf in named_leaves(params).items():
            if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
                raise TypeError(f"`{name}`: expected a real parameter, got {leaf.dtype}. For others use `optax.adamw`.")
        leaves, treedef = jax.tree.flatten(params)
        first, second = ([zeros(x.shape, which, form) for x in leaves] for which in ("first", "second"))
        (mu, mu_scales), (nu, nu_scales) = (_unzip(treedef, made) for made in (first, second))
        return AdamState(jnp.zeros((), jnp.int32), mu, nu, mu_scales, nu_scales)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        del params
        count = jnp.asarray(optax.safe_increment(state.count))
        leaves, treedef = jax.tree.flatten(updates)
        stored = zip(*(treedef.flatten_up_to(tree) for tree in state[1:]), strict=True)
        steps_key = jax.random.fold_in(jax.random.key(0), count)
        made, first, second = [], [], []
        for i, (g, (mu, nu, mu_scales, nu_scales)) in enumerate(zip(leaves, stored, strict=True)):
            g32 = g.astype(jnp.float32)
            m = b1 * read(mu, mu_scales, "first") + (1 - b1) * g32
            v = b2 * read(nu, nu_scales, "second") + (1 - b2) * jnp.square(g32)
            made.append((m / (1 - b1**count) / (jnp.sqrt(v / (1 - b2**count)) + eps)).astype(g.dtype))
            noise = noises(jax.random.fold_in(steps_key, i), g.shape)
            first.append(write(m, mu, "first", noise[0]))
            second.append(write(v, nu, "second", noise[1]))
        (mu, mu_scales), (nu, nu_scales) = (_unzip(treedef, pairs) for pairs in (first, second))
        return jax.tree.unflatten(treedef, made), AdamState(count, mu, nu, mu_scales, nu_scales)

    return optax.GradientTransformation(init, update)


def _unzip(treedef: Any, pairs: list[tuple[Array, Array | None]]) -> tuple[PyTree, PyTree]:
    """Returns a tree of moments, and a tree of their scales."""
    stored, scales = zip(*pairs, strict=True) if pairs else ((), ())
    return jax.tree.unflatten(treedef, stored), jax.tree.unflatten(treedef, scales)
