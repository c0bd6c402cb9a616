"""What the verdict about rows changes in training: how steps are cut into micro-batches, and what is said."""

import threading
from contextlib import closing
from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import redeqx
from redeqx.data import BatchSize, CollatePool, batches, slices
from redeqx.dims import RowUse
from redeqx.machine import make_mesh
from redeqx.memory import Memory, SearchSpace
from redeqx.steps import Task
from tests._memory import divide_micro_batches

DATA = np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32)
MIXED = RowUse("mixed", 0, line="train.py:41", why="a reduction over rows")
UNSURE = RowUse("unknown", 0, line="train.py:41", why="a derivative of its own mixes rows or is not linear")
PAIRS = RowUse("separable", 0, group=2, line="train.py:7")


def contrastive(model, batch, key):
    """Every row is compared with all others."""
    x, y = jax.vmap(model)(batch[:, :5]), jax.vmap(model)(batch[:, 1:])
    return -jax.nn.log_softmax(x @ y.T).diagonal().mean()


def preference(model, batch, key):
    """Consecutive rows are pairs."""
    first, second = jax.vmap(model)(batch[:, :5])[:, 0].reshape(-1, 2).T
    return -jax.nn.log_sigmoid(first - second).mean()


@jax.custom_vjp
def with_clipped_gradient(x):
    """Clips the gradient of all rows together, which only the derivative tells."""
    return x


with_clipped_gradient.defvjp(lambda x: (x, None), lambda _, g: (g / jnp.maximum(1, 100 * jnp.linalg.norm(g)),))


def clipped(model, batch, key):
    return jnp.square(with_clipped_gradient(jax.vmap(model)(batch[:, :5]))).mean()


def make_trainer(loss_fn, *, shards=(1, 1), collate_fn=np.stack, verbose=False, **kwargs):
    return redeqx.Trainer(
        redeqx.Deployer(5, *shards, verbose=verbose),
        model=eqx.nn.MLP(5, 3, 16, 1, key=jax.random.key(1)),
        optimizer=optax.sgd(0.1),
        collate_fn=collate_fn,
        loss_fn=loss_fn,
        **kwargs,
    )


@pytest.fixture
def verdict(monkeypatch):
    """Sets the verdict about the losses of this test; returns the calls that asked for it."""
    calls = []

    def set_to(use):
        def find_row_use(task, weights, state, batch, key, *, inference):
            calls.append((jax.tree.leaves(batch)[0].shape, inference, threading.current_thread()))
            return use

        monkeypatch.setattr(Task, "find_row_use", find_row_use)
        return calls

    return set_to


def expected(loss_fn, parts):
    """Returns the loss and the weights after one update by the plain loss, averaged over parts of the rows."""
    model = eqx.nn.MLP(5, 3, 16, 1, key=jax.random.key(1))
    arrays, static = eqx.partition(model, eqx.is_array)

    def loss(arrays):
        model = eqx.combine(arrays, static)
        return sum(len(part) * loss_fn(model, part, None) for part in parts) / sum(map(len, parts))

    value, grads = jax.jit(jax.value_and_grad(loss))(arrays)
    return value, jax.tree.map(lambda x, g: x - 0.1 * np.asarray(g), arrays, grads)


def check_update(trainer, loss_fn, n_rows, parts):
    value, weights = expected(loss_fn, parts)
    assert trainer.update(DATA[:n_rows])["loss"] == pytest.approx(float(value), rel=1e-6)
    for x, y in zip(jax.tree.leaves(eqx.filter(trainer.model, eqx.is_array)), jax.tree.leaves(weights), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6)


