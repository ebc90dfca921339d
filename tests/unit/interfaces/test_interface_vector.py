"""Vector environments of interfaces, in one process and in several alike."""

import copy
import multiprocessing
import time
from functools import partial

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from interface_helpers import CONTINUOUS, MULTI, TeamsGame, WitnessGame

from marl_lightning import envs
from marl_lightning.envs.interfaces import (
    AddAgentID,
    Interface,
    LBFInterface,
    NormalizeReward,
    SubprocVectorEnv,
    SyncVectorEnv,
    TimeLimit,
)

N = 4
KINDS = {"sync": SyncVectorEnv, "processes": partial(SubprocVectorEnv, start_method="fork", num_workers=2)}


def fns(num=N, reward_aggr="none", **kwargs):
    return [lambda: Interface(TeamsGame(**kwargs), reward_aggr=reward_aggr) for _ in range(num)]


@pytest.fixture(params=KINDS)
def vector(request):
    """Returns a function that makes vector environments and closes them in the end."""
    made = []

    def make(env_fns=None, **kwargs):
        made.append(KINDS[request.param](fns() if env_fns is None else env_fns, **kwargs))
        return made[-1]

    yield make
    for env in made:
        env.close()


def everything(env):
    return [env.get_env_mask(), env.get_agent_mask(), env.get_avail_actions(), env.get_state()]


