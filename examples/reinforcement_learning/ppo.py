"""Proximal policy optimization (Schulman et al. 2017): learns discrete actions from the latest experience."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from gymnasium.spaces.utils import flatdim
from gymnasium.vector import VectorEnv

import redeqx
from examples._cli import Flags
from examples._records import curve
from examples.reinforcement_learning.environments import make_envs, play_episodes, random_returns
from examples.reinforcement_learning.training import TEST_SEED, Best, collate_fn, learn, report


@dataclass(frozen=True)
class PPO(Flags):
    """Proximal policy optimization, for discrete actions. The default environment is CartPole."""

    env: str = "CartPole-v1"  # A gymnasium environment with discrete actions.
    pretrained: Path | None = None  # A checkpoint of an earlier run to start from.
    workdir: Path = Path("workdir/reinforcement_learning/ppo")  # For metrics, checkpoints and the picture.
    n_steps: int = 100_000  # Environment steps, in all environments together.
    n_envs: int = 16  # Environments that run in parallel.
    rollout: int = 128  # Steps of each environment between two trainings.
    n_epochs: int = 10  # Passes over each rollout.
    batch_size: int = 256  # Steps of one update, on all devices together.
    learning_rate: float = 1e-3  # The initial value, which decays to 0.
    width: int = 64  # Width of the hidden layers.
    discount: float = 0.99
    gae_lambda: float = 0.95  # 0 uses only the critic's values, 1 only the returns.
    clip: float = 0.2  # Relative change of an action's probability beyond which the objective is constant.
    entropy_weight: float = 0.01
    eval_every_n_steps: int = 10_000  # Environment steps between two evaluations.
    eval_episodes: int = 64  # Episodes that select the best checkpoint. The same number of others test it.


class ActorCritic(eqx.Module):
    """A policy, and the value that it expects."""

    actor: eqx.nn.MLP
    critic: eqx.nn.MLP

    def __init__(self, n_seen: int, n_actions: int, width: int, *, key: jax.Array):
        keys = jax.random.split(key)
        self.actor = eqx.nn.MLP(n_seen, n_actions, width, 2, jnp.tanh, key=keys[0])
        self.critic = eqx.nn.MLP(n_seen, "scalar", width, 2, jnp.tanh, key=keys[1])

    def __call__(self, observations: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns log probabilities `[batch, actions]` and values `[batch]`."""
        return jax.nn.log_softmax(jax.vmap(self.actor)(observations)), jax.vmap(self.critic)(observations)


def policy_gain(log_ratios: jax.Array, advantages: jax.Array, clip: float) -> jax.Array:
    """Returns the objective for changing probabilities by these ratios. Changes beyond `clip` add nothing to it."""
    ratios = jnp.exp(log_ratios)
    return jnp.minimum(ratios * advantages, jnp.clip(ratios, 1 - clip, 1 + clip) * advantages)


def loss_fn(
    model: ActorCritic, batch: dict[str, jax.Array], key: jax.Array, clip: float, entropy_weight: float
) -> redeqx.Loss:
    """Returns the loss of PPO. Steps that only reset an environment have no weight."""
    log_probs, values = model(batch["observation"])
    chosen = jnp.take_along_axis(log_probs, batch["action"][:, None], axis=1)[:, 0]
    gains = policy_gain(chosen - batch["log_prob"], batch["advantage"], clip)
    entropies = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=1)
    value_losses = (values - batch["return"]) ** 2

    def total(rows: jax.Array) -> jax.Array:
        return jnp.sum(rows * batch["weight"])

    metrics = {"value_loss": total(value_losses), "entropy": total(entropies)}
    return redeqx.Loss(total(0.5 * value_losses - gains - entropy_weight * entropies), jnp.sum(batch["weight"]), metrics)


def pred_fn(model: ActorCritic, observations: jax.Array, key: jax.Array) -> tuple[jax.Array, ...]:
    """Returns a sampled action, its log probability, the value, and the most probable action of each row."""
    log_probs, values = model(observations)
    actions = jax.random.categorical(key, log_probs)
    chosen = jnp.take_along_axis(log_probs, actions[:, None], axis=1)[:, 0]
    return actions, chosen, values, jnp.argmax(log_probs, axis=1)


def estimate_advantages(
    rewards: np.ndarray, values: np.ndarray, terminated: np.ndarray, ended: np.ndarray, discount: float, gae_lambda: float
) -> np.ndarray:
    """Computes generalized advantages (Schulman et al. 2016), all `[time, envs]`; `values` has one time step more.

    A terminated episode has no remaining value. A truncated one has the value of its last observation.
    """
    advantages, later = np.zeros_like(rewards), np.zeros_like(rewards[0])
    for t in reversed(range(len(rewards))):
        surprise = rewards[t] + discount * values[t + 1] * ~terminated[t] - values[t]
        advantages[t] = later = surprise + discount * gae_lambda * ~ended[t] * later
    return advantages


