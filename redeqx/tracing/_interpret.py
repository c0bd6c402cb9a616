"""A traced function, computed again under rules: the one interpreter of jaxprs.

The function is traced once and its equations are walked once, however many rules there are, also inside jits, loops,
branches and remats. Each equation is offered to the rules in their order. The first that computes it does so, and may hand
it on to those after it (`Site.rest`): a rule stands around the rules that follow it. What no rule computes is emitted as it
is, with its name scope and source line, so profiles and tracebacks still show the user's code.

A rule is asked about an equation for one of two reasons: it claims the equation by what that is (`Rule.claims`), or an
operand has its tag (`Tagged`), as a weight has. Equations that are computed together, as a softmax between two products, are
a `Group`: found before the walk, and computed by their rule in the place of the last of them.

Tags pass into the jaxprs of equations as `Tag.enter` says. The inside of an equation is traced again only where a tag enters
it or a rule claims something in it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import jax
from jax.extend import core as jex

from ._body import Body
from ._inline import has_jits, inlined
from ._inner import Place, as_fun, insides, is_replaceable, place_of, run, shapes_in, value_of, with_insides
from ._unknown import or_as_written


class Tag:
    """What a rule notes of a value. Subclasses say how that passes into the jaxprs of equations."""

    def enter(self, value: Any, place: Place) -> tuple[Any, "Tag | None"]:
        """An operand of an equation with jaxprs inside, and the tag that it has there; None where it has none."""
        del place
        return self.release(value), None

    def begin(self, value: Any) -> Any:
        """The value inside, where it arrives with this tag."""
        return Tagged(value, self)

    def release(self, value: Any) -> Any:
        """The plain value, for what knows nothing of the tag."""
        return value


@dataclass(frozen=True)
class Tagged:
    """A value of the walk that a rule knows something about."""

    value: Any
    tag: Tag


def has_tag(value: Any, kind: type[Tag]) -> bool:
    return isinstance(value, Tagged) and isinstance(value.tag, kind)


def plain(value: Any) -> Any:
    """A value without its tag, as any equation can compute with it."""
    return value.tag.release(value.value) if isinstance(value, Tagged) else value


@dataclass(frozen=True)
class Group:
    """Equations of one jaxpr that a rule computes together.

    A group is left alone where anything else reads what its equations compute on the way, or where one has effects.

    **Arguments:**

    - `eqns`: in the jaxpr's order. The outputs of the last are those of the group.
    - `compute`: from `read`, which gives the value of each atom that the group reads from outside, to the outputs.
    - `reads`: atoms from outside that `compute` reads, where the equations themselves do not.
    """

    eqns: Sequence[Any]
    compute: Callable[[Callable[[Any], Any]], Sequence[Any]]
    reads: Sequence[Any] = ()

    def is_closed_in(self, body: Body) -> bool:
        """Whether only the group reads what it computes on the way."""
        ids = {id(eqn) for eqn in self.eqns}
        on_the_way = [var for eqn in self.eqns[:-1] for var in eqn.outvars]
        read_outside = any(id(reader) not in ids for var in on_the_way for reader in body.readers(var))
        return not read_outside and not any(eqn.effects for eqn in self.eqns)


class Rule:
    """How some equations of a traced function are computed otherwise. Its values and gradients stay the same."""

    follows: ClassVar[type[Tag] | None] = None  # the tags that are this rule's own

    def rewritten(self, closed: Any) -> Any:
        """The closed jaxpr to compute instead of the traced one, before any rule looks at it; its inputs are the same."""
        return closed

    def of(self, closed: Any) -> "Rule | None":
        """The rule for one traced function, which it may look at; None where it would change nothing."""
        del closed
        return self

    def tag(self, args: Sequence[Any]) -> Sequence[Any]:
        """The function's inputs, `Tagged` where the rule follows them."""
        return args

    def claims(self, eqn: Any) -> bool:
        """Whether the rule wants an equation, whatever its operands are."""
        del eqn
        return False

    def groups(self, body: Body) -> Iterable[Group]:
        """The groups of equations in a body. Plain jits are inlined, so that a pattern is seen whole."""
        del body
        return ()

    def __call__(self, eqn: Any, ins: Sequence[Any], site: "Site") -> Sequence[Any] | None:
        """The outputs of an equation that the rule claims, or of one with an operand that has its tag; None to pass.

        **Arguments:**

        - `ins`: the operands, some of which may be tagged, also by other rules.
        """
        del eqn, ins, site
        return None


