"""Time limits and episode statistics by hand."""

import numpy as np
import pytest
from scripted import CounterGame, counter_actions
from wrapper_helpers import DummyGame, RandomGame, random_actions

from marl_lightning.data.episodes import EpisodeStatistics
from marl_lightning.envs import SyncVectorEnv
from marl_lightning.envs.wrappers import (
    AddAgentID,
    RecordEpisodeStatistics,
    StackObservations,
    TimeLimit,
    recorded_returns,
)


def counter(length, limit):
    return TimeLimit(
        SyncVectorEnv(factory=lambda: CounterGame(length=length), num_envs=2, seed=0), max_episode_steps=limit
    )


def flags(step):
    return step.terminated.tolist(), step.truncated.tolist()


def test_an_episode_is_cut_after_its_last_step():
    env = counter(5, 2)
    assert env.spec.episode_limit == 2
    env.reset()
    assert flags(env.step(counter_actions(2))) == ([False] * 2, [False] * 2)
    step = env.step(counter_actions(2))
    assert flags(step) == ([False] * 2, [True] * 2)
    assert step.reward["blue"].flatten().tolist() == [2, 2]
    assert step.info["score"].tolist() == [20, 20]
    # The state is (episode, time, noise): the successor is of the old episode, the observations of the new one.
    assert step.final.state[:, :2].tolist() == [[0, 2]] * 2
    assert step.final.observation["blue"][:, 0, :2].tolist() == [[0, 2]] * 2
    assert step.final.alive["red"].tolist() == [[True, False]] * 2
    assert step.final.action_mask["red"][0].tolist() == [[True] * 3, [True, False, False]]
    assert step.observations.state[:, :2].tolist() == [[1, 0]] * 2
    assert flags(env.step(counter_actions(2))) == ([False] * 2, [False] * 2)


def test_a_partial_reset_restarts_the_clock():
    env = counter(9, 3)
    env.reset()
    env.step(counter_actions(2))
    env.step(counter_actions(2))
    env.reset(mask=np.array([True, False]))
    step = env.step(counter_actions(2))
    assert flags(step) == ([False] * 2, [False, True])
    assert step.observations.state[:, :2].tolist() == [[1, 1], [1, 0]]
    assert step.final.state[1, :2].tolist() == [0, 3]


def test_termination_is_not_overridden():
    env = counter(2, 2)  # the first episode is terminated by the game, the second is truncated
    env.reset()
    ends = [flags(env.step(counter_actions(2))) for _ in range(4)]
    assert ends[1] == ([True] * 2, [False] * 2)
    assert ends[3] == ([False] * 2, [True] * 2)


def test_a_shorter_limit_of_the_game_stays():
    env = counter(3, 10)
    assert env.spec.episode_limit == 3
    env.reset()
    for _ in range(6):
        step = env.step(counter_actions(2))
    assert flags(step) == ([False] * 2, [True] * 2)
    assert step.final.state[:, :2].tolist() == [[1, 3]] * 2
    assert TimeLimit(RandomGame(), max_episode_steps=7).spec.episode_limit == 7


def test_one_instance_has_to_be_reset_after_its_limit():
    env = TimeLimit(CounterGame(length=5), max_episode_steps=2)
    env.reset(seed=0)
    env.step(counter_actions())
    step = env.step(counter_actions())
    assert (step.terminated, step.truncated) == (False, True)
    assert step.observations.state[:2].tolist() == [0, 2]
    with pytest.raises(RuntimeError, match="the episode is over: call reset before step"):
        env.step(counter_actions())
    env.reset()
    assert not env.step(counter_actions()).truncated


