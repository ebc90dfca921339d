"""The vector environment: seeds, resets, saving, threads, pictures and refusals."""

import copy
import logging
import os
import pickle
import signal
import time
import tracemalloc

import numpy as np
import pytest
import torch
from smac_helpers import Battle, make_random_policy

from marl_lightning.envs.native.smac import SmacVectorEnv, kernel
from marl_lightning.envs.native.smac.env import GROUP, INFO_KEYS
from marl_lightning.envs.native.smac.kernel import FIRST_ATTACK, NO_OP, STOP


def snapshot(observations):
    """Returns copies of all arrays of a decision point."""
    return [
        observations.observation[GROUP].clone(),
        observations.action_mask[GROUP].clone(),
        observations.alive[GROUP].clone(),
        observations.state.clone(),
    ]


def random_actions(policy, env, observations):
    mask = observations.action_mask[GROUP].numpy()
    return torch.from_numpy(policy(observations.observation[GROUP].numpy(), mask, env.layout))


def run(env, observations, *, steps, policy):
    """Returns copies of what random steps show."""
    frames = []
    for _ in range(steps):
        step = env.step({GROUP: random_actions(policy, env, observations)})
        observations = step.observations
        frames.append(
            [*snapshot(observations), step.reward[GROUP].clone(), step.terminated.clone(), step.truncated.clone()]
        )
    return frames


def assert_equal(first, second):
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def make(**arguments):
    return SmacVectorEnv(**{"map_name": "3m", "num_envs": 4, "spawn_noise": 1.0, **arguments})


def test_spec():
    env = make(map_name="2s3z", physics="smaclite")
    assert env.spec.name == "smac/2s3z"
    assert env.spec.agents == tuple(f"agent_{i}" for i in range(5))
    assert env.spec.episode_limit == 120
    assert env.spec.info_keys == INFO_KEYS
    assert env.spec.can_checkpoint
    assert env.spec.metadata["physics"] == "smaclite"
    assert "not StarCraft II" in env.spec.metadata["note"]


def test_construction_says_what_is_simulated(caplog):
    with caplog.at_level(logging.INFO, logger="marl_lightning.envs.native.smac.env"):
        env = make()
    assert env.description in caplog.text
    assert "physics=sc2" in env.description
    assert "not StarCraft II" in env.description


# -------- seeds and resets


def test_instance_i_with_seed_s_is_instance_0_with_seed_s_plus_i():
    env = make(seed=10)
    policy, observations = make_random_policy(), env.reset()
    single = make(seed=12, num_envs=1)
    single_observations = single.reset()
    for _ in range(150):
        assert_equal([array[2] for array in snapshot(observations)], [a[0] for a in snapshot(single_observations)])
        actions = random_actions(policy, env, observations)
        step, single_step = env.step({GROUP: actions}), single.step({GROUP: actions[2:3]})
        assert_equal(step.reward[GROUP][2], single_step.reward[GROUP][0])
        observations, single_observations = step.observations, single_step.observations
    assert single._state.episode[0] > 1, "the comparison should include automatic resets"


def test_reset_with_a_seed_equals_a_new_environment():
    env = make(seed=1)
    run(env, env.reset(), steps=40, policy=make_random_policy())
    first = run(env, env.reset(seed=5), steps=60, policy=make_random_policy(1))
    other = make(seed=5)
    second = run(other, other.reset(), steps=60, policy=make_random_policy(1))
    assert env.seed == 5
    assert_equal(first, second)


def test_reset_without_a_seed_continues_the_stream_of_episodes():
    env = make()
    first = snapshot(env.reset())
    second = snapshot(env.reset())
    assert not torch.equal(first[3], second[3])
    assert_equal(first, snapshot(env.reset(seed=0)))


def test_instances_differ():
    states = make().reset().state
    assert len({tuple(row.tolist()) for row in states}) == 4


def test_partial_reset_touches_only_the_masked_rows():
    env = make()
    run(env, env.reset(), steps=10, policy=make_random_policy())
    observations = env._step.observations
    before, fields = snapshot(observations), copy.deepcopy(env.state_dict()["fields"])
    mask = np.array([False, True, False, True])
    assert env.reset(mask=mask) is observations
    for old, new in zip(before, snapshot(observations), strict=True):
        assert_equal(old[~mask], new[~mask])
    for name, value in env.state_dict()["fields"].items():
        assert_equal(value[~mask], fields[name][~mask])
    assert env._state.time.tolist() == [10, 0, 10, 0]
    assert env._state.episode.tolist() == [0, 1, 0, 1]
    assert not torch.equal(before[3][1], observations.state[1])


def test_partial_reset_advances_only_the_stream_of_its_instance():
    env, other = make(), make()
    env.reset()
    env.reset(mask=np.array([True, False, False, False]))
    observations = env.reset()
    other.reset()
    expected = snapshot(other.reset())
    assert_equal(observations.state[1:], expected[3][1:])
    assert not torch.equal(observations.state[0], expected[3][0])


