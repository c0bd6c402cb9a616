"""What a function does with the rows of its batch: the verdict, and what follows from it for a part of the rows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import jax
from jaxtyping import PyTree

from .._tree import as_bare_shapes, bare_shape
from ..tracing import normal, shortened, without_remats
from ._atoms import Dim, Step, flat, steps_of
from ._draws import ByNumber, Draws, Factors, factors_of
from ._growth import Growth, constants_of, have_same_constants
from ._names import Inputs, Names
from ._rows import NOT_KNOWN, ROW, RowDependence


class Whole(NamedTuple):
    """An equation that is computed on the whole batch: it mixes rows, but depends on no weight."""

    place: int  # among the equations of the function
    factors: tuple[tuple[Factors, ...], ...]  # of each dim of each output


class Scaled(NamedTuple):
    """An equation whose operands depend on the number of rows in different ways."""

    place: int  # among the equations of the function
    powers: tuple[int, ...]  # of the whole batch's rows over those of a part, by which each operand is multiplied


@dataclass(frozen=True)
class RowUse:
    """What a function does with the rows of its batch."""

    # "separable": its outputs are means or sums over rows, or rows; "after": they are once the values of `whole`, which
    # depend on data alone, were computed on the whole batch; "mixed": what it computes for a row depends on other rows;
    # "unknown": the analysis has no answer. Only "separable" and "after" are proofs.
    kind: Literal["separable", "after", "mixed", "unknown"]
    degree: int = 0  # 0 for a mean over rows, 1 for a sum
    group: int = 1  # that many consecutive rows belong together: preference pairs, or the samples of a prompt
    line: str = ""  # `file:line` of the first equation that mixes rows, or of what is unknown
    why: str = ""  # what that equation does, such as "a reduction over rows"
    metrics: tuple[str, ...] = ()  # one phrase with its line for each metric that mixes rows, so that it is one of each part
    draws: tuple[str, ...] = ()  # one sentence with its line for each random draw that cannot follow the rows
    changes_state: bool = False  # whether each part of the batch changes the model's state
    no_sums: tuple[str, ...] = ()  # metrics whose weight grows with the rows, and their total does not, as that of a mean
    gathers: tuple[tuple[str, str], ...] = field(default=(), repr=False)  # lines over which rows cannot be split, and why
    is_random: bool = True  # whether anything may be drawn
    trace: Any = field(default=None, repr=False, compare=False)  # in normal form, for the given shapes, from 4 rows on
    # How `transforms.by_row` computes a part: the equations to compute from the numbers of the rows, on the whole batch (and
    # whether the order of its rows matters), and with operands scaled by the part's share of the rows; for each output, the
    # power of the whole batch's rows over those of the part to multiply it by; the outputs that are by row, and those that
    # are of the part's rows alone.
    by_number: tuple[ByNumber, ...] = field(default=(), repr=False)
    whole: tuple[Whole, ...] = field(default=(), repr=False)
    in_order: bool = field(default=True, repr=False)
    scaled: tuple[Scaled, ...] = field(default=(), repr=False)
    powers: tuple[int, ...] = field(default=(), repr=False)
    of_rows: frozenset[int] = field(default=frozenset(), repr=False)
    own: tuple[int, ...] = field(default=(), repr=False)
    n_rows: int = field(default=0, repr=False, compare=False)  # of the trace
    # Pairs of the constants for so many rows and for twice as many. A part with others is another function.
    constants: Sequence[tuple[Any, Any]] = field(default=(), repr=False, compare=False)

    @property
    def is_exact(self) -> bool:
        """Whether parts of the batch give together what the whole batch gives."""
        return self.kind in ("separable", "after")

    @property
    def stays_whole(self) -> bool:
        """Whether rows are divided only where the user asks for it: nothing proves that parts give what the whole gives, or
        each part changes the model's state."""
        return (not self.is_exact or self.changes_state) and self != UNKNOWN

    def is_about(self, closed: Any, n_rows: int) -> bool:
        """Whether it is a proof for a closed jaxpr in normal form of the function, for another number of rows."""
        is_known = self.is_exact and not self.draws and self.n_rows
        return bool(is_known) and have_same_constants(self.constants, closed, n_rows / self.n_rows)

    @property
    def is_plain(self) -> bool:
        """Whether a part of the rows is computed as it is written: it draws nothing for rows, and its outputs are sums."""
        needs_numbers = self.by_number or self.whole or self.scaled or self.draws
        return self.is_exact and not needs_numbers and not any(self.powers)

    @property
    def is_additive(self) -> bool:
        """Whether the outputs of all rows are the sum of those of batches that are computed one by one."""
        return self.kind == "separable" and not self.draws and not self.of_rows and not any(self.powers)

    @property
    def text(self) -> str:
        """The verdict in one line, such as "separable after 2 values of the whole batch" or "mixed at train.py:41"."""
        if not self.is_exact:
            where = f" at {self.line}" if self.line else ""
            reason = self.why and (f" ({self.why})" if where or self.kind == "mixed" else f": {self.why}")
            return f"{self.kind}{where}{reason}"
        said = "a sum over rows" if self.kind == "separable" and self.degree else "separable"
        if self.kind == "after":
            said += f" after {len(self.whole)} value{'s' * (len(self.whole) != 1)} of the whole batch"
        said += f", {self.group} rows at a time" if self.group > 1 else ""
        return "; ".join((said, *["each micro-batch changes the state"] * self.changes_state, *self.metrics))


