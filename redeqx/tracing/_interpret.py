"""Interprets a jaxpr under rules. This is the only jaxpr interpreter of the library.

The function is traced once, put into normal form, and its equations are evaluated once, for any number of rules, and inside
loops, branches and remats. Each equation is offered to the rules in order. A rule may compute it, and may call the rules
after it (`Site.rest`), so each rule wraps the rules that follow it. Equations that no rule computes are emitted unchanged,
with their name scope and source line, so profiles and tracebacks still show the user's code.

A rule is asked about an equation if it claims the equation (`Rule.claims`) or if an operand carries its tag (`Tagged`), such
as the tag of a weight. Equations that are computed together, such as a softmax between two products, form a `Group`. Groups
are found before the evaluation, and a group is computed in the place of its last equation.

`Tag.enter` defines how tags pass into the jaxprs inside equations. Such a jaxpr is traced again only if a tag enters it or a
rule claims an equation in it.

A rule that fails changes nothing: its equation is computed by the rules after it, or as it is written, and a warning names
the rule and the line (`or_as_written`).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, ClassVar, TypeVar

import jax
from jax.extend import core as jex

from ._body import Body
from ._inner import (
    REMAT,
    Env,
    Place,
    as_array,
    as_fun,
    insides,
    is_replaceable,
    is_variable,
    place_of,
    run,
    shapes_in,
    variables,
    with_insides,
)
from ._normal import normal
from ._unknown import or_as_written

T = TypeVar("T")


class Tag:
    """A rule's annotation of a value. Subclasses define how it passes into the jaxprs inside equations."""

    def enter(self, value: Any, place: Place) -> tuple[Any, "Tag | None"]:
        """Returns the operand to pass into an inner jaxpr, and its tag there, or None for no tag."""
        del place
        return self.release(value), None

    def begin(self, value: Any) -> Any:
        """Returns the value inside the jaxpr, for an input that arrives with this tag."""
        return Tagged(value, self)

    def release(self, value: Any) -> Any:
        """Returns the plain value, for equations and rules that do not know the tag."""
        return value


@partial(jax.tree_util.register_dataclass, data_fields=["value"], meta_fields=["tag"])  # it passes through a remat
@dataclass(frozen=True)
class Tagged:
    """A value that carries a rule's tag."""

    value: Any
    tag: Tag


def has_tag(value: Any, kind: type[Tag]) -> bool:
    return isinstance(value, Tagged) and isinstance(value.tag, kind)


def plain(value: Any) -> Any:
    """Returns a value without its tag, for use by any equation."""
    return value.tag.release(value.value) if isinstance(value, Tagged) else value


@dataclass(frozen=True)
class Group:
    """Equations of one jaxpr that a rule computes together.

    A group is ignored if one of its intermediate values is read from outside, or if one of its equations has effects.
    """

    eqns: Sequence[Any]  # in the jaxpr's order; the outputs of the last one are those of the group
    compute: Callable[[Callable[[Any], Any]], Sequence[Any]]  # from a function that reads outside atoms, to the outputs
    reads: Sequence[Any] = ()  # further outside atoms that `compute` reads but the equations do not

    def is_closed_in(self, body: Body) -> bool:
        """Whether nothing outside the group reads its intermediate values, and no equation of it has effects."""
        ids = {id(eqn) for eqn in self.eqns}
        intermediates = [var for eqn in self.eqns[:-1] for var in eqn.outvars]
        read_outside = any(id(reader) not in ids for var in intermediates for reader in body.readers(var))
        return not read_outside and not any(eqn.effects for eqn in self.eqns)


