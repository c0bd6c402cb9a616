"""Rematerialisation: what loops save for the backward pass, which computes the rest again.

A level of `RematLoops` applies to all loops alike, or is chosen by value: some values of each loop are kept, some are put
into host memory, and the others are computed again, as `memory.saved_at` chooses for the whole loss. That choice needs the
equations that the other rules make of a loop's body, such as fused attention and gathers of weights. So `with_remats`
computes the traced loss twice: the first time each loop notes what it could save.

Source: rematerialisation per layer (arXiv:1604.06174). Cost: the backward pass computes each loop's body once more, or only
its cheap operations if the outputs of products are saved.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec as P

from ..machine import BATCH_AXES, SEQUENCE, Chip
from ..memory import HOST, KEPT, Loop, Shards, is_named, key_of, loop_of, saved_at
from ..tracing import (
    PRODUCTS,
    REMAT,
    Env,
    Rule,
    Site,
    as_array,
    as_fun,
    evaluate,
    insides,
    interpret,
    normal,
    run,
    scan_counts,
    shapes_in,
    transformed,
)

_CARRY = "redeqx: a loop's carry"
# `pallas_call` covers the kernels of other libraries; primitives of their own have unknown names.
_PRODUCTS = {*PRODUCTS, "pallas_call"}


@dataclass(frozen=True)
class Measure:
    """What it takes to measure what the loops of a function of weights, a state, a batch, and others could save: `specs` of
    the weights as they are used, and the bytes of the host's memory that values may take for each device."""

    mesh: Mesh
    chip: Chip
    specs: Sequence[P | None]
    host: float = 0


@dataclass(frozen=True, eq=False)
class RematLoops(Rule):
    """Recomputes the body of each scan in the backward pass, from the body's inputs and what is saved of it.

    Scans whose body contains a remat are left unchanged, and so are loops inside a scan that recomputes.

    **Arguments:**

    - `level`: `"matmuls"` saves the outputs of matmuls, convolutions and attention. No product is then computed twice, and
        the recomputed operations (norms, activations, casts) are bound by memory bandwidth on GPUs and TPUs. `"full"` saves
        only the body's inputs. `"offload"` does too, with the carry in host memory. Or a level by value: `"offload"`, with
        as many products there as the bus copies, or bytes, such as `"6GiB"`, on one device for what all loops save.
    - `measure`: with which loops are measured under `with_remats`; None if nothing is to be known of them.
    - `by_value`: whether what each loop saves is chosen by this.
    - `saved`: what each loop saves, in their order; known under `with_remats`.
    """

    level: str = "full"
    measure: Measure | None = None
    by_value: bool = False
    saved: Sequence[Loop] = ()
    # For one function: from a scan's equation and its site to the remat in which the body is computed.
    remat_of: Callable[[Any, Site], Callable[..., Any]] | None = None

    def of(self, closed: Any) -> Rule | None:
        if self.remat_of is not None:
            return self
        return replace(self, remat_of=partial(_saving, iter(self.saved)) if self.by_value else self._at_level)

    def claims(self, eqn: Any) -> bool:
        return is_scan_without_remat(eqn)

    def __call__(self, eqn: Any, ins: Sequence[Any], site: Site) -> Sequence[Any] | None:
        assert self.remat_of is not None
        return site.enter(eqn, ins, remat=self.remat_of(eqn, site))

    def _at_level(self, eqn: Any, site: Site) -> Callable[..., Any]:
        del site
        policies = {"matmuls": is_product, "full": None, "offload": _Policy(in_host=frozenset([_CARRY]))}
        moved = _carries(eqn) if self.level == "offload" else ()
        return partial(_checkpointed, policy=policies[self.level], moved=moved)


def with_remats(fn: Callable[..., Any], rules: Sequence[Rule], saved: list[Loop] | None) -> Callable[..., Any]:
    """Wraps `fn` so that it is computed under rules, of which one may be a `RematLoops` with a measure. `saved` receives
    what each loop saves."""
    own = next((rule for rule in rules if isinstance(rule, RematLoops)), None)
    if own is None or (measure := own.measure) is None:
        return transformed(fn, rules)

    def choose(traced: Any, args: Sequence[Any]) -> list[Rule]:
        _, state, batch, *rest = args
        specs = [None] * len(jax.tree.leaves(state)) + [P(BATCH_AXES, SEQUENCE)] * len(jax.tree.leaves(batch))
        specs = [*measure.specs, *specs, *[None] * len(jax.tree.leaves(rest))]
        noted = list[Loop]()
        noting = replace(own, remat_of=_noting(replace(measure, specs=specs), noted))
        under = [noting if rule is own else rule for rule in rules]
        jax.eval_shape(lambda *flat: interpret(traced, flat, under), *shapes_in(traced))
        chosen = saved_at(noted, own.level, measure.chip, measure.host) or ()
        if saved is not None:
            saved[:] = chosen
        return [replace(own, saved=chosen) if rule is own else rule for rule in rules]

    return transformed(fn, rules, choose)


def is_scan_without_remat(eqn: Any) -> bool:
    """Whether an equation is a scan that saves all residuals for its backward pass."""
    if eqn.primitive.name != "scan":
        return False
    return not any(inner.primitive.name == REMAT for inner in normal(eqn.params["jaxpr"]).jaxpr.eqns)


