"""Wrappers that change rewards."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Literal, get_args

import numpy as np

from marl_lightning.envs.base import MultiAgentEnv, Observations, VectorEnv
from marl_lightning.envs.wrappers.base import Batch, Rows, Wrapper
from marl_lightning.envs.wrappers.episode import RETURN, RecordEpisodeStatistics
from marl_lightning.envs.wrappers.running import StatisticsWrapper
from marl_lightning.envs.wrappers.statistics import RunningStatistics

How = Literal["sum", "mean", "first", "none"]
Team = Literal["all", "group"]


class RewardWrapper(Wrapper, ABC):
    """Base of wrappers that replace rewards by what is better to learn from.

    Reports of how well agents play should not depend on it: unless ``info`` has the returns of episodes already, the
    environment is wrapped in :class:`RecordEpisodeStatistics` first, which sees the rewards as they were.
    """

    def __init__(self, env: MultiAgentEnv | VectorEnv) -> None:
        if RETURN not in env.spec.info_keys:
            env = RecordEpisodeStatistics(env)
        super().__init__(env, spec=env.spec, changes=("reward",))

    @abstractmethod
    def _change_reward(self, group: str, batch: Batch, out: np.ndarray) -> None:
        """Writes the rewards ``[E, A]`` float32 of a group."""

    def _on_step(self, batch: Batch) -> None:
        for name, out in batch.result.reward.items():
            self._change_reward(name, batch, out)
            due = batch.stepped if self.spec.shared_reward else batch.alive[name] & batch.stepped[:, None]
            if not due.all():
                out[~due] = 0.0


class TransformReward(RewardWrapper):
    """Applies a function to rewards.

    Agents that were not alive before a step still get 0, unless ``spec.shared_reward`` is set.

    Args:
        env: environment to wrap.
        function: takes rewards ``[E, A]`` float32 of a group and returns as many; must not change them.

    Raises:
        ValueError: if the function returns another shape.
    """

    def __init__(self, env: MultiAgentEnv | VectorEnv, *, function: Callable[[np.ndarray], np.ndarray]) -> None:
        super().__init__(env)
        self._function = function

    def _change_reward(self, group: str, batch: Batch, out: np.ndarray) -> None:
        reward = batch.source.reward[group].view()
        reward.flags.writeable = False  # it may be the memory of the environment inside
        values = np.asarray(self._function(reward))
        if values.shape != out.shape:
            raise ValueError(f"function must return rewards of shape {out.shape}, got {values.shape}")
        out[...] = values


class ClipReward(RewardWrapper):
    """Clips rewards.

    Args:
        env: environment to wrap.
        low: least reward, ``None`` for no bound.
        high: greatest reward, ``None`` for no bound.

    Raises:
        ValueError: if ``low`` exceeds ``high``, or there is no bound at all.
    """

    def __init__(self, env: MultiAgentEnv | VectorEnv, *, low: float | None = -1.0, high: float | None = 1.0) -> None:
        if low is None and high is None:
            raise ValueError("ClipReward needs low, high or both")
        if low is not None and high is not None and low > high:
            raise ValueError(f"low must not exceed high, got low={low} and high={high}")
        super().__init__(env)
        self.low = low
        self.high = high

    def _change_reward(self, group: str, batch: Batch, out: np.ndarray) -> None:
        np.clip(batch.source.reward[group], self.low, self.high, out=out)


class NormalizeReward(StatisticsWrapper, RewardWrapper):
    """Divides rewards by the standard deviation of discounted returns, ``r / sqrt(var(G) + epsilon)``.

    ``G`` is ``gamma * G + r`` from step to step, 0 at the start of an episode. Rewards are not centred, which would
    change what is worth doing. There is one variance a group. With ``spec.shared_reward`` an instance gives one sample
    of ``G`` a step; otherwise each agent has its own ``G``, and gives a sample if it was alive before the step.

    Wrap the vector environment and not its instances, so that all share one set of statistics.

    Args:
        env: environment to wrap.
        gamma: discount, in [0, 1]; take that of the algorithm.
        epsilon: added to the variance.
        update_running_statistics: whether statistics follow the data; an attribute of the same name switches it.

    Raises:
        ValueError: if ``gamma`` or ``epsilon`` is out of range.
    """

    def __init__(
        self,
        env: MultiAgentEnv | VectorEnv,
        *,
        gamma: float = 0.99,
        epsilon: float = 1e-8,
        update_running_statistics: bool = True,
    ) -> None:
        if not 0 <= gamma <= 1:
            raise ValueError(f"gamma must be in [0, 1], got {gamma}")
        self.gamma = gamma
        super().__init__(
            env,
            statistics={name: RunningStatistics() for name in env.spec.groups},
            epsilon=epsilon,
            update_running_statistics=update_running_statistics,
        )
        num_envs = self._num_instances()
        self._returns = {name: np.zeros((num_envs, group.num_agents)) for name, group in self.spec.groups.items()}

    def _on_reset(self, source: Observations[np.ndarray], result: Observations[np.ndarray], rows: Rows) -> None:
        for returns in self._returns.values():
            returns[rows] = 0.0

    def _on_step(self, batch: Batch) -> None:
        super()._on_step(batch)
        if (ended := batch.ended()).any():
            for returns in self._returns.values():
                returns[ended] = 0.0

    def _change_reward(self, group: str, batch: Batch, out: np.ndarray) -> None:
        reward, returns, statistics = batch.source.reward[group], self._returns[group], self.statistics[group]
        returns *= self.gamma
        returns += reward
        if self.update_running_statistics:
            if self.spec.shared_reward:
                statistics.update(returns[:, 0], batch.stepped)
            else:
                statistics.update(returns, batch.alive[group] & batch.stepped[:, None])
        np.divide(reward, np.sqrt(statistics.variance + self.epsilon), out=out, casting="same_kind")

    def _memory(self) -> dict[str, np.ndarray]:
        return {**super()._memory(), **{f"return.{name}": returns for name, returns in self._returns.items()}}


class AggregateReward(Wrapper):
    """Gives all agents of a team the same reward, made from their own; dead agents get it too.

    Sets ``spec.shared_reward``. This is another game: returns that are reported are those of the team reward.

    Args:
        env: environment to wrap.
        how: ``"sum"`` or ``"mean"`` of the rewards of all agents of the team, dead or alive, that of the ``"first"``
            agent, or ``"none"``, which leaves rewards as they are.
        team: ``"all"`` makes one team of all agents, ``"group"`` one of each group, for games between groups.

    Raises:
        ValueError: if ``how`` or ``team`` is unknown.
    """

    def __init__(self, env: MultiAgentEnv | VectorEnv, *, how: How = "sum", team: Team = "all") -> None:
        if how not in get_args(How):
            raise ValueError(f"how must be one of {get_args(How)}, got {how!r}")
        if team not in get_args(Team):
            raise ValueError(f"team must be one of {get_args(Team)}, got {team!r}")
        self.how = how
        self.team = team
        unchanged = how == "none"
        spec = env.spec if unchanged else replace(env.spec, shared_reward=True)
        super().__init__(env, spec=spec, changes=() if unchanged else ("reward",))
        groups = self.spec.groups
        self._teams = [tuple(groups)] if team == "all" else [(name,) for name in groups]

    def _on_step(self, batch: Batch) -> None:
        if self.how == "none":
            return
        for names in self._teams:
            rewards = [batch.source.reward[name] for name in names]
            if self.how == "first":
                total = rewards[0][:, 0]
            else:
                total = sum(reward.sum(axis=1, dtype=np.float64) for reward in rewards)
                if self.how == "mean":
                    total /= sum(reward.shape[1] for reward in rewards)
            for name in names:
                batch.result.reward[name][...] = total[:, None]
