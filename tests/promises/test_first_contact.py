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


MODULE = "`model`: expected an Equinox module, got"
FUNCTION = "A function holds no weights: put them into an `eqx.Module`, and what it does into its `__call__`."
LAYER = "Write it as an `eqx.Module`; `redeqx.models.from_pretrained` loads the folders of many Hugging Face models."
OPTIMIZER = "`optimizer`: expected an optax transformation, got"
KEY = "Add the parameter `key`, which dropout and sampling draw from; it may stay unused."
THESE = "Give it these parameters; bind others with `functools.partial`."
OF_THREE = "expected a function of `(model, batch, key)`, got one of"
ROWS = "`per_device_batch_size`: expected"
ITEMS = "expected one item per example, got"
LOADER = (
    "a DataLoader, whose items are whole batches. "
    "Pass its `dataset`: redeqx shuffles, batches and calls `collate_fn` itself."
)
ONCE = "which can be read once. Pass a list, or a function of the epoch that returns a new one: `lambda epoch: ...`."
NAN = "`loss` at step 1: expected the loss to be finite, got nan. Nothing was saved yet. Its batch is"
RANGE = "finite, but labels or ids are out of range: `y` has values from"
CLASSES = "Count classes from 0, and make as many outputs (or rows of an embedding) as there are."
DELETED = (
    "A training step deletes the arrays that it updates: take `trainer.model` after the last step, or keep a copy: "
    "`jax.tree.map(lambda x: x.copy() if eqx.is_array(x) else x, trainer.model)`."
)
READY = (
    "Each example has arrays that share their leading dim: (2, 4), (2,). If these are ready batches, pass their rows as the "
    "examples, and stack these in `collate_fn`: redeqx shuffles and batches by itself."
)
ORDER = "They are passed by position: put them into this order."
ASSIGNED = "expected to be read only, got an assignment."
MASKED = (
    "`loss` at step 1: expected the loss to be finite, got nan. Nothing was saved yet. The sum of `Loss.weight` over the "
    "update is 0, as if every row or token were masked: leave such examples out, or pass a larger batch size."
)
TOO_LARGE = (
    "expected at most 8 examples per update, all that there are, got {}. Each pass is one update of 8. "
    "Pass `batch_size=8` if this is meant, or less for more updates."
)
CHECKPOINT = "Pass a folder `step_...` of a workdir's `ckpts`, or a name such as `last`."

