"""Random draws belong to rows: an update, an evaluation or a prediction draws the same numbers however it is computed.

Each loss of `drawing.py` is compared with itself on the whole update, undivided, with the key of that update.
"""

import re
from contextlib import nullcontext
from dataclasses import replace
from functools import cache

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import redeqx
from redeqx.machine import make_mesh
from redeqx.memory import Memory, SearchSpace
from redeqx.models.gpt2 import GPT2, GPT2Config
from tests.promises.drawing import EXAMPLES, GRID, LOSSES, MODELS, D, collate_fn

SEED = 3
RATE = 1024.0  # so that the gradients are read from the new parameters without loss of digits
MESHES = {"1": (1, 1, 1), "4": (4, 1, 1), "8": (8, 1, 1), "2x2x2": (2, 2, 2)}  # data, fsdp, model
OF_POSITIONS = {"2x1x1x4": (2, 1, 1, 4)}  # and sequence: devices that share rows


def make_deployer(mesh="8", **options):
    deployer = redeqx.Deployer(SEED, **{"verbose": False, **options})
    shape = {**MESHES, **OF_POSITIONS}[mesh]
    devices = jax.devices()[: int(np.prod(shape))]
    deployer._mesh = make_mesh(shape[2], shape[1], devices, *shape[3:])
    return deployer


def make_trainer(loss_fn, model, mesh="8", accumulate=1, *, rate=RATE, deployer=None, **options):
    return redeqx.Trainer(
        make_deployer(mesh) if deployer is None else deployer,
        model=model,
        optimizer=optax.sgd(rate),
        loss_fn=loss_fn,
        accumulate_grad_batches=accumulate,
        **{"collate_fn": collate_fn, **options},
    )


def key_of_step(step, seed=SEED):
    """Returns the key of an update of a run's first trainer: of the seed, the trainer, training, the step."""
    key = jax.random.key(seed)
    for number in (1, 0, step):
        key = jax.random.fold_in(key, number)
    return key


def plain(loss_fn, model, batch, key):
    """Returns the loss, its metrics and gradients for the whole batch, undivided, on one device."""
    arrays, static = eqx.partition(model, eqx.is_inexact_array)

    def mean(arrays):
        loss = loss_fn(eqx.combine(arrays, static), batch, key)
        if not isinstance(loss, redeqx.Loss):
            return loss, {}
        metrics = {name: x if isinstance(x, tuple) else (x, loss.weight) for name, x in loss.metrics.items()}
        return loss.total / loss.weight, {name: total / weight for name, (total, weight) in metrics.items()}

    (loss, metrics), grads = jax.jit(jax.value_and_grad(mean, has_aux=True))(arrays)
    return {"loss": loss, **metrics}, jax.tree.leaves(grads)


@cache
def expected(name, rows):
    return plain(LOSSES[name], MODELS[name](), collate_fn(EXAMPLES[:rows]), key_of_step(0))


def assert_first_update_matches(trainer, examples, metrics, grads):
    """Compares the metrics of the first update, and the gradient that it descended. Returns all metrics."""
    before = [np.asarray(x) for x in jax.tree.leaves(eqx.filter(trainer.model, eqx.is_inexact_array))]
    found = trainer.update(examples)
    after = jax.tree.leaves(eqx.filter(trainer.model, eqx.is_inexact_array))
    for name, value in metrics.items():
        assert found[name] == pytest.approx(float(value), rel=1e-6, abs=1e-6), name
    errors = [(old - np.asarray(new)) / RATE - grad for old, new, grad in zip(before, after, grads, strict=True)]
    assert norm(errors) < 1e-6 * norm(grads)
    return found


def norm(arrays):
    return np.sqrt(sum(np.sum(np.square(x, dtype=np.float64)) for x in arrays))


# --- one update ----------------------------------------------------------------------------------------------------------

