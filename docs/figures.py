"""The figures of the documentation: `python docs/figures.py` writes `docs/pages/figures/`.

All figures except the sketch of the gathers are drawn from real plans, runs, files and compiled programs.
"""

import contextlib
import runpy
import tempfile
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from safetensors import safe_open

import redeqx

FOLDER = Path(__file__).parent / "pages" / "figures"
COLORS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7"]  # distinguishable for colour-blind readers
PALE = "#d8d8d8"


class Block(eqx.Module):
    """A user's transformer block: Equinox's attention, and an MLP of two raw arrays."""

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
    """Identical layers in one scan."""

    layers: eqx.nn.MLP

    def __init__(self, key: jax.Array, n_layers: int = 16, d: int = 512):
        self.layers = eqx.filter_vmap(lambda key: eqx.nn.MLP(d, d, 4 * d, 1, key=key))(jax.random.split(key, n_layers))

    def __call__(self, x: jax.Array) -> jax.Array:
        arrays, static = eqx.partition(self.layers, eqx.is_array)
        return jax.lax.scan(lambda x, arrays: (x + eqx.combine(arrays, static)(x), None), x, arrays)[0]


def loss_fn(model, batch, key):
    return (jax.vmap(model)(batch) ** 2).mean()


def draw_plan(plt) -> None:
    """Each array of a block, and the part that one device holds."""
    deployer = redeqx.Deployer(n_model_shards=4, verbose=False)
    plan = deployer.plan(Block(jax.random.key(0)), loss_fn, np.ones((2, 10, 64), np.float32))
    plan.draw(FOLDER / "plan.svg")


def draw_first(plt) -> None:
    """The plan of README's example, which is the first page's too."""
    readme = (Path(__file__).parents[1] / "README.md").read_text("utf-8")
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("train.py").write_text(readme.split("```python\n")[1].split("```")[0])
        runpy.run_path("train.py")["trainer"].plan.draw(FOLDER / "first.svg")


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


def forecast(rows: int = 64, accumulate: int = 1, n_fsdp_shards: int = 1, remat: str = "none") -> list[int]:
    """Bytes per device from a dry run: parameters, optimizer state, and temporaries of the step."""
    with redeqx.described("cpu:8"):
        deployer = redeqx.Deployer(n_fsdp_shards=n_fsdp_shards, verbose=False)
        trainer = redeqx.Trainer(
            deployer,
            model=deployer.init(lambda: Stack(jax.random.key(0))),
            optimizer=optax.adamw(1e-3),
            collate_fn=np.stack,
            loss_fn=loss_fn,
            accumulate_grad_batches=accumulate,
            compute=redeqx.Compute(remat=remat),
        )
        report = trainer.dry_run(np.zeros((rows, 512), np.float32), batch_size=rows, search="none")
    return [report.held["parameters"], report.held["optimizer state"], report.steps["train"].temporaries]


def bars(plt, file: str, found: dict[str, list[int]], xlabel: str) -> None:
    """Draws what `forecast` returns, as one bar per name."""
    fig, ax = plt.subplots(figsize=(6, 3))
    bottom = np.zeros(len(found))
    names = ("parameters", "optimizer state", "gradients and other temporaries")
    for name, sizes, color in zip(names, np.array(list(found.values())).T / 2**20, COLORS, strict=False):
        ax.bar(list(found), sizes, bottom=bottom, label=name, color=color)
        bottom += sizes
    ax.set(xlabel=xlabel, ylabel="MiB a device", ylim=(0, 1.35 * bottom.max()))
    ax.legend(frameon=False, ncols=2, fontsize=9)
    ax.spines[["top", "right"]].set_visible(False)
    fig.tight_layout()
    fig.savefig(FOLDER / file)


def draw_memory(plt) -> None:
    """Bytes per device from dry runs, for 1 to 8 shards."""
    bars(plt, "memory.svg", {str(n): forecast(n_fsdp_shards=n) for n in (1, 2, 4, 8)}, "FSDP shards")


