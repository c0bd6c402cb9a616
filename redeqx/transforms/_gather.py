"""Gather at use: gathers each weight where it is used, and not earlier.

Source: ZeRO-3 (arXiv:1910.02054), by sharding constraints. Under fully sharded data parallelism a weight is stored split
over the axis that also splits the batch. By default XLA then follows the sharding of the weights: it computes the whole
batch on every device and sums activations. This rule constrains each weight, at its use, to its spec without the fsdp axis.
That gives an all-gather before the layer, another in the backward pass, and a reduce-scatter of the gradient, while the
batch stays split.

A weight is gathered in the narrowest dtype that has its numbers: after a cast to fewer bits, such as to bfloat16 to compute,
and before one to more bits, such as of 8-bit codes. Its gradient is summed in the dtype in which it is used.

The model needs no changes. Weights of an equation with a custom derivative, or with an inner jaxpr that cannot be replaced,
are gathered before the equation.

Cost: an all-gather of each weight in the forward pass and one in the backward pass, and a reduction of its gradient. In
tracing, one `jax.checkpoint` for each use of a weight.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

from .._tree import merged
from ..dims import repeats, view
from ..tracing import CUSTOM_DERIVATIVES, REMAT, Place, Rule, Site, Tag, Tagged, has_tag, plain, run
from ._constrain import with_gradient

# The name (`jax.ad_checkpoint.checkpoint_name`) of a gradient that a function with a custom derivative computes in the
# forward pass. It is saved, so that the backward pass neither recomputes the function nor gathers its weights again.
GRADIENT = "gradient made in the forward pass"


@dataclass(frozen=True)
class Shardings:
    """The storage and compute shardings of a weight, or of a view of one. Both specs have one entry for each dim. The name
    is added to the name scopes of the weight's uses, where profiles and the dry run read it."""

    storage: NamedSharding
    compute: NamedSharding
    name: str = ""

    @property
    def is_gathered(self) -> bool:
        """Whether the two shardings differ, so that the weight is gathered to compute."""
        return self.storage.spec != self.compute.spec

    def of_view(self, dims: Sequence[int | None]) -> "Shardings | None":
        """Returns the shardings of the view whose dim `i` is this weight's dim `dims[i]`, or a new dim if that is None.
        Returns None for a view that drops or slices a split dim, since only some of the shards hold the view."""
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

    def store(self, gradient: Any) -> Any:
        """Sums a gradient over the batch's shards, and slices it to the stored shard."""
        return self.constrain(self.constrain(gradient, self.compute), self.storage)

    def scope(self) -> AbstractContextManager[Any]:
        return jax.named_scope(self.name) if self.name else nullcontext()


