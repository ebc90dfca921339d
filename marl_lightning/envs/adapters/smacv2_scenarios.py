"""The 15 scenarios of SMACv2: who fights whom, and the options of the package with which they are played.

Source: Ellis et al. 2023, "SMACv2: An Improved Benchmark for Cooperative Multi-Agent Reinforcement Learning", arXiv
2212.07489, without its extended partial observability (which is ``prob_obs_enemy=0`` and ``action_mask=False``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

SIZES = ((5, 5), (10, 10), (10, 11), (20, 20), (20, 23))
"""Numbers of agents and of enemies."""

MAP_SIZE = 32
"""Width and height of the map, in map units."""

OPTIONS: Mapping[str, Any] = MappingProxyType(
    {
        "obs_own_pos": True,
        "use_unit_ranges": True,
        "min_attack_range": 2,
        "conic_fov": False,
        "num_fov_actions": 12,  # only with conic_fov
        "prob_obs_enemy": 1.0,
        "action_mask": True,
    }
)
"""Options that all scenarios share; the others are at the defaults of the package."""


@dataclass(frozen=True, kw_only=True)
class Race:
    """Units of a team.

    Args:
        weights: unit type to the probability with which a unit is of it.
        never_alone: types of which a team must not consist as a whole.
    """

    weights: Mapping[str, float]
    never_alone: tuple[str, ...] = ()


RACES: Mapping[str, Race] = MappingProxyType(
    {
        "protoss": Race(weights={"stalker": 0.45, "zealot": 0.45, "colossus": 0.1}),
        "terran": Race(weights={"marine": 0.45, "marauder": 0.45, "medivac": 0.1}, never_alone=("medivac",)),
        "zerg": Race(weights={"zergling": 0.45, "baneling": 0.1, "hydralisk": 0.45}, never_alone=("baneling",)),
    }
)
"""Teams by the first part of the name of a scenario."""

_SCENARIOS = {f"{race}_{agents}_vs_{enemies}": (race, agents, enemies) for race in RACES for agents, enemies in SIZES}

SCENARIOS = tuple(_SCENARIOS)
"""Names, such as ``"terran_10_vs_11"``."""


def options(scenario: str) -> dict[str, Any]:
    """Returns the arguments of the package's ``StarCraftCapabilityEnvWrapper``, new objects at every call.

    Raises:
        ValueError: if there is no such scenario.
    """
    if scenario not in _SCENARIOS:
        raise ValueError(f"unknown scenario {scenario!r}: choose one of {', '.join(SCENARIOS)}")
    race, num_agents, num_enemies = _SCENARIOS[scenario]
    team = {
        "dist_type": "weighted_teams",
        "unit_types": list(RACES[race].weights),
        "weights": list(RACES[race].weights.values()),
        "exception_unit_types": list(RACES[race].never_alone),
        "observe": True,
    }
    positions = {"dist_type": "surrounded_and_reflect", "p": 0.5, "map_x": MAP_SIZE, "map_y": MAP_SIZE}
    return {
        "map_name": f"10gen_{race}",
        "capability_config": {
            "n_units": num_agents,
            "n_enemies": num_enemies,
            "team_gen": team,
            "start_positions": positions,
        },
        **OPTIONS,
    }
