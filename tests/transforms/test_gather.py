"""Weights gathered at their use: values and gradients equal the unsharded ones, the batch stays split, and the program keeps
the user's name scopes and source lines."""

import math
import re
import traceback

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import redeqx
from redeqx.compiled import Module, collectives
from redeqx.machine import describe, make_mesh, split_rows
from redeqx.models.gpt2 import GPT2, GPT2Config
from redeqx.partition import make_plan
from redeqx.tracing import equations, transformed
from redeqx.transforms import GatherAtUse, Shardings
from tests._programs import computed

MESHES = {"fsdp=8": (1, 8), "data=2, fsdp=2, model=2": (2, 2)}  # n_model_shards, n_fsdp_shards
BATCH, D, LAYERS = 16, 16, 3
# The tests are about the program, not about LLVM's optimisation of it.
QUICK = {"xla_backend_optimization_level": "0"}


def gather_at_use(fn, shardings):
    """`fn` with the arrays of its first argument gathered at their use."""
    return transformed(fn, [GatherAtUse(shardings)])


def shardings_for(shape, mesh, n_stacked=0):
    """Splits the last two dims over model and fsdp, a vector over fsdp, and never a stacked dim."""
    storage = (
        P(*[None] * (len(shape) - 2), "model", "fsdp") if len(shape) - n_stacked > 1 else P(*[None] * n_stacked, "fsdp")
    )
    compute = P(*(None if axis == "fsdp" else axis for axis in storage))
    return Shardings(NamedSharding(mesh, storage), NamedSharding(mesh, compute))


def random_weights_and_batch(shapes):
    rng = np.random.default_rng(0)
    weights = [rng.standard_normal(shape, np.float32) / shape[-1] ** 0.5 for shape in shapes]
    return weights, rng.standard_normal((BATCH, D), np.float32)


CASES = {}


def case(*shapes, rtol=1e-5, atol=1e-6, name=None):
    """Registers a function of the batch and of weights with these shapes; its loss is the mean square of the output."""

    def register(fn):
        CASES[name or fn.__name__] = (fn, shapes, rtol, atol)
        return fn

    return register


def loss_of(fn):
    def loss(weights, x):
        return jnp.mean(jnp.square(fn(x, *weights)).astype(jnp.float32))

    return loss


# --- what users write -------------------------------------------------------------------------------------------------


def block(x, up, down):
    return x + jnp.tanh(x @ up) @ down


UP, DOWN, MATRIX = (D, 4 * D), (4 * D, D), (D, D)
STACKED_UP, STACKED_DOWN, STACKED = (LAYERS, *UP), (LAYERS, *DOWN), (LAYERS, *MATRIX)


@case(UP, DOWN, UP, DOWN)
def unstacked(x, *weights):
    for up, down in zip(weights[::2], weights[1::2], strict=True):
        x = block(x, up, down)
    return x


@case(STACKED_UP, STACKED_DOWN)
def scanned(x, ups, downs):
    return jax.lax.scan(lambda x, layer: (block(x, *layer), None), x, (ups, downs))[0]


REMATS = {
    "checkpoint": jax.checkpoint,
    "dots_saveable": lambda fn: jax.checkpoint(fn, policy=jax.checkpoint_policies.dots_saveable),
    "everything_saveable": lambda fn: jax.checkpoint(fn, policy=jax.checkpoint_policies.everything_saveable),
    "filter_checkpoint": eqx.filter_checkpoint,
}
for remat_name, remat in REMATS.items():

    @case(UP, DOWN, name=f"unstacked, {remat_name}")
    def rematerialised(x, up, down, remat=remat):
        return remat(block)(remat(block)(x, up, down), up, down)

    @case(STACKED_UP, STACKED_DOWN, name=f"scanned, {remat_name}")
    def scanned_remat(x, ups, downs, remat=remat):
        return jax.lax.scan(lambda x, layer: (remat(block)(x, *layer), None), x, (ups, downs))[0]


@case((2, LAYERS, *MATRIX))
def scan_of_scans(x, weights):
    def outer(x, layers):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, layers)

    return jax.lax.scan(outer, x, weights)[0]


@case(UP, DOWN)
def jit_inside(x, up, down):
    return jax.jit(jax.jit(block))(x, up, down)


