"""A traced function, re-evaluated with each weight gathered where it is used.

Under fully sharded data parallelism a weight lives split over the axis that also splits the batch. Left to itself XLA then
follows the weights: it computes the whole batch on every device and sums activations. So each weight is constrained, at
its use, to its spec without the fsdp axis. That is ZeRO-3 (arXiv:1910.02054): an all-gather before the layer, again in the
backward pass, and a reduce-scatter of the gradient, with the batch split throughout.

The model need not know: its function is traced to a jaxpr, and the jaxpr is evaluated again, equation by equation, with
those constraints put in, also inside scans, jits, remats, branches and while loops. An equation is evaluated through
`jaxpr_as_fun`, which keeps its name scopes and source lines, so profiles and tracebacks still show the user's code. An
equation that brings its own derivative, or whose inside is not followed, gets its weights gathered before it.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.extend import core as jex
from jax.sharding import NamedSharding, PartitionSpec as P

from ..tracing import run, scan_counts, shapes_in, value_of


@dataclass(frozen=True)
class Home:
    """Where a weight (or a slice of one) lives, and how it is used; one entry a dim in both specs.

    Its name is written into the name scopes of its uses, where profiles and the dry run find it.
    """

    lives: NamedSharding
    used: NamedSharding
    name: str = ""

    @property
    def is_gathered(self) -> bool:
        """Whether it is used otherwise than it lives."""
        return self.lives.spec != self.used.spec

    def of_view(self, dims: Sequence[int | None]) -> "Home | None":
        """The home of the view whose dim `i` is this weight's dim `dims[i]`, None for a new dim.

        There is none for a view that leaves out, or cuts, a dim that is split: parts of it lie on some of the shards only.
        """
        specs = self.lives.spec, self.used.spec
        if not {dim for spec in specs for dim, axes in enumerate(spec) if axes is not None} <= set(dims):
            return None
        lives, used = (P(*(None if dim is None else spec[dim] for dim in dims)) for spec in specs)
        return Home(NamedSharding(self.lives.mesh, lives), NamedSharding(self.used.mesh, used), self.name)


@dataclass(frozen=True)
class _Weight:
    """A value of the evaluation that still is (a view of) a parameter.

    Transposes and the like wait until it is gathered. So all uses gather the same array, once in a pass where XLA finds them
    equal, and the backward pass is left the shard as it lives: of a turned copy XLA may choose to keep the whole.
    """

    value: Any
    home: Home
    turns: tuple[Any, ...] = ()  # the equations that wait
    turned_home: Home | None = None  # after them


def gather_at_use(fn: Callable[..., Any], homes: Sequence[Home | None]) -> Callable[..., Any]:
    """`fn`, with each array of its first argument gathered where it is used; the same values and gradients.

    **Arguments:**

    - `fn`: takes a sequence of arrays, then any PyTrees of arrays, and returns a PyTree of arrays.
    - `homes`: for each array of that sequence where it lives and how it is used; None for one that is left alone. With
        nothing but None, `fn` itself is returned.
    """
    if all(home is None for home in homes):
        return fn

    def gathered(weights: Sequence[Any], *args: Any) -> Any:
        flat, treedef = jax.tree.flatten((tuple(weights), *args))
        closed, shapes = jax.make_jaxpr(lambda *flat: fn(*jax.tree.unflatten(treedef, flat)), return_shape=True)(*flat)
        padded = [*homes, *[None] * (len(flat) - len(homes))]
        outs = _evaluate(closed, _label(flat, padded), regather=True, in_loop=False)
        return jax.tree.unflatten(jax.tree.structure(shapes), outs)

    return gathered


# --- the evaluation --------------------------------------------------------------------------------------------------


def _label(values: Sequence[Any], homes: Sequence[Home | None]) -> list[Any]:
    """Mark the weights among `values`.

    The constraint to where they live changes nothing here. Its transpose does, in the backward pass: gradients of all uses
    are added first, then cut to the shard that the device keeps, inside the loop over layers already.
    """
    return [
        value if home is None else _Weight(_constrained(value, home, home.lives), home)
        for value, home in zip(values, homes, strict=True)
    ]


def _constrained(value: Any, home: Home, sharding: NamedSharding) -> Any:
    if not home.is_gathered:
        return value
    with _named(home):
        return jax.lax.with_sharding_constraint(value, sharding)


def _named(home: Home) -> AbstractContextManager[Any]:
    return jax.named_scope(home.name) if home.name else nullcontext()


def _value(value: Any) -> Any:
    return value.value if isinstance(value, _Weight) else value


def _turn(value: Any, turns: Sequence[Any]) -> Any:
    for eqn in turns:
        (value,) = run(eqn, [value])
    return value


def _turned(value: Any) -> Any:
    """The weight with nothing waiting, as an equation's inside takes it."""
    if not isinstance(value, _Weight) or not value.turns:
        return value
    return _label([_turn(value.value, value.turns)], [value.turned_home])[0]


