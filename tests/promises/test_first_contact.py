"""Common mistakes of new users: each error names the mistake and the next step, near the user's own line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "mistakes.py"
PACKAGE = Path(__file__).parents[2] / "redeqx"


@pytest.fixture(scope="module")
def outcomes():
    """The error of each mistake, in a process without jaxtyping's checks, which would raise first for some of them."""
    made = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)}, capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    return {(found := json.loads(line))["name"]: found for line in made.stdout.splitlines() if line.startswith("{")}


READY = (
    "Each example has arrays that share their leading dim: (2, 4), (2,). If these are ready batches, pass their rows as the "
    "examples, and stack these in `collate_fn`: redeqx shuffles and batches by itself."
)
# What each mistake raises: the class, the argument that is named, what it got, and the remedy that follows. `TMP` stands for
# the folder of the script.
MESSAGES = {
    "a function for a model": ("TypeError", "`model`", "`pred_fn`", "`eqx.Module`"),
    "a function for a predictor's model": ("TypeError", "`model`", "`<lambda>`", "`eqx.Module`"),
    "a class for a model": ("TypeError", "`model`", "Linear", "`Linear(..., key=key)`"),
    "a name for a model": ("TypeError", "`model`", "'gpt2'", "`model, config = redeqx.models.from_pretrained(...)`"),
    "torch module": ("TypeError", "`model`", "PyTorch", "`eqx.Module`"),
    "flax linen module": ("TypeError", "`model`", "Flax", "`eqx.Module`"),
    "flax nnx module": ("TypeError", "`model`", "Flax", "`eqx.Module`"),
    "keras layer": ("TypeError", "`model`", "Keras", "`eqx.Module`"),
    "model and state": ("TypeError", "`model`", "tuple", "`model=model, model_state=state`"),
    "a number for a state": ("TypeError", "`model_state` leaf `n`", "0", "`jnp.asarray(...)`"),
    "a teacher for a state": ("TypeError", "`model_state` leaf `activation`", "got a", "`eqx.filter(state, eqx.is_array)`"),
    "a state of text, to predict": (
        "TypeError", "`model_state` leaf `value`", "'teacher'",
        "`eqx.filter(state, eqx.is_array)`",
    ),
    "optax.adam not called": ("TypeError", "`optimizer`", "`optax.adam`", "`optax.adam(learning_rate)`"),
    "torch optimizer": ("TypeError", "`optimizer`", "PyTorch", "`optax.adamw(learning_rate)`"),
    "list of optimizers": ("TypeError", "`optimizer`", "list", "`optax.chain(...)`"),
    "no optimizer": ("TypeError", "`optimizer`", "None", "`optax.adamw(learning_rate)`"),
    "loss_fn without key": ("TypeError", "`loss_fn`", "`(model, batch)`", "`key`"),
    "loss_fn with state": ("TypeError", "`loss_fn`", "`(model, state, batch, key)`", "`eqx.nn.make_with_state`"),
    "loss_fn without state": ("TypeError", "`loss_fn`", "`(model, batch, key)`", "`functools.partial`"),
    "jitted loss_fn without key": ("TypeError", "`loss_fn`", "`(model, batch)`", "`key`"),
    "a number for loss_fn": ("TypeError", "`loss_fn`", "0.5", "Pass the function itself"),
    "pred_fn without key": ("TypeError", "`pred_fn`", "`(model, batch)`", "`key`"),
    "default pred_fn without key": ("TypeError", "`pred_fn`", "`(model, batch)`", "`key`"),
    "pred_fn without key, model later": ("TypeError", "`pred_fn`", "`(model, batch)`", "`key`"),
    "collate_fn of two": ("TypeError", "`collate_fn`", "`(x, y)`", "`functools.partial`"),
    "metric_fn of outputs": ("TypeError", "`eval_metric_fn`", "`(outputs)`", "`functools.partial`"),
    "pred_fn for a predictor": ("TypeError", "`eval_predictor`", "`pred_fn`", "`trainer.get_default_predictor(pred_fn)`"),
    "a learning rate for a schedule": ("TypeError", "`lr_schedule_fn`", "0.001", "Pass the function itself"),
    "a key for a plan": ("TypeError", "`plan`", "PRNGKeyArray", "`deployer.plan(model, loss_fn, batch)`"),
    "make_model is a model": ("TypeError", "`make_model`", "`(x, *, key=None)`", "`lambda: ...`"),
    "metric that is an array": ("ValueError", "`eval_metric_fn` metric `accuracy`", "(3,)", "Return its mean"),
    "metric that is a list": ("TypeError", "`eval_metric_fn` metric `accuracy`", "list", "Return a number"),
    "metric called loss": ("ValueError", "`eval_metric_fn`", "'loss'", "`eval_loss=False`"),
    "metric_fn returns a number": ("TypeError", "`eval_metric_fn`", "0.5", "`{'accuracy': ...}`"),
    "metric_fn returns nothing": ("TypeError", "`eval_metric_fn`", "None", "`{'accuracy': ...}`"),
    "rows 4.0": ("TypeError", "`per_device_batch_size`", "4.0", "Pass 4"),
    "rows 2.5": ("TypeError", "`per_device_batch_size`", "2.5", "Pass a whole number"),
    "rows True": ("TypeError", "`per_device_batch_size`", "True", "Pass a whole number"),
    "rows 0": ("ValueError", "`per_device_batch_size`", "0", "Pass a positive number"),
    "rows -1": ("ValueError", "`per_device_batch_size`", "-1", "Pass a positive number"),
    "rows '4'": ("TypeError", "`per_device_batch_size`", "'4'", "Pass a whole number"),
    "rows None": ("ValueError", "`per_device_batch_size`, `batch_size`", "neither", "`batch_size`"),
    "batch_size 8.0": ("TypeError", "`batch_size`", "8.0", "Pass 8"),
    "eval_batch_size True": ("TypeError", "`eval_batch_size`", "True", "Pass a whole number"),
    "rows of train": ("TypeError", "`per_device_batch_size`", "4.0", "Pass 4"),
    "rows of eval_loss": ("TypeError", "`per_device_batch_size`", "4.0", "Pass 4"),
    "rows of predict": ("TypeError", "`per_device_batch_size`", "4.0", "Pass 4"),
    "a text for a flag": ("TypeError", "`resume`", "'false'", "Pass one of them"),
    "a text for a flag of train": ("TypeError", "`drop_remainder`", "'no'", "Pass one of them"),
    "a text for a flag of a deployer": ("TypeError", "`verbose`", "'0'", "Pass one of them"),
    "a number for a flag of saves": ("TypeError", "`save_opt_states`", "0", "Pass one of them"),
    "a text for a flag of loads": ("TypeError", "`load_opt_states`", "'no'", "Pass one of them"),
    "the unroll of a scan": ("TypeError", "`unroll`", "4", "Pass one of them"),
    "a text for a flag or None": ("TypeError", "`stack_blocks`", "'never'", "Pass one of them"),
    "a text for a flag of Muon": ("TypeError", "`nesterov`", "'no'", "Pass one of them"),
    "a number to keep the best by": ("TypeError", "`save_argmin_ckpt_by_metrics`", "0.5", "Write ['loss']"),
    "numbers to keep the best by": ("TypeError", "`save_argmax_ckpt_by_metrics`", "[0.5]", "Write ['loss']"),
    "a score to save with": ("TypeError", "`metrics`", "0.5", "Pass a dict"),
    "a number for a run's config": ("TypeError", "`config`", "3", "Pass a dict"),
    "a dict for outputs": ("TypeError", "`outputs`", "{'a': 1}", "Pass `[outputs]`"),
    "no outputs": ("TypeError", "`outputs`", "None", "Pass `[outputs]`"),
    "no name of outputs": ("ValueError", "`name`", "None", "Pass 'test.jsonl'"),
    "a text for a number of steps": ("TypeError", "`n_steps`", "'10'", "Pass a whole number"),
    "a number for a machine": ("TypeError", "`topology`", "8", "Pass 'gpu:h100-80gb:8'"),
    "a logger of metrics alone": ("TypeError", "`loggers[0].log`", "`(data)`", "`functools.partial`"),
    "a function to train on": ("TypeError", "`examples`", "only `fit` calls", "Call it"),
    "a function to update on": ("TypeError", "`examples`", "only `fit` calls", "Call it"),
    "epochs 1.5": ("TypeError", "`n_epochs`", "1.5", "Pass a whole number"),
    "micro-batches 2.0": ("TypeError", "`accumulate_grad_batches`", "2.0", "Pass 2"),
    "shards 2.0": ("TypeError", "`n_model_shards`", "2.0", "Pass 2"),
    "seed 0.5": ("TypeError", "`jax_seed`", "0.5", "Pass a whole number"),
    "seed -1": ("ValueError", "`jax_seed`", "-1", "Pass 0 or more"),
    "schedule's rows 4.0": ("TypeError", "`per_device_batch_size`", "4.0", "Pass 4"),
    "workdir is a file": ("ValueError", "`workdir`", "`TMP/file`", "Move the file"),
    "workdir in a file": ("ValueError", "`workdir`", "`TMP/file/run`", "Move the file"),
    "workdir is a number": ("TypeError", "`workdir`", "3", "`pathlib.Path`"),
    "workdir is an array": ("TypeError", "`workdir`", "an array of shape (2,)", "`pathlib.Path`"),
    "pandas frame": ("TypeError", "`train_examples`", "DataFrame", '`df.to_dict("records")`'),
    "polars frame": ("TypeError", "`examples`", "DataFrame", "one item per example"),
    "series": ("TypeError", "`train_examples`", "Series", "`series.to_list()`"),
    "loader of batches": ("TypeError", "`train_examples`", "DataLoader", "`dataset`"),
    "loader with a batch sampler": ("TypeError", "`examples`", "DataLoader", "`dataset`"),
    "loader of batches, to evaluate": ("TypeError", "`eval_examples`", "DataLoader", "`dataset`"),
    "splits": ("TypeError", "`train_examples`", "DatasetDict", "Pass one of them, such as the one at 'train'"),
    "columns": ("TypeError", "`train_examples`", "(8, 4), (8,)", "`list(zip(*arrays))`"),
    "columns of one shape": ("TypeError", "`train_examples`", "(8, 4), (8, 4)", "`list(arrays)`"),
    "columns of one shape and two kinds": ("TypeError", "`train_examples`", "(8, 4), (8, 4)", "`list(zip(*arrays))`"),
    "columns by name": (
        "TypeError", "`train_examples`", "dict",
        "`[dict(zip(columns, row)) for row in zip(*columns.values())]`",
    ),
    "a column of None": ("TypeError", "`collate_fn` output `y`", "None in 4 of 4 entries", "Replace them by numbers"),
    "ready batches": ("TypeError", "`collate_fn` output `value`", "list", "`np.array(...)`"),
    "an iterable of ready batches": ("TypeError", "`collate_fn` output `value`", "dict", "Return arrays of numbers"),
    "every row masked": ("ValueError", "`loss` at step 1", "`Loss.weight`", "leave such examples out"),
    "every row masked, in a loop": ("ValueError", "`loss` at step 1", "`Loss.weight`", "leave such examples out"),
    "every evaluated row masked": ("UserWarning", "`Loss.weight`", "0", "evaluate other examples"),
    "epochs of other libraries": ("TypeError", "`fit`", "unknown one: `epochs`", "`n_epochs`"),
    "a misspelt option of fit": ("TypeError", "`fit`", "unknown one: `bath_size`", "`batch_size`"),
    "positional options of fit": (
        "TypeError", "`fit`", "`(train_examples, per_device_batch_size, n_epochs, *, max_steps,",
        "too many positional",
    ),
    "fit without examples": ("TypeError", "`fit`", "`(train_examples, ", "missing a required argument: 'train_examples'"),
    "a positional model": (
        "TypeError", "`Trainer`", "`(deployer, *, model, optimizer, collate_fn, loss_fn,",
        "too many positional arguments",
    ),
    "no collate_fn": ("TypeError", "`Predictor`", "`(deployer, *, model, collate_fn, ", "missing a required"),
    "a model for a deployer": ("TypeError", "`deployer`", "Linear", "`redeqx.Deployer(...)`"),
    "swapped arguments of loss_fn": ("TypeError", "`loss_fn`", "`(batch, model, key)`", "put them into this order"),
    "swapped arguments of metric_fn": ("TypeError", "`eval_metric_fn`", "`(outputs, examples)`", "put them into this order"),
    "assigning a model": ("AttributeError", "`Trainer.model`", "assignment", "`model=`"),
    "assigning an optimizer": ("AttributeError", "`Trainer.optimizer`", "assignment", "`optimizer=`"),
    "workdir of no name": ("ValueError", "`workdir`", "''", "Pass '.' for the current folder"),
    "workdir that cannot be made": (
        "FileNotFoundError", "`workdir`", "'/proc/run'",
        "Choose a folder in which you may write",
    ),
    "workdir with a long name": ("OSError", "`workdir`", "aaa", "Choose a folder in which you may write"),
    "more examples per update than there are": ("UserWarning", "`per_device_batch_size`", "128", "`batch_size=8`"),
    "more examples per update, in a pass": ("UserWarning", "`batch_size`", "64", "`batch_size=8`"),
    "a generator for two epochs": ("ValueError", "`train_examples`", "`numbers`", "`lambda epoch: ...`"),
    "a packed generator for two epochs": ("ValueError", "`train_examples`", "`numbers`", "`lambda epoch: ...`"),
    "a map for two epochs": ("ValueError", "`train_examples`", "a map", "`lambda epoch: ...`"),
    "an iterator for two epochs": ("ValueError", "`train_examples`", "an iterator", "`lambda epoch: ...`"),
    "a generator function": ("TypeError", "`train_examples`", "`()`", "`functools.partial`"),
    "no simulated devices": ("ValueError", "`n_devices`", "0", "Pass a positive number"),
    "simulated devices of text": ("TypeError", "`n_devices`", "'8'", "Pass a whole number"),
    "metrics in a list": ("TypeError", "`metrics`", "[0.5]", "Pass a dict"),
    "a number for a metric's name": ("TypeError", "`metrics`", "{3: 0.5}", "Pass a dict"),
    "a path to save to": ("ValueError", "`name`", "'runs/best'", "Pass 'best'"),
    "a number to save by": ("ValueError", "`name`", "5", "Pass 'best'"),
    "no such checkpoint": ("ValueError", "`/nowhere/step_00000004`", "nothing there", "Pass one of those"),
    "no checkpoint in there": ("ValueError", "`TMP`", "a folder without one", "Pass one of those"),
    "NaN in the batch": (
        "ValueError", "`loss` at step 2", "`x` has NaN in 1 of 4 rows, the first from example 6",
        "Correct or remove these examples",
    ),
    "labels out of range": (
        "ValueError", "`loss` at step 1", "`y` has values from 0 to 4, which index a dim of 3",
        "Count classes from 0",
    ),
    "labels from 1": (
        "ValueError", "`loss` at step 1", "`y` has values from 1 to 3, which index a dim of 3",
        "Count classes from 0",
    ),
    "labels beyond the vocabulary": ("ValueError", "`loss` at step 1", "`y` has values from 0 to 4", "Count classes from 0"),
    "a misspelt option of train": ("TypeError", "`train`", "unknown one: `bath_size`", "`batch_size`"),
    "epochs of train": ("TypeError", "`train`", "`(examples, per_device_batch_size, ", "unknown one: `n_epochs`"),
    "a positional option of train": (
        "TypeError", "`train`", "`(examples, per_device_batch_size, *, batch_size,",
        "too many positional arguments",
    ),
    "train without examples": ("TypeError", "`train`", "`(examples, ", "missing a required argument: 'examples'"),
    "a misspelt option of predict": ("TypeError", "`predict`", "unknown one: `bath_size`", "`batch_size`"),
    "a positional hyperparameter": ("TypeError", "`set_hyperparams`", "`(**values)`", "too many positional arguments"),
    "a deployer for a path": ("TypeError", "`path`", "Deployer", "`pathlib.Path`"),
    "swapped arguments of load": (
        "TypeError", "`like`", "PosixPath",
        "`model, config = redeqx.models.from_pretrained(...)`",
    ),
    "a plan for a deployer": ("TypeError", "`deployer`", "Plan", "`redeqx.Deployer(...)`"),
    "a deployer for a plan": ("TypeError", "`plan`", "'Deployer'", "`deployer.plan(model, loss_fn, batch)`"),
    "load without like": ("TypeError", "`load`", "`(path, like, ", "missing a required argument: 'like'"),
    "a predictor of a model and a like": ("TypeError", "`load(model=)`", "both", "`model`"),
    "swapped arguments of Predictor.load": ("TypeError", "`deployer`", "PosixPath", "`redeqx.Deployer(...)`"),
    "names of PEFT": ("TypeError", "`add`", "rank, ", "unknown one: `r`"),
    "a rank of text": ("TypeError", "`rank`", "'8'", "Pass a whole number"),
    "alpha of 0": ("ValueError", "`alpha`", "0", "`rank`"),
    "a seed for a key": ("TypeError", "`key`", "0", "`jax.random.key(0)`"),
    "no layers": ("ValueError", "`where`", "none", '`"*.attention.query"`'),
    "a function of the path alone": ("TypeError", "`where`", "`(path)`", "`functools.partial`"),
    "an adapter in a file": ("ValueError", "`folder`", "`TMP/file`", "Move the file"),
    "swapped arguments of load_adapter": ("TypeError", "`folder`", "GPT2", "`pathlib.Path`"),
    "a folder of no name": ("ValueError", "`folder`", "''", "Pass '.' for the current folder"),
    "a folder that is a file": ("ValueError", "`folder`", "`TMP/file`", "Move the file"),
    "a folder in a store": ("ValueError", "`folder`", "s3://bucket/gpt2", "Pass a folder"),
    "a dict for a config": ("TypeError", "`config`", "dict", "`from_pretrained`"),
    "None for a folder": ("TypeError", "`folder`", "None", "`pathlib.Path`"),
    "a positional deployer": ("TypeError", "`from_pretrained`", "`(folder, *, dtype,", "too many positional"),
    "names of vLLM": ("TypeError", "`generate`", "unknown one: `max_tokens`", "`max_new_tokens`"),
    "a text for a prompt": ("TypeError", "`inputs`", "'Hello'", "Pass what the tokenizer returns"),
    "tokens of another vocabulary": ("ValueError", "`inputs`", "51", "`mask`"),
    "2.0 new tokens": ("TypeError", "`max_new_tokens`", "2.0", "Pass 2"),
    "an end that is text": ("TypeError", "`eos_token_id`", "'</s>'", "Pass that of the tokenizer"),
    "a rate of text": ("TypeError", "`learning_rate`", "'1e-3'", "`optax.cosine_decay_schedule`"),
    "no rate": ("TypeError", "`learning_rate`", "None", "`optax.cosine_decay_schedule`"),
    "a negative rate": ("ValueError", "`learning_rate`", "-0.001", "`optax.cosine_decay_schedule`"),
    "a decay for a plan": ("TypeError", "`plan`", "0.1", "`deployer.plan(model, loss_fn, batch)`"),
    "betas of PyTorch": ("TypeError", "`adamw`", "b1, b2, ", "unknown one: `betas`"),
    "a beta of 1": ("ValueError", "`b1`", "1.0", "Published values are 0.9 to 0.999"),
    "a kind for a mask": ("TypeError", "`mask`", "'matrix'", "`redeqx.optimizers.of_kind('matrix')`"),
    "rates for groups": ("TypeError", "`transforms['bias']`", "0.001", "`optax.adamw(learning_rate)`"),
    "swapped arguments of groups": (
        "TypeError", "`transforms`", "an optimizer",
        '`groups({"embedding": optax.adam(1e-2)}, default=optax.adamw(1e-3))`',
    ),
    "a default of text": ("TypeError", "`default`", "'adamw'", "`optax.adamw(learning_rate)`"),
    "ends in another order": ("ValueError", "`ends`", "10 to 100", "Pass where each document ends"),
    "a mask for ends": ("TypeError", "`ends`", "bool[100]", "`np.cumsum(lengths)`"),
    "a positional stride": ("TypeError", "`TokenRows`", "`(tokens, length, *, stride", "too many positional"),
    "overrides in a list": ("TypeError", "`overrides`", "list", '`{"head.weight": ("model", None)}`'),
    "a dim for an override": ("TypeError", "`overrides['weight']`", "0", "`('model', None)`"),
    "dims for an override": ("TypeError", "`overrides['weight']`", "0", "`('model', None)`"),
    "positional overrides": ("TypeError", "`loss_fn`", "dict", "`overrides=...`"),
    "a rate of NaN at the end": ("ValueError", "`end_learning_rate`", "nan", "Pass that of the last update"),
    "a first rate of text": ("TypeError", "`init_learning_rate`", "'0'", "Pass that of the first update"),
    "a schedule over nothing": ("ValueError", "`train_size`", "3", "Pass a smaller batch size"),
    "lr": ("TypeError", "`get_lr_schedule_fn`", "learning_rate, ", "unknown one: `lr`"),
    "a misspelt method of a callback": ("UserWarning", "`callbacks[0].on_steps`", "never calls", "`on_step`"),
    "a method of a callback without metrics": ("TypeError", "`callbacks[0].on_step`", "`(trainer)`", "`functools.partial`"),
    "Lightning's EarlyStopping": ("TypeError", "`EarlyStopping`", "`(metric, ", "unknown one: `monitor`"),
    "a batch that is fine": ("ValueError", "`loss` at step 1", "nan", "Lower the learning rate"),
    "a model from before a step": ("ValueError", "`model`", "2 of 2 deleted", "jax.tree.map(lambda x: x.copy()"),
    "a model from before a step, to predict": ("ValueError", "`model`", "2 of 2 deleted", "jax.tree.map(lambda x: x.copy()"),
    "a model from before a step, to train": ("ValueError", "`model`", "2 of 2 deleted", "jax.tree.map(lambda x: x.copy()"),
}  # fmt: skip

