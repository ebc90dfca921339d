import pytest
from dummies import ROLLOUT, fit

from marl_lightning.callbacks import StopAtEnvSteps
from marl_lightning.clock import EnvStepInterval


def firings(every, readings):
    interval = EnvStepInterval(every)
    return [reading for reading in readings if interval.crossed(reading)]


@pytest.mark.parametrize(
    ("every", "readings", "expected"),
    [
        (10, [3, 9, 10, 11, 19, 20], [10, 20]),  # a multiple that is hit counts
        (10, [7, 14, 21, 28, 35], [14, 21, 35]),  # nothing has to divide anything
        (10, [35, 36, 41], [35, 41]),  # several at once fire once
        (1, [1, 2, 2, 3], [1, 2, 3]),  # a clock that stands still does not fire
    ],
)
def test_fires_when_a_multiple_is_crossed(every, readings, expected):
    assert firings(every, readings) == expected


def test_state_goes_on():
    interval = EnvStepInterval(10)
    interval.crossed(25)
    other = EnvStepInterval(10)
    other.load_state_dict(interval.state_dict())
    assert not other.crossed(29)
    assert other.crossed(30)


@pytest.mark.parametrize(("budget", "end"), [(1, ROLLOUT), (3 * ROLLOUT, 3 * ROLLOUT), (3 * ROLLOUT + 1, 4 * ROLLOUT)])
def test_training_stops_with_the_first_rollout_that_reaches_the_budget(tmp_path, budget, end):
    assert fit(tmp_path, env_steps=budget).lightning_module.env_steps == end


def test_budget_must_be_positive():
    with pytest.raises(ValueError, match="at least 1, got 0"):
        StopAtEnvSteps(0)
