"""XLA settings for training, by platform, and a check that the installed compiler accepts them.

They are passed to the compiler of a step (`jax.jit(compiler_options=...)`), so no environment variable is set, and other
programs of the process are not affected. A compiler raises an error for an unknown option, so each option is first tried on
a program with one addition.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.extend.backend import get_backend
from jax.sharding import Mesh, SingleDeviceSharding

from ._compilation_cache import uncached_where_described

Options = Mapping[str, bool | int | float | str]

MIB = 2**20
# For more than one device. Their effect on a compiled step is in tests/benchmarks/compiled.md. Sources: (1) JAX, "GPU
# performance tips", docs.jax.dev; (2) NVIDIA JAX-Toolbox, "Tips for High-Performance LLMs with JAX and XLA",
# docs/GPU_performance.md; (3) MaxText, benchmarks/xla_flags_library.py.
SETTINGS: dict[str, dict[str, bool | int]] = {
    "gpu": {
        "xla_gpu_enable_latency_hiding_scheduler": True,  # (1), (2): overlaps collectives with computation
        "xla_gpu_enable_pipelined_all_gather": True,  # (2), (1): gathers a layer's weights during the layer before
        "xla_gpu_enable_pipelined_reduce_scatter": True,  # (2), (1)
        "xla_gpu_enable_pipelined_all_reduce": True,  # (2), (1)
        # (2): at least the weights of a layer; XLA's default is 30 MiB. A much larger value would gather several layers of
        # an unrolled model at once.
        "xla_gpu_all_gather_combine_threshold_bytes": 128 * MIB,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": 128 * MIB,
        "xla_gpu_all_reduce_combine_threshold_bytes": 128 * MIB,
    },
}
# Flags that change no program: where files are, and how many devices are simulated.
_NEUTRAL = re.compile("dump|cache|autotune_results|vmodule|log_level|host_platform_device_count")


def compiler_environment() -> dict[str, Any]:
    """Returns what decides how this process compiles a given program, by name: the compiler's version, and the environment's
    flags. Processes in which they differ round differently, so that values that should be equal drift apart."""
    texts = {name: os.environ.get(name, "").split() for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE")}
    kept = {name: sorted(flag for flag in text if not _NEUTRAL.search(flag)) for name, text in texts.items()}
    flags = {name: " ".join(text) or "unset" for name, text in kept.items()}
    return {"the version of jaxlib": version("jaxlib"), "the platform": get_backend().platform_version, **flags}


@dataclass(frozen=True)
class Compiler:
    """How programs are compiled, and where they are kept.

    **Arguments:**

    - `cache`: True keeps compiled programs for the next run, in JAX's folder if `JAX_COMPILATION_CACHE_DIR` or `jax.config`
        sets one, else in `~/.cache/redeqx/xla` (`XDG_CACHE_HOME`). A folder keeps them there, also on CPUs, for which True
        does nothing, as their machine code does not run on every other CPU. False leaves JAX's setting unchanged. The
        environment variable `REDEQX_COMPILATION_CACHE` (a folder, or 0) replaces True. Let nobody else write to this
        folder: its contents are executed.
    - `settings`: XLA options for the train, eval and predict steps, as in `XLA_FLAGS` but without dashes:
        `{"xla_gpu_enable_pipelined_all_gather": True}`; `"auto"`, the options recommended for training on this platform;
        None for none. Options that the compiler does not know are left out, and the header names them.

    Raises TypeError or ValueError for any other value.
    """

    cache: bool | str | Path | None = True
    settings: Options | str | None = "auto"

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


@dataclass(frozen=True)
class XlaSettings:
    """Settings for the compiler of one platform.

    **Arguments:**

    - `options`: the options that it accepts.
    - `dropped`: the options that it rejects, each with the reason.
    """

    options: dict[str, bool | int | float | str] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)

    def text(self) -> str:
        """Returns a line to print, or an empty string if there are no settings."""
        spelled = {name: str(x).lower() if isinstance(x, bool) else x for name, x in self.options.items()}
        texts = [f"{name}={x}" for name, x in spelled.items()]
        texts += [f"{name} left out: {reason}" for name, reason in self.dropped.items()]
        return ", ".join(texts)


def xla_settings(mesh: Mesh, given: Options | str | None) -> XlaSettings:
    """Returns the settings for steps on a mesh.

    **Arguments:**

    - `given`: `"auto"` for the platform's settings, without options that `XLA_FLAGS` sets; a dict of other settings;
        or None.
    """
    if given is None:
        return XlaSettings()
    device = next(iter(mesh.local_devices), mesh.devices.flat[0])
    platform = "gpu" if device.platform in ("gpu", "cuda") else device.platform
    if isinstance(given, str):
        environment = os.environ.get("XLA_FLAGS", "")
        own = SETTINGS.get(platform, {}) if mesh.size > 1 else {}
        given = {name: value for name, value in own.items() if not re.search(rf"--{name}\b", environment)}
    return _accepted(device, tuple((name, type(value), value) for name, value in given.items()))


@cache
def _accepted(device: Any, given: tuple[tuple[str, type, Any], ...]) -> XlaSettings:
    options = {name: value for name, _, value in given}  # the type tells True from 1, which are equal keys of the cache
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
