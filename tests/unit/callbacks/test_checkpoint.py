import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from dummies import WalkEnv, fit, traces
from lightning.pytorch.callbacks import Callback

from marl_lightning.callbacks import EnvStepCheckpoint, EvaluationCallback, TrainingInterrupted
from marl_lightning.callbacks.interrupt import SignalTrap


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def env_steps_of(path):
    return torch.load(path, weights_only=True)["marl_lightning"]["env_steps"]


def sidecar_of(path):
    """Returns the folder that a checkpoint says is its own, after checking that it is there and fits."""
    (state,) = [
        state for key, state in torch.load(path, weights_only=True)["callbacks"].items() if "EnvStepCheckpoint" in key
    ]
    folder = path.parent / f"{state['sidecar']}.state"
    assert torch.load(folder / "rank0.pt", weights_only=True)["env_steps"] == env_steps_of(path)
    return folder


def saver(folder, **kwargs):
    return EnvStepCheckpoint(**{"directory": folder, "every_env_steps": 20} | kwargs)


class Metric(Callback):
    """Puts a scripted metric where checkpoints look, after the rollouts that are named."""

    def __init__(self, script):
        self.script = script

    def on_train_epoch_end(self, trainer, pl_module):
        if pl_module.env_steps in self.script:
            trainer.callback_metrics["score"] = torch.tensor(self.script[pl_module.env_steps])


class TestFiles:
    def test_newest_are_kept(self, tmp_path):
        fit(tmp_path, [saver(tmp_path / "c", every_env_steps=30, keep_last=2)], env_steps=130)
        assert files(tmp_path / "c") == [
            "last.ckpt",
            "step_120.ckpt",
            "step_120.state",
            "step_140.ckpt",  # the end of training
            "step_140.state",
        ]
        assert sidecar_of(tmp_path / "c" / "last.ckpt").name == "step_140.state"

    def test_default_folder_is_that_of_the_logger(self, tmp_path):
        fit(tmp_path, [saver(None)], env_steps=20)
        assert "last.ckpt" in files(tmp_path / "lightning_logs" / "version_0" / "checkpoints")

    def test_end_is_saved_once(self, tmp_path):
        fit(tmp_path, [saver(tmp_path / "c", every_env_steps=1000)], env_steps=40)
        assert files(tmp_path / "c") == ["last.ckpt", "step_40.ckpt", "step_40.state"]

    def test_last_can_be_left_out(self, tmp_path):
        fit(tmp_path, [saver(tmp_path / "c", save_last=False, keep_last=1)], env_steps=40)
        assert files(tmp_path / "c") == ["step_40.ckpt", "step_40.state"]

    def test_copies_work_without_hard_links(self, tmp_path, monkeypatch):
        def no_links(*_):
            raise OSError("not supported")

        monkeypatch.setattr(os, "link", no_links)
        fit(tmp_path, [saver(tmp_path / "c", keep_last=1)], env_steps=60)
        assert files(tmp_path / "c") == ["last.ckpt", "step_60.ckpt", "step_60.state"]
        assert env_steps_of(tmp_path / "c" / "last.ckpt") == 60

    def test_taken_names_are_not_overwritten(self, tmp_path):
        fit(tmp_path, [saver(tmp_path / "c")], env_steps=20)
        before = (tmp_path / "c" / "step_20.ckpt").read_bytes()
        fit(tmp_path, [saver(tmp_path / "c")], env_steps=20)
        assert (tmp_path / "c" / "step_20.ckpt").read_bytes() == before
        assert sidecar_of(tmp_path / "c" / "last.ckpt").name == "step_20-v1.state"


