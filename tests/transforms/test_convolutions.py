"""Values and gradients of convolutions are right on every mesh: grouped ones, also inside scans and branches, and those
along positions that sequence shards split."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import redeqx
from redeqx.compiled import Module, collectives
from redeqx.dims import Inputs
from redeqx.machine import make_mesh
from redeqx.tracing import transformed
from redeqx.transforms import FixConvolutions

C = 12


class Net(eqx.Module):
    convs: list[eqx.nn.Conv2d | eqx.nn.Conv1d]
    kind: str = eqx.field(static=True)

    def __init__(self, groups: int, kind: str = "plain", n_channels: int = C):
        keys = jax.random.split(jax.random.key(0), 2)
        make = eqx.nn.Conv1d if kind == "1d" else eqx.nn.Conv2d
        self.kind = kind
        self.convs = [make(n_channels, 2 * n_channels, 3, stride=2, padding=1, groups=groups, key=keys[0])]
        if kind == "1x1":  # as in ShuffleNet
            self.convs = [make(n_channels, n_channels, 1, groups=groups, key=keys[0])]
        if kind == "scan":  # as many output channels as input channels
            self.convs = [make(n_channels, n_channels, 3, padding=1, groups=groups, key=key) for key in keys]

    def __call__(self, x):
        if self.kind != "scan":
            return jax.nn.silu(self.convs[0](x))
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(eqx.filter(conv, eqx.is_array) for conv in self.convs))
        static = eqx.filter(self.convs[0], eqx.is_array, inverse=True)
        step = jax.checkpoint(lambda x, arrays: (jax.nn.silu(eqx.combine(arrays, static)(x)), None))
        x = jax.lax.scan(step, x, stacked)[0]
        return jax.lax.cond(x.sum() > 1e6, lambda x: x, lambda x: self.convs[0](x), x)


def loss_fn(model, batch, key):
    return jnp.square(jax.vmap(model)(batch)).mean()


def grad_fn(model, batch, key):
    """A user's own gradient function, which replaces the Trainer's."""
    loss, grads = eqx.filter_value_and_grad(loss_fn)(model, batch, key)
    return redeqx.Loss(loss * len(batch), len(batch)), grads


def gradients(model, batch, n_model_shards, n_fsdp_shards, n_sequence_shards=1, **options):
    """The gradients, measured as the change of each leaf by a step of SGD with learning rate 1."""
    deployer = redeqx.Deployer(
        n_model_shards=n_model_shards, n_fsdp_shards=n_fsdp_shards, n_sequence_shards=n_sequence_shards, verbose=False
    )
    trainer = redeqx.Trainer(
        deployer, model=model, optimizer=optax.sgd(1.0), collate_fn=np.stack, loss_fn=loss_fn, **options
    )
    trainer.update(list(batch))
    return jax.tree.map(
        lambda a, b: np.asarray(a) - np.asarray(b), *(eqx.filter(m, eqx.is_array) for m in (model, trainer.model))
    )


KINDS = [
    (12, "plain", 12), (3, "plain", 12), (12, "1d", 12), (12, "scan", 12), (3, "plain", 9), (9, "1d", 9), (9, "scan", 9),
    (4, "1x1", 12), (3, "1x1", 12),
]  # fmt: skip


@pytest.mark.parametrize(
    ("mesh", "groups", "kind", "n_channels"),
    [
        *(((2, 2), *KINDS[i]) for i in (0, 4, 6, 7)),
        *(pytest.param((2, 2), *KINDS[i], marks=pytest.mark.sweep) for i in (1, 2, 3, 5, 8)),
        *(pytest.param([(4, 1), (2, 1)][i % 2], *kind, marks=pytest.mark.sweep) for i, kind in enumerate(KINDS)),
    ],
)
def test_gradient_of_a_convolutions(x64, mesh, groups, kind, n_channels):
    model = jax.tree.map(lambda x: x.astype(jnp.float64) if eqx.is_array(x) else x, Net(groups, kind, n_channels))
    space = (8,) if kind == "1d" else (8, 6)
    batch = np.random.default_rng(0).normal(size=(8, n_channels, *space))
    expected = eqx.filter_jit(eqx.filter_grad(loss_fn))(model, batch, None)
    found = gradients(model, batch, *mesh)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, np.asarray(b), rtol=1e-6, atol=1e-10)


class OverText(eqx.Module):
    """A convolution for each channel over the positions of a text, as in a Hyena."""

    embedding: eqx.nn.Embedding
    conv: eqx.nn.Conv1d
    n_cut: int = eqx.field(static=True)

    def __init__(self, n_cut: int):
        keys = jax.random.split(jax.random.key(0), 2)
        self.n_cut = n_cut
        self.embedding = eqx.nn.Embedding(16, 9, key=keys[0])
        self.conv = eqx.nn.Conv1d(9, 9, 3, padding=[(2, 0)], groups=9, key=keys[1])

    def __call__(self, ids):
        return jnp.tanh(self.conv(jax.vmap(self.embedding)(ids[: len(ids) - self.n_cut]).T)).T


@pytest.mark.parametrize(
    ("mesh", "n_rows", "kind", "n_positions"),
    [
        ((1, 4), 8, "image", None), ((1, 4), 2, "text", 30), ((1, 4), 8, "all but one", 32),
        *(pytest.param((1, 4), 2, *of, marks=pytest.mark.sweep) for of in (("image", None), ("text", 29), ("text", 32))),
        *(pytest.param((2, 2), 8, *of, marks=pytest.mark.sweep) for of in (("image", None), ("text", 31))),
        *(pytest.param((1, 4), 2, "all but one", n, marks=pytest.mark.sweep) for n in (32, 33)),
    ],
)  # fmt: skip
def test_gradient_with_sequence_shards(x64, mesh, n_rows, kind, n_positions):
    """Images have no positions, and those of a text may not divide, or only without those that are cut off."""
    rng = np.random.default_rng(0)
    model, batch = Net(9, n_channels=9), rng.normal(size=(n_rows, 9, 8, 6))
    if kind != "image":
        model = OverText(n_cut=int(kind == "all but one"))
        batch = rng.integers(0, 16, size=(n_rows, n_positions)).astype(np.int32)
    model = jax.tree.map(lambda x: x.astype(jnp.float64) if eqx.is_array(x) else x, model)
    expected = eqx.filter_jit(eqx.filter_grad(loss_fn))(model, batch, None)
    found = gradients(model, batch, mesh[0], 1, n_sequence_shards=mesh[1])
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, np.asarray(b), rtol=1e-6, atol=1e-10)


# --- positions that are split -------------------------------------------------------------------------------------------


class Ends(eqx.Module):
    """Two convolutions over the positions of a text, as in Whisper, of which the first position counts."""

    embedding: eqx.nn.Embedding
    convs: list[eqx.nn.Conv1d]

    def __init__(self):
        keys = jax.random.split(jax.random.key(0), 3)
        self.embedding = eqx.nn.Embedding(16, 8, key=keys[0])
        self.convs = [eqx.nn.Conv1d(8, 8, 3, stride, padding=1, key=keys[stride]) for stride in (1, 2)]

    def __call__(self, ids):
        x = jax.vmap(self.embedding)(ids).T
        for conv in self.convs:
            x = jnp.tanh(conv(x))
        return x[:, 0]


@pytest.mark.parametrize(
    ("mesh", "n_rows"),
    [((1, 2), 3), ((2, 2), 8), *(pytest.param(*of, marks=pytest.mark.sweep) for of in (((2, 2), 3), ((2, 4), 1)))],
)
def test_gradient_along_split_positions(x64, mesh, n_rows):
    """The model axis splits the input channels of the second one, and no axis rows that do not divide."""
    model = jax.tree.map(lambda x: x.astype(jnp.float64) if eqx.is_array(x) else x, Ends())
    batch = np.random.default_rng(0).integers(0, 16, size=(n_rows, 32)).astype(np.int32)
    expected = eqx.filter_jit(eqx.filter_grad(loss_fn))(model, batch, None)
    found = gradients(model, batch, mesh[0], 1, n_sequence_shards=mesh[1])
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, np.asarray(b), rtol=1e-6, atol=1e-10)


class OverPixels(eqx.Module):
    """An attention over the pixels of an image between two convolutions, as in a UNet."""

    convs: list[eqx.nn.Conv2d]
    attention: eqx.nn.MultiheadAttention

    def __init__(self):
        keys = jax.random.split(jax.random.key(0), 3)
        self.convs = [eqx.nn.Conv2d(8, 8, 3, padding=1, key=key) for key in keys[:2]]
        self.attention = eqx.nn.MultiheadAttention(4, 8, key=keys[2])

    def __call__(self, x):
        x = jnp.tanh(self.convs[0](x))
        pixels = x.reshape(8, -1).T
        pixels = pixels + self.attention(pixels, pixels, pixels)
        return self.convs[1](pixels.T.reshape(x.shape))


@pytest.mark.parametrize("n_sequence_shards", [2, pytest.param(4, marks=pytest.mark.sweep)])
def test_gradient_of_a_u_net_on_a_ring(n_sequence_shards):
    """As of pdequinox: positions are padded with those of the other end, and a transposed convolution cuts some off. XLA's
    verifier refused the step."""

    def conv(x, weight, stride=1, padding=(0, 0), dilation=1):
        x = jnp.pad(x, ((0, 0), (0, 0), (1, 1)), mode="wrap")
        return jax.lax.conv_general_dilated(x, weight, (stride,), [padding], lhs_dilation=(dilation,))

    def loss_fn(model, batch, key):
        x = jax.nn.gelu(conv(batch[:, None], model["in"]))
        y = conv(jax.nn.gelu(conv(x, model["down"], stride=2)), model["up"], padding=(-1, 0), dilation=2)
        return jnp.square(conv(jnp.concatenate([x, y], 1), model["out"])).mean()

    rng = np.random.default_rng(0)
    shapes = {"in": (4, 1, 3), "down": (4, 4, 3), "up": (4, 4, 3), "out": (1, 8, 3)}
    model = {name: (rng.normal(size=shape) * 0.3).astype(np.float32) for name, shape in shapes.items()}
    batch = rng.normal(size=(8, 32)).astype(np.float32)
    expected = jax.jit(jax.grad(loss_fn))(model, batch, None)
    deployer = redeqx.Deployer(n_sequence_shards=n_sequence_shards, verbose=False)
    trainer = redeqx.Trainer(deployer, model=model, optimizer=optax.sgd(1.0), collate_fn=np.stack, loss_fn=loss_fn)
    trainer.update(list(batch))
    for name, gradient in expected.items():
        found = model[name] - np.asarray(trainer.model[name])
        np.testing.assert_allclose(found, gradient, rtol=1e-4, atol=1e-5 * np.abs(gradient).max())


@pytest.mark.sweep
def test_gradient_around_an_attention_over_pixels():
    """Of rows that do not divide: the attention splits its queries, so XLA would split the image's sides."""
    model, batch = OverPixels(), np.random.default_rng(0).normal(size=(3, 8, 8, 8)).astype(np.float32)
    expected, found = eqx.filter_jit(eqx.filter_grad(loss_fn))(model, batch, None), gradients(model, batch, 2, 1, 2)
    for a, b in zip(jax.tree.leaves(found.convs), jax.tree.leaves(expected.convs), strict=True):
        np.testing.assert_allclose(a, np.asarray(b), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("size", "stride", "padding", "dilations", "n_groups", "numbers"),
    [
        (3, 1, (2, 0), (1, 1), 1, ("NCW", "OIW", "NCW")),
        (5, 2, (4, 4), (1, 2), 1, ("WNC", "WIO", "CWN")),
        (3, 3, (-1, 10), (2, 1), 4, ("NWC", "WIO", "NWC")),
        (65, 1, (64, 0), (1, 1), 4, ("CNW", "OIW", "WNC")),  # longer than all windows
        (1, 4, (0, 0), (1, 1), 1, ("NCW", "OIW", "NCW")),  # shorter than its stride
    ],
)
def test_windows_are_rows(x64, size, stride, padding, dilations, n_groups, numbers):
    rng = np.random.default_rng(0)
    weight = rng.normal(size=[{"O": 4, "I": 8 // n_groups, "W": size}[dim] for dim in numbers[1]])
    batch = rng.normal(size=(2, 32, 8))

    def convolve(weight, batch):
        x = jnp.transpose(batch, ["NWC".index(dim) for dim in numbers[0]])
        return jax.lax.conv_general_dilated(
            x, weight, (stride,), [padding], dilations[:1], dilations[1:], numbers, feature_group_count=n_groups
        )

    def step(fn):
        return jax.value_and_grad(lambda *args: jnp.square(fn(*args)).sum(), (0, 1))

    rule = FixConvolutions(make_mesh(n_sequence_shards=4), inputs=Inputs(n_weights=1, n_state=0, n_batch=1))
    found, expected = (jax.jit(step(fn))(weight, batch) for fn in (transformed(convolve, [rule]), convolve))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)
    (eqn,) = (
        eqn
        for eqn in jax.make_jaxpr(transformed(convolve, [rule]))(weight, batch).eqns
        if eqn.primitive.name == "conv_general_dilated"
    )
    assert eqn.invars[0].aval.shape[eqn.params["dimension_numbers"].lhs_spec[0]] == 4 * 2


def test_xla_still_computes_split_positions_wrongly():
    """The third error that `FixConvolutions` avoids (jax 0.10.2, 2026-11-27). Once this fails, delete its windows."""
    mesh = make_mesh(2, n_sequence_shards=2)
    batch, weight = jax.random.normal(jax.random.key(0), (8, C, 16)), jax.random.normal(jax.random.key(1), (C, C, 3))

    def loss(weight, batch):
        return jnp.square(jnp.tanh(jax.lax.conv_general_dilated(batch, weight, (1,), "SAME"))).sum()

    expected = jax.jit(jax.grad(loss))(weight, batch)
    specs = ((weight, P()), (batch, P(("data", "fsdp"), None, "sequence")))
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in specs]
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(*placed), 2 * expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("n_series", [1, 8])
def test_gradient_of_a_kernel_that_slides_along_rows(x64, n_series):
    """The rows are a series, and split over data shards; the model axis repeats the convolution."""

    def loss_fn(model, batch, key):
        series = jnp.outer(batch @ model["weight"], jnp.arange(1.0, n_series + 1.0)).T
        out = jax.lax.conv_general_dilated(jnp.sin(series)[:, None], model["kernel"][None, None], (1,), "SAME")
        return jnp.square(out).mean()

    rows = np.random.default_rng(0).normal(size=(20, 4))
    model = {"weight": jnp.arange(1.0, 5.0), "kernel": jnp.array([0.3, 0.7, -0.2, 0.5])}
    deployer = redeqx.Deployer(n_model_shards=2, verbose=False)
    trainer = redeqx.Trainer(deployer, model=model, optimizer=optax.sgd(1.0), collate_fn=np.stack, loss_fn=loss_fn)
    expected = jax.tree.map(lambda x, grad: np.asarray(x - grad), model, jax.grad(loss_fn)(model, rows, None))
    trainer.update(rows)
    for name in model:
        np.testing.assert_allclose(np.asarray(trainer.model[name]), expected[name], rtol=1e-9)


@pytest.mark.parametrize("n_channels", [12, 9])
def test_gradient_taken_by_a_grad_fn(x64, n_channels):
    model = jax.tree.map(lambda x: x.astype(jnp.float64) if eqx.is_array(x) else x, Net(n_channels, "plain", n_channels))
    batch = np.random.default_rng(0).normal(size=(8, n_channels, 8, 6))
    expected = eqx.filter_jit(eqx.filter_grad(loss_fn))(model, batch, None)
    found = gradients(model, batch, 4, 1, grad_fn=grad_fn)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, np.asarray(b), rtol=1e-6, atol=1e-10)


