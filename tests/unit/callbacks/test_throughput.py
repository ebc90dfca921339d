import io
import re
import sys
import time

import pytest
from dummies import fit
from lightning.pytorch.callbacks import Callback

from marl_lightning.callbacks import EnvStepProgressBar, EvaluationCallback, ThroughputMonitor, progress
from marl_lightning.callbacks.throughput import MovingRate


class Clock:
    """Stands in for the module ``time``."""

    def __init__(self):
        self.now = 100.0

    def perf_counter(self):
        return self.now


class TestMovingRate:
    def test_window(self, monkeypatch):
        clock = Clock()
        monkeypatch.setattr("marl_lightning.callbacks.throughput.time", clock)
        rate = MovingRate(window=2)
        assert rate.value == 0
        for seconds, env_steps in [(0, 0), (10, 100), (1, 110), (1, 140)]:
            clock.now += seconds
            rate.add(env_steps)
        assert rate.value == (140 - 100) / 2  # the slow start has left the window


class TestThroughputMonitor:
    def test_seconds_are_where_they_were_spent(self, tmp_path):
        class Slow(Callback):
            def on_train_epoch_end(self, trainer, pl_module):
                time.sleep(0.03)

        def collect_slowly(trainer):
            trainer.datamodule.collect_seconds += 0.01  # of a sleep that the data module would have measured
            time.sleep(0.01)

        monitor = ThroughputMonitor()
        evaluation = EvaluationCallback(every_env_steps=40, episodes=2)
        trainer = fit(tmp_path, [evaluation, Slow(), monitor], before_collect=collect_slowly)
        summary = monitor.summary()
        assert summary["env_steps"] == 100
        assert summary["collect_seconds"] >= 0.05
        assert summary["evaluate_seconds"] == evaluation.seconds > 0
        assert summary["update_seconds"] > 0
        assert summary["other_seconds"] >= 0.15
        parts = [summary[f"{name}_seconds"] for name in ("collect", "update", "evaluate", "other")]
        assert sum(parts) == pytest.approx(summary["total_seconds"])
        assert summary["env_steps_per_second"] == pytest.approx(100 / summary["total_seconds"])
        assert monitor.summary() == summary  # the clock stands still after training
        logged = {name for name in trainer.callback_metrics if name.startswith("time/")}
        assert logged == {
            "time/collect_seconds",
            "time/update_seconds",
            "time/evaluate_seconds",
            "time/other_seconds",
            "time/env_steps_per_second",
            "time/env_steps_per_second_total",
        }

    def test_no_summary_before_training(self):
        with pytest.raises(RuntimeError, match="before training"):
            ThroughputMonitor().summary()


class Terminal(io.StringIO):
    def isatty(self):
        return True


class TestProgressBar:
    def test_bar_on_a_terminal(self, tmp_path, monkeypatch):
        monkeypatch.setattr(sys, "stderr", Terminal())
        monkeypatch.setenv("COLUMNS", "300")
        bar = EnvStepProgressBar(total_env_steps=100, refresh_seconds=0)
        fit(tmp_path, [EvaluationCallback(every_env_steps=40, episodes=2), bar])
        drawn = sys.stderr.getvalue().split("\r")
        assert any(re.search(r"^ 40%\|.*\| 40\.0/100 env steps, return -?[\d.]+, win rate 50%", line) for line in drawn)
        last = [line for line in drawn if line.strip()][-1]
        assert re.search(r"100%.*eval return -?[\d.]+, eval win rate \d+%, [\d.]+k? env steps/s, 0:00:00 left", last)

    def test_lines_elsewhere(self, tmp_path, monkeypatch, capsys):
        clock = Clock()
        monkeypatch.setattr(progress, "time", clock)

        def three_seconds_a_rollout(trainer):
            clock.now += 3

        bar = EnvStepProgressBar(total_env_steps=200, refresh_seconds=0)
        fit(tmp_path, [bar], env_steps=200, before_collect=three_seconds_a_rollout)
        lines = [line for line in capsys.readouterr().err.splitlines() if "env steps," in line]
        assert [line.split(" env")[0] for line in lines] == ["80 of 200", "160 of 200", "200 of 200"]

    def test_time_left(self, tmp_path, monkeypatch):
        clock = Clock()
        monkeypatch.setattr("marl_lightning.callbacks.throughput.time", clock)
        bar = EnvStepProgressBar(total_env_steps=3700)
        trainer = fit(tmp_path, [bar], before_collect=lambda trainer: setattr(clock, "now", clock.now + 20))
        assert bar.status(trainer, trainer.lightning_module).endswith("1.00 env steps/s, 1:00:00 left")

    def test_can_be_disabled(self, tmp_path, capsys):
        bar = EnvStepProgressBar(total_env_steps=100)
        bar.disable()
        fit(tmp_path, [bar])
        assert "env steps," not in capsys.readouterr().err

    def test_prints_above_the_bar(self, capsys):
        EnvStepProgressBar(total_env_steps=1).print("a", 1)
        assert capsys.readouterr().err == "a 1\n"
