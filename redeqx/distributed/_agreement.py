"""Checks that all processes of a run agree on models, programs, values, settings and data, once, before these are used.

Every process compiles the same program and contributes its shards. If one has another learning rate, loss or initial
value, nothing fails by itself: parameters that should be equal drift apart, and a checkpoint mixes them.
"""

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from .._tree import array_leaves, is_key, named_leaves
from ._peers import Peers

_ADVICE = (
    "Every process must run the same script with the same arguments: look for what depends on the process, the host, the "
    "time, or the order of a set."
)
_SAME_LENGTH = (
    "Pad to one length, the same in every batch: a process collates the rows that its devices need, if the first batch has "
    "rows of one length. Pass the same examples in every process."
)
_FEW = 2**10  # larger leaves of the optimizer state are not compared: they belong to parameters
_LARGE = 2**20  # the most elements of a constant whose values are compared
_SHOWN = 160  # characters of a line of a program
_THREADS = 4


def agree_on_trainer(peers: Peers, model: PyTree, model_state: PyTree, settings: Mapping[str, Any]) -> None:
    """Checks the model's arrays, the state of its layers, and further settings of a trainer by name."""
    leaves = array_leaves((model, model_state))
    peers.agree("model", {name: f"{leaf.dtype} {list(leaf.shape)}" for name, leaf in leaves.items()})
    peers.agree("Trainer", settings)
    agree_on_values(peers, "model", array_leaves(model))
    agree_on_values(peers, "model_state", array_leaves(model_state))


def agree_on_opt_state(peers: Peers, opt_state: PyTree) -> None:
    """Checks the small leaves of the optimizer state, such as the hyperparameters of `optax.inject_hyperparams`."""
    agree_on_values(peers, "optimizer", {name: leaf for name, leaf in array_leaves(opt_state).items() if leaf.size <= _FEW})


def agree_on_examples(peers: Peers, method: str, n: int | None, batch_size: int) -> None:
    """Checks that all processes call a method with the same number of examples (None: unknown): each computes its share."""
    advice = "Pass the same examples in every process: each computes its share of them."
    peers.agree(method, {"len(examples)": n, "batch_size": batch_size}, advice)


class RowCheck:
    """Compares the rows of the steps of one pass over examples between the processes: their shards form one array. `say`
    prints a line, once in a run: each epoch, evaluation and `update` is a pass."""

    _numbers = count()  # of the passes of this process: every process makes the same ones in the same order
    _has_said = False

    def __init__(self, peers: Peers, say: Callable[[str], None]):
        self._peers, self._say, self._number = peers, say, next(self._numbers)

    def vary(self, batches: Iterable[PyTree], *, mixes: bool) -> bool:
        """Returns whether rows of these batches, or of those of other processes, have different shapes or, as `mixes` says,
        depend on others of their batch, so that each process must collate all rows of a step. Waits for all processes."""
        kinds = sorted({zlib.crc32(json.dumps(_shapes(batch)).encode()) for batch in batches})
        found = self._peers.gather(f"shapes of rows, pass {self._number}", [kinds, mixes])
        varies, mixes = len(set().union(*(kinds for kinds, _ in found))) > 1, any(mixes for _, mixes in found)
        if (varies or mixes) and not RowCheck._has_said:
            RowCheck._has_said = True
            why = "rows of other examples have other shapes" if varies else "a row depends on other examples of its batch"
            self._say(f"`collate_fn`: {why}, so every process collates whole batches")
        return varies or mixes

    def __call__(self, i: int, batch: PyTree, n_examples: int) -> None:
        """Checks that step `i` has the same number of examples (0 after the last step) in all processes, and the collated
        rows of this process, `batch`, the same shape and dtype as those of others."""
        rows = _shapes(batch) | {"the number of examples of a step": str(n_examples)}
        if i == 0:
            self._peers.agree("collate_fn", rows, _SAME_LENGTH)
        else:  # does not wait, as batches are prepared two steps ahead of the device
            self._peers.compare(f"rows of pass {self._number}, step {i}", "collate_fn", rows, _SAME_LENGTH)


def _shapes(batch: PyTree) -> dict[str, str]:
    return {name: f"{leaf.dtype} {list(leaf.shape[1:])} a row" for name, leaf in named_leaves(batch).items()}


def agree_on_program(peers: Peers, what: str, lowered: Any) -> None:
    """Checks that a program is the same in all processes; waits for all of them.

    Raises ValueError, the same in every process, with the first line that differs. Constants, such as a learning rate, are
    part of the program.
    """
    if peers.n == 1:
        return
    # The text excludes source locations, which differ if a process has the script in another folder.
    text: str = lowered.compiler_ir("stablehlo").operation.get_asm(large_elements_limit=_LARGE)
    if len(set(peers.gather(f"program of {what}", zlib.crc32(text.encode())))) > 1:
        peers.agree(what, {f"line {n}": _brief(line) for n, line in enumerate(text.splitlines(), 1)}, _ADVICE)


def _brief(line: str) -> str:
    line = line.strip()
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}... ({zlib.crc32(line.encode()):08x})"


def agree_on_values(peers: Peers, what: str, leaves: Mapping[str, Any]) -> None:
    """Checks that array shards which several processes hold have the same bits in all of them. `leaves` are NumPy or JAX
    arrays by name; a JAX array may be on the devices of this process or of all.

    Raises ValueError, the same in every process, with the name of the first array that differs.
    """
    if peers.n == 1:
        return
    with ThreadPoolExecutor(_THREADS, "redeqx-compare") as pool:
        sums = {name: pool.submit(_crc32, part) for leaf in leaves for name, part in _shared_parts(leaf, leaves[leaf])}
        mine = {name: future.result() for name, future in sums.items()}
    first: dict[str, tuple[int, int]] = {}
    for index, sums_there in enumerate(peers.gather(f"values of {what}", mine)):
        for name, crc32 in sums_there.items():
            holder, expected = first.setdefault(name, (index, crc32))
            if crc32 != expected:
                raise ValueError(
                    f"`{what}`: expected `{name}` to have the same values in all processes, got crc32 {expected:08x} in "
                    f"process {holder}, {crc32:08x} in process {index}. {_ADVICE}"
                )


def _shared_parts(name: str, leaf: Any) -> Iterator[tuple[str, Any]]:
    """Yields the shards of an array that another process holds too, with names that are the same in all processes."""
    if is_key(leaf):
        leaf = jax.random.key_data(leaf)
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        yield name, leaf
        return
    holders: dict[str, set[int]] = {}
    for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
        holders.setdefault(str(index), set()).add(device.process_index)
    parts = {str(shard.index): shard.data for shard in leaf.addressable_shards}
    for index, part in parts.items():
        if len(holders[index]) > 1:
            yield name if part.shape == leaf.shape else f"{name}{index}", part


def _crc32(part: Any) -> int:
    return zlib.crc32(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