class TestBest:
    @pytest.mark.parametrize(("mode", "best"), [("max", 40), ("min", 60)])
    def test_best_outlives_the_newest(self, tmp_path, mode, best):
        metric = Metric({20: 3.0, 40: 7.0, 60: 1.0, 80: 5.0, 100: 6.0})
        callback = saver(tmp_path / "c", monitor="score", mode=mode, keep_last=1)
        fit(tmp_path, [metric, callback])
        assert files(tmp_path / "c") == [
            "best.ckpt",
            "last.ckpt",
            "step_100.ckpt",
            "step_100.state",
            f"step_{best}.state",
        ]
        assert env_steps_of(tmp_path / "c" / "best.ckpt") == best
        assert sidecar_of(tmp_path / "c" / "best.ckpt").name == f"step_{best}.state"
        assert callback.best_model_path == str(tmp_path / "c" / "best.ckpt")

    def test_value_counts_for_the_parameters_it_was_measured_with(self, tmp_path):
        metric = Metric({40: 7.0, 100: 7.0})
        fit(tmp_path, [metric, saver(tmp_path / "c", every_env_steps=60, monitor="score", keep_last=9)])
        assert env_steps_of(tmp_path / "c" / "best.ckpt") == 40
        assert "step_60.ckpt" in files(tmp_path / "c")

    def test_old_best_goes_when_a_better_one_comes(self, tmp_path):
        metric = Metric({20: 1.0, 80: 2.0})
        fit(tmp_path, [metric, saver(tmp_path / "c", monitor="score", keep_last=1)], env_steps=120)
        assert [name for name in files(tmp_path / "c") if name.endswith(".state")] == [
            "step_120.state",
            "step_80.state",
        ]

    def test_final_evaluation_counts(self, tmp_path):
        callbacks = [
            saver(tmp_path / "c", monitor="eval/return_mean"),
            EvaluationCallback(every_env_steps=10**9, episodes=2),
        ]
        fit(tmp_path, callbacks, env_steps=60)
        assert env_steps_of(tmp_path / "c" / "best.ckpt") == 60
        assert callbacks[0].best_score is not None
        assert [name for name in files(tmp_path / "c") if "60" in name] == ["step_60.ckpt", "step_60.state"]

    def test_nan_is_never_best(self, tmp_path):
        fit(tmp_path, [Metric({20: float("nan"), 40: -5.0, 60: float("nan")}), saver(tmp_path / "c", monitor="score")])
        assert env_steps_of(tmp_path / "c" / "best.ckpt") == 40

    def test_unknown_metric_is_named(self, tmp_path):
        callback = saver(tmp_path / "c", monitor="eval/retrun")
        with pytest.warns(UserWarning, match=r"'eval/retrun' never had a value; there was .*train/return"):
            fit(tmp_path, [callback], env_steps=20)
        assert callback.best_model_path == ""


