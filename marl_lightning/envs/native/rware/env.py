"""The robotic warehouse as a vector environment."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from marl_lightning.envs.base import Observations
from marl_lightning.envs.native.rware import kernel
from marl_lightning.envs.native.rware.kernel import Constants, Outcome, State, View
from marl_lightning.envs.native.rware.layout import GROUP, Layout
from marl_lightning.envs.native.rware.options import IMAGE_LAYERS, REWARD_TYPES, read_options
from marl_lightning.envs.native.rware.render import draw_warehouse
from marl_lightning.envs.native.rware.scenarios import parse
from marl_lightning.envs.native.vector import NativeVectorEnv


class RWAREVectorEnv(NativeVectorEnv):
    """Many instances of one game, stepped together by compiled kernels that write into preallocated memory.

    Actions of the agents, ``agent_0`` … of the group ``"agents"``, are none, forward, turn left, turn right and take or
    put down a shelf; with ``msg_bits`` they have further parts, the bits to tell. All actions are legal, numbers that
    are out of range count as 0. Agents pass below shelves unless they carry one, and can put it down in any place for
    shelves that is empty. A requested shelf that reaches a goal is delivered: another one is requested in its place.

    Given equal states and actions, everything is equal to rware, except that an episode whose time is up is
    *truncated*; it is *terminated* only after ``max_inactivity_steps`` without a delivery. Where queues of equal
    lengths meet, the agent with the lowest number goes first; in the package this is arbitrary. (Its two image layers
    ``"agent_direction"`` and ``"agent_load"`` exchange rows and columns and fail at the edge of the map; here, they do
    not.) Start states and new requests have the distributions of the package.

    An observation is float32 ``[8 + (7 + msg_bits) * W**2]`` with ``W = 2 * sensor_range + 1``: column, row, whether
    the agent carries a shelf, its direction (up, down, left, right) one-hot, and whether it is on a way, where no shelf
    can be put down; then, for each of the cells around it, row by row: whether there is an agent, its direction
    one-hot (up if there is none) and its message, whether there is a shelf, and whether that is requested. Images are
    float32 ``[layers, W, W]``.

    The state is float32 and tells everything but the time: for every agent column, row, whether it carries a shelf,
    its direction one-hot, whether it is to put back a shelf that was delivered (only if rewards are in two stages) and
    its message; then for every shelf column, row and whether it is requested; then, with ``max_inactivity_steps``, the
    share of them that has passed.

    Pictures are uint8 ``[16 * height, 16 * width, 3]``, see
    :func:`~marl_lightning.envs.native.rware.render.draw_warehouse`.

    Args:
        scenario: a name such as ``"rware-tiny-4ag-v2"``, see :mod:`~marl_lightning.envs.native.rware.scenarios`.
        num_envs: number of instances.
        seed: instance ``i`` is seeded with ``seed + i``, and behaves as the first instance of an environment with that
            seed would.
        num_threads: threads that step the instances, at most one an instance, which pays off for many instances and
            free cores. ``None`` takes one for every 128 instances, at most as many as torch uses. Results do not
            depend on it.
        **options: fields of :class:`~marl_lightning.envs.native.rware.options.RWAREOptions`.

    Attributes:
        options: the switches.
        layout: the map and sizes.

    Raises:
        TypeError: if an option is unknown.
        ValueError: if the name is unknown or a number is out of range.
    """

    _instances_per_thread = 128
    _saved_fields = State._fields[: State._fields.index("grid")]

    def __init__(
        self,
        *,
        scenario: str,
        num_envs: int,
        seed: int = 0,
        num_threads: int | None = None,
        **options: Any,
    ) -> None:
        self.options = read_options(options)
        self.layout = Layout(parse(scenario), self.options)
        super().__init__(
            spec=self.layout.spec(can_checkpoint=True, metadata={"backend": "embedded"}),
            num_envs=num_envs,
            seed=seed,
            num_threads=num_threads,
            arguments={"scenario": scenario, **asdict(self.options)},
        )
        self._constants = _make_constants(self.layout)
        self._state = _allocate_state(num_envs, self.layout)
        # Actions without messages have no axis of parts.
        self._actions = self._action_arrays[GROUP].reshape(num_envs, self.layout.num_agents, -1)
        arrays = self._arrays
        self._now, self._final = _make_view(arrays.observations), _make_view(arrays.final)
        self._outcome = Outcome(
            reward=arrays.reward[GROUP], terminated=arrays.terminated, truncated=arrays.truncated, **arrays.info
        )

    def _step_instances(self, first: int, last: int) -> None:
        kernel.step_instances(
            first, last, self._actions, self._state, self._constants, self._now, self._final, self._outcome
        )

    def _reset_instances(self, mask: np.ndarray) -> None:
        kernel.reset_instances(mask, self._state, self._constants, self._now)

    def _observe_instances(self) -> None:
        kernel.observe_instances(self._state, self._constants, self._now)

    def _render_instance(self, index: int) -> np.ndarray:
        state = self._state
        agents = state.agents[index, :, : kernel.SHELF + 1].copy()
        agents[:, kernel.SHELF] = agents[:, kernel.SHELF] != kernel.NO_SHELF
        return draw_warehouse(self.layout, agents, state.shelves[index], state.requested[index])


def _make_constants(layout: Layout) -> Constants:
    options = layout.options
    ground = np.where(layout.is_way, kernel.WAY, kernel.PLACE)
    ground[layout.goals[:, kernel.Y], layout.goals[:, kernel.X]] = kernel.GOAL
    return Constants(
        height=layout.height,
        width=layout.width,
        num_agents=layout.num_agents,
        num_shelves=layout.num_shelves,
        num_requests=layout.num_requests,
        sensor_range=options.sensor_range,
        msg_bits=options.msg_bits,
        limit=options.max_steps or 0,
        max_inactivity=options.max_inactivity_steps or 0,
        reward_type=REWARD_TYPES.index(options.reward_type),
        images=options.observation_type == "image",
        directional=options.image_observation_directional,
        normalised=options.normalised_coordinates,
        ground=np.pad(ground, options.sensor_range, constant_values=kernel.NOTHING),
        goals=np.ascontiguousarray(layout.goals),
        places=np.ascontiguousarray(layout.places),
        layers=np.array([IMAGE_LAYERS.index(layer) for layer in options.image_observation_layers], np.int64),
    )


def _make_view(observations: Observations[np.ndarray]) -> View:
    # All actions are legal in this game, and nobody leaves it.
    observations.alive[GROUP][...] = True
    observations.action_mask[GROUP][...] = True
    observation = observations.observation[GROUP]
    return View(observation=observation.reshape(*observation.shape[:2], -1), state=observations.state)


def _allocate_state(num_envs: int, layout: Layout) -> State:
    num_agents, num_shelves = layout.num_agents, layout.num_shelves
    margin = 2 * layout.options.sensor_range
    return State(
        seed=np.zeros(num_envs, np.int64),
        episode=np.zeros(num_envs, np.int64),
        time=np.zeros(num_envs, np.int64),
        inactive=np.zeros(num_envs, np.int64),
        agents=np.zeros((num_envs, num_agents, 5), np.int64),
        messages=np.zeros((num_envs, num_agents, layout.options.msg_bits), np.int64),
        shelves=np.zeros((num_envs, num_shelves, 2), np.int64),
        requested=np.zeros((num_envs, num_shelves), np.bool_),
        grid=np.zeros((num_envs, 2, layout.height + margin, layout.width + margin), np.int32),
        plans=np.zeros((num_envs, num_agents, 5), np.int64),
    )
