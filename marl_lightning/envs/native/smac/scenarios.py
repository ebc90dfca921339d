"""Units, maps and physics presets of the SMAC-like simulator: pure data.

A new map of known units is one more entry of ``SCENARIOS``; a new unit is one more entry of ``UNIT_TYPES``.
Times are in *Faster* game seconds (the setting of public unit tables), distances in map units.

Sources: Samvelyan et al. 2019, "The StarCraft Multi-Agent Challenge", arXiv 1902.04043 (maps, limits, teams); the unit
data and spawn points of the published map files; public StarCraft II unit tables for weapons.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

import numpy as np

MAP_SIZE = 32
"""Width and height of every map, in map units and in terrain cells."""

SIGHT_RANGE = 9.0
"""Agents see units whose centre is strictly nearer than this, whatever their type."""

SHOOT_RANGE = 6.0
"""Agents may order an attack on an enemy whose centre is at most this far away, whatever their weapon's range."""

MOVE_AMOUNT = 2.0
"""Distance to the point that a move action sends an agent to."""

TICKS_PER_STEP = 8
"""Game loops in one env step."""

UNIT_GAP = 0.05
"""Free space between two units that spawn next to each other."""

Named = TypeVar("Named")


@dataclass(frozen=True, kw_only=True)
class UnitType:
    """What all units of one type have in common.

    Args:
        name: name of the type.
        health: hit points of a new unit.
        shield: shield points of a new unit; absorbed first and regenerated.
        armor: subtracted from every hit on health.
        armored: whether bonus damage against armored units applies.
        damage: damage of one hit.
        bonus_armored: additional damage of one hit on an armored unit.
        hits: hits of one shot; armor counts against each of them.
        cooldown: seconds between two shots.
        weapon_range: greatest gap between the circles of attacker and target for a shot.
        speed: map units per second.
        radius: radius of the circle that the unit occupies.
        cooldown_scale: game loops by which the global state divides the weapon's cooldown.
    """

    name: str
    health: float
    shield: float = 0.0
    armor: float = 0.0
    armored: bool = False
    damage: float
    bonus_armored: float = 0.0
    hits: int = 1
    cooldown: float
    weapon_range: float
    speed: float
    radius: float
    cooldown_scale: float


@dataclass(frozen=True, kw_only=True)
class SpawnGroup:
    """Units that start packed around one point.

    Args:
        point: centre of the group, ``(x, y)``.
        units: pairs of unit type name and number, in packing order.
    """

    point: tuple[float, float]
    units: tuple[tuple[str, int], ...]

    @property
    def unit_names(self) -> tuple[str, ...]:
        """Type name of every unit of the group, in packing order."""
        return tuple(name for name, number in self.units for _ in range(number))


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One map: teams, start positions, terrain, limit and the order that the enemies are given.

    Args:
        name: name in the registry.
        allies: groups of agents.
        enemies: groups of enemies.
        limit: env steps of an episode.
        terrain: pathable cells as inclusive bands ``(y_first, y_last, x_first, x_last)``.
        attack_point: where enemies without a target go; ``None`` if they seek the nearest agent at any distance.
        type_order: order of the type bits, empty if each side has a single type.
        enemy_type_order: order of the type bits of enemies in SMAC where it differs from ``type_order``.
    """

    name: str
    allies: tuple[SpawnGroup, ...]
    enemies: tuple[SpawnGroup, ...]
    limit: int
    terrain: tuple[tuple[int, int, int, int], ...]
    attack_point: tuple[float, float] | None
    type_order: tuple[str, ...] = ()
    enemy_type_order: tuple[str, ...] = ()

    def pathable(self) -> np.ndarray:
        """Returns the walkable cells as bool ``[MAP_SIZE, MAP_SIZE]``, indexed ``[x, y]``."""
        cells = np.zeros((MAP_SIZE, MAP_SIZE), np.bool_)
        for y_first, y_last, x_first, x_last in self.terrain:
            cells[x_first : x_last + 1, y_first : y_last + 1] = True
        return cells

    def ally_spawns(self) -> tuple[tuple[UnitType, ...], np.ndarray]:
        """Returns type and start ``[A, 2]`` of the agents, sorted by (type, x, y) as in SMAC."""
        units, points = _pack_groups(self.allies, sign=1.0)
        rank = {name: position for position, name in enumerate(self.type_order)}
        order = sorted(range(len(units)), key=lambda i: (rank.get(units[i].name, 0), *points[i]))
        return tuple(units[i] for i in order), points[order]

    def enemy_spawns(self) -> tuple[tuple[UnitType, ...], np.ndarray]:
        """Returns type and start ``[E, 2]`` of the enemies in packing order: the agents' packing, point-reflected."""
        return _pack_groups(self.enemies, sign=-1.0)


