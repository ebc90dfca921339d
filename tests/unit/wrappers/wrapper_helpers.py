"""Games for wrappers, and comparisons of what environments return. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from marl_lightning.envs import EnvSpec, GroupSpec, MultiAgentEnv, Observations, Step


class DummyGame(MultiAgentEnv):
    """Three agents of which ``a1`` is never alive; what it shows and gets would spoil any statistic.

    The observations of the others are ``(1, 2)`` and ``(3, 4)``, their rewards 1 and 3. Nothing ever changes, and
    episodes do not end.
    """

    def __init__(self, *, shared_reward: bool = False) -> None:
        box = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        group = GroupSpec(agents=("a0", "a1", "a2"), observation_space=box, action_space=spaces.Discrete(2))
        self.spec = EnvSpec(name="dummy", groups={"agents": group}, state_size=2, shared_reward=shared_reward)

    def reset(self, *, seed: int | None = None) -> Observations[np.ndarray]:
        alive = np.array([True, False, True])
        return Observations(
            observation={"agents": np.array([[1, 2], [1000, 1000], [3, 4]], np.float32)},
            action_mask={"agents": np.array([[True, True], [True, False], [True, True]])},
            alive={"agents": alive},
            state=np.array([5, 7], np.float32),
        )

    def step(self, actions: Mapping[str, np.ndarray]) -> Step[np.ndarray]:
        reward = [2, 2, 2] if self.spec.shared_reward else [1, 1000, 3]
        return Step(
            observations=self.reset(),
            reward={"agents": np.array(reward, np.float32)},
            terminated=False,
            truncated=False,
            info={},
        )


class RandomGame(MultiAgentEnv):
    """Everything is drawn from the seed: lengths and kinds of ends, who is alive, what is seen and earned.

    Two groups of flat observations: ``runners`` with three agents, float32 and discrete actions, and ``birds`` with
    two agents, float64 and continuous actions.
    """

    def __init__(self, *, shared_reward: bool = False, can_checkpoint: bool = True, longest: int = 6) -> None:
        self.spec = EnvSpec(
            name="random",
            groups={
                "runners": GroupSpec(
                    agents=("r0", "r1", "r2"),
                    observation_space=spaces.Box(-np.inf, np.inf, (4,), np.float32),
                    action_space=spaces.Discrete(2),
                ),
                "birds": GroupSpec(
                    agents=("b0", "b1"),
                    observation_space=spaces.Box(-np.inf, np.inf, (2,), np.float64),
                    action_space=spaces.Box(-1.0, 1.0, (1,), np.float32),
                ),
            },
            state_size=3,
            info_keys=("luck",),
            shared_reward=shared_reward,
            can_checkpoint=can_checkpoint,
        )
        self.longest = longest
        self.rng = np.random.default_rng()
        self.time, self.length, self.alive = 0, 0, {}

    def reset(self, *, seed: int | None = None) -> Observations[np.ndarray]:
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.time, self.length = 0, int(self.rng.integers(1, self.longest + 1))
        return self.observe()

    def step(self, actions: Mapping[str, np.ndarray]) -> Step[np.ndarray]:
        if self.time == self.length:
            raise RuntimeError("over")
        if (actions["runners"][self.alive["runners"]] > 1).any():
            raise ValueError("illegal action")
        before = self.alive
        self.time += 1
        over, kind = self.time == self.length, self.rng.random()
        if self.spec.shared_reward:
            reward = {name: np.full(len(alive), self.rng.normal(2, 3)) for name, alive in before.items()}
        else:
            reward = {name: np.where(alive, self.rng.normal(2, 3, len(alive)), 0) for name, alive in before.items()}
        return Step(
            observations=self.observe(),
            reward={name: values.astype(np.float32) for name, values in reward.items()},
            terminated=bool(over and kind < 0.6),
            truncated=bool(over and kind >= 0.5),
            info={"luck": float(np.float32(self.rng.random()))},
        )

    def observe(self) -> Observations[np.ndarray]:
        self.alive = {"runners": self.rng.random(3) < 0.7, "birds": self.rng.random(2) < 0.7}
        mask = np.ones((3, 2), np.bool_)
        mask[~self.alive["runners"], 1] = False
        runners = self.rng.normal([100.0, 0.0, -3.0, 1e-3], [1.0, 5.0, 0.1, 1e-3], (3, 4)).astype(np.float32)
        birds = self.rng.normal(7.0, 2.0, (2, 2))
        return Observations(
            observation={
                "runners": np.where(self.alive["runners"][:, None], runners, np.float32(0)),
                "birds": np.where(self.alive["birds"][:, None], birds, 0.0),
            },
            action_mask={"runners": mask},
            alive=self.alive,
            state=self.rng.normal([0.0, 10.0, self.time], 1.0).astype(np.float32),
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "numbers": [self.time, self.length],
            "alive": {name: alive.tolist() for name, alive in self.alive.items()},
            "rng": json.dumps(self.rng.bit_generator.state),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.time, self.length = state["numbers"]
        self.alive = {name: np.array(alive) for name, alive in state["alive"].items()}
        self.rng.bit_generator.state = json.loads(state["rng"])


def random_actions(num_envs: int | None = None) -> dict[str, Any]:
    """Legal actions for :class:`RandomGame`: tensors for ``num_envs`` instances, arrays for one without a number."""
    runners, birds = np.zeros(3, np.int64), np.zeros((2, 1), np.float32)
    if num_envs is None:
        return {"runners": runners, "birds": birds}
    import torch

    return {
        "runners": torch.from_numpy(np.stack([runners] * num_envs)),
        "birds": torch.from_numpy(np.stack([birds] * num_envs)),
    }


def parts(observations: Observations) -> Iterator[tuple[str, np.ndarray]]:
    """Yields name and copy of every array."""
    for kind in ("observation", "action_mask", "alive"):
        for name, array in getattr(observations, kind).items():
            yield f"{kind}.{name}", np.array(np.asarray(array))
    yield "state", np.array(np.asarray(observations.state))


def outcome(step: Any, index: int | None = None) -> dict[str, np.ndarray]:
    """Returns copies of all of a step but ``final``; of one instance of a vector environment, or of one instance."""
    values = dict(parts(step.observations))
    values |= {f"reward.{name}": np.array(np.asarray(array)) for name, array in step.reward.items()}
    values |= {f"info.{name}": np.array(np.asarray(value), np.float32) for name, value in step.info.items()}
    values |= {"terminated": np.asarray(step.terminated).copy(), "truncated": np.asarray(step.truncated).copy()}
    return values if index is None else {name: value[index] for name, value in values.items()}


def assert_same(one: Mapping[str, np.ndarray], two: Mapping[str, np.ndarray]) -> None:
    """Bit for bit."""
    assert one.keys() == two.keys()
    for name in one:
        assert one[name].dtype == two[name].dtype, name
        np.testing.assert_array_equal(one[name], two[name], err_msg=name)


def play_normalised(rank: int, after_rollout: Callable[[Any], None]) -> Any:
    """Plays three rollouts, other ones in each process, and returns the environment."""
    from marl_lightning.envs import SyncVectorEnv
    from marl_lightning.envs.wrappers import NormalizeObservation, NormalizeReward

    env = NormalizeReward(NormalizeObservation(SyncVectorEnv(factory=RandomGame, num_envs=3, seed=10 * rank)))
    env.reset()
    for _ in range(3):
        for _ in range(7):
            env.step(random_actions(3))
        after_rollout(env)
    return env
