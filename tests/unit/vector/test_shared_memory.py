"""SharedMemoryVectorEnv does what SyncVectorEnv does."""

import gc
import os
import subprocess
import sys
import weakref
from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vector_games import DiceGame, OtherSpecGame, WitnessGame
from vector_helpers import children, shared_blocks, wait_until_ended, worker_pids

from marl_lightning.envs import EnvSpec, PettingZooAdapter, SyncVectorEnv
from marl_lightning.envs.base import Observations
from marl_lightning.envs.vector.layout import Block, Carver
from marl_lightning.envs.vector.shared_memory import SharedMemoryVectorEnv


def fork_env(factory=DiceGame, *, num_envs=4, seed=3, num_workers=2, **kwargs):
    return SharedMemoryVectorEnv(
        factory=factory, num_envs=num_envs, seed=seed, num_workers=num_workers, context="fork", **kwargs
    )


def leaves(value, path=""):
    """Yields name and tensor of all tensors in observations or a step."""
    for field in fields(value):
        inner, name = getattr(value, field.name), f"{path}.{field.name}"
        if isinstance(inner, Observations):
            yield from leaves(inner, name)
        elif isinstance(inner, dict):
            yield from ((f"{name}.{key}", tensor) for key, tensor in inner.items())
        else:
            yield name, inner


def assert_equal(got, expected):
    """Compares all that is specified: rows of ``final`` only where an episode ended."""
    for (name, tensor), (_, other) in zip(leaves(got), leaves(expected), strict=True):
        assert tensor.dtype == other.dtype, name
        if name.startswith(".final"):
            ended = expected.terminated | expected.truncated
            tensor, other = tensor[ended], other[ended]
        assert torch.equal(tensor, other), name


def random_actions(spec: EnvSpec, num_envs: int, rng: np.random.Generator):
    return {
        name: torch.from_numpy(rng.integers(0, group.action_size, (num_envs, group.num_agents)))
        if group.is_discrete
        else torch.from_numpy(rng.uniform(-1, 1, (num_envs, group.num_agents, group.action_size)).astype(np.float32))
        for name, group in spec.groups.items()
    }


def play(env, sync, *, vector_steps, seed=0, partial=True):
    """Drives both with the same random actions and partial resets; returns how many episodes ended of each kind."""
    rng, ends = np.random.default_rng(seed), np.zeros(3, int)
    assert_equal(env.reset(), sync.reset())
    for _ in range(vector_steps):
        actions = random_actions(env.spec, env.num_envs, rng)
        got, expected = env.step(actions), sync.step(actions)
        assert_equal(got, expected)
        ends += [int(flags.sum()) for flags in (got.terminated, got.truncated, ~got.observations.alive[_first(env)])]
        if partial and rng.random() < 0.3:
            mask = rng.random(env.num_envs) < 0.5
            assert_equal(env.reset(mask=mask), sync.reset(mask=mask))
    return ends


def _first(env):
    return next(iter(env.spec.groups))


@settings(max_examples=15, deadline=None)
@given(
    num_envs=st.integers(1, 7),
    num_workers=st.integers(1, 3),
    seed=st.integers(0, 2**40),
    script=st.lists(st.sampled_from(["step", "step", "async", "mask", "reset", "reseed"]), min_size=3, max_size=25),
)
def test_equal_to_sync_whatever_is_called(num_envs, num_workers, seed, script):
    rng = np.random.default_rng(seed)
    sync = SyncVectorEnv(factory=DiceGame, num_envs=num_envs, seed=seed)
    with fork_env(num_envs=num_envs, num_workers=num_workers, seed=seed) as env:
        assert env.spec == sync.spec
        assert_equal(env.reset(), sync.reset())
        for call in script:
            if call in ("step", "async"):
                actions = random_actions(env.spec, num_envs, rng)
                expected = sync.step(actions)
                if call == "async":
                    env.step_async(actions)
                    for tensor in actions.values():
                        tensor.zero_()
                    assert_equal(env.step_wait(), expected)
                else:
                    assert_equal(env.step(actions), expected)
            elif call == "mask":
                mask = rng.random(num_envs) < 0.5
                assert_equal(env.reset(mask=mask), sync.reset(mask=mask))
            else:
                new_seed = int(rng.integers(1000)) if call == "reseed" else None
                assert_equal(env.reset(seed=new_seed), sync.reset(seed=new_seed))
                assert env.seed == sync.seed


@pytest.mark.parametrize("context", ["spawn", "fork", "forkserver"])
def test_equal_to_sync_in_every_context_with_a_lambda(context):
    name = f"dice in {context}"
    with SharedMemoryVectorEnv(
        factory=lambda: DiceGame(name=name), num_envs=5, seed=9, num_workers=2, context=context
    ) as env:
        sync = SyncVectorEnv(factory=lambda: DiceGame(name=name), num_envs=5, seed=9)
        terminated, truncated, deaths = play(env, sync, vector_steps=60)
        assert env.spec.name == name
    assert min(terminated, truncated, deaths) > 5


