"""The two-step game of the QMIX paper."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from gymnasium import spaces

from marl_lightning.envs import EnvSpec, GroupSpec, MultiAgentEnv, Observations, Step

PAYOFFS = np.array([[[7, 7], [7, 7]], [[0, 1], [1, 8]]], np.float32)
"""Of the second step, by game and by the actions of both agents."""


class TwoStepGame(MultiAgentEnv):
    """The first agent's first action chooses the payoffs of the second step (Rashid et al. 2018, section 5).

    Both agents observe the step and the game that was chosen, which is also the state. The reward is the team's.
    """

    def __init__(self) -> None:
        self.spec = EnvSpec(
            name="scripted/two_step",
            groups={
                "agents": GroupSpec(
                    agents=("agent_0", "agent_1"),
                    observation_space=spaces.Box(0, 1, (3,), np.float32),
                    action_space=spaces.Discrete(2),
                )
            },
            state_size=3,
            shared_reward=True,
            can_checkpoint=True,
        )
        self.place, self.over = 0, True

    def reset(self, *, seed: int | None = None) -> Observations[np.ndarray]:
        self.place, self.over = 0, False
        return self.observe()

    def step(self, actions: Mapping[str, np.ndarray]) -> Step[np.ndarray]:
        if self.over:
            raise RuntimeError("the episode is over: call reset")
        first, second = actions["agents"].tolist()
        if {first, second} - {0, 1}:
            raise ValueError(f"illegal actions {first} and {second}")
        reward = 0.0
        if self.place:
            reward, self.over = float(PAYOFFS[self.place - 1, first, second]), True
        else:
            self.place = 1 + first
        return Step(
            observations=self.observe(),
            reward={"agents": np.full(2, reward, np.float32)},
            terminated=self.over,
            truncated=False,
            info={},
        )

    def observe(self) -> Observations[np.ndarray]:
        place = np.eye(3, dtype=np.float32)[self.place]
        return Observations(
            observation={"agents": np.stack([place, place])},
            action_mask={"agents": np.ones((2, 2), np.bool_)},
            alive={"agents": np.ones(2, np.bool_)},
            state=place,
        )

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place, "over": int(self.over)}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.place, self.over = state["place"], bool(state["over"])

    def close(self) -> None:
        """Nothing to do."""
