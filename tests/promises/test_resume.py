"""A stopped and resumed run ends bitwise equal to an uninterrupted one: parameters, optimizer state, order of examples and
logged metrics."""

import json
import os
import signal
import subprocess
import sys

import equinox as eqx
import jax
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file

import redeqx

N, BATCH = 22, 8  # three steps an epoch, the last one with six examples
DATA = np.random.default_rng(0).normal(size=(N, 6)).astype(np.float32)


class Model(eqx.Module):
    mlp: eqx.nn.MLP
    dropout: eqx.nn.Dropout

    def __init__(self, key):
        self.mlp = eqx.nn.MLP(5, 1, 16, 1, key=key)
        self.dropout = eqx.nn.Dropout(0.2)

    def __call__(self, x, key):
        return self.mlp(self.dropout(x, key=key))


def loss_fn(model, batch, key):
    keys = jax.random.split(key, len(batch))
    return ((jax.vmap(model)(batch[:, :5], keys)[:, 0] - batch[:, 5]) ** 2).mean()


class Killed(Exception):
    pass


class KillAt(redeqx.Callback):
    """Ends the run after a step. Nothing is written after that, as if the process had been killed."""

    def __init__(self, step):
        self.step = step

    def on_step(self, trainer, metrics):
        if trainer.step == self.step:
            raise Killed


def make_trainer(workdir, *, shards=(2, 2), seed=5):
    deployer = redeqx.Deployer(seed, *shards, workdir=workdir, verbose=False)
    return redeqx.Trainer(
        deployer,
        model=Model(jax.random.key(1)),
        optimizer=optax.adam(1e-2),
        collate_fn=np.stack,
        loss_fn=loss_fn,
    )


def fit(trainer, examples=DATA, *callbacks, **kwargs):
    rows = BATCH // trainer.deployer.n_batch_shards
    options = {"eval_examples": DATA[:5], "save_every_n_steps": 2, "save_argmin_ckpt_by_metrics": ["loss"]}
    return trainer.fit(examples, rows, 3, callbacks=callbacks, **options, **kwargs)


def arrays(trainer):
    trees = (eqx.filter(trainer.model, eqx.is_array), trainer.opt_state)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(trees)]


def assert_same_bits(a, b):
    for x, y in zip(a, b, strict=True):
        assert x.tobytes() == y.tobytes()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("uninterrupted")
    trainer = make_trainer(workdir)
    fit(trainer)
    return arrays(trainer), (workdir / "metrics.jsonl").read_bytes(), json.loads((workdir / "ckpts/index.json").read_text())


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(1, id="before any save", marks=pytest.mark.sweep),
        pytest.param(4, id="mid-epoch"),
        pytest.param(6, id="end of an epoch", marks=pytest.mark.sweep),
        pytest.param(8, id="in the last epoch", marks=pytest.mark.sweep),
    ],
)
def test_killed_and_resumed_ends_with_the_same_bits(step, uninterrupted, tmp_path):
    with pytest.raises(Killed):
        fit(make_trainer(tmp_path), DATA, KillAt(step))
    trainer = make_trainer(tmp_path)
    fit(trainer)
    params, metrics, index = uninterrupted
    assert_same_bits(arrays(trainer), params)
    assert (tmp_path / "metrics.jsonl").read_bytes() == metrics
    assert json.loads((tmp_path / "ckpts/index.json").read_text()) == index


class SignalAt(redeqx.Callback):
    """Signals the run to stop after a step, as a cluster's scheduler does."""

    def __init__(self, step):
        self.step = step

    def on_step(self, trainer, metrics):
        if trainer.step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("step", [5, *(pytest.param(step, marks=pytest.mark.sweep) for step in (1, 3, 8, 9))])
def test_preempted_and_resumed_ends_with_the_same_bits(step, uninterrupted, tmp_path):
    """At any step, also at the last step of an epoch or of the run."""
    stopped = make_trainer(tmp_path)
    with pytest.raises(redeqx.Preempted) as caught:
        fit(stopped, DATA, SignalAt(step))
    assert (caught.value.code, caught.value.step, stopped.step) == (75, step, step)
    index = json.loads((tmp_path / "ckpts" / "index.json").read_text())
    assert index["last"] == f"step_{stopped.step:08d}"
    trainer = make_trainer(tmp_path)
    fit(trainer)
    assert trainer.step == 9
    assert_same_bits(arrays(trainer), uninterrupted[0])
    assert (tmp_path / "metrics.jsonl").read_bytes() == uninterrupted[1]


