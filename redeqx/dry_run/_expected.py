"""The expected time of a step, from the rates that published training runs have reached on the same kind of chip.

Owns the rates, and what the steps that they were fitted to have in common. `tests/benchmarks/forecast.py` fits them, and
shows the errors of each half of the runs by the rates of the other half. All runs are decoders of the LLaMA kind, whose
authors overlap what is sent. So a step is expected to take as long for its products as they did, and in addition the time of
what its own schedule does not hide.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from jax.sharding import Mesh

from ..machine import Chip
from ._figures import Estimate, Step, sent_per_second


@dataclass(frozen=True)
class Reached:
    """The shares of a chip's published FLOP/s that runs have reached: in matmuls with weights, and in causal attention. They
    are fitted to whole steps. Norms, optimizers and all else that takes time are in them too."""

    matmul: float
    attention: float


# By the `device_kind` of the figures in `machine`.
REACHED: Mapping[str, Reached] = {
    "NVIDIA A100-SXM4-80GB": Reached(0.86, 0.12),
    "NVIDIA H100 80GB HBM3": Reached(0.77, 0.12),
    "NVIDIA H200": Reached(0.77, 0.12),
    "TPU v5": Reached(0.83, 0.25),  # of one run
    "TPU v6 lite": Reached(0.60, 0.25),
    "TPU7x": Reached(0.74, 0.25),
}
# What the runs have in common.
MIN_FLOPS, MAX_ATTENTION = 4e14, 0.15  # of a device in a step, and the share of attention in them
MAX_MEMORY = 0.45  # the time of reading and writing over that of products, both at published rates


@dataclass(frozen=True)
class Expected:
    """The expected time of a step."""

    seconds: float
    mfu: float  # the model FLOPs utilization at which it takes this time
    outside: tuple[str, ...]  # in what the step is unlike the runs that the rates were fitted on


def expected(step: Step, estimate: Estimate, chip: Chip, mesh: Mesh) -> Expected | None:
    """Returns the expected time of a compiled step, or None if there are no rates of its chip."""
    reached, total = REACHED.get(chip.kind), sum(step.flops.values())
    if reached is None or not total or not step.kinds:
        return None
    share = step.kinds.get("attention", 0) / total
    products = estimate.compute * ((1 - share) / reached.matmul + share / reached.attention)
    exposed = sum(each.moved * (1 - (each.hidden or 0.0)) / sent_per_second(each, chip, mesh) for each in step.collectives)
    exposed += step.host_bytes * (1 - (step.host_hidden or 0.0)) / chip.host
    others = [kind for kind in ("experts", "convolution") if step.kinds.get(kind)]
    dtypes = sorted(dtype for dtype, n in step.flops.items() if dtype != "bfloat16" and n > 0.01 * total)
    checks = {
        f"products of {' and '.join(others)}": bool(others),
        f"products in {' and '.join(dtypes)}": bool(dtypes),
        f"{share:.0%} of the FLOPs in attention": share > MAX_ATTENTION,
        f"{total / mesh.size:.2g} FLOPs a device": total / mesh.size < MIN_FLOPS,
        "much time for memory": estimate.memory > MAX_MEMORY * estimate.compute,
    }
    seconds = max(products + exposed, estimate.step)
    mfu = estimate.mfu * estimate.step / seconds
    return Expected(seconds, mfu, tuple(what for what, is_outside in checks.items() if is_outside))
