"""Names the dims of every value of a traced function: which of them are the rows of its batch.

Equations unify the atoms of their operands and outputs, by the tables in `_relations` and `_loops`, in both directions: a
draw is named by its use. A size is never a reason to unify two dims; sizes are used only for the arithmetic of reshapes.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..tracing import REMAT, Env, equations
from ._atoms import Block, Dim, Step, Value, flat, reached, size_of, steps_of
from ._inference import Inference
from ._lookups import follow_indices
from ._loops import LOOPS
from ._relations import relation_of


@dataclass(frozen=True)
class Inputs:
    """How many of a function's first inputs are weights, then a state of the model, then leaves of the batch, whose dim 0 is
    rows. The others, such as a key, may be anything."""

    n_weights: int
    n_state: int
    n_batch: int

    @property
    def batch(self) -> slice:
        """The leaves of the batch among the inputs."""
        first = self.n_weights + self.n_state
        return slice(first, first + self.n_batch)


def equations_of(closed: Any) -> list[Any]:
    """Returns the equations of a closed jaxpr in normal form that can be replaced: its own, and those inside loops, branches
    and remats. Remats are not among them, so that they may be inlined."""
    return [eqn for eqn in equations(closed) if eqn.primitive.name != REMAT]


class Names(Inference):
    """The dims of all values of a traced function, by their atoms.

    **Arguments:**

    - `closed`: its closed jaxpr, in normal form without remats.
    - `returns_rows`: whether dim 0 of each output is rows.
    - `is_differentiated`: whether to follow derivatives that are not JAX's too.
    """

    def __init__(self, closed: Any, inputs: Inputs, *, returns_rows: bool = False, is_differentiated: bool = False):
        super().__init__()
        self.inputs, self.is_differentiated = inputs, is_differentiated
        # Of each equation that can be replaced, by its id.
        self.places = {id(eqn): place for place, eqn in enumerate(equations_of(closed))}
        ins = [self.fresh(var.aval) for var in closed.jaxpr.invars]
        self._rows: Dim = ()
        for value in ins[inputs.batch]:
            if value.dims and value.dims[0]:
                self._rows = self._rows or value.dims[0]
                self.unify(self._rows, value.dims[0])
        self.root = self.block(closed, ins)
        for value in self.root.outs if returns_rows else ():
            self.unify(self._rows, value.dims[0])

    @property
    def rows(self) -> Dim:
        """The rows of the batch; several atoms if a reshape divides them."""
        return flat(self._rows)

    @property
    def of_weights(self) -> set[int]:
        """The ids of the values that depend on weights or a state, and on no other input, nor on numbers of places."""
        first = self.inputs.batch.start
        numbers = (out for step in steps_of(self.root) if not step.ins for out in step.outs)  # as of an `iota`
        starts = self.root.ins[:first], (*self.root.ins[first:], *numbers)
        given, others = (reached(values, lambda value: value.readers) for values in starts)
        return given - others

    def needed(self, outputs: Collection[int], ends: Iterable[Value] = (), *, with_own_indices: bool = True) -> set[int]:
        """Returns the ids of the values that some outputs and the equations with effects depend on. Own dependencies of
        `ends` do not count. `with_own_indices`: whether a lookup of each row's own entry depends on the numbers of the
        rows."""
        steps, reads = list(steps_of(self.root)), dict[int, list[Value]]({id(value): [] for value in ends})
        for step in () if with_own_indices else steps:
            if step.own_columns:
                others = [value for i, value in enumerate(step.ins) if i != 1]
                reads |= {id(out): others for out in step.outs}
        effects = [value for step in steps if step.eqn.effects for value in (*step.ins, *step.outs)]
        starts = [*(self.root.outs[i] for i in outputs), *effects]
        return reached(starts, lambda value: reads.get(id(value), value.reads))

    # --- blocks and equations --------------------------------------------------------------------------------------------

    def block(self, closed: Any, ins: Sequence[Value]) -> Block:
        """Returns the block of a closed jaxpr for these inputs."""

        def constant(atom: Any, value: Any) -> Value:
            return self.fresh(atom.aval, literal=value)

        block, jaxpr = Block(list(ins)), closed.jaxpr
        env = Env(zip(jaxpr.invars, ins, strict=True), literal=lambda literal: constant(literal, literal.val))
        env.update(zip(jaxpr.constvars, map(constant, jaxpr.constvars, closed.consts), strict=True))
        for eqn in jaxpr.eqns:
            block.steps.append(step := Step(eqn, env.read(eqn.invars)))
            self._relate(step)
            env.update(zip(eqn.outvars, step.outs, strict=True))
        block.outs = env.read(jaxpr.outvars)
        return block

    def _relate(self, step: Step) -> None:
        outer, self._step = self._step, step
        try:
            if step.name in LOOPS:
                step.outs = LOOPS[step.name](self, step)
                return
            found = relation_of(step.eqn)(self, step.eqn, step.ins)
            step.outs = [Value(var.aval, tuple(dims)) for var, dims in zip(step.eqn.outvars, found, strict=True)]
            for out in step.outs:
                assert [size_of(flat(dim)) for dim in out.dims] == [*getattr(out.aval, "shape", ())], step.eqn
            follow_indices(step.eqn, step.ins, step.outs)
            for i, out in enumerate(step.outs):
                out.depends(*(step.ins if step.copied is None else step.copied[i : i + 1]))
        finally:
            self._step = outer
