"""What a loop saves for its backward pass: which of its values are kept, computed again, or put into host memory.

The candidates are the outputs of products, attention and other kernels. All else is bound by memory bandwidth, and computing
it again takes no longer than writing and reading it. Of each candidate three numbers are known before anything compiles: its
bytes on one device; the time to compute it again, given what else is saved; and the bytes that the bus to the host copies
while one iteration is computed. `choose_saved` takes the candidates that save the most time for their bytes, first into the
memory of the device, then into that of the host as far as the bus hides the copies. It is greedy: each choice changes what
the others are worth.

XLA for GPUs begins a copy when its value is made, and awaits it at the end of the iteration: of a value made in the middle
less than a third is hidden. libtpu begins it with the next iteration, and awaits it where this makes the same value: of
attention and its output 12 % is hidden (Llama 2 70B on v5p, as compiled by jax 0.12). So early values go to the host on
GPUs, and late ones on TPUs. On v6e 81 % of late values is hidden, more than that explains, so there all that a whole
iteration can hide goes to the host. In the backward pass, which takes longer, most copies are hidden.

Owns the numbers and the choice. A rule of `transforms` applies them to a traced loss.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
from jax.extend import core as jex

from ..machine import MODEL, TPUS, Chip
from ..tracing import Env, insides, line_of, matmul_flops, restricted, variables
from ._estimate import may_fuse
from ._shards import Shards
from ._strategy import bytes_of

# The share of the published rate that the products of a layer reach at least. MaxText's published steps reach 45 to 65 %.
_REACHED = 2 / 3
KEPT, HOST, AGAIN = "kept", "host", "again"
KERNELS = ("attention", "pallas_call")  # kernels whose derivative reads outputs that no other equation returns


@dataclass(frozen=True)
class Candidate:
    """A value, or several that are saved together, of one iteration of a loop."""

    key: Any  # as the policy knows it: a name, or the primitive with the types of its operands
    what: str
    line: str
    scope: str  # the names around it, such as that of the weight
    n_bytes: int  # on one device
    window: float  # of the products while which it is copied to the host, on one device, at the published rate


def key_of(primitive: Any, avals: Iterable[Any]) -> Any:
    """Returns the key of a kernel's outputs: a policy sees no more of an equation."""
    return primitive.name, *((tuple(aval.shape), str(aval.dtype)) for aval in avals)


@dataclass(frozen=True)
class Loop:
    """One loop of a loss: what its iterations could save, what it costs to compute that again, and what they do save."""

    line: str
    n: int  # of iterations, each of which saves its own values
    carry: int  # bytes on one device of what an iteration saves in any case; scalars are not counted
    seconds: float  # of the products of one iteration on one device, at the published rate
    forward: float  # of one iteration, with what it writes and sums over model shards
    candidates: Sequence[Candidate]
    # The time to compute everything that the backward pass reads, given the keys of what is saved.
    again: Callable[[Collection[Any]], float] = field(repr=False)
    saved: Mapping[Any, str] = field(default_factory=dict)  # `KEPT` or `HOST` by key; the others are computed again
    carry_in: str = KEPT  # or `HOST`

    def choice(self, candidate: Candidate) -> str:
        return self.saved.get(candidate.key, AGAIN)

    def keys(self, where: str) -> frozenset[Any]:
        """Returns the keys of what is kept, or of what goes to the host."""
        return frozenset(key for key, chosen in self.saved.items() if chosen == where)

    def n_bytes(self, where: str) -> int:
        """Returns the bytes of all iterations on one device, or for it on its host."""
        own = sum(each.n_bytes for each in self.candidates if self.choice(each) == where)
        return self.n * (own + (self.carry if self.carry_in == where else 0))

    def hides(self, candidate: Candidate, chip: Chip) -> bool:
        """Whether the bus copies a candidate to the host, with all that goes there already, while an iteration goes on."""
        chosen = [each for each in self.candidates if self.choice(each) == HOST or each is candidate]
        copies = [(each.window, each.n_bytes) for each in chosen]
        if self.carry_in == HOST:
            copies.append((self.seconds, self.carry))
        # In the shortest window there is time for its own copy, in the next one for both, and so on.
        return all(
            sum(n_bytes for other, n_bytes in copies if other <= window) <= chip.host * window / _REACHED
            for window, _ in copies
        )

    @property
    def seconds_again(self) -> float:
        """The time of what is computed again, in all iterations."""
        return self.n * self.again(self.saved.keys())