def test_channels_that_do_not_divide_are_split_by_groups():
    """Without the groups of zeros XLA gathers the rows, and each device convolves all of them with all groups."""
    mesh = make_mesh(2)
    shapes = ((18, 1, 3), P()), ((32, 9, 64), P(("data", "fsdp")))
    placed = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec)) for shape, spec in shapes]

    def loss(weight, batch):
        out = jax.lax.conv_general_dilated(batch, weight, (2,), [(1, 1)], feature_group_count=9)
        return jnp.square(jnp.tanh(out)).mean()

    def compiled(fn, shapes):
        return jax.jit(jax.grad(fn)).lower(*shapes).compile()

    program = compiled(transformed(loss, [FixConvolutions(mesh)]), placed)
    on_one = compiled(loss, [jax.ShapeDtypeStruct(shape, jnp.float32) for shape, _ in shapes])
    assert program.cost_analysis()["flops"] < on_one.cost_analysis()["flops"] / 4
    assert "all-gather" not in {each.kind for each in collectives(Module.of(program.as_text()))}


@pytest.mark.parametrize("n_model_shards", [2, 4])
def test_xla_still_sums_the_gradient_too_often(n_model_shards):
    """The error that `FixConvolutions` avoids (jax 0.10.2, 2026-11-25). Once this fails, delete the rule."""
    mesh = make_mesh(n_model_shards)
    batch, weight = jax.random.normal(jax.random.key(0), (8, C, 8)), jax.random.normal(jax.random.key(1), (C, 1, 3))

    def loss(weight, batch):
        return jnp.square(jax.lax.conv_general_dilated(batch, weight, (1,), "SAME", feature_group_count=C)).mean()

    expected = jax.jit(jax.grad(loss))(weight, batch)
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in ((weight, P()), (batch, P(("data", "fsdp"))))]
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(*placed), n_model_shards * expected, rtol=1e-4, atol=1e-6)


