"""Splash attention without a TPU: its results, interpreted on CPU; what it does not support; where it is lowered."""

import logging
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import redeqx
from redeqx.kernels import KERNELS, AttentionSetting, _primitive, attend, kernel_of
from redeqx.machine import make_mesh, split_heads, split_rows
from redeqx.transforms import FuseAttention, attentions

blockwise, splash = KERNELS["XLA"], KERNELS["splash attention"]


def draw(n_queries=128, n_keys=128, heads=2, groups=2, rows=2):
    rng = np.random.default_rng(0)
    shapes = ((n_queries, heads), (n_keys, groups), (n_keys, groups), (n_queries, heads))
    return [jnp.asarray(rng.normal(size=(rows, *shape, 8)), jnp.float32) for shape in shapes]


SEGMENTS = jnp.asarray(np.sort(np.random.default_rng(1).integers(-1, 2, (2, 150))))
SUPPORTED = {
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


IN_SWEEPS = set(SUPPORTED) - {"split"}


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.sweep] * (x in IN_SWEEPS)) for x in SUPPORTED])
def test_values_and_gradients_match_plain_xla(name):
    kwargs, extras, sizes = SUPPORTED[name]
    q, k, v, g = draw(**sizes)
    setting = AttentionSetting(0.3, names=tuple(extras), **kwargs)

    def run(kernel, **options):
        out, log_sum = kernel.forward(setting, q, k, v, extras, **options)
        return [out, log_sum, *kernel.backward(setting, q, k, v, extras, out, log_sum, g, **options)]

    got = jax.jit(partial(run, splash, interpret=True))()
    want = jax.jit(partial(run, blockwise))()
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)


UNSUPPORTED = {
    "float16": ({}, {}, {}, "bfloat16 and float32, not float16"),
    "short": ({}, {}, {"n_keys": 100}, "at least 128 queries and keys, not 128 and 100"),
    "window": ({"window": 3}, {}, {"n_keys": 200}, "as many keys as queries, not 200 and 128"),
    "bias": ({}, {"bias": jnp.zeros((1, 1, 1, 128))}, {}, "does not support a bias"),
    "mask": ({}, {"mask": jnp.ones((1, 1, 128, 128), bool)}, {}, "does not support a mask that differs by query or head"),
    "precision": ({"precision": jax.lax.Precision.HIGHEST}, {}, {}, "does not support precision HIGHEST"),
    "dropout": ({"dropout": 0.1}, {"key": jax.random.key(0)[None]}, {}, "does not support dropout"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_operands_have_a_reason(name):
    kwargs, extras, sizes, reason = UNSUPPORTED[name]
    q, k, v, _ = draw(**sizes)
    if name == "float16":
        q, k, v = (x.astype(jnp.float16) for x in (q, k, v))
    assert reason in splash.unsupported_reason(AttentionSetting(1.0, names=tuple(extras), **kwargs), q, k, v, extras)


def test_values_of_another_head_size_are_unsupported():
    q, k, v, _ = draw()
    assert "equal head sizes, not 8 and 4" in splash.unsupported_reason(AttentionSetting(1.0), q, k, v[..., :4], {})


def lowered(fn, *args):
    """Returns the program lowered for TPUs, which needs no TPU."""
    return jax.jit(jax.grad(lambda *args: fn(*args).sum())).trace(*args).lower(lowering_platforms=("tpu",)).as_text()


def test_tpu_programs_call_the_kernel():
    q, k, v, _ = draw()
    text = lowered(partial(redeqx.attention, causal=True), q, k, v)
    assert text.count("tpu_custom_call") == 3  # forward, and backward for queries and for keys


def test_falls_back_to_plain_xla_and_logs_the_reason(caplog):
    q, k, v, _ = draw(n_queries=60)
    with caplog.at_level(logging.INFO, "redeqx"):
        text = lowered(redeqx.attention, q, k, v)
    assert "tpu_custom_call" not in text and "stablehlo.dot_general" in text
    assert "not by splash attention: it needs at least 128 queries and keys, not 60 and 128" in caplog.text


def test_an_unknown_split_over_devices_falls_back_to_blocks():
    """The compiler cannot partition the kernel. If the split is known, each device runs it on its shard."""
    mesh = make_mesh(2, 2)
    q, k, v, _ = (jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split_rows(mesh)) for x in draw(rows=4))
    assert "tpu_custom_call" not in lowered(redeqx.attention, q, k, v)
    known = replace(AttentionSetting(1.0), split=split_heads(mesh))
    text = lowered(lambda q, k, v: attend(q, k, v, {}, known), q, k, v)
    assert text.count("tpu_custom_call") == 3 and "manual_computation" in text


@pytest.mark.parametrize(("platform", "name"), [("cuda", "cuDNN"), ("tpu", "splash attention")])
@pytest.mark.sweep
def test_fewer_key_heads_than_devices_are_repeated_for_the_kernel(platform, name):
    """Otherwise each device would compute all heads. Gradients are summed over the repeats."""
    q, k, v, g = draw(heads=8, groups=2, rows=4)
    split = split_heads(make_mesh(4))
    key_shapes = []

    class Kernel:
        forward = staticmethod(
            lambda setting, q, k, v, extras: (key_shapes.append(k.shape), blockwise.forward(setting, q, k, v, extras))[1]
        )
        backward = staticmethod(blockwise.backward)

    def run(kernel, setting):
        out, log_sum = _primitive._forward(kernel, q, k, v, setting=setting)
        return [out, *_primitive._backward(kernel, q, k, v, out, log_sum, g, setting=setting)]

    for a, b in zip(run(Kernel, AttentionSetting(0.3, split=split)), run(blockwise, AttentionSetting(0.3)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    assert key_shapes == [(4, 128, 4, 8)]
    half = [jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in (q, k, v)]
    assert kernel_of(platform, AttentionSetting(0.3, split=split), half) == f"by {name}"


def test_the_header_names_the_kernel():
    split = split_heads(make_mesh(2, 2))

    def loss(q, k, v):
        return redeqx.attention(q, k, v, causal=True).sum() + redeqx.attention(q, k, v, bias=jnp.zeros((128, 128))).sum()

    fused, unfused = attentions(jax.make_jaxpr(loss)(*draw(rows=4)[:3]), "tpu", split)
    assert unfused == {} and fused == {
        "causal, by splash attention": 1,
        "a bias, in blocks of queries, not by splash attention: it does not support a bias": 1,
    }
    assert FuseAttention(split).split == split
