"""Rules applied to a traced function: inside all control flow, once per equation, in the order of the rules."""

import itertools
import re
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from redeqx.dims import view
from redeqx.machine import make_mesh
from redeqx.tracing import Body, Group, Rule, Tag, Tagged, matmul_flops, plain, run, transformed
from redeqx.transforms import FixConvolutions, GatherAtUse, RematLoops, Reshard, Shardings
from tests._programs import assert_all_close, computed


@dataclass(frozen=True)
class Replace(Rule):
    """Replaces each equation of a primitive by a function, and counts the calls of its methods."""

    name: str
    compute: Any = None
    n_calls: Counter = field(default_factory=Counter)

    def claims(self, eqn):
        self.n_calls["claims"] += 1
        return eqn.primitive.name == self.name

    def __call__(self, eqn, ins, site):
        self.n_calls["calls"] += 1
        return None if self.compute is None else [self.compute(*ins)]


def nested_sines(weights, x):
    """Sines in a scan inside a jit, in a branch, in a while loop and its condition, and in a remat."""

    def layer(x, w):
        return jnp.sin(x @ w), None

    x = jax.jit(lambda x: jax.lax.scan(layer, x, weights)[0])(x)
    x = jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x)
    x = jax.lax.while_loop(lambda c: c[0] < 2 * jnp.sin(1.0), lambda c: (c[0] + 1, jnp.sin(c[1])), (0.0, x))[1]
    return {"out": jax.checkpoint(jnp.sin)(x)}


def test_rules_apply_inside_all_control_flow():
    weights, x = jnp.linspace(0.1, 0.9, 3 * 16).reshape(3, 4, 4), jnp.ones((2, 4))

    def by_hand(weights, x):
        for w in weights:
            x = 2 * (x @ w)
        return 2 * 2**4 * (2 * x)  # the branch, four rounds of the loop (to 2 * 2), the remat

    changed = transformed(nested_sines, [Replace("sin", lambda x: 2 * x)])(weights, x)
    assert jnp.allclose(changed["out"], by_hand(weights, x))
    assert jnp.array_equal(transformed(nested_sines, [Replace("sin")])(weights, x)["out"], nested_sines(weights, x)["out"])


def test_earlier_rules_wrap_later_rules():
    @dataclass(frozen=True)
    class Around(Rule):
        factor: float

        def claims(self, eqn):
            return eqn.primitive.name == "sin"

        def __call__(self, eqn, ins, site):
            return [1 + self.factor * out for out in site.rest(eqn, ins)]

    rules = [Around(2.0), Around(3.0), Replace("sin", lambda x: 10 * x)]
    assert transformed(jnp.sin, rules)(1.0) == 1 + 2 * (1 + 3 * 10)
    assert transformed(jnp.sin, rules[::-1])(1.0) == 10


def test_site_lists_the_enclosing_primitives():
    rule_sites = []

    class Note(Rule):
        def claims(self, eqn):
            return eqn.primitive.name == "sin"

        def __call__(self, eqn, ins, site):
            rule_sites.append(site.around)

    jax.eval_shape(transformed(nested_sines, [Note()]), jnp.ones((3, 4, 4)), jnp.ones((2, 4)))
    assert rule_sites[:-1] == [("scan",), ("cond",), ("while",), ("while",)]  # no plain jit
    assert rule_sites[-1] in (("remat2",), ("checkpoint",))


# --- tags -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scaled(Tag):
    """The value is to be multiplied by 2, but only when something computes with it."""

    def release(self, value):
        return 2 * value

    def enter(self, value, place):
        return (2 * value, None) if place.kind == "carry" else (value, self)


@dataclass(frozen=True)
class DelayScaling(Rule):
    """Delays the scaling of the first input as long as possible."""

    releases: list = field(default_factory=list)
    follows: ClassVar = Scaled

    def tag(self, args):
        return [Tagged(args[0], Scaled()), *args[1:]]

    def __call__(self, eqn, ins, site):
        if not isinstance(ins[0], Tagged) or view(eqn) is None:
            self.releases.append((eqn.primitive.name, site.around))
            return None
        return [Tagged(run(eqn, [ins[0].value, *map(plain, ins[1:])])[0], Scaled())]


