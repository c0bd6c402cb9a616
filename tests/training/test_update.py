"""Custom loops with `update`, `max_steps`, the return value and signature of `fit`, and optimizers that read the loss."""

import contextlib
import inspect
import json
import shutil
import threading

import equinox as eqx
import jax
import numpy as np
import optax
import pytest

import redeqx

DATA = np.random.default_rng(0).normal(size=(24, 6)).astype(np.float32)  # three steps per epoch


def loss_fn(model, batch, key):
    keep = jax.random.bernoulli(key, 0.9, batch[:, :5].shape)
    return ((jax.vmap(model)(batch[:, :5] * keep)[:, 0] - batch[:, 5]) ** 2).mean()


def make_trainer(workdir=None, *, optimizer=None, shards=(2, 2), loss_fn=loss_fn, **kwargs):
    options = {"optimizer": optimizer or optax.adam(1e-2), "collate_fn": np.stack, "loss_fn": loss_fn, **kwargs}
    return redeqx.Trainer(
        redeqx.Deployer(5, *shards, workdir=workdir, verbose=False),
        model=eqx.nn.MLP(5, 1, 16, 1, key=jax.random.key(1)),
        **options,
    )


def bits(trainer):
    trees = (eqx.filter(trainer.model, eqx.is_array), trainer.opt_state)
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(trees)]


# --- updates ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 2])
def test_updates_equal_the_steps_of_train(accumulate, tmp_path):
    expected_trainer = make_trainer(tmp_path / "train", accumulate_grad_batches=accumulate)
    metrics = expected_trainer.train(DATA, batch_size=8)
    trainer = make_trainer(tmp_path / "update", accumulate_grad_batches=accumulate)
    update_metrics = [trainer.update(DATA[start : start + 8]) for start in (0, 8, 16)]
    assert update_metrics[-1] == metrics
    assert trainer.step == 3
    assert bits(trainer) == bits(expected_trainer)
    records = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("train", "update")]
    assert records[0] == records[1]
    for each in (expected_trainer, trainer):
        each.save_ckpt()
    saved = [tmp_path / name / "ckpts/step_00000003" for name in ("train", "update")]
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (saved[0] / name).read_bytes() == (saved[1] / name).read_bytes()


def test_custom_loop_resumes(tmp_path):
    def run(workdir, n_steps):
        trainer = make_trainer(workdir)
        for step in range(trainer.resume(), n_steps):
            trainer.update(DATA[step * 4 : step * 4 + 8])
            if trainer.step in (2, 4):
                trainer.save_ckpt()
        return trainer

    expected_trainer = run(tmp_path / "whole", 5)
    run(tmp_path / "killed", 3)  # the third step is not saved, so that it is repeated
    again = run(tmp_path / "killed", 5)
    assert again.step == 5
    assert bits(again) == bits(expected_trainer)
    assert (tmp_path / "killed/metrics.jsonl").read_bytes() == (tmp_path / "whole/metrics.jsonl").read_bytes()


@pytest.mark.parametrize("context", [contextlib.nullcontext, lambda: redeqx.described("this")], ids=["real", "dry"])
@pytest.mark.parametrize(
    ("examples", "error", "expected"),
    [
        (
            lambda: iter([*DATA]),
            TypeError,
            "`examples`: expected `len()` and integer items, got list_iterator. Pass a list of them.",
        ),
        ([], ValueError, "`examples`: expected at least one example, got none. Look at what was loaded."),
    ],
)
def test_update_with_invalid_examples_raises(context, examples, error, expected):
    with context():
        trainer = make_trainer(shards=(1, 1))
        with pytest.raises(error) as raised:
            trainer.update(examples() if callable(examples) else examples)
    assert str(raised.value) == expected


def test_updates_and_resume_inside_fit_raise():
    """Also between its epochs: the checkpoint of the best evaluation would be that of a later step."""

    def calling(moment, method, *args, **kwargs):
        call = lambda self, trainer, *metrics: getattr(trainer, method)(*args, **kwargs)  # noqa: E731
        return type("Calls", (redeqx.Callback,), {moment: call})()

    trainer = make_trainer()
    for moment in ("on_fit_start", "on_step", "on_eval", "on_epoch_end", "on_last_step"):
        for method, sizes in (("update", {}), ("train", {"batch_size": 8})):
            with pytest.raises(ValueError, match=f"`{method}`: expected after the running `fit`, got called inside it"):
                callbacks = [calling(moment, method, DATA[:8], **sizes)]
                trainer.fit(DATA, batch_size=8, eval_examples=DATA, resume=False, callbacks=callbacks)
    with pytest.raises(ValueError, match="`resume`: expected before the first update, got called inside `fit`"):
        trainer.fit(DATA, batch_size=8, resume=False, callbacks=[calling("on_step", "resume")])