def transformed(fn: Callable[..., Any], rules: Sequence[Rule]) -> Callable[..., Any]:
    """`fn` computed under rules, in their order; `fn` itself where there are none.

    **Arguments:**

    - `fn`: takes PyTrees of arrays, and returns one.
    """
    if not rules:
        return fn

    def under_rules(*args: Any) -> Any:
        flat, treedef = jax.tree.flatten(args)
        traced, shapes = jax.make_jaxpr(lambda *flat: fn(*jax.tree.unflatten(treedef, flat)), return_shape=True)(*flat)
        return jax.tree.unflatten(jax.tree.structure(shapes), interpret(traced, flat, rules))

    return under_rules


def interpret(closed: Any, args: Sequence[Any], rules: Sequence[Rule]) -> list[Any]:
    """The outputs of a closed jaxpr, computed under rules."""
    for rule in rules:
        closed = or_as_written(partial(rule.rewritten, closed), closed, f"`{type(rule).__name__}`")
    finders = [rule for rule in rules if type(rule).groups is not Rule.groups]
    body = Body(closed, [None] * len(args))
    if finders and has_jits(closed):
        flat = Body(inlined(closed), [None] * len(args))
        body = flat if _Walk(tuple(finders)).has_groups(flat) else body
    active = tuple(rule for rule in (rule.of(body.closed) for rule in rules) if rule is not None)
    for rule in active:
        args = rule.tag(args)
    walk = _Walk(active)
    if not walk.changes(body) and not any(isinstance(arg, Tagged) for arg in args):
        return as_fun(closed)(*args)  # equation by equation, tracing would take longer
    return walk.evaluate(body, args, active, ())


@dataclass(frozen=True)
class Site:
    """Where an equation is computed: how a rule reaches the rules after it, and the inside of the equation.

    **Arguments:**

    - `body`: the jaxpr that the equation is in.
    - `around`: the names of the primitives whose insides it is in, outermost first.
    """

    body: Body
    around: tuple[str, ...]
    _walk: "_Walk"
    _rules: tuple[Rule, ...]  # of the whole walk
    _later: tuple[Rule, ...]  # that have not been asked yet

    def rest(self, eqn: Any, ins: Sequence[Any]) -> list[Any]:
        """The outputs of an equation, computed by the rules after this one, or else as it is."""
        own = self._walk.groups.get(id(eqn))
        for i, rule in enumerate(self._later):
            if own is not None and own.rule is rule:
                return list(own.compute(_reader(dict(zip(eqn.invars, map(plain, ins), strict=True)))))
            is_followed = rule.follows is not None and any(has_tag(value, rule.follows) for value in ins)
            if not is_followed and not self._walk.claims(rule, eqn):
                continue
            outs = rule(eqn, ins, replace(self, _later=self._later[i + 1 :]))
            if outs is not None:
                return list(outs)
        if self.enters(eqn):
            return self.enter(eqn, ins)
        return run(eqn, list(map(plain, ins)))

    def enters(self, eqn: Any) -> bool:
        """Whether the walk goes into the equation: it has jaxprs inside, which may be replaced."""
        return is_replaceable(eqn) and id(eqn) not in self._walk.groups

    def enter(
        self, eqn: Any, ins: Sequence[Any], *, remat: Callable[..., Any] | None = None, by_rest: bool = False
    ) -> list[Any]:
        """The outputs of an equation whose inside is computed under the rules.

        **Arguments:**

        - `remat`: wraps the inside, as `jax.checkpoint` does.
        - `by_rest`: whether only the rules after this one compute the inside.
        """
        values: list[Any] = list(ins)
        tags: list[Tag | None] = [None] * len(ins)
        for i, value in enumerate(ins):
            if isinstance(value, Tagged):
                place = place_of(eqn, i)
                values[i], tags[i] = (plain(value), None) if place is None else value.tag.enter(value.value, place)
        rules, around = self._later if by_rest else self._rules, (*self.around, eqn.primitive.name)
        around = (*around, "checkpoint") if remat else around
        made, is_changed = [], False
        for index, inner in enumerate(insides(eqn)):
            body, of_inputs = self.body.inside(eqn, index), [tags[i] for i in inner.operands]
            if remat is None and all(tag is None for tag in of_inputs) and not self._walk.changes(body):
                made.append(inner.closed)
                continue
            is_changed = True

            def inside(*args: Any, body: Body = body, tags: Sequence[Tag | None] = of_inputs) -> list[Any]:
                begun = [arg if tag is None else tag.begin(arg) for arg, tag in zip(args, tags, strict=True)]
                return self._walk.evaluate(body, begun, rules, around)

            made.append(jax.make_jaxpr(remat(inside) if remat else inside)(*shapes_in(inner.closed)))
        return run(*with_insides(eqn, values, made)) if is_changed else run(eqn, values)

    def inline(self, eqn: Any, ins: Sequence[Any]) -> list[Any]:
        """The outputs of an equation that calls one jaxpr, whose equations are computed here, under the rules."""
        return self._walk.evaluate(self.body.inside(eqn), ins, self._rules, self.around)


