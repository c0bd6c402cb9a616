"""The functions of a task under the rules of a plan, for parts of the rows of a batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from .._rounding import at_least_float32
from ..memory import Loop
from ..partition import Plan
from ..transforms import Rows, by_row, of_whole
from ._rules import Role, with_rules
from ._task import Task


@dataclass(frozen=True)
class Functions:
    """The user's functions under a plan, for parts of the rows of a batch."""

    task: Task
    plan: Plan
    named: bool = False  # as for `plan_rules`
    measures: bool = False  # whether `saved` is known at each level of recomputation
    in_host: int = 0  # as for `plan_rules`
    saved: list[Loop] = field(default_factory=list, compare=False, repr=False)  # what each loop of the newest trace saves

    def whole(self, *args: PyTree, inference: bool) -> Rows:
        """Returns the `Rows` of the whole batch, with the values of it that its parts need, for the weights, the state, the
        whole batch, the key, and its `Rows` without these values."""
        return of_whole(self.task.judged(inference=inference), self.task.row_use(*args[:4], inference=inference), *args)

    def loss(self, *, inference: bool, is_only: bool = False, is_all: bool = False) -> Callable[..., Any]:
        """Returns `(weights, state, batch, key, rows) -> ((total, weight, metrics), state)`; gathers weights at their use.
        `is_only` is as for `Task.loss`, `is_all` as for `by_row`."""
        loss = self.task.loss(inference=inference, is_only=is_only)
        return self._of_part(loss, "evaluation" if inference else "training", is_only=is_only, is_all=is_all)

    def gradient(self, *, is_only: bool = False) -> Callable[..., Any]:
        """Returns `(trained, frozen, state, batch, key, rows) -> ((total, weight, metrics, gradients of the total),
        state)`. Unless the verdict is exact, the gradient of `total / weight` is computed, and multiplied by the weight: a
        derivative of the user's that is not linear, such as one that clips, then gets what a hand-written step gives it."""
        if self.task.grad_fn is not None:
            by_user = self._of_part(self.task.gradient(is_only=is_only), "grad_fn", is_only=is_only)
            return lambda trained, frozen, *rest: by_user([*trained, *frozen], *rest)
        loss = self.loss(inference=False, is_only=is_only)

        def gradient(trained: list, frozen: list, *rest: Any) -> Any:
            use = self.task.row_use([*trained, *frozen], *rest[:3])
            is_divided = not use.is_exact  # it may have a derivative of the user's that is not linear

            def of_trained(trained: list) -> Any:
                ((total, weight, metrics), state) = loss([*trained, *frozen], *rest)
                by = jnp.where(weight == 0, 1, weight) if is_divided else None
                return total if by is None else total / by, (total, weight, metrics, state, by)

            (_, (total, weight, metrics, state, by)), grads = jax.value_and_grad(of_trained, has_aux=True)(trained)
            if by is not None:  # not in 16 bits, which would round each product and then its quotient
                grads = [g * by.astype(at_least_float32(g.dtype)) for g in grads]
            return (total, weight, metrics, grads), state

        return gradient

    def _of_part(self, fn: Callable[..., Any], role: Role, *, is_only: bool, is_all: bool = False) -> Callable[..., Any]:
        def of_part(*args: Any) -> Any:
            if is_only:  # its rows are those of the whole batch
                return fn(*args[:4])
            return by_row(fn, self.task.row_use(*args[:4], inference=role == "evaluation"), is_all=is_all)(*args)

        options = {"named": self.named, "measures": self.measures, "in_host": self.in_host}
        return with_rules(of_part, self.task.structure, self.plan, self.task.compute, role, saved=self.saved, **options)


def weak_types(state: PyTree) -> tuple[bool, ...]:
    """Returns, for each array of a model's state, whether its type is weak, as that of `jnp.array(0.0)`."""
    return tuple(getattr(leaf, "weak_type", False) for leaf in jax.tree.leaves(state))


def with_weak_types(fn: Callable[..., Any], weak: Sequence[bool]) -> Callable[..., Any]:
    """Wraps a function of `(model, state, ...)` so that it receives the weak types with which the state was made.
    `eqx.nn.State.set` requires them of a new value, but arrays lose them when they are placed, carried or loaded."""
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
