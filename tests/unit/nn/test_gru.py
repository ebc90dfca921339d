"""The GRU against torch.nn.GRU, against numerical gradients, and its resets against separate sequences."""

import pytest
import torch

from marl_lightning.nn.gru import GRU

T, N, A, F, H = 7, 5, 3, 4, 6


def torch_gru(gru: GRU, agent: int | None = None) -> torch.nn.GRU:
    """A torch.nn.GRU with the same weights (those of one agent, if they are not shared)."""
    pick = (lambda x: x) if agent is None else (lambda x: x[agent])
    twin = torch.nn.GRU(F, H)
    twin.weight_ih_l0.data = pick(gru.input_projection.weight).detach().clone()
    twin.bias_ih_l0.data = pick(gru.input_projection.bias).detach().clone()
    twin.weight_hh_l0.data = pick(gru.recurrent_weight).detach().clone()
    twin.bias_hh_l0.data = pick(gru.recurrent_bias).detach().clone()
    return twin


def make(num_agents=None):
    torch.manual_seed(0)
    gru = GRU(in_features=F, hidden_size=H, num_agents=num_agents)
    with torch.no_grad():
        for parameter in gru.parameters():  # biases start at 0, where errors would not show
            parameter.add_(0.3 * torch.randn_like(parameter))
    return gru, torch.randn(T, N, A, F), torch.randn(N, A, H)


NEVER = torch.zeros(T, N, dtype=torch.bool)


@pytest.mark.parametrize("num_agents", [None, A])
def test_equals_torch_gru_with_gradients(num_agents):
    gru, x, state = make(num_agents)
    x.requires_grad_(), state.requires_grad_()
    out = gru(x, state, NEVER)
    weight = torch.randn_like(out)
    (out * weight).sum().backward()
    x2, state2 = x.detach().clone().requires_grad_(), state.detach().clone().requires_grad_()
    for agent in range(A):
        twin = torch_gru(gru, None if num_agents is None else agent)
        expected, _ = twin(x2[:, :, agent], state2[None, :, agent])
        torch.testing.assert_close(out[:, :, agent], expected, rtol=1e-5, atol=1e-6)
        (expected * weight[:, :, agent]).sum().backward()
        if num_agents is not None:
            torch.testing.assert_close(gru.recurrent_weight.grad[agent], twin.weight_hh_l0.grad, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(gru.recurrent_bias.grad[agent], twin.bias_hh_l0.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(x.grad, x2.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state.grad, state2.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_agents", [None, A])
def test_resets_equal_separate_sequences(num_agents):
    gru, x, state = make(num_agents)
    is_first = torch.rand(T, N) < 0.4
    out = gru(x, state, is_first)
    for n in range(N):
        h = state[n : n + 1]
        for t in range(T):
            if is_first[t, n]:
                h = torch.zeros_like(h)
            h = gru(x[t : t + 1, n : n + 1], h, NEVER[:1, :1])[0]
            torch.testing.assert_close(out[t, n], h[0])


def test_gradient_with_resets_is_that_of_autograd():
    gru, x, state = make()
    is_first = torch.rand(T, N) < 0.4
    x.requires_grad_(), state.requires_grad_()
    (gru(x, state, is_first).square()).sum().backward()
    ours = [x.grad, state.grad, *(p.grad for p in gru.parameters())]
    x2, state2 = x.detach().clone().requires_grad_(), state.detach().clone().requires_grad_()
    gru.zero_grad()
    h, total = state2, 0.0
    for t in range(T):
        h = h * (~is_first[t])[:, None, None]
        gates = torch.nn.functional.linear(x2[t], gru.input_projection.weight, gru.input_projection.bias)
        recurrent = torch.nn.functional.linear(h, gru.recurrent_weight, gru.recurrent_bias)
        r, z = (gates + recurrent)[..., : 2 * H].sigmoid().chunk(2, -1)
        n = torch.tanh(gates[..., 2 * H :] + r * recurrent[..., 2 * H :])
        h = (1 - z) * n + z * h
        total = total + h.square().sum()
    total.backward()
    theirs = [x2.grad, state2.grad, *(p.grad for p in gru.parameters())]
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_reset_stops_the_gradient_into_the_state():
    gru, x, state = make()
    state.requires_grad_()
    is_first = NEVER.clone()
    is_first[0, 2] = True
    gru(x, state, is_first).sum().backward()
    assert (state.grad[2] == 0).all()
    assert (state.grad[1] != 0).any()


def test_one_long_sequence_equals_two_chunks():
    gru, x, state = make()
    is_first = torch.rand(T, N) < 0.3
    whole = gru(x, state, is_first)
    first = gru(x[:3], state, is_first[:3])
    second = gru(x[3:], first[-1], is_first[3:])
    torch.testing.assert_close(whole, torch.cat((first, second)))


def test_runs_in_float32_under_autocast():
    gru, x, state = make()
    with torch.autocast("cpu", torch.bfloat16):
        out = gru(x, state, NEVER)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, gru(x, state, NEVER), rtol=0.05, atol=0.05)
