"""How far runs on different meshes drift apart by rounding: README's model on the digits, with SGD and with Adam.

    NPROC=16 python tests/benchmarks/rounding.py

Prints the relative difference of the loss on held-out digits from that of eight data shards; the first row runs twice.
"""

import equinox as eqx
import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import redeqx

redeqx.simulate_devices(8)
EPOCHS = (1, 2, 4, 6, 8, 10)
MESHES = {  # model shards, FSDP shards, micro-batches
    "data=8": (1, 1, 1), "data=4 x model=2": (2, 1, 1), "model=8": (8, 1, 1), "fsdp=8": (1, 8, 1), "2 parts": (1, 1, 2),
}  # fmt: skip


class Net(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self, key):
        key1, key2 = jax.random.split(key)
        self.attention = eqx.nn.MultiheadAttention(num_heads=4, query_size=8, key=key1)
        self.mlp = eqx.nn.MLP(64, 10, width_size=256, depth=2, key=key2)

    def __call__(self, image):
        return self.mlp((image + self.attention(image, image, image)).ravel())


def collate_fn(examples):
    images, labels = zip(*examples, strict=True)
    return {"images": np.stack(images), "labels": np.array(labels)}


def loss_fn(model, batch, key):
    logits = jax.vmap(model)(batch["images"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


class Curve(redeqx.Callback):
    """Keeps the held-out loss of each epoch."""

    def __init__(self):
        self.losses = []

    def on_eval(self, trainer, metrics):
        self.losses.append(metrics["loss"])


def run(optimizer, examples, held_out, n_model_shards, n_fsdp_shards, accumulate):
    """Returns the loss on held-out examples after each epoch of 24 steps."""
    deployer = redeqx.Deployer(0, n_model_shards, n_fsdp_shards, verbose=False)
    trainer = redeqx.Trainer(
        deployer, model=Net(deployer.next_key()), optimizer=optimizer, collate_fn=collate_fn, loss_fn=loss_fn,
        accumulate_grad_batches=accumulate,
    )  # fmt: skip
    trainer.fit(
        examples, batch_size=64, n_epochs=10, eval_examples=held_out, eval_batch_size=256, callbacks=[curve := Curve()]
    )
    return np.array(curve.losses)


def main():
    digits = load_digits()
    examples = list(zip(digits.images.astype(np.float32) / 16, digits.target, strict=True))
    parts = examples[:1536], examples[1536:]
    for name, optimizer in {"sgd(0.1)": optax.sgd(0.1), "adam(3e-3)": optax.adam(3e-3)}.items():
        reference = run(optimizer, *parts, *MESHES["data=8"])
        for mesh, setting in MESHES.items():
            drift = np.abs(run(optimizer, *parts, *setting) / reference - 1)
            print(f"{name:10}  {mesh:16}  {'  '.join(f'epoch {i}: {drift[i - 1]:.0e}' for i in EPOCHS)}", flush=True)


if __name__ == "__main__":
    main()
