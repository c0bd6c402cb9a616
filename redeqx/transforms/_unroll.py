"""Unrolling: unrolls loops over a few layers whose copies of residuals cost more than the longer compilation.

A scan saves its residuals for the backward pass in stacks over all iterations. XLA fills the stacks with zeros, copies each
iteration's arrays in, and later copies slices out. In an unrolled loop each array stays where its matmul wrote it.

Cost: XLA compiles every iteration, which takes 3 to 5 times as long for 12 layers. It may also save what a remat of the body
would have recomputed, as it merges the recomputation with the forward pass. Partial unrolling gains nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..machine import Chip
from ..tracing import Rule, Site, equations, matmul_flops, n_bytes, scan_counts
from ._remat import is_product, is_scan_without_remat

_MAX_EQUATIONS = 2500  # of all iterations together; compile time grows with them
_MIN_COPY_TIME = 1 / 5  # as a fraction of the time of the loop's products
_MAX_MEMORY = 1 / 8  # for a loop's residuals, as a fraction of a device's memory


@dataclass(frozen=True)
class UnrollLoops(Rule):
    """Unrolls scans whose copies of residuals, split over `n_devices`, take long relative to their products, if they are
    small enough. Scans with a remat or a loop in their body are left unchanged, and so are scans inside other scans."""

    chip: Chip
    n_devices: int = 1

    def claims(self, eqn: Any) -> bool:
        if not is_scan_without_remat(eqn) or eqn.params["length"] < 2 or eqn.params["unroll"] != 1:
            return False
        body, length = eqn.params["jaxpr"], eqn.params["length"]
        inside = list(equations(body))
        if length * len(inside) > _MAX_EQUATIONS or any(inner.primitive.name in ("scan", "while") for inner in inside):
            return False
        saved = residual_bytes(eqn)
        # Zeros, a copy in and a copy out: about 4 reads and writes. A forward and a backward pass: 3 times the products.
        copying = 4 * saved / self.chip.bandwidth
        computing = 3 * sum(flops / self.chip.rate(dtype) for dtype, flops in matmul_flops(body.jaxpr).items())
        return copying > _MIN_COPY_TIME * computing and saved * length / self.n_devices < _MAX_MEMORY * self.chip.memory

    def __call__(self, eqn: Any, ins: Sequence[Any], site: Site) -> Sequence[Any] | None:
        if "scan" in site.around:
            return None
        return site.rest(eqn.replace(params={**eqn.params, "unroll": eqn.params["length"]}), ins)


def residual_bytes(eqn: Any) -> int:
    """Estimates the bytes that one iteration of a scan saves for the backward pass: its carry and the outputs of products. A
    batched product, such as attention's scores, counts at most the bytes of its inputs, which a fused kernel saves."""
    body, (n_consts, n_carry) = eqn.params["jaxpr"], scan_counts(eqn)
    total = sum(map(n_bytes, body.jaxpr.invars[n_consts : n_consts + n_carry]))
    for inner in equations(body):
        if is_product(inner.primitive):
            has_batch = inner.primitive.name == "dot_general" and any(inner.params["dimension_numbers"][1])
            outs, ins = (sum(map(n_bytes, atoms)) for atoms in (inner.outvars, inner.invars))
            total += min(outs, ins) if has_batch else outs
    return total
