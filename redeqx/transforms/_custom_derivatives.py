"""Custom derivatives under the rules that correct XLA, of functions with convolutions, pools, pads or lookups.

No rule enters a custom derivative, which belongs to the function that it was written for. But what XLA computes wrongly
elsewhere, it computes wrongly there too. So this rule traces the function, its forward pass and the user's derivative, and
evaluates them under the rules that avoid it.

Cost: a trace of each derivative that is not elementwise, and that of these rules without positions: no dim along which a
window slides is split, and none of lookups that does not divide.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp

from ..dims import is_elementwise
from ..tracing import (
    CUSTOM_DERIVATIVES,
    Rule,
    Site,
    as_fun,
    called,
    derivative_of,
    equations,
    made_in,
    plain,
    run,
    transformed,
)


@dataclass(frozen=True)
class InCustomDerivatives(Rule):
    """Applies rules, those without which numbers are wrong, inside `jax.custom_vjp` and `jax.custom_jvp`, and in their
    derivatives."""

    rules: tuple[Rule, ...]
    corrects: ClassVar = True

    def claims(self, eqn: Any) -> bool:
        if eqn.primitive.name not in CUSTOM_DERIVATIVES or called(eqn) is None or not _all_inexact(eqn.outvars):
            return False  # a function written here would have to give integers a gradient
        return any(rule.claims(each) for closed in _traces(eqn) for each in equations(closed) for rule in self.rules)

    def __call__(self, eqn: Any, ins: Sequence[Any], site: Site) -> Sequence[Any] | None:
        ins, inside = list(map(plain, ins)), as_fun(called(eqn))
        floats, others = eqx.partition(ins, eqx.is_inexact_array)

        @jax.custom_vjp
        def fn(floats: Sequence[Any], others: Sequence[Any]) -> list[Any]:
            return self._under(inside)(*eqx.combine(floats, others))

        def forward(floats: Sequence[Any], others: Sequence[Any]) -> Any:
            def written(floats: Sequence[Any], others: Sequence[Any]) -> Any:
                return jax.vjp(lambda floats: run(eqn, eqx.combine(floats, others)), floats)

            return self._under(written)(floats, others)

        def backward(derivative: Any, of_outs: Sequence[Any]) -> Any:
            (of_floats,) = self._under(lambda derivative, of_outs: derivative(of_outs))(derivative, of_outs)
            return of_floats, None

        fn.defvjp(forward, backward)
        return fn(floats, others)

    def _under(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        return transformed(fn, [*self.rules, self])


def _all_inexact(values: Sequence[Any]) -> bool:
    return all(jnp.issubdtype(value.aval.dtype, jnp.inexact) for value in values)


def _traces(eqn: Any) -> list[Any]:
    """Returns the closed jaxprs of a function with a derivative of its own, and of that derivative if it can be traced."""
    inside: Any = called(eqn)
    is_elementwise_jvp = eqn.primitive.name == "custom_jvp_call" and all(map(is_elementwise, equations(inside)))
    # JAX keeps the derivative that it traces first, and those of this package depend on where that is (`sum_gradient`).
    if is_elementwise_jvp or made_in(inside, "redeqx"):
        return [inside]
    try:
        return [inside, derivative_of(eqn)]
    except Exception:  # the user's, who may never ask for a gradient
        return [inside]