class Rule:
    """Replaces the computation of some equations of a traced function. Values and gradients stay the same."""

    follows: ClassVar[type[Tag] | None] = None  # the type of this rule's own tags
    corrects: ClassVar[bool] = False  # whether the numbers are wrong without it: then its errors are raised

    def rewritten(self, closed: Any) -> Any:
        """Returns a closed jaxpr to compute instead of one in normal form, with the same inputs. Called before all else."""
        return closed

    def of(self, closed: Any) -> "Rule | None":
        """Returns the rule specialised to one function in normal form, or None if it would change nothing."""
        del closed
        return self

    def tag(self, args: Sequence[Any]) -> Sequence[Any]:
        """Returns the function's inputs, with those that the rule follows wrapped in `Tagged`."""
        return args

    def claims(self, eqn: Any) -> bool:
        """Whether the rule applies to an equation regardless of its operands' tags."""
        del eqn
        return False

    def groups(self, body: Body) -> Iterable[Group]:
        """Yields the groups of equations in a function. Those of a group are in one jaxpr."""
        del body
        return ()

    def __call__(self, eqn: Any, ins: Sequence[Any], site: "Site") -> Sequence[Any] | None:
        """Returns the outputs of an equation, or None to decline it. The rule claims it, or an operand has the rule's tag.

        Some operands may be tagged, by this rule or by others.
        """
        del eqn, ins, site
        return None


def transformed(
    fn: Callable[..., Any],
    rules: Sequence[Rule],
    choose: Callable[[Any, Sequence[Any]], Sequence[Rule]] | None = None,
) -> Callable[..., Any]:
    """Wraps a function of PyTrees of arrays, so that it is computed under rules, in their order. Without rules, returns `fn`
    itself. `choose` takes the closed jaxpr of `fn` and its arguments, and returns the rules to apply instead."""
    if not rules:
        return fn

    def under_rules(*args: Any) -> Any:
        flat, treedef = jax.tree.flatten(args)
        traced, shapes = jax.make_jaxpr(lambda *flat: fn(*jax.tree.unflatten(treedef, flat)), return_shape=True)(*flat)
        chosen = rules if choose is None else choose(traced, args)
        return jax.tree.unflatten(jax.tree.structure(shapes), interpret(traced, flat, chosen))

    return under_rules


def interpret(closed: Any, args: Sequence[Any], rules: Sequence[Rule]) -> list[Any]:
    """Returns the outputs of a closed jaxpr, computed under rules."""
    form = written = normal(closed)
    for rule in rules:
        form = _or_without(rule, lambda rule=rule, form=form: normal(rule.rewritten(form)), lambda form=form: form)
    found = (_or_without(rule, partial(rule.of, form), lambda: None) for rule in rules)
    active = tuple(rule for rule in found if rule is not None)
    for rule in active:
        args = _or_without(rule, partial(rule.tag, args), lambda args=args: args)
    interpreter = _Interpreter(form, active)
    if not interpreter.changes(form) and not any(isinstance(arg, Tagged) for arg in args):
        return as_fun(closed if form is written else form)(*args)  # faster to trace than equation by equation
    return interpreter.evaluate(form, args, active, ())