def test_an_update_inside_a_traced_function_is_refused_and_leaves_the_trainer_as_it_was():
    trainer = make_trainer()
    trainer.update(DATA[:8])
    with pytest.raises(ValueError, match="`Trainer`: expected its steps outside of functions that JAX traces"):
        jax.jit(lambda: trainer.update(DATA[:8])["loss"])()
    trainer.update(DATA[:8])
    assert trainer.step == 2 and np.isfinite(trainer.eval_loss(DATA, batch_size=8))


def test_an_update_collates_its_only_batch_without_a_thread():
    threads = []

    def collate_fn(examples):
        threads.append(threading.current_thread().name)
        return np.stack(examples)

    trainer = make_trainer(collate_fn=collate_fn)
    for _ in range(2):
        trainer.update(DATA[:8])
    assert set(threads) == {threading.current_thread().name}


def test_after_arrays_were_donated_elsewhere_the_trainer_raises_until_a_checkpoint_is_loaded(tmp_path):
    """jaxlib crashes if a compiled step is called with deleted arrays."""
    trainer = make_trainer(tmp_path)
    for _ in range(2):
        trainer.update(DATA[:8])
    trainer.eval_loss(DATA, batch_size=8)
    trainer.save_ckpt("kept")
    before = bits(trainer)
    eqx.filter_jit(lambda model: jax.tree.map(lambda x: 2 * x if eqx.is_array(x) else x, model), donate="all")(trainer.model)
    for call in (lambda: trainer.update(DATA[:8]), lambda: trainer.eval_loss(DATA, batch_size=8)):
        with pytest.raises(ValueError, match=r"`trainer.model`.*`layers.0.weight`.*`donate_argnums`.*load a checkpoint"):
            call()
    trainer.load_ckpt("kept")
    assert bits(trainer) == before
    trainer.update(DATA[:8])
    assert trainer.step == 3


def test_a_refused_fit_inside_a_fit_leaves_it_running():
    class Fits(redeqx.Callback):
        def on_step(self, trainer, metrics):
            with pytest.raises(ValueError, match="`fit`: expected after the running `fit`, got called inside it"):
                trainer.fit(DATA, batch_size=8)

    trainers = make_trainer(), make_trainer()
    for trainer, callbacks in zip(trainers, ([], [Fits()]), strict=True):
        trainer.fit(DATA, batch_size=8, n_epochs=2, callbacks=callbacks)
    leaves = (jax.tree.leaves(trainer.opt_state) for trainer in trainers)
    assert all(np.array_equal(*pair) for pair in zip(*leaves, strict=True))


# --- the end of a fit ---------------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_max_steps_ends_a_fit_and_a_larger_value_resumes_it(tmp_path):
    expected_trainer = make_trainer()
    expected_trainer.fit(DATA, batch_size=8, n_epochs=2)
    first = make_trainer(tmp_path)
    metrics = first.fit(DATA, batch_size=8, max_steps=4, eval_examples=DATA[:8])
    assert first.step == 4
    assert metrics == {"loss": first.eval_loss(DATA[:8], batch_size=8)}  # the evaluation at the last step
    again = make_trainer(tmp_path)
    assert again.fit(DATA, batch_size=8, max_steps=4, eval_examples=DATA[:8]) == metrics
    assert again.step == 4  # already complete
    again = make_trainer(tmp_path)
    again.fit(DATA, batch_size=8, max_steps=6, eval_examples=DATA[:8])
    assert again.step == 6
    assert bits(again) == bits(expected_trainer)
    again.fit(DATA, batch_size=8, max_steps=2)  # `max_steps` counts from the start of each fit
    assert again.step == 8
    again.fit(DATA, batch_size=8, n_epochs=1, max_steps=100)  # the smaller limit applies
    assert again.step == 11


def test_updates_before_a_fit_do_not_count_towards_max_steps(tmp_path):
    for kill_at in (3, None):
        trainer = make_trainer(tmp_path)
        with contextlib.suppress(KeyboardInterrupt):
            for _ in range(trainer.resume(), 4):
                trainer.update(DATA[:8])
                trainer.save_ckpt()
                if trainer.step == kill_at:
                    raise KeyboardInterrupt
            trainer.fit(DATA, batch_size=8, max_steps=5)
    assert trainer.step == 9