TAGGED = {
    "views": lambda w, x: x @ w.T[:, :3].astype(jnp.float32),
    "jit": lambda w, x: jax.jit(lambda w, x: x @ w)(w.T, x),
    "scan's constant": lambda w, x: jax.lax.scan(lambda x, _: (x @ w, None), x, length=2)[0],
    "scan's slice": lambda w, x: jax.lax.scan(lambda x, row: (x * row, None), x, w)[0],
    "scan's carry": lambda w, x: jax.lax.scan(lambda w, _: (w @ w, None), w, length=2)[0],
    "cond": lambda w, x: jax.lax.cond(x.sum() > 0, lambda w: x @ w, lambda w: x, w),
    "while": lambda w, x: jax.lax.while_loop(lambda c: c[0] < w[0, 0] + 2, lambda c: (c[0] + 1, c[1] @ w), (0.0, x))[1],
    "remat": lambda w, x: jax.checkpoint(lambda w, x: jnp.sin(x @ w))(w, x),
    "custom_jvp": lambda w, x: jax.nn.relu(w) @ x.T,
    "returned": lambda w, x: w,
}


def test_tagged_value_is_released_at_its_use():
    w, x = jnp.linspace(-1, 1, 16).reshape(4, 4), jnp.linspace(0, 1, 8).reshape(2, 4)
    rules = {name: DelayScaling() for name in TAGGED}
    found = computed({name: (transformed(fn, [rules[name]]), (w, x)) for name, fn in TAGGED.items()})
    assert_all_close(found, computed({name: (fn, (2 * w, x)) for name, fn in TAGGED.items()}), rtol=1e-5)
    for name in ("scan's constant", "scan's slice", "cond", "remat"):
        assert any(primitive in ("dot_general", "mul") and around for primitive, around in rules[name].releases), name


# --- groups ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Silu(Rule):
    """Replaces `x * sigmoid(x)` by `jax.nn.silu(x)` times a factor, which shows that the rule was applied."""

    factor: float = 1.0
    found: list = field(default_factory=list)

    def groups(self, body):
        for eqn in body.eqns:
            if eqn.primitive.name != "mul":
                continue
            for x, gate in (eqn.invars, eqn.invars[::-1]):
                inner = body.producer(gate)
                if inner is not None and inner.primitive.name == "logistic" and inner.invars[0] is x:
                    self.found.append(eqn)
                    yield Group([inner, eqn], lambda read, x=x: [self.factor * jax.nn.silu(read(x))])


def gate(x):
    return x * jax.nn.sigmoid(x)


def gate_in_a_jit(x):
    return x * jax.jit(lambda x: jax.nn.sigmoid(x))(x)


def scanned(fn):
    return lambda x: jax.lax.scan(lambda total, row: (total + fn(row), None), jnp.zeros_like(x[0]), x)[0]


AROUND = {
    "plain": lambda fn: fn,
    "jit": jax.jit,
    "vmap": jax.vmap,
    "scan": scanned,
    "remat": jax.checkpoint,
    "scan of remat of jit": lambda fn: scanned(jax.checkpoint(jax.jit(fn))),
    "cond": lambda fn: lambda x: jax.lax.cond(x.sum() > 1e6, lambda x: x, fn, x),
}


def test_a_group_with_an_effect_is_computed_as_it_is_written():
    class Everything(Rule):
        def groups(self, body):
            yield Group(body.eqns, lambda read: [2 * read(body.closed.jaxpr.invars[0])])

    def fn(x):
        jax.debug.callback(seen.append, x)
        return 3 * x

    seen = []
    assert transformed(fn, [Everything()])(1.0) == 3 and transformed(lambda x: 3 * x, [Everything()])(1.0) == 2
    jax.effects_barrier()
    assert seen == [1.0]


