"""Short trainings that must reach a return. Thresholds are known values of the games, not past results."""

from collections.abc import Callable

import pytest
from omegaconf import DictConfig

from marl_lightning.plotting import read_curves
from marl_lightning.training import train

pytestmark = pytest.mark.learning


def test_ippo_finds_an_equilibrium_of_climbing(compose: Callable[..., DictConfig]):
    """(b, b) pays 7 in each of 25 steps; the better equilibrium (a, a) is hidden behind -30."""
    result = train(compose("+experiment=ippo_matrix", "trainer.enable_progress_bar=false"))
    assert result.summary["eval/return_mean"] >= 175


def test_ippo_finds_the_best_outcome_of_penalty_without_penalty(compose: Callable[..., DictConfig]):
    result = train(
        compose(
            "+experiment=ippo_matrix",
            "env.scenario=penalty",
            "total_env_steps=40000",
            "trainer.enable_progress_bar=false",
        )
    )
    assert result.summary["eval/return_mean"] == 250


def test_mappo_wins_3m(compose: Callable[..., DictConfig]):
    """A third of the default budget, so that a slow learner fails."""
    result = train(compose("+experiment=mappo_smac", "total_env_steps=300000", "trainer.enable_progress_bar=false"))
    assert result.summary["eval/win_rate"] >= 0.95


def test_mappo_with_continuous_actions_improves_on_spread(compose: Callable[..., DictConfig]):
    """Three seeds gained 2.6, 2.9 and 3.7; an untrained policy gains nothing."""
    overrides = (
        "+experiment=mappo_mpe",
        "env.continuous_actions=true",
        "callbacks.evaluation.at_start=true",
        "total_env_steps=160000",
        "trainer.enable_progress_bar=false",
    )
    result = train(compose(*overrides))
    (curve,) = read_curves(result.output_dir, "eval/return_mean")
    assert curve.env_steps[0] == 0
    assert curve.values[-1] > curve.values[0] + 1.5


def test_ppo_balances_the_pole(compose: Callable[..., DictConfig]):
    """The single-agent case; 475 of 500 counts as solved."""
    result = train(compose("+experiment=ppo_cartpole", "trainer.enable_progress_bar=false"))
    assert result.summary["eval/return_mean"] >= 475
