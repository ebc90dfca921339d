"""Generalised advantage estimation by hand, against TorchRL, and against its definition as a sum."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from marl_lightning.losses.returns import generalized_advantage_estimate


def estimate(terminated, truncated, *, next_value=None, gamma=0.5, gae_lambda=0.5):
    """Three steps with rewards 1, 2, 4 and values 8, 16, 32; the value after the last step is 64."""
    value = torch.tensor([8.0, 16.0, 32.0])
    terminated, truncated = torch.tensor(terminated), torch.tensor(truncated)
    return generalized_advantage_estimate(
        reward=torch.tensor([1.0, 2.0, 4.0]),
        value=value,
        next_value=torch.tensor(next_value or [16.0, 32.0, 64.0]),
        terminated=terminated,
        done=terminated | truncated,
        gamma=gamma,
        gae_lambda=gae_lambda,
    ).tolist()


def test_path_cut_by_the_end_of_the_rollout():
    # delta = 1 + 8 - 8, 2 + 16 - 16, 4 + 32 - 32 = 1, 2, 4;  A2 = 4, A1 = 2 + 4/4, A0 = 1 + 3/4
    assert estimate([False] * 3, [False] * 3) == [1.75, 3.0, 4.0]


def test_terminated_path_has_no_bootstrap():
    # delta2 = 4 - 32 = -28;  A1 = 2 - 28/4 = -5, A0 = 1 - 5/4
    assert estimate([False, False, True], [False] * 3) == [-0.25, -5.0, -28.0]


def test_truncated_path_bootstraps_from_the_true_successor():
    # the episode was cut after step 1, whose true successor is worth 10, not the 32 of the new episode:
    # delta1 = 2 + 5 - 16 = -9;  A2 = 4, A1 = -9, A0 = 1 - 9/4
    assert estimate([False] * 3, [False, True, False], next_value=[16.0, 10.0, 64.0]) == [-1.25, -9.0, 4.0]


def test_termination_in_the_middle_cuts_the_trace():
    # delta1 = 2 - 16 = -14;  A2 = 4, A1 = -14, A0 = 1 - 14/4
    assert estimate([False, True, False], [False] * 3) == [-2.5, -14.0, 4.0]


def test_termination_counts_where_both_flags_are_set():
    assert estimate([False, False, True], [False, False, True]) == [-0.25, -5.0, -28.0]


def test_nan_values_of_terminated_successors_are_ignored():
    assert estimate([False, False, True], [False] * 3, next_value=[16.0, 32.0, float("nan")])[2] == -28.0


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), gamma=st.sampled_from([0.0, 0.9, 0.99, 1.0]), lam=st.sampled_from([0.0, 0.7, 1.0]))
def test_agrees_with_torchrl(seed, gamma, lam):
    functional = pytest.importorskip("torchrl.objectives.value.functional")
    random = torch.Generator().manual_seed(seed)
    shape = (13, 4, 3)
    reward, value, next_value = (torch.randn(shape, generator=random) for _ in range(3))
    terminated = torch.rand(13, 4, 1, generator=random) < 0.15
    done = terminated | (torch.rand(13, 4, 1, generator=random) < 0.15)
    ours = generalized_advantage_estimate(
        reward=reward,
        value=value,
        next_value=next_value,
        terminated=terminated,
        done=done,
        gamma=gamma,
        gae_lambda=lam,
    )
    expand = lambda x: x.expand(shape).transpose(0, 1)  # noqa: E731
    theirs, _ = functional.generalized_advantage_estimate(
        gamma, lam, *(expand(x) for x in (value, next_value, reward, done, terminated)), time_dim=1
    )
    torch.testing.assert_close(ours, theirs.transpose(0, 1), rtol=1e-5, atol=1e-5)