# The error of each mistake. `TMP` stands for its folder.
MESSAGES = {
    "a function for a model": ("TypeError", f"{MODULE} the function `pred_fn`. {FUNCTION}"),
    "a function for a predictor's model": ("TypeError", f"{MODULE} the function `<lambda>`. {FUNCTION}"),
    "a class for a model": ("TypeError", f"{MODULE} the class Linear. Make one: `Linear(..., key=key)`."),
    "a name for a model": (
        "TypeError", f"{MODULE} 'gpt2'. Load it first: `model, config = redeqx.models.from_pretrained(...)`.",
    ),
    "torch module": ("TypeError", f"{MODULE} PyTorch's Net. {LAYER}"),
    "flax linen module": ("TypeError", f"{MODULE} Flax's Net. {LAYER}"),
    "flax nnx module": ("TypeError", f"{MODULE} Flax's Net. {LAYER}"),
    "keras layer": ("TypeError", f"{MODULE} Keras's Net. {LAYER}"),
    "model and state": (
        "TypeError", f"{MODULE} a tuple of a model and its state. Pass them apart: `model=model, model_state=state`.",
    ),
    "optax.adam not called": (
        "TypeError", f"{OPTIMIZER} the function `optax.adam`. Call it: `optax.adam(learning_rate)`.",
    ),
    "torch optimizer": (
        "TypeError",
        f"{OPTIMIZER} PyTorch's SGD. Pass, for example, `optax.adamw(learning_rate)`, which holds no weights.",
    ),
    "list of optimizers": (
        "TypeError",
        f"{OPTIMIZER} a list of GradientTransformation, GradientTransformationExtraArgs. Chain them: `optax.chain(...)`.",
    ),
    "no optimizer": ("TypeError", f"{OPTIMIZER} None. Pass, for example, `optax.adamw(learning_rate)`."),
    "loss_fn without key": ("TypeError", f"`loss_fn`: {OF_THREE} `(model, batch)`. {KEY}"),
    "loss_fn with state": (
        "TypeError",
        f"`loss_fn`: {OF_THREE} `(model, state, batch, key)`. "
        "Pass `model_state` too, as `eqx.nn.make_with_state` returns it.",
    ),
    "loss_fn without state": (
        "TypeError",
        "`loss_fn`: expected a function of `(model, state, batch, key)`, as `model_state` was given, got one of "
        f"`(model, batch, key)`. {THESE}",
    ),
    "jitted loss_fn without key": ("TypeError", f"`loss_fn`: {OF_THREE} `(model, batch)`. {KEY}"),
    "a number for loss_fn": (
        "TypeError", "`loss_fn`: expected a function of `(model, batch, key)`, got 0.5. Pass the function itself.",
    ),
    "pred_fn without key": ("TypeError", f"`pred_fn`: {OF_THREE} `(model, batch)`. {KEY}"),
    "default pred_fn without key": ("TypeError", f"`pred_fn`: {OF_THREE} `(model, batch)`. {KEY}"),
    "pred_fn without key, model later": ("TypeError", f"`pred_fn`: {OF_THREE} `(model, batch)`. {KEY}"),
    "collate_fn of two": (
        "TypeError", f"`collate_fn`: expected a function of `(examples)`, got one of `(x, y)`. {THESE}",
    ),
    "metric_fn of outputs": (
        "TypeError",
        f"`eval_metric_fn`: expected a function of `(examples, outputs)`, got one of `(outputs)`. {THESE}",
    ),
    "pred_fn for a predictor": (
        "TypeError",
        "`eval_predictor`: expected a Predictor, got the function `pred_fn`. "
        "Pass `trainer.get_default_predictor(pred_fn)`.",
    ),
    "a learning rate for a schedule": (
        "TypeError", "`lr_schedule_fn`: expected a function of `(step)`, got 0.001. Pass the function itself.",
    ),
    "make_model is a model": (
        "TypeError",
        "`make_model`: expected a function without arguments, got one of `(x, *, key=None)`. Bind them: `lambda: ...`.",
    ),
    "metric that is an array": (
        "ValueError",
        "`eval_metric_fn` metric `accuracy`: expected a number, got an array of shape (3,). "
        "Return its mean, or a metric for each entry.",
    ),
    "metric that is a list": (
        "TypeError", "`eval_metric_fn` metric `accuracy`: expected a number, got a list of float. Return a number.",
    ),
    "metric called loss": (
        "ValueError",
        "`eval_metric_fn`: expected names other than 'loss', which the evaluation itself reports, got it too. "
        "Rename that metric, or pass `eval_loss=False`.",
    ),
    "metric_fn returns a number": (
        "TypeError",
        "`eval_metric_fn`: expected a dict of numbers by name, got 0.5. Return one: `{'accuracy': ...}`.",
    ),
    "metric_fn returns nothing": (
        "TypeError", "`eval_metric_fn`: expected a dict of numbers by name, got None. Return one: `{'accuracy': ...}`.",
    ),
    "rows 4.0": ("TypeError", f"{ROWS} an integer, got 4.0. Pass 4."),
    "rows 2.5": ("TypeError", f"{ROWS} an integer, got 2.5. Pass a whole number."),
    "rows True": ("TypeError", f"{ROWS} an integer, got True. Pass a whole number."),
    "rows 0": ("ValueError", f"{ROWS} at least 1, got 0. Pass a positive number."),
    "rows -1": ("ValueError", f"{ROWS} at least 1, got -1. Pass a positive number."),
    "rows '4'": ("TypeError", f"{ROWS} an integer, got '4'. Pass a whole number."),
    "rows None": (
        "ValueError",
        "`per_device_batch_size`, `batch_size`: expected one of the two, got neither. "
        "Pass `batch_size`, examples per update.",
    ),
    "batch_size 8.0": ("TypeError", "`batch_size`: expected an integer, got 8.0. Pass 8."),
    "eval_batch_size True": ("TypeError", "`eval_batch_size`: expected an integer, got True. Pass a whole number."),
    "rows of train": ("TypeError", f"{ROWS} an integer, got 4.0. Pass 4."),
    "rows of eval_loss": ("TypeError", f"{ROWS} an integer, got 4.0. Pass 4."),
    "rows of predict": ("TypeError", f"{ROWS} an integer, got 4.0. Pass 4."),
    "epochs 1.5": ("TypeError", "`n_epochs`: expected an integer or None, got 1.5. Pass a whole number."),
    "micro-batches 2.0": ("TypeError", "`accumulate_grad_batches`: expected an integer, got 2.0. Pass 2."),
    "shards 2.0": ("TypeError", "`n_model_shards`: expected an integer, got 2.0. Pass 2."),
    "seed 0.5": ("TypeError", "`jax_seed`: expected an integer, got 0.5. Pass a whole number."),
    "seed -1": ("ValueError", "`jax_seed`: expected at least 0, got -1. Pass 0 or more."),
    "schedule's rows 4.0": ("TypeError", f"{ROWS} an integer, got 4.0. Pass 4."),
    "workdir is a file": (
        "ValueError",
        "`workdir`: expected a folder, got `TMP/file`, which is a file. Move the file, or choose another folder.",
    ),
    "workdir in a file": (
        "ValueError",
        "`workdir`: expected a folder, got `TMP/file/run`, where `TMP/file` is a file. "
        "Move the file, or choose another folder.",
    ),
    "workdir is a number": (
        "TypeError", "`workdir`: expected a path or None, got 3. Pass a string or a `pathlib.Path`.",
    ),
    "pandas frame": (
        "TypeError",
        f'`train_examples`: {ITEMS} a DataFrame, whose items are its columns. Pass its rows: `df.to_dict("records")`.',
    ),
    "polars frame": (
        "TypeError", f"`examples`: {ITEMS} a DataFrame, whose items are its columns. Pass its rows: `df.to_dicts()`.",
    ),
    "series": (
        "TypeError",
        f"`train_examples`: {ITEMS} a Series, which looks items up in its index. Pass its values: `series.to_list()`.",
    ),
    "loader of batches": ("TypeError", f"`train_examples`: {ITEMS} {LOADER}"),
    "loader with a batch sampler": ("TypeError", f"`examples`: {ITEMS} {LOADER}"),
    "splits": ("TypeError", f"`train_examples`: {ITEMS} a DatasetDict of train. Pass one: `['train']`."),
    "columns": (
        "TypeError",
        f"`train_examples`: {ITEMS} a tuple of 2 arrays of shapes (8, 4), (8,), each with one row per example. "
        "Pass `list(zip(*arrays))`.",
    ),
    "columns of one shape": (
        "TypeError",
        f"`train_examples`: {ITEMS} a tuple of 2 arrays of shapes (8, 4), (8, 4), each with one row per example. "
        "Pass `list(zip(*arrays))`, or `list(arrays)` if each is one example.",
    ),
    "columns of one shape and two kinds": (
        "TypeError",
        f"`train_examples`: {ITEMS} a list of 2 arrays of shapes (8, 4), (8, 4), each with one row per example. "
        "Pass `list(zip(*arrays))`.",
    ),
    "columns by name": (
        "TypeError",
        f"`train_examples`: {ITEMS} a dict of 2 arrays, each with one row per example. "
        "Pass `[dict(zip(columns, row)) for row in zip(*columns.values())]`.",
    ),
    "a column of None": (
        "TypeError",
        "`collate_fn` output `y`: expected numbers, got None in 4 of 4 entries, the first is entry 0. "
        "Replace them by numbers.",
    ),
    "ready batches": (
        "TypeError", "`collate_fn` output `value`: expected an array of 4 rows, got a list of 4. Return `np.array(...)`.",
    ),
    "an iterable of ready batches": (
        "TypeError",
        "`collate_fn` output `value`: expected numbers, got an array of dtype object that holds: dict. "
        "Return arrays of numbers.",
    ),
    "every row masked": ("ValueError", MASKED),
    "every row masked, in a loop": ("ValueError", MASKED),
    "every evaluated row masked": (
        "UserWarning",
        "`Loss.weight`: expected a sum above 0 over the evaluated examples, got 0, as if every row or token were masked. "
        "Their loss is NaN: evaluate other examples.",
    ),
    "epochs of other libraries": (
        "TypeError", "`fit(epochs=)`: expected an argument of redeqx, got an unknown one. Did you mean `n_epochs`?",
    ),
    "a misspelt option of fit": (
        "TypeError", "`fit(bath_size=)`: expected an argument of redeqx, got an unknown one. Did you mean `batch_size`?",
    ),
    "positional options of fit": (
        "TypeError",
        "`fit`: expected only `train_examples`, `per_device_batch_size`, `n_epochs` without a name, got 4 such arguments. "
        "Name the others: `fit(train_examples, per_device_batch_size, n_epochs, max_steps=...)`.",
    ),
    "fit without examples": (
        "TypeError", "`fit(train_examples=)`: expected this argument, got none. Pass `train_examples`.",
    ),
    "a positional model": (
        "TypeError",
        "`Trainer`: expected only `deployer` without a name, got 5 such arguments. "
        "Name the others: `Trainer(deployer, model=..., optimizer=..., collate_fn=..., loss_fn=...)`.",
    ),
    "no collate_fn": ("TypeError", "`Predictor(collate_fn=)`: expected this argument, got none. Pass `collate_fn`."),
    "a model for a deployer": ("TypeError", "`deployer`: expected a Deployer, got a Linear. Pass `redeqx.Deployer()`."),
    "swapped arguments of loss_fn": ("TypeError", f"`loss_fn`: {OF_THREE} `(batch, model, key)`. {ORDER}"),
    "swapped arguments of metric_fn": (
        "TypeError",
        f"`eval_metric_fn`: expected a function of `(examples, outputs)`, got one of `(outputs, examples)`. {ORDER}",
    ),
    "assigning a model": ("AttributeError", f"`Trainer.model`: {ASSIGNED} Create another Trainer with `model=`."),
    "assigning an optimizer": (
        "AttributeError", f"`Trainer.optimizer`: {ASSIGNED} Create another Trainer with `optimizer=`.",
    ),
    "assigning a step": ("AttributeError", f"`Trainer.step`: {ASSIGNED} The arguments and training determine it."),
    "workdir of no name": (
        "ValueError", "`workdir`: expected a path or None, got ''. Pass '.' for the current folder.",
    ),
    "workdir that cannot be made": (
        "FileNotFoundError",
        "`workdir`: expected a folder that can be created, got '/proc/run': No such file or directory. "
        "Choose a folder in which you may write.",
    ),
    "workdir with a long name": (
        "OSError",
        f"`workdir`: expected a folder that can be created, got '{'a' * 60}...': File name too long. "
        "Choose a folder in which you may write.",
    ),
    "more examples per update than there are": ("UserWarning", f"`per_device_batch_size`: {TOO_LARGE.format(128)}"),
    "more examples per update, in a pass": ("UserWarning", f"`batch_size`: {TOO_LARGE.format(64)}"),
    "a generator for two epochs": (
        "ValueError",
        f"`train_examples`: expected examples that can be read 2 times, once per epoch, got `numbers`, a generator, {ONCE}",
    ),
    "a map for two epochs": (
        "ValueError", f"`train_examples`: expected examples that can be read 2 times, once per epoch, got a map, {ONCE}",
    ),
    "an iterator for two epochs": (
        "ValueError",
        f"`train_examples`: expected examples that can be read 2 times, once per epoch, got an iterator, {ONCE}",
    ),
    "a generator function": (
        "TypeError", f"`train_examples`: expected a function of `(epoch)`, got one of `()`. {THESE}",
    ),
    "no such checkpoint": (
        "ValueError",
        f"`/nowhere/step_00000004`: expected the folder of a checkpoint, got one that is not there. {CHECKPOINT}",
    ),
    "no checkpoint in there": (
        "ValueError", f"`TMP`: expected the folder of a checkpoint, got one that holds no trainer.json. {CHECKPOINT}",
    ),
    "NaN in the batch": (
        "ValueError",
        f"{NAN.replace('step 1', 'step 2')} not finite: `x` has NaN in 1 of 4 rows, the first from example 6. "
        "Correct or remove these examples, or `collate_fn`.",
    ),
    "labels out of range": ("ValueError", f"{NAN} {RANGE} 0 to 4, which index a dim of 3. {CLASSES}"),
    "labels from 1": ("ValueError", f"{NAN} {RANGE} 1 to 3, which index a dim of 3. {CLASSES}"),
    "labels beyond the vocabulary": (
        "ValueError", f"{NAN} {RANGE} 0 to 4, for some of which the loss is nan. {CLASSES}",
    ),
    "a misspelt option of train": (
        "TypeError",
        "`train(bath_size=)`: expected an argument of redeqx, got an unknown one. Did you mean `batch_size`?",
    ),
    "epochs of train": (
        "TypeError",
        "`train(n_epochs=)`: expected an argument of redeqx, got an unknown one. It takes `examples`, "
        "`per_device_batch_size`, `batch_size`, `drop_remainder`.",
    ),
    "a positional option of train": (
        "TypeError",
        "`train`: expected only `examples`, `per_device_batch_size` without a name, got 3 such arguments. "
        "Name the others: `train(examples, per_device_batch_size, batch_size=...)`.",
    ),
    "train without examples": (
        "TypeError",
        "`train(examples=)`: expected this argument, got none. Pass `examples`.",
    ),
    "a misspelt option of predict": (
        "TypeError",
        "`predict(bath_size=)`: expected an argument of redeqx, got an unknown one. Did you mean "
        "`batch_size`?",
    ),
    "a positional hyperparameter": (
        "TypeError",
        "`set_hyperparams`: expected each argument with its name, got 1 without one. Name them: "
        "`set_hyperparams(name=...)`.",
    ),
    "a deployer for a path": (
        "TypeError",
        "`path`: expected a path, got a Deployer. Pass a string or a `pathlib.Path`.",
    ),
    "swapped arguments of load": (
        "TypeError",
        "`like`: expected an Equinox module, got a PosixPath. Load it first: `model, config = "
        "redeqx.models.from_pretrained(...)`.",
    ),
    "a plan for a deployer": (
        "TypeError",
        "`deployer`: expected a Deployer, got a Plan. Pass `redeqx.Deployer()`.",
    ),
    "a deployer for a plan": (
        "TypeError",
        "`plan`: expected a Plan or None, got 'Deployer'. Pass `deployer.plan(model)`.",
    ),
    "load without like": (
        "TypeError",
        "`load(like=)`: expected this argument, got none. Pass `like`.",
    ),
    "a predictor of a model and a like": (
        "TypeError",
        "`load(model=)`: expected the model as `like` alone, got both. Leave `model` out.",
    ),
    "swapped arguments of Predictor.load": (
        "TypeError",
        "`deployer`: expected a Deployer, got a PosixPath. Pass `redeqx.Deployer()`.",
    ),
    "names of PEFT": (
        "TypeError",
        "`add(r=)`: expected an argument of redeqx, got an unknown one. Did you mean `rank`?",
    ),
    "a rank of text": (
        "TypeError",
        "`rank`: expected an integer, got '8'. Pass a whole number.",
    ),
    "alpha of 0": (
        "ValueError",
        "`alpha`: expected a finite number above 0 or None, got 0. Pass `rank` or twice of it.",
    ),
    "a seed for a key": (
        "TypeError",
        "`key`: expected a PRNG key, got 0. Pass `jax.random.key(0)`, say.",
    ),
    "no layers": (
        "ValueError",
        '`where`: expected at least one glob, got none. Write `"*.attention.query"`, say.',
    ),
    "a function of the path alone": (
        "TypeError",
        "`where`: expected a function of `(path, layer)`, got one of `(path)`. Give it these parameters; "
        "bind others with `functools.partial`.",
    ),
    "an adapter in a file": (
        "ValueError",
        "`folder`: expected a folder, got `TMP/file`, which is a file. Move the file, or choose another "
        "folder.",
    ),
    "swapped arguments of load_adapter": (
        "TypeError",
        "`folder`: expected a path, got a GPT2. Pass a string or a `pathlib.Path`.",
    ),
    "a folder of no name": (
        "ValueError",
        "`folder`: expected a path, got ''. Pass '.' for the current folder.",
    ),
    "a folder that is a file": (
        "ValueError",
        "`folder`: expected a folder, got `TMP/file`, which is a file. Move the file, or choose another "
        "folder.",
    ),
    "a folder in a store": (
        "ValueError",
        "`folder`: expected a path on a disk, got s3://bucket/gpt2, an address. Pass a folder, and copy its "
        "files from there or to there.",
    ),
    "a dict for a config": (
        "TypeError",
        "`config`: expected that of the model, a GPT2Config, got dict. Pass what `from_pretrained` returned, "
        "or what the model was made of.",
    ),
    "None for a folder": (
        "TypeError",
        "`folder`: expected a path, got None. Pass a string or a `pathlib.Path`.",
    ),
    "a positional deployer": (
        "TypeError",
        "`from_pretrained`: expected only `folder` without a name, got 2 such arguments. Name the others: "
        "`from_pretrained(folder, dtype=...)`.",
    ),
    "names of transformers": (
        "TypeError",
        "`generate(do_sample=)`: expected an argument of redeqx, got an unknown one. Did you mean `sample`?",
    ),
    "a text for a prompt": (
        "TypeError",
        "`inputs`: expected an array of token ids, got 'Hello'. Pass what the tokenizer returns.",
    ),
    "tokens of another vocabulary": (
        "ValueError",
        "`inputs`: expected token ids from 0 to 15, the vocabulary of the model, got 51 in row 0. Pass the "
        "tokenizer of this model's folder, and a `mask` for padding.",
    ),
    "2.0 new tokens": (
        "TypeError",
        "`max_new_tokens`: expected an integer, got 2.0. Pass 2.",
    ),
    "an end that is text": (
        "TypeError",
        "`eos_token_id`: expected a token id, got '</s>'. Pass that of the tokenizer.",
    ),
    "a rate of text": (
        "TypeError",
        "`learning_rate`: expected a finite number of at least 0, got '1e-3'. Pass a number, or a schedule "
        "such as `optax.cosine_decay_schedule`.",
    ),
    "no rate": (
        "TypeError",
        "`learning_rate`: expected a finite number of at least 0, got None. Pass a number, or a schedule "
        "such as `optax.cosine_decay_schedule`.",
    ),
    "a negative rate": (
        "ValueError",
        "`learning_rate`: expected a finite number of at least 0, got -0.001. Pass a number, or a schedule "
        "such as `optax.cosine_decay_schedule`.",
    ),
    "a decay for a plan": (
        "TypeError",
        "`plan`: expected a Plan or None, got 0.1. Pass `deployer.plan(model)`.",
    ),
    "betas of PyTorch": (
        "TypeError",
        "`adamw(betas=)`: expected an argument of redeqx, got an unknown one. It takes `learning_rate`, "
        "`moments`, `b1`, `b2`, `eps`, `weight_decay`, `mask`.",
    ),
    "a beta of 1": (
        "ValueError",
        "`b1`: expected a number from 0 to below 1, got 1.0. Published values are 0.9 to 0.999.",
    ),
    "a kind for a mask": (
        "TypeError",
        "`mask`: expected a function of the parameters or a PyTree of booleans, got 'matrix'. Pass "
        "`redeqx.optimizers.of_kind('matrix')`, say.",
    ),
    "rates for groups": (
        "TypeError",
        "`transforms['bias']`: expected an optax transformation, got 0.001. Pass, for example, "
        "`optax.adamw(learning_rate)`.",
    ),
    "swapped arguments of groups": (
        "TypeError",
        "`transforms`: expected a dict of an optimizer for each kind, got an optimizer. Write "
        '`groups({"embedding": optax.adam(1e-2)}, default=optax.adamw(1e-3))`.',
    ),
    "a default of text": (
        "TypeError",
        "`default`: expected an optax transformation, got 'adamw'. Pass, for example, "
        "`optax.adamw(learning_rate)`.",
    ),
    "ends in another order": (
        "ValueError",
        "`ends`: expected numbers that ascend from 0 to the 100 tokens, got 10 to 100 in another order. Pass "
        "where each document ends, in tokens from the start.",
    ),
    "a mask for ends": (
        "TypeError",
        "`ends`: expected a flat array of integers, got bool[100]. Pass `np.cumsum(lengths)` of the "
        "documents' lengths.",
    ),
    "a positional stride": (
        "TypeError",
        "`TokenRows`: expected only `tokens`, `length` without a name, got 3 such arguments. Name the others: "
        "`TokenRows(tokens, length, stride=...)`.",
    ),
    "overrides in a list": (
        "TypeError",
        '`overrides`: expected a dict of specs by path or glob, got list. Write `{"head.weight": ("model", '
        "None)}`.",
    ),
    "a dim for an override": (
        "TypeError",
        "`overrides['weight']`: expected a mesh axis or None for each dim, got 0. Write `('model', None)` to "
        "split the first of two dims, None to replicate the leaf.",
    ),
    "dims for an override": (
        "TypeError",
        "`overrides['weight']`: expected a mesh axis or None for each dim, got 0. Write `('model', None)` to "
        "split the first of two dims, None to replicate the leaf.",
    ),
    "positional overrides": (
        "TypeError",
        "`loss_fn`: expected a function of `(model, batch, key)`, got a dict. Specs have a name: "
        "`overrides=...`.",
    ),
    "a rate of NaN at the end": (
        "ValueError",
        "`end_learning_rate`: expected a number, got nan. Pass that of the last update.",
    ),
    "a first rate of text": (
        "TypeError",
        "`init_learning_rate`: expected a number, got '0'. Pass that of the first update.",
    ),
    "a schedule over nothing": (
        "ValueError",
        "`train_size`: expected the 8 examples of an update with `drop_remainder`, got 3. Pass a smaller "
        "batch size, or keep the remainder.",
    ),
    "lr": (
        "TypeError",
        "`get_lr_schedule_fn(lr=)`: expected an argument of redeqx, got an unknown one. Did you mean "
        "`learning_rate`?",
    ),
    "a misspelt method of a callback": (
        "UserWarning",
        "`callbacks[0].on_steps`: expected one of on_fit_start, on_step, on_eval, on_epoch_end, "
        "on_last_step, on_save, on_fit_end, got a method that a fit never calls. Did you mean `on_step`?",
    ),
    "a method of a callback without metrics": (
        "TypeError",
        "`callbacks[0].on_step`: expected a function of `(trainer, metrics)`, got one of `(trainer)`. Give "
        "it these parameters; bind others with `functools.partial`.",
    ),
    "Lightning's EarlyStopping": (
        "TypeError",
        "`EarlyStopping(monitor=)`: expected an argument of redeqx, got an unknown one. Did you mean "
        "`metric`?",
    ),
    "a batch that is fine": (
        "ValueError", f"{NAN} finite. Lower the learning rate, clip gradients, or look at that step's examples.",
    ),
}  # fmt: skip
MESSAGES |= {
    f"a model from before a step{what}": (
        "ValueError",
        f"`model`: expected arrays that still exist, got 2 of 2 deleted (`weight`, `bias`). {DELETED}",
    )
    for what in ("", ", to predict", ", to train")
}

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
        "Raised by the check before training, which evaluates the first 4 of 8 examples, so that mistakes show early. If a "
        "metric needs more of them, pass `eval_sanity_check=False`.", ["fit", "<lambda>"],
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
    found, (kind, message) = outcomes[name], MESSAGES[name]
    tmp = next((word for word in outcomes["no checkpoint in there"]["message"].split("`") if word), "TMP")
    assert (found["kind"], found["message"].replace(tmp, "TMP")) == (kind, message)


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
    assert outcomes[name]["message"].startswith("`model`: expected arrays that still exist, got ")
    assert outcomes[name]["message"].endswith(DELETED)


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
