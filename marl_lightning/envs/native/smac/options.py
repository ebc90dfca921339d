"""The switches of the SMAC-like simulator, checked once."""

from __future__ import annotations

from dataclasses import dataclass

from marl_lightning.envs.native.smac.kernel import COLLISIONS, REWARD_MODES
from marl_lightning.envs.native.smac.scenarios import PHYSICS, find

INVALID_ACTION_MODES = ("mask", "error")


@dataclass(frozen=True, kw_only=True)
class SmacOptions:
    """Everything that can be chosen beside the map. Names and defaults are those of SMAC where it has the option.

    Args:
        physics: preset of clock and engine rules, ``"sc2"`` or ``"smaclite"``.
        collision: ``"slide"`` moves units around standing ones and pushes overlapping ones apart, ``"separate"`` only
            pushes, ``"none"`` lets them overlap.
        spawn_noise: every coordinate of every start position is shifted uniformly by up to this many map units.
        invalid_action: ``"mask"`` replaces an illegal action by stop and counts it in ``info["invalid_actions"]``,
            ``"error"`` raises ``ValueError`` before anything is changed.
        limit_is_terminal: reports the time limit as termination, as SMAC does, instead of truncation.
        obs_all_health: observations contain health and shield of the other units.
        obs_own_health: observations contain the agent's own health and shield.
        obs_last_action: observations contain the last actions of the allies in sight.
        obs_pathing_grid: observations contain whether eight points around the agent are pathable.
        obs_terrain_height: observations contain the height of these points and of the agent's cell.
        obs_timestep_number: observations end with the fraction of the time limit that has passed.
        obs_instead_of_state: the state is the concatenation of the observations.
        state_last_action: the state contains the last actions.
        state_timestep_number: the state ends with the fraction of the time limit that has passed.
        align_unit_types: enemies use the same order of type bits as agents. ``False`` reproduces SMAC, where the bits
            of enemy stalkers and zealots are swapped.
        reward_mode: ``"smac"`` is the absolute value of the enemies' net loss plus kills, ``"clip"`` its positive part,
            ``"damage"`` ignores regeneration, ``"signed"`` subtracts own losses, ``"sparse"`` gives 1, -1 or 0 at the
            end of the episode.
        reward_scale: divides rewards by the greatest possible return, times ``reward_scale_rate``. Also divides sparse
            rewards, as in SMAC.
        reward_scale_rate: return of a flawless win without regeneration.
        reward_death_value: reward for each kill.
        reward_win: reward for a win.
        reward_defeat: reward for a defeat.
        reward_negative_scale: weight of own losses in ``"signed"`` rewards.

    Raises:
        ValueError: if a value is unknown or out of range.
    """

    physics: str = "sc2"
    collision: str = "slide"
    spawn_noise: float = 0.0
    invalid_action: str = "mask"
    limit_is_terminal: bool = False
    obs_all_health: bool = True
    obs_own_health: bool = True
    obs_last_action: bool = False
    obs_pathing_grid: bool = False
    obs_terrain_height: bool = False
    obs_timestep_number: bool = False
    obs_instead_of_state: bool = False
    state_last_action: bool = True
    state_timestep_number: bool = False
    align_unit_types: bool = True
    reward_mode: str = "smac"
    reward_scale: bool = True
    reward_scale_rate: float = 20.0
    reward_death_value: float = 10.0
    reward_win: float = 200.0
    reward_defeat: float = 0.0
    reward_negative_scale: float = 0.5

    def __post_init__(self) -> None:
        for option, known in (
            ("physics", PHYSICS),
            ("collision", COLLISIONS),
            ("invalid_action", INVALID_ACTION_MODES),
            ("reward_mode", REWARD_MODES),
        ):
            find({name: name for name in known}, getattr(self, option), option)
        if self.spawn_noise < 0:
            raise ValueError(f"spawn_noise must not be negative, got {self.spawn_noise}")
