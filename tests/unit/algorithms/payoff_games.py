"""Games of one decision that is made over and over, from arrays of payoffs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from marl_lightning.envs import EnvSpec, GroupSpec, MultiAgentEnv, Observations, Step


class PayoffGame(MultiAgentEnv):
    """``payoffs[i, a_0, a_1, ...]`` is the reward of agent ``i``. Agents see 1; episodes are cut after ``limit`` steps.

    Neighbours with equally many actions are in one group. ``illegal`` lists pairs of agent and action.
    """

    def __init__(self, payoffs: np.ndarray, *, limit: int = 25, illegal: tuple[tuple[int, int], ...] = ()):
        self.payoffs, self.limit, self.illegal = np.asarray(payoffs, np.float32), limit, illegal
        sizes, groups = self.payoffs.shape[1:], {}
        for i, size in enumerate(sizes):
            groups.setdefault(f"with_{size}", []).append(f"agent_{i}")
        self.rows = {name: [int(agent[6:]) for agent in agents] for name, agents in groups.items()}
        assert [i for rows in self.rows.values() for i in rows] == list(range(len(sizes))), (
            "equal sizes must be neighbours"
        )
        self.spec = EnvSpec(
            name="scripted/payoffs",
            groups={
                name: GroupSpec(
                    agents=tuple(agents),
                    observation_space=spaces.Box(1.0, 1.0, (1,), np.float32),
                    action_space=spaces.Discrete(sizes[self.rows[name][0]]),
                )
                for name, agents in groups.items()
            },
            state_size=1,
            episode_limit=limit,
            can_checkpoint=True,
        )
        self.time = 0

    def reset(self, *, seed: int | None = None) -> Observations[np.ndarray]:
        self.time = 0
        return self.observe()

    def step(self, actions: Mapping[str, np.ndarray]) -> Step[np.ndarray]:
        joint = tuple(int(a) for name in self.spec.groups for a in actions[name])
        self.time += 1
        return Step(
            observations=self.observe(),
            reward={name: self.payoffs[(rows, *joint)] for name, rows in self.rows.items()},
            terminated=False,
            truncated=self.time == self.limit,
            info={},
        )

    def observe(self) -> Observations[np.ndarray]:
        masks = {}
        for name, rows in self.rows.items():
            masks[name] = np.ones((len(rows), self.spec.groups[name].action_size), np.bool_)
            for agent, action in self.illegal:
                if agent in rows:
                    masks[name][rows.index(agent), action] = False
        return Observations(
            observation={name: np.ones((len(rows), 1), np.float32) for name, rows in self.rows.items()},
            action_mask=masks,
            alive={name: np.ones(len(rows), np.bool_) for name, rows in self.rows.items()},
            state=np.ones(1, np.float32),
        )

    def state_dict(self) -> dict[str, Any]:
        return {"time": self.time}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.time = state["time"]
