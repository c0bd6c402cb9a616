"""Invalid input, end to end: each error is raised before any work, with this message, and nothing is lost."""

import errno
import json
import os
import re
import shutil
import threading
import traceback

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import redeqx
from tests._tree import named_leaves

LIBRARY = os.path.dirname(redeqx.__file__)


def stack(examples):
    return {"x": np.stack(examples).astype(np.float32)}


def mse(model, batch, key):
    return jnp.mean(jax.vmap(model)(batch["x"]) ** 2)


def linear(n_in=4, n_out=4, seed=0):
    return eqx.nn.Linear(n_in, n_out, key=jax.random.key(seed))


EXAMPLES = list(np.random.default_rng(0).normal(size=(8, 4)))


def make_trainer(workdir=None, *, jax_seed=0, n_model_shards=8, **kwargs):
    """On a mesh with one batch shard, so that eight examples can give several steps."""
    at = redeqx.Deployer(jax_seed=jax_seed, n_model_shards=n_model_shards, workdir=workdir, verbose=False)
    given = {"model": linear(), "optimizer": optax.adam(0.1), "collate_fn": stack, "loss_fn": mse, **kwargs}
    return redeqx.Trainer(at, **given)


def message(error, fn, *args, **kwargs):
    with pytest.raises(error) as raised:
        fn(*args, **kwargs)
    return str(raised.value)


def bits(trainer):
    leaves = named_leaves((trainer.model, trainer.opt_state))
    return {name: np.asarray(leaf).tobytes() for name, leaf in leaves.items() if eqx.is_array(leaf)}