@pytest.mark.sweep
def test_group_is_replaced_with_equal_values_and_gradients():
    x, plain, changed = jnp.linspace(-2, 2, 12).reshape(3, 4), {}, {}
    for fn, (around, wrap) in itertools.product((gate, gate_in_a_jit), AROUND.items()):
        wrapped = wrap(fn)

        def loss(x, wrapped=wrapped):
            return jnp.sum(jnp.sin(wrapped(x)))

        name = f"{fn.__name__} in {around}"
        assert "silu" in str(jax.make_jaxpr(transformed(loss, [Silu()]))(x)), name
        plain |= {name: (jax.value_and_grad(loss), (x,)), f"{name}, times 3": (loss, (x,))}
        changed |= {
            name: (jax.value_and_grad(transformed(loss, [Silu()])), (x,)),
            f"{name}, times 3": (transformed(loss, [Silu(3.0)]), (x,)),
        }
    found, expected = computed(changed), computed(plain)
    for name in [name for name in plain if name.endswith("times 3")]:
        assert abs(found.pop(name) - expected.pop(name)) > 1e-3, "the replacement is computed"
    assert_all_close(found, expected, rtol=1e-5, atol=1e-6)
    assert all(found[name][1].dtype == expected[name][1].dtype for name in expected)


def inner_result_read_again(x):
    s = jax.nn.sigmoid(x)
    return x * s + s


def inner_result_returned(x):
    s = jax.nn.sigmoid(x)
    return x * s, s


@pytest.mark.parametrize(
    "fn",
    [
        inner_result_read_again,
        inner_result_returned,
        jax.jit(inner_result_read_again),
        jax.checkpoint(inner_result_returned),
    ],
)
def test_group_whose_inner_result_is_used_elsewhere_is_not_replaced(fn):
    x, rule = jnp.linspace(-2, 2, 4), Silu(3.0)
    jax.tree.map(np.testing.assert_array_equal, transformed(fn, [rule])(x), fn(x))
    assert rule.found


def test_function_without_a_group_is_unchanged():
    fn = jax.jit(lambda x: jnp.sin(x) * 2)
    assert str(jax.make_jaxpr(transformed(fn, [Silu()]))(1.0)) == str(jax.make_jaxpr(fn)(1.0))


@dataclass(frozen=True)
class Softmax(Rule):
    """Replaces matmul, masked softmax and matmul by one function, and records whether the mask is causal."""

    masks: list = field(default_factory=list)

    def groups(self, body):
        for eqn in body.eqns:
            chain = [eqn]
            for name in ("div", "exp", "sub", "select_n", "dot_general"):
                producers = [body.producer(atom) for atom in chain[-1].invars]
                chain += [inner for inner in producers if inner is not None and inner.primitive.name == name][:1]
            if len(chain) < 6 or eqn.primitive.name != "dot_general":
                continue
            last = {id(eqn): i for i, eqn in enumerate(body.eqns)}
            span = body.eqns[last[id(chain[-1])] : last[id(eqn)] + 1]
            mask = body.value(chain[4].invars[0])
            is_causal = mask is not None and bool((np.asarray(mask) == np.tril(np.ones(mask.shape, bool))).all())
            self.masks.append(is_causal)
            q, k = chain[-1].invars
            v = next(atom for atom in eqn.invars if body.producer(atom) is None or atom not in chain[1].outvars)
            mask = chain[4].invars[0]

            def compute(read, q=q, k=k, v=v, mask=mask):
                scores = jnp.where(read(mask), read(q) @ read(k).T, -1e9)
                return [jnp.exp(scores - jax.nn.logsumexp(scores, -1, keepdims=True)) @ read(v)]

            yield Group([one for one in span if one.primitive.name != "transpose"], compute)


