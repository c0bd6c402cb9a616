"""Compute: how the functions of a model are computed. One object, given by the user, that travels whole.

A new option is a field here and its one reader. What devices decide (a default, a rule that only GPUs need) is decided here
too, for a mesh.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh, PartitionSpec as P

from ..errors import check_choice, check_flag
from ..machine import DEFAULT_CHIP, HOST_MEMORY, MODEL, STORAGE_AXES, chip_of_kind
from ..memory import AUTO, REMATS, bytes_of
from ..tracing import Rule
from ..transforms import Measure, RematLoops, UnrollLoops
from ._precision import Precision


@dataclass(frozen=True)
class Compute:
    """How a loss or a prediction is computed. Values and gradients stay the same up to rounding.

    ```python
    trainer = redeqx.Trainer(..., compute="bfloat16")  # as Compute(precision="bfloat16")
    trainer = redeqx.Trainer(..., compute=redeqx.Compute("bfloat16", remat="full", memory="auto"))
    ```

    The pages "Does it fit?" and "When it is slow" say when each option pays.

    **Arguments:**

    - `precision`: `"float32"`; `"bfloat16"`: parameters, sums of losses and of gradients, and updates in float32, all else
        in bfloat16; `"fp8"`: as `"bfloat16"`, with products with weights in 8-bit floating point, on GPUs that support it
        (CPUs emulate it); `jnp.float32` or `jnp.bfloat16`, as their names; or a `redeqx.Precision`. None keeps the dtypes of
        the model. The batch is never cast: cast floating inputs in `loss_fn`, and logits to float32 before your own loss.
    - `fuse_attention`: whether attention, however it is written, is computed by the platform's kernel (`redeqx.attention`).
    - `remat`: what loops (`jax.lax.scan`, as over stacked blocks) recompute in the backward pass: `"none"`; `"matmuls"`,
        everything except matmuls, convolutions and attention; `"full"`, the whole body; `"offload"`, as `"full"`, with the
        inputs of each iteration in host memory, and as many products as the bus copies while it is computed. Or bytes, such
        as `"6GiB"`: the device keeps the products that save most time, in that many bytes; the host keeps others, and the
        rest is computed again. `"auto"` is `"matmuls"`. Loops with a `jax.checkpoint` of their own stay as they are.
    - `memory`: `"auto"` compiles the first step and, if it does not fit into the device's memory, tries loops that are not
        unrolled, a split residual stream, bytes and the next levels of `remat`, smaller parts of micro-batches unless the
        loss mixes rows, and the optimizer state in host memory. It prints its choice; nothing is chosen on CPUs and with a
        `grad_fn`.
    - `unroll`: whether loops over a few small layers are unrolled on GPUs, which costs compile time.
    - `stack_blocks`: whether equal blocks computed one after the other, as from a Python list, become one loop over their
        stacked weights. By default on GPUs and TPUs, and where `remat` recomputes products, which only loops do.
    - `split_residual`: whether model shards split the positions of the values between layers, instead of each having all
        of them (Megatron's sequence parallelism). By default on GPUs unless `remat` is `"matmuls"`, where the step would
        send a quarter more bytes.
    - `offload_opt_state`: whether the optimizer state is stored in host memory between updates.

    Raises ValueError for any other value.
    """

    precision: Any = None
    fuse_attention: bool = True
    remat: str = "auto"
    memory: str | None = None
    unroll: bool = True
    stack_blocks: bool | None = None
    split_residual: bool | None = None
    offload_opt_state: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "precision", Precision.of(self.precision))
        if not isinstance(self.remat, str) or bytes_of(self.remat) is None:
            check_choice(self.remat, "remat", ("auto", *REMATS))
        check_choice(self.memory, "memory", ("auto", None))
        for name in ("fuse_attention", "unroll", "offload_opt_state"):
            check_flag(getattr(self, name), name)
        for name in ("stack_blocks", "split_residual"):
            check_flag(getattr(self, name), name, optional=True)

    @classmethod
    def of(cls, value: Any) -> "Compute":
        """Returns the object for a `compute` argument: a `Compute`, or a precision."""
        return value if isinstance(value, Compute) else cls(Precision.of(value, "compute", " or `redeqx.Compute`"))

    @property
    def dtype(self) -> Any:
        """The dtype to which floating leaves of the model are cast; None to keep theirs."""
        return self.precision.dtype

    @property
    def remat_level(self) -> str:
        """The level of recomputation. By default everything but products is recomputed (tests/benchmarks/README.md)."""
        return AUTO if self.remat == "auto" else self.remat

    def remats_on(self, mesh: Mesh, specs: Sequence[P], *, measures: bool, in_host: int) -> Rule | None:
        """Returns the rule for what loops save on the devices of a mesh, given the specs of the weights in use; None if they
        save everything. If it `measures`, loops are measured at each level. `in_host` is as for `plan_rules`."""
        level, device = self.remat_level, mesh.devices.flat[0]
        chip = chip_of_kind(device.device_kind)
        if level == "none":
            return None
        by_value = bytes_of(level) is not None or (level == "offload" and chip is not None)  # else the bus is unknown
        host = 0 if device.platform == "cpu" else HOST_MEMORY - in_host
        measure = Measure(mesh, chip or DEFAULT_CHIP, specs, host)
        return RematLoops(level, measure if by_value or measures else None, by_value)

    def unroll_on(self, mesh: Mesh) -> UnrollLoops | None:
        """Returns which loops are unrolled on the devices of a mesh. None are if whole bodies are recomputed, which XLA
        would undo, or if weights are gathered layer by layer, which XLA would then do for several layers at once."""
        device = mesh.devices.flat[0]
        is_gathered = any(mesh.shape[axis] > 1 for axis in STORAGE_AXES)
        if not self.unroll or device.platform not in ("cuda", "gpu") or self.recomputes_products or is_gathered:
            return None
        chip = chip_of_kind(device.device_kind)
        return None if chip is None else UnrollLoops(chip, mesh.size)

    def stacks_on(self, mesh: Mesh) -> bool:
        """Returns whether equal blocks become one loop on the devices of a mesh: by default on GPUs and TPUs, where the
        recomputation in loops saves memory, and compilation takes longest, and where products are recomputed."""
        if self.stack_blocks is not None:
            return self.stack_blocks
        return mesh.devices.flat[0].platform != "cpu" or self.recomputes_products

    @property
    def recomputes_products(self) -> bool:
        """Whether the backward pass computes products of loops again."""
        return self.remat_level not in ("none", "matmuls")

    def splits_residual_on(self, mesh: Mesh) -> bool:
        """Returns whether the model axis splits positions between layers on the devices of a mesh.

        By default where it sends at most a tenth more: on GPUs and TPUs, if the backward pass recomputes either nothing or
        products too (`transforms._split_residual`). XLA makes no reduce-scatters for CPUs. TPUs v5e and v6e send 0.97 and
        0.92 of the bytes with `remat="none"`, 1.07 and 1.02 with `"full"`, by the option in `settings_on` (2026-12-01)."""
        if mesh.shape[MODEL] == 1:
            return False
        if self.split_residual is not None:
            return self.split_residual
        return mesh.devices.flat[0].platform != "cpu" and self.remat_level != "matmuls"

    def settings_on(self, mesh: Mesh) -> dict[str, Any]:
        """Returns the XLA options of this step on the devices of a mesh that are not those of `machine.SETTINGS`: their
        values, and None for one that would make it slower, or too large.

        To start an all-gather an iteration early, XLA also repeats what it depends on. For a recomputed residual stream that
        is the sum after attention: 1.18 times the bytes instead of 1.10, and 2.6 GiB of temporaries instead of 2.0 (8
        layers of LLaMA 3 8B's size, compiled for 8 H100 by jax 0.10.2; 2026-11-26).

        XLA for TPUs makes loops of products and permutes (windowed einsums) of the gathers and scatters of a split residual
        stream: on v5e 1.47 times the bytes instead of 0.97 (2 such layers, libtpu 0.0.50.1; 2026-12-01).

        A queue of collectives keeps all weights and gradients of a layer on the device. With `"offload"` memory is short:
        Llama 3.1 70B on 32 v6e would need 31.4 of 31.2 GiB instead of 30.4 (libtpu 0.0.50; 2026-11-30)."""
        settings: dict[str, Any] = {}
        if self.splits_residual_on(mesh):
            if self.recomputes_products:
                settings["xla_gpu_pipeline_all_gather"] = None
            if mesh.devices.flat[0].platform == "tpu":
                settings["xla_jf_spmd_threshold_for_windowed_einsum_mib"] = 1_000_000  # above all
        if self.remat_level == "offload":
            settings["xla_tpu_enable_sparse_core_offload_queuing_in_lhs"] = None
        return settings
