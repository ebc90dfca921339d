"""Pictures of the warehouse, drawn with numpy alone."""

from __future__ import annotations

import numpy as np

from marl_lightning.envs.native.rware.layout import Layout

PIXELS_PER_CELL = 16

_WAY = np.array([228, 226, 220], np.uint8)
_PLACE = np.array([196, 192, 184], np.uint8)
_GOAL = np.array([90, 90, 90], np.uint8)
_SHELF = np.array([72, 63, 140], np.uint8)
_REQUESTED = np.array([0, 150, 130], np.uint8)
_AGENT = np.array([255, 140, 30], np.uint8)
_LOADED = np.array([215, 40, 40], np.uint8)
_MARK = np.array([20, 20, 20], np.uint8)

_OFFSET = np.arange(PIXELS_PER_CELL) + 0.5 - PIXELS_PER_CELL / 2
_SQUARE = np.maximum(abs(_OFFSET[:, None]), abs(_OFFSET)) < 0.44 * PIXELS_PER_CELL
_DISC = np.hypot(_OFFSET[:, None], _OFFSET) < 0.36 * PIXELS_PER_CELL
_BAR = abs(_OFFSET) < 0.08 * PIXELS_PER_CELL
# From the middle of an agent to its front: up, down, left, right.
_FRONTS = (
    _DISC & _BAR & (_OFFSET[:, None] < 0),
    _DISC & _BAR & (_OFFSET[:, None] > 0),
    _DISC & _BAR[:, None] & (_OFFSET < 0),
    _DISC & _BAR[:, None] & (_OFFSET > 0),
)


def draw_warehouse(layout: Layout, agents: np.ndarray, shelves: np.ndarray, requested: np.ndarray) -> np.ndarray:
    """Returns the picture of a warehouse as uint8 ``[H, W, 3]``, ``PIXELS_PER_CELL`` a cell.

    Goals are dark grey; shelves are purple squares, green if requested; agents are orange discs, red if they carry a
    shelf, with a mark at their front.

    Args:
        layout: the map.
        agents: ``[A, 4]`` integers: column, row, direction (up, down, left, right), 1 if it carries a shelf.
        shelves: ``[S, 2]`` integers: column and row.
        requested: ``[S]`` bool.
    """
    colors = np.where(layout.is_way[..., None], _WAY, _PLACE)
    colors[layout.goals[:, 1], layout.goals[:, 0]] = _GOAL
    picture = colors.repeat(PIXELS_PER_CELL, axis=0).repeat(PIXELS_PER_CELL, axis=1)

    def cell(x: int, y: int) -> np.ndarray:
        top, left = y * PIXELS_PER_CELL, x * PIXELS_PER_CELL
        return picture[top : top + PIXELS_PER_CELL, left : left + PIXELS_PER_CELL]

    for (x, y), is_requested in zip(shelves.tolist(), requested.tolist(), strict=True):
        cell(x, y)[_SQUARE] = _REQUESTED if is_requested else _SHELF
    for x, y, direction, loaded in agents.tolist():
        cell(x, y)[_DISC] = _LOADED if loaded else _AGENT
        cell(x, y)[_FRONTS[direction]] = _MARK
    return picture
