"""The compiler of a run: its settings by platform, and the cache of compiled programs.

Settings are passed to the compiler of a step (`jax.jit(compiler_options=...)`), so no environment variable is set, and other
programs of the process are not affected. A compiler raises an error for an unknown option, so each option is first tried on
a program with one addition.

JAX's persistent cache is off for CPUs unless a folder is given. Its entries contain machine code, which other CPUs may not
support. XLA checks this, but its check also prints errors and rejects entries on the machine that wrote them (jax issue
38445).
"""

import os
import re
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.monitoring
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from jax.extend.backend import get_backend
from jax.sharding import Mesh, SingleDeviceSharding

XlaOptions = Mapping[str, bool | int | float | str]


@dataclass(frozen=True)
class Compiler:
    """How programs are compiled, and where they are kept.

    **Arguments:**

    - `cache`: True keeps compiled programs for the next run, in JAX's folder if `JAX_COMPILATION_CACHE_DIR` or `jax.config`
        sets one, else in `~/.cache/redeqx/xla` (`XDG_CACHE_HOME`). A folder keeps them there, also on CPUs, for which True
        does nothing, as their machine code does not run on every other CPU. One that `redeqx dry-run --save` has filled must
        be for this run: the Deployer or the first step raises ValueError with what differs. From one that cannot be written,
        programs are read (not on GPUs, where it is not used). False leaves JAX's setting unchanged. The environment variable
        `REDEQX_COMPILATION_CACHE` (a folder, or 0) replaces True. Let nobody else write to this folder: its contents are
        executed.
    - `settings`: XLA options for the train, eval and predict steps, as in `XLA_FLAGS` but without dashes:
        `{"xla_gpu_enable_latency_hiding_scheduler": True}`; `"auto"`, the options recommended for training on this platform;
        None for none. Options that the compiler does not know are left out, and the header names them.

    Raises TypeError or ValueError for any other value.
    """

    cache: bool | str | Path | None = True
    settings: XlaOptions | str | None = "auto"

    def __post_init__(self) -> None:
        if self.cache is not None and not isinstance(self.cache, bool | str | os.PathLike):
            raise TypeError(f"`compiler.cache`: expected True, False or a folder, got {self.cache!r}. Pass one of them.")
        given = self.settings
        if given is None or given == "auto":
            return
        if not isinstance(given, Mapping):
            kind, got = (ValueError, repr(given)) if isinstance(given, str) else (TypeError, type(given).__name__)
            raise kind(f'`compiler.settings`: expected "auto", a dict or None, got {got}. Pass one of them.')
        for name, value in given.items():
            if not isinstance(name, str) or not isinstance(value, bool | int | float | str):
                raise TypeError(
                    f"`compiler.settings`: expected a bool, a number or a string by name, got {name!r}: {value!r}. "
                    'Write {"xla_gpu_...": True}.'
                )
            if name.startswith("-"):
                advice = f"Pass {name.lstrip('-')!r}."
                raise ValueError(f"`compiler.settings`: expected names without dashes, got {name!r}. {advice}")


# --- settings ----------------------------------------------------------------------------------------------------------

