"""The vector environment: description, seeds, resets, saving, threads, pictures and refusals."""

import copy
import os
import signal
import time
import tracemalloc

import numpy as np
import pytest
import torch
from lbf_helpers import Field, random_actions

from marl_lightning.envs import check_env
from marl_lightning.envs.native.lbf import LBFVectorEnv
from marl_lightning.envs.native.lbf.kernel import NONE
from marl_lightning.envs.native.lbf.layout import GROUP
from marl_lightning.envs.native.lbf.scenarios import SCENARIOS, parse
from marl_lightning.envs.single import SingleEnv

SCENARIO = "Foraging-2s-5x5-3p-2f-v3"


def make(**arguments):
    return LBFVectorEnv(**{"scenario": SCENARIO, "num_envs": 4, "episode_limit": 20, **arguments})


def snapshot(observations):
    """Returns copies of all arrays of a decision point."""
    return [
        observations.observation[GROUP].clone(),
        observations.action_mask[GROUP].clone(),
        observations.alive[GROUP].clone(),
        observations.state.clone(),
    ]


def run(env, observations, *, steps, seed=0):
    """Returns copies of what random steps show."""
    frames, rng = [], np.random.default_rng(seed)
    for _ in range(steps):
        step = env.step({GROUP: random_actions(rng, observations)})
        observations = step.observations
        ends = [step.terminated.clone(), step.truncated.clone()]
        frames.append([*snapshot(observations), step.reward[GROUP].clone(), *ends])
    return frames


def assert_equal(first, second):
    torch.testing.assert_close(first, second, rtol=0, atol=0)


# -------- description


@pytest.mark.parametrize(
    ("scenario", "options"),
    [
        ("Foraging-8x8-2p-2f-coop-v3", {}),
        (SCENARIO, {"penalty": 0.1, "obs_instead_of_state": True}),
        ("Foraging-5x5-3p-2f-v3", {"grid_observation": True, "sight": 2, "observe_agent_levels": False}),
    ],
)
def test_contract(scenario, options):
    check_env(LBFVectorEnv(scenario=scenario, num_envs=3, **options))
    check_env(SingleEnv(env=LBFVectorEnv(scenario=scenario, num_envs=1, **options)))


def test_spec():
    env = make(scenario="Foraging-2s-10x10-3p-2f-coop-v3", episode_limit=50)
    assert env.spec.name == "lbf/Foraging-2s-10x10-3p-2f-coop-v3"
    assert env.spec.agents == ("agent_0", "agent_1", "agent_2")
    assert env.spec.groups[GROUP].observation_shape == (15,)
    assert env.spec.groups[GROUP].action_size == 6
    assert env.spec.state_size == 15
    assert env.spec.episode_limit == 50
    assert env.spec.info_keys == ("food_left",)
    assert env.spec.can_checkpoint
    assert not env.spec.shared_reward
    assert env.layout.sight == 2
    assert make(scenario="Foraging-7x7-2p-1f-v3").layout.sight == 7


@pytest.mark.parametrize("obs_instead_of_state", [False, True])
def test_sizes_follow_the_options(obs_instead_of_state):
    env = make(grid_observation=True, obs_instead_of_state=obs_instead_of_state)
    assert env.spec.groups[GROUP].observation_shape == (3, 5, 5)
    assert env.spec.state_size == (3 * 75 if obs_instead_of_state else 15)
    assert make(observe_agent_levels=False).spec.groups[GROUP].observation_shape == (12,)


def test_observations_are_within_their_space():
    for options in ({}, {"grid_observation": True}, {"max_player_level": [1, 2, 5]}, {"observe_agent_levels": False}):
        env = make(**options)
        space = env.spec.groups[GROUP].observation_space
        for observation, *_ in run(env, env.reset(), steps=40):
            assert all(space.contains(row) for row in observation.flatten(0, 1).numpy())


def test_names():
    assert len(SCENARIOS) == len(set(SCENARIOS)) == 15 * 8 * 4 * 2 * 2
    assert all(parse(name).name == name for name in SCENARIOS)


def test_names_are_those_of_the_package():
    pytest.importorskip("lbforaging")
    import gymnasium

    registered = {name for name in gymnasium.registry if name.startswith("Foraging") and "grid" not in name}
    assert set(SCENARIOS) == registered


# -------- seeds and resets


