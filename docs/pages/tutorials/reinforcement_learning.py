# %% [markdown]
# # Balance a pole by reinforcement learning
#
# In most training the data is there before the model. In reinforcement learning the model makes its own data: it
# plays, sees what came of it, and learns to do more of what went well. So the loop is yours, and `trainer.update`
# takes one step in it. The compiled step, the mesh, the records and the checkpoints are the same as with `fit`.
#
# The game is gymnasium's CartPole: push a cart to the left or to the right so that the pole on it does not fall.
# Each step that it stands is worth one point, and 500 is the most. The method is PPO (Schulman et al. 2017,
# [arXiv:1707.06347](https://arxiv.org/abs/1707.06347)). If redeqx is new to you, read [the miniGPT](mini_gpt.md)
# first. This page takes about a minute, and needs `pip install -e ".[examples]"`.

# %%
import tempfile

import equinox as eqx
import gymnasium
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import redeqx

redeqx.simulate_devices(8)

# %% [markdown]
# ## The game
#
# Thirty-two copies of the game run side by side. An observation is four numbers: where the cart is, how fast it
# moves, how far the pole leans, how fast it falls. Chance alone does badly:

# %%
N_GAMES = 32
games = gymnasium.make_vec("CartPole-v1", N_GAMES, "sync")


def play_once(act, seed):
    """The points of one episode in each game."""
    games.action_space.seed(seed)
    seen, _ = games.reset(seed=seed)
    points, is_running = np.zeros(N_GAMES), np.ones(N_GAMES, bool)
    while is_running.any():
        seen, rewards, has_fallen, is_over, _ = games.step(act(seen))
        points += rewards * is_running
        is_running &= ~(has_fallen | is_over)
    return points


points = play_once(lambda seen: games.action_space.sample(), seed=1)
print(f"random actions: {points.mean():.0f} points")

# %% [markdown]
# ## Two small networks
#
# The *actor* says how probable each action should be. The *critic* guesses how many points are still to come. The
# critic is needed to tell whether an action was good: did more come of it than was expected?


# %%
class ActorCritic(eqx.Module):
    actor: eqx.nn.MLP
    critic: eqx.nn.MLP

    def __init__(self, key):
        key1, key2 = jax.random.split(key)
        self.actor = eqx.nn.MLP(4, 2, 64, depth=2, activation=jnp.tanh, key=key1)
        self.critic = eqx.nn.MLP(4, "scalar", 64, depth=2, activation=jnp.tanh, key=key2)

    def __call__(self, seen):  # [4]
        return jax.nn.log_softmax(self.actor(seen)), self.critic(seen)  # [2], one value


# %% [markdown]
# `pred_fn` draws an action for each game, and returns with it how probable it was and what the critic expects.
# Playing needs only observations, so the predictor gets a `collate_fn` of its own below.


# %%
def pred_fn(model, seen, key):
    log_probs, values = jax.vmap(model)(seen)
    actions = jax.random.categorical(key, log_probs)
    return {
        "action": actions,
        "log_prob": jnp.take_along_axis(log_probs, actions[:, None], axis=1)[:, 0],
        "value": values,
        "best": jnp.argmax(log_probs, axis=1),
    }


# %% [markdown]
# ## The loss
#
# For each step that was played, `advantage` is how much better it went than the critic expected. The actor should
# make actions with a positive advantage more probable, and the others less. PPO takes care that one update does
# not go too far: once an action is a fifth more or less probable than it was when it was played, pushing it
# further gains nothing.
#
# The step after the end of an episode only resets the game, so it has no weight. That is what `redeqx.Loss` is
# for: a total, and what to divide it by. The library adds both up over all devices and divides once.


# %%
def loss_fn(model, batch, key):
    log_probs, values = jax.vmap(model)(batch["seen"])
    chosen = jnp.take_along_axis(log_probs, batch["action"][:, None], axis=1)[:, 0]
    ratio, advantage = jnp.exp(chosen - batch["log_prob"]), batch["advantage"]
    gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
    error = (values - batch["return"]) ** 2
    entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=1)  # some chance keeps it trying

    def total(rows):
        return jnp.sum(rows * batch["weight"])

    metrics = {"entropy": total(entropy), "critic_error": total(error)}
    loss = total(0.5 * error - gain - 0.01 * entropy)
    return redeqx.Loss(loss, jnp.sum(batch["weight"]), metrics)


# %% [markdown]
# Examples are rows of a structured array, one for each step that was played. `collate_fn` makes one array of each
# field.

# %%
numbers = [(name, np.float32) for name in ("log_prob", "advantage", "return", "weight")]
STEP = np.dtype([("seen", np.float32, (4,)), ("action", np.int32), *numbers])


def collate_fn(steps):
    rows = np.array(steps, STEP)
    return {name: rows[name] for name in STEP.names}


# %% [markdown]
# ## The trainer
#
# `begin_records(-1)` clears what an earlier run recorded in the folder, because this loop always begins anew.
# (The folder is a temporary one here, so there is nothing to clear. With your own folder there may be.)

# %%
N_ROUNDS, N_STEPS, N_EPOCHS, BATCH_SIZE = 30, 64, 8, 512
n_updates = N_ROUNDS * N_EPOCHS * N_GAMES * N_STEPS // BATCH_SIZE