def draw_search(plt) -> None:
    """Bytes per device from dry runs, for the settings that are tried if a run does not fit."""
    found = {
        "as written": forecast(65536),
        'remat="full"': forecast(65536, remat="full"),
        "and 4 parts": forecast(65536, 4, remat="full"),
        "and 8 shards": forecast(65536, 4, 8, remat="full"),
    }
    bars(plt, "search.svg", found, "65,536 rows, on 8 devices")


def draw_numbers(plt) -> None:
    """The loss of one run on four meshes, and the relative differences."""
    settings = {
        "8 devices share the rows": {},
        "n_model_shards=4": {"n_model_shards": 4},
        "n_fsdp_shards=4, n_model_shards=2": {"n_fsdp_shards": 4, "n_model_shards": 2},
        "4 micro-batches": {"accumulate": 4},
    }
    rng = np.random.default_rng(0)
    examples = [(x, np.sin(3 * x[:1])) for x in rng.uniform(-1, 1, (512, 2)).astype(np.float32)]
    curves = {}
    for name, given in settings.items():
        kwargs = dict(given)
        accumulate = kwargs.pop("accumulate", 1)
        losses = curves[name] = []

        class Losses:
            def log(self, metrics, step, losses=losses):
                losses.append(metrics["loss"])

        trainer = redeqx.Trainer(
            redeqx.Deployer(**kwargs, loggers=[Losses()], verbose=False),
            model=eqx.nn.MLP(2, 1, 64, 2, key=jax.random.key(0)),
            optimizer=optax.adam(1e-2),
            collate_fn=lambda examples: {"x": np.stack([x for x, _ in examples]), "y": np.stack([y for _, y in examples])},
            loss_fn=lambda model, batch, key: ((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2).mean(),
            accumulate_grad_batches=accumulate,
        )
        trainer.fit(examples, batch_size=64, n_epochs=8)
    fig, (top, low) = plt.subplots(2, figsize=(6, 4), sharex=True, height_ratios=(2, 1))
    first = np.array(curves["8 devices share the rows"])
    for (name, losses), color, width in zip(curves.items(), COLORS, (6, 4, 2.5, 1), strict=True):
        top.plot(losses, color=color, linewidth=width, label=name)
        low.plot(np.abs(np.array(losses) / first - 1) + 1e-9, color=color)
    top.set(ylabel="loss", yscale="log")
    top.legend(frameon=False, fontsize=9)
    low.set(xlabel="step", ylabel="relative\ndifference", yscale="log", ylim=(1e-9, 1))
    for ax in (top, low):
        ax.spines[["top", "right"]].set_visible(False)
    fig.tight_layout()
    fig.savefig(FOLDER / "numbers.svg")


def draw_checkpoint(plt) -> None:
    """The bytes of a checkpoint's two files: each tensor is contiguous and at one place, whatever the mesh."""
    with tempfile.TemporaryDirectory() as folder:
        deployer = redeqx.Deployer(n_model_shards=2, n_fsdp_shards=2, workdir=folder, verbose=False)
        model = eqx.nn.MLP(16, 16, 32, 2, key=jax.random.key(0))
        arguments = {"optimizer": optax.adam(1e-3), "collate_fn": np.stack, "loss_fn": loss_fn}
        trainer = redeqx.Trainer(deployer, model=model, **arguments)
        trainer.fit(np.ones((8, 16), np.float32), batch_size=8, n_epochs=1)
        (step,) = Path(folder).glob("ckpts/step_*")
        tensors = {}
        for path in sorted(step.glob("*.safetensors")):
            with safe_open(path, "np") as file:
                tensors[path.name] = {name: file.get_tensor(name).nbytes for name in file.offset_keys()}
    fig, axes = plt.subplots(len(tensors), figsize=(8, 3.2))
    for ax, (name, sizes) in zip(axes, tensors.items(), strict=True):
        left = 0
        for i, (tensor, n_bytes) in enumerate(sizes.items()):
            ax.barh(0, n_bytes, left=left, color=COLORS[i % 4], edgecolor="white")
            if n_bytes > sum(sizes.values()) / 12:
                shown = tensor.replace("layers.", "")
                ax.text(left + n_bytes / 2, 0, shown, ha="center", va="center", fontsize=8, color="white")
            left += n_bytes
        ax.set(yticks=[], xlabel="bytes", xlim=(0, left))
        ax.set_title(name, loc="left", fontsize=10)
        ax.spines[["top", "right", "left"]].set_visible(False)
    fig.tight_layout()
    fig.savefig(FOLDER / "checkpoint.svg")


def draw_rows(plt) -> None:
    """The rows of a batch that each device computes, and so the rows that each of two processes collates."""
    deployer = redeqx.Deployer(n_model_shards=2, n_fsdp_shards=2, verbose=False)
    devices = list(deployer.mesh.devices.flat)
    sharding = jax.sharding.NamedSharding(deployer.mesh, jax.sharding.PartitionSpec(("data", "fsdp")))
    fig, ax = plt.subplots(figsize=(7, 2.8))
    for device, (rows,) in sharding.devices_indices_map((16,)).items():
        i = devices.index(device)
        ax.barh(i, rows.stop - rows.start, left=rows.start, color=COLORS[i // 4], height=0.7)
    ax.set_yticks(range(8), [f"device {i}" for i in range(8)])
    ax.set(xlabel="rows of a batch of 16, on a mesh of data=2, fsdp=2, model=2", xlim=(0, 16))
    ax.invert_yaxis()
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in COLORS[:2]]
    ax.legend(handles, ["process 0 collates", "process 1 collates"], frameon=False, loc="upper right")
    ax.spines[["top", "right"]].set_visible(False)
    fig.tight_layout()
    fig.savefig(FOLDER / "rows.svg")


def draw_attention(plt) -> None:
    """Temporaries of an attention gradient from the CPU compiler: as written, and with `redeqx.attention`."""

    def as_written(q, k, v):
        scores = jnp.einsum("tnh,snh->nts", q, k) / jnp.sqrt(q.shape[-1])
        causal = jnp.tril(jnp.ones(scores.shape[1:], bool))
        return jnp.einsum("nts,snh->tnh", jax.nn.softmax(jnp.where(causal, scores, -jnp.inf)), v)

    def fused(q, k, v):
        return redeqx.attention(q, k, v, causal=True)

    tokens = [256, 512, 1024, 2048, 4096]
    fig, ax = plt.subplots(figsize=(6, 3))
    for name, fn, color in (("as written", as_written, COLORS[1]), ("redeqx.attention", fused, COLORS[0])):
        sizes = []
        for n in tokens:
            q = jax.ShapeDtypeStruct((n, 8, 64), jnp.float32)
            step = jax.jit(jax.grad(lambda q, k, v, fn=fn: fn(q, k, v).sum(), argnums=(0, 1, 2)))
            sizes.append(step.lower(q, q, q).compile().memory_analysis().temp_size_in_bytes / 2**20)
        ax.plot(tokens, sizes, "o-", color=color, label=name)
    ax.set(xlabel="tokens (8 heads of 64)", ylabel="MiB of temporaries", xscale="log", yscale="log")
    ax.set_xticks(tokens, map(str, tokens))
    ax.minorticks_off()
    ax.legend(frameon=False)
    ax.spines[["top", "right"]].set_visible(False)
    fig.tight_layout()
    fig.savefig(FOLDER / "attention.svg")


def main() -> None:
    redeqx.simulate_devices(8)
    matplotlib.use("svg")
    matplotlib.rcParams |= {"font.size": 10, "svg.hashsalt": "redeqx"}
    import matplotlib.pyplot as plt

    FOLDER.mkdir(exist_ok=True)
    for draw in (draw_plan, draw_first, draw_gathers, draw_memory, draw_search):
        draw(plt)
    for draw in (draw_numbers, draw_checkpoint, draw_rows, draw_attention):
        draw(plt)


if __name__ == "__main__":
    main()
