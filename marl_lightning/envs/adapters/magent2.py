"""MAgent2: battles and hunts among hundreds of agents in a grid, stepped in arrays of whole teams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces

from marl_lightning.envs.adapters.packages import require
from marl_lightning.envs.base import MultiAgentEnv, Observations, Step
from marl_lightning.envs.spec import EnvSpec, GroupSpec
from marl_lightning.envs.validation import action_arrays, check_legal

if TYPE_CHECKING:
    from magent2.environments.magent_env import magent_parallel_env

_SCENARIOS = (
    "adversarial_pursuit_v4",
    "battle_v4",
    "battlefield_v5",
    "combined_arms_v6",
    "gather_v5",
    "tiger_deer_v4",
)
_HEALTH = 2  # channel of the view in which an agent sees the health of its own team


def scenarios() -> tuple[str, ...]:
    """Returns the six games of the package. Raises ``ImportError`` if magent2 is not installed."""
    require("magent2.environments", extra="magent2")
    return _SCENARIOS


def make(scenario: str, **kwargs: Any) -> MultiAgentEnv:
    """Returns one instance; arguments and errors as for :class:`MAgent2Adapter`."""
    return MAgent2Adapter(scenario=scenario, **kwargs)


def engine_seed(seed: int) -> int:
    """Returns the seed of the engine, 31 bits, for a seed of an instance.

    The engine draws from a linear congruential generator, to which the seeds 0 and 1 are the same, and other
    neighbours, such as the instances of a vector environment get, are much alike.
    """
    return int(np.random.SeedSequence(seed).generate_state(1)[0] >> 1)


class MAgent2Adapter(MultiAgentEnv):
    """A game of MAgent2, played on its engine directly, and equal to the package's ``parallel_env``.

    **Groups.** The teams of the package: ``predator`` and ``prey``, ``red`` and ``blue``, ``redmelee``, ``redranged``,
    ``bluemelee`` and ``blueranged``, ``omnivore``, ``deer`` and ``tiger``. Observations are the fields around an agent,
    float32 ``[width, height, channels]``. All actions are legal; rewards are individual.

    **Ends.** Agents die one by one. The episode terminates when a team (or, in ``gather_v5``, the food) has been wiped
    out, and is truncated after ``max_cycles`` env steps. The successor of the last step shows who is left.

    **State.** The map of the package, flat: walls, and for every team (and the food) where its members are and their
    health, 10 125 to 200 000 numbers. It is often far larger than what an agent sees, and memory of rollouts grows with
    it: where nothing uses it, ``with_state=False`` leaves it out.

    **Differences.** In the package, all teams take the actions of the first one in the first step of every episode; the
    state shows walls of another map, raises when a team has been wiped out, and mixes up channels of ``gather_v5`` with
    ``extra_features``. Here they do not. Seeds go through :func:`engine_seed`.

    Games cannot be saved: the engine does not tell the state of its random generator.

    Args:
        scenario: one of the six, such as ``"battle_v4"``.
        with_state: whether there is a state; without one ``spec.state_size`` is 0.
        **kwargs: of the package: ``max_cycles``, ``map_size`` (not for ``gather_v5``), ``minimap_mode``,
            ``extra_features``, ``render_mode``, and rewards such as ``step_reward``; ``None`` takes its default.

    Raises:
        ImportError: if magent2 is not installed.
        ValueError: if there is no such game or ``max_cycles`` is less than 1.
    """

    def __init__(self, *, scenario: str, with_state: bool = True, **kwargs: Any) -> None:
        if scenario not in _SCENARIOS:
            raise ValueError(f"unknown scenario {scenario!r}: choose one of {', '.join(_SCENARIOS)}")
        package = require(f"magent2.environments.{scenario}", extra="magent2")
        self._package: magent_parallel_env = package.parallel_env(
            **{name: value for name, value in kwargs.items() if value is not None}
        )
        if self._package.max_cycles < 1:
            raise ValueError(f"max_cycles must be at least 1, got {self._package.max_cycles}")
        self._engine = self._package.env
        teams = dict.fromkeys(agent.rpartition("_")[0] for agent in self._package.possible_agents)
        self._handles = dict(zip(teams, self._package.handles, strict=True))
        self._with_state = with_state
        self.spec = EnvSpec(
            name=f"magent2/{scenario}",
            groups={team: _group(self._package, team) for team in teams},
            state_size=int(np.prod(self._package.state_space.shape)) if with_state else 0,
            episode_limit=self._package.max_cycles,
            metadata={"backend": "magent2"},
        )
        self._rows: dict[str, np.ndarray] = {}  # places in the group of those whom the engine still has, in its order
        self._alive: dict[str, np.ndarray] = {}
        self._action_mask: dict[str, np.ndarray] = {}
        self._walls = np.empty((0, 2), np.int64)
        self._elapsed = 0
        self._over = True

    def reset(self, *, seed: int | None = None) -> Observations[np.ndarray]:
        """See :meth:`MultiAgentEnv.reset`."""
        self._package.reset(seed=None if seed is None else engine_seed(seed))
        for team, handle in self._handles.items():
            ids = self._engine.get_agent_id(handle)
            self._rows[team] = ids - ids[:1]  # ids run through all teams, in the order in which agents were placed
        self._walls = self._engine._get_walls_info()
        self._elapsed = 0
        self._over = False
        everyone = {team: np.ones(len(rows), np.bool_) for team, rows in self._rows.items()}
        return self._observations(self._look(everyone), everyone)

    def step(self, actions: Mapping[str, np.ndarray]) -> Step[np.ndarray]:
        """See :meth:`MultiAgentEnv.step`."""
        if self._over:
            raise RuntimeError("the episode is over or has not begun: call reset before step")
        arrays = action_arrays(self.spec, actions, ())
        check_legal(self.spec, arrays, action_mask=self._action_mask, alive=self._alive)
        for team, handle in self._handles.items():
            self._engine.set_action(handle, np.ascontiguousarray(arrays[team][self._rows[team]], np.int32))
        terminated = self._engine.step()
        self._elapsed += 1
        survives = {team: self._engine.get_alive(handle) for team, handle in self._handles.items()}
        observation = self._look(survives)
        reward = {}  # only now: to ask for rewards changes what agents see as their last one
        for team, handle in self._handles.items():
            reward[team] = np.zeros(self.spec.groups[team].num_agents, np.float32)
            reward[team][self._rows[team]] = self._engine.get_reward(handle)
        self._engine.clear_dead()
        observations = self._observations(observation, survives)
        truncated = not terminated and self._elapsed >= self.spec.episode_limit
        self._over = terminated or truncated
        return Step(observations=observations, reward=reward, terminated=terminated, truncated=truncated, info={})

    def render(self) -> np.ndarray:
        """See :meth:`MultiAgentEnv.render`. The game must have been made with ``render_mode="rgb_array"``."""
        mode = self._package.render_mode
        if mode != "rgb_array":
            raise NotImplementedError(f'{self.spec.name} needs render_mode="rgb_array" to be rendered, got {mode!r}')
        return self._package.render()

    def close(self) -> None:
        """See :meth:`MultiAgentEnv.close`."""
        self._package.close()

    def _look(self, survives: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns what the agents see that are left.

        Args:
            survives: per team whether each of those that the engine has is left.
        """
        observation = {}
        for team, handle in self._handles.items():
            group, rows = self.spec.groups[team], self._rows[team]
            # Written from the engine's own arrays, which the next call fills anew, without copies on the way: for
            # arrays of this size, most of the time of a copy goes into fetching fresh memory from the system.
            view, features = self._engine.get_observation(handle)
            fields = observation[team] = np.zeros((group.num_agents, *group.observation_shape), np.float32)
            channels = view.shape[-1]
            fields[..., :channels][rows] = view
            if shown := group.observation_shape[-1] - channels:
                fields[..., channels:][rows] = features[:, None, None, -shown:]
            fields[rows[~survives[team]]] = 0
        return observation

    def _observations(
        self, observation: dict[str, np.ndarray], survives: Mapping[str, np.ndarray]
    ) -> Observations[np.ndarray]:
        """Notes who is left; arguments as returned and taken by :meth:`_look`. The engine has forgotten the others."""
        for team, group in self.spec.groups.items():
            self._rows[team] = self._rows[team][survives[team]]
            self._alive[team] = np.zeros(group.num_agents, np.bool_)
            self._alive[team][self._rows[team]] = True
            self._action_mask[team] = np.repeat(self._alive[team][:, None], group.action_size, axis=1)
            self._action_mask[team][:, 0] = True
        return Observations(
            observation=observation,
            # The caller may write into what it gets.
            action_mask={team: mask.copy() for team, mask in self._action_mask.items()},
            alive={team: alive.copy() for team, alive in self._alive.items()},
            state=self._state() if self._with_state else np.empty(0, np.float32),
        )

    def _state(self) -> np.ndarray:
        """Returns the package's map of all teams, flat."""
        handles = self._engine.get_handles()
        state = np.zeros(self._package.state_space.shape, np.float32)
        state[self._walls[:, 0], self._walls[:, 1], 0] = 1
        for index, handle in enumerate(handles):
            view, features = self._engine.get_observation(handle)
            x, y = self._engine.get_pos(handle).T
            state[x, y, 1 + 2 * index] = 1
            state[x, y, 2 + 2 * index] = view[:, view.shape[1] // 2, view.shape[2] // 2, _HEALTH]
            if self._package.extra_features:
                known = features[:, :-2] if self._package.minimap_mode else features  # less the own position
                first = 1 + 2 * len(handles)
                state[x, y, first : first + known.shape[1] - 1] = known[:, :-1]
                state[x, y, -1] = known[:, -1]  # the last reward
        return state.ravel()


def _group(package: magent_parallel_env, team: str) -> GroupSpec:
    agents = tuple(agent for agent in package.possible_agents if agent.rpartition("_")[0] == team)
    space = package.observation_space(agents[0])
    low, high = space.low.copy(), space.high.copy()
    if package.extra_features:
        # The package's bounds of the last reward can be passed, since rewards of one step add up.
        reward = -3 if package.minimap_mode else -1
        low[..., reward], high[..., reward] = -np.inf, np.inf
    action_space = package.action_space(agents[0])
    return GroupSpec(
        agents=agents,
        observation_space=spaces.Box(low, high, dtype=np.float32),
        action_space=spaces.Discrete(int(action_space.n)),
    )