def _home(value: Any) -> Home | None:
    return value.home if isinstance(value, _Weight) else None


def _gather(value: Any) -> Any:
    """The whole weight. Its transpose sums the gradient over the batch's shards; `_label` then brings it back home."""
    if not isinstance(value, _Weight):
        return value
    with jax.named_scope("gather"):
        whole = _constrained(value.value, value.home, value.home.used)
    return _turn(whole, value.turns)


def _evaluate(closed: Any, args: Sequence[Any], *, regather: bool, in_loop: bool) -> list[Any]:
    """The outputs of a closed jaxpr, whose arguments may be weights.

    **Arguments:**

    - `regather`: gather again in the backward pass, rather than keep what was gathered; off inside a remat, which does so
        by itself.
    - `in_loop`: inside a scan, whose forward and backward loops XLA cannot merge.
    """
    jaxpr = closed.jaxpr
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, jex.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        ins = [read(atom) for atom in eqn.invars]
        if not any(isinstance(value, _Weight) for value in ins):
            outs = run(eqn, ins)
        elif (home := _view(eqn, ins[0])) is not None:
            outs = [_seen(eqn, ins, home)]
        elif eqn.primitive.name in _INSIDE:
            outs = _INSIDE[eqn.primitive.name](eqn, [_turned(value) for value in ins], regather, in_loop)
        else:
            outs = _use(eqn, ins, regather, in_loop)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [value_of(atom, _gather(read(atom))) for atom in jaxpr.outvars]


def _use(eqn: Any, ins: Sequence[Any], regather: bool, in_loop: bool) -> list[Any]:
    """An equation that computes with weights: gathered for it, and gathered again by its backward pass."""

    def compute(*values: Any) -> list[Any]:
        again = [replace(w, value=v) if isinstance(w, _Weight) else v for w, v in zip(ins, values, strict=True)]
        return run(eqn, list(map(_gather, again)))

    weights = [value.home for value in ins if isinstance(value, _Weight)]
    if regather and not eqn.effects and any(home.is_gathered for home in weights):
        # Without this the backward pass would keep every gathered weight since the forward pass: the whole model.
        compute = jax.checkpoint(compute, prevent_cse=not in_loop)
    with _named(weights[0]):
        return compute(*map(_value, ins))


# --- views of a weight -----------------------------------------------------------------------------------------------
# Each function gives, for every dim of an equation's output, the dim of its operand that it is, None for a new one; or None
# alone where the equation computes something.


def _view(eqn: Any, operand: Any) -> Home | None:
    """The home of what the equation makes of a weight, where that is the weight seen otherwise; None where it is a use."""
    if eqn.primitive.name not in _VIEWS or not isinstance(operand, _Weight):
        return None
    dims = _VIEWS[eqn.primitive.name](eqn)
    return None if dims is None else (operand.turned_home or operand.home).of_view(dims)


def _seen(eqn: Any, ins: Sequence[Any], home: Home) -> _Weight:
    """A view of a weight, a weight itself: parts and casts, which make less to gather, are taken before, the rest waits."""
    weight = ins[0]
    if eqn.primitive.name in _TURNS and len(ins) == 1:
        return _Weight(weight.value, weight.home, (*weight.turns, eqn), home)
    return _label(run(eqn, [_value(_turned(value)) for value in ins]), [home])[0]


def _same(eqn: Any) -> list[int]:
    return list(range(eqn.outvars[0].aval.ndim))


def _squeezed(eqn: Any) -> list[int]:
    removed = {dim % eqn.invars[0].aval.ndim for dim in eqn.params["dimensions"]}
    return [dim for dim in range(eqn.invars[0].aval.ndim) if dim not in removed]


def _broadcast(eqn: Any) -> list[int | None] | None:
    operand, shape, to = eqn.invars[0].aval.shape, eqn.params["shape"], eqn.params["broadcast_dimensions"]
    if len(eqn.invars) > 1 or any(operand[i] != shape[dim] for i, dim in enumerate(to)):
        return None
    if len(shape) != len(operand) and any(size != 1 for dim, size in enumerate(shape) if dim not in to):
        return None  # a real broadcast: a use
    return [to.index(dim) if dim in to else None for dim in range(len(shape))]


def _reshaped(eqn: Any) -> list[int | None] | None:
    """Only reshapes that add or drop dims of size 1."""
    before, after = eqn.invars[0].aval.shape, eqn.params["new_sizes"]
    if len(eqn.invars) > 1 or [n for n in before if n != 1] != [n for n in after if n != 1]:
        return None
    kept = iter([dim for dim, size in enumerate(before) if size != 1])
    return [None if size == 1 else next(kept) for size in after]


def _sliced(eqn: Any) -> list[int | None]:
    """A dim that is cut is a new one."""
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    return [dim if size == before[dim] else None for dim, size in enumerate(after)]