MIB = 2**20
_PIPELINED = "COLLECTIVE_PIPELINING_MODE_ON"
# For more than one device. Their effect on a compiled step is in tests/benchmarks/compiled.md. Sources: (1) JAX, "GPU
# performance tips", docs.jax.dev; (2) NVIDIA JAX-Toolbox, "Tips for High-Performance LLMs with JAX and XLA",
# docs/GPU_performance.md; (3) MaxText, benchmarks/xla_flags_library.py; (4) AI-Hypercomputer/tpu-recipes, training/ironwood.
SETTINGS: dict[str, dict[str, bool | int | str]] = {
    "gpu": {
        "xla_gpu_enable_latency_hiding_scheduler": True,  # (1), (2): overlaps collectives with computation
        "xla_gpu_pipeline_all_gather": _PIPELINED,  # (2), (1): gathers a layer's weights during the layer before
        "xla_gpu_pipeline_reduce_scatter": _PIPELINED,  # (2), (1)
        "xla_gpu_pipeline_all_reduce": _PIPELINED,  # (2), (1)
        # By default a collective is started only when the one before has ended, and a loop over layers has up to ten. If all
        # of them may start early, its matmuls hide what they send (8 layers of LLaMA 8B, 8 H100: 80 % of all bytes, not 35).
        # They are still sent one after the other, on one stream.
        "xla_gpu_experimental_parallel_collective_overlap_limit": 32,
        # A step that needs more memory than the scheduler's limit is scheduled without any overlap. The limit is 76 % of the
        # device's memory by default, and with this value 94 %, of which JAX uses up to 95 %. The step of LLaMA 8B on 8 H100,
        # of 66 of 75 GiB, hides 1 % without it and 93 % with it, and needs 0.3 GiB more.
        "xla_gpu_memory_limit_slop_factor": 118,
        # (2): at least the weights of a layer; XLA's default is 30 MiB. A much larger value would gather several layers of
        # an unrolled model at once.
        "xla_gpu_all_gather_combine_threshold_bytes": 128 * MIB,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": 128 * MIB,
        "xla_gpu_all_reduce_combine_threshold_bytes": 128 * MIB,
    },
    # (3): the SparseCores of v5p and v6e send while matmuls run; by default a collective is awaited where it starts. TPU7x
    # does so by default, and v5e has none. Fusions of matmuls and collectives (`xla_tpu_enable_async_collective_fusion`)
    # hide more on v5p, but libtpu 0.0.50 refuses them for all but v5e: their results may be wrong there.
    "tpu": {
        "xla_tpu_enable_sparse_core_collective_offload_all_gather": True,
        "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": True,
        "xla_tpu_enable_sparse_core_collective_offload_all_reduce": True,
        # (4): the same over several dims of a slice, as of fsdp over all of it. Else a gather or a reduce-scatter over the
        # three dims of a v5p is an all-reduce, which sends twice as much.
        "xla_tpu_enable_sparse_core_collective_offload_2d_all_gather": True,
        "xla_tpu_enable_sparse_core_collective_offload_3d_all_gather": True,
        "xla_tpu_enable_sparse_core_collective_offload_nd_reduce_scatter": True,
        "xla_tpu_prefer_async_allgather_to_allreduce": True,
        # (4): the collectives of a layer wait in a queue. Else each starts when the one before is awaited, and of two needed
        # one after the other the second is not hidden.
        "xla_tpu_enable_sparse_core_offload_queuing_in_lhs": True,
    },
}
# The same for XLA before JAX 0.12, which rejects the names above.
_BEFORE = {
    "xla_gpu_pipeline_all_gather": "xla_gpu_enable_pipelined_all_gather",
    "xla_gpu_pipeline_reduce_scatter": "xla_gpu_enable_pipelined_reduce_scatter",
    "xla_gpu_pipeline_all_reduce": "xla_gpu_enable_pipelined_all_reduce",
}
# Flags that change no program: where files are, and how many devices are simulated.
_NEUTRAL = re.compile("dump|cache|autotune_results|vmodule|log_level|host_platform_device_count")