def attend(q, k, v, mask):
    return jax.nn.softmax(jnp.where(mask, jnp.einsum("th,sh->ts", q, k), -1e9), axis=-1) @ v


def in_a_loop(q, k, v, mask):
    return jax.lax.scan(lambda q, _: (jax.checkpoint(attend)(q, k, v, mask), None), q, length=2)[0]


@pytest.mark.parametrize("fn", [attend, jax.jit(attend), in_a_loop])
def test_value_of_a_constant_mask_is_known_at_its_use(fn):
    q, k, v = (jnp.sin(jnp.arange(32.0).reshape(8, 4) + i) for i in range(3))
    for mask, is_causal in ((lambda x: jnp.tril(jnp.ones((8, 8), bool)), True), (lambda x: x @ x.T < 1, False)):
        rule = Softmax()

        def loss(q, k, v, mask=mask):
            return jnp.sum(fn(q, k, v, mask(q)) ** 2)

        expected = jax.value_and_grad(loss, (0, 1, 2))(q, k, v)
        got = jax.jit(jax.value_and_grad(transformed(loss, [rule]), (0, 1, 2)))(q, k, v)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), got, expected)
        assert set(rule.masks) == {is_causal}


@dataclass(frozen=True)
class AddTable(Rule):
    """Adds a numpy array to each sine."""

    def claims(self, eqn):
        return eqn.primitive.name == "sin"

    def __call__(self, eqn, ins, site):
        table = np.linspace(0, 1, ins[0].size, dtype=np.float32).reshape(ins[0].shape)
        return [out + jnp.asarray(table) for out in site.rest(eqn, ins)]


def test_rule_may_close_over_arrays():
    weights, x = jnp.linspace(0.1, 0.9, 3 * 16).reshape(3, 4, 4), jnp.ones((2, 4))
    table = np.linspace(0, 1, 8, dtype=np.float32).reshape(2, 4)

    def fn(weights, x):
        x = jax.lax.scan(jax.checkpoint(lambda x, w: (jnp.sin(x @ w), None)), x, weights)[0]
        return jax.lax.cond(x.sum() > 1e6, lambda x: x, lambda x: jnp.sin(x), x).sum()

    def by_hand(weights, x):
        for w in weights:
            x = jnp.sin(x @ w) + table
        return (jnp.sin(x) + table).sum()

    got, expected = (jax.jit(jax.value_and_grad(f))(weights, x) for f in (transformed(fn, [AddTable()]), by_hand))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), got, expected)


@dataclass(frozen=True)
class AddValue(Rule):
    """Adds a value to each sine."""

    value: Any

    def claims(self, eqn):
        return eqn.primitive.name == "sin"

    def __call__(self, eqn, ins, site):
        return [out + self.value for out in site.rest(eqn, ins)]


def over_rows(fn):
    return lambda x: jax.lax.scan(lambda x, row: (fn(x) * row, fn(row)), x, jnp.arange(1.0, 4.0))


def repeated(fn):
    return lambda x: jax.lax.scan(lambda x, _: (fn(x), None), x, length=3)[0]


def either(fn):
    """A branch that reads a value twice, and one that reads none."""
    return lambda x: jax.lax.cond(x > 0.2, lambda x: x * fn(fn(2 * x)), jnp.cos, x)


def until_large(fn):
    """A while loop that calls the function in its condition too."""
    step, is_small = lambda c: (c[0] + 1, fn(c[1])), lambda c: c[0] * fn(c[0]) < 4
    return lambda x: jax.lax.while_loop(is_small, step, (0.0, x))[1]


