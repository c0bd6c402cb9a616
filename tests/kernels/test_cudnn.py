"""cuDNN's operands, and what it does not support; needs neither a GPU nor its plug-in."""

import logging
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import redeqx
from redeqx.kernels import KERNELS, AttentionSetting
from redeqx.machine import make_mesh, split_heads

cudnn = KERNELS["cuDNN"]


def shapes(dtype=jnp.bfloat16, n_queries=20, n_keys=20, heads=4, groups=4, size=8, value_size=8):
    q, k = (2, n_queries, heads, size), (2, n_keys, groups, size)
    return [jnp.zeros(shape, dtype) for shape in (q, k, (*k[:3], value_size))]


UNSUPPORTED = {
    "float32": (AttentionSetting(1.0), shapes(jnp.float32), {}, "bfloat16 and float16, not float32"),
    "size": (AttentionSetting(1.0), shapes(size=6, value_size=6), {}, "multiples of 8, not 6 and 6"),
    "value size": (AttentionSetting(1.0), shapes(value_size=16), {}, "multiples of 8, not 8 and 16"),
    "wide heads": (AttentionSetting(1.0), shapes(size=264, value_size=264), {}, "a head size of at most 128, not 264"),
    "dropout": (AttentionSetting(1.0, dropout=0.1), shapes(), {}, "its dropout takes no key"),
    "window": (AttentionSetting(1.0, window=3), shapes(), {}, "only keys before the query"),
    "bias": (AttentionSetting(1.0), shapes(), {"bias": jnp.zeros((2, 4, 20, 20))}, "a bias only if all rows share it"),
}


@pytest.mark.parametrize(("setting", "operands", "extras", "reason"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_unsupported_operands_have_a_reason(setting, operands, extras, reason):
    assert reason in cudnn.unsupported_reason(setting, *operands, extras)


def test_segments_and_masks_become_a_bias_with_even_sizes():
    q, k, v = shapes(n_queries=21, n_keys=17)
    segments = {"query_segments": jnp.arange(42).reshape(2, 21) % 2, "key_segments": jnp.arange(34).reshape(2, 17) % 2}
    (q, k, _, bias, *_), _ = cudnn.arguments(
        AttentionSetting(1.0), q, k, v, {**segments, "mask": jnp.ones((1, 1, 1, 17), bool).at[..., 3].set(False)}
    )
    assert bias.shape == (2, 1, 22, 18) and q.shape[1] == 22 and k.shape[1] == 18
    mask = segments["query_segments"][:, :, None] == segments["key_segments"][:, None]
    mask = mask & (jnp.arange(17) != 3)
    np.testing.assert_array_equal(bias[:, 0, :21, :17] == 0, mask)
    assert (bias[..., 17] < -1e9).all()  # a padding key


@pytest.mark.parametrize(
    ("heads", "groups", "rows", "spec"),
    [(4, 4, 8, ("data", "model")), (4, 2, 8, ("data", "model")), (3, 1, 8, ("data", None)), (4, 4, 1, (None, "model"))],
)
def test_queries_keys_and_values_have_the_same_split(heads, groups, rows, spec):
    """Otherwise the GPU compiler fails. Dims that do not divide are not split."""
    q, k, v = (x[:1].repeat(rows, 0) for x in shapes(heads=heads, groups=groups))
    setting = AttentionSetting(1.0, split=split_heads(make_mesh(2)))
    fn = jax.jit(lambda *operands: cudnn.arguments(setting, *operands, {})[0][:3])
    for x in fn(q, k, v):
        by_rows, _, by_heads, _ = (*x.sharding.spec, None, None, None, None)[:4]
        assert ("data" in (by_rows or ()), by_heads) == (spec[0] is not None, spec[1])


def test_a_bias_of_segments_is_whole_along_queries_and_keys():
    """Its partitioner refuses others. Segments are split by positions where heads are exchanged for them."""
    mesh = make_mesh(n_sequence_shards=8)
    setting = AttentionSetting(1.0, split=NamedSharding(mesh, P(None, None, "sequence", None)))
    segments = jax.device_put(jnp.zeros((2, 16), int), NamedSharding(mesh, P(None, "sequence")))
    operands = shapes(n_queries=16, n_keys=16, heads=8, groups=8)

    def bias(segments):
        return cudnn.arguments(setting, *operands, {"query_segments": segments, "key_segments": segments})[0][3]

    assert (*jax.jit(bias)(segments).sharding.spec, None, None, None, None)[2:4] == (None, None)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("has_lengths", [False, True])
def test_the_mask_type_depends_on_causal_and_lengths(causal, has_lengths):
    extras = {"lengths": jnp.array([3])} if has_lengths else {}
    (*_, query_lengths, lengths), options = cudnn.arguments(AttentionSetting(1.0, causal=causal), *shapes(), extras)
    names = {(False, False): "NO_MASK", (True, False): "CAUSAL", (False, True): "PADDING", (True, True): "PADDING_CAUSAL"}
    assert options["mask_type"].name == names[causal, has_lengths]
    if has_lengths:
        assert lengths.tolist() == [3, 3] and query_lengths.tolist() == [20, 20]


def test_falls_back_to_plain_xla_and_logs_the_reason(caplog):
    """Lowering for CUDA needs no plug-in. cuDNN does not support float32."""
    traced = jax.jit(lambda q, k, v: redeqx.attention(q, k, v, causal=True)).trace(
        *shapes(jnp.float32, n_queries=24, n_keys=24)
    )
    with caplog.at_level(logging.INFO, "redeqx"):
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "stablehlo.dot_general" in text and "custom_call" not in text
    assert "in blocks of queries, not by cuDNN: it supports bfloat16 and float16, not float32" in caplog.text


def test_the_public_function_rounds_the_log_sum_exps():
    """Once it fails, and the backward pass is public too, no private function of JAX is needed."""
    public = partial(jax.nn.dot_product_attention, implementation="xla", return_residual=True)
    assert jax.eval_shape(public, *shapes())[1].dtype == jnp.bfloat16