@case(MATRIX, (D,))
def jit_that_closes_over_arrays(x, w, bias):
    scale = jnp.arange(D, dtype=x.dtype) + np.linspace(0, 1, D, dtype=np.float32)

    @jax.jit
    def part(x):
        return jnp.tanh(x @ w) * scale + bias

    return part(part(x))


@case(MATRIX)
def scan_with_a_weight_as_constant(x, w):
    return jax.lax.scan(lambda x, t: (jnp.tanh(x @ w + t), None), x, jnp.arange(3.0))[0]


@case(MATRIX, MATRIX)
def recurrent_network(x, w_input, w_state):
    steps = jnp.stack([x, x + 1, x * 2])

    def cell(state, x):
        state = jnp.tanh(x @ w_input + state @ w_state)
        return state, state

    return jax.lax.scan(cell, jnp.zeros_like(x), steps)[1]


@case(STACKED_UP, STACKED_DOWN)
def scan_over_the_layer_index(x, ups, downs):
    def body(x, i):
        return block(x, ups[i], jax.lax.dynamic_index_in_dim(downs, i, keepdims=False)), None

    return jax.lax.scan(body, x, jnp.arange(LAYERS))[0]


@case(MATRIX)
def scan_with_a_weight_in_its_carry(x, w):
    def body(carry, _):
        x, w = carry
        return (jnp.tanh(x @ w), w), None

    return jax.lax.scan(body, (x, w), length=3)[0][0]


@case(STACKED)
def fori_loop(x, ws):
    return jax.lax.fori_loop(0, LAYERS, lambda i, x: jnp.tanh(x @ ws[i]), x)


@case(MATRIX, MATRIX)
def while_loop(x, w, v):
    """Power iteration in a while loop, which has no reverse-mode derivative, beside a differentiable path."""
    frozen = jax.lax.stop_gradient(w)

    def body(carry):
        i, u = carry
        return i + 1, frozen @ u / jnp.linalg.norm(frozen @ u)

    _, u = jax.lax.while_loop(lambda carry: carry[0] < 3, body, (0, jnp.ones(D)))
    return x @ (v / jnp.linalg.norm(jax.lax.stop_gradient(u @ w)))


@case(UP, DOWN, STACKED)
def barriers(x, up, down, ws):
    """A barrier returns its operands, so weights pass it in their storage sharding."""
    x, up, down = jax.lax.optimization_barrier((x, up.T, down))

    def body(x, w):
        w, x = jax.lax.optimization_barrier((w, x))
        return jnp.tanh(x @ w), None

    return jax.lax.scan(body, block(x, up.T, down), ws)[0]


@case(UP, DOWN, MATRIX)
def cond_and_switch(x, up, down, w):
    x = jax.lax.cond(x.sum() > 1e6, lambda x: x, lambda x: block(x, up, down), x)
    return jax.lax.switch(jnp.int32(1), [lambda x: x, lambda x: jnp.tanh(x @ w), lambda x: x @ w], x)


@jax.custom_jvp
def _jvp_matmul(x, w):
    return jnp.sin(x @ w)


