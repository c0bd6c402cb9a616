"""The compilation cache: its folder, when it is off, its messages, and reuse by a second run."""

import errno
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import SingleDeviceSharding

import redeqx
from redeqx.machine import XLA_CACHES, cache_text, cache_use, start_cache, uncached_where_described

ROOT = Path(__file__).parents[2]


@pytest.fixture
def default_folder(monkeypatch, tmp_path):
    """JAX without a cache folder, and the user's cache inside `tmp_path`. Yields the latter."""
    before, xla_caches = jax_cache_folder(), getattr(jax.config, XLA_CACHES)
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("REDEQX_COMPILATION_CACHE", raising=False)
    yield tmp_path / "cache/redeqx/xla"
    jax.config.update("jax_compilation_cache_dir", before)
    jax.config.update(XLA_CACHES, xla_caches)
    compilation_cache.reset_cache()


def jax_cache_folder():
    return getattr(jax.config, "jax_compilation_cache_dir", None)


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_accelerators_use_a_folder_in_the_users_cache(default_folder, platform):
    assert start_cache(True, platform) == str(default_folder) == jax_cache_folder()
    assert default_folder.is_dir() and default_folder.stat().st_mode & 0o077 == 0  # its contents are executed


def test_default_folder_is_in_the_home_folder(default_folder, monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert start_cache(True, "gpu") == str(tmp_path / "home/.cache/redeqx/xla")


def test_cpus_use_a_cache_only_with_an_explicit_folder(default_folder, tmp_path):
    assert start_cache(True, "cpu") is None and jax_cache_folder() is None and not default_folder.exists()
    assert start_cache(tmp_path / "own", "cpu") == str(tmp_path / "own") == jax_cache_folder()


@pytest.mark.parametrize("given", [False, None])
def test_cache_can_be_switched_off(default_folder, given):
    assert start_cache(given, "gpu") is None and jax_cache_folder() is None and not default_folder.exists()


@pytest.mark.parametrize("given", [True, False, None])
@pytest.mark.parametrize("platform", ["gpu", "cpu"])
def test_folder_set_in_jax_is_kept(default_folder, tmp_path, given, platform):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "jax"))
    assert start_cache(given, platform) == f"{tmp_path}/jax, as JAX is set"
    assert jax_cache_folder() == str(tmp_path / "jax") and not default_folder.exists()


def test_explicit_folder_overrides_the_one_set_in_jax(default_folder, tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "jax"))
    assert start_cache(str(tmp_path / "own"), "gpu") == str(tmp_path / "own") == jax_cache_folder()


@pytest.mark.parametrize(("variable", "is_on"), [("0", False), ("off", False), ("1", True), ("", True)])
def test_environment_variable_switches_the_cache(default_folder, monkeypatch, variable, is_on):
    monkeypatch.setenv("REDEQX_COMPILATION_CACHE", variable)
    assert start_cache(True, "gpu") == (str(default_folder) if is_on else None)


def test_environment_variable_names_a_folder_that_the_script_can_override(default_folder, monkeypatch, tmp_path):
    monkeypatch.setenv("REDEQX_COMPILATION_CACHE", str(tmp_path / "shared"))
    assert start_cache(True, "cpu") == str(tmp_path / "shared")
    assert start_cache(str(tmp_path / "own"), "cpu") == str(tmp_path / "own")


def test_unwritable_folder_switches_the_cache_off_with_a_message(default_folder, tmp_path):
    (tmp_path / "file").write_text("")
    assert start_cache(tmp_path / "file/cache", "gpu") == (
        f"off: `{tmp_path}/file/cache` cannot be written (Not a directory)"
    )
    assert jax_cache_folder() is None


def test_xlas_own_caches_are_for_gpus_alone(default_folder, tmp_path):
    """They are below the folder, so that JAX's keys contain its path: elsewhere its programs would not be found."""
    before = getattr(jax.config, XLA_CACHES)
    start_cache(tmp_path / "gpu", "gpu")
    assert getattr(jax.config, XLA_CACHES) == before
    start_cache(tmp_path / "tpu", "tpu")
    assert getattr(jax.config, XLA_CACHES) == ""