def test_equal_to_sync_on_simple_spread():
    pytest.importorskip("mpe2")
    from mpe2 import simple_spread_v3

    def factory():
        return PettingZooAdapter(factory=simple_spread_v3.parallel_env, name="spread")

    sync = SyncVectorEnv(factory=factory, num_envs=3, seed=1)
    with SharedMemoryVectorEnv(factory=factory, num_envs=3, seed=1, num_workers=2) as env:
        _, truncated, _ = play(env, sync, vector_steps=60, partial=False)
    assert truncated == 6


def test_ended_instances_show_their_true_successor_and_then_a_new_episode():
    with fork_env() as env:
        state = env.reset().state
        assert state[:, 2].tolist() == [3, 4, 5, 6]  # the seeds
        ended = 0
        for _ in range(12):
            lengths = state[:, 1].tolist()
            step = env.step(random_actions(env.spec, 4, np.random.default_rng(0)))
            for row in torch.nonzero(step.terminated | step.truncated).ravel().tolist():
                assert step.final.state[row, :2].tolist() == [lengths[row]] * 2
                assert step.info["time"][row] == lengths[row]
                assert state[row, 0] == 0
                ended += 1
        assert ended > 8


def test_dtypes_and_memory():
    with fork_env() as env:
        observations = env.reset()
        assert observations.observation["team"].dtype == torch.uint8
        assert observations.observation["team"].shape == (4, 2, 3, 5)
        assert observations.observation["lone"].dtype == torch.float64
        step = env.step(random_actions(env.spec, 4, np.random.default_rng(0)))
        pointers = [tensor.data_ptr() for _, tensor in leaves(step)]
        assert step.observations is observations
        assert env.step(random_actions(env.spec, 4, np.random.default_rng(1))) is step
        assert [tensor.data_ptr() for _, tensor in leaves(step)] == pointers
        assert all(pointer % 64 == 0 for pointer in pointers)
        assert len(set(pointers)) == len(pointers)


def test_arrays_of_a_block_do_not_overlap():
    arguments = {"spec": DiceGame().spec, "num_envs": 3, "num_workers": 2}
    counter = Carver()
    Block.build(**arguments, make=counter)
    arrays = []
    carver = Carver(bytearray(counter.size))

    def make(shape, dtype):
        arrays.append(carver(shape, dtype))
        return arrays[-1]

    Block.build(**arguments, make=make)
    assert carver.size == counter.size
    for number, array in enumerate(arrays):
        array.view(np.uint8)[...] = number
    assert all((array.view(np.uint8) == number).all() for number, array in enumerate(arrays))


def test_wide_actions_are_cast_and_bad_ones_refused_without_harm():
    sync = SyncVectorEnv(factory=DiceGame, num_envs=4, seed=3)
    with fork_env() as env:
        env.reset()
        sync.reset()
        actions = random_actions(env.spec, 4, np.random.default_rng(0))
        for change in ({"team": actions["team"][:2]}, {"team": actions["team"].float()}, {"other": actions["team"]}):
            with pytest.raises(ValueError, match="actions"):
                env.step({**actions, **change})
        narrow = {"team": actions["team"].int(), "lone": actions["lone"].double()}
        assert_equal(env.step(narrow), sync.step(actions))


def test_workers_share_the_instances_evenly():
    with fork_env(num_envs=7, num_workers=3) as env:
        assert [list(worker.indices) for worker in env._workers] == [[0, 1], [2, 3], [4, 5, 6]]
    with fork_env(num_envs=2, num_workers=5) as env:
        assert len(env._workers) == 2


def test_default_is_a_worker_for_every_usable_core(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3, 5})
    with SharedMemoryVectorEnv(factory=DiceGame, num_envs=4, seed=0, context="fork") as env:
        assert len(env._workers) == 3


def test_partial_reset_asks_only_the_workers_concerned():
    with fork_env() as env:
        env.reset()
        sent = []
        send = env._send
        env._send = lambda worker, *message: (sent.append(worker.number), send(worker, *message))
        env.reset(mask=np.array([False, False, False, True]))
        env.reset(mask=np.zeros(4, np.bool_))
        assert sent == [1]


@pytest.mark.parametrize(
    ("change", "message"),
    [({"num_envs": 0}, "num_envs"), ({"num_workers": 0}, "num_workers"), ({"timeout": 0}, "timeout")],
)
def test_bad_arguments(change, message):
    with pytest.raises(ValueError, match=message):
        fork_env(**change)


