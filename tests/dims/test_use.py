"""The text of the verdict about rows, and whether a function draws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec as P

from redeqx.dims import RowUse, Whole, row_use


@pytest.mark.parametrize(
    "use, text",
    [
        (RowUse("separable", 0), "separable"),
        (RowUse("separable", 1), "a sum over rows"),
        (RowUse("separable", 0, group=2), "separable, 2 rows at a time"),
        (RowUse("after", 0, whole=(Whole(3, ()), Whole(5, ()))), "separable after 2 values of the whole batch"),
        (RowUse("after", 1, whole=(Whole(3, ()),)), "separable after 1 value of the whole batch"),
        (
            RowUse("separable", 0, group=2, metrics=("metric `auc` mixes at train.py:41", "metric `top` mixes rows")),
            "separable, 2 rows at a time; metric `auc` mixes at train.py:41; metric `top` mixes rows",
        ),
        (
            RowUse("mixed", 0, line="train.py:41", why="a reduction over rows"),
            "mixed at train.py:41 (a reduction over rows)",
        ),
        (RowUse("mixed", 0), "mixed"),
        (RowUse("unknown", 0), "unknown"),
        (RowUse("unknown", 0, why="a callback"), "unknown: a callback"),
        (RowUse("unknown", 0, line="train.py:41", why="a callback"), "unknown at train.py:41 (a callback)"),
    ],
)
def test_a_verdict_reads_as_one_line(use, text):
    assert use.text == text


def on_host(x):
    return jax.pure_callback(np.tanh, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def on_shards(key):
    mesh = Mesh(np.array(jax.devices()[:1]), ("one",))
    return jax.shard_map(jax.random.normal, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)(key)


@pytest.mark.parametrize(
    "fn, is_random",
    [
        (lambda w, key: w, False),
        (lambda w, key: on_host(w), False),
        (lambda w, key: w * jax.random.normal(key), True),
        (lambda w, key: w * on_shards(key), True),
        (lambda w, key: on_host(w * jax.random.key_data(key)[0]), True),
    ],
    ids=["no key", "unknown operation", "draw", "draw in an unknown operation", "bits of the key"],
)
def test_a_function_that_may_draw_is_told_from_one_that_does_not(fn, is_random):
    use = row_use(lambda w, s, x, key: fn(w, key) * x.mean(), jnp.float32(1), (), jnp.ones(8), jax.random.key(0))
    assert use.is_random == is_random
