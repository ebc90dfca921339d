"""A game of opponents and policies whose every move can be told, for tests of the pool."""

from __future__ import annotations

import json

import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from marl_lightning.envs import EnvSpec, GroupSpec, MultiAgentEnv, Observations, Step, SyncVectorEnv
from marl_lightning.envs.wrappers.opponent_pool import PoolEntry

CATS = GroupSpec(agents=("c0", "c1"), observation_space=spaces.Box(-99, 99, (2,)), action_space=spaces.Discrete(4))
DOGS = GroupSpec(agents=("d0",), observation_space=spaces.Box(-99, 99, (1,)), action_space=spaces.Discrete(5))


class Duel(MultiAgentEnv):
    """Three agents in two groups, each rewarded by its action less half of what the others do.

    Episodes take 2 to 5 steps and end either way. ``c1`` dies after two steps in every second episode; ``d0`` may not
    do 0 in every other step. Observations hold time and noise.
    """

    def __init__(self, *, shared_reward: bool = False) -> None:
        self.spec = EnvSpec(
            name="test/duel",
            groups={"cats": CATS, "dogs": DOGS},
            state_size=2,
            info_keys=("steps",),
            shared_reward=shared_reward,
            can_checkpoint=True,
        )
        self.rng = np.random.default_rng()
        self.time, self.length, self.episode = 0, 0, 0

    def reset(self, *, seed=None):
        if seed is not None:
            self.rng, self.episode = np.random.default_rng(seed), 0
        self.time, self.length, self.episode = 0, int(self.rng.integers(2, 6)), self.episode + 1
        return self._observe()

    def step(self, actions):
        alive = self._alive()
        actions = {"cats": actions["cats"] * alive, "dogs": actions["dogs"]}
        total = sum(action.sum() for action in actions.values())
        reward = {name: (1.5 * action - 0.5 * total).astype(np.float32) for name, action in actions.items()}
        reward["cats"] = reward["cats"] * alive
        self.time += 1
        over = self.time == self.length
        return Step(
            observations=self._observe(),
            reward=reward,
            terminated=over and self.episode % 3 == 0,
            truncated=over and self.episode % 3 != 0,
            info={"steps": float(self.time)},
        )

    def _alive(self):
        return np.array([True, self.episode % 2 == 0 or self.time < 2])

    def _observe(self):
        noise = self.rng.normal(size=3).astype(np.float32)
        alive = self._alive()
        cats, dogs = np.ones((2, 4), np.bool_), np.ones((1, 5), np.bool_)
        cats[1, 1:] = alive[1]
        dogs[0, 0] = self.time % 2 == 0
        return Observations(
            observation={
                "cats": np.array([[self.time, noise[0]], [self.time, noise[1]]], np.float32),
                "dogs": noise[2:, None],
            },
            action_mask={"cats": cats, "dogs": dogs},
            alive={"cats": alive, "dogs": np.ones(1, np.bool_)},
            state=np.array([self.time, noise[0]], np.float32),
        )

    def state_dict(self):
        return {
            "rng": json.dumps(self.rng.bit_generator.state),
            "numbers": [self.time, self.length, self.episode],
        }

    def load_state_dict(self, state):
        self.rng.bit_generator.state = json.loads(state["rng"])
        self.time, self.length, self.episode = state["numbers"]


class Spy(SyncVectorEnv):
    """Keeps the actions that arrive inside."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.arrived = []

    def step(self, actions):
        self.arrived.append({name: action.clone() for name, action in actions.items()})
        return super().step(actions)

    def step_async(self, actions):
        self.begun = actions

    def step_wait(self):
        return self.step(self.begun)


def duel(num_envs: int = 6, seed: int = 0, **options) -> Spy:
    return Spy(factory=lambda: Duel(**options), num_envs=num_envs, seed=seed)


class Digits(nn.Module):
    """Cats do a number plus their steps since the start of the episode, modulo 4, and dogs 1 or more than that.

    The number is a parameter, the steps are the recurrent state, and ``luck`` is drawn and not used.
    """

    def __init__(self, number: int = 0):
        super().__init__()
        self.number = nn.Parameter(torch.tensor(float(number)))

    def initial_state(self, num_envs):
        return {"steps": torch.zeros(num_envs)}

    def act(self, observations, state, is_first, *, deterministic=False, generator=None):
        steps = torch.where(is_first, 0.0, state["steps"])
        torch.rand(1, generator=generator)
        digit = (self.number + steps).long() % 4
        actions = {"cats": digit[:, None].expand(-1, 2), "dogs": digit[:, None] + 1}
        return actions, {name: torch.zeros(action.shape) for name, action in actions.items()}, {"steps": steps + 1}

    def env_actions(self, actions):
        return actions


def entry(number: int, digit: int | None = None) -> PoolEntry:
    """Returns an entry of a pool that plays a digit, by default its number."""
    return PoolEntry(number=number, weights={"number": torch.tensor(float(number if digit is None else digit))})
