"""Sizes and names of features, and the constants of the kernel, derived from a scenario and the options."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from marl_lightning.envs.native.smac.kernel import COLLISIONS, FIRST_ATTACK, REWARD_MODES, Constants
from marl_lightning.envs.native.smac.options import SmacOptions
from marl_lightning.envs.native.smac.scenarios import (
    MAP_SIZE,
    MOVE_AMOUNT,
    PHYSICS,
    SHOOT_RANGE,
    SIGHT_RANGE,
    TICKS_PER_STEP,
    Scenario,
    UnitType,
)

NUM_MOVES = 4
NUM_PATHING_POINTS = 8
NUM_HEIGHT_POINTS = 9


class Layout:
    """Sizes and names of everything that a scenario shows under some options.

    Args:
        scenario: the map.
        options: the switches.

    Attributes:
        allies: unit types of the agents, in agent order.
        enemies: unit types of the enemies, in enemy order.
        ally_shield: whether features of agents have a shield entry.
        enemy_shield: whether features of enemies have one.
        type_bits: entries of the unit type one-hot.
    """

    def __init__(self, scenario: Scenario, options: SmacOptions) -> None:
        self.scenario = scenario
        self.options = options
        self.allies, self._ally_points = scenario.ally_spawns()
        self.enemies, self._enemy_points = scenario.enemy_spawns()
        self.ally_shield = any(unit.shield for unit in self.allies)
        self.enemy_shield = any(unit.shield for unit in self.enemies)
        self.type_bits = len(scenario.type_order)

    @property
    def num_agents(self) -> int:
        return len(self.allies)

    @property
    def num_enemies(self) -> int:
        return len(self.enemies)

    @property
    def num_actions(self) -> int:
        """No-op, stop, four moves, and one attack an enemy."""
        return FIRST_ATTACK + self.num_enemies

    @property
    def move_size(self) -> int:
        """Entries of the first block of an observation."""
        pathing = NUM_PATHING_POINTS * self.options.obs_pathing_grid
        return NUM_MOVES + pathing + NUM_HEIGHT_POINTS * self.options.obs_terrain_height

    @property
    def enemy_size(self) -> int:
        """Entries of one enemy in an observation."""
        return 4 + self.options.obs_all_health * (1 + self.enemy_shield) + self.type_bits

    @property
    def ally_size(self) -> int:
        """Entries of one ally in an observation."""
        last_action = self.num_actions * self.options.obs_last_action
        return 4 + self.options.obs_all_health * (1 + self.ally_shield) + self.type_bits + last_action

    @property
    def own_size(self) -> int:
        """Entries of an agent about itself in its observation."""
        return self.options.obs_own_health * (1 + self.ally_shield) + self.type_bits

    @property
    def observation_size(self) -> int:
        others = self.num_enemies * self.enemy_size + (self.num_agents - 1) * self.ally_size
        return self.move_size + others + self.own_size + self.options.obs_timestep_number

    @cached_property
    def ally_feature_names(self) -> tuple[str, ...]:
        """Names of the entries of one agent in the global state."""
        return ("health", "energy/cooldown", "rel_x", "rel_y", *self._shield_and_type_names(self.ally_shield))

    @cached_property
    def enemy_feature_names(self) -> tuple[str, ...]:
        """Names of the entries of one enemy in the global state."""
        return ("health", "rel_x", "rel_y", *self._shield_and_type_names(self.enemy_shield))

    @property
    def state_size(self) -> int:
        if self.options.obs_instead_of_state:
            return self.num_agents * self.observation_size
        units = self.num_agents * len(self.ally_feature_names) + self.num_enemies * len(self.enemy_feature_names)
        last_actions = self.num_agents * self.num_actions * self.options.state_last_action
        return units + last_actions + self.options.state_timestep_number

    @property
    def max_reward(self) -> float:
        """Unscaled return of a flawless win without regeneration of enemies."""
        points = sum(unit.health + unit.shield for unit in self.enemies)
        return self.options.reward_death_value * self.num_enemies + self.options.reward_win + points

    def constants(self) -> Constants:
        """Returns what the kernel needs to know: units expanded to arrays ``[U]``, times in ticks, float32."""
        options, scenario, physics = self.options, self.scenario, PHYSICS[self.options.physics]
        units = self.allies + self.enemies
        spawns = np.concatenate([self._ally_points, self._enemy_points])
        attack_point = scenario.attack_point or (MAP_SIZE / 2, MAP_SIZE / 2)
        scan_ranges = [physics.scan_range(unit) for unit in units]
        if scenario.attack_point is None:
            scan_ranges[self.num_agents :] = [2.0 * MAP_SIZE] * self.num_enemies  # notice everybody
        return Constants(
            num_agents=self.num_agents,
            num_enemies=self.num_enemies,
            num_actions=self.num_actions,
            limit=scenario.limit,
            ticks=TICKS_PER_STEP,
            map_size=MAP_SIZE,
            type_bits=self.type_bits,
            collision=COLLISIONS.index(options.collision),
            reward_mode=REWARD_MODES.index(options.reward_mode),
            limit_is_terminal=bool(options.limit_is_terminal),
            obs_all_health=bool(options.obs_all_health),
            obs_own_health=bool(options.obs_own_health),
            obs_last_action=bool(options.obs_last_action),
            obs_pathing_grid=bool(options.obs_pathing_grid),
            obs_terrain_height=bool(options.obs_terrain_height),
            obs_timestep_number=bool(options.obs_timestep_number),
            obs_instead_of_state=bool(options.obs_instead_of_state),
            state_last_action=bool(options.state_last_action),
            state_timestep_number=bool(options.state_timestep_number),
            move_amount=np.float32(MOVE_AMOUNT),
            sight_range=np.float32(SIGHT_RANGE),
            shoot_range=np.float32(SHOOT_RANGE),
            weapon_delay_low=np.float32(physics.weapon_delay[0]),
            weapon_delay_high=np.float32(physics.weapon_delay[1]),
            shield_delay=np.float32(physics.shield_delay),
            shield_rate=np.float32(physics.shield_rate),
            spawn_noise=np.float32(options.spawn_noise),
            reward_death_value=np.float32(options.reward_death_value),
            reward_win=np.float32(options.reward_win),
            reward_defeat=np.float32(options.reward_defeat),
            reward_negative_scale=np.float32(options.reward_negative_scale),
            reward_factor=np.float32(options.reward_scale_rate / self.max_reward if options.reward_scale else 1.0),
            attack_x=np.float32(attack_point[0]),
            attack_y=np.float32(attack_point[1]),
            pathable=scenario.pathable(),
            terrain_height=np.zeros((MAP_SIZE, MAP_SIZE), np.float32),  # all maps so far are flat
            spawn_x=_float32(spawns[:, 0]),
            spawn_y=_float32(spawns[:, 1]),
            max_health=_float32([unit.health for unit in units]),
            max_shield=_float32([unit.shield for unit in units]),
            cooldown=_float32([unit.cooldown * physics.ticks_per_second for unit in units]),
            cooldown_scale=_float32([unit.cooldown_scale for unit in units]),
            weapon_range=_float32([unit.weapon_range for unit in units]),
            scan_range=_float32(scan_ranges),
            speed=_float32([unit.speed / physics.ticks_per_second for unit in units]),
            radius=_float32([unit.radius for unit in units]),
            shield_bit=np.array([self.ally_shield] * self.num_agents + [self.enemy_shield] * self.num_enemies),
            type_bit=self._type_bits(),
            shot_damage=_float32([[i.hits * _hit(i, j) for j in units] for i in units]),
            shot_wounds=_float32([[i.hits * max(_hit(i, j) - j.armor, 0.0) for j in units] for i in units]),
        )

    def _shield_and_type_names(self, shield: bool) -> tuple[str, ...]:
        return ("shield",) * shield + tuple(f"type_{bit}" for bit in range(self.type_bits))

    def _type_bits(self) -> np.ndarray:
        ally_order = self.scenario.type_order
        enemy_order = ally_order if self.options.align_unit_types else self.scenario.enemy_type_order
        bits = [
            order.index(unit.name) if order else 0
            for order, side in ((ally_order, self.allies), (enemy_order, self.enemies))
            for unit in side
        ]
        return np.array(bits, np.int64)


def _hit(attacker: UnitType, target: UnitType) -> float:
    """Damage of one hit before armor."""
    return attacker.damage + attacker.bonus_armored * target.armored


def _float32(values: object) -> np.ndarray:
    """Returns a contiguous float32 array."""
    return np.ascontiguousarray(values, np.float32)
