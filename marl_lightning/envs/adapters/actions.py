"""Discrete actions of other packages, which may start anywhere and have any shape, counted from 0 along one axis."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces


def group_action_space(space: spaces.Space) -> spaces.Space:
    """Returns the space that stands for a package's action space in a :class:`GroupSpec`.

    ``Discrete`` and ``MultiDiscrete`` are counted from 0, ``MultiBinary`` becomes a ``MultiDiscrete`` of twos, several
    axes become one. Other spaces are returned as they are, for :class:`GroupSpec` to judge.
    """
    if isinstance(space, spaces.Discrete):
        return spaces.Discrete(int(space.n))
    if isinstance(space, spaces.MultiDiscrete):
        return spaces.MultiDiscrete(space.nvec.ravel())
    if isinstance(space, spaces.MultiBinary):
        return spaces.MultiDiscrete(np.full(space.shape, 2).ravel())
    return space


def package_action(space: spaces.Space, action: np.ndarray) -> int | np.ndarray:
    """Returns one agent's action as its package expects it. Continuous actions are clipped to their bounds.

    Args:
        space: the action space of the package.
        action: an element of ``group_action_space(space)``.
    """
    if isinstance(space, spaces.Discrete):
        return int(action + space.start)  # some games refuse numpy integers
    if isinstance(space, spaces.MultiDiscrete):
        return (action.reshape(space.shape) + space.start).astype(space.dtype)
    if isinstance(space, spaces.MultiBinary):
        return action.reshape(space.shape).astype(space.dtype)
    return np.clip(action, space.low, space.high).astype(space.dtype)


def flat_mask(mask: Any) -> np.ndarray:
    """Returns an action mask as bool ``[action_size]``, the parts of an action one after another.

    Args:
        mask: numbers that are not 0 where legal; an array, or a tuple of one array a part, as ``MultiDiscrete.sample``
            of Gymnasium takes it.
    """
    if not isinstance(mask, np.ndarray):
        mask = np.concatenate([np.ravel(part) for part in mask])
    return mask.astype(np.bool_).ravel()