def choose_saved(loops: Sequence[Loop], budget: float, chip: Chip, host: float) -> list[Loop]:
    """Chooses what the loops of a loss save, for a budget of bytes on one device, and one for it on its host, 0 if this has
    no memory of its own. Carries that do not fit into the first go to the host, if it has room; otherwise they stay."""
    found = [replace(loop, saved={}, carry_in=KEPT) for loop in loops]
    left, left_in_host = budget - sum(loop.n * loop.carry for loop in loops), host
    for i in sorted(range(len(loops)), key=lambda i: -loops[i].n * loops[i].carry):
        n_bytes = loops[i].n * loops[i].carry
        if left < 0 and n_bytes <= left_in_host:
            found[i] = replace(found[i], carry_in=HOST)
            left, left_in_host = left + n_bytes, left_in_host - n_bytes
    while (best := _best(found, left, left_in_host, chip)) is not None:
        i, each, where = best
        found[i] = replace(found[i], saved={**found[i].saved, each.key: where})
        if where == KEPT:
            left -= loops[i].n * each.n_bytes
        else:
            left_in_host -= loops[i].n * each.n_bytes
    return found


def saved_at(loops: Sequence[Loop], level: str, chip: Chip, host: float) -> list[Loop] | None:
    """Returns what loops save at a level of `Compute.remat`, whatever they saved before; None for `"none"`, where they save
    more than the candidates. `host` is as for `choose_saved`."""
    if level in ("matmuls", "full"):
        keys = [[each.key for each in loop.candidates if level == "matmuls"] for loop in loops]
        return [replace(loop, saved=dict.fromkeys(of, KEPT), carry_in=KEPT) for loop, of in zip(loops, keys, strict=True)]
    budget = 0 if level == "offload" else bytes_of(level)
    return None if budget is None else choose_saved(loops, budget, chip, host)


class Row(NamedTuple):
    """A line of a report about a value: what becomes of it, the bytes of all iterations on one device, what it is, the leaf
    of a product, its line of code, and why."""

    choice: str
    n_bytes: int
    what: str
    leaf: str
    line: str
    why: str


def describe_saved(loops: Sequence[Loop], level: str, chip: Chip, host: float, leaves: Collection[str]) -> list[Row]:
    """Returns a row for each value that loops could save at a level of `Compute.remat`. `host` is 0 if the device's host has
    no memory of its own, or else infinity; `leaves` are the names of the model's leaves."""
    rows, roomy = [], saved_at(loops, level, chip, host) or loops
    for loop, other in zip(loops, roomy, strict=True):
        known, times = loop.saved.keys(), f"{loop.n} x " * (loop.n > 1)
        if loop.carry:
            why = "an iteration is computed again from it" + "; there is no room for it" * (loop.carry_in == HOST)
            why += _NO_ROOM * (other.carry_in == HOST != loop.carry_in)
            what = f"{times}inputs of an iteration"
            rows.append(Row(_WORDS[loop.carry_in], loop.n * loop.carry, what, "", loop.line, why))
        for each in sorted(loop.candidates, key=lambda each, loop=loop: [*_WORDS].index(loop.choice(each))):
            chosen = loop.choice(each)
            gain = loop.again({*known} - {each.key}) - loop.again({*known, each.key})
            why = f"{_milliseconds(gain)} to compute it again"
            if chosen == HOST:
                copy, whole = _milliseconds(each.n_bytes / chip.host), _milliseconds(loop.seconds / _REACHED)
                why += f", {copy} to copy it; an iteration takes about {whole}"
            elif chosen == AGAIN and other.choice(each) == HOST:
                why += _NO_ROOM
            elif chosen == AGAIN and gain < 2 * each.n_bytes / chip.bandwidth:
                why += ", no more than to write and to read it"
            elif chosen == AGAIN and level != "full":
                why += "; there is no room for it" + ", and no time to copy it to the host" * bool(host)
            leaf = next((part for part in each.scope.split("/") if part in leaves), "")
            rows.append(Row(_WORDS[chosen], loop.n * each.n_bytes, f"{times}{each.what}", leaf, each.line, why))
    return rows


def share_again(loops: Sequence[Loop]) -> float:
    """Returns the time of what loops compute again, as a share of the time of their forward pass."""
    return sum(loop.seconds_again for loop in loops) / max(1e-12, sum(loop.n * loop.forward for loop in loops))


