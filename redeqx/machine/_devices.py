"""The devices of a run: those of this machine, simulated ones, and those of described machines.

Programs can be compiled for a described machine, but not run. This needs the vendor's compiler, but no hardware. Owns the
names of such machines, the start of their compilers, and the target machine of a script's dry run.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jaxtyping import PyTree

from .._tree import nearest
from ..errors import check_count
from ._chips import GIB, GPUS, TPUS, Chip, chip_of_kind

# The share of a GPU's memory that is available to programs. CUDA's context and NCCL's buffers take the rest.
USABLE = 0.95


@dataclass(frozen=True)
class Machine:
    """Devices to compile for."""

    name: str  # the argument of `describe`
    devices: tuple[Any, ...]  # those of a described machine are only for compiling
    memory: int | None = None  # bytes of a device that a program may use; None if unknown
    chip: Chip | None = None  # published figures of a device; None if unknown

    @property
    def n_hosts(self) -> int:
        return len({device.process_index for device in self.devices})


_SPELLINGS = (
    "TPUs as `v4:2x2x2` (kinds: " + ", ".join(TPUS) + "), GPUs as `gpu:a100-40gb:4` or `gpu:h100-80gb:2x8` for two hosts of "
    "eight (kinds: " + ", ".join(GPUS) + "), `cpu:8` for simulated devices, `this` for the devices at hand"
)


def describe(name: str, *, memory: int | None = None) -> Machine:
    """Returns the machine of a name: `v4:2x2x2`, `gpu:a100-40gb:4`, `gpu:h100-80gb:2x8` (hosts x devices), `cpu:8`, `this`.
    `memory` replaces the known number of bytes of a device; of a TPU it is not larger.

    Raises ValueError for an unknown name or too much memory, and ImportError if the compiler is not installed.
    """
    if not isinstance(name, str):
        raise TypeError(f"`topology`: expected the name of a machine, got {name!r}. Pass 'gpu:h100-80gb:8', for example.")
    kind, _, size = name.partition(":")
    if name == "this":
        machine = of_devices("this", jax.devices())
    elif kind == "cpu":
        machine = _simulated(name, size)
    elif kind == "gpu":
        machine = _gpus(name, size, memory)
    elif kind in TPUS:
        machine = _tpus(name, kind, size, memory)
    else:
        raise _unknown(name, kind, [*TPUS, "gpu", "cpu", "this"])
    return machine if memory is None else replace(machine, memory=memory)


def _unknown(name: str, part: str, known: list[str]) -> ValueError:
    return ValueError(f"`{name}`: expected a topology: {_SPELLINGS}.{nearest(part, known)}")


def of_devices(name: str, devices: Any) -> Machine:
    """Returns a machine of existing devices, with the memory that they report."""
    devices = tuple(devices)
    # Only a device of this process reports its memory.
    own = next((device for device in devices if device.process_index == jax.process_index()), devices[0])
    memory = host_memory() // len(devices) if own.platform == "cpu" else (own.memory_stats() or {}).get("bytes_limit")
    return Machine(name, devices, memory, chip_of_kind(devices[0].device_kind))


def peak_memory(devices: Sequence[Any]) -> int | None:
    """Returns the peak bytes on any one of these devices since the process started, or None if none reports them."""
    stats = [device.memory_stats() or {} for device in devices]
    return max((each["peak_bytes_in_use"] for each in stats if "peak_bytes_in_use" in each), default=None)


def host_memory() -> int:
    """Returns the bytes of this host's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _simulated(name: str, size: str) -> Machine:
    if not size.isdecimal() or int(size) < 1:
        raise _unknown(name, name, ["cpu:8"])
    if jax.device_count("cpu") != int(size):
        raise ValueError(
            f"`{name}`: expected {size} simulated devices, got {jax.device_count('cpu')}, as JAX's CPU backend was started "
            f"with. Call `redeqx.simulate_devices({size})` at the top of the script, or `python -m redeqx dry-run`."
        )
    return of_devices(name, jax.devices("cpu"))


