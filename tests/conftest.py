"""Eight simulated devices, every warning an error, and in sweeps jaxtyping's annotations checked by beartype."""

import atexit
import gc
import os
import shutil
import sys
import tempfile
from importlib.metadata import version

# Bytecode is kept, also on machines that keep none: the tests start hundreds of processes, each of which would compile the
# library, and pytest would rewrite the assertions of all files in each.
os.environ["PYTHONDONTWRITEBYTECODE"] = ""
# Before JAX starts its CPU client: with fewer cores than devices, collectives dispatched asynchronously deadlock unless
# the client believes that it has a thread for each.
os.environ["NPROC"] = "16"
os.environ["JAX_PLATFORMS"] = "cpu"
# Most of the suite's time is compilation: machine code is left unoptimised, fusions are emitted the older, quicker way, and
# LLVM gets a program in one part, not in one of many for each core (all of XLA's own passes run). Programs that are alike
# are compiled once for all tests. The first process makes the folder, those that it starts find it. Each worker has its own
# part: JAX writes an entry in place, and a worker that reads it meanwhile warns of a truncated one.
if "XLA_FLAGS" not in os.environ:
    flags = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
    # A later XLA has one way to emit fusions, and ends a process that asks for the other. Without multiplications that are
    # fused with additions, all its fusions round alike.
    is_old = version("jaxlib").startswith("0.10.")
    os.environ["XLA_FLAGS"] = f"{flags} {'--xla_cpu_use_fusion_emitters=false' if is_old else '--xla_cpu_max_isa=AVX'}"
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="redeqx-tests-")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    os.environ["JAX_COMPILATION_CACHE_DIR"] = os.path.join(os.environ["JAX_COMPILATION_CACHE_DIR"], worker)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
# An instruction of a program names one line of source, not the ten frames of its call: lowering is a tenth of the time.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "1")

import jax
import pytest
from jaxtyping import install_import_hook

sys.dont_write_bytecode = False
jax.config.update("jax_num_cpu_devices", 8)


def pytest_configure(config):
    """The models' annotations have shapes and dtypes. The sweep and the parity tests check them: that takes 3 s in each
    process, and a part of each call. `make test TYPECHECK=redeqx` checks all of the library, in half as long again."""
    is_quick = "not sweep" in config.option.markexpr
    if checked := os.environ.get("TYPECHECK", "" if is_quick else "redeqx.models"):
        install_import_hook(checked, "beartype.beartype")


# These take longest, and run first: at the end no process works on one of them while the others have nothing to do.
LONGEST = [
    *("promises/test_faults.py", "models/test_gradients_parity.py", "promises/test_docs.py", "models/test_training.py"),
    *("models/test_parity.py", "models/test_decoders_parity.py", "promises/test_sequence.py", "models/test_segments.py"),
    *("dry_run/test_forecast.py", "examples/test_text_to_image.py", "models/test_decoders.py", "storage/test_faults.py"),
    *("models/hf/test_config.py", "promises/test_processes.py", "dims/test_verdicts.py", "optimizers/test_muon.py"),
    *("models/generation/test_generate.py", "kernels/test_sequence.py", "examples/test_reinforcement_learning.py"),
    *("promises/test_draws.py", "distributed/test_preempted_outside.py", "examples/test_language_modeling.py"),
    *("optimizers/test_adamw.py", "examples/test_text_to_text.py", "promises/test_invariance.py", "data/test_libraries.py"),
    *("promises/test_install.py", "promises/test_tutorials.py", "models/lora/test_lora.py", "training/test_odd_losses.py"),
]
RANKS = {os.path.join(os.path.dirname(__file__), name): rank for rank, name in enumerate(LONGEST)}


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What is imported stays: searching it for cycles again and again takes a fifth of the time of collecting."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_ignore_collect(collection_path, config):
    """To import all files takes half a minute in each process: one without the mark of a suite has no test of it."""
    marks = config.option.markexpr.split(" or ")
    if {*marks} <= {"sweep", "parity"} and collection_path.suffix == ".py":
        text = collection_path.read_text("utf-8")
        return not any(f"pytest.mark.{mark}" in text for mark in marks) or None
    return None


def pytest_addoption(parser):
    parser.addoption(
        "--part", default="1/1", metavar="K/N", help="of the long tests every N-th, from the K-th on; all quick ones"
    )


def pytest_collection_modifyitems(config, items):
    """Chooses a part of the long tests. The cases of one test follow each other, so that each part has some of them."""
    items.sort(key=lambda item: RANKS.get(str(item.path), len(RANKS)))
    part, n_parts = map(int, config.option.part.split("/"))
    if not 1 <= part <= n_parts:
        raise pytest.UsageError(f"--part: expected a number from 1 to {n_parts}, got {part}")
    long = [item for item in items if item.get_closest_marker("sweep") or item.get_closest_marker("parity")]
    left_out = {item for i, item in enumerate(long) if i % n_parts != part - 1}
    config.hook.pytest_deselected(items=[*left_out])
    items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish():
    """What was imported stays, and tracing leaves few cycles: searching for them again and again takes 5 % of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture
def x64():
    """64-bit mode in all threads, as a user sets it; `jax.enable_x64` would not reach those that load data."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.fixture(scope="module", autouse=True)
def _forget_programs():
    """After each file: thousands of programs would stay in memory, and no file runs those of another."""
    yield
    jax.clear_caches()
