"""Wraps the user's loss, gradient and prediction functions as functions of flat lists of arrays, under the plan's rules."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from .._tree import array_leaves, as_bare_shapes, listed, named_leaves
from ..dims import RowUse, row_use, shapes_of_row
from ..memory import Loop
from ..partition import Plan
from ..tracing import Trace, normal, restricted, variables
from ..transforms import Rows, by_row, of_whole
from ._compute import Compute
from ._loss import as_sums, n_rows
from ._precision import AS_GIVEN, Precision
from ._rules import Role, with_rules
from ._structure import Structure


@dataclass(frozen=True)
class Sums:
    """The user's loss, or loss and gradients, as sums over the rows of a batch, for a model as a flat list of arrays.

    They are functions `(weights, state, batch, key) -> (sums, state)` of the trained and then the frozen arrays.

    **Arguments:**

    - `uses`: the verdicts so far, see `row_use`.
    """

    structure: Structure
    loss_fn: Callable[..., Any]
    has_state: bool = False
    precision: Precision = AS_GIVEN
    grad_fn: Callable[..., Any] | None = None
    uses: dict[Any, RowUse] = field(default_factory=dict, compare=False, repr=False)

    def loss(self, *, inference: bool, is_only: bool = False) -> Callable[..., Any]:
        """Returns the function with the sums `(total, weight, metrics)`.

        **Arguments:**

        - `is_only`: whether the batch is the only micro-batch of a step. A mean then has weight 1, as in a
            hand-written step: no gradient is multiplied by the number of rows and divided by it again.
        """

        def loss(weights: Sequence[Array], state: PyTree, batch: PyTree, key: Array) -> Any:
            out, state = self._call(self.loss_fn, "loss_fn", weights, state, batch, key, inference=inference)
            return as_sums(out, 1 if is_only else n_rows(batch)), state

        return loss

    def gradient(self, *, is_only: bool = False) -> Callable[..., Any]:
        """Returns the function of `grad_fn`, with the sums `(total, weight, metrics, gradients of the trained arrays)`.

        **Arguments:**

        - `is_only`: as for `loss`.
        """
        assert self.grad_fn is not None
        grad_fn = self.grad_fn

        def gradient(weights: Sequence[Array], state: PyTree, batch: PyTree, key: Array) -> Any:
            out, state = self._call(grad_fn, "grad_fn", weights, state, batch, key, inference=False)
            out, grads = _pair(out, "grad_fn", "(loss, grads)")
            total, weight, metrics = as_sums(out, 1 if is_only else n_rows(batch), "grad_fn")
            leaves = array_leaves(grads)
            picked = []
            for name, param in zip(self.structure.names[0], weights, strict=False):
                if name not in leaves or leaves[name].shape != param.shape:
                    found = leaves[name].shape if name in leaves else "none"
                    raise ValueError(
                        f"`grad_fn` gradient `{name}`: expected shape {param.shape}, got {found}. "
                        "Return a gradient for every trainable leaf, in the model's structure."
                    )
                picked.append(leaves[name] * weight)
            return (total, weight, metrics, picked), state

        return gradient

    def judged(self, *, inference: bool) -> Callable[..., Any]:
        """Returns the function that `row_use` is about: the user's gradient if there is one, else the loss."""
        return self.loss(inference=inference) if self.grad_fn is None or inference else self.gradient()

    def row_use(self, weights: Sequence[Any], state: PyTree, batch: PyTree, key: Any, *, inference: bool = False) -> RowUse:
        """Returns what the function does with the rows of a batch. It is found once for all numbers of rows; longer texts,
        for example, are other shapes, for which other constants of the loss may hold.

        **Arguments:**

        - `weights`, `state`, `batch`, `key`: arrays or their shapes.
        """
        of = inference, *shapes_of_row(weights, state, batch)
        if of not in self.uses:
            self.uses[of] = self._find_row_use(weights, state, batch, key, inference=inference)
        return self.uses[of]

    def _find_row_use(self, weights: Sequence[Any], state: PyTree, batch: PyTree, key: Any, *, inference: bool) -> RowUse:
        fn = self.judged(inference=inference)
        is_differentiated = self.grad_fn is None and not inference
        use = row_use(lambda *args: fn(*args)[0], weights, state, batch, key, is_differentiated=is_differentiated)
        if not use.is_exact or inference:
            return use
        changes, reads = _changes_state(fn, weights, state, batch, key)
        if reads:
            return replace(use, kind="mixed", why="it reads a state that each part of the batch changes")
        return replace(use, changes_state=changes)

    def row_use_of(self, model: PyTree, state: PyTree, batch: PyTree, *, inference: bool = False) -> RowUse:
        """Returns what the function does with the rows of a batch, for a model in one piece."""
        trained, frozen = self.structure.take(model)
        key = jax.eval_shape(lambda: jax.random.key(0))
        return self.row_use([*trained, *frozen], state, batch, key, inference=inference)

    def trace(self, model: PyTree, state: PyTree, batch: PyTree) -> Trace:
        """Traces the total of the loss for the shapes of a batch, for a model in one piece."""
        loss = self.loss(inference=False)

        def total(model: PyTree, batch: PyTree, key: Any) -> Any:
            trained, frozen = self.structure.take(model)
            return loss([*trained, *frozen], jax.tree.map(_any_value, state), batch, key)[0][0]

        return Trace.of(total, model, batch, jax.eval_shape(lambda: jax.random.key(0)))

    def _call(
        self,
        fn: Callable[..., Any],
        where: str,
        weights: Sequence[Array],
        state: PyTree,
        batch: PyTree,
        key: Array,
        *,
        inference: bool,
    ) -> tuple[Any, PyTree]:
        n, dtype = len(self.structure.names[0]), self.precision.dtype
        model = self.structure.put(weights[:n], weights[n:], inference=inference, compute_dtype=dtype)
        if not self.has_state:
            return fn(model, batch, key), state
        given = jax.tree.map(lambda x: x, state)  # a copy: `state.set` makes the object that it is called on unusable
        out, after = _pair(fn(model, given, batch, key), where, "(loss, state)", ", as `model_state` was given")
        return out, state if inference else _checked_state(after, state, where)