QUICK = {  # on what is hardest for each; tests below have the dropout by row and the VAE
    ("dropout_in_a_scan_over_layers", "2x2x2", 1, 20),
    ("keys_folded_with_the_row", "4", 4, 32),
    ("samples_of_a_prompt", "4", 2, 20),
    ("dropout_by_row", "2x1x1x4", 2, 20),
}
COVERING = {  # each loss on another mesh; each mesh with several numbers of micro-batches, and with rows that do not divide
    ("dropout_by_row", "4", 2, 32),
    ("one_bernoulli", "1", 2, 20),
    ("dropout_in_a_scan_over_layers", "4", 1, 32),
    ("droppath", "8", 4, 32),
    ("diffusion", "2x2x2", 2, 20),
    ("keys_folded_with_the_row", "1", 4, 20),
    ("categorical_sampling", "2x2x2", 1, 20),
    ("vae", "8", 1, 32),
    ("samples_of_a_prompt", "2x2x2", 4, 20),
}


@pytest.mark.parametrize(
    ("name", "mesh", "accumulate", "rows"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.sweep) for case in sorted({*QUICK, *COVERING})],
)
def test_an_update_is_that_of_the_undivided_loss(name, mesh, accumulate, rows):
    trainer = make_trainer(LOSSES[name], MODELS[name](), mesh, accumulate)
    assert_first_update_matches(trainer, EXAMPLES[:rows], *expected(name, rows))


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param(name, "2x2x2" if i % 2 else "8", marks=() if i < 2 else pytest.mark.sweep)
        for i, name in enumerate(name for name in LOSSES if name not in GRID)
    ],
)
def test_other_forms_of_draws_follow_the_rows(name, mesh):
    trainer = make_trainer(LOSSES[name], MODELS[name](), mesh, 2)
    assert_first_update_matches(trainer, EXAMPLES[:20], *expected(name, 20))


@pytest.mark.parametrize("rows", [20, pytest.param(17, marks=pytest.mark.sweep)])
def test_gradients_of_the_users_own_draw_for_the_rows(rows):
    """The derivative is inside the user's function, so that the step traces it on the mesh."""
    loss_fn, model = LOSSES["dropout_by_row"], MODELS["dropout_by_row"]()
    trainer = make_trainer(loss_fn, model, "2x2x2", 2, grad_fn=eqx.filter_value_and_grad(loss_fn))
    assert_first_update_matches(trainer, EXAMPLES[:rows], *expected("dropout_by_row", rows))


class Counting(eqx.Module):
    model: eqx.Module
    n_calls: eqx.nn.StateIndex

    def __init__(self):
        self.model = MODELS["vae"]()
        self.n_calls = eqx.nn.StateIndex(jnp.array(0))


@pytest.mark.parametrize("rows", [33, pytest.param(32, marks=pytest.mark.sweep)])
def test_a_model_with_state_draws_for_the_rows_and_keeps_its_state(rows):
    """Four micro-batches, also of 9, 9, 9 and 6 rows, which do not divide over the devices."""

    def loss_fn(model, state, batch, key):
        state = state.set(model.n_calls, state.get(model.n_calls) + 1)
        return LOSSES["vae"](model.model, batch, key), state

    model, state = eqx.nn.make_with_state(Counting)()
    trainer = make_trainer(loss_fn, model, "8", 4, model_state=state)
    is_uncut = pytest.warns(UserWarning, match="got 9. Each micro-batch changes the state, so its rows are not cut")
    with is_uncut if rows % 32 else nullcontext():
        assert_first_update_matches(trainer, EXAMPLES[:rows], *expected("vae", rows))
    assert int(trainer.model_state.get(model.n_calls)) == 4


@pytest.mark.sweep
def test_a_later_update_draws_with_its_own_key():
    loss_fn, model = LOSSES["vae"], MODELS["vae"]()
    trainer = make_trainer(loss_fn, model, "4", 2, rate=1e-2)
    trainer.update(EXAMPLES[:20])
    metrics, _ = plain(loss_fn, trainer.model, collate_fn(EXAMPLES[20:]), key_of_step(1))
    found = trainer.update(EXAMPLES[20:])
    for name, value in metrics.items():
        assert found[name] == pytest.approx(float(value), rel=1e-6), name


VOCAB = 11
IDS = list(np.random.default_rng(1).integers(0, VOCAB, (20, 9)).astype(np.int32))


def language_loss(model, batch, key):
    logits = jax.vmap(lambda ids, key: model(ids, key=key))(batch[:, :-1], jax.random.split(key, len(batch)))
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:])
    return redeqx.Loss(losses.sum(), losses.size)


