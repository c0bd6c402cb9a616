"""The compilation cache: which folder, when none, what is said; and that a second run reads what the first compiled."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import SingleDeviceSharding

import redeqx
from redeqx.machine import CacheUse, _compilation_cache, cache_use, start_cache, uncached_where_described

ROOT = Path(__file__).parents[2]


@pytest.fixture
def unset(monkeypatch, tmp_path):
    """JAX without a folder; the user's cache in a folder of the test."""
    before = folder()
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("REDEQX_COMPILATION_CACHE", raising=False)
    yield tmp_path / "cache/redeqx/xla"
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


def folder():
    return getattr(jax.config, "jax_compilation_cache_dir", None)


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_accelerators_have_one_in_the_user_s_cache(unset, platform):
    assert start_cache(True, platform) == str(unset) == folder()
    assert unset.is_dir() and unset.stat().st_mode & 0o077 == 0  # what is in it is executed


def test_the_user_s_cache_keeps_what_was_used_last(unset, monkeypatch, tmp_path):
    monkeypatch.setattr(_compilation_cache, "MAX_BYTES", 250)
    for i, folder in enumerate([unset, tmp_path / "given"]):
        folder.mkdir(parents=True)
        for age in range(4):
            (folder / f"step-{age}-cache").write_bytes(bytes(100))
            os.utime(folder / f"step-{age}-cache", (1e9 - age, 1e9 - age))
        start_cache(True if i == 0 else folder, "gpu")
    assert sorted(path.name for path in unset.iterdir()) == ["step-0-cache", "step-1-cache"]
    assert len(list((tmp_path / "given").iterdir())) == 4  # the user's to keep


def test_the_home_folder_has_it_by_default(unset, monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert start_cache(True, "gpu") == str(tmp_path / "home/.cache/redeqx/xla")


def test_cpus_have_one_only_where_a_folder_is_given(unset, tmp_path):
    assert start_cache(True, "cpu") is None and folder() is None and not unset.exists()
    assert start_cache(tmp_path / "own", "cpu") == str(tmp_path / "own") == folder()


@pytest.mark.parametrize("given", [False, None])
def test_off(unset, given):
    assert start_cache(given, "gpu") is None and folder() is None and not unset.exists()


@pytest.mark.parametrize("given", [True, False, None])
@pytest.mark.parametrize("platform", ["gpu", "cpu"])
def test_a_setting_of_jax_stays(unset, tmp_path, given, platform):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "jax"))
    assert start_cache(given, platform) == f"{tmp_path}/jax, as JAX is set"
    assert folder() == str(tmp_path / "jax") and not unset.exists()


def test_a_folder_in_the_script_wins_over_jax_s(unset, tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "jax"))
    assert start_cache(str(tmp_path / "own"), "gpu") == str(tmp_path / "own") == folder()


@pytest.mark.parametrize(("variable", "is_on"), [("0", False), ("off", False), ("1", True), ("", True)])
def test_the_environment_switches_it(unset, monkeypatch, variable, is_on):
    monkeypatch.setenv("REDEQX_COMPILATION_CACHE", variable)
    assert start_cache(True, "gpu") == (str(unset) if is_on else None)


def test_the_environment_names_a_folder_but_not_over_the_script(unset, monkeypatch, tmp_path):
    monkeypatch.setenv("REDEQX_COMPILATION_CACHE", str(tmp_path / "shared"))
    assert start_cache(True, "cpu") == str(tmp_path / "shared")
    assert start_cache(str(tmp_path / "own"), "cpu") == str(tmp_path / "own")


def test_a_folder_that_cannot_be_written_switches_it_off_and_is_said(unset, tmp_path):
    (tmp_path / "file").write_text("")
    assert start_cache(tmp_path / "file/cache", "gpu") == (
        f"off: `{tmp_path}/file/cache` cannot be written (Not a directory)"
    )
    assert folder() is None


def test_what_is_no_folder_is_refused_before_anything_is_done(tmp_path):
    with pytest.raises(TypeError) as raised:
        redeqx.Deployer(workdir=tmp_path / "run", compilation_cache=5)
    assert str(raised.value) == "`compilation_cache`: expected True, False or a folder, got 5. Pass one of them."
    assert not (tmp_path / "run").exists()


def test_what_is_said_of_a_compilation(unset, tmp_path):
    assert CacheUse().text() == "" and CacheUse(n_misses=1).text() == ""  # there is no cache
    start_cache(tmp_path / "own", "cpu")
    assert CacheUse(n_misses=1).text() == "not found in the compilation cache"
    assert CacheUse(1, 2, 12.34).text() == "read from the compilation cache, which saved 12.3s"


def test_hits_and_misses_are_counted(unset, tmp_path):
    start_cache(tmp_path / "own", "cpu")

    def use():
        jax.clear_caches()
        with cache_use() as found:
            jax.jit(lambda x: jnp.sin(x) * 3)(1.0).block_until_ready()
        return found

    first, second = use(), use()  # conftest lets JAX keep programs of any size
    assert (first.n_hits, first.n_misses) == (0, 1)
    assert (second.n_hits, second.n_misses) == (1, 0)
    jax.clear_caches()
    jax.jit(lambda x: jnp.cos(x))(1.0)
    assert (second.n_hits, second.n_misses) == (1, 0)  # nobody listens any more


SCRIPT = """
import sys
import equinox as eqx, jax, jax.numpy as jnp, numpy as np, optax
import redeqx

trainer = redeqx.Trainer(
    redeqx.Deployer(0, compilation_cache=sys.argv[1]),
    model=eqx.nn.Linear(8, 8, key=jax.random.key(0)),
    optimizer=optax.sgd(0.1),
    collate_fn=np.stack,
    loss_fn=lambda model, x, key: jnp.mean(jnp.exp(jax.vmap(model)(x))),
)
print(trainer.fit(np.ones((16, 8), np.float32), batch_size=16, n_epochs=1))
"""


@pytest.mark.sweep
def test_a_second_run_reads_what_the_first_compiled(tmp_path):
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
def test_a_compiler_without_devices_reads_nothing_from_it(unset, tmp_path):
    """It could not load it: JAX would warn, and compile again."""
    start_cache(tmp_path / "here", "cpu")
    with redeqx.described("v5e:2x2"):
        device = redeqx.Deployer(verbose=False).mesh.devices.flat[0]
        shape = jax.ShapeDtypeStruct((), np.float32, sharding=SingleDeviceSharding(device))
        for _ in range(2):
            with uncached_where_described(device):
                jax.jit(lambda x: x + 1).lower(shape).compile()
    assert folder() == str(tmp_path / "here")
    with uncached_where_described(jax.devices()[0]):
        assert folder() == str(tmp_path / "here")
