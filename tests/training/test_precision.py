"""Precision: the dtypes in which a step computes, stores, sums and rounds, for models written without regard to it."""

import re
from contextlib import nullcontext
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import redeqx
from redeqx.machine import GPUS, has_fp8
from redeqx.models import cross_entropy
from redeqx.models.gpt2 import GPT2, GPT2Config
from redeqx.models.llama import Llama, LlamaConfig
from redeqx.steps import Precision, Structure, Task, round_stochastically
from redeqx.tracing import all_inside, equations, transformed
from redeqx.transforms import WeightProducts, fp8_products
from tests._tree import named_leaves

D = 32
HALF = {"compute": "bfloat16", "parameters": "bfloat16"}


class Net(eqx.Module):
    """A first product, a scan over layers held as raw arrays, and a last product."""

    first: jax.Array
    blocks: jax.Array
    bias: jax.Array
    last: jax.Array

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.first = jax.random.normal(keys[0], (D, D)) / D**0.5
        self.blocks = jax.random.normal(keys[1], (3, D, D)) / D**0.5
        self.bias = jnp.zeros((3, D))
        self.last = jax.random.normal(keys[2], (D, D)) / D**0.5

    def __call__(self, x):
        def block(x, of):
            weight, bias = of
            return x + jnp.tanh(x @ weight + bias), None

        x, _ = jax.lax.scan(block, x.astype(self.first.dtype) @ self.first, (self.blocks, self.bias))
        return x @ self.last


def loss_fn(model, batch, key):
    out = jax.vmap(model)(batch["x"])
    return jnp.mean((out.astype(jnp.float32) - batch["y"]) ** 2)


def make_examples(n=32, seed=0):
    x = np.random.default_rng(seed).standard_normal((n, 16, D), np.float32)
    return [{"x": row, "y": np.tanh(row)} for row in x]


def collate(examples):
    return {name: np.stack([example[name] for example in examples]) for name in ("x", "y")}


def make_trainer(shards=(1, 1), workdir=None, verbose=False, **options):
    deployer = redeqx.Deployer(n_model_shards=shards[0], n_fsdp_shards=shards[1], workdir=workdir, verbose=verbose)
    options = {"optimizer": optax.sgd(0.1), "model": Net(jax.random.key(0)), "loss_fn": loss_fn, **options}
    return redeqx.Trainer(deployer, collate_fn=collate, **options)


def weights(trainer):
    return {name: np.asarray(leaf, np.float32) for name, leaf in named_leaves(trainer.model).items()}


def message(error, fn, *args, **kwargs):
    with pytest.raises(error) as raised:
        fn(*args, **kwargs)
    return str(raised.value)


# --- arguments and messages -------------------------------------------------------------------------------------------


def test_invalid_precisions_raise():
    named = "'float32', 'bfloat16' or 'fp8' or a `redeqx.Precision`"
    assert message(ValueError, make_trainer, compute="bf16") == (
        f"`compute`: expected {named} or `redeqx.Compute`, got 'bf16'. Pass one of them."
    )
    assert message(ValueError, redeqx.Compute, precision="bf16") == (
        f"`precision`: expected {named}, got 'bf16'. Pass one of them."
    )
    assert message(ValueError, redeqx.Precision, parameters="float16") == (
        "`Precision.parameters`: expected 'float32', 'bfloat16' or None, got 'float16'. Pass one of them."
    )
    assert message(ValueError, redeqx.Precision, rounding="nearest") == (
        "`Precision.rounding`: expected 'master' or 'stochastic', got 'nearest'. Pass one of the two."
    )


@pytest.mark.parametrize("dtype", ["bfloat16", jnp.bfloat16, np.dtype("bfloat16"), jnp.zeros((), "bfloat16").dtype])
def test_a_precision_may_be_a_dtype(dtype):
    make_trainer(compute=dtype)
    assert redeqx.Compute(dtype) == redeqx.Compute("bfloat16")


