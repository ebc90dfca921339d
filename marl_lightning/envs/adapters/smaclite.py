"""SMAClite (Michalski et al. 2023, arXiv 2305.05566): SMAC's battles without StarCraft II, in pure Python."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from marl_lightning.envs.base import MultiAgentEnv, Observations, Step
from marl_lightning.envs.spec import EnvSpec, GroupSpec
from marl_lightning.envs.validation import action_arrays, check_legal

GROUP = "agents"
NOOP = 0  # legal for the dead only, who have nothing else
FIRST_TARGET = 6  # the first action that aims at a unit; the others are no-op, stop and four moves

_NUM_MOVES = 4
_HEALTH = 4  # where its health is among the features of an enemy
_NUM_SEEDS = 2**31

LIMITS: Mapping[str, int] = MappingProxyType(
    {
        "10m_vs_11m": 150,
        "27m_vs_30m": 180,
        "2c_vs_64zg": 400,
        "2s3z": 120,
        "2s_vs_1sc": 300,
        "3s5z": 150,
        "3s5z_vs_3s6z": 170,
        "3s_vs_5z": 250,
        "MMM": 150,
        "MMM2": 180,
        "bane_vs_bane": 200,
        "corridor": 400,
    }
)
"""The maps of the package and the env steps of an episode in SMAC."""


def scenarios() -> tuple[str, ...]:
    """Returns the names of the maps. Raises ``ImportError`` if smaclite is not installed."""
    if importlib.util.find_spec("smaclite") is None:  # importing it would take long
        raise ImportError(_missing("smaclite"))
    return tuple(LIMITS)


def make(scenario: str, **kwargs: Any) -> MultiAgentEnv:
    """Returns one instance; arguments and errors as for :class:`SMACliteAdapter`."""
    return SMACliteAdapter(scenario=scenario, **kwargs)


class SMACliteAdapter(MultiAgentEnv):
    """One battle of SMAClite, with what it lacks to be read like one of SMAC.

    Agents ``agent_0`` … of the group ``"agents"`` get SMAC's observations, legal actions, state and team reward. A dead
    agent is not alive, observes zeros, and its only legal action is the no-op, 0.

    What is changed:

    * The time limit is that of SMAC and truncates; the package has none. The end of a battle terminates.
    * Agents are sorted by type and start position (x, then y) as in SMAC. In the package they are in the order in which
      the map lists them, which on some maps begins with the last type of SMAC. Wherever agents are counted, in
      observations, in the state and in the actions of those that heal, our order counts.
    * A battle in which both sides lose their last units at once is not won. Its reward is that of the package,
      which includes the one for winning.
    * A first state does not show the last actions of the episode before.

    A seed is the one of a generator that gives every episode its own. Games cannot be saved.

    ``info`` has ``battle_won`` (1.0 in the step that wins).

    Args:
        scenario: name of the map, one of :data:`LIMITS`.
        episode_limit: env steps; by default those of the map in SMAC.
        **options: arguments of the package, given to ``gymnasium.make``.

    Raises:
        ImportError: if smaclite is not installed; says where it is found.
        ValueError: if there is no such map, or the limit is less than 1.
    """

    def __init__(self, *, scenario: str, episode_limit: int | None = None, **options: Any) -> None:
        if scenario not in LIMITS:
            raise ValueError(f"unknown map {scenario!r}: choose one of {', '.join(LIMITS)}")
        limit = LIMITS[scenario] if episode_limit is None else episode_limit
        if limit < 1:
            raise ValueError(f"episode_limit must be at least 1, got {episode_limit}")
        try:
            importlib.import_module("smaclite")  # registers its games
        except ModuleNotFoundError as error:
            raise ImportError(_missing(error.name or "smaclite")) from error
        self._env = gymnasium.make(f"smaclite/{scenario}-v0", disable_env_checker=True, **options).unwrapped
        self._rng = np.random.default_rng()
        self._env.reset(seed=0)  # places the units, always in the same way
        self._order = _AgentOrder(self._env)
        group = GroupSpec(
            agents=tuple(f"agent_{index}" for index in range(self._env.n_agents)),
            observation_space=spaces.Box(-np.inf, np.inf, (self._env.obs_size,), np.float32),
            action_space=spaces.Discrete(self._env.n_actions),
        )
        self.spec = EnvSpec(
            name=f"smaclite/{scenario}",
            groups={GROUP: group},
            state_size=self._env.state_size,
            episode_limit=limit,
            info_keys=("battle_won",),
            shared_reward=True,
            metadata={"backend": "smaclite"},
        )
        self._elapsed = 0
        self._over = True
        self._closed = False

    def reset(self, *, seed: int | None = None) -> Observations[np.ndarray]:
        """See :meth:`MultiAgentEnv.reset`."""
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        observation, _ = self._env.reset(seed=int(self._rng.integers(_NUM_SEEDS)))
        self._elapsed = 0
        self._over = False
        return self._observe(observation)

    def step(self, actions: Mapping[str, np.ndarray]) -> Step[np.ndarray]:
        """See :meth:`MultiAgentEnv.step`."""
        if self._over:
            raise RuntimeError("the episode is over or has not begun: call reset before step")
        arrays = action_arrays(self.spec, actions, ())
        check_legal(self.spec, arrays, action_mask={GROUP: self._action_mask}, alive={GROUP: self._alive})
        chosen = np.where(self._alive, arrays[GROUP], NOOP)
        observation, reward, terminated, _, info = self._env.step(self._order.package_actions(chosen).tolist())
        self._elapsed += 1
        terminated = bool(terminated)
        truncated = not terminated and self._elapsed >= self.spec.episode_limit
        self._over = terminated or truncated
        observations = self._observe(observation)
        return Step(
            observations=observations,
            reward={GROUP: np.full(self.spec.num_agents, reward, np.float32)},
            terminated=terminated,
            truncated=truncated,
            info={"battle_won": float(info["battle_won"] and self._alive.any())},
        )

    def close(self) -> None:
        """See :meth:`MultiAgentEnv.close`."""
        if not self._closed:
            self._env.close()
        self._closed = True

    def _observe(self, package_observation: tuple[np.ndarray, ...]) -> Observations[np.ndarray]:
        mask = self._order.mask(np.array(self._env.get_avail_actions(), np.bool_))
        alive = ~mask[:, NOOP]
        observation = self._order.observation(np.array(package_observation, np.float32), mask)
        observation[~alive] = 0
        state = self._order.state(np.array(self._env.get_state(), np.float32), is_first=self._elapsed == 0)
        # The result belongs to the caller, who may write into it.
        self._action_mask, self._alive = mask.copy(), alive.copy()
        return Observations(
            observation={GROUP: observation}, action_mask={GROUP: mask}, alive={GROUP: alive}, state=state
        )


class _AgentOrder:
    """Translates from the package's order of agents to that of SMAC, and back.

    An entry of ours is one of the package that lies elsewhere, so arrays are translated by indexing.

    Args:
        env: the package's game after a reset.
    """

    def __init__(self, env: Any) -> None:
        types = env.map_info.unit_type_ids or {}  # numbered as in SMAC; not if there is one type only

        def rank(index: int) -> tuple[int, float, float]:
            unit = env.agents[index]
            return types.get(unit.type, 0), float(unit.pos[0]), float(unit.pos[1])

        self._agents = np.array(sorted(range(env.n_agents), key=rank))
        healers = [index for index, agent in enumerate(self._agents) if _heals(env.agents[agent])]
        self._healers = np.array(healers, np.int64)[:, None]
        enemies = np.arange(env.n_enemies)
        self._attacks = FIRST_TARGET + enemies
        self._attackable = _NUM_MOVES + enemies * env.enemy_feat_size
        self._health = self._attackable + _HEALTH
        self._actions = self._action_indices(env.n_actions)
        self._observation = self._observation_indices(env)
        self._last_actions = slice(env.state_size - self._actions.size, None)
        self._state = self._state_indices(env)

    def package_actions(self, actions: np.ndarray) -> np.ndarray:
        """Returns the package's actions ``[A]``, from ours."""
        result = np.empty_like(actions)
        result[self._agents] = np.take_along_axis(self._actions, actions[:, None], axis=1)[:, 0]
        return result

    def mask(self, mask: np.ndarray) -> np.ndarray:
        """Returns our legal actions ``[A, n]``, from the package's."""
        return np.take_along_axis(mask[self._agents], self._actions, axis=1)

    def observation(self, observation: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Returns our observations ``[A, obs_size]``, from the package's and our legal actions ``[A, n]``."""
        result = np.take_along_axis(observation[self._agents], self._observation, axis=1)
        # Whether a visible enemy can be attacked is the legality of the action of its number. In SMAC too, that of an
        # agent that heals is about the ally of that number.
        is_visible = result[self._healers, self._health] > 0
        result[self._healers, self._attackable] = is_visible & mask[self._healers, self._attacks]
        return result

    def state(self, state: np.ndarray, *, is_first: bool) -> np.ndarray:
        """Returns our state ``[state_size]``, from the package's, which keeps last actions over the end of episodes."""
        result = state[self._state]
        if is_first:
            result[self._last_actions] = 0
        return result

    def _action_indices(self, num_actions: int) -> np.ndarray:
        """Returns ``[A, n]``: agent ``i`` means by its action ``j`` what it means by ``[i, j]`` in the package."""
        indices = np.tile(np.arange(num_actions), (len(self._agents), 1))
        # There is an action for every ally wherever there are agents that heal.
        indices[self._healers, FIRST_TARGET + np.arange(len(self._agents))] = FIRST_TARGET + self._agents
        return indices

    def _observation_indices(self, env: Any) -> np.ndarray:
        """Returns ``[A, obs_size]``: where the entries of agent ``i`` are in what the package tells that agent."""
        indices = np.tile(np.arange(env.obs_size), (env.n_agents, 1))
        first = _NUM_MOVES + env.n_enemies * env.enemy_feat_size
        size = env.ally_feat_size
        for row, agent in enumerate(self._agents):
            others = np.delete(self._agents, row)
            blocks = others - (others > agent)  # an agent is not among its allies
            entries = first + blocks[:, None] * size + np.arange(size)
            indices[row, first : first + entries.size] = entries.ravel()
        return indices

    def _state_indices(self, env: Any) -> np.ndarray:
        """Returns ``[state_size]``: where the entries of our state are in the package's."""
        indices = np.arange(env.state_size)
        allies = indices[: env.n_agents * env.ally_state_feat_size].reshape(env.n_agents, -1)
        allies[:] = allies[self._agents]
        actions = indices[self._last_actions].reshape(self._actions.shape)
        actions[:] = np.take_along_axis(actions[self._agents], self._actions, axis=1)
        return indices


def _heals(unit: Any) -> bool:
    return unit.combat_type.name == "HEALING"


def _missing(module: str) -> str:
    return (
        f"smaclite needs a package that is missing ({module}): it is not on PyPI, so get a checkout of "
        "https://github.com/uoe-agents/smaclite and pip install rtree scikit-learn pygame-ce, then "
        "pip install --no-deps CHECKOUT"
    )
