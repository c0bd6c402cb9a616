# %% [markdown]
# # Draw digits by diffusion
#
# A diffusion model learns to remove noise from pictures. Start from pure noise, let the model remove a little two
# hundred times, and it draws a new picture. Here it draws handwritten digits, on eight devices. On the way you see
# a loss that draws random numbers, an average of the weights (*EMA*), samples during training, and a test of how
# good the samples are.
#
# The method is DDPM (Ho et al. 2020, [arXiv:2006.11239](https://arxiv.org/abs/2006.11239)). If redeqx is new to
# you, read [the miniGPT](mini_gpt.md) first. This page takes about a minute, and needs
# `pip install -e ".[examples]"`.

# %%
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

import redeqx
from redeqx.optimizers import ema

redeqx.simulate_devices(8)

# %% [markdown]
# ## Digits
#
# scikit-learn comes with 1797 real handwritten digits of 8 x 8 pixels. Pixels are scaled to -1 (white) to 1
# (black), so that they are about as large as the noise. An example is a picture and its digit.

# %%
digits = load_digits()
pictures = (digits.images / 8 - 1).astype(np.float32).reshape(-1, 64)  # 8 x 8 pixels in a row
examples = list(zip(pictures, digits.target, strict=True))
train, held_out = examples[:1536], examples[1536:]


def show(rows, labels=()):
    """Draws pictures, `[rows, columns, 64]`, with a label for each row."""
    size = len(rows), len(rows[0])
    _, axes = plt.subplots(*size, figsize=(7, 0.75 * size[0]), layout="constrained", squeeze=False)
    for i, row in enumerate(rows):
        for axis, picture in zip(axes[i], row, strict=True):
            axis.imshow(np.reshape(picture, (8, 8)), cmap="gray_r", vmin=-1, vmax=1)
            axis.set(xticks=[], yticks=[])
        if labels:
            axes[i, 0].set_ylabel(labels[i], rotation=0, ha="right", va="center")


show([[pictures[digits.target == digit][n] for digit in range(10)] for n in range(2)])

# %% [markdown]
# ## Noise
#
# A picture at time `t` is a mixture: `signal[t]` times the picture plus `noise[t]` times random numbers. The
# squares of the two factors add up to one. At time 0 the mixture is almost only the picture, and at the last time
# almost only noise. (This is the cosine schedule of Nichol and Dhariwal 2021.)

# %%
N_TIMES = 200
angles = np.linspace(0.01, 0.999, N_TIMES, dtype=np.float32) * np.pi / 2
kept = np.cos(angles) ** 2  # the squared share of the picture
signal, noise = np.sqrt(kept), np.sqrt(1 - kept)

times = np.linspace(0, N_TIMES - 1, 10).astype(int)
drawn = np.random.default_rng(0).normal(size=64)
show([[signal[t] * pictures[3] + noise[t] * drawn for t in times]], ["more noise"])

# %% [markdown]
# ## The model
#
# The model gets a mixture, the time and the digit, and predicts the noise in the mixture. For pictures this small,
# three residual layers are enough. (Larger pictures need convolutions: `redeqx.models.unet` has Stable Diffusion's
# U-Net.) The time is encoded as sines of several frequencies, so that close times look alike and distant ones do not.

# %%
WIDTH = 384


class Layer(eqx.Module):
    norm: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP

    def __init__(self, key):
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, WIDTH, depth=1, activation=jax.nn.silu, key=key)

    def __call__(self, x, condition):
        return x + self.mlp(self.norm(x + condition))


class Denoiser(eqx.Module):
    picture: eqx.nn.Linear
    time: eqx.nn.MLP
    digit: eqx.nn.Embedding
    layers: list[Layer]
    out: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 7)
        self.picture = eqx.nn.Linear(64, WIDTH, key=keys[0])
        self.time = eqx.nn.MLP(32, WIDTH, WIDTH, depth=1, activation=jax.nn.silu, key=keys[1])
        self.digit = eqx.nn.Embedding(10, WIDTH, key=keys[2])
        self.layers = [Layer(key) for key in keys[3:6]]
        self.out = eqx.nn.Linear(WIDTH, 64, key=keys[6])

    def __call__(self, x, t, digit):  # [64], a time, a digit
        angles = t / N_TIMES * jnp.exp(jnp.linspace(0, math.log(1000), 16))
        waves = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)])
        condition = self.time(waves) + self.digit(digit)
        x = self.picture(x)
        for layer in self.layers:
            x = layer(x, condition)
        return self.out(x)  # [64]


# %% [markdown]
# ## The loss
#
# For each picture of a batch, the loss draws a time and noise, mixes them with the picture, and asks the model for
# the noise. The loss is the mean squared error. A model that always answers zero has a loss of one.
#
# The `key` differs at every step and is the same on every mesh. Because the numbers are drawn for the whole batch,
# they do not depend on how many devices share it.


# %%
def collate_fn(examples):
    pictures, labels = zip(*examples, strict=True)
    return {"pictures": np.stack(pictures), "digits": np.array(labels, np.int32)}