def test_fp8_on_a_chip_without_it_raises():
    with redeqx.described("v4:2x2x1"):
        reported = message(ValueError, make_trainer, compute="fp8")
    assert reported == (
        "`precision`: expected a device that supports fp8 (NVIDIA GeForce RTX 4090, NVIDIA L4, NVIDIA L40S, "
        "NVIDIA H100 80GB HBM3, NVIDIA H200, NVIDIA B200), got TPU v4. Pass 'bfloat16' for this one."
    )


def test_gpus_support_fp8_from_capability_8_9():
    class Device:
        platform, device_kind = "gpu", "a GPU that no table has"

        def __init__(self, capability):
            self.compute_capability = capability

    assert [has_fp8(Device(capability)) for capability in ("8.6", "8.9", "12.0")] == [False, True, True]
    assert all((gpu.chip.fp8 is not None) == (gpu.capability >= (8, 9)) for gpu in GPUS.values())


def test_chip_rates_by_dtype():
    h100, t4 = GPUS["h100-80gb"].chip, GPUS["t4"].chip
    assert [h100.rate(name) for name in ("float8_e5m2", "bfloat16", "float32")] == [1979e12, 989e12, 495e12]
    assert t4.rate("float8_e4m3fn") == t4.rate("float16") == 65e12


@pytest.mark.sweep
def test_header_reports_the_dtypes(capsys):
    make_trainer(verbose=True, compute="fp8").train(make_examples(8), 1)
    reported = " ".join(capsys.readouterr().out.split())
    assert (
        "precision parameters float32, computed in bfloat16 and fp8, gradients summed over devices in float32; "
        "3 of 5 products with weights in fp8, emulated on CPUs" in reported
    )
    make_trainer(verbose=True).train(make_examples(8), 1)
    assert "precision" not in capsys.readouterr().out


@pytest.mark.sweep
def test_wider_products_are_counted_and_warned_about_if_all_are_wider(capsys):
    """A product of float32 inputs and bfloat16 weights is in float32, so that bfloat16 would silently gain nothing."""
    first = eqx.nn.Linear(D, D, key=jax.random.key(0))

    def one_wider_product(model, batch, key):
        out = jax.vmap(model[1])(jax.vmap(jax.vmap(model[0]))(batch["x"]))
        return jnp.mean((out.astype(jnp.float32) - batch["y"]) ** 2)

    trainer = make_trainer(
        verbose=True, compute="bfloat16", model=(first, Net(jax.random.key(0))), loss_fn=one_wider_product
    )
    trainer.train(make_examples(8), 1)
    assert "; 1 of 6 products with weights in a wider dtype, as their inputs are" in " ".join(
        capsys.readouterr().out.split()
    )

    linear = eqx.nn.MLP(D, D, D, 1, key=jax.random.key(0))
    wider_loss = lambda model, batch, key: jnp.mean((jax.vmap(jax.vmap(model))(batch["x"]) - batch["y"]) ** 2)  # noqa: E731
    reported = (
        "expected products with weights in bfloat16, got all 2 in a wider dtype, that of their inputs. Cast floating inputs"
    )
    with pytest.warns(UserWarning, match=reported):
        make_trainer(compute="bfloat16", model=linear, loss_fn=wider_loss).train(make_examples(8), 1)
    make_trainer(compute="float32", model=linear, loss_fn=wider_loss).train(make_examples(8), 1)


