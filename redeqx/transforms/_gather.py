"""Gather at use: gathers each weight where it is used, and not earlier.

Source: ZeRO-3 (arXiv:1910.02054), by sharding constraints. Under fully sharded data parallelism a weight is stored split
over the axis that also splits the batch. By default XLA then follows the sharding of the weights: it computes the whole
batch on every device and sums activations. This rule constrains each weight, at its use, to its spec without the fsdp axis.
That gives an all-gather before the layer, another in the backward pass, and a reduce-scatter of the gradient, while the
batch stays split.

The model needs no changes. Weights of an equation with a custom derivative, or with an inner jaxpr that cannot be replaced,
are gathered before the equation.

Cost: an all-gather of each weight in the forward pass and one in the backward pass, and a reduction of its gradient. In
tracing, one `jax.checkpoint` for each use of a weight.
"""

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
from jax.sharding import NamedSharding, PartitionSpec as P

from ..dims import repeats, view
from ..tracing import REMATS, Place, Rule, Site, Tag, Tagged, has_tag, plain, run

# The name (`jax.ad_checkpoint.checkpoint_name`) of a gradient that a function with a custom derivative computes in the
# forward pass. It is saved, so that the backward pass neither recomputes the function nor gathers its weights again.
GRADIENT = "gradient made in the forward pass"


@dataclass(frozen=True)
class Shardings:
    """The storage and compute shardings of a weight, or of a view of one.

    Both specs have one entry for each dim. The name is added to the name scopes of the weight's uses, where profiles and the
    dry run read it.
    """

    storage: NamedSharding
    compute: NamedSharding
    name: str = ""

    @property
    def is_gathered(self) -> bool:
        """Whether the two shardings differ, so that the weight is gathered to compute."""
        return self.storage.spec != self.compute.spec

    def of_view(self, dims: Sequence[int | None]) -> "Shardings | None":
        """Returns the shardings of the view whose dim `i` is this weight's dim `dims[i]`, or a new dim if that is None.

        Returns None for a view that drops or slices a split dim, since only some of the shards hold the view.
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
    """Tags a value that is a parameter or a view of one.

    Transposes and similar views stay pending until the value is gathered. All uses then gather the same array, once a pass
    if XLA merges equal gathers, and the backward pass saves the stored shard. If a transposed copy were gathered, XLA might
    save the gathered copy.

    **Arguments:**

    - `pending`: the equations of the pending views, in their order.
    - `of_view`: the shardings after the pending views, or None if nothing is pending.
    """

    shardings: Shardings
    pending: tuple[Any, ...] = ()
    of_view: Shardings | None = None

    def begin(self, value: Any) -> Tagged:
        """Constrains the weight to its storage sharding.

        This has no effect in the forward pass. In the backward pass its transpose acts on the gradient: the gradients of all
        uses are added, then sliced to the device's shard, already inside the loop over layers.
        """
        return Tagged(self.shardings.constrain(value, self.shardings.storage), self)

    def release(self, value: Any) -> Any:
        """Gathers the weight. The transpose sums the gradient over the batch's shards, and that of `begin` slices it."""
        with jax.named_scope("gather"):
            value = self.shardings.constrain(value, self.shardings.compute)
        return _apply(self.pending, value)

    def materialized(self, value: Any) -> Tagged:
        """Applies the pending views, as needed to pass the weight into an equation's inner jaxpr."""
        if self.of_view is None:
            return Tagged(value, self)
        return _Weight(self.of_view).begin(_apply(self.pending, value))

    def enter(self, value: Any, place: Place) -> tuple[Any, Tag | None]:
        weight = self.materialized(value)
        tag: _Weight = weight.tag  # pyright: ignore[reportAssignmentType]
        if place.kind == "slice":
            of_slice = tag.shardings.of_view(range(1, weight.value.ndim))
            return (plain(weight), None) if of_slice is None else (weight.value, _Weight(of_slice))
        # A while loop, such as one that generates tokens, gathers weights in each iteration: gathering before the loop would
        # hold the whole model at once. A weight that each iteration of a scan reads as a whole is gathered before the scan.
        is_before = place.eqn.primitive.name == "scan" and not _is_only_sliced(place, tag)
        if place.kind == "carry" or place.inner.role == "condition" or is_before:
            return plain(weight), None
        return weight.value, tag


def _apply(eqns: Sequence[Any], value: Any) -> Any:
    for eqn in eqns:
        (value,) = run(eqn, [value])
    return value


def _is_only_sliced(place: Place, weight: _Weight) -> bool:
    """Whether a loop's body only takes slices of a weight. Each slice is then gathered at its use."""
    uses = [eqn for eqn in place.inner.closed.jaxpr.eqns if any(atom is place.var for atom in eqn.invars)]
    return bool(uses) and all(
        eqn.primitive.name == "dynamic_slice" and _view_shardings(eqn, weight) is not None for eqn in uses
    )


