"""SMAC and SMACv2 themselves: battles in StarCraft II. Two families, since each is a package of its own.

``scenarios`` and ``make`` are those of SMAC (Samvelyan et al. 2019, arXiv 1902.04043), ``scenarios_v2`` and ``make_v2``
those of SMACv2 (Ellis et al. 2023, arXiv 2212.07489).
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import logging
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
from gymnasium import spaces

from marl_lightning.envs.adapters import smacv2_scenarios
from marl_lightning.envs.base import MultiAgentEnv, Observations, Step
from marl_lightning.envs.spec import EnvSpec, GroupSpec
from marl_lightning.envs.validation import action_arrays, check_legal

logger = logging.getLogger(__name__)

GROUP = "agents"
NOOP = 0  # legal for the dead only, who have nothing else

MAPS = (
    *("3m", "8m", "25m", "5m_vs_6m", "8m_vs_9m", "10m_vs_11m", "27m_vs_30m", "MMM", "MMM2"),
    *("2s3z", "3s5z", "3s5z_vs_3s6z", "1c3s5z", "3s_vs_3z", "3s_vs_4z", "3s_vs_5z"),
    *("2m_vs_1z", "2s_vs_1sc", "6h_vs_8z", "corridor", "so_many_baneling", "bane_vs_bane", "2c_vs_64zg"),
)
"""The maps of SMAC."""

_NUM_SEEDS = 2**32  # of StarCraft II

# Arguments of both packages that the adapter sets, and what to do instead.
_TAKEN = {
    "map_name": "it follows from the name of the environment",
    "seed": "give the seed to reset",
    "continuing_episode": "time limits always truncate here",
}


def scenarios() -> tuple[str, ...]:
    """Returns the names of the maps of SMAC. Raises ``ImportError`` if its package is not installed."""
    _require_installed("smac")
    return MAPS


def make(scenario: str, **options: Any) -> MultiAgentEnv:
    """Returns one instance of a map of SMAC; see :class:`StarCraft2Adapter`.

    Args:
        scenario: name of the map, such as ``"2s3z"``.
        **options: arguments of the package's ``StarCraft2Env``, such as ``difficulty="7"`` or ``obs_last_action=True``.

    Raises:
        ImportError: if the package is not installed; says where it is found.
        ValueError: if there is no such map, or an option cannot be chosen.
    """
    if scenario not in MAPS:
        raise ValueError(f"unknown map {scenario!r}: choose one of {', '.join(MAPS)}")
    too_long = "the package makes such observations one entry longer than it says; use state_timestep_number"
    _refuse(options, {**_TAKEN, "obs_timestep_number": too_long})
    package = _import("smac.env", package="smac")
    factory = partial(package.StarCraft2Env, map_name=scenario, continuing_episode=True, **options)
    return StarCraft2Adapter(name=f"starcraft2/{scenario}", factory=factory, backend="smac")


def scenarios_v2() -> tuple[str, ...]:
    """Returns the names of the scenarios of SMACv2. Raises ``ImportError`` if its package is not installed."""
    _require_installed("smacv2")
    return smacv2_scenarios.SCENARIOS


def make_v2(scenario: str, **options: Any) -> MultiAgentEnv:
    """Returns one instance of a scenario of SMACv2; see :class:`StarCraft2Adapter`.

    Args:
        scenario: name such as ``"terran_10_vs_11"``.
        **options: arguments of the package's ``StarCraftCapabilityEnvWrapper`` that replace those of the scenario, see
            :func:`marl_lightning.envs.adapters.smacv2_scenarios.options`.

    Raises:
        ImportError: if the package is not installed; says where it is found.
        ValueError: if there is no such scenario, or an option cannot be chosen.
    """
    _refuse(options, _TAKEN)
    arguments = {**smacv2_scenarios.options(scenario), **options}
    package = _import("smacv2.env.starcraft2.wrapper", package="smacv2")
    factory = partial(_SeededBattles, package.StarCraftCapabilityEnvWrapper, continuing_episode=True, **arguments)
    return StarCraft2Adapter(name=f"smacv2/{scenario}", factory=factory, backend="smacv2")


class StarCraft2Adapter(MultiAgentEnv):
    """One battle of SMAC or SMACv2, played by StarCraft II in a process of its own.

    Agents ``agent_0`` … of the group ``"agents"`` get the package's observations, legal actions, state and team reward.
    A dead agent is not alive, observes zeros, and its only legal action is the no-op, 0.

    **Ends.** The end of a battle terminates, the time limit truncates. If the connection to StarCraft II is lost during
    a step, which the package reports as an end without a result, the episode is truncated where it was, with reward 0,
    and a warning is logged.

    **Resets.** StarCraft II is started by the first reset, which takes seconds, and later episodes are played in the
    same process. It is started anew, in a new game of the package, by a reset

    * with a seed, since the package takes one only when a game is made;
    * in the middle of the first episode, where the package would leave the running StarCraft II behind, start a second
      one, and count the enemies twice in the scale of all its rewards;
    * after a lost connection, or if the reset fails, which is tried a second time only.

    A second reset in a row, with the same seed or without one, changes nothing.

    **Seeds.** A seed determines those that StarCraft II gets and, in SMACv2, all that the package draws: teams, start
    positions and, with extended partial observability, who sees which enemy. Only its random failures of attacks (if
    ``capability_config`` has the key ``"attack"``) have no seed. Games cannot be saved.

    ``info`` has ``battle_won`` (1.0 in the step that wins), ``dead_allies`` and ``dead_enemies``.

    Args:
        name: ``spec.name``.
        factory: called as ``factory(seed=)``; returns a new game of the package.
        backend: name of the package.
    """

    def __init__(self, *, name: str, factory: Callable[..., Any], backend: str) -> None:
        self._factory = factory
        self._rng = np.random.default_rng()
        self._make_game()
        facts = self._game.get_env_info()
        group = GroupSpec(
            agents=tuple(f"agent_{index}" for index in range(facts["n_agents"])),
            observation_space=spaces.Box(-np.inf, np.inf, (facts["obs_shape"],), np.float32),
            action_space=spaces.Discrete(facts["n_actions"]),
        )
        self.spec = EnvSpec(
            name=name,
            groups={GROUP: group},
            state_size=facts["state_shape"],
            episode_limit=facts["episode_limit"],
            info_keys=("battle_won", "dead_allies", "dead_enemies"),
            shared_reward=True,
            metadata={"backend": backend},
        )
        self._seed: int | None = None  # of the present episode, if it is the first one with a seed
        self._start: Observations[np.ndarray] | None = None  # of the present episode, before its first step
        self._over = True

    def reset(self, *, seed: int | None = None) -> Observations[np.ndarray]:
        """See :meth:`MultiAgentEnv.reset`.

        Raises:
            RuntimeError: if no episode could be started, twice.
        """
        if self._start is not None and seed in (None, self._seed):
            return copy.deepcopy(self._start)
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        if seed is not None or (self._has_begun and not self._has_ended):
            self._replace_game()
        self._start, self._over = None, True
        try:
            observations = self._begin()
        except Exception as error:  # of any kind, from the package or from StarCraft II
            logger.warning("%s: StarCraft II is started anew, since a reset failed: %s", self.spec.name, _text(error))
            self._replace_game()
            try:
                observations = self._begin()
            except Exception as again:
                raise RuntimeError(
                    f"no episode of {self.spec.name} could be started: {_text(again)}. StarCraft II must be installed "
                    f"where the environment variable SC2PATH says, with the maps of {self.spec.metadata['backend']} in "
                    "its folder Maps"
                ) from again
        self._seed, self._over = seed, False
        self._start = copy.deepcopy(observations)  # the other one belongs to the caller
        return observations

    def step(self, actions: Mapping[str, np.ndarray]) -> Step[np.ndarray]:
        """See :meth:`MultiAgentEnv.step`."""
        if self._over:
            raise RuntimeError("the episode is over or has not begun: call reset before step")
        arrays = action_arrays(self.spec, actions, ())
        check_legal(self.spec, arrays, action_mask={GROUP: self._action_mask}, alive={GROUP: self._alive})
        self._start = None
        reward, over, info = self._game.step(np.where(self._alive, arrays[GROUP], NOOP).tolist())
        self._over = bool(over)
        is_lost = "battle_won" not in info
        if is_lost:
            logger.warning("%s: an episode is cut, since StarCraft II could not be reached", self.spec.name)
        self._has_ended = (self._has_ended or self._over) and not is_lost
        truncated = self._over and (is_lost or bool(info.get("episode_limit", False)))
        return Step(
            observations=self._observe(),
            reward={GROUP: np.full(self.spec.num_agents, reward, np.float32)},
            terminated=self._over and not truncated,
            truncated=truncated,
            info={key: float(info.get(key, 0.0)) for key in self.spec.info_keys},
        )

    def close(self) -> None:
        """Ends StarCraft II. See :meth:`MultiAgentEnv.close`."""
        if not self._closed:
            self._game.close()
        self._closed = True
        self._start, self._over = None, True
        self._has_begun, self._has_ended = True, False  # so that a reset starts it anew

    def _make_game(self) -> None:
        # This starts nothing yet, so a game that was made only to ask for its sizes costs little.
        self._game = self._factory(seed=int(self._rng.integers(_NUM_SEEDS)))
        self._closed = False
        self._has_begun = False  # whether the game has been reset
        self._has_ended = False  # whether it has ended an episode: only then is it fit for another reset

    def _replace_game(self) -> None:
        if not self._closed:
            self._game.close()
        self._make_game()

    def _begin(self) -> Observations[np.ndarray]:
        self._has_begun = True
        self._game.reset()  # returns the observations too, but nothing after SMACv2 has repeated a failed reset
        observations = self._observe()
        if not self._alive.all():
            raise RuntimeError("units are missing at the start of an episode")
        return observations

    def _observe(self) -> Observations[np.ndarray]:
        mask = np.array(self._game.get_avail_actions(), np.bool_)
        alive = ~mask[:, NOOP]
        observation = np.stack(self._game.get_obs()).astype(np.float32)
        observation[~alive] = 0
        state = np.array(self._game.get_state(), np.float32)
        # The result belongs to the caller, who may write into it.
        self._action_mask, self._alive = mask.copy(), alive.copy()
        return Observations(
            observation={GROUP: observation}, action_mask={GROUP: mask}, alive={GROUP: alive}, state=state
        )


class _SeededBattles:
    """The wrapper of SMACv2, with its teams and start positions drawn from the seed too.

    The package seeds StarCraft II only. Its distributions have generators of their own, and the rest is drawn from the
    global generators of Python and numpy, whose places are taken by ours while the package runs.
    """

    def __init__(self, wrapper: Callable[..., Any], *, seed: int, **options: Any) -> None:
        self._wrapper = wrapper(seed=seed, **copy.deepcopy(options))  # it writes into capability_config
        rng = np.random.default_rng(seed)
        for distribution in self._wrapper.env_key_to_distribution_map.values():
            _seed_generators(distribution, rng)
        self._python = random.Random(int(rng.integers(_NUM_SEEDS))).getstate()
        self._numpy = np.random.RandomState(rng.integers(_NUM_SEEDS)).get_state()

    def reset(self) -> None:
        with self._global_generators():
            self._wrapper.reset()

    def step(self, actions: list[int]) -> tuple[float, bool, dict[str, Any]]:
        with self._global_generators():
            return self._wrapper.step(actions)

    def get_obs(self) -> list[np.ndarray]:
        with self._global_generators():
            return self._wrapper.get_obs()

    def get_state(self) -> np.ndarray:
        with self._global_generators():
            return self._wrapper.get_state()

    def get_avail_actions(self) -> list[list[int]]:
        return self._wrapper.get_avail_actions()

    def get_env_info(self) -> dict[str, Any]:
        return self._wrapper.get_env_info()

    def close(self) -> None:
        self._wrapper.close()

    @contextmanager
    def _global_generators(self) -> Iterator[None]:
        python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - the package uses it
        random.setstate(self._python)
        np.random.set_state(self._numpy)  # noqa: NPY002
        try:
            yield
        finally:
            self._python, self._numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002


def _seed_generators(distribution: Any, rng: np.random.Generator) -> None:
    """Replaces the generators of a distribution and of those that it is made of."""
    for name, value in vars(distribution).items():
        if isinstance(value, np.random.Generator):
            setattr(distribution, name, np.random.default_rng(int(rng.integers(_NUM_SEEDS))))
        elif hasattr(value, "generate"):
            _seed_generators(value, rng)


def _refuse(options: Mapping[str, Any], taken: Mapping[str, str]) -> None:
    for name in options:
        if name in taken:
            raise ValueError(f"{name} cannot be chosen: {taken[name]}")


def _require_installed(package: str) -> None:
    """Raises ``ImportError`` if a package is missing, without importing it, which would take long."""
    try:
        found = importlib.util.find_spec(f"{package}.env")
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise ImportError(_missing(package, package))


def _import(module: str, *, package: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ImportError(_missing(package, error.name or package)) from error


def _missing(package: str, module: str) -> str:
    return (
        f"{package} needs a package that is missing ({module}): install StarCraft II and its maps as "
        f"https://github.com/oxwhirl/{package} says, and pip install git+https://github.com/oxwhirl/{package}.git "
        "(not from PyPI, whose smac is something else)"
    )


def _text(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
