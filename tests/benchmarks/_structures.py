"""Small models with their losses, one per structure that plans must support, for tests and benchmarks of plans.

Each is a function of a key that returns the model, the shape and dtype of one example, and `loss(model, x)` of one example.
Sizes divide over four shards unless the docstring says otherwise.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

SEQ, D, HEADS, F, VOCAB = 64, 64, 8, 256, 384


class Structure(NamedTuple):
    model: Any
    example: jax.ShapeDtypeStruct
    loss: Callable[[Any, Array], Array]


STRUCTURES: dict[str, Callable[[Array], Structure]] = {}


def structure(make: Callable[[Array], Structure]) -> Callable[[Array], Structure]:
    STRUCTURES[make.__name__] = make
    return make


def tokens(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def square(model: Any, x: Array) -> Array:
    return jnp.square(model(x)).mean()


def normal(key: Array, *shape: int) -> Array:
    return jax.random.normal(key, shape) * shape[-1] ** -0.5


# --- fully connected ----------------------------------------------------------------------------------------------------


@structure
def mlp(key: Array) -> Structure:
    return Structure(eqx.nn.MLP(D, D, F, 3, key=key), tokens(D), square)


class SwiGLU(eqx.Module):
    """SwiGLU with its fields in any order; `roles` gives the role of each."""

    a: eqx.nn.Linear
    b: eqx.nn.Linear
    c: eqx.nn.Linear
    roles: tuple[str, str, str] = eqx.field(static=True)

    def __init__(self, roles: tuple[str, str, str], *, key: Array):
        self.roles = roles
        keys = jax.random.split(key, 3)
        make = {role: (F, D) if role == "down" else (D, F) for role in roles}
        self.a, self.b, self.c = (
            eqx.nn.Linear(*make[role], use_bias=False, key=k) for role, k in zip(roles, keys, strict=True)
        )

    def __call__(self, x: Array) -> Array:
        by_role = dict(zip(self.roles, (self.a, self.b, self.c), strict=True))
        gate, up, down = (jax.vmap(by_role[role]) for role in ("gate", "up", "down"))
        return x + down(jax.nn.silu(gate(x)) * up(x))


@structure
def swiglu_gate_up_down(key: Array) -> Structure:
    return Structure(SwiGLU(("gate", "up", "down"), key=key), tokens(SEQ, D), square)


@structure
def swiglu_down_gate_up(key: Array) -> Structure:
    return Structure(SwiGLU(("down", "gate", "up"), key=key), tokens(SEQ, D), square)


@structure
def swiglu_gate_down_up(key: Array) -> Structure:
    return Structure(SwiGLU(("gate", "down", "up"), key=key), tokens(SEQ, D), square)


@structure
def fused_glu(key: Array) -> Structure:
    """One weight for gate and up, whose output is split in two."""
    keys = jax.random.split(key)
    model = {"both": normal(keys[0], 2 * F, D), "down": normal(keys[1], D, F)}

    def loss(model: Any, x: Array) -> Array:
        gate, up = jnp.split(x @ model["both"].T, 2, axis=-1)
        return jnp.square(x + (jax.nn.silu(gate) * up) @ model["down"].T).mean()

    return Structure(model, tokens(SEQ, D), loss)


class Reversed(eqx.Module):
    """Layers that are called in the reverse order of their fields."""

    head: eqx.nn.Linear
    down: eqx.nn.Linear
    up: eqx.nn.Linear

    def __init__(self, *, key: Array):
        keys = jax.random.split(key, 3)
        self.up = eqx.nn.Linear(D, D, key=keys[0])
        self.down = eqx.nn.Linear(D, D, key=keys[1])
        self.head = eqx.nn.Linear(D, D, key=keys[2])

    def __call__(self, x: Array) -> Array:
        return self.head(jax.nn.relu(self.down(jax.nn.relu(self.up(x)))))


@structure
def reversed_fields(key: Array) -> Structure:
    return Structure(Reversed(key=key), tokens(D), square)


@structure
def transposed_autoencoder(key: Array) -> Structure:
    """One weight used twice, the second time transposed."""

    def loss(model: Any, x: Array) -> Array:
        return jnp.square(jax.nn.relu(x @ model["weight"].T) @ model["weight"] - x).mean()

    return Structure({"weight": normal(key, F, D)}, tokens(SEQ, D), loss)


@structure
def square_residual(key: Array) -> Structure:
    """Two square residual layers; either may be split along columns or rows."""
    keys = jax.random.split(key)
    model = [eqx.nn.Linear(D, D, key=k) for k in keys]

    def loss(model: Any, x: Array) -> Array:
        for layer in model:
            x = x + jax.nn.relu(jax.vmap(layer)(x))
        return jnp.square(x).mean()

    return Structure(model, tokens(SEQ, D), loss)


# --- attention ------------------------------------------------------------------------------------------------------------


def attend(q: Array, k: Array, v: Array) -> Array:
    return jax.nn.dot_product_attention(q, k, v)


class Block(eqx.Module):
    norm: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    norm2: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    is_parallel: bool = eqx.field(static=True)

    def __init__(self, is_parallel: bool = False, *, key: Array):
        keys = jax.random.split(key, 3)
        self.norm, self.norm2, self.is_parallel = eqx.nn.LayerNorm(D), eqx.nn.LayerNorm(D), is_parallel
        self.attention = eqx.nn.MultiheadAttention(HEADS, D, key=keys[0])
        self.up, self.down = eqx.nn.Linear(D, F, key=keys[1]), eqx.nn.Linear(F, D, key=keys[2])

    def __call__(self, x: Array) -> Array:
        y = jax.vmap(self.norm)(x)
        attended = self.attention(y, y, y)
        if not self.is_parallel:
            x = x + attended
            y = jax.vmap(self.norm2)(x)
            return x + jax.vmap(self.down)(jax.nn.gelu(jax.vmap(self.up)(y)))
        return x + (attended + jax.vmap(self.down)(jax.nn.gelu(jax.vmap(self.up)(y))))


@structure
def block(key: Array) -> Structure:
    return Structure(Block(key=key), tokens(SEQ, D), square)


@structure
def parallel_block(key: Array) -> Structure:
    """GPT-J's block: attention and MLP have the same input, and both outputs are added to it."""
    return Structure(Block(True, key=key), tokens(SEQ, D), square)


