"""Running statistics of returns."""

import torch

from marl_lightning.nn.value_norm import ValueNorm

X = torch.tensor([[1.0, 2.0], [3.0, 6.0]])
ONES = torch.ones_like(X)


def test_before_the_first_update_nothing_is_changed():
    norm = ValueNorm()
    assert torch.equal(norm.normalise(X), X)
    assert torch.equal(norm.denormalise(X), X)


def test_one_update_gives_the_moments_of_the_batch_whatever_the_decay():
    for decay in (0.0, 0.9, 0.99999):
        norm = ValueNorm(decay=decay)
        norm.update(X, ONES)
        torch.testing.assert_close(norm.normalise(X).mean(), torch.tensor(0.0), atol=1e-3, rtol=0)
        torch.testing.assert_close(norm.normalise(X).std(correction=0), torch.tensor(1.0), atol=1e-3, rtol=0)


def test_two_updates_are_weighted_by_hand():
    norm = ValueNorm(decay=0.5)
    norm.update(torch.tensor([2.0]), torch.ones(1))
    norm.update(torch.tensor([8.0]), torch.ones(1))
    # weights 1/4 and 1/2 of 3/4: mean 6, mean square (4 + 2 * 64) / 3 = 44, variance 8
    torch.testing.assert_close(norm.denormalise(torch.zeros(())), torch.tensor(6.0))
    torch.testing.assert_close(norm.denormalise(torch.ones(())), torch.tensor(6.0) + 8**0.5)


def test_normalise_and_denormalise_are_inverse():
    norm = ValueNorm(decay=0.9)
    for _ in range(5):
        norm.update(torch.randn(10) * 4 + 9, torch.ones(10))
    torch.testing.assert_close(norm.denormalise(norm.normalise(X)), X)


def test_entries_without_weight_and_empty_batches_change_nothing():
    a, b = ValueNorm(decay=0.9), ValueNorm(decay=0.9)
    a.update(torch.tensor([1.0, 3.0, 1e9]), torch.tensor([1.0, 1.0, 0.0]))
    b.update(torch.tensor([1.0, 3.0]), torch.ones(2))
    assert torch.equal(a.normalise(X), b.normalise(X))
    before = a.normalise(X)
    a.update(torch.full((3,), 1e9), torch.zeros(3))
    assert torch.equal(a.normalise(X), before)


def test_moments_may_be_those_of_several_processes():
    """What the processes agree on counts, not the own data."""
    sums = iter([torch.tensor([4.0, 12.0]), torch.tensor(14.0)])  # count, sum, and squares around the mean, of X
    parallel, single = ValueNorm(), ValueNorm()
    parallel.update(X[0], torch.ones(2), lambda _: next(sums))
    single.update(X, ONES)
    torch.testing.assert_close(parallel.normalise(X), single.normalise(X))


def test_small_deviations_around_a_large_mean_are_kept():
    x = 1000 + torch.randn(5000)
    norm = ValueNorm(decay=0.9)
    for _ in range(20):
        norm.update(x, torch.ones_like(x))
    assert abs(norm.normalise(x).std().item() - 1) < 0.01


def test_statistics_are_in_the_state_dict():
    norm, other = ValueNorm(), ValueNorm()
    norm.update(X, ONES)
    other.load_state_dict(norm.state_dict())
    assert torch.equal(norm.normalise(X), other.normalise(X))
