"""Losses of distributional Q-learning, against slow versions and numbers worked out by hand."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from marl_lightning.losses.distributional import (
    categorical_loss,
    categorical_projection,
    quantile_huber_loss,
    quantile_midpoints,
)

SUPPORT = torch.linspace(-2.0, 2.0, 5)


def brute_force_projection(position, probability, support):
    """Each atom of the support takes the share ``max(0, 1 - distance / step)`` of all, ends what is beyond."""
    step = support[1] - support[0]
    result = np.zeros(len(support))
    for z, p in zip(position, probability, strict=True):
        z = min(max(z, support[0]), support[-1])
        for i, atom in enumerate(support):
            result[i] += p * max(0.0, 1.0 - abs(z - atom) / step)
    return result


def test_projection_by_hand():
    position = torch.tensor([-9.0, 0.25, 1.0, 1.5])
    probability = torch.tensor([0.1, 0.4, 0.2, 0.3])
    projected = categorical_projection(position=position, probability=probability, support=SUPPORT)
    # 0.25 lies a quarter of the way from 0 to 1, 1.5 half of the way from 1 to 2.
    assert projected.tolist() == pytest.approx([0.1, 0.0, 0.3, 0.1 + 0.2 + 0.15, 0.15])


def test_projection_of_the_support_itself_is_the_identity():
    probability = torch.rand(3, 5, generator=torch.Generator().manual_seed(0))
    projected = categorical_projection(position=SUPPORT, probability=probability, support=SUPPORT)
    assert torch.equal(projected, probability)


@settings(max_examples=50, deadline=None)
@given(
    positions=st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=6),
    atoms=st.integers(2, 60),
    seed=st.integers(0, 1000),
)
def test_projection_is_that_of_the_definition(positions, atoms, seed):
    support = torch.linspace(-3.0, 1.5, atoms, dtype=torch.float64)
    position = torch.tensor(positions, dtype=torch.float64)
    probability = torch.rand(len(position), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    projected = categorical_projection(position=position, probability=probability, support=support)
    expected = brute_force_projection(position.numpy(), probability.numpy(), support.numpy())
    np.testing.assert_allclose(projected, expected, atol=1e-9)
    assert projected.sum() == pytest.approx(float(probability.sum()))


def test_projection_keeps_the_mean_of_what_lies_inside():
    position = torch.tensor([[-1.3, 0.1, 1.9], [-0.2, 0.0, 0.7]])
    probability = torch.tensor([[0.2, 0.5, 0.3], [0.6, 0.1, 0.3]])
    projected = categorical_projection(position=position, probability=probability, support=SUPPORT)
    torch.testing.assert_close(projected @ SUPPORT, (position * probability).sum(-1))


def test_categorical_loss_is_the_cross_entropy():
    logits = torch.tensor([[0.0, np.log(3.0)], [5.0, 5.0]])
    target = torch.tensor([[0.5, 0.5], [1.0, 0.0]])
    expected = [-0.5 * np.log(0.25) - 0.5 * np.log(0.75), np.log(2.0)]
    assert categorical_loss(logits, target).tolist() == pytest.approx(expected)


def test_quantile_levels():
    assert quantile_midpoints(4).tolist() == [0.125, 0.375, 0.625, 0.875]


def test_quantile_huber_by_hand():
    # Levels 1/4 and 3/4. Errors of quantile 0: 0.5 and -3; of quantile 2: -1.5 and -5.
    quantile, target = torch.tensor([0.0, 2.0]), torch.tensor([0.5, -3.0])
    first = 0.25 * 0.125 + 0.75 * 2.5
    second = 0.25 * 1.0 + 0.25 * 4.5
    assert quantile_huber_loss(quantile, target).item() == pytest.approx(first / 2 + second / 2)


def test_quantile_huber_threshold():
    quantile, target = torch.tensor([0.0]), torch.tensor([3.0])
    assert quantile_huber_loss(quantile, target, huber_delta=4.0).item() == pytest.approx(0.5 * 9 / 8)
    assert quantile_huber_loss(quantile, target, huber_delta=2.0).item() == pytest.approx(0.5 * (3 - 1))


def test_quantile_regression_finds_the_quantiles():
    target = torch.arange(1000.0) / 1000
    quantile = torch.zeros(4, requires_grad=True)
    optimizer = torch.optim.Adam([quantile], lr=0.01)
    for _ in range(600):
        optimizer.zero_grad()
        quantile_huber_loss(quantile, target, huber_delta=1e-3).backward()
        optimizer.step()
    torch.testing.assert_close(quantile.detach(), quantile_midpoints(4), atol=0.02, rtol=0)