_VIEWS: dict[str, Callable[[Any], Any]] = {
    "convert_element_type": _same,
    "copy": _same,
    "stop_gradient": _same,
    "transpose": lambda eqn: list(eqn.params["permutation"]),
    "squeeze": _squeezed,
    "expand_dims": _broadcast,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshaped,
    "slice": _sliced,
    "dynamic_slice": _sliced,
}
_TURNS = ("transpose", "squeeze", "expand_dims", "broadcast_in_dim", "reshape")


# --- equations with jaxprs inside: the same equation around an inside that gathers -----------------------------------


def _inner(closed: Any, homes: Sequence[Home | None], *, regather: bool, in_loop: bool) -> Any:
    """The closed jaxpr of the same inputs and outputs that gathers the weights among its arguments at their use."""

    def inside(*args: Any) -> list[Any]:
        return _evaluate(closed, _label(args, homes), regather=regather, in_loop=in_loop)

    return jax.make_jaxpr(inside)(*shapes_in(closed))


def _jit(eqn: Any, ins: Sequence[Any], regather: bool, in_loop: bool) -> list[Any]:
    homes = [_home(value) for value in ins]
    inner = _inner(eqn.params["jaxpr"], homes, regather=regather, in_loop=in_loop)
    return run(eqn.replace(params={**eqn.params, "jaxpr": inner}), list(map(_value, ins)))


def _remat(eqn: Any, ins: Sequence[Any], regather: bool, in_loop: bool) -> list[Any]:
    homes = [_home(value) for value in ins]
    inner = _inner(jex.ClosedJaxpr(eqn.params["jaxpr"], ()), homes, regather=False, in_loop=in_loop)
    policy = eqn.params["policy"]

    def keep_nothing_gathered(prim: Any, *args: Any, **params: Any) -> Any:
        return False if prim.name == "sharding_constraint" else policy(prim, *args, **params)

    params = {**eqn.params, "jaxpr": inner.jaxpr, "policy": policy and keep_nothing_gathered}
    assert not inner.consts, "a remat's jaxpr is closed over nothing"
    return run(eqn.replace(params=params), list(map(_value, ins)))


def _scan(eqn: Any, ins: Sequence[Any], regather: bool, in_loop: bool) -> list[Any]:
    n_consts, n_carry = scan_counts(eqn)
    body = eqn.params["jaxpr"]
    # A weight that every iteration reads whole is gathered once, before the loop; one that iterations take slices of, in it.
    consts = [
        value if _only_sliced(var, value, body.jaxpr) else _gather(value)
        for var, value in zip(body.jaxpr.invars, ins[:n_consts], strict=False)
    ]
    carry = list(map(_gather, ins[n_consts : n_consts + n_carry]))
    stacked, slice_homes = [], []
    for value in ins[n_consts + n_carry :]:
        home = _home(value)
        slice_home = home and home.of_view(range(1, value.value.ndim))
        stacked.append(value if slice_home else _gather(value))
        slice_homes.append(slice_home)
    homes = [*map(_home, consts), *[None] * n_carry, *slice_homes]
    inner = _inner(body, homes, regather=regather, in_loop=True)
    return run(eqn.replace(params={**eqn.params, "jaxpr": inner}), list(map(_value, [*consts, *carry, *stacked])))


def _only_sliced(var: Any, value: Any, jaxpr: Any) -> bool:
    """Whether a loop's body only takes slices of a weight, each of which is gathered where it is used."""
    uses = [eqn for eqn in jaxpr.eqns if any(atom is var for atom in eqn.invars)]
    return bool(uses) and all(eqn.primitive.name == "dynamic_slice" and _view(eqn, value) is not None for eqn in uses)


def _cond(eqn: Any, ins: Sequence[Any], regather: bool, in_loop: bool) -> list[Any]:
    """Only the branch that is taken gathers what it uses."""
    homes = list(map(_home, ins[1:]))
    branches = [_inner(branch, homes, regather=regather, in_loop=in_loop) for branch in eqn.params["branches"]]
    return run(eqn.replace(params={**eqn.params, "branches": tuple(branches)}), list(map(_value, ins)))


def _while(eqn: Any, ins: Sequence[Any], regather: bool, in_loop: bool) -> list[Any]:
    """Gathered in each iteration anew, as when tokens are generated: before the loop would be the whole model at once."""
    n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    conditions, consts, carry = ins[:n_cond], ins[n_cond : n_cond + n_body], ins[n_cond + n_body :]
    homes = [*map(_home, consts), *[None] * len(carry)]
    inner = _inner(eqn.params["body_jaxpr"], homes, regather=False, in_loop=True)  # no gradient flows back through it
    values = [*map(_gather, conditions), *map(_value, consts), *map(_gather, carry)]
    return run(eqn.replace(params={**eqn.params, "body_jaxpr": inner}), values)


_INSIDE: dict[str, Callable[..., list[Any]]] = {
    "jit": _jit,
    "pjit": _jit,
    "remat2": _remat,
    "checkpoint": _remat,
    "remat": _remat,
    "scan": _scan,
    "cond": _cond,
    "while": _while,
}