def test_finished_run_is_not_trained_again(uninterrupted, tmp_path):
    fit(make_trainer(tmp_path), save_last_ckpt=True)
    metrics = (tmp_path / "metrics.jsonl").read_bytes()
    trainer = make_trainer(tmp_path)
    fit(trainer, save_last_ckpt=True)
    assert trainer.step == 9
    assert_same_bits(arrays(trainer), uninterrupted[0])
    assert (tmp_path / "metrics.jsonl").read_bytes() == metrics


def test_a_finished_fit_says_that_it_had_other_examples(tmp_path):
    make_trainer(tmp_path).fit(DATA, batch_size=8)
    for given, got in ((DATA[:12], "12 others"), (DATA[::-1], "others")):
        with pytest.warns(UserWarning, match=rf"`train_examples`: expected the 22 .*, got {got}: .* choose another workdir"):
            make_trainer(tmp_path).fit(given, batch_size=8)
    make_trainer(tmp_path).fit(DATA, batch_size=4)  # a warning would be an error: its result is that of these examples


def make_actor_and_critic(workdir):
    deployer = redeqx.Deployer(workdir=workdir, verbose=False)
    return [
        redeqx.Trainer(
            deployer, model=eqx.nn.Linear(6, 1, key=jax.random.key(i)), optimizer=optax.adam(1e-2), collate_fn=np.stack,
            loss_fn=lambda model, batch, key: (jax.vmap(model)(batch) ** 2).mean(), name=name,
        )
        for i, name in enumerate(("actor", "critic"))
    ]  # fmt: skip


def test_trainers_resume_at_one_iteration_if_a_kill_came_between_their_saves(tmp_path):
    """Also if it comes at the same point again, as when there is no room for that save."""

    def run(workdir, killed_at):
        actor, critic = trainers = make_actor_and_critic(workdir)
        first = [trainer.resume() for trainer in trainers]
        while critic.step < 6:
            for trainer in trainers:
                trainer.update(DATA[critic.step :][:8])
            actor.deployer.log_metrics({"env/reward": critic.step}, critic.step)
            actor.save_ckpt()
            if critic.step == killed_at:
                return first, None  # nothing is written after that
            critic.save_ckpt()
        return first, [array for trainer in trainers for array in arrays(trainer)]

    _, expected = run(tmp_path / "undisturbed", None)
    assert [run(tmp_path / "killed", 4)[0] for _ in range(2)] == [[0, 0], [3, 3]]
    first, found = run(tmp_path / "killed", None)
    assert first == [3, 3]
    assert_same_bits(found, expected)
    metrics, expected_metrics = ((tmp_path / name / "metrics.jsonl").read_bytes() for name in ("killed", "undisturbed"))
    assert metrics == expected_metrics


def test_a_trainer_that_has_no_checkpoint_yet_is_named(tmp_path):
    """A kill came before its first save, so the two do not resume at one iteration."""
    for trainer in (trainers := make_actor_and_critic(tmp_path)):
        trainer.update(DATA[:8])
    trainers[0].save_ckpt()
    actor, critic = make_actor_and_critic(tmp_path)
    with pytest.warns(UserWarning, match="got none of the trainer 'critic', which was at step 1 then: it begins anew. Save"):
        assert [actor.resume(), critic.resume()] == [1, 0]


def test_trainers_that_save_at_different_times_resume_from_their_own_newest_checkpoints(tmp_path):
    for life in range(2):
        actor, critic = trainers = make_actor_and_critic(tmp_path)
        assert [trainer.resume() for trainer in trainers] == [2 * life, 4 * life]
        if life == 0:
            for trainer, n in ((actor, 1), (critic, 1), (actor, 1), (critic, 3)):  # now the critic's step 1 is pruned
                for _ in range(n):
                    trainer.update(DATA[:8])
                    trainer.save_ckpt()


@pytest.mark.sweep
def test_second_fit_of_one_trainer_resumes_too(tmp_path):
    """The script is run again: the finished first fit is skipped, and the second one resumes."""

    def run(workdir, *callbacks):
        trainer = make_trainer(workdir)
        fit(trainer, DATA, *callbacks, save_last_ckpt=True)
        fit(trainer, DATA, *callbacks, save_last_ckpt=True)
        return arrays(trainer)

    expected = run(tmp_path / "a")
    with pytest.raises(Killed):
        run(tmp_path / "b", KillAt(14))
    assert_same_bits(run(tmp_path / "b"), expected)


