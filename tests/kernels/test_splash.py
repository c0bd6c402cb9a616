"""What TPUs' kernel computes, interpreted on CPU; what it refuses; where it is lowered to; without a TPU."""

import logging
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import redeqx
from redeqx.kernels import Setting, _blockwise, _primitive, _splash, attend, kernel_of
from redeqx.machine import make_mesh, split_heads, split_rows
from redeqx.transforms import FuseAttention, attentions


def drawn(n_queries=128, n_keys=128, heads=2, groups=2, rows=2):
    rng = np.random.default_rng(0)
    shapes = ((n_queries, heads), (n_keys, groups), (n_keys, groups), (n_queries, heads))
    return [jnp.asarray(rng.normal(size=(rows, *shape, 8)), jnp.float32) for shape in shapes]


SEGMENTS = jnp.asarray(np.sort(np.random.default_rng(1).integers(-1, 2, (2, 150))))
COMPUTED = {
    "causal": ({"causal": True}, {}, {}),
    "odd lengths": ({}, {}, {"n_queries": 130, "n_keys": 200}),
    "causal, more keys": ({"causal": True}, {}, {"n_queries": 130, "n_keys": 300}),
    "window": ({"window": 20}, {}, {"n_queries": 150, "n_keys": 150}),
    "causal window": ({"causal": True, "window": 20}, {}, {"n_queries": 300, "n_keys": 300}),
    "grouped": ({"causal": True}, {}, {"heads": 4}),
    "lengths": ({}, {"lengths": jnp.array([7, 129])}, {"n_keys": 129}),
    "mask of keys": (
        {"causal": True},
        {"mask": jnp.asarray(np.arange(150) % 7 != 3)[None, None, None]},
        {"n_queries": 150, "n_keys": 150},
    ),
    "segments": (
        {"causal": True},
        {"query_segments": SEGMENTS, "key_segments": SEGMENTS},
        {"n_queries": 150, "n_keys": 150},
    ),
    "split": (
        {"causal": True, "split": split_heads(make_mesh(2, 2))},
        {"lengths": jnp.array([7, 140, 100, 1])},
        {"n_queries": 140, "n_keys": 140, "heads": 4, "rows": 4},
    ),
    "rows that do not divide": ({"split": split_heads(make_mesh(2, 2))}, {}, {"rows": 1}),
    "heads that do not divide": ({"split": split_heads(make_mesh(2))}, {}, {"heads": 3, "groups": 1, "rows": 4}),
}


IN_SWEEPS = set(COMPUTED) - {"segments", "split"}


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.sweep] * (x in IN_SWEEPS)) for x in COMPUTED])
def test_values_and_gradients_are_those_of_plain_xla(name):
    kwargs, extras, sizes = COMPUTED[name]
    q, k, v, g = drawn(**sizes)
    setting = Setting(0.3, names=tuple(extras), **kwargs)

    def run(kernel, **of_kernel):
        out, log_sum = kernel.forward(setting, q, k, v, extras, **of_kernel)
        return [out, log_sum, *kernel.backward(setting, q, k, v, extras, out, log_sum, g, **of_kernel)]

    found = jax.jit(partial(run, _splash, interpret=True))()
    wanted = jax.jit(partial(run, _blockwise))()
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)


