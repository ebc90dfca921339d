"""One battle with the interface that SMAC programs expect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from marl_lightning.envs.base import Observations
from marl_lightning.envs.native.smac.env import GROUP, SmacVectorEnv


class SmacEnv:
    """The SMAC-like simulator with the methods, names and return values of SMAC's environment.

    Args:
        continuing_episode: reports ``info["episode_limit"]`` when the time limit ends an episode, so that learners can
            bootstrap; the limit is reported as termination all the same.
        **arguments: of :class:`~marl_lightning.envs.native.smac.env.SmacVectorEnv`, at least ``map_name``. Illegal
            actions raise by default.

    Attributes:
        n_agents: number of agents.
        n_enemies: number of enemies.
        n_actions: number of actions of an agent.
        episode_limit: env steps after which a battle is over.
    """

    def __init__(self, *, continuing_episode: bool = False, **arguments: Any) -> None:
        self._env = SmacVectorEnv(**{"invalid_action": "error", **arguments}, num_envs=1)
        self._continuing_episode = continuing_episode
        self._layout = self._env.layout
        self.n_agents = self._layout.num_agents
        self.n_enemies = self._layout.num_enemies
        self.n_actions = self._layout.num_actions
        self.episode_limit = self._layout.scenario.limit
        self._current: Observations | None = None
        self._over = True
        self._battles_won = self._battles_game = self._timeouts = 0

    def reset(self) -> tuple[list[np.ndarray], np.ndarray]:
        """Starts an episode and returns ``get_obs()`` and ``get_state()``."""
        if self._current is None or not self._over:
            self._current = self._env.reset()
        else:  # the vector environment began the next episode when the last one ended
            self._current = self._step.observations
        self._over = False
        return self.get_obs(), self.get_state()

    def step(self, actions: Sequence[int]) -> tuple[float, bool, dict[str, Any]]:
        """Makes one env step.

        Args:
            actions: one action an agent.

        Returns:
            The team reward, whether the episode is over for any reason, and a dictionary with ``battle_won``,
            ``dead_allies``, ``dead_enemies`` and, if asked for, ``episode_limit``.

        Raises:
            ValueError: if an action is illegal; nothing has changed then.
            RuntimeError: before the first reset and after the end of an episode.
        """
        if self._over:
            raise RuntimeError("the episode is over; call reset")
        chosen = torch.tensor([int(action) for action in actions]).unsqueeze(0)
        self._step = self._env.step({GROUP: chosen})
        numbers = {key: value.item() for key, value in self._step.info.items()}
        self._over = bool(self._step.terminated | self._step.truncated)
        self._current = self._step.final if self._over else self._step.observations
        info: dict[str, Any] = {
            "battle_won": bool(numbers["battle_won"]),
            "dead_allies": int(numbers["dead_allies"]),
            "dead_enemies": int(numbers["dead_enemies"]),
        }
        if numbers["timeout"] and self._continuing_episode:
            info["episode_limit"] = True
        self._battles_won += info["battle_won"]
        self._battles_game += self._over
        self._timeouts += bool(numbers["timeout"])
        return float(self._env.team_reward[0]), self._over, info

    def get_obs(self) -> list[np.ndarray]:
        """Returns the observations of all agents, ``[obs_size]`` float32 each."""
        return list(self._read("observation"))

    def get_obs_agent(self, agent_id: int) -> np.ndarray:
        """Returns the observation of one agent, ``[obs_size]`` float32."""
        return self._read("observation")[agent_id]

    def get_state(self) -> np.ndarray:
        """Returns the global state, ``[state_size]`` float32."""
        return self._started.state[0].numpy().copy()

    def get_avail_actions(self) -> list[list[int]]:
        """Returns 1 for every legal action and 0 for the others, one list an agent."""
        return self._read("action_mask").astype(int).tolist()

    def get_avail_agent_actions(self, agent_id: int) -> list[int]:
        """Returns 1 for every legal action of one agent and 0 for the others."""
        return self.get_avail_actions()[agent_id]

    def get_obs_size(self) -> int:
        """Returns the number of entries of an observation."""
        return self._layout.observation_size

    def get_state_size(self) -> int:
        """Returns the number of entries of the global state."""
        return self._layout.state_size

    def get_total_actions(self) -> int:
        """Returns the number of actions of an agent."""
        return self._layout.num_actions

    def get_env_info(self) -> dict[str, Any]:
        """Returns sizes, the limit, and the names of the entries of a unit in the global state."""
        return {
            "state_shape": self.get_state_size(),
            "obs_shape": self.get_obs_size(),
            "n_actions": self.get_total_actions(),
            "n_agents": self._layout.num_agents,
            "episode_limit": self._layout.scenario.limit,
            "agent_features": list(self._layout.ally_feature_names),
            "enemy_features": list(self._layout.enemy_feature_names),
        }

    def get_stats(self) -> dict[str, Any]:
        """Returns counts over the finished episodes; a draw is, as in SMAC, an episode that the limit ended."""
        return {
            "battles_won": self._battles_won,
            "battles_game": self._battles_game,
            "battles_draw": self._timeouts,
            "win_rate": self._battles_won / max(self._battles_game, 1),
            "timeouts": self._timeouts,
            "restarts": 0,
        }

    def render(self) -> np.ndarray:
        """Returns the current picture, uint8 ``[H, W, 3]``."""
        return self._env.render(0)

    def close(self) -> None:
        """Frees what the environment holds."""
        self._env.close()

    @property
    def _started(self) -> Observations:
        if self._current is None:
            raise RuntimeError("call reset first")
        return self._current

    def _read(self, field: str) -> np.ndarray:
        """Returns a copy of a field of the current observations, without the axis of instances."""
        return getattr(self._started, field)[GROUP][0].numpy().copy()
