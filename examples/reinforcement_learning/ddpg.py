"""Deep deterministic policy gradient (Lillicrap et al. 2016): an actor-critic method with a replay buffer."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from gymnasium.spaces.utils import flatdim
from jaxtyping import PyTree

import redeqx
from examples._cli import Flags
from examples._records import curve
from examples.reinforcement_learning.environments import make_envs, play_episodes, random_returns
from examples.reinforcement_learning.training import TEST_SEED, Best, Replay, collate_fn, learn, report


@dataclass(frozen=True)
class DDPG(Flags):
    """Deep deterministic policy gradient, for continuous actions. The default environment is Pendulum."""

    env: str = "Pendulum-v1"  # A gymnasium environment with bounded continuous actions.
    pretrained: Path | None = None  # A checkpoint of an earlier run to start from.
    workdir: Path = Path("workdir/reinforcement_learning/ddpg")  # For metrics, checkpoints and the picture.
    n_steps: int = 20_000  # Environment steps, in all environments together.
    n_envs: int = 8  # Environments that run in parallel.
    rollout: int = 16  # Steps of each environment between two trainings.
    n_updates: int = 64  # Updates in one training.
    n_random_steps: int = 1_000  # Environment steps with random actions at the start.
    replay: int = 100_000  # Capacity of the replay buffer, in transitions.
    batch_size: int = 128  # Transitions of one update, on all devices together.
    learning_rate: float = 1e-3
    width: int = 128  # Width of the hidden layers.
    discount: float = 0.99
    target_rate: float = 0.005  # Fraction by which each update moves the target networks to the trained ones.
    noise: float = 0.1  # Standard deviation of the noise that is added to actions, which are in [-1, 1].
    eval_every_n_steps: int = 2_000  # Environment steps between two evaluations.
    eval_episodes: int = 100  # Episodes that select the best checkpoint. The same number of others test it.


class ActorCritic(eqx.Module):
    """A policy with actions in [-1, 1], and the value of any action."""

    actor: eqx.nn.MLP
    critic: eqx.nn.MLP

    def __init__(self, n_seen: int, n_actions: int, width: int, *, key: jax.Array):
        keys = jax.random.split(key)
        self.actor = eqx.nn.MLP(n_seen, n_actions, width, 2, final_activation=jnp.tanh, key=keys[0])
        self.critic = eqx.nn.MLP(n_seen + n_actions, "scalar", width, 2, key=keys[1])

    def act(self, observations: jax.Array) -> jax.Array:
        return jax.vmap(self.actor)(observations)

    def value(self, observations: jax.Array, actions: jax.Array) -> jax.Array:
        return jax.vmap(self.critic)(jnp.concatenate([observations, actions], axis=1))


def loss_fn(
    model: ActorCritic, targets: PyTree, batch: dict[str, jax.Array], key: jax.Array, discount: float, target_rate: float
) -> tuple[redeqx.Loss, PyTree]:
    """Returns the critic's loss plus the actor's, and the updated target networks, which are the trainer's `model_state`."""
    seen, arrays = batch["observation"], eqx.filter(model, eqx.is_array)
    target = eqx.combine(targets, model)  # non-array fields, such as an activation, are equal in both
    later = target.value(batch["next"], target.act(batch["next"]))
    goals = batch["reward"] + discount * (1 - batch["terminated"]) * later
    surprises = model.value(seen, batch["action"]) - jax.lax.stop_gradient(goals)
    # The actor maximizes the critic's value. The critic's weights get no gradient from this term.
    judge = eqx.combine(jax.lax.stop_gradient(arrays), model)
    values = judge.value(seen, model.act(seen))
    losses = jnp.sum(surprises**2) - jnp.sum(values)
    metrics = {"critic_loss": jnp.sum(surprises**2), "value": jnp.sum(values)}
    return redeqx.Loss(losses, len(seen), metrics), optax.incremental_update(arrays, targets, target_rate)


def pred_fn(model: ActorCritic, targets: PyTree, observations: jax.Array, key: jax.Array) -> jax.Array:
    return model.act(observations)


def main(args: DDPG) -> dict[str, float]:
    """Trains and reports. Returns the mean test return."""
    args.check_positive("n_envs", "rollout", "n_updates", "replay", "eval_episodes", "eval_every_n_steps", "width")
    deployer = redeqx.Deployer(args.seed, args.n_model_shards, args.n_fsdp_shards, workdir=args.workdir)
    deployer.begin_records(-1)  # drops the records of an earlier run
    envs, eval_envs = (make_envs(args.env, "ddpg", n) for n in (args.n_envs, args.eval_episodes))
    n_seen, n_actions = flatdim(envs.single_observation_space), flatdim(envs.single_action_space)
    key = deployer.next_key()
    model = deployer.init(lambda: ActorCritic(n_seen, n_actions, args.width, key=key))
    trainer = redeqx.Trainer(
        deployer, model=model, model_state=eqx.filter(model, eqx.is_array), optimizer=optax.adam(args.learning_rate),
        collate_fn=collate_fn, loss_fn=partial(loss_fn, discount=args.discount, target_rate=args.target_rate),
    )  # fmt: skip
    if args.pretrained is not None:
        trainer.load_ckpt(args.pretrained, load_opt_states=False)
    predictor = trainer.get_default_predictor(pred_fn, collate_fn=np.stack)

    def act(observations: np.ndarray) -> np.ndarray:
        return np.stack(predictor.predict(observations, batch_size=len(observations)))

    rng = np.random.default_rng(args.seed)
    sizes = {"observation": n_seen, "action": n_actions, "next": n_seen}
    fields = [(name, np.float32, (size,)) for name, size in sizes.items()]
    dtype = np.dtype([*fields, ("reward", np.float32), ("terminated", np.float32)])
    replay = Replay(args.replay, dtype)
    envs.action_space.seed(args.seed)
    (observations, _), ended = envs.reset(seed=args.seed), np.zeros(args.n_envs, bool)

    def play_and_train(n_played: int) -> dict[str, float]:
        nonlocal observations, ended
        for _ in range(args.rollout):
            if n_played <= args.n_random_steps:
                actions = envs.action_space.sample()
            else:
                actions = act(observations)
                actions = np.clip(actions + rng.normal(0, args.noise, actions.shape), -1, 1).astype(np.float32)
            following, rewards, terminated, truncated, _ = envs.step(actions)
            rows = np.zeros(args.n_envs, dtype)
            rows["observation"], rows["action"], rows["reward"] = observations, actions, rewards
            rows["next"], rows["terminated"] = following, terminated
            replay.add(rows[~ended])  # the step after an episode's end only resets
            observations, ended = following, terminated | truncated
        metrics = {"return": float(np.mean(envs.return_queue))} if envs.return_queue else {}
        if n_played < args.n_random_steps:
            return metrics
        sample = replay.sample(args.n_updates * args.batch_size, rng)
        return {**metrics, **trainer.train(sample, batch_size=args.batch_size)}

    best = Best(trainer, partial(play_episodes, eval_envs, act))
    n_a_round = args.rollout * args.n_envs
    learn(best, "ddpg", -(-args.n_steps // n_a_round), n_a_round, args.eval_every_n_steps, play_and_train)
    returns = {"ddpg": best.test(), "random actions": random_returns(eval_envs, TEST_SEED)}
    return report(best, args.env, returns, {"validation": curve(args.workdir, "eval_return")})
