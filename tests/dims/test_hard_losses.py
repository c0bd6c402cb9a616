"""Losses that look like sums over rows and are none, and their neighbours that are: verdicts, and numbers in two parts."""

import warnings
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.extend import core
from jax.interpreters import ad, mlir

from redeqx.dims import row_use
from redeqx.models import cross_entropy
from redeqx.transforms import by_row
from tests.dims.parts import all_rows, part_of, rows_with_whole

N, T, D = 16, 6, 8
KEY = jax.random.key(7)
TABLE = jnp.asarray(np.random.default_rng(1).normal(size=64), jnp.float32)
CASES = {}


def weights():
    keys = jax.random.split(jax.random.key(1), 5)
    shapes = {"w": (D, D), "u": (D, D), "v": (D,), "b": (), "four": (4,)}
    return {name: 0.4 * jax.random.normal(key, shape) for (name, shape), key in zip(shapes.items(), keys, strict=True)}


def batch_of(n_rows):
    draw = np.random.default_rng(0)
    return {
        "x": jnp.asarray(draw.normal(size=(n_rows, T, D)), jnp.float32),
        "y": jnp.asarray(draw.normal(size=n_rows), jnp.float32),
        "label": jnp.asarray(draw.integers(0, 5, n_rows)),
    }


def by_rows(p, batch):
    return jnp.tanh(batch["x"].mean(1) @ p["w"]) @ p["v"]


def one(p, x, name="w"):
    return jnp.tanh(x @ p[name]).sum()


def case(kind, group=1):
    def add(loss):
        CASES[loss.__name__] = (loss, kind, group)
        return loss

    return add


separable, after, mixed, unknown = map(case, ("separable", "after", "mixed", "unknown"))

# --- what no table has --------------------------------------------------------------------------------------------------

_reversed_p = core.Primitive("reversed_by_a_package")
_reversed_p.def_abstract_eval(lambda x: x)
mlir.register_lowering(_reversed_p, mlir.lower_fun(lambda x: x[::-1], multiple_results=False))
ad.deflinear(_reversed_p, lambda g: [_reversed_p.bind(g)])


@unknown
def a_primitive_of_a_package_that_keeps_the_shape(p, batch, key):
    return (_reversed_p.bind(by_rows(p, batch)) * batch["y"]).mean()


@mixed
def an_index_within_narrower_bounds(p, batch, key):
    picked = by_rows(p, batch)[lax.clamp(2, jnp.arange(len(batch["y"])), 5)]
    return (picked * batch["y"]).mean()


@after
def a_mean_over_a_mask_and_the_size_of_the_weights(p, batch, key):
    mask = batch["y"] > 0
    return (by_rows(p, batch) * mask).sum() / mask.sum() + 0.1 * (p["w"] ** 2).sum()


@after
def a_mean_over_a_mask_and_a_plain_mean(p, batch, key):
    mask = batch["y"] > 0
    return (by_rows(p, batch) * mask).sum() / mask.sum() + one(p, batch["x"]) / len(batch["x"])


@separable
def sums_written_at_a_position(p, batch, key):
    of_columns = jnp.tanh(batch["x"].mean(1) @ p["w"]).mean(0)
    return lax.dynamic_update_slice(jnp.zeros(2 * D), of_columns, (3,)) @ jnp.concatenate([p["v"], p["v"]])


# --- the number of rows, in odd ways ------------------------------------------------------------------------------------


@separable
def sum_plus_a_number(p, batch, key):
    """Each part adds its share of the number."""
    return by_rows(p, batch).sum() + 3.0


@mixed
def divided_by_its_root(p, batch, key):
    return by_rows(p, batch).sum() / len(batch["x"]) ** 0.5


@mixed
def times_its_logarithm(p, batch, key):
    return by_rows(p, batch).mean() * np.log(len(batch["x"]))


@mixed
def divided_by_one_less(p, batch, key):
    return by_rows(p, batch).sum() / (len(batch["x"]) - 1)


@mixed
def divided_by_a_little_more(p, batch, key):
    return by_rows(p, batch).sum() / (len(batch["x"]) + 1e-4)


@unknown
def to_its_power(p, batch, key):
    return lax.integer_pow(by_rows(p, batch), len(batch["x"])).mean()


@separable
def the_number_in_a_nonlinear_function(p, batch, key):
    return jnp.tanh(by_rows(p, batch) * len(batch["x"])).mean()


@separable
def its_cube(p, batch, key):
    n = len(batch["x"])
    return by_rows(p, batch).mean() * (p["b"] * n) ** 3 / n / n / n


@separable
def its_whole_part(p, batch, key):
    return (by_rows(p, batch) * (p["b"] * len(batch["x"])).astype(jnp.int32)).mean()


@mixed
def written_at_its_place(p, batch, key):
    rows = by_rows(p, batch).mean(keepdims=True)
    return lax.dynamic_update_slice(TABLE, rows, (len(batch["x"]),)) @ jnp.arange(64.0)


@separable
def a_penalty_added_to_a_sum(p, batch, key):
    return by_rows(p, batch).sum() + (p["w"] ** 2).sum()