deployer = redeqx.Deployer(jax_seed=0, workdir=tempfile.mkdtemp())
deployer.begin_records(-1)
learning_rate = optax.linear_schedule(2e-3, 0.0, n_updates)
trainer = redeqx.Trainer(
    deployer,
    model=ActorCritic(deployer.next_key()),
    optimizer=optax.chain(optax.clip_by_global_norm(0.5), optax.adam(learning_rate)),
    collate_fn=collate_fn,
    loss_fn=loss_fn,
)
predictor = trainer.get_default_predictor(pred_fn, collate_fn=np.stack)

# %% [markdown]
# A predictor draws the same numbers at every call, so that an evaluation can be repeated. Here each call should
# draw anew: give it a new key. It always uses the newest weights of the trainer.


# %%
def ask(seen):
    rows = predictor.predict(seen, batch_size=N_GAMES, key=deployer.next_key())
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


def act_well(seen):
    return ask(seen)["best"]


print(f"before training: {play_once(act_well, seed=1).mean():.0f} points")

# %% [markdown]
# ## Play
#
# Each round plays 64 steps in every game and goes on where the last round stopped. The advantage of a step adds
# up the surprises that followed it, later ones with less weight (*generalized advantage estimation*, Schulman et
# al. 2016). After a fall nothing more is to come; after a time limit, the critic's guess is.

# %%
DISCOUNT, TRUST = 0.99, 0.95


def play(seen, ended):
    rows = np.zeros((N_STEPS, N_GAMES), STEP)
    rewards, values = np.zeros((N_STEPS, N_GAMES)), np.zeros((N_STEPS + 1, N_GAMES))
    fallen, ends = np.zeros((2, N_STEPS, N_GAMES), bool)
    for t in range(N_STEPS):
        said = ask(seen)
        rows["seen"][t], rows["weight"][t], values[t] = seen, ~ended, said["value"]
        rows["action"][t], rows["log_prob"][t] = said["action"], said["log_prob"]
        seen, rewards[t], fallen[t], is_over, _ = games.step(said["action"])
        ends[t] = ended = fallen[t] | is_over
    values[-1] = ask(seen)["value"]

    later = np.zeros(N_GAMES)
    for t in reversed(range(N_STEPS)):
        surprise = rewards[t] + DISCOUNT * values[t + 1] * ~fallen[t] - values[t]
        rows["advantage"][t] = later = surprise + DISCOUNT * TRUST * ~ends[t] * later
    rows["return"] = rows["advantage"] + values[:-1]
    real = rows["advantage"][rows["weight"] > 0]
    rows["advantage"] = (rows["advantage"] - real.mean()) / (real.std() + 1e-8)
    return rows.reshape(-1), seen, ended


# %% [markdown]
# ## Learn
#
# The loop: play a round, then pass over it eight times in batches of 512 steps, in a new order each time.
# `update` takes one step with the examples that you give it and returns its metrics. Every fifth round, 32 whole
# episodes are played with the best actions, and the result is recorded beside the metrics. `save_ckpt` saves all
# that a later run needs to go on.

# %%
rng = np.random.default_rng(0)
seen, _ = games.reset(seed=0)
ended = np.zeros(N_GAMES, bool)
curve = []
with deployer.progress(title="ppo", n_steps=n_updates) as progress:
    for n_round in range(1, N_ROUNDS + 1):
        rows, seen, ended = play(seen, ended)
        for _ in range(N_EPOCHS):
            for batch in rng.permutation(rows).reshape(-1, BATCH_SIZE):
                metrics = trainer.update(batch)
        progress.update(trainer.step, metrics=metrics, n_examples=len(rows) * N_EPOCHS)
        if n_round % 5 == 0:
            points = play_once(act_well, seed=1000 + n_round).mean()
            curve.append((trainer.step, points))
            deployer.log_metrics({"points": points}, trainer.step)
            deployer.log_info(f"round {n_round}: {points:.0f} points")
            trainer.save_ckpt(metrics={"points": points})
            seen, _ = games.reset(seed=n_round)
            ended = np.zeros(N_GAMES, bool)

# %%
figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
axes.plot(*zip(*curve, strict=True), marker="o")
axes.axhline(500, linestyle="--", linewidth=1, color="gray")
axes.set_xlabel("update")
axes.set_ylabel("points of an episode")
axes.grid(alpha=0.3)

# %% [markdown]
# ## How well does it play?
#
# Other episodes than those in the curve: a new seed.

# %%
points = play_once(act_well, seed=2000)
print(f"{points.mean():.0f} points, the worst of {N_GAMES} episodes {points.min():.0f}")
assert points.mean() > 300

# %% [markdown]
# To go on in another run, give `Deployer` a folder that stays, and begin the loop with `trainer.resume()`, which
# loads the newest checkpoint and returns its step.
#
# ## Next
#
# - `examples/reinforcement_learning` has PPO for any game with discrete actions, and DDPG and MADDPG for
#   continuous ones.
# - [Callbacks, trackers, rules](../guides/extend.md): what `fit` can do for loops that need not be your own.
