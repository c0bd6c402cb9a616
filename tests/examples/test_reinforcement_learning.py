"""Three algorithms: they learn, their formulas match naive implementations, and unsuitable environments are refused."""

import json
import warnings

import equinox as eqx
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import redeqx
from examples.reinforcement_learning import ddpg, maddpg, ppo
from examples.reinforcement_learning.ddpg import DDPG
from examples.reinforcement_learning.environments import Games, make_envs, play_episodes, returns_of
from examples.reinforcement_learning.maddpg import MADDPG, Team
from examples.reinforcement_learning.ppo import PPO
from examples.reinforcement_learning.training import Replay
from redeqx.dry_run import DryRunDone
from tests.examples._run import refusal, run_example

PNG = b"\x89PNG"
SMALL = ("--width", 32, "--n-envs", 8, "--eval-episodes", 8)


@pytest.fixture(autouse=True)
def ignore_gymnasium_version_warnings():
    """Gymnasium warns about each outdated environment, and one is used below."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*out of date")
        yield


# --- whole runs -------------------------------------------------------------------------------------------------------


def assert_complete(workdir, run):
    assert (workdir / "returns.png").read_bytes().startswith(PNG)
    assert "test_return" in run.metrics[-1] and "test_random_return" in run.metrics[-1]
    index = json.loads((workdir / "ckpts/index.json").read_text())
    record = json.loads((workdir / "ckpts" / index["argmax_return"] / "trainer.json").read_text())
    returns = run.series("eval_return")
    assert len(returns) >= 3
    assert record["metrics"]["return"] == max(returns)


SMALL_RUN = {"width": 16, "n_envs": 4, "n_updates": 2, "batch_size": 16, "eval_episodes": 4}


@pytest.mark.sweep
def test_target_networks_reach_the_dry_run(tmp_path):
    """Their state is the model's own arrays, by `eqx.filter(model, eqx.is_array)`."""
    with redeqx.described("cpu:8"), pytest.raises(DryRunDone) as done:
        maddpg.main(MADDPG(**SMALL_RUN, workdir=tmp_path / "run"))
    run = done.value.run
    assert run.held["model state"] == run.held["parameters"] > 0
    assert run.fits and not (tmp_path / "run").exists()


@pytest.mark.sweep
def test_ppo_learns_cartpole_and_starts_from_a_checkpoint(tmp_path):
    flags = ("--n-steps", 4000, "--rollout", 32, "--batch-size", 64, "--n-epochs", 4, "--eval-every-n-steps", 1000)
    run = run_example("reinforcement_learning ppo", *SMALL, *flags, workdir=tmp_path)
    assert_complete(tmp_path, run)
    scores = run.metrics[-1]
    assert scores["test_return"] > 2 * scores["test_random_return"]
    # One compilation and occasional progress lines: passes print nothing.
    assert run.output.count("compiling train step") == 1
    assert run.output.count("ppo  step") < 20

    best = tmp_path / "ckpts" / json.loads((tmp_path / "ckpts/index.json").read_text())["argmax_return"]
    again = PPO(pretrained=best, n_steps=0, width=32, eval_episodes=8, workdir=tmp_path / "again")
    assert ppo.main(again)["test_return"] > 2 * scores["test_random_return"]
    other = PPO("Acrobot-v1", pretrained=best, width=32, eval_episodes=2, workdir=tmp_path / "other")
    with pytest.raises(ValueError, match=rf"(?s)`{best}.*actor\.layers"):
        ppo.main(other)


@pytest.mark.sweep
def test_ddpg_learns_from_replay(tmp_path):
    flags = ("--n-steps", 1200, "--n-random-steps", 400, "--batch-size", 32, "--n-updates", 32)
    run = run_example("reinforcement_learning ddpg", *SMALL, *flags, "--eval-every-n-steps", 600, workdir=tmp_path)
    assert_complete(tmp_path, run)
    losses = run.series("critic_loss")
    assert np.mean(losses[-32:]) < 0.3 * np.mean(losses[:8])