def test_resume_drops_metrics_recorded_after_the_checkpoint(tmp_path):
    trainer = make_trainer(tmp_path)
    for _ in range(2):
        trainer.update(DATA[:8])
    trainer.save_ckpt()
    for _ in range(2):
        trainer.update(DATA[:8])
    assert trainer.resume() == 2
    trainer.update(DATA[:8])
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3]


def test_failed_load_leaves_the_resumed_state(tmp_path):
    trainer = make_trainer(tmp_path)
    for name in ("first", "second"):
        trainer.update(DATA[:8])
        trainer.save_ckpt(name)
    path = tmp_path / "ckpts" / "step_00000001" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    again = make_trainer(tmp_path)
    assert again.resume() == 2
    with pytest.raises(ValueError, match="crc32"):
        again.load_ckpt("first")
    assert again.step == 2 and bits(again) == bits(trainer)


def test_fit_starts_from_a_checkpoint_loaded_after_a_failed_fit(tmp_path):
    trainer, seen = make_trainer(tmp_path), []

    class RecordSteps(redeqx.Callback):
        def on_step(self, trainer, metrics):
            seen.append(trainer.step)
            if trainer.step == 8:
                raise KeyboardInterrupt

    options = {"batch_size": 8, "n_epochs": 2, "save_every_n_steps": 1, "keep_last": 9, "callbacks": [RecordSteps()]}
    trainer.fit(DATA, batch_size=8, n_epochs=1)
    with contextlib.suppress(KeyboardInterrupt):
        trainer.fit(DATA, **options)
    trainer.load_ckpt("step_00000005")
    assert trainer.step == 5
    with contextlib.suppress(KeyboardInterrupt):
        trainer.fit(DATA, **options)
    assert seen == [4, 5, 6, 7, 8, 6, 7, 8]


