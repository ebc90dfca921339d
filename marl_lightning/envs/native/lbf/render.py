"""Pictures of the field, drawn with numpy alone."""

from __future__ import annotations

import numpy as np

PIXELS_PER_CELL = 32

_GROUND = np.array([58, 56, 50], np.uint8)
_LINE = np.array([84, 82, 74], np.uint8)
_PLAYER = np.array([70, 140, 255], np.uint8)
_FOOD = np.array([225, 60, 50], np.uint8)
_DIGIT = np.array([255, 255, 255], np.uint8)

_DIGIT_SCALE = 3  # pixels of a dot

# Five rows of three dots for each digit.
_FONT = (
    "111101101101111",
    "010110010010111",
    "111001111100111",
    "111001111001111",
    "101101111001001",
    "111100111001111",
    "111100111101111",
    "111001001001001",
    "111101111101111",
    "111101111001111",
)
_DIGITS = np.array([[dot == "1" for dot in digit] for digit in _FONT]).reshape(10, 5, 3)


def draw_field(size: int, players: np.ndarray, foods: np.ndarray) -> np.ndarray:
    """Returns the picture of a field as uint8 ``[H, W, 3]``, ``PIXELS_PER_CELL`` a cell, north up.

    Players are blue squares, foods red discs, each with its level.

    Args:
        size: rows and columns of the field.
        players: ``[P, 3]`` integers: row, column, level.
        foods: ``[F, 3]`` integers, the same; level 0 is not drawn.
    """
    picture = np.tile(_GROUND, (size * PIXELS_PER_CELL, size * PIXELS_PER_CELL, 1))
    picture[::PIXELS_PER_CELL] = _LINE
    picture[:, ::PIXELS_PER_CELL] = _LINE
    offset = np.abs(np.arange(PIXELS_PER_CELL) + 0.5 - PIXELS_PER_CELL / 2)
    square = np.maximum(offset[:, None], offset) < 0.38 * PIXELS_PER_CELL
    disc = np.hypot(offset[:, None], offset) < 0.42 * PIXELS_PER_CELL
    for units, shape, color in ((foods, disc, _FOOD), (players, square, _PLAYER)):
        for row, column, level in units.tolist():
            if level > 0:
                y, x = row * PIXELS_PER_CELL, column * PIXELS_PER_CELL
                cell = picture[y : y + PIXELS_PER_CELL, x : x + PIXELS_PER_CELL]
                cell[shape] = color
                _write_number(cell, level)
    return picture


def _write_number(cell: np.ndarray, number: int) -> None:
    """Writes ``number`` into the middle of ``cell``; digits that find no room are cut off."""
    gap = np.zeros((5, 1), np.bool_)
    columns = [column for digit in str(number) for column in (_DIGITS[int(digit)], gap)]
    dots = np.concatenate(columns[:-1], axis=1).repeat(_DIGIT_SCALE, axis=0).repeat(_DIGIT_SCALE, axis=1)
    dots = dots[:, : cell.shape[1]]
    y, x = (cell.shape[0] - dots.shape[0]) // 2, (cell.shape[1] - dots.shape[1]) // 2
    cell[y : y + dots.shape[0], x : x + dots.shape[1]][dots] = _DIGIT