BATCH = (
    "The leading dim is the batch, of {} rows; an Equinox module takes one row, so `jax.vmap(model)(...)` takes them all."
)
# JAX's message, which is kept; the added note; and the function names of the script's last frames.
NOTES = {
    "wrong width": (
        "TypeError", "dot_general requires contracting dimensions to have the same shape, got (5,) and (4,).",
        f"`loss_fn` was called with this batch: `x` float32[4, 4], `y` int32[4]. {BATCH.format(4)}", ["fit", "loss_fn"],
    ),
    "no vmap": (
        "ValueError", "Incompatible shapes for broadcasting: shapes=[(3, 4), (3,)]",
        f"`loss_fn` was called with this batch: `x` float32[4, 4], `y` int32[4]. {BATCH.format(4)}", ["fit", "<lambda>"],
    ),
    "no vmap in pred_fn": (
        "ValueError", "Incompatible shapes for broadcasting: shapes=[(3, 4), (3,)]",
        f"`pred_fn` was called with this batch: `x` float32[4, 4], `y` int32[4]. {BATCH.format(4)}",
        ["<lambda>", "<lambda>"],
    ),
    "no vmap in a plan": (
        "TypeError", "dot_general requires contracting dimensions to have the same shape, got (4,) and (8,).",
        f"`loss_fn` was called with this batch: `x` float32[8, 4], `y` int32[8]. {BATCH.format(8)}",
        ["<lambda>", "<lambda>"],
    ),
    "collate_fn raises": (
        "TypeError", "tuple indices must be integers or slices, not str",
        "`collate_fn` was called with examples 4, 0, 1, 3, counted from 0.", ["fit", "collate_wrongly"],
    ),
    "collate_fn raises in predict": (
        "TypeError", "tuple indices must be integers or slices, not str",
        "`collate_fn` was called with examples 0, 1, 2, 3, counted from 0.", ["<lambda>", "collate_wrongly"],
    ),
    "a metric of all classes": (
        "KeyError", "-4",
        "Raised by the check before training, which evaluates the first batch, 4 of 8 examples, so that mistakes show "
        "early. If a metric needs more of them, pass `eval_sanity_check=False`.", ["fit", "<lambda>"],
    ),
    "reading raises": (
        "OSError", "no such picture", "Raised in reading example 5, counted from 0.", ["fit", "__getitem__"],
    ),
    "an iterable's example is wrong": (
        "ValueError", "not enough values to unpack (expected 2, got 1)",
        "`collate_fn` was called with examples 8, counted from 0.", ["<lambda>", "collate_fn"],
    ),
}  # fmt: skip

