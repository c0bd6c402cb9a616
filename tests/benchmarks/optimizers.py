"""State and traffic of optimizers: bytes of state per device, and bytes sent per train step. Nothing is timed.

    python tests/benchmarks/optimizers.py            # 8 simulated devices

Trains the user's model of `collectives.py` (plain `eqx.nn` layers in a list of blocks) with AdamW, AdamW with small moments,
redeqx's Muon, and optax's Muon with a mask of the matrices of hidden layers. Both Muons compute the same updates, but for
optax's the compiler decides how to split the iterations. Arrays are counted as in `collectives.py`. The CPU compiler emits
no reduce-scatter, so gradients are all-reduced in all rows. Takes a minute.
"""

import argparse
import math
from typing import Any

import jax
import numpy as np
import optax
from collectives import BATCH, MAX_SCALAR, MESHES, SEQ, SIZES, LanguageModel, loss_fn

import redeqx
from redeqx.compiled import Module, collectives
from redeqx.optimizers import adamw, muon

OPTIMIZERS = {
    "optax.adamw": lambda is_matrix: optax.adamw(1e-3),
    'adamw(moments="bfloat16")': lambda is_matrix: adamw(1e-3, moments="bfloat16"),
    'adamw(moments="8bit")': lambda is_matrix: adamw(1e-3, moments="8bit"),
    "muon": lambda is_matrix: muon(1e-3),
    "optax.contrib.muon": lambda is_matrix: optax.contrib.muon(1e-3, muon_weight_dimension_numbers=is_matrix),
}


def matrices(model: Any) -> Any:
    """Returns for optax's Muon which leaves are matrices of hidden layers."""
    dims = optax.contrib.MuonDimensionNumbers()

    def of(path: Any, leaf: Any) -> Any:
        return dims if jax.tree_util.keystr(path).startswith(".blocks") and getattr(leaf, "ndim", 0) == 2 else None

    return jax.tree_util.tree_map_with_path(of, model)


def measure(name: str, n_layers: int, n_model_shards: int, n_fsdp_shards: int) -> tuple[int, int, float]:
    """Returns the bytes of state per device, and the arrays and bytes that one device sends per step."""
    deployer = redeqx.Deployer(n_model_shards=n_model_shards, n_fsdp_shards=n_fsdp_shards, verbose=False)
    model = LanguageModel(n_layers, SIZES["d"], SIZES["n_heads"], SIZES["vocab_size"], key=jax.random.key(0))
    trainer = redeqx.Trainer(
        deployer, model=model, optimizer=OPTIMIZERS[name](matrices), collate_fn=np.stack, loss_fn=loss_fn
    )
    examples = list(np.zeros((BATCH, SEQ), np.int32))
    mesh = deployer.mesh
    step = trainer.compile(examples, BATCH // (mesh.shape["data"] * mesh.shape["fsdp"]))
    found = [c for c in collectives(Module.of(step.as_text() or "")) if c.bytes > MAX_SCALAR]
    leaves = [x for x in jax.tree.leaves(trainer.opt_state) if hasattr(x, "sharding")]
    held = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)
    return held, sum(c.n_executions for c in found), sum(c.moved for c in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--meshes", nargs="+", choices=MESHES, default=list(MESHES))
    parser.add_argument("--layers", type=int, default=2)
    args = parser.parse_args()
    redeqx.simulate_devices(8)
    for mesh in args.meshes:
        print(f"{mesh:28}{'state, MiB a device':>22}{'arrays sent':>14}{'a device sends, MB':>22}")
        for name in args.optimizers:
            held, n, sent = measure(name, args.layers, *MESHES[mesh])
            print(f"  {name:26}{held / 2**20:22.2f}{n:14}{sent / 1e6:22.2f}", flush=True)


if __name__ == "__main__":
    main()
