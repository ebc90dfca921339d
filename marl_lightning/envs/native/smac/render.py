"""Pictures of battles, drawn with numpy alone."""

from __future__ import annotations

import numpy as np

from marl_lightning.envs.native.smac.kernel import Constants, State

PIXELS_PER_CELL = 16

_GROUND = np.array([58, 56, 50], np.float32)
_CLIFF = np.array([24, 24, 26], np.float32)
_SIDES = np.array([[70, 140, 255], [235, 70, 60]], np.float32)
_SHIELD = np.array([150, 230, 255], np.float32)
_COOLDOWN = np.array([255, 210, 80], np.float32)


def draw_battle(index: int, state: State, constants: Constants) -> np.ndarray:
    """Returns the picture of instance ``index`` as uint8 ``[H, W, 3]``, ``PIXELS_PER_CELL`` a map unit, north up."""
    ground = np.where(constants.pathable[..., None], _GROUND, _CLIFF)
    picture = ground.repeat(PIXELS_PER_CELL, axis=0).repeat(PIXELS_PER_CELL, axis=1)
    alive = np.flatnonzero(state.health[index] > 0)
    for unit in alive:
        _draw_unit(picture, unit, index, state, constants)
    for unit in np.flatnonzero(state.shot[index] >= 0):
        target = state.shot[index, unit]
        _draw_line(
            picture,
            (state.x[index, unit], state.y[index, unit]),
            (state.x[index, target], state.y[index, target]),
            _SIDES[int(unit >= constants.num_agents)],
        )
    # The canvas is indexed [x, y]; a picture has rows from the north and columns from the west.
    return picture.transpose(1, 0, 2)[::-1].astype(np.uint8)


def _draw_unit(picture: np.ndarray, unit: int, index: int, state: State, constants: Constants) -> None:
    x, y, radius = state.x[index, unit], state.y[index, unit], constants.radius[unit]
    # A window with room for the bar above the circle.
    window, xs, ys = _window(picture, x, y, radius + 0.4)
    distance = np.hypot(xs - x, ys - y)
    side = _SIDES[int(unit >= constants.num_agents)]
    window[distance < radius] = side * (0.35 + 0.65 * state.health[index, unit] / constants.max_health[unit])
    if state.shield[index, unit] > 0:
        share = state.shield[index, unit] / constants.max_shield[unit]
        window[np.abs(distance - radius) < 0.09] = _SHIELD * (0.4 + 0.6 * share)
    waiting = min(state.cooldown[index, unit] / constants.cooldown[unit], 1.0)
    bar = (np.abs(ys - y - radius - 0.25) < 0.09) & (np.abs(xs - x) < radius * waiting)
    window[bar] = _COOLDOWN


def _draw_line(picture: np.ndarray, start: tuple, end: tuple, color: np.ndarray) -> None:
    """Draws a line from a quarter to three quarters of the way, so that shooter and target stay visible."""
    ends = np.array([start, end], np.float32) * PIXELS_PER_CELL
    count = int(np.abs(ends[1] - ends[0]).max()) + 1
    points = ends[0] + np.linspace(0.25, 0.75, count)[:, None] * (ends[1] - ends[0])
    cells = np.clip(points.astype(np.int64), 0, np.array(picture.shape[:2]) - 1)
    picture[cells[:, 0], cells[:, 1]] = 0.5 * color + 127.0


def _window(picture: np.ndarray, x: float, y: float, reach: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the part of the picture within ``reach`` of a point, and the map coordinates of its pixel centres."""
    low = np.maximum(np.floor((np.array([x, y]) - reach) * PIXELS_PER_CELL), 0).astype(int)
    high = np.ceil((np.array([x, y]) + reach) * PIXELS_PER_CELL).astype(int)
    window = picture[low[0] : high[0], low[1] : high[1]]
    xs = (low[0] + np.arange(window.shape[0]) + 0.5) / PIXELS_PER_CELL
    ys = (low[1] + np.arange(window.shape[1]) + 0.5) / PIXELS_PER_CELL
    return window, xs[:, None], ys[None, :]
