"""Programs and values that must agree in all processes are compared, and differences are reported."""

import contextlib
import os
import re
import socket
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redeqx.distributed import Member, Peers, agree_on_program, agree_on_values

LIMIT = 30.0


@pytest.fixture(scope="module")
def trio():
    """Three connected processes, each run by a thread."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    peers = [Peers(3, i) for i in range(3)]
    members = [Member(each.n, each.index, "127.0.0.1", port, "127.0.0.1") for each in peers]
    meets = [partial(each.meet, member, LIMIT) for each, member in zip(peers, members, strict=True)]
    assert run_in_threads(meets) == [None] * 3
    yield peers
    for each in peers:
        each._left.update(range(3))
    for each in peers:
        for link in each._links.values():
            with contextlib.suppress(OSError):
                link._socket.shutdown(socket.SHUT_RDWR)
            link.close()


def run_in_threads(fns):
    """What each function returns or raises, each run in its own thread."""
    ended = {}

    def run(i, fn):
        try:
            ended[i] = fn()
        except Exception as error:
            ended[i] = error

    threads = [threading.Thread(target=run, args=each, daemon=True) for each in enumerate(fns)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive()
    return [ended[i] for i in range(len(fns))]


def call_in_all(trio, fn, what, inputs):
    """What `fn(peers, what, input)` returns or raises in each process."""
    return run_in_threads([partial(fn, peers, what, each) for peers, each in zip(trio, inputs, strict=True)])


def common_message(errors):
    assert {type(error) for error in errors} == {ValueError}, errors
    (text,) = {str(error) for error in errors}
    return text


def lowered(rate, more=False):
    def step(x):
        jax.debug.callback(lambda x: None, x)  # the callback's address is not part of the program
        x = x - rate * jnp.sin(x)
        return jnp.cos(x) if more else x

    return jax.jit(step).lower(jnp.zeros(3))


def test_same_program_from_different_source_locations_agrees(trio):
    source = "import jax, jax.numpy as jnp\nlowered = jax.jit(lambda x: x - 0.1 * jnp.sin(x)).lower(jnp.zeros(3))"
    programs = []
    for i in range(3):
        names = {}
        exec(compile("\n" * i + source, f"/host{i}/train.py", "exec"), names)
        programs.append(names["lowered"])
    assert (
        run_in_threads([partial(agree_on_program, *each) for each in zip(trio, ["step"] * 3, programs, strict=True)])
        == [None] * 3
    )
    same = [lowered(0.125) for _ in trio]
    assert (
        run_in_threads([partial(agree_on_program, *each) for each in zip(trio, ["step"] * 3, same, strict=True)])
        == [None] * 3
    )


def test_differing_constant_is_shown(trio):
    programs = [lowered(0.125), lowered(0.125), lowered(0.25)]
    found = call_in_all(trio, agree_on_program, "train step", programs)
    assert re.fullmatch(
        r"`train step`: expected `line \d+` to be .*1\.250000e-01.*, as in process 0, "
        r"got .*2\.500000e-01.* in process 2\. Every process must run the same script with the same arguments: look for "
        r"what depends on the process, the host, the time, or the order of a set\.",
        common_message(found),
    )


def test_differing_operation_is_shown(trio):
    programs = [lowered(0.125), lowered(0.125, more=True), lowered(0.125)]
    found = call_in_all(trio, agree_on_program, "train step", programs)
    assert "stablehlo.cosine" in common_message(found)
    assert "in process 1" in common_message(found)


def values(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "weight": jnp.asarray(rng.normal(size=(3, 4)), jnp.bfloat16),
        "bias": np.asfortranarray(rng.normal(size=(2, 5))).T,
        "count": np.zeros((), np.int32),
        "key": jax.random.key(0),
    }


@pytest.mark.parametrize("other", ["weight", "bias", "count", "key"])
def test_differing_initial_value_is_named(trio, other):
    changed = {"weight": values(1)["weight"], "bias": values(1)["bias"], "count": np.int32(1), "key": jax.random.key(1)}
    each = [values(), {**values(), other: changed[other]}, values()]
    assert call_in_all(trio, agree_on_values, "model", [values() for _ in trio]) == [None] * 3
    found = call_in_all(trio, agree_on_values, "model", each)
    assert re.fullmatch(
        rf"`model`: expected `{other}` to have the same values in all processes, got crc32 [0-9a-f]{{8}} in process 0, "
        r"[0-9a-f]{8} in process 1\. Every process must run the same script .*\.",
        common_message(found),
    )


def test_single_process_compares_nothing():
    agree_on_values(Peers(), "model", {"weight": object()})
    agree_on_program(Peers(), "step", None)


def test_process_0_decides_and_warns(trio):
    nan = float("nan")
    inputs = [{"loss": nan, "score": 0.5}, {"loss": nan, "score": 0.25}, {"loss": nan}]
    with pytest.warns(UserWarning) as caught:
        found = call_in_all(trio, Peers.decide, "eval_metric_fn", inputs)
    assert [each["score"] for each in found] == [0.5] * 3
    (warning,) = caught
    assert str(warning.message) == (
        "`eval_metric_fn`: expected `score` to be 0.5, as in process 0, got 0.25 in process 1. Process 0's is used: compute "
        "it from all the outputs."
    )
    alike = [{"loss": nan, "score": 0.5}] * 3
    assert (
        len(run_in_threads([partial(peers.decide, "eval_metric_fn", each) for peers, each in zip(trio, alike, strict=True)]))
        == 3
    )


# --- processes that are one run ------------------------------------------------------------------------------------------

SCRIPT = """
import os, sys
fault, index = sys.argv[1], os.environ["REDEQX_PROCESS_ID"]
if fault == "flags" and index == "1":
    os.environ["XLA_FLAGS"] = "--xla_cpu_enable_fast_math=true --xla_dump_to=/tmp/unused"
