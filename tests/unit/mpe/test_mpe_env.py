"""The contract of a vector environment: seeds, resets, ends, checkpoints, threads, pictures and bad input."""

import io

import numpy as np
import pytest
import torch
from mpe_helpers import SCENARIOS, random_actions, to_tensors

from marl_lightning.envs.checker import check_env
from marl_lightning.envs.native.mpe import MPEVectorEnv


def play(env, *, steps, seed=0):
    """Steps with random actions and returns copies of all that could be seen."""
    rng, frames = np.random.default_rng(seed), []
    for _ in range(steps):
        step = env.step(to_tensors(random_actions(env, rng)))
        ended = (step.truncated | step.terminated).numpy()
        frames.append(
            [
                step.observations.state.numpy().copy(),
                step.final.state.numpy()[ended],
                ended.copy(),
                *(reward.numpy().copy() for reward in step.reward.values()),
                *(observation.numpy().copy() for observation in step.observations.observation.values()),
            ]
        )
    return frames


def assert_equal_frames(first, second):
    for one, two in zip(first, second, strict=True):
        for a, b in zip(one, two, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("continuous_actions", [False, True])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_check_env(scenario, continuous_actions):
    env = MPEVectorEnv(scenario=scenario, num_envs=3, continuous_actions=continuous_actions, max_cycles=7)
    check_env(env, steps=40)


@pytest.mark.parametrize(
    ("scenario", "options"),
    [
        ("simple_spread_v3", {"N": 4, "terminate_on_success": True, "num_agent_neighbors": 2}),
        ("simple_tag_v3", {"num_good": 2, "curriculum": True, "terminate_on_success": True}),
        ("simple_world_comm_v3", {"num_forests": 0, "num_obstacles": 0}),
    ],
    ids=str,
)
def test_check_env_with_options(scenario, options):
    check_env(MPEVectorEnv(scenario=scenario, num_envs=2, max_cycles=7, **options), steps=40)


def test_state_is_the_observations_in_order():
    env = MPEVectorEnv(scenario="simple_world_comm_v3", num_envs=3)
    observations = env.reset()
    rows = [array.flatten(1) for array in observations.observation.values()]
    assert torch.equal(observations.state, torch.cat(rows, dim=1))
    assert not any(
        np.shares_memory(array.numpy(), observations.state.numpy()) for array in observations.observation.values()
    )


def test_true_successor_at_the_end_of_an_episode():
    """An environment with a longer episode shows what the successor is."""
    short = MPEVectorEnv(scenario="simple_tag_v3", num_envs=4, max_cycles=5)
    long = MPEVectorEnv(scenario="simple_tag_v3", num_envs=4, max_cycles=50)
    rng = np.random.default_rng(0)
    assert torch.equal(short.reset(seed=1).state, long.reset(seed=1).state)
    for time in range(5):
        actions = to_tensors(random_actions(short, rng))
        step, other = short.step(actions), long.step(actions)
        assert step.truncated.all().item() is (time == 4)
        assert not step.terminated.any()
        for name, reward in other.reward.items():
            assert torch.equal(step.reward[name], reward)
    assert torch.equal(step.final.state, other.observations.state)
    assert torch.equal(step.final.observation["agent"], other.observations.observation["agent"])
    assert not torch.isclose(step.observations.state, other.observations.state).all(dim=1).any()
    # Velocities are the first numbers of an adversary's observation.
    assert (step.observations.observation["adversary"][..., :2] == 0).all()


def test_episodes_differ_and_seeds_repeat_them():
    env = MPEVectorEnv(scenario="simple_reference_v3", num_envs=2, max_cycles=3)
    starts = []
    for seed in (4, 4, 5, None):
        state = env.reset(seed=seed).state.clone()
        starts.append(state)
    assert torch.equal(starts[0], starts[1])
    assert torch.equal(starts[0][1], starts[2][0])
    assert not torch.equal(starts[2], starts[3])
    env.reset(seed=4)
    first = play(env, steps=10)
    env.reset(seed=4)
    assert_equal_frames(first, play(env, steps=10))


def test_places_differ_from_episode_to_episode():
    env = MPEVectorEnv(scenario="simple_push_v3", num_envs=3, max_cycles=1)
    env.reset(seed=4)
    places = [env._state.position.copy()]
    for _ in range(3):
        play(env, steps=1)
        places.append(env._state.position.copy())
    assert len({float(x) for batch in places for x in batch.ravel()}) == 4 * env._state.position.size


def test_large_seeds_matter():
    env = MPEVectorEnv(scenario="simple_v3", num_envs=1)
    states = [env.reset(seed=seed).state.clone() for seed in (1, 1 + 2**32, 2**62)]
    assert not torch.equal(states[0], states[1])
    assert not torch.equal(states[1], states[2])
    for seed in (-1, 2**63):
        with pytest.raises(ValueError, match="seed"):
            env.reset(seed=seed)


def test_partial_reset_leaves_the_others_alone():
    env = MPEVectorEnv(scenario="simple_spread_v3", num_envs=4)
    env.reset()
    play(env, steps=3)
    before = {name: getattr(env._state, name).copy() for name in env._state._fields}
    state = env.reset(mask=np.array([False, True, False, True])).state.clone()
    for name, array in before.items():
        np.testing.assert_array_equal(getattr(env._state, name)[::2], array[::2], err_msg=name)
    assert env._state.time.tolist() == [3, 0, 3, 0]
    assert env._state.episode.tolist() == [0, 1, 0, 1]
    env.reset(mask=np.zeros(4, np.bool_))
    assert torch.equal(env.reset(mask=np.zeros(4, np.bool_)).state, state)


@pytest.mark.parametrize("scenario", ["simple_tag_v3", "simple_crypto_v3"])
def test_state_dict_continues_exactly(scenario):
    options = {"curriculum": True} if scenario == "simple_tag_v3" else {}
    env = MPEVectorEnv(scenario=scenario, num_envs=3, max_cycles=9, **options)
    env.reset(seed=2)
    play(env, steps=4)
    env.curriculum_stage = len(env.world.stages) - 1
    file = io.BytesIO()
    torch.save(env.state_dict(), file)
    file.seek(0)
    first = play(env, steps=20, seed=1)
    other = MPEVectorEnv(scenario=scenario, num_envs=3, max_cycles=9, **options)
    observations = other.load_state_dict(torch.load(file, weights_only=True))
    assert other.seed == 2
    assert other.curriculum_stage == env.curriculum_stage
    np.testing.assert_array_equal(observations.alive["agent" if options else "eve"].numpy(), True)
    assert_equal_frames(first, play(other, steps=20, seed=1))


def test_state_dict_of_another_game():
    state = MPEVectorEnv(scenario="simple_spread_v3", num_envs=2).state_dict()
    for arguments in ({"num_envs": 3}, {"num_envs": 2, "N": 4}, {"num_envs": 2, "max_cycles": 9}):
        with pytest.raises(ValueError, match="does not fit"):
            MPEVectorEnv(scenario="simple_spread_v3", **arguments).load_state_dict(state)


def test_threads_change_nothing():
    frames = []
    for num_threads in (1, 3):
        with MPEVectorEnv(scenario="simple_tag_v3", num_envs=7, num_threads=num_threads, max_cycles=5) as env:
            env.reset(seed=3)
            frames.append(play(env, steps=12))
    assert_equal_frames(*frames)


def test_replicate():
    env = MPEVectorEnv(scenario="simple_tag_v3", num_envs=2, num_good=2, curriculum=True)
    env.recipe = {"name": "mpe/simple_tag_v3", "kwargs": {"num_good": 2}}
    env.curriculum_stage = 2
    other = env.replicate(num_envs=3, seed=9)
    assert (other.num_envs, other.seed, other.spec, other.recipe) == (3, 9, env.spec, env.recipe)
    assert other.curriculum_stage == 2


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_render(scenario):
    env = MPEVectorEnv(scenario=scenario, num_envs=2)
    env.reset()
    play(env, steps=2)
    pictures = [env.render(index) for index in range(2)]
    assert pictures[0].shape == (350, 350, 3)
    assert pictures[0].dtype == np.uint8
    assert (pictures[0] != pictures[1]).any()
    np.testing.assert_array_equal(pictures[0], env.render(0))


def test_render_shows_things_where_they_are():
    env = MPEVectorEnv(scenario="simple_v3", num_envs=1)
    env.reset()
    env._state.position[0] = [[0.5, 0.5], [-0.5, 0.5]]
    picture = env.render(0).astype(int)
    reds = np.argwhere((picture[..., 0] == 150) & (picture[..., 1] == 50))
    grays = np.argwhere((picture == 50).all(axis=-1))
    assert reds[:, 0].mean() == pytest.approx(grays[:, 0].mean(), abs=2)  # the same height, in the upper half
    assert reds[:, 0].mean() < 175
    assert reds[:, 1].mean() == pytest.approx(350 - grays[:, 1].mean(), abs=2)
    assert reds[:, 1].mean() < 175


@pytest.mark.parametrize("bad", [-1, 5, 2**40])
def test_illegal_discrete_action(bad):
    env = MPEVectorEnv(scenario="simple_tag_v3", num_envs=2)
    state = env.reset().state.clone()
    actions = {"adversary": torch.zeros(2, 3, dtype=torch.int64), "agent": torch.zeros(2, 1, dtype=torch.int64)}
    actions["adversary"][1, 2] = bad
    with pytest.raises(ValueError, match=r"illegal action .* 'adversary_2' in environment 1"):
        env.step(actions)
    assert torch.equal(env._step.observations.state, state)
    assert not env._state.time.any()


def test_number_of_actions_is_that_of_the_agent():
    env = MPEVectorEnv(scenario="simple_speaker_listener_v4", num_envs=1)
    env.reset()
    env.step({"speaker": torch.tensor([[2]]), "listener": torch.tensor([[4]])})
    with pytest.raises(ValueError, match="speaker_0"):
        env.step({"speaker": torch.tensor([[3]]), "listener": torch.tensor([[4]])})


def test_illegal_continuous_action():
    env = MPEVectorEnv(scenario="simple_speaker_listener_v4", num_envs=2, continuous_actions=True)
    env.reset()
    actions = {"speaker": torch.zeros(2, 1, 3), "listener": torch.zeros(2, 1, 5)}
    env.step(actions)
    actions["listener"][1, 0, 4] = torch.nan
    with pytest.raises(ValueError, match="'listener_0' in environment 1"):
        env.step(actions)
    actions["listener"][1, 0, 4] = 7.0  # clipped
    env.step(actions)


def test_wrong_actions():
    env = MPEVectorEnv(scenario="simple_spread_v3", num_envs=2)
    with pytest.raises(RuntimeError, match="reset"):
        env.step({"agent": torch.zeros(2, 3, dtype=torch.int64)})
    env.reset()
    for actions in (
        {"agents": torch.zeros(2, 3, dtype=torch.int64)},
        {"agent": torch.zeros(2, 2, dtype=torch.int64)},
        {"agent": torch.zeros(2, 3)},
    ):
        with pytest.raises(ValueError, match="actions"):
            env.step(actions)


def test_calls_out_of_order_and_out_of_range():
    env = MPEVectorEnv(scenario="simple_spread_v3", num_envs=2)
    with pytest.raises(RuntimeError, match="first reset"):
        env.reset(mask=np.ones(2, np.bool_))
    with pytest.raises(RuntimeError, match="render"):
        env.render(0)
    env.reset()
    with pytest.raises(IndexError):
        env.render(2)
    with pytest.raises(ValueError, match="curriculum_stage"):
        env.curriculum_stage = 1
    env.close()
    env.close()


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"scenario": "simple_spred_v3"}, "simple_spread_v3"),
        ({"num_envs": 0}, "num_envs"),
        ({"max_cycles": 0}, "max_cycles"),
        ({"num_threads": 0}, "num_threads"),
        ({"N": 0}, "N must"),
        ({"local_ratio": 1.5}, "local_ratio"),
        ({"num_agent_neighbors": 0}, "num_agent_neighbors"),
        ({"num_landmark_neighbors": 1.0}, "num_landmark_neighbors"),
        ({"scenario": "simple_tag_v3", "num_good": 0}, "num_good"),
        ({"scenario": "simple_tag_v3", "num_obstacles": -1}, "num_obstacles"),
        ({"scenario": "simple_reference_v3", "local_ratio": -1}, "local_ratio"),
        ({"scenario": "simple_world_comm_v3", "num_food": 0}, "num_food"),
        ({"scenario": "simple_world_comm_v3", "num_forests": 63}, "num_forests"),
    ],
    ids=str,
)
def test_wrong_arguments(arguments, match):
    with pytest.raises(ValueError, match=match):
        MPEVectorEnv(**{"scenario": "simple_spread_v3", "num_envs": 2, **arguments})


def test_unknown_option():
    with pytest.raises(TypeError, match="num_good"):
        MPEVectorEnv(scenario="simple_spread_v3", num_envs=1, num_good=2)
