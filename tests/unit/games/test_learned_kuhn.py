"""Best responses that are learned in Kuhn poker, whose values are known (Kuhn 1950)."""

import pytest
from game_policies import kuhn_equilibrium
from learned_helpers import KuhnTable, uniform_kuhn

from marl_lightning.envs import make_vector_env
from marl_lightning.games import LearnedEvaluator, nash_conv

pytest.importorskip("pyspiel")


def test_uniform_kuhn_quickly():
    """The gains are 0.375 and 0.5417, together 11/12. Half of the smallest budget finds most of it."""
    env = make_vector_env("openspiel/kuhn_poker", num_envs=1)
    settings = {"env_steps": 6_000, "select_episodes": 200, "report_episodes": 500, "hidden_sizes": (32,)}
    result = nash_conv(uniform_kuhn(), env, LearnedEvaluator(preset="quick", **settings))
    assert result.interval[0] <= 11 / 12
    assert result.value >= 0.6
    assert set(result.snapshots) == {"player_0", "player_1"}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_uniform_kuhn(seed):
    env = make_vector_env("openspiel/kuhn_poker", num_envs=1)
    result = nash_conv(uniform_kuhn(), env, LearnedEvaluator(preset="standard", seed=seed))
    half_width = (result.interval[1] - result.interval[0]) / 2
    assert 0.9 * 11 / 12 <= result.value <= 11 / 12 + half_width


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0, 1 / 6, 1 / 3])
def test_equilibria_of_kuhn(alpha):
    env = make_vector_env("openspiel/kuhn_poker", num_envs=1)
    result = nash_conv(KuhnTable(kuhn_equilibrium(alpha).bets), env, "learned:standard")
    assert result.interval[0] <= 0 <= result.interval[1]