# For a function `fn` of a number: functions that call it inside loops, branches and calls.
CALLERS = {
    "jit": lambda fn: jax.jit(lambda x: x * fn(x)),
    "scan": over_rows,
    "scan in scan": lambda fn: repeated(lambda x: over_rows(fn)(x)[0]),
    "remat": lambda fn: jax.checkpoint(lambda x: fn(fn(x))),
    "remat with prevent_cse per operand": lambda fn: jax.checkpoint(lambda x: fn(x), prevent_cse=(True,)),
    "remat in scan": lambda fn: repeated(jax.checkpoint(fn)),
    "cond in scan": lambda fn: repeated(either(fn)),
    "scan in cond in jit": lambda fn: jax.jit(lambda x: jax.lax.cond(x > 0, over_rows(fn), over_rows(jnp.cos), x)),
    "while": until_large,
}


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.sweep] * (i % 2)) for i, x in enumerate(CALLERS)])
def test_rule_may_close_over_values_of_the_enclosing_trace(name):
    def by_hand(x, v):
        return sum(out.sum() for out in jax.tree.leaves(CALLERS[name](lambda x: jnp.sin(x) + v * v)(x)))

    def by_rule(x, v):
        return sum(out.sum() for out in jax.tree.leaves(transformed(CALLERS[name](jnp.sin), [AddValue(v * v)])(x)))

    def derivatives(fn):
        return jax.jvp(fn, (x, v), (1.0, 2.0)) if name == "while" else jax.value_and_grad(fn, (0, 1))(x, v)

    def values(fn):
        mapped = jax.vmap(fn)(jnp.array([x, -x]), jnp.array([v, 3 * v]))
        in_a_loop = jax.lax.scan(lambda x, v: (fn(x, v), fn(x, v)), x, jnp.linspace(0.0, 1.0, 3))
        return derivatives(fn), mapped, jax.vmap(fn, (None, 0))(x, jnp.ones(2)), in_a_loop

    x, v = 0.3, 1.2
    for of in (derivatives, jax.jit(values, static_argnums=0)):
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), of(by_rule), of(by_hand))


# --- constants ------------------------------------------------------------------------------------------------------------


def test_constants_are_known_inside_inner_jaxprs():
    def fn(x):
        mask = jnp.tril(jnp.ones((3, 3)))

        def body(carry, row):
            return jax.jit(lambda c, m, r: c * m + r)(carry, mask, row), None

        return jax.lax.scan(body, x, jnp.arange(6.0).reshape(2, 1, 3))[0]

    body = Body(jax.make_jaxpr(fn)(jnp.ones((3, 3))))
    (jit,) = (eqn for eqn in body.eqns if eqn.primitive.name == "jit" and len(eqn.invars) == 3)
    in_jit = jit.params["jaxpr"].jaxpr
    mask_values = [value for value in map(body.value, in_jit.invars) if value is not None]
    assert len(mask_values) == 1  # not the carry, not a slice
    np.testing.assert_array_equal(mask_values[0], np.tril(np.ones((3, 3))))
    product, total = (next(eqn for eqn in in_jit.eqns if eqn.primitive.name == name) for name in ("mul", "add"))
    assert not any(body.is_constant(eqn.outvars[0]) for eqn in (product, total))


def test_long_chain_of_constants_does_not_exceed_the_recursion_limit():
    def fn(x):
        y = jnp.arange(2.0)
        for _ in range(2000):
            y = y + 1
        return x + y

    body = Body(jax.make_jaxpr(fn)(jnp.ones(2)))
    np.testing.assert_array_equal(body.value(body.eqns[-1].invars[1]), [2000, 2001])


def test_a_number_is_cast_as_it_is_written():
    """Fused attention divides scores by it."""

    def fn(x):
        return x / jnp.broadcast_to(jnp.sqrt(jnp.float32(7)).astype(jnp.int32), x.shape)  # 2

    body = Body(jax.make_jaxpr(fn)(jnp.ones(2)))
    assert body.number(body.eqns[-1].invars[1]) == 2


