"""Interfaces by name: from the registry, and by classes for the packages whose games are known by their own names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from marl_lightning.envs.base import MultiAgentEnv
from marl_lightning.envs.interfaces.base import Interface, RewardAggregation
from marl_lightning.envs.registry import make_env
from marl_lightning.envs.wrappers import TimeLimit

Backend = Literal["package", "embedded"]

# The argument with which games of a family take their time limit; other families have none, or one that is fixed.
_LIMITS = {
    "lbf/": "episode_limit",
    "magent2/": "max_cycles",
    "mamujoco/": "episode_limit",
    "mpe/": "max_cycles",
    "pettingzoo/butterfly/": "max_cycles",
    "pettingzoo/sisl/": "max_cycles",
    "rware/": "max_steps",
    "smaclite/": "episode_limit",
}


def make_interface(
    name: str | Callable[[], MultiAgentEnv],
    *,
    reward_aggr: RewardAggregation = "sum",
    max_episode_steps: int | None = None,
    **kwargs: Any,
) -> Interface:
    """Makes an interface to any game that :func:`marl_lightning.envs.make_env` makes.

    Args:
        name: see :func:`make_env`.
        reward_aggr: see :class:`Interface`.
        max_episode_steps: steps after which an episode is truncated; ``None`` leaves it to the game. Games whose limit
            is fixed, such as those of StarCraft II, can only be made shorter.
        **kwargs: arguments of the game.

    Raises:
        ValueError: if there is no such game, or an argument is out of range.
        ImportError: if its package is not installed.
    """
    return Interface(_make(name, max_episode_steps, **kwargs), reward_aggr=reward_aggr)


class LBFInterface(Interface):
    """Level-based foraging.

    Args:
        env_name: such as ``"Foraging-2s-10x10-3p-3f-coop-v3"``.
        max_episode_steps: see :func:`make_interface`; 50 by default.
        reward_aggr: see :class:`Interface`.
        disable_env_checker: has no effect, the checks of gymnasium are always off.
        backend: ``"package"`` plays lbforaging; ``"embedded"`` plays the game of this library, which has the same rules
            and draws other starts from a seed. It is the faster one, but imports torch, also in worker processes.
        **options: of :class:`~marl_lightning.envs.native.lbf.options.LBFOptions`.
    """

    def __init__(
        self,
        env_name: str,
        max_episode_steps: int | None = None,
        reward_aggr: RewardAggregation = "sum",
        disable_env_checker: bool = True,
        *,
        backend: Backend = "package",
        **options: Any,
    ) -> None:
        super().__init__(
            _make(f"lbf/{env_name}", max_episode_steps, backend=backend, **options), reward_aggr=reward_aggr
        )


class RWAREInterface(Interface):
    """The multi-robot warehouse.

    Args:
        env_name: such as ``"rware-tiny-2ag-v2"``.
        max_episode_steps: see :func:`make_interface`; 500 by default.
        reward_aggr: see :class:`Interface`.
        disable_env_checker: has no effect, the checks of gymnasium are always off.
        backend: see :class:`LBFInterface`; the package is rware.
        **options: of :class:`~marl_lightning.envs.native.rware.options.RWAREOptions`.
    """

    def __init__(
        self,
        env_name: str,
        max_episode_steps: int | None = None,
        reward_aggr: RewardAggregation = "sum",
        disable_env_checker: bool = True,
        *,
        backend: Backend = "package",
        **options: Any,
    ) -> None:
        super().__init__(
            _make(f"rware/{env_name}", max_episode_steps, backend=backend, **options), reward_aggr=reward_aggr
        )


class SMACliteInterface(Interface):
    """SMAClite. All agents get the reward of the team, so that ``"first"`` is that reward.

    Args:
        env_name: map, such as ``"MMM2"``.
        max_episode_steps: see :func:`make_interface`; that of the map in SMAC by default.
        reward_aggr: see :class:`Interface`.
        disable_env_checker: has no effect, the checks of gymnasium are always off.
        **options: of :class:`~marl_lightning.envs.adapters.smaclite.SMACliteAdapter`.
    """

    def __init__(
        self,
        env_name: str,
        max_episode_steps: int | None = None,
        reward_aggr: RewardAggregation = "first",
        disable_env_checker: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(_make(f"smaclite/{env_name}", max_episode_steps, **options), reward_aggr=reward_aggr)


class PettingZooInterface(Interface):
    """Games of PettingZoo; those with turns as :class:`~marl_lightning.envs.adapters.turn_based.AECAdapter` has them.

    Rewards are individual by default, since many of the games are played against each other.

    Args:
        env_name: such as ``"pursuit_v5"``.
        family: ``"sisl"``, ``"butterfly"``, ``"classic"``, or ``"mpe"``, which is the package mpe2.
        max_episode_steps: see :func:`make_interface`; in games with turns a step is one move.
        reward_aggr: see :class:`Interface`.
        **options: of the game, see the documentation of PettingZoo.
    """

    def __init__(
        self,
        env_name: str,
        family: str,
        max_episode_steps: int | None = None,
        reward_aggr: RewardAggregation = "none",
        **options: Any,
    ) -> None:
        name = f"pettingzoo/{family}/{env_name}"
        if family == "mpe":
            name, options = f"mpe/{env_name}", {"backend": "package", **options}
        super().__init__(_make(name, max_episode_steps, **options), reward_aggr=reward_aggr)


class MAmujocoInterface(Interface):
    """MuJoCo robots moved by several agents. All get the reward of the robot, so that ``"first"`` is that reward.

    Agents are in the order of the package, with observations and actions padded to those of the largest.

    Args:
        env_name: robot, ``-p`` and the partition of its joints, such as ``"Ant-p2x4"``.
        max_episode_steps: see :func:`make_interface`; that of the single-agent task by default, mostly 1000.
        reward_aggr: see :class:`Interface`.
        **options: of :class:`~marl_lightning.envs.adapters.mamujoco.MaMuJoCoAdapter`.

    Raises:
        ValueError: if the name is of another form, or unknown.
    """

    def __init__(
        self,
        env_name: str,
        max_episode_steps: int | None = None,
        reward_aggr: RewardAggregation = "first",
        **options: Any,
    ) -> None:
        robot, separator, partition = env_name.partition("-p")
        if not (robot and separator and partition):
            raise ValueError(f"env_name must be ROBOT-pPARTITION, such as 'Ant-p2x4', got {env_name!r}")
        game = _make(f"mamujoco/{robot}-{partition}", max_episode_steps, grouping="padded", **options)
        super().__init__(game, reward_aggr=reward_aggr)


class MAgent2Interface(Interface):
    """MAgent2: teams against each other, one after another on the axis of agents.

    Rewards are individual by default, since their sum would be that of all teams.

    Args:
        env_name: such as ``"adversarial_pursuit_v4"``.
        max_episode_steps: see :func:`make_interface`; that of the package by default, 500 or 1000.
        reward_aggr: see :class:`Interface`.
        **options: of :class:`~marl_lightning.envs.adapters.magent2.MAgent2Adapter`.
    """

    def __init__(
        self,
        env_name: str,
        max_episode_steps: int | None = None,
        reward_aggr: RewardAggregation = "none",
        **options: Any,
    ) -> None:
        super().__init__(_make(f"magent2/{env_name}", max_episode_steps, **options), reward_aggr=reward_aggr)


class SMACInterface(Interface):
    """SMAC. All agents get the reward of the team, so that ``"first"`` is that reward.

    Args:
        env_name: map, such as ``"3m"``.
        max_episode_steps: see :func:`make_interface`.
        reward_aggr: see :class:`Interface`.
        **options: of the package's ``StarCraft2Env``.
    """

    def __init__(
        self,
        env_name: str,
        max_episode_steps: int | None = None,
        reward_aggr: RewardAggregation = "first",
        **options: Any,
    ) -> None:
        super().__init__(_make(f"starcraft2/{env_name}", max_episode_steps, **options), reward_aggr=reward_aggr)


class SMACv2Interface(Interface):
    """SMACv2. All agents get the reward of the team, so that ``"first"`` is that reward.

    Args:
        env_name: scenario, such as ``"terran_5_vs_5"``.
        max_episode_steps: see :func:`make_interface`.
        reward_aggr: see :class:`Interface`.
        **options: of the package's ``StarCraftCapabilityEnvWrapper``; they replace those of the scenario.
    """

    def __init__(
        self,
        env_name: str,
        max_episode_steps: int | None = None,
        reward_aggr: RewardAggregation = "first",
        **options: Any,
    ) -> None:
        super().__init__(_make(f"smacv2/{env_name}", max_episode_steps, **options), reward_aggr=reward_aggr)


def _make(name: str | Callable[[], MultiAgentEnv], max_episode_steps: int | None, **kwargs: Any) -> MultiAgentEnv:
    if max_episode_steps is None:
        return make_env(name, **kwargs)
    if isinstance(name, str):
        option = next((option for prefix, option in _LIMITS.items() if name.startswith(prefix)), None)
        if option in kwargs:
            raise ValueError(f"max_episode_steps and {option} are the same for {name}: give one of them")
        if option is not None:
            return make_env(name, **{option: max_episode_steps}, **kwargs)
    return TimeLimit(make_env(name, **kwargs), max_episode_steps=max_episode_steps)
