"""The robotic warehouse: agents fetch requested shelves, bring them to a goal and put them back.

The game is exactly that of the package rware 2.0.0, hundreds of times faster: given equal states and actions,
observations, rewards and ends are equal. The one thing that the package leaves to chance is pinned: see
:func:`~marl_lightning.envs.native.rware.kernel.is_first`.

Where things are: :mod:`.scenarios` reads names of games, :mod:`.options` has what can be chosen beside the name,
:mod:`.layout` the map, sizes and the description that follow from both, :mod:`.kernel` the rules, :mod:`.env` the
vector environment, :mod:`.render` the pictures. Names that need torch and numba are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from marl_lightning.envs.native.rware.env import RWAREVectorEnv

__all__ = ["RWAREVectorEnv"]


def __getattr__(name: str) -> object:
    if name == "RWAREVectorEnv":
        from marl_lightning.envs.native.rware.env import RWAREVectorEnv

        return RWAREVectorEnv
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