@pytest.mark.sweep
def test_maddpg_learns_and_trains_independent_agents(tmp_path):
    flags = ("--n-episodes", 32, "--batch-size", 64, "--n-updates", 16)
    run = run_example("reinforcement_learning maddpg", *SMALL, *flags, "--eval-every-n-episodes", 16, workdir=tmp_path)
    assert_complete(tmp_path, run)
    assert "test_independent_return" in run.metrics[-1]
    losses = run.series("critic_loss")
    assert np.mean(losses[-8:]) < 0.7 * np.mean(losses[:4])
    assert (tmp_path / "independent/metrics.jsonl").read_text().count("critic_loss") == len(losses)


def test_a_misspelt_algorithm_suggests_the_nearest():
    run = refusal("reinforcement_learning", "pop")
    assert run.status == 2 and "ppo" in run.output


# --- refused environments ---------------------------------------------------------------------------------------------

REFUSED = [
    ("ppo", "Pendulum-v1", r"`--env Pendulum-v1`: expected Discrete actions.*`ppo`, got Box\(-2\.0.*Use `ddpg`"),
    ("ddpg", "CartPole-v1", r"`--env CartPole-v1`: expected actions in a bounded Box.*`ddpg`, got Discrete\(2\).*Use `ppo`"),
    ("ppo", "Blackjack-v1", r"`--env Blackjack-v1`: expected observations in a Box of one dim, got Tuple"),
    ("ddpg", "FrozenLake-v1", r"`--env FrozenLake-v1`: expected observations in a Box of one dim, got Discrete\(16\)"),
    ("ppo", "CartPol-v1", r"`--env CartPol-v1`: expected an environment of gymnasium, got none: .*Did you mean: `CartPole`"),
    ("ppo", "nowhere:CartPole-v1", r"`--env nowhere:CartPole-v1`: expected an environment.*No module named 'nowhere'"),
]


@pytest.mark.parametrize(("algorithm", "name", "message"), REFUSED)
def test_unsuitable_environment_is_refused(tmp_path, algorithm, name, message):
    with pytest.raises(ValueError, match=message):
        if algorithm == "ppo":
            ppo.main(PPO(name, workdir=tmp_path))
        else:
            ddpg.main(DDPG(name, workdir=tmp_path))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("simple_spred_v3", r"`--env simple_spred_v3`: expected a game of mpe2, got none: .*simple_spread_v3"),
        ("simple_speaker_listener_v4", r"same shapes, got speaker_0 \(3,\) and \(3,\), listener_0 \(11,\) and \(5,\)"),
    ],
)
def test_unsuitable_game_is_refused(name, message):
    with pytest.raises(ValueError, match=message):
        maddpg.main(MADDPG(name))


def test_sizes_below_one_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"`--eval-episodes`: expected at least 1, got 0"):
        ppo.main(PPO(eval_episodes=0, workdir=tmp_path))
    with pytest.raises(ValueError, match=r"`--n-updates`: expected at least 1, got -1"):
        ddpg.main(DDPG(n_updates=-1, workdir=tmp_path))
    with pytest.raises(ValueError, match=r"`--n-envs`: expected at least 1, got 0"):
        maddpg.main(MADDPG(n_envs=0, workdir=tmp_path))


# --- environments -----------------------------------------------------------------------------------------------------


def test_episode_returns_match_single_environments():
    act = lambda observations: (observations[:, 2] > 0).astype(int)  # noqa: E731
    returns = play_episodes(make_envs("CartPole-v1", "ppo", 5), act, seed=3)
    for i, found in enumerate(returns):
        env = gymnasium.make("CartPole-v1")
        (seen, _), total, over = env.reset(seed=3 + i), 0.0, False
        while not over:
            seen, reward, terminated, truncated, _ = env.step(int(seen[2] > 0))
            total, over = total + float(reward), terminated or truncated
        assert found == total
    assert len(set(returns)) > 1


def test_continuous_actions_range_from_minus_one_to_one():
    envs, alone = make_envs("Pendulum-v1", "ddpg", 1), gymnasium.make("Pendulum-v1")
    envs.reset(seed=0), alone.reset(seed=0)
    seen, *_ = envs.step(np.full((1, 1), 0.5, np.float32))
    np.testing.assert_allclose(seen[0], alone.step(np.array([1.0], np.float32))[0], rtol=1e-5)


