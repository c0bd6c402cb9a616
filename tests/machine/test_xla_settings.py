"""XLA settings: the defaults of each platform, settings that the compiler refuses, and their use in a step."""

import json
from dataclasses import dataclass
from types import SimpleNamespace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import redeqx
from redeqx.machine import SETTINGS, XlaSettings, make_mesh, xla_settings


def test_cpu_has_no_default_settings():
    assert xla_settings(make_mesh(), "auto") == xla_settings(make_mesh(), None) == XlaSettings()


@pytest.fixture
def compiler_accepts_all(monkeypatch):
    """A compiler that accepts all options."""
    monkeypatch.setattr("redeqx.machine._compiler._accepted", lambda device, given: XlaSettings(dict(given)))


@dataclass(frozen=True)
class Device:
    platform: str


def mesh_of(platform, size=8):
    device = Device(platform)
    return SimpleNamespace(size=size, local_devices=[], devices=np.array([device] * size, object), shape={"model": size})


@pytest.mark.usefixtures("compiler_accepts_all")
@pytest.mark.parametrize("platform", ["gpu", "cuda", "tpu"])
def test_default_settings_of_a_platform(platform):
    assert xla_settings(mesh_of(platform), "auto").options == SETTINGS["tpu" if platform == "tpu" else "gpu"]
    assert xla_settings(mesh_of(platform, size=1), "auto").options == {}  # the defaults are about collectives
    assert xla_settings(mesh_of(platform), {"xla_other": 1}).options == {"xla_other": 1}


@pytest.mark.usefixtures("compiler_accepts_all")
@pytest.mark.parametrize(
    "platform, variable, name",
    [
        ("gpu", "XLA_FLAGS", "xla_gpu_pipeline_all_gather"),
        ("tpu", "LIBTPU_INIT_ARGS", "xla_tpu_enable_sparse_core_collective_offload_all_gather"),
    ],
)
def test_flags_of_the_environment_override_the_defaults(monkeypatch, platform, variable, name):
    monkeypatch.setenv(variable, f"--xla_other=2 --{name}=false")
    options = xla_settings(mesh_of(platform), "auto").options
    assert options == {key: value for key, value in SETTINGS[platform].items() if key != name}
    assert xla_settings(mesh_of(platform), {name: True}).options == {name: True}  # set in the script


def test_an_older_compiler_gets_older_names(monkeypatch):
    def accepted(device, given):
        dropped = {name: "No such compile option" for name in given if name.startswith("xla_gpu_pipeline_")}
        return XlaSettings({name: x for name, x in given.items() if name not in dropped}, dropped)

    monkeypatch.setattr("redeqx.machine._compiler._accepted", accepted)
    found, older = xla_settings(mesh_of("gpu"), "auto"), "xla_gpu_enable_pipelined_"
    assert found.dropped == {} and found.options.keys() - SETTINGS["gpu"].keys() == {
        f"{older}all_gather", f"{older}reduce_scatter", f"{older}all_reduce"
    }  # fmt: skip
    monkeypatch.setenv("XLA_FLAGS", f"--{older}all_gather=false")
    assert len(xla_settings(mesh_of("gpu"), "auto").options) == len(found.options) - 1


@pytest.mark.usefixtures("compiler_accepts_all")
def test_gathers_are_not_pipelined_where_that_repeats_sums():
    """They are of the residual stream, if its values are recomputed."""
    name, mesh = "xla_gpu_pipeline_all_gather", mesh_of("gpu")
    full = redeqx.Compute(remat="full")
    own = full.settings_on(mesh)
    assert own == {name: None}
    assert xla_settings(mesh, "auto", own).options == {key: x for key, x in SETTINGS["gpu"].items() if key != name}
    assert xla_settings(mesh, {name: True}, own).options == {name: True}  # set in the script
    assert redeqx.Compute().settings_on(mesh) == full.settings_on(mesh_of("gpu", size=1)) == {}
    assert redeqx.Compute(remat="full", split_residual=False).settings_on(mesh) == {}


@pytest.mark.usefixtures("compiler_accepts_all")
def test_collectives_are_not_queued_where_memory_is_short():
    """Weights and gradients of a whole layer would be on the device at once."""
    name, mesh = "xla_tpu_enable_sparse_core_offload_queuing_in_lhs", mesh_of("tpu")
    own = redeqx.Compute(remat="offload", split_residual=False).settings_on(mesh)
    assert xla_settings(mesh, "auto", own).options == {key: x for key, x in SETTINGS["tpu"].items() if key != name}
    assert name in SETTINGS["tpu"] and redeqx.Compute(remat="full", split_residual=False).settings_on(mesh) == {}


@pytest.mark.usefixtures("compiler_accepts_all")
def test_a_split_residual_stream_is_not_permuted_on_tpus():
    """XLA would make loops of products and permutes of its gathers. Programs without it have those of their weights."""
    name, mesh = "xla_jf_spmd_threshold_for_windowed_einsum_mib", mesh_of("tpu")
    own = redeqx.Compute(split_residual=True).settings_on(mesh)
    assert redeqx.Compute(remat="full").settings_on(mesh)[name] == own[name]  # by default, but with `remat="matmuls"`
    assert redeqx.Compute(remat="matmuls").settings_on(mesh) == {}
    assert xla_settings(mesh, "auto", own).options == {**SETTINGS["tpu"], name: 1_000_000}
    assert xla_settings(mesh, {name: 1}, own).options == {name: 1}  # set in the script
    assert name not in xla_settings(mesh, "auto").options  # of a predictor
    assert redeqx.Compute(split_residual=False).settings_on(mesh) == {}
    assert redeqx.Compute(split_residual=True).settings_on(mesh_of("gpu")) == {}


