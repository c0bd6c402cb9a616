# %% [markdown]
# # Train a miniGPT
#
# A small GPT learns to write English, one byte at a time, on eight devices. On the way you see a mesh, a plan,
# samples during training, a loss curve, a profile, a checkpoint that moves to another mesh, and a fine-tune with
# LoRA. You need to know JAX and Equinox. You need no knowledge of training on several devices.
#
# The page follows [Train a miniGPT language model with JAX](https://docs.jaxstack.ai) of the JAX AI stack, with
# Equinox and redeqx.
#
# Everything here runs on a laptop in a minute or two, without a download. It needs `pip install -e ".[draw]"`.

# %%
import inspect
import json
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import redeqx
from redeqx.models import lora

# %% [markdown]
# ## Eight devices
#
# `simulate_devices(8)` makes one CPU act as eight devices. Programs are split and communicate as on eight GPUs;
# they are only slower. Call it before anything else uses JAX. On a machine with a GPU or a TPU it changes nothing, and
# the rest of this page runs there.

# %%
redeqx.simulate_devices(8)
print(jax.devices())

# %% [markdown]
# ## Text
#
# Every Python comes with its own manual: `pydoc_data.topics` has the pages that `help("with")` shows. That is
# less than half a megabyte of English, enough for a model of this size.

# %%
text = "\n\n\n".join(topics[name] for name in sorted(topics))
print(f"{len(text):,} characters")
print(text[1000:1300])

# %% [markdown]
# A tokenizer would need training too. The model reads bytes instead: 256 possible tokens, and `text.encode()` is
# the tokenizer. The text is cut into rows of 129 bytes: 128 to read, and the next byte of each to predict. One row in
# twenty is held out for testing.

# %%
N_TOKENS = 128


def cut(text):
    data = np.frombuffer(text.encode(), np.uint8)
    n_rows = len(data) // (N_TOKENS + 1)
    return data[: n_rows * (N_TOKENS + 1)].reshape(n_rows, N_TOKENS + 1)


rows = cut(text)
is_held_out = np.arange(len(rows)) % 20 == 0
train, held_out = rows[~is_held_out], rows[is_held_out]
print(f"{len(train)} rows to train on, {len(held_out)} held out")

# %% [markdown]
# ## The model
#
# This is ordinary Equinox code that knows nothing about devices. A block is attention and an MLP, each added to its
# input. The causal mask lets a token see only the tokens before it and itself.

# %%
WIDTH, N_HEADS, N_BLOCKS = 128, 4, 2


class Block(eqx.Module):
    norm1: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    norm2: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP

    def __init__(self, key):
        key1, key2 = jax.random.split(key)
        self.norm1, self.norm2 = eqx.nn.LayerNorm(WIDTH), eqx.nn.LayerNorm(WIDTH)
        self.attention = eqx.nn.MultiheadAttention(N_HEADS, WIDTH, key=key1)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 1, activation=jax.nn.gelu, key=key2)

    def __call__(self, x):  # [tokens, width]
        mask = jnp.tril(jnp.ones((len(x), len(x)), bool))
        h = jax.vmap(self.norm1)(x)
        x = x + self.attention(h, h, h, mask=mask)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norm2)(x))


# %% [markdown]
# The whole model embeds bytes and their positions, applies the blocks, and returns a score (a *logit*) for every
# possible next byte, at each position.


# %%
class MiniGPT(eqx.Module):
    tokens: eqx.nn.Embedding
    positions: eqx.nn.Embedding
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, key):
        key1, key2, key3, *keys = jax.random.split(key, 3 + N_BLOCKS)
        self.tokens = eqx.nn.Embedding(256, WIDTH, key=key1)
        self.positions = eqx.nn.Embedding(N_TOKENS, WIDTH, key=key2)
        self.blocks = [Block(key) for key in keys]
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.head = eqx.nn.Linear(WIDTH, 256, key=key3)

    def __call__(self, ids):  # [tokens]
        x = jax.vmap(self.tokens)(ids) + jax.vmap(self.positions)(jnp.arange(len(ids)))
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.head)(jax.vmap(self.norm)(x))  # [tokens, 256]


# %% [markdown]
# ## What redeqx needs from you
#
# Two functions. `collate_fn` turns a list of examples into arrays with a row for each. `loss_fn` turns the model
# and such a batch into one number, the mean over the rows. Neither mentions devices.


# %%
def collate_fn(examples):
    rows = np.stack(examples).astype(np.int32)
    return {"ids": rows[:, :-1], "labels": rows[:, 1:]}


