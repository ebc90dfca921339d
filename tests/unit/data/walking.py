"""A small grid with marked cells and tasks on it, for tests of counterfactual experience."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from marl_lightning.data.collector import RolloutCollector
from marl_lightning.data.replay import replay_records
from marl_lightning.envs import EnvSpec, GroupSpec, MultiAgentEnv, Observations, Step, SyncVectorEnv
from marl_lightning.envs.monitors import MonitorParallelEnv, sequence

MOVES = np.array([(0, 1), (0, -1), (1, 0), (-1, 0)])


class Walk(MultiAgentEnv):
    """Agents that walk on a grid without meeting; each sees a one-hot of its cell and is paid 0.25 a step.

    All start in the first cell, or anywhere with ``scatter``. The game is over once an agent is in the cell ``trap``.
    """

    def __init__(self, *, size: int, agents: int = 1, limit: int = 30, trap: int | None = None, scatter: bool = False):
        self.spec = EnvSpec(
            name="scripted/walk",
            groups={
                "walkers": GroupSpec(
                    agents=tuple(f"walker_{i}" for i in range(agents)),
                    observation_space=spaces.Box(0.0, 1.0, (size * size,), np.float32),
                    action_space=spaces.Discrete(4),
                )
            },
            state_size=agents,
            episode_limit=limit,
            can_checkpoint=True,
        )
        self.size, self.agents, self.limit, self.trap, self.scatter = size, agents, limit, trap, scatter
        self.rng = np.random.default_rng()
        self.position, self.time, self.over = np.zeros((agents, 2), np.int64), 0, True

    @property
    def cells(self) -> np.ndarray:
        return self.position[:, 0] * self.size + self.position[:, 1]

    def reset(self, *, seed: int | None = None) -> Observations[np.ndarray]:
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.time, self.over = 0, False
        start = self.rng.integers(self.size, size=(self.agents, 2))
        self.position = start if self.scatter else np.zeros((self.agents, 2), np.int64)
        return self.observe()

    def step(self, actions: Mapping[str, np.ndarray]) -> Step[np.ndarray]:
        if self.over:
            raise RuntimeError("over")
        if not np.isin(actions["walkers"], range(4)).all():
            raise ValueError("illegal action")
        self.position = np.clip(self.position + MOVES[actions["walkers"]], 0, self.size - 1)
        self.time += 1
        terminated = self.trap is not None and bool((self.cells == self.trap).any())
        self.over = terminated or self.time == self.limit
        return Step(
            observations=self.observe(),
            reward={"walkers": np.full(self.agents, 0.25, np.float32)},
            terminated=terminated,
            truncated=self.time == self.limit and not terminated,
            info={},
        )

    def observe(self) -> Observations[np.ndarray]:
        return Observations(
            observation={"walkers": np.eye(self.size**2, dtype=np.float32)[self.cells]},
            action_mask={"walkers": np.ones((self.agents, 4), np.bool_)},
            alive={"walkers": np.ones(self.agents, np.bool_)},
            state=self.cells.astype(np.float32),
        )

    def state_dict(self) -> dict[str, Any]:
        rng = {key: str(value) for key, value in self.rng.bit_generator.state["state"].items()}
        return {"position": self.position.tolist(), "time": self.time, "over": self.over, "rng": rng}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.position, self.time, self.over = np.array(state["position"]), state["time"], state["over"]
        full = self.rng.bit_generator.state
        full["state"] = {key: int(value) for key, value in state["rng"].items()}
        self.rng.bit_generator.state = full


def labeller(marks: Mapping[str, int]):
    """Returns a function that says whose cell has which marks."""

    def label(context):
        seen = context.next_observations.observation["walkers"].argmax(-1)
        return {f"walker_{i}": frozenset(m for m, cell in marks.items() if cell == seen[i]) for i in range(len(seen))}

    return label


def watched_walk(*, size=3, agents=2, marks=None, monitors=None, limit=30, trap=None, scatter=True, **settings):
    """Returns a walk in which every agent is to visit a, b and c in this order."""
    game = Walk(size=size, agents=agents, limit=limit, trap=trap, scatter=scatter)
    marks = {"a": 0, "b": 2, "c": 6} if marks is None else marks
    if monitors is None:
        monitors = {name: sequence("a", "b", "c") for name in game.spec.agents}
    return MonitorParallelEnv(game, monitors, labeller(marks), **{"report_labels": True} | settings)


class Wanderer:
    """A policy that draws actions uniformly."""

    def initial_state(self, num_envs):
        return {}

    def act(self, observations, state, is_first, *, deterministic=False, generator=None):
        actions, log_probs = {}, {}
        for name, alive in observations.alive.items():
            mask = observations.action_mask.get(name)
            if mask is None:
                actions[name] = torch.zeros(*alive.shape, 2)
            else:
                actions[name] = torch.multinomial(mask.float().flatten(0, 1), 1, generator=generator).view(alive.shape)
            log_probs[name] = torch.zeros(alive.shape)
        return actions, log_probs, state

    def env_actions(self, actions):
        return actions


def wander(make, *, steps, envs=1, rollouts=1, seed=0):
    """Yields records and info of rollouts in which nobody knows what to do."""
    env = SyncVectorEnv(factory=make, num_envs=envs, seed=seed)
    collector = RolloutCollector(env=env, rollout_length=steps, seed=seed, keep_final="ended")
    for _ in range(rollouts):
        rollout = collector.collect(Wanderer())
        yield replay_records(rollout).clone(), {key: value.clone() for key, value in rollout.info.items()}