@dataclass(frozen=True)
class GatherAtUse(Rule):
    """Gathers weights where they are used.

    **Arguments:**

    - `shardings`: the shardings of each of the function's first inputs. None for an input that the rule ignores.
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
        if _is_weight(ins[0]) and (of_view := _view_shardings(eqn, ins[0].tag)) is not None:
            return [_compute_view(eqn, ins, of_view)]
        if eqn.primitive.name == "stack" and len(weights) == len(ins) and (stack := _stack_of(eqn, weights)) is not None:
            values = [weight.materialized(each.value).value for weight, each in zip(weights, ins, strict=True)]
            return [stack.begin(run(eqn, values)[0])]
        if eqn.primitive.name == "optimization_barrier":  # output i is operand i
            kept = [value.tag.materialized(value.value) if _is_weight(value) else value for value in ins]
            outs = run(eqn, [value.value if _is_weight(value) else plain(value) for value in kept])
            return [Tagged(out, value.tag) if _is_weight(value) else out for out, value in zip(outs, kept, strict=True)]
        if eqn.primitive.name in REMATS:
            return site.rest(_without_saving_gathered(eqn), ins)
        if site.enters(eqn):
            return None
        return _compute_with_weights(eqn, ins, weights, site)


def _stack_of(eqn: Any, weights: Sequence[_Weight]) -> _Weight | None:
    """Returns the tag of a stack of weights along a new dim, or None unless they are all sharded alike."""
    shardings, axis = [weight.of_view or weight.shardings for weight in weights], eqn.params["axis"]
    if any((each.storage, each.compute) != (shardings[0].storage, shardings[0].compute) for each in shardings):
        return None
    n_dims = len(eqn.outvars[0].aval.shape)
    stack = shardings[0].of_view([None if i == axis else i - (i > axis) for i in range(n_dims)])
    return stack and _Weight(replace(stack, name=_common_name([each.name for each in shardings])))


def _common_name(names: Sequence[str]) -> str:
    """Merges the names of the weights of several blocks into one, with `*` for the numbers in which they differ."""
    parts = [re.split(r"(\d+)", name) for name in names]
    if len(set(map(len, parts))) > 1:
        return names[0]
    return "".join(same[0] if len(set(same)) == 1 else "*" for same in zip(*parts, strict=True))


def _is_weight(value: Any) -> bool:
    return has_tag(value, _Weight)


def gather_without_derivative(value: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Gathers a weight without the gather's derivative. Returns the gathered weight and the function `store`.

    The caller must apply `store` to the weight's gradient: it sums the gradient over the batch's shards and slices it to the
    stored shard, in the gradient's dtype. The derivative of a gather would do this in the weight's dtype. For a value that
    is no weight of `GatherAtUse`, returns its plain value and the identity.
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


def _compute_with_weights(eqn: Any, ins: Sequence[Any], weights: Sequence[_Weight], site: Site) -> Sequence[Any]:
    """Computes an equation that uses weights: gathers them before it, and again in its backward pass."""

    def compute(*values: Any) -> list[Any]:
        tagged = [Tagged(v, old.tag) if isinstance(old, Tagged) else v for old, v in zip(ins, values, strict=True)]
        return site.rest(eqn, tagged)

    # A remat gathers again already, and no gradient flows through a while loop.
    regathers = not {*REMATS, "while"} & {*site.around}
    if regathers and not eqn.effects and any(weight.shardings.is_gathered for weight in weights):
        # Without this, every gathered weight would be saved for the backward pass: the whole model. `prevent_cse` is not
        # needed inside a scan, because XLA does not merge its forward and backward loops.
        keep = jax.checkpoint_policies.save_only_these_names(GRADIENT)
        compute = jax.checkpoint(compute, prevent_cse="scan" not in site.around, policy=keep)
    with weights[0].shardings.scope():
        return compute(*(value.value if isinstance(value, Tagged) else value for value in ins))


def _without_saving_gathered(eqn: Any) -> Any:
    """Returns a remat equation whose policy saves no gathered weight for the backward pass."""
    policy = eqn.params["policy"]

    def keep(prim: Any, *args: Any, **params: Any) -> Any:
        return False if prim.name == "sharding_constraint" else policy(prim, *args, **params)

    return eqn if policy is None else eqn.replace(params={**eqn.params, "policy": keep})


# --- views of a weight -----------------------------------------------------------------------------------------------

_PENDING = ("transpose", "squeeze", "broadcast_in_dim", "reshape")
_APPLIED = ("convert_element_type", "copy", "stop_gradient", "slice", "dynamic_slice")


def _view_shardings(eqn: Any, weight: _Weight) -> Shardings | None:
    """Returns the shardings of an equation's output if that is a view of the weight, or None for any other equation."""
    if eqn.primitive.name not in (*_PENDING, *_APPLIED) or repeats(eqn):
        return None
    dims = view(eqn)
    return None if dims is None else (weight.of_view or weight.shardings).of_view(dims)


def _compute_view(eqn: Any, ins: Sequence[Any], of_view: Shardings) -> Tagged:
    """Computes a view of a weight. Slices and casts, which gather less, are applied at once. Other views stay pending."""
    weight: _Weight = ins[0].tag
    if eqn.primitive.name in _PENDING:
        return Tagged(ins[0].value, _Weight(weight.shardings, (*weight.pending, eqn), of_view))
    operands = [weight.materialized(ins[0].value).value, *map(plain, ins[1:])]
    return _Weight(of_view).begin(run(eqn, operands)[0])