@mixed
def weights_to_which_rows_are_added(p, batch, key):
    return (jnp.tile(p["b"], 5).at[batch["label"]].add(by_rows(p, batch)) ** 1).sum()


@separable
def a_sum_padded_with_ones(p, batch, key):
    return jnp.pad(by_rows(p, batch).sum(keepdims=True), (0, 3), constant_values=1.0).sum()


@mixed
def a_sum_rounded(p, batch, key):
    return by_rows(p, batch).mean() + by_rows(p, batch).sum().astype(jnp.int32) / len(batch["x"])


@after
def a_sum_in_eight_bits(p, batch, key):
    return by_rows(p, batch).mean() + (batch["label"] * 100).sum().astype(jnp.int8) / len(batch["x"])


@separable
def equal_shares_of_numpy(p, batch, key):
    return (by_rows(p, batch) * np.full(len(batch["x"]), 1 / len(batch["x"]), np.float32)).sum()


@after
def shares_along_the_rows(p, batch, key):
    return (by_rows(p, batch) * jnp.linspace(0, 1, len(batch["x"]))).mean()


@after
def as_many_of_a_table_as_rows(p, batch, key):
    return (by_rows(p, batch) * TABLE[: len(batch["x"])]).mean()


@after
def rows_counted_from_the_end(p, batch, key):
    return (by_rows(p, batch) * (len(batch["x"]) - jnp.arange(len(batch["x"])))).mean()


@after
def the_next_row_of_the_data(p, batch, key):
    return (by_rows(p, batch) * jnp.roll(batch["y"], 1)).mean()


@after
def differences_of_all_pairs_of_data(p, batch, key):
    return (jnp.exp(-((batch["y"][:, None] - batch["y"]) ** 2)).sum(1) * by_rows(p, batch)).mean()


@after
def ones_written_over_as_many_of_a_table_as_rows(p, batch, key):
    return by_rows(p, batch).mean() * TABLE.at[: len(batch["x"])].set(1.0).sum()


@after
def draws_for_rows_written_into_a_table(p, batch, key):
    drawn = jax.random.normal(key, (len(batch["x"]),))
    return by_rows(p, batch).mean() * lax.dynamic_update_slice(TABLE, drawn, (2,)).sum()


@case("after", group=2)
def data_by_every_other_row_beside_the_rows(p, batch, key):
    """The moved rows are a value of the whole batch, although a factor of theirs is in both orders."""
    moved = jnp.concatenate([batch["y"][::2], batch["y"][1::2]])
    return (moved * batch["y"]).mean() * by_rows(p, batch).mean()


@mixed
def outputs_by_every_other_row_beside_the_rows(p, batch, key):
    rows = by_rows(p, batch)
    return (jnp.concatenate([rows[::2], rows[1::2]]) * batch["y"]).mean()


@after
def constants_for_each_row_beside_a_mean_of_data(p, batch, key):
    weighed = batch["y"] * np.arange(len(batch["y"]))
    return by_rows(p, batch).mean() * weighed.mean()


@after
def a_weight_beside_a_mean_of_data(p, batch, key):
    """The mean is of the whole batch, and not the difference, which depends on a weight."""
    return (p["b"] - batch["y"].mean()) ** 2


@after
def a_covariance_of_data_between_weights(p, batch, key):
    x = batch["x"].mean(1)
    return jnp.linalg.slogdet(p["w"] @ (x.T @ x / len(x)) @ p["w"].T + jnp.eye(D))[1]


@mixed
def a_mean_of_outputs_beside_a_mean_of_data(p, batch, key):
    return (by_rows(p, batch).mean() - batch["y"].mean()) ** 2


@after
def a_spectrum_of_the_rows_in_their_order(p, batch, key):
    """The sum alone is of the whole batch, since nothing names the rows of the spectrum."""
    return (jnp.fft.fft(batch["y"]).real * batch["y"]).mean() * by_rows(p, batch).mean()