@_jvp_matmul.defjvp
def _(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    return _jvp_matmul(x, w), jnp.cos(x @ w) * (dx @ w + x @ dw)


@jax.custom_vjp
def _vjp_matmul(x, w):
    return jnp.tanh(x @ w)


_vjp_matmul.defvjp(
    lambda x, w: (jnp.tanh(x @ w), (x, w)),
    lambda saved, g: (g @ saved[1].T, saved[0].T @ g),  # not the true gradient: the custom one must be kept
)


@case(MATRIX, MATRIX)
def custom_derivatives(x, w, v):
    return _vjp_matmul(_jvp_matmul(x, w), v)


@case(UP, (4 * D,), DOWN)
def vmapped(x, up, bias, down):
    return jax.vmap(lambda row: down.T @ jax.nn.gelu(up.T @ row + bias))(x)


@case(STACKED)
def vmapped_over_weights(x, ws):
    return jax.vmap(lambda w: jnp.tanh(x @ w))(ws)


@case((64, D), (32, D))
def tied_and_sliced(x, embedding, positions):
    ids = jnp.arange(BATCH)[:, None] * 5 % 64
    h = embedding[ids[:, 0]] + positions[:BATCH] + positions[3]
    h = h + embedding.at[ids[:, 0]].get(mode="fill")
    return (x + h) @ embedding.T


@case((3, *MATRIX), (2 * D, D))
def fused(x, qkv, gate_up):
    q, k, v = qkv @ x.T
    gate, up = jnp.split(gate_up @ x.T, 2)
    first, second = jnp.split(gate_up, 2)
    return q * k + v * jax.nn.silu(gate) * up + qkv[0] @ (first + second)


@case((4, D, 2, 8))
def raw_arrays_in_einsum(x, w):
    heads = jnp.einsum("bd,sdhe->sbhe", x, w)
    return jnp.einsum("bhe,dhe->bd", heads[0] * heads[1], w[2]) + jnp.einsum(
        "bd,dhe,hef->bf", x, w[3], w[1].reshape(2, 8, D)
    )


@case(UP, DOWN, STACKED, MATRIX, rtol=8e-3, atol=1e-5)  # bfloat16 rounds the sums of gradients once
def casts_to_more_bits(x, *weights):
    up, down, stack, matrix = (w.astype(jnp.bfloat16).astype(jnp.float32) for w in weights)
    x = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), block(x, up, down), stack)[0]
    return x * jnp.mean(matrix.T[1:], 0) + x @ matrix


@case(UP, DOWN, rtol=2e-2, atol=1e-3)  # bfloat16 has 8 bits: partial sums round differently
def bfloat16_compute(x, up, down):
    return block(x.astype(jnp.bfloat16), up.astype(jnp.bfloat16), down.astype(jnp.bfloat16))


@case(MATRIX, MATRIX)
def prints_and_error_checks(x, w, v):
    jax.debug.print("{}", w[0, 0] * 0, ordered=False)
    w = eqx.error_if(w, jnp.any(jnp.isnan(w)), "not a number")
    x = eqx.error_if(x @ w, jnp.any(v > 1e6), "too large")
    return x @ v


@case(MATRIX, MATRIX)
def inner_gradient(x, w, v):
    """As in MAML: an update on one half of the batch, the loss on the other half."""

    def inner(w, v):
        return jnp.mean(jnp.square(jnp.tanh(x[:8] @ w) @ v - 1))

    dw, dv = jax.grad(inner, (0, 1))(w, v)
    return jnp.tanh(x[8:] @ (w - 0.1 * dw)) @ (v - 0.1 * dv)


@case(STACKED)
def gradient_of_gradient(x, ws):
    def energy(x):
        return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0] ** 2)

    return jax.grad(lambda x: jnp.sum(jax.grad(energy)(x) ** 2))(x)


@case(MATRIX)
def scan_over_a_split_dim(x, w):
    return jax.lax.scan(lambda x, row: (jnp.tanh(x + row), None), x, w)[0]


@case(MATRIX, MATRIX)
def remat_of_a_jit_that_closes_over_arrays(x, w, v):
    mask = np.tri(D, dtype=np.float32)

    @jax.checkpoint
    def part(x, w):
        return jax.jit(lambda x: jnp.tanh(x @ (w * mask)) @ v)(x)

    return part(part(x, w), w)


@case(MATRIX)
def lax_map(x, w):
    return jax.lax.map(lambda row: jnp.tanh(row @ w), x)


@case(MATRIX, MATRIX, MATRIX)
def stacked_inside_the_loss(x, u, v, w):
    ws = jnp.stack([u, v, w], axis=1)
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, jnp.moveaxis(ws, 1, 0))[0] + x @ jnp.stack([u, w.T])[1]


@case(STACKED, (LAYERS, D, 8), (LAYERS, 8, D))
def frozen_stack_with_adapters(x, ws, a, b):
    def body(x, layer):
        w, a, b = layer
        return jnp.tanh(x @ w + x @ a @ b), None

    return jax.lax.scan(body, x, (jax.lax.stop_gradient(ws), a, b))[0]


@case(MATRIX)
def unused_outputs(x, w):
    largest = jax.jit(lambda w: jax.lax.top_k(w, 2))(w)[0]
    return jnp.sort(x @ w) + largest.sum()


