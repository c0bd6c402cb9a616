"""Classification and regression: predicts a class or a number from images, tables or texts, in one script.

    python -m examples.classification_regression

The default task is scikit-learn's handwritten digits, with a small CNN whose BatchNorm state the Trainer carries. Other
tasks: `--task diabetes` (a table, with an MLP, compared with ridge regression), `--task images --data FOLDER` (one subfolder
for each class), and GLUE with `--task cola|mnli|mrpc|qnli|qqp|rte|sst2|stsb|wnli --data FOLDER` (GLUE's folder, or the
task's folder in it), which tunes a BERT from a Hugging Face folder, `--pretrained FOLDER`.

1 CPU core, under 30 s of CPU time: 99.7, 98.9 and 99.2 % of the test digits are correct with seeds 0, 1 and 2. On diabetes
the MLP explains as much variance as ridge regression: R2 is 0.34, 0.30 and 0.35 on 89 patients, and 0.34 for ridge.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from tokenizers import Tokenizer

import redeqx
from examples._cli import Flags
from examples._texts import PAD, load_tokenizer
from examples.classification_regression.cnn import CNN
from examples.classification_regression.glue import GLUE
from examples.classification_regression.tasks import METRICS, Name, Task, draw, encode, measure, read_task, ridge
from redeqx.models.bert import Bert, BertForSequenceClassification


@dataclass(frozen=True)
class Args(Flags):
    task: Name = "digits"
    data: Path | None = None  # A folder of GLUE's tables, or one with a subfolder of images for each class.
    pretrained: Path | None = None  # A Hugging Face BERT for texts; a checkpoint of an earlier run for other tasks.
    workdir: Path = Path("workdir/classification_regression")  # Metrics, checkpoints, pictures. A run resumes from it.
    image_size: int = 32  # Height and width to which the images of a folder are resized, in pixels.
    n_channels: Literal[1, 3] = 3  # Channels of the images of a folder: 3 for color, 1 for grayscale.
    width: int = 32  # Channels of the first convolutions, or width of the MLP's layers.
    max_tokens: int = 96  # Maximum length of a text in tokens.
    n_epochs: int | None = None  # The default of this and of the learning rate is in RECIPES.
    learning_rate: float | None = None
    batch_size: int = 32  # Examples of one update, on all devices together.
    accumulate_grad_batches: int = 1  # Micro-batches in one update.


RECIPES = {"images": (30, 3e-3), "table": (60, 1e-3), "texts": (3, 3e-5)}  # epochs, learning rate


def make_bert(task: Task, folder: Path, deployer: redeqx.Deployer) -> tuple[BertForSequenceClassification, Tokenizer]:
    """Returns the BERT of a folder with a new head for the task, and its tokenizer."""
    key = deployer.next_key()
    bert, config = Bert.from_pretrained(folder, deployer=deployer)
    tokenizer = load_tokenizer(folder, config.vocab_size)
    config = replace(config, n_classes=len(task.classes) or 1)
    model = deployer.init(lambda: BertForSequenceClassification(config, key=key))
    if bert.pooler is None:  # without a pooler in the folder, a new one is trained with the head
        bert = eqx.tree_at(lambda bert: bert.pooler, bert, model.encoder.pooler, is_leaf=lambda x: x is None)
    return eqx.tree_at(lambda model: model.encoder, model, bert), tokenizer


def collate_fn(examples: list[tuple[dict[str, np.ndarray], int | float]]) -> dict[str, Any]:
    inputs, targets = zip(*examples, strict=True)
    return {"inputs": jax.tree.map(lambda *rows: np.stack(rows), *inputs), "targets": np.array(targets)}


def apply(model: Any, state: eqx.nn.State, batch: dict[str, Any], key: jax.Array) -> tuple[jax.Array, eqx.nn.State]:
    """Returns logits [rows, classes], or numbers [rows, 1]; and the new state."""
    keys = jax.random.split(key, len(batch["targets"]))
    if isinstance(model, CNN):  # BatchNorm's statistics cover the whole micro-batch, on any number of devices
        over_rows = jax.vmap(model, axis_name="batch", in_axes=(0, None, 0), out_axes=(0, None))
        return over_rows(batch["inputs"]["image"], state, keys)
    return jax.vmap(lambda inputs, key: model(**inputs, key=key))(batch["inputs"], keys), state


def loss_fn(model: Any, state: eqx.nn.State, batch: dict[str, Any], key: jax.Array) -> tuple[jax.Array, eqx.nn.State]:
    """Returns the mean cross-entropy in nats for classes, or the mean squared error for numbers."""
    outputs, state = apply(model, state, batch, key)
    outputs, targets = outputs.astype(jnp.float32), batch["targets"]
    if jnp.issubdtype(targets.dtype, jnp.integer):
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(outputs, targets)), state
    return jnp.mean((outputs[:, 0] - targets) ** 2), state


def pred_fn(model: Any, state: eqx.nn.State, batch: dict[str, Any], key: jax.Array) -> jax.Array:
    return apply(model, state, batch, key)[0]


def main(args: Args) -> dict[str, float]:
    """Trains and reports. Returns the scores on the test set."""
    deployer = redeqx.Deployer(args.seed, args.n_model_shards, args.n_fsdp_shards, workdir=args.workdir)
    task = read_task(args.task, args.data, args.image_size, args.n_channels)
    kind = "texts" if args.task in GLUE else "table" if args.task == "diabetes" else "images"
    if kind == "texts":
        if args.pretrained is None:
            raise ValueError(f"`--pretrained`: expected the folder of a BERT for `--task {args.task}`, got none. Pass one.")
        model, tokenizer = make_bert(task, args.pretrained, deployer)
        task = encode(task, tokenizer, args.max_tokens, model.config.pad_token_id or PAD)
    elif kind == "table":
        model = eqx.nn.MLP(len(task.train[0][0]["x"]), 1, args.width, depth=2, key=deployer.next_key())
    else:
        n_channels, size, _ = task.train[0][0]["image"].shape
        model = CNN(n_channels, size, args.width, len(task.classes), key=deployer.next_key())
    state = eqx.nn.State(model)  # the state of BatchNorm layers; empty if the model has none
    model = eqx.nn.delete_init_state(model)

    # Fill up the last update with the first examples: in a smaller one, BatchNorm would see few rows.
    train = [task.train[i % len(task.train)] for i in range(-(-len(task.train) // args.batch_size) * args.batch_size)]
    n_epochs, learning_rate = RECIPES[kind]
    n_epochs = n_epochs if args.n_epochs is None else args.n_epochs
    learning_rate = learning_rate if args.learning_rate is None else args.learning_rate
    lr = deployer.get_lr_schedule_fn(
        len(train), None, n_epochs, learning_rate, "cosine", warmup_ratio=0.1, batch_size=args.batch_size,
        accumulate_grad_batches=args.accumulate_grad_batches,
    )  # fmt: skip
    trainer = redeqx.Trainer(
        deployer, model=model, model_state=state, optimizer=optax.adamw(lr, weight_decay=0.01), collate_fn=collate_fn,
        loss_fn=loss_fn, lr_schedule_fn=lr, accumulate_grad_batches=args.accumulate_grad_batches,
    )  # fmt: skip
    if args.pretrained is not None and kind != "texts":
        trainer.load_ckpt(args.pretrained, load_opt_states=False)
    predictor, metric = trainer.get_default_predictor(pred_fn), METRICS[args.task][0]
    trainer.fit(
        train, batch_size=args.batch_size, n_epochs=n_epochs, eval_examples=task.validation, eval_predictor=predictor,
        eval_metric_fn=partial(measure, task), save_last_ckpt=True, save_argmin_ckpt_by_metrics=["loss"],
        save_argmax_ckpt_by_metrics=[metric],
    )  # fmt: skip
    # On few examples, the loss is more informative than the accuracy. GLUE's scores, however, can still rise while the loss
    # rises.
    trainer.load_ckpt(f"argmax_{metric}" if kind == "texts" else "argmin_loss")

    outputs = np.stack(predictor.predict(task.test, batch_size=args.batch_size))
    scores = {f"test_{name}": score for name, score in measure(task, task.test, outputs).items()}
    if kind == "table":
        scores |= {f"test_ridge_{name}": score for name, score in ridge(task).items()}
    lines = [f"{name:24}{score:.4f}" for name, score in scores.items()]
    files = [*draw(task, outputs, args.workdir), args.workdir / f"ckpts/step_{trainer.step:08}"]
    deployer.log_info("\n".join([*lines, *map(str, files)]), title=f"{args.task}: test set, pictures, best checkpoint")
    deployer.log_metrics(scores, trainer.step)
    return scores