class Adapted(eqx.Module):
    """A convolution with channels last, whose kernel takes a step on each row before it is used, as in meta-learning."""

    kernel: jax.Array

    def convolve(self, kernel, x):
        return jax.lax.conv_general_dilated(x[None], kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))[0]

    def __call__(self, x):
        gradient = jax.grad(lambda kernel: jnp.square(self.convolve(kernel, x) - x).mean())(self.kernel)
        return self.convolve(self.kernel - gradient, x)


@pytest.mark.parametrize("mesh", [(1, 1), (2, 2), pytest.param((4, 1), marks=pytest.mark.sweep)])
def test_gradient_of_kernels_for_each_row(x64, mesh):
    rng = np.random.default_rng(0)
    model, batch = Adapted(jnp.asarray(rng.normal(size=(3, 4, 4)))), rng.normal(size=(8, 10, 4))
    expected, found = eqx.filter_jit(eqx.filter_grad(loss_fn))(model, batch, None), gradients(model, batch, *mesh)
    np.testing.assert_allclose(found.kernel, expected.kernel, rtol=1e-6, atol=1e-10)


def test_xla_still_takes_one_dim_for_another():
    """The fourth error that `FixConvolutions` avoids (jax 0.10.2, 2026-11-27). Once this fails, delete `_in_order`."""
    mesh = make_mesh(1)
    x, weight = jax.random.normal(jax.random.key(0), (8, 6, 3)), jax.random.normal(jax.random.key(1), (16, 1, 6))

    def convolve(x, weight):
        return jax.lax.conv_general_dilated(
            x, weight, (1,), [(1, 1)], dimension_numbers=("CWN", "OIW", "NCW"), feature_group_count=8
        )

    by_channel = jax.device_put(x, NamedSharding(mesh, P("data")))
    assert not np.allclose(jax.jit(convolve)(by_channel, weight), jax.jit(convolve)(x, weight), rtol=0.1)


