"""What an interface returns, on games whose numbers are known."""

from dataclasses import replace

import numpy as np
import pytest
from gymnasium import spaces
from interface_helpers import CONTINUOUS, MULTI, TeamsGame

from marl_lightning.envs import SyncVectorEnv
from marl_lightning.envs.interfaces import Interface, make_interface

READS = ("get_state", "get_avail_actions", "get_agent_mask", "sample")


def make(reward_aggr="none", **kwargs):
    return Interface(TeamsGame(**kwargs), reward_aggr=reward_aggr)


def twin(seed, **kwargs):
    """A game and what it shows after a reset."""
    game = TeamsGame(**kwargs)
    return game, game.reset(seed=seed)


def stacked(observations):
    """All agents' observations, alive flags and legal actions, by hand."""
    rows = np.zeros((5, 6), np.float32)
    rows[:2] = observations.observation["scouts"].reshape(2, 6)
    rows[2:, :4] = observations.observation["tanks"]
    alive = np.concatenate([observations.alive["scouts"], observations.alive["tanks"]])
    legal = np.zeros((5, 4), np.bool_)
    legal[:2, :2], legal[2:] = observations.action_mask["scouts"], observations.action_mask["tanks"]
    return rows, alive, legal


def assert_shows(env, obs, observations):
    rows, alive, legal = stacked(observations)
    for one, two in (
        (obs, rows),
        (env.get_agent_mask(), alive),
        (env.get_avail_actions(), legal),
        (env.get_state(), observations.state),
    ):
        assert one.dtype == two.dtype
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("seed", range(5))
def test_groups_are_stacked_flattened_and_padded(seed):
    env = make()
    game, observations = twin(seed)
    obs, info = env.reset(seed=seed)
    assert info == {}
    assert_shows(env, obs, observations)
    terminated = truncated = False
    while not terminated | truncated:
        actions = env.sample()
        obs, reward, terminated, truncated, info = env.step(actions)
        step = game.step({"scouts": actions[:2], "tanks": actions[2:]})
        assert_shows(env, obs, step.observations)
        assert reward.dtype == np.float32
        assert reward.tolist() == [*step.reward["scouts"], *step.reward["tanks"]]
        assert (terminated, truncated, info) == (step.terminated, step.truncated, step.info)
        assert type(terminated) is type(truncated) is bool
    with pytest.raises(RuntimeError):
        env.step(actions)
    obs, _ = env.reset()
    assert_shows(env, obs, game.reset())


def test_sizes_and_names_are_known_before_a_reset():
    env = make()
    assert (env.n_agents, env.get_obs_size(), env.get_state_size(), env.get_action_size()) == (5, 6, 3, 4)
    assert env.agents == ("scouts_0", "scouts_1", "tanks_0", "tanks_1", "tanks_2")
    assert isinstance(env.unwrapped, TeamsGame)


def test_the_dead_see_nothing_have_one_action_and_earn_nothing():
    deaths = 0
    for shared_reward in (False, True):
        env = make(shared_reward=shared_reward)
        for seed in range(10):
            obs, _ = env.reset(seed=seed)
            dead = ~env.get_agent_mask()
            deaths += dead.sum()
            assert not obs[dead].any()
            assert (env.get_avail_actions().sum(axis=1)[dead] == 1).all()
            _, reward, *_ = env.step(env.sample())
            assert not reward[dead].any()
            assert reward[~dead].all() or not shared_reward
    assert deaths > 10


def test_observations_keep_a_dtype_that_all_groups_have():
    game = TeamsGame()
    game.spec = replace(game.spec, groups={"scouts": game.spec.groups["scouts"]})
    obs, _ = Interface(game).reset(seed=0)
    assert (obs.shape, obs.dtype) == ((2, 6), np.uint8)


# Rewards -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["sum", "mean", "first"])
@pytest.mark.parametrize("seed", range(3))
def test_one_reward_is_a_float(how, seed):
    env, individual = make(how), make("none")
    env.reset(seed=seed)
    individual.reset(seed=seed)
    actions = env.sample()
    _, reward, *_ = env.step(actions)
    _, rewards, *_ = individual.step(actions)
    assert type(reward) is float
    assert np.shape(reward) == ()
    assert rewards.shape == (5,)
    expected = {"sum": rewards.sum(), "mean": rewards.mean(), "first": rewards[0]}
    assert reward == pytest.approx(float(expected[how]))


def test_of_a_shared_reward_the_first_is_the_reward():
    env = make("first", shared_reward=True)
    env.reset(seed=0)
    assert env.step(env.sample())[1] == 7.0


def test_other_aggregations_are_refused():
    with pytest.raises(ValueError, match=r"reward_aggr must be one of .*'sum'.* got 'median'"):
        make("median")


# Actions -------------------------------------------------------------------------------------------------------------


def test_samples_are_legal_come_from_the_seed_and_leave_nothing_out():
    env, other = make(), make()
    seen = np.zeros((5, 4), np.bool_)
    for seed in range(40):
        env.reset(seed=seed)
        other.reset(seed=seed)
        legal = env.get_avail_actions()
        for _ in range(3):
            actions = env.sample()
            assert actions.dtype == np.int64
            assert actions.tolist() == other.sample().tolist()
            assert legal[np.arange(5), actions].all()
            seen[np.arange(5), actions] = True
    assert seen[:2, :2].all()
    assert seen[2:].all()


