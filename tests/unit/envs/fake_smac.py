"""Stand-ins for smac, smacv2 and smaclite, which cannot be installed: their interfaces over a battle of our own.

What matters to an adapter is as in the packages, mistakes included; the battle itself is as simple as can be. All
units of a side hit at once, so that the order in which they are counted does not matter.
"""

from __future__ import annotations

import importlib.machinery
import math
import random
import sys
from dataclasses import dataclass
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

MAP_SIZE = 32
SIGHT, RANGE = 9, 6
MOVES = {2: (0, 2), 3: (0, -2), 4: (2, 0), 5: (-2, 0)}
HEALTH = {"marine": 45, "marauder": 125, "medivac": 150, "stalker": 80, "zealot": 100, "colossus": 200}
HEALTH |= {"zergling": 35, "baneling": 30, "hydralisk": 80, "spine crawler": 300}
SHIELD = {"stalker": 80, "zealot": 50, "colossus": 150}


@dataclass(frozen=True)
class Map:
    """Teams as pairs of type and number in the order of SMAClite, and the env steps of an episode."""

    allies: tuple[tuple[str, int], ...]
    enemies: tuple[tuple[str, int], ...]
    limit: int
    types: tuple[str, ...] = ()  # in the order of the type bits and of agents in SMAC


MAPS = {
    "3m": Map((("marine", 3),), (("marine", 3),), 60),
    "2s3z": Map((("stalker", 2), ("zealot", 3)), (("stalker", 2), ("zealot", 3)), 120, ("stalker", "zealot")),
    "2s_vs_1sc": Map((("stalker", 2),), (("spine crawler", 1),), 300),
    "bane_vs_bane": Map(
        (("zergling", 20), ("baneling", 4)), (("baneling", 4), ("zergling", 20)), 200, ("baneling", "zergling")
    ),
    "MMM": Map(
        (("marine", 7), ("marauder", 2), ("medivac", 1)),
        (("marine", 7), ("marauder", 2), ("medivac", 1)),
        150,
        ("marauder", "marine", "medivac"),
    ),
    "MMM2": Map(
        (("medivac", 1), ("marine", 7), ("marauder", 2)),
        (("medivac", 1), ("marine", 8), ("marauder", 3)),
        180,
        ("marauder", "marine", "medivac"),
    ),
}
RACES = {
    "terran": ("marine", "marauder", "medivac"),
    "protoss": ("stalker", "zealot", "colossus"),
    "zerg": ("zergling", "hydralisk", "baneling"),
}


class Unit:
    def __init__(self, name: str, x: float, y: float) -> None:
        self.name = name
        self.pos = np.array([x, y], np.float32)
        self.health: float = HEALTH[name]
        self.shield: float = SHIELD.get(name, 0)

    @property
    def heals(self) -> bool:
        return self.name == "medivac"

    @property
    def total(self) -> float:
        return self.health + self.shield

    def take(self, damage: float) -> None:
        absorbed = min(damage, self.shield)
        self.shield -= absorbed
        self.health = max(0, self.health - damage + absorbed)


def distance(one: Unit, other: Unit) -> float:
    (x, y), (other_x, other_y) = one.pos.tolist(), other.pos.tolist()
    return math.hypot(x - other_x, y - other_y)