def test_automatic_reset_keeps_the_true_successor():
    battle = Battle("3m").only(0, 3).put(0, x=12, y=16, health=20).put(3, x=15, y=16, health=6)
    step = battle.step(FIRST_ATTACK)
    assert step.terminated[0]
    final, now = step.final, step.observations
    # The last picture: one agent left, hit once, and no enemy.
    assert final.alive[GROUP][0].tolist() == [True, False, False]
    assert final.state[0, 0] == pytest.approx(14 / 45)
    assert not final.state[0, 12:21].any()
    assert final.action_mask[GROUP][0, 1].nonzero().flatten().tolist() == [NO_OP]
    assert final.state[0, 21 + FIRST_ATTACK] == 1
    # The next decision point: a new battle.
    assert now.alive[GROUP].all()
    assert now.state[0, 0] == 1
    assert not now.state[0, 21:].any()
    assert (battle.state.shot == -1).all(), "pictures of the new battle must not show old shots"


def test_results_are_written_into_the_same_memory():
    env = make()
    observations = env.reset()
    step = env.step({GROUP: torch.full((4, 3), STOP)})
    assert step.observations is observations
    assert env.step({GROUP: torch.full((4, 3), STOP)}) is step


def test_step_allocates_no_arrays():
    env = make(map_name="27m_vs_30m", num_envs=16)
    observations = env.reset()
    actions = {GROUP: random_actions(make_random_policy(), env, observations)}
    env.step(actions)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    env.step(actions)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # The observations alone have 16 * 27 * 285 entries; a few small Python objects are created on the way.
    assert peak - before < 20_000


def test_replicate_is_independent_and_of_the_same_game():
    env = make(physics="smaclite", obs_last_action=True)
    env.reset()
    before = env.state_dict()["fields"]
    replica = env.replicate(num_envs=2, seed=9)
    assert (replica.num_envs, replica.seed, replica.spec) == (2, 9, env.spec)
    run(replica, replica.reset(), steps=3, policy=make_random_policy())
    assert_equal(env.state_dict()["fields"], before)


# -------- saving


def test_saved_state_continues_bit_for_bit():
    env = make(map_name="2s3z")
    run(env, env.reset(), steps=55, policy=make_random_policy())
    saved = copy.deepcopy(env.state_dict())
    policy = make_random_policy(2)
    expected = run(env, env._step.observations, steps=80, policy=policy)
    other = make(map_name="2s3z", seed=77)
    observations = other.load_state_dict(saved)
    assert_equal(run(other, observations, steps=80, policy=make_random_policy(2)), expected)
    assert other.seed == env.seed
    assert any(frame[5].any() for frame in expected), "the comparison should include ends of episodes"


def test_saved_state_is_safe_to_load(tmp_path):
    env = make()
    env.reset()
    torch.save(env.state_dict(), tmp_path / "state.pt")
    make().load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))


def test_saved_state_is_a_copy():
    env = make()
    env.reset()
    saved = env.state_dict()
    run(env, env.reset(), steps=2, policy=make_random_policy())
    assert saved["fields"]["time"].tolist() == [0] * 4


def test_state_of_another_game_is_refused():
    env = make()
    env.reset()
    for other in (make(map_name="8m"), make(num_envs=2), make(physics="smaclite")):
        with pytest.raises(ValueError, match="does not fit"):
            other.load_state_dict(env.state_dict())


# -------- threads


def test_results_do_not_depend_on_the_number_of_threads():
    frames = []
    for num_threads in (1, 2, 3):
        env = make(num_envs=7, num_threads=num_threads)
        frames.append(run(env, env.reset(), steps=80, policy=make_random_policy()))
        env.close()
        env.close()
    assert_equal(frames[0], frames[1])
    assert_equal(frames[0], frames[2])


def test_default_number_of_threads_grows_with_the_instances():
    assert make(num_envs=2, num_threads=5).num_threads == 2
    assert make(num_envs=1).num_threads == 1
    assert make(num_envs=1024).num_threads == min(16, torch.get_num_threads())


def test_stepping_goes_on_after_close_and_in_a_forked_process():
    env = make(num_envs=4, num_threads=2)
    env.reset(seed=0)
    actions = {GROUP: torch.full((4, env.layout.num_agents), kernel.STOP)}
    env.step(actions)
    child = os.fork()
    if child == 0:
        env.step(actions)
        os._exit(7)
    for _ in range(200):
        process, status = os.waitpid(child, os.WNOHANG)
        if process:
            break
        time.sleep(0.05)
    else:
        os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(status) == 7
    env.close()
    env.step(actions)


def test_copies_are_refused_because_they_would_stand_still():
    for copy_of in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="replicate"):
            copy_of(make())


def test_kernels_are_compiled_where_nothing_can_be_cached(monkeypatch, caplog):
    def without_cache(**options):
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return lambda function: function

    monkeypatch.setattr(kernel, "njit", without_cache)
    assert kernel._driver(abs) is abs
    assert "NUMBA_CACHE_DIR" in caplog.text


# -------- pictures


