"""Single-agent Gymnasium environments as games with one agent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from marl_lightning.envs.adapters.actions import group_action_space, package_action
from marl_lightning.envs.base import MultiAgentEnv, Observations, Step
from marl_lightning.envs.spec import EnvSpec, GroupSpec
from marl_lightning.envs.validation import action_arrays, check_legal

GROUP, AGENT = "agents", "agent_0"


class GymnasiumAdapter(MultiAgentEnv):
    """A Gymnasium environment as a group ``"agents"`` of one agent; the state is the flat observation.

    Observations that are no ``Box`` are flattened (a ``Discrete`` one becomes one-hot). Actions may be ``Discrete``,
    ``MultiDiscrete`` or ``MultiBinary``, start anywhere and have any shape (see :mod:`.actions`); continuous ones are
    clipped to their bounds. All actions are always legal. ``spec.episode_limit`` is that of the registered environment.
    Games cannot be saved.

    Args:
        env_id: registered id, such as ``"CartPole-v1"``.
        **kwargs: of ``gymnasium.make``.

    Raises:
        ValueError: if a space is of a kind that cannot be used (see :class:`GroupSpec`).
    """

    def __init__(self, *, env_id: str, **kwargs: Any) -> None:
        env = gymnasium.make(env_id, disable_env_checker=True, **kwargs)
        if not isinstance(env.observation_space, spaces.Box):
            env = gymnasium.wrappers.FlattenObservation(env)
        self._env = env
        group = GroupSpec(
            agents=(AGENT,),
            observation_space=env.observation_space,
            action_space=group_action_space(env.action_space),
        )
        self.spec = EnvSpec(
            name=f"gymnasium/{env_id}",
            groups={GROUP: group},
            state_size=group.observation_size,
            episode_limit=getattr(env.spec, "max_episode_steps", None),
            metadata={"backend": "gymnasium"},
        )
        self._over = True

    def reset(self, *, seed: int | None = None) -> Observations[np.ndarray]:
        """See :meth:`MultiAgentEnv.reset`."""
        observation, _ = self._env.reset(seed=seed)
        self._over = False
        return self._observe(observation)

    def step(self, actions: Mapping[str, np.ndarray]) -> Step[np.ndarray]:
        """See :meth:`MultiAgentEnv.step`."""
        if self._over:
            raise RuntimeError("the episode is over or has not begun: call reset before step")
        arrays = action_arrays(self.spec, actions, ())
        group = self.spec.groups[GROUP]
        masks = {GROUP: np.ones((1, group.action_size), np.bool_)} if group.is_discrete else {}
        check_legal(self.spec, arrays, action_mask=masks, alive={GROUP: np.ones(1, np.bool_)})
        (action,) = arrays[GROUP]
        action = package_action(self._env.action_space, action)
        observation, reward, terminated, truncated, _ = self._env.step(action)
        self._over = bool(terminated or truncated)
        return Step(
            observations=self._observe(observation),
            reward={GROUP: np.array([reward], np.float32)},
            terminated=bool(terminated),
            truncated=bool(truncated) and not terminated,
            info={},
        )

    def render(self) -> np.ndarray:
        """See :meth:`MultiAgentEnv.render`. The game must have been made with ``render_mode="rgb_array"``."""
        if self._env.render_mode != "rgb_array":
            mode = self._env.render_mode
            raise NotImplementedError(f'{self.spec.name} needs render_mode="rgb_array" to be rendered, got {mode!r}')
        return self._env.render()

    def close(self) -> None:
        """See :meth:`MultiAgentEnv.close`."""
        self._env.close()

    def _observe(self, observation: Any) -> Observations[np.ndarray]:
        group = self.spec.groups[GROUP]
        stacked = np.array(observation, group.observation_space.dtype)[None]
        mask = {GROUP: np.ones((1, group.action_size), np.bool_)} if group.is_discrete else {}
        return Observations(
            observation={GROUP: stacked},
            action_mask=mask,
            alive={GROUP: np.ones(1, np.bool_)},
            state=stacked.astype(np.float32).ravel(),
        )
