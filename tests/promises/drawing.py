"""Losses that draw random numbers, as a user writes them for one device; `test_draws.py` runs them on every mesh.

Each is `loss_fn(model, batch, key)` over rows of `EXAMPLES`, with the model that `MODELS` makes for it. Dims: R rows, T
positions, D features, C classes.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import redeqx

T, D, C = 4, 8, 6
_draw = np.random.default_rng(0)
EXAMPLES = [
    {"x": x, "label": label, "target": target}
    for x, label, target in zip(
        _draw.normal(size=(40, T, D)).astype(np.float32),
        _draw.integers(0, C, 40).astype(np.int32),
        _draw.normal(size=40).astype(np.float32),
        strict=True,
    )
]


def collate_fn(examples):
    return {name: np.stack([example[name] for example in examples]) for name in examples[0]}


def weights(**shapes):
    keys = jax.random.split(jax.random.key(1), len(shapes))
    return {name: 0.4 * jax.random.normal(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=True)}


def dense():
    return weights(w=(D, D), v=(D,), head=(D, C), layers=(3, D, D), mean=(D, D), scale=(D, D))


class Net(eqx.Module):
    first: eqx.nn.Linear
    last: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __init__(self):
        keys = jax.random.split(jax.random.key(2))
        self.first, self.last = eqx.nn.Linear(D, 2 * D, key=keys[0]), eqx.nn.Linear(2 * D, "scalar", key=keys[1])
        self.dropout = eqx.nn.Dropout(0.3)

    def __call__(self, x, key):
        return self.last(self.dropout(jnp.tanh(self.first(x.mean(0))), key=key))


LOSSES, MODELS = {}, {}


def case(make):
    def add(loss):
        LOSSES[loss.__name__], MODELS[loss.__name__] = loss, make
        return loss

    return add


# --- the grid ----------------------------------------------------------------------------------------------------------


@case(Net)
def dropout_by_row(model, batch, key):
    """A key for each row."""
    out = jax.vmap(model)(batch["x"], jax.random.split(key, len(batch["x"])))
    return ((out - batch["target"]) ** 2).mean()


@case(dense)
def one_bernoulli(p, batch, key):
    """One mask for the whole batch."""
    keep = jax.random.bernoulli(key, 0.8, batch["x"].shape)
    return jnp.tanh(batch["x"] * keep / 0.8 @ p["w"]).mean(1).dot(p["v"]).mean()


@case(dense)
def dropout_in_a_scan_over_layers(p, batch, key):
    def layer(x, of):
        w, key = of
        x = x + jnp.tanh(x @ w)
        return jnp.where(jax.random.bernoulli(key, 0.7, x.shape), x / 0.7, 0), None

    x, _ = jax.lax.scan(layer, batch["x"], (p["layers"], jax.random.split(key, 3)))
    return ((x @ p["v"]).mean(1) * batch["target"]).mean()


@case(dense)
def droppath(p, batch, key):
    """A draw without rows: whether a layer is left out, for all rows alike."""
    x = batch["x"]
    for i, own in enumerate(jax.random.split(key, 3)):
        x = x + jnp.where(jax.random.bernoulli(own, 0.6), jnp.tanh(x @ p["layers"][i]), 0) / 0.6
    return ((x @ p["v"]).mean(1) * batch["target"]).mean()


@case(dense)
def diffusion(p, batch, key):
    """A timestep for each row, and noise."""
    time_key, noise_key = jax.random.split(key)
    time = jax.random.randint(time_key, (len(batch["x"]),), 0, 1000)
    noise = jax.random.normal(noise_key, batch["x"].shape)
    level = jnp.cos(time / 1000)[:, None, None]
    out = jnp.tanh((level * batch["x"] + (1 - level) * noise) @ p["w"]) @ p["mean"]
    return ((out - noise) ** 2).mean()


@case(dense)
def keys_folded_with_the_row(p, batch, key):
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(len(batch["x"])))
    noise = jax.vmap(lambda key: jax.random.normal(key, (T, D)))(keys)
    return (jnp.tanh((batch["x"] + noise) @ p["w"]) @ p["v"]).mean()


@case(dense)
def categorical_sampling(p, batch, key):
    """Classes drawn from the model's own logits, learned by their reward."""
    logits = batch["x"].mean(1) @ p["head"]
    drawn = jax.random.categorical(key, jax.lax.stop_gradient(logits))
    reward = jnp.where(drawn == batch["label"], 1.0, 0.1)
    logp = jnp.take_along_axis(jax.nn.log_softmax(logits), drawn[:, None], 1)[:, 0]
    return redeqx.Loss(-(reward * logp).sum(), len(logp), {"reward": reward.sum(), "class": drawn.sum()})


@case(dense)
def vae(p, batch, key):
    x = batch["x"].reshape(-1, T * D)[:, :D]
    mean, scale = jnp.tanh(x @ p["mean"]), jax.nn.softplus(x @ p["scale"])
    z = mean + scale * jax.random.normal(key, mean.shape)
    rec, kl = ((z @ p["w"] - x) ** 2).sum(-1), (mean**2 + scale**2 - 2 * jnp.log(scale) - 1).sum(-1) / 2
    return redeqx.Loss((rec + kl).sum(), len(x), {"rec": rec.sum(), "kl": (kl.sum(), kl.size)})