def test_checkpoint_of_another_optimizer_loads_without_its_state(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.update(DATA[:8])
    trainer.save_ckpt()
    again = make_trainer(tmp_path, optimizer=optax.sgd(1e-2, momentum=0.9))
    assert again.resume() == 1
    again.load_ckpt("last", load_opt_states=False)
    assert bits(again)[:4] == bits(trainer)[:4]


def test_schedule_is_called_with_an_array():
    schedule = lambda step: 1e-2 * step.astype(np.float32)  # noqa: E731
    trainer = make_trainer(optimizer=optax.sgd(schedule), lr_schedule_fn=schedule)
    trainer.fit(DATA, batch_size=8)
    assert trainer.step == 3


@pytest.mark.sweep
def test_rerun_resumes_a_second_fit_started_from_the_best_checkpoint(tmp_path):
    def run(kill_at=None):
        trainer, seen = make_trainer(tmp_path, loss_fn=loss_fn), []

        class RecordAndKill(redeqx.Callback):
            def on_step(self, trainer, metrics):
                seen.append(trainer.step)
                if trainer.step == kill_at:
                    raise KeyboardInterrupt

        options = {"batch_size": 8, "n_epochs": 2, "save_every_n_steps": 1, "callbacks": [RecordAndKill()]}
        with contextlib.suppress(KeyboardInterrupt):
            trainer.fit(DATA, eval_examples=DATA[:8], save_argmin_ckpt_by_metrics=["loss"], **options)
            trainer.load_ckpt("argmin_loss")
            trainer.fit(DATA, **options)
        return trainer, seen

    first, seen = run()
    best = first.step - 6
    assert seen[-6:] == list(range(best + 1, best + 7))
    again, seen = run()
    assert seen == [] and bits(again) == bits(first)
    shutil.rmtree(tmp_path)
    run(kill_at=best + 3 + (0 if best >= 6 else 6))
    again, seen = run()
    assert bits(again) == bits(first)


def test_epochs_without_a_step_raise():
    with pytest.raises(ValueError, match="`train_examples`: expected at least 8 examples, a batch of them"):
        make_trainer().fit(DATA[:7], batch_size=8, max_steps=1, drop_remainder=True)


def test_fit_without_evaluation_returns_the_last_training_metrics(tmp_path):
    trainer = make_trainer(tmp_path)
    metrics = trainer.fit(DATA, batch_size=8)
    assert metrics.keys() == {"loss", "grad_norm"}
    same_run = make_trainer(tmp_path / "other")
    assert same_run.fit(DATA, batch_size=8) == metrics
    assert make_trainer(tmp_path).fit(DATA, batch_size=8) == metrics  # already complete


def test_fit_has_an_explicit_documented_signature():
    parameters = inspect.signature(redeqx.Trainer.fit).parameters
    assert list(parameters)[:4] == ["self", "train_examples", "per_device_batch_size", "n_epochs"]
    rest = [parameters[name] for name in list(parameters)[4:]]
    assert {parameter.kind for parameter in rest} == {inspect.Parameter.KEYWORD_ONLY}
    assert {"max_steps", "callbacks", "eval_examples", "resume"} <= {parameter.name for parameter in rest}
    documented = redeqx.Trainer.fit.__doc__
    assert all(f"`{name}`" in documented for name in list(parameters)[1:])


# --- optimizers that read the loss --------------------------------------------------------------------------------------


def test_reduce_on_plateau_lowers_the_learning_rate():
    plateau = optax.contrib.reduce_on_plateau(factor=0.5, patience=1, rtol=1.0, accumulation_size=1)
    trainer = make_trainer(optimizer=optax.chain(optax.sgd(1e-3), plateau))
    trainer.fit(DATA, batch_size=8, n_epochs=2)
    scale = float(trainer.opt_state[1].scale)
    assert scale < 1.0
    # Computed with optax alone from the best loss.
    state = plateau.init({"x": jax.numpy.zeros(())})
    for loss in np.full(6, float(trainer.opt_state[1].best_value)):
        _, state = plateau.update({"x": jax.numpy.zeros(())}, state, value=loss)
    assert scale == float(state.scale)


def test_value_fn_is_the_loss_of_the_whole_step():
    """Of its micro-batches and its remainder: here an update is the value at the current weights."""

    def update(updates, state, params=None, *, value_fn, **extra):
        value = value_fn(params)
        return jax.tree.map(lambda x: jax.numpy.full_like(x, value), updates), state

    optimizer = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    trainer = make_trainer(optimizer=optimizer, accumulate_grad_batches=2)
    before = np.asarray(trainer.model.layers[0].weight)
    loss = trainer.update(DATA[:13])["loss"]
    np.testing.assert_allclose(trainer.model.layers[0].weight - before, loss, rtol=1e-5)


def test_the_gradient_at_other_parameters_does_not_differentiate_the_weight():
    """Here it is asked for at the current ones, and an update is its difference from the step's own."""

    def weighted(model, batch, key):
        squares = jax.vmap(model)(batch[:, :5])[:, 0] ** 2
        return redeqx.Loss((batch[:, 5] * squares).sum(), squares.sum())

    def update(updates, state, params=None, *, grad_fn, **extra):
        return jax.tree.map(jax.numpy.subtract, grad_fn(params), updates), state

    optimizer = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    trainer = make_trainer(optimizer=optimizer, loss_fn=weighted)
    before = np.asarray(trainer.model.layers[0].weight)
    trainer.update(DATA[:8])
    np.testing.assert_allclose(trainer.model.layers[0].weight, before, atol=1e-6)


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.sweep), 2])
@pytest.mark.sweep
def test_lbfgs_line_search_matches_optax(accumulate):
    def loss_without_dropout(model, batch, key):
        return ((jax.vmap(model)(batch[:, :5])[:, 0] - batch[:, 5]) ** 2).mean()

    def value_fn(model):
        return loss_without_dropout(model, DATA, None)

    trainer = make_trainer(optimizer=optax.lbfgs(), loss_fn=loss_without_dropout, accumulate_grad_batches=accumulate)
    losses = [trainer.update(DATA)["loss"] for _ in range(4)]
    # The same computation with optax alone.
    model, optimizer, expected = eqx.nn.MLP(5, 1, 16, 1, key=jax.random.key(1)), optax.lbfgs(), []
    params, static = eqx.partition(model, eqx.is_inexact_array)
    state = optimizer.init(params)

    @jax.jit
    def step(params, state):
        def loss_of(params):
            return value_fn(eqx.combine(params, static))

        value, grad = jax.value_and_grad(loss_of)(params)
        updates, state = optimizer.update(grad, state, params, value=value, grad=grad, value_fn=loss_of)
        return optax.apply_updates(params, updates), state, value

    for _ in range(4):
        params, state, value = step(params, state)
        expected.append(float(value))
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    assert losses[-1] < losses[0]
