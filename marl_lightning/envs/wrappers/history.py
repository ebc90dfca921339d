"""What was done and paid in every episode, for looking at it later."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from marl_lightning.envs.base import MultiAgentEnv, Observations, Step


class EpisodeHistory(MultiAgentEnv):
    """Keeps the actions and rewards of all episodes of an instance, in memory without limit.

    Args:
        env: environment to wrap; nothing of it is changed.

    Attributes:
        env: the environment inside.
        spec: its description.
    """

    def __init__(self, env: MultiAgentEnv) -> None:
        self.env = env
        self.spec = env.spec
        self._episodes: list[dict[str, Any]] = []

    def reset(self, *, seed: int | None = None) -> Observations[np.ndarray]:
        """See :meth:`MultiAgentEnv.reset`."""
        observations = self.env.reset(seed=seed)
        self._episodes.append({"actions": [], "rewards": [], "terminated": False, "truncated": False})
        return observations

    def step(self, actions: Mapping[str, np.ndarray]) -> Step[np.ndarray]:
        """See :meth:`MultiAgentEnv.step`."""
        step = self.env.step(actions)
        episode = self._episodes[-1]
        episode["actions"].append(self._by_agent(actions))
        episode["rewards"].append(self._by_agent(step.reward))
        episode["terminated"], episode["truncated"] = step.terminated, step.truncated
        return step

    def history(self) -> list[dict[str, Any]]:
        """Returns the episodes so far; can be written as JSON.

        An episode has ``actions`` and ``rewards``, a list of steps with the entries of each agent, and ``terminated``
        and ``truncated``, which are false if it still goes on. Those of which no step was made are left out.
        """
        return [episode for episode in self._episodes if episode["actions"]]

    def render(self) -> np.ndarray:
        """See :meth:`MultiAgentEnv.render`."""
        return self.env.render()

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`MultiAgentEnv.state_dict`. The history is not a part of it."""
        return self.env.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :meth:`MultiAgentEnv.load_state_dict`."""
        self.env.load_state_dict(state)

    def close(self) -> None:
        """See :meth:`MultiAgentEnv.close`."""
        self.env.close()

    def _by_agent(self, values: Mapping[str, np.ndarray]) -> dict[str, Any]:
        return {
            agent: value
            for name, group in self.spec.groups.items()
            for agent, value in zip(group.agents, np.asarray(values[name]).tolist(), strict=True)
        }