def assert_equal(one, two):
    """Arrays, numbers, lists and dictionaries, bit for bit."""
    assert type(one) is type(two)
    if isinstance(one, dict):
        assert one.keys() == two.keys()
        for key in one:
            assert_equal(one[key], two[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(two)
        for a, b in zip(one, two, strict=True):
            assert_equal(a, b)
    elif isinstance(one, np.ndarray):
        assert one.dtype == two.dtype
        np.testing.assert_array_equal(one, two)
    else:
        assert one == two


# Shapes --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reward_aggr", ["sum", "none"])
@pytest.mark.parametrize("auto_reset", [False, True])
def test_shapes(vector, reward_aggr, auto_reset):
    env = vector(fns(reward_aggr=reward_aggr), auto_reset=auto_reset)
    assert (env.n_envs, env.n_agents) == (N, 5)
    assert (env.get_obs_size(), env.get_state_size(), env.get_action_size()) == (6, 3, 4)

    def check(array, shape, dtype):
        assert isinstance(array, np.ndarray)
        assert (array.shape, array.dtype) == (shape, dtype)

    obs, infos = env.reset(seed=0)
    check(obs, (N, 5, 6), np.float32)
    assert infos == [{}] * N
    actions = env.sample()
    check(actions, (N, 5), np.int64)
    obs, rewards, dones, truncated, infos = env.step(actions)
    check(obs, (N, 5, 6), np.float32)
    check(rewards, (N,) if reward_aggr == "sum" else (N, 5), np.float32)
    check(dones, (N,), np.bool_)
    check(truncated, (N,), np.bool_)
    check(env.get_state(), (N, 3), np.float32)
    check(env.get_avail_actions(), (N, 5, 4), np.bool_)
    check(env.get_agent_mask(), (N, 5), np.bool_)
    check(env.get_env_mask(), (N,), np.bool_)
    assert [type(info) for info in infos] == [dict] * N


@pytest.mark.parametrize(("actions", "shape"), [(CONTINUOUS, (N, 5, 3)), (MULTI, (N, 5, 2))])
def test_other_actions(vector, actions, shape):
    env = vector(fns(actions=actions, longest=30))
    env.reset(seed=0)
    assert env.sample().shape == shape
    env.step(env.sample())


@pytest.mark.parametrize("reward_aggr", ["sum", "none"])
def test_returned_arrays_are_copies(vector, reward_aggr):
    env_fns = fns(reward_aggr=reward_aggr)
    env, other = vector(env_fns, auto_reset=True), SyncVectorEnv(env_fns, auto_reset=True)
    env.reset(seed=0)
    other.reset(seed=0)
    for _ in range(10):
        actions = env.sample()
        outcome = [*env.step(actions), *everything(env)]
        known = copy.deepcopy(outcome)
        assert_equal(known, [*other.step(other.sample()), *everything(other)])
        env.step(env.sample())
        other.step(other.sample())
        assert_equal(outcome, known)
        for info in outcome[4]:
            for value in info.values():
                if isinstance(value, np.ndarray):
                    value[:] = 1
            info["luck"] = 3
        for array in (*outcome[:4], *outcome[5:]):
            array[:] = 1
    assert_equal(env.reset(indices=0), other.reset(indices=0))


# Equality ------------------------------------------------------------------------------------------------------------


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 99),
    auto_reset=st.booleans(),
    reward_aggr=st.sampled_from(["sum", "mean", "first", "none"]),
    script=st.lists(st.sampled_from(["step", "step", "step", "part", "all", "seed"]), max_size=25),
)
def test_both_kinds_play_as_single_interfaces_do(seed, auto_reset, reward_aggr, script):
    env_fns = [lambda: AddAgentID(TimeLimit(Interface(TeamsGame(), reward_aggr=reward_aggr), 4)) for _ in range(N)]
    sync, singles = SyncVectorEnv(env_fns, auto_reset=auto_reset), [env_fn() for env_fn in env_fns]
    processes = KINDS["processes"](env_fns, auto_reset=auto_reset)
    frozen = [None] * N
    try:
        for i, single in enumerate(singles):
            single.reset(seed=seed + i)
        assert_equal(sync.reset(seed=seed), processes.reset(seed=seed))
        for command in script:
            running = sync.get_env_mask()
            if command == "step" and running.any():
                actions = sync.sample()
                assert_equal(actions, processes.sample())
                outcome = sync.step(actions)
                assert_equal(outcome, processes.step(actions))
                for i, single in enumerate(singles):
                    row = [outcome[0][i], outcome[1][i], bool(outcome[2][i]), bool(outcome[3][i]), outcome[4][i]]
                    if not running[i]:
                        assert_equal([row[0], *row[2:]], frozen[i])
                        assert not np.any(row[1])
                        assert not actions[i].any()
                        continue
                    obs, reward, terminated, truncated, info = single.step(actions[i])
                    np.testing.assert_array_equal(row[1], np.float32(reward))
                    assert row[2:4] == [terminated, truncated]
                    if (terminated or truncated) and auto_reset:
                        final = {
                            "final_obs": obs,
                            "final_state": single.get_state(),
                            "final_avail_actions": single.get_avail_actions(),
                            "final_agent_mask": single.get_agent_mask(),
                            "final_info": info,
                        }
                        obs, info = single.reset()
                        info = {**info, **final}
                    elif terminated or truncated:
                        frozen[i] = [obs, terminated, truncated, info]
                    assert_equal([row[0], row[4]], [obs, info])
            elif command == "part":
                indices = [0, 3]
                assert_equal(sync.reset(indices=indices), processes.reset(indices=np.array([True, False, False, True])))
                for i in indices:
                    singles[i].reset()
            elif command == "all":
                assert_equal(sync.reset(), processes.reset())
                for single in singles:
                    single.reset()
            elif command == "seed":
                assert_equal(sync.reset(seed=seed + 50), processes.reset(seed=seed + 50))
                for i, single in enumerate(singles):
                    single.reset(seed=seed + 50 + i)
            assert_equal(everything(sync), everything(processes))
            for i, single in enumerate(singles):
                rows = [single.get_agent_mask(), single.get_avail_actions(), single.get_state()]
                assert_equal([array[i] for array in everything(sync)[1:]], rows)
    finally:
        processes.close()


def test_both_kinds_agree_on_wrapped_games_of_a_package():
    def make():
        env = LBFInterface("Foraging-5x5-2p-1f-v3", max_episode_steps=6, reward_aggr="mean")
        return NormalizeReward(AddAgentID(env), gamma=0.9)

    sync, processes = SyncVectorEnv([make] * N, auto_reset=True), SubprocVectorEnv([make] * N, auto_reset=True)
    assert_equal(sync.reset(seed=3), processes.reset(seed=3))
    for _ in range(20):
        actions = sync.sample()
        assert_equal(actions, processes.sample())
        assert_equal(sync.step(actions), processes.step(actions))
    processes.close()


