"""Programs that a dry run saves: a run finds them, with the same numbers, and is refused by name where it differs."""

import errno
import json
import os
import shutil
import tempfile
import warnings

import equinox as eqx
import jax
import numpy as np
import optax
import pytest
from jax.experimental.compilation_cache import compilation_cache

import redeqx
from redeqx.cli import main
from redeqx.compiled import SavedPrograms, program_environment
from redeqx.dry_run import DryRunDone
from redeqx.machine import cache_use, describe, dry_for, make_mesh

EXAMPLES = np.random.default_rng(0).normal(size=(32, 16)).astype(np.float32)


def fit(rate=0.1, d=16, batch_size=16, shards=(2, 2), dtype="float32", **kwargs):
    deployer = redeqx.Deployer(0, *shards, **kwargs)
    key = deployer.next_key()
    trainer = redeqx.Trainer(
        deployer,
        model=deployer.init(lambda: eqx.nn.MLP(16, 16, d, 2, key=key)),
        optimizer=optax.adamw(rate),
        collate_fn=lambda rows: {"x": np.stack(rows).astype(dtype)},
        loss_fn=lambda model, batch, key: (jax.vmap(model)(batch["x"].astype("float32")) ** 2).mean(),
    )
    return trainer.fit(list(EXAMPLES), batch_size=batch_size, eval_examples=list(EXAMPLES[:16]))


def save(folder):
    folder.mkdir()
    with dry_for(describe("cpu:8"), save=SavedPrograms(folder), search="none"), pytest.raises(DryRunDone):
        fit(verbose=False)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(tmp_path_factory.mktemp("programs") / "saved")


def jax_options():
    names = ("compilation_cache_dir", "persistent_cache_min_compile_time_secs", "persistent_cache_enable_xla_caches")
    return {f"jax_{name}": getattr(jax.config, f"jax_{name}") for name in names}


@pytest.fixture
def use(monkeypatch):
    """Returns a function that runs with a folder of programs, and nothing that this process has compiled before."""
    before = jax_options()
    monkeypatch.delenv("REDEQX_COMPILATION_CACHE", raising=False)

    def run(folder, **kwargs):
        jax.clear_caches()
        return fit(compiler=redeqx.Compiler(cache=folder), **kwargs)

    yield run
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.mark.sweep
def test_a_run_loads_what_a_dry_run_has_saved(folder, use, capsys):
    names = {path.name.rpartition("-cache")[0].rpartition("-")[0] for path in folder.glob("*-cache")}
    assert {"jit_make", "jit_init_opt_state", "jit_step_fn", "jit_eval_fn"} <= names
    before = {path.name for path in folder.iterdir()}
    metrics = use(folder)
    out = capsys.readouterr().out
    for name in ("train", "eval"):
        (line,) = [line for line in out.splitlines() if line.startswith(f"compiled {name} step")]
        assert "read from the compilation cache" in line
    added = {path.name for path in folder.iterdir()} - before
    assert not [name for name in added if name.startswith(("jit_make", "jit_init_opt", "jit_step_fn", "jit_eval_fn"))]
    jax.config.update("jax_compilation_cache_dir", None)
    assert metrics == fit(verbose=False)


def test_programs_are_loaded_from_a_moved_folder_that_cannot_be_written(folder, use, tmp_path, monkeypatch, capsys):
    """As a disk that is mounted read-only on the hosts of a pod."""
    moved = shutil.copytree(folder, tmp_path / "moved")

    def refuse(*args, **kwargs):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    use(moved)
    out = capsys.readouterr().out
    assert f"{moved}, which cannot be written (Read-only file system)" in " ".join(out.split())
    for name in ("train", "eval"):
        (line,) = [line for line in out.splitlines() if line.startswith(f"compiled {name} step")]
        assert "read from the compilation cache" in line


def test_programs_are_not_compiled_for_a_folder_that_cannot_be_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # as for a read-only mount
    (tmp_path / "train.py").write_text("raise AssertionError")
    assert main(["dry-run", "--topology", "cpu:8", "--save", str(tmp_path), str(tmp_path / "train.py")]) == 1
    expected = f"`--save`: expected a folder that can be written, got {tmp_path}, which cannot."
    assert capsys.readouterr().err.startswith(expected)