@pytest.mark.parametrize("compute", ["bfloat16", None])
def test_the_header_tells_that_a_loss_was_rounded_to_16_bits(compute, capsys):
    weight = jnp.ones(D, jnp.float32 if compute else jnp.bfloat16)

    def loss_fn(model, batch, key, dtype=None):
        errors = batch["x"].astype(model.dtype) @ model - batch["y"].mean(-1).astype(model.dtype)
        return (errors.astype(dtype or errors.dtype) ** 2).mean()

    def scaled(model, batch, key, by):
        return by(model) * loss_fn(model, batch, key, jnp.float32 if by is scale_of else None).astype(jnp.float32)

    def scale_of(model):
        return model[0].astype(jnp.float32)

    for loss, is_told in (
        (loss_fn, True),
        (partial(loss_fn, dtype=jnp.float32), False),
        (partial(scaled, by=lambda model: 0.5), True),
        (partial(scaled, by=scale_of), False),  # a narrow factor of a wide loss
    ):
        trainer = make_trainer(verbose=True, compute=compute, model=weight, loss_fn=loss)
        trainer.train(make_examples(8), 1)
        told = "loss rounded to bfloat16, 2 digits: cast logits to float32 in `loss_fn`"
        assert (told in " ".join(capsys.readouterr().out.split())) == is_told


def test_describe_precision():
    dtypes = [jnp.float32]
    assert Precision("bfloat16", gradients=None).describe(dtypes) == (
        "parameters float32, computed in bfloat16, gradients summed over devices in bfloat16"
    )
    assert Precision(**HALF, rounding="stochastic", gradients=None).describe([jnp.bfloat16]) == (
        "parameters bfloat16 with stochastic rounding, computed in bfloat16, gradients summed over devices in bfloat16"
    )


# --- sums in float32 --------------------------------------------------------------------------------------------------

_MODELS = {
    "gpt2": lambda key: GPT2(GPT2Config(64, 16, 32, 2, 2).without_dropout(), key=key),
    "llama": lambda key: Llama(
        LlamaConfig(vocab_size=64, n_positions=16, d_model=32, d_mlp=64, n_layers=2, n_heads=2, n_kv_heads=1), key=key
    ),
}


def all_equations(closed):
    """Yield all equations, including those inside custom derivatives."""
    for eqn in closed.jaxpr.eqns:
        yield eqn
        for inner in all_inside(eqn):
            yield from all_equations(inner)


@pytest.mark.parametrize("name", _MODELS)
def test_losses_softmaxes_and_norms_of_models_are_in_float32(name):
    def loss(model, ids, key):
        return cross_entropy(jax.vmap(model)(ids[:, :-1]), ids[:, 1:])

    shapes = eqx.filter_eval_shape(_MODELS[name], jax.random.key(0))
    structure, batch = Structure.of(shapes), jax.ShapeDtypeStruct((2, 9), jnp.int32)
    of_arrays = Task(structure, loss, optax.sgd(0.1), redeqx.Compute("bfloat16")).loss(inference=False)
    weights = [leaf for leaves in structure.take(shapes) for leaf in leaves]
    closed = jax.make_jaxpr(of_arrays)(weights, None, batch, jax.eval_shape(lambda: jax.random.key(0)))
    dtypes = {}
    for eqn in all_equations(closed):
        if eqn.primitive.name in ("reduce_sum", "reduce_max", "exp", "log", "rsqrt", "sqrt", "dot_general"):
            dtypes.setdefault(eqn.primitive.name, set()).add(str(eqn.invars[0].aval.dtype))
    assert dtypes["dot_general"] == {"bfloat16"}
    sums = {name: found - {"int32", "bool"} for name, found in dtypes.items() if name != "dot_general"}
    assert {"reduce_sum", "exp", "log"} <= set(sums)
    assert all(found == {"float32"} for found in sums.values()), sums


def transformed_grads(fn, values, **options):
    rule = WeightProducts(len(values) - 1, emulated=True, **options)
    transformed_fn = transformed(fn, [rule])
    return jax.jit(jax.grad(lambda weights: transformed_fn(*weights, values[-1])))(values[:-1])