def is_product(primitive: Any, *args: Any, **params: Any) -> bool:
    """Whether a primitive is a product, whose outputs are saved. A policy for `jax.checkpoint`.

    Complex products are computed again: JAX rounds what a policy saves by `reduce_precision`, which takes no complex dtype
    (jax 0.10.2; `test_jax_still_saves_no_complex_products` fails once it does).
    """
    is_complex = any(jnp.issubdtype(x.dtype, jnp.complexfloating) for x in args if hasattr(x, "dtype"))
    return primitive.name in _PRODUCTS and not is_complex


def _carries(scan: Any) -> range:
    n_consts, n_carry = scan_counts(scan)
    return range(n_consts, n_consts + n_carry)


# --- by value --------------------------------------------------------------------------------------------------------------


def _saving(saved: Iterator[Loop], eqn: Any, site: Site) -> Callable[..., Any]:
    """Returns the remat of a loop that saves what was chosen."""
    del site
    loop = next(saved)
    is_moved = loop.carry_in == HOST
    policy = _Policy(loop.keys(KEPT), loop.keys(HOST) | ({_CARRY} if is_moved else set()))
    return partial(_checkpointed, policy=policy, moved=_carries(eqn) if is_moved else (), is_named=True)


def _noting(measure: Measure, noted: list[Loop]) -> Callable[..., Any]:
    """Returns what computes loops without a remat, and notes what each could save. The specs are those of all inputs."""
    shards_of = cache(partial(Shards, specs=measure.specs, mesh=measure.mesh))

    def remat_of(eqn: Any, site: Site) -> Callable[..., Any]:
        def remat(body: Callable[..., Any]) -> Callable[..., Any]:
            def noting(*args: Any) -> Any:
                closed = _traced(body, args)
                fn, names = _named(closed)
                specs = [shards_of(site.body.closed).spec(var) for var in insides(eqn)[0].closed.jaxpr.invars]
                specs += [None] * (len(closed.jaxpr.invars) - len(specs))
                shards = partial(Shards, specs=specs, mesh=measure.mesh)
                traced, n = jax.make_jaxpr(fn)(*shapes_in(closed)), eqn.params["length"]
                noted.append(loop_of(traced, names, n, _carries(eqn), shards, measure.chip))
                return as_fun(closed)(*args)

            return noting

        return remat

    return remat_of


def _traced(body: Callable[..., Any], args: Sequence[Any]) -> Any:
    return jax.make_jaxpr(body)(*(jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in args))


def _checkpointed(
    body: Callable[..., Any], policy: Any, moved: Collection[int] = (), *, is_named: bool = False
) -> Callable[..., Any]:
    """Returns a loop's body that saves what a policy says, which knows the names of products if `is_named`. The inputs
    `moved` go to the host, but for scalars, such as counters and sums of losses."""

    def named(*args: Any) -> Any:
        fn = _named(_traced(body, args))[0] if is_named else body
        is_moved = [i in moved and x.ndim > 0 and jnp.issubdtype(x.dtype, jnp.inexact) for i, x in enumerate(args)]
        return fn(*(checkpoint_name(x, _CARRY) if its else x for x, its in zip(args, is_moved, strict=True)))

    # XLA does not merge the forward and the backward loop.
    return jax.checkpoint(named, prevent_cse=False, policy=policy)


def _named(closed: Any) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Returns a closed jaxpr as a function in which the outputs of products have names, and the equation of each name."""
    jaxpr, names = closed.jaxpr, dict[str, Any]()
    of_var = {}
    for i, eqn in enumerate(jaxpr.eqns):
        if is_named(eqn) and not eqn.effects:
            for k, var in enumerate(eqn.outvars):
                if jnp.issubdtype(var.aval.dtype, jnp.inexact) and not jnp.issubdtype(var.aval.dtype, jnp.complexfloating):
                    of_var[var] = f"redeqx: {i}.{k}"
                    names[of_var[var]] = eqn

    def compute(eqn: Any, ins: Sequence[Any]) -> list[Any]:
        pairs = zip(eqn.outvars, run(eqn, ins), strict=True)
        return [checkpoint_name(x, of_var[var]) if var in of_var else x for var, x in pairs]

    def fn(*args: Any) -> list[Any]:
        env = Env(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *args], strict=True))
        evaluate(jaxpr.eqns, env, compute)
        return [as_array(env[atom], atom) for atom in jaxpr.outvars]

    return fn, names


@dataclass(frozen=True)
class _Policy:
    """A policy for `jax.checkpoint`, by keys as in `Candidate`."""

    kept: frozenset[Any] = frozenset()
    in_host: frozenset[Any] = frozenset()

    def __call__(self, primitive: Any, *avals: Any, **params: Any) -> Any:
        key = params["name"] if primitive.name == "name" else key_of(primitive, avals)
        return _to_host() if key in self.in_host else key in self.kept


@cache
def _to_host() -> Any:
    """Returns what a policy returns for a value that goes to the host."""
    (eqn,) = jax.make_jaxpr(lambda x: checkpoint_name(x, _CARRY))(0.0).jaxpr.eqns
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[_CARRY],
        offload_src="device",
        offload_dst="pinned_host",
    )
    return policy(eqn.primitive, name=_CARRY)