def _gpus(name: str, size: str, memory: int | None) -> Machine:
    kind, _, count = size.partition(":")
    if kind not in GPUS:
        raise _unknown(name, kind, list(GPUS))
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)?", count):
        raise ValueError(f"`{name}`: expected a number of GPUs, got {count!r}. Write `gpu:{kind}:8`, or `gpu:{kind}:2x8`.")
    hosts, _, devices = count.rpartition("x")
    gpu = GPUS[kind]
    if memory is not None:  # the compiler reads it too: it recomputes values if memory is short
        gpu = replace(gpu, chip=replace(gpu.chip, memory=memory))
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # hides the plugin's long warnings about memory
    options = {"topology": f"1x{hosts or 1}x{devices}", "target_config": gpu.target_config()}
    with _compiler(name, "GPU", "topology-gpu", _CUDA):
        try:
            described = topologies.get_topology_desc(platform="cuda", topology_name="", **options)
        except NotImplementedError:
            # JAX started its backends earlier, with the version check that `_CUDA` skips, and did not load the plugin.
            plugins = [plugin for plugin in entry_points(group="jax_plugins") if "cuda" in plugin.name]
            if not plugins:
                raise
            for plugin in plugins:
                plugin.load().initialize()
            _register_partitioners()
            described = topologies.get_topology_desc(platform="cuda", topology_name="", **options)
    return Machine(name, tuple(described.devices), int(USABLE * gpu.chip.memory), gpu.chip)


def _register_partitioners() -> None:
    """Registers the partitioners of JAX's modules with the plugin, as JAX does with a plugin that it loads itself. Without
    them a program for several GPUs with cuDNN's attention does not compile."""
    from jax._src.xla_bridge import _backend_factories, _plugin_callbacks

    for callback in _plugin_callbacks if "cuda" in _backend_factories else ():
        callback(c_api=_backend_factories["cuda"].c_api)


def _tpus(name: str, kind: str, size: str, memory: int | None) -> Machine:
    if not re.fullmatch(r"\d+(x\d+){1,2}", size):
        raise ValueError(f"`{name}`: expected chips along each side, got {size!r}. Write `{kind}:2x4`, or `{kind}:2x2x2`.")
    chip = TPUS[kind]
    if memory is not None and memory > chip.memory:
        raise ValueError(
            f"`{name}`: expected at most {chip.memory / GIB:.2f} GiB of memory, as the compiler of a {chip.kind} refuses "
            f"what needs more, got {memory / GIB:.2f}. Leave it out, or pass less."
        )
    # Both cores of a v4 chip are one device, as usual. This is the default for later kinds.
    options = {"chip_config_name": "megacore"} if kind == "v4" else {}
    with _compiler(name, "TPU", "topology-tpu", _LIBTPU):
        try:
            described = topologies.get_topology_desc(platform="tpu", topology_name=name, **options)
        except jax.errors.JaxRuntimeError as error:
            raise ValueError(f"`{name}`: expected a topology of {chip.kind}, got one that is refused: {error}") from error
    return Machine(name, tuple(described.devices), chip.memory, chip)