def compiler_environment(client: Any = None) -> dict[str, Any]:
    """Returns what decides how a process compiles a given program for the devices of `client`, by default its own, by name:
    the compiler's version, and the environment's flags. Processes in which they differ round differently, so that values
    that should be equal drift apart."""
    texts = {name: os.environ.get(name, "").split() for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE")}
    kept = {name: sorted(flag for flag in text if not _NEUTRAL.search(flag)) for name, text in texts.items()}
    flags = {name: " ".join(text) or "unset" for name, text in kept.items()}
    return {"the version of jaxlib": version("jaxlib"), "the platform": (client or get_backend()).platform_version, **flags}


@dataclass(frozen=True)
class XlaSettings:
    """Settings for the compiler of one platform."""

    options: dict[str, bool | int | float | str] = field(default_factory=dict)  # those that it accepts
    dropped: dict[str, str] = field(default_factory=dict)  # those that it rejects, each with the reason

    def text(self) -> str:
        """Returns a line to print, or an empty string if there are no settings."""
        spelled = {name: str(x).lower() if isinstance(x, bool) else x for name, x in self.options.items()}
        texts = [f"{name}={x}" for name, x in spelled.items()]
        texts += [f"{name} left out: {reason}" for name, reason in self.dropped.items()]
        return ", ".join(texts)


def xla_settings(mesh: Mesh, given: XlaOptions | str | None, own: Mapping[str, Any] = MappingProxyType({})) -> XlaSettings:
    """Returns the settings for steps on a mesh: `given`, a dict or None, or for `"auto"` the platform's with the step's
    `own`, of which None leaves one out, but none that `XLA_FLAGS` or `LIBTPU_INIT_ARGS` sets."""
    if given is None:
        return XlaSettings()
    device = next(iter(mesh.local_devices), mesh.devices.flat[0])
    platform = "gpu" if device.platform in ("gpu", "cuda") else device.platform
    if not isinstance(given, str):
        return _accepted(device, given)
    environment = " ".join(os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"))
    own = {**SETTINGS.get(platform, {}), **own} if mesh.size > 1 else {}
    own = {
        name: value
        for name, value in own.items()
        if value is not None and not re.search(rf"--({name}|{_BEFORE.get(name, name)})\b", environment)
    }
    found = _accepted(device, own)
    older = _accepted(device, {_BEFORE[name]: True for name in found.dropped if name in _BEFORE})
    dropped = {name: why for name, why in found.dropped.items() if _BEFORE.get(name) not in older.options}
    return XlaSettings({**found.options, **older.options}, dropped)


def _accepted(device: Any, given: XlaOptions) -> XlaSettings:
    # The types tell True from 1, which are equal keys of the cache.
    return _asked(device, tuple((name, type(value), value) for name, value in given.items()))


@cache
def _asked(device: Any, given: tuple[tuple[str, type, Any], ...]) -> XlaSettings:
    options = {name: value for name, _, value in given}
    if not options or _refusal(device, options) is None:
        return XlaSettings(options)
    refusals = {name: _refusal(device, {name: value}) for name, value in options.items()}
    dropped = {name: reason for name, reason in refusals.items() if reason is not None}
    return XlaSettings({name: value for name, value in options.items() if name not in dropped}, dropped)


def _refusal(device: Any, options: dict[str, Any]) -> str | None:
    """Returns the reason why the compiler of a device rejects these options, or None if it accepts them."""
    one = jax.ShapeDtypeStruct((), np.float32, sharding=SingleDeviceSharding(device))
    try:
        with uncached_where_described(device):
            jax.jit(lambda x: x + 1).lower(one).compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        return re.sub(r"^\w+: ", "", str(error).splitlines()[0])
    return None


# --- the cache ---------------------------------------------------------------------------------------------------------

VARIABLE = "REDEQX_COMPILATION_CACHE"
# XLA's own caches, which only compilers for GPUs have, are below JAX's folder, and JAX's keys contain their paths. Without
# them, programs are also found in a folder that was moved.
XLA_CACHES = "jax_persistent_cache_enable_xla_caches"


def start_cache(given: bool | str | Path | None, platform: str) -> str | None:
    """Sets JAX's cache folder for this process. Returns the line to print, or None.

    `given` is a folder; True for JAX's own setting or else the user's cache folder, which the environment variable
    `REDEQX_COMPILATION_CACHE` (a folder, or 0) replaces; False or None to set nothing.
    """
    before, has_gpus = cache_folder(), platform in ("cuda", "gpu")
    variable = os.environ.get(VARIABLE, "")
    if given is True and variable.lower() not in ("", "1", "true", "on", "yes"):
        given = False if variable.lower() in ("0", "false", "off", "no") else variable
    if given and not has_gpus:
        jax.config.update(XLA_CACHES, "")
    if not given or (given is True and (platform == "cpu" or before is not None)):
        return None if before is None else f"{before}, as JAX is set"
    own = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "redeqx" / "xla"
    folder, unwritten = own if given is True else Path(given), ""
    try:
        folder = folder.expanduser().absolute()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # private, since others who can write here could run code
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, RuntimeError) as error:  # a RuntimeError if the account has no home folder, as in some containers
        unwritten = f"cannot be written ({getattr(error, 'strerror', None) or error})"
        # Where XLA compiles for GPUs, it writes the times of its kernels to this folder.
        if has_gpus or not os.access(folder, os.R_OK | os.X_OK):
            return f"off: `{folder}` {unwritten}"
        warnings.filterwarnings("ignore", "Error writing persistent compilation cache entry")
    if before != str(folder):
        _use(str(folder))
    return f"{folder}, which {unwritten}" if unwritten else str(folder)


def uncached_where_described(device: Any) -> AbstractContextManager[None]:
    """A context that turns the cache off if a device is only described: its compiler cannot load programs from the cache
    (jax 0.10.2: "PjRtCompiler must be constructed with a Client")."""
    is_described = type(device.client).__name__ == "CompileOnlyPyClient"
    return use_cache_folder(None) if is_described and cache_folder() is not None else nullcontext()


@contextmanager
def configured(**options: Any) -> Iterator[None]:
    """A context in which these options of JAX are set."""
    before = {name: getattr(jax.config, name) for name in options}
    try:
        for name, value in options.items():
            jax.config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


@contextmanager
def use_cache_folder(folder: str | None) -> Iterator[None]:
    """A context in which JAX's cache is in another folder; None turns it off."""
    before = cache_folder()
    _use(folder)
    try:
        yield
    finally:
        _use(before)


def _use(folder: str | None) -> None:
    jax.config.update("jax_compilation_cache_dir", folder)
    compilation_cache.reset_cache()  # JAX keeps the cache of an earlier folder open


def cache_folder() -> str | None:
    """Returns the folder of JAX's cache; None if there is none."""
    return getattr(jax.config, "jax_compilation_cache_dir", None)


_REQUESTS, _HITS = "/jax/compilation_cache/compile_requests_use_cache", "/jax/compilation_cache/cache_hits"
_SAVED = "/jax/compilation_cache/compile_time_saved_sec"


@contextmanager
def cache_use() -> Iterator[Counter[str]]:
    """A context that sums the events and the seconds that JAX reports to `jax.monitoring` in this thread, by name."""
    use, thread = Counter[str](), threading.get_ident()

    def add(event: str, duration_secs: Any = 1, **kwargs: Any) -> None:
        del kwargs
        if threading.get_ident() == thread:
            use[event] += duration_secs

    jax.monitoring.register_event_listener(add)
    jax.monitoring.register_event_duration_secs_listener(add)
    try:
        yield use
    finally:
        jax.monitoring.unregister_event_listener(add)
        jax.monitoring.unregister_event_duration_listener(add)


def cache_text(use: Mapping[str, float]) -> str:
    """Returns what to print of a compilation with this `cache_use`; empty if there is no cache."""
    if use[_HITS]:  # what was not found are then small programs: JAX stores none that compiles within a second
        return f"read from the compilation cache, which saved {max(use[_SAVED], 0.0):.1f}s"
    has_cache = cache_folder() is not None and getattr(jax.config, "jax_enable_compilation_cache", True)
    return "not found in the compilation cache" if use[_REQUESTS] and has_cache else ""
