"""A gated recurrent unit for reinforcement learning: state resets inside sequences, one set of weights or one an agent.

``torch.nn.GRU`` cannot reset its state inside a sequence, and a Python loop over ``GRUCell`` accumulates the weight
gradient once a time step. Here the input projection of a whole sequence is one product, each time step does one thin
product and five fused elementwise operations, and the backward pass, written out by hand, collects the gate gradients
so that the gradient of the recurrent weight is one product as well.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from marl_lightning.nn.linear import AgentLinear


class GRU(nn.Module):
    """Single-layer GRU (Cho et al. 2014, in the form of ``torch.nn.GRU``) over time-major sequences with resets.

    ::

        r, z = sigmoid(W_r x + U_r h + b), sigmoid(W_z x + U_z h + b)
        n    = tanh(W_n x + b_n + r * (U_n h + c_n))
        h'   = (1 - z) * n + z * h

    Args:
        in_features: size of the input.
        hidden_size: size of the state.
        num_agents: ``None`` shares one set of weights; a number ``A`` stacks ``A`` sets (see
            :class:`~marl_lightning.nn.linear.AgentLinear`).
    """

    def __init__(self, *, in_features: int, hidden_size: int, num_agents: int | None = None):
        super().__init__()
        self.hidden_size = hidden_size
        self.input_projection = AgentLinear(
            in_features=in_features, out_features=3 * hidden_size, num_agents=num_agents
        )
        recurrent = AgentLinear(in_features=hidden_size, out_features=3 * hidden_size, num_agents=num_agents)
        self.recurrent_weight = recurrent.weight
        self.recurrent_bias = recurrent.bias

    def forward(self, x: Tensor, state: Tensor, is_first: Tensor) -> Tensor:
        """Runs the sequence.

        Args:
            x: ``[T, N, A, in_features]``.
            state: ``[N, A, hidden_size]``, the state before the first step.
            is_first: ``[T, N]`` bool, the state is zeroed before this step.

        Returns:
            The states after every step, ``[T, N, A, hidden_size]``; the last one continues the sequence.
        """
        gates = self.input_projection(x).float()
        if self.recurrent_weight.dim() == 3:  # [T, N, A, F] -> [T, A, N, F], one product an agent
            out = _Recurrence.apply(
                gates.transpose(1, 2),
                state.transpose(0, 1),
                self.recurrent_weight,
                self.recurrent_bias.unsqueeze(1),
                _reset_steps(is_first, is_first[:, None, :, None]),
            )
            return out.transpose(1, 2)
        time, rows, agents, _ = gates.shape
        resets = _reset_steps(is_first, is_first.unsqueeze(2).expand(time, rows, agents).reshape(time, -1, 1))
        out = _Recurrence.apply(
            gates.reshape(time, rows * agents, -1),
            state.reshape(rows * agents, -1),
            self.recurrent_weight,
            self.recurrent_bias,
            resets,
        )
        return out.reshape(time, rows, agents, -1)


def _reset_steps(is_first: Tensor, mask: Tensor) -> list[Tensor | None]:
    """Returns, for each step, ``mask`` of the rows that keep their state, or ``None`` where nothing is reset."""
    keep = (~mask).float()
    if is_first.device.type == "cpu":
        return [row if any_first else None for row, any_first in zip(keep, is_first.any(1).tolist(), strict=True)]
    return list(keep)  # looking at the values would wait for the device


class _Recurrence(Function):
    """Steps through the gates; see the module's docstring for why the gradient is written by hand."""

    @staticmethod
    def forward(ctx, gates, state, weight, bias, keep):
        hidden = weight.shape[-1]
        time, *rows, _ = gates.shape
        reset_update = gates.new_empty(time, *rows, 2 * hidden)
        candidate, previous, states = (gates.new_empty(time, *rows, hidden) for _ in range(3))
        recurrent = gates.new_empty(time, *rows, 3 * hidden)
        h = state.float()
        with torch.autocast(gates.device.type, enabled=False):
            for t, kept in enumerate(keep):
                h = previous[t].copy_(h) if kept is None else torch.mul(h, kept, out=previous[t])
                torch.matmul(h, weight.transpose(-1, -2), out=recurrent[t]).add_(bias)
                rz = torch.add(gates[t, ..., : 2 * hidden], recurrent[t, ..., : 2 * hidden], out=reset_update[t])
                r, z = rz.sigmoid_().split(hidden, -1)
                n = torch.addcmul(gates[t, ..., 2 * hidden :], r, recurrent[t, ..., 2 * hidden :], out=candidate[t])
                h = torch.lerp(n.tanh_(), h, z, out=states[t])
        ctx.save_for_backward(weight, reset_update, candidate, recurrent, previous)
        ctx.keep = keep
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_states):
        weight, reset_update, candidate, recurrent, previous = ctx.saved_tensors
        hidden = weight.shape[-1]
        d_gates, d_recurrent = torch.empty_like(recurrent), torch.empty_like(recurrent)
        d_h = torch.zeros_like(grad_states[0])
        for t in range(len(candidate) - 1, -1, -1):
            (r, z), n, h = reset_update[t].split(hidden, -1), candidate[t], previous[t]
            d_r, d_z, d_n = d_gates[t].split(hidden, -1)
            d_h += grad_states[t]
            tanh_backward(torch.addcmul(d_h, d_h, z, value=-1), n, grad_input=d_n)
            sigmoid_backward((h - n).mul_(d_h), z, grad_input=d_z)
            sigmoid_backward(d_n * recurrent[t, ..., 2 * hidden :], r, grad_input=d_r)
            d_recurrent[t, ..., : 2 * hidden] = d_gates[t, ..., : 2 * hidden]
            torch.mul(d_n, r, out=d_recurrent[t, ..., 2 * hidden :])
            d_h = torch.matmul(d_recurrent[t], weight).addcmul_(d_h, z)
            if ctx.keep[t] is not None:
                d_h *= ctx.keep[t]
        d_weight, d_bias = _weight_gradients(d_recurrent, previous)
        return d_gates, d_h, d_weight, d_bias, None


tanh_backward = torch.ops.aten.tanh_backward.grad_input
sigmoid_backward = torch.ops.aten.sigmoid_backward.grad_input


def _weight_gradients(d_recurrent: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
    """Sums over time and rows in one product: ``[T, (A,) N, 3H]`` and ``[T, (A,) N, H]`` -> ``[(A,) 3H, H]``."""
    if d_recurrent.dim() == 3:
        d_recurrent, previous = d_recurrent.flatten(0, 1), previous.flatten(0, 1)
        return d_recurrent.T @ previous, d_recurrent.sum(0)
    d_recurrent, previous = (x.transpose(0, 1).flatten(1, 2) for x in (d_recurrent, previous))
    return d_recurrent.transpose(1, 2) @ previous, d_recurrent.sum(1, keepdim=True)