# --- values --------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:`batch_size`. expected micro-batches")
@pytest.mark.parametrize("shards", [(1, 1), pytest.param((2, 2), marks=pytest.mark.sweep)])
@pytest.mark.parametrize(
    "n_rows, accumulate", [(20, 1), (21, 2), *(pytest.param(*case, marks=pytest.mark.sweep) for case in ((16, 1), (24, 2)))]
)
def test_rows_that_mix_are_cut_only_as_the_user_asked(n_rows, accumulate, shards):
    parts = np.split(DATA[:n_rows], [-(-n_rows // accumulate)]) if accumulate == 2 else [DATA[:n_rows]]
    check_update(make_trainer(contrastive, shards=shards, accumulate_grad_batches=accumulate), contrastive, n_rows, parts)


@pytest.mark.parametrize("n_rows", [13, pytest.param(35, marks=pytest.mark.sweep)])
def test_rows_that_may_mix_are_not_cut(n_rows):
    """13 rows on 8 devices: of a loss that is known to be separable, each device would compute one, and all of them five."""
    with pytest.warns(UserWarning, match="The loss may mix rows at .*test_row_use.py"):
        check_update(make_trainer(clipped), clipped, n_rows, [DATA[:n_rows]])


@pytest.mark.filterwarnings("ignore:`batch_size`. expected micro-batches")
@pytest.mark.parametrize(("is_sum", "accumulate"), [(False, 2), (True, 1), pytest.param(True, 2, marks=pytest.mark.sweep)])
def test_a_derivative_that_is_not_linear_takes_the_gradient_of_a_hand_written_step(is_sum, accumulate):
    """Of the mean over a micro-batch, and not of the sum over its rows, which is clipped more."""

    def loss_fn(model, batch, key):
        value = clipped(model, batch, key)
        return redeqx.Loss(value * len(batch), len(batch)) if is_sum else value

    trainer = make_trainer(loss_fn, accumulate_grad_batches=accumulate)
    model = trainer.model
    grads = [eqx.filter_jit(eqx.filter_grad(clipped))(model, part, None) for part in np.split(DATA[:32], accumulate)]
    found = [np.asarray(x) for x in jax.tree.leaves(eqx.filter(model, eqx.is_array))]
    trainer.update(DATA[:32])
    after = jax.tree.leaves(eqx.filter(trainer.model, eqx.is_array))
    for new, old, *of in zip(after, found, *map(jax.tree.leaves, grads), strict=True):
        np.testing.assert_allclose(new, old - 0.1 * np.mean(of, 0), atol=1e-6)


@pytest.mark.filterwarnings("ignore:`batch_size`. expected micro-batches")
def test_an_optimizer_takes_the_same_gradient_at_other_parameters():
    """Of the mean over each micro-batch, as in the step, also where it is not linear. An update is the difference."""

    def update(grads, state, params, *, grad_fn, value_fn, value, **extra):
        return jax.tree.map(lambda x, y: x - y + value_fn(params) - value, grad_fn(params), grads), state

    optimizer = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    trainer = redeqx.Trainer(
        redeqx.Deployer(verbose=False), model=jnp.ones((5, 3)), optimizer=optimizer, accumulate_grad_batches=2,
        loss_fn=lambda model, batch, key: (with_clipped_gradient(batch[:, :5] @ model) ** 2).mean(), collate_fn=np.stack,
    )  # fmt: skip
    trainer.update(DATA[:32])
    np.testing.assert_allclose(trainer.model, 1, atol=1e-6)


def test_a_gradient_of_16_bits_is_rounded_once():
    """The gradient of the mean times the weight, over the weight: in bfloat16 that would be two more roundings."""
    draw = np.random.default_rng(0)
    first, last, batch = (draw.normal(size=shape).astype(jnp.bfloat16) for shape in ((64, 64), (64, 8), (24, 64)))

    def mean(model, batch, key):
        return (with_clipped_gradient(batch @ model[0] @ model[1]).astype(jnp.float32) ** 2).mean()

    keep = optax.GradientTransformation(lambda params: params, lambda grads, state, params: (grads, grads))
    trainer = redeqx.Trainer(
        redeqx.Deployer(verbose=False), model=[jnp.asarray(first), jnp.asarray(last)], optimizer=keep, collate_fn=np.stack,
        loss_fn=lambda model, batch, key: redeqx.Loss(len(batch) * mean(model, batch, key), len(batch)),
    )  # fmt: skip
    expected = jax.jit(jax.grad(mean))(trainer.model, batch, None)
    trainer.update(list(batch))
    for found, grad in zip(trainer.opt_state, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(found), np.asarray(grad))


@pytest.mark.filterwarnings("ignore:`batch_size`. expected micro-batches")
@pytest.mark.parametrize("shards", [(1, 1), pytest.param((2, 2), marks=pytest.mark.sweep)])
@pytest.mark.parametrize(
    ("n_rows", "accumulate"),
    [
        (6, 1),
        (34, 2),
        *(pytest.param(*case, marks=pytest.mark.sweep) for case in ((8, 2), (16, 1), (20, 1), (34, 1))),
    ],
)
def test_rows_of_a_group_stay_together(n_rows, accumulate, shards):
    check_update(
        make_trainer(preference, shards=shards, accumulate_grad_batches=accumulate), preference, n_rows, [DATA[:n_rows]]
    )


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:`batch_size`. expected micro-batches")
def test_an_evaluation_of_rows_that_mix_keeps_the_batch_size():
    """40 examples by 16: batches of 16, 16 and 8 rows, each with its own value."""
    trainer = make_trainer(contrastive)
    trainer.update(DATA[:8])
    parts = [DATA[:16], DATA[16:32], DATA[32:]]
    value = sum(len(part) * eqx.filter_jit(contrastive)(trainer.model, part, None) for part in parts) / 40
    assert trainer.eval_loss(list(DATA), batch_size=16) == pytest.approx(float(value), rel=1e-6)


@pytest.mark.parametrize("loss_fn", [contrastive, "masked", "sum"])
def test_the_first_evaluation_says_once_that_it_depends_on_the_batch_size(loss_fn, capsys):
    """Also before any update. The value is that of each batch of 16, 16 and 8 rows."""

    def masked(model, batch, key):
        mask = batch[:, 5] > 0
        return (jnp.square(jax.vmap(model)(batch[:, :5])).mean(1) * mask).sum() / mask.sum()

    def total(model, batch, key):
        return jnp.square(jax.vmap(model)(batch[:, :5])).sum()

    loss_fn, said = {
        contrastive: (contrastive, "mixed at tests/training/test_row_use.py"),
        "masked": (masked, "separable after 1 value of the whole batch"),
        "sum": (total, "a sum over rows"),
    }[loss_fn]
    trainer = make_trainer(loss_fn, verbose=True)
    parts, of_part = np.split(DATA, [16, 32]), eqx.filter_jit(loss_fn)
    value = sum(len(part) * of_part(trainer.model, part, None) for part in parts) / 40
    for _ in range(2):
        assert trainer.eval_loss(list(DATA), batch_size=16) == pytest.approx(float(value), rel=1e-6)
    out = " ".join(capsys.readouterr().out.split())
    assert out.count("evaluation: the loss depends on the batch size. Rows: ") == 1
    assert f"evaluation: the loss depends on the batch size. Rows: {said}" in out


@pytest.mark.parametrize("is_activation", [False, True])
@pytest.mark.parametrize(("change", "rows"), [(jnp.sign, "rows: unknown at tests"), (lambda x: x / 2, "rows: separable")])
def test_derivatives_of_the_users_own_by_equinox_are_not_trusted(change, rows, is_activation):
    """The gradient of a mean is smaller over more rows, its sign is not: an update depends on the micro-batches."""

    @eqx.filter_custom_vjp
    def changed(x):
        return x

    changed.def_fwd(lambda perturbed, x: (x, None))
    changed.def_bwd(lambda residuals, gradient, perturbed, x: change(gradient))

    def loss_fn(model, batch, key):
        outputs = jax.vmap(model)(batch[:, :5])
        return jnp.square(outputs if is_activation else jax.vmap(changed)(outputs)).mean()

    activation = changed if is_activation else jax.nn.relu
    model = eqx.nn.MLP(5, 3, 16, 1, activation, key=jax.random.key(0))
    deployer = redeqx.Deployer(verbose=False)
    trainer = redeqx.Trainer(deployer, model=model, optimizer=optax.sgd(0.1), collate_fn=np.stack, loss_fn=loss_fn)
    trainer.update(DATA[:8])
    assert rows in trainer.plan.explain()


def test_rows_that_a_loss_of_optax_mixes_are_named_by_the_line_that_calls_it():
    def loss_fn(model, batch, key):
        return optax.losses.ntxent(jax.vmap(model)(batch[:, :5]), jnp.arange(len(batch)) // 2)

    trainer = make_trainer(loss_fn)
    trainer.update(DATA[:8])
    line = loss_fn.__code__.co_firstlineno + 1
    assert f"rows: mixed at tests/training/test_row_use.py:{line} (" in trainer.plan.explain()


class Normed(eqx.Module):
    """A model with BatchNorm, which mixes rows only in training."""

    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    last: eqx.nn.Linear

    def __init__(self):
        keys = jax.random.split(jax.random.key(1))
        self.first, self.last = eqx.nn.Linear(6, 8, key=keys[0]), eqx.nn.Linear(8, 3, key=keys[1])
        self.norm = eqx.nn.BatchNorm(8, "batch", mode="batch")

    def __call__(self, x, state):
        x, state = self.norm(self.first(x), state)
        return self.last(x), state


def normed_loss(model, state, batch, key):
    out, state = jax.vmap(model, in_axes=(0, None), out_axes=(0, None), axis_name="batch")(batch, state)
    return jnp.square(out).mean(), state


def normed_trainer(model, state, loss_fn=normed_loss, **kwargs):
    return redeqx.Trainer(
        redeqx.Deployer(5, **kwargs),
        model=model,
        model_state=state,
        optimizer=optax.sgd(0.1),
        collate_fn=np.stack,
        loss_fn=loss_fn,
    )


@pytest.mark.parametrize("is_trained", [True, False])
def test_an_evaluation_is_cut_by_what_the_loss_does_in_inference_mode(is_trained, capsys):
    """20 rows are 16 on all devices and 4 on each, and not 20 on each, as in training."""
    trainer = normed_trainer(*eqx.nn.make_with_state(Normed)())
    trainer.update(DATA[:16])
    if not is_trained:
        trainer = normed_trainer(trainer.model, trainer.model_state)
    model = eqx.nn.inference_mode(trainer.model)
    desired = float(eqx.filter_jit(normed_loss)(model, trainer.model_state, DATA, None)[0])
    for size in (40, 24, 20, 16, 5):
        assert trainer.eval_loss(list(DATA), batch_size=size) == pytest.approx(desired, rel=1e-6)
    assert trainer.eval_loss(iter(DATA), batch_size=24) == pytest.approx(desired, rel=1e-6)
    assert "evaluation:" not in capsys.readouterr().out


def test_an_evaluation_has_the_batches_of_its_own_verdict():
    """Two micro-batches of 20 rows in training, which mixes them; batches of 8 rows in an evaluation by 16, so that 40
    examples leave no remainder."""
    sizes = set()

    def loss_fn(model, state, batch, key):
        if model.norm.inference:
            sizes.add(len(batch))
        return normed_loss(model, state, batch, key)

    trainer = normed_trainer(*eqx.nn.make_with_state(Normed)(), loss_fn, verbose=False)
    trainer.update(DATA[:16])
    trainer.eval_loss(list(DATA), batch_size=16)
    assert sizes == {8, 16, 32}  # with 16 and 32 rows it is only traced


# --- rows of several shapes ----------------------------------------------------------------------------------------------


def padded(examples):
    longest = max(map(len, examples))
    return np.stack([np.pad(x, ((0, longest - len(x)), (0, 0))) for x in examples])


def dropout_loss(model, batch, key):
    """A mean over rows and positions: its constants depend on the length of the longest row."""
    x = eqx.nn.Dropout(0.3)(batch, key=key, inference=model.depth == 0)
    return jnp.square(jax.vmap(jax.vmap(model))(x)).mean()


@pytest.mark.sweep
def test_batches_of_other_lengths_are_divided_as_exactly_as_the_first():
    texts = [DATA[i : i + 3 + i // 16, :5] for i in range(36)]
    found = []
    for accumulate in (1, 2):
        trainer = make_trainer(dropout_loss, collate_fn=padded, accumulate_grad_batches=accumulate)
        trainer.train(texts, batch_size=16)  # 16, 16 and 4 rows, of 3, 4 and 5 positions
        evals = [trainer.eval_loss(texts[: 16 * n], batch_size=16) for n in (1, 2)]
        found.append([*evals, *(np.asarray(x) for x in jax.tree.leaves(eqx.filter(trainer.model, eqx.is_array)))])
    for x, y in zip(*found, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def sum_of_clipped(model, batch, key):
    return redeqx.Loss(clipped(model, batch, key) * len(batch), len(batch))


@pytest.mark.parametrize(("of_long_rows", "n"), [(contrastive, 12), (preference, 12), (sum_of_clipped, 16)])
def test_what_a_loss_does_with_rows_of_another_shape_is_found_for_them(of_long_rows, n, capsys):
    """By the first batch, 12 rows would be cut into 8 and 4, and the gradient be that of a sum over rows."""

    def loss_fn(model, batch, key):
        rows = batch.mean(1)
        return of_long_rows(model, rows, key) if batch.shape[1] > 3 else jnp.square(jax.vmap(model)(rows[:, :5])).mean()

    def scalar(model, batch):
        loss = loss_fn(model, batch, None)
        return loss.total / loss.weight if isinstance(loss, redeqx.Loss) else loss

    texts = [np.stack([x] * 3) for x in DATA[:16]] + [np.stack([x] * 4) for x in DATA[16 : 16 + n]]
    trainer = make_trainer(loss_fn, collate_fn=padded, verbose=True)
    model = trainer.model
    for batch in (padded(texts[:16]), padded(texts[16:])):
        grads = eqx.filter_jit(eqx.filter_grad(scalar))(model, batch)
        model = eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads))
    trainer.train(texts, batch_size=16)
    for x, y in zip(*(jax.tree.leaves(eqx.filter(each, eqx.is_array)) for each in (trainer.model, model)), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6)
    assert f"for batches with `value` [{n}, 4, 6]" in " ".join(capsys.readouterr().out.split())


# --- cuts ----------------------------------------------------------------------------------------------------------------


def cuts(size, n_rows, use, mesh):
    return [(group.n, group.rows) for group in size.cut(n_rows, use, mesh)]


def test_remainder_of_rows_that_mix_is_one_micro_batch():
    mesh = make_mesh(1, 1)
    size = BatchSize.of(mesh, None, 64, 2)
    assert cuts(size, 64, MIXED, mesh) == [(2, 32)]
    assert cuts(size, 61, MIXED, mesh) == [(1, 32), (1, 29)]
    assert cuts(size, 61, RowUse("separable", 0), mesh) == [(1, 32), (1, 24), (5, 1)]
    assert cuts(BatchSize.of(mesh, None, 20), 20, MIXED, mesh) == [(1, 20)]
    assert cuts(BatchSize.of(mesh, None, 24, 2), 24, MIXED, mesh) == [(2, 12)]  # not three micro-batches of 8
    assert cuts(BatchSize.of(mesh, 3, None, 2), 48, MIXED, mesh) == [(2, 24)]
    assert cuts(BatchSize.of(mesh, None, 25, 2), 25, MIXED, mesh) == [(1, 13), (1, 12)]
    assert cuts(BatchSize(128, 128), 140, RowUse("separable"), mesh) == [(1, 128), (1, 12)]  # no more than a device's 16


def test_groups_that_do_not_fill_every_device_take_the_most_rows_that_divide():
    mesh = make_mesh(1, 1)
    for rows, group, expected in ((96, 16, 96), (100, 16, 96), (8, 16, 16), (130, 16, 128), (24, 6, 24)):
        assert BatchSize(rows, rows).micro_batch_for(RowUse("separable", group=group), mesh) == expected


@pytest.mark.parametrize("shards", [(1, 1), (2, 1), (2, 2), (1, 8), (8, 1)])
@pytest.mark.parametrize("group", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("per_device, n_micro_batches", [(1, 1), (2, 1), (3, 2), (8, 1), (16, 2)])
def test_micro_batches_are_multiples_of_the_group(shards, group, per_device, n_micro_batches):
    mesh = make_mesh(*shards)
    use, size = RowUse("separable", 0, group=group), BatchSize.of(mesh, per_device, None, n_micro_batches)
    n_shards = 8 // shards[0]
    for n_rows in range(group, 3 * size.micro_batch, group):
        cut = size.cut(n_rows, use, mesh)
        assert sum(each.size for each in cut) == n_rows
        assert all(each.rows % group == 0 for each in cut)
    if per_device % group == 0:
        assert cuts(size, size.examples, use, mesh) == [(n_micro_batches, size.micro_batch)]  # as without groups
    whole = size.micro_batch_for(use, mesh)
    assert whole % n_shards == 0
    assert (whole // n_shards) % group == 0 or size.micro_batch < group * n_shards


def test_steps_that_do_not_divide_into_groups_are_refused_before_the_first_update(verdict):
    verdict(PAIRS)
    trainer = make_trainer(preference)
    message = (
        r"`batch_size`: expected steps of a multiple of 2 examples, since `loss_fn` takes 2 rows at a time \(train.py:7\), "
        "got a step of 7, with 16 examples a full step"
    )
    with pytest.raises(ValueError, match=message):
        trainer.train(DATA[:39], batch_size=16)
    assert trainer.step == 0
    with pytest.raises(ValueError, match="got a step of 9, with 9 examples a full step"):
        trainer.update(DATA[:9])
    trainer.fit(DATA[:39], batch_size=16, n_epochs=1, drop_remainder=True)
    assert trainer.step == 2


# --- before the first batch ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("as_examples", "n_workers"), [(list, 2), (iter, 0)], ids=["list", "iterator"])
def test_the_verdict_is_asked_before_the_first_batch_is_cut(as_examples, n_workers, verdict):
    calls = verdict(MIXED)
    collated = []

    def collate_fn(examples):
        collated.append(len(examples))
        return np.stack(examples)

    trainer = make_trainer(contrastive, collate_fn=collate_fn, workers=redeqx.Workers(n_workers))
    trainer.train(as_examples(DATA[:40]), batch_size=16)
    trainer.eval_loss(list(DATA), batch_size=16)
    # Once each; in an evaluation for the sizes of its batches, which may leave no remainder.
    assert calls == [((16, 6), inference, threading.main_thread()) for inference in (False, True)]
    assert sorted(collated) == [8] * 2 + [16] * 5  # each step once, and one for the sizes
    assert trainer.step == 3


def test_a_repeated_micro_batch_would_count_in_values_of_the_whole_batch():
    mesh, size = make_mesh(1, 1), BatchSize(16, 8, asked=2)
    shapes = {}
    for kind in ("separable", "after"):
        given = slices(DATA[:24], 16), CollatePool(np.stack), size, mesh
        with closing(batches(*given, find_use=lambda shapes, kind=kind: RowUse(kind, 0))) as upcoming:
            shapes[kind] = [batch.groups[0].shape[:2] for batch in upcoming]
    assert shapes == {"separable": [(2, 8), (2, 8)], "after": [(2, 8), (1, 8)]}


def test_an_error_of_the_verdict_ends_the_thread_that_reads():
    def fails(shapes):
        assert shapes.shape == (16, 6)
        raise ValueError("no")

    n_before = threading.active_count()
    with pytest.raises(ValueError, match="no"):
        batches(slices(DATA[:24], 16), CollatePool(np.stack), BatchSize(16, 8), make_mesh(1, 1), find_use=fails)
    assert threading.active_count() == n_before


def test_no_examples_ask_for_no_verdict():
    def use(shapes):
        pytest.fail("asked")

    with closing(batches(iter(()), CollatePool(np.stack), BatchSize(16, 8), make_mesh(1, 1), find_use=use)) as upcoming:
        assert list(upcoming) == []


@pytest.mark.parametrize("n_workers", [0, 1])
def test_a_leaf_whose_rows_are_not_its_first_dim_is_refused(n_workers):
    """A batch of 8 sequences of 8 numbers, transposed for a loss that loops over time first."""

    def collate_fn(examples):
        return {
            "x": np.stack([row[:2] for row in examples]),
            "times": np.stack([np.tile(row[:1], 8) for row in examples], 1),
        }

    def loss_fn(model, batch, key):
        return jnp.square(batch["times"].T * model.layers[0].weight.sum()).mean()

    trainer = make_trainer(loss_fn, collate_fn=collate_fn, workers=redeqx.Workers(n_workers))
    message = (
        r"`collate_fn` output `times`: expected rows in dim 0, one for each example, got shape \(8, 8\) for 8 examples and "
        r"\(8, 1\) for one. The leading dim is the batch: transpose it."
    )
    with pytest.raises(ValueError, match=message):
        trainer.update(DATA[:8])


def test_square_rows_are_no_transposed_batch():
    """The first dim is the rows, and `collate_fn` may refuse to collate one example alone."""

    def collate_fn(examples):
        if len(examples) % 2:
            raise ValueError("pairs only")
        return np.stack([np.tile(row[:5], (8, 1)) for row in examples])

    def loss_fn(model, batch, key):
        return jnp.square(jax.vmap(jax.vmap(model))(batch)).mean()

    make_trainer(loss_fn, collate_fn=collate_fn).update(DATA[:8])
    make_trainer(loss_fn, collate_fn=lambda examples: np.stack([np.tile(row[:5], (8, 1)) for row in examples])).update(
        DATA[:8]
    )


# --- what is said --------------------------------------------------------------------------------------------------------


def header_of(capsys, loss_fn, n_rows=16, **kwargs):
    """Returns what an update prints in its header, and the plan."""
    trainer = make_trainer(loss_fn, verbose=True, **kwargs)
    trainer.update(DATA[:n_rows])
    assert trainer.plan is not None
    return " ".join(capsys.readouterr().out.split()), trainer.plan.explain()


def test_the_header_and_the_plan_say_what_the_loss_does_with_rows(capsys, verdict):
    verdict(PAIRS)
    header, plan = header_of(capsys, preference)
    assert "rows separable, 2 rows at a time " in header
    assert plan.splitlines()[-1] == "rows: separable, 2 rows at a time"


@pytest.mark.parametrize("use, are", [(MIXED, "is"), (UNSURE, "may be")])
def test_the_header_names_micro_batches_that_are_batches_of_their_own(use, are, capsys, verdict):
    verdict(use)
    header, plan = header_of(capsys, contrastive, accumulate_grad_batches=2)
    said = f"{use.kind} at train.py:41 ({use.why})"
    assert f"rows {said}, so each of the 2 micro-batches, of 8 rows, {are} a batch of its own" in header
    assert plan.splitlines()[-1] == f"rows: {said}"


def test_draws_that_cannot_follow_rows_are_said_once(capsys, verdict):
    verdict(RowUse("separable", draws=("it is inside a custom derivative (train.py:9)",)))
    header, _ = header_of(capsys, preference)
    said = "draws differ with the number of micro-batches: it is inside a custom derivative (train.py:9)"
    assert header.count("inside a custom derivative") == 1 and said in header


def test_nothing_is_said_of_an_unknown_use(capsys, verdict):
    verdict(RowUse("unknown"))
    header, plan = header_of(capsys, preference)
    assert "rows" not in header and "rows:" not in plan


@pytest.mark.parametrize("use, mixes, n_evaluated", [(MIXED, "mixes", 16), (UNSURE, "may mix", 0)])
def test_micro_batches_that_cannot_be_cut_and_do_not_divide_give_a_warning(use, mixes, n_evaluated, verdict):
    verdict(use)
    message = (
        "`batch_size`: expected micro-batches of a multiple of 8 rows, so that each device computes its share, got 10. "
        f"The loss {mixes} rows at train.py:41, so they are not cut, and every device computes all of them. "
        "Choose a multiple of 16."
    )
    trainer = make_trainer(contrastive, accumulate_grad_batches=2)
    if n_evaluated:
        trainer.eval_loss(DATA[:n_evaluated], batch_size=n_evaluated)
    with pytest.warns(UserWarning) as caught:
        trainer.update(DATA[:20])
    assert [str(each.message) for each in caught] == [message]


# --- dry runs and the search for memory ----------------------------------------------------------------------------------


def test_a_dry_run_cuts_rows_as_the_run_does(verdict):
    verdict(MIXED)
    run = make_trainer(contrastive).dry_run(list(DATA), batch_size=20)
    report = " ".join(str(run).split())
    assert (
        "batch 1 micro-batches of 20 rows = 20 examples a step; each batch shard computes all 20 rows that do not divide "
        "over the 8 shards"
    ) in report
    assert report.count(f"rows {MIXED.text}") == 1 and report.count(f"rows: {MIXED.text}") == 1
    assert run.to_json()["rows"] == MIXED.text


@pytest.mark.parametrize(
    "use, n_groups",
    [
        (MIXED, 1),
        (PAIRS, 2),
        (RowUse("separable"), 4),
        (RowUse("after"), 4),
        (RowUse("separable", draws=("its key is not one of JAX's default kind (train.py:9)",)), 1),
        (RowUse("unknown"), 1),
        (replace(UNSURE, is_random=False), 1),
    ],
)
def test_memory_auto_cuts_only_rows_that_may_be_cut(use, n_groups, verdict, monkeypatch):
    """The loss draws, and a device has 4 rows of a micro-batch."""

    def draws(model, batch, key):
        return preference(model, batch + jax.random.normal(key, batch.shape), key)

    verdict(use)
    given, strategies = [], SearchSpace.strategies

    class Searched(Exception):
        pass

    def recorded(space):
        given.append(max(each.accumulate_grad_batches for each in strategies(space)))
        raise Searched

    monkeypatch.setattr("redeqx.memory._need.memory_of", lambda mesh: Memory(1))
    monkeypatch.setattr(SearchSpace, "strategies", recorded)
    with pytest.raises(Searched):
        make_trainer(draws, compute=redeqx.Compute(memory="auto")).update(DATA[:32])
    assert given == [n_groups]


def masked(model, batch, key):
    mask = (batch[:, 0] > 0).astype(jnp.float32)
    return (jnp.square(jax.vmap(model)(batch[:, :5])).mean(1) * mask).sum() / mask.sum()


def noisy(model, batch, key):
    return jnp.square(jax.vmap(model)(batch[:, :5] + jax.random.normal(key, batch[:, :5].shape))).mean()


@pytest.mark.parametrize(
    ("loss_fn", "n_parts"),
    [
        (preference, 2),
        *(pytest.param(*case, marks=pytest.mark.sweep) for case in ((masked, 2), (noisy, 2), (preference, 4), (noisy, 4))),
    ],
)
def test_parts_of_micro_batches_compute_the_same(loss_fn, n_parts, monkeypatch):
    """4 rows a device, also as 2 x 2 and 4 x 1; a remainder of 16 rows, two a device, has 2 parts if no pair is divided."""
    divide_micro_batches(monkeypatch, n_parts)
    trainer = make_trainer(loss_fn, compute=redeqx.Compute(memory="auto"))
    trainer.train(np.concatenate([DATA, DATA[:8]]), batch_size=32)
    expected_trainer = make_trainer(loss_fn)
    expected_trainer.train(np.concatenate([DATA, DATA[:8]]), batch_size=32)
    for x, y in zip(*(jax.tree.leaves(eqx.filter(t.model, eqx.is_array)) for t in (trainer, expected_trainer)), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6)


@pytest.mark.parametrize("place", [0, pytest.param(1, marks=pytest.mark.sweep)])
def test_parts_of_micro_batches_are_only_those_of_shapes_whose_rows_may_be_cut(place, monkeypatch):
    """Rows are means in the first step, and compared in the second one. One of the two steps does not fit."""
    memories = iter([Memory(2**40)] * place + [Memory(1)])

    def search(space, own, measure, *, to_fastest):
        return [measure(max(space.strategies(), key=lambda each: each.accumulate_grad_batches))]

    def loss_fn(model, batch, key):
        rows = batch.mean(1)
        return contrastive(model, rows, key) if batch.shape[1] > 3 else jnp.square(jax.vmap(model)(rows[:, :5])).mean()

    monkeypatch.setattr("redeqx.memory._need.memory_of", lambda mesh: next(memories, Memory(2**40)))
    monkeypatch.setattr(SearchSpace, "search", search)
    texts = [np.stack([x] * 3) for x in DATA[:16]] + [np.stack([x] * 4) for x in DATA[16:32]]
    trainer = make_trainer(loss_fn, compute=redeqx.Compute(memory="auto"))
    model = trainer.model
    for batch in (padded(texts[:16]), padded(texts[16:])):
        grads = eqx.filter_jit(eqx.filter_grad(loss_fn))(model, batch, None)
        model = eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads))
    trainer.train(texts, batch_size=16)
    for x, y in zip(*(jax.tree.leaves(eqx.filter(each, eqx.is_array)) for each in (trainer.model, model)), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6)


@pytest.mark.parametrize("n_fsdp_shards", [1, 8])
def test_the_loss_is_traced_for_two_numbers_of_rows_before_the_step(n_fsdp_shards):
    """Once each for the plan and the verdict, and in the step, which also tells its work without recomputation."""
    traced = []

    def loss_fn(model, batch, key):
        traced.append(len(batch))
        return (jax.vmap(model)(batch) ** 2).mean()

    deployer = redeqx.Deployer(n_fsdp_shards=n_fsdp_shards)
    model = eqx.nn.MLP(8, 8, 64, 2, key=jax.random.key(0))
    trainer = redeqx.Trainer(deployer, model=model, optimizer=optax.adam(1e-3), collate_fn=np.stack, loss_fn=loss_fn)
    trainer.fit(np.ones((16, 8), np.float32), batch_size=16)
    assert traced == [16, 32, 16]


def test_a_loss_that_reads_a_state_which_it_changes_is_mixed(capsys):
    """SpectralNorm takes one step of its power iteration in each call: in each micro-batch."""

    class Normed(eqx.Module):
        layer: eqx.nn.SpectralNorm

        def __init__(self):
            keys = jax.random.split(jax.random.key(0))
            self.layer = eqx.nn.SpectralNorm(eqx.nn.Linear(4, 4, key=keys[0]), "weight", key=keys[1])

    def loss_fn(model, state, batch, key):
        out, state = jax.vmap(model.layer, in_axes=(0, None), out_axes=(0, None), axis_name="batch")(batch, state)
        return (out**2).mean(), state

    model, state = eqx.nn.make_with_state(Normed)()
    trainer = redeqx.Trainer(
        redeqx.Deployer(), model=model, model_state=state, optimizer=optax.sgd(0.1), collate_fn=np.stack, loss_fn=loss_fn
    )
    trainer.update(np.ones((16, 4), np.float32))
    assert "mixed (it reads a state that each part of the batch changes)" in capsys.readouterr().out


def test_a_loss_that_reads_a_state_which_it_keeps_is_separable(capsys):
    def loss_fn(model, state, batch, key):
        mean, n = state
        return (((batch - mean) @ model) ** 2).mean(), (mean, n + 1)

    trainer = redeqx.Trainer(
        redeqx.Deployer(),
        model=jnp.ones(6),
        model_state=(jnp.ones(6), jnp.array(0)),
        optimizer=optax.sgd(0.1),
        collate_fn=np.stack,
        loss_fn=loss_fn,
    )
    trainer.update(DATA[:16])
    assert "separable" in (text := capsys.readouterr().out) and "mixed" not in text


@pytest.mark.parametrize("inference", [False, True])
def test_a_metric_that_is_divided_by_rows_and_is_no_sum_over_them_gives_a_warning(inference):
    def loss_fn(model, batch, key):
        errors, mask = jnp.abs(jax.vmap(model)(batch[:, :5])).mean(1), batch[:, 5] > 0
        sums = {"sum": errors.sum(), "masked": ((errors * mask).sum(), mask.sum()), "off": jnp.zeros(())}
        pairs = {
            "mean pair": (errors.mean(), 1),
            "count": (mask.sum(), 1),
            "weight": (jnp.abs(model.layers[0].bias).sum(), 1),
        }
        return redeqx.Loss(jnp.square(errors).sum(), errors.size, {**sums, **pairs, "mae": errors.mean()})

    trainer = make_trainer(loss_fn)
    with pytest.warns(UserWarning) as caught:
        for _ in range(2):
            trainer.eval_loss(list(DATA), batch_size=16) if inference else trainer.update(DATA[:16])
    (message,) = {str(each.message) for each in caught}
    assert message == (
        "`Loss.metrics['mae']`: expected a sum over rows, as its weight is (by default that of the loss), got a value that "
        "does not grow with their number, such as a mean. Return its sum, or the pair `(mae, 1)`."
    )


def test_a_term_without_rows_counts_once_in_an_evaluation():
    """In the sum of a batch is its share of the term, by the rows of all batches."""

    def penalised(model, batch, key):
        return redeqx.Loss(((batch @ model) ** 2).sum() + (model**2).sum(), len(batch))

    options = {"model": jnp.ones(6), "optimizer": optax.sgd(0.1), "collate_fn": np.stack}
    trainer = redeqx.Trainer(redeqx.Deployer(verbose=False), loss_fn=penalised, **options)
    expected = penalised(trainer.model, DATA[:22], None)
    np.testing.assert_allclose(trainer.eval_loss(DATA[:22], batch_size=8), expected.total / expected.weight, rtol=1e-6)


def test_an_evaluation_takes_no_gradient(capsys):
    """Of a loop that ends by a condition, only `jax.jacfwd` takes one."""

    @jax.custom_jvp
    def softened(x):
        return jnp.maximum(x, 0)

    softened.defjvp(lambda primals, tangents: (softened(*primals), jax.nn.sigmoid(primals[0]) * tangents[0]))

    def loss_fn(model, batch, key):
        halved = jax.vmap(lambda x: jax.lax.while_loop(lambda x: jnp.abs(x).sum() > 1, lambda x: x / 2, x * model))(batch)
        return softened(halved).mean()

    def grad_fn(model, batch, key):
        return loss_fn(model, batch, key), jax.jacfwd(loss_fn)(model, batch, key)

    trainer = redeqx.Trainer(
        redeqx.Deployer(), model=jnp.ones(6), optimizer=optax.sgd(0.1), collate_fn=np.stack, loss_fn=loss_fn, grad_fn=grad_fn
    )
    trainer.train(DATA, batch_size=8)
    expected = loss_fn(trainer.model, DATA, None)
    np.testing.assert_allclose(trainer.eval_loss(DATA, batch_size=8), expected, rtol=1e-6)
    assert "depend on the batch size" not in capsys.readouterr().out


def test_a_state_that_is_not_read_is_changed_once():
    """Rows that do not divide over the devices would be computed in micro-batches, each of which would change it."""

    def loss_fn(model, state, batch, key):
        return jnp.square(jax.vmap(model)(batch)).mean(), 0.9 * state + 0.1 * batch.mean(0)

    trainer = redeqx.Trainer(
        redeqx.Deployer(verbose=False), model=eqx.nn.Linear(6, 1, key=jax.random.key(0)), model_state=jnp.zeros(6),
        optimizer=optax.sgd(0.1), collate_fn=np.stack, loss_fn=loss_fn,
    )  # fmt: skip
    with pytest.warns(UserWarning, match="got 13. Each micro-batch changes the state, so its rows are not cut"):
        trainer.update(DATA[:13])
    np.testing.assert_allclose(np.asarray(trainer.model_state), 0.1 * DATA[:13].mean(0), rtol=1e-5)
