"""Returns and lengths of the episodes that end inside rollouts, computed once a rollout and not once a step."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from marl_lightning.envs.spec import EnvSpec
from marl_lightning.envs.wrappers import recorded_returns


class EpisodeStatistics:
    """Sums rewards over episodes that may start in one rollout and end in another.

    Args:
        spec: the environment.
        num_envs: number of instances, ``E``.
    """

    def __init__(self, *, spec: EnvSpec, num_envs: int):
        self._spec = spec
        self._groups = tuple(spec.groups)
        self._returns = {name: np.zeros((num_envs, group.num_agents)) for name, group in spec.groups.items()}
        self._lengths = np.zeros(num_envs, np.int64)

    def update(
        self, reward: Mapping[str, np.ndarray], done: np.ndarray, info: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Takes in a rollout and returns the episodes that ended in it, in order of time.

        Args:
            reward: per group ``[T, E, A]``.
            done: ``[T, E]`` bool.
            info: per name ``[T, E]``.

        Returns:
            One entry an episode: ``return`` (mean over agents of their own returns), ``team_return`` (sum over
            agents), ``length`` in env steps, with several groups ``return/<group>``, and each name of ``info`` as of
            the last step.
        """
        env, time = np.nonzero(done.T)  # sorted by env, then time
        continues = np.append(False, env[1:] == env[:-1]) if len(env) else np.zeros(0, bool)
        group_returns = {}
        for name in self._groups:
            total = np.cumsum(reward[name], axis=0, dtype=np.float64) + self._returns[name]
            at_end = total[time, env]
            group_returns[name] = at_end.copy()
            group_returns[name][continues] -= at_end[np.flatnonzero(continues) - 1]
            self._returns[name] = total[-1]
            self._returns[name][env] -= at_end  # of several ends of one instance, the last is written last
        at_end = time + 1 + self._lengths[env]
        lengths = at_end - np.where(continues, np.roll(at_end, 1), 0)
        self._lengths += len(done)
        self._lengths[env] = len(done) - 1 - time
        at_end_info = {name: values[time, env] for name, values in info.items()}
        group_returns = true_returns(self._spec, group_returns, at_end_info)
        every_agent = np.concatenate(list(group_returns.values()), axis=1)
        episodes = {"return": every_agent.mean(1), "team_return": every_agent.sum(1), "length": lengths}
        if len(self._groups) > 1:
            episodes |= {f"return/{name}": returns.mean(1) for name, returns in group_returns.items()}
        hidden = ("episode_", "label/")  # the return and the length again, and numbers whose mean means nothing
        episodes |= {name: values for name, values in at_end_info.items() if not name.startswith(hidden)}
        order = np.argsort(time, kind="stable")
        return {name: values[order] for name, values in episodes.items()}

    def state_dict(self) -> dict:
        """Returns the running sums as lists, which any checkpoint can hold."""
        return {"returns": {k: v.tolist() for k, v in self._returns.items()}, "lengths": self._lengths.tolist()}

    def load_state_dict(self, state: Mapping) -> None:
        """Restores :meth:`state_dict`."""
        self._returns = {name: np.array(values) for name, values in state["returns"].items()}
        self._lengths = np.array(state["lengths"], np.int64)


def true_returns(
    spec: EnvSpec, returns: Mapping[str, np.ndarray], info: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Returns per group ``[n, A]`` what episodes were worth in the rewards of the game itself.

    Wrappers that rescale rewards leave the returns of the game in ``info``: the mean over the agents of a group, which
    then stands for each of them.

    Args:
        spec: the environment.
        returns: per group ``[n, A]``, sums of the rewards that came out of the environment.
        info: per name ``[n]``, as of the last step of each episode.
    """
    recorded = recorded_returns(spec, info)
    if not recorded:
        return dict(returns)
    return {name: np.broadcast_to(recorded[name][:, None], values.shape) for name, values in returns.items()}


def episode_metrics(episodes: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Returns ``train/...`` means over the episodes, ``train/win_rate`` if the game can be won; nothing without any."""
    if not len(episodes["length"]):
        return {}
    names = {"length": "episode_length", "battle_won": "win_rate"}
    metrics = {f"train/{names.get(name, name)}": float(values.mean()) for name, values in episodes.items()}
    return metrics | {"train/episodes": float(len(episodes["length"]))}
