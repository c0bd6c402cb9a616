"""The parameters to evaluate and to save, where these are not the trained ones: averages of them, above all.

An optimizer's state determines them: that of `ema`, of `optax.contrib.schedule_free`, of `optax.contrib.sam` between its
updates, or of an optimizer in `with_eval_params`. It may be inside of others, as in `optax.chain`, `optax.MultiSteps` or a
masked group.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree

from .._tree import listed, named_leaves
from ..errors import check_optimizer, filter_traceback
from ._checks import check_numbers
from ._states import states_in
from ._update import MasterState, accepting, widened

_HIDDEN = optax.MaskedNode  # stands for a leaf that belongs to another group


class EmaState(NamedTuple):
    """The state of the averaged optimizer, the average of the parameters before the newest update, and the decay."""

    inner: PyTree
    average: PyTree[Array]
    decay: Float[Array, ""]


class EvalState(eqx.Module):
    """The state of an optimizer with its own parameters to evaluate, and the structure of the trained ones."""

    inner: PyTree
    fn: Callable[[PyTree, PyTree], PyTree] = eqx.field(static=True)
    treedef: Any = eqx.field(static=True)


_STATES = (EmaState, EvalState, optax.contrib.ScheduleFreeState, optax.contrib.SAMState)
# States with copies of the parameters, and their fields.
_COPIES: dict[type, str] = {
    EmaState: "average",
    MasterState: "master",
    optax.contrib.ScheduleFreeState: "z",
    optax.contrib.SAMState: "cache",
}


@filter_traceback
def ema(optimizer: optax.GradientTransformation, decay: float = 0.999) -> optax.GradientTransformationExtraArgs:
    """Returns the optimizer with an exponential moving average of its parameters, which a Trainer evaluates and saves.

    ```python
    trainer = redeqx.Trainer(..., optimizer=ema(optax.adam(1e-3), decay=0.999))
    trainer.eval_model  # the average; `trainer.model` is the model that is trained
    ```

    After each update `average = decay * average + (1 - decay) * parameters`, from the first parameters on, in float32 at
    least.

    **Arguments:**

    - `decay`: the weight of the old average, in [0, 1): 0.999 averages about 1000 updates.

    Raises ValueError for another decay, TypeError for anything but a number.
    """
    check_optimizer(optimizer)
    check_numbers(decay=decay)
    inner = accepting(optimizer)

    def init(params: Any) -> Any:
        # In bfloat16 the small changes of an average would be rounded away.
        return EmaState(inner.init(params), jax.tree.map(jnp.copy, widened(params)), jnp.asarray(decay, jnp.float32))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        if params is None:
            raise ValueError("`params`: expected the parameters, got None. Call `update(grads, state, params)`.")
        updates, of_inner = inner.update(updates, state.inner, params, **extra)
        # Of the parameters before this update: those after it depend on transformations that may follow this one.
        return updates, EmaState(of_inner, _averaged(state.average, params, decay), jnp.asarray(decay, jnp.float32))

    return optax.GradientTransformationExtraArgs(init, update)


@filter_traceback
def with_eval_params(
    optimizer: optax.GradientTransformation, eval_params: Callable[[PyTree, PyTree], PyTree]
) -> optax.GradientTransformationExtraArgs:
    """Returns the optimizer with a function of its state for the parameters that a Trainer evaluates and saves. `ema` and
    optax's optimizers need none.

    **Arguments:**

    - `eval_params`: maps `(opt_state, params)` to the parameters to evaluate.
    """
    check_optimizer(optimizer)
    inner = accepting(optimizer)

    def init(params: Any) -> Any:
        return EvalState(inner.init(params), eval_params, jax.tree.structure(params))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        updates, of_inner = inner.update(updates, state.inner, params, **extra)
        return updates, EvalState(of_inner, state.fn, state.treedef)

    return optax.GradientTransformationExtraArgs(init, update)


def eval_params(opt_state: PyTree, params: PyTree) -> PyTree:
    """Returns the parameters to evaluate and to save, in the dtypes of the trained ones. A Trainer does this for you."""
    wide = opt_state.master if isinstance(opt_state, MasterState) else params
    for node in _nodes(opt_state):
        wide = _replaced(wide, _structure(node), lambda own, node=node: _evaluated(node, own))
    return jax.tree.map(lambda new, x: new.astype(x.dtype), wide, params)


def has_eval_params(opt_state: PyTree) -> bool:
    """Returns whether the parameters to evaluate differ from the trained ones; the state may be shapes.

    Raises ValueError for leaves with two averages, of which only one could be evaluated.
    """
    seen: set[str] = set()
    for node in _nodes(opt_state):
        names = set(named_leaves(_structure(node)))
        if twice := sorted(names & seen):
            raise ValueError(
                f"`optimizer`: expected one average of each parameter, got several of {', '.join(listed(twice, 3))}. Leave "
                "the others out, or choose with `redeqx.optimizers.with_eval_params`."
            )
        seen |= names
    return bool(seen)


def with_new_copies(opt_state: PyTree, params: PyTree) -> PyTree:
    """Returns an optimizer state whose averages and other copies of the parameters begin again, with these."""

    def renewed(node: Any) -> Any:
        name = _COPIES.get(type(node))
        if name is None:
            return node
        node = type(node)(*with_new_copies(tuple(node), params))  # those inside of it
        copies = getattr(node, name)
        return node if copies is None else node._replace(**{name: _copied(copies, params)})

    return jax.tree.map(renewed, opt_state, is_leaf=lambda node: type(node) in _COPIES)


# --- states ------------------------------------------------------------------------------------------------------------


def _nodes(opt_state: PyTree) -> Iterator[Any]:
    """Yields the states that determine parameters to evaluate, the outermost first."""
    for node in states_in(opt_state, _STATES):
        if not (isinstance(node, optax.contrib.SAMState) and node.cache is None):
            yield node
        if not isinstance(node, EvalState):  # which decides for those inside of it
            yield from _nodes(tuple(node))


def _structure(node: Any) -> PyTree:
    """Returns a tree of the parameters that a state is of: masked ones are hidden."""
    if isinstance(node, EvalState):
        return jax.tree.unflatten(node.treedef, [jax.ShapeDtypeStruct((), bool)] * node.treedef.num_leaves)
    return getattr(node, _COPIES[type(node)])


def _evaluated(node: Any, params: PyTree) -> PyTree:
    """Returns the parameters to evaluate of one state."""
    if isinstance(node, EvalState):
        return node.fn(node.inner, params)
    if isinstance(node, EmaState):
        return _averaged(node.average, params, node.decay)
    if isinstance(node, optax.contrib.SAMState):  # perturbed until the next update
        return jax.tree.map(lambda x, kept: jnp.where(node.steps_since_sync == 0, x, kept), params, node.cache)
    return optax.contrib.schedule_free_eval_params(node, params)


def _averaged(average: PyTree, params: PyTree, decay: Any) -> PyTree:
    # Not `decay * a + (1 - decay) * x`: rounded, the two factors do not add up to 1.
    return jax.tree.map(lambda a, x: a + (1 - decay) * (x.astype(a.dtype) - a), average, params)


# --- masks -------------------------------------------------------------------------------------------------------------


def _is_hidden(node: Any) -> bool:
    return isinstance(node, _HIDDEN)


def _replaced(params: PyTree, structure: PyTree, fn: Callable[[PyTree], PyTree]) -> PyTree:
    """Returns the parameters with those of a group replaced by `fn` of the group."""
    own = jax.tree.map(lambda s, x: s if _is_hidden(s) else x, structure, params, is_leaf=_is_hidden)
    return jax.tree.map(lambda new, x: x if _is_hidden(new) else new.astype(x.dtype), fn(own), params, is_leaf=_is_hidden)


def _copied(old: PyTree, params: PyTree) -> PyTree:
    """Returns parameters in the dtypes and shardings of an average, copied since a step donates both."""

    def copied(a: Any, x: Any) -> Any:
        return a if _is_hidden(a) else jax.device_put(jnp.array(x, a.dtype, copy=True), a.sharding)

    return jax.tree.map(copied, old, params, is_leaf=_is_hidden)
