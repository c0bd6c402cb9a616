"""The expected time of a step: products at the rates of published runs, and what is sent while nothing computes."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from redeqx.compiled import Collective
from redeqx.dry_run import DryRun, Step
from redeqx.machine import GPUS, TPUS
from redeqx.memory import Strategy

MESH = Mesh(np.array(jax.devices()[:8]).reshape(1, 8, 1, 1), ("data", "fsdp", "sequence", "model"))
# MaxText's Llama 3.1 8B on 8 TPU v6e: 3.443 s (AI-Hypercomputer/tpu-recipes, Llama3.1-8B-MaxText/v6e-8). FLOPs of a step,
# with the recomputed gate, up and attention.
MATMULS, ATTENTION, MODEL = 8 * 1.317e15, 8 * 0.186e15, 8 * 1.265e15


def run_on(chip, *collectives, sent=0.0, hidden=1.0, dtype="bfloat16", bytes_moved=0, host_bytes=0, mesh=MESH, **kinds):
    kinds = kinds or {"matmul": MATMULS, "attention": ATTENTION}
    gather = Collective("all-gather", (1,), "bf16", int(sent * 8 / 7), tuple(range(8)), 1, hidden=hidden)
    step = Step(
        needs=0, compile_seconds=0.0, collectives=(gather, *collectives), flops={dtype: sum(kinds.values())}, kinds=kinds,
        bytes_moved=bytes_moved, host_bytes=host_bytes, host_hidden=hidden,
    )  # fmt: skip
    machine, plan = SimpleNamespace(chip=chip, memory=None), SimpleNamespace(mesh=mesh)
    return DryRun(machine, Strategy(1, 8, 3, 1), plan, {}, {"train": step}, {}, {"bfloat16": MODEL})  # type: ignore[arg-type]


def test_a_published_run_takes_about_what_is_expected():
    about = run_on(TPUS["v6e"]).expected
    assert about is not None and about.seconds == pytest.approx(3.443, rel=0.1) and about.outside == ()
    assert about.mfu == pytest.approx(MODEL / 8 / TPUS["v6e"].bfloat16 / about.seconds)


def test_what_is_not_hidden_is_added():
    chip = TPUS["v6e"]
    hidden, half, none = (run_on(chip, sent=chip.link, hidden=share).expected for share in (1.0, 0.5, 0.0))
    assert half.seconds == pytest.approx(hidden.seconds + 0.5) and none.seconds == pytest.approx(hidden.seconds + 1)
    copied = run_on(chip, sent=chip.link, hidden=0.5, host_bytes=chip.host).expected
    assert copied.seconds == pytest.approx(half.seconds + 0.5)


@pytest.mark.parametrize("n_local, n_networks", [(4, 4), (1, 1)])
def test_a_ring_over_hosts_sends_by_the_networks_of_a_host(n_local, n_networks):
    chip = GPUS["h100-80gb"].chip
    devices = np.array([SimpleNamespace(process_index=i // n_local) for i in range(8)])
    found = run_on(chip, sent=chip.network, mesh=SimpleNamespace(devices=devices, size=8, shape=MESH.shape)).estimate
    assert found.communication == pytest.approx(max(1 / n_networks, chip.network / chip.link))


@pytest.mark.parametrize("n_local, is_between_hosts", [(8, False), (4, True)])
def test_a_permute_is_as_slow_as_its_pair_between_hosts(n_local, is_between_hosts):
    chip = GPUS["h100-80gb"].chip
    pairs = tuple((i, (i + 1) % 8) for i in range(8))
    permute = Collective("collective-permute", (1,), "bf16", int(chip.network), pairs[0], 1, pairs=pairs)
    devices = np.array([SimpleNamespace(process_index=i // n_local) for i in range(8)])
    found = run_on(chip, permute, mesh=SimpleNamespace(devices=devices, size=8, shape=MESH.shape)).estimate
    assert found.communication == pytest.approx(1 if is_between_hosts else chip.network / chip.link)


def test_what_is_copied_to_the_host_may_be_needed_at_once():
    """The state on the device is needed with all else when gradients are complete, not with the activations."""
    for needs, expected in ((90, 60), (70, 50)):
        step = Step(needs=needs, compile_seconds=0.0, arguments=40).offloaded(30, 20)
        assert (step.needs, step.arguments, step.host_bytes) == (expected, 10, 60)


def test_no_step_is_expected_to_be_faster_than_its_bound():
    chip = TPUS["v6e"]
    about = run_on(chip, bytes_moved=int(100 * chip.bandwidth)).expected
    assert about.seconds == pytest.approx(100) and about.outside == ("much time for memory",)


@pytest.mark.parametrize(
    "options, outside",
    [
        ({"matmul": 1e15, "attention": 1e16}, "91% of the FLOPs in attention"),
        ({"matmul": 8e12}, "1e+12 FLOPs a device"),
        ({"matmul": 1e16, "experts": 1e16}, "products of experts"),
        ({"dtype": "float32"}, "products in float32"),
    ],
)
def test_a_step_unlike_the_published_runs_says_so(options, outside):
    assert run_on(TPUS["v6e"], **options).expected.outside == (outside,)


def test_chips_without_published_runs_have_no_expected_time():
    assert run_on(GPUS["l4"].chip).expected is None and run_on(None).expected is None
