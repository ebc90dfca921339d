"""Multi-agent particle environments (MPE), exactly as the package ``mpe2`` plays them, compiled and batched.

Given the same state and the same actions, positions, velocities, observations, rewards and ends are those of the
package. Start positions come from the same distributions but from other random numbers.

Where things are: :mod:`.scenarios` has the worlds as data, :mod:`.kernel` the physics and the rules of the scenarios,
:mod:`.env` the vector environment, :mod:`.render` the pictures.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from marl_lightning.envs.native.mpe.scenarios import SCENARIOS

if TYPE_CHECKING:
    from marl_lightning.envs.native.mpe.env import MPEVectorEnv

__all__ = ["SCENARIOS", "MPEVectorEnv"]


def __getattr__(name: str) -> object:
    if name == "MPEVectorEnv":  # needs torch and numba
        from marl_lightning.envs.native.mpe.env import MPEVectorEnv

        return MPEVectorEnv
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