@dataclass(frozen=True, kw_only=True)
class Physics:
    """Clock and engine rules that differ between simulators.

    Args:
        name: name of the preset.
        ticks_per_second: game loops per Faster second.
        weapon_delay: bounds in ticks of the uniform random time added to every cooldown.
        min_scan_range: enemies notice agents from here, or from the range of their weapon if that is longer and
            ``scan_by_weapon`` is set.
        scan_by_weapon: whether the range of the weapon can extend the scan range, both measured from circle to
            circle; else the scan range is measured from the enemy's centre to the agent's circle.
        shield_delay: ticks without damage after which a shield regenerates.
        shield_rate: shield points regenerated per tick.
    """

    name: str
    ticks_per_second: float
    weapon_delay: tuple[float, float]
    min_scan_range: float
    scan_by_weapon: bool
    shield_delay: float
    shield_rate: float

    def scan_range(self, unit: UnitType) -> float:
        """Returns how far from its centre a unit notices the circle of another."""
        if not self.scan_by_weapon:
            return self.min_scan_range
        return max(self.min_scan_range, unit.weapon_range) + unit.radius


def _pack_groups(groups: Iterable[SpawnGroup], sign: float) -> tuple[tuple[UnitType, ...], np.ndarray]:
    units: list[UnitType] = []
    points: list[np.ndarray] = []
    for group in groups:
        members = [UNIT_TYPES[name] for name in group.unit_names]
        units += members
        points.append(np.asarray(group.point) + sign * _pack([unit.radius for unit in members]))
    return tuple(units), np.concatenate(points)


def _pack(radii: list[float]) -> np.ndarray:
    """Returns offsets ``[n, 2]`` of circles in a centred square grid filled row by row, bottom row first.

    A row is as high as its largest circle; neighbours and rows are ``UNIT_GAP`` apart.
    """
    side = math.ceil(math.sqrt(len(radii)))
    offsets, width, bottom = [], 0.0, 0.0
    for start in range(0, len(radii), side):
        row = radii[start : start + side]
        left = 0.0
        for radius in row:
            offsets.append((left + radius, bottom + max(row)))
            left += 2 * radius + UNIT_GAP
        width = max(width, left - UNIT_GAP)
        bottom += 2 * max(row) + UNIT_GAP
    return np.asarray(offsets) - np.asarray([width, bottom - UNIT_GAP]) / 2


def _by_name(records: Iterable[Named]) -> Mapping[str, Named]:
    return MappingProxyType({record.name: record for record in records})


def find(registry: Mapping[str, Named], name: str, kind: str) -> Named:
    """Returns ``registry[name]``.

    Args:
        registry: records by name.
        name: name that the user gave.
        kind: what the registry holds, for the message.

    Raises:
        ValueError: if the name is unknown; the message proposes the nearest name and lists all.
    """
    if name in registry:
        return registry[name]
    nearest = difflib.get_close_matches(str(name), registry, n=1, cutoff=0.0)
    raise ValueError(f"unknown {kind} {name!r}; did you mean {nearest[0]!r}? Known: {', '.join(registry)}")


UNIT_TYPES = _by_name(
    [
        UnitType(
            name="marine",
            health=45,
            damage=6,
            cooldown=0.61,
            weapon_range=5,
            speed=3.15,
            radius=0.375,
            cooldown_scale=15,
        ),
        UnitType(
            name="stalker",
            health=80,
            shield=80,
            armor=1,
            armored=True,
            damage=13,
            bonus_armored=5,
            cooldown=1.34,
            weapon_range=6,
            speed=4.13,
            radius=0.625,
            cooldown_scale=35,
        ),
        UnitType(
            name="zealot",
            health=100,
            shield=50,
            armor=1,
            damage=8,
            hits=2,
            cooldown=0.86,
            weapon_range=0.1,
            speed=3.15,
            radius=0.5,
            cooldown_scale=22,
        ),
    ]
)
"""Unit types by name."""

