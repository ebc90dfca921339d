"""A game whose actions have several parts, with masks, an agent that leaves, and a best return that is known."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from gymnasium import spaces

from marl_lightning.envs import EnvSpec, GroupSpec, MultiAgentEnv, Observations, Step
from marl_lightning.envs.validation import action_arrays, check_legal

DIALS = (3, 2, 4)
BEST_RETURN = 3.0
"""Mean over both agents: a point in each of 4 steps for the one that stays, in 2 for the one that leaves."""


class LocksGame(MultiAgentEnv):
    """Each of two agents sets all dials of a lock at once, and gets the share of dials that it sets right.

    The observation shows the right digits, one-hot dial after dial; they change with every step. Right digits are
    legal, others are blocked at random. An episode has 4 steps, after the first 2 of which ``thief_1`` leaves.
    """

    def __init__(self, *, dials: tuple[int, ...] = DIALS) -> None:
        size = sum(dials)
        self.spec = EnvSpec(
            name="scripted/locks",
            groups={
                "thief": GroupSpec(
                    agents=("thief_0", "thief_1"),
                    observation_space=spaces.Box(0, 1, (size,), np.float32),
                    action_space=spaces.MultiDiscrete(dials),
                )
            },
            state_size=2 * size,
            episode_limit=4,
        )
        self.dials = np.array(dials)
        self.starts = np.cumsum(self.dials) - self.dials
        self.rng = np.random.default_rng()
        self.time = 4

    def reset(self, *, seed: int | None = None) -> Observations[np.ndarray]:
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.time = 0
        return self.observe()

    def step(self, actions: Mapping[str, np.ndarray]) -> Step[np.ndarray]:
        if self.time == 4:
            raise RuntimeError("the episode is over: call reset before step")
        chosen = action_arrays(self.spec, actions, ())
        check_legal(self.spec, chosen, action_mask={"thief": self.mask}, alive={"thief": self.alive})
        reward = self.alive * (chosen["thief"] == self.digits).mean(-1)
        self.time += 1
        return Step(
            observations=self.observe(),
            reward={"thief": reward.astype(np.float32)},
            terminated=self.time == 4,
            truncated=False,
            info={},
        )

    def observe(self) -> Observations[np.ndarray]:
        self.alive = np.array([True, self.time < 2])
        # Whoever has left sees nothing, and has only digit 0 to choose.
        self.digits = self.rng.integers(0, self.dials, (2, len(self.dials))) * self.alive[:, None]
        shown = np.zeros((2, self.dials.sum()), np.bool_)
        np.put_along_axis(shown, self.digits + self.starts, True, -1)
        blocked = self.rng.random(shown.shape) < 0.4
        self.mask = shown | (~blocked & self.alive[:, None])
        observation = (shown & self.alive[:, None]).astype(np.float32)
        return Observations(
            observation={"thief": observation},
            action_mask={"thief": self.mask.copy()},
            alive={"thief": self.alive.copy()},
            state=observation.ravel(),
        )
