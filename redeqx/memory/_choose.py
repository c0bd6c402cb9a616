"""`memory="auto"`: the strategy with which a running script's step fits its devices, on the mesh that it has."""

from collections.abc import Callable, Sequence

import jax
from jax.sharding import Mesh

from ..distributed import Peers
from ..machine import GIB
from ._need import Tried, least_memory, memory_of, try_step
from ._search import SearchSpace
from ._strategy import Strategy


def choose(
    own: Strategy,
    mesh: Mesh,
    peers: Peers,
    compiled: Callable[[Strategy], jax.stages.Compiled],
    space: Callable[[int], SearchSpace],
    opt_state: int = 0,
) -> tuple[Sequence[Tried], str]:
    """Returns the strategies that had to be compiled, and a text about the last one: the first that fits. Returns none of
    them if the memory of a device is unknown. All processes compile the same.

    **Arguments:**

    - `own`: the strategy of the script.
    - `compiled`: returns the compiled train step of a strategy.
    - `space`: maps the bytes of a device to the strategies that make the same update; called if `own` does not fit.
    - `opt_state`: bytes of the optimizer state on a device, where it is not in host memory yet.
    """
    memory = least_memory(memory_of(mesh), peers)
    if memory is None:
        return [], ""

    def measure(strategy: Strategy) -> Tried:
        moved = opt_state if strategy.offload_opt_state else 0
        return try_step(strategy, lambda: compiled(strategy), memory, peers, moved)

    tried = [measure(own)]
    if not tried[0].fits:
        tried += space(memory.limit).search(tried[0], measure, to_fastest=False)
    return tried, _describe(tried, memory.limit)


def _describe(tried: Sequence[Tried], limit: int) -> str:
    def size(each: Tried) -> str:
        return ("at least " if each.is_refused else "") + f"{each.needs / GIB:,.2f} GiB"

    *others, chosen = tried
    text = f"memory: {size(chosen)} of {limit / GIB:,.2f} GiB a device with {chosen.strategy.code()}"
    text += "".join(f"; {each.strategy.code()} needs {size(each)}" for each in others)
    if not chosen.fits:
        text += (
            ". Nothing fits: expect the step to fail. Take more shards; `python -m redeqx dry-run --fit` finds the fastest "
            "strategy that fits"
        )
    return text