def test_jax_of_the_whole_process_is_left_as_it_was(tmp_path):
    before = jax_options()
    save(tmp_path / "saved")
    assert jax_options() == before


AGAIN = "Save them again with `redeqx dry-run --save`, or pass another folder to `Compiler(cache=)`."
REFUSED = {
    "arguments": ({"d": 32}, "`layers.0.weight` of the train step to be 'float32[16, 16]"),
    "batch": ({"batch_size": 8}, '`batch[0].x` of the train step to be "float32[1, 16, 16]'),
    "dtype": ({"dtype": "float16"}, '`batch[0].x` of the train step to be "float32[1, 16, 16]'),
    "constant": (
        {"rate": 0.2},
        "the text of the train step (the loss, the optimizer, a constant such as the learning rate, or an option) to be",
    ),
    "mesh": ({"shards": (4, 2)}, "the mesh to be 'data=2 x fsdp=2 x model=2', as when the programs were saved, got 'data=1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_run_that_differs_is_refused(name, folder, use):
    options, expected = REFUSED[name]
    with cache_use() as used, pytest.raises(ValueError) as caught:
        use(folder, verbose=False, **options)
    assert str(caught.value).startswith(f"`{folder}/redeqx.json`: expected {expected}"), caught.value
    assert str(caught.value).endswith(AGAIN)
    assert used["/jax/compilation_cache/compile_requests_use_cache"] < 20  # of small programs


@pytest.mark.parametrize(
    "fact", ["the version of jax", "the version of jaxlib", "the platform", "LIBTPU_INIT_ARGS", "the devices"]
)
def test_another_environment_is_refused(fact, folder, use, tmp_path):
    manifest = json.loads((folder / "redeqx.json").read_text())
    now = manifest[fact]
    manifest[fact] = "another\none"
    (tmp_path / "redeqx.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError) as caught:
        use(tmp_path, verbose=False, workdir=tmp_path / "run")
    expected = f"expected {fact} to be 'another one', as when the programs were saved, got {' '.join(now.split())!r}."
    assert str(caught.value) == f"`{tmp_path}/redeqx.json`: {expected} {AGAIN}"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("text", ["{", "[]", "3"])
def test_a_damaged_manifest_is_an_error(text, use, tmp_path):
    (tmp_path / "redeqx.json").write_text(text)
    with pytest.raises(ValueError, match=r"redeqx\.json`: expected a manifest of saved programs, got .* Save them again"):
        use(tmp_path, verbose=False)


REFUSED_OPTIONS = [
    (["--topology", "gpu:h100-80gb:8"], "expected TPUs or CPUs, got `gpu:h100-80gb:8`: the compiler chooses the kernels"),
    (
        ["--topology", "cpu:8", "--search", "fastest"],
        "expected the programs of a run as the script is, got `--search fastest`.",
    ),
    (
        ["--topology", "v5e:2x4", "--optimization", "O1"],
        "expected the programs of a run as the script is, got `--optimization O1`.",
    ),
]


@pytest.mark.parametrize("options, expected", REFUSED_OPTIONS)
def test_options_that_do_not_go_together(options, expected, tmp_path, capsys):
    (tmp_path / "train.py").write_text("")
    assert main(["dry-run", *options, "--save", str(tmp_path / "saved"), str(tmp_path / "train.py")]) == 1
    assert capsys.readouterr().err.startswith(f"`--save`: {expected}")
    assert not (tmp_path / "saved").exists()


@pytest.mark.sweep
def test_programs_of_described_tpus_are_saved_twice_without_a_warning(tmp_path):
    pytest.importorskip("libtpu")
    machine = describe("v5e:2x2")
    saved = SavedPrograms(tmp_path)
    for _ in range(2):
        with dry_for(machine, save=saved, search="none"), warnings.catch_warnings(), pytest.raises(DryRunDone):
            warnings.simplefilter("error")
            fit(verbose=False)
    assert len([*tmp_path.glob("jit_step_fn-*-cache")]) == 1
    found = SavedPrograms.read(tmp_path)
    assert found is not None and found.facts["the devices"] == "4 x TPU v5 lite in 1 process"
    assert found.facts.items() >= program_environment(make_mesh(2, 2, devices=machine.devices)).items()
    assert "TFRT TPU v5 lite" in found.facts["the platform"]