@pytest.mark.parametrize("shards", [pytest.param((1, 1), marks=pytest.mark.sweep), (4, 2)])
def test_resumes_on_another_mesh(shards, uninterrupted, tmp_path):
    with pytest.raises(Killed):
        fit(make_trainer(tmp_path), DATA, KillAt(5))
    trainer = make_trainer(tmp_path, shards=shards)
    fit(trainer)
    for found, expected in zip(arrays(trainer), uninterrupted[0], strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-7)


class Stream:
    """An iterable in its own order whose iterator has a state, as in grain and torchdata."""

    def __init__(self, n_reads):
        self.n_reads = n_reads

    def __iter__(self):
        return StreamIterator(self)


class StreamIterator:
    def __init__(self, stream):
        self.stream, self.next = stream, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.next == N:
            raise StopIteration
        self.stream.n_reads.append(self.next)
        self.next += 1
        return DATA[self.next - 1]

    def get_state(self):
        return {"next": self.next}

    def set_state(self, state):
        self.next = state["next"]


@pytest.mark.sweep
def test_a_stream_with_state_resumes_at_its_position(tmp_path):
    whole = make_trainer(tmp_path / "whole")
    fit(whole, Stream([]))
    with pytest.raises(Killed):
        fit(make_trainer(tmp_path / "killed"), Stream([]), KillAt(5))
    reads = []
    trainer = make_trainer(tmp_path / "killed")
    fit(trainer, Stream(reads))
    assert_same_bits(arrays(trainer), arrays(whole))
    assert reads[0] == BATCH  # resumes after step 4, the first of its epoch