def test_gradients_are_summed_over_rows_in_float32():
    """4,096 rows, each with a gradient of 1, in a lookup, a bias and a product; bfloat16 sums of 1 stop at 256."""
    n = 4096

    def loss(table, bias, weight, ids):
        out = table[ids] + bias + jnp.ones((n, 16), jnp.bfloat16) @ weight
        return jnp.sum(out.astype(jnp.float32))

    zeros = [jnp.zeros((4, 16), jnp.bfloat16), jnp.zeros(16, jnp.bfloat16), jnp.zeros((16, 16), jnp.bfloat16)]
    transformed_result = transformed_grads(loss, (*zeros, jnp.zeros(n, jnp.int32)), gradients=jnp.float32)
    assert [np.asarray(g, np.float32).max() for g in transformed_result] == [n, n, n]
    untransformed = jax.jit(jax.grad(lambda weights: loss(*weights, jnp.zeros(n, jnp.int32))))(zeros)
    assert np.asarray(untransformed[0], np.float32).max() < n  # the error that the rule fixes


@pytest.mark.parametrize("summed_in", ["bfloat16", "float32"])
def test_dtype_of_gradient_sums_over_devices(summed_in):
    """XLA sums over devices in the dtype of the product that computes a weight's gradient. The CPU compiler widens such
    sums, so this test inspects the trace."""
    leaves, treedef = jax.tree.flatten(jax.tree.map(lambda x: x.astype(jnp.bfloat16), Net(jax.random.key(0))))
    batch = {"x": jnp.ones((2, 16, D)), "y": jnp.ones((2, 16, D))}
    rule = WeightProducts(len(leaves), gradients=None if summed_in == "bfloat16" else jnp.float32)
    fn = transformed(lambda leaves, batch: loss_fn(jax.tree.unflatten(treedef, leaves), batch, None), [rule])
    eqns = list(equations(jax.make_jaxpr(jax.grad(fn))(leaves, batch)))
    products = [e for e in eqns if e.primitive.name == "dot_general" and e.outvars[0].aval.shape == (D, D)]
    assert len(products) == 3  # one of them is inside the loop
    assert {str(e.outvars[0].aval.dtype) for e in products} == {summed_in}


def test_fsdp_adds_no_float32_all_reduces_of_whole_gradients():
    """The gather's own derivative would all-reduce the whole gradient in float32 and slice it afterwards."""
    trainer = make_trainer((1, 8), compute="bfloat16")
    assert trainer.train(make_examples(8), 1)["loss"] > 0
    text = trainer.compile(make_examples(8), 1).as_text()
    whole = re.findall(rf"f32\[{D},{D}\]\S* all-reduce", text)
    compute_only = (
        make_trainer((1, 8), compute=redeqx.Precision("bfloat16", gradients=None)).compile(make_examples(8), 1).as_text()
    )
    assert len(whole) <= len(re.findall(rf"\[{D},{D}\]\S* all-reduce", compute_only))


# --- fp8 --------------------------------------------------------------------------------------------------------------


def test_products_between_first_and_last_are_in_fp8():
    model = Net(jax.random.key(0))
    leaves, treedef = jax.tree.flatten(model)

    def fn(leaves, x):
        return jax.vmap(jax.tree.unflatten(treedef, leaves))(x)

    x = jnp.ones((2, 16, D))
    assert fp8_products(jax.make_jaxpr(fn)(leaves, x), len(leaves)) == (3, 5)
    narrow = [leaf[..., :8] if leaf.ndim == 3 else leaf for leaf in leaves]
    indivisible = jax.make_jaxpr(lambda leaves, x: (x @ leaves[0]) @ leaves[1] @ leaves[1].T @ leaves[0])
    assert fp8_products(indivisible([narrow[0], narrow[1][0]], x), 2)[0] == 0  # 8 columns are not a multiple of 16
    rank_0 = jax.make_jaxpr(lambda leaves, x: x @ leaves[0] @ leaves[1] @ leaves[1].T @ leaves[0])
    assert fp8_products(rank_0([jnp.ones((D, D)), jnp.ones((D, 0))], x), 2)[0] == 0  # adapters of rank 0
    merged = jax.make_jaxpr(lambda leaves, x: x @ leaves[0] @ (leaves[1] + leaves[2]) @ leaves[0])
    assert fp8_products(merged([jnp.ones((D, D))] * 3, x), 3) == (1, 3)  # the sum of two weights is not in fp8


