"""Differentially private training: a classifier that reveals almost nothing about any single training image.

    python -m examples.private_training

This is DP-SGD (Abadi et al. 2016, arXiv 1607.00133). Each step draws a Poisson sample of the images, clips the norm of each
image's gradient, and adds Gaussian noise to their sum; this is the Trainer's `grad_fn`, in `privacy.py`. Google's
`dp_accounting` calibrates the noise for a budget epsilon over all steps. The default data is scikit-learn's digits. `--data`
takes a folder with one subfolder of images for each class. A linear model works best, because the cost of the noise grows
with the number of parameters.

The guarantee holds for each budget's model alone, for adding or removing one image. It does not cover:

- the choice of clip norm, steps and learning rate, which were tuned on this data (no checkpoint is selected: the last one is
    tested), and the number of images, which counts as public;
- the `loss` in `metrics.jsonl`, which is computed on the training images without noise, and all validation results;
- anyone who knows or guesses `--seed`, which determines the noise.

25 CPU seconds on one device, 9 of them for the accountant. Test accuracy at delta 1e-5, seeds 0 to 2: 0.872 to 0.894 for
epsilon 1, 0.925 to 0.936 for 3, 0.939 to 0.942 for 8, and 0.961 to 0.964 without privacy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import redeqx
from examples._cli import Flags
from examples._images import Labelled, accuracy, read_parts
from examples._records import curve, draw_curves
from examples.private_training.privacy import calibrate, hold_to, poisson_samples, private_gradient, room_for, spent


@dataclass(frozen=True)
class Args(Flags):
    data: Path | None = None  # A folder with one subfolder of images for each class. The digits by default.
    image_size: int = 16  # Height and width to which a folder's images are resized, in grayscale.
    pretrained: Path | None = None  # A checkpoint folder of an earlier run to start from. Its data must be public.
    workdir: Path = Path("workdir/private_training")  # For metrics, checkpoints and the picture. Runs resume from it.
    epsilons: tuple[float, ...] = (1.0, 3.0, 8.0)  # Budgets. One model is trained for each, and one without privacy.
    delta: float = 1e-5  # Must be well below 1 / number of images.
    clip_norm: float = 0.5  # Maximum norm of one image's gradient.
    sampling_rate: float = 0.25  # Probability that an image is in a step's sample.
    steps_per_epoch: int = 4
    n_epochs: int = 20
    learning_rate: float = 6.0  # Divided by the root of the noise, which needs smaller steps. Decays linearly to a tenth.
    momentum: float = 0.9
    hidden_size: int = 0  # Width of a hidden layer with tanh; 0 for none.
    accumulate_grad_batches: int = 1  # Micro-batches in a step, if all its images' gradients do not fit in memory.
    seed: int = 0  # Seed of the samples and the noise. It must stay secret for the guarantee to hold.


def check(args: Args) -> None:
    """Raises ValueError for numbers without a valid guarantee."""
    epsilons, n_steps = args.epsilons, (args.n_epochs, args.steps_per_epoch)
    differ = len(set(epsilons)) == len(epsilons)
    rules = {
        "--epsilons": (epsilons, "different budgets above 0", differ and min(epsilons, default=0) > 0),
        "--delta": (args.delta, "a number between 0 and 1", 0 < args.delta < 1),
        "--clip-norm": (args.clip_norm, "a number above 0", args.clip_norm > 0),
        "--sampling-rate": (args.sampling_rate, "a number above 0, at most 1", 0 < args.sampling_rate <= 1),
        "--n-epochs`, `--steps-per-epoch": (n_steps, "both at least 1", min(n_steps) >= 1),
    }  # fmt: skip
    for name, (found, rule, holds) in rules.items():
        if not holds:
            raise ValueError(f"`{name}`: expected {rule}, got {found}. Choose another value.")


class Classifier(eqx.Module):
    """A linear model over pixels, or two layers with tanh between them."""

    layers: eqx.nn.MLP

    def __call__(self, image: jax.Array) -> jax.Array:
        # Normalize each image by its own mean and norm: statistics over all images would cost privacy.
        pixels = jnp.ravel(image - jnp.mean(image))
        return self.layers(3 * pixels / jnp.maximum(jnp.linalg.norm(pixels), 1e-6))


def collate_fn(examples: Labelled) -> dict[str, np.ndarray]:
    images, labels = zip(*examples, strict=True)
    return {"images": np.stack(images), "labels": np.array(labels, np.int32)}


def loss_of_one(model: Classifier, row: dict[str, jax.Array]) -> jax.Array:
    """Returns the loss of one image in nats; 0 for a label of -1."""
    loss = optax.softmax_cross_entropy_with_integer_labels(model(row["images"]), jnp.maximum(row["labels"], 0))
    return loss * (row["labels"] >= 0)


def loss_fn(model: Classifier, batch: dict[str, jax.Array], key: jax.Array) -> redeqx.Loss:
    losses = jax.vmap(partial(loss_of_one, model))(batch)
    return redeqx.Loss(total=jnp.sum(losses), weight=jnp.sum(batch["labels"] >= 0))


def pred_fn(model: Classifier, batch: dict[str, jax.Array], key: jax.Array) -> jax.Array:
    return jnp.argmax(jax.vmap(model)(batch["images"]), axis=-1)


def fit(args: Args, folder: Path, seed: int, data: Sequence[Labelled], n_classes: int, noise: float | None) -> float:
    """Trains one model, without privacy if `noise` is None. Returns its test accuracy."""
    train, validation, test = data
    deployer = redeqx.Deployer(seed, args.n_model_shards, args.n_fsdp_shards, workdir=folder)
    n_steps, n_micro = args.n_epochs * args.steps_per_epoch, args.accumulate_grad_batches
    n_rows = room_for(len(train), args.sampling_rate, n_steps, deployer.mesh.size * n_micro)

    sizes, depth, key = (train[0][0].size, n_classes, args.hidden_size), int(args.hidden_size > 0), deployer.next_key()
    model = deployer.init(lambda: Classifier(eqx.nn.MLP(*sizes, depth, jnp.tanh, key=key)))
    grad_fn = None
    if noise is not None:
        terms = {"noise_multiplier": round(noise, 6), "clip_norm": args.clip_norm, "sampling_rate": args.sampling_rate}
        hold_to(folder / "privacy.json", {**terms, "n_steps": n_steps, "n_examples": len(train)})
        grad_fn = partial(
            private_gradient, loss_of_one, clip_norm=args.clip_norm, noise_multiplier=noise,
            sample_size=args.sampling_rate * len(train),
        )  # fmt: skip
    peak = args.learning_rate / (1.0 if noise is None else noise**0.5)
    lr = optax.linear_schedule(peak, peak / 10, n_steps)
    trainer = redeqx.Trainer(
        deployer, model=model, optimizer=optax.sgd(lr, args.momentum), collate_fn=collate_fn, loss_fn=loss_fn,
        grad_fn=grad_fn, lr_schedule_fn=lr, accumulate_grad_batches=n_micro,
    )  # fmt: skip
    if args.pretrained is not None:
        trainer.load_ckpt(args.pretrained, load_opt_states=False)
    predictor = trainer.get_default_predictor(pred_fn)
    draw_epoch = partial(poisson_samples, train, args.sampling_rate, args.steps_per_epoch, n_rows)
    trainer.fit(
        lambda epoch: draw_epoch((seed, epoch)), batch_size=n_rows, n_epochs=args.n_epochs, eval_examples=validation,
        eval_predictor=predictor,
        eval_metric_fn=accuracy, save_last_ckpt=True,
    )  # fmt: skip
    return accuracy(test, predictor.predict(test, batch_size=n_rows))["accuracy"]


def main(args: Args) -> dict[str, float]:
    """Trains a model for each budget and one without privacy. Returns their test accuracies."""
    check(args)
    data, classes = read_parts(args.data, args.image_size)
    deployer = redeqx.Deployer(args.seed, args.n_model_shards, args.n_fsdp_shards, workdir=args.workdir)
    budget = (args.delta, args.sampling_rate, args.n_epochs * args.steps_per_epoch)
    names = [*(f"eps{epsilon:g}" for epsilon in args.epsilons), "public"]
    noise = [*(calibrate(epsilon, *budget) for epsilon in args.epsilons), None]
    folders = [args.workdir / name for name in names]
    # A separate seed for each model: noise that two models share could be removed by comparing them.
    seeds = range(args.seed * len(names), (args.seed + 1) * len(names))
    accuracies = [fit(args, folders[i], seeds[i], data, len(classes), noise[i]) for i in range(len(names))]
    levels = {f"{name}, test": value for name, value in zip(names, accuracies, strict=True)}
    curves = {folder.name: curve(folder, "eval_accuracy") for folder in folders}
    draw_curves(args.workdir / "accuracy.png", curves, levels, xlabel="step", ylabel="validation accuracy", ylim=(None, 1))

    table = ["epsilon  noise  accuracy"]
    for multiplier, value in zip(noise, accuracies, strict=True):
        bound = "none    " if multiplier is None else f"{spent(multiplier, *budget):<8.3f}"
        table.append(f"{bound} {multiplier or 0:5.2f}  {value:.3f}")
    title = f"accuracy on {len(data[-1])} test images, delta {args.delta:g}; the noise in clip norms of {args.clip_norm:g}"
    files = [args.workdir / "accuracy.png", *(folder / "ckpts" for folder in folders)]
    deployer.log_info("\n".join([*table, *map(str, files)]), title=title)
    scores = {f"test_accuracy_{name}": value for name, value in zip(names, accuracies, strict=True)}
    deployer.log_metrics(scores, budget[-1])
    return scores
