"""SyncVectorEnv against episodes that are known by script."""

import numpy as np
import pytest
import torch
from scripted import CounterGame, counter_actions

from marl_lightning.envs import SyncVectorEnv


@pytest.fixture
def env():
    return SyncVectorEnv(factory=CounterGame, num_envs=3, seed=5)


def noise(seed: int, episodes: int) -> np.ndarray:
    return np.random.default_rng(seed).random(episodes).astype(np.float32)


def test_shapes_and_dtypes(env):
    observations = env.reset()
    assert observations.observation["red"].shape == (3, 2, 4)
    assert observations.observation["blue"].dtype == torch.float32
    assert observations.action_mask.keys() == {"red"}
    assert observations.alive["red"].dtype == torch.bool
    assert observations.state.shape == (3, 3)
    step = env.step(counter_actions(3))
    assert step.reward["red"].shape == (3, 2)
    assert step.terminated.dtype == step.truncated.dtype == torch.bool
    assert step.info["score"].tolist() == [10.0, 10.0, 10.0]


def test_same_objects_are_filled_anew(env):
    observations = env.reset()
    step = env.step(counter_actions(3))
    assert step.observations is observations
    assert env.step(counter_actions(3)) is step
    assert env.reset() is observations


def test_autoreset_keeps_the_true_successor(env):
    env.reset()
    step = [env.step(counter_actions(3)) for _ in range(3)][-1]
    # The first episode is terminated at time 3; the next decision point is time 0 of episode 1.
    assert step.terminated.all()
    assert not step.truncated.any()
    assert step.final.state[:, :2].tolist() == [[0, 3]] * 3
    assert step.final.alive["red"].tolist() == [[True, False]] * 3
    assert step.final.action_mask["red"][0].tolist() == [[True, True, True], [True, False, False]]
    assert step.observations.state[:, :2].tolist() == [[1, 0]] * 3
    assert step.observations.alive["red"].all()
    assert step.reward["red"].tolist() == [[3, 0]] * 3
    assert step.info["score"].tolist() == [30.0] * 3
    step = [env.step(counter_actions(3)) for _ in range(3)][-1]
    assert step.truncated.all()
    assert not step.terminated.any()


def test_reward_of_the_step_of_death_counts(env):
    env.reset()
    env.step(counter_actions(3))
    step = env.step(counter_actions(3))
    assert step.reward["red"].tolist() == [[2, -1]] * 3
    assert step.observations.alive["red"].tolist() == [[True, False]] * 3


def test_instance_i_is_seeded_with_seed_plus_i_and_continues_its_stream(env):
    first = env.reset().state[:, 2].clone()
    assert first.tolist() == [noise(5 + i, 1)[0] for i in range(3)]
    second = env.reset().state[:, 2].clone()
    assert second.tolist() == [noise(5 + i, 2)[1] for i in range(3)]
    assert env.reset(seed=40).state[:, 2].tolist() == [noise(40 + i, 1)[0] for i in range(3)]
    assert env.seed == 40


def test_automatic_and_explicit_resets_share_the_stream(env):
    env.reset()
    for _ in range(3):
        step = env.step(counter_actions(3))
    assert step.observations.state[:, 2].tolist() == [noise(5 + i, 2)[1] for i in range(3)]


def test_partial_reset_leaves_the_others_alone(env):
    env.reset()
    env.step(counter_actions(3))
    before = env.step(counter_actions(3)).observations.state.clone()
    state = env.reset(mask=np.array([False, True, False])).state
    assert torch.equal(state[[0, 2]], before[[0, 2]])
    assert state[1, :2].tolist() == [1, 0]
    step = env.step(counter_actions(3))
    assert step.terminated.tolist() == [True, False, True]
    assert step.observations.state[1, :2].tolist() == [1, 1]


@pytest.mark.parametrize(
    "mask", [np.ones(2, np.bool_), np.ones(3, np.int64), [True] * 3, torch.ones(3, dtype=torch.bool)], ids=str
)
def test_bad_masks_are_refused(env, mask):
    env.reset()
    with pytest.raises(ValueError, match="mask must be a numpy bool array of shape"):
        env.reset(mask=mask)