def test_large_effectful_or_input_dependent_values_are_not_constants():
    def fn(x):
        large = jnp.zeros((4096, 2048))
        random = jax.pure_callback(lambda: np.zeros(2), jax.ShapeDtypeStruct((2,), np.float32))
        jax.debug.print("{}", x)
        return large.sum() + random + x

    body = Body(jax.make_jaxpr(fn)(jnp.ones(2)))
    of = {eqn.primitive.name: eqn for eqn in body.eqns}
    assert not body.is_constant(of["broadcast_in_dim"].outvars[0])
    assert not any(body.is_constant(atom) for atom in body.closed.jaxpr.outvars)
    assert body.value(of["reduce_sum"].outvars[0]) is None


# --- one traversal --------------------------------------------------------------------------------------------------------


def nested_scans(depth, x):
    if depth == 0:
        return jnp.sin(x)
    return jax.lax.scan(lambda x, _: (nested_scans(depth - 1, x), None), x, length=2)[0]


@pytest.mark.parametrize("depth", [2, 5])
def test_each_body_is_traversed_once_at_any_depth(depth):
    rules = [Replace("sin"), Replace("sin")]
    jax.make_jaxpr(transformed(partial(nested_scans, depth), rules))(1.0)
    n_eqns = depth + 1  # a scan for each level, and the sine
    for rule in rules:
        assert rule.n_calls == {"claims": n_eqns, "calls": 1}


def test_jits_are_inlined_so_that_rules_see_the_values_inside_them():
    fn, outer = jax.jit(lambda x: (jnp.cos(x) * 2, x, 1.0)), jax.jit(lambda x: jax.jit(jnp.tan)(jnp.sin(x)))

    def calls(x):
        for _ in range(10):
            x = sum(fn(x))
        return jax.jit(lambda x: x)(outer(x))

    rule = Replace("sin", lambda x: 2 * x)
    changed = jax.make_jaxpr(transformed(calls, [rule]))(1.0)
    assert not {eqn.primitive.name for eqn in changed.jaxpr.eqns} & {"jit", "pjit"} and rule.n_calls["calls"] == 1
    x = 0.1
    for _ in range(10):
        x = 2 * np.cos(x) + x + 1
    np.testing.assert_allclose(transformed(calls, [rule])(0.1), np.tan(2 * x), rtol=1e-4)


def test_function_is_traced_once_for_any_number_of_rules():
    n_traces = 0

    def fn(x):
        nonlocal n_traces
        n_traces += 1
        return jnp.sin(x)

    jax.jit(jax.grad(transformed(fn, [Replace("sin"), Replace("cos"), Silu(), RematLoops()]))).lower(1.0)
    assert n_traces == 1


# --- the rules of the library, all together -------------------------------------------------------------------------------


def scanned_loss(weights, x):
    return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0])


def rematted_loss(weights, x):
    return jnp.sum(jax.lax.scan(jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None)), x, weights)[0])


def test_remat_loops_preserve_gradients(x64):
    weights, x = jnp.linspace(-1, 1, 3 * 64).reshape(3, 8, 8), jnp.linspace(0, 1, 16).reshape(2, 8)
    recomputing, forward = transformed(scanned_loss, [RematLoops()]), 3 * 2 * 2 * 8 * 8
    found, expected = (jax.jit(jax.grad(fn))(weights, x) for fn in (recomputing, scanned_loss))
    assert jnp.allclose(found, expected, rtol=1e-6)
    for fn, times in ((scanned_loss, 3), (recomputing, 4), (rematted_loss, 4)):
        jaxpr = jax.make_jaxpr(jax.grad(fn))(weights, x).jaxpr
        assert matmul_flops(jaxpr).total() == times * forward
        assert matmul_flops(jaxpr, with_recomputation=False).total() == 3 * forward
    # A loop that recomputes already is unchanged.
    assert str(jax.make_jaxpr(transformed(rematted_loss, [RematLoops()]))(weights, x)) == str(
        jax.make_jaxpr(rematted_loss)(weights, x)
    )


