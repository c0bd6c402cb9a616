"""Blocks that the backward pass computes again: equal consecutive blocks of a loss that stay unrolled, each in a remat.

They are those that `StackBlocks` would compute as a scan. A remat of a block saves its inputs: what it reads of the block
before, and values that it shares with others, such as weights. `RematLoops` may save more of it, the same of each block.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from ..tracing import REMATS, Env, Rule, equations, evaluate, variables
from ._stack_blocks import Blocks, last_reads, runs_of_blocks, with_runs


@dataclass(frozen=True)
class Block:
    """The policy of a block's remat, which saves nothing. Marks the remat for `RematLoops`.

    **Arguments:**

    - `of`: the index of the first equation of the run of blocks.
    - `n`: how many blocks the run has.
    - `n_carried`: how many of its last inputs are outputs of the block before.
    """

    of: int
    n: int
    n_carried: int

    def __call__(self, *args: Any, **params: Any) -> bool:
        return False


def block_of(eqn: Any) -> Block | None:
    """Returns the block that an equation computes; None if it is no block's remat."""
    policy = eqn.params.get("policy") if eqn.primitive.name in REMATS else None
    return policy if isinstance(policy, Block) else None


@dataclass(frozen=True)
class CheckpointBlocks(Rule):
    """Computes each block of a run of equal ones in a remat.

    **Arguments:**

    - `kinds`: as for `StackBlocks`.
    """

    kinds: Sequence[Any]

    def rewritten(self, closed: Any) -> Any:
        if any(eqn.primitive.name in REMATS for eqn in equations(closed)):
            return closed  # the function says itself what is computed again
        found, last_read = runs_of_blocks(closed, self.kinds), last_reads(closed.jaxpr)

        def compute_run(blocks: Blocks, eqns: Sequence[Any], env: Env) -> dict[Any, Any]:
            known = Env(env.items())
            for index in range(blocks.n):
                known.update(_computed(blocks, index, eqns, last_read, known))
            return known

        return with_runs(closed, found, compute_run) if found else closed


def _computed(blocks: Blocks, index: int, eqns: Sequence[Any], last_read: Mapping[Any, int], env: Env) -> dict[Any, Any]:
    """Computes one block in a remat. Returns its values that later equations read."""
    first = blocks.start + index * blocks.period
    eqns = eqns[first : first + blocks.period]
    made = {var for eqn in eqns for var in eqn.outvars}
    read = variables(atom for eqn in eqns for atom in eqn.invars)
    carried = variables(eqns[j].invars[k] for j, k in blocks.carried)
    ins = [var for var in read if var not in made and var not in carried] + carried
    outs = [var for eqn in eqns for var in eqn.outvars if last_read.get(var, -1) >= first + blocks.period]

    def compute(*args: Any) -> list[Any]:
        inside = Env(zip(ins, args, strict=True))
        evaluate(eqns, inside)
        return inside.read(outs)

    policy = Block(blocks.start, blocks.n, len(carried))
    return dict(zip(outs, partial(jax.checkpoint, policy=policy)(compute)(*env.read(ins)), strict=True))