# Seeds ---------------------------------------------------------------------------------------------------------------


def test_instance_i_gets_seed_plus_i_and_without_a_seed_all_are_random(vector):
    env = vector()
    obs, _ = env.reset(seed=7)
    for i, row in enumerate(obs):
        np.testing.assert_array_equal(row, Interface(TeamsGame()).reset(seed=7 + i)[0])
    first = env.sample().tolist()
    env.reset(seed=7)
    assert env.sample().tolist() == first
    starts = {vector().reset()[0].tobytes() for _ in range(3)}
    assert len(starts) == 3


# Order of calls and bad arguments ------------------------------------------------------------------------------------


def test_calls_before_a_reset(vector):
    env = vector()
    for name in ("get_state", "get_avail_actions", "get_agent_mask", "get_env_mask", "sample"):
        with pytest.raises(RuntimeError, match="call reset first"):
            getattr(env, name)()
    with pytest.raises(RuntimeError, match="call reset first"):
        env.step(np.zeros((N, 5), np.int64))
    with pytest.raises(RuntimeError, match="first reset must be without indices"):
        env.reset(indices=[0])
    env.reset()


@pytest.mark.parametrize("shape", [(N - 1, 5), (N + 1, 5), (N, 4), (N,), (N, 5, 1)])
def test_misshapen_actions(vector, shape):
    env = vector()
    env.reset(seed=0)
    with pytest.raises(ValueError, match=rf"actions must have shape \({N}, 5\)"):
        env.step(np.zeros(shape, np.int64))
    env.step(np.zeros((N, 5), np.int64))


@pytest.mark.parametrize(
    ("indices", "error", "message"),
    [
        ([True] * (N - 1), ValueError, r"mask of instances must have shape \(4,\)"),
        (np.ones((N, 1), np.bool_), ValueError, r"mask of instances must have shape \(4,\)"),
        ([1, 2, 1], ValueError, "indices must differ"),
        ([[1, 2]], ValueError, "a number, a list of numbers or a bool mask"),
        ([0.5], ValueError, "a number, a list of numbers or a bool mask"),
        (N, IndexError, r"indices must be in \[0, 4\), got \[4\]"),
        ([0, -1], IndexError, r"got \[-1\]"),
    ],
)
def test_bad_indices(vector, indices, error, message):
    env = vector()
    env.reset(seed=0)
    with pytest.raises(error, match=message):
        env.reset(indices=indices)


def test_a_seed_is_for_all(vector):
    env = vector()
    env.reset(seed=0)
    with pytest.raises(ValueError, match="seed and indices cannot be combined"):
        env.reset(seed=1, indices=[0])


@pytest.mark.parametrize(
    "indices", [2, np.int64(2), [2], np.array([2]), [False, False, True, False], np.arange(N) == 2, []]
)
def test_indices_of_every_kind(vector, indices):
    env = vector(fns(longest=40))
    env.reset(seed=5)
    for _ in range(2):
        obs, *_ = env.step(np.zeros((N, 5), np.int64))
    before = everything(env)
    after, infos = env.reset(indices=indices)
    chosen = [] if isinstance(indices, list) and not indices else [2]
    for array, old in zip(everything(env), before, strict=True):
        np.testing.assert_array_equal(np.delete(array, chosen, axis=0), np.delete(old, chosen, axis=0))
    np.testing.assert_array_equal(np.delete(after, chosen, axis=0), np.delete(obs, chosen, axis=0))
    assert env.get_state()[:, 0].tolist() == [2, 2, 0 if chosen else 2, 2]
    assert [bool(info) for info in infos] == [True, True, not chosen, True]


def test_nothing_is_left_to_step_when_all_have_ended(vector):
    env = vector()
    env.reset(seed=0)
    while env.get_env_mask().any():
        env.step(env.sample())
    for call in (env.sample, lambda: env.step(np.zeros((N, 5), np.int64))):
        with pytest.raises(RuntimeError, match="all instances have ended"):
            call()
    env.reset(indices=1)
    assert env.get_env_mask().tolist() == [False, True, False, False]
    assert not env.sample()[[0, 2, 3]].any()