PHYSICS = _by_name(
    [
        # 22.4 loops per Faster second, 16 per Normal second. Shields wait 10 Normal seconds, then gain 2 per Normal
        # second. SC2 delays each shot by -1/16 to +2/16 of a Normal second at random.
        Physics(
            name="sc2",
            ticks_per_second=22.4,
            weapon_delay=(-1.0, 2.0),
            min_scan_range=5.0,
            scan_by_weapon=True,
            shield_delay=160.0,
            shield_rate=0.125,
        ),
        # SMAClite runs Faster speeds and cooldowns, but Normal shields, on 16 loops per second, without randomness.
        Physics(
            name="smaclite",
            ticks_per_second=16.0,
            weapon_delay=(0.0, 0.0),
            min_scan_range=5.0,
            scan_by_weapon=False,
            shield_delay=160.0,
            shield_rate=0.125,
        ),
    ]
)
"""Physics presets by name. ``smaclite`` follows Michalski et al. 2023, "SMAClite", arXiv 2305.05566."""

_FLAT = ((0, 31, 0, 31),)
_STRIP = ((8, 23, 0, 31),)
_OCTAGON = (
    (5, 5, 9, 22),
    (6, 6, 8, 23),
    (7, 7, 7, 24),
    (8, 8, 6, 25),
    (9, 22, 5, 26),
    (23, 23, 6, 25),
    (24, 24, 7, 24),
    (25, 25, 8, 23),
    (26, 26, 9, 22),
)
_LEFT, _RIGHT = (9.0, 16.0), (23.0, 16.0)


def _face_to_face(
    name: str,
    allies: tuple[tuple[str, int], ...],
    enemies: tuple[tuple[str, int], ...],
    limit: int,
    *,
    terrain: tuple[tuple[int, int, int, int], ...] = _STRIP,
) -> Scenario:
    """Returns a map with the agents on the left and the enemies on the right, who attack towards the agents' start."""
    mixed = len(allies) > 1
    return Scenario(
        name=name,
        allies=(SpawnGroup(point=_LEFT, units=allies),),
        enemies=(SpawnGroup(point=_RIGHT, units=enemies),),
        limit=limit,
        terrain=terrain,
        attack_point=_LEFT,
        type_order=tuple(unit for unit, _ in allies) if mixed else (),
        # Allied units are custom types whose ids ascend from stalker to zealot; the built-in ids of enemies descend.
        enemy_type_order=("zealot", "stalker") if mixed else (),
    )


def _marines(name: str, allies: int, enemies: int, limit: int) -> Scenario:
    return _face_to_face(name, (("marine", allies),), (("marine", enemies),), limit)


def _kiting(name: str, zealots: int, limit: int) -> Scenario:
    return _face_to_face(name, (("stalker", 3),), (("zealot", zealots),), limit, terrain=_FLAT)


def _mirror(name: str, stalkers: int, zealots: int, limit: int) -> Scenario:
    team = (("stalker", stalkers), ("zealot", zealots))
    return _face_to_face(name, team, team, limit)


SCENARIOS = _by_name(
    [
        _marines("3m", 3, 3, 60),
        _marines("8m", 8, 8, 120),
        _marines("25m", 25, 25, 150),
        _marines("5m_vs_6m", 5, 6, 70),
        _marines("8m_vs_9m", 8, 9, 120),
        _marines("10m_vs_11m", 10, 11, 150),
        _marines("27m_vs_30m", 27, 30, 180),
        _mirror("2s3z", 2, 3, 120),
        _mirror("3s5z", 3, 5, 150),
        _face_to_face("3s5z_vs_3s6z", (("stalker", 3), ("zealot", 5)), (("stalker", 3), ("zealot", 6)), 170),
        _kiting("3s_vs_3z", 3, 150),
        _kiting("3s_vs_4z", 4, 200),
        _kiting("3s_vs_5z", 5, 250),
        Scenario(
            name="2m_vs_1z",
            allies=(
                SpawnGroup(point=(13.0, 12.0), units=(("marine", 1),)),
                SpawnGroup(point=(19.0, 12.0), units=(("marine", 1),)),
            ),
            enemies=(SpawnGroup(point=(16.0, 19.0), units=(("zealot", 1),)),),
            limit=150,
            terrain=_OCTAGON,
            attack_point=None,
        ),
    ]
)
"""Maps by name."""