def test_folder_that_cannot_be_written_is_read_except_on_gpus(default_folder, tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    text = f"cannot be written ({os.strerror(errno.EROFS)})"
    assert start_cache(tmp_path, "gpu") == f"off: `{tmp_path}` {text}"
    assert jax_cache_folder() is None
    assert start_cache(tmp_path, "tpu") == f"{tmp_path}, which {text}"
    assert jax_cache_folder() == str(tmp_path)


def test_missing_home_folder_switches_the_cache_off_with_a_message(default_folder, monkeypatch):
    def no_home(*args):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "expanduser", no_home)
    assert start_cache(True, "gpu") == "off: `~/.cache/redeqx/xla` cannot be written (Could not determine home directory.)"
    assert start_cache("~/own", "cpu") == "off: `~/own` cannot be written (Could not determine home directory.)"
    assert jax_cache_folder() is None


def test_invalid_folder_is_an_error_before_any_side_effect(tmp_path):
    with pytest.raises(TypeError) as raised:
        redeqx.Deployer(workdir=tmp_path / "run", compiler=redeqx.Compiler(cache=5))
    assert str(raised.value) == "`compiler.cache`: expected True, False or a folder, got 5. Pass one of them."
    assert not (tmp_path / "run").exists()


def test_hits_and_misses_are_told(default_folder, tmp_path):
    def use():
        jax.clear_caches()
        with cache_use() as found:
            jax.jit(lambda x: jnp.sin(x) * 3)(1.0).block_until_ready()
        return found

    assert cache_text(use()) == ""  # no cache is configured
    start_cache(tmp_path / "own", "cpu")
    first, second = use(), use()  # conftest lets JAX keep programs of any size
    assert cache_text(first) == "not found in the compilation cache"
    assert cache_text(second).startswith("read from the compilation cache, which saved ")
    before = dict(second)
    jax.clear_caches()
    jax.jit(lambda x: jnp.cos(x))(1.0)
    assert second == before  # counting has ended


SCRIPT = """
import sys
import equinox as eqx, jax, jax.numpy as jnp, numpy as np, optax
import redeqx

trainer = redeqx.Trainer(
    redeqx.Deployer(0, compiler=redeqx.Compiler(cache=sys.argv[1])),
    model=eqx.nn.Linear(8, 8, key=jax.random.key(0)),
    optimizer=optax.sgd(0.1),
    collate_fn=np.stack,
    loss_fn=lambda model, x, key: jnp.mean(jnp.exp(jax.vmap(model)(x))),
)
print(trainer.fit(np.ones((16, 8), np.float32), batch_size=16, n_epochs=1))
"""


@pytest.mark.sweep
def test_second_run_reads_the_programs_of_the_first(tmp_path):
    hidden = ("JAX_COMPILATION_CACHE_DIR", "REDEQX_COMPILATION_CACHE")
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    env |= {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path / "home"), "PYTHONWARNINGS": "error"}

    def run():
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(tmp_path / "cache")],
            env=env, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    first, second = run(), run()
    for out in (first, second):
        assert f"compilation cache  {tmp_path}/cache\n" in out
    assert ", not found in the compilation cache\n" in first
    assert ", read from the compilation cache, which saved " in second
    assert first.splitlines()[-1] == second.splitlines()[-1]  # the same numbers
    assert not (tmp_path / "home").exists()


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="the TPU compiler is an extra")
def test_compiler_for_described_devices_does_not_use_the_cache(default_folder, tmp_path):
    """It could not load the entries: JAX would warn and compile again."""
    start_cache(tmp_path / "here", "cpu")
    with redeqx.described("v5e:2x2"):
        device = redeqx.Deployer(verbose=False).mesh.devices.flat[0]
        shape = jax.ShapeDtypeStruct((), np.float32, sharding=SingleDeviceSharding(device))
        for _ in range(2):
            with uncached_where_described(device):
                jax.jit(lambda x: x + 1).lower(shape).compile()
    assert jax_cache_folder() == str(tmp_path / "here")
    with uncached_where_described(jax.devices()[0]):
        assert jax_cache_folder() == str(tmp_path / "here")
