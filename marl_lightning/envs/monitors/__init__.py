"""Monitors: finite automata that watch a game and tell each agent what of its task is done.

Where things are: :mod:`.guards` parses conditions over propositions, :mod:`.machines` has the monitors and builders of
usual ones, :mod:`.env` puts them around an environment.
"""

from marl_lightning.envs.monitors.env import LabelContext, MonitorParallelEnv
from marl_lightning.envs.monitors.machines import (
    Monitor,
    MonitorStep,
    PotentialShaping,
    RewardMachine,
    always,
    eventually,
    sequence,
    until,
)

__all__ = [
    "LabelContext",
    "Monitor",
    "MonitorParallelEnv",
    "MonitorStep",
    "PotentialShaping",
    "RewardMachine",
    "always",
    "eventually",
    "sequence",
    "until",
]