_NO_ROOM = "; the host has no room for it"
_WORDS = {KEPT: "kept", HOST: "in host memory", AGAIN: "computed again"}


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.2g} ms"


def _best(found: Sequence[Loop], left: float, left_in_host: float, chip: Chip) -> tuple[int, Candidate, str] | None:
    """Returns the candidate that saves the most time for its bytes, of those for which there is room, and where it goes."""
    best: tuple[float, int, Candidate, str] | None = None
    for i, loop in enumerate(found):
        before = loop.again(loop.saved.keys())
        for each in loop.candidates:
            if each.key in loop.saved or not each.n_bytes:
                continue
            n_bytes = loop.n * each.n_bytes
            where = KEPT if n_bytes <= left else HOST if n_bytes <= left_in_host and loop.hides(each, chip) else None
            # To save it is to write and to read it.
            gain = before - loop.again({*loop.saved, each.key}) - 2 * each.n_bytes / chip.bandwidth
            if where is not None and gain > 0 and (best is None or gain / each.n_bytes > best[0]):
                best = gain / each.n_bytes, i, each, where
    return None if best is None else best[1:]


# --- what a loop could save ------------------------------------------------------------------------------------------------


def is_named(eqn: Any) -> bool:
    """Whether an equation is a product, or contains one or a kernel. The outputs of a kernel itself are known by its key."""
    return eqn.primitive.name not in KERNELS and (bool(_flops(eqn)[0]) or any(map(_has_kernel, _inside(eqn))))


def _has_kernel(eqn: Any) -> bool:
    return eqn.primitive.name in KERNELS or any(map(_has_kernel, _inside(eqn)))


def loop_of(body: Any, names: dict[str, Any], n: int, carries: range, shards: Callable[[Any], Shards], chip: Chip) -> Loop:
    """Returns what an iteration of a loop could save.

    **Arguments:**

    - `body`: one iteration as a closed jaxpr, with the values in `names` named.
    - `names`: the equation whose output each name is of.
    - `carries`: which of its inputs are the carry.
    - `shards`: returns the shards of a closed jaxpr with the body's inputs.
    """
    fn = jex.jaxpr_as_fun(body)
    n_outs = len(body.jaxpr.outvars)

    def forward(*args: Any) -> Any:
        outs, pullback = jax.vjp(fn, *args)
        return outs, jax.tree.leaves(pullback)  # the values that the backward pass reads

    avals = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in body.jaxpr.invars]
    closed = jax.make_jaxpr(forward)(*avals)
    graph = _Graph(closed, shards(closed), chip, n_outs)
    candidates = []
    for key, eqns in graph.saved.items():
        made = [names[key]] if key in names else eqns
        outs = [var for eqn in eqns for var in eqn.outvars]
        each = Candidate(
            key=key,
            what=f"{_words(made[0])} {', '.join(map(_type, eqns[0].outvars))}" + f" x {len(eqns)}" * (len(eqns) > 1),
            line=line_of(made[0]),
            scope=str(made[0].source_info.name_stack),
            n_bytes=sum(map(graph.shards.n_bytes, outs)),
            window=graph.window(eqns),
        )
        if graph.seconds(()) > graph.seconds((key,)):  # else the backward pass does not need it
            candidates.append(each)
    _, read = graph.needed(())
    carry = [var for i, var in enumerate(closed.jaxpr.invars) if i in carries and var in read and var.aval.shape]
    products = filter(_has_product, body.jaxpr.eqns)
    line = next(filter(None, map(line_of, products)), "")
    n_bytes = sum(map(graph.shards.n_bytes, carry))
    return Loop(line, n, n_bytes, graph.all_products, graph.forward, candidates, graph.seconds)