def test_a_checkpoint_of_a_custom_loop_records_its_metrics(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.train(DATA, 2)
    chosen = arrays(trainer)
    path = trainer.save_ckpt("argmax_return", metrics={"return": 3.5})
    trainer.train(DATA, 2)
    trainer.save_ckpt()
    assert json.loads((path / "trainer.json").read_text())["metrics"] == {"return": 3.5}
    again = make_trainer(tmp_path)
    again.load_ckpt("argmax_return")
    assert_same_bits(arrays(again), chosen)


def test_what_is_not_finite_is_recorded_as_json(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.train(DATA, 2)
    path = trainer.save_ckpt(metrics={"return": float("nan"), "gap": float("-inf"), "steps": np.float32(0.5)})

    def refuse(literal):
        raise AssertionError(literal)

    record = json.loads((path / "trainer.json").read_text(), parse_constant=refuse)
    assert record["metrics"] == {"return": "NaN", "gap": "-Infinity", "steps": 0.5}
    make_trainer(tmp_path).load_ckpt()
    with pytest.raises(TypeError, match=r"`metrics`: expected numbers by name, got .*\. Convert them by `float`\."):
        trainer.save_ckpt(metrics={"return": np.ones(3)})


@pytest.mark.sweep
def test_a_metric_of_infinity_is_compared_as_a_number_after_a_restart(tmp_path):
    values = [float("inf"), 2.0]
    for n_epochs in (1, 2):
        trainer = make_trainer(tmp_path)
        predictor = trainer.get_default_predictor(lambda model, batch, key: batch)
        trainer.fit(
            DATA, 2, n_epochs, eval_examples=DATA, eval_predictor=predictor, eval_sanity_check=False,
            eval_metric_fn=lambda examples, outputs: {"gap": values.pop(0)}, save_argmax_ckpt_by_metrics=["gap"],
        )  # fmt: skip
    index = json.loads((tmp_path / "ckpts" / "index.json").read_text())
    assert not values and "argmax_gap" in str(index)
    records = [json.loads(path.read_text()) for path in (tmp_path / "ckpts").glob("step_*/trainer.json")]
    assert [record["metrics"]["gap"] for record in records if "argmax_gap" in record["tags"]] == ["Infinity"]
    assert redeqx.load(tmp_path / "ckpts" / "argmax_gap", trainer.model) is not None


# --- saves in the background, and the end of a script --------------------------------------------------------------------

_LOOP = """
import os, signal, sys, time
import equinox as eqx, jax, numpy as np, optax, redeqx
deployer = redeqx.Deployer(workdir=sys.argv[1], verbose=False)
trainer = redeqx.Trainer(
    deployer, model=eqx.nn.MLP(4, 4, 1024, 2, key=jax.random.key(0)), optimizer=optax.adam(1e-2), collate_fn=np.stack,
    loss_fn=lambda model, batch, key: (jax.vmap(model)(batch) ** 2).mean(),
)
def then(path):
    if "fails" in sys.argv:
        raise OSError("no space for the index of models")
for step in range(trainer.resume(), 3):
    trainer.update(np.ones((8, 4), np.float32))
    trainer.save_ckpt(then=then)
if "signal" in sys.argv:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(30)
"""


@pytest.mark.parametrize("how", ["ends", "signal", "fails"])
def test_a_background_save_is_complete_when_the_script_ends(how, tmp_path):
    script = tmp_path / "loop.py"
    script.write_text(_LOOP)
    command = [sys.executable, str(script), str(tmp_path / "run"), how]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == {"ends": 0, "signal": 75, "fails": 1}[how], ended.stderr
    last = json.loads((tmp_path / "run" / "ckpts" / "index.json").read_text())["last"]
    if how == "fails":  # the error of the first one ends the loop
        assert "no space for the index of models" in ended.stderr
    else:
        assert last == "step_00000003" and load_file(tmp_path / "run" / "ckpts" / last / "optimizer.safetensors")


def test_an_error_of_the_last_background_save_is_printed_and_is_the_exit_code(tmp_path):
    script = tmp_path / "loop.py"
    script.write_text(_LOOP.replace('"fails" in sys.argv', 'path.name.endswith("3")'))
    command = [sys.executable, str(script), str(tmp_path / "run")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert "a background save failed after the last step" in ended.stderr and "no space for the index" in ended.stderr


# --- keys ---------------------------------------------------------------------------------------------------------------


def with_more_keys(workdir, n):
    """A trainer of a script that draws more keys before it, as a cell of a notebook that runs twice."""
    deployer = redeqx.Deployer(5, 2, 2, workdir=workdir, verbose=False)
    for _ in range(n):
        deployer.next_key()
    optimizer = optax.adam(1e-2)
    return redeqx.Trainer(
        deployer, model=Model(jax.random.key(1)), optimizer=optimizer, collate_fn=np.stack, loss_fn=loss_fn
    )


@pytest.mark.parametrize("first", [pytest.param("fit", marks=pytest.mark.sweep), "resume"])
def test_keys_drawn_before_the_trainer_do_not_change_the_dropout_of_a_resumed_run(first, uninterrupted, tmp_path):
    with pytest.raises(Killed):
        fit(make_trainer(tmp_path), DATA, KillAt(5))
    trainer = with_more_keys(tmp_path, 3)
    if first == "resume":
        assert trainer.resume() == 4
    fit(trainer)
    assert_same_bits(arrays(trainer), uninterrupted[0])


@pytest.mark.parametrize("is_placed", [False, pytest.param(True, marks=pytest.mark.sweep)])
def test_keys_drawn_before_the_trainer_do_not_change_the_dropout_after_a_loaded_checkpoint(is_placed, tmp_path):
    fit(make_trainer(tmp_path))
    results = []
    for n_more in (0, 3):
        trainer = with_more_keys(tmp_path, n_more)
        if is_placed:
            trainer.eval_loss(DATA, batch_size=8)
        trainer.load_ckpt()
        trainer.train(DATA, batch_size=8)
        results.append(arrays(trainer))
    assert_same_bits(*results)


@pytest.mark.sweep
def test_a_loop_that_draws_keys_continues_with_the_next_ones(tmp_path):
    def run(n_steps, trainer):
        drawn = []
        for _ in range(trainer.resume(), n_steps):
            key = trainer.deployer.next_key()
            drawn.append(jax.random.key_data(key).tolist())
            trainer.update(DATA[jax.random.permutation(key, N)[:8]])
        trainer.save_ckpt()
        return drawn

    whole = make_trainer(tmp_path / "whole")
    drawn = run(4, whole)
    first = run(2, make_trainer(tmp_path / "parts"))
    again = make_trainer(tmp_path / "parts")
    assert first + run(4, again) == drawn
    assert_same_bits(arrays(again), arrays(whole))
    more = with_more_keys(tmp_path / "parts", 9)  # more than the run had drawn: none is returned twice
    more.resume()
    assert more.deployer.n_keys == 10
