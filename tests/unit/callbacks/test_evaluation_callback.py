import csv

import pytest
from dummies import WalkEnv, fit, traces

from marl_lightning.callbacks import EnvStepCheckpoint, EvaluationCallback, VideoCallback


def logged(folder, name="eval/return_mean"):
    """Returns env step and value of each time that a metric was logged."""
    with next(folder.rglob("metrics.csv")).open() as file:
        return [(int(row["step"]), float(row[name])) for row in csv.DictReader(file) if row.get(name)]


def test_evaluates_when_due_and_at_both_ends(tmp_path):
    fit(tmp_path, [EvaluationCallback(every_env_steps=50, episodes=3, at_start=True)], env_steps=130)
    assert [step for step, _ in logged(tmp_path)] == [0, 60, 100, 140]


def test_final_policy_is_not_evaluated_twice(tmp_path):
    fit(tmp_path, [EvaluationCallback(every_env_steps=50, episodes=3)], env_steps=100)
    assert [step for step, _ in logged(tmp_path)] == [60, 100]


def test_end_can_be_left_out(tmp_path):
    fit(tmp_path, [EvaluationCallback(every_env_steps=50, episodes=3, at_end=False)], env_steps=80)
    assert [step for step, _ in logged(tmp_path)] == [60]


def test_metrics_are_where_checkpoints_look(tmp_path):
    callback = EvaluationCallback(every_env_steps=50, episodes=3)
    metrics = fit(tmp_path, [callback]).callback_metrics
    names = ("return_mean", "return_std", "return_ci_low", "return_ci_high", "length_mean", "win_rate")
    assert {f"eval/{name}" for name in names} <= metrics.keys()
    assert metrics["eval/return_ci_low"] <= metrics["eval/return_mean"] <= metrics["eval/return_ci_high"]
    assert callback.seconds > 0


def test_training_is_the_same_with_and_without(tmp_path):
    watchers = [
        EvaluationCallback(every_env_steps=30, episodes=3, deterministic=False, at_start=True),
        VideoCallback(every_env_steps=30, episodes=2),
    ]
    assert traces(fit(tmp_path / "with", watchers)) == traces(fit(tmp_path / "without"))


@pytest.mark.parametrize(("num_envs", "episodes", "expected"), [(None, 3, 3), (None, 9, 4), (2, 9, 2), (6, 9, 6)])
def test_number_of_instances(tmp_path, monkeypatch, num_envs, episodes, expected):
    made = []
    replicate = WalkEnv.replicate
    monkeypatch.setattr(WalkEnv, "replicate", lambda env, **kw: made.append(replicate(env, **kw)) or made[-1])
    fit(tmp_path, [EvaluationCallback(every_env_steps=50, episodes=episodes, num_envs=num_envs)])
    assert [env.num_envs for env in made] == [expected]  # one environment for all evaluations
    assert made[0].closed


def test_environment_is_closed_after_an_error(tmp_path, monkeypatch):
    def fail(trainer):
        if trainer.lightning_module.env_steps == 60:
            raise RuntimeError("broken game")

    made = []
    replicate = WalkEnv.replicate
    monkeypatch.setattr(WalkEnv, "replicate", lambda env, **kw: made.append(replicate(env, **kw)) or made[-1])
    with pytest.raises(RuntimeError, match="broken game"):
        fit(tmp_path, [EvaluationCallback(every_env_steps=40, episodes=2)], before_collect=fail)
    assert made[0].closed


def test_resumed_run_goes_on_with_the_interval(tmp_path):
    def callbacks():
        evaluation = EvaluationCallback(every_env_steps=70, episodes=2, at_end=False)
        return [evaluation, EnvStepCheckpoint(directory=tmp_path / "c", every_env_steps=1000)]

    fit(tmp_path / "a", callbacks(), env_steps=80)
    fit(tmp_path / "b", callbacks(), env_steps=160, ckpt_path=tmp_path / "c" / "last.ckpt")
    assert [step for step, _ in logged(tmp_path / "a")] == [80]
    assert [step for step, _ in logged(tmp_path / "b")] == [140]


def test_arguments_are_checked():
    with pytest.raises(ValueError, match=r"every_env_steps=0[\s\S]*episodes='many'"):
        EvaluationCallback(every_env_steps=0, episodes="many")