# JAX checks the versions of all CUDA libraries. Compiling needs none of them, and the newest do not load without a driver
# (CUPTI 13.5: error 999).
_CUDA = {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
# Without these, libtpu queries the network for its TPU, prints that it found none, and refuses to load in a second process,
# although there is no TPU to share.
_LIBTPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v4-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@contextmanager
def _compiler(name: str, kind: str, extra: str, variables: Mapping[str, str]) -> Iterator[None]:
    """A context to start a vendor's compiler, with those of these environment variables that are not set."""
    added = {key: value for key, value in variables.items() if key not in os.environ}
    os.environ.update(added)
    try:
        yield
    except RuntimeError as error:
        raise ImportError(
            f"`{name}`: expected the {kind} compiler, got none ({error}). "
            f'Run `pip install "redeqx[{extra}]"`: it needs no {kind}.'
        ) from error
    finally:
        for key in added:
            del os.environ[key]


# --- simulated devices ---------------------------------------------------------------------------------------------------


def simulate_devices(n_devices: int) -> None:
    """Simulates `n_devices` devices on a machine without an accelerator. With an accelerator, this has no visible effect.

    Call it before the first use of JAX's devices. It sets the number of JAX's CPU devices. It also sets the environment
    variable `NPROC`, the size of XLA's thread pool, since collectives over more devices than threads deadlock. In a dry run
    the topology sets the number of devices, and this function does nothing.

    Raises RuntimeError if JAX's backends have started already, TypeError and ValueError for anything but a positive integer.
    """
    check_count(n_devices, "n_devices")
    if _dry is not None:
        return
    try:
        jax.config.update("jax_num_cpu_devices", n_devices)
    except RuntimeError as error:
        raise RuntimeError(
            f"`simulate_devices({n_devices})`: expected JAX's devices to be untouched, got a started backend. "
            "Call it at the top of the script, before any array is created."
        ) from error
    os.environ["NPROC"] = str(max(2 * n_devices, int(os.environ.get("NPROC") or 0), os.cpu_count() or 1))


# --- a dry run of a script ---------------------------------------------------------------------------------------------


@dataclass
class Dry:
    """The dry run of a script."""

    machine: Machine
    options: dict[str, Any]  # further arguments of the dry run
    zeros: set[str] = field(default_factory=set)  # what the script received with zeros: `"models"`, `"predictions"`
    # The exception with the report that ended the script, even if the script caught it. Empty before.
    done: list[Any] = field(default_factory=list)


def as_zeros(shapes: PyTree) -> PyTree:
    """Returns a tree of shapes with read-only zeros in their place, which take no memory: a model in a dry run. They are
    NumPy's, as JAX allocates its own. `eqx.is_array` is true for both, so that a script can filter the model."""

    if _dry is not None:
        _dry.zeros.add("models")

    def zeros(x: Any) -> Any:
        if not isinstance(x, jax.ShapeDtypeStruct) or jnp.issubdtype(x.dtype, jax.dtypes.extended):  # PRNG keys
            return x
        return np.broadcast_to(np.zeros((), x.dtype), x.shape)

    return jax.tree.map(zeros, shapes)


_dry: Dry | None = None


def dry() -> Dry | None:
    """Returns the current dry run, or None in a real run."""
    return _dry


@contextmanager
def described(topology: str, *, memory: int | None = None) -> Iterator[Machine]:
    """A context in which deployers compile for a described machine, and allocate no arrays of a model.

    ```python
    with redeqx.described("v4:2x2x2"):
        deployer = redeqx.Deployer(n_model_shards=8)
        model = deployer.init(lambda: Model(key=key))
        trainer = redeqx.Trainer(deployer, model=model, ...)
        print(trainer.dry_run(examples, per_device_batch_size=4))
    ```

    **Arguments:**

    - `topology`: `"v4:2x2x2"`, `"gpu:a100-40gb:4"`, `"gpu:h100-80gb:2x8"` (hosts x devices), `"cpu:8"`, `"this"`.
    - `memory`: bytes of a device, to replace the known number; of a TPU, no more than that.

    Raises ValueError for an unknown topology or too much memory, and ImportError if its compiler is not installed.
    """
    machine = describe(topology, memory=memory)
    with dry_for(machine):
        yield machine


@contextmanager
def dry_for(machine: Machine, **options: Any) -> Iterator[Dry]:
    """A context in which deployers compile for a machine, and allocate no arrays of a model."""
    global _dry
    before, _dry = _dry, (run := Dry(machine, options))
    try:
        yield run
    finally:
        _dry = before
