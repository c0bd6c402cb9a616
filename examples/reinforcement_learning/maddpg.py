"""Multi-agent DDPG (Lowe et al. 2017): each agent has its own policy, and its critic sees all agents.

An independent critic treats the other agents as part of the environment, with the behavior in the replay buffer: exploring,
and weaker than the current policies. A critic that receives their actions evaluates an action given the current ones. So its
advantage grows with the noise: with `--noise 0.3` both methods perform alike. A return is the agents' mean sum of rewards.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from einops import rearrange
from jaxtyping import PyTree

import redeqx
from examples._cli import Flags
from examples._records import curve
from examples.reinforcement_learning.environments import Games, returns_of
from examples.reinforcement_learning.training import TEST_SEED, Best, Replay, collate_fn, learn, report


@dataclass(frozen=True)
class MADDPG(Flags):
    """Multi-agent DDPG and independent DDPG. By default, three agents must cover three landmarks."""

    env: str = "simple_spread_v3"  # A module of mpe2 whose agents have equal observation and action spaces.
    pretrained: Path | None = None  # A checkpoint of an earlier run to start from.
    workdir: Path = Path("workdir/reinforcement_learning/maddpg")  # For metrics, checkpoints and the picture.
    independent: bool = True  # Whether to train independent DDPG too, whose critics see only their own agent.
    n_episodes: int = 4_000  # Episodes of each of the two methods.
    n_envs: int = 16  # Episodes that run in parallel.
    n_updates: int = 40  # Updates after each set of parallel episodes.
    replay: int = 250_000  # Capacity of the replay buffer, in transitions.
    batch_size: int = 256  # Transitions of one update, on all devices together.
    learning_rate: float = 1e-3
    width: int = 64  # Width of the hidden layers.
    discount: float = 0.9
    target_rate: float = 0.01  # Fraction by which each update moves the target networks to the trained ones.
    noise: float = 1.0  # Standard deviation of the noise that is added to actions, which are in [-1, 1].
    eval_every_n_episodes: int = 400
    eval_episodes: int = 400  # Episodes that select the best checkpoint. The same number of others test it.


class Team(eqx.Module):
    """A policy with actions in [-1, 1] and a critic for each agent, stacked."""

    actors: eqx.nn.MLP
    critics: eqx.nn.MLP
    independent: bool = eqx.field(static=True)

    def __init__(self, n_agents: int, n_seen: int, n_actions: int, width: int, independent: bool, *, key: jax.Array):
        actor_keys, critic_keys = jax.random.split(key, (2, n_agents))
        actor = partial(eqx.nn.MLP, n_seen, n_actions, width, 2, final_activation=jnp.tanh)
        critic = partial(eqx.nn.MLP, n_agents * (n_seen + n_actions), "scalar", width, 2)
        self.actors = eqx.filter_vmap(lambda key: actor(key=key))(actor_keys)
        self.critics = eqx.filter_vmap(lambda key: critic(key=key))(critic_keys)
        self.independent = independent

    def act(self, observations: jax.Array) -> jax.Array:
        """Maps observations `[batch, agent, seen]` to actions `[batch, agent, action]`."""
        return each(self.actors, observations)

    def value(self, observations: jax.Array, actions: jax.Array) -> jax.Array:
        """Maps `[batch, agent, seen]` and inputs `[batch, critic, agent, action]` of each critic to `[batch, critic]`."""
        observations = jnp.broadcast_to(observations[:, None], (*actions.shape[:3], observations.shape[2]))
        known = jnp.concatenate([observations, actions], axis=3)
        if self.independent:  # the same critic, with zeros for the others' observations and actions
            known = known * jnp.eye(actions.shape[1])[:, :, None]
        return each(self.critics, rearrange(known, "batch critic agent x -> batch critic (agent x)"))


def each(mlps: eqx.nn.MLP, inputs: jax.Array) -> jax.Array:
    """Applies stacked MLPs, each to its rows of `[batch, mlp, x]`."""
    apply = eqx.filter_vmap(lambda mlp, x: jax.vmap(mlp)(x), in_axes=(eqx.if_array(0), 1), out_axes=1)
    return apply(mlps, inputs)


def loss_fn(
    model: Team, targets: PyTree, batch: dict[str, jax.Array], key: jax.Array, discount: float, target_rate: float
) -> tuple[redeqx.Loss, PyTree]:
    """Returns the critics' losses plus the actors', and the updated target networks, the trainer's `model_state`."""
    seen, actions, arrays = batch["observation"], batch["action"], eqx.filter(model, eqx.is_array)
    n_agents = seen.shape[1]
    to_all = partial(jnp.repeat, repeats=n_agents, axis=1)  # every critic receives the same actions
    target = eqx.combine(targets, model)  # non-array fields, such as an activation, are equal in both
    later = target.value(batch["next"], to_all(target.act(batch["next"])[:, None]))
    # Episodes are truncated, never terminated, so there is always a next value.
    surprises = model.value(seen, to_all(actions[:, None])) - jax.lax.stop_gradient(batch["reward"] + discount * later)
    # Each actor maximizes its own critic's value, which gives the critic's weights no gradient. The others' actions are
    # those of the replay buffer.
    judge = eqx.combine(jax.lax.stop_gradient(arrays), model)
    own = jnp.eye(n_agents, dtype=bool)[:, :, None]
    values = judge.value(seen, jnp.where(own, model.act(seen)[:, None], actions[:, None]))
    losses = jnp.sum(surprises**2) - jnp.sum(values)
    metrics = {"critic_loss": jnp.sum(surprises**2) / n_agents, "value": jnp.sum(values) / n_agents}
    return redeqx.Loss(losses, len(seen), metrics), optax.incremental_update(arrays, targets, target_rate)