class TestResume:
    @pytest.mark.parametrize("name", ["step_40", "step_60", "last", "best"])
    def test_resumed_run_equals_the_uninterrupted_one(self, tmp_path, name):
        def callbacks(folder):
            return [
                EvaluationCallback(every_env_steps=30, episodes=2, at_end=False),
                saver(folder, monitor="eval/return_mean", keep_last=9),
            ]

        expected = traces(fit(tmp_path / "a", env_steps=140))
        fit(tmp_path / "b", callbacks(tmp_path / "b"), env_steps=80)
        shutil.move(tmp_path / "b", tmp_path / "moved")
        path = tmp_path / "moved" / f"{name}.ckpt"
        resumed = fit(tmp_path / "c", callbacks(tmp_path / "c"), env_steps=140, ckpt_path=path)
        assert traces(resumed) == expected

    def test_without_sidecar_there_is_a_warning(self, tmp_path):
        fit(tmp_path, [saver(tmp_path / "c")], env_steps=40)
        shutil.rmtree(tmp_path / "c" / "step_40.state")
        with pytest.warns(UserWarning, match=r"resume is not exact: .*last\.ckpt misses .*step_40\.state"):
            trainer = fit(tmp_path, [saver(tmp_path / "d")], ckpt_path=tmp_path / "c" / "last.ckpt")
        assert trainer.lightning_module.env_steps == 100

    def test_checkpoint_of_somebody_else_is_not_exact(self, tmp_path):
        trainer = fit(tmp_path, [saver(tmp_path / "c")], env_steps=40)
        trainer.save_checkpoint(tmp_path / "c" / "mine.ckpt")
        with pytest.warns(UserWarning, match=r"mine\.ckpt was not written by EnvStepCheckpoint"):
            fit(tmp_path, [saver(tmp_path / "d")], ckpt_path=tmp_path / "c" / "mine.ckpt")

    def test_game_that_cannot_be_saved_is_not_exact(self, tmp_path):
        env = WalkEnv(num_envs=4, can_checkpoint=False)
        fit(tmp_path, [saver(tmp_path / "c")], env_steps=40, env=env)
        with pytest.warns(UserWarning, match="resume is not exact: test/walk cannot be saved"):
            fit(tmp_path, [saver(tmp_path / "d")], ckpt_path=tmp_path / "c" / "last.ckpt", env=env)

    def test_other_number_of_processes_is_refused(self, tmp_path):
        fit(tmp_path, [saver(tmp_path / "c")], env_steps=40)
        shutil.copy(tmp_path / "c" / "step_40.state" / "rank0.pt", tmp_path / "c" / "step_40.state" / "rank1.pt")
        with pytest.raises(ValueError, match="state of 2 processes, but there are 1: resume with as many devices"):
            fit(tmp_path, [saver(tmp_path / "d")], ckpt_path=tmp_path / "c" / "last.ckpt")

    def test_sidecar_of_another_checkpoint_is_refused(self, tmp_path):
        fit(tmp_path, [saver(tmp_path / "c")], env_steps=40)
        shutil.copy(tmp_path / "c" / "step_20.state" / "rank0.pt", tmp_path / "c" / "step_40.state" / "rank0.pt")
        with pytest.raises(ValueError, match="env step 20 instead of 40"):
            fit(tmp_path, [saver(tmp_path / "d")], ckpt_path=tmp_path / "c" / "last.ckpt")

    def test_best_and_old_checkpoints_are_remembered(self, tmp_path):
        folder = tmp_path / "c"
        fit(tmp_path, [Metric({20: 9.0}), saver(folder, monitor="score", keep_last=2)], env_steps=60)
        metric = Metric({80: 5.0})
        fit(tmp_path, [metric, saver(folder, monitor="score", keep_last=2)], ckpt_path=folder / "last.ckpt")
        assert env_steps_of(folder / "best.ckpt") == 20
        assert [name for name in files(folder) if name.startswith("step")] == [
            "step_100.ckpt",
            "step_100.state",
            "step_20.state",
            "step_80.ckpt",
            "step_80.state",
        ]

    def test_past_the_end_nothing_is_done(self, tmp_path):
        fit(tmp_path, [saver(tmp_path / "c")], env_steps=40)
        before = files(tmp_path / "c")
        trainer = fit(tmp_path, [saver(tmp_path / "c")], env_steps=40, ckpt_path=tmp_path / "c" / "last.ckpt")
        assert trainer.lightning_module.env_steps == 40
        assert files(tmp_path / "c") == before


class Killed(BaseException):
    """Stands for a SIGKILL: the file system stays as it is at this moment, and nothing runs after it."""


OPERATIONS = [
    (Path, "mkdir"),
    (Path, "rename"),
    (Path, "replace"),
    (Path, "unlink"),
    (os, "link"),
    (shutil, "rmtree"),
    (torch, "save"),
]


def kill_at(monkeypatch, stage, *, folder, from_env_steps, trainers):
    """Kills at the ``stage``-th change of files after ``from_env_steps``; returns the list of changes so far."""
    log = []

    def wrap(owner, name):
        function = getattr(owner, name)

        def wrapper(*args, **kwargs):
            trainer = trainers[-1]
            if trainer.lightning_module.env_steps < from_env_steps or trainer.interrupted:
                return function(*args, **kwargs)
            log.append(name)
            if len(log) == stage:
                if name == "save":  # half a file
                    target = args[1]
                    if isinstance(target, Path):
                        target.write_bytes(b"half")
                raise Killed
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, wrapper)

    for owner, name in OPERATIONS:
        wrap(owner, name)
    return log


