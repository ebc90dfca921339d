"""Games for the tests of interfaces. Needs no torch, since worker processes play them."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import numpy as np
from gymnasium import spaces

from marl_lightning.envs import EnvSpec, GroupSpec, MultiAgentEnv, Observations, Step

DISCRETE = {"scouts": spaces.Discrete(2), "tanks": spaces.Discrete(4)}
MULTI = {"scouts": spaces.Discrete(3), "tanks": spaces.MultiDiscrete([2, 3])}
CONTINUOUS = {
    "scouts": spaces.Box(-1.0, 1.0, (1,), np.float32),
    "tanks": spaces.Box(np.array([0.0, 2.0, -4.0], np.float32), np.array([1.0, 3.0, -2.0], np.float32)),
}


class TeamsGame(MultiAgentEnv):
    """Two scouts that see 2 x 3 bytes and three tanks that see 4 floats. All else is drawn from the seed.

    Rewards are 10 times the place of an agent among all, and what it did, so that a wrong action is seen; those who
    were dead before the step get 0, or what all get if ``shared_reward`` is set. ``received`` has the last actions.
    """

    def __init__(
        self,
        *,
        actions: Mapping[str, spaces.Space] = DISCRETE,
        shared_reward: bool = False,
        longest: int = 6,
        name: str = "teams",
    ) -> None:
        sights = {
            "scouts": spaces.Box(0, 255, (2, 3), np.uint8),
            "tanks": spaces.Box(-np.inf, np.inf, (4,), np.float32),
        }
        sizes = {"scouts": 2, "tanks": 3}
        self.spec = EnvSpec(
            name=name,
            groups={
                group: GroupSpec(
                    agents=tuple(f"{group}_{index}" for index in range(sizes[group])),
                    observation_space=sights[group],
                    action_space=actions[group],
                )
                for group in sights
            },
            state_size=3,
            info_keys=("luck",),
            shared_reward=shared_reward,
        )
        self.longest = longest
        self.rng = np.random.default_rng()
        self.over = True
        self.received: dict[str, np.ndarray] = {}
        self.closed = 0
        self.speed = 1

    def reset(self, *, seed: int | None = None) -> Observations[np.ndarray]:
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.time, self.length, self.over = 0, int(self.rng.integers(1, self.longest + 1)), False
        return self.observe()

    def step(self, actions: Mapping[str, np.ndarray]) -> Step[np.ndarray]:
        if self.over:
            raise RuntimeError("over")
        self.received = {name: np.array(action) for name, action in actions.items()}
        self.time += 1
        self.over, kind = self.time == self.length, self.rng.random()
        return Step(
            reward={
                name: np.where(
                    self.alive[name] | self.spec.shared_reward,
                    7 if self.spec.shared_reward else first + np.arange(len(alive)) * 10 + self.done(name),
                    0,
                ).astype(np.float32)
                for (name, alive), first in zip(self.alive.items(), (0, 20), strict=True)
            },
            observations=self.observe(),
            terminated=bool(self.over and kind < 0.6),
            truncated=bool(self.over and kind >= 0.5),
            info={"luck": float(np.float32(self.rng.random()))},
        )

    def done(self, name: str) -> np.ndarray:
        action = self.received[name]
        return action if action.ndim == 1 else action.sum(axis=1)

    def observe(self) -> Observations[np.ndarray]:
        self.alive, observation, mask = {}, {}, {}
        for name, group in self.spec.groups.items():
            alive = self.alive[name] = self.rng.random(group.num_agents) < 0.7
            seen = self.rng.integers(1, 255, (group.num_agents, *group.observation_shape))
            observation[name] = seen.astype(group.observation_space.dtype)
            observation[name][~alive] = 0
            if group.is_discrete:
                legal = self.rng.random((group.num_agents, group.action_size)) < 0.5
                legal[~alive] = False
                legal[:, list(group.action_offsets)] = True
                mask[name] = legal
        state = np.array([self.time, self.length, self.rng.random()], np.float32)
        return Observations(observation=observation, action_mask=mask, alive=self.alive, state=state)

    def render(self) -> np.ndarray:
        return np.full((2, 2, 3), self.time, np.uint8)

    def close(self) -> None:
        self.closed += 1


class WitnessGame(TeamsGame):
    """Tells in its name which heavy modules its process has imported."""

    def __init__(self) -> None:
        heavy = ("torch", "lightning", "tensordict", "numba", "pytest")
        super().__init__(name=f"heavy={[module for module in heavy if module in sys.modules]}")
