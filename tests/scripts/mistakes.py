"""Common first mistakes, as user code. Prints what each one raises, as one line of JSON per mistake.

    python tests/scripts/mistakes.py

Runs in a process of its own, as a user's script does: in the tests, jaxtyping's checks would refuse some of them first.
"""

import json
import os
import sys
import tempfile
import traceback
import warnings
from functools import cache, partial
from pathlib import Path

os.environ.setdefault("NPROC", "16")

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import redeqx
from redeqx.data import TokenRows, pack
from redeqx.models import cross_entropy, from_pretrained, generate, lora, save_pretrained
from redeqx.models.gpt2 import GPT2, GPT2Config
from redeqx.optimizers import adamw, groups, muon

redeqx.simulate_devices(2)
KEY = jax.random.key(0)
FOLDER = Path(tempfile.mkdtemp())
(FOLDER / "file").write_text("")
EXAMPLES = [(np.arange(4, dtype=np.float32) / 4, i % 3) for i in range(8)]


def collate_fn(examples):
    x, y = zip(*examples, strict=True)
    return {"x": np.stack(x), "y": np.array(y)}


def loss_fn(model, batch, key):
    logits = jax.vmap(model)(batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def pred_fn(model, batch, key):
    return jax.vmap(model)(batch["x"]).argmax(-1)


class Wandb:
    def log(self, data):
        pass


def linear(n_in=4):
    return eqx.nn.Linear(n_in, 3, key=KEY)


def trainer(workdir=None, **kwargs):
    defaults = {"model": linear(), "optimizer": optax.sgd(0.01), "collate_fn": collate_fn, "loss_fn": loss_fn}
    return redeqx.Trainer(redeqx.Deployer(workdir=workdir, verbose=False), **{**defaults, **kwargs})


def predictor(**kwargs):
    defaults = {"model": linear(), "collate_fn": collate_fn, "pred_fn": pred_fn}
    return redeqx.Predictor(redeqx.Deployer(verbose=False), **{**defaults, **kwargs})


def fit(*args, examples=EXAMPLES, n_epochs=1, rows=2, metric_fn=None, **kwargs):
    instance = trainer(*args, **kwargs)
    if metric_fn is None:
        return instance.fit(examples, rows, n_epochs)
    default = instance.get_default_predictor(pred_fn)
    return instance.fit(examples, rows, n_epochs, eval_examples=examples, eval_predictor=default, eval_metric_fn=metric_fn)


# --- stand-ins for other libraries --------------------------------------------------------------------------------------


def instance_of(module, name, **attributes):
    """An instance of a subclass of a class `name` that appears to be defined in `module`."""
    base = type(name, (), {"__module__": module, **attributes})
    return type("Net" if name in ("Module", "Layer") else name, (base,), {})()


class Rows:
    """A sized container whose items are not its rows."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)

    def __len__(self):
        return 4

    def __getitem__(self, i):
        raise KeyError(i)

    def __iter__(self):
        raise AssertionError("read")


def rows_like(name, **attributes):
    return type(name, (Rows,), {})(**attributes)


class Broken:
    def __len__(self):
        return 8

    def __getitem__(self, i):
        if i == 5:
            raise OSError("no such picture")
        return EXAMPLES[i]


@cache
def stale_model():
    instance = trainer()
    instance.train(EXAMPLES, 2)
    before = instance.model
    instance.train(EXAMPLES, 2)
    return instance, before


def save_stale(save):
    config = GPT2Config(16, 4, 8, 1, 2)
    model = GPT2(config, key=KEY)
    for leaf in jax.tree.leaves(eqx.filter(model, eqx.is_array)):
        leaf.delete()
    save(model, config)


def collate_wrongly(examples):
    return {"x": np.stack([example["x"] for example in examples])}


CONFIG = GPT2Config(16, 8, 8, 1, 2)
PROMPTS = np.ones((2, 3), np.int32)


@cache
def gpt2():
    return GPT2(CONFIG, key=KEY)


@cache
def run():
    """The workdir of a finished run."""
    trainer(FOLDER / "run").fit(EXAMPLES, 2, 1)
    return FOLDER / "run"


def plan(overrides):
    return redeqx.Deployer(verbose=False).plan(linear(), overrides=overrides)


def schedule(**kwargs):
    defaults = {"train_size": 100, "per_device_batch_size": 4, "learning_rate": 1e-3}
    return redeqx.Deployer(verbose=False).get_lr_schedule_fn(**{**defaults, **kwargs})


class Misspelt(redeqx.Callback):
    def on_steps(self, trainer, metrics):
        raise AssertionError


class Short(redeqx.Callback):
    def on_step(self, trainer):
        raise AssertionError


def numbers():
    yield from EXAMPLES


def labels(low, high):
    return [(np.ones(4, np.float32), i) for i in range(low, high)]


def vocabulary_loss(model, batch, key):
    return cross_entropy(jax.vmap(model)(batch["x"]), batch["y"])


def masked_loss(weight):
    def masked(model, batch, key):
        return redeqx.Loss(weight * loss_fn(model, batch, key), jnp.asarray(weight))

    return masked


MISTAKES = {
    "a function for a model": lambda: trainer(model=pred_fn),
    "a function for a predictor's model": lambda: predictor(model=lambda x: x),
    "a class for a model": lambda: trainer(model=eqx.nn.Linear),
    "a name for a model": lambda: trainer(model="gpt2"),
    "torch module": lambda: trainer(model=instance_of("torch.nn.modules.module", "Module")),
    "flax linen module": lambda: trainer(model=instance_of("flax.linen.module", "Module")),
    "flax nnx module": lambda: predictor(model=instance_of("flax.nnx.module", "Module")),
    "keras layer": lambda: redeqx.Deployer(verbose=False).plan(instance_of("keras.src.layers.layer", "Layer")),
    "model and state": lambda: trainer(model=eqx.nn.make_with_state(eqx.nn.Linear)(4, 3, key=KEY)),
    "a number for a state": lambda: trainer(model_state={"n": 0}, loss_fn=lambda model, state, batch, key: (0.0, state)),
    "a teacher for a state": lambda: trainer(
        model_state=eqx.nn.MLP(4, 3, 8, 1, key=KEY), loss_fn=lambda model, state, batch, key: (0.0, state)
    ),
    "a state of text, to predict": lambda: predictor(
        model_state="teacher", pred_fn=lambda model, state, batch, key: jax.vmap(model)(batch["x"])
    ),
    "optax.adam not called": lambda: trainer(optimizer=optax.adam),
    "torch optimizer": lambda: trainer(optimizer=instance_of("torch.optim.sgd", "SGD", step=None)),
    "list of optimizers": lambda: trainer(optimizer=[optax.clip(1.0), optax.adam(1e-3)]),
    "no optimizer": lambda: trainer(optimizer=None),
    "loss_fn without key": lambda: trainer(loss_fn=lambda model, batch: 0.0),
    "loss_fn with state": lambda: trainer(loss_fn=lambda model, state, batch, key: (0.0, state)),
    "loss_fn without state": lambda: trainer(model_state=eqx.nn.State(linear()), loss_fn=loss_fn),
    "jitted loss_fn without key": lambda: trainer(loss_fn=jax.jit(lambda model, batch: 0.0)),
    "a number for loss_fn": lambda: trainer(loss_fn=0.5),
    "pred_fn without key": lambda: predictor(pred_fn=lambda model, batch: 0.0),
    "default pred_fn without key": lambda: trainer().get_default_predictor(lambda model, batch: 0.0),
    "pred_fn without key, model later": lambda: predictor(model=None, pred_fn=lambda model, batch: 0.0).predict(
        EXAMPLES, 2, linear()
    ),
    "collate_fn of two": lambda: trainer(collate_fn=lambda x, y: {"x": x, "y": y}),
    "metric_fn of outputs": lambda: fit(metric_fn=lambda outputs: {}),
    "pred_fn for a predictor": lambda: trainer().fit(EXAMPLES, 2, 1, eval_examples=EXAMPLES, eval_predictor=pred_fn),
    "a learning rate for a schedule": lambda: trainer(lr_schedule_fn=1e-3),
    "a key for a plan": lambda: redeqx.Deployer(verbose=False).init(linear, jax.random.key(0)),
    "make_model is a model": lambda: redeqx.Deployer(verbose=False).init(linear()),
    "wrong width": lambda: fit(model=linear(5)),
    "no vmap": lambda: fit(loss_fn=lambda model, batch, key: model(batch["x"]).mean()),
    "no vmap in pred_fn": lambda: predictor(pred_fn=lambda model, batch, key: model(batch["x"])).predict(EXAMPLES, 2),
    "no vmap in a plan": lambda: redeqx.Deployer(verbose=False).plan(
        linear(), lambda model, batch, key: model(batch["x"]).mean(), collate_fn(EXAMPLES)
    ),
    "metric that is an array": lambda: fit(metric_fn=lambda examples, outputs: {"accuracy": np.ones(3)}),
    "metric that is a list": lambda: fit(metric_fn=lambda examples, outputs: {"accuracy": [1.0]}),
    "metric called loss": lambda: fit(metric_fn=lambda examples, outputs: {"loss": 1.0}),
    "metric_fn returns a number": lambda: fit(metric_fn=lambda examples, outputs: 0.5),
    "metric_fn returns nothing": lambda: fit(metric_fn=lambda examples, outputs: None),
    "rows 4.0": lambda: fit(rows=4.0),
    "rows 2.5": lambda: fit(rows=2.5),
    "rows True": lambda: fit(rows=True),
    "rows 0": lambda: fit(rows=0),
    "rows -1": lambda: fit(rows=-1),
    "rows '4'": lambda: fit(rows="4"),
    "rows None": lambda: fit(rows=None),
    "batch_size 8.0": lambda: trainer().train(EXAMPLES, batch_size=8.0),
    "eval_batch_size True": lambda: trainer().fit(EXAMPLES, 2, 1, eval_examples=EXAMPLES, eval_batch_size=True),
    "rows of train": lambda: trainer().train(EXAMPLES, 4.0),
    "rows of eval_loss": lambda: trainer().eval_loss(EXAMPLES, 4.0),
    "rows of predict": lambda: predictor().predict(EXAMPLES, 4.0),
    "a text for a flag": lambda: trainer().fit(EXAMPLES, 2, resume="false"),
    "a text for a flag of train": lambda: trainer().train(EXAMPLES, 2, drop_remainder="no"),
    "a text for a flag of a deployer": lambda: redeqx.Deployer(verbose="0"),
    "a number for a flag of saves": lambda: trainer(FOLDER / "flags").save_ckpt(save_opt_states=0),
    "a text for a flag of loads": lambda: trainer(FOLDER / "flags").load_ckpt(load_opt_states="no"),
    "the unroll of a scan": lambda: redeqx.Compute(unroll=4),
    "a text for a flag or None": lambda: redeqx.Compute(stack_blocks="never"),
    "a text for a flag of Muon": lambda: muon(1e-3, nesterov="no"),
    "a number to keep the best by": lambda: trainer().fit(EXAMPLES, 2, save_argmin_ckpt_by_metrics=0.5),
    "numbers to keep the best by": lambda: trainer().fit(EXAMPLES, 2, save_argmax_ckpt_by_metrics=[0.5]),
    "a score to save with": lambda: trainer(FOLDER / "flags").save_ckpt(metrics=0.5),
    "a number for a run's config": lambda: redeqx.Deployer(verbose=False).log_config(3),
    "a dict for outputs": lambda: redeqx.Deployer(workdir=FOLDER / "flags", verbose=False).save_outputs({"a": 1}),
    "no outputs": lambda: redeqx.Deployer(workdir=FOLDER / "flags", verbose=False).save_outputs(None),
    "no name of outputs": lambda: redeqx.Deployer(workdir=FOLDER / "flags", verbose=False).save_outputs([1], None),
    "a text for a number of steps": lambda: redeqx.Deployer(verbose=False).progress(n_steps="10"),
    "a number for a machine": lambda: trainer().dry_run(EXAMPLES, 2, 8),
    "a logger of metrics alone": lambda: redeqx.Deployer(verbose=False, loggers=[Wandb()]),
    "a function to train on": lambda: trainer().train(lambda: EXAMPLES, 2),
    "a function to update on": lambda: trainer().update(lambda: EXAMPLES),
    "epochs 1.5": lambda: fit(n_epochs=1.5),
    "micro-batches 2.0": lambda: trainer(accumulate_grad_batches=2.0),
    "shards 2.0": lambda: redeqx.Deployer(n_model_shards=2.0),
    "seed 0.5": lambda: redeqx.Deployer(jax_seed=0.5),
    "seed -1": lambda: redeqx.Deployer(jax_seed=-1),
    "schedule's rows 4.0": lambda: redeqx.Deployer(verbose=False).get_lr_schedule_fn(100, 4.0, 1, 1e-3),
    "workdir is a file": lambda: redeqx.Deployer(workdir=FOLDER / "file"),
    "workdir in a file": lambda: redeqx.Deployer(workdir=str(FOLDER / "file" / "run")),
    "workdir is a number": lambda: redeqx.Deployer(workdir=3),
    "workdir is an array": lambda: redeqx.Deployer(workdir=np.zeros(2)),
    "pandas frame": lambda: fit(examples=rows_like("DataFrame", columns=["x"], to_dict=None)),
    "polars frame": lambda: predictor().predict(rows_like("DataFrame", columns=["x"], to_dict=None, to_dicts=None), 2),
    "series": lambda: fit(examples=rows_like("Series", to_list=None)),
    "loader of batches": lambda: fit(
        examples=rows_like("DataLoader", dataset=[], batch_size=32, batch_sampler=None, collate_fn=None)
    ),
    "loader with a batch sampler": lambda: trainer().eval_loss(
        rows_like("DataLoader", dataset=[], batch_size=None, batch_sampler=[[0]], collate_fn=None), 2
    ),
    "loader of batches, to evaluate": lambda: trainer().fit(
        EXAMPLES,
        2,
        eval_examples=instance_of(  # it has no integer items, as torch's
            "torch.utils.data", "DataLoader", dataset=[], batch_size=32, batch_sampler=None, collate_fn=None, __iter__=None
        ),
    ),
    "splits": lambda: fit(examples=type("DatasetDict", (dict,), {})(train=[{"x": 0}] * 4)),
    "columns": lambda: fit(examples=(np.ones((8, 4)), np.ones(8))),
    "columns of one shape": lambda: fit(examples=(np.ones((8, 4)), np.ones((8, 4)))),
    "columns of one shape and two kinds": lambda: fit(examples=[np.ones((8, 4)), np.ones((8, 4), np.int32)]),
    "columns by name": lambda: fit(examples={"x": np.ones((8, 4)), "y": np.ones(8)}),
    "ready batches": lambda: fit(examples=[collate_fn(EXAMPLES[i : i + 2]) for i in (0, 2, 4, 6)], collate_fn=list),
    "an iterable of ready batches": lambda: trainer(collate_fn=np.array).train(
        (collate_fn(EXAMPLES[i : i + 2]) for i in (0, 2, 4, 6)), 2
    ),
    "a column of None": lambda: fit(examples=[(x, None) for x, _ in EXAMPLES]),
    "every row masked": lambda: fit(loss_fn=masked_loss(0.0)),
    "every row masked, in a loop": lambda: trainer(loss_fn=masked_loss(0.0)).update(EXAMPLES),
    "a metric of all classes": lambda: fit(metric_fn=lambda examples, outputs: {"f1": {0: 1.0}[len(examples) - 8]}),
    "epochs of other libraries": lambda: trainer().fit(EXAMPLES, 2, epochs=3),
    "a misspelt option of fit": lambda: trainer().fit(EXAMPLES, bath_size=2),
    "positional options of fit": lambda: trainer().fit(EXAMPLES, 2, 1, EXAMPLES),
    "fit without examples": lambda: trainer().fit(),
    "a positional model": lambda: redeqx.Trainer(
        redeqx.Deployer(verbose=False), linear(), optax.sgd(0.1), collate_fn, loss_fn
    ),
    "no collate_fn": lambda: redeqx.Predictor(redeqx.Deployer(verbose=False), model=linear(), pred_fn=pred_fn),
    "a model for a deployer": lambda: redeqx.Trainer(
        linear(), model=linear(), optimizer=optax.sgd(0.1), collate_fn=collate_fn, loss_fn=loss_fn
    ),
    "swapped arguments of loss_fn": lambda: trainer(loss_fn=lambda batch, model, key: loss_fn(model, batch, key)),
    "swapped arguments of metric_fn": lambda: fit(metric_fn=lambda outputs, examples: {}),
    "assigning a model": lambda: setattr(trainer(), "model", linear()),
    "assigning an optimizer": lambda: setattr(trainer(), "optimizer", optax.sgd(0.1)),
    "workdir of no name": lambda: redeqx.Deployer(workdir=""),
    "workdir that cannot be made": lambda: redeqx.Deployer(workdir="/proc/run", verbose=False),
    "workdir with a long name": lambda: redeqx.Deployer(workdir="a" * 300, verbose=False),
    "more examples per update than there are": lambda: fit(rows=64),
    "more examples per update, in a pass": lambda: trainer().train(EXAMPLES, batch_size=64),
    "every evaluated row masked": lambda: trainer(loss_fn=masked_loss(0.0)).eval_loss(EXAMPLES, 2),
    "a generator for two epochs": lambda: fit(examples=numbers(), n_epochs=2),
    "a packed generator for two epochs": lambda: fit(examples=pack(numbers(), 4), n_epochs=2),
    "a map for two epochs": lambda: fit(examples=map(tuple, EXAMPLES), n_epochs=2),
    "an iterator for two epochs": lambda: fit(examples=iter(np.ones((8, 4))), n_epochs=2),
    "a generator function": lambda: fit(examples=numbers),
    "no simulated devices": lambda: redeqx.simulate_devices(0),
    "simulated devices of text": lambda: redeqx.simulate_devices("8"),
    "metrics in a list": lambda: redeqx.Deployer(verbose=False).log_metrics([0.5], 1),
    "a number for a metric's name": lambda: redeqx.Deployer(verbose=False).log_metrics({3: 0.5}, 1),
    "a path to save to": lambda: trainer(FOLDER / "run").save_ckpt("runs/best"),
    "a number to save by": lambda: trainer(FOLDER / "run").save_ckpt(5),
    "no such checkpoint": lambda: trainer(FOLDER).load_ckpt("/nowhere/step_00000004"),
    "no checkpoint in there": lambda: trainer(FOLDER).load_ckpt(FOLDER),
    "NaN in the batch": lambda: fit(examples=[*EXAMPLES[:6], (np.full(4, np.nan, np.float32), 0), EXAMPLES[0]]),
    "labels out of range": lambda: fit(examples=labels(0, 8)),
    "labels from 1": lambda: trainer().train(labels(1, 4), batch_size=3),
    "labels beyond the vocabulary": lambda: fit(examples=labels(0, 8), loss_fn=vocabulary_loss),
    "a batch that is fine": lambda: fit(loss_fn=lambda model, batch, key: jnp.nan * loss_fn(model, batch, key)),
    "a model from before a step": lambda: predictor(model=stale_model()[1]),
    "a model from before a step, to predict": lambda: predictor().predict(EXAMPLES, 2, stale_model()[1]),
    "a model from before a step, to save": lambda: save_stale(lambda model, config: save_pretrained(model, config, FOLDER)),
    "a model from before a step, to save its adapter": lambda: save_stale(
        lambda model, config: lora.save_adapter(model, FOLDER)
    ),
    "a model from before a step, to train": lambda: trainer(model=stale_model()[1]),
    "collate_fn raises": lambda: fit(collate_fn=collate_wrongly),
    "collate_fn raises in predict": lambda: predictor(collate_fn=collate_wrongly).predict(EXAMPLES, 2),
    "reading raises": lambda: fit(examples=Broken()),
    "a misspelt option of train": lambda: trainer().train(EXAMPLES, bath_size=2),
    "epochs of train": lambda: trainer().train(EXAMPLES, 2, n_epochs=3),
    "a positional option of train": lambda: trainer().train(EXAMPLES, 2, 4),
    "train without examples": lambda: trainer().train(),
    "a misspelt option of predict": lambda: predictor().predict(EXAMPLES, bath_size=2),
    "a positional hyperparameter": lambda: trainer().set_hyperparams({"learning_rate": 0.1}),
    "a deployer for a path": lambda: redeqx.load(redeqx.Deployer(verbose=False), linear()),
    "swapped arguments of load": lambda: redeqx.load(linear(), run()),
    "a plan for a deployer": lambda: redeqx.load(run(), linear(), redeqx.Deployer(verbose=False).plan(linear())),
    "a deployer for a plan": lambda: redeqx.load(run(), linear(), plan=redeqx.Deployer(verbose=False)),
    "load without like": lambda: redeqx.load(run()),
    "a predictor of a model and a like": lambda: redeqx.Predictor.load(
        run(), redeqx.Deployer(verbose=False), like=linear(), model=linear(), collate_fn=collate_fn, pred_fn=pred_fn
    ),
    "swapped arguments of Predictor.load": lambda: redeqx.Predictor.load(
        redeqx.Deployer(verbose=False), run(), like=linear(), collate_fn=collate_fn, pred_fn=pred_fn
    ),
    "names of PEFT": lambda: lora.add(gpt2(), r=8, where="*.query", key=KEY),
    "a rank of text": lambda: lora.add(gpt2(), rank="8", where="*.query", key=KEY),
    "alpha of 0": lambda: lora.add(gpt2(), rank=8, alpha=0, where="*.query", key=KEY),
    "a seed for a key": lambda: lora.add(gpt2(), rank=8, where="*.query", key=0),
    "no layers": lambda: lora.add(gpt2(), rank=8, where=[], key=KEY),
    "a function of the path alone": lambda: lora.add(gpt2(), rank=8, where=lambda path: True, key=KEY),
    "an adapter in a file": lambda: lora.save_adapter(lora.add(gpt2(), rank=8, where="*.query", key=KEY), FOLDER / "file"),
    "swapped arguments of load_adapter": lambda: lora.load_adapter(FOLDER, gpt2()),
    "a folder of no name": lambda: save_pretrained(gpt2(), CONFIG, ""),
    "a folder that is a file": lambda: save_pretrained(gpt2(), CONFIG, FOLDER / "file"),
    "a folder in a store": lambda: save_pretrained(gpt2(), CONFIG, "s3://bucket/gpt2"),
    "a dict for a config": lambda: save_pretrained(gpt2(), {"n_layers": 1}, FOLDER / "gpt2"),
    "None for a folder": lambda: from_pretrained(None),
    "a positional deployer": lambda: from_pretrained("gpt2", redeqx.Deployer(verbose=False)),
    "names of vLLM": lambda: generate(gpt2(), PROMPTS, max_tokens=2),
    "a text for a prompt": lambda: generate(gpt2(), "Hello", max_new_tokens=2),
    "tokens of another vocabulary": lambda: generate(gpt2(), PROMPTS + 50, max_new_tokens=2),
    "2.0 new tokens": lambda: generate(gpt2(), PROMPTS, max_new_tokens=2.0),
    "an end that is text": lambda: generate(gpt2(), PROMPTS, max_new_tokens=2, eos_token_id="</s>"),
    "a rate of text": lambda: muon("1e-3"),
    "no rate": lambda: adamw(None),
    "a negative rate": lambda: muon(-1e-3),
    "a decay for a plan": lambda: muon(1e-3, 0.1),
    "betas of PyTorch": lambda: adamw(1e-3, betas=(0.9, 0.99)),
    "a beta of 1": lambda: adamw(1e-3, b1=1.0),
    "a kind for a mask": lambda: adamw(1e-3, mask="matrix"),
    "rates for groups": lambda: groups({"bias": 1e-3}, optax.adam(1e-3)),
    "swapped arguments of groups": lambda: groups(optax.adam(1e-3), {"bias": optax.adam(1e-3)}),
    "a default of text": lambda: groups({"bias": optax.adam(1e-3)}, "adamw"),
    "ends in another order": lambda: TokenRows(np.arange(100), 8, ends=np.array([100, 10])),
    "a mask for ends": lambda: TokenRows(np.arange(100), 8, ends=np.arange(100) % 10 == 0),
    "a positional stride": lambda: TokenRows(np.arange(100), 8, 7),
    "overrides in a list": lambda: plan([("weight", ("model", None))]),
    "a dim for an override": lambda: plan({"weight": 0}),
    "dims for an override": lambda: plan({"weight": (0, None)}),
    "positional overrides": lambda: redeqx.Deployer(verbose=False).plan(linear(), {"weight": None}),
    "a rate of NaN at the end": lambda: schedule(end_learning_rate=np.nan),
    "a first rate of text": lambda: schedule(init_learning_rate="0"),
    "a schedule over nothing": lambda: schedule(train_size=3, drop_remainder=True),
    "lr": lambda: redeqx.Deployer(verbose=False).get_lr_schedule_fn(100, 4, lr=1e-3),
    "a misspelt method of a callback": lambda: trainer().fit(EXAMPLES, 2, 1, callbacks=[Misspelt()]),
    "a method of a callback without metrics": lambda: trainer().fit(EXAMPLES, 2, 1, callbacks=[Short()]),
    "Lightning's EarlyStopping": lambda: redeqx.EarlyStopping(monitor="loss"),
    "an iterable's example is wrong": lambda: trainer().train(iter([*EXAMPLES, "x"]), 2),
}

# Valid uses, which must not raise.
FINE = {
    "numpy integers": lambda: trainer().train(EXAMPLES, np.int64(2)),
    "functions with more": lambda: trainer(
        loss_fn=partial(lambda scale, model, batch, key, extra=None: loss_fn(model, batch, key), 1.0),
        collate_fn=lambda examples, *rest, **options: collate_fn(examples),
        lr_schedule_fn=optax.linear_schedule(0.1, 0.0, 10),
    ).train(EXAMPLES, 2),
    "any arguments": lambda: trainer(loss_fn=lambda *args: loss_fn(*args)).train(EXAMPLES, 2),
    "a filter-jitted loss": lambda: trainer(loss_fn=eqx.filter_jit(loss_fn)).train(EXAMPLES, 2),
    "a PyTree of arrays": lambda: trainer(
        model={"w": jnp.ones((3, 4))}, loss_fn=lambda model, batch, key: jnp.mean(batch["x"] @ model["w"].T)
    ).train(EXAMPLES, 2),
    "a generator for one epoch": lambda: fit(examples=numbers()),
    "numbers of any kind": lambda: fit(
        metric_fn=lambda examples, outputs: {"a": np.float32(1), "b": jnp.ones(()), "c": True, "d": 2, "e": np.array(0.5)}
    ),
    "the trainer's own model": lambda: (
        (instance := stale_model()[0]).get_default_predictor(pred_fn).predict(EXAMPLES, 2, instance.model)
    ),
}


def main(names):
    warnings.simplefilter("error", UserWarning)
    for name, mistake in {**MISTAKES, **FINE}.items():
        if names and name not in names:
            continue
        result = {"name": name}
        try:
            mistake()
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)[1:]
            result.update(
                kind=type(error).__name__,
                message=str(error),
                notes=getattr(error, "__notes__", []),
                frames=[[frame.filename, frame.name] for frame in frames],
            )
            if names:
                traceback.print_exc()
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