@pytest.mark.parametrize(
    ("names", "mesh_name"),
    [
        ([*CASES][::2], "data=2, fsdp=2, model=2"),
        pytest.param([*CASES][1::2], "data=2, fsdp=2, model=2", marks=pytest.mark.sweep),
        pytest.param([*CASES][::2], "fsdp=8", marks=pytest.mark.sweep),
    ],
    ids=["data=2, fsdp=2, model=2", "data=2, fsdp=2, model=2, others", "fsdp=8"],
)
def test_values_and_gradients_equal_the_unsharded_ones(names, mesh_name):
    mesh, plain, gathered = make_mesh(*MESHES[mesh_name]), {}, {}
    for name in names:
        fn, shapes, *_ = CASES[name]
        weights, x = random_weights_and_batch(shapes)
        shardings = [shardings_for(shape, mesh, n_stacked=int(shape[0] == LAYERS)) for shape in shapes]
        placed = [jax.device_put(weight, sharding.storage) for weight, sharding in zip(weights, shardings, strict=True)]
        plain[name] = jax.value_and_grad(loss_of(fn)), (weights, x)
        gathered[name] = (
            jax.value_and_grad(gather_at_use(loss_of(fn), shardings)),
            (placed, jax.device_put(x, split_rows(mesh))),
        )
    found, wanted = (computed(cases, compiler_options=QUICK) for cases in (gathered, plain))
    jax.effects_barrier()
    for name in names:
        _, _, rtol, atol = CASES[name]
        for got, expected in zip(jax.tree.leaves(found[name]), jax.tree.leaves(wanted[name]), strict=True):
            scale = max(1.0, np.abs(expected).max())
            np.testing.assert_allclose(got, expected, rtol=rtol, atol=atol * scale, err_msg=name)


def test_stack_of_transposed_weights_has_their_transposed_shardings():
    """At the stack, in storage and in compute: a stack with the stored order of dims would be resharded in each step."""
    mesh = make_mesh(2, 2)
    one = shardings_for((4 * D, D), mesh)  # over model, fsdp
    weights = [jax.ShapeDtypeStruct((4 * D, D), jnp.float32)] * LAYERS

    def loss(weights, x):
        return (x @ jnp.stack([w.T for w in weights], axis=1)[:, 1]).sum()

    traced = jax.make_jaxpr(gather_at_use(loss, [one] * LAYERS))(weights, jax.ShapeDtypeStruct((BATCH, D), jnp.float32))
    constraints = [eqn for eqn in equations(traced) if eqn.primitive.name == "sharding_constraint"]
    of_stack, of_slice = (
        {eqn.params["sharding"].spec for eqn in constraints if eqn.outvars[0].aval.shape == (D, n, 4 * D)}
        for n in (LAYERS, 1)
    )
    assert of_stack == {P("fsdp", None, "model")}
    assert of_slice == {P("fsdp", None, "model"), P(None, None, "model")}


# --- the batch stays split --------------------------------------------------------------------------------------------

ROWS, SEQ, WIDTH = 48, 5, 32  # no size of a weight, split or not, equals one of the batch
DROPOUTS = ("embedding_dropout", "attention_dropout", "residual_dropout")
N_WEIGHTS = 2  # per layer: one is used transposed, as in `eqx.nn.Linear`, the other is not


def layer_with_two_layouts(x, layer):
    up, down = layer
    return x + jnp.tanh(x @ up.T) @ down, None


def unstacked_loss(weights, x):
    shift, *weights = weights  # without it, the backward pass would not need the first layer's weight

    def model(x):
        for layer in zip(weights[::2], weights[1::2], strict=True):
            x, _ = layer_with_two_layouts(x, layer)
        return x

    return jnp.mean(jax.vmap(model)(x + shift) ** 2)


def scanned_loss(weights, x):
    shift, *layers = weights
    return jnp.mean(jax.vmap(lambda x: jax.lax.scan(layer_with_two_layouts, x, tuple(layers))[0])(x + shift) ** 2)


def stacked_loss(weights, x):
    shift, *weights = weights
    return scanned_loss([shift, jnp.stack(weights[::2]), jnp.stack(weights[1::2])], x)