@dataclass(frozen=True)
class _Weight(Tag):
    """Tags a value that is a parameter or a view of one.

    Transposes and similar views stay pending until the value is gathered. All uses then gather the same array, once a pass
    if XLA merges equal gathers, and the backward pass saves the stored shard. If a transposed copy were gathered, XLA might
    save the gathered copy.
    """

    shardings: Shardings
    pending: tuple[Any, ...] = ()  # the equations of the pending views, in their order
    of_view: Shardings | None = None  # the shardings after the pending views, or None if nothing is pending
    stored_in: Any = None  # the narrower dtype from which the weight was cast without loss; None if there is none

    def begin(self, value: Any) -> Tagged:
        """Constrains the weight to its storage sharding.

        This has no effect in the forward pass. In the backward pass its transpose acts on the gradient: the gradients of all
        uses are added, then sliced to the device's shard, already inside the loop over layers.
        """
        return Tagged(self.shardings.constrain(value, self.shardings.storage), self)

    def release(self, value: Any) -> Any:
        """Gathers the weight. The transpose sums the gradient over the batch's shards, and that of `begin` slices it."""
        if self.stored_in is None:
            return viewed(self.pending, self.gathered(value))
        # The casts, which lose nothing, have no part in the derivative.
        return self.gathered_with(value, lambda gradient: self.shardings.constrain(gradient, self.shardings.compute))

    def gathered(self, value: Any) -> Any:
        """Returns the value, constrained to the compute sharding in the narrowest dtype that holds it."""
        of = self.shardings
        with jax.named_scope("gather"):
            if self.stored_in is None or not of.is_gathered:
                return of.constrain(value, of.compute)
            narrow = of.constrain(value.astype(self.stored_in), of.storage)  # else XLA might gather before the cast
            return of.constrain(narrow, of.compute).astype(value.dtype)

    def gathered_with(self, value: Any, of_gradient: Callable[[Any], Any]) -> Any:
        """Returns the gathered value after the pending views. The gather's derivative is another function."""
        return viewed(self.pending, with_gradient(self.gathered, of_gradient)(value))

    def materialized(self, value: Any) -> Tagged:
        """Applies the pending views, as needed to pass the weight into an equation's inner jaxpr."""
        if self.of_view is None:
            return Tagged(value, self)
        return _Weight(self.of_view, stored_in=self.stored_in).begin(viewed(self.pending, value))

    def enter(self, value: Any, place: Place) -> tuple[Any, Tag | None]:
        weight = self.materialized(value)
        tag: _Weight = weight.tag  # pyright: ignore[reportAssignmentType]
        if place.kind == "slice":
            of_slice = tag.shardings.of_view(range(1, weight.value.ndim))
            return (plain(weight), None) if of_slice is None else (weight.value, _Weight(of_slice, stored_in=tag.stored_in))
        # A while loop, such as one that generates tokens, gathers weights in each iteration: gathering before the loop would
        # hold the whole model at once. A weight that each iteration of a scan reads as a whole is gathered before the scan.
        is_before = place.eqn.primitive.name == "scan" and not _is_only_sliced(place, tag)
        if place.kind == "carry" or place.inner.role == "condition" or is_before:
            return plain(weight), None
        return weight.value, tag


def viewed(eqns: Sequence[Any], value: Any) -> Any:
    """Returns a value after several views."""
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
    """Gathers weights where they are used, given the shardings of the function's first inputs. It ignores those without
    any."""

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
        if eqn.primitive.name == REMAT:
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
    dtypes = {weight.stored_in for weight in weights}
    stored_in = dtypes.pop() if len(dtypes) == 1 else None
    return stack and _Weight(replace(stack, name=merged([each.name for each in shardings])), stored_in=stored_in)


def _is_weight(value: Any) -> bool:
    return has_tag(value, _Weight)


@dataclass(eq=False)
class _Gradients:
    """How the gradients of one equation with a custom derivative reach the weights that it takes.

    Its rule may call `sum_gradient` while JAX differentiates the equation. Gradients are then summed and sliced where they
    are made, so that the forward pass saves a slice, and the derivative of the gather has nothing left to sum.
    """

    shardings: Sequence[Shardings | None]  # of its operands, after pending views; None for those that are no weights
    summed: set[str] = field(default_factory=set)  # the names of the weights for whose gradients the rule did that

    def gather(self, weight: Tagged) -> Any:
        tag: _Weight = weight.tag  # pyright: ignore[reportAssignmentType]
        of = tag.shardings

        def store(gradient: Any) -> Any:
            return of.constrain(gradient, of.storage) if of.name in self.summed else of.store(gradient)

        return tag.gathered_with(weight.value, store)


_gradients: ContextVar[_Gradients | None] = ContextVar("the gradients of the equation that is differentiated", default=None)


def weights_of_derivative() -> Sequence[Shardings]:
    """For the derivative rule of a function with a custom derivative: returns the shardings of the weights that it takes."""
    gradients = _gradients.get()
    return [] if gradients is None else [of for of in gradients.shardings if of is not None]


def sum_gradient(gradient: Any, operand: int) -> Any:
    """For the derivative rule of a function with a custom derivative that computes gradients in the forward pass: sums the
    gradient of a weight over the batch's shards, and slices it to the stored shard. Returns any other gradient unchanged.
    `operand` is the number of the weight among the function's operands, all arrays in their order."""
    gradients = _gradients.get()
    shardings = None if gradients is None or operand >= len(gradients.shardings) else gradients.shardings[operand]
    if gradients is None or shardings is None or len(shardings.storage.spec) != gradient.ndim:
        return gradient
    gradients.summed.add(shardings.name)
    return shardings.store(gradient)


