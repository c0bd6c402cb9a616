"""The mesh: its shapes, errors for sizes that do not divide, and simulated devices."""

import functools
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest
from jax.sharding import AxisType, PartitionSpec as P

from redeqx.machine import make_mesh, n_batch_shards, of_devices, replicated, split_rows


@pytest.mark.parametrize(
    "n_model_shards, n_fsdp_shards, n_sequence_shards, shape, batch_shards",
    [
        (1, 1, 1, (8, 1, 1, 1), 8),
        (2, 1, 1, (4, 1, 1, 2), 4),
        (8, 1, 1, (1, 1, 1, 8), 1),
        (1, 8, 1, (1, 8, 1, 1), 8),
        (2, 2, 1, (2, 2, 1, 2), 4),
        (4, 2, 1, (1, 2, 1, 4), 2),
        (2, 1, 2, (2, 1, 2, 2), 2),
        (1, 2, 4, (1, 2, 4, 1), 2),
    ],
)
def test_mesh_shape(n_model_shards, n_fsdp_shards, n_sequence_shards, shape, batch_shards):
    mesh = make_mesh(n_model_shards, n_fsdp_shards, n_sequence_shards=n_sequence_shards)
    assert tuple(mesh.shape.items()) == tuple(zip(("data", "fsdp", "sequence", "model"), shape, strict=True))
    assert n_batch_shards(mesh) == batch_shards
    assert mesh.axis_types == (AxisType.Auto,) * 4
    assert set(mesh.devices.flat) == set(jax.devices())


def test_model_shards_are_on_neighbouring_devices():
    """The model axis communicates most, so its devices are neighbours."""
    ids = [device.id for device in make_mesh(2, 2).devices[0, 0, 0]]
    assert ids == [0, 1]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            (3,),
            "`n_model_shards`=3 x `n_fsdp_shards`=1 = 3: expected a product that divides the 8 devices, got a remainder "
            "of 2. Choose a product among 1, 2, 4, 8.",
        ),
        ((4, 4), "`n_model_shards`=4 x `n_fsdp_shards`=4 = 16: expected a product that divides the 8 devices"),
        ((0,), "`n_model_shards`: expected at least 1, got 0. Pass 1 to leave that axis unused."),
        ((1, -2), "`n_fsdp_shards`: expected at least 1, got -2."),
    ],
)
def test_invalid_numbers_of_shards_are_errors(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make_mesh(*arguments)


def test_split_on_one_device_is_an_error():
    message = (
        "`n_model_shards`=2 x `n_fsdp_shards`=1 = 2: expected 1 on one device, got 2. Leave them out, or simulate devices "
        "on the CPU with `redeqx.simulate_devices(8)` and JAX_PLATFORMS=cpu."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        make_mesh(2, devices=jax.devices()[:1])


def test_shardings_of_rows_and_replicas():
    mesh = make_mesh(2, 2)
    assert replicated(mesh).spec == P()
    assert split_rows(mesh).spec == P(("data", "fsdp"))
    assert split_rows(mesh, dim=1).spec == P(None, ("data", "fsdp"))


def run_python(code, **env):
    """The output of a new interpreter, with a timeout."""
    clean = {name: value for name, value in os.environ.items() if name not in ("NPROC", "XLA_FLAGS")}
    return subprocess.run(
        [sys.executable, "-c", code], env={**clean, **env}, capture_output=True, text=True, timeout=100, check=True
    ).stdout.strip()


@pytest.mark.parametrize("index", [0, 1])
def test_memory_is_that_of_a_device_of_this_process(monkeypatch, index):
    """JAX raises an error for devices of other processes."""
    monkeypatch.setattr(jax, "process_index", lambda: index)

    def memory_stats(of):
        assert of == index
        return {"bytes_limit": 100 + of}

    devices = [
        SimpleNamespace(
            platform="gpu", device_kind="a GPU", process_index=of, memory_stats=functools.partial(memory_stats, of)
        )
        for of in (0, 1)
    ]
    assert of_devices("this", devices).memory == 100 + index


@pytest.mark.parametrize("stats", [None, {}])
def test_memory_of_an_accelerator_that_reports_none_is_unknown(stats):
    """It is not that of the host, as for simulated devices."""
    device = SimpleNamespace(platform="tpu", device_kind="TPU v4", process_index=0, memory_stats=lambda: stats)
    assert of_devices("this", [device] * 4).memory is None
    assert of_devices("this", jax.devices()).memory > 0


@pytest.mark.sweep
def test_simulate_devices():
    code = (
        "import os, redeqx; redeqx.simulate_devices(4); import jax; "
        "mesh = redeqx.Deployer(n_model_shards=2, verbose=False).mesh; "
        "print(jax.device_count(), int(os.environ['NPROC']) >= 8, list(mesh.shape.values()))"
    )
    assert run_python(code, JAX_PLATFORMS="cpu") == "4 True [2, 1, 1, 2]"


@pytest.mark.sweep
def test_simulate_devices_after_jax_has_started_is_an_error():
    code = """
import os, jax, redeqx
jax.devices()
try:
    redeqx.simulate_devices(4)
except RuntimeError as error:
    print(error, "NPROC" in os.environ)
"""
    assert run_python(code, JAX_PLATFORMS="cpu") == (
        "`simulate_devices(4)`: expected JAX's devices to be untouched, got a started backend. "
        "Call it at the top of the script, before any array is created. False"
    )