def axes_of(collective, mesh):
    """The mesh axes over which the collective's groups extend."""
    coordinates = np.unravel_index(collective.group, tuple(mesh.shape.values()))
    return {axis for axis, at in zip(mesh.shape, coordinates, strict=True) if len(set(at)) > 1}


@pytest.mark.parametrize("mesh_name", MESHES)
@pytest.mark.parametrize("loss", [unstacked_loss, scanned_loss, stacked_loss])
def test_each_weight_has_one_gather_per_pass_and_one_reduction(loss, mesh_name):
    mesh = make_mesh(*MESHES[mesh_name])
    lead = (LAYERS,) if loss is scanned_loss else ()
    shape, storage = (*lead, 4 * WIDTH, WIDTH), NamedSharding(mesh, P(*[None] * len(lead), "model", "fsdp"))
    one = Shardings(storage, NamedSharding(mesh, P(*[None] * len(lead), "model", None)))
    n = N_WEIGHTS if lead else N_WEIGHTS * LAYERS
    weights = [
        jax.ShapeDtypeStruct((WIDTH,), jnp.float32),
        *[jax.ShapeDtypeStruct(shape, jnp.float32, sharding=storage)] * n,
    ]
    x = jax.ShapeDtypeStruct((ROWS, SEQ, WIDTH), jnp.float32, sharding=split_rows(mesh))

    step = jax.jit(
        jax.value_and_grad(gather_at_use(loss, [None, *[one] * n])),
        out_shardings=(None, [NamedSharding(mesh, P()), *[storage] * n]),
        compiler_options=QUICK,
    )
    found = [c for c in collectives(Module.of(step.lower(weights, x).compile().as_text())) if c.bytes > 4 * WIDTH]
    assert all(c.exact for c in found)

    sizes_of_batches = {n * ROWS // shards for n in (1, SEQ) for shards in (1, 2, 4, 8)}
    activations = [c for c in found if sizes_of_batches & {*c.shape}]
    assert all(axes_of(c, mesh) == {"model"} and {ROWS // 4, SEQ * ROWS // 4} & {*c.shape} for c in activations)
    assert bool(activations) == (mesh.shape["model"] > 1)

    gathered = sorted([WIDTH, 4 * WIDTH // mesh.shape["model"]])
    of_weights = [c for c in found if sorted(size for size in c.shape if size != 1) == gathered]
    assert len(of_weights) + len(activations) == len(found) and all("fsdp" in axes_of(c, mesh) for c in of_weights)

    def count(kinds, is_backward):
        return sum(c.n_executions for c in of_weights if c.kind in kinds and c.is_backward == is_backward)

    reductions = ("all-reduce", "reduce-scatter")
    assert count(["all-gather"], False) == count(["all-gather"], True) == count(reductions, True) == N_WEIGHTS * LAYERS
    assert count(reductions, False) == 0


# Weights as they are stored: a list, a stack and 8-bit codes with scales are used in float32, and the last in bfloat16.
NARROW = {"list": jnp.bfloat16, "stack": jnp.bfloat16, "codes": jnp.int8, "scales": jnp.float32, "cast": jnp.float32}


def loss_with_casts(weights, x):
    x = x + jnp.tanh(x @ weights["list"].astype(jnp.float32).T)
    x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, weights["stack"].astype(jnp.float32))
    x = x + jnp.tanh(x @ (weights["codes"].astype(jnp.float32) * weights["scales"]))
    narrow = x.astype(jnp.bfloat16) @ weights["cast"].astype(jnp.bfloat16)
    return jnp.mean(jnp.square(narrow.astype(jnp.float32)))


def step_with_casts(mesh):
    """The jitted gradient of all weights but the codes, and its arguments."""
    shapes = {"list": (WIDTH, WIDTH), "stack": (LAYERS, WIDTH, WIDTH), "codes": (WIDTH, WIDTH), "scales": (WIDTH,)}
    shapes["cast"] = (WIDTH, WIDTH)
    shardings = {name: shardings_for(shape, mesh, n_stacked=int(name == "stack")) for name, shape in shapes.items()}
    names = sorted(NARROW)  # the order in which JAX flattens a dict
    loss = gather_at_use(loss_with_casts, [shardings[name] for name in names])

    def of(trained, codes, x):
        return loss({**trained, "codes": codes}, x)

    args = {
        name: jax.ShapeDtypeStruct(shape, NARROW[name], sharding=shardings[name].storage) for name, shape in shapes.items()
    }
    codes = args.pop("codes")
    out = {name: arg.sharding for name, arg in args.items()}
    step = jax.jit(jax.value_and_grad(of), out_shardings=(None, out))
    return step, (args, codes, jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32, sharding=split_rows(mesh)))


def sent(text, kind):
    """The dtypes of a program's collectives of matrices of this kind, with their number in one step."""
    found = [c for c in collectives(Module.of(text)) if c.kind == kind and WIDTH**2 in (math.prod(c.shape), c.bytes)]
    return {dtype: sum(c.n_executions for c in found if c.dtype == dtype) for dtype in {c.dtype for c in found}}


def test_weights_are_gathered_in_the_narrowest_dtype():
    """XLA for CPUs has no collectives of bfloat16: it sends them as float32."""
    step, args = step_with_casts(make_mesh(1, 8))
    lowered = step.lower(*args)
    assert sent(lowered.compile(QUICK).as_text(), "all-gather")["s8"] == 2
    constrained = re.findall(r"sharding_constraint [^\n]*\[(.*)\]> : tensor<32x32x(\w+)>", lowered.as_text())
    assert {dtype for specs, dtype in constrained if "fsdp" not in specs and "{}" in specs} >= {"bf16", "i8"}


@pytest.mark.sweep
def test_weights_are_gathered_in_the_narrowest_dtype_on_gpus():
    try:
        devices = describe("gpu:h100-80gb:8").devices
    except ImportError:
        pytest.skip("compiling for GPUs needs jax's CUDA plugin")
    step, args = step_with_casts(make_mesh(1, 8, devices=devices))
    text = step.lower(*args).compile().as_text()
    assert sent(text, "all-gather") == {"s8": 2, "bf16": 2 * (2 + LAYERS) - 1}  # the last weight is gathered once
    assert sent(text, "reduce-scatter") == {"f32": 1 + LAYERS, "bf16": 1}


@pytest.mark.sweep
def test_gpt2_gathers_weights_again_in_the_backward_pass():
    """No transposed weight is saved in gathered form. The tied embedding is gathered once a pass."""
    mesh = make_mesh(1, 8)
    config = GPT2Config(vocab_size=256, n_positions=80, d_model=64, n_layers=2, n_heads=4, **dict.fromkeys(DROPOUTS, 0.0))
    is_shape = lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct)  # noqa: E731
    arrays, static = eqx.partition(eqx.filter_eval_shape(lambda: GPT2(config, key=jax.random.key(0))), is_shape)
    plan = make_plan(arrays, mesh)
    names, treedef = list(plan.leaves), jax.tree.structure(arrays)
    storage = [plan.sharding(name) for name in names]
    compute = [NamedSharding(mesh, plan.spec_in_use(name)) for name in names]
    shardings = [Shardings(*pair) if pair[0] != pair[1] else None for pair in zip(storage, compute, strict=True)]

    def loss(weights, ids):
        model = eqx.combine(jax.tree.unflatten(treedef, weights), static)
        return jnp.mean(jax.nn.logsumexp(jax.vmap(model)(ids), axis=-1))

    weights = [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at)
        for leaf, at in zip(jax.tree.leaves(arrays), storage, strict=True)
    ]
    ids = jax.ShapeDtypeStruct((16, 80), jnp.int32, sharding=split_rows(mesh))
    step = jax.jit(jax.value_and_grad(gather_at_use(loss, shardings)), out_shardings=(None, storage), compiler_options=QUICK)
    found = collectives(Module.of(step.lower(weights, ids).compile().as_text()))
    gathers = [c for c in found if c.kind == "all-gather"]
    for is_backward in (False, True):
        in_pass = [c for c in gathers if c.is_backward == is_backward]
        in_blocks = [c for c in in_pass if c.n_executions == config.n_layers]
        assert sorted(max(c.shape) for c in in_blocks) == [64, 64, 64, 64, 256, 256]
        outside_blocks = sorted(c.shape for c in in_pass if c.n_executions == 1)
        assert outside_blocks == ([(256, 64)] if is_backward else [(80, 64), (256, 64)])


def test_checkpoint_policies_do_not_save_gathered_weights():
    """A user's policy is about computed values and does not know of gathered weights. Saving these would put the whole model
    on every device."""
    n_layers, width = 16, 64

    class Model(eqx.Module):
        weights: jax.Array

        def __call__(self, x):
            policy = jax.checkpoint_policies.everything_saveable
            block = jax.checkpoint(lambda x, w: jnp.tanh(x @ w), policy=policy)
            return jax.lax.scan(lambda x, w: (block(x, w), None), x, self.weights)[0]

    deployer = redeqx.Deployer(n_fsdp_shards=8, verbose=False)
    trainer = redeqx.Trainer(
        deployer,
        model=Model(jnp.zeros((n_layers, width, width))),
        optimizer=optax.sgd(0.1),
        collate_fn=np.stack,
        loss_fn=lambda model, batch, key: jnp.mean(model(batch) ** 2),
        plan=deployer.plan(Model(jnp.zeros((n_layers, width, width))), overrides={"weights": (None, "fsdp", None)}),
    )
    compiled = trainer.compile(list(np.zeros((8, width), np.float32)), 1)
    model_bytes = 4 * n_layers * width * width
    memory = compiled.memory_analysis()
    assert memory.argument_size_in_bytes < model_bytes / 8 + 8192
    assert memory.temp_size_in_bytes < model_bytes / 2
    assert f"f32[{n_layers},{width},{width}]" not in compiled.as_text()
    found = collectives(Module.of(compiled.as_text()))
    gathers = [c for c in found if c.kind == "all-gather" and c.bytes >= 4 * width * width]
    assert {c.is_backward: c.n_executions for c in gathers} == {False: n_layers, True: n_layers}


def test_while_loop_gathers_one_layer_at_a_time():
    """Generation has such a loop. Gathers before it would hold the whole model at once."""
    mesh = make_mesh(1, 8)
    shape = (LAYERS, 4 * WIDTH, WIDTH)
    one = shardings_for(shape, mesh, n_stacked=1)

    def loop(weights, x):
        def step(carry):
            i, x = carry
            return i + 1, jax.lax.scan(layer_with_two_layouts, x, tuple(weights))[0]

        return jax.lax.while_loop(lambda carry: jnp.abs(carry[1]).max() < 1e3, step, (0, x))[1]

    weights = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=one.storage)] * 2
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32, sharding=split_rows(mesh))
    compiled = jax.jit(gather_at_use(loop, [one, one]), compiler_options=QUICK).lower(weights, x).compile()
    gathers = [c for c in collectives(Module.of(compiled.as_text())) if c.kind == "all-gather"]
    assert [sorted(size for size in c.shape if size != 1) for c in gathers] == [[WIDTH, 4 * WIDTH]] * 2
    assert not any(c.exact for c in gathers)  # inside the loop, whose trip count is unknown