@structure
def scanned_stack(key: Array) -> Structure:
    """A user's stack: blocks created by `filter_vmap` and run by `scan` with remat."""
    model = eqx.filter_vmap(lambda key: Block(key=key))(jax.random.split(key, 3))

    def loss(model: Any, x: Array) -> Array:
        arrays, static = eqx.partition(model, eqx.is_array)
        step = jax.checkpoint(lambda x, arrays: (eqx.combine(arrays, static)(x), None))
        return jnp.square(jax.lax.scan(step, x, arrays)[0]).mean()

    return Structure(model, tokens(SEQ, D), loss)


@structure
def patches_and_blocks(key: Array) -> Structure:
    """A ViT: projected patches, positions, then a list of blocks; the output of the first layer is the residual stream."""
    keys = jax.random.split(key, 3)
    patches = eqx.nn.Linear(D, D, key=keys[2])
    model = {"patches": patches, "positions": jnp.zeros((SEQ, D)), "blocks": [Block(key=k) for k in keys[:2]]}

    def loss(model: Any, x: Array) -> Array:
        x = jax.vmap(model["patches"])(x) + model["positions"]
        for block in model["blocks"]:
            x = block(x)
        return jnp.square(x).mean()

    return Structure(model, tokens(SEQ, D), loss)


