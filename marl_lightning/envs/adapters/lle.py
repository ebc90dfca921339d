"""The laser learning environment (package laser-learning-environment): cooperation in a grid with coloured lasers."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from gymnasium import spaces

from marl_lightning.envs.adapters.packages import require
from marl_lightning.envs.base import MultiAgentEnv, Observations, Step
from marl_lightning.envs.spec import EnvSpec, GroupSpec
from marl_lightning.envs.validation import action_arrays, check_legal

GROUP = "agent"

_LEVELS = {f"level{number}": number for number in range(1, 7)}


def scenarios() -> tuple[str, ...]:
    """Returns ``"level1"`` to ``"level6"``. Raises ``ImportError`` if laser-learning-environment is not installed."""
    require("lle", extra="lle")
    return tuple(_LEVELS)


def make(scenario: str, **kwargs: Any) -> MultiAgentEnv:
    """Returns one instance; arguments and errors as for :class:`LLEAdapter`."""
    return LLEAdapter(scenario=scenario, **kwargs)


class LLEAdapter(MultiAgentEnv):
    """One of the six levels of the package. All agents are the group ``"agent"`` and get the reward of the team.

    Actions are north, south, east, west and stay. An agent may not walk into walls and, once it stands on an exit, only
    stay; it is alive all the same. Walking into a laser of another colour is legal and kills.

    An episode terminates when all agents have reached an exit or one has been killed, and is truncated by the time
    limit, which the package lacks. The state is the package's own, with positions in cells; nothing happens at random
    but the colours of ``randomize_lasers``.

    ``info`` has ``gems_collected``, and ``exit_rate``, the part of the agents that stand on an exit.

    Args:
        scenario: ``"level1"`` to ``"level6"``.
        obs_type: kind of observation, such as ``"layered"`` ``[layers, height, width]``, ``"flattened"``,
            ``"partial7x7"``, ``"perspective"``, ``"state"`` or ``"rgb-image"`` (uint8); see the package for all.
        state_type: kind of observation that is flattened to become the state.
        walkable_lasers: whether agents may walk into active lasers of other colours.
        randomize_lasers: whether each episode draws the colours of the lasers.
        episode_limit: env steps; by default half as many as the map has cells, as the authors of the game do.

    Raises:
        ImportError: if laser-learning-environment is not installed.
        ValueError: if there is no such level or kind of observation, or the limit is less than 1.
    """

    def __init__(
        self,
        *,
        scenario: str,
        obs_type: str = "layered",
        state_type: str = "state",
        walkable_lasers: bool = True,
        randomize_lasers: bool = False,
        episode_limit: int = 78,
    ) -> None:
        if scenario not in _LEVELS:
            raise ValueError(f"unknown level {scenario!r}: choose one of {', '.join(_LEVELS)}")
        if episode_limit < 1:
            raise ValueError(f"episode_limit must be at least 1, got {episode_limit}")
        package = require("lle", extra="lle")
        builder = package.level(_LEVELS[scenario]).walkable_lasers(walkable_lasers)
        builder.obs_type(_kind(package, "obs_type", obs_type)).state_type(_kind(package, "state_type", state_type))
        if randomize_lasers:
            builder.randomize_lasers()
        self._env = builder.build()
        self._world_state = package.WorldState
        # The package draws colours from Python's global generator; ours takes its place for the time of a reset.
        self._generator = random.Random()
        height, width, agents = self._env.world.height, self._env.world.width, self._env.n_agents
        is_image = obs_type == "rgb-image"
        group = GroupSpec(
            agents=tuple(f"{GROUP}_{index}" for index in range(agents)),
            observation_space=spaces.Box(
                low=0 if is_image else -1,
                high=255 if is_image else max(height, width) if obs_type == "state" else 1,
                shape=self._env.observation_shape,
                dtype=np.uint8 if is_image else np.float32,
            ),
            action_space=spaces.Discrete(self._env.n_actions),
        )
        self.spec = EnvSpec(
            name=f"lle/{scenario}",
            groups={GROUP: group},
            state_size=int(np.prod(self._env.state_shape)),
            episode_limit=episode_limit,
            info_keys=("gems_collected", "exit_rate"),
            shared_reward=True,
            can_checkpoint=True,
            metadata={"backend": "lle"},
        )
        self._elapsed = 0
        self._over = True

    def reset(self, *, seed: int | None = None) -> Observations[np.ndarray]:
        """See :meth:`MultiAgentEnv.reset`."""
        with self._as_global_generator():
            observation, state = self._env.reset(seed=seed)
        self._elapsed = 0
        self._over = False
        return self._observe(observation, state)

    def step(self, actions: Mapping[str, np.ndarray]) -> Step[np.ndarray]:
        """See :meth:`MultiAgentEnv.step`."""
        if self._over:
            raise RuntimeError("the episode is over or has not begun: call reset before step")
        arrays = action_arrays(self.spec, actions, ())
        mask = self._env.available_actions()
        check_legal(self.spec, arrays, action_mask={GROUP: mask}, alive={GROUP: np.ones(len(mask), np.bool_)})
        step = self._env.step(arrays[GROUP])
        self._elapsed += 1
        terminated = bool(step.done)
        truncated = not terminated and self._elapsed >= self.spec.episode_limit
        self._over = terminated or truncated
        return Step(
            observations=self._observe(step.obs, step.state),
            reward={GROUP: np.full(len(mask), step.reward.item(), np.float32)},
            terminated=terminated,
            truncated=truncated,
            info={key: float(step.info[key]) for key in self.spec.info_keys},
        )

    def render(self) -> np.ndarray:
        """See :meth:`MultiAgentEnv.render`."""
        return self._env.get_image()

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`MultiAgentEnv.state_dict`."""
        world = self._env.world
        state = world.get_state()
        version, numbers, gauss = self._generator.getstate()
        return {
            "positions": [list(position) for position in state.agents_positions],
            "gems": list(state.gems_collected),
            "alive": list(state.agents_alive),
            "colours": [source.colour for source in world.laser_sources],
            "generator": [version, list(numbers), gauss],
            "elapsed": self._elapsed,
            "over": self._over,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :meth:`MultiAgentEnv.load_state_dict`."""
        for source, colour in zip(self._env.world.laser_sources, state["colours"], strict=True):
            source.set_colour(colour)
        # A reset makes the package draw the colours into its observations, and must not choose other ones.
        self._env.randomize_lasers, randomize = False, self._env.randomize_lasers
        self._env.reset()
        self._env.randomize_lasers = randomize
        positions = [tuple(position) for position in state["positions"]]
        self._env.set_state(self._world_state(positions, state["gems"], state["alive"]))
        version, numbers, gauss = state["generator"]
        self._generator.setstate((version, tuple(numbers), gauss))
        self._elapsed = state["elapsed"]
        self._over = state["over"]

    def _observe(self, observation: Any, state: Any) -> Observations[np.ndarray]:
        group = self.spec.groups[GROUP]
        alive = np.array([agent.is_alive for agent in self._env.world.agents])
        stacked = observation.data.astype(group.observation_space.dtype)
        stacked[~alive] = 0
        return Observations(
            observation={GROUP: stacked},
            action_mask={GROUP: observation.available_actions.copy()},
            alive={GROUP: alive},
            state=state.data.astype(np.float32).ravel(),
        )

    @contextmanager
    def _as_global_generator(self) -> Iterator[None]:
        outside = random.getstate()
        random.setstate(self._generator.getstate())
        try:
            yield
        finally:
            self._generator.setstate(random.getstate())
            random.setstate(outside)


def _kind(package: Any, argument: str, name: str) -> Any:
    try:
        return package.ObservationType(name)
    except ValueError as error:
        known = ", ".join(kind.value for kind in package.ObservationType)
        raise ValueError(f"{argument} must be one of {known}, got {name!r}") from error
