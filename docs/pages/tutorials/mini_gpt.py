# %% [markdown]
# # Train a miniGPT
#
# A small GPT learns to write English, one byte at a time, on eight devices. On the way you see a mesh, a plan,
# samples during training, and a checkpoint that moves to another mesh. You need to know JAX and Equinox. You need no
# knowledge of training on several devices.
#
# The page follows [Train a miniGPT language model with JAX](https://docs.jaxstack.ai) of the JAX AI stack, with
# Equinox and redeqx. It runs on a laptop in a minute, without a download.

# %%
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import redeqx

redeqx.simulate_devices(8)  # one CPU acts as eight devices; on a GPU or a TPU this changes nothing

# %% [markdown]
# ## Text
#
# Every Python comes with its own manual: `pydoc_data.topics` has the pages that `help("with")` shows. The model reads
# bytes: 256 possible tokens, and no tokenizer to train. The text is cut into rows of 129 bytes: 128 to read, and the
# next byte of each to predict. One row in twenty is held out for testing.

# %%
N_TOKENS = 128
text = "\n\n\n".join(topics[name] for name in sorted(topics))
data = np.frombuffer(text.encode(), np.uint8)
rows = data[: len(data) // (N_TOKENS + 1) * (N_TOKENS + 1)].reshape(-1, N_TOKENS + 1)
is_held_out = np.arange(len(rows)) % 20 == 0
train, held_out = rows[~is_held_out], rows[is_held_out]
print(text[1000:1300])

# %% [markdown]
# ## The model
#
# This is ordinary Equinox code that knows nothing about devices. A block is attention and an MLP, each added to its
# input. The causal mask lets a token see only the tokens before it and itself. The model returns a score (a *logit*) for
# every possible next byte, at each position.

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
# ## Two functions
#
# `collate_fn` turns a list of examples into arrays with a row for each. `loss_fn` turns the model and such a batch
# into one number, the mean over the rows. Neither mentions devices.


# %%
def collate_fn(examples):
    rows = np.stack(examples).astype(np.int32)
    return {"ids": rows[:, :-1], "labels": rows[:, 1:]}


def loss_fn(model, batch, key):
    logits = jax.vmap(model)(batch["ids"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


# %% [markdown]
# ## The mesh and the plan
#
# The `Deployer` arranges the devices as a grid, the *mesh*. With `n_model_shards=2`, pairs of devices share the work
# of each layer, and each of the four pairs gets its own part of the batch. On a single GPU, run the page with
# `JAX_PLATFORMS=cpu`.
#
# The *plan* says how each array of the model is split, and why. Look at an MLP: its first layer is split by outputs
# (`column`), its second by inputs (`row`), so that the devices of a pair communicate only once, after the second.

# %%
workdir = Path(tempfile.mkdtemp())  # in a folder of your own, a restarted run continues where it stopped
deployer = redeqx.Deployer(jax_seed=0, n_model_shards=2, workdir=workdir)
model = MiniGPT(deployer.next_key())
deployer.plan(model, loss_fn, collate_fn(train[:16]))

# %% [markdown]
# ## Samples
#
# A loss is a number; a sample shows what it means. `pred_fn` continues each prompt: it asks the model for the next
# byte, draws it, and repeats. (`redeqx.models.generate` also keeps a cache.) The callback runs it every 200 steps.

# %%
PROMPTS = [text.encode() for text in ("The statement is used to", "A class definition is an")]


def pred_fn(model, prompts, key):  # [rows, tokens]
    def add_one(ids, inputs):
        position, key = inputs
        logits = jax.vmap(model)(ids)[:, position - 1]
        return ids.at[:, position].set(jax.random.categorical(key, logits / 0.7)), None

    positions = jnp.arange(len(PROMPTS[0]), N_TOKENS)
    return jax.lax.scan(add_one, prompts, (positions, jax.random.split(key, len(positions))))[0]


def collate_prompts(texts):
    return np.stack([np.frombuffer(text.ljust(N_TOKENS), np.uint8) for text in texts]).astype(np.int32)


class Sample(redeqx.Callback):
    every = 200

    def on_step(self, trainer, metrics):
        for ids in predictor.predict(PROMPTS, batch_size=len(PROMPTS)):
            trainer.deployer.log_info(bytes(ids.astype(np.uint8)).decode(errors="replace"), title=f"step {trainer.step}")


# %% [markdown]
# ## Train
#
# At first the loss should be near `log(256)`, which is 5.55: all bytes are equally likely. Then letters and spaces
# come, then pieces of words, then words. The run records a line for each step in `metrics.jsonl`. The first lines
# that are printed describe it. `attention` says that redeqx found the
# softmax attention in your loss, saw that it is causal, and computes it without the full table of weights.


# %%
def make_trainer(deployer, model):
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(2e-3))
    return redeqx.Trainer(deployer, model=model, optimizer=optimizer, collate_fn=collate_fn, loss_fn=loss_fn)


trainer = make_trainer(deployer, model)
predictor = trainer.get_default_predictor(pred_fn, collate_fn=collate_prompts)
trainer.fit(train, batch_size=16, n_epochs=2, eval_examples=held_out, eval_batch_size=64, callbacks=[Sample()])

# %% [markdown]
# ## Another mesh
#
# The end of the run was saved: each array is in one piece in `model.safetensors`, under its path in the module. Nothing
# in it depends on the mesh. Load it with the arrays split over all eight devices (*FSDP*: each device keeps an eighth
# of an array, and fetches the rest when a layer needs it). The weights are the same bits; the held-out loss differs
# only by rounding.

# %%
fsdp = redeqx.Deployer(n_fsdp_shards=8, workdir=workdir, verbose=False)
moved = make_trainer(fsdp, MiniGPT(fsdp.next_key()))
moved.load_ckpt("last")
for weight in (trainer.model.head.weight, moved.model.head.weight):
    print(f"of {weight.shape} each device keeps {weight.sharding.shard_shape(weight.shape)}")
losses = [of.eval_loss(held_out, batch_size=64) for of in (trainer, moved)]
print(losses)
assert np.array_equal(trainer.model.head.weight, moved.model.head.weight) and np.isclose(*losses, rtol=1e-5)

# %% [markdown]
# Next: change `WIDTH` and `N_BLOCKS`, and check [whether it fits](../ideas/dry_run.md); see [where the time
# goes](../guides/performance.md); [fine-tune](../guides/lora.md) a published model; or train by
# [diffusion](diffusion.md) and [reinforcement learning](reinforcement_learning.md).
