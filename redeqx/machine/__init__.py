"""The devices of a run: real, simulated, or described ones, for which programs can be compiled but not run.

Owns the mesh and its three axes, the figures of chips, the choice of devices, and the compiler's settings and cache. It is
independent of models and programs. Open `_mesh.py` first.
"""

from ._chips import (
    DEFAULT_CHIP as DEFAULT_CHIP,
    FP8_DEVICES as FP8_DEVICES,
    GIB as GIB,
    GPUS as GPUS,
    HOST_MEMORY as HOST_MEMORY,
    TPUS as TPUS,
    Chip as Chip,
    chip_of_kind as chip_of_kind,
    has_fp8 as has_fp8,
)
from ._compiler import (
    SETTINGS as SETTINGS,
    XLA_CACHES as XLA_CACHES,
    Compiler as Compiler,
    XlaOptions as XlaOptions,
    XlaSettings as XlaSettings,
    cache_folder as cache_folder,
    cache_text as cache_text,
    cache_use as cache_use,
    compiler_environment as compiler_environment,
    configured as configured,
    start_cache as start_cache,
    uncached_where_described as uncached_where_described,
    use_cache_folder as use_cache_folder,
    xla_settings as xla_settings,
)
from ._devices import (
    USABLE as USABLE,
    Machine as Machine,
    as_zeros as as_zeros,
    describe as describe,
    described as described,
    dry as dry,
    dry_for as dry_for,
    host_memory as host_memory,
    of_devices as of_devices,
    peak_memory as peak_memory,
    simulate_devices as simulate_devices,
)
from ._mesh import (
    BATCH_AXES as BATCH_AXES,
    FSDP as FSDP,
    MODEL as MODEL,
    SEQUENCE as SEQUENCE,
    STORAGE_AXES as STORAGE_AXES,
    axes_of as axes_of,
    copied as copied,
    in_host as in_host,
    is_in_host as is_in_host,
    make_mesh as make_mesh,
    mesh_text as mesh_text,
    n_batch_shards as n_batch_shards,
    n_shards as n_shards,
    put as put,
    replicated as replicated,
    sharding_of as sharding_of,
    split_heads as split_heads,
    split_rows as split_rows,
)