def stored(value: Any) -> tuple[Any, Shardings] | None:
    """Returns a weight of `GatherAtUse` as it is stored, and its shardings; None for any other value."""
    if not _is_weight(value):
        return None
    weight = value.tag.materialized(value.value)
    return weight.value, weight.tag.shardings


def used_as(value: Any, spec: P) -> Tagged:
    """Returns a weight of `GatherAtUse` whose next uses take it with this spec, rather than with that of the plan."""
    weight = value.tag.materialized(value.value)
    shardings = replace(weight.tag.shardings, compute=NamedSharding(weight.tag.shardings.compute.mesh, spec))
    return Tagged(weight.value, replace(weight.tag, shardings=shardings))


def gather_without_derivative(value: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Gathers a weight without the gather's derivative. Returns the gathered weight and the function `store`.

    The caller must apply `store` to the weight's gradient: it sums the gradient over the batch's shards and slices it to the
    stored shard, in the gradient's dtype. The derivative of a gather would do this in the weight's dtype. For a value that
    is no weight of `GatherAtUse`, returns its plain value and the identity.
    """
    if not _is_weight(value):
        return plain(value), lambda gradient: gradient
    weight: _Weight = value.tag
    return weight.gathered_with(value.value, lambda gradient: gradient), (weight.of_view or weight.shardings).store


def _compute_with_weights(eqn: Any, ins: Sequence[Any], weights: Sequence[_Weight], site: Site) -> Sequence[Any]:
    """Computes an equation that uses weights: gathers them before it, and again in its backward pass."""
    gradients = None
    if eqn.primitive.name in CUSTOM_DERIVATIVES and site.around == ():
        of_views = [value.tag.of_view or value.tag.shardings if _is_weight(value) else None for value in ins]
        gradients = _Gradients(of_views)

    def compute(*values: Any) -> list[Any]:
        given = [Tagged(v, old.tag) if isinstance(old, Tagged) else v for old, v in zip(ins, values, strict=True)]
        if gradients is not None:
            given = [gradients.gather(x) if _is_weight(x) else x for x in given]
        return site.rest(eqn, given)

    # Without this, every gathered weight would be saved for the backward pass: the whole model.
    if any(weight.shardings.is_gathered for weight in weights):
        compute = computed_again(compute, eqn, site)
    with weights[0].shardings.scope(), _differentiating(gradients):
        return compute(*(value.value if isinstance(value, Tagged) else value for value in ins))


def computed_again(compute: Callable[..., Any], eqn: Any, site: Site) -> Callable[..., Any]:
    """Returns what computes an equation, in a remat where none is around it already."""
    if eqn.effects or {REMAT, "while"} & {*site.around}:  # no gradient flows through a while loop
        return compute
    # XLA does not merge the forward and the backward loop of a scan.
    keep = jax.checkpoint_policies.save_only_these_names(GRADIENT)
    return jax.checkpoint(compute, prevent_cse="scan" not in site.around, policy=keep)


@contextmanager
def _differentiating(gradients: _Gradients | None) -> Iterator[None]:
    token = _gradients.set(gradients)
    try:
        yield
    finally:
        _gradients.reset(token)


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
        return Tagged(ins[0].value, _Weight(weight.shardings, (*weight.pending, eqn), of_view, weight.stored_in))
    operands = [weight.materialized(ins[0].value).value, *map(plain, ins[1:])]
    narrow = eqn.invars[0].aval.dtype if weight.stored_in is None else weight.stored_in
    stored_in = narrow if _holds(eqn.outvars[0].aval.dtype, narrow) else None
    return _Weight(of_view, stored_in=stored_in).begin(run(eqn, operands)[0])


def _holds(wide: Any, narrow: Any) -> bool:
    """Whether a floating dtype has more bits than another dtype, and all of its numbers."""
    if not jnp.issubdtype(wide, jnp.floating) or wide.itemsize <= narrow.itemsize:
        return False
    if jnp.issubdtype(narrow, jnp.integer):
        return jnp.iinfo(narrow).bits <= jnp.finfo(wide).nmant + 1
    if not jnp.issubdtype(narrow, jnp.floating):
        return False
    of_wide, of_narrow = jnp.finfo(wide), jnp.finfo(narrow)
    return of_wide.nmant >= of_narrow.nmant and of_wide.maxexp >= of_narrow.maxexp and of_wide.minexp <= of_narrow.minexp