def test_specs_must_be_equal(vector):
    changes = [
        {"name": "other"},
        {"actions": {"scouts": spaces.Discrete(2), "tanks": spaces.Discrete(5)}},
        {"shared_reward": True},
    ]
    for change in changes:
        with pytest.raises(ValueError, match="all instances need equal specs"):
            vector([*fns(2), *fns(2, **change)])
    with pytest.raises(ValueError, match="all instances need equal specs"):
        vector([*fns(2), *fns(2, reward_aggr="mean")])
    with pytest.raises(ValueError, match="num_envs must be at least 1"):
        vector([])


def test_functions_must_return_interfaces(vector):
    with pytest.raises(TypeError, match="must return an Interface, got TeamsGame"):
        vector([TeamsGame])


@pytest.mark.parametrize("kind", [envs.SyncVectorEnv, partial(envs.SharedMemoryVectorEnv, context="fork")])
def test_several_factories_are_one_for_each_instance(kind, tmp_path):
    def make(i):
        (tmp_path / str(i)).touch()
        return TeamsGame()

    env = kind(factory=[partial(make, i) for i in range(3)], num_envs=3, seed=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2"]
    with pytest.raises(ValueError, match="one for each of the 2 instances, got 3"):
        env.replicate(num_envs=2, seed=0)
    env.close()


# Ends ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("auto_reset", [False, True])
def test_doing_nothing_lasts_until_the_limit_everywhere(vector, auto_reset):
    def make():
        return LBFInterface("Foraging-8x8-2p-2f-coop-v3", max_episode_steps=8)

    env = vector([make] * 3, auto_reset=auto_reset)
    env.reset(seed=0)
    for step in range(1, 9):
        assert env.get_env_mask().all()
        _, _, dones, truncated, infos = env.step(np.zeros((3, 2), np.int64))
        assert not dones.any()
        assert (truncated == (step == 8)).all()
    assert all(("final_obs" in info) == auto_reset for info in infos)
    assert (env.get_env_mask() == auto_reset).all()


# Processes -----------------------------------------------------------------------------------------------------------


def test_closing_twice_leaves_no_process():
    before = set(multiprocessing.active_children())
    env = SubprocVectorEnv(fns(), start_method="fork")
    env.reset(seed=0)
    assert set(multiprocessing.active_children()) - before
    for _ in range(2):
        env.close()
    deadline = time.monotonic() + 5
    while set(multiprocessing.active_children()) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert set(multiprocessing.active_children()) <= before


def test_a_closed_environment_says_so(vector):
    env = vector()
    env.reset(seed=0)
    env.close()
    env.close()
    for call in (env.reset, env.sample, env.get_state, lambda: env.step(np.zeros((N, 5), np.int64))):
        with pytest.raises(RuntimeError, match="closed"):
            call()


def test_workers_import_nothing_heavy():
    env = SubprocVectorEnv([lambda: AddAgentID(NormalizeReward(Interface(WitnessGame())))] * 2, num_workers=1)
    assert env.spec.name == "heavy=[]"
    env.close()


def test_unknown_start_methods_are_refused():
    with pytest.raises(ValueError, match="thread"):
        SubprocVectorEnv(fns(), start_method="thread")


def test_samples_are_legal_and_ask_no_process():
    env = KINDS["processes"](fns(longest=30))
    env.reset(seed=0)
    legal = env.get_avail_actions()
    for worker in env.unwrapped._workers:
        worker.process.kill()
        worker.process.join()
    seen = np.zeros_like(legal)
    for _ in range(60):
        np.put_along_axis(seen, env.sample()[..., None], True, axis=-1)
    np.testing.assert_array_equal(seen, legal)
    env.close()


def test_pictures(vector):
    env = vector()
    env.reset(seed=0)
    assert env.render(1).shape == (2, 2, 3)
