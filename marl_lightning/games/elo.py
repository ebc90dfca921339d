"""Elo ratings from win rates."""

from __future__ import annotations

import numpy as np

_SCALE = 400 / np.log(10)
_ROUNDS = 10_000
_TOLERANCE = 1e-10


def elo_ratings(wins: np.ndarray) -> np.ndarray:
    """Most likely ratings in the model of Bradley and Terry (1952), on the scale of Elo (1978) ::

        P(i beats j) = 1 / (1 + 10^((R_j - R_i) / 400))

    found by the iteration of Hunter (2004, "MM algorithms for generalized Bradley-Terry models", equation 3). Every
    pair is taken to have drawn one more game, so that who never lost has a finite rating too.

    Args:
        wins: ``[n, n]``, ``wins[i, j]`` is how often ``i`` beat ``j``; a draw is half a win of both. The diagonal does
            not count.

    Returns:
        ``[n]``, with a mean of 0.
    """
    wins = np.asarray(wins, np.float64) + 0.5
    np.fill_diagonal(wins, 0.0)
    games = wins + wins.T
    strength = np.ones(len(wins))
    for _ in range(_ROUNDS):
        new = wins.sum(1) / (games / (strength[:, None] + strength)).sum(1)
        new /= np.exp(np.log(new).mean())
        change = np.abs(np.log(new / strength)).max()
        strength = new
        if change < _TOLERANCE:
            break
    return _SCALE * np.log(strength)