def fused_attention(key: Array, heads_first: bool) -> Structure:
    keys = jax.random.split(key, 4)
    model = {
        "qkv": normal(keys[0], 3 * D, D), "output": normal(keys[1], D, D),
        "up": normal(keys[2], F, D), "down": normal(keys[3], D, F),
    }  # fmt: skip

    def loss(model: Any, x: Array) -> Array:
        qkv = x @ model["qkv"].T
        if heads_first:
            q, k, v = jnp.moveaxis(qkv.reshape(SEQ, HEADS, 3, D // HEADS), 2, 0)
        else:
            q, k, v = (part.reshape(SEQ, HEADS, D // HEADS) for part in jnp.split(qkv, 3, axis=-1))
        x = x + attend(q, k, v).reshape(SEQ, D) @ model["output"].T
        return jnp.square(x + jax.nn.gelu(x @ model["up"].T) @ model["down"].T).mean()

    return Structure(model, tokens(SEQ, D), loss)


@structure
def fused_qkv(key: Array) -> Structure:
    """One weight for query, key and value, concatenated in this order, as in common ViT code."""
    return fused_attention(key, heads_first=False)


@structure
def fused_qkv_heads_first(key: Array) -> Structure:
    """One weight in which query, key and value of each head are adjacent, as in Megatron-LM."""
    return fused_attention(key, heads_first=True)


@structure
def einsum_attention(key: Array) -> Structure:
    """Raw arrays with a dim for heads, as in the code of many papers."""
    keys = jax.random.split(key, 6)
    size = D // HEADS
    model = {
        "q": normal(keys[0], D, HEADS, size), "k": normal(keys[1], D, HEADS, size), "v": normal(keys[2], D, HEADS, size),
        "o": normal(keys[3], HEADS, size, D), "up": normal(keys[4], D, F), "down": normal(keys[5], F, D),
    }  # fmt: skip

    def loss(model: Any, x: Array) -> Array:
        q, k, v = (jnp.einsum("td,dhk->thk", x, model[name]) for name in "qkv")
        scores = jax.nn.softmax(jnp.einsum("thk,shk->hts", q, k) / size**0.5, axis=-1)
        x = x + jnp.einsum("thk,hkd->td", jnp.einsum("hts,shk->thk", scores, v), model["o"])
        return jnp.square(x + jax.nn.relu(x @ model["up"]) @ model["down"]).mean()

    return Structure(model, tokens(SEQ, D), loss)


@structure
def grouped_query(key: Array) -> Structure:
    """Eight query heads over two key/value heads."""
    keys = jax.random.split(key, 4)
    size = D // HEADS
    model = {
        "q": normal(keys[0], D, D), "k": normal(keys[1], 2 * size, D), "v": normal(keys[2], 2 * size, D),
        "o": normal(keys[3], D, D),
    }  # fmt: skip

    def loss(model: Any, x: Array) -> Array:
        q, k, v = ((x @ model[name].T).reshape(SEQ, -1, size) for name in "qkv")
        return jnp.square(x + attend(q, k, v).reshape(SEQ, D) @ model["o"].T).mean()

    return Structure(model, tokens(SEQ, D), loss)


@structure
def odd_heads(key: Array) -> Structure:
    """Six heads, which do not divide over four shards although the features do."""
    model = dict(zip("qkvo", (normal(k, 96, 96) for k in jax.random.split(key, 4)), strict=True))

    def loss(model: Any, x: Array) -> Array:
        q, k, v = ((x @ model[name].T).reshape(SEQ, 6, 16) for name in "qkv")
        return jnp.square(x + attend(q, k, v).reshape(SEQ, 96) @ model["o"].T).mean()

    return Structure(model, tokens(SEQ, 96), loss)


@structure
def language_model(key: Array) -> Structure:
    """A tied embedding, one block, cross-entropy over the vocabulary."""
    keys = jax.random.split(key)
    model = {"embedding": eqx.nn.Embedding(VOCAB, D, key=keys[0]), "block": Block(key=keys[1])}

    def loss(model: Any, ids: Array) -> Array:
        x = model["block"](jax.vmap(model["embedding"])(ids))
        logp = jax.nn.log_softmax(x @ model["embedding"].weight.T)
        return -jnp.take_along_axis(logp, jnp.roll(ids, -1)[:, None], axis=-1).mean()

    return Structure(model, jax.ShapeDtypeStruct((SEQ,), jnp.int32), loss)


# --- others -----------------------------------------------------------------------------------------------------------


@structure
def mixture_of_experts(key: Array) -> Structure:
    """A dense mixture of four experts, weighted by a router."""
    keys = jax.random.split(key, 3)
    model = {"router": normal(keys[0], 4, D), "up": normal(keys[1], 4, D, F), "down": normal(keys[2], 4, F, D)}

    def loss(model: Any, x: Array) -> Array:
        weights = jax.nn.softmax(x @ model["router"].T)
        hidden = jax.nn.gelu(jnp.einsum("td,edf->etf", x, model["up"]))
        return jnp.square(x + jnp.einsum("te,etf,efd->td", weights, hidden, model["down"])).mean()

    return Structure(model, tokens(SEQ, D), loss)


class Separable(eqx.Module):
    """Inverted residuals: pointwise, depthwise, pointwise."""

    blocks: list[list[eqx.nn.Conv2d]]
    head: eqx.nn.Linear

    def __init__(self, *, key: Array):
        keys = jax.random.split(key, 7)
        self.blocks = [
            [
                eqx.nn.Conv2d(32, 128, 1, key=keys[3 * i]),
                eqx.nn.Conv2d(128, 128, 3, padding=1, groups=128, key=keys[3 * i + 1]),
                eqx.nn.Conv2d(128, 32, 1, key=keys[3 * i + 2]),
            ]
            for i in range(2)
        ]
        self.head = eqx.nn.Linear(32, 8, key=keys[6])

    def __call__(self, x: Array) -> Array:
        for expand, depthwise, project in self.blocks:
            x = x + project(jax.nn.relu(depthwise(jax.nn.relu(expand(x)))))
        return self.head(x.mean((1, 2)))


@structure
def separable_cnn(key: Array) -> Structure:
    return Structure(Separable(key=key), tokens(32, 8, 8), square)


@structure
def gru(key: Array) -> Structure:
    model = {"cell": eqx.nn.GRUCell(D, D, key=key), "head": eqx.nn.Linear(D, D, key=key)}

    def loss(model: Any, x: Array) -> Array:
        h = jax.lax.scan(lambda h, x: (model["cell"](x, h), None), jnp.zeros(D), x)[0]
        return jnp.square(model["head"](h)).mean()

    return Structure(model, tokens(SEQ, D), loss)


@structure
def state_space(key: Array) -> Structure:
    """Mamba's block: a projection split in two, a depthwise convolution over time, a diagonal recurrence."""
    keys = jax.random.split(key, 6)
    n = 8
    model = {
        "in_proj": normal(keys[0], 2 * F, D), "conv": normal(keys[1], F, 1, 4), "bc_proj": normal(keys[2], 2 * n, F),
        "log_a": jnp.zeros((F, n)), "skip": jnp.ones(F), "out_proj": normal(keys[3], D, F),
    }  # fmt: skip

    def loss(model: Any, x: Array) -> Array:
        u, gate = jnp.split(x @ model["in_proj"].T, 2, axis=-1)
        u = jax.lax.conv_general_dilated(u.T[None], model["conv"], (1,), [(3, 0)], feature_group_count=F)[0].T
        u = jax.nn.silu(u)
        b, c = jnp.split(u @ model["bc_proj"].T, 2, axis=-1)

        def step(h: Array, inputs: Any) -> Any:
            u, b, c = inputs
            h = h * jnp.exp(-jnp.exp(model["log_a"])) + u[:, None] * b
            return h, h @ c

        y = jax.lax.scan(step, jnp.zeros((F, n)), (u, b, c))[1] + u * model["skip"]
        return jnp.square(x + (y * jax.nn.silu(gate)) @ model["out_proj"].T).mean()

    return Structure(model, tokens(SEQ, D), loss)


@structure
def low_rank_adapter(key: Array) -> Structure:
    """A layer with a raw adapter of rank 8, then a narrowing layer."""
    keys = jax.random.split(key, 4)
    model = {
        "up": normal(keys[0], F, D), "a": normal(keys[1], 8, D), "b": normal(keys[2], F, 8), "down": normal(keys[3], D, F),
    }  # fmt: skip

    def loss(model: Any, x: Array) -> Array:
        hidden = x @ model["up"].T + (x @ model["a"].T) @ model["b"].T
        return jnp.square(x + jax.nn.relu(hidden) @ model["down"].T).mean()

    return Structure(model, tokens(SEQ, D), loss)


@cache
def of_shapes(name: str) -> Structure:
    """Returns a structure with shapes in place of arrays: nothing is drawn or compiled."""
    return eqx.filter_eval_shape(STRUCTURES[name], jax.random.key(0))


def batched(loss: Callable[[Any, Array], Array]) -> Callable[..., Array]:
    """Returns the mean loss over a batch, in the form that the Trainer takes."""

    def loss_fn(model: Any, batch: Array, key: Any = None) -> Array:
        return jax.vmap(partial(loss, model))(batch).mean()

    return loss_fn