@pytest.mark.sweep
@pytest.mark.parametrize("settings", [None, "auto"])
def test_collectives_are_sent_behind_matmuls_on_tpus(settings):
    """Without the settings libtpu awaits each collective of a v6e where it starts."""
    n_layers, d = 4, 1024

    def loss_fn(weights, x, key):
        return jnp.mean(jax.lax.scan(lambda x, weight: (x + jax.nn.relu(x @ weight), None), x, weights)[0] ** 2)

    with redeqx.described("v6e:2x4"):
        trainer = redeqx.Trainer(
            redeqx.Deployer(n_fsdp_shards=8, verbose=False, compiler=redeqx.Compiler(settings=settings)),
            model=jnp.zeros((n_layers, d, d)),
            optimizer=optax.sgd(0.1),
            collate_fn=np.stack,
            loss_fn=loss_fn,
            compute="bfloat16",
        )
        report = trainer.dry_run([np.zeros((1024, d), np.float32)] * 64, batch_size=64, search="none")
    collectives = report.steps["train"].collectives
    hidden = sum(each.moved * (each.hidden or 0) for each in collectives) / sum(each.moved for each in collectives)
    assert hidden > 0.3 if settings else hidden == 0


def test_settings_refused_by_the_compiler_are_dropped_and_reported():
    given = {"xla_cpu_enable_fast_math": False, "xla_foo": True, "xla_cpu_enable_fast_min_max": "maybe"}
    found = xla_settings(make_mesh(), given)
    assert found.options == {"xla_cpu_enable_fast_math": False}
    assert set(found.dropped) == {"xla_foo", "xla_cpu_enable_fast_min_max"}
    assert found.text() == (
        "xla_cpu_enable_fast_math=false, xla_foo left out: No such compile option: 'xla_foo', "
        f"xla_cpu_enable_fast_min_max left out: {found.dropped['xla_cpu_enable_fast_min_max']}"
    )


def fit_and_output(capsys, **kwargs):
    deployer = redeqx.Deployer(0, **kwargs)
    model = eqx.nn.Linear(8, 8, key=jax.random.key(0))
    trainer = redeqx.Trainer(
        deployer,
        model=model,
        optimizer=optax.sgd(0.1),
        collate_fn=np.stack,
        loss_fn=lambda model, x, key: jnp.mean(jnp.exp(jax.vmap(model)(x))),
    )
    trainer.fit(np.ones((16, 8), np.float32), batch_size=16, n_epochs=1)
    return trainer, capsys.readouterr().out


def test_answer_for_one_type_is_not_reused_for_another():
    """`True` and `1` are equal, but XLA accepts only one of them."""
    name = "xla_backend_optimization_level"
    assert name in xla_settings(make_mesh(), {name: True}).dropped
    assert xla_settings(make_mesh(), {name: 1}) == XlaSettings({name: 1})


def test_settings_apply_to_compiled_steps_and_are_printed(capsys, tmp_path):
    """XLA dumps only the programs that are compiled with the option."""
    given = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_text": True, "xla_foo": 1}
    trainer, out = fit_and_output(capsys, compiler=redeqx.Compiler(settings=given))
    trainer.get_default_predictor(lambda model, x, key: jax.vmap(model)(x)).predict(np.ones((8, 8), np.float32), 1)
    assert f"xla                xla_dump_to={tmp_path}, xla_dump_hlo_as_text=true, xla_foo left out: " in out
    modules = {path.name.split(".")[1] for path in tmp_path.iterdir() if path.name.startswith("module_")}
    steps = {"jit_step_fn", "jit_predict_fn"}
    assert steps <= modules <= steps | {"jit__lambda"}  # the lambda is compiled to try the options


def test_nothing_is_printed_without_settings(capsys):
    _, out = fit_and_output(capsys, compiler=redeqx.Compiler(settings=None))
    assert "\n  xla " not in out


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ("best", ValueError, "`compiler.settings`: expected \"auto\", a dict or None, got 'best'. Pass one of them."),
        (["xla_foo"], TypeError, '`compiler.settings`: expected "auto", a dict or None, got list. Pass one of them.'),
        (
            {"xla_foo": None},
            TypeError,
            "`compiler.settings`: expected a bool, a number or a string by name, got 'xla_foo': None. "
            'Write {"xla_gpu_...": True}.',
        ),
        (
            {"--xla_foo": 1},
            ValueError,
            "`compiler.settings`: expected names without dashes, got '--xla_foo'. Pass 'xla_foo'.",
        ),
    ],
)
def test_invalid_settings_are_errors(given, error, message):
    with pytest.raises(error) as caught:
        redeqx.Compiler(settings=given)
    assert str(caught.value) == message


def test_default_names_are_compiler_options():
    for options in SETTINGS.values():
        assert all(name.startswith("xla_") for name in options)
        json.dumps(options)
