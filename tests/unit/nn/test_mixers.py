"""The sum and the monotonic mixer: numbers worked out by hand and the property that greedy agents rely on."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from marl_lightning.nn.mixers import MonotonicMixer, SumMixer, one_hot

AGENTS, STATE = 3, 4


def test_sum():
    value = torch.tensor([[1.0, 2.0, -4.0], [0.0, 0.5, 0.5]])
    assert SumMixer()(value, torch.zeros(2, 0)).tolist() == [[-1], [1]]


def test_monotonic_by_hand():
    """Two hidden units; the state is (1, 2)."""
    mixer = MonotonicMixer(num_agents=2, state_size=2, embedding_size=2, hypernet_size=None)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.zero_()
        # Weights -2, 1 from the first agent and 3, 0.5 from the second, made positive.
        mixer.first_weight.weight[:, 0] = torch.tensor([-2.0, 1.0, 3.0, 0.5])
        mixer.first_bias.weight[:, 1] = torch.tensor([0.5, -1.0])  # 1 and -2
        mixer.second_weight.bias[:] = torch.tensor([-1.0, 10.0])
        mixer.offset[0].weight[0] = torch.tensor([1.0, 1.0])
        mixer.offset[2].weight[0, 0] = -1.0  # -relu(1 + 2)
    value = torch.tensor([1.0, 2.0])
    hidden = [1 * 2 + 2 * 3 + 1, 1 * 1 + 2 * 0.5 - 2]
    assert mixer(value, torch.tensor([1.0, 2.0])).item() == pytest.approx(hidden[0] + 10 * hidden[1] - 3)
    value = torch.tensor([0.0, 0.0])  # elu(-2) = exp(-2) - 1
    expected = 1 + 10 * (torch.exp(torch.tensor(-2.0)).item() - 1) - 3
    assert mixer(value, torch.tensor([1.0, 2.0])).item() == pytest.approx(expected)


def random_mixer(seed, hypernet_size):
    torch.manual_seed(seed)
    mixer = MonotonicMixer(num_agents=AGENTS, state_size=STATE, embedding_size=8, hypernet_size=hypernet_size)
    for parameter in mixer.parameters():
        nn.init.normal_(parameter)
    return mixer


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), hypernet_size=st.sampled_from([None, 16]))
def test_it_never_falls_in_any_value(seed, hypernet_size):
    mixer = random_mixer(seed, hypernet_size)
    value = torch.randn(64, AGENTS).mul_(3).requires_grad_()
    state = torch.randn(64, STATE).mul_(3)
    mixer(value, state).sum().backward()
    assert (value.grad >= 0).all()
    assert (value.grad > 0).any()
    raised = value + torch.rand(64, AGENTS)
    assert (mixer(raised, state) >= mixer(value, state)).all()


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_the_agents_best_actions_are_the_best_joint_action(seed):
    mixer, values, state = random_mixer(seed, 16), torch.randn(AGENTS, 4), torch.randn(STATE)
    joint = [mixer(values[range(AGENTS), actions], state).item() for actions in itertools.product(range(4), repeat=3)]
    assert max(joint) == mixer(values.amax(1), state).item()


def test_any_number_of_leading_axes():
    mixer = random_mixer(0, 16)
    value, state = torch.randn(5, 2, AGENTS), torch.randn(5, 2, STATE)
    whole = mixer(value, state)
    assert whole.shape == (5, 2, 1)
    torch.testing.assert_close(whole[3, 1], mixer(value[3, 1], state[3, 1]))


def test_a_mixer_without_a_state_is_refused():
    with pytest.raises(ValueError, match="use VDN or IQL instead"):
        MonotonicMixer(num_agents=2, state_size=0)


def test_one_hot():
    assert one_hot(torch.tensor([[2, 0]]), 3).tolist() == [[[0, 0, 1], [1, 0, 0]]]