def test_picture():
    battle = Battle("2s3z", ticks=1).only(0, 5).put(0, x=10, y=12).put(5, x=14, y=12).pacify()
    battle.step(FIRST_ATTACK)
    start = time.perf_counter()
    picture = battle.env.render(0)
    assert time.perf_counter() - start < 0.5
    assert picture.shape == (512, 512, 3)
    assert picture.dtype == np.uint8
    at = lambda x, y: picture[511 - int(y * 16), int(x * 16)].astype(int)  # noqa: E731
    assert at(10, 12)[2] > at(10, 12)[0], "agents are blue"
    assert at(14, 12)[0] > at(14, 12)[2], "enemies are red"
    assert at(10, 4).sum() < at(10, 20).sum(), "blocked cells are dark"
    assert at(12, 12).sum() > at(12, 11.5).sum(), "a line shows the shot"
    assert at(10, 12.62)[1] > at(10, 12.3)[1], "a ring shows the shield"
    assert at(10, 12.88)[0] > 200, "a bar shows the cooldown"
    bright = at(10, 12)[2]
    battle.put(0, health=8)
    assert battle.env.render(0)[511 - 192, 160][2] < bright, "wounded units are darker"


def test_picture_with_units_at_the_border():
    battle = Battle("3s_vs_3z").put(0, x=0.01, y=0.01).put(1, x=31.99, y=31.99)
    assert battle.env.render(0).shape == (512, 512, 3)


# -------- refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"map_name": "3mm"}, "unknown map '3mm'; did you mean '3m'"),
        ({"physics": "smac_lite"}, "did you mean 'smaclite'"),
        ({"collision": "slides"}, "did you mean 'slide'"),
        ({"reward_mode": "sign"}, "did you mean 'signed'"),
        ({"invalid_action": "mask_out"}, "did you mean 'mask'"),
        ({"backend": "embeded"}, "did you mean 'embedded'"),
        ({"num_envs": 0}, "num_envs must be at least 1"),
        ({"num_threads": 0}, "num_threads"),
        ({"seed": -1}, "seed"),
        ({"spawn_noise": -0.1}, "spawn_noise"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        make(**arguments)


def test_unknown_options_are_refused():
    with pytest.raises(TypeError, match="obs_everything"):
        make(obs_everything=True)


@pytest.mark.parametrize(("backend", "package"), [("starcraft2", "'smac'.*StarCraft II"), ("smaclite", "'smaclite'")])
def test_other_backends_name_what_they_need(backend, package, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=f"{package}.*embedded"):
        make(backend=backend)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    with pytest.raises(ValueError, match="embedded"):
        make(backend=backend)


def test_nothing_works_before_the_first_reset():
    env = make()
    with pytest.raises(RuntimeError, match="reset"):
        env.step({GROUP: torch.full((4, 3), STOP)})
    with pytest.raises(RuntimeError, match="reset"):
        env.render(0)
    with pytest.raises(RuntimeError, match="all instances"):
        env.reset(mask=np.array([True, False, False, False]))


@pytest.mark.parametrize("mask", [np.ones(3, bool), np.ones(4), [True] * 4, np.ones((4, 1), bool)])
def test_wrong_masks_are_refused(mask):
    env = make()
    env.reset()
    with pytest.raises(ValueError, match="mask"):
        env.reset(mask=mask)


def test_seed_with_mask_is_refused():
    with pytest.raises(ValueError, match="mask"):
        make().reset(seed=1, mask=np.ones(4, bool))


@pytest.mark.parametrize("actions", [torch.ones(4, 2, dtype=torch.int64), torch.ones(4, 3)])
def test_wrong_actions_are_refused(actions):
    env = make()
    env.reset()
    with pytest.raises(ValueError, match="integers of shape"):
        env.step({GROUP: actions})


@pytest.mark.parametrize("actions", [[-1, 99, 0], [2**40, FIRST_ATTACK, -(2**40)]])
def test_illegal_actions_become_stop_and_are_counted(actions):
    battle = Battle("3m")
    step = battle.step(*actions)
    assert step.info["invalid_actions"][0] == 3
    assert battle.state.last_action[0].tolist() == [STOP] * 3
    assert battle.step(STOP, STOP, STOP).info["invalid_actions"][0] == 0


def test_illegal_actions_can_be_refused_before_anything_changes():
    env = make(invalid_action="error")
    env.reset()
    before = env.state_dict()["fields"]
    for action in (NO_OP, FIRST_ATTACK, 99, -1):
        actions = torch.full((4, 3), STOP)
        actions[2, 1] = action
        with pytest.raises(ValueError, match=f"action {action} of agent_1 in instance 2 is not legal"):
            env.step({GROUP: actions})
        assert_equal(env.state_dict()["fields"], before)


def test_actions_of_dead_agents_are_ignored_even_if_illegal_actions_are_refused():
    battle = Battle("3m", invalid_action="error").put(1, health=0)
    battle.observe()
    step = battle.step(STOP, FIRST_ATTACK, STOP)
    assert step.info["invalid_actions"][0] == 0
    assert battle.state.last_action[0].tolist() == [STOP, NO_OP, STOP]


def test_actions_may_have_any_integer_type_and_memory_layout():
    env = make()
    env.reset()
    env.step({GROUP: torch.full((3, 4), STOP, dtype=torch.int32).T})
    assert (env._actions == STOP).all()
