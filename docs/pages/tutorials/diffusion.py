# %% [markdown]
# # Draw digits by diffusion
#
# A diffusion model learns to remove noise from pictures. Start from pure noise, let the model remove a little two
# hundred times, and it draws a new picture. On the way you see a loss that draws random numbers, an average of the
# weights (*EMA*), samples during training, and a test of how good the samples are.
#
# The method is DDPM ([arXiv:2006.11239](https://arxiv.org/abs/2006.11239)). If redeqx is new to you, read
# [the miniGPT](mini_gpt.md) first. This page takes about a minute, and needs `pip install -e ".[examples]"`.

# %%
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
# scikit-learn comes with 1797 real handwritten digits of 8 x 8 pixels. Pixels are scaled to -1 (white) to 1 (black). An
# example is a picture and its digit.

# %%
digits = load_digits()
pictures = (digits.images / 8 - 1).astype(np.float32).reshape(-1, 64)  # 8 x 8 pixels in a row
train = list(zip(pictures, digits.target, strict=True))[:1536]


def show(rows, labels=()):
    """Draws pictures, `[rows, columns, 64]`, with a label for each row."""
    _, axes = plt.subplots(len(rows), figsize=(7, 0.75 * len(rows)), layout="constrained", squeeze=False)
    for i, row in enumerate(rows):
        axes[i, 0].imshow(np.hstack([np.reshape(picture, (8, 8)) for picture in row]), cmap="gray_r", vmin=-1, vmax=1)
        axes[i, 0].set(xticks=[], yticks=[])
        axes[i, 0].set_ylabel(labels[i] if labels else "", rotation=0, ha="right", va="center")


show([[pictures[digits.target == digit][n] for digit in range(10)] for n in range(2)])

# %% [markdown]
# ## Noise
#
# A picture at time `t` is a mixture: `signal[t]` times the picture plus `noise[t]` times random numbers. At time 0 it is
# almost only the picture, and at the last time almost only noise.

# %%
N_TIMES = 200
angles = jnp.linspace(0.01, 0.999, N_TIMES) * jnp.pi / 2
signal, noise = jnp.cos(angles), jnp.sin(angles)

numbers = np.random.default_rng(0).normal(size=64)
show([[signal[t] * pictures[3] + noise[t] * numbers for t in range(0, N_TIMES, 22)]], ["more noise"])

# %% [markdown]
# ## The model
#
# The model gets a mixture, the time and the digit, and predicts the noise in the mixture. The time is encoded as sines
# of several frequencies.

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
        angles = t / N_TIMES * jnp.logspace(0, 3, 16)
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
# the noise. The `key` differs at every step. The numbers belong to the rows: they do not depend on how many devices
# share the batch.


# %%
def collate_fn(examples):
    pictures, labels = zip(*examples, strict=True)
    return {"pictures": np.stack(pictures), "digits": np.array(labels, np.int32)}


def loss_fn(model, batch, key):
    key1, key2 = jax.random.split(key)
    t = jax.random.randint(key1, batch["digits"].shape, 0, N_TIMES)
    drawn = jax.random.normal(key2, batch["pictures"].shape)
    mixed = signal[t, None] * batch["pictures"] + noise[t, None] * drawn
    return jnp.mean((jax.vmap(model)(mixed, t, batch["digits"]) - drawn) ** 2)


# %% [markdown]
# ## Sampling
#
# To draw, start from noise at the last time and go back. At each time the model predicts the noise; removing all of
# it gives a rough guess at the picture. Take one step towards it: mix it with the current picture, add a little fresh
# noise (equations 6 and 7 of the paper), and predict again.


# %%
def pred_fn(model, labels, key):
    def step_back(x, inputs):
        t, key = inputs
        at, before = signal[t] ** 2, jnp.where(t > 0, signal[t - 1] ** 2, 1.0)
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
# The running average of the weights usually draws better than the last ones. `ema` keeps it:
# `average = 0.995 * average + 0.005 * weights` after each step. It is saved with the optimizer's state. Evaluations,
# predictions and saved models use it. The callback draws the ten digits every 300 steps, from the same noise.

# %%
deployer = redeqx.Deployer(jax_seed=0)
model, optimizer = Denoiser(deployer.next_key()), ema(optax.adam(1e-3), 0.995)
trainer = redeqx.Trainer(deployer, model=model, optimizer=optimizer, collate_fn=collate_fn, loss_fn=loss_fn)
predictor = trainer.get_default_predictor(pred_fn, collate_fn=np.array)


class Draw(redeqx.Callback):
    every = 300

    def on_step(self, trainer, metrics):
        rows.append(predictor.predict(np.arange(10), batch_size=10))
        labels.append(f"step {trainer.step}")


rows, labels = [], []
trainer.fit(train, batch_size=128, n_epochs=100, callbacks=[Draw()])
show(rows, labels)

# %% [markdown]
# ## Are they digits?
#
# The judge is a logistic regression that was trained to read the real digits. How many of the drawn ones does it read
# as the requested digit?

# %%
reader = LogisticRegression(max_iter=1000).fit(pictures[:1536], digits.target[:1536])
wanted = np.arange(400) % 10
drawn = np.stack(predictor.predict(wanted, batch_size=400))
shares = reader.score(pictures[1536:], digits.target[1536:]), reader.score(drawn, wanted)
print(f"{shares[0]:.1%} of held-out digits, {shares[1]:.1%} of drawn ones")
assert shares[1] > 0.8
show(drawn[:40].reshape(4, 10, 64))

# %% [markdown]
# Next: `examples/text_to_image` trains latent diffusion, with a text encoder and an autoencoder. When the loop has to be
# your own: [reinforcement learning](reinforcement_learning.md).
