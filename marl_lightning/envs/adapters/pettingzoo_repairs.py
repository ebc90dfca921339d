"""What PettingZoo 1.27 gets wrong in some of its games, mended by wrappers. Imports pettingzoo.

Each of them does nothing where a game is right, so that it does no harm to versions of a game without the fault.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import numpy as np
from gymnasium import spaces
from pettingzoo import AECEnv, ParallelEnv
from pettingzoo.utils.wrappers import BaseParallelWrapper, BaseWrapper


def make_parallel(package: ModuleType, game: str, *, with_state: bool, **kwargs: Any) -> ParallelEnv:
    """Makes a game with a parallel form.

    Args:
        package: the module of the game.
        game: its name without a version, such as ``"pistonball"``.
        with_state: whether it tells its state.
        **kwargs: arguments of the game.
    """
    if game in _DRAWN and kwargs.get("render_mode") is None:
        kwargs["render_mode"] = "rgb_array"
    env = package.parallel_env(**kwargs)
    _show_limit(env.unwrapped)
    if game in _PARALLEL:
        env = _PARALLEL[game](env)
    return env if with_state else _ParallelWithoutState(env)


def make_turn_based(package: ModuleType, game: str, *, with_state: bool, **kwargs: Any) -> AECEnv:
    """Makes a game in which agents take turns; arguments as for :func:`make_parallel`."""
    env = package.env(**kwargs)
    if game in _TURN_BASED:
        env = _TURN_BASED[game](env)
    return env if with_state else _TurnBasedWithoutState(env)


def _show_limit(env: Any) -> None:
    """Gives a game its time limit as an attribute ``max_cycles``, which some of them have in their engine only."""
    engine = getattr(env, "env", None)
    if not hasattr(env, "max_cycles") and hasattr(engine, "max_cycles"):
        env.max_cycles = engine.max_cycles


class _Multiwalker(BaseParallelWrapper):
    """Reports the time limit as truncation, not as termination; has a state when walkers have been removed."""

    def step(self, actions: Mapping[str, np.ndarray]) -> tuple[dict, dict, dict, dict, dict]:
        observations, rewards, terminations, truncations, infos = self.env.step(actions)
        engine = self.unwrapped.env
        if engine.frames >= engine.max_cycles:
            done = dict(zip(self.unwrapped.possible_agents, engine.last_dones, strict=True))
            truncations = {agent: not done[agent] for agent in terminations}
            terminations = {agent: bool(done[agent]) for agent in terminations}
        return observations, rewards, terminations, truncations, infos

    def state(self) -> np.ndarray:
        """Returns what all walkers feel, zero for those that have been removed, and where the package is."""
        engine = self.unwrapped.env
        if all(walker.hull is not None for walker in engine.walkers):
            return self.env.state()
        rows = [
            np.zeros(walker.observation_space.shape[0] - _NEIGHBOURS)
            if walker.hull is None
            else walker.get_observation()
            for walker in engine.walkers
        ]
        package = [engine.package.position.x, engine.package.position.y, engine.package.angle]
        return np.concatenate([*rows, package]).astype(np.float32)


class _KnightsArchersZombies(BaseParallelWrapper):
    """Lets the time to the first zombie not depend on the episode before."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict, dict]:
        self.unwrapped.zombie_spawn_interval.reset()
        self.unwrapped.kill_list.clear()
        return self.env.reset(seed=seed, options=options)


class _RockPaperScissors(BaseParallelWrapper):
    """Shows the last action of the opponent as a one-hot array; hides an attribute that is no state of the game."""

    def observation_space(self, agent: str) -> spaces.Space:
        return spaces.flatten_space(self.env.observation_space(agent))

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict, dict]:
        observations, infos = self.env.reset(seed=seed, options=options)
        return self._flat(observations), infos

    def step(self, actions: Mapping[str, int]) -> tuple[dict, dict, dict, dict, dict]:
        observations, *rest = self.env.step(actions)
        return self._flat(observations), *rest

    def state(self) -> np.ndarray:
        raise NotImplementedError

    def _flat(self, observations: Mapping[str, Any]) -> dict[str, np.ndarray]:
        return {
            agent: spaces.flatten(self.env.observation_space(agent), observation)
            for agent, observation in observations.items()
        }


class _Hanabi(BaseWrapper):
    """Lets the player begin whom the game has drawn, with ``random_start_player``, and not always the first."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        super().reset(seed=seed, options=options)
        self.unwrapped.agent_selection = self.unwrapped.hanabi_env.agent_selection


class _Go(BaseWrapper):
    """Lets games with boards of different sizes be played at once: the size is a global variable of the package."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        self._set_size()
        super().reset(seed=seed, options=options)

    def step(self, action: int | None) -> None:
        self._set_size()
        super().step(action)

    def _set_size(self) -> None:
        from pettingzoo.classic.go import go_base

        size = self.unwrapped._N
        if size != go_base.N:
            self.unwrapped._overwrite_go_global_variables(board_size=size)


class _ParallelWithoutState(BaseParallelWrapper):
    def state(self) -> np.ndarray:
        return np.empty(0, np.float32)


class _TurnBasedWithoutState(BaseWrapper):
    def state(self) -> np.ndarray:
        return np.empty(0, np.float32)


# Their observations are pictures that they draw only when they are asked to render, too: without, they stay as they
# were at the reset.
_DRAWN = ("cooperative_pong", "pistonball")
_NEIGHBOURS = 7  # entries of a walker's observation that its state does not have: neighbours and package
_PARALLEL: dict[str, Callable[[ParallelEnv], ParallelEnv]] = {
    "multiwalker": _Multiwalker,
    "knights_archers_zombies": _KnightsArchersZombies,
    "rps": _RockPaperScissors,
}
_TURN_BASED: dict[str, Callable[[AECEnv], AECEnv]] = {"hanabi": _Hanabi, "go": _Go}
