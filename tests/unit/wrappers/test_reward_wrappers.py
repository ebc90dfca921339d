"""Numbers of the wrappers of rewards, worked out by hand and by brute force."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import CounterGame, counter_actions
from wrapper_helpers import DummyGame, RandomGame, random_actions

from marl_lightning.envs import SyncVectorEnv
from marl_lightning.envs.wrappers import (
    AggregateReward,
    ClipReward,
    NormalizeReward,
    RecordEpisodeStatistics,
    TransformReward,
)

DUMMY_ACTIONS = {"agents": np.zeros(3, np.int64)}


# NormalizeReward ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True])
def test_the_dummy_earns_two_on_average(shared):
    """Of one step, so that G is the reward; the agent that is not alive would spoil the mean."""
    env = NormalizeReward(DummyGame(shared_reward=shared), gamma=0.0)
    env.reset()
    for _ in range(10):
        reward = env.step(DUMMY_ACTIONS).reward["agents"]
    statistics = env.statistics["agents"]
    assert statistics.mean == pytest.approx(2.0, abs=1e-3)
    assert statistics.count == pytest.approx(10 if shared else 20, abs=1e-3)
    assert reward.dtype == np.float32
    if not shared:  # the variance of 1 and 3 is 1
        np.testing.assert_allclose(reward, [1, 0, 3], rtol=1e-4)


def test_discounted_returns_by_hand():
    """Counter games earn 1, 2, 3 a step: with gamma 0.5 the blue agent's G is 1, 2.5, 4.25, and 1 again."""
    env = NormalizeReward(SyncVectorEnv(factory=CounterGame, num_envs=1, seed=0), gamma=0.5)
    env.reset()
    rewards = [env.step(counter_actions(1)).reward["blue"].item() for _ in range(4)]
    returns = np.array([1, 2.5, 4.25, 1])
    assert env.statistics["blue"].mean == pytest.approx(returns.sum() / (4 + 1e-4))
    for n, (earned, reward) in enumerate(zip((1, 2, 3, 1), rewards, strict=True), start=1):
        mean = returns[:n].sum() / (n + 1e-4)
        variance = (1e-4 * (1 + mean**2) + ((returns[:n] - mean) ** 2).sum()) / (n + 1e-4)
        assert reward == pytest.approx(earned / np.sqrt(variance + 1e-8), rel=1e-5)


def test_the_step_of_a_death_still_counts():
    """red_1 dies in step 2, in which it earns -1: alive before, it gives a sample; in step 3 it does not."""
    env = NormalizeReward(CounterGame(), gamma=0.5)
    env.reset(seed=0)
    counts = []
    for _ in range(3):
        step = env.step(counter_actions())
        counts.append(env.statistics["red"].count)
    assert counts == pytest.approx([2, 4, 5], abs=1e-3)
    assert step.reward["red"][1] == 0


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 10**6), num_envs=st.integers(1, 4), steps=st.integers(1, 20), shared=st.booleans())
def test_every_reward_equals_a_brute_force_recomputation(seed, num_envs, steps, shared):
    def make():
        return SyncVectorEnv(factory=lambda: RandomGame(shared_reward=shared), num_envs=num_envs, seed=seed)

    env, raw = NormalizeReward(make(), gamma=0.8), make()
    env.reset()
    observations = raw.reset()
    sizes = {"runners": 3, "birds": 2}
    samples = {name: [] for name in sizes}
    running = {name: np.zeros((num_envs, size)) for name, size in sizes.items()}
    for time in range(steps):
        alive = {name: array.numpy().copy() for name, array in observations.alive.items()}
        step, source = env.step(random_actions(num_envs)), raw.step(random_actions(num_envs))
        ended = (source.terminated | source.truncated).numpy()
        for name in sizes:
            reward = source.reward[name].double().numpy()
            for i in range(num_envs):
                for agent in range(sizes[name]):
                    running[name][i, agent] = 0.8 * running[name][i, agent] + reward[i, agent]
                    if (agent == 0) if shared else alive[name][i, agent]:
                        samples[name].append(running[name][i, agent])
            count = len(samples[name]) + 1e-4
            mean = sum(samples[name]) / count
            squares = sum((sample - mean) ** 2 for sample in samples[name])
            variance = (1e-4 * (1 + mean**2) + squares) / count
            np.testing.assert_allclose(step.reward[name], reward / np.sqrt(variance + 1e-8), rtol=1e-5)
            running[name][ended] = 0
        if time == steps // 2:
            mask = np.arange(num_envs) % 2 == 0
            env.reset(mask=mask)
            observations = raw.reset(mask=mask)
            for name in sizes:
                running[name][mask] = 0


def test_frozen_statistics_still_scale():
    env = NormalizeReward(SyncVectorEnv(factory=CounterGame, num_envs=1, seed=0), gamma=0.5)
    env.reset()
    for _ in range(9):
        env.step(counter_actions(1))
    env.update_running_statistics = False
    count, variance = env.statistics["blue"].count, env.statistics["blue"].variance
    reward = env.step(counter_actions(1)).reward["blue"].item()
    assert env.statistics["blue"].count == count
    assert reward == pytest.approx(1 / np.sqrt(variance + 1e-8))


