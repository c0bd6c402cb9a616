"""Published figures of accelerators, and descriptions of GPUs for the compiler.

Owns only numbers. Rates are those of one JAX device, which is a chip for TPU v4 and later, but a core for TPU v3 and TPU7x.
"""

from dataclasses import dataclass
from typing import Any

GIB = 2**30
# Bytes that a program may use on the host for each device. libtpu 0.0.50 refuses more, for each generation from v4 to TPU7x
# and whatever the machine has. XLA has no bound for GPUs, whose machines often have 128 to 256 GiB for each.
HOST_MEMORY = 128 * GIB
_T, _G = 1e12, 1e9


@dataclass(frozen=True)
class Chip:
    """The published figures of one device. Rates are in FLOP/s of dense matmuls, or in bytes/s."""

    kind: str  # its `jax.Device.device_kind`
    memory: int  # bytes that a program may use, as reported by the compiler for TPUs and by CUDA for GPUs
    # At JAX's default precision. TPUs multiply float32 as bfloat16, GPUs as TF32 if they have it. For GPUs before Ampere,
    # which have no bfloat16, the first one is for float16.
    bfloat16: float
    float32: float
    bandwidth: float  # of memory
    link: float  # that one device sends to others of its host (TPUs: of its slice)
    # That one device sends to other hosts, in the machines that usually contain it; None if the link also connects hosts.
    network: float | None = None
    host: float = 16 * _G  # between one device and host memory, in one direction, over PCIe
    fp8: float | None = None  # None if XLA has no fp8 matmuls for it

    def rate(self, dtype: str) -> float:
        """Returns the FLOP/s of dense matmuls of a dtype, given its name."""
        if dtype.startswith("float8"):
            return self.fp8 or self.bfloat16
        return self.bfloat16 if dtype in ("bfloat16", "float16") else self.float32


# Memory: the compiler's "available HBM" (libtpu 0.0.51). Rates: Google Cloud's pages of each generation. PCIe: "How to Scale
# Your Model" (jax-ml.github.io/scaling-book).
TPUS = {
    "v3": Chip("TPU v3", int(15.48 * GIB), 61.5 * _T, 61.5 * _T, 450 * _G, 41 * _G),
    "v4": Chip("TPU v4", int(30.75 * GIB), 275 * _T, 275 * _T, 1228 * _G, 300 * _G),
    "v5e": Chip("TPU v5 lite", int(15.75 * GIB), 197 * _T, 197 * _T, 819 * _G, 200 * _G),
    "v5p": Chip("TPU v5", int(95.73 * GIB), 459 * _T, 459 * _T, 2765 * _G, 600 * _G),
    "v6e": Chip("TPU v6 lite", int(31.24 * GIB), 918 * _T, 918 * _T, 1640 * _G, 448 * _G, host=32 * _G),
    "tpu7x": Chip("TPU7x", int(94.74 * GIB), 1153 * _T, 1153 * _T, 3690 * _G, 600 * _G),
}


@dataclass(frozen=True)
class GPU:
    """A GPU: its figures, and the properties that the compiler needs."""

    chip: Chip
    capability: tuple[int, int]  # the compute capability, major and minor
    cores: int  # streaming multiprocessors
    clock: float  # the boost clock, in GHz
    l2: float | int  # the size of the L2 cache, in MiB

    def target_config(self) -> str:
        """Returns the description for XLA, a text proto."""
        major, minor = self.capability
        # By capability: shared memory of a core, and its limit for one block; threads and FP32 units of a core.
        shared, of_block, threads, fpus = {
            (7, 5): (65536, 65536, 1024, 64),
            (8, 0): (167936, 166912, 2048, 64),
            (8, 6): (102400, 101376, 1536, 128),
            (8, 9): (102400, 101376, 1536, 128),
            (9, 0): (233472, 232448, 2048, 128),
            (10, 0): (233472, 232448, 2048, 128),
        }[self.capability]
        return f"""
            gpu_device_info {{
              threads_per_block_limit: 1024
              threads_per_warp: 32
              shared_memory_per_block: 49152
              shared_memory_per_core: {shared}
              threads_per_core_limit: {threads}
              core_count: {self.cores}
              fpus_per_core: {fpus}
              block_dim_limit_x: 2147483647
              block_dim_limit_y: 65535
              block_dim_limit_z: 65535
              memory_bandwidth: {self.chip.bandwidth:.0f}
              l2_cache_size: {self.l2 * 2**20:.0f}
              clock_rate_ghz: {self.clock}
              device_memory_size: {self.chip.memory}
              shared_memory_per_block_optin: {of_block}
              cuda_compute_capability {{ major: {major} minor: {minor} }}
              registers_per_core_limit: 65536
              registers_per_block_limit: 65536
            }}
            platform_name: "CUDA"
            dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
            runtime_version {{ major: 13 minor: 0 patch: 0 }}
            device_description_str: "{self.chip.kind}"
        """


