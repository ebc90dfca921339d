"""Action heads against torch.distributions, and the promise that illegal actions never happen."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from marl_lightning.nn.heads import CategoricalHead, GaussianHead


def categorical(gain=3.0, num_agents=None):
    torch.manual_seed(0)
    return CategoricalHead(in_features=6, num_actions=5, num_agents=num_agents, gain=gain)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 1000), legal=st.integers(1, 5), deterministic=st.booleans())
def test_illegal_actions_are_never_chosen(seed, legal, deterministic):
    random = torch.Generator().manual_seed(seed)
    head = categorical()
    features = 10 * torch.randn(64, 3, 6, generator=random)
    mask = torch.rand(64, 3, 5, generator=random).argsort(-1) < legal
    action, log_prob = head.sample(features, mask, deterministic=deterministic, generator=random)
    assert mask.gather(-1, action.unsqueeze(-1)).all()
    assert log_prob.isfinite().all()
    if legal == 1:
        assert (log_prob == 0).all()


def test_illegal_actions_have_probability_exactly_zero_and_no_gradient():
    head = categorical()
    features = torch.randn(4, 6, requires_grad=True)
    mask = torch.tensor([True, False, True, False, True]).expand(4, 5)
    log_probs = head.log_probs(features, mask)
    assert (log_probs.exp()[:, [1, 3]] == 0).all()
    _, entropy = head.evaluate(features, torch.zeros(4, dtype=torch.int64), mask)
    (entropy.sum() + log_probs[:, 0].sum()).backward()
    assert features.grad.isfinite().all()
    assert (head.logits.weight.grad[[1, 3]] == 0).all()


def test_categorical_agrees_with_torch_distributions():
    head = categorical()
    features, action = torch.randn(7, 3, 6), torch.randint(5, (7, 3))
    oracle = torch.distributions.Categorical(logits=head.logits(features))
    log_prob, entropy = head.evaluate(features, action, None)
    torch.testing.assert_close(log_prob, oracle.log_prob(action))
    torch.testing.assert_close(entropy, oracle.entropy())
    assert (head.sample(features, None, deterministic=True, generator=None)[0] == oracle.probs.argmax(-1)).all()


def test_samples_follow_the_distribution_and_the_generator():
    head = categorical()
    features = torch.randn(1, 6).expand(40_000, 6)
    action, _ = head.sample(features, None, deterministic=False, generator=torch.Generator().manual_seed(1))
    again, _ = head.sample(features, None, deterministic=False, generator=torch.Generator().manual_seed(1))
    assert (action == again).all()
    frequencies = torch.bincount(action, minlength=5) / len(action)
    torch.testing.assert_close(frequencies, head.log_probs(features[0], None).exp(), atol=0.01, rtol=0)


def test_log_prob_of_acting_is_that_of_evaluating():
    head = categorical(num_agents=3)
    features, mask = torch.randn(8, 3, 6), torch.rand(8, 3, 5) < 0.7
    mask[..., 0] = True
    action, log_prob = head.sample(features, mask, deterministic=False, generator=None)
    assert torch.equal(log_prob, head.evaluate(features, action, mask)[0])


def gaussian(squash):
    torch.manual_seed(0)
    box = spaces.Box(np.array([-1.0, 0.0], np.float32), np.array([3.0, 10.0], np.float32))
    return GaussianHead(in_features=6, action_space=box, squash=squash, gain=1.0, initial_log_std=0.3)


@pytest.mark.parametrize("squash", [False, True])
def test_gaussian_agrees_with_torch_distributions(squash):
    head = gaussian(squash)
    features = torch.randn(7, 3, 6)
    normal = torch.distributions.Normal(head.mean(features), head.log_std.exp())
    action, log_prob = head.sample(features, None, deterministic=False, generator=None)
    if squash:
        tanh = torch.distributions.transforms.TanhTransform(cache_size=1)
        expected = normal.log_prob(action) - tanh.log_abs_det_jacobian(action, action.tanh())
    else:
        expected = normal.log_prob(action)
        torch.testing.assert_close(head.evaluate(features, action, None)[1], normal.entropy().sum(-1))
    torch.testing.assert_close(log_prob, expected.sum(-1))
    torch.testing.assert_close(head.evaluate(features, action, None)[0], log_prob)


def test_entropy_of_a_squashed_gaussian_is_unbiased():
    head = gaussian(squash=True)
    features = torch.randn(1, 6).expand(200_000, 6)
    action, log_prob = head.sample(features, None, deterministic=False, generator=None)
    estimate = head.evaluate(features, action, None)[1].mean()
    assert estimate.item() == pytest.approx(-log_prob.mean().item(), abs=0.02)


@pytest.mark.parametrize("squash", [False, True])
def test_env_actions_fill_the_box_and_stay_inside(squash):
    head = gaussian(squash)
    actions = head.env_action(torch.tensor([[-50.0, 50.0], [0.0, 0.0], [50.0, -50.0]]))
    torch.testing.assert_close(actions, torch.tensor([[-1.0, 10.0], [1.0, 5.0], [3.0, 0.0]]))


def test_log_prob_of_extreme_squashed_actions_is_finite():
    head = gaussian(squash=True)
    assert head.log_prob(torch.zeros(1, 2), torch.tensor([[30.0, -30.0]])).isfinite().all()
