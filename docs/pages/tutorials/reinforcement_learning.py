# %% [markdown]
# # Balance a pole by reinforcement learning
#
# In reinforcement learning the model makes its own data: it plays, and learns to repeat what went well. So the loop is
# yours, and `trainer.update` takes one step in it. All else is as with `fit`.
#
# The game is gymnasium's CartPole: push a cart so that the pole on it does not fall. Each step without a fall gives
# one point, up to 500. The method is PPO ([arXiv:1707.06347](https://arxiv.org/abs/1707.06347)). If redeqx is new to
# you, read [the miniGPT](mini_gpt.md) first. This page takes about a minute, and needs `pip install -e ".[examples]"`.

# %%
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
# Thirty-two copies of the game run side by side. An observation is four numbers. Random actions do badly:

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
# The *actor* gives the probability of each action. The *critic* estimates how many points are still to come.
# `pred_fn` draws an action for each game, and returns it with its probability and the critic's estimate.


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


def pred_fn(model, seen, key):
    log_probs, values = jax.vmap(model)(seen)
    actions = jax.random.categorical(key, log_probs)
    chosen = jnp.take_along_axis(log_probs, actions[:, None], axis=1)[:, 0]
    return {"action": actions, "log_prob": chosen, "value": values, "best": jnp.argmax(log_probs, axis=1)}


# %% [markdown]
# ## The loss
#
# `advantage` is how much better a step went than the critic expected. The actor makes such actions more probable.
# PPO limits an update: once an action is a fifth more or less probable than when it was played, more gains nothing.
#
# The step after the end of an episode only resets the game, so it has no weight. `redeqx.Loss` holds a total and its
# weight; redeqx sums both over all devices, and divides once.


# %%
def loss_fn(model, batch, key):
    log_probs, values = jax.vmap(model)(batch["seen"])
    chosen = jnp.take_along_axis(log_probs, batch["action"][:, None], axis=1)[:, 0]
    ratio, advantage = jnp.exp(chosen - batch["log_prob"]), batch["advantage"]
    gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
    error = (values - batch["return"]) ** 2
    entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=1)  # randomness keeps the actor exploring
    total = jnp.sum((0.5 * error - gain - 0.01 * entropy) * batch["weight"])
    return redeqx.Loss(total, jnp.sum(batch["weight"]), {"entropy": jnp.sum(entropy * batch["weight"])})


# Examples are rows of a structured array, one for each played step.
numbers = [(name, np.float32) for name in ("log_prob", "advantage", "return", "weight")]
STEP = np.dtype([("seen", np.float32, (4,)), ("action", np.int32), *numbers])


def collate_fn(steps):
    rows = np.array(steps, STEP)
    return {name: rows[name] for name in STEP.names}


# %% [markdown]
# ## The trainer
#
# With a `workdir` the run is recorded. Such a loop begins with `trainer.resume()`, which loads the newest checkpoint
# and returns its step, and saves with `trainer.save_ckpt()`. A predictor draws the same random numbers at every call;
# here each call gets a new key.

# %%
N_ROUNDS, N_STEPS, N_EPOCHS, BATCH_SIZE = 30, 64, 4, 512
n_updates = N_ROUNDS * N_EPOCHS * N_GAMES * N_STEPS // BATCH_SIZE

deployer = redeqx.Deployer(jax_seed=0)
learning_rate = optax.linear_schedule(1e-3, 0.0, n_updates)
trainer = redeqx.Trainer(
    deployer,
    model=ActorCritic(deployer.next_key()),
    optimizer=optax.chain(optax.clip_by_global_norm(0.5), optax.adam(learning_rate)),
    collate_fn=collate_fn,
    loss_fn=loss_fn,
)
predictor = trainer.get_default_predictor(pred_fn, collate_fn=np.stack)


def ask(seen):
    rows = predictor.predict(seen, batch_size=N_GAMES, key=deployer.next_key())
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


# %% [markdown]
# ## Play
#
# Each round plays 64 steps in every game. The advantage of a step sums the critic's errors from that step on, later
# ones with less weight. After a fall no points are to come; after a time limit, the critic's estimate is used.

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
# Play a round, then pass over it four times in batches of 512 steps. `update` takes one step with the given examples
# and returns its metrics. Every fifth round, 32 complete episodes are played with the best actions.

# %%
rng = np.random.default_rng(0)
seen, _ = games.reset(seed=0)
ended = np.zeros(N_GAMES, bool)
curve = []
for n_round in range(1, N_ROUNDS + 1):
    rows, seen, ended = play(seen, ended)
    for _ in range(N_EPOCHS):
        for batch in rng.permutation(rows).reshape(-1, BATCH_SIZE):
            trainer.update(batch)
    if n_round % 5 == 0:
        points = play_once(lambda seen: ask(seen)["best"], seed=1000 + n_round).mean()
        curve.append((trainer.step, points))
        deployer.log_info(f"round {n_round}: {points:.0f} points")
        seen, _ = games.reset(seed=n_round)
        ended = np.zeros(N_GAMES, bool)

_, axes = plt.subplots(figsize=(7, 3), layout="constrained")
axes.plot(*zip(*curve, strict=True), marker="o")
axes.set(xlabel="update", ylabel="points of an episode")

assert points > 300

# %% [markdown]
# Next: `examples/reinforcement_learning` has PPO for any game with discrete actions, and DDPG and MADDPG for continuous
# ones. [Callbacks](../guides/extend.md) extend `fit`, if you need no loop of your own.
