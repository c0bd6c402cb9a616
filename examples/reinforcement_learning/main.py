"""Reinforcement learning: policies learn from their own experience, with three algorithms.

    python -m examples.reinforcement_learning ppo
    python -m examples.reinforcement_learning ppo --env Acrobot-v1
    python -m examples.reinforcement_learning ddpg
    python -m examples.reinforcement_learning maddpg

Each algorithm alternates between playing and training. From time to time it plays evaluation episodes, which select the best
checkpoint. At the end, that checkpoint plays other episodes, and their mean return is reported. `--env` takes any gymnasium
environment with suitable actions, and for maddpg a game of mpe2.

One CPU core, three seeds:

    ppo, CartPole-v1       40 s         500, 500 and 500 of 500 (random actions: 20)
    ppo, Acrobot-v1        45 s         -81, -86 and -90 (-494; solved at -100)
    ddpg, Pendulum-v1      35 s         -144, -146 and -144 (-1219)
    maddpg, simple_spread  3 min 45 s   -14.6 and -13.9; independent DDPG -15.6 and -14.8 (-24.6); two seeds
"""

from examples.reinforcement_learning import ddpg, maddpg, ppo
from examples.reinforcement_learning.ddpg import DDPG
from examples.reinforcement_learning.maddpg import MADDPG
from examples.reinforcement_learning.ppo import PPO


def main(args: PPO | DDPG | MADDPG) -> dict[str, float]:
    """Trains and reports. Returns the mean test return, and the returns to compare it with."""
    if isinstance(args, PPO):
        return ppo.main(args)
    return ddpg.main(args) if isinstance(args, DDPG) else maddpg.main(args)