def test_fp8_products_and_gradients_are_accurate():
    keys = jax.random.split(jax.random.key(0), 5)
    values = [jax.random.normal(key, shape) for key, shape in zip(keys, [(D, D)] * 3 + [(16, D)], strict=False)]

    def loss(first, weight, last, x):
        return jnp.sum(jnp.einsum("td,dk->kt", x @ first, weight).T @ last * jnp.cos(x))

    exact = jax.jit(jax.grad(lambda weights: loss(*weights, values[-1])))(values[:-1])
    for found, wanted in zip(transformed_grads(loss, values, fp8=True), exact, strict=True):
        error = float(jnp.linalg.norm(found - wanted) / jnp.linalg.norm(wanted))
        assert 1e-4 < error < 0.1, error  # e4m3 has 3 mantissa bits, e5m2 has 2


def test_fp8_scales_are_powers_of_two_and_keep_infinities():
    x = jnp.ones((16, 16)).at[0, 0].set(3e-6)

    def product(first, weight, last, x):
        return jnp.sum(x @ first @ weight @ last)

    eye = jnp.eye(16)
    for scale in (1e-20, 1.0, 1e20):  # powers of two are exact in fp8
        value, exact = (fn([eye, eye * 2.0 ** round(np.log2(scale)), eye, jnp.ones((16, 16))]) for fn in (
            lambda values: transformed(product, [WeightProducts(3, fp8=True, emulated=True)])(*values),
            lambda values: product(*values),
        ))  # fmt: skip
        assert float(value) == float(exact)
    with_infinity = transformed(product, [WeightProducts(3, fp8=True, emulated=True)])(
        eye, eye, eye, x.at[1, 1].set(jnp.inf)
    )
    assert not np.isfinite(float(with_infinity))


def test_fp8_gradients_keep_a_range_of_26_powers_of_two():
    """e5m2 represents all of them, while e4m3 would round those below 2**-18 of the largest to zero."""
    eye, scales = jnp.eye(16), 2.0 ** -jnp.floor(1.75 * jnp.arange(16.0))[:, None]

    def loss(first, weight, last, x):
        return jnp.sum(x @ first @ weight @ last * scales)

    found = transformed_grads(loss, [eye, eye, eye, eye], fp8=True)
    np.testing.assert_array_equal(found[1], jnp.broadcast_to(scales, (16, 16)))  # the product of `weight` is in fp8


SHARDS = [(2, 2), (1, 8)]


@pytest.mark.parametrize(("precision", "mesh"), [("bfloat16", (1, 8)), ("fp8", (2, 2))])
def test_results_do_not_depend_on_the_mesh(precision, mesh):
    runs = []
    for shards in ((1, 1), mesh):
        trainer = make_trainer(
            shards, compute=redeqx.Compute(precision=precision, remat="matmuls" if shards == (2, 2) else "none")
        )
        losses = [trainer.update(make_examples(8, i))["loss"] for i in range(3)]
        runs.append((losses, weights(trainer)))
    for losses, found in runs[1:]:
        np.testing.assert_allclose(losses, runs[0][0], rtol=2e-3)
        for name, leaf in found.items():  # a value between two fp8 numbers may round either way
            np.testing.assert_allclose(leaf, runs[0][1][name], atol=2e-3 if precision == "fp8" else 5e-4)


# --- parameters in bfloat16 -------------------------------------------------------------------------------------------