UNKNOWN = RowUse("unknown")  # nothing has been traced yet


def row_use(
    fn: Callable[..., Any],
    weights: PyTree,
    state: PyTree,
    batch: PyTree,
    *args: PyTree,
    returns_rows: bool = False,
    is_differentiated: bool = True,
) -> RowUse:
    """Returns what a function does with the rows of its batch, from its traces at two numbers of rows.

    **Arguments:**

    - `fn`: takes the following; returns arrays. Those in a dict are metrics, by name: they do not decide the verdict.
    - `weights`, `state`, `batch`, `args`: arrays or their shapes. Dim 0 of each leaf of the batch is rows.
    - `returns_rows`: whether dim 0 of each output is rows. There are no metrics then, and `RowDependence(makes_text=True)`.
    - `is_differentiated`: whether a gradient is taken of the first output, whose derivatives may be the user's own.
    """
    inputs = Inputs(*(len(jax.tree.leaves(tree)) for tree in (weights, state, batch)))
    n = jax.tree.leaves(batch)[0].shape[0]
    n *= -(-4 // n)  # at fewer rows, powers of their number and other functions of it look alike
    try:
        given = ((weights, state, with_rows(batch, rows), *args) for rows in (n, 2 * n))
        (ours, outs), (theirs, _) = (jax.make_jaxpr(fn, return_shape=True)(*as_bare_shapes(each)) for each in given)
        ours, theirs = normal(ours), normal(theirs)
    except Exception as error:
        first = str(error).partition("\n")[0]
        return RowUse("unknown", why=f"it cannot be traced for {n} and {2 * n} rows: {first}")
    options = {"returns_rows": returns_rows, "is_differentiated": is_differentiated}
    names, other = (Names(without_remats(each), inputs, **options) for each in (ours, theirs))
    growth = Growth(names, other)
    gathers = dict.fromkeys((step.line, why) for step in steps_of(names.root) if (why := _why_gathered(names.rows, step)))
    found: dict[str, Any] = {"trace": ours, "gathers": tuple(gathers)}
    # A layer's state takes the statistics of each part, so what the layer computes is not taken from the whole batch. Of the
    # rows of a prediction, no more than one batch is known at a time.
    metrics, with_whole = {} if returns_rows else _metrics_in(outs), not inputs.n_state and not returns_rows
    options = {"with_whole": with_whole, "makes_text": returns_rows}
    judged = _judged(names, growth, metrics, **options) if growth.is_comparable else None
    draws = Draws(names, growth, judged[0].outs if judged else range(len(names.root.outs)))
    found |= {
        "is_random": draws.is_random,
        "draws": tuple(dict.fromkeys(f"{why} ({shortened(step.line)})" for step, why in draws.refused)),
    }
    if judged is None:
        return RowUse("unknown", why="its equations depend on the number of rows", **found)
    rows, mixing = judged
    if not rows.is_sum:
        how, step = rows.first or ("the number of rows", None)
        kind = "unknown" if how in NOT_KNOWN else "mixed"
        return RowUse(kind, why=how, line="" if step is None else shortened(step.line), **found)
    if draws.wrong is not None:
        step, why = draws.wrong
        return RowUse("unknown", why=f"the numbers of the rows are needed, but {why}", line=shortened(step.line), **found)
    whole = tuple(Whole(names.places[id(s.eqn)], tuple(factors_of(growth, out.dims) for out in s.outs)) for s in rows.whole)
    scaled = tuple(Scaled(names.places[id(s.eqn)], rows.scaled[id(s)]) for s in steps_of(names.root) if id(s) in rows.scaled)
    of_rows = {i for i, state in rows.outs.items() if state.kind == ROW or growth.has_rows(names.root.outs[i].dims)}
    own = tuple(i for name in mixing for i in metrics[name])
    every = range(len(names.root.outs))
    powers = tuple(rows.outs[i].degree - (i not in of_rows) if i in rows.outs else 0 for i in every)
    if draws.refused and (rows.whole or rows.scaled or any(powers)):  # each part draws as a batch of its own
        step, _ = draws.refused[0]
        return RowUse("mixed", why="a draw that cannot follow the rows", line=shortened(step.line), **found)
    return RowUse(
        "after" if rows.whole else "separable",
        degree=powers[0] if powers and 0 not in of_rows else 0,
        group=growth.group,
        by_number=tuple(draws.by_number),
        whole=whole,
        in_order=rows.in_order,
        scaled=scaled,
        powers=powers,
        of_rows=frozenset(of_rows),
        metrics=tuple(mixing.values()),
        no_sums=tuple(name for name, of in metrics.items() if name not in mixing and _is_no_sum(rows, of)),
        own=own,
        n_rows=n,
        constants=tuple(zip(*map(constants_of, (ours, theirs)), strict=False)),
        **found,
    )


def with_rows(batch: PyTree, n: int) -> PyTree:
    """Returns the shapes of a batch with another number of rows."""
    return jax.tree.map(lambda x: bare_shape(x, (n, *x.shape[1:])), batch)


def _metrics_in(outs: PyTree) -> dict[str, list[int]]:
    """Returns the outputs that are metrics, by name: those in a dict."""
    found: dict[str, list[int]] = {}
    for i, (path, _) in enumerate(jax.tree_util.tree_leaves_with_path(outs)):
        for name in [key.key for key in path if isinstance(key, jax.tree_util.DictKey)][:1]:
            found.setdefault(name, []).append(i)
    return found


def _judged(
    names: Names, growth: Growth, metrics: Mapping[str, Sequence[int]], **options: bool
) -> tuple[RowDependence, dict[str, str]]:
    """Returns how the outputs depend on rows, without metrics that mix rows, and a phrase for each of these."""
    left, mixing = dict(metrics), list[str]()
    judged = set(range(len(names.root.outs)))
    while True:
        rows = RowDependence(names, growth, judged, **options)
        found = [name for name, of in left.items() if not set(rows.mixed).isdisjoint(of)]
        if not found:
            break
        mixing += found
        for name in found:
            judged.difference_update(left.pop(name))
    said = dict[str, str]()
    for name in mixing if rows.is_sum else ():
        first = RowDependence(names, growth, metrics[name], **options).first
        line = "" if first is None else f" at {shortened(first[1].line)}"
        said[name] = f"metric `{name}` mixes{line or ' rows'}"
    return rows, said


def _is_no_sum(rows: RowDependence, metric: Sequence[int]) -> bool:
    """Whether of a metric's total and its weight, by their indices, only the weight grows with the number of rows."""
    total, weight = (rows.outs[i] for i in (metric[0], metric[-1]))
    return total.degree < weight.degree and not total.is_of_any_degree  # as zeros are, of a part that is switched off


def shapes_of_row(weights: PyTree, state: PyTree, batch: PyTree) -> tuple[Any, ...]:
    """Returns the shapes on which a verdict depends: all but the number of the batch's rows."""
    leaves, treedef = jax.tree.flatten((weights, state, with_rows(batch, 1)))
    return treedef, tuple((x.shape, bare_shape(x).dtype) for x in leaves)


def _why_gathered(rows: Dim, step: Step) -> str:
    """Returns why XLA cannot split an equation over rows, so that it gathers all of them; an empty string if it can."""

    def has_rows(dim: Dim, rows: Dim = rows) -> bool:
        return any(atom in rows for atom in flat(dim))

    if has_rows(step.scanned):
        return "a loop takes one after the other"
    hows = {how for how, dim in step.mixes if has_rows(dim)}
    if "order" in hows:
        return f"`{step.name}` depends on their order"
    if hows and step.name.startswith(("gather", "scatter", "dynamic_slice", "dynamic_update_slice")):
        return f"`{step.name}` looks them up by index"
    is_some = any(how == "part" and has_rows(dim, rows[:1]) for how, dim in step.mixes)
    return f"`{step.name}` takes some of them" if is_some else ""
