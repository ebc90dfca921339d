"""Running moments against one pass over all samples, and their merge over processes."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from wrapper_helpers import RandomGame, play_normalised

from marl_lightning.envs import SyncVectorEnv
from marl_lightning.envs.wrappers import (
    AddAgentID,
    RunningStatistics,
    merge_statistics,
    running_statistics,
)


def expected_moments(samples):
    """The initial count of 1e-4 is a sample of that weight, with mean 0 and variance 1."""
    count = len(samples) + 1e-4
    mean = samples.sum(0) / count
    return count, mean, (1e-4 * (1 + mean**2) + ((samples - mean) ** 2).sum(0)) / count


def assert_moments(statistics, samples):
    count, mean, variance = expected_moments(samples)
    assert statistics.count == pytest.approx(count, rel=1e-12)
    np.testing.assert_allclose(statistics.mean, mean, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(statistics.variance, variance, rtol=1e-9, atol=1e-12)


def test_start():
    statistics = RunningStatistics((2, 3))
    assert statistics.count == 1e-4
    assert (statistics.mean == np.zeros((2, 3))).all()
    assert (statistics.variance == np.ones((2, 3))).all()
    assert RunningStatistics().mean.shape == ()


@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 10**6),
    sizes=st.lists(st.integers(0, 7), min_size=1, max_size=8),
    shape=st.sampled_from([(), (3,), (2, 2)]),
    dtype=st.sampled_from([np.float32, np.float64, np.uint8]),
)
def test_batches_equal_one_pass(seed, sizes, shape, dtype):
    rng = np.random.default_rng(seed)
    statistics, counted_samples = RunningStatistics(shape), [np.zeros((0, *shape))]
    for size in sizes:
        samples = rng.normal(100, 3, (size, 2, *shape)).astype(dtype)
        counted = rng.random((size, 2)) < 0.6
        statistics.update(samples, counted)
        counted_samples.append(samples[counted].astype(np.float64))
    assert_moments(statistics, np.concatenate(counted_samples))


def test_small_differences_between_large_numbers_survive():
    samples = 1e6 + np.random.default_rng(0).normal(0, 1e-2, (1000, 1))
    one = RunningStatistics((1,))
    one.merge([])  # from here on, what came in is kept apart
    for batch in np.split(samples, 50):
        one.update(batch)
    count, mean, squares = one.pack()
    assert (count, mean) == (1000, pytest.approx(samples.mean(), rel=1e-15))
    assert squares / count == pytest.approx(samples.var(), rel=1e-4)  # the naive difference of squares would be noise


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10**6), merges=st.integers(1, 4), processes=st.integers(1, 3))
def test_merges_count_every_sample_once(seed, merges, processes):
    rng = np.random.default_rng(seed)
    everyone, samples = [RunningStatistics((2,)) for _ in range(processes)], [np.zeros((0, 2))]
    for _ in range(merges):
        for statistics in everyone:
            for _ in range(rng.integers(0, 3)):
                batch = rng.normal(5, 2, (rng.integers(1, 4), 2))
                statistics.update(batch)
                samples.append(batch)
        packed = [statistics.pack() for statistics in everyone]
        for statistics in everyone:
            statistics.merge(packed)
    for statistics in everyone:
        assert_moments(statistics, np.concatenate(samples))
        for name, array in statistics.arrays().items():
            np.testing.assert_array_equal(array, everyone[0].arrays()[name])


def test_without_statistics_there_is_no_collective():
    env = AddAgentID(SyncVectorEnv(factory=RandomGame, num_envs=1, seed=0))
    merge_statistics(env, all_gather=None)


TWO_PROCESSES = """
import sys
sys.path[:0] = {path!r}
import torch
import torch.distributed as dist
from marl_lightning.envs.wrappers import merge_statistics, statistics_state_dict
from wrapper_helpers import play_normalised

rank = int(sys.argv[1])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://" + sys.argv[2] + "/meet", rank=rank, world_size=2)

def all_gather(tensor):
    everyone = [torch.empty_like(tensor) for _ in range(2)]
    dist.all_gather(everyone, tensor)
    return torch.stack(everyone)

env = play_normalised(rank, lambda env: merge_statistics(env, all_gather))
torch.save(statistics_state_dict(env), sys.argv[2] + f"/rank{{rank}}.pt")
"""


def test_two_processes_have_the_statistics_of_all_their_samples(tmp_path):
    script = tmp_path / "two.py"
    script.write_text(TWO_PROCESSES.format(path=sys.path))
    processes = [
        subprocess.Popen([sys.executable, str(script), str(rank), str(tmp_path)], stderr=subprocess.PIPE)
        for rank in (0, 1)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors.decode()
    first, second = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in (0, 1)]
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)

    # What is seen and earned does not depend on the statistics, so that each process can be repeated alone.
    alone = [running_statistics(play_normalised(rank, lambda env: None)) for rank in (0, 1)]
    for key, one in alone[0].items():
        two = alone[1][key]
        total = RunningStatistics(one.shape)
        total.merge([one.pack(), two.pack()])
        count, mean, squares = (first[f"{key}.{moment}"][0].numpy() for moment in ("count", "mean", "squares"))
        assert count.item() == pytest.approx(one.count + two.count - 1e-4)
        np.testing.assert_allclose(mean.reshape(one.shape), total.mean, rtol=1e-10)
        np.testing.assert_allclose((squares / count).reshape(one.shape), total.variance, rtol=1e-10)