def pred_fn(model: Team, targets: PyTree, observations: jax.Array, key: jax.Array) -> jax.Array:
    return model.act(observations)


def train(args: MADDPG, games: Games, eval_games: Games, independent: bool) -> Best:
    """Trains one of the two methods. Returns its best checkpoint."""
    workdir = args.workdir / "independent" if independent else args.workdir
    deployer = redeqx.Deployer(args.seed, args.n_model_shards, args.n_fsdp_shards, workdir=workdir)
    deployer.begin_records(-1)  # drops the records of an earlier run
    key, sizes = deployer.next_key(), (len(games.agents), games.n_seen, games.n_actions, args.width)
    model = deployer.init(lambda: Team(*sizes, independent, key=key))
    trainer = redeqx.Trainer(
        deployer, model=model, model_state=eqx.filter(model, eqx.is_array), optimizer=optax.adam(args.learning_rate),
        collate_fn=collate_fn, loss_fn=partial(loss_fn, discount=args.discount, target_rate=args.target_rate),
    )  # fmt: skip
    if args.pretrained is not None and not independent:
        trainer.load_ckpt(args.pretrained, load_opt_states=False)
    predictor, rng = trainer.get_default_predictor(pred_fn, collate_fn=np.stack), np.random.default_rng(args.seed)

    def act(observations: np.ndarray) -> np.ndarray:
        return np.stack(predictor.predict(observations, batch_size=len(observations)))

    def explore(observations: np.ndarray) -> np.ndarray:
        actions = act(observations)
        return np.clip(actions + rng.normal(0, args.noise, actions.shape), -1, 1)

    def play_and_train(n_played: int) -> dict[str, float]:
        played = games.play(explore, seed=n_played)
        replay.add(played.reshape(-1))
        metrics = trainer.train(replay.sample(args.n_updates * args.batch_size, rng), batch_size=args.batch_size)
        return {"return": float(returns_of(played).mean()), **metrics}

    best, replay = Best(trainer, lambda seed: returns_of(eval_games.play(act, seed))), Replay(args.replay, games.dtype)
    n_rounds = -(-args.n_episodes // args.n_envs)
    learn(best, workdir.name, n_rounds, args.n_envs, args.eval_every_n_episodes, play_and_train)
    return best


def main(args: MADDPG) -> dict[str, float]:
    """Trains and reports. Returns the mean test returns."""
    args.check_positive("n_envs", "eval_episodes", "eval_every_n_episodes", "n_updates", "width")
    games, eval_games = Games(args.env, args.n_envs), Games(args.env, args.eval_episodes)
    rng, shape = np.random.default_rng(args.seed), (args.eval_episodes, len(games.agents), games.n_actions)
    returns = {"random actions": returns_of(eval_games.play(lambda _: rng.uniform(-1, 1, shape), TEST_SEED))}
    curves = {}
    if args.independent:
        returns["independent DDPG"] = train(args, games, eval_games, independent=True).test()
        curves["independent DDPG, validation"] = curve(args.workdir / "independent", "eval_return")
    best = train(args, games, eval_games, independent=False)
    curves["MADDPG, validation"] = curve(args.workdir, "eval_return")
    return report(best, args.env, {"MADDPG": best.test(), **returns}, curves)
