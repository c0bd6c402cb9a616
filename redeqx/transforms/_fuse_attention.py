"""Fused attention: a softmax between two products of queries, keys and values is computed by the platform's kernel.

It is found whatever its dims are called, also under `jax.vmap` and in loops: the dims of the scores are labelled at the
softmax, and the labels are followed back to the product of queries and keys, and on to the product with the values. On the
way back there may be scales, masks (`where`), biases (sums), casts and transposes. Masks that depend on no input are
recognised as causal or as windows. Others, and biases, are handed to the kernel without the dims along which they repeat.
Where anything else reads the scores or the weights, or stands between them and the products (dropout, a softcap), the loss
is computed as it is written.

Source: FlashAttention (arXiv:2205.14135). Cost: in tracing, a look at each product. In a step, the backward pass computes
the weights again instead of reading them.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from ..compiled import line_of
from ..kernels import Setting, attend
from ..tracing import Body, Group, Rule, Site, or_as_written, plain, run
from ._bands import Inequalities, band, inequalities
from ._scores import SIZE, Operand, Scores, follow_scores, weights_from

MIN_QUERIES = 16  # for fewer, as where one token is decoded at a time, the weights are small and the keys are read once


@dataclass(frozen=True)
class FuseAttention(Rule):
    """Computes attention by the kernel of the platform that is compiled for.

    **Arguments:**

    - `split`: how a plan splits queries `[rows, positions, heads, size]`, which a kernel has to know.
    """

    split: NamedSharding | None = None

    def groups(self, body: Body) -> Iterable[Group]:
        return [replace(found, setting=self._here(found.setting)).group(body) for found in attentions_in(body)]

    def claims(self, eqn: Any) -> bool:
        if eqn.primitive.name != "attention":
            return False
        setting = eqn.params["setting"]
        return setting.split != self.split or "mask" in setting.names

    def __call__(self, eqn: Any, ins: Sequence[Any], site: Site) -> Sequence[Any] | None:
        setting, kept = without_known_mask(site.body, eqn)
        params = {**eqn.params, "setting": self._here(setting)}
        kept_eqn = eqn.replace(params=params, invars=[eqn.invars[i] for i in kept])
        return run(kept_eqn, [plain(ins[i]) for i in kept])

    def _here(self, setting: Setting) -> Setting:
        return replace(setting, split=self.split)


@dataclass(frozen=True)
class _Attention:
    """An attention in a body.

    **Arguments:**

    - `eqns`: its equations, in any order.
    - `sizes`: of the labels.
    - `key`: the label of the keys' positions.
    - `query`: the label of the queries' positions.
    - `rows`: the labels of leading dims.
    - `heads`: the labels of the heads: first those of keys and values, then those that share them.
    - `masks`, `biases`: those that the kernel is handed as arrays, as in `Scores`.
    - `setting`: without the names of these.
    - `out`: the equation that makes the output, and its dims' labels.
    """

    eqns: Sequence[Any]
    sizes: Mapping[Any, int]
    key: Any
    query: Any
    rows: Sequence[Any]
    heads: Sequence[Any]
    q: Operand
    k: Operand
    v: Operand
    masks: Sequence[tuple[Operand, bool]]
    biases: Sequence[tuple[Operand, float]]
    setting: Setting
    out: tuple[Any, tuple[Any, ...]]

    def group(self, body: Body) -> Group:
        """The equations, to be computed together."""
        ids = {id(eqn) for eqn in self.eqns}
        reads = [operand.atom for operand, _ in (*self.masks, *self.biases)]
        return Group([eqn for eqn in body.eqns if id(eqn) in ids], self.compute, reads)

    def operands(self) -> tuple[Setting, list[Any]]:
        """The setting, and the shapes of queries, keys, values and what `setting.names` says."""
        size, value_size = (of.atom.aval.shape[of.labels.index(SIZE)] for of in (self.q, self.v))
        heads = math.prod(self.sizes[label] for label in self.heads)
        groups = math.prod(self.sizes[label] for label in self.heads[:1] if label in self.k.labels)
        n_rows, n_queries, n_keys = (math.prod(self.sizes[x] for x in of) for of in (self.rows, [self.query], [self.key]))
        dtype = self.q.atom.aval.dtype
        shapes = (n_queries, heads, size), (n_keys, groups, size), (n_keys, groups, value_size)
        arrays = [jax.ShapeDtypeStruct((n_rows, *shape), dtype) for shape in shapes]
        names = []
        for name, found, of_dtype in (("mask", self.masks, bool), ("bias", self.biases, dtype)):
            if found:
                has = {label for operand, _ in found for label in operand.labels}
                dims = (n_rows, self.rows), (heads, self.heads), (n_queries, [self.query])
                shape = (*(n if has & set(labels) else 1 for n, labels in dims), n_keys)
                arrays.append(jax.ShapeDtypeStruct(shape, of_dtype))
                names.append(name)
        return replace(self.setting, names=tuple(names)), arrays

    def compute(self, read: Any) -> list[Any]:
        """The output, from the values of what the equations read."""
        lead, of_heads = ([self.sizes[label] for label in labels] for labels in (self.rows, self.heads))
        queries, groups = [*self.rows, self.query, *self.heads, SIZE], self.heads[:1]
        q = self.q.arranged(read, queries)  # of size 1 for rows that share their queries
        q = jnp.broadcast_to(q, (*lead, self.sizes[self.query], *of_heads, q.shape[-1]))
        q = q.reshape(*lead, self.sizes[self.query], math.prod(of_heads), q.shape[-1])
        k, v = (of.arranged(read, [*self.rows, self.key, *(groups or [None]), SIZE]) for of in (self.k, self.v))
        extras: dict[str, Any] = {}
        for mask, is_seen in self.masks:
            x = self._by_head(mask, read)
            x = x == 0 if jnp.issubdtype(x.dtype, jnp.floating) else x  # what is added to scores that are seen
            x = x if is_seen else ~x
            extras["mask"] = x if "mask" not in extras else extras["mask"] & x
        for bias, factor in self.biases:
            x = factor * self._by_head(bias, read).astype(jnp.float32)
            extras["bias"] = x if "bias" not in extras else extras["bias"] + x
        out = attend(q, k, v, extras, self.setting)
        eqn, labels = self.out
        out = out.reshape(*lead, self.sizes[self.query], *of_heads, out.shape[-1])
        aval = eqn.outvars[0].aval
        return [jnp.transpose(out, [queries.index(label) for label in labels]).astype(aval.dtype)]

    def _by_head(self, operand: Operand, read: Any) -> Any:
        """A mask or a bias as `[*rows, heads, query, key]`, of size 1 where it repeats, but not along the keys."""
        n = len(self.rows)
        x = operand.arranged(read, [*self.rows, *self.heads, self.query, self.key])
        *lead, n_queries, n_keys = x.shape
        of_heads = [self.sizes[label] for label in self.heads]
        if math.prod(lead[n:]) > 1:
            x = jnp.broadcast_to(x, (*lead[:n], *of_heads, n_queries, n_keys))
        return jnp.broadcast_to(
            x.reshape(*lead[:n], math.prod(x.shape[n:-2]), n_queries, n_keys),
            (*lead[:n], math.prod(x.shape[n:-2]), n_queries, self.sizes[self.key]),
        )


def without_known_mask(body: Body, eqn: Any) -> tuple[Setting, list[int]]:
    """The setting of an attention that is written as one, and the operands that it needs: without a mask that is known to
    be causal or a window, which the setting then says."""
    setting, kept = eqn.params["setting"], list(range(len(eqn.invars)))
    if "mask" not in setting.names:
        return setting, kept
    place = 3 + setting.names.index("mask")
    mask = eqn.invars[place]
    found = inequalities(body, mask)
    known = None if found is None else _as_setting(setting, found, mask.aval.shape, mask.aval.ndim - 2, mask.aval.ndim - 1)
    if known is None or setting.causal or setting.window is not None:
        return setting, kept
    names = tuple(name for name in setting.names if name != "mask")
    return replace(known, names=names), [i for i in kept if i != place]


def _as_setting(setting: Setting, found: Inequalities, shape: Sequence[int], query: int, key: int) -> Setting | None:
    """A setting with the band that inequalities say; None where they say another."""
    of = band(found, shape, query, key)
    if of is None:
        return None
    least, most = of
    if least is None and most is None:
        return setting
    if least == 0:
        return replace(setting, causal=True, window=None if most is None else most + 1)
    if least is not None and most is not None and least == -most:
        return replace(setting, window=most + 1)
    return None


def described(setting: Setting) -> str:
    """What an attention sees, in words."""
    words = ["causal"] * setting.causal + ([f"window of {setting.window}"] if setting.window is not None else [])
    words += [_WORDS[name] for name in setting.names if name in _WORDS]
    return ", ".join(words) if words else "all keys"


_WORDS = {"mask": "a mask", "bias": "a bias", "lengths": "lengths", "query_segments": "segments", "key": "dropout"}


def attentions_in(body: Body) -> list["_Attention"]:
    """The attentions of a body, closed or not."""
    found = (attention_of(body, eqn) for eqn in body.eqns if eqn.primitive.name == "dot_general")
    return [attention for attention in found if isinstance(attention, _Attention)]


def attention_of(body: Body, product: Any) -> "_Attention | str | None":
    """The attention whose product with the values an equation is; None where it is none, and where it is one that no kernel
    computes the reason."""
    return or_as_written(partial(_attention, body, product), None, f"attention at {line_of(product)}")


class _Left(Exception):
    """Why what is a softmax between two products is left as it is."""


def _attention(body: Body, product: Any) -> _Attention | str | None:
    reason = None
    for side in (0, 1):
        found = weights_from(body, product.invars[side])
        if found is None:
            continue
        eqns, softmax, dims = found  # dims: of the weights as the product reads them, in those of the softmax
        source, members, axis = softmax
        scores = Scores()
        if not follow_scores(body, source, tuple(range(len(source.aval.shape))), scores):
            continue
        try:
            built = _built(body, product, side, dims, source.aval.shape, axis, scores)
        except _Left as left:
            reason = str(left)
            continue
        return _Attention(eqns=[*eqns, *members, *scores.eqns, scores.product[0], product], **built)  # pyright: ignore
    return reason


# --- what it all is ---------------------------------------------------------------------------------------------------


def _built(
    body: Body, product: Any, side: int, dims: Sequence[int], shape: Sequence[int], axis: int, scores: Scores
) -> dict[str, Any]:
    """The fields of an `_Attention`; raises `_Left` where the products are not those of one that kernels compute.

    **Arguments:**

    - `product`, `side`: the product with the values, and which of its operands the weights are.
    - `dims`: of the weights there, in dims of the softmax, which are the labels.
    - `shape`, `axis`: of the softmax.
    """
    assert scores.product is not None
    first, labels = scores.product
    if product.outvars[0].aval.dtype == jnp.float64 or first.outvars[0].aval.dtype == jnp.float64:
        raise _Left("its softmax is in float64, and that of kernels in float32")
    found = _sides(first, labels)
    if found is None:
        raise _Left("its scores sum over more dims than one")
    batch, sides = found
    key_sides = [operand for operand in sides if axis in operand.labels]
    if len(key_sides) != 1:
        raise _Left("its softmax is not over the keys")
    (k,) = key_sides
    q = sides[1 - sides.index(k)]
    own = [label for label in k.labels if label not in (*batch, axis, SIZE)]  # rows that share their queries
    (of_weights, of_values), (weights_batch, values_batch) = _ordered(product, side)
    if [dims[dim] for dim in of_weights] != [axis]:
        raise _Left("its weights are not summed over the keys alone")
    if {dims[dim] for dim in weights_batch} != {*batch, *own}:
        raise _Left("its values have other rows or heads than its keys")
    values = product.invars[1 - side]
    of_v: list[Any] = [SIZE] * values.aval.ndim
    of_v[of_values[0]] = axis
    for dim, of in zip(values_batch, weights_batch, strict=True):
        of_v[dim] = dims[of]
    if of_v.count(SIZE) != 1:
        raise _Left("its values have more dims than one for the size of a head")
    free = [dims[dim] for dim in range(len(dims)) if dim not in of_weights and dim not in weights_batch]
    out = [dims[dim] for dim in product.params["dimension_numbers"][1][side]]
    out += [*free, SIZE] if side == 0 else [SIZE, *free]
    queries = [label for label in q.labels if label is not None and label not in batch and label != SIZE]
    if math.prod(shape[label] for label in queries) < MIN_QUERIES:
        raise _Left(f"it has fewer than {MIN_QUERIES} queries")
    query, setting, masks = _meaning(body, scores, shape, axis, queries)
    rows = [*own, *(label for label in q.labels if label in batch)]
    n_rows = max(len(rows) - 1, min(len(rows), 1))  # the last dim of several is that of the heads
    heads = [*rows[n_rows:], *(label for label in queries if label != query)]
    return {
        "sizes": dict(enumerate(shape)),
        "key": axis,
        "query": query,
        "rows": rows[:n_rows],
        "heads": heads,
        "q": q,
        "k": k,
        "v": Operand(values, tuple(of_v)),
        "masks": masks,
        "biases": scores.biases,
        "setting": replace(setting, precision=_precision(first, product)),
        "out": (product, tuple(out)),
    }


def _precision(*products: Any) -> Any:
    """The precision that products of float32 ask for, the highest where it is one of `jax.lax.Precision`; None for the
    platform's own."""
    asked = [eqn.params["precision"] for eqn in products if eqn.invars[0].aval.dtype == jnp.float32]
    levels = [level for each in asked if isinstance(each, tuple) for level in each]
    other = next((each for each in asked if each is not None and not isinstance(each, tuple)), None)
    return other or max(levels, key=lambda level: level.value, default=None)