class _Graph:
    """The forward pass of an iteration, up to what the backward pass reads, with the time of each equation on a device."""

    def __init__(self, closed: Any, shards: Shards, chip: Chip, n_outs: int):
        self.shards, self._chip = shards, chip
        self._eqns = list(closed.jaxpr.eqns)
        self._read = variables(closed.jaxpr.outvars[n_outs:])
        self._maker = Env(((var, i) for i, eqn in enumerate(self._eqns) for var in eqn.outvars), literal=lambda _: None)
        self._products = list(map(self._product_time, self._eqns))
        self._times = [product + self._other_time(eqn) for eqn, product in zip(self._eqns, self._products, strict=True)]
        self._before_products = {var for eqn in self._eqns for var in _before_products(eqn)}
        self.all_products, self.forward = sum(self._products), sum(self._times)
        self.saved: dict[Any, list[Any]] = {}  # by key, the equations whose outputs are saved together
        for eqn in self._eqns:
            if eqn.primitive.name == "name":
                self.saved.setdefault(eqn.params["name"], []).append(eqn)
            elif eqn.primitive.name in KERNELS:
                self.saved.setdefault(key_of(eqn.primitive, (var.aval for var in eqn.invars)), []).append(eqn)

    def window(self, eqns: Sequence[Any]) -> float:
        """Returns the time of the products while which the outputs of these equations are copied to the host."""
        if self._chip.kind == TPUS["v6e"].kind:
            return self.all_products
        if self._chip.kind.startswith("TPU"):  # until the product that has the name, or the kernel, begins again
            made = (self._maker[(eqn.invars if eqn.primitive.name == "name" else eqn.outvars)[0]] for eqn in eqns)
            return sum(self._products[: min(made)])
        return sum(self._products[max(self._maker[eqn.outvars[0]] for eqn in eqns) + 1 :])

    def _product_time(self, eqn: Any) -> float:
        flops, dtype = _flops(eqn)
        return flops / self.shards.n_devices(*eqn.invars, *eqn.outvars) / self._chip.rate(dtype) if flops else 0.0

    def _other_time(self, eqn: Any) -> float:
        """Returns the time to write an output, unless it is fused with what reads it, and to sum it over model shards."""
        if may_fuse(eqn):
            return 0.0
        written = sum(map(self.shards.n_bytes, eqn.outvars))
        time = written / self._chip.bandwidth
        if eqn.primitive.name == "dot_general":
            axes = self.shards.axes(eqn.invars[0]) & self.shards.axes(eqn.invars[1]) - self.shards.axes(eqn.outvars[0])
            if MODEL in axes:
                time += 2 * written / self._chip.link
        return time

    def needed(self, saved: Collection[Any]) -> tuple[set[int], set[Any]]:
        """Returns the equations to compute again if these keys are saved, and the inputs that they read."""
        known = {var for key in saved for eqn in self.saved[key] for var in eqn.outvars}
        todo, eqns, inputs = [var for var in self._read if var not in known], set[int](), set[Any]()
        while todo:
            var = todo.pop()
            if (i := self._maker.get(var)) is None:
                inputs.add(var)
            elif i not in eqns:
                if var in self._before_products:
                    known.add(var)
                else:
                    eqns.add(i)
                todo += [each for each in variables(self._eqns[i].invars) if each not in known]
        return eqns, inputs

    def seconds(self, saved: Collection[Any]) -> float:
        return sum(self._times[i] for i in self.needed(saved)[0])


def _before_products(eqn: Any) -> list[Any]:
    """Returns the outputs of a `shard_map` that its products do not make, such as the rows that the gradient of a grouped
    matmul reads."""
    if eqn.primitive.name != "shard_map":
        return []
    (inner,) = insides(eqn)
    makes = [restricted(inner.closed, [var]).jaxpr.eqns for var in inner.closed.jaxpr.outvars]
    return [var for var, eqns in zip(eqn.outvars, makes, strict=True) if not any(map(_has_product, eqns))]


def _has_product(eqn: Any) -> bool:
    return is_named(eqn) or eqn.primitive.name in KERNELS


def _inside(eqn: Any) -> list[Any]:
    return [each for inner in insides(eqn) for each in inner.closed.jaxpr.eqns]


def _flops(eqn: Any) -> tuple[float, str]:
    """Returns the FLOPs of an equation's products and of those inside it, and the dtype of most of them."""
    found = matmul_flops(eqn, with_masked=False)
    ((dtype, _),) = found.most_common(1) or [("float32", 0)]
    return found.total(), dtype


def _words(eqn: Any) -> str:
    name = eqn.primitive.name
    if name == "shard_map":  # such as a grouped matmul, of which each device computes a part
        return next(map(_words, filter(_has_product, _inside(eqn))))
    if name in ("dot_general", "checkpoint", "remat2", "remat", "custom_vjp_call", "custom_jvp_call"):
        return "product"
    words = {"conv_general_dilated": "convolution", "pallas_call": "kernel", "scan": "loop"}
    return words[name] if name in words else name.replace("_", " ")


def _type(var: Any) -> str:
    return f"{var.aval.dtype.name}[{', '.join(map(str, var.aval.shape))}]"