def has_done_no_work(trainer):
    """Whether a trainer has placed no array and taken no step."""
    return trainer.plan is None and trainer.step == 0


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The workdir of a finished run of four steps, each saved."""
    workdir = tmp_path_factory.mktemp("finished")
    make_trainer(workdir).fit(EXAMPLES, 4, 2, save_every_n_steps=1, keep_last=4)
    return workdir


@pytest.fixture
def workdir(finished, tmp_path):
    """A copy of the finished run, to be damaged."""
    return shutil.copytree(finished, tmp_path / "run")


# --- devices and models -------------------------------------------------------------------------------------------------


def test_shards_must_divide_the_devices():
    assert message(ValueError, make_trainer, n_model_shards=3) == (
        "`n_model_shards`=3 x `n_fsdp_shards`=1 = 3: expected a product that divides the 8 devices, got a remainder of 2. "
        "Choose a product among 1, 2, 4, 8."
    )


def test_some_leaf_must_be_trainable():
    assert message(ValueError, make_trainer, trainable=lambda leaf: False) == (
        "`trainable`: expected at least one trainable leaf, got none of 2 arrays. Check the filter and the model."
    )


@pytest.mark.parametrize(
    ("model", "error", "expected"),
    [
        (eqx.nn.Identity(), ValueError, "arrays to train, got none in Identity(). Pass a model with weights."),
        (3, ValueError, "arrays to train, got none in 3. Pass a model with weights."),
        (None, TypeError, "an Equinox module, got None. Pass an `eqx.Module`, or another PyTree of arrays."),
    ],
)
def test_a_model_without_arrays_is_named(model, error, expected):
    assert message(error, make_trainer, model=model) == f"`model`: expected {expected}"


def test_micro_batches_must_be_positive():
    assert message(ValueError, make_trainer, accumulate_grad_batches=0) == (
        "`accumulate_grad_batches`: expected at least 1, got 0. Pass a positive number."
    )


@pytest.mark.parametrize("how", ["fit", "train", "eval_loss"])
def test_per_device_batch_size_must_be_positive(how):
    trainer = make_trainer()
    call = {"fit": lambda: trainer.fit(EXAMPLES, 0, 1)}.get(how, lambda: getattr(trainer, how)(EXAMPLES, 0))
    assert message(ValueError, call) == "`per_device_batch_size`: expected at least 1, got 0. Pass a positive number."
    assert has_done_no_work(trainer)


# --- examples -----------------------------------------------------------------------------------------------------------


EMPTY = "expected at least one example, got none. Look at what was loaded."
USED_UP = (
    "expected at least one example, got an iterable with none, or one that is used up. "
    "Pass one that can be iterated anew, or a function of the epoch."
)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda trainer: trainer.fit([], 1, 1), f"`train_examples`: {EMPTY}"),
        (lambda trainer: trainer.fit(lambda epoch: [], 1, 1), f"`train_examples(0)`: {EMPTY}"),
        (lambda trainer: trainer.fit(iter([]), 1, 1), f"`train_examples`: {USED_UP}"),
        (lambda trainer: trainer.fit(EXAMPLES, 1, 1, eval_examples=[]), f"`eval_examples`: {EMPTY}"),
        (lambda trainer: trainer.train([], 1), f"`examples`: {EMPTY}"),
        (lambda trainer: trainer.train(iter([]), 1), f"`examples`: {USED_UP}"),
        (lambda trainer: trainer.eval_loss([], 1), f"`examples`: {EMPTY}"),
    ],
)
def test_examples_must_not_be_empty(call, expected):
    trainer = make_trainer()
    assert message(ValueError, call, trainer) == expected
    assert has_done_no_work(trainer)


def test_exhausted_examples_leave_the_checkpoint_of_the_previous_epoch(tmp_path):
    class Once:
        """A Python iterator that might restart: whether it does shows only in the second epoch."""

        def __init__(self):
            self.left = list(EXAMPLES)

        def __iter__(self):
            return self

        def __next__(self):
            if not self.left:
                raise StopIteration
            return self.left.pop()

    trainer = make_trainer(tmp_path)
    assert message(ValueError, trainer.fit, Once(), 4, 2, save_last_ckpt=True) == f"`train_examples`: {USED_UP}"
    last = json.loads((tmp_path / "ckpts" / "index.json").read_text())["last"]
    assert json.loads((tmp_path / "ckpts" / last / "trainer.json").read_text())["epoch"] == 1


@pytest.mark.parametrize(
    ("collate_fn", "error", "expected"),
    [
        (
            lambda rows: {"ids": [list(range(i + 1)) for i in range(len(rows))]},
            TypeError,
            "`collate_fn` output `ids`: expected an array of 4 rows, got a list of 4 with lengths 1 to 4. "
            "Pad to one length and return `np.array(...)`.",
        ),
        (
            lambda rows: {"text": np.array(["a"] * len(rows))},
            TypeError,
            "`collate_fn` output `text`: expected numbers, got text in 4 entries. Tokenize it, or leave it out.",
        ),
        (
            lambda rows: {"x": np.zeros((len(rows) - 1, 4))},
            ValueError,
            "`collate_fn` output `x`: expected 4 rows, one for each example, got shape (3, 4). "
            "The leading dim is the batch.",
        ),
    ],
)
def test_collate_fn_output_is_checked(collate_fn, error, expected):
    trainer = make_trainer(collate_fn=collate_fn)
    assert message(error, trainer.fit, EXAMPLES, 4, 1) == expected
    assert message(error, trainer.train, EXAMPLES, 4) == expected
    assert message(error, trainer.eval_loss, EXAMPLES, 4) == expected
    assert has_done_no_work(trainer)


def prefetch_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("redeqx-prefetch")]


@pytest.mark.parametrize("how", ["loss_fn", "collate_fn", "eval_metric_fn"])
def test_user_error_propagates_unchanged_and_leaves_no_thread(how):
    def fail(*args):
        raise LookupError("of the user")

    kwargs = {} if how == "eval_metric_fn" else {how: fail}
    trainer = make_trainer(**kwargs)
    predictor = trainer.get_default_predictor(lambda model, batch, key: jax.vmap(model)(batch["x"]))
    evaluation = {"eval_examples": EXAMPLES, "eval_predictor": predictor, "eval_metric_fn": fail, "eval_every_n_steps": 1}
    kwargs = {**evaluation, "eval_sanity_check": False} if how == "eval_metric_fn" else {}
    with pytest.raises(LookupError, match="of the user") as raised:
        trainer.fit(EXAMPLES * 5, 1, 1, **kwargs)
    assert raised.traceback[-1].name == "fail"
    assert not prefetch_threads()  # although the traceback keeps all frames alive


# --- losses -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss_fn", "error", "expected"),
    [
        (
            lambda model, batch, key: jnp.mean(jax.vmap(model)(batch["x"]) ** 2, axis=1),
            ValueError,
            "`loss_fn`: expected the loss to be a scalar, got shape (4,). "
            "Return its mean, or `redeqx.Loss(total=its sum, weight=its size)`.",
        ),
        (
            lambda model, batch, key: {"loss": mse(model, batch, key)},
            TypeError,
            "`loss_fn`: expected the loss to be a scalar, got dict. "
            "Return a scalar or `redeqx.Loss(total, weight, metrics)`; with `model_state`, `(loss, state)`.",
        ),
        (
            lambda model, batch, key: (mse(model, batch, key), {}),
            TypeError,
            "`loss_fn`: expected the loss to be a scalar, got tuple. "
            "Return a scalar or `redeqx.Loss(total, weight, metrics)`; with `model_state`, `(loss, state)`.",
        ),
        (
            lambda model, batch, key: redeqx.Loss(mse(model, batch, key), 1.0, {"each": batch["x"][:, 0]}),
            ValueError,
            "`loss_fn`: expected metric 'each' to be a scalar, got shape (4,). "
            "Return its mean, or `redeqx.Loss(total=its sum, weight=its size)`.",
        ),
        (
            lambda model, batch, key: jnp.mean(batch["x"]),
            ValueError,
            "`loss_fn`: expected a loss that depends on a trainable leaf, got one that reads none of 2. "
            "Use the model that `loss_fn` is given, not one from outside.",
        ),
        (
            lambda model, batch, key: mse(linear(), batch, key),
            ValueError,
            "`loss_fn`: expected a loss that depends on a trainable leaf, got one that reads none of 2. "
            "Use the model that `loss_fn` is given, not one from outside.",
        ),
        (
            lambda model, batch, key: jax.lax.stop_gradient(mse(model, batch, key)),
            ValueError,
            "`loss_fn`: expected a loss that depends on a trainable leaf, got one that reads none of 2. "
            "Use the model that `loss_fn` is given, not one from outside.",
        ),
    ],
)
def test_loss_must_be_a_scalar_that_depends_on_the_model(loss_fn, error, expected):
    trainer = make_trainer(loss_fn=loss_fn)
    assert message(error, trainer.fit, EXAMPLES, 4, 1) == expected
    assert has_done_no_work(trainer)
    assert not prefetch_threads()


def test_loss_that_depends_only_on_frozen_leaves():
    trainer = make_trainer(
        trainable=lambda leaf: eqx.is_array(leaf) and leaf.ndim == 1,
        loss_fn=lambda model, batch, key: jnp.mean(batch["x"] @ model.weight.T),
    )
    assert message(ValueError, trainer.fit, EXAMPLES, 4, 1) == (
        "`loss_fn`: expected a loss that depends on a trainable leaf, got one that reads none of 1. "
        "Use the model that `loss_fn` is given, not one from outside."
    )


@pytest.mark.parametrize("bad", ["nan", "inf"])
def test_nonfinite_loss_names_its_step_and_keeps_the_last_checkpoint(bad, tmp_path):
    examples = [np.full(4, 0.1 * i) for i in range(12)]
    examples[10] = np.array([float(bad), 0, 0, 0])
    trainer = make_trainer(tmp_path, optimizer=optax.sgd(0.0))
    # In order, two examples per step: step 6 has the bad one; checkpoints follow steps 2 and 4.
    with pytest.raises(ValueError) as raised:
        trainer.fit(iter(examples), 2, 1, save_every_n_steps=2)
    index = json.loads((tmp_path / "ckpts" / "index.json").read_text())
    assert index == {"last": "step_00000004"}
    assert str(raised.value) == (
        f"`loss` at step 6: expected the loss to be finite, got {bad}. The last good checkpoint is step_00000004. Its batch "
        f"is not finite: `x` has {'NaN' if bad == 'nan' else 'infinite values'} in 1 of 2 rows, the first from example 10. "
        "Correct or remove these examples, or `collate_fn`."
    )
    assert not prefetch_threads()

    again = make_trainer(tmp_path, optimizer=optax.sgd(0.0))
    again.load_ckpt("last")
    assert again.step == 4
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(again.model) if eqx.is_array(leaf))


def test_nonfinite_loss_at_the_first_step():
    assert message(ValueError, make_trainer().train, [np.full(4, np.nan)] * 20, 2) == (
        "`loss` at step 1: expected the loss to be finite, got nan. Nothing was saved yet. Its batch is not finite: `x` has "
        "NaN in 2 of 2 rows, the first from example 0. Correct or remove these examples, or `collate_fn`."
    )


def test_nonfinite_gradient_names_its_step():
    def loss_fn(model, batch, key):
        return jnp.mean(jnp.sqrt(jnp.abs(0.0 * jax.vmap(model)(batch["x"]))))

    assert message(ValueError, make_trainer(loss_fn=loss_fn).train, EXAMPLES, 8) == (
        "`grad_norm` at step 1: expected the gradient's norm to be finite, got nan. Nothing was saved yet. Its batch is "
        "finite. Lower the learning rate, clip gradients, or look at that step's examples."
    )


# --- arguments of a fit ---------------------------------------------------------------------------------------------------


NEEDS_EVAL = (
    "`eval_examples`: expected examples and something to evaluate, got {}. The evaluation that was asked for needs them."
)


@pytest.mark.parametrize(
    ("kwargs", "error", "expected"),
    [
        ({"n_epochs": 0}, ValueError, "`n_epochs`: expected at least 1 or None, got 0. Pass a positive number."),
        ({"keep_last": 0}, ValueError, "`keep_last`: expected at least 1, got 0. Pass a positive number."),
        (
            {"save_every_n_steps": 0},
            ValueError,
            "`save_every_n_steps`: expected at least 1 or None, got 0. Pass a positive number.",
        ),
        (
            {"eval_every_n_steps": -1},
            ValueError,
            "`eval_every_n_steps`: expected at least 1 or None, got -1. Pass a positive number.",
        ),
        (
            {"save_ckpt_every_k_epochs": 0},
            ValueError,
            "`save_ckpt_every_k_epochs`: expected at least 1 or None, got 0. Pass a positive number.",
        ),
        (
            {"eval_per_device_batch_size": 0},
            ValueError,
            "`eval_per_device_batch_size`: expected at least 1, got 0. Pass a positive number.",
        ),
        ({"eval_every_n_steps": 1}, ValueError, NEEDS_EVAL.format("none")),
        ({"save_argmax_ckpt_by_metrics": ["accuracy"]}, ValueError, NEEDS_EVAL.format("none")),
        (
            {"save_argmin_ckpt_by_metrics": ["loss"], "eval_examples": EXAMPLES, "eval_loss": False},
            ValueError,
            NEEDS_EVAL.format("no `eval_loss` and no `eval_metric_fn`"),
        ),
        (
            {"eval_examples": EXAMPLES, "eval_metric_fn": lambda examples, outputs: {}},
            ValueError,
            "`eval_metric_fn`: expected with an `eval_predictor`, got None. Pass the predictor too.",
        ),
        (
            {"eval_examples": iter(EXAMPLES)},
            TypeError,
            "`eval_examples`: expected `len()` and integer items, got list_iterator. Pass a list of them.",
        ),
        (
            {"save_argmin_ckpt_by_metrics": "loss", "eval_examples": EXAMPLES},
            TypeError,
            "`save_argmin_ckpt_by_metrics`: expected names of metrics in a list, got a string. Write ['loss'].",
        ),
    ],
)
def test_invalid_arguments_are_refused_before_any_work(kwargs, error, expected, tmp_path):
    trainer = make_trainer(tmp_path)
    assert message(error, trainer.fit, EXAMPLES, **{"per_device_batch_size": 4, "n_epochs": 1, **kwargs}) == expected
    assert has_done_no_work(trainer)
    assert not (tmp_path / "ckpts").exists()


SAVES = [
    {"save_every_n_steps": 1},
    {"save_last_ckpt": True},
    {"save_ckpt_every_k_epochs": 1},
    {"save_argmin_ckpt_by_metrics": ["loss"], "eval_examples": EXAMPLES},
]


@pytest.mark.parametrize("kwargs", [*SAVES, {}])
def test_saving_needs_a_workdir_that_can_be_written(kwargs, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # as for a read-only mount
    trainer = make_trainer(tmp_path)
    expected = f"`workdir`: expected a folder that can be written, got {tmp_path}, which cannot. Change its permissions or "
    assert message(ValueError, trainer.fit, EXAMPLES, 4, 1, **kwargs).startswith(expected)
    assert has_done_no_work(trainer)


@pytest.mark.parametrize(
    ("call", "number", "advice"),
    [
        ("fit", errno.ENOSPC, "Make room"),
        ("save_ckpt", errno.EROFS, "Change its permissions or mount"),
        ("save_outputs", errno.EIO, "Look at the disk"),
    ],
)
def test_an_error_of_the_disk_reads_as_other_errors(call, number, advice, tmp_path, monkeypatch):
    """The path, what was expected and found, and the next step, below one frame of the library."""
    trainer = make_trainer(tmp_path)
    calls = {
        "fit": lambda: trainer.fit(EXAMPLES, 4),
        "save_ckpt": trainer.save_ckpt,
        "save_outputs": lambda: trainer.deployer.save_outputs([1]),
    }

    def fails(*args):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError) as raised:
        calls[call]()
    path = "outputs/outputs.jsonl" if call == "save_outputs" else "ckpts"
    assert raised.value.errno == number
    expected = rf"`{tmp_path / path}`: expected .*, got '{os.strerror(number)}'.* {advice}, or "
    assert re.match(expected, str(raised.value))
    assert raised.value.__suppress_context__ or raised.value.__context__ is None
    assert len([frame for frame in traceback.extract_tb(raised.tb) if frame.filename.startswith(LIBRARY)]) == 1


@pytest.mark.parametrize("kwargs", SAVES)
def test_saving_needs_a_workdir(kwargs):
    expected = "`workdir`: expected a folder for checkpoints, got None. Pass `Deployer(workdir=...)`."
    trainer = make_trainer()
    assert message(ValueError, trainer.fit, EXAMPLES, 4, 1, **kwargs) == expected
    assert has_done_no_work(trainer)
    assert message(ValueError, trainer.save_ckpt) == expected
    assert message(ValueError, trainer.load_ckpt) == expected


@pytest.mark.parametrize("kind", ["argmin", "argmax"])
def test_metric_missing_from_the_evaluation_is_reported_before_training(kind, tmp_path):
    trainer = make_trainer(tmp_path)
    predictor = trainer.get_default_predictor(lambda model, batch, key: jax.vmap(model)(batch["x"]))
    found = message(
        ValueError,
        trainer.fit,
        EXAMPLES,
        4,
        1,
        eval_examples=EXAMPLES,
        eval_predictor=predictor,
        eval_metric_fn=lambda examples, outputs: {"acc": 1.0},
        **{f"save_{kind}_ckpt_by_metrics": ["accuracy", "loss"]},
    )
    assert found == (
        "`save_argmin_ckpt_by_metrics`, `save_argmax_ckpt_by_metrics`: expected metrics among ['acc', 'loss'], "
        "which the evaluation returns, got ['accuracy']. Return them from `eval_metric_fn`, or drop them."
    )
    assert trainer.step == 0
    assert not (tmp_path / "ckpts").exists()


# --- checkpoints --------------------------------------------------------------------------------------------------------


def flip(path, at=-1):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def flip_in_the_header(path):
    flip(path, 40)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-4])


def edit_manifest(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


DAMAGED = "The file is damaged or unfinished: load another checkpoint."


@pytest.mark.parametrize(
    ("file", "damage", "expected"),
    [
        ("model.safetensors", truncate, rf"expected \d+ bytes, got \d+\. {DAMAGED}"),
        ("optimizer.safetensors", truncate, rf"expected \d+ bytes, got \d+\. {DAMAGED}"),
        ("model.safetensors", flip, rf"expected crc32 \d+, got \d+\. {DAMAGED}"),
        ("optimizer.safetensors", flip_in_the_header, rf"expected crc32 \d+, got \d+\. {DAMAGED}"),
        ("model.safetensors", lambda path: path.unlink(), rf"expected \d+ bytes, got no file\. {DAMAGED}"),
        ("optimizer.safetensors", flip, rf"expected crc32 \d+, got \d+\. {DAMAGED}"),
        ("trainer.json", truncate, rf"expected JSON, got .*\. {DAMAGED}"),
        (
            "trainer.json",
            lambda path: edit_manifest(path, step=3),
            rf"expected a manifest of crc32 \d+, got \d+\. {DAMAGED}",
        ),
        (
            "trainer.json",
            lambda path: edit_manifest(path, version=7),
            r"expected version 1, which this release reads, got 7\. Install the release of redeqx that wrote it, "
            "or a later one.",
        ),
    ],
)
def test_damaged_checkpoint_is_not_loaded(file, damage, expected, workdir):
    path = workdir / "ckpts" / "step_00000004" / file
    damage(path)
    trainer = make_trainer(workdir)
    before = bits(trainer)
    with pytest.raises(ValueError, match=rf"^`{path}`: {expected}$"):
        trainer.load_ckpt("last")
    assert bits(trainer) == before
    assert trainer.step == 0
    trainer.load_ckpt("step_00000003")  # the previous one is intact
    assert trainer.step == 3
    again = make_trainer(workdir)
    with pytest.warns(UserWarning, match=rf"^`{path}`: {expected} It is skipped for the previous one\.$"):
        again.fit(EXAMPLES, 4, 3)
    assert again.step > 4


def test_run_does_not_restart_over_checkpoints_that_are_all_damaged(workdir):
    for folder in (workdir / "ckpts").glob("step_*"):
        truncate(folder / "model.safetensors")
    with pytest.warns(UserWarning, match="It is skipped"), pytest.raises(ValueError, match=r"step_00000004.*expected"):
        make_trainer(workdir).fit(EXAMPLES, 4, 3)


def test_unknown_checkpoint_suggests_the_nearest(workdir):
    assert message(ValueError, make_trainer(workdir).load_ckpt, "lats") == (
        f"`{workdir / 'ckpts'}`: expected one of last, step_00000001, step_00000002, step_00000003, step_00000004, or the "
        "path of a checkpoint, got 'lats'. Did you mean `last`? Pass one of those."
    )


class Renamed(eqx.Module):
    weights: jax.Array
    bias: jax.Array

    def __init__(self):
        self.weights, self.bias = jnp.zeros((4, 4)), jnp.zeros(4)

    def __call__(self, x):
        return self.weights @ x + self.bias


def mismatch_message(path, *lines):
    listed = "".join(f"\n  - {line}" for line in lines)
    is_renamed = any("got none" in line for line in lines) and any("expected no tensor" in line for line in lines)
    hint = " If leaves were renamed, `redeqx.models.load_weights` maps the names."
    return (
        f"`{path / 'model.safetensors'}`: expected the tensors of this model, got {len(lines)} that differ:{listed}\n"
        f"Build the model that was saved, or load the checkpoint of this one.{hint * is_renamed}"
    )


OTHERS = {
    "missing and extra": (
        Renamed,
        "`weights`: expected float32 (4, 4), got none. Did you mean `weight`?",
        "`weight`: expected no tensor of this name, got float32 (4, 4). Did you mean `weights`?",
    ),
    "other shapes": (
        lambda: linear(4, 6),
        "`weight`: expected float32 (6, 4), got float32 (4, 4).",
        "`bias`: expected float32 (6,), got float32 (4,).",
    ),
    "extra": (
        lambda: eqx.nn.Linear(4, 4, use_bias=False, key=jax.random.key(0)),
        "`bias`: expected no tensor of this name, got float32 (4,).",
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_checkpoint_of_another_model_is_not_loaded(kind, workdir):
    make_model, *lines = OTHERS[kind]
    path = workdir / "ckpts" / "step_00000004"
    trainer = make_trainer(workdir, model=make_model())
    before = bits(trainer)
    assert message(ValueError, trainer.load_ckpt) == mismatch_message(path, *lines)
    assert bits(trainer) == before

    trainer = make_trainer(workdir, model=make_model())
    expected = (
        f"`workdir`: expected a run that this trainer can continue, got {path}, which it cannot: "
        f"{mismatch_message(path, *lines)} For a new run choose another workdir."
    )
    index = (workdir / "ckpts" / "index.json").read_bytes()
    assert message(ValueError, trainer.fit, EXAMPLES, 4, 3, save_last_ckpt=True) == expected
    # The second call fails in the same way. A traceback shows the differences once.
    with pytest.raises(ValueError) as raised:
        trainer.fit(EXAMPLES, 4, 3, save_last_ckpt=True)
    assert str(raised.value) == expected
    assert "".join(traceback.format_exception(raised.value)).count(lines[0]) == 1
    assert (workdir / "ckpts" / "index.json").read_bytes() == index


def test_checkpoint_of_another_optimizer_loads_without_its_state(workdir):
    path = workdir / "ckpts" / "step_00000004"
    trainer = make_trainer(workdir, optimizer=optax.sgd(0.1))
    differs = f"`{path / 'optimizer.safetensors'}`: expected the tensors of this optimizer, got "
    advice = (
        "Pass the `optimizer` and the `trainable` with which it was saved, or load the model alone: "
        "`load_ckpt(..., load_opt_states=False)`."
    )
    found = message(ValueError, trainer.load_ckpt)
    assert found.startswith(differs) and found.endswith(f"\n{advice}")
    found = message(
        ValueError, make_trainer(workdir, trainable=lambda leaf: eqx.is_array(leaf) and leaf.ndim == 2).fit, EXAMPLES, 4, 3
    )
    assert differs in found and found.endswith(f"\n{advice} For a new run choose another workdir.")
    trainer.load_ckpt(load_opt_states=False)
    assert trainer.step == 0
    same = make_trainer(workdir)
    same.load_ckpt()
    np.testing.assert_array_equal(np.asarray(trainer.model.weight), np.asarray(same.model.weight))


def test_checkpoint_without_optimizer_loads_as_a_model(tmp_path):
    trainer = make_trainer(tmp_path)
    path = trainer.save_ckpt(save_opt_states=False)
    assert message(ValueError, trainer.load_ckpt) == (
        f"`{path}`: expected the optimizer's state, got model alone, as `save_opt_states=False` saves it. "
        "Load the model without it: `load_ckpt(..., load_opt_states=False)`."
    )
    trainer.load_ckpt(load_opt_states=False)
    with pytest.raises(ValueError, match=r"expected one of model, got 'ema'\. Save it, or load without it"):
        redeqx.load(path, trainer.model, kind="ema")


def test_existing_checkpoints_are_refused_without_resume(workdir):
    trainer = make_trainer(workdir)
    assert message(ValueError, trainer.fit, EXAMPLES, 4, 3, resume=False) == (
        f"`workdir`: expected no checkpoints, as `resume=False`, got {workdir / 'ckpts' / 'step_00000004'}. "
        "Pass `resume=True` to continue from it, or another workdir for a new run."
    )
    assert has_done_no_work(trainer)


def test_resumed_run_needs_the_same_seed(workdir):
    trainer = make_trainer(workdir, jax_seed=1)
    assert message(ValueError, trainer.fit, EXAMPLES, 4, 3) == (
        f"`jax_seed`: expected 0, as in {workdir / 'ckpts' / 'step_00000004'}, got 1. "
        "Pass the same seed to continue, or another workdir for a new run."
    )
    assert has_done_no_work(trainer)


def test_resumed_run_needs_the_same_number_of_examples(workdir):
    shutil.rmtree(workdir / "ckpts" / "step_00000004")
    index = workdir / "ckpts" / "index.json"
    index.write_text(json.dumps({"last": "step_00000003"}))  # in the middle of the second epoch
    trainer = make_trainer(workdir)
    assert message(ValueError, trainer.fit, EXAMPLES[:7], 4, 2, save_last_ckpt=True) == (
        "`train_examples`: expected 8, as in the resumed run, got 7. "
        "The order of the examples would differ. For new examples choose another workdir."
    )
    assert json.loads(index.read_text()) == {"last": "step_00000003"}