def test_reset_steps_have_no_weight():
    envs, args = make_envs("CartPole-v1", "ppo", 3), PPO(rollout=80, n_envs=3)
    (observations, _), ended = envs.reset(seed=0), np.zeros(3, bool)

    def act(seen):
        return [np.ones(len(seen), np.int32), np.zeros(len(seen)), seen[:, 0], np.ones(len(seen), np.int32)]

    rows, _, _ = ppo.play(envs, act, observations, ended, args)
    poles = np.abs(rows["observation"][..., 2])
    fallen = poles > 0.2095  # an episode ends beyond this angle, and the next step resets the game
    assert fallen.sum() > 10
    np.testing.assert_array_equal(rows["weight"], ~fallen)
    real = rows["advantage"][rows["weight"] > 0]
    np.testing.assert_allclose([real.mean(), real.std()], [0, 1], atol=1e-4)


def test_parallel_games_match_single_games():
    rng = np.random.default_rng(0)
    chosen = rng.uniform(-1, 1, (25, 2, 3, 5)).astype(np.float32)
    steps = iter(chosen)
    games = Games("simple_spread_v3", 2)
    played = games.play(lambda _: next(steps), seed=7)
    assert played.shape == (25, 2)
    np.testing.assert_array_equal(played["next"][:-1], played["observation"][1:])
    game = Games("simple_spread_v3", 1).games[0]
    game.reset(seed=8)  # the second of the two
    rewards = [game.step(dict(zip(game.agents, (a[1] + 1) / 2, strict=True)))[1] for a in chosen]
    total = sum(sum(reward.values()) for reward in rewards) / 3
    np.testing.assert_allclose(returns_of(played)[1], total, rtol=1e-5)


# --- formulas ---------------------------------------------------------------------------------------------------------


def test_advantages_match_the_definition():
    rng, (n_times, n_envs), discount, gae_lambda = np.random.default_rng(0), (12, 4), 0.9, 0.8
    rewards, values = rng.normal(size=(n_times, n_envs)), rng.normal(size=(n_times + 1, n_envs))
    terminated = rng.random((n_times, n_envs)) < 0.15
    ended = terminated | (rng.random((n_times, n_envs)) < 0.15)
    found = ppo.estimate_advantages(rewards, values, terminated, ended, discount, gae_lambda)
    for env in range(n_envs):
        for t in range(n_times):
            wanted, weight = 0.0, 1.0
            for later in range(t, n_times):
                to_come = 0.0 if terminated[later, env] else values[later + 1, env]
                wanted += weight * (rewards[later, env] + discount * to_come - values[later, env])
                weight *= discount * gae_lambda
                if ended[later, env]:
                    break
            np.testing.assert_allclose(found[t, env], wanted, rtol=1e-10)


@pytest.mark.parametrize(
    ("ratio", "advantage", "gain", "slope"),
    [(1.1, 2, 2.2, 2), (1.5, 2, 2.4, 0), (0.5, 2, 1.0, 2), (1.5, -2, -3.0, -2), (0.5, -2, -1.6, 0)],
)
def test_policy_gain_is_clipped(ratio, advantage, gain, slope):
    def at(ratio):
        return ppo.policy_gain(jnp.log(ratio), jnp.array(float(advantage)), 0.2)

    np.testing.assert_allclose(at(ratio), gain, rtol=1e-6)
    np.testing.assert_allclose(jax.grad(at)(ratio), slope, rtol=1e-5)


def test_replay_keeps_the_newest():
    replay, rng = Replay(5, np.dtype([("x", np.int32)])), np.random.default_rng(0)
    for start, stop, held in [(1, 4, {1, 2, 3}), (4, 8, {3, 4, 5, 6, 7}), (8, 20, {15, 16, 17, 18, 19})]:
        replay.add(np.array([(x,) for x in range(start, stop)], replay.rows.dtype))
        assert len(replay) == len(held)
        assert set(replay.sample(500, rng)["x"].tolist()) == held  # no unfilled rows


ROWS = 3


def transitions(rng, *middle):
    sizes = {"observation": 4, "action": 2, "next": 4}
    batch = {name: rng.normal(size=(ROWS, *middle, size)) for name, size in sizes.items()}
    batch |= {"reward": rng.normal(size=(ROWS, *middle)), "terminated": np.array([0, 1, 0])}
    return {name: jnp.asarray(x, jnp.float32) for name, x in batch.items()}


def gradients_and_targets(loss_fn, model, targets, batch):
    def mean(model):
        loss, state = loss_fn(model, targets, batch, None, discount=0.9, target_rate=0.1)
        return loss.total / loss.weight, state

    (_, state), grads = eqx.filter_jit(eqx.filter_value_and_grad(mean, has_aux=True))(model)
    return grads, state