def test_instance_i_with_seed_s_is_instance_0_with_seed_s_plus_i():
    env, single = make(seed=10), make(seed=12, num_envs=1)
    observations, single_observations = env.reset(), single.reset()
    rng = np.random.default_rng(0)
    for _ in range(60):
        assert_equal([array[2] for array in snapshot(observations)], [a[0] for a in snapshot(single_observations)])
        actions = random_actions(rng, observations)
        step, single_step = env.step({GROUP: actions}), single.step({GROUP: actions[2:3]})
        assert_equal(step.reward[GROUP][2], single_step.reward[GROUP][0])
        observations, single_observations = step.observations, single_step.observations
    assert single._state.episode[0] > 1, "the comparison should include automatic resets"


def test_reset_with_a_seed_equals_a_new_environment():
    env = make(seed=1)
    run(env, env.reset(), steps=40)
    first = run(env, env.reset(seed=5), steps=60, seed=1)
    other = make(seed=5)
    second = run(other, other.reset(), steps=60, seed=1)
    assert env.seed == 5
    assert_equal(first, second)


def test_reset_without_a_seed_continues_the_stream_of_episodes():
    env = make()
    first, second = snapshot(env.reset()), snapshot(env.reset())
    assert not torch.equal(first[3], second[3])
    assert_equal(first, snapshot(env.reset(seed=0)))


def test_instances_differ():
    assert len({tuple(row.tolist()) for row in make().reset().state}) == 4


def test_partial_reset_touches_only_the_masked_rows():
    env = make()
    run(env, env.reset(), steps=3)
    observations = env._step.observations
    before, fields = snapshot(observations), copy.deepcopy(env.state_dict()["fields"])
    mask = np.array([False, True, False, True])
    assert env.reset(mask=mask) is observations
    for old, new in zip(before, snapshot(observations), strict=True):
        assert_equal(old[~mask], new[~mask])
    for name, value in env.state_dict()["fields"].items():
        assert_equal(value[~mask], fields[name][~mask])
    assert env._state.time.tolist() == [3, 0, 3, 0]
    assert env._state.episode.tolist() == [0, 1, 0, 1]
    assert not torch.equal(before[3][1], observations.state[1])
    env.reset(mask=np.repeat(mask, 2)[::2])  # memory of any layout
    assert env._state.episode.tolist() == [0, 2, 0, 2]


def test_results_are_written_into_the_same_memory():
    env = make()
    observations = env.reset()
    actions = {GROUP: torch.full((4, 3), NONE)}
    step = env.step(actions)
    assert step.observations is observations
    assert env.step(actions) is step


def test_step_allocates_no_arrays():
    env = make(scenario="Foraging-19x19-9p-4f-v3", num_envs=64)
    actions = {GROUP: random_actions(np.random.default_rng(0), env.reset())}
    env.step(actions)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    env.step(actions)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # The observations alone have 64 * 9 * 39 entries; a few small Python objects are created on the way.
    assert peak - before < 20_000


def test_replicate_is_independent_and_of_the_same_game():
    env = make(penalty=0.1)
    env.reset()
    before = env.state_dict()["fields"]
    env.recipe = {"name": env.spec.name, "kwargs": {}}
    replica = env.replicate(num_envs=2, seed=9)
    assert replica.recipe == env.recipe
    assert (replica.num_envs, replica.seed, replica.spec, replica.options) == (2, 9, env.spec, env.options)
    run(replica, replica.reset(), steps=3)
    assert_equal(env.state_dict()["fields"], before)


# -------- saving


def test_saved_state_continues_bit_for_bit(tmp_path):
    env = make(max_player_level=[1, 2, 3])
    run(env, env.reset(), steps=15)
    torch.save(env.state_dict(), tmp_path / "state.pt")
    expected = run(env, env._step.observations, steps=60, seed=2)
    other = make(seed=77, max_player_level=[1, 2, 3])
    observations = other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert_equal(run(other, observations, steps=60, seed=2), expected)
    assert other.seed == env.seed
    assert any(frame[6].any() for frame in expected), "the comparison should include ends of episodes"


def test_saved_state_is_a_copy():
    env = make()
    env.reset()
    saved = env.state_dict()
    run(env, env.reset(), steps=2)
    assert saved["fields"]["time"].tolist() == [0] * 4


def test_state_of_another_game_is_refused():
    env = make()
    env.reset()
    for other in (make(scenario="Foraging-2s-5x5-3p-3f-v3"), make(num_envs=2), make(penalty=0.1)):
        with pytest.raises(ValueError, match="does not fit"):
            other.load_state_dict(env.state_dict())
    saved = env.state_dict()
    del saved["fields"]["spawned"]
    with pytest.raises(ValueError, match="another version"):
        env.load_state_dict(saved)


# -------- threads