def play(
    envs: VectorEnv, act: Callable[[np.ndarray], list[np.ndarray]], observations: np.ndarray, ended: np.ndarray, args: PPO
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Continues from these observations. Returns the steps, `[time, envs]`, and the new observations."""
    numbers = [(name, np.float32) for name in ("log_prob", "advantage", "return", "weight")]
    seen = ("observation", np.float32, observations.shape[1:])
    shape = (args.rollout, args.n_envs)
    rows = np.zeros(shape, [seen, ("action", np.int32), *numbers])
    rewards, values = np.zeros(shape, np.float32), np.zeros((args.rollout + 1, args.n_envs), np.float32)
    terminations, ends = np.zeros(shape, bool), np.zeros(shape, bool)
    for t in range(args.rollout):
        actions, log_probs, values[t], _ = act(observations)
        rows["observation"][t], rows["action"][t], rows["log_prob"][t] = observations, actions, log_probs
        rows["weight"][t] = ~ended  # the step after an episode's end only resets
        observations, rewards[t], terminations[t], truncations, _ = envs.step(actions)
        ends[t] = ended = terminations[t] | truncations
    values[-1] = act(observations)[2]
    advantages = estimate_advantages(rewards, values, terminations, ends, args.discount, args.gae_lambda)
    rows["return"] = advantages + values[:-1]
    real = advantages[rows["weight"] > 0]
    rows["advantage"] = (advantages - real.mean()) / (real.std() + 1e-8)
    return rows, observations, ended


def main(args: PPO) -> dict[str, float]:
    """Trains and reports. Returns the mean test return."""
    args.check_positive("n_envs", "rollout", "n_epochs", "eval_episodes", "eval_every_n_steps", "width")
    deployer = redeqx.Deployer(args.seed, args.n_model_shards, args.n_fsdp_shards, workdir=args.workdir)
    deployer.begin_records(-1)  # drops the records of an earlier run
    envs, eval_envs = (make_envs(args.env, "ppo", n) for n in (args.n_envs, args.eval_episodes))
    n_seen, n_actions = flatdim(envs.single_observation_space), flatdim(envs.single_action_space)
    key = deployer.next_key()
    model = deployer.init(lambda: ActorCritic(n_seen, n_actions, args.width, key=key))

    n_a_round = args.rollout * args.n_envs
    n_rounds, n_updates = -(-args.n_steps // n_a_round), -(-n_a_round * args.n_epochs // args.batch_size)
    lr = optax.linear_schedule(args.learning_rate, 0.0, max(n_rounds * n_updates, 1))
    trainer = redeqx.Trainer(
        deployer, model=model, optimizer=optax.chain(optax.clip_by_global_norm(0.5), optax.adam(lr)), lr_schedule_fn=lr,
        collate_fn=collate_fn, loss_fn=partial(loss_fn, clip=args.clip, entropy_weight=args.entropy_weight),
    )  # fmt: skip
    if args.pretrained is not None:
        trainer.load_ckpt(args.pretrained, load_opt_states=False)
    predictor = trainer.get_default_predictor(pred_fn, collate_fn=np.stack)

    def act(observations: np.ndarray) -> list[np.ndarray]:
        said = predictor.predict(observations, batch_size=len(observations), key=deployer.next_key())
        return [np.array(column) for column in zip(*said, strict=True)]

    def act_greedily(observations: np.ndarray) -> np.ndarray:
        return act(observations)[3]

    rng = np.random.default_rng(args.seed)
    (observations, _), ended = envs.reset(seed=args.seed), np.zeros(args.n_envs, bool)

    def play_and_train(n_played: int) -> dict[str, float]:
        nonlocal observations, ended
        played, observations, ended = play(envs, act, observations, ended, args)
        orders = [rng.permutation(n_a_round) for _ in range(args.n_epochs)]
        metrics = trainer.train(played.reshape(-1)[np.concatenate(orders)], batch_size=args.batch_size)
        return {"return": float(np.mean(envs.return_queue)), **metrics} if envs.return_queue else metrics

    best = Best(trainer, partial(play_episodes, eval_envs, act_greedily))
    learn(best, "ppo", n_rounds, n_a_round, args.eval_every_n_steps, play_and_train)
    returns = {"ppo": best.test(), "random actions": random_returns(eval_envs, TEST_SEED)}
    return report(best, args.env, returns, {"validation": curve(args.workdir, "eval_return")})