def test_limits_that_cannot_be_kept_are_refused():
    with pytest.raises(ValueError, match="max_episode_steps must be at least 1, got 0"):
        TimeLimit(CounterGame(), max_episode_steps=0)
    env = SyncVectorEnv(factory=CounterGame, num_envs=1, seed=0, autoreset=False)
    with pytest.raises(ValueError, match="wrap its instances instead"):
        TimeLimit(AddAgentID(env), max_episode_steps=2)
    limited = SyncVectorEnv(
        factory=lambda: TimeLimit(CounterGame(), max_episode_steps=2), num_envs=2, seed=0, autoreset=False
    )
    limited.reset()
    for _ in range(2):
        step = limited.step(counter_actions(2))
    assert step.truncated.all()


def test_outside_of_other_wrappers_it_starts_their_episodes_too():
    env = TimeLimit(StackObservations(SyncVectorEnv(factory=lambda: CounterGame(length=9), num_envs=1, seed=0),
                                      stack_size=2), max_episode_steps=2)  # fmt: skip
    env.reset()
    env.step(counter_actions(1))
    step = env.step(counter_actions(1))
    assert step.final.observation["blue"].view(2, 4)[:, :2].tolist() == [[0, 1], [0, 2]]
    assert step.observations.observation["blue"].view(2, 4)[:, :2].tolist() == [[1, 0], [1, 0]]


@pytest.mark.parametrize("outside", [True, False], ids=["limit outside", "limit inside"])
def test_statistics_are_of_the_whole_episode_wherever_the_limit_is(outside):
    game = SyncVectorEnv(factory=lambda: CounterGame(length=9), num_envs=2, seed=0)
    if outside:
        env = TimeLimit(RecordEpisodeStatistics(game), max_episode_steps=2)
    else:
        env = RecordEpisodeStatistics(TimeLimit(game, max_episode_steps=2))
    env.reset()
    for _ in range(2):  # episodes
        info = env.step(counter_actions(2)).info
        assert info["episode_length"].tolist() == [1, 1]
        assert info["episode_return"].tolist() == [1, 1]
        step = env.step(counter_actions(2))
        assert step.truncated.all()
        assert step.info["episode_length"].tolist() == [2, 2]
        assert step.info["episode_return"].tolist() == [2, 2]  # 1 + 2, 1 - 1 and 1 + 2


def test_statistics_equal_those_of_the_collector():
    env = RecordEpisodeStatistics(SyncVectorEnv(factory=RandomGame, num_envs=3, seed=0))
    env.reset()
    steps = []
    for _ in range(30):
        step = env.step(random_actions(3))
        steps.append(
            (
                {name: reward.numpy().copy() for name, reward in step.reward.items()},
                (step.terminated | step.truncated).numpy().copy(),
                {key: value.numpy().copy() for key, value in step.info.items()},
            )
        )
    reward = {name: np.stack([rewards[name] for rewards, _, _ in steps]) for name in ("runners", "birds")}
    info = {key: np.stack([infos[key] for _, _, infos in steps]) for key in env.spec.info_keys}
    done = np.stack([ended for _, ended, _ in steps])
    episodes = EpisodeStatistics(spec=RandomGame().spec, num_envs=3).update(reward, done, {})
    time, index = np.nonzero(done)
    assert len(time) > 10
    for key, name in (
        ("episode_return", "return"),
        ("episode_return/runners", "return/runners"),
        ("episode_return/birds", "return/birds"),
        ("episode_length", "length"),
    ):
        np.testing.assert_allclose(info[key][time, index], episodes[name], rtol=1e-5, atol=1e-5)


def test_recorded_returns_are_found_by_group():
    env = RecordEpisodeStatistics(CounterGame())
    env.reset(seed=0)
    for _ in range(3):
        info = env.step(counter_actions()).info
    assert recorded_returns(env.spec, info) == {"red": 3, "blue": 6}
    assert recorded_returns(env.unwrapped.spec, info) is None
    env = RecordEpisodeStatistics(DummyGame(shared_reward=True))
    env.reset()
    info = env.step({"agents": np.zeros(3, np.int64)}).info
    assert info == {"episode_return": 2, "episode_length": 1}
    assert recorded_returns(env.spec, info) == {"agents": 2}