def test_gathers_are_inside_the_branches_of_a_cond():
    one = shardings_for(UP, make_mesh(1, 8))

    def branch(weights, x):
        return jax.lax.cond(x.sum() > 0, lambda x: x @ weights[0], lambda x: x @ weights[1] + 1, x).sum()

    weights = [jax.ShapeDtypeStruct(UP, jnp.float32, sharding=one.storage)] * 2
    x = jax.ShapeDtypeStruct((BATCH, D), jnp.float32, sharding=split_rows(one.storage.mesh))
    step = jax.jit(gather_at_use(branch, [one, one]), compiler_options=QUICK)
    gathers = [c for c in collectives(Module.of(step.lower(weights, x).compile().as_text())) if c.kind == "all-gather"]
    of_weights = [c for c in gathers if sorted(c.shape) == sorted(UP)]
    assert of_weights and not any(c.exact for c in of_weights)  # in a branch


# --- name scopes and source lines ---------------------------------------------------------------------------------------


def matrix_shardings(shape=MATRIX):
    return shardings_for(shape, make_mesh(1, 8))


def test_name_scopes_and_source_lines_survive():
    def loss(weights, x):
        @jax.checkpoint
        def body(x, w):
            with jax.named_scope("my_layer"):
                return jnp.tanh(x @ w), None

        with jax.named_scope("my_head"):
            x = x @ weights[1]
        return jnp.mean(jax.lax.scan(body, x, weights[0])[0])

    shardings = [shardings_for(STACKED, make_mesh(1, 8), n_stacked=1), matrix_shardings()]
    weights, x = random_weights_and_batch([STACKED, MATRIX])
    lowered = jax.jit(jax.value_and_grad(gather_at_use(loss, shardings)), compiler_options=QUICK).lower(weights, x)
    compiled = lowered.compile().as_text()
    forward_in_loop = r"while/body/\w+/my_layer/dot_general"  # \w+ is JAX's own scope for evaluating a jaxpr
    for scope in (r"jvp\(my_head\)/dot_general", forward_in_loop, "rematted_computation/my_layer/dot_general"):
        assert re.search(scope, compiled)
    first_line = loss.__code__.co_firstlineno
    located = lowered.as_text(debug_info=True)
    for offset in (4, 7):  # the two matmuls
        assert f'test_gather.py":{first_line + offset}' in located