def test_stochastic_rounding_is_unbiased():
    x = jnp.float32([1.0, 1.001, -3.1415927, 1e-30, 0.0, 65000.0])
    samples = jax.vmap(lambda key: round_stochastically(x, key))(jax.random.split(jax.random.key(0), 20_000))
    assert samples.dtype == jnp.bfloat16
    samples = np.asarray(samples, np.float64)
    ulp = 2.0 ** (np.floor(np.log2(np.abs(np.where(x == 0, 1, x)))) - 7)
    assert np.all(np.abs(samples.mean(0) - np.asarray(x, np.float64)) < 0.02 * ulp)  # 6 standard deviations
    assert np.all(np.abs(samples - np.asarray(x, np.float64)) < ulp)  # rounds to an adjacent value
    assert set(samples[:, 0]) == {1.0} and set(samples[:, 4]) == {0.0}
    nonfinite = jnp.append(jnp.float32([jnp.inf, -jnp.inf, jnp.nan]), np.uint32(0x7FFFFFFF).view(np.float32))  # CUDA's NaN
    nonfinite = round_stochastically(nonfinite, jax.random.key(0))
    assert np.isinf(np.asarray(nonfinite[:2], np.float32)).all() and jnp.isnan(nonfinite[2:]).all()


def constant_gradient_loss(model, batch, key):
    return jnp.sum(model[0].astype(jnp.float32)) + 0 * jnp.sum(batch["x"])


@pytest.mark.parametrize(("rounding", "expect_change"), [("stochastic", True), ("master", True), (None, False)])
def test_small_updates_are_kept(rounding, expect_change):
    """64 steps of 1e-3 each, starting from 1, where half a unit in the last place of bfloat16 is 2e-3."""
    precision = None if rounding is None else redeqx.Precision(**HALF, rounding=rounding)
    model = [jnp.ones(1024, jnp.float32 if rounding else jnp.bfloat16)]
    trainer = make_trainer(
        model=model, loss_fn=constant_gradient_loss, optimizer=optax.sgd(1e-3), compute=redeqx.Compute(precision=precision)
    )
    with nullcontext() if rounding else pytest.warns(UserWarning, match="got 100% of the updates of step 1 lost") as warned:
        for _ in range(64):
            metrics = trainer.update(make_examples(8))
    assert warned is None or len(warned) == 1
    assert metrics.keys() == {"loss", "grad_norm"}
    found = np.asarray(trainer.model[0], np.float32)
    assert trainer.model[0].dtype == jnp.bfloat16
    np.testing.assert_allclose(found.mean(), 1 - 0.064 if expect_change else 1.0, atol=2e-3)
    if rounding == "master":
        master = trainer.opt_state.master[0]
        np.testing.assert_allclose(master, 1 - 0.064, rtol=1e-5)
        assert np.array_equal(found, np.asarray(master.astype(jnp.bfloat16), np.float32))


@pytest.mark.parametrize("shards", [(1, 1), (2, 2)])
def test_lost_updates_of_16_bit_parameters_are_warned_about(shards):
    """An update of zero is not lost: a rate of 0, or a row of a table that the batch does not use."""

    def loss(model, batch, key):
        return jnp.sum(model["used"].astype(jnp.float32)) + 0 * jnp.sum(model["idle"].astype(jnp.float32))

    def update(rate, dtype, n_steps):
        model = {"used": jnp.ones((64, 32), dtype), "idle": jnp.ones((512, 32), dtype), "wide": jnp.ones(4)}
        trainer = make_trainer(shards, model=model, loss_fn=loss, optimizer=optax.sgd(rate))
        for _ in range(n_steps):
            trainer.update(make_examples(8))
        return trainer

    update(1e-2, jnp.bfloat16, 2)
    update(1e-3, jnp.float32, 2)
    warmed_up = lambda step: jnp.where(step < 2, 0.0, 1e-3)  # noqa: E731
    update(warmed_up, jnp.bfloat16, 2)
    with pytest.warns(UserWarning) as warned:
        update(warmed_up, jnp.bfloat16, 4)
    assert [str(warning.message) for warning in warned] == [
        "`model`: expected 16-bit parameters that updates change, got 100% of the updates of step 3 lost: each is less than "
        "half of its parameter's last digit. Pass `compute=redeqx.Precision(parameters='bfloat16')`, which keeps float32 "
        "copies of them, add `rounding='stochastic'` to need none, or store them in float32: `compute='bfloat16'`."
    ]


