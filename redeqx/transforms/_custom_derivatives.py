"""Custom derivatives under the rules that correct XLA: `jax.custom_vjp` functions with convolutions, pools, pads or lookups.

No rule enters a custom derivative, which belongs to the function that it was written for. But what XLA computes wrongly
elsewhere, it computes wrongly there too. So this rule traces the function, its forward pass and the user's derivative, and
evaluates them under the rules that avoid it.

Cost: none, beyond that of these rules without positions: no dim along which a window slides is split, and none of lookups
that does not divide.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ..tracing import Rule, Site, as_fun, called, equations, plain, run, transformed


@dataclass(frozen=True)
class InCustomDerivatives(Rule):
    """Applies rules inside `jax.custom_vjp`, and in its derivative.

    **Arguments:**

    - `rules`: those without which the numbers are wrong.
    """

    rules: tuple[Rule, ...]
    corrects: ClassVar = True

    def claims(self, eqn: Any) -> bool:
        if eqn.primitive.name != "custom_vjp_call" or (inside := called(eqn)) is None:
            return False
        return any(rule.claims(each) for each in equations(inside) for rule in self.rules)

    def __call__(self, eqn: Any, ins: Sequence[Any], site: Site) -> Sequence[Any] | None:
        if not all(jnp.issubdtype(var.aval.dtype, jnp.inexact) for var in eqn.outvars):
            return None  # a function written here would have to give integers a gradient
        ins, inside = list(map(plain, ins)), as_fun(called(eqn))
        places = [i for i, x in enumerate(ins) if jnp.issubdtype(x.dtype, jnp.inexact)]

        def joined(floats: Sequence[Any], others: Sequence[Any]) -> list[Any]:
            args = list(others)
            for i, x in zip(places, floats, strict=True):
                args[i] = x
            return args

        @jax.custom_vjp
        def fn(floats: Sequence[Any], others: Sequence[Any]) -> list[Any]:
            return self._under(inside)(*joined(floats, others))

        def forward(floats: Sequence[Any], others: Sequence[Any]) -> Any:
            def written(floats: Sequence[Any], others: Sequence[Any]) -> Any:
                return jax.vjp(lambda floats: run(eqn, joined(floats, others)), floats)

            return self._under(written)(floats, others)

        def backward(derivative: Any, of_outs: Sequence[Any]) -> Any:
            (of_floats,) = self._under(lambda derivative, of_outs: derivative(of_outs))(derivative, of_outs)
            return of_floats, None

        fn.defvjp(forward, backward)
        return fn([ins[i] for i in places], [None if i in places else x for i, x in enumerate(ins)])

    def _under(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        return transformed(fn, [*self.rules, self])
