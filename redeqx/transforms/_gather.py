"""Gather at use: each weight is gathered where it is used, and nowhere before.

Source: ZeRO-3 (arXiv:1910.02054), by sharding constraints. Under fully sharded data parallelism a weight is stored split
over the axis that also splits the batch. Left to itself XLA then follows the weights: it computes the whole batch on every
device and sums activations. So each weight is constrained, at its use, to its spec without the fsdp axis: an all-gather
before the layer, again in the backward pass, and a reduce-scatter of the gradient, with the batch split throughout.

The model need not know. An equation that brings its own derivative, or whose inside is not followed, gets its weights
gathered before it.

Cost: a gather of each weight in the forward pass and one in the backward pass, a reduction of its gradient; in tracing, one
`jax.checkpoint` for each use of a weight.
"""

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
from jax.sharding import NamedSharding, PartitionSpec as P

from ..tracing import REMATS, Place, Rule, Site, Tag, Tagged, has_tag, plain, repeats, run, view

# The name (`jax.ad_checkpoint.checkpoint_name`) of a gradient that a function with its own derivative makes in the forward
# pass. It is kept, so that the function is not computed again with weights that are gathered again.
GRADIENT = "gradient made in the forward pass"


@dataclass(frozen=True)
class Shardings:
    """How a weight (or a view of one) is sharded: where it is stored, and where it is computed with.

    Both specs have one entry a dim. The name is written into the name scopes of its uses, where profiles and the dry run
    find it.
    """

    storage: NamedSharding
    compute: NamedSharding
    name: str = ""

    @property
    def is_gathered(self) -> bool:
        """Whether the two differ."""
        return self.storage.spec != self.compute.spec

    def of_view(self, dims: Sequence[int | None]) -> "Shardings | None":
        """The shardings of the view whose dim `i` is this weight's dim `dims[i]`, None for a new dim.

        There are none for a view that leaves out, or cuts, a dim that is split: parts of it are on some of the shards only.
        """
        specs = self.storage.spec, self.compute.spec
        if not {dim for spec in specs for dim, axes in enumerate(spec) if axes is not None} <= set(dims):
            return None
        storage, compute = (P(*(None if dim is None else spec[dim] for dim in dims)) for spec in specs)
        return Shardings(NamedSharding(self.storage.mesh, storage), NamedSharding(self.compute.mesh, compute), self.name)

    def constrain(self, value: Any, sharding: NamedSharding) -> Any:
        if not self.is_gathered:
            return value
        with self.scope():
            return jax.lax.with_sharding_constraint(value, sharding)

    def scope(self) -> AbstractContextManager[Any]:
        return jax.named_scope(self.name) if self.name else nullcontext()


@dataclass(frozen=True)
class _Weight(Tag):
    """A value that still is (a view of) a parameter.

    Transposes and the like are pending until it is gathered. So all uses gather the same array, once in a pass where XLA
    finds them equal, and the backward pass is left the shard as it is stored: of a transposed copy XLA may choose to keep
    the gathered one.

    **Arguments:**

    - `pending`: the equations of those transposes, in their order.
    - `of_view`: the shardings after them; None where nothing is pending.
    """

    shardings: Shardings
    pending: tuple[Any, ...] = ()
    of_view: Shardings | None = None

    def begin(self, value: Any) -> Tagged:
        """The weight, constrained to its storage.

        That changes nothing here. Its transpose does, in the backward pass: gradients of all uses are added first, then cut
        to the shard that the device keeps, inside the loop over layers already.
        """
        return Tagged(self.shardings.constrain(value, self.shardings.storage), self)

    def release(self, value: Any) -> Any:
        """The gathered weight. Its transpose sums the gradient over the batch's shards; `begin` then cuts it."""
        with jax.named_scope("gather"):
            value = self.shardings.constrain(value, self.shardings.compute)
        return _apply(self.pending, value)

    def settled(self, value: Any) -> Tagged:
        """The weight with nothing pending, as the inside of an equation takes it."""
        if self.of_view is None:
            return Tagged(value, self)
        return _Weight(self.of_view).begin(_apply(self.pending, value))

    def enter(self, value: Any, place: Place) -> tuple[Any, Tag | None]:
        weight = self.settled(value)
        tag: _Weight = weight.tag  # pyright: ignore[reportAssignmentType]
        if place.kind == "slice":
            of_slice = tag.shardings.of_view(range(1, weight.value.ndim))
            return (plain(weight), None) if of_slice is None else (weight.value, _Weight(of_slice))
        # In a while loop weights are gathered in each iteration anew, as when tokens are generated: before the loop that
        # would be the whole model at once. A weight that every iteration of a scan reads whole is gathered before it.
        is_before = place.eqn.primitive.name == "scan" and not _is_only_sliced(place, tag)
        if place.kind == "carry" or place.inner.role == "condition" or is_before:
            return plain(weight), None
        return weight.value, tag


