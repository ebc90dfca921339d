"""Level-based foraging: players with levels gather foods that are too heavy for one of them.

The game is exactly that of the package lbforaging 2.0.0, hundreds of times faster: given equal states and actions,
observations, legal actions, rewards and ends are equal.

Where things are: :mod:`.scenarios` reads names of games, :mod:`.options` has what can be chosen beside the name,
:mod:`.layout` the sizes and the description that follow from both, :mod:`.kernel` the rules, :mod:`.env` the vector
environment, :mod:`.render` the pictures. Names that need torch and numba are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from marl_lightning.envs.native.lbf.env import LBFVectorEnv

__all__ = ["LBFVectorEnv"]


def __getattr__(name: str) -> object:
    if name == "LBFVectorEnv":
        from marl_lightning.envs.native.lbf.env import LBFVectorEnv

        return LBFVectorEnv
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
