"""Splitting a head by its vocabulary: each device computes a part of the logits, for the rows of several devices.

`GatherAtUse` would gather the whole head on every device, where a loss that is computed in chunks also adds up the whole
gradient of the head, in float32. Under this rule the head is exchanged instead, so that each of the devices among which it
is split has the weights of a part of the vocabulary. A chunk's hidden states are gathered from these devices, each computes
the logits of its part for all of them, and the gradients of the hidden states are summed back into the devices' own rows.
The gradient of a device's part of the head is complete there.

So a device holds a part of the head and of its gradient, and sends hidden states and their gradients instead of the head and
its gradient. Values and gradients stay the same, but for the order of sums.

Source: the output layer of Megatron-LM (arXiv:1909.08053), here over the axes that store weights. The loss must say which
values enter the head (`HEAD_INPUT`), and apply the functions of this module to each chunk, while JAX differentiates it.
Cost: an all-gather and a reduce-scatter of hidden states, and two all-to-alls of a part of the head. With more tokens than
entries of the vocabulary that is more than the head and its gradient. It is still done where that is little beside what all
weights send, as a whole gradient takes 4 bytes for each number of the head on every device.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec as P

from ..machine import BATCH_AXES, FSDP, MODEL, SEQUENCE, n_batch_shards
from ..tracing import CUSTOM_DERIVATIVES, Rule, Site, variables
from ._constrain import split_over
from ._gather import stored, used_as, weights_of_derivative

# The name (`jax.ad_checkpoint.checkpoint_name`) of the hidden states that enter a head, `[rows, tokens, features]`.
HEAD_INPUT = "hidden states that enter a head"


@dataclass(frozen=True)
class SplitVocabulary(Rule):
    """Splits the vocabulary of a head over the fsdp axis, where that sends no more bytes, or few more. `n_vocab` has, for
    one function, the size of the vocabulary of each equation with a head."""

    mesh: Mesh
    n_trained: int
    n_vocab: Mapping[Any, int] = field(default_factory=dict)

    def of(self, closed: Any) -> Rule | None:
        if self.mesh.shape[FSDP] == 1 or self.mesh.shape[SEQUENCE] > 1:
            return None
        eqns = closed.jaxpr.eqns
        named = [eqn for eqn in eqns if eqn.primitive.name == "name" and eqn.params["name"] == HEAD_INPUT]
        inputs = {eqn.outvars[0] for eqn in named if eqn.outvars[0].aval.ndim == 3}
        heads = [eqn for eqn in eqns if eqn.primitive.name in CUSTOM_DERIVATIVES and inputs & {*variables(eqn.invars[:1])}]
        n_vocab = {eqn: n for eqn in heads if (n := self._vocab_of(eqn)) is not None}
        return replace(self, n_vocab=n_vocab) if n_vocab else None

    def _vocab_of(self, eqn: Any) -> int | None:
        """Returns the size of the vocabulary that is split; None to leave the equation as it is."""
        (n_rows, n_tokens, d), others = eqn.invars[0].aval.shape, [atom.aval.shape for atom in eqn.invars[2:]]
        sizes = {sum(shape) - d for shape in others if len(shape) == 2 and d in shape}
        n, n_batch = self.mesh.shape[FSDP], n_batch_shards(self.mesh)
        if len(sizes) != 1 or n_rows % n_batch:
            return None
        (n_vocab,) = sizes
        # Numbers of hidden states that are sent beyond those of the head; both are sent twice, in the same dtypes.
        n_more = (n_rows * n_tokens // n_batch * n - n_vocab) * d
        is_possible = n_vocab != d and n_vocab % (n * self.mesh.shape[MODEL]) == 0
        return n_vocab if is_possible and n_more <= FEW * self.n_trained else None

    def claims(self, eqn: Any) -> bool:
        return eqn in self.n_vocab

    def __call__(self, eqn: Any, ins: Sequence[Any], site: Site) -> Sequence[Any] | None:
        n_vocab = self.n_vocab[eqn]
        weights = [stored(value) for value in ins]
        if not any(weight is not None and n_vocab in weight[0].shape and weight[0].ndim == 2 for weight in weights):
            return None
        split: list[Any] = []
        for value, weight in zip(ins, weights, strict=True):
            if weight is None or n_vocab not in weight[0].shape:
                split.append(value)
                continue
            dim = weight[0].shape.index(n_vocab)
            split.append(used_as(value, P(*(_AXES if i == dim else None for i in range(weight[0].ndim)))))
        return site.rest(eqn, split)


FEW = 1 / 20  # of the trained parameters: so many numbers may be sent in addition, for a head that no device has as a whole
_AXES = (MODEL, FSDP)  # that split the vocabulary; the plan splits no dim of a weight in use over both
_OTHERS = tuple(axis for axis in BATCH_AXES if axis != FSDP)


def by_vocabulary(logits: jax.Array) -> jax.Array:
    """Splits logits `[rows, tokens, vocabulary]` over the devices that have a part of the vocabulary. What is multiplied by
    the head is gathered for that: the hidden states themselves, or their norm, if the head begins with one."""
    return _constrained(logits, _OTHERS, _AXES)


def with_own_rows(gradient: jax.Array) -> jax.Array:
    """Sums the gradient of hidden states over the parts of the vocabulary, and leaves each device its own rows."""
    return _constrained(gradient, BATCH_AXES, None)


def _constrained(value: jax.Array, rows: tuple[str, ...], last: Any) -> jax.Array:
    mesh = next((of.compute.mesh for of in weights_of_derivative() if _AXES in of.compute.spec), None)
    return value if mesh is None else split_over(value, mesh, {0: rows, 2: last}, None)