import jax, jax.numpy as jnp, numpy as np, optax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
import redeqx
from jax.sharding import NamedSharding, PartitionSpec as P

deployer = redeqx.Deployer(n_model_shards=2, timeouts=redeqx.Timeouts(hang=60))
weight = np.arange(8, dtype=np.float32).reshape(4, 2)
if fault == "shards" and index == "1":
    weight[3, 1] += 1e-6  # only in this process's copy of the second shard
split = NamedSharding(deployer.mesh, P("model", None))
model = {"weight": jax.make_array_from_callback((4, 2), split, lambda at: weight[at])}
trainer = redeqx.Trainer(
    deployer, model=model, optimizer=optax.sgd(0.1), collate_fn=np.stack,
    loss_fn=lambda model, batch, key: jnp.mean((batch @ model["weight"]) ** 2),
)
trainer.fit([np.ones(4, np.float32)] * 16, batch_size=8, n_epochs=1)
print("trained", flush=True)
"""


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("none", "trained"),
        ("shards", "ValueError: `model`: expected `weight(slice(2, 4, None), slice(None, None, None))` to have the same"),
        (
            "flags",
            "ValueError: `Deployer`: expected `XLA_FLAGS` to be unset, as in process 0, got --xla_cpu_enable_fast_math=true",
        ),
    ],
)
@pytest.mark.sweep
def test_processes_with_other_shards_or_flags_are_refused(tmp_path, fault, expected):
    """Each process holds both shards of the weight, and computes with one half of the rows."""
    (tmp_path / "run.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "NPROC": "16", "XLA_FLAGS": ""}
    command = [sys.executable, "-m", "redeqx", "launch", "--processes", "2", str(tmp_path / "run.py"), fault]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    output = run.stdout + run.stderr
    assert expected in output, output
    assert ("trained" in output) == (run.returncode == 0) == (fault == "none")
    assert "unused" not in output  # where files are does not matter