def test_seed_and_mask_are_refused_together(env):
    env.reset()
    with pytest.raises(ValueError, match="cannot be combined"):
        env.reset(seed=1, mask=np.ones(3, np.bool_))


def test_first_reset_must_be_full(env):
    with pytest.raises(RuntimeError, match="without a mask"):
        env.reset(mask=np.ones(3, np.bool_))


def test_step_needs_a_reset(env):
    with pytest.raises(RuntimeError, match="reset before step"):
        env.step(counter_actions(3))


@pytest.mark.parametrize(
    "change",
    [
        {"red": torch.zeros(2, 2, dtype=torch.long)},
        {"red": torch.zeros(3, 2)},
        {"blue": torch.zeros(3, 1, 3)},
        {"green": torch.zeros(3, 1)},
    ],
    ids=["too few instances", "floats for a discrete group", "too many dimensions", "unknown group"],
)
def test_bad_actions_are_refused(env, change):
    env.reset()
    with pytest.raises(ValueError, match="actions"):
        env.step({**counter_actions(3), **change})


def test_errors_name_the_instance(env):
    env.reset()
    actions = counter_actions(3)
    actions["red"][2, 0] = 7
    with pytest.raises(ValueError, match="illegal action") as caught:
        env.step(actions)
    assert caught.value.__notes__ == ["raised by environment 2 of 3 (scripted/counter)"]


def test_different_specs_are_refused_and_closed():
    made = []

    def factory():
        made.append(CounterGame(length=3 + len(made) // 2))
        return made[-1]

    with pytest.raises(ValueError, match="equal specs, but 2"):
        SyncVectorEnv(factory=factory, num_envs=3, seed=0)
    assert [game.closed for game in made] == [1, 1, 1]


def test_num_envs_is_checked():
    with pytest.raises(ValueError, match="num_envs must be at least 1, got 0"):
        SyncVectorEnv(factory=CounterGame, num_envs=0, seed=0)


def test_replicate_is_independent(env):
    env.recipe = {"name": "scripted/counter", "kwargs": {}}
    env.reset()
    other = env.replicate(num_envs=2, seed=8)
    assert other.recipe == env.recipe
    assert other.reset().state[:, 2].tolist() == [noise(8, 1)[0], noise(9, 1)[0]]
    state = env.step(counter_actions(3)).observations.state
    before = state.clone()
    other.step(counter_actions(2))
    other.step(counter_actions(2))
    assert torch.equal(state, before)


def test_saved_state_continues_exactly(env, tmp_path):
    env.reset()
    for _ in range(4):
        env.step(counter_actions(3))
    torch.save(env.state_dict(), tmp_path / "env.pt")
    expected = [env.step(counter_actions(3)).observations.state.clone() for _ in range(7)]
    other = env.replicate(num_envs=3, seed=99)
    restored = other.load_state_dict(torch.load(tmp_path / "env.pt", weights_only=True))
    assert restored.state[:, :2].tolist() == [[1, 1]] * 3
    assert other.seed == 5
    for state in expected:
        assert torch.equal(other.step(counter_actions(3)).observations.state, state)


def test_saved_state_of_another_size_is_refused(env):
    with pytest.raises(ValueError, match="holds 3 instances, this environment 2"):
        env.replicate(num_envs=2, seed=0).load_state_dict(env.state_dict())


def test_render_by_index(env):
    env.reset()
    env.step(counter_actions(3))
    env.reset(mask=np.array([True, False, False]))
    assert env.render(0).max() == 0
    assert env.render(1).min() == 1
    with pytest.raises(IndexError, match=r"\[0, 3\), got -1"):
        env.render(-1)


def test_close_may_be_repeated(env):
    with env:
        env.reset()
    env.close()


def test_all_instances_are_closed_even_if_one_cannot_be():
    class Stuck(CounterGame):
        def close(self):
            super().close()
            raise OSError("stuck")

    games = [Stuck(), CounterGame(), Stuck(), CounterGame()]
    env = SyncVectorEnv(factory=[lambda game=game: game for game in games], num_envs=4, seed=0)
    with pytest.raises(OSError, match="stuck"):
        env.close()
    assert [game.closed for game in games] == [1, 1, 1, 1]