def _apply(eqns: Sequence[Any], value: Any) -> Any:
    for eqn in eqns:
        (value,) = run(eqn, [value])
    return value


def _is_only_sliced(place: Place, weight: _Weight) -> bool:
    """Whether a loop's body only takes slices of a weight, each of which is gathered where it is used."""
    uses = [eqn for eqn in place.inner.closed.jaxpr.eqns if any(atom is place.var for atom in eqn.invars)]
    return bool(uses) and all(eqn.primitive.name == "dynamic_slice" and _seen(eqn, weight) is not None for eqn in uses)


@dataclass(frozen=True)
class GatherAtUse(Rule):
    """Gathers weights where they are used.

    **Arguments:**

    - `shardings`: for each of the function's first inputs its shardings; None for one that is left alone.
    """

    shardings: Sequence[Shardings | None]
    follows: ClassVar = _Weight

    def tag(self, args: Sequence[Any]) -> Sequence[Any]:
        first = [
            arg if shardings is None else _Weight(shardings).begin(arg)
            for arg, shardings in zip(args, self.shardings, strict=False)
        ]
        return [*first, *args[len(first) :]]

    def __call__(self, eqn: Any, ins: Sequence[Any], site: Site) -> Sequence[Any] | None:
        weights = [value.tag for value in ins if _is_weight(value)]
        if _is_weight(ins[0]) and (of_view := _seen(eqn, ins[0].tag)) is not None:
            return [_view(eqn, ins, of_view)]
        if eqn.primitive.name == "stack" and len(weights) == len(ins) and (stack := _stack_of(eqn, weights)) is not None:
            values = [weight.settled(each.value).value for weight, each in zip(weights, ins, strict=True)]
            return [stack.begin(run(eqn, values)[0])]
        if eqn.primitive.name == "optimization_barrier":  # each output is its operand
            kept = [value.tag.settled(value.value) if _is_weight(value) else value for value in ins]
            outs = run(eqn, [value.value if _is_weight(value) else plain(value) for value in kept])
            return [Tagged(out, value.tag) if _is_weight(value) else out for out, value in zip(outs, kept, strict=True)]
        if eqn.primitive.name in REMATS:
            return site.rest(_keeping_nothing_gathered(eqn), ins)
        if site.enters(eqn):
            return None
        return _use(eqn, ins, weights, site)


def _stack_of(eqn: Any, weights: Sequence[_Weight]) -> _Weight | None:
    """What weights that are sharded alike are along a dim of their own; None for any other weights."""
    of, axis = [weight.of_view or weight.shardings for weight in weights], eqn.params["axis"]
    if any((each.storage, each.compute) != (of[0].storage, of[0].compute) for each in of):
        return None
    n_dims = len(eqn.outvars[0].aval.shape)
    stack = of[0].of_view([None if i == axis else i - (i > axis) for i in range(n_dims)])
    return stack and _Weight(replace(stack, name=_common_name([each.name for each in of])))


