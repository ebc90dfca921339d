"""Values of own actions under responses of others: numbers by hand, enumeration and finite differences as oracles."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from marl_lightning.losses.response import (
    decode,
    draw_responses,
    encode,
    expected_value,
    response_log_prob,
    sampled_soft_value,
    soft_value,
    value_of,
)


def double(*values):
    return torch.tensor(values, dtype=torch.float64)


# ------------------------------------------------------------------------------------------------------ joint actions


def test_joint_actions_are_numbered_in_mixed_radix():
    sizes = (2, 3, 4)
    actions = torch.tensor(list(itertools.product(range(2), range(3), range(4))))
    index = encode(actions, sizes)
    assert index.tolist() == list(range(24))
    assert torch.equal(decode(index, sizes), actions)
    assert encode(torch.tensor([1, 2, 3]), sizes).item() == 1 * 12 + 2 * 4 + 3
    assert decode(torch.tensor([[23], [5]]), sizes).tolist() == [[[1, 2, 3]], [[0, 1, 1]]]


def test_without_others_there_is_one_joint_action():
    index = encode(torch.zeros(5, 0, dtype=torch.int64), ())
    assert index.tolist() == [0] * 5
    assert decode(index, ()).shape == (5, 0)


# -------------------------------------------------------------------------------------------------------- soft values


def test_two_responses_by_hand():
    """Q = (0, 1), temperature 1: p = (1, e) / (1 + e), F = log(1 + e) = E Q + H(p)."""
    value = double(0.0, 1.0)
    p = torch.softmax(value, -1)
    assert p.tolist() == pytest.approx([0.2689, 0.7311], abs=5e-5)
    entropy = -(p * p.log()).sum().item()
    lse, lme, mean = (
        soft_value(value, (2,), temperature=1.0, aggregate=a).item() for a in ("lse", "lme", "expectation")
    )
    assert (lse, lme, mean, entropy) == pytest.approx((1.3133, 0.6201, 0.7311, 0.5822), abs=5e-5)
    assert lse == pytest.approx(mean + entropy)
    assert expected_value(value, value, (2,)).item() == pytest.approx(mean)


def test_the_gradient_is_the_response():
    value, temperature, step = double(0.3, -1.2, 2.0), 0.7, 1e-6
    response = torch.softmax(value / temperature, -1)
    for aggregate in ("lse", "lme"):
        for i in range(3):
            moved = [value + sign * step * torch.eye(3, dtype=torch.float64)[i] for sign in (1, -1)]
            up, down = (soft_value(v, (3,), temperature=temperature, aggregate=aggregate) for v in moved)
            assert ((up - down) / (2 * step)).item() == pytest.approx(response[i].item(), abs=1e-8)


def test_temperatures_reach_from_the_maximum_to_the_mean():
    value = double(1.0, 4.0, -2.0)
    assert soft_value(value, (3,), temperature=1e-3).item() == pytest.approx(4.0, abs=2e-3)
    assert soft_value(value, (3,), temperature=1e6).item() == pytest.approx(1.0, abs=1e-5)


values = st.lists(st.floats(-50, 50), min_size=4, max_size=4)


@given(values, values, st.floats(0.05, 20), st.sampled_from(["lse", "lme"]))
def test_soft_values_do_not_expand(first, second, temperature, aggregate):
    first, second = double(*first), double(*second)
    f1, f2 = (soft_value(v, (4,), temperature=temperature, aggregate=aggregate) for v in (first, second))
    assert abs(f1 - f2) <= (first - second).abs().max() + 1e-9


def test_the_expectation_expands():
    """Why it is not the default: from (0, 1.8) to (0, 2) it changes by more than the values do."""
    first, second = double(0.0, 1.8), double(0.0, 2.0)
    change = [soft_value(v, (2,), temperature=1.0, aggregate="expectation").item() for v in (first, second)]
    assert change[1] - change[0] > 0.2


def test_what_others_never_do_does_not_count():
    value = double(1.0, 9.0, 3.0)
    mask = torch.tensor([True, False, True])
    for aggregate in ("lse", "lme", "expectation"):
        arguments = {"temperature": 0.5, "aggregate": aggregate}
        expected = soft_value(double(1.0, 3.0), (2,), **arguments).item()
        assert soft_value(value, (3,), mask=mask, **arguments).item() == pytest.approx(expected, abs=1e-12)
        nothing = soft_value(value, (3,), mask=torch.zeros(3, dtype=torch.bool), **arguments).item()
        assert nothing == pytest.approx(soft_value(value, (3,), **arguments).item())


@pytest.mark.parametrize("aggregate", ["lse", "lme", "expectation"])
def test_one_response_is_exact(aggregate):
    value = torch.randn(100, 1)
    assert torch.equal(soft_value(value, (1,), temperature=0.3, aggregate=aggregate), value[:, 0])
    assert torch.equal(expected_value(value, torch.randn(100, 1), (1,)), value[:, 0])


# -------------------------------------------------------------------------------------------------------------- pairs


def enumerate_pairs(q, parts):
    """Values of all joint actions of a sum of values."""
    actions = torch.tensor(list(itertools.product(*map(range, parts))))
    return torch.stack([value_of(q, a.expand(*q.shape[:-1], -1), parts) for a in actions], -1)


@pytest.mark.parametrize("aggregate", ["lse", "lme", "expectation"])
def test_sums_of_pairs_equal_enumeration(aggregate):
    torch.manual_seed(0)
    parts, q = (2, 3, 4), torch.randn(5, 9, dtype=torch.float64)
    joint = enumerate_pairs(q, parts)
    assert joint.shape == (5, 24)
    arguments = {"temperature": 0.6, "aggregate": aggregate}
    torch.testing.assert_close(soft_value(q, parts, **arguments), soft_value(joint, (24,), **arguments))


def test_products_of_responses_equal_enumeration():
    torch.manual_seed(0)
    parts, q, logits = (2, 3), torch.randn(4, 5, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)
    actions = torch.tensor(list(itertools.product(range(2), range(3))))
    joint_p = torch.stack([response_log_prob(logits, a.expand(4, 2), parts).exp() for a in actions], -1)
    torch.testing.assert_close(joint_p.sum(-1), torch.ones(4, dtype=torch.float64))
    torch.testing.assert_close(expected_value(q, logits, parts), (joint_p * enumerate_pairs(q, parts)).sum(-1))


# ------------------------------------------------------------------------------------------------------------ samples


def test_draws_invert_the_distribution():
    logits = torch.tensor([0.5, 0.25, 0.25]).log().expand(2, 3)
    points = torch.tensor([[0.0], [0.49], [0.5], [0.74], [0.76], [0.9999999]])
    index, log_prob = draw_responses(logits, points, (3,))
    assert index.shape == (6, 2, 1)
    assert index[:, 0, 0].tolist() == [0, 0, 1, 1, 2, 2]
    assert log_prob[:, 1].exp().tolist() == pytest.approx([0.5, 0.5, 0.25, 0.25, 0.25, 0.25])


def test_samples_estimate_from_below():
    """Many estimates from few samples: the mean of their exponentials is right, their own mean is too small."""
    generator = torch.Generator().manual_seed(0)
    parts = (3, 2)
    q, logits = torch.randn(5, dtype=torch.float64, generator=generator), torch.zeros(5, dtype=torch.float64)
    logits[1] = 1.0
    exact = soft_value(q, parts, temperature=0.8).item()
    few, many = 4, 20_000
    points = torch.rand(few * many, 2, dtype=torch.float64, generator=generator)
    index, log_prob = draw_responses(logits, points, parts)
    sampled = value_of(q.expand(few * many, 5), index, parts)
    estimate = sampled_soft_value(sampled.view(few, many), log_prob.view(few, many), 6, temperature=0.8)
    assert 0.8 * (estimate / 0.8).exp().mean().log().item() == pytest.approx(exact, abs=0.01)
    assert estimate.mean().item() < exact - 0.02
    for aggregate in ("lse", "expectation"):
        full = sampled_soft_value(sampled, log_prob, 6, temperature=0.8, aggregate=aggregate).item()
        assert full == pytest.approx(soft_value(q, parts, temperature=0.8, aggregate=aggregate).item(), abs=0.02)


def test_a_sum_grows_with_the_number_of_responses():
    value = torch.zeros(4)
    assert soft_value(value, (4,), temperature=2.0, aggregate="lse").item() == pytest.approx(2 * math.log(4))
    assert soft_value(value, (4,), temperature=2.0).item() == pytest.approx(0.0, abs=1e-6)