@case(dense)
def samples_of_a_prompt(p, batch, key):
    """As GRPO: each row is a prompt, of which a group of answers is drawn, and compared with the group."""

    def of_prompt(x, label, key):
        logits = x @ p["head"]
        drawn = jax.vmap(lambda key: jax.random.categorical(key, jax.lax.stop_gradient(logits)))(jax.random.split(key, 6))
        reward = (drawn == label).mean(1) + 0.1 * (drawn == 0).mean(1)  # [answers]
        advantage = (reward - reward.mean()) / (reward.std() + 1e-2)
        logp = jnp.take_along_axis(jax.nn.log_softmax(logits)[None], drawn[..., None], 2)[..., 0].mean(1)
        return -(advantage * logp).mean(), reward.mean()

    losses, rewards = jax.vmap(of_prompt)(batch["x"], batch["label"], jax.random.split(key, len(batch["x"])))
    return redeqx.Loss(losses.sum(), len(losses), {"reward": rewards.sum()})


GRID = list(LOSSES)

# --- other forms -------------------------------------------------------------------------------------------------------


@case(dense)
def within_remat(p, batch, key):
    def layer(x, of):
        w, key = of
        x = x + jnp.tanh(x @ w)
        return jnp.where(jax.random.bernoulli(key, 0.7, x.shape), x / 0.7, 0), None

    x, _ = jax.lax.scan(jax.checkpoint(layer), batch["x"], (p["layers"], jax.random.split(key, 3)))
    return ((x @ p["v"]).mean(1) * batch["target"]).mean()


@case(dense)
def rows_last_and_flattened(p, batch, key):
    one, two = jax.random.split(key)
    rows = len(batch["x"])
    x = batch["x"].transpose(1, 2, 0) + jax.random.normal(one, (T, D, rows))
    keep = jax.random.bernoulli(two, 0.7, (rows * T,))
    x = x.transpose(2, 0, 1).reshape(rows * T, D) * keep[:, None]
    return (jnp.tanh(x @ p["w"]) @ p["v"]).mean()


@case(dense)
def raw_keys(p, batch, key):
    """Keys as arrays of uint32, as `jax.random.PRNGKey` makes them."""
    raw = jax.random.key_data(key)
    keys = jax.random.split(raw, len(batch["x"]))
    noise = jax.vmap(lambda key: jax.random.uniform(key, (T, D)))(keys) + jax.random.normal(raw, batch["x"].shape)
    return (jnp.tanh((batch["x"] + noise) @ p["w"]) @ p["v"]).mean()


@case(dense)
def a_key_of_its_own(p, batch, key):
    """A constant key: the same numbers in each update, but others for each row."""
    noise = jax.random.normal(jax.random.PRNGKey(3), batch["x"].shape) + jax.random.normal(
        jax.random.key(4), (len(batch["x"]), 1, D)
    )
    return (jnp.tanh((batch["x"] + noise) @ p["w"]) @ p["v"]).mean()


@case(lambda: {**dense(), "key": jax.random.key(5)})
def a_key_of_the_model(p, batch, key):
    """A frozen leaf."""
    keep = jax.random.bernoulli(p["key"], 0.7, batch["x"].shape)
    noise = jax.vmap(lambda key: jax.random.normal(key, (T, D)))(jax.random.split(p["key"], len(batch["x"])))
    return (jnp.tanh((batch["x"] * keep + noise) @ p["w"]) @ p["v"]).mean()


@case(dense)
def positions_permuted_in_each_row(p, batch, key):
    orders = jax.vmap(lambda key: jax.random.permutation(key, T))(jax.random.split(key, len(batch["x"])))
    x = jnp.take_along_axis(batch["x"], orders[..., None], 1)[:, :2]
    return jnp.tanh(x @ p["w"]).sum(1).dot(p["v"]).mean()


@case(dense)
def start_of_a_recurrence(p, batch, key):
    def cell(h, x):
        h = jnp.tanh(h @ p["w"] + x @ p["mean"])
        return h, h

    _, states = jax.lax.scan(cell, jax.random.normal(key, (len(batch["x"]), D)), batch["x"].swapaxes(0, 1))
    return (states @ p["v"]).mean()


@case(dense)
def a_draw_for_pairs_of_row_and_class(p, batch, key):
    """Gumbel noise of a relaxed choice, and an exponential variable for each row."""
    one, two = jax.random.split(key)
    logits = batch["x"].mean(1) @ p["head"]
    soft = jax.nn.softmax(logits + jax.random.gumbel(one, logits.shape))
    at = jax.random.exponential(two, (len(logits), 1)) * jax.random.truncated_normal(one, -1.0, 1.0, (len(logits), 1))
    return ((soft * at) ** 2).sum(1).mean()


@case(dense)
def in_a_python_loop(p, batch, key):
    x = batch["x"]
    for i in range(2):
        key, own = jax.random.split(key)
        x = jnp.tanh(x @ p["layers"][i]) + 0.1 * jax.random.laplace(own, x.shape)
    return (x @ p["v"]).mean()