class Grab(Callback):
    def __init__(self, trainers):
        self.trainers = trainers

    def on_train_start(self, trainer, pl_module):
        self.trainers.append(trainer)


def check_every_checkpoint(folder):
    """Every checkpoint that can be seen is complete and has its own sidecar."""
    visible = list(folder.glob("*.ckpt"))
    for path in visible:
        sidecar_of(path)
    return {path.name: env_steps_of(path) for path in visible}


def test_kill_at_any_stage_damages_nothing(tmp_path, monkeypatch):
    """A third checkpoint is written, becomes best and last, and pushes out the first, and is killed in between."""
    expected = traces(fit(tmp_path / "whole", env_steps=100))
    metric = {20: 1.0, 60: 2.0}
    stage, seen = 0, set()
    while True:
        stage += 1
        folder, trainers = tmp_path / str(stage), []
        callbacks = [Metric(metric), Grab(trainers), saver(folder, monitor="score", keep_last=2)]
        with monkeypatch.context() as patch:
            log = kill_at(patch, stage, folder=folder, from_env_steps=60, trainers=trainers)
            try:
                fit(tmp_path / "logs", callbacks, env_steps=100, before_collect=stop_after(60))
            except Killed:
                pass
            except RuntimeError:
                break  # all stages are done
        checkpoints = check_every_checkpoint(folder)
        seen.add((checkpoints["last.ckpt"], checkpoints["best.ckpt"]))
        assert {40, checkpoints["last.ckpt"], checkpoints["best.ckpt"]} <= set(checkpoints.values())
        resumed = fit(
            tmp_path / "logs",
            [Metric(metric), saver(folder, monitor="score", keep_last=2)],
            env_steps=100,
            ckpt_path=folder / "last.ckpt",
        )
        assert traces(resumed) == expected
        assert not [name for name in files(folder) if "partial" in name]
    assert stage > 8
    assert log.count("rename") == 2
    assert seen == {(40, 20), (40, 60), (60, 60)}


def stop_after(env_steps):
    def stop(trainer):
        if trainer.lightning_module.env_steps == env_steps:
            raise RuntimeError("all stages are done")

    return stop


