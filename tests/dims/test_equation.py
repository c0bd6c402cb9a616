"""How single equations relate the dims of their operands and outputs."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from redeqx.dims import Related, is_elementwise, repeats, row_use, view
from redeqx.tracing import equations


def last_equation(fn, *shapes, name=None):
    """Returns the last equation of a function of arrays, or the last one of a primitive, also inside jits."""
    closed = jax.make_jaxpr(fn)(*(jnp.zeros(shape) for shape in shapes))
    return [eqn for eqn in equations(closed) if name in (None, eqn.primitive.name)][-1]


def conv(groups=1):
    return lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME", feature_group_count=groups)


def lookup(table, indices):
    return lax.gather(
        table,
        indices.astype(int),
        lax.GatherDimensionNumbers(offset_dims=(2,), collapsed_slice_dims=(0,), start_index_map=(0,)),
        slice_sizes=(1, table.shape[1]),
    )


@pytest.mark.parametrize(
    "fn, shapes, expected",
    [
        (lambda x: x.T, [(1, 8)], [1, 0]),  # also a dim of size 1 is known
        (lambda x: lax.broadcast_in_dim(x, (4, 8), (0, 1)), [(1, 8)], [None, 1]),
        (lambda x: lax.squeeze(x, (1,)), [(4, 1, 8)], [0, 2]),
        (lambda x: x[:, 1:3], [(4, 8)], [0, None]),
        (lambda x: lax.reshape(x, (1, 4, 8)), [(4, 8)], [None, 0, 1]),
        (lambda x: lax.reshape(x, (4, 2, 4)), [(4, 8)], [0, None, None]),
        (lambda x: lax.pad(x, 0.0, ((0, 0, 0), (1, 1, 0))), [(4, 8)], [0, None]),
        (lambda x: lax.rev(x, (0,)), [(4, 8)], [0, 1]),
        (lambda x: lax.reduce_sum(x, (1,)), [(4, 8, 3)], [0, 2]),
        (lambda x, y: x @ y, [(4, 8), (8, 3)], [0, None]),
        (lambda x: lax.split(x, (2, 6), axis=1)[0], [(4, 8)], [0, None]),
        (lambda x: lax.top_k(x, 3)[0], [(4, 8)], [0, None]),
    ],
)
def test_output_dims_and_the_operand_dims_that_they_are(fn, shapes, expected):
    assert Related(last_equation(fn, *shapes)).source() == expected


@pytest.mark.parametrize(
    "fn, shapes, places, partners, combined",
    [
        (lambda x, w: x @ w, [(4, 8), (8, 3)], ({0: 0}, {1: 1}), ({1: 0}, {0: 1}), ([1], [0])),
        (lambda x, w: x @ w, [(4, 0), (0, 3)], ({0: 0}, {1: 1}), ({1: 0}, {0: 1}), ([1], [0])),
        (
            lambda x, w: lax.dot_general(x, w, (((3, 1), (1, 3)), ((0,), (2,)))),
            [(1, 5, 7, 6), (9, 6, 1, 5)],
            ({0: 0, 2: 1}, {0: 2, 2: 0}),
            ({0: 2, 1: 3, 3: 1}, {1: 3, 2: 0, 3: 1}),
            ([3, 1], [1, 3]),  # in the order of the products' dims
        ),
        # The windows of dims 2 and 3 have no place in the output.
        (conv(), [(2, 6, 5, 5), (4, 6, 3, 3)], ({0: 0}, {0: 1}), ({1: 1}, {1: 1}), ([1, 2, 3], [1, 2, 3])),
        # Groups are the first factor of the channels of the input, of the kernel and of the output.
        (conv(3), [(2, 6, 5, 5), (12, 2, 3, 3)], ({0: 0, 1: 1}, {0: 1}), ({1: 0}, {0: 1}), ([1, 2, 3], [1, 2, 3])),
    ],
)
def test_products_and_the_dims_that_they_share(fn, shapes, places, partners, combined):
    related = Related(last_equation(fn, *shapes))
    assert tuple(map(related.places, (0, 1))) == places
    assert tuple(map(related.partners, (0, 1))) == partners
    assert tuple(map(related.combined, (0, 1))) == combined


def test_lookups_select_rows_of_a_table():
    related = Related(last_equation(lookup, (50, 8), (2, 3, 1)))
    assert related.source(0) == [None, None, 1]
    assert related.source(1) == [0, 1, None]
    assert related.combined() == [0]


@pytest.mark.parametrize(
    "before, after, places",
    [
        ((24, 5), (2, 12, 5), {0: 0, 1: 2}),
        ((2, 12, 5), (24, 5), {0: 0, 2: 1}),
        ((6, 4), (3, 8), {0: 0}),
        ((1, 8), (8, 1), {1: 0}),
        ((0, 4), (4, 0), {}),
    ],
)
def test_reshapes_keep_the_first_factor_of_a_dim_in_place(before, after, places):
    assert Related(last_equation(lambda x: lax.reshape(x, after), before)).places() == places


@pytest.mark.parametrize(
    "name, fn, shapes, expected",
    [
        ("add", lambda x, y: x + y, [(4, 8), (4, 8)], True),
        ("select_n", lambda x: jnp.where(x > 0, x, 0.0), [(4, 8)], True),
        ("tile", lambda x: lax.tile(x, (1, 8)), [(4, 1)], True),
        ("tile", lambda x: lax.tile(x, (1, 2)), [(4, 4)], False),
        ("cumsum", lambda x: lax.cumsum(x, axis=0), [(4, 8)], False),
        ("rev", lambda x: lax.rev(x, (0,)), [(4, 8)], False),
        ("cholesky", jnp.linalg.cholesky, [(4, 4)], False),
        ("fft", jnp.fft.fft, [(4, 8)], False),
        ("pure_callback", lambda x: jax.pure_callback(lambda x: x, x, x), [(4, 8)], False),
        ("rng_uniform", lambda: lax.rng_uniform(0.0, 1.0, (4, 8)), [], False),
        ("rng_bit_generator", lambda: lax.rng_bit_generator(jnp.zeros(4, jnp.uint32), (4,)), [], False),
    ],
)
def test_elementwise_equations(name, fn, shapes, expected):
    assert is_elementwise(last_equation(fn, *shapes, name=name)) == expected


@pytest.mark.parametrize(
    "fn, shape, expected",
    [
        (lambda x: x.astype(jnp.bfloat16), (4, 8), [0, 1]),
        (lambda x: lax.reshape(x, (1, 4, 8)), (4, 8), [None, 0, 1]),
        (lambda x: lax.reshape(x, (8, 4)), (4, 8), None),
        (lambda x: lax.dynamic_slice(x, (0, 1), (4, 2)), (4, 8), [0, None]),
        (lambda x: lax.rev(x, (0,)), (4, 8), None),
        (lambda x: jnp.sin(x), (4, 8), None),
    ],
)
def test_views_and_the_dims_that_they_keep(fn, shape, expected):
    eqn = last_equation(fn, shape)
    assert view(eqn) == expected
    assert not repeats(eqn)


def test_a_broadcast_repeats_its_operand():
    assert repeats(last_equation(lambda x: lax.broadcast_in_dim(x, (4, 8), (0, 1)), (1, 8)))


def test_numbers_that_a_device_makes_for_itself_do_not_follow_rows():
    def loss(w, state, batch):
        return jnp.mean((batch @ w + lax.rng_uniform(0.0, 1.0, (batch.shape[0],))) ** 2)

    (refused,) = row_use(loss, jnp.ones(4), None, jnp.ones((8, 4))).draws
    assert "test_equation.py" in refused


def test_a_draw_that_is_refused_twice_is_said_once():
    """JAX draws a beta as two gammas on one line."""

    def loss(w, state, batch):
        return jnp.mean((batch @ w + jax.random.beta(jax.random.key(0), 0.4, 0.4, (batch.shape[0],))) ** 2)

    (refused,) = row_use(loss, jnp.ones(4), None, jnp.ones((8, 4))).draws
    assert refused.startswith("`random_gamma` draws for all rows at once (")