def test_order_of_calls_is_checked():
    with fork_env() as env:
        actions = random_actions(env.spec, 4, np.random.default_rng(0))
        with pytest.raises(RuntimeError, match="reset before step"):
            env.step(actions)
        with pytest.raises(RuntimeError, match="without a mask"):
            env.reset(mask=np.ones(4, np.bool_))
        env.reset()
        with pytest.raises(RuntimeError, match="call step_async first"):
            env.step_wait()
        env.step_async(actions)
        with pytest.raises(RuntimeError, match="begun already"):
            env.step(actions)
        env.step_wait()
        with pytest.raises(ValueError, match="mask must be"):
            env.reset(mask=np.ones(3, np.bool_))


def test_reset_finishes_a_step_that_was_begun():
    sync = SyncVectorEnv(factory=DiceGame, num_envs=4, seed=3)
    actions = random_actions(sync.spec, 4, np.random.default_rng(0))
    sync.reset()
    sync.step(actions)
    with fork_env() as env:
        env.reset()
        env.step_async(actions)
        assert_equal(env.reset(), sync.reset())
        assert_equal(env.step(actions), sync.step(actions))


def test_different_specs_are_refused(nothing_left):
    with pytest.raises(ValueError, match="equal specs, but 2 has"):
        fork_env(OtherSpecGame)


def test_saved_states_are_exact_and_those_of_sync(tmp_path):
    rng = np.random.default_rng(5)
    sync = SyncVectorEnv(factory=DiceGame, num_envs=4, seed=3)
    with fork_env() as env, fork_env(seed=70, num_workers=3) as other:
        play(env, sync, vector_steps=7)
        torch.save(env.state_dict(), tmp_path / "env.pt")
        state = torch.load(tmp_path / "env.pt", weights_only=True)
        assert state["envs"] == sync.state_dict()["envs"]
        assert_equal(other.load_state_dict(state), env.reset(mask=np.zeros(4, np.bool_)))
        restored = SyncVectorEnv(factory=DiceGame, num_envs=4, seed=0)
        restored.load_state_dict(state)
        for _ in range(9):
            actions = random_actions(env.spec, 4, rng)
            expected = env.step(actions)
            assert_equal(other.step(actions), expected)
            assert_equal(restored.step(actions), expected)
        assert other.seed == 3
        with pytest.raises(ValueError, match="holds 3 instances, this environment 4"):
            env.load_state_dict({**state, "envs": state["envs"][:3]})


def test_render_by_index():
    with fork_env() as env:
        env.reset()
        assert [int(env.render(index).min()) for index in range(4)] == [3, 4, 5, 6]
        with pytest.raises(IndexError, match=r"\[0, 4\), got 4"):
            env.render(4)


def test_replicate_keeps_the_settings():
    with fork_env(timeout=17.0) as env:
        env.recipe = {"name": "dice", "kwargs": {}}
        env.reset()
        with env.replicate(num_envs=3, seed=50) as other:
            assert other.recipe == env.recipe
            assert (other._timeout, len(other._workers)) == (17.0, 2)
            assert_equal(other.reset(), SyncVectorEnv(factory=DiceGame, num_envs=3, seed=50).reset())


def test_workers_are_light_and_this_process_unchanged():
    environment = dict(os.environ)
    main = sys.modules["__main__"]
    with SharedMemoryVectorEnv(factory=WitnessGame, num_envs=2, seed=0, num_workers=1, context="spawn") as env:
        assert env.spec.name == "heavy=[] threads=['1', '1', '1'] main=False"
    assert dict(os.environ) == environment
    assert sys.modules["__main__"] is main


def test_importing_the_worker_imports_nothing_heavy():
    code = (
        "import sys, marl_lightning.envs.vector.worker; "
        "print([name for name in ('torch', 'lightning', 'numba', 'tensordict') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_close_leaves_nothing_and_may_be_repeated(nothing_left):
    blocks = shared_blocks()
    env = fork_env()
    pids = worker_pids(env)
    state = env.reset().state
    before = state.clone()
    assert (len(children() & set(pids)), shared_blocks()) == (2, blocks + 1)
    env.close()
    env.close()
    assert wait_until_ended(pids, 0) == []
    assert torch.equal(state, before)  # memory that somebody holds stays valid
    for call in (env.reset, env.state_dict, env.step_wait, lambda: env.render(0)):
        with pytest.raises(RuntimeError, match="closed"):
            call()


def test_a_forgotten_environment_closes_itself(nothing_left):
    env = fork_env()
    env.reset()
    pids, reference = worker_pids(env), weakref.ref(env)
    del env
    gc.collect()
    assert reference() is None
    assert wait_until_ended(pids, 0) == []


def test_close_with_a_step_under_way(nothing_left):
    env = fork_env()
    env.reset()
    env.step_async(random_actions(env.spec, 4, np.random.default_rng(0)))
    env.close()
