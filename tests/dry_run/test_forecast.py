"""Dry runs: the report compared with a real step, described machines, and the `dry-run` command."""

import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
import textwrap
from collections import Counter
from html import escape
from types import SimpleNamespace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import topologies

import redeqx
from redeqx.compiled import Buffer
from redeqx.dry_run import DryRunDone, Step
from redeqx.machine import GPUS, TPUS, Chip, describe, dry, dry_for, of_devices, replicated
from redeqx.memory import sizes_of
from redeqx.models import cross_entropy, from_pretrained, lora, save_pretrained
from redeqx.models.gpt2 import GPT2, GPT2Config
from tests._tree import named_leaves

VOCAB, SEQ, D, LAYERS = 256, 16, 64, 2
CONFIG = GPT2Config(VOCAB, SEQ, d_model=D, n_layers=LAYERS, n_heads=4).without_dropout()
requires_tpu_compiler = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="the TPU compiler is an extra")
requires_gpu_compiler = pytest.mark.skipif(
    importlib.util.find_spec("jax_plugins") is None or importlib.util.find_spec("jax_plugins.xla_cuda13") is None,
    reason="the GPU compiler is an extra",
)


def gpu(kind, memory_stats):
    return SimpleNamespace(platform="gpu", process_index=0, device_kind=kind, memory_stats=memory_stats)


def test_present_devices_have_the_figures_of_their_kind():
    chips = [*TPUS.values(), *(gpu.chip for gpu in GPUS.values())]
    for chip in chips:
        device = gpu(chip.kind, lambda: {"bytes_limit": 123})
        machine = of_devices("this", [device] * 2)
        assert (machine.chip, machine.memory, len(machine.devices)) == (chip, 123, 2)
    assert of_devices("this", [gpu("new", dict)]).chip is None


def remat(config):
    return dataclasses.replace(config, remat=True)


def loss_fn(model, batch, key):
    return cross_entropy(jax.vmap(model)(batch), batch)


def make_trainer(deployer, config=CONFIG, **options):
    model = deployer.init(lambda: GPT2(config, key=jax.random.key(0)))
    options = {"optimizer": optax.adamw(1e-3), "loss_fn": loss_fn, "collate_fn": np.stack, **options}
    return redeqx.Trainer(deployer, model=model, **options)


def examples(n=64):
    return np.zeros((n, SEQ), np.int32)


def make_deployer(n_model=1, n_fsdp=1, **options):
    return redeqx.Deployer(n_model_shards=n_model, n_fsdp_shards=n_fsdp, verbose=False, **options)


@pytest.fixture(scope="module")
def on_eight_devices():
    """The dry run of a step on all three axes of a mesh."""
    return make_trainer(make_deployer(2, 2)).dry_run(examples(), 2)


# --- compared with a step ------------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_memory_equals_that_of_the_compiled_step():
    config = GPT2Config(512, 32, d_model=64, n_layers=3, n_heads=4).without_dropout()
    trainer = make_trainer(make_deployer(2, 2), config, accumulate_grad_batches=2)
    rows = np.zeros((64, 32), np.int32)
    run = trainer.dry_run(rows, 2)
    compiled = trainer.compile(rows, 2).memory_analysis()
    real = compiled.argument_size_in_bytes + compiled.temp_size_in_bytes
    assert run.needs == pytest.approx(real, rel=0.05)
    parameters = sum(leaf.sharding.shard_shape(leaf.shape) != () and leaf.addressable_shards[0].data.nbytes
                     for leaf in jax.tree.leaves(eqx.filter(trainer.model, eqx.is_array)))  # fmt: skip
    assert run.held["parameters"] == parameters
    assert 2 * parameters <= run.held["optimizer state"] <= 2 * parameters + 64
    step = run.steps["train"]
    assert sum(buffer.bytes for buffer in step.largest) == pytest.approx(step.temporaries, rel=0.05)
    assert run.machine.name == "this" and run.fits and run.estimate is None  # CPUs have no published rates


@pytest.mark.sweep
def test_rows_of_memory_include_the_batch():
    trainer = make_trainer(make_deployer(2, 2), GPT2Config(64, 32, d_model=8, n_layers=1, n_heads=2).without_dropout())
    rows = np.zeros((256, 32), np.int32)
    run, estimated = (trainer.dry_run(rows, 64, optimization=level) for level in ("O0", "none"))
    for each in (run, estimated):
        # 64 rows of 32 tokens, the step and a key.
        assert re.search(r"train step: batch +8\.0\d KiB\n", str(each)), str(each)
        step = each.steps["train"]
        assert each.needs == step.arguments + step.temporaries + step.outputs + step.code
    assert estimated.steps["train"].arguments == pytest.approx(run.steps["train"].arguments, abs=32)