@dataclass(frozen=True)
class _Owned:
    rule: Rule
    compute: Callable[[Callable[[Any], Any]], Sequence[Any]]


@dataclass(frozen=True)
class _Walk:
    """One walk, and what it remembers: each jaxpr is searched once, however often and however deep it is called."""

    rules: tuple[Rule, ...]
    groups: dict[int, _Owned] = field(default_factory=dict)  # by the id of the equation that stands for a group
    _claims: dict[tuple[int, int], bool] = field(default_factory=dict)
    _changes: dict[int, bool] = field(default_factory=dict)
    _eqns: dict[int, Sequence[Any]] = field(default_factory=dict)
    _kept: list[Any] = field(default_factory=list)  # whose ids are in use

    def evaluate(self, body: Body, args: Sequence[Any], rules: tuple[Rule, ...], around: tuple[str, ...]) -> list[Any]:
        """The outputs of a body."""
        jaxpr = body.closed.jaxpr
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, body.closed.consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))

        read = _reader(env)
        site = Site(body, around, self, rules, rules)
        for eqn in self.eqns(body):
            env.update(zip(eqn.outvars, site.rest(eqn, list(map(read, eqn.invars))), strict=True))
        return [value_of(atom, plain(read(atom))) for atom in jaxpr.outvars]

    def claims(self, rule: Rule, eqn: Any) -> bool:
        key = (id(rule), id(eqn))
        if key not in self._claims:
            self._kept.append(eqn)
            self._claims[key] = rule.claims(eqn)
        return self._claims[key]

    def changes(self, body: Body) -> bool:
        """Whether any rule computes any equation of a body otherwise, its tags apart."""
        return self.has_claims(body.closed.jaxpr) or self.has_groups(body)

    def has_claims(self, jaxpr: Any) -> bool:
        if id(jaxpr) not in self._changes:
            self._kept.append(jaxpr)
            self._changes[id(jaxpr)] = any(
                any(self.claims(rule, eqn) for rule in self.rules)
                or (is_replaceable(eqn) and any(self.has_claims(inner.closed.jaxpr) for inner in insides(eqn)))
                for eqn in jaxpr.eqns
            )
        return self._changes[id(jaxpr)]

    def has_groups(self, body: Body) -> bool:
        if all(type(rule).groups is Rule.groups for rule in self.rules):
            return False
        return any(
            id(eqn) in self.groups
            or (is_replaceable(eqn) and any(self.has_groups(body.inside(eqn, i)) for i in range(len(insides(eqn)))))
            for eqn in self.eqns(body)
        )

    def eqns(self, body: Body) -> Sequence[Any]:
        """The equations of a body, each group as one that calls it."""
        if id(body) not in self._eqns:
            self._kept.append(body)
            self._eqns[id(body)] = self._grouped(body)
        return self._eqns[id(body)]

    def _grouped(self, body: Body) -> Sequence[Any]:
        calls: dict[int, Any] = {}  # by the id of a group's last equation
        members: set[int] = set()
        for rule in self.rules:
            for group in rule.groups(body):
                ids = {id(eqn) for eqn in group.eqns}
                if ids & members or not group.is_closed_in(body):
                    continue
                call = _call(group, type(rule).__name__)
                calls[id(group.eqns[-1])] = call
                self.groups[id(call)] = _Owned(rule, group.compute)
                members |= ids
        if not members:
            return body.eqns
        return [calls.get(id(eqn), eqn) for eqn in body.eqns if id(eqn) not in members or id(eqn) in calls]


def _reader(env: Mapping[Any, Any]) -> Callable[[Any], Any]:
    return lambda atom: atom.val if isinstance(atom, jex.Literal) else env[atom]


def _call(group: Group, name: str) -> Any:
    """An equation that calls a group: what rules with tagged operands see of it."""
    made = {var for eqn in group.eqns for var in eqn.outvars}
    read = [*(atom for eqn in group.eqns for atom in eqn.invars), *group.reads]
    inputs = {id(atom): atom for atom in read if not isinstance(atom, jex.Literal) and atom not in made}
    invars, outvars = list(inputs.values()), group.eqns[-1].outvars
    info = jex.DebugInfo("redeqx", name, None, None)
    closed = jex.ClosedJaxpr(jex.Jaxpr((), invars, outvars, list(group.eqns), set(), info), ())

    def fun(*args: Any) -> list[Any]:
        return jex.jaxpr_as_fun(closed)(*args)

    fun.__name__ = name
    (call,) = jax.make_jaxpr(jax.jit(fun))(*shapes_in(closed)).jaxpr.eqns
    return call.replace(invars=invars, outvars=outvars, source_info=group.eqns[-1].source_info)
