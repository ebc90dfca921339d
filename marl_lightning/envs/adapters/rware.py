"""The robotic warehouse as played by the package rware itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from marl_lightning.envs.adapters.packages import require
from marl_lightning.envs.base import MultiAgentEnv, Observations, Step
from marl_lightning.envs.native.rware.layout import GROUP, NUM_DIRECTIONS, Layout
from marl_lightning.envs.native.rware.options import read_options
from marl_lightning.envs.native.rware.render import draw_warehouse
from marl_lightning.envs.native.rware.scenarios import SCENARIOS, parse
from marl_lightning.envs.validation import action_arrays, check_legal

if TYPE_CHECKING:
    from rware.warehouse import Warehouse

_TRANSPOSED_LAYERS = ("agent_direction", "agent_load")


def scenarios() -> tuple[str, ...]:
    """Returns the names of all games that the package registers and can play, without ``rware/``.

    Raises:
        ImportError: if rware is not installed.
    """
    require("rware", extra="rware")
    return SCENARIOS


def make(scenario: str, **options: Any) -> RWAREAdapter:
    """Makes one instance, see :class:`RWAREAdapter`."""
    return RWAREAdapter(scenario=scenario, **options)


class RWAREAdapter(MultiAgentEnv):
    """One instance of the package's game, described as :class:`~marl_lightning.envs.native.rware.RWAREVectorEnv` is.

    The package reports its time limit as termination; here it truncates, and an episode terminates only after too many
    steps without a delivery (``max_inactivity_steps``). Games cannot be saved.

    Args:
        scenario: a name such as ``"rware-tiny-4ag-v2"``.
        **options: fields of :class:`~marl_lightning.envs.native.rware.options.RWAREOptions`.

    Raises:
        ImportError: if rware is not installed.
        TypeError: if an option is unknown.
        ValueError: if the name is unknown, a number is out of range, or images need the layers ``"agent_direction"`` or
            ``"agent_load"``, which the package writes with rows and columns exchanged.
    """

    def __init__(self, *, scenario: str, **options: Any) -> None:
        self._layout = Layout(parse(scenario), read_options(options))
        self.spec = self._layout.spec(can_checkpoint=False, metadata={"backend": "rware"})
        self._env = _make_package_env(self._layout)
        self._over = True

    def reset(self, *, seed: int | None = None) -> Observations[np.ndarray]:
        """See :meth:`MultiAgentEnv.reset`."""
        observations, _ = self._env.reset(seed=seed)
        self._over = False
        return self._observe(observations)

    def step(self, actions: Mapping[str, np.ndarray]) -> Step[np.ndarray]:
        """See :meth:`MultiAgentEnv.step`."""
        if self._over:
            raise RuntimeError("the episode is over or has not begun: call reset before step")
        arrays = action_arrays(self.spec, actions, ())
        check_legal(self.spec, arrays, action_mask={GROUP: self._action_mask()}, alive={GROUP: self._alive()})
        returning = [agent for agent in self._env.agents if agent.has_delivered]
        observations, rewards, self._over, _, _ = self._env.step(arrays[GROUP].tolist())
        limit = self._layout.options.max_inactivity_steps
        terminated = limit is not None and self._env._cur_inactive_steps >= limit
        returned = sum(not agent.has_delivered for agent in returning)
        return Step(
            observations=self._observe(observations),
            reward={GROUP: np.array(rewards, np.float32)},
            terminated=terminated,
            truncated=bool(self._over) and not terminated,
            info={"deliveries": self._count_deliveries(rewards, returned)},
        )

    def render(self) -> np.ndarray:
        """Returns the current picture as uint8 ``[16 * height, 16 * width, 3]``, drawn as that of the native game."""
        agents = [(a.x, a.y, a.dir.value, a.carrying_shelf is not None) for a in self._env.agents]
        shelves = [(shelf.x, shelf.y) for shelf in self._env.shelfs]
        return draw_warehouse(self._layout, np.array(agents, np.int64), np.array(shelves), self._requested())

    def _count_deliveries(self, rewards: list[float], returned: int) -> float:
        """Returns how many shelves were delivered, which only the rewards tell, if ``returned`` were put back."""
        kind = self._layout.options.reward_type
        if kind == "global":
            return float(rewards[0])
        return float(sum(rewards)) if kind == "individual" else 2.0 * float(sum(rewards)) - returned

    def _requested(self) -> np.ndarray:
        """Returns which shelves are requested, ``[S]`` bool."""
        requested = np.zeros(self._layout.num_shelves, np.bool_)
        requested[[shelf.id - 1 for shelf in self._env.request_queue]] = True
        return requested

    def _alive(self) -> np.ndarray:
        return np.ones(self._layout.num_agents, np.bool_)

    def _action_mask(self) -> np.ndarray:
        return np.ones((self._layout.num_agents, self.spec.groups[GROUP].action_size), np.bool_)

    def _observe(self, observations: tuple[np.ndarray, ...]) -> Observations[np.ndarray]:
        return Observations(
            observation={GROUP: np.stack(observations)},
            action_mask={GROUP: self._action_mask()},
            alive={GROUP: self._alive()},
            state=self._state(),
        )

    def _state(self) -> np.ndarray:
        """Returns the global state, which the package does not have."""
        options = self._layout.options
        scale = (self._layout.width - 1, self._layout.height - 1) if options.normalised_coordinates else (1, 1)
        entries: list[float] = []
        for agent in self._env.agents:
            entries += [agent.x / scale[0], agent.y / scale[1], agent.carrying_shelf is not None]
            entries += np.eye(NUM_DIRECTIONS)[agent.dir.value].tolist()
            entries += [agent.has_delivered, *agent.message.tolist()]
        for shelf, requested in zip(self._env.shelfs, self._requested(), strict=True):
            entries += [shelf.x / scale[0], shelf.y / scale[1], requested]
        if options.max_inactivity_steps is not None:
            entries.append(self._env._cur_inactive_steps / options.max_inactivity_steps)
        return np.array(entries, np.float32)


def _make_package_env(layout: Layout) -> Warehouse:
    package = require("rware.warehouse", extra="rware")
    scenario, options = layout.scenario, layout.options
    is_image = options.observation_type == "image"
    transposed = [layer for layer in options.image_observation_layers if layer in _TRANSPOSED_LAYERS]
    if is_image and transposed:
        raise ValueError(
            f"rware writes the image layers {', '.join(transposed)} with rows and columns exchanged, and fails at the "
            "edge of the map: leave them out of image_observation_layers, or use the game of our own (backend=embedded)"
        )
    return package.Warehouse(
        # The map says all about the shelves.
        shelf_columns=1,
        column_height=1,
        shelf_rows=1,
        layout=scenario.map if options.layout is None else options.layout,
        n_agents=scenario.num_agents,
        msg_bits=options.msg_bits,
        sensor_range=options.sensor_range,
        request_queue_size=layout.num_requests,
        max_inactivity_steps=options.max_inactivity_steps,
        max_steps=options.max_steps,
        reward_type=package.RewardType[options.reward_type.upper()],
        observation_type=package.ObservationType[options.observation_type.upper()],
        image_observation_layers=[package.ImageLayer[layer.upper()] for layer in options.image_observation_layers],
        image_observation_directional=options.image_observation_directional,
        normalised_coordinates=options.normalised_coordinates,
    )
