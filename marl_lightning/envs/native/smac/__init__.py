"""A SMAC-like simulator: cooperative micromanagement battles with the interface of the StarCraft Multi-Agent Challenge.

Maps, observations, states, actions, legality, rewards and ends are those of SMAC. The game is a simulator of our own,
not StarCraft II: units turn and accelerate at once, shots hit at once, the damage of a game loop is simultaneous, units
slide around each other in contact, and nobody plans a path around terrain. Results are results on this simulator.

Where things are: :mod:`.scenarios` has maps, units and physics presets as data, :mod:`.options` the switches,
:mod:`.layout` what follows from both, :mod:`.kernel` the rules, :mod:`.env` the vector environment, :mod:`.api` one
battle with SMAC's methods, :mod:`.render` the pictures.
"""

from marl_lightning.envs.native.smac.api import SmacEnv
from marl_lightning.envs.native.smac.env import SmacVectorEnv

__all__ = ["SmacEnv", "SmacVectorEnv"]
