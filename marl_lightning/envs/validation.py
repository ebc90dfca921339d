"""Checks of arguments that all environments share. Needs numpy only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from marl_lightning.envs.spec import EnvSpec


def check_num_envs(num_envs: int) -> None:
    """Raises ``ValueError`` unless there is at least one instance."""
    if num_envs < 1:
        raise ValueError(f"num_envs must be at least 1, got {num_envs}")


def check_reset(num_envs: int, *, seed: int | None, mask: np.ndarray | None) -> None:
    """Raises ``ValueError`` if the arguments of ``VectorEnv.reset`` break its contract."""
    if mask is None:
        return
    if seed is not None:
        raise ValueError("seed and mask cannot be combined: a seed restarts all instances")
    if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_ or mask.shape != (num_envs,):
        given = f"{mask.dtype} {mask.shape}" if isinstance(mask, np.ndarray) else type(mask).__name__
        raise ValueError(f"mask must be a numpy bool array of shape ({num_envs},), got {given}")


def action_arrays(spec: EnvSpec, actions: Mapping[str, Any], leading: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Returns the actions as numpy arrays, without copying CPU tensors.

    Args:
        spec: description of one instance.
        actions: per group integers ``[*leading, A]`` or ``[*leading, A, P]``, or floats ``[*leading, A, d]``.
        leading: ``()`` for one instance, ``(E,)`` for a vector environment.

    Raises:
        ValueError: if a group is missing or unknown, or an array has a wrong shape or kind of numbers.
    """
    if actions.keys() != spec.groups.keys():
        raise ValueError(f"actions need the groups {list(spec.groups)}, got {list(actions)}")
    arrays = {}
    for name, group in spec.groups.items():
        array = np.asarray(actions[name])
        shape = (*leading, group.num_agents, *group.action_shape)
        kinds, words = ("iu", "integers") if group.is_discrete else ("f", "floats")
        if array.shape != shape or array.dtype.kind not in kinds:
            raise ValueError(f"actions of {name!r} must be {words} of shape {shape}, got {array.dtype} {array.shape}")
        arrays[name] = array
    return arrays


def check_legal(
    spec: EnvSpec,
    actions: Mapping[str, np.ndarray],
    *,
    action_mask: Mapping[str, np.ndarray],
    alive: Mapping[str, np.ndarray],
) -> None:
    """Raises ``ValueError`` naming the first agent that may act and takes an action it must not take.

    Every part of a discrete action must be legal by the mask, a continuous action must be finite; bounds are not
    checked, since a continuous action outside of them is clipped. Actions of agents that are not alive are ignored.

    Args:
        spec: description of one instance.
        actions: as returned by :func:`action_arrays`.
        action_mask: per discrete group ``[..., A, action_size]`` bool, as before the step.
        alive: per group ``[..., A]`` bool, as before the step.
    """
    for name, group in spec.groups.items():
        action = actions[name]
        if group.is_discrete:
            parts = action if group.action_shape else action[..., None]
            # Choices out of range are replaced for the look-up: they would be found in another part, wrap or raise.
            inside = (parts >= 0) & (parts < group.action_parts)
            index = np.where(inside, parts, 0).astype(np.int64) + group.action_offsets
            legal = inside & np.take_along_axis(action_mask[name], index, axis=-1)
        else:
            legal = np.isfinite(action)
        illegal = alive[name] & ~legal.all(axis=-1)
        if illegal.any():
            *row, agent = (int(i) for i in np.argwhere(illegal)[0])
            chosen = action[(*row, agent)]
            part = ""
            if group.is_discrete and group.action_shape:
                index = int(legal[(*row, agent)].argmin())
                chosen, part = chosen[index], f" in part {index}"
            where = f" in environment {row[0]}" if row else ""
            raise ValueError(f"illegal action {chosen}{part} of agent {group.agents[agent]!r}{where}")


def is_plain(value: Any) -> bool:
    """Whether a checkpoint can hold a value and be loaded safely."""
    if isinstance(value, Mapping):
        return all(type(key) is str and is_plain(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(is_plain(item) for item in value)
    return value is None or type(value) in (bool, int, float, str)