def gradient(loss):
    return eqx.filter_jit(eqx.filter_grad(loss))


def assert_same(found, wanted):
    found, wanted = (jax.tree.leaves(eqx.filter(tree, eqx.is_array)) for tree in (found, wanted))
    assert len(found) == len(wanted) > 0
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
        assert jnp.any(b != 0)


def assert_targets_moved_by_a_tenth(state, targets, model):
    arrays = eqx.filter(model, eqx.is_array)
    assert_same(state, jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, targets, arrays))


@pytest.mark.sweep
def test_ddpg_losses_of_critic_and_actor():
    model, other = (ddpg.ActorCritic(4, 2, 8, key=jax.random.key(seed)) for seed in (0, 1))
    batch = transitions(np.random.default_rng(0))
    targets = eqx.filter(other, eqx.is_array)
    grads, state = gradients_and_targets(ddpg.loss_fn, model, targets, batch)

    def value(critic, seen, action):
        return critic(jnp.concatenate([seen, action]))

    def critic_loss(critic):
        total = 0.0
        for i in range(ROWS):
            later = value(other.critic, batch["next"][i], other.actor(batch["next"][i]))
            goal = batch["reward"][i] + 0.9 * (1 - batch["terminated"][i]) * later
            total += (goal - value(critic, batch["observation"][i], batch["action"][i])) ** 2
        return total / ROWS

    def loss_of_actor(actor):
        return -sum(value(model.critic, seen, actor(seen)) for seen in batch["observation"]) / ROWS

    assert_same(grads.critic, gradient(critic_loss)(model.critic))  # the actor's loss contributes nothing
    assert_same(grads.actor, gradient(loss_of_actor)(model.actor))
    assert_targets_moved_by_a_tenth(state, targets, model)


@pytest.mark.parametrize("independent", [pytest.param(False, marks=pytest.mark.sweep), True])
@pytest.mark.sweep
def test_maddpg_losses_of_critics_and_actors(independent):
    model, other = (Team(3, 4, 2, 8, independent, key=jax.random.key(seed)) for seed in (0, 1))
    batch = transitions(np.random.default_rng(0), 3)
    targets = eqx.filter(other, eqx.is_array)
    grads, state = gradients_and_targets(maddpg.loss_fn, model, targets, batch)

    def one(stack, agent):
        return jax.tree.map(lambda x: x[agent] if eqx.is_array(x) else x, stack)

    def value(critic, agent, seen, actions):
        known = [jnp.concatenate([seen[j], actions[j]]) * (j == agent or not independent) for j in range(3)]
        return critic(jnp.concatenate(known))

    for agent in range(3):

        def critic_loss(critic, agent=agent):
            total = 0.0
            for i in range(ROWS):
                following = batch["next"][i]
                actions = [one(other.actors, j)(following[j]) for j in range(3)]
                goal = batch["reward"][i, agent] + 0.9 * value(one(other.critics, agent), agent, following, actions)
                total += (goal - value(critic, agent, batch["observation"][i], batch["action"][i])) ** 2
            return total / ROWS

        def loss_of_actor(actor, agent=agent):
            total = 0.0
            for i in range(ROWS):
                actions = list(batch["action"][i])
                actions[agent] = actor(batch["observation"][i, agent])
                total -= value(one(model.critics, agent), agent, batch["observation"][i], actions)
            return total / ROWS

        wanted = gradient(critic_loss)(one(model.critics, agent))
        found = one(grads.critics, agent)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
        assert_same(one(grads.actors, agent), gradient(loss_of_actor)(one(model.actors, agent)))
    assert_targets_moved_by_a_tenth(state, targets, model)


@pytest.mark.sweep
@pytest.mark.parametrize("independent", [False, True])
def test_independent_critic_sees_only_its_own_agent(independent):
    model = Team(3, 4, 2, 8, independent, key=jax.random.key(0))
    seen, actions = jnp.ones((1, 3, 4)), jnp.ones((1, 3, 3, 2))
    before = model.value(seen, actions)[0]
    after = model.value(seen.at[:, 1].set(0.0), actions.at[:, :, 1].set(0.0))[0]
    np.testing.assert_array_equal(before == after, [independent, False, independent])