def _any_value(leaf: Any) -> Any:
    """Returns a JAX array of the trace for a shape or a NumPy array, as in a dry run: NumPy would compute outside of it."""
    return jnp.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct | np.ndarray) else leaf


def _changes_state(fn: Callable[..., Any], weights: PyTree, state: PyTree, batch: PyTree, key: Any) -> tuple[bool, bool]:
    """Whether `(sums, state)` has a part of the state changed, and whether the sums depend on such a part."""
    n = len(jax.tree.leaves(state))
    if not n:
        return False, False
    closed = normal(jax.make_jaxpr(fn)(*as_bare_shapes((weights, state, batch, key))))
    start, outs = len(jax.tree.leaves(weights)), closed.jaxpr.outvars
    needed = {var for eqn in restricted(closed, outs[:-n]).jaxpr.eqns for var in variables(eqn.invars)}
    pairs = zip(closed.jaxpr.invars[start : start + n], outs[-n:], strict=True)
    changed = {before for before, after in pairs if before is not after}
    return bool(changed), bool(changed & needed)


@dataclass(frozen=True)
class Functions:
    """The user's functions under a plan, for parts of the rows of a batch."""

    sums: Sums
    plan: Plan
    compute: Compute
    named: bool = False  # as for `plan_rules`
    measures: bool = False  # whether `saved` is known at each level of recomputation
    saved: list[Loop] = field(default_factory=list, compare=False, repr=False)  # what each loop of the newest trace saves

    @property
    def structure(self) -> Structure:
        return self.sums.structure

    def whole(self, *args: PyTree, inference: bool) -> Rows:
        """Returns the `Rows` of the whole batch, with the values of it that its parts need.

        **Arguments:**

        - `args`: the weights, the state, the whole batch, the key, and its `Rows` without these values.
        """
        return of_whole(self.sums.judged(inference=inference), self.sums.row_use(*args[:4], inference=inference), *args)

    def loss(self, *, inference: bool, is_only: bool = False, is_all: bool = False) -> Callable[..., Any]:
        """Returns `(weights, state, batch, key, rows) -> ((total, weight, metrics), state)`; gathers weights at their use.

        **Arguments:**

        - `is_only`: whether the batch is the only micro-batch of a step, as for `Sums.loss`.
        - `is_all`: as for `by_row`.
        - `rows`: the `Rows` of the batch.
        """
        loss = self.sums.loss(inference=inference, is_only=is_only)
        return self._of_part(loss, "evaluation" if inference else "training", is_only=is_only, is_all=is_all)

    def gradient(self, *, is_only: bool = False) -> Callable[..., Any]:
        """Returns `(trained, frozen, state, batch, key, rows) -> ((total, weight, metrics, gradients), state)`, with the
        gradients of the total.

        **Arguments:**

        - `is_only`, `rows`: as for `loss`.
        """
        if self.sums.grad_fn is not None:
            by_user = self._of_part(self.sums.gradient(is_only=is_only), "grad_fn", is_only=is_only)
            return lambda trained, frozen, *rest: by_user([*trained, *frozen], *rest)
        loss = self.loss(inference=False, is_only=is_only)

        def gradient(trained: list, frozen: list, *rest: Any) -> Any:
            def of_trained(trained: list) -> Any:
                ((total, weight, metrics), state) = loss([*trained, *frozen], *rest)
                return total, (weight, metrics, state)

            (total, (weight, metrics, state)), grads = jax.value_and_grad(of_trained, has_aux=True)(trained)
            return (total, weight, metrics, grads), state

        return gradient

    def _of_part(self, fn: Callable[..., Any], role: Role, *, is_only: bool, is_all: bool = False) -> Callable[..., Any]:
        def of_part(*args: Any) -> Any:
            if is_only:  # its rows are those of the whole batch
                return fn(*args[:4])
            return by_row(fn, self.sums.row_use(*args[:4], inference=role == "evaluation"), is_all=is_all)(*args)

        options = {"named": self.named, "measures": self.measures}
        return with_rules(of_part, self.structure, self.plan, self.compute, role, saved=self.saved, **options)


