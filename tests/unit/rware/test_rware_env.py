"""The vector environment: description, seeds, resets, saving, threads, pictures and refusals."""

import copy
import tracemalloc

import numpy as np
import pytest
import torch
from gymnasium import spaces
from rware_helpers import Floor, random_actions

from marl_lightning.envs import check_env
from marl_lightning.envs.native.rware import RWAREVectorEnv
from marl_lightning.envs.native.rware.kernel import NONE, RIGHT, UP
from marl_lightning.envs.native.rware.layout import GROUP
from marl_lightning.envs.native.rware.scenarios import NUM_AGENTS, SCENARIOS, parse
from marl_lightning.envs.single import SingleEnv

SCENARIO = "rware-tiny-3ag-v2"
YARD = """
....
.xx.
.xx.
.gg.
"""


def make(**arguments):
    return RWAREVectorEnv(**{"scenario": SCENARIO, "num_envs": 4, "max_steps": 20, **arguments})


def make_yard(**arguments):
    """Returns games in which random play delivers."""
    return make(
        **{"scenario": "rware-tiny-4ag-v2", "layout": YARD, "request_queue_size": 3, "max_steps": 40, **arguments}
    )


def snapshot(observations):
    """Returns copies of all arrays of a decision point."""
    return [
        observations.observation[GROUP].clone(),
        observations.action_mask[GROUP].clone(),
        observations.alive[GROUP].clone(),
        observations.state.clone(),
    ]


def run(env, *, steps, seed=0):
    """Returns copies of what random steps show."""
    frames, rng = [], np.random.default_rng(seed)
    for _ in range(steps):
        step = env.step({GROUP: random_actions(rng, env)})
        ends = [step.terminated.clone(), step.truncated.clone()]
        frames.append([*snapshot(step.observations), step.reward[GROUP].clone(), *ends])
    return frames


def assert_equal(first, second):
    torch.testing.assert_close(first, second, rtol=0, atol=0)


# -------- description


@pytest.mark.parametrize(
    ("scenario", "options"),
    [
        ("rware-tiny-4ag-v2", {}),
        ("rware-tiny-1ag-hard-v2", {"max_inactivity_steps": 20, "normalised_coordinates": True}),
        (SCENARIO, {"msg_bits": 2, "sensor_range": 2, "reward_type": "two_stage", "max_steps": 30}),
        (
            "rware-small-2ag-easy-v2",
            {
                "observation_type": "image",
                "image_observation_layers": ["agent_direction", "agent_load", "accessible"],
                "reward_type": "global",
                "max_steps": None,
            },
        ),
    ],
)
def test_contract(scenario, options):
    check_env(RWAREVectorEnv(scenario=scenario, num_envs=3, **options))
    check_env(SingleEnv(env=RWAREVectorEnv(scenario=scenario, num_envs=1, **options)))


@pytest.mark.slow
def test_contract_of_all_scenarios():
    for scenario in SCENARIOS:
        check_env(RWAREVectorEnv(scenario=scenario, num_envs=2), steps=20)


def test_spec():
    env = make(scenario="rware-tiny-4ag-hard-v2", max_steps=500)
    assert env.spec.name == "rware/rware-tiny-4ag-hard-v2"
    assert env.spec.agents == ("agent_0", "agent_1", "agent_2", "agent_3")
    assert env.spec.groups[GROUP].observation_shape == (71,)
    assert env.spec.groups[GROUP].action_space == spaces.Discrete(5)
    assert env.spec.state_size == 4 * 8 + 32 * 3
    assert env.spec.episode_limit == 500
    assert env.spec.info_keys == ("deliveries",)
    assert env.spec.can_checkpoint
    assert not env.spec.shared_reward
    assert env.spec.metadata == {"backend": "embedded"}
    assert (env.layout.height, env.layout.width, env.layout.num_requests) == (11, 10, 2)


def test_sizes_follow_the_options():
    env = make(msg_bits=2, sensor_range=2, max_inactivity_steps=7, max_steps=None)
    assert env.spec.groups[GROUP].observation_shape == (8 + 25 * 9,)
    assert env.spec.groups[GROUP].action_space == spaces.MultiDiscrete([5, 2, 2])
    assert env.spec.state_size == 3 * 10 + 32 * 3 + 1
    assert env.spec.episode_limit is None
    assert make(msg_bits=2, sensor_range=2, max_inactivity_steps=7, max_steps=0).spec == env.spec
    assert make(max_inactivity_steps=0).spec == make().spec
    image = make(observation_type="image", image_observation_layers=["goals", "agent_direction"])
    space = image.spec.groups[GROUP].observation_space
    assert space.shape == (2, 3, 3)
    assert (space.high[0].max(), space.high[1].max()) == (1, 4)
    assert make(request_queue_size=5).reset().state[:, 3 * 8 + 2 :: 3].sum(1).tolist() == [5] * 4


