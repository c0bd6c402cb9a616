"""How many tiles a grouped matmul has for given sizes of its groups, which a compiled program does not tell."""

import jax
import jax.numpy as jnp

from redeqx.kernels import _megablox, _tiles
from redeqx.kernels._grouped_lowering import ON_CPU, ON_GPU, _Local


def n_grouped_tiles(group_sizes: jax.Array, n_rows: int, platform: str, n_devices: int = 1) -> tuple[jax.Array, int]:
    """Returns the number of tiles in which each device of a platform multiplies its sorted rows, and the rows of a tile."""
    sizes, mean, n_local = group_sizes[None], n_rows / len(group_sizes), -(-n_rows // n_devices)
    of_devices = [_Local(sizes, n_local, i * n_local, mean) for i in range(n_devices)]
    if platform == "tpu":
        size = _megablox.n_tile_rows(mean)
        bounds = (local.bounds for local in of_devices)  # a tile is multiplied for each group that has rows in it
        counts = [jnp.sum(jnp.where(ends > starts, -(-ends // size) - starts // size, 0)) for starts, ends in bounds]
        return jnp.stack(counts), size
    size = min(_tiles.n_tile_rows(mean, (ON_CPU if platform == "cpu" else ON_GPU).min_rows), n_local)
    return jnp.stack([_tiles._Tiles(local.groups(1), n_local, size).after[-1] for local in of_devices]), size
