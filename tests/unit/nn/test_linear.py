"""Stacked layers and agent indices."""

import torch

from marl_lightning.nn.body import Body, with_agent_id
from marl_lightning.nn.linear import MLP, AgentLinear


def test_stacked_weights_equal_one_layer_an_agent():
    torch.manual_seed(0)
    layer = AgentLinear(in_features=4, out_features=5, num_agents=3)
    with torch.no_grad():
        layer.bias.normal_()
    x = torch.randn(2, 6, 3, 4)
    expected = torch.stack([x[:, :, i] @ layer.weight[i].T + layer.bias[i] for i in range(3)], 2)
    torch.testing.assert_close(layer(x), expected)


def test_unshared_agents_do_not_influence_each_other():
    torch.manual_seed(0)
    body = Body(in_features=4, hidden_sizes=(8,), recurrent=True, activation="relu", layer_norm=False, num_agents=3)
    x = torch.randn(5, 2, 3, 4, requires_grad=True)
    features, _ = body(x, torch.zeros(2, 3, 8), torch.zeros(5, 2, dtype=torch.bool))
    features[:, :, 1].sum().backward()
    assert (x.grad[:, :, [0, 2]] == 0).all()
    assert body.gru.recurrent_weight.grad[[0, 2]].eq(0).all()


def test_initial_weights_are_orthogonal_with_the_gain():
    layer = AgentLinear(in_features=8, out_features=5, num_agents=2, gain=3.0)
    for weight in layer.weight:
        torch.testing.assert_close(weight @ weight.T, 9 * torch.eye(5), atol=1e-4, rtol=0)
    assert (layer.bias == 0).all()


def test_mlp_has_the_layers_asked_for():
    mlp = MLP(in_features=4, hidden_sizes=(8, 6), activation="tanh", layer_norm=True)
    names = [type(layer).__name__ for layer in mlp.layers]
    assert names == ["LayerNorm", "AgentLinear", "Tanh", "LayerNorm", "AgentLinear", "Tanh", "LayerNorm"]
    assert mlp(torch.randn(3, 2, 4)).shape == (3, 2, 6)


def test_agent_id():
    x = with_agent_id(torch.zeros(2, 3, 1), 3)
    assert x.tolist() == [[[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]] * 2
