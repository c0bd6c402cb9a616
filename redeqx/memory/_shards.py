"""The shards of a program's values: which mesh axes split each of their dims, and their bytes on one device.

Follows the shardings of the inputs forward through a jaxpr, from operands to outputs, and reads the constraints in it, as
XLA's propagation does. It is an estimate: XLA also propagates backward, and may choose otherwise where operands differ.
"""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec as P

from .._tree import bytes_in_memory
from ..dims import Related, is_elementwise
from ..machine import axes_of, n_shards
from ..tracing import Env, flow, insides, is_variable

Axes = tuple[tuple[str, ...], ...]  # for each dim of a value, the axes that split it


class Shards:
    """The shards of a closed jaxpr's values, including those inside its loops, branches and calls, given the specs of its
    inputs, None for replicated ones."""

    def __init__(self, closed: Any, specs: Sequence[P | None], mesh: Mesh):
        self.mesh = mesh
        self._axes = Env(literal=lambda _: ())
        inputs = [self._of_spec(spec, var.aval) for spec, var in zip(specs, closed.jaxpr.invars, strict=True)]
        self._axes.update(zip(closed.jaxpr.invars, inputs, strict=True))
        flow(
            closed,
            inputs,
            self._rule,
            _joined,
            visit=self._visit,
            entry=lambda axes: axes[1:],
            stack=lambda axes: ((), *axes),
        )

    def spec(self, atom: Any) -> P:
        """Returns the spec of a value."""
        return P(*(axes or None for axes in self._axes.get(atom, ())))

    def axes(self, atom: Any) -> frozenset[str]:
        """Returns all axes that split a value."""
        return frozenset(axis for axes in self._axes.get(atom, ()) for axis in axes)

    def n_bytes(self, atom: Any) -> int:
        """Returns the bytes of a value on one device."""
        shape, dtype = getattr(atom.aval, "shape", ()), getattr(atom.aval, "dtype", jnp.float32)
        axes = self._axes.get(atom, ()) or ((),) * len(shape)
        sizes = [-(-size // n_shards(of_dim, self.mesh)) for size, of_dim in zip(shape, axes, strict=False)]
        return bytes_in_memory(sizes, dtype)

    def n_devices(self, *atoms: Any) -> int:
        """Returns over how many devices the work of an equation is split, given its operands and outputs."""
        return n_shards(frozenset[str]().union(*map(self.axes, atoms)), self.mesh)

    def _of_spec(self, spec: P | None, aval: Any) -> Axes:
        """Returns the axes of an input's dims, without those that do not divide them."""
        shape = getattr(aval, "shape", ())
        entries = [axes_of(entry) for entry in (spec or ())] + [()] * len(shape)
        return self._used_once([tuple(a for a in axes if a in self.mesh.shape) for axes in entries[: len(shape)]], shape)

    def _used_once(self, dims: Sequence[tuple[str, ...]], shape: Sequence[int]) -> Axes:
        """Returns axes of dims, each axis once, and none that splits a dim into more parts than it has entries."""
        used, found = set[str](), []
        for axes, size in zip(dims, shape, strict=True):
            own = tuple(axis for axis in axes if axis not in used and self.mesh.shape[axis] > 1)
            own = own if n_shards(own, self.mesh) <= size else ()
            used |= set(own)
            found.append(own)
        return tuple(found)

    def _visit(self, eqn: Any, ins: Sequence[Axes], outs: Sequence[Axes]) -> None:
        """Notes the axes of outputs, and of operands, among which are the inputs of inner jaxprs."""
        pairs = zip((*eqn.invars, *eqn.outvars), (*ins, *outs), strict=True)
        self._axes.update((atom, axes) for atom, axes in pairs if is_variable(atom))

    def _rule(self, eqn: Any, ins: Sequence[Axes]) -> Sequence[Axes] | None:
        inner = insides(eqn)
        if eqn.primitive.name == "optimization_barrier" or any(each.role != "manual" for each in inner):
            # What is inside is followed by `flow`, in the same way.
            return None
        shapes = [getattr(var.aval, "shape", ()) for var in eqn.outvars]
        if inner:  # a shard_map
            specs = eqn.params.get("out_specs", ())
            outs = [self._of_spec(spec, var.aval) for spec, var in zip(specs, eqn.outvars, strict=False)]
            outs += [((),) * len(shape) for shape in shapes[len(outs) :]]
        elif eqn.primitive.name == "sharding_constraint":
            outs = [self._constrained(eqn, ins[0])]
        else:
            outs = [self._used_once(dims, shape) for dims, shape in zip(_through(eqn, ins), shapes, strict=True)]
        return outs

    def _constrained(self, eqn: Any, before: Axes) -> Axes:
        spec, shape = getattr(eqn.params["sharding"], "spec", None), eqn.outvars[0].aval.shape
        if spec is None:
            return before
        free = eqn.params.get("unconstrained_dims", frozenset())
        entries = [*spec, *[None] * (len(shape) - len(spec))]
        before = before or ((),) * len(shape)
        dims = [
            before[i] if i in free or entry is P.UNCONSTRAINED else tuple(axes_of(entry)) for i, entry in enumerate(entries)
        ]
        fixed = {axis for i, axes in enumerate(dims) if i not in free for axis in axes}
        dims = [tuple(a for a in axes if i not in free or a not in fixed) for i, axes in enumerate(dims)]
        return self._used_once(dims, shape)


def _joined(values: Sequence[Axes]) -> Axes:
    """Joins the axes of a value where paths meet, such as zeros before a loop and what the loop adds to them."""
    used, found = set[str](), []
    for own in (max(of_dim, key=len) for of_dim in zip_longest(*values, fillvalue=())):
        found.append(tuple(axis for axis in own if axis not in used))
        used |= set(own)
    return tuple(found)


def _through(eqn: Any, ins: Sequence[Axes]) -> list[list[tuple[str, ...]]]:
    """Returns the axes of an equation's outputs, by how it relates dims."""
    shapes = [getattr(var.aval, "shape", ()) for var in eqn.outvars]
    empty = [[()] * len(shape) for shape in shapes]
    if not any(any(axes) for axes in ins):
        return empty
    if is_elementwise(eqn):
        found: list[tuple[str, ...]] = [()] * len(shapes[0])
        for axes, atom in zip(ins, eqn.invars, strict=True):
            for i, own in enumerate(axes):
                if len(own) > len(found[i]) and atom.aval.shape[i] == shapes[0][i]:
                    found[i] = own
        return [found for _ in shapes]
    if eqn.primitive.name == "attention":
        *rows, positions, heads, _ = ins[0] or ((),) * len(shapes[0])
        return [[*rows, positions, heads, ()], [*rows, heads, positions]]
    if eqn.primitive.name == "attention_gradient":
        return [list(axes) for axes in ins[: len(shapes)]]
    try:
        related = Related(eqn)
    except Exception:  # an unknown form of a primitive: nothing is known of its outputs
        return empty
    by_factor: dict[Any, tuple[str, ...]] = {}
    for axes, dims in zip(ins, related.ins, strict=True):
        for own, dim in zip(axes, dims, strict=False):
            if own and len(own) > len(by_factor.get(dim[:1], ())):
                by_factor[dim[:1]] = own
    outputs = []
    for dims, shape in zip(related.outs, shapes, strict=True):
        outs = [by_factor.get(dim[:1], ()) if dim else () for dim in dims]
        for axes in ins:  # parts of a split dim, as those of a slice, stay split
            if len(axes) == len(shape) and eqn.primitive.name in _PARTS:
                outs = [own or before for own, before in zip(outs, axes, strict=True)]
        outputs.append(outs)
    return outputs


_PARTS = ("slice", "dynamic_slice", "split", "pad", "concatenate", "dynamic_update_slice")