FINE = [
    "numpy integers", "functions with more", "any arguments", "a filter-jitted loss", "a PyTree of arrays",
    "a generator for one epoch", "numbers of any kind", "the trainer's own model",
]  # fmt: skip

SAVED = ["a model from before a step, to save", "a model from before a step, to save its adapter"]


def is_ours(file):
    return file.startswith(str(PACKAGE))


def test_every_mistake_has_an_expected_error(outcomes):
    assert set(outcomes) == {*MESSAGES, *NOTES, *SAVED, *FINE}


@pytest.mark.parametrize("name", MESSAGES)
def test_the_error_names_the_mistake_and_the_next_step(name, outcomes):
    found, (kind, argument, got, remedy) = outcomes[name], MESSAGES[name]
    tmp = next((word for word in outcomes["no checkpoint in there"]["message"].split("`") if word), "TMP")
    named, _, rest = found["message"].replace(tmp, "TMP").partition(": expected ")
    assert (found["kind"], named) == (kind, argument)
    assert got in rest and remedy in rest.partition(got)[2], found["message"]


@pytest.mark.parametrize("name", MESSAGES)
def test_the_error_is_raised_near_the_users_line(name, outcomes):
    ours = [function for file, function in outcomes[name]["frames"] if is_ours(file)]
    assert len(ours) <= 4
    assert [is_ours(file) for file, _ in outcomes[name]["frames"][-len(ours) :]] == [True] * len(ours)