def place(team: tuple[tuple[str, int], ...], x: float, y: float) -> list[Unit]:
    """Packs a team around a point, row by row."""
    names = [name for name, number in team for _ in range(number)]
    side = int(np.ceil(np.sqrt(len(names))))
    return [Unit(name, x + i % side - side / 2, y + i // side - side / 2) for i, name in enumerate(names)]


class Battle:
    """Agents against enemies that go for the nearest agent. Draws one number a step, if ``spread`` is positive."""

    def __init__(
        self,
        allies: list[Unit],
        enemies: list[Unit],
        *,
        types: tuple[str, ...],
        has_position: bool,
        generator: np.random.Generator,
        spread: int = 8,
    ) -> None:
        self.allies, self.enemies, self.types = allies, enemies, types
        self.has_position, self.generator, self.spread = has_position, generator, spread
        self.last_actions = np.zeros((len(allies), self.num_actions(len(enemies))))

    @staticmethod
    def num_actions(num_enemies: int) -> int:
        return 6 + num_enemies

    def legal(self, agent: int) -> list[int]:
        unit = self.allies[agent]
        legal = [0] * self.num_actions(len(self.enemies))
        if unit.health == 0:
            legal[0] = 1
            return legal
        legal[1] = 1
        for action, move in MOVES.items():
            legal[action] = int(all(0 <= old + step / 2 < MAP_SIZE for old, step in zip(unit.pos, move, strict=True)))
        for index, target in enumerate(self.allies if unit.heals else self.enemies):
            if target is not unit and target.health > 0 and distance(target, unit) <= RANGE:
                legal[6 + index] = 1
        return legal

    def advance(self, actions: list[int]) -> float:
        """Makes one step and returns the damage to enemies, with 10 for each of them that died."""
        self.last_actions = np.eye(self.num_actions(len(self.enemies)))[actions]
        damage = 10 + (int(self.generator.integers(self.spread + 1)) if self.spread else 0)
        hits: list[tuple[Unit, float]] = []
        for unit, action in zip(self.allies, actions, strict=True):
            if action in MOVES:
                unit.pos = np.clip(unit.pos + np.array(MOVES[action], np.float32), 0, MAP_SIZE - 1)
            elif action >= 6 and unit.heals:
                patient = self.allies[action - 6]
                hits.append((patient, max(patient.health - HEALTH[patient.name], -5)))
            elif action >= 6:
                hits.append((self.enemies[action - 6], damage))
        alive = [unit for unit in self.allies if unit.health > 0]
        for enemy in self.enemies:
            if enemy.health > 0 and not enemy.heals:
                target = min(alive, key=lambda unit, enemy=enemy: (distance(unit, enemy), *unit.pos))
                if distance(target, enemy) <= RANGE:
                    hits.append((target, damage))
                else:
                    enemy.pos = enemy.pos + np.sign(target.pos - enemy.pos)
        before = [enemy.total for enemy in self.enemies]
        for target, amount in hits:
            if amount < 0:
                target.health -= amount
        for target, amount in hits:
            if amount > 0:
                target.take(amount)
        return sum(
            old - enemy.total + 10 * (old > 0 and enemy.health == 0)
            for old, enemy in zip(before, self.enemies, strict=True)
        )

    @property
    def worth(self) -> float:
        return sum(HEALTH[unit.name] + SHIELD.get(unit.name, 0) for unit in self.enemies)

    def left(self, units: list[Unit], *, healers: bool = True) -> int:
        return sum(unit.health > 0 and (healers or not unit.heals) for unit in units)

    def _body(self, unit: Unit, team: list[Unit]) -> list[float]:
        shield = [unit.shield / SHIELD[unit.name]] if team[0].name in SHIELD else []
        return [unit.health / HEALTH[unit.name], *shield]

    def _type(self, unit: Unit) -> list[float]:
        return [float(unit.name == name) for name in self.types]

    def observe(self, agent: int, *, seen: np.ndarray | None = None) -> np.ndarray:
        """What SMAC shows an agent; ``seen`` says which enemies it may see at all."""
        unit, legal = self.allies[agent], self.legal(agent)
        rows: list[list[float]] = [list(map(float, legal[2:6]))]
        others = [(self.enemies, index, 6 + index) for index in range(len(self.enemies))]
        others += [(self.allies, index, None) for index in range(len(self.allies)) if index != agent]
        for team, index, action in others:
            other = team[index]
            x, y = ((other.pos - unit.pos) / SIGHT).tolist()
            first = 1.0 if action is None else float(legal[action])
            row = [first, math.hypot(x, y), x, y, *self._body(other, team), *self._type(other)]
            hidden = action is not None and seen is not None and not seen[index]
            rows.append([0.0] * len(row) if other.health == 0 or row[1] >= 1 or hidden else row)
        own = (unit.pos / MAP_SIZE).tolist() if self.has_position else []
        rows.append([*self._body(unit, self.allies), *own, *self._type(unit)])
        flat = np.array([entry for row in rows for entry in row], np.float32)
        return flat if unit.health > 0 else np.zeros_like(flat)

    def state(self) -> np.ndarray:
        rows = []
        for team in (self.allies, self.enemies):
            for unit in team:
                health, *shield = self._body(unit, team)
                cooldown = [0.5] if team is self.allies else []
                row = [health, *cooldown, *(unit.pos - MAP_SIZE / 2) / MAP_SIZE, *shield, *self._type(unit)]
                rows.append(row if unit.health > 0 else [0.0] * len(row))
        return np.concatenate([*rows, self.last_actions.ravel()]).astype(np.float32)


# ---------------------------------------------------------------------------------------------------------------------
# smac and smacv2
# ---------------------------------------------------------------------------------------------------------------------


class CannotResetException(Exception):  # noqa: N818 - its name in the package
    pass


class StarCraft2Env:
    """The interface of both packages. ``games`` and ``trouble`` are replaced by :func:`install_smac`.

    Trouble is taken from the front of the list by every reset and step: an exception to raise, ``"units"`` for a start
    at which some are missing, ``"lost"`` for a lost connection in a step, or ``None``.
    """

    games: list[StarCraft2Env]
    trouble: list[Exception | str | None]

    def __init__(
        self,
        map_name: str = "8m",
        difficulty: str = "7",
        seed: int | None = None,
        continuing_episode: bool = False,
        obs_instead_of_state: bool = False,
    ) -> None:
        scenario = MAPS[map_name]
        self.types, self.episode_limit = scenario.types, scenario.limit
        self.n_agents = sum(number for _, number in scenario.allies)
        self.n_enemies = sum(number for _, number in scenario.enemies)
        self._setup(map_name, seed, continuing_episode, obs_instead_of_state)

    def _setup(self, map_name: str, seed: int | None, continuing_episode: bool, obs_instead_of_state: bool) -> None:
        self.map_name, self.used_seed = map_name, seed
        self.continuing_episode, self.obs_instead_of_state = continuing_episode, obs_instead_of_state
        self.max_reward = 10 * self.n_enemies + 200
        self.episode_count = self.episode_steps = 0
        self.launches = self.running = self.closes = 0
        self.resets = 0
        self.games.append(self)

    def _next_trouble(self) -> Exception | str | None:
        return self.trouble.pop(0) if self.trouble else None

    def _launch(self) -> None:
        self.launches += 1
        self.running += 1  # a process that still runs is forgotten
        self.generator = np.random.default_rng(self.used_seed)

    def _teams(self) -> tuple[list[Unit], list[Unit]]:
        scenario = MAPS[self.map_name]
        return place(scenario.allies, 14, 16), place(scenario.enemies, 20, 16)

    def _rank(self, unit: Unit) -> tuple[Any, ...]:
        return (self.types.index(unit.name) if self.types else 0, *unit.pos)

    def reset(self) -> Any:
        self.resets += 1
        self.episode_steps = 0
        trouble = self._next_trouble()
        if isinstance(trouble, Exception):
            raise trouble
        if self.episode_count == 0:
            self._launch()
        allies, enemies = self._teams()
        self.battle = Battle(
            sorted(allies, key=self._rank),
            enemies,
            types=self.types,
            has_position=self.has_position,
            generator=self.generator,
        )
        if self.episode_count == 0:
            self.max_reward += self.battle.worth
        if trouble == "units":
            self.battle.allies[0].health = 0
        return self.get_obs(), self.get_state()

    has_position = False

    def step(self, actions: list[int]) -> tuple[float, bool, dict[str, Any]]:
        assert self.running, "StarCraft II does not run"
        for agent, (action, legal) in enumerate(zip(actions, self.get_avail_actions(), strict=True)):
            assert legal[action] == 1, f"Agent {agent} cannot perform action {action}"
        if self._next_trouble() == "lost":
            self.running -= 1
            self._launch()
            return 0, True, {}
        self.episode_steps += 1
        battle = self.battle
        reward = battle.advance(actions)
        allies, enemies = battle.left(battle.allies, healers=False), battle.left(battle.enemies, healers=False)
        is_won = allies > 0 and enemies == 0
        info: dict[str, Any] = {
            "battle_won": is_won,
            "dead_allies": self.n_agents - battle.left(battle.allies),
            "dead_enemies": self.n_enemies - battle.left(battle.enemies),
        }
        is_over = allies == 0 or enemies == 0
        if not is_over and self.episode_steps >= self.episode_limit:
            is_over = True
            if self.continuing_episode:
                info["episode_limit"] = True
        self.episode_count += is_over
        return (reward + 200 * is_won) * 20 / self.max_reward, is_over, info

    def get_obs(self) -> list[np.ndarray]:
        return [self.battle.observe(agent) for agent in range(self.n_agents)]

    def get_state(self) -> np.ndarray:
        return np.concatenate(self.get_obs()) if self.obs_instead_of_state else self.battle.state()

    def get_avail_actions(self) -> list[list[int]]:
        return [self.battle.legal(agent) for agent in range(self.n_agents)]

    def get_env_info(self) -> dict[str, Any]:
        """By the formulas of SMAC, not from a battle."""
        agents, enemies, types = self.n_agents, self.n_enemies, len(self.types)
        shields = [self._has_shield(side) for side in (0, 1)]
        actions = 6 + enemies
        own = 1 + shields[0] + types + 2 * self.has_position
        obs = 4 + enemies * (5 + shields[1] + types) + (agents - 1) * (5 + shields[0] + types) + own
        state = agents * (4 + shields[0] + types) + enemies * (3 + shields[1] + types) + agents * actions
        return {
            "state_shape": obs * agents if self.obs_instead_of_state else state,
            "obs_shape": obs,
            "n_actions": actions,
            "n_agents": agents,
            "episode_limit": self.episode_limit,
        }

    def _has_shield(self, side: int) -> bool:
        scenario = MAPS[self.map_name]
        return (scenario.allies, scenario.enemies)[side][0][0] in SHIELD

    def close(self) -> None:
        self.closes += 1
        self.running = max(0, self.running - 1)


class GeneratedBattles(StarCraft2Env):
    """The environment that the wrapper of smacv2 wraps."""

    def __init__(
        self,
        *,
        map_name: str,
        capability_config: dict[str, Any],
        seed: int | None = None,
        continuing_episode: bool = False,
        obs_instead_of_state: bool = False,
        obs_timestep_number: bool = False,
        obs_own_pos: bool = False,
        use_unit_ranges: bool = False,
        min_attack_range: int = 2,
        conic_fov: bool = False,
        num_fov_actions: int = 12,
        prob_obs_enemy: float = 1.0,
        action_mask: bool = True,
    ) -> None:
        assert use_unit_ranges
        assert action_mask
        assert (conic_fov, num_fov_actions, min_attack_range) == (False, 12, 2)
        self.types, self.episode_limit = RACES[map_name.removeprefix("10gen_")], 200
        self.n_agents = capability_config["team_gen"]["n_units"]
        self.n_enemies = capability_config["team_gen"]["n_enemies"]
        self.has_position, self.prob_obs_enemy = obs_own_pos, prob_obs_enemy
        self.obs_timestep_number = obs_timestep_number
        self._setup(map_name, seed, continuing_episode, obs_instead_of_state)

    def _has_shield(self, side: int) -> bool:
        return self.map_name == "10gen_protoss"

    def _rank(self, unit: Unit) -> tuple[Any, ...]:
        return (unit.name, *unit.pos)

    def reset(self, config: dict[str, Any]) -> Any:  # type: ignore[override]
        self.config = config
        self.owners: list[int | None] = [None] * self.n_enemies
        self.seen = np.zeros((self.n_agents, self.n_enemies), np.bool_)
        return super().reset()

    def _teams(self) -> tuple[list[Unit], list[Unit]]:
        teams = self.config["team_gen"]
        allies, enemies = self.config["ally_start_positions"]["item"], self.config["enemy_start_positions"]["item"]
        return (
            [Unit(name, *point) for name, point in zip(teams["ally_team"], allies, strict=True)],
            [Unit(name, *point) for name, point in zip(teams["enemy_team"], enemies, strict=True)],
        )

    def get_obs(self) -> list[np.ndarray]:
        agents = list(range(self.n_agents))
        random.shuffle(agents)
        for agent in agents:
            for index, enemy in enumerate(self.battle.enemies):
                near = distance(enemy, self.battle.allies[agent]) < SIGHT
                if near and self.owners[index] is None:
                    self.owners[index] = agent
                    draws = np.random.rand(self.n_agents)  # noqa: NPY002 - as in the package
                    self.seen[:, index] = draws < self.prob_obs_enemy
                    self.seen[agent, index] = True
        time = [self.episode_steps / self.episode_limit] * self.obs_timestep_number  # for the dead too
        return [np.append(self.battle.observe(agent, seen=self.seen[agent]), time) for agent in range(self.n_agents)]

    def get_env_info(self) -> dict[str, Any]:
        info = super().get_env_info()
        return info | {"obs_shape": info["obs_shape"] + self.obs_timestep_number}


class WeightedTeams:
    def __init__(self, config: dict[str, Any]) -> None:
        self.config, self.rng = config, np.random.default_rng()
        assert len(config["unit_types"]) == len(config["weights"]) == 3

    def _team(self, size: int) -> list[str]:
        exceptions = self.config.get("exception_unit_types", [])
        team: list[str] = []
        while not team or all(name in exceptions for name in team):
            team = self.rng.choice(self.config["unit_types"], size=size, p=self.config["weights"]).tolist()
            random.shuffle(team)
        return team

    def generate(self) -> dict[str, Any]:
        agents, enemies = self.config["n_units"], self.config["n_enemies"]
        team = self._team(agents)
        more = self._team(enemies - agents) if enemies > agents else []
        return {self.config["env_key"]: {"ally_team": team, "enemy_team": [*team, *more], "id": 0}}


class Positions:
    """Two distributions in one, as in the package."""

    def __init__(self, config: dict[str, Any], *, nested: bool = True) -> None:
        self.config, self.rng = config, np.random.default_rng()
        if nested:
            self.surrounded_distribution = Positions(config, nested=False)

    def draw(self, size: int) -> np.ndarray:
        return self.rng.uniform((8, 8), (self.config["map_x"] - 8, self.config["map_y"] - 8), (size, 2))

    def generate(self) -> dict[str, Any]:
        chosen = self.surrounded_distribution if self.rng.random() > self.config["p"] else self
        return {
            "ally_start_positions": {"item": chosen.draw(self.config["n_units"]), "id": 0},
            "enemy_start_positions": {"item": chosen.draw(self.config["n_enemies"]), "id": 0},
        }


DISTRIBUTIONS = {"weighted_teams": WeightedTeams, "surrounded_and_reflect": Positions}


class StarCraftCapabilityEnvWrapper:
    battles: type[GeneratedBattles]

    def __init__(self, **kwargs: Any) -> None:
        config = kwargs["capability_config"]
        self.env_key_to_distribution_map = {}
        for key, entry in config.items():
            if key not in ("n_units", "n_enemies"):
                # Writes into what it was given.
                entry.update(env_key=key, n_units=config["n_units"], n_enemies=config["n_enemies"])
                self.env_key_to_distribution_map[key] = DISTRIBUTIONS[entry["dist_type"]](entry)
        self.env = self.battles(**kwargs)

    def reset(self) -> Any:
        try:
            config: dict[str, Any] = {}
            for distribution in self.env_key_to_distribution_map.values():
                config |= distribution.generate()
            return self.env.reset(config)
        except CannotResetException:
            self.reset()  # and nothing is returned
            return None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)


def install_smac(monkeypatch: Any) -> type[StarCraft2Env]:
    """Puts the stand-ins in the place of smac and smacv2. Returns the class whose ``games`` lists all that are made."""
    games: list[StarCraft2Env] = []
    trouble: list[Exception | str | None] = []
    env = type("StarCraft2Env", (StarCraft2Env,), {"games": games, "trouble": trouble})
    battles = type("GeneratedBattles", (GeneratedBattles,), {"games": games, "trouble": trouble})
    wrapper = type("StarCraftCapabilityEnvWrapper", (StarCraftCapabilityEnvWrapper,), {"battles": battles})
    _add_module(monkeypatch, "smac")
    _add_module(monkeypatch, "smac.env", StarCraft2Env=env)
    for name in ("smacv2", "smacv2.env", "smacv2.env.starcraft2"):
        _add_module(monkeypatch, name)
    _add_module(monkeypatch, "smacv2.env.starcraft2.wrapper", StarCraftCapabilityEnvWrapper=wrapper)
    return env


def _add_module(monkeypatch: Any, name: str, **contents: Any) -> None:
    module = ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, name, module)