def _pair(out: Any, where: str, names: str, why: str = "") -> tuple[Any, Any]:
    if isinstance(out, tuple) and len(out) == 2:
        return out
    found = f"{len(out)} values" if isinstance(out, tuple) else "an array" if eqx.is_array(out) else type(out).__name__
    raise TypeError(f"`{where}`: expected `{names}`{why}, got {found}. Return both.")


def _checked_state(after: PyTree, before: PyTree, where: str) -> PyTree:
    """Returns the state after a call, in the dtypes from before it. Raises ValueError for a state of another structure or
    shape, and for numbers that would become integers, such as a decayed rate that began as `jnp.array(1)`."""
    leaves, old_leaves = named_leaves(after), named_leaves(before)
    if (treedef := jax.tree.structure(before)) != jax.tree.structure(after):
        names = [f"`{name}`" for name in (*leaves, *old_leaves) if (name in leaves) != (name in old_leaves)]
        raise ValueError(
            f"`{where}` state: expected the structure of `model_state`, got another one"
            f"{', which differs in ' * bool(names)}{', '.join(listed(names, 3))}. Return the state that the model's call "
            "returned, or what else replaces each leaf."
        )
    new_leaves = []
    for (name, leaf), old in zip(leaves.items(), old_leaves.values(), strict=True):
        new = jnp.asarray(leaf)
        becomes_integer = jnp.issubdtype(new.dtype, jnp.inexact) and not jnp.issubdtype(old.dtype, jnp.inexact)
        if new.shape != old.shape or becomes_integer:
            raise ValueError(
                f"`{where}` state `{name}`: expected {old.dtype}{list(old.shape)}, as in `model_state`, got "
                f"{new.dtype}{list(new.shape)}. Return that, or pass the other one as `model_state`."
            )
        new_leaves.append(new.astype(old.dtype))
    return jax.tree.unflatten(treedef, new_leaves)


def weak_types(state: PyTree) -> tuple[bool, ...]:
    """Returns, for each array of a model's state, whether its type is weak, as that of `jnp.array(0.0)`."""
    return tuple(getattr(leaf, "weak_type", False) for leaf in jax.tree.leaves(state))


def with_weak_types(fn: Callable[..., Any], weak: Sequence[bool]) -> Callable[..., Any]:
    """Wraps a function of `(model, state, ...)` so that it receives the weak types with which the state was made.

    `eqx.nn.State.set` requires them of a new value, but arrays lose them when they are placed, carried or loaded.
    """
    if not any(weak):
        return fn

    def weakened(leaf: Array, is_weak: bool) -> Any:
        if not is_weak:
            return leaf
        return jax.lax.convert_element_type_p.bind(leaf, new_dtype=leaf.dtype, weak_type=True, sharding=None)

    @wraps(fn, updated=())
    def with_types(model: PyTree, state: PyTree, *rest: Any) -> Any:
        leaves, treedef = jax.tree.flatten(state)
        return fn(model, jax.tree.unflatten(treedef, map(weakened, leaves, weak)), *rest)

    return with_types