def _ordered(product: Any, side: int) -> Any:
    """The contracted and the batch dims of a product, those of one side first."""
    contracted, batch = product.params["dimension_numbers"]
    order = (side, 1 - side)
    return [contracted[i] for i in order], [batch[i] for i in order]


def _sides(product: Any, labels: Sequence[Any]) -> tuple[list[Any], list[Operand]] | None:
    """The labels of a product's batch dims, and its operands with theirs; None where it contracts more than one dim."""
    (contracted, batch) = product.params["dimension_numbers"]
    if len(contracted[0]) != 1:
        return None
    n = len(batch[0])
    rest = list(labels[n:])
    sides = []
    for atom, dim, of_batch in zip(product.invars, (of[0] for of in contracted), batch, strict=True):
        own: list[Any] = [None] * atom.aval.ndim
        own[dim] = SIZE
        for place, at in enumerate(of_batch):
            own[at] = labels[place]
        for i in range(atom.aval.ndim):
            if i != dim and i not in of_batch:
                own[i] = rest.pop(0)
        sides.append(Operand(atom, tuple(own)))
    return list(labels[:n]), sides


def _meaning(
    body: Body, scores: Scores, shape: Sequence[int], key: int, queries: Sequence[Any]
) -> tuple[Any, Setting, list[tuple[Operand, bool]]]:
    """The label of the queries' positions, the setting, and the masks that it does not say."""
    default = max(queries, key=lambda label: shape[label])
    found: list[Inequalities] = []
    others, of_bands = [], []
    for mask, is_seen in ((mask.operand, mask.is_seen) for mask in scores.masks):
        of = inequalities(body, mask.atom, negated=not is_seen)
        if of is None:
            others.append((mask, is_seen))
            continue
        of_bands.append((mask, is_seen))
        # In the dims of the softmax, so that bands of all masks are read together.
        found.append(tuple(_in_labels(each, mask.labels, len(shape)) for each in of))
    together = tuple(each for of in found for each in of)
    for query in [default, *(label for label in queries if label != default)]:
        setting = _as_setting(Setting(scores.scale), together, shape, query, key)
        if setting is not None:
            return query, setting, others
    return default, Setting(scores.scale), [*others, *of_bands]


def _in_labels(each: Any, labels: Sequence[Any], n: int) -> Any:
    slopes = [0] * n
    for slope, label in zip(each.slopes, labels, strict=True):
        if label is not None:
            slopes[label] = slope
    return type(each)(each.start, tuple(slopes))
