"""Gymnasium environments as games of one agent, step by step against the package."""

import gymnasium
import numpy as np
import pytest

from marl_lightning.envs import check_env, make_env, make_vector_env


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", "FrozenLake-v1"])
def test_equals_the_package(env_id):
    ours, theirs = make_env(f"gymnasium/{env_id}"), gymnasium.make(env_id)
    if env_id == "FrozenLake-v1":
        theirs = gymnasium.wrappers.FlattenObservation(theirs)
    group = ours.spec.groups["agents"]
    rng = np.random.default_rng(0)
    ends = 0
    for episode in range(4):
        seed = 3 if episode == 0 else None
        expected, _ = theirs.reset(seed=seed)
        found = ours.reset(seed=seed)
        over = False
        while not over:
            np.testing.assert_array_equal(found.observation["agents"][0], expected)
            np.testing.assert_array_equal(found.state, np.ravel(expected).astype(np.float32))
            if group.is_discrete:
                action = rng.integers(group.action_size)
                step = ours.step({"agents": np.array([action])})
            else:
                action = rng.uniform(-2, 2, group.action_size).astype(np.float32)
                step = ours.step({"agents": action[None]})
            expected, reward, terminated, truncated, _ = theirs.step(action)
            assert step.reward["agents"][0] == np.float32(reward)
            assert (step.terminated, step.truncated) == (terminated, truncated and not terminated)
            found, over = step.observations, terminated or truncated
        ends += terminated
    assert ends == {"CartPole-v1": 4, "Pendulum-v1": 0}.get(env_id, ends)


def test_time_limit_is_truncation_and_known():
    env = make_env("gymnasium/Pendulum-v1")
    assert env.spec.episode_limit == 200
    env.reset(seed=0)
    steps = [env.step({"agents": np.zeros((1, 1), np.float32)}) for _ in range(200)]
    assert [step.truncated for step in steps] == [False] * 199 + [True]
    with pytest.raises(RuntimeError, match="reset"):
        env.step({"agents": np.zeros((1, 1), np.float32)})


def test_actions_that_start_elsewhere():
    class Shifted(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(0, 9, (1,), np.float32)
        action_space = gymnasium.spaces.Discrete(3, start=5)

        def reset(self, *, seed=None, options=None):
            return np.zeros(1, np.float32), {}

        def step(self, action):
            return np.full(1, action, np.float32), 0.0, False, False, {}

    gymnasium.register("Shifted-v0", entry_point=Shifted)
    env = make_env("gymnasium/Shifted-v0")
    env.reset(seed=0)
    assert env.step({"agents": np.array([2])}).observations.observation["agents"][0, 0] == 7


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", "FrozenLake-v1"])
def test_keeps_the_contract(env_id):
    check_env(make_env(f"gymnasium/{env_id}"))
    check_env(make_vector_env(f"gymnasium/{env_id}", num_envs=3))


def test_is_rendered_on_demand_only():
    env = make_env("gymnasium/CartPole-v1")
    env.reset(seed=0)
    with pytest.raises(NotImplementedError, match="rgb_array"):
        env.render()


def test_names_of_unknown_games_are_suggested():
    with pytest.raises(ValueError, match="gymnasium/CartPole-v1"):
        make_env("gymnasium/CartPole-v7")