# --- windows that do not slide ------------------------------------------------------------------------------------------


class Styled(eqx.Module):
    """A convolution whose kernel depends on the row, as in StyleGAN."""

    weight: jax.Array
    style: eqx.nn.Linear

    def __init__(self, size):
        self.weight = jax.random.normal(jax.random.key(0), (8, 3, size, size))
        self.style = eqx.nn.Linear(3, 3, key=jax.random.key(1))

    def __call__(self, x):
        weight = self.weight * self.style(x.mean((1, 2)))[:, None, None]
        return jax.lax.conv_general_dilated(x[None], weight, (1, 1), "SAME")[0]


@pytest.mark.parametrize(("mesh", "size"), [((1, 1), 1), ((2, 2), 3), pytest.param((2, 2), 1, marks=pytest.mark.sweep)])
def test_kernels_of_rows(x64, mesh, size):
    model = jax.tree.map(lambda x: x.astype(jnp.float64) if eqx.is_array(x) else x, Styled(size))
    batch = np.random.default_rng(0).normal(size=(16, 3, 4, 4))
    found, expected = gradients(model, batch, *mesh), eqx.filter_jit(eqx.filter_grad(loss_fn))(model, batch, None)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, np.asarray(b), rtol=1e-6, atol=1e-10)
    predictor = redeqx.Predictor(
        redeqx.Deployer(0, *mesh, verbose=False), model=model, collate_fn=np.stack,
        pred_fn=lambda model, batch, key: jax.vmap(model)(batch),
    )  # fmt: skip
    outputs = np.stack(predictor.predict(list(batch), batch_size=16))
    np.testing.assert_allclose(outputs, np.stack([model(x) for x in batch]), rtol=1e-6, atol=1e-10)