def make_gpt2():
    config = GPT2Config(
        VOCAB, 8, d_model=16, n_layers=2, n_heads=2, residual_dropout=0.2, embedding_dropout=0.1, attention_dropout=0.2
    )
    return GPT2(config, key=jax.random.key(0))


@pytest.mark.parametrize(
    ("rows", "mesh", "remat", "stack_blocks", "unroll"),
    [
        (20, "2x2x2", "full", True, True),
        (20, "2x2x2", "matmuls", False, False),
        (20, "2x1x1x4", "full", False, True),  # of positions of one row that four devices compute
    ],
)
@pytest.mark.sweep
def test_dropout_of_gpt2_follows_the_rows(rows, mesh, remat, stack_blocks, unroll):
    model = make_gpt2()
    how = {"compute": redeqx.Compute(remat=remat, stack_blocks=stack_blocks, unroll=unroll), "collate_fn": np.stack}
    trainer = make_trainer(language_loss, model, mesh, 2, **how)
    assert_first_update_matches(trainer, IDS[:rows], *plain(language_loss, model, np.stack(IDS[:rows]), key_of_step(0)))


@pytest.mark.sweep
def test_rows_that_memory_auto_divides_draw_the_same(monkeypatch, capsys):
    loss_fn, model = LOSSES["dropout_in_a_scan_over_layers"], MODELS["dropout_in_a_scan_over_layers"]()
    examples = EXAMPLES * 16

    def in_parts(space):
        own = space.own
        yield replace(own, per_device_batch_size=own.per_device_batch_size // 4, accumulate_grad_batches=4)

    found = make_trainer(loss_fn, model, "4").compile(examples, batch_size=len(examples)).memory_analysis()
    limit = found.argument_size_in_bytes + found.temp_size_in_bytes // 2
    monkeypatch.setattr("redeqx.memory._need.memory_of", lambda mesh: Memory(limit))
    monkeypatch.setattr(SearchSpace, "strategies", in_parts)
    deployer = make_deployer("4", verbose=True)
    trainer = make_trainer(loss_fn, model, deployer=deployer, compute=redeqx.Compute(memory="auto"))
    assert_first_update_matches(trainer, examples, *plain(loss_fn, model, collate_fn(examples), key_of_step(0)))
    printed = " ".join(capsys.readouterr().out.split())
    assert "with Deployer(n_model_shards=1, n_fsdp_shards=1); Trainer(accumulate_grad_batches=4" in printed


@pytest.mark.parametrize("stop", [1, pytest.param(3, marks=pytest.mark.sweep)])
def test_a_resumed_run_draws_what_the_interrupted_one_would_have(tmp_path, stop):
    def fit(folder, **options):
        deployer = make_deployer("2x2x2", workdir=tmp_path / folder)
        trainer = make_trainer(LOSSES["vae"], MODELS["vae"](), accumulate=2, rate=1e-2, deployer=deployer)
        trainer.fit(EXAMPLES, None, 2, batch_size=16, save_end=True, **options)  # 16, 16 and 8 rows
        return [np.asarray(x).tobytes() for x in jax.tree.leaves(trainer.model)]

    fit("stopped", max_steps=stop)
    assert fit("stopped") == fit("whole")


# --- evaluation and prediction -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", ["8", pytest.param("2x2x2", marks=pytest.mark.sweep)])
def test_the_loss_of_a_vae_does_not_depend_on_the_batch_size_of_its_evaluation(mesh):
    trainer = make_trainer(LOSSES["vae"], MODELS["vae"](), mesh)
    found = [trainer.eval_metrics(EXAMPLES, batch_size=size) for size in (40, 20, 8, 5)]
    for metrics in found[1:]:
        assert metrics == pytest.approx(found[0], rel=1e-6)
    batches = [collate_fn(EXAMPLES[i : i + 20]) for i in (0, 20)]
    without_noise = [plain(LOSSES["vae"], MODELS["vae"](), each, jax.random.key(99))[0]["rec"] for each in batches]
    assert found[0]["rec"] != pytest.approx(float(np.mean(without_noise)), rel=1e-4)  # it draws


def behind(model, batch, key):
    """Draws for the rows twice: as the first dim, and as the second one."""
    rows = len(batch["x"])
    first, second = jax.random.normal(key, (rows, D)), jax.random.normal(key, (D, rows)).T
    out, x = jnp.square(batch["x"] @ model["head"]).mean((1, 2)), batch["x"][:, 0]
    return redeqx.Loss(out.sum(), rows, metrics={"first": (first * x).sum(), "second": (second * x).sum()})


@pytest.mark.sweep
def test_an_evaluation_of_an_iterator_does_not_depend_on_the_batch_size():
    """The number of its rows is known only at the end: a draw whose rows are not the first dim takes other numbers than for
    a list, the same for all batch sizes."""
    trainer = make_trainer(behind, MODELS["vae"](), "8")
    found = [trainer.eval_metrics(iter(EXAMPLES), batch_size=size) for size in (40, 24, 8, 5)]
    for metrics in found[1:]:
        assert metrics == pytest.approx(found[0], rel=1e-5, abs=1e-7)
    of_list = trainer.eval_metrics(EXAMPLES, batch_size=8)
    assert found[0]["first"] == pytest.approx(of_list["first"], rel=1e-5)
    assert found[0]["second"] != pytest.approx(of_list["second"], rel=1e-2)


def sample(model, batch, key):
    """Returns a class for each position, and noise with keys by row."""
    noise = jax.vmap(lambda key: jax.random.normal(key, (D,)))(jax.random.split(key, len(batch["x"])))
    return jax.random.categorical(key, batch["x"] @ model["head"]), noise


@pytest.mark.parametrize("mesh", ["8", pytest.param("2x2x2", marks=pytest.mark.sweep)])
@pytest.mark.sweep
def test_samples_of_a_prediction_do_not_depend_on_the_batch_size(mesh):
    predictor = redeqx.Predictor(make_deployer(mesh), model=MODELS["vae"](), collate_fn=collate_fn, pred_fn=sample)
    key = jax.random.key(5)
    classes, noise = sample(MODELS["vae"](), collate_fn(EXAMPLES), key)
    for size in (40, 20, 8, 5):
        found = predictor.predict(EXAMPLES, batch_size=size, key=key)
        np.testing.assert_array_equal([row[0] for row in found], classes)
        np.testing.assert_allclose([row[1] for row in found], noise, rtol=1e-6)


# --- no number is drawn twice --------------------------------------------------------------------------------------------


class Slots(eqx.Module):
    """One slot for each example. The gradient of a slot is the number that was drawn with its example."""

    draws: jax.Array


def slots_loss(draw):
    def loss_fn(model, slots, key):
        drawn = draw(key, len(slots))
        # A metric for each slot: the number that was drawn with its example.
        seen = {f"slot {i}": (jnp.sum(drawn * (slots == i)), jnp.sum(slots == i)) for i in range(len(model.draws))}
        return redeqx.Loss(jnp.sum(model.draws[slots] * drawn), len(slots), seen)

    return loss_fn


draw_by_row = slots_loss(lambda key, n: jax.random.uniform(key, (n,)))
draw_once = slots_loss(lambda key, n: jax.random.uniform(key))


def uniform_of_rbg(key, n):
    rbg = jax.random.wrap_key_data(jnp.tile(jax.random.key_data(key), 2), impl="rbg")
    return jax.random.uniform(rbg, (n,))


def uniform_in_a_custom_derivative(key, n):
    noisy = jax.custom_vjp(lambda x, key: x + jax.random.uniform(key, x.shape))
    noisy.defvjp(lambda x, key: (noisy(x, key), None), lambda _, g: (g, None))
    return noisy(jnp.zeros(n), key)


class Counts:
    """A tracker that records, for each step, the draw of each of its examples."""

    def __init__(self):
        self.seen = []

    def log(self, metrics, step):
        draws = {int(name.split()[1]): draw for name, draw in metrics.items() if name.startswith("slot")}
        self.seen.append({slot: draw for slot, draw in draws.items() if draw > 0})


def make_slots(n_slots, loss_fn=draw_by_row, *, seed=0, accumulate=3, n_model_shards=8, verbose=False):
    """A trainer on one batch shard by default, so that a micro-batch may have two rows."""
    counts = Counts()
    deployer = redeqx.Deployer(seed, n_model_shards=n_model_shards, verbose=verbose, loggers=[counts])
    trainer = redeqx.Trainer(
        deployer,
        model=Slots(jnp.zeros(n_slots)),
        optimizer=optax.sgd(1.0),
        collate_fn=np.array,
        loss_fn=loss_fn,
        accumulate_grad_batches=accumulate,
    )
    return trainer, counts


def drawn(trainer, counts):
    """Returns the draw of each example, after one step on it; compares it with the gradient of its slot."""
    found = [step[slot] for step in counts.seen for slot in sorted(step)]
    gradients = [-len(step) * float(trainer.model.draws[slot]) for step in counts.seen for slot in sorted(step)]
    np.testing.assert_allclose(gradients, found, rtol=1e-5)
    return found


def assert_none_twice(draws):
    assert all(0 < draw < 1 for draw in draws)
    assert len(set(draws)) == len(draws)


@pytest.mark.parametrize("n_left", [4, pytest.param(5, marks=pytest.mark.sweep)])
def test_each_step_and_row_draws_new_numbers(n_left):
    """Two steps of three micro-batches, then one of two micro-batches, or of two and another row."""
    trainer, counts = make_slots(12 + n_left)
    trainer.train(list(range(12 + n_left)), 2)
    assert [len(step) for step in counts.seen] == [6, 6, n_left]
    assert_none_twice(drawn(trainer, counts))


def test_a_draw_without_rows_is_one_for_the_update():
    trainer, counts = make_slots(16, draw_once)
    trainer.train(list(range(16)), 2)
    drawn(trainer, counts)
    of_steps = [set(step.values()) for step in counts.seen]
    assert [len(step) for step in of_steps] == [1, 1, 1]
    assert_none_twice([draw for step in of_steps for draw in step])


@pytest.mark.parametrize("n_rows", [36, 37])
@pytest.mark.sweep
def test_rows_that_do_not_divide_over_the_devices_draw_numbers_of_their_own(n_rows):
    """32 rows in two micro-batches, then the rest in micro-batches of at most two rows, which each device computes."""
    trainer, counts = make_slots(n_rows, n_model_shards=1)
    trainer.train(list(range(n_rows)), 2)
    draws = drawn(trainer, counts)
    assert len(draws) == n_rows  # none is dropped
    assert_none_twice(draws)


@pytest.mark.sweep
def test_passes_and_epochs_draw_new_numbers():
    trainer, counts = make_slots(24)
    trainer.train(list(range(6)), 2)
    trainer.train(list(range(6, 12)), 2)
    trainer.fit(lambda epoch: list(range(12 + 6 * epoch, 18 + 6 * epoch)), 2, 2)
    assert_none_twice(drawn(trainer, counts))


@pytest.mark.sweep
def test_an_evaluation_draws_numbers_that_differ_from_training():
    trainer, counts = make_slots(12)
    evaluated = trainer.eval_metrics(list(range(12)), 2)
    draws = [evaluated[f"slot {i}"] for i in range(12)]
    trainer.train(list(range(12)), 2)
    assert_none_twice(draws + drawn(trainer, counts))
    # Repeated evaluations draw the same numbers.
    assert trainer.eval_metrics(list(range(12)), 2)["slot 5"] == evaluated["slot 5"]


@pytest.mark.sweep
def test_the_seed_and_the_trainer_determine_the_random_numbers():
    def draws(seed):
        trainer, counts = make_slots(6, seed=seed)
        trainer.train(list(range(6)), 2)
        return drawn(trainer, counts)

    first, same, other = map(draws, (0, 0, 1))
    assert first == same
    assert_none_twice(first + other)


@pytest.mark.parametrize(
    ("draw", "line", "why"),
    [
        (uniform_of_rbg, 2, "its key is not one of JAX's default kind"),
        (uniform_in_a_custom_derivative, 1, "it is inside a custom derivative"),
    ],
)
def test_draws_that_cannot_follow_the_rows_are_said_and_differ_between_micro_batches(draw, line, why, capsys):
    trainer, counts = make_slots(12, slots_loss(draw), verbose=True)
    trainer.train(list(range(12)), 2)
    assert_none_twice(drawn(trainer, counts))
    said = rf"{why} \(\S*test_draws\.py:{draw.__code__.co_firstlineno + line}\)"
    assert len(re.findall(said, capsys.readouterr().out)) == 1