@pytest.mark.parametrize(
    ("arguments", "message"), [({"gamma": 1.5}, "gamma must be in"), ({"epsilon": -1.0}, "epsilon must be positive")]
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        NormalizeReward(DummyGame(), **arguments)


# Raw rewards ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrap",
    [NormalizeReward, ClipReward, lambda env: TransformReward(env, function=np.zeros_like)],
    ids=["normalise", "clip", "transform"],
)
def test_returns_that_are_reported_are_those_of_the_game(wrap):
    env = wrap(SyncVectorEnv(factory=CounterGame, num_envs=2, seed=0))
    assert env.spec.info_keys == (
        "score",
        "episode_return",
        "episode_length",
        "episode_return/red",
        "episode_return/blue",
    )
    env.reset()
    for _ in range(3):
        info = env.step(counter_actions(2)).info
    # red_0 and blue_0 earn 1 + 2 + 3, red_1 earns 1 - 1.
    assert info["episode_return"].tolist() == [4, 4]
    assert info["episode_return/red"].tolist() == [3, 3]
    assert info["episode_return/blue"].tolist() == [6, 6]
    assert info["score"].tolist() == [30, 30]


def test_returns_are_recorded_once():
    env = NormalizeReward(ClipReward(RecordEpisodeStatistics(CounterGame())))
    assert isinstance(env.env.env, RecordEpisodeStatistics)
    with pytest.raises(ValueError, match="already"):
        RecordEpisodeStatistics(env)


# ClipReward and TransformReward ---------------------------------------------------------------------------------------


def test_clipping_by_hand():
    env = ClipReward(CounterGame(), low=-0.5, high=2)
    env.reset(seed=0)
    rewards = [env.step(counter_actions()).reward["red"].tolist() for _ in range(3)]
    assert rewards == [[1, 1], [2, -0.5], [2, 0]]
    env = ClipReward(CounterGame(), low=2, high=None)
    env.reset(seed=0)
    rewards = [env.step(counter_actions()).reward["red"].tolist() for _ in range(3)]
    assert rewards == [[2, 2], [2, 2], [3, 0]]  # the dead agent gets nothing all the same


@pytest.mark.parametrize("arguments", [{"low": 1.0, "high": 0.0}, {"low": None, "high": None}])
def test_bounds_that_make_no_sense_are_refused(arguments):
    with pytest.raises(ValueError, match="low"):
        ClipReward(DummyGame(), **arguments)


def test_a_function_of_rewards():
    env = TransformReward(
        SyncVectorEnv(factory=CounterGame, num_envs=2, seed=0), function=lambda reward: 10 * reward + 1
    )
    env.reset()
    rewards = [env.step(counter_actions(2)).reward["red"][1].tolist() for _ in range(3)]
    assert rewards == [[11, 11], [21, -9], [31, 0]]
    env = TransformReward(DummyGame(), function=lambda reward: reward.sum(axis=-1))
    env.reset()
    with pytest.raises(ValueError, match=r"must return rewards of shape \(1, 3\), got \(1,\)"):
        env.step(DUMMY_ACTIONS)


def test_a_function_of_shared_rewards_reaches_the_dead():
    env = TransformReward(DummyGame(shared_reward=True), function=lambda reward: reward + 1)
    env.reset()
    assert env.step(DUMMY_ACTIONS).reward["agents"].tolist() == [3, 3, 3]


# AggregateReward ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "red", "blue"),
    [
        # Step 2: red_0 earns 2, red_1 dies and earns -1, blue_0 earns 2.
        ({}, 3, 3),
        ({"how": "mean"}, 1, 1),
        ({"how": "first"}, 2, 2),
        ({"how": "sum", "team": "group"}, 1, 2),
        ({"how": "mean", "team": "group"}, 0.5, 2),
        ({"how": "first", "team": "group"}, 2, 2),
    ],
)
def test_team_rewards_by_hand(arguments, red, blue):
    env = AggregateReward(SyncVectorEnv(factory=CounterGame, num_envs=2, seed=0), **arguments)
    env.reset()
    env.step(counter_actions(2))
    step = env.step(counter_actions(2))
    assert env.spec.shared_reward
    assert step.reward["red"].tolist() == [[red, red]] * 2
    assert step.reward["blue"].tolist() == [[blue]] * 2
    assert step.reward["red"].dtype == torch.float32
    step = env.step(counter_actions(2))
    assert step.reward["red"][0, 0] == step.reward["red"][0, 1]  # the dead one too


def test_none_leaves_rewards_alone():
    env = AggregateReward(CounterGame(), how="none")
    env.reset(seed=0)
    assert not env.spec.shared_reward
    assert [env.step(counter_actions()).reward["red"].tolist() for _ in range(2)] == [[1, 1], [2, -1]]


@pytest.mark.parametrize("arguments", [{"how": "max"}, {"team": "both"}])
def test_other_aggregations_are_refused(arguments):
    name = next(iter(arguments))
    with pytest.raises(ValueError, match=f"{name} must be one of"):
        AggregateReward(CounterGame(), **arguments)


def test_a_team_reward_is_normalised_as_one_number():
    env = NormalizeReward(AggregateReward(SyncVectorEnv(factory=CounterGame, num_envs=2, seed=0)), gamma=0.0)
    env.reset()
    env.step(counter_actions(2))
    assert env.statistics["red"].count == pytest.approx(2, abs=1e-3)
    assert env.statistics["red"].mean == pytest.approx(3, abs=1e-3)