def loss_fn(model, batch, key):
    logits = jax.vmap(model)(batch["ids"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


# %% [markdown]
# ## The mesh
#
# The `Deployer` arranges the devices as a grid, the *mesh*. You give one number: how many devices share each layer.
# With `n_model_shards=2`, pairs of devices share the work of each layer, and each of the four pairs gets its own part
# of the batch. On a single GPU, run the page with `JAX_PLATFORMS=cpu`.
#
# The folder is a temporary one, so that this page starts afresh each time. With a folder of your own, a restarted run
# continues where it stopped.

# %%
workdir = Path(tempfile.mkdtemp())
deployer = redeqx.Deployer(jax_seed=0, n_model_shards=2, workdir=workdir)
print(deployer.mesh)

# %% [markdown]
# The *plan* says how each array of the model is split, and why. redeqx traces your loss and follows the values
# through it. Look at an MLP: its first layer is split by outputs (`column`), its second by inputs (`row`), so
# that the devices of a pair communicate only once, after the second.

# %%
model = MiniGPT(deployer.next_key())
deployer.plan(model, loss_fn, collate_fn(train[:16]))

# %% [markdown]
# The `Trainer` takes the model, the two functions and any optax optimizer. The learning rate rises for a tenth of
# the run and then falls along a cosine.

# %%
BATCH_SIZE, N_EPOCHS = 16, 2


def make_trainer(deployer, model):
    learning_rate = deployer.get_lr_schedule_fn(
        len(train),
        batch_size=BATCH_SIZE,
        n_epochs=N_EPOCHS,
        learning_rate=4e-3,
        schedule_type="cosine",
        warmup_ratio=0.1,
    )
    return redeqx.Trainer(
        deployer,
        model=model,
        optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(learning_rate)),
        collate_fn=collate_fn,
        loss_fn=loss_fn,
    )


trainer = make_trainer(deployer, model)

# %% [markdown]
# ## Samples
#
# A loss is a number; a sample shows what it means. `pred_fn` continues each prompt to the full length: it asks the
# model for the next byte, draws it, and repeats. (It recomputes all positions for each byte.
# `redeqx.models.generate` keeps a cache.)

# %%
N_PROMPT = 24


def pred_fn(model, prompts, key):  # [rows, tokens]; the first N_PROMPT tokens are given
    def add_one(ids, inputs):
        position, key = inputs
        logits = jax.vmap(model)(ids)[:, position - 1]
        return ids.at[:, position].set(jax.random.categorical(key, logits / 0.7)), None

    positions = jnp.arange(N_PROMPT, N_TOKENS)
    return jax.lax.scan(add_one, prompts, (positions, jax.random.split(key, len(positions))))[0]


def collate_prompts(texts):
    padded = [text.encode()[:N_PROMPT].ljust(N_TOKENS) for text in texts]
    return np.stack([np.frombuffer(each, np.uint8) for each in padded]).astype(np.int32)


def to_text(ids):
    return bytes(ids.astype(np.uint8)).decode(errors="replace")


# %% [markdown]
# A predictor runs `pred_fn` with the trainer's current model. The callback below calls it every 200 steps. A
# callback may also save, log, or stop the run.

# %%
PROMPTS = ["The statement is used to", "A class definition is an"]
predictor = trainer.get_default_predictor(pred_fn, collate_fn=collate_prompts)


class Sample(redeqx.Callback):
    every = 200

    def on_step(self, trainer, metrics):
        for ids in predictor.predict(PROMPTS, batch_size=len(PROMPTS)):
            trainer.deployer.log_info(to_text(ids), title=f"step {trainer.step}")


# %% [markdown]
# ## Train
#
# Before any training the loss should be near `log(256)`, which is 5.55: all bytes are equally likely. Watch the
# samples: letters and spaces come first, then pieces of words, then words.
#
# The first lines that `fit` prints describe the run. `plan` says how many arrays are split. `attention` says that
# redeqx found the softmax attention in your loss, saw that it is causal, and computes it without the full table
# of weights.

# %%
metrics = trainer.fit(
    train,
    batch_size=BATCH_SIZE,
    n_epochs=N_EPOCHS,
    eval_examples=held_out,
    eval_batch_size=64,
    callbacks=[Sample()],
)
print(metrics)

# %% [markdown]
# ## The loss curve
#
# The run recorded its metrics: `metrics.jsonl` has a line for each step and each evaluation.

# %%
lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
for name, label in [("loss", "train"), ("eval_loss", "held out")]:
    points = [(line["step"], line[name]) for line in lines if name in line]
    axes.plot(*zip(*points, strict=True), marker="o" if label == "held out" else "", label=label)
axes.set_xlabel("step")
axes.set_ylabel("loss (nats a byte)")
axes.legend()
axes.grid(alpha=0.3)

# %% [markdown]
# ## Where does the time go?
#
# `Profile` traces a few steps and prints the costliest operations, with the lines of *your* code that they come
# from. Here is another fit, of ten steps, of which three are traced. Which lines would you expect at the top? (On
# simulated devices, waiting for the other devices counts too.)

# %%
first = trainer.step + 5
trainer.fit(
    train,
    batch_size=BATCH_SIZE,
    max_steps=10,
    callbacks=[redeqx.Profile(range(first, first + 3))],
)

# %% [markdown]
# ## The checkpoint
#
# Because there is a `workdir`, the end of the run was saved. A checkpoint is a folder of ordinary files: each array
# of the model is stored in one piece in `model.safetensors`, under its path in the module. Any safetensors reader can
# open it.

# %%
checkpoint = trainer.save_ckpt("finished")
for file in sorted(checkpoint.iterdir()):
    print(f"{file.name:24}{file.stat().st_size:>10,} bytes")

# %% [markdown]
# ## Another mesh
#
# Nothing in the checkpoint depends on the mesh. Load it into a trainer with another mesh: without pairs, and with the
# arrays split over all eight devices (*FSDP*: each device keeps an eighth of an array, and fetches the other seven
# when a layer needs them).

# %%
fsdp = redeqx.Deployer(n_fsdp_shards=8, workdir=workdir, verbose=False)
moved = make_trainer(fsdp, MiniGPT(fsdp.next_key()))
moved.load_ckpt("finished")
for weight in (trainer.model.head.weight, moved.model.head.weight):
    print(f"of {weight.shape} each device keeps {weight.sharding.shard_shape(weight.shape)}")

# %% [markdown]
# The weights are bit for bit the same. The held-out loss differs only by rounding: eight devices sum in another order
# than pairs do.

# %%
weights = [jax.tree.leaves(eqx.filter(of.model, eqx.is_array)) for of in (trainer, moved)]
assert all(np.array_equal(a, b) for a, b in zip(*weights, strict=True))
losses = [of.eval_loss(held_out, batch_size=64) for of in (trainer, moved)]
print(losses)
assert np.isclose(*losses, rtol=1e-5)

# %% [markdown]
# On the *same* mesh, the evaluation is bit for bit the same too. A checkpoint is the complete state: a run that was
# killed and restarted ends with the same bits as an uninterrupted one.

# %%
pairs = redeqx.Deployer(n_model_shards=2, workdir=workdir, verbose=False)
again = make_trainer(pairs, MiniGPT(jax.random.key(1)))
again.load_ckpt("finished")
assert again.eval_loss(held_out, batch_size=64) == losses[0]

# %% [markdown]
# ## The same numbers on every mesh
#
# That holds for training as well. `update` takes one step on the given examples. Below, three meshes take the same
# five steps from the same start. The rows should agree to about six digits.


# %%
def five_losses(**shards):
    deployer = redeqx.Deployer(jax_seed=0, verbose=False, **shards)
    trainer = make_trainer(deployer, MiniGPT(deployer.next_key()))
    batches = train[: 5 * BATCH_SIZE].reshape(5, BATCH_SIZE, -1)
    return [trainer.update(batch)["loss"] for batch in batches]


table = {}
for shards in [{}, {"n_model_shards": 4}, {"n_model_shards": 2, "n_fsdp_shards": 2}]:
    table[str(shards)] = five_losses(**shards)
    print(f"{shards!s:44}", *(f"{loss:.6f}" for loss in table[str(shards)]))
np.testing.assert_allclose(list(table.values()), [table["{}"]] * 3, rtol=1e-4)

# %% [markdown]
# ## Fine-tune with LoRA
#
# The model knows the manual. How well does it know Python's own source code? Its loss there is higher than on the
# manual, so there is something to learn.

# %%
code = cut("".join(inspect.getsource(module) for module in (inspect, json.decoder, tempfile)))
code_train, code_held_out = code[:-64], code[-64:]
loss = trainer.eval_loss(code_held_out, batch_size=64)
print(f"{len(code_train)} rows of code to train on; its loss is {loss:.3f}")

# %% [markdown]
# LoRA does not change the weights. To each layer that you name it adds a product of two thin matrices, and only those
# are trained. `where` takes globs over the paths in the plan. The trainer below has optimizer state only for the
# adapters.

# %%
where = ["blocks.*_proj", "blocks.*.mlp.layers.*"]
adapted = lora.add(trainer.model, rank=8, where=where, key=deployer.next_key())
tuner = redeqx.Trainer(
    redeqx.Deployer(n_model_shards=2),
    model=adapted,
    optimizer=optax.adam(5e-3),
    trainable=lora.trainable(adapted),
    collate_fn=collate_fn,
    loss_fn=loss_fn,
)
tuner.fit(code_train, batch_size=BATCH_SIZE)
tuned = tuner.eval_loss(code_held_out, batch_size=64)
print(f"loss on code: {loss:.3f} before, {tuned:.3f} after")
assert tuned < loss

# %% [markdown]
# `lora.merge` adds each adapter to its layer: the result is a plain `MiniGPT` again. You can use it wherever you can
# use the original model, which is unchanged.

# %%
merged = lora.merge(tuner.model)
merged_loss = trainer.eval_loss(code_held_out, batch_size=64, model=merged)
print(f"loss on code, merged: {merged_loss:.3f}")
print(f"loss on the manual, as before: {trainer.eval_loss(held_out, batch_size=64):.3f}")
for ids in predictor.predict(["def get_name(self, value)"], batch_size=1, model=merged):
    print(to_text(ids))

# %% [markdown]
# ## Next
#
# - Larger: change `WIDTH`, `N_BLOCKS` and `N_TOKENS`, and check [whether it fits](../ideas/dry_run.md) before you
#   rent the machine.
# - Faster: [what to look at](../guides/performance.md) when a step takes longer than it should.
# - Published models: [fine-tune a Hugging Face folder](../guides/lora.md).
# - Other kinds of training: [diffusion](diffusion.md) and [reinforcement learning](reinforcement_learning.md).
