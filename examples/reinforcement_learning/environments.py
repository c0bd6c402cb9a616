"""Environments: gymnasium's, run in parallel, and the multi-agent games of mpe2."""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import VectorEnv
from gymnasium.wrappers import RescaleAction
from gymnasium.wrappers.vector import RecordEpisodeStatistics

Act = Callable[[np.ndarray], np.ndarray]  # from the observations of all environments to their actions


def make_envs(name: str, algorithm: str, n_envs: int) -> RecordEpisodeStatistics:
    """Creates environments that run in parallel. Continuous actions are in [-1, 1].

    The step after the end of an episode only resets: its action is ignored and its reward is 0.

    Raises ValueError for an environment that the algorithm cannot act in.
    """
    try:
        with gymnasium.make(name) as env:
            seen, actions = env.observation_space, env.action_space
    except (gymnasium.error.Error, ImportError) as error:
        raise ValueError(
            f"`--env {name}`: expected an environment of gymnasium, got none: {error} "
            "See `gymnasium.pprint_registry()` for those installed."
        ) from error
    if not isinstance(seen, Box) or len(seen.shape) != 1:
        raise ValueError(f"`--env {name}`: expected observations in a Box of one dim, got {seen}. Choose another.")
    discrete = isinstance(actions, Discrete) and actions.start == 0
    continuous = isinstance(actions, Box) and len(actions.shape) == 1 and actions.is_bounded()
    if not (discrete if algorithm == "ppo" else continuous):
        rule = "Discrete actions from 0" if algorithm == "ppo" else "actions in a bounded Box of one dim"
        other = "Use `ddpg` for it." if continuous else "Use `ppo` for it." if discrete else "Choose another."
        raise ValueError(f"`--env {name}`: expected {rule} for `{algorithm}`, got {actions}. {other}")
    to_unit = partial(RescaleAction, min_action=np.float32(-1), max_action=np.float32(1))
    return RecordEpisodeStatistics(gymnasium.make_vec(name, n_envs, "sync", wrappers=[to_unit] if continuous else []))


def random_returns(envs: VectorEnv, seed: int) -> np.ndarray:
    """Returns the return of one episode with random actions in each environment."""
    return play_episodes(envs, lambda _: envs.action_space.sample(), seed)


def play_episodes(envs: VectorEnv, act: Act, seed: int) -> np.ndarray:
    """Returns the return of one episode in each environment."""
    envs.action_space.seed(seed)
    observations, _ = envs.reset(seed=seed)
    returns, running = np.zeros(envs.num_envs), np.ones(envs.num_envs, bool)
    while running.any():
        observations, rewards, terminated, truncated, _ = envs.step(act(observations))
        returns += rewards * running
        running &= ~(terminated | truncated)
    return returns


class Games:
    """Several copies of a multi-agent game. All episodes have the same length and end only by a time limit.

    Raises ValueError for a module that mpe2 does not have, and for agents with different observations or actions.
    """

    def __init__(self, name: str, n_games: int):
        try:
            module = importlib.import_module(f"mpe2.{name}")
            self.games = [module.parallel_env(continuous_actions=True) for _ in range(n_games)]
        except (ImportError, AttributeError) as error:
            raise ValueError(f"`--env {name}`: expected a game of mpe2, got none: {error}. Try simple_spread_v3.") from error
        game, self.agents = self.games[0], self.games[0].possible_agents
        shapes = {agent: (game.observation_space(agent).shape, game.action_space(agent).shape) for agent in self.agents}
        if len(set(shapes.values())) > 1:
            found = ", ".join(f"{agent} {seen} and {actions}" for agent, (seen, actions) in shapes.items())
            raise ValueError(
                f"`--env {name}`: expected agents with observations and actions of the same shapes, got {found}. "
                "Try simple_spread_v3."
            )
        (self.n_seen,), (self.n_actions,) = shapes[self.agents[0]]
        sizes = {"observation": self.n_seen, "action": self.n_actions, "next": self.n_seen}
        fields = [(field, np.float32, (len(self.agents), size)) for field, size in sizes.items()]
        self.dtype = np.dtype([*fields, ("reward", np.float32, (len(self.agents),))])

    def play(self, act: Act, seed: int) -> np.ndarray:
        """Plays each game once. Returns the transitions, `[time, games]`. Actions are in [-1, 1]."""
        observations = self._stacked([game.reset(seed=seed + i)[0] for i, game in enumerate(self.games)])
        played = []
        while self.games[0].agents:
            rows = np.zeros(len(self.games), self.dtype)
            rows["observation"], rows["action"] = observations, act(observations)
            from_0 = (rows["action"] + 1) / 2
            outs = [game.step(dict(zip(self.agents, x, strict=True))) for game, x in zip(self.games, from_0, strict=True)]
            observations = rows["next"] = self._stacked([out[0] for out in outs])
            rows["reward"] = self._stacked([out[1] for out in outs])
            played.append(rows)
        return np.stack(played)

    def _stacked(self, dicts: list[dict[str, Any]]) -> np.ndarray:
        return np.array([[of[agent] for agent in self.agents] for of in dicts], np.float32)


def returns_of(played: np.ndarray) -> np.ndarray:
    """Returns the return of each game: rewards summed over time and averaged over agents."""
    return played["reward"].sum(axis=0).mean(axis=1)