@dataclass(frozen=True)
class Site:
    """The context of an equation. It gives a rule access to the rules after it and to the jaxprs inside the equation."""

    around: tuple[str, ...]  # the names of the primitives that enclose it, outermost first
    _interpreter: "_Interpreter"
    _rules: tuple[Rule, ...]  # all rules
    _later: tuple[Rule, ...]  # the rules that have not been asked yet

    @property
    def body(self) -> Body:
        """The function that contains the equation."""
        return self._interpreter.body

    def rest(self, eqn: Any, ins: Sequence[Any]) -> list[Any]:
        """Returns the outputs of an equation, computed by the rules after this one, or unchanged if none computes it."""
        group = self._interpreter.groups.get(eqn)
        for i, rule in enumerate(self._later):
            if group is not None and group[0] is rule:
                values = list(map(plain, ins))
                read = Env(zip(eqn.invars, values, strict=True)).__getitem__
                by_group = partial(_checked, eqn, partial(group[1].compute, read))
                return _or_without(rule, by_group, partial(run, eqn, values), eqn)
            is_followed = rule.follows is not None and any(has_tag(value, rule.follows) for value in ins)
            if not is_followed and not self._interpreter.claims(rule, eqn):
                continue
            later = replace(self, _later=self._later[i + 1 :])
            by_rule = partial(_checked, eqn, partial(rule, eqn, ins, later))
            if (outs := _or_without(rule, by_rule, partial(later.rest, eqn, ins), eqn)) is not None:
                return outs
        if self.enters(eqn):
            return self.enter(eqn, ins)
        return run(eqn, list(map(plain, ins)))

    def enters(self, eqn: Any) -> bool:
        """Whether the rules are applied inside the equation: it contains jaxprs that may be replaced."""
        return is_replaceable(eqn) and eqn not in self._interpreter.groups

    def enter(self, eqn: Any, ins: Sequence[Any], *, remat: Callable[..., Any] | None = None) -> list[Any]:
        """Returns the outputs of an equation whose inner jaxprs are computed under the rules. `remat` wraps each inner
        function, as `jax.checkpoint` does; inside, only the rules after this one apply then."""
        values: list[Any] = list(ins)
        tags: list[Tag | None] = [None] * len(ins)
        for i, value in enumerate(ins):
            if isinstance(value, Tagged):
                place = place_of(eqn, i)
                outside = lambda value=value: (plain(value), None)  # noqa: E731
                into = outside if place is None else partial(value.tag.enter, value.value, place)
                values[i], tags[i] = or_as_written(into, outside, f"the tag `{type(value.tag).__name__}`", eqn)
        rules, around = self._later if remat else self._rules, (*self.around, eqn.primitive.name)
        around = (*around, REMAT) if remat else around
        new_insides, is_changed = [], False
        for inner in insides(eqn):
            of_inputs = [tags[i] for i in inner.operands]
            if remat is None and all(tag is None for tag in of_inputs) and not self._interpreter.changes(inner.closed):
                new_insides.append(inner.closed)
                continue
            is_changed = True

            def inside(*args: Any, closed: Any = inner.closed, tags: Sequence[Tag | None] = of_inputs) -> list[Any]:
                tagged = [arg if tag is None else tag.begin(arg) for arg, tag in zip(args, tags, strict=True)]
                return self._interpreter.evaluate(closed, tagged, rules, around)

            new_insides.append(jax.make_jaxpr(remat(inside) if remat else inside)(*shapes_in(inner.closed)))
        return run(*with_insides(eqn, values, new_insides)) if is_changed else run(eqn, values)