def test_results_do_not_depend_on_the_number_of_threads():
    frames = []
    for num_threads in (1, 2, 3):
        env = make(num_envs=7, num_threads=num_threads)
        frames.append(run(env, env.reset(), steps=40))
        env.close()
        env.close()
    assert_equal(frames[0], frames[1])
    assert_equal(frames[0], frames[2])


def test_default_number_of_threads_grows_with_the_instances():
    assert make(num_envs=2, num_threads=5).num_threads == 2
    assert make(num_envs=64).num_threads == 1
    assert make(num_envs=4096).num_threads == min(16, torch.get_num_threads())


def test_stepping_goes_on_after_close_and_in_a_forked_process():
    env = make(num_threads=2)
    env.reset()
    actions = {GROUP: torch.full((4, 3), NONE)}
    env.step(actions)
    env.close()
    env.step(actions)
    child = os.fork()
    if child == 0:  # pragma: no cover
        env.step(actions)
        os._exit(0)
    deadline = time.monotonic() + 30
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    if ended == (0, 0):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    env.close()
    assert ended == (child, 0), "the forked process should step with threads of its own"


# -------- pictures


def test_picture():
    field = Field(players=[[0, 0, 1], [7, 7, 2]], foods=[[2, 3, 3], [5, 5, 0]])
    start = time.perf_counter()
    picture = field.env.render(0)
    assert time.perf_counter() - start < 0.5
    assert picture.shape == (256, 256, 3)
    assert picture.dtype == np.uint8
    cell = lambda row, column: picture[32 * row : 32 * row + 32, 32 * column : 32 * column + 32].astype(int)  # noqa: E731
    for at in ((0, 0), (7, 7)):
        assert cell(*at)[6, 6, 2] > cell(*at)[6, 6, 0], "players are blue"
    assert cell(2, 3)[6, 16, 0] > cell(2, 3)[6, 16, 2], "foods are red"
    np.testing.assert_array_equal(cell(5, 5), cell(4, 4), err_msg="eaten foods are not drawn")
    white = lambda at: (cell(*at) == 255).all(-1).sum()  # noqa: E731
    assert len({white((0, 0)), white((7, 7)), white((4, 4))}) == 3, "levels are written"


def test_picture_of_great_levels():
    field = Field(players=[[0, 0, 1], [1, 1, 12345]], foods=[[4, 4, 24]])
    assert field.env.render(0).shape == (256, 256, 3)


# -------- refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scenario": "Foraging-8x8-2p-2f"}, "is named Foraging"),
        ({"scenario": "Foraging-8x9-2p-2f-v3"}, "is named Foraging"),
        ({"scenario": "Foraging-4x4-2p-2f-v3"}, "size must be between 5 and 19"),
        ({"scenario": "Foraging-8x8-1p-2f-v3"}, "num_players must be between 2 and 9"),
        ({"scenario": "Foraging-8x8-2p-9f-v3"}, "num_foods must be between 1 and 4"),
        ({"num_envs": 0}, "num_envs must be at least 1"),
        ({"num_threads": 0}, "num_threads"),
        ({"seed": -1}, "seed"),
        ({"sight": 0}, "sight"),
        ({"episode_limit": 0}, "episode_limit"),
        ({"min_player_level": 0}, "1 <= min_player_level"),
        ({"min_player_level": 3}, "min_player_level <= max_player_level"),
        ({"max_player_level": [1, 2]}, "max_player_level must be a number or 3 of them"),
        ({"min_food_level": 3, "max_food_level": 2}, "min_food_level <= max_food_level"),
        ({"max_food_level": 0}, "1 <= min_food_level"),
        ({"min_food_level": 4}, "can exceed the greatest level of a food"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        make(**arguments)


def test_unknown_options_are_refused():
    with pytest.raises(TypeError, match="observe_everything"):
        make(observe_everything=True)


def test_nothing_works_before_the_first_reset():
    env = make()
    with pytest.raises(RuntimeError, match="reset"):
        env.step({GROUP: torch.full((4, 3), NONE)})
    with pytest.raises(RuntimeError, match="reset"):
        env.render(0)
    with pytest.raises(RuntimeError, match="all instances"):
        env.reset(mask=np.array([True, False, False, False]))


@pytest.mark.parametrize("actions", [torch.ones(4, 2, dtype=torch.int64), torch.ones(4, 3)])
def test_wrong_actions_are_refused(actions):
    env = make()
    env.reset()
    with pytest.raises(ValueError, match="integers of shape"):
        env.step({GROUP: actions})


def test_actions_may_have_any_integer_type_and_memory_layout():
    env = make()
    env.reset()
    env.step({GROUP: torch.full((3, 4), NONE, dtype=torch.int32).T})
    assert (env._actions == NONE).all()
