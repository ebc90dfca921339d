"""SingleEnv plays exactly what the instance below it would."""

import numpy as np
import pytest
from scripted import CounterGame, counter_actions

from marl_lightning.envs import SyncVectorEnv
from marl_lightning.envs.single import SingleEnv


def single() -> SingleEnv:
    return SingleEnv(env=SyncVectorEnv(factory=CounterGame, num_envs=1, seed=5))


def assert_equal(first, second):
    np.testing.assert_equal(first.observation, second.observation)
    np.testing.assert_equal(first.action_mask, second.action_mask)
    np.testing.assert_equal(first.alive, second.alive)
    np.testing.assert_equal(first.state, second.state)


def test_equals_the_instance_over_several_episodes():
    game, view = CounterGame(), single()
    assert_equal(view.reset(), game.reset(seed=5))
    for _ in range(3):
        for _ in range(3):
            expected, step = game.step(counter_actions()), view.step(counter_actions())
            assert_equal(step.observations, expected.observations)
            np.testing.assert_equal(step.reward, expected.reward)
            assert (step.terminated, step.truncated, step.info) == (
                expected.terminated,
                expected.truncated,
                expected.info,
            )
        assert step.terminated or step.truncated
        with pytest.raises(RuntimeError, match="over"):
            view.step(counter_actions())
        assert_equal(view.reset(), game.reset())
    # A reset within an episode, and one with a seed.
    view.step(counter_actions())
    assert_equal(view.reset(), game.reset())
    assert_equal(view.reset(seed=7), game.reset(seed=7))


def test_results_belong_to_the_caller():
    view = single()
    first = view.reset()
    view.step(counter_actions())
    assert first.state[1] == 0


def test_actions_of_dead_agents_are_ignored():
    view = single()
    view.reset()
    view.step(counter_actions())
    view.step(counter_actions())
    actions = counter_actions()
    actions["red"][1] = 2  # red_1 is dead and could only play 0
    assert view.step(actions).terminated


def test_illegal_continuous_actions_are_refused():
    view = single()
    view.reset()
    actions = counter_actions()
    actions["blue"][0, 1] = np.nan
    with pytest.raises(ValueError, match=r"illegal action .* of agent 'blue_0'"):
        view.step(actions)


@pytest.mark.parametrize("steps", [2, 3], ids=["within an episode", "after its end"])
def test_saved_state_continues_exactly(steps):
    view, other = single(), single()
    view.reset()
    for _ in range(steps):
        view.step(counter_actions())
    other.load_state_dict(view.state_dict())
    if steps == 2:
        assert_equal(other.step(counter_actions()).observations, view.step(counter_actions()).observations)
    with pytest.raises(RuntimeError, match="over"):
        other.step(counter_actions())
    assert_equal(other.reset(), view.reset())


def test_needs_one_instance():
    with pytest.raises(ValueError, match="num_envs=1, got 2"):
        SingleEnv(env=SyncVectorEnv(factory=CounterGame, num_envs=2, seed=0))