# ---------------------------------------------------------------------------------------------------------------------
# smaclite
# ---------------------------------------------------------------------------------------------------------------------


class CombatType(Enum):
    DAMAGE = "DAMAGE"
    HEALING = "HEALING"


class SMACliteEnv(gymnasium.Env):
    """The interface of smaclite, whose agents are in the order of the map and which has no time limit."""

    spread = 8

    def __init__(self, map_name: str, render_mode: str | None = None) -> None:
        scenario = MAPS[map_name]
        self.scenario = scenario
        self.n_agents = sum(number for _, number in scenario.allies)
        self.n_enemies = sum(number for _, number in scenario.enemies)
        ids = {name: index for index, name in enumerate(scenario.types)}
        self.map_info = SimpleNamespace(unit_type_ids=ids or None)
        self.n_actions = 6 + self.n_enemies
        types = len(scenario.types)
        shields = [team[0][0] in SHIELD for team in (scenario.allies, scenario.enemies)]
        self.enemy_feat_size = 5 + shields[1] + types
        self.ally_feat_size = 5 + shields[0] + types
        self.ally_state_feat_size = 4 + shields[0] + types
        self.obs_size = 4 + self.n_enemies * self.enemy_feat_size + (self.n_agents - 1) * self.ally_feat_size
        self.obs_size += 1 + shields[0] + types
        self.state_size = self.n_agents * (self.ally_state_feat_size + self.n_actions)
        self.state_size += self.n_enemies * (3 + shields[1] + types)
        self.action_space = spaces.Tuple([spaces.Discrete(self.n_actions)] * self.n_agents)
        box = spaces.Box(-1, 1, (self.obs_size,), np.float32)
        self.observation_space = spaces.Tuple([box] * self.n_agents)
        self.last_actions = np.zeros((self.n_agents, self.n_actions))
        self.closes = 0

    @property
    def agents(self) -> dict[int, Any]:
        """The living, by number."""
        kinds = {True: CombatType.HEALING, False: CombatType.DAMAGE}
        return {
            index: SimpleNamespace(type=unit.name, pos=unit.pos, combat_type=kinds[unit.heals])
            for index, unit in enumerate(self.battle.allies)
            if unit.health > 0
        }

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.battle = Battle(
            place(self.scenario.allies, 14, 16),
            place(self.scenario.enemies, 20, 16),
            types=self.scenario.types,
            has_position=False,
            generator=np.random.default_rng(seed),  # without a seed too
            spread=self.spread,
        )
        self.battle.last_actions = self.last_actions  # of the episode before
        return self._obs(), {"battle_won": False}

    def step(self, actions: list[int]) -> Any:
        assert len(actions) == self.n_agents
        assert all(type(action) is int for action in actions)
        for agent, (action, legal) in enumerate(zip(actions, self.get_avail_actions(), strict=True)):
            assert self.battle.allies[agent].health > 0 or action == 0
            if not legal[action]:
                raise ValueError(f"Invalid action for agent {agent}: {action}")
        reward = self.battle.advance(actions)
        self.last_actions = self.battle.last_actions
        allies, enemies = self.battle.left(self.battle.allies), self.battle.left(self.battle.enemies)
        reward = (reward + 200 * (enemies == 0)) * 20 / (10 * self.n_enemies + 200 + self.battle.worth)
        return self._obs(), reward, enemies == 0 or allies == 0, False, {"battle_won": enemies == 0}

    def _obs(self) -> tuple[np.ndarray, ...]:
        return tuple(self.battle.observe(agent) for agent in range(self.n_agents))

    def get_avail_actions(self) -> list[np.ndarray]:
        return [np.array(self.battle.legal(agent), np.float64) for agent in range(self.n_agents)]

    def get_state(self) -> np.ndarray:
        return self.battle.state()

    def close(self) -> None:
        self.closes += 1


def install_smaclite(monkeypatch: Any, *, spread: int = 8) -> None:
    """Puts the stand-in in the place of smaclite; ``spread`` of 0 makes it deterministic."""
    env = type("SMACliteEnv", (SMACliteEnv,), {"spread": spread})
    for name in MAPS:
        spec = gymnasium.envs.registration.EnvSpec(f"smaclite/{name}-v0", entry_point=env, kwargs={"map_name": name})
        monkeypatch.setitem(gymnasium.registry, spec.id, spec)
    _add_module(monkeypatch, "smaclite")