def test_gathers_have_a_name_scope():
    """Profiles show the scope."""
    weights, x = random_weights_and_batch([MATRIX])
    step = jax.jit(jax.grad(gather_at_use(loss_of(lambda x, w: x @ w), [matrix_shardings()])))
    assert "gather/sharding_constraint" in step.lower(weights, x).as_text(debug_info=True)


def test_traceback_of_an_error_in_the_loss_has_the_users_frame():
    def users_loss(weights, x):
        return jnp.mean(jax.lax.scan(lambda x, w: (jnp.dot(x, w[:3]), None), x, weights[0])[0])

    weights, x = random_weights_and_batch([STACKED])
    with pytest.raises(TypeError, match="dot_general requires contracting dimensions") as raised:
        jax.jit(jax.grad(gather_at_use(users_loss, [shardings_for(STACKED, make_mesh(1, 8), n_stacked=1)])))(weights, x)
    assert "users_loss" in {frame.name for frame in traceback.extract_tb(raised.tb)}


def test_no_rules_returns_the_same_function():
    def loss(weights, x):
        return x

    assert transformed(loss, []) is loss


# --- outputs and views --------------------------------------------------------------------------------------------------


def test_output_structure_is_kept_and_may_contain_weights():
    def fn(weights, batch, key):
        w, other = weights
        return {"same": w, "view": w.T, "none": None, "pair": (batch["x"] @ w, jax.random.key_data(key))}, other

    weights, x = random_weights_and_batch([MATRIX, (3,)])
    key = jax.random.key(1)
    expected, got = (jax.jit(f)(weights, {"x": x}, key) for f in (fn, gather_at_use(fn, [matrix_shardings(), None])))
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, expected)
    jax.tree.map(lambda a, b: a.aval.weak_type == b.aval.weak_type, got, expected)


