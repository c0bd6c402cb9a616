"""Grouped matmuls as compilers make them: 16384 rows of 2048 in 16 groups, to 4096, in bfloat16. Nothing is run.

*FLOPs* are those of the compiled program over those of the rows, for three distributions of rows over groups; a loop over
tiles counts with the tiles that a distribution has. *Temporaries* are the compiler's. `--time` runs and times them instead,
in float32 at a smaller size, on this machine.

    JAX_PLATFORMS=cpu python tests/benchmarks/grouped.py [--topology gpu:h100-80gb:1 | v5e:2x4 | this]
    JAX_PLATFORMS=cpu python tests/benchmarks/grouped.py --time
"""

import argparse
import math
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_gpu_autotune_level=0")  # there is no GPU to time kernels on

import jax
import jax.numpy as jnp
import numpy as np
from _grouped_tiles import n_grouped_tiles
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from redeqx.compiled import Module
from redeqx.compiled._repeated_work import flops_by_line
from redeqx.kernels import grouped_matmul
from redeqx.machine import describe

ROWS, INPUTS, OUTPUTS, GROUPS = 16384, 2048, 4096, 16


def distributions(n_rows: int, n_groups: int) -> dict[str, np.ndarray]:
    """Returns sizes of groups: equal, as 1 / rank (Zipf's law), and all rows in one group."""
    share = 1 / np.arange(1, n_groups + 1)
    zipf = np.floor(n_rows * share / share.sum()).astype(np.int32)
    zipf[0] += n_rows - zipf.sum()
    one = np.zeros(n_groups, np.int32)
    one[n_groups // 2] = n_rows
    return {"equal": np.full(n_groups, n_rows // n_groups, np.int32), "1 / rank": zipf, "one group": one}


def by_dense(x: Any, weights: Any, sizes: Any) -> Any:
    """One matmul of all rows, the best that there is."""
    return x @ weights[0]


FNS: dict[str, Callable[..., Any]] = {
    "redeqx": grouped_matmul,
    "jax.lax.ragged_dot": jax.lax.ragged_dot,
    "one matmul of all rows": by_dense,
}


def with_gradients(fn: Callable[..., Any]) -> Callable[..., Any]:
    def total(x: Any, weights: Any, sizes: Any) -> Any:
        return jnp.square(fn(x, weights, sizes).astype(jnp.float32)).sum()

    return jax.grad(total, (0, 1))


def lines_of(module: Module) -> Iterator[Any]:
    return chain.from_iterable(module.computations.values())


def flops(compiled: Any, platform: str, name: str, sizes: np.ndarray) -> float:
    """Returns the FLOPs of a program. A loop of unknown length has one iteration for each tile.

    Megablox declares the FLOPs of the rows, whatever its tiles are: these are counted instead.
    """
    counts, size = n_grouped_tiles(jnp.asarray(sizes), int(sizes.sum()), platform)
    is_tiled = FNS[name] is grouped_matmul
    if platform == "tpu":  # whose matmuls are inside fusions and kernels
        return compiled.cost_analysis()["flops"] * (int(counts[0]) * size / int(sizes.sum()) if is_tiled else 1)
    return sum(flops_by_line(Module.of(compiled.as_text())).all.values()) * (int(counts[0]) if is_tiled else 1)


def report(topology: str) -> None:
    device = jax.devices()[0] if topology == "this" else describe(topology).devices[0]
    mesh = Mesh(np.array([device]), ("x",))
    struct = partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, P()))
    args = (
        struct((ROWS, INPUTS), jnp.bfloat16),
        struct((GROUPS, INPUTS, OUTPUTS), jnp.bfloat16),
        struct((GROUPS,), jnp.int32),
    )
    sizes = distributions(ROWS, GROUPS)
    print(f"{topology:15s} {'':24s} {'':10s} " + "".join(f"{name:>10s}" for name in sizes) + f" {'temporaries':>12s}")
    for name, fn in FNS.items():
        for what, of, n in (("forward", fn, 1), ("gradients", with_gradients(fn), 3)):
            compiled = jax.jit(of).lower(*args).compile()
            ideal = 2 * ROWS * INPUTS * OUTPUTS * n
            ratios = [flops(compiled, device.platform, name, each) / ideal for each in sizes.values()]
            temporaries = compiled.memory_analysis().temp_size_in_bytes / 2**20
            wide = GROUPS * ROWS * min(INPUTS, OUTPUTS)
            arrays = (array for line in lines_of(Module.of(compiled.as_text())) for array in line.arrays)
            largest = max(math.prod(array.shape) for array in arrays)
            print(
                f"{topology:15s} {name:24s} {what:10s} "
                + "".join(f"{ratio:10.2f}" for ratio in ratios)
                + f" {temporaries:8.0f} MiB{'  [groups, rows, d] in the program' if largest >= wide else ''}",
                flush=True,
            )


def run_and_time(n_rows: int = 4096, k: int = 512, n: int = 1024) -> None:
    keys = jax.random.split(jax.random.key(0), 2)
    x, weights = jax.random.normal(keys[0], (n_rows, k)), jax.random.normal(keys[1], (GROUPS, k, n))
    for label, sizes in distributions(n_rows, GROUPS).items():
        for name, fn in FNS.items():
            jitted = [jax.jit(fn), jax.jit(with_gradients(fn))]
            seconds = []
            for each in jitted:
                jax.block_until_ready(each(x, weights, sizes))
                times = []
                for _ in range(5):
                    start = time.perf_counter()
                    jax.block_until_ready(each(x, weights, sizes))
                    times.append(time.perf_counter() - start)
                seconds.append(min(times))
            forward, gradients = (1e3 * each for each in seconds)
            print(f"{label:10s} {name:24s} forward {forward:8.1f} ms  gradients {gradients:8.1f} ms", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topology", nargs="*", default=["this", "v5e:2x4", "gpu:h100-80gb:1"])
    parser.add_argument("--time", action="store_true")
    options = parser.parse_args()
    if options.time:
        run_and_time()
    else:
        for topology in options.topology:
            report(topology)
