"""The one entry: what it chooses, refuses and returns, and that nothing is disturbed."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from game_policies import Uniform

from marl_lightning.algorithms import IPPO, IQL, MFQ
from marl_lightning.envs import make_env, make_vector_env
from marl_lightning.games import (
    MarkovEvaluator,
    MarkovGame,
    MatrixEvaluator,
    NashConvResult,
    OpenSpielEvaluator,
    choose_evaluator,
    nash_conv,
)

PENNIES = np.array([[[1.0, -1], [-1, 1]], [[-1.0, 1], [1, -1]]])
MARKOV = MarkovGame(transitions=np.ones((1, 2, 2, 1)), rewards=PENNIES[:, None], start=[1.0], gamma=0.5)


def matrix_env(game="rock_paper_scissors", **kwargs):
    return make_vector_env(f"matrix/{game}", num_envs=1, **kwargs)


def kuhn():
    pytest.importorskip("pyspiel")
    return make_vector_env("openspiel/kuhn_poker", num_envs=1)


def test_auto_takes_what_fits():
    assert isinstance(choose_evaluator("auto", matrix_env()), MatrixEvaluator)
    assert isinstance(choose_evaluator("auto", PENNIES), MatrixEvaluator)
    assert isinstance(choose_evaluator("auto", torch.tensor(PENNIES)), MatrixEvaluator)
    assert isinstance(choose_evaluator("auto", MARKOV), MarkovEvaluator)
    assert isinstance(choose_evaluator("auto", kuhn()), OpenSpielEvaluator)


def test_by_name():
    assert nash_conv([[0.6, 0.4], [0.5, 0.5]], PENNIES, "matrix").value == pytest.approx(0.2)
    tables = [np.array([[0.6, 0.4]]), np.array([[0.5, 0.5]])]
    assert nash_conv(tables, MARKOV, "markov").value == pytest.approx(0.4)
    assert nash_conv(Uniform(), kuhn(), "openspiel").value == pytest.approx(11 / 12)


@pytest.mark.parametrize("name", ["mpe/simple_spread_v3", "lbf/Foraging-5x5-2p-1f-v3"])
def test_auto_says_what_can_be_evaluated(name):
    env = make_vector_env(name, num_envs=1)
    with pytest.raises(
        ValueError, match=rf"{env.spec.name} has no exact evaluation.*openspiel/<game> and matrix/<game>"
    ):
        nash_conv(Uniform(), env)
    with pytest.raises(ValueError, match=r"a dict has no exact evaluation"):
        nash_conv(Uniform(), {})


def test_a_single_instance_of_a_matrix_game_is_refused():
    with pytest.raises(ValueError, match="make_vector_env"):
        nash_conv(Uniform(), make_env("matrix/climbing"))


def test_an_evaluator_as_object():
    class Learned:
        def evaluate(self, profile, game, *, mode="stochastic"):
            return profile, game, mode

    assert nash_conv("profile", "game", Learned()) == ("profile", "game", "stochastic")
    assert nash_conv("profile", "game", Learned(), mode="greedy") == ("profile", "game", "greedy")


def test_bad_arguments():
    env = matrix_env()
    with pytest.raises(ValueError, match=r"must be one of auto, matrix, openspiel, markov, learned, .* or an object"):
        nash_conv(Uniform(), env, "exact")
    with pytest.raises(TypeError, match="evaluator must be a name or have a method evaluate, got int"):
        nash_conv(Uniform(), env, 3)
    with pytest.raises(ValueError, match="mode must be 'stochastic' or 'greedy', got 'best'"):
        nash_conv(Uniform(), env, mode="best")


@pytest.mark.parametrize("make", [matrix_env, kuhn])
def test_policies_without_probabilities_are_refused(make):
    env = make()
    with pytest.raises(TypeError, match=r"IPPO cannot state the probabilities of its actions.*its attribute policy"):
        nash_conv(IPPO(spec=env.spec), env)
    with pytest.raises(TypeError, match=r"object cannot state .*give a StochasticPolicy"):
        nash_conv(object(), env)
    with pytest.raises(TypeError, match="mean-field"):
        nash_conv(MFQ(spec=env.spec).policy, env)


@pytest.mark.parametrize("make", [matrix_env, kuhn])
@pytest.mark.parametrize("recurrent", [False, True])
def test_nothing_is_disturbed(make, recurrent):
    env = make()
    module = IPPO(spec=env.spec, recurrent=recurrent)
    module.policy.train()
    before = {name: parameter.clone() for name, parameter in module.named_parameters()}
    env.reset(seed=3)
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    first, second = nash_conv(module.policy, env), nash_conv(module.policy, env)
    assert first.value == second.value >= -1e-9
    assert all(torch.equal(before[name], parameter) for name, parameter in module.named_parameters())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in module.parameters())
    assert module.policy.training
    assert torch.equal(torch_state, torch.get_rng_state())
    assert np.array_equal(numpy_state, np.random.get_state()[1])  # noqa: NPY002
    assert env.seed == 3


def test_a_greedy_profile_is_pure():
    """Rock, paper, scissors has no pure equilibrium: whatever is preferred, both together gain 2 a round."""
    env = matrix_env(episode_length=10)
    policy = IPPO(spec=env.spec).policy
    # Untrained policies are nearly uniform, which is the equilibrium.
    assert nash_conv(policy, env).value < 2
    assert nash_conv(policy, env, mode="greedy").value == 20
    assert nash_conv(IQL(spec=env.spec).policy, env, mode="greedy").value == 20


def test_result_is_as_documented():
    result = nash_conv([[0.6, 0.4], [0.5, 0.5]], PENNIES)
    assert isinstance(result, NashConvResult)
    assert result.value == pytest.approx(sum(result.gains.values()))
    for agent, gain in result.gains.items():
        assert gain == pytest.approx(result.best_response_values[agent] - result.on_policy[agent])
    assert (result.snapshots, result.episodes, result.env_steps) == ({}, 0, 0)
    assert result.wall_seconds > 0
    written = json.loads(json.dumps(result.as_dict()))
    assert written["value"] == pytest.approx(0.2)
    assert written["interval"] == [result.value, result.value]
    assert written["bound"] == "exact"
    assert written["normalised"] == pytest.approx(0.1)
    with pytest.raises(AttributeError):
        result.value = 0.0


def test_tables_show_everything():
    lines = nash_conv([[0.6, 0.4], [0.5, 0.5]], PENNIES).table().splitlines()
    assert [line.split() for line in lines] == [
        ["agent", "on", "policy", "best", "response", "gain"],
        ["player_0", "0.000000", "0.000000", "0.000000"],
        ["player_1", "0.000000", "0.200000", "0.200000"],
        ["NashConv", "0.200000", "(exact)"],
    ]
    bound = NashConvResult(
        value=-1e-16,
        gains={"a": -1e-16},
        on_policy={"a": 1.0},
        best_response_values={"a": 1.0},
        bound="lower",
        interval=(-0.1, 0.1),
        episodes=500,
    )
    assert bound.normalised is None
    last = " ".join(bound.table().splitlines()[-1].split())
    assert last == "NashConv 0.000000 (lower bound, in [-0.100000, 0.100000], 500 episodes)"


def test_lightning_is_not_needed():
    code = "import sys, marl_lightning.games; print(sorted({'lightning', 'pyspiel'} & sys.modules.keys()))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
