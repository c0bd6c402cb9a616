"""Reinforcement learning: policies learn from what they play, by three algorithms.

    python -m examples.reinforcement_learning ppo
    python -m examples.reinforcement_learning ppo --env Acrobot-v1
    python -m examples.reinforcement_learning ddpg
    python -m examples.reinforcement_learning maddpg

Each plays, trains on what was played, now and then plays other episodes to choose the best checkpoint, and at last
reports the mean return of that one in episodes that it was not chosen by. `--env` takes any environment of gymnasium with
actions of the right kind, or a game of mpe2 for maddpg.
"""

from examples.reinforcement_learning import ddpg, maddpg, ppo
from examples.reinforcement_learning.ddpg import DDPG
from examples.reinforcement_learning.maddpg import MADDPG
from examples.reinforcement_learning.ppo import PPO


def main(args: PPO | DDPG | MADDPG) -> dict[str, float]:
    """Trains and reports; returns the mean test return, and what it is to be held against."""
    if isinstance(args, PPO):
        return ppo.main(args)
    return ddpg.main(args) if isinstance(args, DDPG) else maddpg.main(args)