def test_names():
    assert len(SCENARIOS) == len(set(SCENARIOS)) == 4 * 3 * 19 - 4
    assert all(parse(name).name == name for name in SCENARIOS)
    assert [parse(f"rware-large-{n}ag-hard-v2").num_requests for n in NUM_AGENTS] == [n // 2 for n in NUM_AGENTS]


# -------- seeds and resets


def test_instance_i_with_seed_s_is_instance_0_with_seed_s_plus_i():
    env, single = make_yard(seed=10), make_yard(seed=12, num_envs=1)
    observations, single_observations = env.reset(), single.reset()
    rng, rewards = np.random.default_rng(0), 0.0
    for _ in range(300):
        assert_equal([array[2] for array in snapshot(observations)], [a[0] for a in snapshot(single_observations)])
        actions = random_actions(rng, env)
        step, single_step = env.step({GROUP: actions}), single.step({GROUP: actions[2:3]})
        assert_equal(step.reward[GROUP][2], single_step.reward[GROUP][0])
        observations, single_observations = step.observations, single_step.observations
        rewards += single_step.reward[GROUP].sum().item()
    assert single._state.episode[0] > 1, "the comparison should include automatic resets"
    assert rewards > 0, "the comparison should include new requests"


def test_reset_with_a_seed_equals_a_new_environment():
    env, other = make_yard(seed=1), make_yard(seed=5)
    env.reset()
    run(env, steps=30)
    assert_equal(snapshot(env.reset(seed=5)), snapshot(other.reset()))
    assert_equal(run(env, steps=60), run(other, steps=60))


def test_reset_without_a_seed_continues_the_stream_of_episodes():
    env = make()
    first, second = snapshot(env.reset()), snapshot(env.reset())
    assert not torch.equal(first[3], second[3])
    assert_equal(first, snapshot(env.reset(seed=0)))


def test_instances_differ():
    assert len({tuple(row.tolist()) for row in make().reset().state}) == 4


def test_partial_reset_touches_only_the_masked_rows():
    env = make_yard(msg_bits=1)
    env.reset()
    run(env, steps=3)
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


def test_step_allocates_no_arrays():
    env = make(scenario="rware-large-19ag-v2", num_envs=64)
    env.reset()
    actions = {GROUP: random_actions(np.random.default_rng(0), env)}
    env.step(actions)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    env.step(actions)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # The observations alone have 64 * 19 * 71 entries; a few small Python objects are created on the way.
    assert peak - before < 20_000


def test_replicate_is_independent_and_of_the_same_game():
    env = make_yard(msg_bits=1)
    env.reset()
    before = env.state_dict()["fields"]
    replica = env.replicate(num_envs=2, seed=9)
    assert (replica.num_envs, replica.seed, replica.spec, replica.options) == (2, 9, env.spec, env.options)
    replica.reset()
    run(replica, steps=3)
    assert_equal(env.state_dict()["fields"], before)


# -------- saving


def test_saved_state_continues_bit_for_bit(tmp_path):
    options = {"msg_bits": 1, "reward_type": "two_stage", "max_inactivity_steps": 12}
    env = make_yard(**options)
    env.reset()
    run(env, steps=15)
    torch.save(env.state_dict(), tmp_path / "state.pt")
    shown = snapshot(env._step.observations)
    expected = run(env, steps=60, seed=2)
    other = make_yard(seed=77, **options)
    assert_equal(snapshot(other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))), shown)
    assert_equal(run(other, steps=60, seed=2), expected)
    assert other.seed == env.seed
    assert any(frame[5].any() for frame in expected), "the comparison should include ends of episodes"
    assert any(frame[4].any() for frame in expected), "the comparison should include new requests"


def test_state_of_another_game_is_refused():
    env = make()
    env.reset()
    for other in (make(scenario="rware-tiny-3ag-easy-v2"), make(num_envs=2), make(reward_type="global")):
        with pytest.raises(ValueError, match="does not fit"):
            other.load_state_dict(env.state_dict())


