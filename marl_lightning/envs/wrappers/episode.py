"""Wrappers of whole episodes: a limit of their length, and their returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from marl_lightning.envs.base import Array, MultiAgentEnv, Observations, VectorEnv
from marl_lightning.envs.spec import EnvSpec
from marl_lightning.envs.wrappers.base import Batch, Rows, Wrapper, autoresets, copy_rows

RETURN = "episode_return"
LENGTH = "episode_length"
AGENT_RETURN = "agent_return"


class TimeLimit(Wrapper):
    """Truncates an episode after ``max_episode_steps`` steps; a game that ends by then is terminated and not truncated.

    Put it inside other wrappers, which then see the episodes that it makes.

    Args:
        env: environment to wrap; a vector environment has to reset its instances itself.
        max_episode_steps: steps after which an episode that still goes on is truncated. A limit of the game's own
            stays in force, and the smaller of both is ``spec.episode_limit``.

    Raises:
        ValueError: if the limit is less than 1, or ``env`` is a vector environment without autoreset.
    """

    def __init__(self, env: MultiAgentEnv | VectorEnv, *, max_episode_steps: int) -> None:
        if max_episode_steps < 1:
            raise ValueError(f"max_episode_steps must be at least 1, got {max_episode_steps}")
        if isinstance(env, VectorEnv) and not autoresets(env):
            raise ValueError(
                "TimeLimit around a vector environment needs autoreset; wrap its instances instead: "
                "factory=lambda: TimeLimit(make_game(), max_episode_steps=...)"
            )
        limit = min(max_episode_steps, env.spec.episode_limit or max_episode_steps)
        super().__init__(env, spec=replace(env.spec, episode_limit=limit), changes=("truncated",))
        self.max_episode_steps = max_episode_steps
        self._length = np.zeros(self._num_instances(), np.int64)

    def _on_reset(self, source: Observations[np.ndarray], result: Observations[np.ndarray], rows: Rows) -> None:
        self._length[rows] = 0

    def _on_step(self, batch: Batch) -> None:
        source, result = batch.source, batch.result
        self._length += 1
        cut = self._length >= self.max_episode_steps
        cut &= ~(source.terminated | source.truncated)
        np.logical_or(source.truncated, cut, out=result.truncated)
        ended = batch.ended()
        if not (batch.autoreset and ended.any()):
            return
        self._length[ended] = 0
        copy_rows(result.final, source.final, ended)
        if cut.any():
            copy_rows(result.final, source.observations, cut)
            self.env.reset(mask=cut)  # writes the starts into source.observations, which are result.observations

    def _memory(self) -> dict[str, np.ndarray]:
        return {**super()._memory(), "length": self._length}


class RecordEpisodeStatistics(Wrapper):
    """Reports return and length of the running episode in ``info``.

    The numbers are those of the episode so far, the step included; on its last step, those of the whole episode.
    Returns are sums of rewards as they are inside of this wrapper: put it inside of wrappers that rescale rewards.

    ============================  ======================================================================================
    name in ``info``              meaning
    ============================  ======================================================================================
    ``episode_return``            mean over all agents of their own undiscounted returns: the score of an episode
    ``episode_return/<group>``    mean over the agents of a group, if there are several groups
    ``episode_length``            env steps
    ``agent_return/<agent>``      return of one agent, with ``per_agent``
    ============================  ======================================================================================

    Args:
        env: environment to wrap.
        per_agent: also report the returns of single agents.

    Raises:
        ValueError: if they are reported already.
    """

    def __init__(self, env: MultiAgentEnv | VectorEnv, *, per_agent: bool = False) -> None:
        if RETURN in env.spec.info_keys:
            raise ValueError(f"{env.spec.name} reports {RETURN!r} already: use RecordEpisodeStatistics once")
        groups = env.spec.groups
        self._names = _group_keys(env.spec) if len(groups) > 1 else {}
        self._agent_names = (
            {name: [f"{AGENT_RETURN}/{agent}" for agent in group.agents] for name, group in groups.items()}
            if per_agent
            else {}
        )
        agent_keys = (key for names in self._agent_names.values() for key in names)
        keys = (*env.spec.info_keys, RETURN, LENGTH, *self._names.values(), *agent_keys)
        super().__init__(env, spec=replace(env.spec, info_keys=keys))
        num_envs = self._num_instances()
        self._length = np.zeros(num_envs, np.int64)
        # float32 would lose small rewards of long episodes.
        self._returns = {name: np.zeros((num_envs, group.num_agents)) for name, group in groups.items()}

    def _on_reset(self, source: Observations[np.ndarray], result: Observations[np.ndarray], rows: Rows) -> None:
        self._clear(rows)

    def _on_step(self, batch: Batch) -> None:
        self._length += batch.stepped
        for name, returns in self._returns.items():
            returns += batch.source.reward[name]  # 0 where an instance stood still
        self._report(batch.result.info)
        if batch.autoreset and (ended := batch.ended()).any():
            self._clear(ended)

    def _report(self, info: Mapping[str, np.ndarray]) -> None:
        totals = {name: returns.sum(axis=1) for name, returns in self._returns.items()}
        np.divide(sum(totals.values()), self.spec.num_agents, out=info[RETURN], casting="same_kind")
        for name, key in self._names.items():
            np.divide(totals[name], self.spec.groups[name].num_agents, out=info[key], casting="same_kind")
        for name, keys in self._agent_names.items():
            for i, key in enumerate(keys):
                info[key][:] = self._returns[name][:, i]
        info[LENGTH][:] = self._length

    def _clear(self, rows: Rows) -> None:
        self._length[rows] = 0
        for returns in self._returns.values():
            returns[rows] = 0.0

    def _memory(self) -> dict[str, np.ndarray]:
        returns = {f"return.{name}": returns for name, returns in self._returns.items()}
        return {**super()._memory(), **returns, "length": self._length}


def recorded_returns(spec: EnvSpec, info: Mapping[str, Array]) -> dict[str, Array] | None:
    """Returns, per group, the mean over its agents of the returns that :class:`RecordEpisodeStatistics` reported.

    Args:
        spec: of the environment.
        info: of steps of it, in any shape.

    Returns:
        Arrays of the shape of those in ``info``; ``None`` if returns are not reported.
    """
    if RETURN not in spec.info_keys:
        return None
    return {name: info[key] for name, key in _group_keys(spec).items()}


def _group_keys(spec: EnvSpec) -> dict[str, str]:
    """Returns the name in ``info`` of the return of each group; that of a single group is that of all agents."""
    return {name: f"{RETURN}/{name}" if len(spec.groups) > 1 else RETURN for name in spec.groups}