@dataclass(frozen=True)
class _Interpreter:
    """Evaluates a function in normal form under rules. Caches its searches, so each equation is searched once."""

    closed: Any
    rules: tuple[Rule, ...]
    _claims: dict[tuple[int, Any], bool] = field(default_factory=dict)
    _changes: dict[Any, bool] = field(default_factory=dict)

    @cached_property
    def body(self) -> Body:
        return Body(self.closed)

    def evaluate(self, closed: Any, args: Sequence[Any], rules: tuple[Rule, ...], around: tuple[str, ...]) -> list[Any]:
        """Returns the outputs of the function, or of a closed jaxpr inside it."""
        jaxpr, calls = closed.jaxpr, self._calls
        env = Env(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *args], strict=True))
        site = Site(around, self, rules, rules)
        for written in jaxpr.eqns:
            if (eqn := calls.get(written, written)) is not None:
                outs = site.rest(eqn, env.read(eqn.invars))
                env.update((var, out) for var, out in zip(eqn.outvars, outs, strict=True) if is_variable(var))
        return list(map(as_array, map(plain, env.read(jaxpr.outvars)), jaxpr.outvars))

    def claims(self, rule: Rule, eqn: Any) -> bool:
        key = (id(rule), eqn)
        if key not in self._claims:
            self._claims[key] = _or_without(rule, partial(rule.claims, eqn), lambda: False, eqn)
        return self._claims[key]

    def changes(self, closed: Any) -> bool:
        """Whether any rule applies to any equation of a closed jaxpr, even if no input is tagged."""
        return any(map(self._applies, closed.jaxpr.eqns))

    def _applies(self, eqn: Any) -> bool:
        """Whether any rule applies to an equation or inside it."""
        if eqn not in self._changes:
            is_own = eqn in self._calls or any(self.claims(rule, eqn) for rule in self.rules)
            inner = insides(eqn) if is_replaceable(eqn) else ()
            self._changes[eqn] = is_own or any(self.changes(each.closed) for each in inner)
        return self._changes[eqn]

    @cached_property
    def groups(self) -> dict[Any, tuple[Rule, Group]]:
        """The groups, each by an equation that calls it."""
        found, members = dict[Any, tuple[Rule, Group]](), set[Any]()
        for rule in self.rules:
            if type(rule).groups is Rule.groups:
                continue
            for group, call in _or_without(rule, partial(_calls, rule, self.body), list):
                if members.isdisjoint(group.eqns):
                    members.update(group.eqns)
                    found[call] = (rule, group)
        return found

    @cached_property
    def _calls(self) -> dict[Any, Any]:
        """For the last equation of each group, the equation that calls the group; for its others None."""
        last = {group.eqns[-1]: call for call, (_, group) in self.groups.items()}
        return {eqn: last.get(eqn) for _, group in self.groups.values() for eqn in group.eqns}


def _or_without(rule: Rule, attempt: Callable[[], T], otherwise: Callable[[], T], eqn: Any = None) -> T:
    """Returns the result of one of a rule's methods, or that of `otherwise`, with a warning, if the rule fails."""
    if rule.corrects:
        return attempt()
    name = type(rule).__name__.removeprefix("_")
    return or_as_written(attempt, otherwise, f"the rule `{name}`", eqn)


def _checked(eqn: Any, compute: Callable[[], Sequence[Any] | None]) -> Any:
    """Returns the outputs that a rule computes for an equation, or None. Raises TypeError unless they have its types."""
    if (outs := compute()) is None:
        return None
    if len(outs) != len(eqn.outvars):
        raise TypeError(f"{len(outs)} outputs instead of {len(eqn.outvars)}")
    for var, out in zip(eqn.outvars, outs, strict=True):
        if not isinstance(out, Tagged) and hasattr(var.aval, "shape"):
            expected, found = ((aval.shape, aval.dtype) for aval in (var.aval, jax.typeof(out)))
            if expected != found:
                raise TypeError(f"an output of {found[1]}{list(found[0])} instead of {expected[1]}{list(expected[0])}")
    return list(outs)


def _calls(rule: Rule, body: Body) -> list[tuple[Group, Any]]:
    """Returns the groups of a rule in a function, each with an equation that calls it."""
    return [(group, _call(group, type(rule).__name__)) for group in rule.groups(body) if group.is_closed_in(body)]


def _call(group: Group, name: str) -> Any:
    """Returns an equation that calls a group. Rules that follow tagged operands see the group as this equation."""
    computed = {var for eqn in group.eqns for var in eqn.outvars}
    read = [*(atom for eqn in group.eqns for atom in eqn.invars), *group.reads]
    invars, outvars = [var for var in variables(read) if var not in computed], group.eqns[-1].outvars
    info = jex.DebugInfo("redeqx", name, None, None)
    closed = jex.ClosedJaxpr(jex.Jaxpr((), invars, outvars, list(group.eqns), set(), info), ())

    def fun(*args: Any) -> list[Any]:
        return jex.jaxpr_as_fun(closed)(*args)

    fun.__name__ = name
    (call,) = jax.make_jaxpr(jax.jit(fun))(*shapes_in(closed)).jaxpr.eqns
    return call.replace(invars=invars, outvars=outvars, source_info=group.eqns[-1].source_info)
