"""How many tiles a grouped matmul has for given sizes of its groups, which a compiled program does not tell."""

import jax
import jax.numpy as jnp

from redeqx.kernels import _megablox, _tiles
from redeqx.kernels._grouped_lowering import ON_CPU, ON_GPU, groups_of
from redeqx.transforms._group_matmuls import sizes_of_rows


def n_grouped_tiles(group_sizes: jax.Array, n_rows: int, platform: str, n_devices: int = 1) -> tuple[jax.Array, int]:
    """Returns the number of tiles in which each device of a platform multiplies its sorted rows, and the rows of a tile."""
    mean, n_local = n_rows / len(group_sizes), -(-n_rows // n_devices)
    of_devices = [sizes_of_rows(group_sizes[None], i * n_local, n_local) for i in range(n_devices)]
    if platform == "tpu":
        size = _megablox.n_tile_rows(mean)
        bounds = ((jnp.cumsum(sizes) - sizes[0], jnp.cumsum(sizes)) for sizes in of_devices)
        # A tile is multiplied for each group that has rows in it.
        counts = [jnp.sum(jnp.where(ends > starts, -(-ends // size) - starts // size, 0)) for starts, ends in bounds]
        return jnp.stack(counts), size
    size = min(_tiles.n_tile_rows(mean, (ON_CPU if platform == "cpu" else ON_GPU).min_rows), n_local)
    groups = (groups_of(sizes, n_local, shares_matrices=True) for sizes in of_devices)
    return jnp.stack([_tiles._Tiles(each, n_local, size).after[-1] for each in groups]), size