@pytest.mark.parametrize("rounding", ["stochastic", "master"])
def test_training_continues_from_a_model_loaded_without_optimizer_state(tmp_path, rounding):
    """The float32 master copies are not loaded; the previous ones must not bring the old model back."""
    precision = redeqx.Precision(**HALF, rounding=rounding)
    options = {
        "model": [jnp.ones(8)],
        "loss_fn": constant_gradient_loss,
        "optimizer": optax.sgd(0.25),
        "compute": redeqx.Compute(precision),
    }
    trainer = make_trainer(workdir=tmp_path, **options)
    trainer.update(make_examples(8))
    trainer.save_ckpt("early")
    for _ in range(2):
        trainer.update(make_examples(8))
    np.testing.assert_array_equal(trainer.model[0], 1 - 3 * 0.25)
    trainer.load_ckpt("early", load_opt_states=False)
    np.testing.assert_array_equal(trainer.model[0], 1 - 0.25)
    trainer.update(make_examples(8))
    np.testing.assert_array_equal(trainer.model[0], 1 - 2 * 0.25)


@pytest.mark.parametrize("rounding", ["stochastic", "master"])
def test_optimizer_state_stays_in_float32(rounding):
    trainer = make_trainer(optimizer=optax.adam(1e-3), compute=redeqx.Precision(**HALF, rounding=rounding))
    trainer.update(make_examples(8))
    state = trainer.opt_state if rounding == "stochastic" else trainer.opt_state.inner
    assert state[0].mu.first.dtype == state[0].nu.first.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(trainer.model)} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize("rounding", ["stochastic", "master"])
def test_complex_parameters_are_not_rounded(rounding):
    def real_and_complex(model, batch, key):
        return (model["real"].astype(jnp.float32) * model["complex"].real).sum() + 0 * jnp.sum(batch["x"])

    model = {"real": jnp.ones(8), "complex": jnp.full(8, 1 + 2j, jnp.complex64)}
    trainer = make_trainer(model=model, loss_fn=real_and_complex, compute=redeqx.Precision(**HALF, rounding=rounding))
    trainer.update(make_examples(8))
    np.testing.assert_allclose(trainer.model["complex"], 0.9 + 2j, rtol=1e-6)
    assert trainer.model["complex"].dtype == jnp.complex64


def test_weight_decay_acts_on_the_float32_copies():
    def no_gradient(model, batch, key):
        return 0 * jnp.sum(model[0].astype(jnp.float32)) + 0 * jnp.sum(batch["x"])

    optimizer, precision = optax.adamw(2.0**-7, weight_decay=2.0**-3), redeqx.Precision(**HALF, rounding="master")
    trainer = make_trainer(
        model=[jnp.ones((4, 4))], loss_fn=no_gradient, optimizer=optimizer, compute=redeqx.Compute(precision=precision)
    )
    for _ in range(8):
        trainer.update(make_examples(8))
    np.testing.assert_allclose(trainer.opt_state.master[0], (1 - 2.0**-10) ** 8, rtol=4e-7)


def test_each_step_and_leaf_is_rounded_by_other_numbers():
    """With the same numbers in each step, seven in eight weights would never move and the others always."""
    precision = redeqx.Precision(**HALF, rounding="stochastic")
    model, eighth = [jnp.ones((16, 32)), jnp.ones((16, 32))], 2.0**-10  # of the distance of bfloat16 numbers above 1

    def constant_gradients(model, batch, key):
        return sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in model) + 0 * jnp.sum(batch["x"])

    trainer = make_trainer(
        model=model, loss_fn=constant_gradients, optimizer=optax.sgd(-eighth), compute=redeqx.Compute(precision=precision)
    )
    for _ in range(32):
        trainer.update(make_examples(8))
    first, second = (np.asarray(leaf, np.float32) for leaf in trainer.model)
    assert np.mean(first > 1) > 0.9 and np.mean(second > 1) > 0.9
    assert not np.array_equal(first, second)