def test_slice_of_a_split_dim_is_taken_from_the_gathered_weight():
    """Takes 5 rows of a table whose rows are split over 8 devices: 5 rows cannot be split over them."""
    mesh = make_mesh(1, 8)
    table = Shardings(NamedSharding(mesh, P("fsdp", None)), NamedSharding(mesh, P(None, None)))
    gathered = gather_at_use(lambda weights, x: jax.jit(jnp.sum)(weights[0][:5]) + x.sum(), [table])
    weights, x = random_weights_and_batch([(64, D)])
    np.testing.assert_allclose(jax.jit(gathered)(weights, x), weights[0][:5].sum() + x.sum(), rtol=1e-5)


@pytest.mark.parametrize(
    "dims, storage, compute",
    [
        ([1, 0], P("fsdp", "model"), P(None, "model")),
        ([None, 0, 1], P(None, "model", "fsdp"), P(None, "model", None)),
    ],
)
def test_shardings_of_a_view(dims, storage, compute):
    view = shardings_for(MATRIX, make_mesh(2, 2)).of_view(dims)
    assert (view.storage.spec, view.compute.spec) == (storage, compute)


def test_view_without_a_split_dim_has_no_shardings():
    assert shardings_for(MATRIX, make_mesh(2, 2)).of_view([1]) is None
    assert shardings_for(STACKED, make_mesh(2, 2)).of_view([None, 1, 2]) is not None