# -------- threads


def test_results_do_not_depend_on_the_number_of_threads():
    frames = []
    for num_threads in (1, 2, 3):
        env = make_yard(num_envs=7, num_threads=num_threads)
        env.reset()
        frames.append(run(env, steps=40))
        env.close()
    assert_equal(frames[0], frames[1])
    assert_equal(frames[0], frames[2])


# -------- pictures


def test_picture():
    floor = Floor(YARD, agents=[(0, 0, UP), (3, 1, RIGHT)], requests=(2,))
    floor.give(1, 3)
    picture = floor.env.render(0)
    assert (picture.shape, picture.dtype) == ((64, 64, 3), np.uint8)
    color = lambda column, row, dx=8, dy=8: tuple(picture[16 * row + dy, 16 * column + dx].tolist())  # noqa: E731
    way, place, shelf, requested, goal = color(0, 3), color(2, 2), color(1, 1), color(1, 2), color(1, 3)
    free, loaded, mark = color(0, 0, dy=11), color(3, 1, dx=5), color(0, 0, dy=5)
    assert len({way, place, shelf, requested, goal, free, loaded, mark}) == 8
    assert color(3, 1, dx=11) == mark, "agent 1 looks right"
    assert color(3, 1, dx=2, dy=2) == shelf, "agent 1 stands below its shelf"
    assert color(0, 1) == way


# -------- refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scenario": "rware-tiny-2ag"}, "is named rware-.*; did you mean rware-tiny-2ag-v2"),
        (
            {"scenario": "rware-tinny-2ag-v2"},
            "one of tiny, small, medium, large, got 'tinny'; did you mean rware-tiny-2ag-v2",
        ),
        ({"scenario": "rware-tiny-20ag-v2"}, "num_agents must be between 1 and 19, got 20; did you mean"),
        ({"scenario": "rware-tiny-2ag-easier-v2"}, "difficulty must be .*; did you mean rware-tiny-2ag-easy-v2"),
        ({"scenario": "rware-img-tiny-2ag-v2"}, "unknown scenario"),
        ({"scenario": "rware-tiny-16ag-easy-v2"}, "set request_queue_size below 32"),
        ({"num_envs": 0}, "num_envs must be at least 1"),
        ({"num_threads": 0}, "num_threads"),
        ({"seed": -1}, "seed"),
        ({"sensor_range": 0}, "sensor_range must be at least 1, got 0"),
        ({"msg_bits": -1}, "msg_bits must be at least 0"),
        ({"request_queue_size": -1}, "request_queue_size must be at least 0"),
        ({"request_queue_size": 32}, "more than the 32 shelves"),
        ({"max_inactivity_steps": -1}, "max_inactivity_steps must be at least 0"),
        ({"max_steps": -1}, "max_steps must be at least 0"),
        ({"reward_type": "indivdual"}, "reward_type: 'indivdual' is not one of .*mean 'individual'"),
        ({"observation_type": "images"}, "observation_type: 'images' is not one of .*mean 'image'"),
        ({"image_observation_layers": ["shelfs"]}, "image_observation_layers: 'shelfs' is .*mean 'shelves'"),
        ({"image_observation_layers": []}, "must not be empty"),
        ({"layout": "xx.\n.g"}, "rectangle"),
        ({"layout": "xx.\n..."}, "at least one goal"),
        ({"layout": "xx#\n..g"}, "x .shelf.*got"),
        ({"layout": "xg"}, "2 cells, too few for 3 agents"),
        ({"layout": "xxxxxg", "normalised_coordinates": True}, "two rows"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        make(**arguments)


def test_unknown_options_are_refused():
    with pytest.raises(TypeError, match=r"unknown option 'sensor_rang'.*did you mean 'sensor_range'"):
        make(sensor_rang=2)


def test_nothing_works_before_the_first_reset():
    env = make()
    with pytest.raises(RuntimeError, match="reset"):
        env.step({GROUP: torch.full((4, 3), NONE)})
    with pytest.raises(RuntimeError, match="reset"):
        env.render(0)


@pytest.mark.parametrize("actions", [torch.ones(4, 2, dtype=torch.int64), torch.ones(4, 3), torch.ones(4, 3, 2).long()])
def test_wrong_actions_are_refused(actions):
    env = make()
    env.reset()
    with pytest.raises(ValueError, match="integers of shape"):
        env.step({GROUP: actions})