class TestInterrupt:
    @pytest.fixture(autouse=True)
    def _default_handlers(self):
        """A test runner in the background ignores SIGINT, and so would the callback."""
        before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        yield
        for signum, handler in before.items():
            signal.signal(signum, handler)

    @staticmethod
    def send(*signums, at):
        def interrupt(trainer):
            if trainer.lightning_module.env_steps == at:
                for signum in signums:
                    os.kill(os.getpid(), signum)

        return interrupt

    @pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
    def test_rollout_is_finished_and_the_run_can_be_resumed_exactly(self, tmp_path, signum, code):
        expected = traces(fit(tmp_path / "whole", env_steps=140))
        evaluation = EvaluationCallback(every_env_steps=10**9, episodes=2)
        with pytest.raises(TrainingInterrupted) as error:
            fit(
                tmp_path,
                [evaluation, saver(tmp_path / "c", every_env_steps=1000)],
                before_collect=self.send(signum, at=40),
            )
        assert (error.value.code, error.value.signum) == (code, signum)
        assert evaluation.seconds == 0  # no time for a last evaluation
        assert files(tmp_path / "c") == ["interrupted.ckpt", "last.ckpt", "step_60.ckpt", "step_60.state"]
        resumed = fit(
            tmp_path,
            [saver(tmp_path / "c", every_env_steps=1000)],
            env_steps=140,
            ckpt_path=tmp_path / "c" / "interrupted.ckpt",
        )
        assert traces(resumed) == expected
        assert "interrupted.ckpt" not in files(tmp_path / "c")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    def test_second_ctrl_c_interrupts_at_once_and_saves_nothing(self, tmp_path):
        with pytest.raises(SystemExit) as error:
            fit(tmp_path, [saver(tmp_path / "c")], before_collect=self.send(signal.SIGINT, signal.SIGINT, at=40))
        assert error.value.code == 1  # Lightning's
        assert "interrupted.ckpt" not in files(tmp_path / "c")
        assert env_steps_of(tmp_path / "c" / "last.ckpt") == 40

    def test_repeated_sigterm_is_still_graceful(self, tmp_path):
        with pytest.raises(TrainingInterrupted):
            fit(tmp_path, [saver(tmp_path / "c")], before_collect=self.send(signal.SIGTERM, signal.SIGTERM, at=40))

    def test_sigterm_that_lightning_caught_counts(self, tmp_path):
        class Early(Callback):
            def on_train_start(self, trainer, pl_module):  # before checkpoint callbacks
                os.kill(os.getpid(), signal.SIGTERM)

        with pytest.raises(TrainingInterrupted) as error:
            fit(tmp_path, [Early(), saver(tmp_path / "c")])
        assert error.value.code == 143
        assert env_steps_of(tmp_path / "c" / "interrupted.ckpt") == 20

    def test_other_errors_leave_the_last_good_one(self, tmp_path):
        with pytest.raises(RuntimeError, match="all stages"):
            fit(tmp_path, [saver(tmp_path / "c", every_env_steps=30)], before_collect=stop_after(80))
        assert env_steps_of(tmp_path / "c" / "last.ckpt") == 60
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def test_training_in_a_thread_works_without_handlers(self, tmp_path):
        thread = threading.Thread(target=fit, args=(tmp_path, [saver(tmp_path / "c")]))
        thread.start()
        thread.join()
        assert env_steps_of(tmp_path / "c" / "last.ckpt") == 100

    def test_ignored_signals_stay_ignored(self):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        trap = SignalTrap()
        trap.install()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        trap.remove()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    def test_processes_stop_together_when_one_is_told(self, tmp_path):
        """Two processes, and a SIGTERM for the second one only."""
        script = tmp_path / "script.py"
        script.write_text(f"""
import json, os, signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import lightning
from dummies import WalkDataModule, WalkEnv, WalkModule
from lightning.pytorch.callbacks import Callback
from marl_lightning.callbacks import EnvStepCheckpoint, EvaluationCallback

class Report(Callback):
    def on_exception(self, trainer, pl_module, exception):
        metrics = {{name: float(value) for name, value in trainer.callback_metrics.items() if name[:5] == "eval/"}}
        weights = [p.tolist() for p in pl_module.parameters()]
        with open(f"report{{trainer.global_rank}}.json", "w") as file:
            json.dump({{"metrics": metrics, "weights": weights}}, file)

def interrupt(trainer):
    if trainer.lightning_module.env_steps == 80 and trainer.global_rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)

trainer = lightning.Trainer(
    accelerator="cpu", devices=2, strategy="ddp", max_epochs=-1, use_distributed_sampler=False, logger=False,
    enable_progress_bar=False, enable_model_summary=False,
    callbacks=[
        EvaluationCallback(every_env_steps=80, episodes=5),
        EnvStepCheckpoint(directory="c", every_env_steps=80, monitor="eval/return_mean"),
        Report(),
    ],
)
seed = 7 + 100 * int(os.environ.get("LOCAL_RANK", 0))
lightning.seed_everything(3)
trainer.fit(WalkModule(), datamodule=WalkDataModule(env=WalkEnv(num_envs=4, seed=seed), before_collect=interrupt))
""")
        done = subprocess.run(
            [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 143, done.stderr
        assert "stopped by SIGTERM at env step 120" in done.stderr
        folder = tmp_path / "c"
        assert {"best.ckpt", "interrupted.ckpt", "last.ckpt"} <= set(files(folder))
        assert env_steps_of(folder / "interrupted.ckpt") == 120
        assert files(sidecar_of(folder / "interrupted.ckpt")) == ["rank0.pt", "rank1.pt"]
        first, second = (json.loads((tmp_path / f"report{rank}.json").read_text()) for rank in (0, 1))
        assert first == second
        wins = 5 * first["metrics"]["eval/win_rate"]  # five episodes in all, and not six
        assert wins == pytest.approx(round(wins))
