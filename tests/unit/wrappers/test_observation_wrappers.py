"""Numbers of the wrappers of observations, worked out by hand and by brute force."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import CounterGame, counter_actions
from wrapper_helpers import DummyGame, RandomGame, parts, random_actions

from marl_lightning.envs import GroupSpec, SyncVectorEnv, make_env
from marl_lightning.envs.wrappers import (
    AddAgentID,
    ClipReward,
    NormalizeObservation,
    SelectFeatures,
    StackObservations,
    TransformObservation,
    freeze_statistics,
    load_statistics,
    running_statistics,
    statistics_state_dict,
    wrap,
)
from marl_lightning.evaluation import evaluate

DUMMY_ACTIONS = {"agents": np.zeros(3, np.int64)}


def images():
    """A game with one agent that sees images of two channels."""
    game = CounterGame()
    group = GroupSpec(
        agents=("a",), observation_space=spaces.Box(0, 9, (3, 4, 2), np.uint8), action_space=spaces.Discrete(2)
    )
    game.spec = type(game.spec)(name="images", groups={"eyes": group}, state_size=3)
    return game


# NormalizeObservation -------------------------------------------------------------------------------------------------


def test_only_living_agents_count():
    env = NormalizeObservation(DummyGame())
    observations = env.reset()
    for _ in range(20):
        observations = env.step(DUMMY_ACTIONS).observations
    statistics = env.statistics["agents"]
    np.testing.assert_allclose(statistics.mean, [2, 3], atol=1e-3)
    np.testing.assert_allclose(statistics.variance, [1, 1], atol=1e-3)
    assert statistics.count == pytest.approx(2 * 21, abs=1e-3)
    observation = observations.observation["agents"]
    assert observation.dtype == np.float32
    np.testing.assert_allclose(observation[[0, 2]], [[-1, -1], [1, 1]], atol=1e-3)
    assert (observation[1] == 0).all()
    assert env.statistics["state"].count == pytest.approx(21, abs=1e-3)
    np.testing.assert_allclose(env.statistics["state"].mean, [5, 7], atol=1e-3)


def test_the_state_is_left_alone_if_asked():
    env = NormalizeObservation(DummyGame(), normalize_state=False)
    assert env.reset().state.tolist() == [5, 7]
    assert env.statistics.keys() == {"agents"}


def test_images_become_floats_of_the_same_shape():
    spec = NormalizeObservation(images()).spec
    assert spec.groups["eyes"].observation_space == spaces.Box(-np.inf, np.inf, (3, 4, 2), np.float32)


def test_epsilon_has_to_be_positive():
    with pytest.raises(ValueError, match="epsilon must be positive, got 0"):
        NormalizeObservation(DummyGame(), epsilon=0.0)


class Moments:
    """All samples so far; the initial count is a sample of weight 1e-4 with mean 0 and variance 1."""

    def __init__(self):
        self.samples = []

    def normalise(self, x):
        samples = np.array(self.samples)
        count = len(samples) + 1e-4
        mean = samples.sum(0) / count if len(samples) else np.zeros(x.shape[-1])
        variance = (1e-4 * (1 + mean**2) + ((samples - mean) ** 2).sum(0)) / count if len(samples) else 1.0
        return (x - mean) / np.sqrt(variance + 1e-8)


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 10**6), num_envs=st.integers(1, 4), steps=st.integers(1, 15), partial=st.booleans())
def test_every_number_equals_a_brute_force_recomputation(seed, num_envs, steps, partial):
    env = NormalizeObservation(SyncVectorEnv(factory=RandomGame, num_envs=num_envs, seed=seed))
    raw = SyncVectorEnv(factory=RandomGame, num_envs=num_envs, seed=seed)
    moments = {"runners": Moments(), "birds": Moments(), "state": Moments()}

    def learn(observations, rows):
        for i in rows:
            moments["state"].samples.append(observations.state[i].double().numpy())
            for name, alive in observations.alive.items():
                moments[name].samples += list(observations.observation[name][i][alive[i]].double().numpy())

    def check(result, observations, rows):
        for i in rows:
            expected = moments["state"].normalise(observations.state[i].double().numpy())
            np.testing.assert_allclose(result.state[i], expected, rtol=2e-5, atol=2e-5)
            for name, alive in observations.alive.items():
                expected = moments[name].normalise(observations.observation[name][i].double().numpy())
                expected[~alive[i].numpy()] = 0
                assert result.observation[name].dtype == torch.float32
                np.testing.assert_allclose(result.observation[name][i], expected, rtol=2e-5, atol=2e-5)
                assert (result.observation[name][i][~alive[i]] == 0).all()

    rows = range(num_envs)
    result, observations = env.reset(), raw.reset()
    learn(observations, rows)
    check(result, observations, rows)
    for _ in range(steps):
        step, source = env.step(random_actions(num_envs)), raw.step(random_actions(num_envs))
        ended = (source.terminated | source.truncated).nonzero().flatten().tolist()
        check(step.final, source.final, ended)  # by the statistics before this step
        learn(source.observations, rows)
        check(step.observations, source.observations, rows)
    if partial:
        mask = np.arange(num_envs) % 2 == 1
        before = dict(parts(env.env.reset(mask=np.zeros(num_envs, np.bool_))))
        untouched = {name: array[~mask] for name, array in parts(step.observations)}
        result, observations = env.reset(mask=mask), raw.reset(mask=mask)
        assert before.keys() == untouched.keys()
        learn(observations, np.flatnonzero(mask))
        check(result, observations, np.flatnonzero(mask))
        for name, array in parts(result):
            np.testing.assert_array_equal(array[~mask], untouched[name])


def test_successors_of_the_last_step_do_not_count():
    env = NormalizeObservation(SyncVectorEnv(factory=CounterGame, num_envs=2, seed=0))
    env.reset()
    for _ in range(3):
        env.step(counter_actions(2))
    # Two starts of two episodes, and two steps between them; states hold (episode, time, noise).
    assert env.statistics["state"].count == pytest.approx(2 * 4, abs=1e-3)
    assert env.statistics["state"].mean[1] == pytest.approx((0 + 1 + 2 + 0) / 4, abs=1e-3)


def test_a_frozen_wrapper_learns_nothing():
    env = NormalizeObservation(SyncVectorEnv(factory=RandomGame, num_envs=2, seed=0), update_running_statistics=False)
    raw = SyncVectorEnv(factory=RandomGame, num_envs=2, seed=0)
    result, observations = env.reset(), raw.reset()
    np.testing.assert_allclose(result.state, observations.state, rtol=1e-6)  # mean 0, variance 1
    env.step(random_actions(2))
    assert all(statistics.count == 1e-4 for statistics in running_statistics(env).values())
    env.update_running_statistics = True
    env.step(random_actions(2))
    assert env.statistics["state"].count == pytest.approx(2, abs=1e-3)
    freeze_statistics(ClipReward(env))
    assert not env.update_running_statistics


# Evaluation -----------------------------------------------------------------------------------------------------------


def training_env(num_envs=3):
    stack = ["NormalizeObservation", "AddAgentID", "NormalizeReward"]
    return wrap(SyncVectorEnv(factory=RandomGame, num_envs=num_envs, seed=0), stack)


def saved(env):
    return {name: array.clone() for name, array in statistics_state_dict(env).items()}


def assert_equal_states(one, two):
    assert one.keys() == two.keys() != set()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_replica_uses_the_statistics_of_the_moment_and_leaves_them_alone():
    env = training_env()
    evaluation = env.replicate(num_envs=2, seed=7)
    env.reset()
    for _ in range(10):
        env.step(random_actions(3))
    before = saved(env)
    first = dict(parts(evaluation.reset(seed=7)))
    for _ in range(10):
        evaluation.step(random_actions(2))
    assert_equal_states(saved(env), before)
    raw = SyncVectorEnv(factory=RandomGame, num_envs=2, seed=7).reset()
    statistics = env.get_wrapper_attr("env").env.env.statistics["state"]
    expected = (raw.state.numpy() - statistics.mean) / np.sqrt(statistics.variance + 1e-8)
    np.testing.assert_allclose(first["state"], expected, rtol=1e-5, atol=1e-5)
    # A replica of a replica, and what happens later in training.
    env.step(random_actions(3))
    second = dict(parts(evaluation.replicate(num_envs=2, seed=7).reset()))
    assert not np.array_equal(first["state"], second["state"])


class StandStill:
    """A policy that needs no network."""

    def initial_state(self, num_envs):
        return {}

    def act(self, observations, state, is_first, *, deterministic=False, generator=None):
        actions = random_actions(len(is_first))
        return actions, {}, state

    def env_actions(self, actions):
        return actions


def test_evaluating_leaves_training_as_it_was():
    def train(evaluations):
        env = training_env()
        env.reset()
        for _ in range(3):
            for _ in range(5):
                step = env.step(random_actions(3))
            for _ in range(evaluations):
                with env.replicate(num_envs=2, seed=1) as evaluation:
                    evaluate(StandStill(), evaluation, episodes=3)
        return saved(env), dict(parts(step.observations))

    (one, seen), (two, seen_too) = train(0), train(1)
    assert_equal_states(one, two)
    assert all(np.array_equal(seen[name], seen_too[name]) for name in seen)


def test_loading_into_a_replica_leaves_its_origin_alone():
    env, other = training_env(), training_env(num_envs=2)
    for one, num_envs in ((env, 3), (other, 2)):
        one.reset()
        one.step(random_actions(num_envs))
    before = saved(env)
    replica = env.replicate(num_envs=2, seed=0)
    replica.load_state_dict(other.state_dict())
    assert_equal_states(saved(replica), saved(other))
    replica = env.replicate(num_envs=2, seed=0)
    load_statistics(replica, saved(other))
    assert_equal_states(saved(replica), saved(other))
    assert_equal_states(saved(env), before)


def test_statistics_are_saved_on_their_own_whatever_the_game():
    def make():
        game = SyncVectorEnv(factory=lambda: RandomGame(can_checkpoint=False), num_envs=2, seed=0)
        return wrap(game, ["NormalizeObservation", "NormalizeReward"])

    env, other = make(), make()
    env.reset()
    env.step(random_actions(2))
    load_statistics(other, statistics_state_dict(env))
    assert_equal_states(saved(env), saved(other))
    with pytest.raises(ValueError, match="use the wrappers that they were saved with"):
        load_statistics(make().env, statistics_state_dict(env))
    assert statistics_state_dict(SyncVectorEnv(factory=RandomGame, num_envs=1, seed=0)) == {}


def test_statistics_are_restored_where_a_replica_looks():
    """A run that is resumed loads its statistics into the environment that evaluation was replicated from."""
    env, source = training_env(), training_env()
    evaluation = env.replicate(num_envs=1, seed=0)
    source.reset()
    load_statistics(env, statistics_state_dict(source))
    assert_equal_states(saved(evaluation), saved(source))


# AddAgentID -----------------------------------------------------------------------------------------------------------


def test_ids_are_one_hot_over_the_agents_of_all_groups():
    env = AddAgentID(CounterGame())
    observations = env.reset(seed=0)
    np.testing.assert_array_equal(observations.observation["red"][:, 4:], [[1, 0, 0], [0, 1, 0]])
    np.testing.assert_array_equal(observations.observation["blue"][:, 4:], [[0, 0, 1]])
    np.testing.assert_array_equal(observations.observation["red"][:, 3], [0, 1])
    assert observations.state.shape == (3,)
    space = env.spec.groups["red"].observation_space
    assert space.shape == (7,)
    assert space.low[4:].tolist() == [0, 0, 0]
    assert space.high[4:].tolist() == [1, 1, 1]


def test_ids_come_with_final_observations_and_not_with_dead_agents():
    env = AddAgentID(SyncVectorEnv(factory=CounterGame, num_envs=1, seed=0))
    env.reset()
    for _ in range(3):
        step = env.step(counter_actions(1))
    final = step.final.observation
    np.testing.assert_array_equal(final["red"][0, :, 1:2], [[3], [0]])
    np.testing.assert_array_equal(final["red"][0, :, 4:], [[1, 0, 0], [0, 0, 0]])
    np.testing.assert_array_equal(step.observations.observation["red"][0, :, 4:], [[1, 0, 0], [0, 1, 0]])


def test_ids_stay_zero_or_one_outside_of_normalisation():
    env = AddAgentID(NormalizeObservation(SyncVectorEnv(factory=CounterGame, num_envs=3, seed=0)))
    env.reset()
    for _ in range(5):
        observations = env.step(counter_actions(3)).observations
    assert set(observations.observation["red"][..., 4:].unique().tolist()) == {0.0, 1.0}


def test_ids_do_not_fit_images():
    with pytest.raises(ValueError, match=r"'eyes' have shape \(3, 4, 2\): flatten them with TransformObservation"):
        AddAgentID(images())


# StackObservations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", ["first", "zero"])
def test_stacks(padding):
    env = StackObservations(SyncVectorEnv(factory=CounterGame, num_envs=2, seed=0), stack_size=3, padding=padding)

    def times(observations):
        return observations.observation["blue"].view(2, 3, 4)[..., 1].tolist()

    def episodes(observations):
        return observations.observation["blue"].view(2, 3, 4)[..., 0].tolist()

    assert env.spec.groups["blue"].observation_shape == (12,)
    assert times(env.reset()) == [[0, 0, 0]] * 2
    assert times(env.step(counter_actions(2)).observations) == [[0, 0, 1]] * 2
    assert times(env.step(counter_actions(2)).observations) == [[0, 1, 2]] * 2
    # The partial reset concerns the second instance only.
    observations = env.reset(mask=np.array([False, True]))
    assert times(observations) == [[0, 1, 2], [0, 0, 0]]
    past = 1.0 if padding == "first" else 0.0
    assert episodes(observations) == [[0, 0, 0], [past, past, 1]]
    step = env.step(counter_actions(2))
    assert times(step.final)[0] == [1, 2, 3]
    assert times(step.observations) == [[0, 0, 0], [0, 0, 1]]
    assert episodes(step.observations) == [[past, past, 1], [past, 1, 1]]


def test_dead_agents_see_nothing_and_come_back_without_a_past():
    alive = [True, True, False, True, True]

    class Phoenix(DummyGame):
        time = 0

        def reset(self, *, seed=None):
            observations = super().reset()
            observations.alive["agents"][0] = alive[self.time]
            observations.action_mask["agents"][0] = [True, alive[self.time]]
            observations.observation["agents"][0] = self.time + 1
            return observations

        def step(self, actions):
            self.time += 1
            return super().step(actions)

    env = StackObservations(Phoenix(), stack_size=2)
    seen = [env.reset()] + [env.step(DUMMY_ACTIONS).observations for _ in range(4)]
    stacks = [observations.observation["agents"][0, ::2].tolist() for observations in seen]
    assert stacks == [[1, 1], [1, 2], [0, 0], [0, 4], [4, 5]]
    assert all((observations.observation["agents"][1] == 0).all() for observations in seen)


def test_images_are_stacked_by_channels():
    space = StackObservations(images(), stack_size=4).spec.groups["eyes"].observation_space
    assert space == spaces.Box(0, 9, (3, 4, 8), np.uint8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"stack_size": 0}, "stack_size must be at least 1, got 0"), ({"stack_size": 2, "padding": "last"}, "padding")],
)
def test_bad_stacks_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        StackObservations(CounterGame(), **arguments)


# SelectFeatures -------------------------------------------------------------------------------------------------------


def test_features_are_kept_in_the_given_order():
    env = SelectFeatures(DummyGame(), features=[1, 0])
    observations = env.reset()
    assert observations.observation["agents"].tolist() == [[2, 1], [0, 0], [4, 3]]  # the dead still see zeros
    assert observations.state.tolist() == [5, 7]
    assert SelectFeatures(DummyGame(), features=[1]).reset().observation["agents"].tolist() == [[2], [0], [4]]


def test_features_have_bounds_of_their_own():
    env = wrap(make_env("gymnasium/CartPole-v1"), [{"name": "SelectFeatures", "features": [0, 2]}])
    (group,) = env.spec.groups.values()
    (whole,) = env.unwrapped.spec.groups.values()
    np.testing.assert_array_equal(group.observation_space.high, whole.observation_space.high[[0, 2]])
    assert np.isfinite(group.observation_space.high).all()  # only velocities are unbounded


@pytest.mark.parametrize("features", [[], [0, 0], [2], [-1]])
def test_features_that_are_not_there_are_refused(features):
    with pytest.raises(ValueError, match="features"):
        SelectFeatures(DummyGame(), features=features)


# TransformObservation -------------------------------------------------------------------------------------------------


def test_functions_see_all_agents_at_once():
    shapes = []

    def clip(x):
        shapes.append(x.shape)
        return np.clip(x, 0, 1)

    env = TransformObservation(SyncVectorEnv(factory=CounterGame, num_envs=2, seed=0), function=clip)
    env.reset()
    shapes.clear()
    observations = env.step(counter_actions(2)).observations
    assert shapes == [(2, 2, 4), (2, 1, 4)]
    assert observations.observation["red"].max() == 1


def test_new_spaces_states_and_one_function_a_group():
    space = spaces.Box(-1, 1, (1,), np.float64)
    env = TransformObservation(
        CounterGame(),
        function={"red": lambda x: np.tanh(x[..., 3:]).astype(np.float64), "blue": lambda x: x},
        space={"red": space, "blue": CounterGame().spec.groups["blue"].observation_space},
        state_function=lambda state: state[..., :2] + np.float32(1),
    )
    observations = env.reset(seed=0)
    assert env.spec.groups["red"].observation_space == space
    np.testing.assert_allclose(observations.observation["red"], np.tanh([[0.0], [1.0]]))
    assert env.spec.state_size == 2
    assert observations.state.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"function": lambda x: x[..., :2]},
            r"function of 'red' must return float32 of shape \(1, 2, 4\).*\(1, 2, 2\)",
        ),
        ({"function": lambda x: x.astype(np.float64)}, "must return float32 .* got float64"),
        ({"function": np.abs, "space": {"red": None}}, r"space needs the groups \['red', 'blue'\], got \['red'\]"),
        ({"function": {"green": np.abs}}, "function needs the groups"),
        ({"function": np.abs, "state_function": lambda x: x.astype(int)}, "state_function must return float32"),
    ],
)
def test_functions_that_do_not_fit_are_refused_at_once(arguments, message):
    with pytest.raises(ValueError, match=message):
        TransformObservation(CounterGame(), **arguments)


def test_functions_cannot_change_the_game_below():
    def cheat(x):
        x += 1
        return x

    with pytest.raises(ValueError, match="read-only"):
        TransformObservation(CounterGame(), function=cheat)


def test_dead_agents_still_see_zeros():
    env = TransformObservation(
        SyncVectorEnv(factory=RandomGame, num_envs=4, seed=0), function=lambda x: x + x.dtype.type(1)
    )
    observations = env.reset()
    for name, alive in observations.alive.items():
        assert (observations.observation[name] == 0).all(-1).equal(~alive)
    assert not observations.alive["runners"].all()