REFUSED = {
    "float16": ({}, {}, {}, "bfloat16 or float32, not in float16"),
    "few": ({}, {}, {"n_keys": 100}, "128 queries and 100 keys are fewer than its blocks of 128"),
    "window": ({"window": 3}, {}, {"n_keys": 200}, "as many keys as queries, not 200 and 128"),
    "bias": ({}, {"bias": jnp.zeros((1, 1, 1, 128))}, {}, "none with a bias"),
    "mask": ({}, {"mask": jnp.ones((1, 1, 128, 128), bool)}, {}, "none with a mask that differs by query or head"),
    "precision": ({"precision": jax.lax.Precision.HIGHEST}, {}, {}, "products have no precision HIGHEST"),
    "dropout": ({"dropout": 0.1}, {"key": jax.random.key(0)[None]}, {}, "none with dropout"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_has_no_kernel_for_is_refused_with_a_reason(name):
    kwargs, extras, sizes, reason = REFUSED[name]
    q, k, v, _ = drawn(**sizes)
    if name == "float16":
        q, k, v = (x.astype(jnp.float16) for x in (q, k, v))
    with pytest.raises(_splash.Refused, match=f"splash attention: .*{reason}"):
        _splash.forward(Setting(1.0, names=tuple(extras), **kwargs), q, k, v, extras)


def test_heads_of_two_sizes_are_refused():
    q, k, v, _ = drawn()
    with pytest.raises(_splash.Refused, match="heads of one size, not 8 and 4"):
        _splash.forward(Setting(1.0), q, k, v[..., :4], {})


def lowered(fn, *args):
    """The program for TPUs, which needs none."""
    return jax.jit(jax.grad(lambda *args: fn(*args).sum())).trace(*args).lower(lowering_platforms=("tpu",)).as_text()


def test_a_program_for_tpus_calls_the_kernel():
    q, k, v, _ = drawn()
    text = lowered(partial(redeqx.attention, causal=True), q, k, v)
    assert text.count("tpu_custom_call") == 3  # forward, and backward for queries and for keys


def test_where_it_refuses_plain_xla_computes_and_the_reason_is_logged(caplog):
    q, k, v, _ = drawn(n_queries=60)
    with caplog.at_level(logging.INFO, "redeqx"):
        text = lowered(redeqx.attention, q, k, v)
    assert "tpu_custom_call" not in text and "stablehlo.dot_general" in text
    assert "attention without its platform's kernel: splash attention: 60 queries and 128 keys are fewer" in caplog.text


def test_several_devices_that_share_arrays_in_an_unknown_way_compute_in_blocks():
    """The kernel cannot be partitioned by the compiler. Where a plan says the split, each device runs it on its part."""
    mesh = make_mesh(2, 2)
    q, k, v, _ = (jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split_rows(mesh)) for x in drawn(rows=4))
    assert "tpu_custom_call" not in lowered(redeqx.attention, q, k, v)
    known = replace(Setting(1.0), split=split_heads(mesh))
    text = lowered(lambda q, k, v: attend(q, k, v, {}, known), q, k, v)
    assert text.count("tpu_custom_call") == 3 and "manual_computation" in text


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_keys_of_fewer_heads_than_devices_are_repeated_for_the_kernel(platform):
    """Otherwise each device would compute all heads. Gradients are summed over what was repeated."""
    q, k, v, g = drawn(heads=8, groups=2, rows=4)
    split = split_heads(make_mesh(4))
    seen = []

    class Kernel:
        forward = staticmethod(
            lambda setting, q, k, v, extras: (seen.append(k.shape), _blockwise.forward(setting, q, k, v, extras))[1]
        )
        backward = staticmethod(_blockwise.backward)

    def run(kernel, setting):
        out, log_sum = _primitive._forward(kernel, q, k, v, setting=setting)
        return [out, *_primitive._backward(kernel, q, k, v, out, log_sum, g, setting=setting)]

    for a, b in zip(run(Kernel, Setting(0.3, split=split)), run(_blockwise, Setting(0.3)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    assert seen == [(4, 128, 4, 8)]
    half = [jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in (q, k, v)]
    assert kernel_of(platform, Setting(0.3, split=split), *half, {}) == f"by {_primitive._KERNELS[platform][1]}"


def test_the_header_names_the_kernel():
    split = split_heads(make_mesh(2, 2))

    def loss(q, k, v):
        return redeqx.attention(q, k, v, causal=True).sum() + redeqx.attention(q, k, v, bias=jnp.zeros((128, 128))).sum()

    fused, left, dense = attentions(jax.make_jaxpr(loss)(*drawn(rows=4)[:3]), "tpu", split)
    assert left == dense == {} and fused == {
        "causal, by splash attention": 1,
        "a bias, in blocks of queries, as splash attention refuses: it has none with a bias": 1,
    }
    assert FuseAttention(split).split == split
