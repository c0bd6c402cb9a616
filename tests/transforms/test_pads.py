"""Pads and cuts of a dim that is split over devices: those of one device, and no failure."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import redeqx
from redeqx.machine import make_mesh
from redeqx.tracing import transformed
from redeqx.transforms import FixPads

MODEL = {"table": np.random.default_rng(1).normal(size=(16, 8)).astype(np.float32)}
SIZES = [(-1, 0, 1), (-3, 2, 1), (-3, -2, 2), (-130, 140, 1), (5, 40, 1)]


def loss_of(sizes):
    def loss_fn(model, batch, key):
        x = jnp.tanh(model["table"][batch])
        x = jax.lax.pad(x, 0.5, ((0, 0, 0), sizes, (0, 0, 0)))
        scores = jnp.einsum("bid,bjd->bij", x, x)  # of positions
        return jnp.square(jax.nn.softmax(scores) @ x * jnp.arange(x.shape[1])[:, None]).mean()

    return loss_fn


@pytest.mark.parametrize("sizes", SIZES)
def test_a_pad_without_negative_sizes_is_the_same(sizes):
    batch = np.random.default_rng(0).integers(0, 16, (2, 64)).astype(np.int32)
    found, expected = (
        jax.jit(jax.value_and_grad(fn))(MODEL, batch, None)
        for fn in (transformed(loss_of(sizes), [FixPads(make_mesh())]), loss_of(sizes))
    )
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(a - b) <= 1e-6 * np.linalg.norm(b)


def slice_with_a_stride(model, batch, key):
    """Its derivative is a pad."""
    x = jnp.tanh(model["table"][batch])
    scores = jax.nn.softmax(jnp.einsum("bid,bjd->bij", x, x))
    return jnp.square((scores @ x)[:, 22:41:3]).mean()


@pytest.mark.parametrize("loss_fn", [loss_of((-3, -2, 2)), slice_with_a_stride], ids=["pad", "slice"])
def test_split_positions(loss_fn):
    batch = np.random.default_rng(0).integers(0, 16, (4, 64)).astype(np.int32)
    expected = jax.jit(jax.grad(loss_fn))(MODEL, batch, None)["table"]
    deployer = redeqx.Deployer(n_sequence_shards=4, verbose=False)
    trainer = redeqx.Trainer(deployer, model=MODEL, optimizer=optax.sgd(1.0), collate_fn=np.stack, loss_fn=loss_fn)
    trainer.update(list(batch))
    np.testing.assert_allclose(MODEL["table"] - np.asarray(trainer.model["table"]), expected, rtol=1e-4, atol=1e-5)


def shifted(sizes, spec, out_spec, rules=True):
    """The values and the gradient of a pad on four devices, between two of these splits, and how far each is off."""
    mesh = make_mesh(n_sequence_shards=4)

    def fn(x):
        x = jax.lax.with_sharding_constraint(x * 2, NamedSharding(mesh, spec))
        y = jax.lax.pad(x, 0.5, [sizes])
        return jax.lax.with_sharding_constraint(y, NamedSharding(mesh, out_spec))

    def loss(fn, x):
        y = fn(x)
        return jnp.sin(y) @ jnp.cos(jnp.arange(len(y))), y

    x = jnp.tanh(jnp.arange(16.0))
    (_, y), gradient = jax.value_and_grad(lambda x: loss(lambda x: jax.lax.pad(x * 2, 0.5, [sizes]), x), has_aux=True)(x)
    fn = transformed(fn, [FixPads(mesh)]) if rules else fn
    (_, found), of_x = jax.jit(jax.value_and_grad(lambda x: loss(fn, x), has_aux=True))(x)
    return float(jnp.abs(found - y).max()), float(jnp.abs(of_x - gradient).max())


@pytest.mark.parametrize(("spec", "out_spec"), [(P(), P("sequence")), (P("sequence"), P())], ids=["to-split", "of-split"])
@pytest.mark.parametrize("sizes", [(1, -1, 0), (-1, 1, 0), (-1, -1, 0), (-2, 0, 0), (2, 0, 0), (1, 1, 0)])
def test_pads_that_cut_an_end(sizes, spec, out_spec):
    assert max(shifted(sizes, spec, out_spec)) < 1e-6


def test_xla_still_cuts_ends_wrongly():
    """Once this fails, XLA is right without the rule (jax 0.10.2, 2026-12-01)."""
    assert min(shifted((1, -1, 0), P(), P("sequence"), rules=False)) > 0.1
    assert shifted((1, -1, 0), P("sequence"), P(), rules=False)[1] > 0.1


def test_a_slice_of_one_entry_with_a_stride():
    mesh = make_mesh(n_model_shards=4)
    x = jnp.arange(4.0)

    def third(x):
        x = jax.lax.with_sharding_constraint(x * 2, NamedSharding(mesh, P("model")))
        return jax.lax.slice(x, [2], [3], [5])

    assert jax.jit(transformed(third, [FixPads(mesh)]))(x) == 4
    assert jax.jit(third)(x) != 4  # once this fails, XLA is right without the rule (jax 0.10.2, 2026-11-30)


ABORTS = """
import jax
from jax.sharding import NamedSharding, PartitionSpec as P
from redeqx.machine import make_mesh
jax.config.update("jax_num_cpu_devices", 4)
sharding = NamedSharding(make_mesh(n_sequence_shards=4), P("sequence"))
x = jax.device_put(jax.numpy.arange(64.0), sharding)
jax.jit(lambda x: jax.lax.pad(x, 0.0, [(-1, 2, 1)]), out_shardings=sharding)(x)
"""


FAILS = ABORTS.replace("64.0", "4.0").replace("(-1, 2, 1)", "(5, 17, 2)")


@pytest.mark.sweep
def test_xla_still_fails():
    """The other failure that `FixPads` avoids (jax 0.10.2, 2026-11-30). Once this fails, the rule is for negative sizes."""
    found = subprocess.run([sys.executable, "-c", FAILS], capture_output=True, timeout=60, text=True)
    assert found.returncode == 1 and "hlo verifier" in found.stderr


@pytest.mark.sweep
def test_xla_still_ends_the_process():
    """The failure that `FixPads` avoids (jax 0.10.2, 2026-11-27). Once this fails, delete the rule."""
    assert subprocess.run([sys.executable, "-c", ABORTS], capture_output=True, timeout=60).returncode < 0