# Memory: as reported by CUDA, to about 1 %. Rates: NVIDIA's data sheets, dense. The CUDA 13 compiler supports capability 7.5
# and later. Links: NVLink, or else PCIe, in one direction.
_A100 = 42505273344 / GIB  # exactly
# fmt: off
_GPUS: dict[str, tuple[Any, ...]] = {
    # kind, memory in GiB; TFLOP/s of 16 bit, float32, fp8; GB/s of memory, link, network; capability, cores, GHz, MiB of L2
    "rtx-2080ti": ("NVIDIA GeForce RTX 2080 Ti", 10.76, 53.8, 13.4, None, 616,  15.8, 3,  (7, 5),  68,  1.545, 5.5),
    "t4":         ("Tesla T4",                   14.75, 65,   8.1,  None, 320,  15.8, 6,  (7, 5),  40,  1.59,  4),
    "a10g":       ("NVIDIA A10G",                22.1,  70,   35,   None, 600,  31.5, 12, (8, 6),  80,  1.71,  6),
    "rtx-3090":   ("NVIDIA GeForce RTX 3090",    23.7,  71,   35.6, None, 936,  31.5, 3,  (8, 6),  82,  1.695, 6),
    "a100-40gb":  ("NVIDIA A100-SXM4-40GB",      _A100, 312,  156,  None, 1555, 300,  25, (8, 0),  108, 1.41,  40),
    "a100-80gb":  ("NVIDIA A100-SXM4-80GB",      79.1,  312,  156,  None, 2039, 300,  25, (8, 0),  108, 1.41,  40),
    "rtx-4090":   ("NVIDIA GeForce RTX 4090",    23.6,  165,  82.6, 330,  1008, 31.5, 3,  (8, 9),  128, 2.52,  72),
    "l4":         ("NVIDIA L4",                  22.2,  121,  60,   242,  300,  31.5, 12, (8, 9),  58,  2.04,  48),
    "l40s":       ("NVIDIA L40S",                44.5,  362,  183,  733,  864,  31.5, 25, (8, 9),  142, 2.52,  96),
    "h100-80gb":  ("NVIDIA H100 80GB HBM3",      79.2,  989,  495,  1979, 3350, 450,  50, (9, 0),  132, 1.98,  50),
    "h200-141gb": ("NVIDIA H200",                139.8, 989,  495,  1979, 4800, 450,  50, (9, 0),  132, 1.98,  50),
    "b200-180gb": ("NVIDIA B200",                178,   2250, 1125, 4500, 8000, 900,  50, (10, 0), 148, 1.965, 126),
}
# fmt: on
# GB/s of 16 lanes of PCIe by the major version of the capability: generation 3, 4 or 5.
_PCIE = {7: 15.8, 8: 31.5, 9: 63, 10: 63}


def _gpu(kind: str, memory: float, half: float, single: float, fp8: float | None, *rest: Any) -> GPU:
    bandwidth, link, network, capability, cores, clock, l2 = rest
    chip = Chip(
        kind, int(memory * GIB), half * _T, single * _T, bandwidth * _G, link * _G, network * _G,
        host=_PCIE[capability[0]] * _G, fp8=fp8 and fp8 * _T,
    )  # fmt: skip
    return GPU(chip, capability, cores, clock, l2)


GPUS = {name: _gpu(*figures) for name, figures in _GPUS.items()}

DEFAULT_CHIP = GPUS["a100-40gb"].chip  # decides what to compare for devices without published rates


def chip_of_kind(kind: str) -> Chip | None:
    """Returns the figures of a device by its `device_kind`, or None if they are unknown."""
    chips = [*TPUS.values(), *(gpu.chip for gpu in GPUS.values())]
    return next((chip for chip in chips if chip.kind == kind), None)


FP8_DEVICES = tuple(gpu.chip.kind for gpu in GPUS.values() if gpu.chip.fp8 is not None)


def has_fp8(device: Any) -> bool:
    """Whether XLA has fp8 matmuls for a device: NVIDIA GPUs of compute capability 8.9 and later."""
    chip = chip_of_kind(device.device_kind)
    if chip is not None:
        return chip.fp8 is not None
    capability = str(getattr(device, "compute_capability", "")).split(".")
    return device.platform in ("cuda", "gpu") and all(map(str.isdigit, capability)) and tuple(map(int, capability)) >= (8, 9)
