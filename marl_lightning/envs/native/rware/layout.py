"""Sizes, the map and the description of a game, derived from its scenario and the options. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from gymnasium import spaces

from marl_lightning.envs.native.rware.options import RWAREOptions
from marl_lightning.envs.native.rware.scenarios import Scenario
from marl_lightning.envs.spec import EnvSpec, GroupSpec

GROUP = "agents"
"""Name of the only group."""

NUM_ACTIONS = 5
"""None, forward, turn left, turn right, take or put down a shelf."""

NUM_DIRECTIONS = 4
"""Up, down, left, right."""

INFO_KEYS = ("deliveries",)
"""Numbers that every step reports: how many requested shelves were delivered in it."""


class Layout:
    """The map and the sizes of everything that a scenario shows under some options.

    Args:
        scenario: the game.
        options: the switches.

    Attributes:
        height: rows of the map.
        width: columns of the map.
        is_way: ``[height, width]`` bool, where no shelf may be put down: everywhere but at the places of shelves.
        goals: ``[G, 2]`` int64, column and row of the goals, in the order in which deliveries count.
        places: ``[S, 2]`` int64, column and row of the places of shelves, row by row, where the shelves start.
        num_requests: how many shelves are requested at a time.

    Raises:
        ValueError: if the map of the options is no warehouse, has too few cells for the agents or too few shelves for
            the requests.
    """

    def __init__(self, scenario: Scenario, options: RWAREOptions) -> None:
        self.scenario = scenario
        self.options = options
        cells = _read_map(scenario.map if options.layout is None else options.layout)
        self.height, self.width = cells.shape
        self.is_way = cells != "x"
        self.goals = np.argwhere(cells == "g")[:, ::-1].astype(np.int64)
        self.places = np.argwhere(cells == "x")[:, ::-1].astype(np.int64)
        if len(self.goals) == 0:
            raise ValueError("layout needs at least one goal (g)")
        if scenario.num_agents > cells.size:
            raise ValueError(f"layout has {cells.size} cells, too few for {scenario.num_agents} agents")
        if options.normalised_coordinates and min(cells.shape) < 2:
            raise ValueError("layout needs at least two rows and two columns for normalised_coordinates")
        self.num_requests = scenario.num_requests if options.request_queue_size is None else options.request_queue_size
        if self.num_requests >= len(self.places):
            raise ValueError(
                f"{self.num_requests} requests need more than the {len(self.places)} shelves there are, since a "
                f"delivered one is replaced by one not requested: set request_queue_size below {len(self.places)}"
            )

    @property
    def num_agents(self) -> int:
        """Number of agents."""
        return self.scenario.num_agents

    @property
    def num_shelves(self) -> int:
        """Number of shelves."""
        return len(self.places)

    @property
    def observation_shape(self) -> tuple[int, ...]:
        """``(8 + (7 + msg_bits) * W**2,)`` with ``W = 2 * sensor_range + 1``, or ``(layers, W, W)`` for images."""
        width = 2 * self.options.sensor_range + 1
        if self.options.observation_type == "image":
            return (len(self.options.image_observation_layers), width, width)
        return (4 + NUM_DIRECTIONS + width * width * (3 + NUM_DIRECTIONS + self.options.msg_bits),)

    @property
    def agent_size(self) -> int:
        """Entries of one agent in the state."""
        return 4 + NUM_DIRECTIONS + self.options.msg_bits

    @property
    def state_size(self) -> int:
        """Entries of the global state."""
        return (
            self.num_agents * self.agent_size + 3 * self.num_shelves + (self.options.max_inactivity_steps is not None)
        )

    def observation_space(self) -> spaces.Box:
        """Returns the space of one agent's observation."""
        high = np.ones(self.observation_shape, np.float32)
        if self.options.observation_type == "image":
            high[np.array(self.options.image_observation_layers) == "agent_direction"] = NUM_DIRECTIONS
        elif not self.options.normalised_coordinates:
            high[:2] = self.width - 1, self.height - 1
        return spaces.Box(np.zeros_like(high), high, dtype=np.float32)

    def action_space(self) -> spaces.Discrete | spaces.MultiDiscrete:
        """Returns the space of one agent's action, which has a part for every bit of its message."""
        if self.options.msg_bits == 0:
            return spaces.Discrete(NUM_ACTIONS)
        return spaces.MultiDiscrete([NUM_ACTIONS] + [2] * self.options.msg_bits)

    def spec(self, *, can_checkpoint: bool, metadata: Mapping[str, str]) -> EnvSpec:
        """Returns the description of one instance."""
        group = GroupSpec(
            agents=tuple(f"agent_{i}" for i in range(self.num_agents)),
            observation_space=self.observation_space(),
            action_space=self.action_space(),
        )
        return EnvSpec(
            name=f"rware/{self.scenario.name}",
            groups={GROUP: group},
            state_size=self.state_size,
            episode_limit=self.options.max_steps,
            info_keys=INFO_KEYS,
            shared_reward=self.options.reward_type == "global",
            can_checkpoint=can_checkpoint,
            metadata=metadata,
        )


def _read_map(text: str) -> np.ndarray:
    """Returns the characters of a map, ``[height, width]``."""
    lines = text.replace(" ", "").strip().lower().splitlines()
    if len({len(line) for line in lines}) != 1:
        raise ValueError(f"layout must be a rectangle, got lines of {[len(line) for line in lines]} characters")
    cells = np.array([list(line) for line in lines])
    unknown = sorted(set(cells.ravel().tolist()) - set("gx."))
    if unknown:
        raise ValueError(f"layout may have x (shelf), . (way) and g (goal) only, got {unknown}")
    return cells
