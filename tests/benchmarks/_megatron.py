"""A GPT-2 training step split by hand, as in Megatron-LM and ZeRO-3: the baseline of the plan benchmarks.

The weights are plain arrays in a dict, with Megatron's specs, and each is gathered by hand where it is used. The maths and
sizes are those of `redeqx.models.gpt2` without dropout.

Dims: L layers, d width, h heads, f = 4 d, v vocabulary, b batch, s tokens, c = 3 for query, key and value.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P


def weights(
    *, n_layers: int, d: int, vocab_size: int, n_positions: int, fused: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the shapes and the specs of the weights; those of blocks have a leading dim L.

    The model axis splits the output dim of column layers (q, k, v, up) and the input dim of row layers (output, down); the
    fsdp axis splits the other dim. Both axes split the vocabulary of the embedding.
    """
    column, row = P(None, "model", "fsdp"), P(None, "fsdp", "model")
    table = {
        "embedding": ((vocab_size, d), P(("model", "fsdp"), None)),
        "positions": ((n_positions, d), P(None, "fsdp")),
        "norm": ((2, d), P()),  # scale and offset
        "blocks": {
            "norms": ((n_layers, 2, 2, d), P()),
            "qkv": ((n_layers, 3, d, d), P(None, *column)) if fused else [((n_layers, d, d), column)] * 3,
            "qkv_bias": ((n_layers, 3, d), P(None, None, "model")),
            "output": ((n_layers, d, d), row),
            "output_bias": ((n_layers, d), P()),
            "up": ((n_layers, 4 * d, d), column),
            "up_bias": ((n_layers, 4 * d), P(None, "model")),
            "down": ((n_layers, d, 4 * d), row),
            "down_bias": ((n_layers, d), P()),
        },
    }
    entries, treedef = jax.tree.flatten(table, is_leaf=lambda node: isinstance(node, tuple))
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape, _ in entries]
    return treedef.unflatten(shapes), treedef.unflatten([spec for _, spec in entries])


def gather_at_use(weight: jax.Array, spec: P, mesh: Mesh) -> jax.Array:
    """Gathers a weight along the fsdp axis; the backward pass reshards its gradient to the storage sharding."""
    storage = NamedSharding(mesh, spec)
    compute = NamedSharding(mesh, P(*("model" if "model" in (axes or ()) else None for axes in spec)))

    @jax.custom_vjp
    def gather(weight):
        return jax.lax.with_sharding_constraint(weight, compute)

    gather.defvjp(lambda w: (gather(w), None), lambda _, g: (jax.lax.with_sharding_constraint(g, storage),))
    return gather(weight)


def keep_nothing_gathered(primitive: Any, *_: Any, **__: Any) -> bool:
    """The `jax.checkpoint` policy that saves all activations but no gathered weight."""
    # The two primitives of `gather_at_use`; a policy is called for both.
    return primitive.name not in ("sharding_constraint", "custom_vjp_call")


def compile_step(
    mesh: Mesh,
    *,
    n_layers: int,
    d: int,
    n_heads: int,
    vocab_size: int,
    n_positions: int,
    batch: int,
    seq: int,
    remat: bool,
    fused: bool,
) -> jax.stages.Compiled:
    """Compiles one AdamW step on a batch of token ids `[batch, seq]` for the mesh.

    **Arguments:**

    - `remat`: whether the backward pass recomputes each block.
    - `fused`: whether one matmul computes query, key and value, as in Megatron-LM; the gradient of their input is then
        summed over the model axis once on all backends. With three matmuls, the CPU compiler sums three times.
    """
    is_fsdp = mesh.shape["fsdp"] > 1
    params, specs = weights(n_layers=n_layers, d=d, vocab_size=vocab_size, n_positions=n_positions, fused=fused)

    def gathered(params: Any, where: Any, n_stacked: int) -> Any:
        if not is_fsdp:
            return params
        return jax.tree.map(lambda w, spec: gather_at_use(w, P(*spec[n_stacked:]), mesh), params, where)

    def norm(x, scale_and_offset):
        scale, offset = scale_and_offset
        centred = x - x.mean(-1, keepdims=True)
        return centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5) * scale + offset

    def block(x, layer):
        w = gathered(layer, specs["blocks"], 1)
        h = norm(x, w["norms"][0])
        if fused:
            qkv = jnp.einsum("bsd,ced->cbse", h, w["qkv"]) + w["qkv_bias"][:, None, None]
        else:
            qkv = [jnp.einsum("bsd,ed->bse", h, w["qkv"][c]) + w["qkv_bias"][c] for c in range(3)]
        heads = (*x.shape[:2], n_heads, d // n_heads)
        h = jax.nn.dot_product_attention(*(y.reshape(heads) for y in qkv), is_causal=True).reshape(x.shape)
        x = x + (jnp.einsum("bsd,ed->bse", h, w["output"]) + w["output_bias"])
        h = jax.nn.gelu(jnp.einsum("bsd,fd->bsf", norm(x, w["norms"][1]), w["up"]) + w["up_bias"])
        return x + (jnp.einsum("bsf,df->bsd", h, w["down"]) + w["down_bias"]), None

    if remat:
        block = jax.checkpoint(block, prevent_cse=False)
    elif is_fsdp:
        block = jax.checkpoint(block, policy=keep_nothing_gathered, prevent_cse=False)

    @partial(jax.checkpoint, policy=keep_nothing_gathered)
    def head(x, w):
        w = gathered(w, {name: specs[name] for name in w}, 0)
        return jnp.einsum("bsd,vd->bsv", norm(x, w["norm"]), w["embedding"])

    def loss_fn(params, ids):
        outer = {name: spec for name, spec in specs.items() if name != "blocks"}
        w = gathered({name: params[name] for name in outer}, outer, 0)
        x, _ = jax.lax.scan(block, w["embedding"][ids] + w["positions"][: ids.shape[1]], params["blocks"])
        logits = head(x, {name: params[name] for name in ("norm", "embedding")})
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], ids[:, 1:]).mean()

    placed = jax.tree.map(lambda _, spec: NamedSharding(mesh, spec), params, specs)
    return compile_adamw_step(loss_fn, params, placed, jax.ShapeDtypeStruct((batch, seq), jnp.int32), mesh)


def compile_adamw_step(loss_fn: Any, params: Any, placed: Any, ids: jax.ShapeDtypeStruct, mesh: Mesh) -> jax.stages.Compiled:
    """Compiles a step of `loss_fn(params, ids)` with parameters and optimizer state sharded as `placed`; rows are split."""
    optimizer = optax.adamw(1e-3)

    def step(params, opt_state, ids):
        loss, grads = jax.value_and_grad(loss_fn)(params, ids)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    replicated = NamedSharding(mesh, P())
    opt_state = jax.eval_shape(optimizer.init, params)
    opt_placed = optax.tree_utils.tree_map_params(
        optimizer, lambda _, where: where, opt_state, placed, transform_non_params=lambda _: replicated
    )
    jitted = jax.jit(
        step,
        donate_argnums=(0, 1),
        in_shardings=(placed, opt_placed, NamedSharding(mesh, P(("data", "fsdp")))),
        out_shardings=(placed, opt_placed, replicated),
    )
    return jitted.lower(params, opt_state, ids).compile()