def loss_fn(model, batch, key):
    key1, key2 = jax.random.split(key)
    n_rows = len(batch["pictures"])
    t = jax.random.randint(key1, (n_rows,), 0, N_TIMES)
    drawn = jax.random.normal(key2, (n_rows, 64))
    share, rest = jnp.asarray(signal)[t, None], jnp.asarray(noise)[t, None]
    mixed = share * batch["pictures"] + rest * drawn
    return jnp.mean((jax.vmap(model)(mixed, t, batch["digits"]) - drawn) ** 2)


# %% [markdown]
# ## Sampling
#
# To draw, start from noise at the last time and go back. At each time the model predicts the noise; removing all of
# it gives a guess at the picture. The guess is rough, so take only one step towards it: mix it with the current
# picture, add a little fresh noise, and predict again. The weights of this mixture are those of the DDPM paper (its
# equations 6 and 7).


# %%
def pred_fn(model, labels, key):
    def step_back(x, inputs):
        t, key = inputs
        at, before = jnp.asarray(kept)[t], jnp.where(t > 0, jnp.asarray(kept)[t - 1], 1.0)
        found = jax.vmap(model, in_axes=(0, None, 0))(x, t, labels)
        guess = jnp.clip((x - jnp.sqrt(1 - at) * found) / jnp.sqrt(at), -1, 1)
        of_guess = jnp.sqrt(before) * (1 - at / before) / (1 - at)
        of_x = jnp.sqrt(at / before) * (1 - before) / (1 - at)
        fresh = jnp.sqrt((1 - at / before) * (1 - before) / (1 - at))
        return of_guess * guess + of_x * x + fresh * jax.random.normal(key, x.shape), None

    key, start = jax.random.split(key)
    inputs = (jnp.arange(N_TIMES)[::-1], jax.random.split(key, N_TIMES))
    return jax.lax.scan(step_back, jax.random.normal(start, (len(labels), 64)), inputs)[0]


# %% [markdown]
# ## Train
#
# Without shards, all eight devices hold the whole model and share the batch: *data parallelism*.
#
# The weights fluctuate with the last few batches. Their running average is more stable and usually draws better.
# `ema` keeps it: `average = 0.995 * average + 0.005 * weights` after each step. It is part of the optimizer's state, so it
# is saved and resumed with it. Evaluations, predictions and saved models use the average.

# %%
deployer = redeqx.Deployer(jax_seed=0)
trainer = redeqx.Trainer(
    deployer,
    model=Denoiser(deployer.next_key()),
    optimizer=ema(optax.adam(1e-3), 0.995),
    collate_fn=collate_fn,
    loss_fn=loss_fn,
)
predictor = trainer.get_default_predictor(pred_fn, collate_fn=np.array)

# %% [markdown]
# This callback draws the ten digits every 300 steps with the averaged weights. The key is the same each time, so the
# same noise becomes a better picture as the model learns.


# %%
class Draw(redeqx.Callback):
    every = 300

    def __init__(self):
        self.rows, self.labels = [], []

    def on_step(self, trainer, metrics):
        self.rows.append(predictor.predict(np.arange(10), batch_size=10))
        self.labels.append(f"step {trainer.step}")


draw = Draw()
trainer.fit(train, batch_size=128, n_epochs=100, callbacks=[draw])
show(draw.rows, draw.labels)

# %% [markdown]
# `eval_loss` takes any model of the same structure. On digits that neither of them has seen, the average should
# have the smaller loss.

# %%
for name, model in {"last weights": trainer.model, "their average": trainer.eval_model}.items():
    print(f"{name:16}{trainer.eval_loss(held_out, batch_size=256, model=model):.4f}")

# %% [markdown]
# ## Are they digits?
#
# The judge is a logistic regression that was trained to read the real digits. It also misreads some held-out real
# digits. How many of the drawn ones does it read as the requested digit?

# %%
reader = LogisticRegression(max_iter=1000).fit(pictures[:1536], digits.target[:1536])
wanted = np.arange(400) % 10
key = jax.random.key(1)
by_average = predictor.predict(wanted, batch_size=400, key=key)
by_last = predictor.predict(wanted, batch_size=400, key=key, model=trainer.model)

shares = {
    "real, held out": reader.score(pictures[1536:], digits.target[1536:]),
    "drawn by the average": reader.score(np.stack(by_average), wanted),
    "drawn by the last weights": reader.score(np.stack(by_last), wanted),
}
for name, share in shares.items():
    print(f"{name:28}{share:.1%}")
assert shares["drawn by the average"] > 0.8

# %% [markdown]
# Here are forty of them. No two are alike, and none is a copy: a drawn digit is about as far from the nearest real
# digit as a held-out digit is.

# %%
show(np.reshape(by_average[:40], (4, 10, 64)))


# %%
def nearest(of, among):
    distances = np.linalg.norm(np.stack(of)[:, None] - np.stack(among)[None], axis=-1)
    return float(np.sort(distances, axis=1)[:, 0].mean())


for name, those in {"a drawn digit": by_average, "a held-out digit": pictures[1536:]}.items():
    print(f"from {name} to the nearest real one: {nearest(those, pictures[:1536]):.2f}")

# %% [markdown]
# ## Next
#
# - `examples/text_to_image` trains latent diffusion, with a text encoder and an autoencoder.
# - [Callbacks](../guides/extend.md): write to your tracker, stop, save.
# - [Reinforcement learning](reinforcement_learning.md): when the loop has to be your own.