@pytest.mark.sweep
def test_averages_are_evaluated_beside_the_trained_weights():
    needs, weights = [], 0
    for optimizer in (optax.adamw(1e-3), redeqx.optimizers.ema(optax.adamw(1e-3), 0.99)):
        with dry_for(describe("cpu:8")), pytest.raises(DryRunDone) as done:
            make_trainer(make_deployer(), optimizer=optimizer).fit(examples(8), 1, 1, eval_examples=examples(8))
        run = done.value.run
        needs.append(run.steps["eval"].needs - run.held["optimizer state"])
        weights = run.held["parameters"]
    assert needs[1] - needs[0] == pytest.approx(weights, abs=64)
    assert f"eval step: averages of the weights {weights / 2**10:.1f} KiB" in " ".join(str(run).split())


@pytest.mark.sweep
def test_numbers_of_4_bits_are_packed():
    class Codes(eqx.Module):
        weight: jax.Array
        scale: jax.Array

        def __call__(self, x):
            return x @ (self.weight.astype(jnp.float32) * self.scale)

    trainer = redeqx.Trainer(
        make_deployer(), model=Codes(jnp.ones((16, 512), jnp.int4), jnp.ones(())), optimizer=optax.sgd(0.1),
        loss_fn=lambda model, batch, key: jnp.mean(model(batch) ** 2), collate_fn=np.stack,
    )  # fmt: skip
    run, estimated = (trainer.dry_run(np.zeros((8, 16), np.float32), 1, optimization=level) for level in ("O0", "none"))
    assert run.held == estimated.held == {"parameters": 16 * 512 // 2 + 4} and run.plan.leaves["weight"].n_bytes == 4096
    arguments = [each.steps["train"].arguments for each in (run, estimated)]
    assert arguments[0] == pytest.approx(arguments[1], abs=32) and 4096 < arguments[0] < 4400


@pytest.mark.sweep
def test_copied_arguments_are_named_by_their_leaves_in_the_report(monkeypatch):
    trainer = make_trainer(make_deployer(2, 2), trainable=lambda leaf: eqx.is_inexact_array(leaf) and leaf.ndim > 1)
    (state, frozen, *_), _ = trainer.compile(examples(8), batch_size=8).args_info
    lists = {"state.trained": state.trained, "frozen": frozen, "state.opt_state": state.opt_state}
    shapes = {f"{name}[{i}]": info.shape for name, infos in lists.items() for i, info in enumerate(infos)}
    copies = [Buffer(2**20, "f32", shape, f"jit(step_fn)/copy({name})", ()) for name, shape in shapes.items()]
    step = Step(needs=2**21, compile_seconds=0.0, largest=tuple(copies))
    monkeypatch.setattr("redeqx.dry_run._forecast._step", lambda *args: step)
    largest = trainer.dry_run(examples(8), batch_size=8).to_json()["steps"]["train"]["largest"]
    leaves = {**named_leaves(eqx.filter(trainer.model, eqx.is_array)), **named_leaves(trainer.opt_state)}
    found = [copy["layer"].removeprefix("copy/") for copy in largest]
    assert sorted(found) == sorted(leaves)
    assert [leaves[name].shape for name in found] == [*shapes.values()]


@pytest.mark.sweep
def test_remainder_rows_are_computed_by_each_batch_shard():
    """Each of 8 batch shards computes all of these rows, so their FLOPs are not divided by 8."""
    trainer = make_trainer(make_deployer())
    full, two, twelve = (trainer.dry_run(examples(), batch_size=n) for n in (8, 2, 12))
    assert "1 rows x 8 batch shards x 1 micro-batches = 8 examples a step" in str(full) and "computes all" not in str(full)
    assert "batch       2 examples a step; each batch shard computes all 2 rows that do not divide over the 8" in str(two)
    assert "and 4 more rows = 12 examples a step; each batch shard computes all 4 rows" in " ".join(str(twelve).split())
    flops = [sum(run.steps["train"].flops.values()) for run in (full, two, twelve)]
    assert flops[1] / flops[0] == pytest.approx(2.0, rel=0.01)  # 2 rows, each computed 8 times, compared with 8 rows
    assert flops[2] / flops[0] == pytest.approx(5.0, rel=0.01)
    assert [sum(run.model_flops.values()) / sum(full.model_flops.values()) for run in (two, twelve)] == [0.25, 1.5]


@pytest.mark.sweep
def test_estimate_of_collectives_between_hosts_and_of_copies_to_the_host(on_eight_devices):
    run = on_eight_devices
    within, between = 0.0, Counter()  # bytes within a host of four devices, and between both by the devices of each
    for each in run.steps["train"].collectives:
        if len({i // 4 for i in each.group}) == 1:
            within += each.moved
        else:
            between[len(each.group) // 2] += each.moved
    assert within > 0 and between[1] > 0 and between[2] > 0
    hosts = SimpleNamespace(devices=np.array([SimpleNamespace(process_index=i // 4) for i in range(8)]), size=8)
    train = dataclasses.replace(run.steps["train"], host_bytes=7 * 2**40)

    def estimate(network):
        chip = Chip("any", 0, bfloat16=1e30, float32=1e30, bandwidth=1e30, link=2.0, network=network, host=2.0**40)
        machine = dataclasses.replace(run.machine, chip=chip)
        return dataclasses.replace(run, machine=machine, plan=SimpleNamespace(mesh=hosts), steps={"train": train}).estimate

    # Devices of one host use all of their networks at once, but no more than their links.
    for network in (0.5, 1.5):
        sent = sum(n_bytes / min(2.0, network * n) for n, n_bytes in between.items())
        assert estimate(network).communication == pytest.approx(within / 2 + sent)
    assert estimate(None).communication == pytest.approx((within + between.total()) / 2)  # the link also connects hosts
    assert estimate(0.5).host == 7 and estimate(0.5).serial == pytest.approx(estimate(0.5).communication + 7)


@pytest.mark.sweep
def test_the_report_says_tokens_a_second(on_eight_devices):
    chip = Chip("any", 0, bfloat16=1e9, float32=1e9, bandwidth=1e9, link=1e9)
    run = dataclasses.replace(on_eight_devices, machine=dataclasses.replace(on_eight_devices.machine, chip=chip))
    assert run.n_tokens == 8 * SEQ
    at_most, serial = (f"{run.n_tokens / seconds:,.0f}" for seconds in (run.estimate.step, run.estimate.serial))
    assert f"{run.n_tokens:,}: at most {at_most} a second, {serial} without overlap" in str(run)


@pytest.mark.sweep
def test_the_report_names_layers_axes_and_lines(on_eight_devices):
    run = on_eight_devices
    text = str(run)
    for expected in (
        "dry run on this machine", "mesh        data=2 x fsdp=2 x model=2",
        "2 rows x 4 batch shards x 1 micro-batches = 8 examples",
        "optimizer state", "all-gather", "all-reduce", "fsdp", "stack.blocks.mlp.up.weight", "models/nn/_layers.py:",
        "row: its input arrives split by", "to spare",
    ):  # fmt: skip
        assert expected in text, expected
    assert run._repr_html_() == f"<pre>{escape(text)}</pre>"
    gathered = [c for c in run.to_json()["steps"]["train"]["collectives"] if c["kind"] == "all-gather"]
    assert {c["layer"] for c in gathered} >= {"stack.blocks.mlp.up.weight", "stack.blocks.attention.query.weight"}
    assert all(c["axes"] == ["fsdp"] for c in gathered if c["layer"].startswith("stack.blocks"))
    json.loads(json.dumps(run.to_json()))


@pytest.mark.parametrize("with_remat", [False, pytest.param(True, marks=pytest.mark.sweep)])
@pytest.mark.sweep
def test_flops_with_and_without_recomputation(with_remat):
    """A step computes three matmuls for each one of the loss. Remat repeats the forward pass, fused attention its scores.

    The model's FLOPs are without the keys that the causal mask excludes, which blocks of queries on CPUs compute too.
    """
    mlp, projections = 2 * (2 * D * 4 * D), 4 * (2 * D * D)  # per token
    unmasked, forward = (
        16 * SEQ * (LAYERS * (mlp + projections + 2 * (2 * n_keys * D)) + 2 * D * VOCAB) for n_keys in ((SEQ + 1) / 2, SEQ)
    )
    trainer = make_trainer(make_deployer(1, 8), config=remat(CONFIG)) if with_remat else make_trainer(make_deployer())
    run = trainer.dry_run(examples(), 2)
    assert dict(run.model_flops) == {"float32": 3 * unmasked}
    computed = run.steps["train"].flops["float32"]
    scores = 16 * SEQ * LAYERS * 2 * SEQ * D
    assert 3 * forward + scores < computed <= 4 * forward + scores if with_remat else computed == 3 * forward + scores


@pytest.mark.sweep
def test_verdict_survives_failures_in_details(on_eight_devices, monkeypatch):
    """The verdict needs only the memory of a compiled step. The report says what else could not be read, with the reason."""
    expected = on_eight_devices

    def fails(*args):
        return [][0]

    monkeypatch.setattr("redeqx.dry_run._forecast.temporaries", fails)
    run = make_trainer(make_deployer(2, 2)).dry_run(examples(), 2)
    assert run.needs == expected.needs and run.fits and run.verdict() == expected.verdict() and run.estimate is None
    text = str(run)
    what = "train step: its arrays and collectives"
    assert f"{what} " in text and "IndexError: list index out of range (test_forecast.py:" in text
    assert text.splitlines()[-1] == str(expected).splitlines()[-1] and "KiB of" in text.splitlines()[-1]
    report = json.loads(json.dumps(run.to_json()))
    assert report["needs"] == expected.needs and report["steps"]["train"]["unread"] == run.steps["train"].unread


@pytest.mark.sweep
def test_unparsable_program_still_has_its_memory(monkeypatch):
    """A libtpu newer than jaxlib compiles a step whose text jaxlib cannot parse."""

    def unread(text):
        raise jax.errors.JaxRuntimeError("INTERNAL: unknown opcode\nand more")

    monkeypatch.setattr("redeqx.dry_run._forecast.Module.of", unread)
    run = make_trainer(make_deployer()).dry_run(examples(), 1)
    step = run.steps["train"]
    assert run.fits and step.temporaries > 0 and step.flops and step.unread and run.estimate is None
    assert "JaxRuntimeError: INTERNAL: unknown opcode (" in str(run) and "and more" not in str(run)


@pytest.mark.sweep
def test_verdict_survives_an_evaluation_that_does_not_compile(monkeypatch):
    from redeqx.dry_run import _forecast as _dry_run

    real = _dry_run._step

    def step(traced, machine, mesh, optimization, other_bytes, save):
        if other_bytes:  # an eval or predict step
            raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: no such operation")
        return real(traced, machine, mesh, optimization, other_bytes, save)

    monkeypatch.setattr(_dry_run, "_step", step)
    with redeqx.described("cpu:8"):
        trainer = make_trainer(make_deployer())
        with pytest.raises(DryRunDone) as done:
            trainer.fit(examples(), 2, 1, eval_examples=examples(8))
    run = done.value.run
    assert set(run.steps) == {"train"} and run.fits and done.value.code == 1
    assert run.failed["eval step"].startswith("JaxRuntimeError: UNIMPLEMENTED")
    assert run.verdict().endswith("to spare; not counted, as it failed to compile: the eval step")


@pytest.mark.sweep
def test_dry_run_does_not_change_the_trainer():
    trainer = make_trainer(make_deployer(2))
    before = jax.tree.map(np.asarray, eqx.filter(trainer.model, eqx.is_array))
    trainer.dry_run(examples(), 1)
    assert trainer.step == 0 and trainer.plan is None
    trainer.train(examples(8), 1)
    first = trainer.dry_run(examples(), 1)  # the model is now on the mesh
    assert first.fits
    other = make_trainer(make_deployer(2))
    assert eqx.tree_equal(before, jax.tree.map(np.asarray, eqx.filter(other.model, eqx.is_array)))
    other.train(examples(8), 1)
    assert eqx.tree_equal(trainer.model, other.model)


def test_model_state_and_custom_plan_are_used():
    deployer = make_deployer(2)
    model, state = eqx.nn.make_with_state(Normed)(jax.random.key(0))
    plan = deployer.plan(model, overrides={"linear.weight": (None, "model")})

    def loss(model, state, batch, key):
        out, state = jax.vmap(model, in_axes=(0, None), out_axes=(0, None), axis_name="batch")(batch, state)
        return jnp.mean(out**2), state

    trainer = redeqx.Trainer(
        deployer,
        model=model,
        model_state=state,
        optimizer=optax.sgd(0.1),
        collate_fn=np.stack,
        loss_fn=loss,
        plan=plan,
    )
    run = trainer.dry_run(np.zeros((16, 8), np.float32), 2)
    assert run.plan["linear.weight"].spec == jax.sharding.PartitionSpec(None, "model")
    assert run.held["model state"] == sum(leaf.nbytes for leaf in jax.tree.leaves(state))


class Normed(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.BatchNorm

    def __init__(self, key):
        self.linear = eqx.nn.Linear(8, 16, key=key)
        self.norm = eqx.nn.BatchNorm(16, axis_name="batch", mode="batch")

    def __call__(self, x, state):
        return self.norm(self.linear(x), state)


# --- inside a dry run --------------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_models_take_no_memory_and_nothing_is_written(tmp_path):
    before = {id(array) for array in jax.live_arrays()}
    with redeqx.described("cpu:8") as machine:
        deployer = redeqx.Deployer(n_model_shards=2, workdir=tmp_path / "run", verbose=False, loggers=[RaisingLogger()])
        assert deployer.is_dry_run and deployer.mesh.size == 8 and len(machine.devices) == 8
        trainer = make_trainer(deployer)
        arrays = jax.tree.leaves(eqx.filter(trainer.model, eqx.is_array))  # as a script filters them
        shapes = eqx.filter_eval_shape(lambda: GPT2(CONFIG, key=jax.random.key(0)))
        assert [x.shape for x in arrays] == [x.shape for x in jax.tree.leaves(shapes) if hasattr(x, "shape")]
        assert not any(map(np.any, arrays))
        assert all(isinstance(x, np.ndarray) and not any(x.strides) for x in arrays)  # one number each
        deployer.log_metrics({"loss": 1.0}, 0)
        deployer.save_outputs([1], "x.jsonl")
        predictor = trainer.get_default_predictor(lambda model, batch, key: jax.vmap(model)(batch).argmax(-1))
        with pytest.raises(DryRunDone) as done:
            trainer.fit(
                examples(), 2, 1, eval_examples=examples(20), eval_predictor=predictor,
                eval_metric_fn=lambda e, o: {}, save_last_ckpt=True,
            )  # fmt: skip
    assert dry() is None and not redeqx.Deployer(verbose=False).is_dry_run
    run = done.value.run
    assert done.value.code == 0 and set(run.steps) == {"train", "eval", "predict"}
    n_bytes = 4 * run.plan.n_parameters
    assert n_bytes < run.files["model.safetensors"] < n_bytes + 8192
    assert 2 * n_bytes < run.files["optimizer.safetensors"] < 2 * n_bytes + 16384
    # The optimizer state is not an argument of an evaluation, but stays in memory.
    assert run.steps["eval"].needs >= run.steps["eval"].arguments + run.held["optimizer state"]
    assert not (tmp_path / "run").exists()
    new = [array for array in jax.live_arrays() if id(array) not in before]
    assert max((array.nbytes for array in new), default=0) < 1024


@pytest.mark.parametrize(
    "own, stored, compute",
    [("bfloat16", "float32", "bfloat16"), ("float32", "bfloat16", redeqx.Precision("bfloat16", parameters="bfloat16"))],
)
def test_models_take_no_memory_in_another_dtype(own, stored, compute):
    shape = (2**20, 2**20)
    with redeqx.described("cpu:8"):
        deployer = redeqx.Deployer(n_fsdp_shards=8, verbose=False)
        trainer = redeqx.Trainer(
            deployer,
            model=deployer.init(lambda: jnp.zeros(shape, own)),
            optimizer=optax.sgd(0.1),
            collate_fn=np.stack,
            loss_fn=lambda model, batch, key: jnp.mean(batch @ model),
            compute=compute,
        )
    assert trainer.model.dtype == stored and trainer.model.shape == shape and not any(trainer.model.strides)


class RaisingLogger:
    def log(self, metrics, step):
        raise AssertionError("a dry run tracks nothing")


@pytest.mark.sweep
def test_script_may_predict_and_save_before_its_fit(tmp_path, capsys):
    """Predictions are zeros, and what needs values says so."""

    def predictor_of(trainer):
        return trainer.get_default_predictor(
            lambda model, batch, key: {"logits": jax.vmap(model)(batch), "last": batch[:, -1]},
            output_fn=lambda outs: list(zip(outs["logits"], outs["last"], strict=True)),
        )

    with redeqx.described("cpu:8"):
        deployer = redeqx.Deployer(workdir=tmp_path / "run")
        trainer = make_trainer(deployer)
        with pytest.raises(ValueError, match=r"`eval_loss`: expected to come after `fit`.*if not deployer.is_dry_run"):
            trainer.eval_loss(examples(20), 1)
        outputs = predictor_of(trainer).predict(examples(20), 1)
        assert len(outputs) == 20
        assert all(logits.shape == (SEQ, VOCAB) and not logits.any() and last == 0 for logits, last in outputs)
        predictor = redeqx.Predictor(
            deployer,
            model=trainer.model,
            collate_fn=np.stack,
            pred_fn=lambda model, batch, key: jax.vmap(model)(batch),
        )
        assert [row.shape for row in predictor.predict(examples(3), batch_size=8)] == [(SEQ, VOCAB)] * 3
        assert trainer.save_ckpt() == tmp_path / "run" / "ckpts" / "step_00000000"
        assert save_pretrained(trainer.model, CONFIG, tmp_path / "hf") == tmp_path / "hf"
        trainer.load_ckpt("anything")  # not read: it would have the model's shapes
        weight = np.asarray(trainer.model.embedding.weight)
        assert weight.shape == (VOCAB, D) and weight.dtype == np.float32 and not weight.any()
        moments = [leaf for leaf in jax.tree.leaves(trainer.opt_state) if leaf.shape == (VOCAB, D)]
        assert len(moments) == 2 and not np.asarray(moments[0]).any()
        with pytest.raises(ValueError, match="`model`: expected a model, got None"):
            redeqx.Predictor(deployer, collate_fn=np.stack, pred_fn=predictor._pred_fn).predict(examples(3), 1)
        with pytest.raises(DryRunDone):
            trainer.train(examples(), 1)
    assert capsys.readouterr().out.count("`predict` returns zeros") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.sweep
def test_pretrained_folders_are_read_as_zeros_even_without_weights(tmp_path):
    model = GPT2(CONFIG, key=jax.random.key(0))
    save_pretrained(model, CONFIG, tmp_path / "weights")
    save_pretrained(model, CONFIG, tmp_path / "config_only")
    (tmp_path / "config_only" / "model.safetensors").unlink()
    expected = jax.tree.map(lambda x: (x.shape, x.dtype), eqx.filter(model, eqx.is_array))
    with redeqx.described("cpu:8"):
        for folder in ("weights", "config_only"):
            found, config = from_pretrained(tmp_path / folder, deployer=make_deployer(2))
            zeros = jax.tree.map(lambda x: (x.shape, x.dtype), eqx.filter(found, eqx.is_array))
            assert jax.tree.leaves(zeros) == jax.tree.leaves(expected)
            assert config == CONFIG
        half, _ = from_pretrained(tmp_path / "config_only", dtype=jnp.bfloat16)
        assert half.embedding.weight.dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="expected safetensors"):
        from_pretrained(tmp_path / "config_only")


@pytest.mark.sweep
def test_a_checkpoint_of_adapters_is_counted_without_the_folder_that_it_names(tmp_path):
    save_pretrained(GPT2(CONFIG, key=jax.random.key(0)), CONFIG, tmp_path / "base")

    def fit():
        deployer = redeqx.Deployer(verbose=False, workdir=tmp_path / "run")
        model, _ = from_pretrained(tmp_path / "base", deployer=deployer)
        model = lora.add(model, rank=2, where=("*.attention.query",), key=jax.random.key(1))
        trainer = redeqx.Trainer(
            deployer, model=model, trainable=lora.trainable(model), optimizer=optax.adamw(1e-3), loss_fn=loss_fn,
            collate_fn=np.stack,
        )  # fmt: skip
        trainer.fit(examples(8), batch_size=8)

    with dry_for(describe("cpu:8")), pytest.raises(DryRunDone) as done:
        fit()
    fit()
    files = {path.name: path.stat().st_size for path in (tmp_path / "run" / "ckpts").glob("*/*.safetensors")}
    assert done.value.run.files == files and files["model.safetensors"] < 2**14


# --- described machines -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, message",
    [
        ("v9:2x2", r"`v9:2x2`: expected a topology: TPUs as `v4:2x2x2` .*GPUs as .*a100-40gb.*`cpu:8`.*`this`"),
        ("gpu:a100:4", r"expected a topology: .* Did you mean `a10"),
        ("gpu:a100-40gb", r"`gpu:a100-40gb`: expected a number of GPUs, got ''. Write `gpu:a100-40gb:8`"),
        ("v4:8", r"`v4:8`: expected chips along each side, got '8'. Write `v4:2x4`, or `v4:2x2x2`."),
        ("cpu:3", r"`cpu:3`: expected 3 simulated devices, got 8, as JAX's CPU backend was started"),
        ("cpu:x", r"`cpu:x`: expected a topology"),
    ],
)
def test_unknown_machines_are_errors(name, message):
    with pytest.raises(ValueError, match=message):
        describe(name)


def test_a_tpu_has_no_more_memory_than_its_compiler_accepts():
    """With more, a step that the compiler refuses would lack less than nothing."""
    with pytest.raises(
        ValueError, match=r"`v5e:2x2`: expected at most 15.75 GiB .* of a TPU v5 lite .* got 16.00. Leave it"
    ):
        describe("v5e:2x2", memory=16 * 2**30)


@requires_tpu_compiler
@pytest.mark.sweep
def test_described_tpu_reports_collectives_and_estimates():
    with redeqx.described("v4:2x2x1") as machine:
        assert len(machine.devices) == 4 and machine.memory > 30 * 2**30
        run = make_trainer(make_deployer(4)).dry_run(examples(), 2)
    assert run.fits and run.machine.name == "v4:2x2x1"
    sent = [each for each in run.steps["train"].collectives if each.kind == "all-reduce" and each.bytes > 2**10]
    assert {each.axes(run.plan.mesh) for each in sent} == {("model",)} and all(each.exact for each in sent)
    layers = {each["layer"] for each in run.to_json()["steps"]["train"]["collectives"]}
    assert layers >= {"stack.blocks.attention.output.weight", "stack.blocks.mlp.down.weight"}
    estimate = run.estimate
    assert estimate.step == max(estimate.compute, estimate.memory, estimate.communication) > 0
    assert estimate.serial == estimate.compute + estimate.memory + estimate.communication and estimate.host == 0
    assert 0 < estimate.serial_mfu < estimate.mfu < 1 and "where nothing does" in str(run)
    assert estimate.compute == pytest.approx(sum(run.steps["train"].flops.values()) / 4 / 275e12)
    assert "ALLOW_MULTIPLE_LIBTPU_LOAD" not in os.environ


@requires_tpu_compiler
@pytest.mark.sweep
def test_optimizer_state_in_host_memory():
    config = GPT2Config(512, 32, d_model=256, n_layers=2, n_heads=4).without_dropout()
    rows = np.zeros((64, 32), np.int32)
    with redeqx.described("v5e:2x2"):
        with_it, without = (
            make_trainer(make_deployer(2, 2), config, compute=redeqx.Compute(offload_opt_state=offload)).dry_run(rows, 2)
            for offload in (True, False)
        )
    state = without.held["optimizer state"]
    assert with_it.in_host == pytest.approx(state, abs=64) and with_it.held["optimizer state"] <= 64
    assert with_it.steps["train"].arguments == pytest.approx(without.steps["train"].arguments - state, rel=0.01)
    assert with_it.steps["train"].host_bytes == pytest.approx(2 * with_it.in_host, rel=0.01)
    assert with_it.estimate.host > 0 and "in host memory: optimizer state" in str(with_it)
    assert with_it.to_json()["in_host"] == with_it.in_host


def test_offloading_is_estimated_if_the_compiler_has_no_host_memory():
    step = Step(needs=1000, compile_seconds=0.0, arguments=500)
    found = step.offloaded(300, other_bytes=200)
    assert (found.needs, found.arguments, found.host_bytes) == (700, 200, 600)
    assert step.offloaded(300, other_bytes=600).needs == 900


@requires_tpu_compiler
def test_mesh_axes_that_share_a_side_of_the_torus():
    """`jax.make_mesh` raises for 8 x 8 on 4 x 4 x 4 chips."""
    with redeqx.described("v4:4x4x4"):
        mesh = make_deployer(8, 8).mesh
    assert (
        mesh.shape == {"data": 1, "fsdp": 8, "sequence": 1, "model": 8}
        and len({device.id for device in mesh.devices.flat}) == 64
    )


@requires_tpu_compiler
@pytest.mark.sweep
def test_step_refused_by_the_tpu_compiler_does_not_fit():
    config = remat(GPT2Config.of("1.6b").without_dropout())
    with redeqx.described("v5e:2x2"):
        run = make_trainer(make_deployer(1), config=config).dry_run(np.zeros((64, 32), np.int32), 8, search="none")
    step = run.steps["train"]
    assert step.is_refused and not run.fits and run.needs > run.machine.memory
    assert run.estimate is None and "needs at least" in run.verdict() and "refused: at least" in str(run)


@requires_tpu_compiler
def test_a_program_for_tpus_needs_its_peak():
    """By which libtpu refuses programs. The sum of what it counts is larger, but for programs that fit into caches."""

    def step(w, x):
        loss = lambda w: jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0] ** 2)  # noqa: E731
        return w - jax.grad(loss)(w)

    with redeqx.described("v5e:2x2"):
        whole = replicated(make_deployer(1).mesh)
        shapes = (jax.ShapeDtypeStruct(shape, np.float32, sharding=whole) for shape in ((8, 2048, 2048), (8192, 2048)))
        compiled = jax.jit(step, donate_argnums=0).lower(*shapes).compile()
    counted, sizes = compiled.memory_analysis(), sizes_of(compiled)
    assert sum(sizes.values()) - sizes["code"] == counted.peak_memory_in_bytes
    assert sizes["temporaries"] < counted.temp_size_in_bytes


@requires_tpu_compiler
def test_tpu_topology_must_be_a_multiple_of_a_host():
    with pytest.raises(
        ValueError, match=r"`v4:3x3x1`: expected a topology of TPU v4, got one that is refused: .*not divisible"
    ):
        describe("v4:3x3x1")


@requires_gpu_compiler
def test_described_gpus_count_their_hosts():
    with redeqx.described("gpu:h100-80gb:2x4") as machine:
        assert machine.n_hosts == 2 and machine.chip.kind == machine.devices[0].device_kind
        run = make_trainer(make_deployer(4)).dry_run(examples(), 2)
    assert run.fits and run.estimate.communication > 0
    with redeqx.described("gpu:rtx-2080ti:2", memory=10**6):
        assert not make_trainer(make_deployer(2)).dry_run(examples(), 2, search="none").fits


@pytest.mark.skipif(
    importlib.util.find_spec("jax_plugins") is not None and importlib.util.find_spec("jax_plugins.xla_cuda13") is not None,
    reason="the GPU compiler is there",
)
def test_missing_compiler_error_names_the_extra():
    with pytest.raises(ImportError, match=r'expected the GPU compiler, got none .* `pip install "redeqx\[topology-gpu\]"`'):
        describe("gpu:a100-40gb:4")


@pytest.mark.parametrize("is_jax_started", [False, True])
def test_gpu_compiler_starts_without_the_check_of_cuda_libraries(monkeypatch, is_jax_started):
    """Also if JAX has already started its backends without the plugin, because a library did not load."""
    seen = []

    def get_topology_desc(**kwargs):
        seen.append(os.environ.get("JAX_SKIP_CUDA_CONSTRAINTS_CHECK"))
        if is_jax_started and "initialized" not in seen:
            raise NotImplementedError("topology not implemented for cuda")
        return SimpleNamespace(devices=[kwargs["topology"]])

    plugin = SimpleNamespace(initialize=lambda: seen.append("initialized"))
    point = SimpleNamespace(name="xla_cuda13", load=lambda: plugin)
    monkeypatch.delenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", raising=False)
    monkeypatch.setattr(topologies, "get_topology_desc", get_topology_desc)
    monkeypatch.setattr("redeqx.machine._devices.entry_points", lambda group: [point])
    # JAX calls these with a plugin that it loads itself, to register partitioners.
    monkeypatch.setattr("jax._src.xla_bridge._backend_factories", {"cuda": SimpleNamespace(c_api="of cuda")})
    monkeypatch.setattr("jax._src.xla_bridge._plugin_callbacks", [lambda c_api: seen.append(c_api)])
    assert describe("gpu:a100-40gb:2x4").devices == ("1x2x4",)
    assert seen == (["1", "initialized", "of cuda", "1"] if is_jax_started else ["1"])
    assert "JAX_SKIP_CUDA_CONSTRAINTS_CHECK" not in os.environ


# --- the command ------------------------------------------------------------------------------------------------------

SCRIPT = """
import sys
import equinox as eqx, jax, jax.numpy as jnp, numpy as np, optax
import redeqx

redeqx.simulate_devices(2)  # as scripts do; the topology overrides it
kind = sys.argv[1]
if kind == "exits":
    sys.exit(3)
if kind == "raises":
    def inner():
        raise KeyError("mine")
    inner()
if kind == "huge":
    key = jax.random.key(0)
    jax.block_until_ready(eqx.nn.Linear(4_000_000, 100_000, key=key).weight)
deployer = redeqx.Deployer(n_model_shards=2, workdir=sys.argv[2])
model = deployer.init(lambda: eqx.nn.MLP(64, 64, 1024, 2, key=jax.random.key(0)))
trainer = redeqx.Trainer(
    deployer, model=model, optimizer=optax.adam(1e-3), collate_fn=np.stack,
    loss_fn=lambda model, batch, key: jnp.mean(jax.vmap(model)(batch) ** 2),
)
if kind == "divides":
    predictor = trainer.get_default_predictor(lambda model, batch, key: jax.vmap(model)(batch)[:, 0])
    print(1 / int(predictor.predict(np.zeros((8, 64), np.float32), 1)[0]))
if kind == "computes":
    print(1 / int(jnp.mean(model.layers[0].weight)))
if kind != "never":
    trainer.fit(np.zeros((64, 64), np.float32), 4, 1, save_last_ckpt=True)
    print("after the fit")
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


def command(script, *args, topology="cpu:8", options=()):
    line = [sys.executable, "-m", "redeqx", "dry-run", "--topology", topology, *options, str(script), *args]
    env = {key: value for key, value in os.environ.items() if key not in ("NPROC", "XLA_FLAGS", "JAX_PLATFORMS")}
    return subprocess.run(line, env=env, cwd=script.parent, capture_output=True, text=True, timeout=200)


@pytest.mark.sweep
def test_script_runs_up_to_its_fit(script, tmp_path):
    done = command(script, "fits", str(tmp_path / "run"), options=["--json", str(tmp_path / "report.json")])
    assert done.returncode == 0, done.stderr
    assert "dry run on cpu:8" in done.stdout and "data=4 x fsdp=1 x model=2" in done.stdout
    lines = done.stderr.splitlines()
    assert "compiling for cpu:8: Deployer(n_model_shards=2" in lines[0], lines
    assert re.match(r"compiled for cpu:8: Deployer\(n_model_shards=2.* in \d", lines[-2]), lines
    assert lines[-1].startswith("compiled 1  "), lines
    assert "after the fit" not in done.stdout and not (tmp_path / "run").exists()
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["fits"] and report["n_devices"] == 8 and report["strategy"]["n_model_shards"] == 2
    assert report["needs"] == max(step["needs"] for step in report["steps"].values())
    assert set(report["files"]) == {"model.safetensors", "optimizer.safetensors"}


@pytest.mark.sweep
def test_exit_code_is_3_if_the_step_does_not_fit(script, tmp_path):
    done = command(script, "fits", str(tmp_path / "run"), options=["--memory", "5MB", "--search", "none"])
    assert done.returncode == 3 and "does not fit" in done.stdout, done.stderr
    assert "of 4.77 MiB a device" in done.stdout


@pytest.mark.parametrize(
    "kind, code, expected",
    [
        ("raises", 1, "KeyError: 'mine'"),
        ("exits", 1, "expected a call of `Trainer.fit` or `Trainer.train`, got `sys.exit(3)` before"),
        pytest.param(
            "never",
            2,
            "train.py`: expected a call of `Trainer.fit` or `Trainer.train`, got none before the end of",
            marks=pytest.mark.sweep,
        ),
        pytest.param("huge", 1, "Make it with `deployer.init(lambda: Model(key=key))`", marks=pytest.mark.sweep),
        pytest.param(
            "divides",
            1,
            "while models and predictions are zeros. If that is the cause, skip that code with `if not deployer",
            marks=pytest.mark.sweep,
        ),
        pytest.param(
            "computes",
            1,
            "while models are zeros. If that is the cause, skip that code with `if not deployer",
            marks=pytest.mark.sweep,
        ),
    ],
)
@pytest.mark.sweep
def test_scripts_that_do_not_reach_fit(script, tmp_path, kind, code, expected):
    done = command(script, kind, str(tmp_path / "run"))
    assert done.returncode == code and expected in done.stderr, done.stderr
    if kind == "raises":
        python_run = subprocess.run(
            [sys.executable, str(script), kind], cwd=script.parent, capture_output=True, text=True, timeout=100
        )
        assert done.stderr == python_run.stderr


@pytest.mark.sweep
def test_invalid_arguments_are_errors(script):
    done = command(script, topology="v9:2x2")
    assert done.returncode == 1 and "`v9:2x2`: expected a topology" in done.stderr and "Traceback" not in done.stderr
    done = command(script.with_name("absent.py"))
    assert done.returncode == 1 and "absent.py`: expected a script, got no such file." in done.stderr
    done = command(script, options=["--memory", "much"])
    assert done.returncode == 2 and "expected bytes above 0, such as 10GB or 9.5GiB, got 'much'" in done.stderr


@pytest.mark.sweep
def test_search_option_asks_for_the_fastest_setting(script, tmp_path):
    """The script's own one fits, so that nothing else is compiled; `test_search.py` searches."""
    options = ["--search", "fastest", "--json", str(tmp_path / "report.json")]
    done = command(script, "fits", str(tmp_path / "run"), options=options)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["fits"] and report["best"] in done.stdout.replace("\n", " ") and "Fastest that fits" in done.stdout
