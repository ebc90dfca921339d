"""Pictures of particle worlds, drawn with numpy alone."""

from __future__ import annotations

import numpy as np

from marl_lightning.envs.native.mpe.kernel import State
from marl_lightning.envs.native.mpe.scenarios import World

PIXELS = 350
"""Width and height of a picture."""

_MARGIN = 0.1
_CELL = 12  # pixels of a word of a message
_GOAL = (255, 170, 0)


def draw_world(index: int, state: State, world: World) -> np.ndarray:
    """Returns the picture of instance ``index`` as uint8 ``[PIXELS, PIXELS, 3]``, y upwards.

    Agents and landmarks are discs in the colors of the package, agents with an outline, goals with a ring. The view
    grows with the world, so that everything is always inside. For each agent that speaks, a row of squares at the
    lower left shows its last message, darker for stronger words, after a square in the color of the agent.
    """
    positions = state.position[index]
    entities = (*world.agents, *world.landmarks)
    reach = max(1.0, float(np.abs(positions).max())) + max(entity.size for entity in entities) + _MARGIN
    centres = (np.arange(PIXELS) + 0.5) / PIXELS * 2 * reach - reach
    xs, ys = centres[None, :], -centres[:, None]
    pixel = 2 * reach / PIXELS
    picture = np.full((PIXELS, PIXELS, 3), 255, np.uint8)
    goals = {len(world.agents) + int(goal) for goal in state.goal[index, : world.num_goals]}
    # Landmarks lie under the agents.
    for i in reversed(range(len(entities))):
        distance = np.hypot(xs - positions[i, 0], ys - positions[i, 1])
        size = max(entities[i].size, pixel)
        picture[distance < size] = (np.array(entities[i].color) * 200).astype(np.uint8)
        if i in goals:
            picture[np.abs(distance - size - 2 * pixel) < 1.5 * pixel] = _GOAL
        elif i < len(world.agents):
            picture[np.abs(distance - size) < pixel] = 0
    speakers = [i for i, agent in enumerate(world.agents) if not agent.silent]
    for row, i in enumerate(speakers):
        _draw_message(picture, row, np.array(world.agents[i].color), state.message[index, i])
    return picture


def _draw_message(picture: np.ndarray, row: int, color: np.ndarray, message: np.ndarray) -> None:
    bottom = PIXELS - _CELL * (row + 1) - 4
    for column, shade in enumerate((color * 200, *(255 * (1 - message)))):
        left = 4 + column * _CELL
        picture[bottom : bottom + _CELL, left : left + _CELL] = 128
        picture[bottom + 1 : bottom + _CELL - 1, left + 1 : left + _CELL - 1] = np.asarray(shade).astype(np.uint8)