def test_rounding_is_independent_of_what_the_loss_draws():
    """Else updates would follow dropout, for example. The loss gives back the bits that its key draws for the first leaf."""

    def drawing(model, state, batch, key):
        bits = jax.random.bits(jax.random.fold_in(key, 0), state.shape, jnp.uint16)
        return jnp.sum(model[0].astype(jnp.float32)) + 0 * jnp.sum(batch["x"]), bits

    precision, n = redeqx.Precision(**HALF, rounding="stochastic"), 4096
    half = optax.sgd(-(2.0**-8))  # of the distance of bfloat16 numbers above 1
    options = {"model": [jnp.ones(n)], "model_state": jnp.zeros(n, jnp.uint16), "loss_fn": drawing, "optimizer": half}
    trainer = make_trainer(**options, compute=redeqx.Compute(precision=precision))
    trainer.update(make_examples(8))
    is_up, is_large = np.asarray(trainer.model[0] > 1), np.asarray(trainer.model_state) >= 2**15
    assert 0.4 < is_up.mean() < 0.6 and 0.4 < np.mean(is_up == is_large) < 0.6


@pytest.mark.sweep
def test_stochastic_rounding_does_not_depend_on_the_mesh():
    """For bitwise equal updates; random bits depend on the step and the leaf."""
    found = []
    for shards in [(1, 1), *SHARDS]:
        precision = redeqx.Precision(**HALF, rounding="stochastic")
        model = [jnp.ones((64, 32)), jnp.ones((64, 32))]
        trainer = make_trainer(
            shards,
            model=model,
            loss_fn=constant_gradient_loss,
            optimizer=optax.sgd(1e-3),
            compute=redeqx.Compute(precision=precision),
        )
        for _ in range(3):
            trainer.update(make_examples(8))
        found.append(np.asarray(trainer.model[0], np.float32))
    assert len(set(found[0].ravel())) > 1
    assert np.array_equal(found[0], found[1]) and np.array_equal(found[0], found[2])


@pytest.mark.parametrize("rounding", ["stochastic", pytest.param("master", marks=pytest.mark.sweep)])
def test_resume_ends_with_the_same_bits(tmp_path, rounding):
    def run(folder, n_steps):
        precision = redeqx.Precision(**HALF, rounding=rounding)
        trainer = make_trainer(
            (2, 2), tmp_path / folder, optimizer=optax.adam(1e-2), compute=redeqx.Compute(precision=precision)
        )
        trainer.fit(make_examples(32), batch_size=8, n_epochs=2, max_steps=n_steps)
        return trainer

    uninterrupted = run("a", 6)
    run("b", 3)
    resumed = run("b", 6)
    assert resumed.step == uninterrupted.step == 6
    pairs = zip(*(jax.tree.leaves((of.model, of.opt_state)) for of in (uninterrupted, resumed)), strict=True)
    assert all(a.dtype == b.dtype and np.array_equal(np.asarray(a), np.asarray(b)) for a, b in pairs)


@pytest.mark.sweep
def test_resume_with_another_precision_is_reported(tmp_path, capsys):
    make_trainer(workdir=tmp_path, compute="bfloat16").fit(make_examples(16), batch_size=8, n_epochs=1)
    options = {"workdir": tmp_path, "verbose": True}
    make_trainer(**options, compute="float32").fit(make_examples(16), batch_size=8, n_epochs=2)
    reported = " ".join(capsys.readouterr().out.split())
    assert (
        "resumed with settings that differ: `precision` parameters float32, computed in float32, gradients summed over "
        "devices in float32, before parameters float32, computed in bfloat16, gradients summed over devices in float32"
        in reported
    )
    other = make_trainer(workdir=tmp_path, compute=redeqx.Precision(**HALF))
    reported = message(ValueError, other.fit, make_examples(16), batch_size=8, n_epochs=3)
    assert "got 4 that differ" in reported and re.search(r"`master\.first`: expected \w+ \S+ *\S*, got none", reported), (
        reported
    )