def _common_name(names: Sequence[str]) -> str:
    """One name for weights of several blocks: theirs, with `*` for the numbers in which they differ."""
    parts = [re.split(r"(\d+)", name) for name in names]
    if len(set(map(len, parts))) > 1:
        return names[0]
    return "".join(of[0] if len(set(of)) == 1 else "*" for of in zip(*parts, strict=True))


def _is_weight(value: Any) -> bool:
    return has_tag(value, _Weight)


def gathered(value: Any) -> tuple[Any, Callable[[Any], Any]]:
    """A weight that is gathered without a derivative, and what its user does with the weight's gradient instead: sum it over
    the batch's shards, and cut it to the shard that is stored. In a dtype of the user's choice, as the derivative of the
    gather has that of the weight. A value that is no such weight is plain, and nothing is done with its gradient.
    """
    if not _is_weight(value):
        return plain(value), lambda gradient: gradient
    weight: _Weight = value.tag
    of_view = weight.of_view or weight.shardings

    @jax.custom_vjp
    def gather(x: Any) -> Any:
        with jax.named_scope("gather"):
            return weight.shardings.constrain(x, weight.shardings.compute)

    gather.defvjp(lambda x: (gather(x), None), lambda _, gradient: (gradient,))

    def store(gradient: Any) -> Any:
        return of_view.constrain(of_view.constrain(gradient, of_view.compute), of_view.storage)

    return _apply(weight.pending, gather(value.value)), store


def _use(eqn: Any, ins: Sequence[Any], weights: Sequence[_Weight], site: Site) -> Sequence[Any]:
    """An equation that computes with weights: gathered for it, and gathered again by its backward pass."""

    def compute(*values: Any) -> list[Any]:
        tagged = [Tagged(v, old.tag) if isinstance(old, Tagged) else v for old, v in zip(ins, values, strict=True)]
        return site.rest(eqn, tagged)

    # A remat gathers again by itself, and no gradient flows back through a while loop.
    regathers = not {*REMATS, "while"} & {*site.around}
    if regathers and not eqn.effects and any(weight.shardings.is_gathered for weight in weights):
        # Without this the backward pass would keep every gathered weight since the forward pass: the whole model. The
        # forward and backward loops of a scan are not merged by XLA, so that nothing need prevent it there.
        keep = jax.checkpoint_policies.save_only_these_names(GRADIENT)
        compute = jax.checkpoint(compute, prevent_cse="scan" not in site.around, policy=keep)
    with weights[0].shardings.scope():
        return compute(*(value.value if isinstance(value, Tagged) else value for value in ins))


def _keeping_nothing_gathered(eqn: Any) -> Any:
    """A remat whose policy keeps no gathered weight for the backward pass."""
    policy = eqn.params["policy"]

    def keep(prim: Any, *args: Any, **params: Any) -> Any:
        return False if prim.name == "sharding_constraint" else policy(prim, *args, **params)

    return eqn if policy is None else eqn.replace(params={**eqn.params, "policy": keep})


# --- views of a weight -----------------------------------------------------------------------------------------------

_PENDING = ("transpose", "squeeze", "broadcast_in_dim", "reshape")
_TAKEN = ("convert_element_type", "copy", "stop_gradient", "slice", "dynamic_slice")


def _seen(eqn: Any, weight: _Weight) -> Shardings | None:
    """The shardings of what the equation makes of a weight, where that is a view of it; None where it is a use."""
    if eqn.primitive.name not in (*_PENDING, *_TAKEN) or repeats(eqn):
        return None
    dims = view(eqn)
    return None if dims is None else (weight.of_view or weight.shardings).of_view(dims)


def _view(eqn: Any, ins: Sequence[Any], of_view: Shardings) -> Tagged:
    """A view of a weight, a weight itself: parts and casts, which make less to gather, are taken before, the rest waits."""
    weight: _Weight = ins[0].tag
    if eqn.primitive.name in _PENDING:
        return Tagged(ins[0].value, _Weight(weight.shardings, (*weight.pending, eqn), of_view))
    operands = [weight.settled(ins[0].value).value, *map(plain, ins[1:])]
    return _Weight(of_view).begin(run(eqn, operands)[0])