@pytest.mark.parametrize("name", ["ready batches", "an iterable of ready batches"])
def test_examples_that_are_batches_get_a_note(name, outcomes):
    assert READY in outcomes[name]["notes"]


@pytest.mark.parametrize("name", SAVED)
def test_a_model_from_before_a_step_is_not_saved(name, outcomes):
    assert outcomes[name]["message"].startswith("`model`: expected ")
    assert "deleted" in outcomes[name]["message"] and "keep a copy" in outcomes[name]["message"]


@pytest.mark.parametrize("name", NOTES)
def test_an_error_of_a_users_function_keeps_its_message_and_gets_a_note(name, outcomes):
    kind, message, note, functions = NOTES[name]
    found = outcomes[name]
    assert (found["kind"], found["message"]) == (kind, message)
    assert note in found["notes"]
    in_script = [function for file, function in found["frames"] if file == str(SCRIPT) and function != "<listcomp>"]
    assert in_script[-2:] == functions


@pytest.mark.parametrize("name", sorted(set(NOTES) - {"no vmap in a plan"}))
def test_an_error_of_a_users_function_shows_no_library_frame(name, outcomes):
    assert not [file for file, _ in outcomes[name]["frames"] if is_ours(file) or "threading" in file]


@pytest.mark.parametrize("name", FINE)
def test_valid_uses_are_accepted(name, outcomes):
    assert "kind" not in outcomes[name], outcomes[name]