def test_illegal_and_misshapen_actions_are_refused():
    env = make_interface("lbf/Foraging-5x5-2p-1f-v3")
    env.reset(seed=0)
    agent, action = np.argwhere(~env.get_avail_actions())[0]
    actions = np.zeros(2, np.int64)
    actions[agent] = action
    with pytest.raises(ValueError, match="illegal action"):
        env.step(actions)
    for wrong in (np.zeros(3, np.int64), np.zeros((2, 1), np.int64), 0):
        with pytest.raises(ValueError, match=r"actions must have shape \(2,\)"):
            env.step(wrong)
    with pytest.raises(ValueError, match="integers"):
        env.step(np.zeros(2))
    env.step([0, 0])


def test_continuous_actions_are_cut_to_the_width_of_an_agent():
    env = make(actions=CONTINUOUS)
    env.reset(seed=0)
    dimensions = np.array([[True, False, False]] * 2 + [[True] * 3] * 3)
    assert env.get_action_size() == 3
    np.testing.assert_array_equal(env.get_avail_actions(), dimensions)
    env.step(np.arange(15.0).reshape(5, 3))
    assert env.unwrapped.received["scouts"].tolist() == [[0.0], [3.0]]
    assert env.unwrapped.received["tanks"].tolist() == [[6.0, 7.0, 8.0], [9.0, 10.0, 11.0], [12.0, 13.0, 14.0]]
    assert env.unwrapped.received["tanks"].dtype == np.float32


def test_continuous_samples_fill_the_bounds_and_pad_with_zeros():
    env = make(actions=CONTINUOUS)
    env.reset(seed=0)
    samples = np.stack([env.sample() for _ in range(300)])
    assert samples.dtype == np.float32
    assert not samples[:, :2, 1:].any()
    for rows, group in ((slice(0, 2), "scouts"), (slice(2, 5), "tanks")):
        space = CONTINUOUS[group]
        own = samples[:, rows, : space.shape[0]]
        low, high = own.min(axis=(0, 1)), own.max(axis=(0, 1))
        assert (low >= space.low).all()
        assert (high <= space.high).all()
        np.testing.assert_allclose(low, space.low, atol=0.05)
        np.testing.assert_allclose(high, space.high, atol=0.05)


def test_actions_of_several_parts():
    env = make(actions=MULTI)
    assert env.get_action_size() == 5
    for seed in range(10):
        env.reset(seed=seed)
        legal, actions = env.get_avail_actions(), env.sample()
        assert actions.shape == (5, 2)
        assert not legal[:2, 3:].any()
        assert not actions[:2, 1].any()
        for agent in range(2):
            assert legal[agent, actions[agent, 0]]
        for agent in range(2, 5):
            assert legal[agent, actions[agent, 0]]
            assert legal[agent, 2 + actions[agent, 1]]
        env.step(actions)
        assert env.unwrapped.received["scouts"].tolist() == actions[:2, 0].tolist()
        assert env.unwrapped.received["tanks"].tolist() == actions[2:].tolist()


# Order of calls ------------------------------------------------------------------------------------------------------


def test_before_a_reset_and_after_closing_there_is_nothing_to_see():
    env = make()
    for _ in range(2):
        for name in READS:
            with pytest.raises(RuntimeError, match="call reset first"):
                getattr(env, name)()
        with pytest.raises(RuntimeError, match="call reset first"):
            env.step(np.zeros(5, np.int64))
        env.reset(seed=0)
        env.close()
    env.close()
    assert env.unwrapped.closed == 3


def test_returned_arrays_are_copies():
    env, other = make(), make()
    obs, _ = env.reset(seed=1)
    other.reset(seed=1)
    obs[:] = 99
    for name in READS[:3]:
        getattr(env, name)()[:] = True
        np.testing.assert_array_equal(getattr(env, name)(), getattr(other, name)())
    actions = env.sample()
    assert actions.tolist() == other.sample().tolist()
    np.testing.assert_array_equal(env.step(actions)[0], other.step(actions)[0])


def test_without_a_seed_the_first_episode_is_drawn_at_random_and_a_seed_determines_all_that_follow():
    starts = set()
    for backend in ("package", "embedded"):
        for _ in range(3):
            env = make_interface("lbf/Foraging-19x19-9p-4f-v3", backend=backend)
            starts.add(env.reset()[0].tobytes())
            starts.add(env.reset()[0].tobytes())
    assert len(starts) == 12
    env, other = make(), make()
    for _ in range(2):
        np.testing.assert_array_equal(env.reset(seed=4)[0], other.reset(seed=4)[0])
        np.testing.assert_array_equal(env.reset()[0], other.reset()[0])
        env.sample()


def test_pictures():
    env = make()
    env.reset(seed=0)
    assert env.render().shape == (2, 2, 3)


# What cannot have an interface ---------------------------------------------------------------------------------------


def test_discrete_and_continuous_actions_do_not_mix():
    with pytest.raises(ValueError, match=r"discrete and with continuous actions.*\['scouts', 'tanks'\]"):
        make(actions={"scouts": spaces.Discrete(2), "tanks": CONTINUOUS["tanks"]})


def test_only_instances_have_interfaces():
    with pytest.raises(TypeError, match="needs a MultiAgentEnv, got SyncVectorEnv"):
        Interface(SyncVectorEnv(factory=TeamsGame, num_envs=1, seed=0))