def constants(weights, x):
    """Returns literals of the jaxpr, of a jit, a remat, a branch and a loop's carry."""
    w, bias = weights
    y = jnp.sin(x @ w + bias).reshape(len(x), 2, -1).sum(1)  # equal parts of a dim that the model axis splits
    literals = (y.sum(), True, 2.5, np.float16(3), np.int8(4), jnp.zeros((), jnp.bfloat16), 7)
    nested = {"jit": jax.jit(lambda y: (y, True, 1.0))(y), "remat": jax.checkpoint(lambda y: (jnp.sin(y), False, 1))(y)}
    nested["cond"] = jax.lax.cond(y.sum() > 0, lambda y: (y, True, 1.0), lambda y: (2 * y, True, 1.0), y)
    begin = (x @ w, jnp.zeros((), jnp.bool_), 1.0, jnp.float16(2))

    def body(carry, _):
        return (jnp.sin(carry[0][:, :8] @ w), True, 2.0, jnp.float16(1)), None

    nested["scan"] = jax.lax.scan(body, begin, length=2)[0]
    return literals, nested


def test_loops_inside_a_rematerialised_loop_are_unchanged():
    def inner(x, _):
        return jax.lax.scan(lambda x, _: (jnp.sin(x), None), x, length=2)

    def fn(x):
        return jax.lax.scan(inner, x, length=3)[0]

    text = str(jax.make_jaxpr(transformed(fn, [RematLoops()]))(1.0))
    assert text.count("checkpoint") + text.count("remat") == 1
    assert jnp.allclose(jax.jit(jax.grad(transformed(fn, [RematLoops()])))(1.0), jax.jit(jax.grad(fn))(1.0))


def gather_at_use(n_model_shards, n_fsdp_shards):
    mesh = make_mesh(n_model_shards, n_fsdp_shards)
    specs = ((P(None, "fsdp"), P(None, None)), (P("fsdp"), P(None)))
    return GatherAtUse([Shardings(*(NamedSharding(mesh, spec) for spec in pair)) for pair in specs])


REWRITTEN = {
    "replaced": lambda: [Replace("sin", jnp.sin)],
    "nothing replaced": lambda: [Replace("tan")],
    "grouped convolutions": lambda: [FixConvolutions(make_mesh(4))],
    "reshard": lambda: [Reshard([1, 0], make_mesh(4))],
    "nothing to reshard": lambda: [Reshard([None, None], make_mesh(4))],
    "gather": lambda: [gather_at_use(1, 8)],
    "remat loops": lambda: [RematLoops()],
    "all": lambda: [RematLoops(), gather_at_use(2, 2), Replace("sin", jnp.sin), Reshard([1, 0], make_mesh(2, 2))],
}


@pytest.mark.sweep
def test_literal_outputs_keep_dtype_and_weak_type():
    """A loop's carry must keep its weak types too."""
    weights, x = (jnp.linspace(-1, 1, 8 * 16).reshape(8, 16), jnp.ones(16)), jnp.linspace(0, 1, 64).reshape(8, 8)
    assert any("True" in str(var) for var in jax.make_jaxpr(constants)(weights, x).jaxpr.outvars), "literals"
    output_leaves = []

    def changed(rules):
        def fn(weights, x):
            outs = transformed(constants, rules())(weights, x)
            output_leaves.extend(jax.tree.leaves(outs))
            return outs

        return fn

    found = computed({name: (changed(rules), (weights, x)) for name, rules in REWRITTEN.items()})
    assert all(isinstance(leaf, jax.Array) for leaf in output_leaves)
    expected = jax.tree.leaves(jax.jit(constants)(weights, x))
    for name, outs in found.items():
        for a, b in zip(jax.tree.leaves(outs), expected, strict=True):
            assert (a.dtype, a.weak_type) == (b.dtype, b.weak_type), name
            np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=1e-5, atol=1e-6)


