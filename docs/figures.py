"""The figures of the documentation, from real plans and dry runs: `python docs/figures.py` writes `docs/pages/figures/`."""

from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax

import redeqx

FOLDER = Path(__file__).parent / "pages" / "figures"
COLORS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7"]  # told apart by colour-blind readers
PALE = "#d8d8d8"


class Block(eqx.Module):
    """A transformer block of a user: attention by Equinox, an MLP of two raw arrays."""

    attention: eqx.nn.MultiheadAttention
    up: jax.Array
    bias: jax.Array
    down: jax.Array

    def __init__(self, key: jax.Array, d: int = 64):
        keys = jax.random.split(key, 3)
        self.attention = eqx.nn.MultiheadAttention(4, d, key=keys[0])
        self.up, self.down = 0.1 * jax.random.normal(keys[1], (d, 4 * d)), 0.1 * jax.random.normal(keys[2], (4 * d, d))
        self.bias = jnp.zeros(4 * d)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(x, x, x)
        return x + jax.nn.gelu(x @ self.up + self.bias) @ self.down


class Stack(eqx.Module):
    """Equal layers in one scan."""

    layers: eqx.nn.MLP

    def __init__(self, key: jax.Array, n_layers: int = 16, d: int = 512):
        self.layers = eqx.filter_vmap(lambda key: eqx.nn.MLP(d, d, 4 * d, 1, key=key))(jax.random.split(key, n_layers))

    def __call__(self, x: jax.Array) -> jax.Array:
        arrays, static = eqx.partition(self.layers, eqx.is_array)
        return jax.lax.scan(lambda x, arrays: (x + eqx.combine(arrays, static)(x), None), x, arrays)[0]


def loss_fn(model, batch, key):
    return (jax.vmap(model)(batch) ** 2).mean()


def draw_plan(plt) -> None:
    """Each array of a block, and the part of it that one device holds."""
    deployer = redeqx.Deployer(n_model_shards=4, verbose=False)
    plan = deployer.plan(Block(jax.random.key(0)), loss_fn, np.ones((2, 10, 64), np.float32))
    plan.draw(FOLDER / "plan.svg")


def draw_gathers(plt) -> None:
    """When each layer's full weight exists on a device, in a forward and a backward pass."""
    n = 4
    fig, ax = plt.subplots(figsize=(8, 2.4))
    for layer in range(n):
        for start, color in ((layer, COLORS[0]), (2 * n - 1 - layer, COLORS[1])):
            ax.barh(layer, 1, left=start, color=color, height=0.6)
        ax.barh(layer, 2 * n, color=PALE, height=0.12, zorder=0)
    ax.set_yticks(range(n), [f"layer {i}" for i in range(n)])
    ax.invert_yaxis()
    ax.set(xticks=[n / 2, 3 * n / 2], xticklabels=["forward pass", "backward pass"], xlim=(0, 2 * n))
    labels = ["full, for the forward pass", "gathered again, for the gradient", "this device's shard, always"]
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in (*COLORS[:2], PALE)]
    fig.legend(handles, labels, loc="lower center", ncols=3, frameon=False, fontsize=9)
    ax.spines[["top", "right"]].set_visible(False)
    fig.subplots_adjust(bottom=0.3)
    fig.savefig(FOLDER / "gathers.svg")


def draw_memory(plt) -> None:
    """Bytes of a device by dry runs, for 1 to 8 shards."""
    shards = [1, 2, 4, 8]
    found = []
    with redeqx.described("cpu:8"):
        for n in shards:
            deployer = redeqx.Deployer(n_fsdp_shards=n, verbose=False)
            trainer = redeqx.Trainer(
                deployer,
                model=deployer.init(lambda: Stack(jax.random.key(0))),
                optimizer=optax.adamw(1e-3),
                collate_fn=np.stack,
                loss_fn=loss_fn,
            )
            report = trainer.dry_run(np.zeros((64, 512), np.float32), batch_size=64, search=False)
            found.append((report.held["parameters"], report.held["optimizer state"], report.steps["train"].temporaries))
    fig, ax = plt.subplots(figsize=(6, 3))
    bottom = np.zeros(len(shards))
    names = ("parameters", "optimizer state", "gradients and other temporaries")
    for name, sizes, color in zip(names, np.array(found).T / 2**20, COLORS, strict=False):
        ax.bar([str(n) for n in shards], sizes, bottom=bottom, label=name, color=color)
        bottom += sizes
    ax.set(xlabel="FSDP shards", ylabel="MiB a device")
    ax.legend(frameon=False)
    ax.spines[["top", "right"]].set_visible(False)
    fig.tight_layout()
    fig.savefig(FOLDER / "memory.svg")


def main() -> None:
    redeqx.simulate_devices(8)
    matplotlib.use("svg")
    matplotlib.rcParams |= {"font.size": 10, "svg.hashsalt": "redeqx"}
    import matplotlib.pyplot as plt

    FOLDER.mkdir(exist_ok=True)
    for draw in (draw_plan, draw_gathers, draw_memory):
        draw(plt)


if __name__ == "__main__":
    main()
