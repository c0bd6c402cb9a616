"""Fused attention: computes a softmax between two products of queries, keys and values by the platform's kernel.

The pattern is matched for any order of dims, under `jax.vmap` and in loops: `_scores` labels the dims of the scores at
the softmax, and traces the labels to the product of queries and keys and to the product with the values. Between them there
may be scales, masks (`where`), biases (sums), casts and transposes. Constant masks are recognised as causal or as windows;
other masks and biases are passed to the kernel without the dims along which they repeat. If anything else uses the scores
or the weights, or changes them between the products (dropout, a softcap), the original code is kept.

Source: FlashAttention (arXiv:2205.14135). Cost: each product is inspected while tracing; in a step, the backward pass
recomputes the weights instead of reading them.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from .._rounding import at_least_float32
from ..dims import Related
from ..kernels import AttentionSetting, attend, constrain_positions
from ..machine import SEQUENCE, n_batch_shards, split_heads
from ..tracing import Body, Group, Site, or_as_written, plain, run
from ._bands import Affine, find_band, inequalities, select_dims
from ._by_positions import ByPositions
from ._scores import SIZE, Operand, Scores, WeightsUse, match_softmax, trace_scores, uses_of_weights

MIN_QUERIES = 16  # with fewer, as when decoding one token at a time, the weights are small and fusing does not pay off


@dataclass(frozen=True)
class FuseAttention(ByPositions):
    """The rule that computes attention by the kernel of the target platform.

    Kernels need to know how the plan splits queries `[rows, positions, heads, size]`: `split`. Those whose positions are not
    split are split by rows over the sequence axis too, if these divide. So are chunks of positions.
    """

    split: NamedSharding | None = None

    def groups(self, body: Body) -> Iterable[Group]:
        found = [each for _, each in find_attentions(body, body.eqns) if isinstance(each, _Attention)]
        return [replace(each, setting=self.with_split(each.setting, each.q.atom)).group(body) for each in found]

    def claims(self, eqn: Any) -> bool:
        if eqn.primitive.name != "attention":
            return False
        setting = eqn.params["setting"]
        return setting.split != self._split_of(eqn.invars[0]) or "mask" in setting.names

    def __call__(self, eqn: Any, ins: Sequence[Any], site: Site) -> Sequence[Any] | None:
        setting, kept = drop_known_mask(site.body, eqn)
        setting = self.with_split(setting, eqn.invars[0])
        params = {**eqn.params, "setting": setting}
        kept_eqn = eqn.replace(params=params, invars=[eqn.invars[i] for i in kept])
        out, log_sum = run(kept_eqn, [plain(ins[i]) for i in kept])
        is_pairs = log_sum.ndim > len(eqn.outvars[1].aval.shape)  # of a ring, which other equations do not know of
        return [constrain_positions(setting, out), log_sum.sum(-1) if is_pairs else log_sum]

    def with_split(self, setting: AttentionSetting, queries: Any) -> AttentionSetting:
        """Returns the setting with the split of queries, given the variable or the atom that they are made of."""
        return replace(setting, split=self._split_of(queries))

    def _split_of(self, queries: Any) -> NamedSharding | None:
        if self.split is None or self.inputs is None:
            return self.split
        mesh = self.split.mesh
        # Within chunks, these are split as rows are: with the places in them over the sequence axis, XLA computed the
        # gradients of an attention in chunks of 16 from a part of the positions (jax 0.10.2, CPU, 2026-11-27).
        if len(self.positions.dims.get(queries, ())) > 1:
            return split_heads(mesh, by_rows=True)
        if not self.positions.are_whole(queries, mesh.shape[SEQUENCE]):
            return self.split
        divide = self.positions.rows_in(queries, n_batch_shards(mesh) * mesh.shape[SEQUENCE]) is not None
        return split_heads(mesh, by_rows=True) if divide else self.split


@dataclass(frozen=True)
class _Attention:
    """An attention that was matched in a body."""

    eqns: Sequence[Any]  # in any order
    sizes: Mapping[Any, int]  # of each label
    key: Any  # the label of the keys' positions
    query: Any  # the label of the queries' positions
    rows: Sequence[Any]  # the labels of leading dims
    heads: Sequence[Any]  # the labels of first the key and value heads, then the query heads that share each of them
    q: Operand
    k: Operand
    v: Operand
    masks: Sequence[tuple[Operand, bool]]  # passed to the kernel as arrays, each with its `keep` (see `Mask`)
    biases: Sequence[tuple[Operand, float]]  # each with its factor
    setting: AttentionSetting  # with empty `names`
    out: tuple[Any, tuple[Any, ...]]  # the equation that computes the output, and the labels of its dims

    def group(self, body: Body) -> Group:
        """Returns the equations as a group, which is computed at once."""
        own = set(self.eqns)
        reads = [operand.atom for operand, _ in (*self.masks, *self.biases)]
        return Group([eqn for eqn in body.eqns if eqn in own], self.compute, reads)

    def compute(self, read: Any) -> list[Any]:
        """Computes the output, given a function that reads the value of an atom."""
        q, k, v, extras = self._operands(read)
        out = attend(q, k, v, extras, self.setting)
        eqn, labels = self.out
        out = out.reshape(*out.shape[:-2], *(self.sizes[label] for label in self.heads), out.shape[-1])
        order = [*self.rows, self.query, *self.heads, SIZE]
        return [jnp.transpose(out, [order.index(label) for label in labels]).astype(eqn.outvars[0].aval.dtype)]

    def shapes(self) -> tuple[AttentionSetting, list[Any]]:
        """Returns the setting, and the shapes of queries, keys, values and optional operands."""
        q, k, v, extras = jax.eval_shape(lambda: self._operands(lambda atom: jnp.zeros(atom.aval.shape, atom.aval.dtype)))
        return replace(self.setting, names=tuple(extras)), [q, k, v, *extras.values()]

    def _operands(self, read: Any) -> tuple[Any, Any, Any, dict[str, Any]]:
        """Returns queries, keys, values and the optional operands, as `attend` takes them."""
        head_sizes = [self.sizes[label] for label in self.heads]
        q = self.q.arrange(read, [*self.rows, self.query, *self.heads, SIZE])  # of size 1 along rows that share queries
        lead = [self.sizes[label] for label in (*self.rows, self.query)]
        q = jnp.broadcast_to(q, (*lead, *head_sizes, q.shape[-1])).reshape(*lead, math.prod(head_sizes), q.shape[-1])
        k, v = (x.arrange(read, [*self.rows, self.key, *(self.heads[:1] or [None]), SIZE]) for x in (self.k, self.v))
        extras: dict[str, Any] = {}
        for mask, keep in self.masks:
            x = self._expand(mask, read)
            if jnp.issubdtype(x.dtype, jnp.floating):  # an added mask, which is 0 at unmasked keys
                x = x == 0
            x = x if keep else ~x
            extras["mask"] = x if "mask" not in extras else extras["mask"] & x
        for bias, factor in self.biases:
            x = self._expand(bias, read)
            x = factor * x.astype(at_least_float32(x.dtype))
            extras["bias"] = x if "bias" not in extras else extras["bias"] + x
        return q, k, v, extras

    def _expand(self, operand: Operand, read: Any) -> Any:
        """Returns a mask or a bias as `[*rows, heads, query, key]`: of full size along keys, of size 1 where it repeats."""
        x = operand.arrange(read, [*self.rows, *self.heads, self.query, self.key])
        rows, heads, n_queries = x.shape[: len(self.rows)], x.shape[len(self.rows) : -2], x.shape[-2]
        if math.prod(heads) > 1:
            heads = [self.sizes[label] for label in self.heads]
            x = jnp.broadcast_to(x, (*rows, *heads, *x.shape[-2:]))
        x = x.reshape(*rows, math.prod(heads), n_queries, x.shape[-1])
        return jnp.broadcast_to(x, (*x.shape[:-1], self.sizes[self.key]))


def drop_known_mask(body: Body, eqn: Any) -> tuple[AttentionSetting, list[int]]:
    """Moves a mask that is known to be causal or a window from the operands of an `attention` equation to its setting.
    Returns the setting and the indices of the remaining operands."""
    setting, kept = eqn.params["setting"], list(range(len(eqn.invars)))
    if "mask" not in setting.names:
        return setting, kept
    mask_index = 3 + setting.names.index("mask")
    mask = eqn.invars[mask_index]
    found = inequalities(body, mask)
    band = None if found is None else find_band(found, mask.aval.shape, mask.aval.ndim - 2, mask.aval.ndim - 1)
    if band is None or setting.causal or setting.window is not None:
        return setting, kept
    names = tuple(name for name in setting.names if name != "mask")
    return replace(setting, names=names, causal=band[0], window=band[1]), [i for i in kept if i != mask_index]


def describe(setting: AttentionSetting) -> str:
    """Describes the mask and the optional operands of an attention."""
    words = ["causal"] * setting.causal + ([f"window of {setting.window}"] if setting.window is not None else [])
    words += [_OPERAND_WORDS[name] for name in setting.names if name in _OPERAND_WORDS]
    return ", ".join(words) if words else "all keys"


_OPERAND_WORDS = {"mask": "a mask", "bias": "a bias", "lengths": "lengths", "query_segments": "segments", "key": "dropout"}


def find_attentions(body: Body, eqns: Sequence[Any]) -> Iterator[tuple[Any, _Attention | str]]:
    """Yields each softmax between two products: its equation, and the attention, or the reason why it is not fused."""
    for eqn in eqns:
        attempt = partial(_match, body, eqn)
        if (found := or_as_written(attempt, lambda: None, "the search for attention", eqn)) is not None:
            yield eqn, found


# Primitives that apply dropout or a mask to weights, and primitives that change scores, as a softcap does.
_DROPOUT = {"mul", "select_n", "div"}
_SCORE_CHANGES = {"tanh", "mul", "div", "max", "min", "clamp", "logistic", "erf", "exp", "neg", "select_n", "stop_gradient"}


def _match(body: Body, eqn: Any) -> _Attention | str | None:
    """Returns None if the equation is no softmax between two products."""
    softmax = match_softmax(body, eqn)
    if softmax is None:
        return None
    source, members, axis = softmax
    scores = trace_scores(body, source)
    readers, uses = body.readers(eqn.outvars[0]), uses_of_weights(body, eqn)
    names = [reader.primitive.name for reader in readers if reader is not None]
    if scores.product is None:
        is_changed = bool(uses) and scores.stopped_at in _SCORE_CHANGES
        return f"`{scores.stopped_at}` between the scores and their softmax" if is_changed else None
    if not uses:
        is_masked = not _DROPOUT.isdisjoint(names)
        return f"`{names[0]}` between the weights and the values, such as dropout or a mask" if is_masked else None
    reason = f"`{names[0]}` between the weights and the values"
    for use in uses:
        if use.is_unchanged:
            found = _build(body, [*use.path, *members], use, source.aval.shape, axis, scores)
            if isinstance(found, str) or found.group(body).is_closed_in(body):
                return found
            reason = "its scores or weights are also used elsewhere"
    return reason


# --- the roles of dims and operands -----------------------------------------------------------------------------------


def _build(
    body: Body, eqns: Sequence[Any], use: WeightsUse, shape: Sequence[int], axis: int, scores: Scores
) -> _Attention | str:
    """Returns an `_Attention`, or the reason why kernels do not compute it. `eqns` are those of the softmax, and those
    between it and the product with the values. The labels are the dims of the softmax, of this shape and axis."""
    product, side, _, dims, _ = use
    assert scores.product is not None
    first, labels = scores.product
    if (first.outvars[0].aval.dtype == jnp.float64) != (product.outvars[0].aval.dtype == jnp.float64):
        return "only one of its products is in float64"
    of_first = Related(first)
    known = dict(zip(of_first.outs[0], labels, strict=True))
    sides = [_labelled(atom, own, known) for atom, own in zip(first.invars, of_first.ins, strict=True)]
    if any(operand.labels.count(SIZE) != 1 for operand in sides):
        return "its scores contract more than one dim"
    q, k = sides if axis in sides[1].labels else sides[::-1]
    if axis not in k.labels or axis in q.labels:
        return "its softmax is not over the keys"
    batch = [label for label in q.labels if label in k.labels and label not in (SIZE, None)]
    own = [label for label in k.labels if label not in (*q.labels, axis, None)]  # rows that share their queries
    of_product = Related(product)
    known = dict(zip(of_product.ins[side], dims, strict=True))
    v = _labelled(product.invars[1 - side], of_product.ins[1 - side], known)
    out = [known.get(dim, SIZE) for dim in of_product.outs[0]]
    if {label for label in dims if label not in out} != {axis}:
        return "its weights are not contracted over the keys alone"
    if {label for label in v.labels if label in out} - {SIZE} != {*batch, *own}:
        return "its values and keys have different rows or heads"
    if v.labels.count(SIZE) != 1:
        return "its values have more than one dim for the head size"
    queries = [label for label in q.labels if label not in (*batch, SIZE, None)]
    if math.prod(shape[label] for label in queries) < MIN_QUERIES:
        return f"it has fewer than {MIN_QUERIES} queries"
    query, setting, masks = _interpret_masks(body, scores, shape, axis, queries)
    rows = [*own, *(label for label in q.labels if label in batch)]
    n_rows = max(len(rows) - 1, min(len(rows), 1))  # if there are several, the last one is that of the heads
    heads = [*rows[n_rows:], *(label for label in queries if label != query)]
    return _Attention(
        eqns=[*eqns, *scores.eqns, first, product],
        sizes=dict(enumerate(shape)),
        key=axis,
        query=query,
        rows=rows[:n_rows],
        heads=heads,
        q=q,
        k=k,
        v=v,
        masks=masks,
        biases=scores.biases,
        setting=replace(setting, precision=_precision(first, product)),
        out=(product, tuple(out)),
    )


def _precision(*products: Any) -> Any:
    """Returns the precision of the float32 products, the highest if they are `jax.lax.Precision`s; None for the default."""
    precisions = [eqn.params["precision"] for eqn in products if eqn.invars[0].aval.dtype == jnp.float32]
    levels = [level for each in precisions if isinstance(each, tuple) for level in each]
    preset = next((each for each in precisions if each is not None and not isinstance(each, tuple)), None)
    return preset or max(levels, key=lambda level: level.value, default=None)


def _labelled(atom: Any, dims: Sequence[Any], known: Mapping[Any, Any]) -> Operand:
    """Returns an operand of a product with the labels of its dims. Those that are not known are of the head size."""
    return Operand(atom, tuple(known.get(dim, SIZE) for dim in dims))


def _interpret_masks(
    body: Body, scores: Scores, shape: Sequence[int], key: int, queries: Sequence[Any]
) -> tuple[Any, AttentionSetting, list[tuple[Operand, bool]]]:
    """Returns the label of the queries' positions, the setting, and the masks that the setting does not express."""
    default = max(queries, key=lambda label: shape[label])
    found: list[Affine] = []  # the inequalities of all masks, in the dims of the softmax
    unknown, known = [], []
    for mask, keep in ((mask.operand, mask.keep) for mask in scores.masks):
        conditions = inequalities(body, mask.atom, negated=not keep)
        if conditions is None:
            unknown.append((mask, keep))
            continue
        known.append((mask, keep))
        dims = [mask.labels.index(label) if label in mask.labels else None for label in range(len(shape))]
        found += [select_dims(each, dims) for each in conditions]
    for query in [default, *(label for label in queries if label != default)]:
        if (band := find_band(found, shape, query, key)) is not None:
            return query, AttentionSetting(scores.scale, *band), unknown
    return default, AttentionSetting(scores.scale), [*unknown, *known]