@case("after", group=2)
def half_of_the_data_twice(p, batch, key):
    return (batch["y"][: len(batch["y"]) // 2].repeat(2) * batch["y"]).mean() * by_rows(p, batch).mean()


# --- loops over rows ----------------------------------------------------------------------------------------------------


def looped(step, start):
    return lambda p, batch: lax.scan(lambda carry, x: step(p, carry, x), start(p), batch["x"])


@mixed
def a_sum_with_alternating_signs(p, batch, key):
    return looped(lambda p, c, x: (one(p, x) - c, None), lambda p: 0.0)(p, batch)[0]


@mixed
def a_carry_negated(p, batch, key):
    return looped(lambda p, c, x: (-c + one(p, x), None), lambda p: 0.0)(p, batch)[0]


@mixed
def a_carry_doubled(p, batch, key):
    return looped(lambda p, c, x: (c + c + one(p, x), None), lambda p: 0.0)(p, batch)[0]


@mixed
def a_carry_transposed(p, batch, key):
    total = looped(lambda p, c, x: (c.T + jnp.tanh(x.T @ x @ p["u"]), None), lambda p: jnp.zeros((D, D)))(p, batch)[0]
    return (total * p["w"]).sum()


@mixed
def a_carry_reversed(p, batch, key):
    total = looped(lambda p, c, x: (c[::-1] + jnp.tanh(x @ p["w"]).sum(0), None), lambda p: jnp.zeros(D))(p, batch)[0]
    return (total * p["v"]).sum()


@mixed
def carries_that_change_places(p, batch, key):
    step = lambda p, c, x: ((c[1] + one(p, x), c[0] + one(p, x, "u")), None)  # noqa: E731
    first, second = looped(step, lambda p: (0.0, 0.0))(p, batch)[0]
    return 2 * first + second


@mixed
def a_carry_added_to_another(p, batch, key):
    step = lambda p, c, x: ((c[0] + c[1], c[1] + one(p, x)), None)  # noqa: E731
    return looped(step, lambda p: (0.0, 0.0))(p, batch)[0][0]


@mixed
def weights_of_rows_that_decay(p, batch, key):
    return looped(lambda p, c, x: (c * 0.9, c * one(p, x)), lambda p: 1.0)(p, batch)[1].mean()


@mixed
def rows_counted_in_a_loop(p, batch, key):
    return looped(lambda p, c, x: (c + 1, c * one(p, x)), lambda p: 0)(p, batch)[1].mean()


@mixed
def a_key_split_in_a_loop_over_rows(p, batch, key):
    def step(key, x):
        key, own = jax.random.split(key)
        return key, one(p, x + jax.random.normal(own, x.shape))

    return lax.scan(step, key, batch["x"])[1].mean()


@mixed
def a_sum_that_starts_at_a_weight(p, batch, key):
    return looped(lambda p, c, x: (c + one(p, x), None), lambda p: p["b"])(p, batch)[0] / len(batch["x"])


@separable
def a_mean_that_starts_at_a_weight(p, batch, key):
    return looped(lambda p, c, x: (c + one(p, x) / len(batch["x"]), None), lambda p: p["b"])(p, batch)[0]


@mixed
def a_mean_that_starts_at_a_function_of_a_sum(p, batch, key):
    start = jnp.tanh(by_rows(p, batch).sum())
    return looped(lambda p, c, x: (c + one(p, x) / len(batch["x"]), None), lambda p: start)(p, batch)[0]


@mixed
def one_carry_or_another(p, batch, key):
    step = lambda p, c, x: ((jnp.where(x[0, 0] > 0, c[1], c[0]) + one(p, x), c[1] + one(p, x, "u")), None)  # noqa: E731
    return looped(step, lambda p: (0.0, 0.0))(p, batch)[0][0]


@mixed
def the_first_carry_or_the_second(p, batch, key):
    either = lambda c, x: lax.cond(x[0, 0] > 0, lambda: c[0], lambda: c[1])  # noqa: E731
    step = lambda p, c, x: ((either(c, x) + one(p, x), c[1] + one(p, x, "u")), None)  # noqa: E731
    return looped(step, lambda p: (0.0, 0.0))(p, batch)[0][0]


@mixed
def the_second_carry_or_the_first(p, batch, key):
    either = lambda c, x: lax.cond(x[0, 0] > 0, lambda: c[0], lambda: c[1])  # noqa: E731
    step = lambda p, c, x: ((c[0] + one(p, x), either(c, x) + one(p, x, "u")), None)  # noqa: E731
    return looped(step, lambda p: (0.0, 0.0))(p, batch)[0][1]


@mixed
def a_sum_that_starts_again(p, batch, key):
    return looped(lambda p, c, x: (jnp.where(x[0, 0] > 0, c + one(p, x), 0.0), None), lambda p: 0.0)(p, batch)[0]


@unknown
def a_power_by_a_loop(p, batch, key):
    return lax.fori_loop(0, len(batch["x"]), lambda i, c: c * 0.9, p["b"]) + by_rows(p, batch).mean()


@separable
def keys_of_rows_in_a_loop(p, batch, key):
    step = lambda c, of: (c, one(p, of[0] + jax.random.normal(of[1], of[0].shape)))  # noqa: E731
    return lax.scan(step, 0, (batch["x"], jax.random.split(key, len(batch["x"]))))[1].mean()


@after
def numbers_counted_by_a_loop(p, batch, key):
    return (by_rows(p, batch) * lax.scan(lambda c, _: (c + 1, c), 0, None, length=len(batch["x"]))[1]).mean()


@mixed
def data_that_mix_in_a_loop_over_layers(p, batch, key):
    step = lambda h, w: (jnp.tanh(h @ w) * (batch["y"] - batch["y"].mean())[:, None, None], None)  # noqa: E731
    return lax.scan(step, batch["x"], jnp.stack([p["w"], p["u"]]))[0].mean()


@mixed
def data_that_mix_in_a_branch(p, batch, key):
    means = lambda y: (by_rows(p, batch) * (y - y.mean())).mean()  # noqa: E731
    return lax.cond(p["b"] > -9, means, lambda y: (by_rows(p, batch) * y).mean(), batch["y"])


@mixed
def a_weight_chosen_by_a_mean(p, batch, key):
    return lax.cond(by_rows(p, batch).mean() > 0, lambda: p["b"], lambda: 2 * p["b"])


@mixed
def a_branch_of_another_degree(p, batch, key):
    return lax.cond(p["b"] > 9, lambda: by_rows(p, batch).sum(), lambda: 3.0)


@mixed
def a_power_of_the_number_by_a_loop(p, batch, key):
    return lax.fori_loop(0, 3, lambda i, c: c * len(batch["x"]), p["b"]) + by_rows(p, batch).mean()


def halved(goes_on, may_step):
    def loop(p, batch):
        x = jnp.abs(by_rows(p, batch)) + 1

        def body(x):
            return jnp.where(may_step(x), x * 0.9, x)

        return lax.stop_gradient(lax.while_loop(lambda x: goes_on(x).any(), body, x))

    return loop


@mixed
def rows_that_go_on_while_others_do(p, batch, key):
    ends = halved(lambda x: x > 0.5, lambda x: jnp.sin(1e3 * x) > -2)(p, batch)
    return (by_rows(p, batch) * ends).mean()


@separable
def a_loop_under_vmap(p, batch, key):
    def ends(x):
        return lax.stop_gradient(lax.while_loop(lambda x: x > 0.5, lambda x: x * 0.9, jnp.abs(x) + 1))

    return (by_rows(p, batch) * jax.vmap(ends)(by_rows(p, batch))).mean()


# --- groups, with draws and with data of the whole batch ----------------------------------------------------------------


@case("separable", 4)
def weights_by_the_place_in_a_group(p, batch, key):
    return (by_rows(p, batch).reshape(-1, 4) * p["four"]).mean()


@case("separable", 4)
def numbers_by_the_place_in_a_group(p, batch, key):
    return (by_rows(p, batch).reshape(-1, 4) * jnp.arange(4)).mean()


@case("separable", 4)
def groups_with_a_draw_for_each_row(p, batch, key):
    scores = (by_rows(p, batch) + jax.random.normal(key, (len(batch["x"]),))).reshape(-1, 4)
    return jnp.tanh(scores - scores.mean(1, keepdims=True)).mean()


@case("separable", 4)
def groups_with_a_draw_for_each_group(p, batch, key):
    scores = by_rows(p, batch).reshape(-1, 4)
    scores = scores * jax.random.normal(key, (len(scores), 1))
    return jnp.tanh(scores - scores.mean(1, keepdims=True)).mean()


@case("separable", 4)
def groups_with_a_draw_for_each_place(p, batch, key):
    scores = by_rows(p, batch).reshape(-1, 4)
    return jnp.tanh(scores - scores.mean(1, keepdims=True) + jax.random.normal(key, scores.T.shape).T).mean()


@case("after", 2)
def pairs_and_the_mean_of_the_data(p, batch, key):
    scores = (by_rows(p, batch) * jnp.tanh(batch["y"] - batch["y"].mean())).reshape(-1, 2)
    return -jax.nn.log_sigmoid(scores[:, 0] - scores[:, 1]).mean()


@unknown
def weights_of_four_parts_of_the_rows(p, batch, key):
    return (by_rows(p, batch).reshape(4, -1) * p["four"][:, None]).mean()


@case("separable", 4)
def labels_of_four_parts_of_the_rows(p, batch, key):
    """Each row's own entry is looked up without its number, which a part of divided rows could not have."""
    logits = jnp.tanh(batch["x"].mean(1) @ p["w"])
    return (logits[jnp.arange(len(logits)), batch["label"]].reshape(4, -1) * p["b"]).mean()


@after
def copies_of_the_data_in_reverse(p, batch, key):
    return (jnp.tile(by_rows(p, batch), 3) * jnp.tile(batch["y"], 3)[::-1]).mean()


@after
def data_repeated_in_reverse(p, batch, key):
    return (jnp.repeat(by_rows(p, batch), 2) * jnp.repeat(batch["y"], 2)[::-1]).mean()


@after
def a_distance_of_all_pairs_of_data(p, batch, key):
    return by_rows(p, batch).mean() + jnp.abs(batch["y"][:, None] - batch["y"]).mean()


@after
def the_first_five_of_the_data(p, batch, key):
    """A part of four rows does not have five."""
    return (by_rows(p, batch) * jnp.tanh(batch["x"][:5].mean(1) @ p["w"]).mean()).mean()


@after
def five_of_the_data_from_the_third(p, batch, key):
    """A part of four rows cannot even be traced."""
    x = lax.dynamic_slice_in_dim(batch["x"], 2, 5)
    return (by_rows(p, batch) * jnp.tanh(x.mean(1) @ p["w"]).mean()).mean()


@after
def up_to_five_of_the_data(p, batch, key):
    """A part of four rows has the same equations, for four."""
    x = batch["x"][jnp.arange(min(len(batch["x"]), 5))]
    return (by_rows(p, batch) * jnp.tanh(x.mean(1) @ p["w"]).sum()).mean()


@mixed
def halves_of_the_data_exchanged(p, batch, key):
    return (by_rows(p, batch) * batch["y"].reshape(2, -1)[::-1].reshape(-1)).mean()


@unknown
def a_callback_with_effects(p, batch, key):
    return (by_rows(p, batch) * io_callback(lambda y: y - y.mean(), batch["y"], batch["y"])).mean()


@case("separable", 2)
def a_loop_over_halves_that_counts_them(p, batch, key):
    """There are two, however many rows there are."""
    count, halves = lax.scan(lambda n, rows: (n + p["b"], jnp.sin(rows)), 0.0, by_rows(p, batch).reshape(2, -1))
    return halves.mean() + count


# --- derivatives of the user's own --------------------------------------------------------------------------------------


@jax.custom_jvp
def with_a_mean_in_its_derivative(x):
    return x * 1.0


with_a_mean_in_its_derivative.defjvp(lambda primals, tangents: (primals[0] * 1.0, tangents[0] - tangents[0].mean()))


@jax.custom_vjp
def with_a_mean_in_its_gradient(x):
    return x * 1.0


with_a_mean_in_its_gradient.defvjp(lambda x: (x * 1.0, None), lambda _, g: (g - g.mean(),))


@jax.custom_vjp
def with_the_number_of_the_row_in_its_gradient(x):
    return x * 1.0


with_the_number_of_the_row_in_its_gradient.defvjp(lambda x: (x * 1.0, None), lambda _, g: (g * jnp.arange(len(g)),))


@jax.custom_jvp
def with_the_number_of_the_row(x):
    return x * jnp.arange(len(x))


with_the_number_of_the_row.defjvp(lambda primals, tangents: (with_the_number_of_the_row(*primals), tangents[0] * 2))


@jax.custom_vjp
def clipped_by_row(x):
    return x * 1.0


clipped_by_row.defvjp(lambda x: (x * 1.0, x), lambda x, g: (jnp.where(x > 0, g, 0.5 * g),))


@jax.custom_vjp
def times_a_mean_in_its_gradient(x, y):
    return x * 1.0


times_a_mean_in_its_gradient.defvjp(lambda x, y: (x * 1.0, y), lambda y, g: (g * y.mean(), None))


@jax.custom_vjp
def with_its_gradient_clipped(x):
    return x * 1.0


with_its_gradient_clipped.defvjp(lambda x: (x * 1.0, None), lambda _, g: (jnp.clip(g, -0.01, 0.01),))


@jax.custom_vjp
def product(x, y):
    return x @ y


product.defvjp(lambda x, y: (x @ y, (x, y)), lambda xy, g: (xy[1] * g, xy[0] * g))


# Functions of libraries with derivatives of the user's own.
sine_with_a_mean = jax.custom_jvp(jnp.sin)
sine_with_a_mean.defjvp(lambda x, t: (jnp.sin(x[0]), t[0] * jnp.cos(x[0].mean())))
softplus_with_a_maximum = jax.custom_vjp(jax.nn.softplus)
softplus_with_a_maximum.defvjp(lambda x: (jax.nn.softplus(x), x), lambda x, g: (g / jnp.abs(x).max(),))
sine_by_row = jax.custom_jvp(jnp.sin)
sine_by_row.defjvp(lambda x, t: (jnp.sin(x[0]), t[0] * jnp.cos(0.5 * x[0])))
sine_by_defjvps_with_a_mean = jax.custom_jvp(jnp.sin)
sine_by_defjvps_with_a_mean.defjvps(lambda t, out, x: t * jnp.cos(x.mean()))
sine_by_defjvps_by_row = jax.custom_jvp(jnp.sin)
sine_by_defjvps_by_row.defjvps(lambda t, out, x: t * jnp.cos(0.5 * x))
sine_of_a_remat = jax.custom_jvp(jax.checkpoint(jnp.sin))
sine_of_a_remat.defjvps(lambda t, out, x: t * jnp.cos(0.5 * x))
relu_by_defjvps_with_a_mean = jax.custom_jvp(jax.nn.relu)
relu_by_defjvps_with_a_mean.defjvps(lambda t, out, x: t * jnp.cos(x.mean()))
jitted_relu_by_defjvps_with_a_mean = jax.custom_jvp(jax.jit(jax.nn.relu))
jitted_relu_by_defjvps_with_a_mean.defjvps(lambda t, out, x: t * jnp.cos(x.mean()))
sine_by_the_derivative_of_another = jax.custom_jvp(jnp.sin)
sine_by_the_derivative_of_another.defjvp(partial(jax.jvp, lambda x: jnp.sin(x) - x.mean()))


@jax.custom_vjp
def with_a_mean_in_its_forward_pass(x):
    return x * 1.0


with_a_mean_in_its_forward_pass.defvjp(lambda x: (x * x.mean(), None), lambda _, g: (g,))


@jax.custom_jvp
def with_its_sign(x):
    return x * 1.0, (x > 0).astype(jnp.int32)


@with_its_sign.defjvp
def _(primals, tangents):
    outs = with_its_sign(*primals)
    return outs, (tangents[0] * 0.5, np.zeros(outs[1].shape, jax.dtypes.float0))


@jax.custom_vjp
def cosine_that_can_be_dropped(x):
    return jnp.cos(x)


cosine_that_can_be_dropped.defvjp(lambda x: (jnp.cos(x), jnp.sin(x)), lambda sine, g: (-g * sine,), optimize_remat=True)


@eqx.filter_custom_jvp
def filtered_with_a_mean(x):
    return jnp.sin(x)


filtered_with_a_mean.def_jvp(lambda x, t: (jnp.sin(x[0]), t[0] * jnp.cos(x[0].mean())))


with_a_mean_in_a_custom_gradient: Any = jax.custom_gradient(lambda x: (jnp.sin(x), lambda g: g * jnp.cos(x.mean())))


@unknown
def a_derivative_that_mixes_of_a_function_of_jax(p, batch, key):
    return sine_with_a_mean(by_rows(p, batch)).mean()


@unknown
def a_derivative_by_defjvps_that_mixes_of_a_function_of_jax(p, batch, key):
    return sine_by_defjvps_with_a_mean(by_rows(p, batch)).mean()


@unknown
def a_derivative_by_defjvps_that_mixes_of_relu(p, batch, key):
    return relu_by_defjvps_with_a_mean(by_rows(p, batch)).mean()


@unknown
def a_derivative_by_defjvps_that_mixes_of_jitted_relu(p, batch, key):
    return jitted_relu_by_defjvps_with_a_mean(by_rows(p, batch)).mean()


@unknown
def a_derivative_of_a_function_that_mixes(p, batch, key):
    return sine_by_the_derivative_of_another(by_rows(p, batch)).mean()


@unknown
def a_forward_pass_that_mixes(p, batch, key):
    """It is computed where a gradient is taken, instead of the function."""
    return with_a_mean_in_its_forward_pass(by_rows(p, batch)).mean()


@separable
def forward_passes_that_call_the_function_or_can_be_dropped(p, batch, key):
    x = by_rows(p, batch)
    return (with_its_sign(x)[0] + cosine_that_can_be_dropped(x)).mean()


@unknown
def a_derivative_by_defjvps_of_a_remat(p, batch, key):
    return sine_of_a_remat(by_rows(p, batch)).mean()


@separable
def derivatives_by_defjvps(p, batch, key):
    x = jnp.tanh(batch["x"].mean(1) @ p["w"])
    return (sine_by_defjvps_by_row(by_rows(p, batch)) + jax.nn.relu(x @ p["w"]).sum(1) + jax.nn.relu6(p["v"]).sum()).mean()


@unknown
def a_gradient_that_mixes_of_a_function_of_jax(p, batch, key):
    return softplus_with_a_maximum(by_rows(p, batch)).mean()


@unknown
def a_derivative_that_mixes_by_equinox(p, batch, key):
    return filtered_with_a_mean(by_rows(p, batch)).mean()


@unknown
def a_derivative_that_mixes_by_equinox_under_its_vmap(p, batch, key):
    x = jnp.tanh(batch["x"].mean(1) @ p["w"])
    return eqx.filter_vmap(filtered_with_a_mean, in_axes=1)(x).mean()


@unknown
def a_custom_gradient_that_mixes(p, batch, key):
    return with_a_mean_in_a_custom_gradient(by_rows(p, batch)).mean()


@separable
def a_derivative_by_row_of_a_function_of_jax(p, batch, key):
    return (sine_by_row(by_rows(p, batch)) + jax.vmap(filtered_with_a_mean)(by_rows(p, batch))).mean()


@separable
def a_gradient_of_weights_in_a_loop_over_rows(p, batch, key):
    return lax.map(lambda x: product(jnp.tanh(x.mean(0)), p["v"]), batch["x"]).mean()


@unknown
def a_gradient_that_is_clipped(p, batch, key):
    """By row, but another gradient for a sum of rows than for their mean."""
    return (with_its_gradient_clipped(by_rows(p, batch)) ** 2).mean()


@unknown
def a_clipped_gradient_of_a_masked_mean(p, batch, key):
    mask = batch["y"] > 0
    return (with_its_gradient_clipped(by_rows(p, batch)) * mask).sum() / mask.sum()


@unknown
def a_derivative_that_mixes(p, batch, key):
    return (with_a_mean_in_its_derivative(by_rows(p, batch)) ** 2).mean()


@unknown
def a_gradient_that_mixes(p, batch, key):
    return (with_a_mean_in_its_gradient(by_rows(p, batch)) ** 2).mean()


@unknown
def a_gradient_that_mixes_inside_a_loop(p, batch, key):
    return lax.scan(lambda h, w: (with_a_mean_in_its_gradient(h * w), None), by_rows(p, batch), p["v"])[0].sum()


@unknown
def a_gradient_by_the_number_of_the_row(p, batch, key):
    return (with_the_number_of_the_row_in_its_gradient(by_rows(p, batch)) ** 2).mean()


@unknown
def a_number_of_the_row_that_a_part_cannot_have(p, batch, key):
    return with_the_number_of_the_row(by_rows(p, batch)).mean()


@unknown
def a_derivative_that_mixes_in_the_head_of_a_cross_entropy(p, batch, key):
    """The cross-entropy's own derivative is trusted, and not that of the user's head inside it."""
    head = lambda x: with_a_mean_in_its_derivative(x @ p["w"])  # noqa: E731
    return cross_entropy(batch["x"].mean(1)[:, None], batch["label"][:, None], head=head).total / len(batch["x"])


@unknown
def a_derivative_by_equinox_that_mixes_as_the_head_of_a_cross_entropy(p, batch, key):
    """A model of this package calls it."""
    x = (batch["x"].mean(1) @ p["w"])[:, None]
    return cross_entropy(x, batch["label"][:, None], head=filtered_with_a_mean).total / len(x)


@separable
def a_cross_entropy_by_chunks(p, batch, key):
    labels = jnp.broadcast_to(batch["label"][:, None], batch["x"].shape[:2])
    return cross_entropy(batch["x"], labels, head=lambda x: x @ p["w"], chunk_size=2).total / len(labels)


@separable
def a_gradient_by_row(p, batch, key):
    return (clipped_by_row(by_rows(p, batch)) ** 2).mean()


@after
def a_gradient_by_row_of_a_masked_mean(p, batch, key):
    mask = batch["y"] > 0
    return (clipped_by_row(by_rows(p, batch)) * mask).sum() / mask.sum()


@after
def a_gradient_by_row_after_noise_and_an_order(p, batch, key):
    """Values of the whole batch that have its rows, as their second dim, and that a draw needs."""
    x = jnp.swapaxes(batch["x"] * jax.random.uniform(key, batch["y"].shape)[:, None, None], 0, 1)
    x = jnp.flip(x, 1) - x.mean((0, 1))
    return (clipped_by_row(jnp.tanh(x.mean(0) @ p["w"]) @ p["v"]) * jax.random.normal(key, batch["y"].shape)).mean()


@after
def a_masked_mean_of_a_linear_solve(p, batch, key):
    solved = jnp.linalg.solve(p["w"] @ p["w"].T + jnp.eye(D), batch["x"].mean(1)[..., None])[..., 0]
    return (solved.sum(1) * (batch["y"] > 0)).sum() / (batch["y"] > 0).sum()


def pooled(x, op, initial):
    return lax.reduce_window(x, initial, op, (1, 2, 1), (1, 2, 1), "VALID")


@separable
def a_gradient_by_row_of_pools(p, batch, key):
    x = jnp.tanh(batch["x"] @ p["w"])
    x = (pooled(x, lax.max, -jnp.inf) + pooled(x, lax.add, 0.0)).sum(1) @ p["v"]
    return clipped_by_row(x).sum()


@separable
def a_gradient_by_row_of_a_spectrum(p, batch, key):
    x = jnp.fft.rfft(batch["x"] @ p["w"], axis=1)
    return clipped_by_row(jnp.abs(x * lax.complex(1.0, 2.0)).sum(1) @ p["v"]).sum()


@separable
def a_gradient_by_row_of_real_numbers_in_a_complex_transform(p, batch, key):
    """In the gradient, complex numbers become their real parts."""
    x = jnp.fft.ifft((batch["x"] @ p["w"]).astype(complex), axis=1)
    return clipped_by_row((jnp.abs(x) ** 2).sum(1) @ p["v"]).sum()


@separable
def a_gradient_by_row_of_a_recurrence(p, batch, key):
    hidden = jnp.zeros((len(batch["x"]), D))
    hidden, _ = lax.scan(lambda h, x: (jnp.tanh(h @ p["w"] + x), None), hidden, jnp.swapaxes(batch["x"], 0, 1))
    return clipped_by_row(hidden @ p["v"]).sum()


@separable
def a_gradient_by_row_of_a_sum_and_the_size_of_the_weights(p, batch, key):
    return clipped_by_row(by_rows(p, batch)).sum() / 3 + (p["w"] ** 2).mean()


@after
def a_gradient_by_row_of_a_masked_mean_and_the_size_of_the_weights(p, batch, key):
    mask = batch["y"] > 0
    return (clipped_by_row(by_rows(p, batch)) * mask).sum() / mask.sum() + 0.1 * (p["w"] ** 2).sum()


@unknown
def a_gradient_that_makes_a_value_of_the_whole_batch(p, batch, key):
    mask = batch["y"] > 0
    return (times_a_mean_in_its_gradient(by_rows(p, batch), batch["y"]) * mask).sum() / mask.sum()


# --- lookups by the number of the row -----------------------------------------------------------------------------------


@separable
def the_label_of_each_row(p, batch, key):
    return jax.nn.log_softmax(batch["x"].mean(1) @ p["w"])[jnp.arange(len(batch["x"])), batch["label"]].mean()


@mixed
def rows_up_to_the_sixth(p, batch, key):
    return (by_rows(p, batch)[jnp.clip(jnp.arange(len(batch["x"])), 0, 5)] * batch["y"]).mean()


def sums(loss):
    def fn(weights, state, batch, key):
        return loss(weights, batch, key) * len(batch["x"]), jnp.float32(len(batch["x"]))

    return fn


def in_parts(loss, use, parts):
    fn, batch = sums(loss), batch_of(N)
    every = rows_with_whole(fn, use, weights(), batch, KEY)

    def of_part(weights, rows):
        part = jax.tree.map(lambda x: x[rows], batch)
        return by_row(fn, use)(weights, (), part, KEY, part_of(every, rows))

    found = [jax.jit(jax.value_and_grad(of_part, has_aux=True))(weights(), np.asarray(rows)) for rows in parts]
    (total, weight), grads = jax.tree.map(lambda *x: sum(x), *found)
    return total / weight, jax.tree.map(lambda x: x / weight, grads)


@pytest.mark.parametrize("name", CASES)
def test_the_verdict_about_a_hard_loss(name):
    loss, kind, group = CASES[name]
    use = row_use(sums(loss), weights(), (), batch_of(N), KEY)
    assert (use.kind, use.group if use.is_exact else 1) == (kind, group), use.text
    assert not use.draws


def test_a_metric_that_draws_has_no_part_in_a_gradient():
    def fn(weights, state, batch, key):
        rows = clipped_by_row(by_rows(weights, batch))
        noisy = rows * jax.random.normal(key, batch["y"].shape)
        return rows.sum(), jnp.float32(len(rows)), {"noisy": noisy.sum()}

    use = row_use(fn, weights(), (), batch_of(N), KEY)
    assert use.kind == "separable" and not use.draws, use.text


QUICK = (
    "its_cube",
    "the_number_in_a_nonlinear_function",
    "rows_counted_from_the_end",
    "groups_with_a_draw_for_each_place",
    "a_loop_under_vmap",
    "a_loop_over_halves_that_counts_them",
    "labels_of_four_parts_of_the_rows",
    "the_first_five_of_the_data",
)
EXACT = [name for name, (_, kind, _) in CASES.items() if kind in ("separable", "after")]


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.sweep) for name in EXACT])
def test_a_hard_loss_is_that_of_its_parts(name):
    loss, _, group = CASES[name]
    use = row_use(sums(loss), weights(), (), batch_of(N), KEY)
    expected = jax.jit(jax.value_and_grad(lambda weights: loss(weights, batch_of(N), KEY)))(weights())
    for parts in (np.split(np.arange(N), [12]), np.arange(N).reshape(-1, 2, group).swapaxes(0, 1).reshape(2, -1)):
        for found, value in zip(jax.tree.leaves(in_parts(loss, use, parts)), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(found, value, rtol=2e-5, atol=2e-6)


ODD = {
    "a bound": lambda n: 1 / max(n, 14),
    "half the number": lambda n: 1 / (n // 2 * 2),
    "a branch": lambda n: 1.0 if n > 14 else 3.0,
}


@pytest.mark.parametrize("of", ODD.values(), ids=ODD)
def test_a_part_of_another_function_warns(of):
    """Two numbers of rows do not tell a bound or a branch from a mean. The trace for the part does."""

    def loss(p, batch, key):
        return by_rows(p, batch).sum() * of(len(batch["x"]))

    use = row_use(sums(loss), weights(), (), batch_of(N), KEY)
    assert use.kind == "separable"
    with pytest.warns(UserWarning, match="expected the same equations for"):
        in_parts(loss, use, [np.arange(13), np.arange(13, N)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        in_parts(loss, use, [np.arange(N)])


def test_constants_of_few_rows_are_not_taken_for_powers_of_their_number():
    """log(4) is twice log(2)."""

    def loss(p, batch, key):
        return by_rows(p, batch).sum() * np.log(len(batch["x"]))

    for n_rows in (1, 2, 3):
        assert row_use(sums(loss), weights(), (), batch_of(n_rows), KEY).kind == "mixed"


def outputs_of_single_rows(fn, use):
    for rows in np.arange(N)[:, None]:
        part = jax.tree.map(lambda x, rows=rows: x[rows], batch_of(N))
        yield by_row(fn, use)(weights(), (), part, KEY, part_of(all_rows(N), rows))


def test_an_output_that_is_a_draw_for_each_row():
    def fn(weights, state, batch, key):
        return jax.random.normal(key, (len(batch["x"]),))

    use = row_use(fn, weights(), (), batch_of(N), KEY, returns_rows=True)
    found = np.concatenate(list(outputs_of_single_rows(fn, use)))
    np.testing.assert_allclose(found, fn(weights(), (), batch_of(N), KEY), rtol=1e-6)


def test_sums_of_integers_stay_integers():
    def fn(weights, state, batch, key):
        return (batch["label"] > 2).sum()

    found = list(outputs_of_single_rows(fn, row_use(fn, weights(), (), batch_of(N), KEY)))
    assert {each.dtype for each in found} == {jnp.dtype("int32")}
    assert sum(map(int, found)) == int(fn(weights(), (), batch_of(N), KEY))


def steps(p, x):
    for _ in range(1_000):
        x = p["v"] + x
    return x.mean(1)


def a_long_condition(p, x):
    def goes_on(x):
        for _ in range(500):
            x = x * 0.5 + 1
        return x.mean(1, keepdims=True) < 2

    x = lax.while_loop(lambda x: goes_on(x).any(), lambda x: jnp.where(goes_on(x), x + 1, x), x)
    return lax.stop_gradient(x) @ p["v"]


@pytest.mark.parametrize("fn", [steps, a_long_condition])
def test_long_functions_do_not_exceed_the_recursion_limit(fn):
    use = row_use(sums(lambda p, batch, key: fn(p, batch["x"]).mean()), weights(), (), batch_of(N), KEY)
    assert use.kind == "separable", use.text