@pytest.mark.parametrize("by_batch", [False, True])
@pytest.mark.parametrize(
    ("space", "kernel", "padding", "strides", "numbers"),
    [
        ((5, 6), (1, 1), [(0, 0), (0, 0)], (1, 1), ("NCHW", "OIHW", "NCHW")),
        ((5, 6), (5, 6), [(0, 0), (0, 0)], (2, 1), ("NHWC", "OIHW", "CNHW")),
        ((1, 1), (3, 2), [(2, 2), (1, 1)], (1, 1), ("CHWN", "IHWO", "HWNC")),
        ((5, 1), (1, 2), [(0, 0), (1, 1)], (1, 1), ("NHWC", "HWIO", "NHWC")),
        ((1, 4), (1, 4), [(0, 0), (0, 0)], (3, 3), ("NCHW", "HWIO", "CHWN")),
    ],
)
def test_a_window_that_does_not_slide_is_a_product(space, kernel, padding, strides, numbers, by_batch):
    n_groups, size, rng = 4, 2, np.random.default_rng(0)
    sizes = {"N": 8, "C": size if by_batch else n_groups * size, "H": space[0], "W": space[1]}
    of_kernel = {"O": 3 * n_groups, "I": size, "H": kernel[0], "W": kernel[1]}
    x, weight = rng.normal(size=[sizes[dim] for dim in numbers[0]]), rng.normal(size=[of_kernel[dim] for dim in numbers[1]])
    count = {"batch_group_count" if by_batch else "feature_group_count": n_groups}

    def convolve(x, weight):
        return jax.lax.conv_general_dilated(x, weight, strides, padding, dimension_numbers=numbers, **count)

    fixed = transformed(convolve, [FixConvolutions(make_mesh(1), is_differentiated=False)])
    found, expected = fixed(x, weight), convolve(x, weight)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert "conv_general_dilated" not in str(jax.make_jaxpr(fixed)(x, weight))


def test_xla_still_forgets_groups():
    """The other error that `FixConvolutions` avoids (jax 0.10.2, 2026-11-26)."""
    mesh = make_mesh(1)
    batch, weight = jax.random.normal(jax.random.key(0), (1, 128, 6)), jax.random.normal(jax.random.key(1), (128, 8, 1))

    def convolve(batch, weight):
        return jax.lax.conv_general_dilated(batch, weight, (1,), "SAME", feature_group_count=16)

    by_channel = jax.device_put(batch, NamedSharding(mesh, P(None, "data")))
    assert not np.allclose(jax.jit(convolve)(by_channel, weight), jax.jit(convolve)(batch, weight), rtol=0.1)