@dataclass(frozen=True)
class Failing(Rule):
    """Fails in one of a rule's methods, on each sine."""

    method: str

    def _fail(self, method):
        if method == self.method:
            raise NotImplementedError("an unknown form")

    def rewritten(self, closed):
        self._fail("rewritten")
        return None if self.method == "form" else closed

    def of(self, closed):
        self._fail("of")
        return self

    def tag(self, args):
        self._fail("tag")
        return args

    def claims(self, eqn):
        self._fail("claims") if eqn.primitive.name == "sin" else None
        return eqn.primitive.name == "sin"

    def groups(self, body):
        self._fail("groups")
        if self.method == "group":
            yield Group([], self._compute)
        if self.method == "compute":
            yield from (Group([eqn], self._compute) for eqn in body.eqns if eqn.primitive.name == "sin")

    def _compute(self, read):
        self._fail("compute")
        return []

    def __call__(self, eqn, ins, site):
        self._fail("call")
        return {"count": [], "type": [jnp.zeros(7)]}.get(self.method)


METHODS = ["rewritten", "form", "of", "tag", "claims", "groups", "group", "compute", "call", "count", "type"]


@pytest.mark.parametrize("method", METHODS)
def test_rule_that_fails_leaves_the_function_as_written(method):
    """The rules after it apply. The warnings name the rule, and the line where there is one."""
    args, after = (jnp.ones((3, 4, 4)), jnp.ones((2, 4))), Replace("sin", lambda x: 2 * x)
    with pytest.warns(UserWarning) as caught:
        found = transformed(nested_sines, [Failing(method), after])(*args)
    expected = transformed(nested_sines, [] if method == "compute" else [after])(*args)
    np.testing.assert_allclose(found["out"], expected["out"], rtol=1e-6)
    named = [
        re.search(r"a form that the rule `Failing`( at \S*test_interpret.py:\d+)? knows, got", str(each.message))
        for each in caught
    ]
    assert all(named)
    if method in ("claims", "compute", "call", "count", "type"):
        assert any(each[1] for each in named if each)


def test_tag_that_cannot_enter_a_loop_stays_outside():
    class Stuck(Tag):
        def enter(self, value, place):
            raise KeyError("an unknown place")

    class Stick(Rule):
        follows: ClassVar = Stuck

        def tag(self, args):
            return [Tagged(args[0], Stuck()), *args[1:]]

    args = jnp.ones((3, 4, 4)), jnp.ones((2, 4))
    with pytest.warns(UserWarning, match="a form that the tag `Stuck` at .*test_interpret.py:.* knows, got KeyError"):
        found = transformed(nested_sines, [Stick()])(*args)
    np.testing.assert_allclose(found["out"], nested_sines(*args)["out"], rtol=1e-6)


def test_rule_that_corrects_numbers_is_not_left_out():
    class Needed(Failing):
        corrects = True

    with pytest.raises(NotImplementedError, match="an unknown form"):
        transformed(jnp.sin, [Needed("call")])(1.0)


def test_error_of_the_function_itself_is_raised_without_a_warning():
    """A custom derivative runs inside the rules, when the function is differentiated."""

    @jax.custom_vjp
    def fn(x):
        return x

    def forward(x):
        raise LookupError("my own")

    fn.defvjp(forward, lambda _, g: (g,))

    class Around(Rule):
        def claims(self, eqn):
            return eqn.primitive.name.startswith("custom_vjp")

        def __call__(self, eqn, ins, site):
            return site.rest(eqn, ins)

    with pytest.raises(LookupError, match="my own"):
        jax.grad(transformed(fn, [Around()]))(1.0)


@dataclass(frozen=True)
class AddsTen(Rule):
    """Computes a sum with another value of its second operand."""

    def claims(self, eqn):
        return eqn.primitive.name == "add"

    def __call__(self, eqn, ins, site):
        return site.rest(eqn, [ins[0], jnp.float32(10)])


@pytest.mark.parametrize("fn", [lambda x: x + 2.0, lambda x: x + jnp.sin(x), lambda x: x + x])
def test_rule_gives_an_operand_another_value(fn):
    """Also one that is a literal of the traced function."""
    assert transformed(fn, [AddsTen()])(jnp.float32(1)) == 11
