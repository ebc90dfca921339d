"""The head of actions with several parts: numbers worked out by hand, torch.distributions, and legality."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import Categorical

from marl_lightning.nn.heads import CategoricalHead, MultiCategoricalHead

PARTS = [(3, 2, 4), (3, 3), (5,), (1, 2), (2, 2, 2, 2)]


def multi(parts, gain=3.0, num_agents=None):
    torch.manual_seed(0)
    return MultiCategoricalHead(in_features=6, action_parts=parts, num_agents=num_agents, gain=gain)


def fixed(parts, logits):
    """A head that gives the same logits whatever the features are."""
    head = multi(parts)
    with torch.no_grad():
        head.logits.weight.zero_()
        head.logits.bias.copy_(torch.tensor(logits))
    return head


def random_mask(parts, shape, generator=None):
    """One legal choice a part at least."""
    mask = torch.rand(*shape, sum(parts), generator=generator) < 0.5
    for part, size in zip(mask.split(parts, -1), parts, strict=True):
        legal = torch.randint(size, (*shape, 1), generator=generator)
        part.scatter_(-1, legal, True)
    return mask


# Probabilities of the parts: 1/2, 1/4, 1/4 and 1/5, 4/5. Without the first choice: 1/2, 1/2.
LOGITS = [math.log(2), 0.0, 0.0, 0.0, math.log(4)]


def test_by_hand():
    head = fixed((3, 2), LOGITS)
    log_prob, entropy = head.evaluate(torch.randn(2, 6), torch.tensor([[0, 1], [2, 0]]), None)
    assert log_prob.exp().tolist() == pytest.approx([1 / 2 * 4 / 5, 1 / 4 * 1 / 5])
    first = 1 / 2 * math.log(2) + 2 / 4 * math.log(4)
    second = 1 / 5 * math.log(5) + 4 / 5 * math.log(5 / 4)
    assert entropy.tolist() == pytest.approx([first + second] * 2)
    action, best = head.sample(torch.randn(1, 6), None, deterministic=True, generator=None)
    assert action.tolist() == [[0, 1]]
    assert best.exp().item() == pytest.approx(2 / 5)


def test_by_hand_with_masks():
    head = fixed((3, 2), LOGITS)
    mask = torch.tensor([[False, True, True, True, True], [True, False, False, True, False]])
    features = torch.randn(2, 6)
    log_prob, entropy = head.evaluate(features, torch.tensor([[2, 1], [0, 0]]), mask)
    assert log_prob.exp().tolist() == pytest.approx([1 / 2 * 4 / 5, 1.0])
    second = 1 / 5 * math.log(5) + 4 / 5 * math.log(5 / 4)
    assert entropy.tolist() == pytest.approx([math.log(2) + second, 0.0])
    assert log_prob[1] == 0
    action, _ = head.sample(features, mask, deterministic=True, generator=None)
    assert action.tolist() == [[1, 1], [0, 0]]


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("masked", [False, True])
def test_agrees_with_torch_distributions(parts, masked):
    head = multi(parts)
    features = torch.randn(7, 3, 6)
    mask = random_mask(parts, (7, 3)) if masked else None
    logits = head.logits(features)
    if masked:
        logits = logits.masked_fill(~mask, -math.inf)
    oracles = [Categorical(logits=part) for part in logits.split(parts, -1)]
    action = torch.stack([oracle.sample() for oracle in oracles], -1)
    log_prob, entropy = head.evaluate(features, action, mask)
    torch.testing.assert_close(log_prob, sum(o.log_prob(a) for o, a in zip(oracles, action.unbind(-1), strict=True)))
    torch.testing.assert_close(entropy, sum(oracle.entropy() for oracle in oracles))
    greedy, _ = head.sample(features, mask, deterministic=True, generator=None)
    assert torch.equal(greedy, torch.stack([oracle.probs.argmax(-1) for oracle in oracles], -1))


def test_agrees_with_an_independent_distribution():
    head = multi((4, 4))
    features, action = torch.randn(5, 6), torch.randint(4, (5, 2))
    oracle = torch.distributions.Independent(Categorical(logits=head.logits(features).unflatten(-1, (2, 4))), 1)
    log_prob, entropy = head.evaluate(features, action, None)
    torch.testing.assert_close(log_prob, oracle.log_prob(action))
    torch.testing.assert_close(entropy, oracle.entropy())


@settings(max_examples=60, deadline=None)
@given(
    parts=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    seed=st.integers(0, 1000),
    deterministic=st.booleans(),
    scale=st.sampled_from([0.1, 10.0, 1000.0]),
)
def test_actions_are_always_legal(parts, seed, deterministic, scale):
    random = torch.Generator().manual_seed(seed)
    head = multi(parts)
    features = scale * torch.randn(32, 2, 6, generator=random)
    mask = random_mask(parts, (32, 2), random)
    action, log_prob = head.sample(features, mask, deterministic=deterministic, generator=random)
    assert action.shape == (32, 2, len(parts))
    assert action.dtype == torch.int64
    assert ((action >= 0) & (action < torch.tensor(parts))).all()
    for index, part in enumerate(mask.split(parts, -1)):
        assert part.gather(-1, action[..., index : index + 1]).all()
    assert log_prob.isfinite().all()
    assert torch.equal(log_prob, head.evaluate(features, action, mask)[0])
    free, _ = head.sample(features, None, deterministic=deterministic, generator=random)
    assert ((free >= 0) & (free < torch.tensor(parts))).all()


@pytest.mark.parametrize("parts", [(3, 2), (2, 2)])
def test_samples_follow_the_distribution_and_the_generator(parts):
    head = multi(parts)
    features = torch.randn(1, 6).expand(40_000, 6)
    action, log_prob = head.sample(features, None, deterministic=False, generator=torch.Generator().manual_seed(1))
    again, _ = head.sample(features, None, deterministic=False, generator=torch.Generator().manual_seed(1))
    assert torch.equal(action, again)
    for joint in torch.cartesian_prod(*map(torch.arange, parts)):
        hit = (action == joint).all(-1)
        probability = head.evaluate(features[:1], joint.unsqueeze(0), None)[0].exp().item()
        assert hit.float().mean().item() == pytest.approx(probability, abs=0.01)
        torch.testing.assert_close(log_prob[hit].exp(), torch.full_like(log_prob[hit], probability))


def test_illegal_choices_get_no_gradient():
    head = multi((3, 2, 4))
    mask = torch.tensor([True, False, True, True, True, False, False, False, True]).expand(4, 9)
    features = torch.randn(4, 6, requires_grad=True)
    log_prob, entropy = head.evaluate(features, torch.tensor([0, 1, 3]).expand(4, 3), mask)
    (log_prob.sum() + entropy.sum()).backward()
    assert features.grad.isfinite().all()
    rows = head.logits.weight.grad.abs().sum(-1)
    assert (rows[[1, 5, 6, 7, 8]] == 0).all()  # the last part has one choice, whose probability is 1 anyway
    assert (rows[[0, 2, 3, 4]] > 0).all()


def test_gradients_are_those_of_the_definition():
    parts = (3, 2, 4)
    head = multi(parts, gain=1.0)
    features, action = torch.randn(5, 6), torch.tensor([2, 0, 1]).expand(5, 3)
    log_prob, entropy = head.evaluate(features, action, None)
    (found,) = torch.autograd.grad((log_prob + entropy).sum(), head.logits.weight)
    oracles = [Categorical(logits=part) for part in head.logits(features).split(parts, -1)]
    loss = sum((o.log_prob(a) + o.entropy()).sum() for o, a in zip(oracles, action.unbind(-1), strict=True))
    (expected,) = torch.autograd.grad(loss, head.logits.weight)
    torch.testing.assert_close(found, expected)


def test_one_part_is_a_categorical_head():
    head, single = multi((5,)), CategoricalHead(in_features=6, num_actions=5)
    single.load_state_dict(head.state_dict())
    features, mask = torch.randn(8, 6), random_mask((5,), (8,))
    generators = [torch.Generator().manual_seed(2) for _ in range(2)]
    action, log_prob = head.sample(features, mask, deterministic=False, generator=generators[0])
    expected = single.sample(features, mask, deterministic=False, generator=generators[1])
    assert torch.equal(action.squeeze(-1), expected[0])
    assert torch.equal(log_prob, expected[1])


def test_agents_of_their_own_weights():
    head = multi((3, 2), num_agents=3)
    same = torch.randn(1, 1, 6).expand(4, 3, 6)
    log_probs = head.log_probs(same, None)
    assert log_probs.shape == (4, 3, 2, 3)
    assert not torch.allclose(log_probs[:, 0], log_probs[:, 1])
    assert set(head.state_dict()) == {"logits.weight", "logits.bias"}
