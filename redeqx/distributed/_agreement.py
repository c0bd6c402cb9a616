"""Checks that all processes of a run agree on models, settings and data, before these are used."""

from collections.abc import Mapping
from typing import Any

from jaxtyping import PyTree

from .._tree import is_array_like, named_leaves
from ._peers import Peers
from ._replicas import agree_on_values

_FEW = 2**10  # larger leaves of the optimizer state are not compared: they belong to parameters


def _arrays(tree: PyTree) -> dict[str, Any]:
    return {name: leaf for name, leaf in named_leaves(tree).items() if is_array_like(leaf)}


def agree_on_trainer(peers: Peers, model: PyTree, model_state: PyTree, settings: Mapping[str, Any]) -> None:
    """Checks the model's arrays, the state of its layers, and further settings of a trainer by name."""
    leaves = _arrays((model, model_state))
    peers.agree("model", {name: f"{leaf.dtype} {list(leaf.shape)}" for name, leaf in leaves.items()})
    peers.agree("Trainer", settings)
    agree_on_values(peers, "model", _arrays(model))
    agree_on_values(peers, "model_state", _arrays(model_state))


def agree_on_opt_state(peers: Peers, opt_state: PyTree) -> None:
    """Checks the small leaves of the optimizer state, such as the hyperparameters of `optax.inject_hyperparams`."""
    agree_on_values(peers, "optimizer", {name: leaf for name, leaf in _arrays(opt_state).items() if leaf.size <= _FEW})


def agree_on_examples(peers: Peers, method: str, n: int | None, batch_size: int) -> None:
    """Checks that all processes call a method with the same number of examples: each computes its share of them.

    **Arguments:**

    - `n`: the number of examples; None if unknown.
    """
    advice = "Pass the same examples in every process: each computes its share of them."
    peers.agree(method, {"len(examples)": n, "batch_size": batch_size}, advice)


def check_rows(peers: Peers, n_pass: int, i: int, batch: PyTree, n_examples: int) -> None:
    """Checks that step `i` of a pass has the same number of examples in all processes, and rows of the same shape and dtype,
    since the shards of all processes form one array.

    **Arguments:**

    - `batch`: the collated rows of this process.
    - `n_examples`: the number in all processes; 0 after the last step.
    """
    rows = {name: f"{leaf.dtype} {list(leaf.shape[1:])} a row" for name, leaf in named_leaves(batch).items()}
    rows["the number of examples of a step"] = str(n_examples)
    advice = (
        "Pad to one length, the same in every batch: a process collates the rows that its devices need. Pass the same "
        "examples in every process."
    )
    if i == 0:
        peers.agree("collate_fn", rows, advice)
    else:  # does not wait, as batches are prepared two steps ahead of the device
        peers.compare(f"rows of pass {n_pass}, step {i}", "collate_fn", rows, advice)
