"""Games with hand-made episodes: every number that a test expects can be read off the script."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from pettingzoo import ParallelEnv

from marl_lightning.envs import EnvSpec, GroupSpec, MultiAgentEnv, Observations, Step


class CounterGame(MultiAgentEnv):
    """Two groups; episodes of ``length`` steps that are terminated and truncated in turn, terminated first.

    The observation of agent ``a`` is ``(episode, time, noise, a)``, where the noise is drawn at each reset. Agent
    ``red_1`` dies on step 2 and gets -1 for it; all other rewards are the time. Blue's actions are continuous.
    """

    def __init__(self, *, length: int = 3, name: str = "scripted/counter") -> None:
        box = spaces.Box(-np.inf, np.inf, (4,), np.float32)
        self.spec = EnvSpec(
            name=name,
            groups={
                "red": GroupSpec(agents=("red_0", "red_1"), observation_space=box, action_space=spaces.Discrete(3)),
                "blue": GroupSpec(
                    agents=("blue_0",), observation_space=box, action_space=spaces.Box(-1.0, 1.0, (2,), np.float32)
                ),
            },
            state_size=3,
            episode_limit=length,
            info_keys=("score",),
            can_checkpoint=True,
            metadata={},
        )
        self.length = length
        self.rng = np.random.default_rng()
        self.episode, self.time, self.noise = -1, 0, 0.0
        self.over = True
        self.seeds: list[int | None] = []
        self.closed = 0

    def reset(self, *, seed: int | None = None) -> Observations[np.ndarray]:
        self.seeds.append(seed)
        if seed is not None:
            self.rng = np.random.default_rng(seed)
            self.episode = -1
        self.episode += 1
        self.time, self.over = 0, False
        self.noise = float(np.float32(self.rng.random()))
        return self.observe()

    def step(self, actions: Mapping[str, np.ndarray]) -> Step[np.ndarray]:
        if self.over:
            raise RuntimeError("over")
        red = self.alive["red"]
        if not np.isin(actions["red"][red], range(3)).all():
            raise ValueError("illegal action")
        self.time += 1
        self.over = self.time == self.length
        reward = np.where(red, np.float32(self.time), np.float32(0))
        reward[1] = -1.0 if self.time == 2 else reward[1]
        return Step(
            observations=self.observe(),
            reward={"red": reward.astype(np.float32), "blue": np.full(1, self.time, np.float32)},
            terminated=self.over and self.episode % 2 == 0,
            truncated=self.over and self.episode % 2 == 1,
            info={"score": 10.0 * self.time},
        )

    @property
    def alive(self) -> dict[str, np.ndarray]:
        return {"red": np.array([True, self.time < 2]), "blue": np.array([True])}

    def observe(self) -> Observations[np.ndarray]:
        def rows(num_agents: int) -> np.ndarray:
            return np.array([[self.episode, self.time, self.noise, a] for a in range(num_agents)], np.float32)

        alive = self.alive
        mask = np.ones((2, 3), np.bool_)
        mask[~alive["red"], 1:] = False
        return Observations(
            observation={"red": np.where(alive["red"][:, None], rows(2), np.float32(0)), "blue": rows(1)},
            action_mask={"red": mask},
            alive=alive,
            state=np.array([self.episode, self.time, self.noise], np.float32),
        )

    def render(self) -> np.ndarray:
        return np.full((2, 2, 3), self.time, np.uint8)

    def state_dict(self) -> dict[str, Any]:
        return {
            "numbers": [self.episode, self.time, self.noise],
            "over": self.over,
            # The generator's integers have 128 bits: too long for a tensor.
            "rng": {key: str(value) for key, value in self.rng.bit_generator.state["state"].items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.episode, self.time, self.noise = state["numbers"]
        self.over = state["over"]
        full = self.rng.bit_generator.state
        full["state"] = {key: int(value) for key, value in state["rng"].items()}
        self.rng.bit_generator.state = full

    def close(self) -> None:
        self.closed += 1


def counter_actions(num_envs: int | None = None, red: int = 0) -> dict[str, Any]:
    """Actions for :class:`CounterGame`: tensors for ``num_envs`` instances, arrays for one without a number."""
    if num_envs is None:
        return {"red": np.full(2, red, np.int64), "blue": np.zeros((1, 2), np.float32)}
    return {"red": torch.full((num_envs, 2), red), "blue": torch.zeros(num_envs, 1, 2)}


class LeavingGame(ParallelEnv):
    """A ParallelEnv whose agents leave by script: ``leaves[agent] = (step, "terminated" or "truncated")``.

    Observations are ``10 * time + index`` of the agent, rewards ``100 * time + index``. Agents that leave vanish from
    all dictionaries afterwards. The received actions are kept in ``received``.
    """

    metadata = {"name": "leaving_v0"}  # noqa: RUF012 - as in PettingZoo

    def __init__(self, leaves: Mapping[str, tuple[int, str]], *, masks: str | None = None) -> None:
        self.leaves = dict(leaves)
        self.possible_agents = list(leaves)
        self.masks = masks
        self.received: list[dict[str, Any]] = []
        self.seeds: list[int | None] = []
        self.agents: list[str] = []

    def observation_space(self, agent: str) -> spaces.Space:
        box = spaces.Box(0, 255, (1,), np.uint8)
        if self.masks == "observation":
            return spaces.Dict({"observation": box, "action_mask": spaces.MultiBinary(3)})
        return box

    def action_space(self, agent: str) -> spaces.Space:
        return spaces.Discrete(3)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None):
        self.seeds.append(seed)
        self.agents = list(self.possible_agents)
        self.time = 0
        return {a: self.observe(a) for a in self.agents}, {a: self.info() for a in self.agents}

    def step(self, actions: dict[str, Any]):
        self.received.append(dict(actions))
        self.time += 1
        acted = self.agents
        ends = {a: self.leaves[a][1] if self.leaves[a][0] == self.time else "" for a in acted}
        self.agents = [a for a in acted if not ends[a]]
        return (
            {a: self.observe(a) for a in acted},
            {a: 100.0 * self.time + self.possible_agents.index(a) for a in acted},
            {a: ends[a] in ("terminated", "both") for a in acted},
            {a: ends[a] in ("truncated", "both") for a in acted},
            {a: self.info() for a in acted},
        )

    def observe(self, agent: str) -> Any:
        array = np.array([10 * self.time + self.possible_agents.index(agent)], np.uint8)
        if self.masks == "observation":
            return {"observation": array, "action_mask": np.array([0, 1, 1], np.int8)}
        return array

    def info(self) -> dict[str, Any]:
        return {"action_mask": np.array([1, 0, 1], np.int8)} if self.masks == "info" else {}
