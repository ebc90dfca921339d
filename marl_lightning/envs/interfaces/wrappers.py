"""Wrappers for interfaces, with the rules of :mod:`marl_lightning.envs.wrappers`.

Each takes an interface, of one instance or of a vector environment, and returns the same interface to the wrapped game.
The first argument is taken over: go on with what is returned, and call ``reset`` on it. The order matters::

    env = LBFInterface(env_name="Foraging-2s-10x10-3p-3f-coop-v3", reward_aggr="none")
    env = TimeLimit(env, max_episode_steps=150)
    env = NormalizeObservation(env, normalize_state=True)
    env = AddAgentID(env)  # after normalisation, so that IDs stay 0 or 1
    env = TransformReward(env, lambda reward: np.clip(reward, -1.0, 1.0))
    env = NormalizeReward(env, gamma=0.99)
"""

# ruff: noqa: N802 - functions named as the classes that they put around the game

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np
from gymnasium import spaces

from marl_lightning.envs import wrappers
from marl_lightning.envs.base import MultiAgentEnv
from marl_lightning.envs.interfaces.base import Host

Env = TypeVar("Env", bound=Host)  # an interface, or a vector environment of interfaces
Function = Callable[[Any], Any]


def TimeLimit(env: Env, max_episode_steps: int) -> Env:
    """Truncates episodes; see :class:`marl_lightning.envs.wrappers.TimeLimit`. A limit of the game stays in force."""
    return env.wrap(partial(wrappers.TimeLimit, max_episode_steps=max_episode_steps))


def TransformObservation(env: Env, function: Function, *, state_function: Function | None = None) -> Env:
    """Applies a function to observations, and the same or another one to the state.

    Results are float32. Dead agents still observe zeros.

    Args:
        env: to wrap.
        function: takes observations ``[A, O]`` and returns ``[A, O']``. Called once a group if there are several, with
            the agents of that group; in a vector environment with a leading axis for the instances, as is the next one.
        state_function: takes a state ``[S]`` and returns ``[S']``; by default ``function``.
    """
    if state_function is None:
        state_function = function
    single = isinstance(env.unwrapped, MultiAgentEnv)
    observe, describe = _floats(function, single=single), _floats(state_function, single=single)
    boxes = {}
    for name, group in env.spec.groups.items():
        zeros = np.zeros((1, group.num_agents, *group.observation_shape), group.observation_space.dtype)
        boxes[name] = spaces.Box(-np.inf, np.inf, observe(zeros).shape[2:], np.float32)
    return env.wrap(partial(wrappers.TransformObservation, function=observe, space=boxes, state_function=describe))


def NormalizeObservation(env: Env, normalize_state: bool = False, epsilon: float = 1e-8) -> Env:
    """Normalises observations, and maybe the state; see :class:`marl_lightning.envs.wrappers.NormalizeObservation`.

    ``env.set_wrapper_attr("update_running_statistics", False)`` freezes the statistics.
    """
    return env.wrap(partial(wrappers.NormalizeObservation, normalize_state=normalize_state, epsilon=epsilon))


def AddAgentID(env: Env) -> Env:
    """Appends one-hot IDs to observations; see :class:`marl_lightning.envs.wrappers.AddAgentID`."""
    return env.wrap(wrappers.AddAgentID)


def StackObservations(env: Env, stack_size: int, padding: Literal["first", "zero"] = "first") -> Env:
    """Joins the last observations; see :class:`marl_lightning.envs.wrappers.StackObservations`."""
    return env.wrap(partial(wrappers.StackObservations, stack_size=stack_size, padding=padding))


def TransformReward(env: Env, function: Function) -> Env:
    """Applies a function to rewards.

    Args:
        env: to wrap.
        function: takes the reward as ``step`` returns it, a float or ``[A]``, and returns as many numbers. Rewards of
            several agents come group by group; in a vector environment with a leading axis for the instances.
    """
    shared = env.reward_aggr != "none"
    single = isinstance(env.unwrapped, MultiAgentEnv)

    def apply(reward: np.ndarray) -> np.ndarray:
        given = reward[:, 0] if shared else reward
        if single:
            given = float(given[0]) if shared else given[0]
        result = np.asarray(function(given), np.float32)
        if result.shape != np.shape(given):
            raise ValueError(f"function must return rewards of shape {np.shape(given)}, got {result.shape}")
        return np.broadcast_to(result[..., None], reward.shape) if shared else result.reshape(reward.shape)

    return env.wrap(partial(wrappers.TransformReward, function=apply))


def ClipReward(env: Env, low: float | None = -1.0, high: float | None = 1.0) -> Env:
    """Clips rewards; see :class:`marl_lightning.envs.wrappers.ClipReward`."""
    return env.wrap(partial(wrappers.ClipReward, low=low, high=high))


def NormalizeReward(env: Env, gamma: float = 0.99, epsilon: float = 1e-8) -> Env:
    """Divides rewards by the deviation of returns; see :class:`marl_lightning.envs.wrappers.NormalizeReward`.

    Normalises the one reward of all agents, or that of each agent with ``reward_aggr="none"``.
    """
    return env.wrap(partial(wrappers.NormalizeReward, gamma=gamma, epsilon=epsilon))


def RecordEpisodeStatistics(env: Env) -> Env:
    """Adds ``episode_return`` and ``episode_length`` to ``info``, of the episode so far and at its end of all of it.

    See :class:`marl_lightning.envs.wrappers.RecordEpisodeStatistics`.
    """
    return env.wrap(wrappers.RecordEpisodeStatistics)


def _floats(function: Function, *, single: bool) -> Callable[[np.ndarray], np.ndarray]:
    """Returns a function of arrays with a leading axis of instances, which one instance does not have."""
    if single:
        return lambda x: np.asarray(function(x[0]), np.float32)[None]
    return lambda x: np.asarray(function(x), np.float32)
