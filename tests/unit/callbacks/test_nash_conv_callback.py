"""NashConv during training: its numbers, that it leaves no trace, what it refuses, and how it is interrupted."""

from __future__ import annotations

import csv
import dataclasses
import os
import random
import signal
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import lightning
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping
from lightning.pytorch.loggers import CSVLogger

from marl_lightning.algorithms import IPPO, IQL, MAPPO, MFQ, QLearningModule
from marl_lightning.callbacks import (
    EnvStepCheckpoint,
    EnvStepProgressBar,
    NashConvCallback,
    StopAtEnvSteps,
    ThroughputMonitor,
    TrainingInterrupted,
)
from marl_lightning.callbacks import nash_conv as module_under_test
from marl_lightning.data import ReplayDataModule, RolloutDataModule
from marl_lightning.envs import make_vector_env
from marl_lightning.games import MatrixEvaluator, NashConvResult, OpenSpielEvaluator, nash_conv, openspiel
from marl_lightning.games.learned import PRESETS, LearnedEvaluator

ROCK, KUHN = "matrix/rock_paper_scissors", "openspiel/kuhn_poker"
ROLLOUT = 32
"""Env steps of a rollout in :func:`fit`."""


def on_policy(kind, **options):
    return lambda: kind(hidden_sizes=(8,), num_epochs=1, **options)


def iql():
    return IQL(hidden_sizes=(8,), log_every_env_steps=ROLLOUT)


def data_for(module, env):
    if not isinstance(module, QLearningModule):
        return RolloutDataModule(env=env, rollout_length=ROLLOUT // env.num_envs)
    sizes = {"capacity": 500, "batch_size": 8, "start_training": 8, "training_frequency": 16, "updates_per_batch": 2}
    return ReplayDataModule(env=env, rollout_length=4, **sizes)


IPPO_MLP = on_policy(IPPO)


def fit(folder, callbacks=(), *, make=IPPO_MLP, game=ROCK, env_steps=4 * ROLLOUT, ckpt_path=None, bar=False):
    """Trains from a fixed seed and returns the trainer."""
    if game.startswith("openspiel"):
        pytest.importorskip("pyspiel")
    lightning.seed_everything(3, verbose=False)
    module = make()
    trainer = lightning.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        max_epochs=-1,
        callbacks=[StopAtEnvSteps(env_steps), *callbacks],
        logger=CSVLogger(folder),
        enable_progress_bar=bar,
        enable_checkpointing=any(isinstance(callback, EnvStepCheckpoint) for callback in callbacks),
        enable_model_summary=False,
    )
    options = {ROCK: {"episode_length": 3}, KUHN: {"vectorization": "sync"}}
    env = make_vector_env(game, num_envs=4, seed=5, **options.get(game, {}))
    trainer.fit(module, datamodule=data_for(module, env), ckpt_path=ckpt_path)
    return trainer


def logged(folder, name="nashconv/value"):
    """Returns env step and value of each time that a metric was logged."""
    with next(folder.rglob("metrics.csv")).open() as file:
        return [(int(row["step"]), float(row[name])) for row in csv.DictReader(file) if row.get(name)]


def traces(trainer):
    """Returns all that must be equal after equal trainings."""
    module, data = trainer.lightning_module, trainer.datamodule
    return {
        "weights": str({name: value.tolist() for name, value in module.state_dict().items()}),
        "optimizer": str(module.optimizers().state_dict()),
        "training": [m.training for m in module.modules()],
        "counters": (module.env_steps, module.updates, trainer.global_step),
        "data": str(data.local_state_dict()),
        "torch": torch.get_rng_state().tolist(),
        "numpy": str(np.random.get_state()),  # noqa: NPY002
        "python": random.getstate(),
    }


EXACT = NashConvResult.exact(
    agents=("a", "b"), on_policy=(0.5, -1.0), best_response_values=(0.75, 1.0), wall_seconds=0.25
)


class Searching:
    """Plays and draws as if it learned, and estimates always the same.

    Args:
        during: called in the middle.
        result: what is returned.
    """

    def __init__(self, during=lambda: None, **result):
        self.during, self.result, self.games = during, result, []

    def evaluate(self, profile, game, *, mode="stochastic"):
        self.games.append(game)
        for submodule in profile.modules():
            submodule.eval()  # carelessly, for good
        random.random(), np.random.rand(), torch.rand(3)  # noqa: NPY002
        game.reset(seed=1)
        self.during()
        return dataclasses.replace(
            EXACT, **{"bound": "lower", "interval": (1.0, 3.0), "episodes": 100, "env_steps": 77, **self.result}
        )


def due(**options):
    return NashConvCallback(**{"every_env_steps": 2 * ROLLOUT} | options)


# Numbers --------------------------------------------------------------------------------------------------------------


def test_numbers_of_kuhn_poker(tmp_path):
    """A new IQL explores always, so that it mixes evenly: the gains are 3/8 and 13/24, and payoffs are in [-2, 2]."""
    callback = NashConvCallback(at_start=True, at_end=False)
    metrics = fit(tmp_path, [callback], make=iql, game=KUHN).callback_metrics
    found = {name: float(value) for name, value in metrics.items() if name.startswith("nashconv/")}
    assert found.pop("nashconv/seconds") > 0
    assert found == pytest.approx(
        {
            "nashconv/value": 11 / 12,
            "nashconv/ci_low": 11 / 12,
            "nashconv/ci_high": 11 / 12,
            "nashconv/normalised": 11 / 48,
            "nashconv/gain/player_0": 3 / 8,
            "nashconv/gain/player_1": 13 / 24,
            "nashconv/on_policy/player_0": 1 / 8,
            "nashconv/on_policy/player_1": -1 / 8,
            "nashconv/best_response/player_0": 1 / 2,
            "nashconv/best_response/player_1": 5 / 12,
            "nashconv/is_exact": 1.0,
            "nashconv/env_steps": 0.0,
        },
        abs=1e-6,
    )
    assert callback.result.value == pytest.approx(11 / 12)
    assert logged(tmp_path) == [(0, pytest.approx(11 / 12))]


def test_the_last_result_is_that_of_the_trained_policy(tmp_path):
    callback = due(at_start=True)
    trainer = fit(tmp_path, [callback])
    again = nash_conv(trainer.lightning_module.policy, trainer.datamodule.env)
    assert callback.result.gains == again.gains
    values = logged(tmp_path)
    assert [step for step, _ in values] == [0, 64, 128]
    assert values[-1][1] == again.value
    assert len({value for _, value in values}) == 3  # it has learned meanwhile


def test_a_greedy_profile_is_pure(tmp_path):
    callback = NashConvCallback(mode="greedy")
    fit(tmp_path, [callback])
    assert callback.result.value == 2 * 3  # of rock, paper, scissors, in each of three repetitions


def test_estimates_are_logged_as_such(tmp_path):
    metrics = fit(tmp_path, [NashConvCallback(evaluator=Searching())]).callback_metrics
    found = {name: float(value) for name, value in metrics.items() if name.startswith("nashconv/")}
    assert found == {
        "nashconv/value": 2.25,
        "nashconv/ci_low": 1.0,
        "nashconv/ci_high": 3.0,
        "nashconv/gain/a": 0.25,
        "nashconv/gain/b": 2.0,
        "nashconv/on_policy/a": 0.5,
        "nashconv/on_policy/b": -1.0,
        "nashconv/best_response/a": 0.75,
        "nashconv/best_response/b": 1.0,
        "nashconv/is_exact": 0.0,
        "nashconv/env_steps": 77.0,
        "nashconv/seconds": 0.25,
    }


# When -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [128]),
        ({"every_env_steps": 50}, [64, 128]),  # the end is no other evaluation
        ({"every_env_steps": 60}, [64, 128]),
        ({"every_env_steps": 90}, [96, 128]),
        ({"every_env_steps": 90, "at_end": False}, [96]),
        ({"at_start": True, "at_end": False}, [0]),
    ],
)
def test_evaluates_when_due_and_at_both_ends(tmp_path, options, expected):
    fit(tmp_path, [NashConvCallback(**options)])
    assert [step for step, _ in logged(tmp_path)] == expected


def test_resumed_run_goes_on_with_the_interval(tmp_path):
    def callbacks():
        checkpoint = EnvStepCheckpoint(directory=tmp_path / "c", every_env_steps=10**6)
        return [NashConvCallback(every_env_steps=100, at_start=True, at_end=False), checkpoint]

    fit(tmp_path / "a", callbacks(), env_steps=160)
    fit(tmp_path / "b", callbacks(), env_steps=290, ckpt_path=tmp_path / "c" / "last.ckpt")
    assert [step for step, _ in logged(tmp_path / "a")] == [0, 128]
    assert [step for step, _ in logged(tmp_path / "b")] == [224, 320]


def test_a_run_that_is_resumed_at_its_end_is_not_evaluated_again(tmp_path):
    def callbacks(evaluator):
        checkpoint = EnvStepCheckpoint(directory=tmp_path / "c", every_env_steps=10**6)
        return [NashConvCallback(evaluator=evaluator), checkpoint]

    first, second = Searching(), Searching()
    fit(tmp_path / "a", callbacks(first))
    fit(tmp_path / "b", callbacks(second), ckpt_path=tmp_path / "c" / "last.ckpt")
    assert (len(first.games), len(second.games)) == (1, 0)


# No trace -------------------------------------------------------------------------------------------------------------

METHODS = {
    "ippo": IPPO_MLP,
    "mappo": on_policy(MAPPO),
    "ippo-gru": on_policy(IPPO, recurrent=True, chunk_length=4),
    "iql": iql,
}


@pytest.mark.parametrize("game", [ROCK, KUHN])
@pytest.mark.parametrize("method", METHODS)
def test_training_is_the_same_with_and_without(tmp_path, method, game):
    options = {"make": METHODS[method], "game": game, "env_steps": 2 * ROLLOUT}
    expected = traces(fit(tmp_path / "without", **options))
    for evaluator in ("auto", Searching()):
        callback = NashConvCallback(every_env_steps=ROLLOUT, at_start=True, evaluator=evaluator)
        assert traces(fit(tmp_path / type(evaluator).__name__, [callback], **options)) == expected
        assert len(logged(tmp_path / type(evaluator).__name__)) == 3


@pytest.mark.parametrize("method", ["ippo-gru", "iql"])
def test_learning_responses_leaves_no_trace_either(tmp_path, method):
    options = {"make": METHODS[method], "env_steps": 2 * ROLLOUT}
    expected = traces(fit(tmp_path / "without", **options))
    search = LearnedEvaluator(preset="quick", env_steps=64, select_episodes=20, report_episodes=600, hidden_sizes=(8,))
    callback = NashConvCallback(every_env_steps=ROLLOUT, evaluator=search)
    assert traces(fit(tmp_path / "with", [callback], **options)) == expected
    assert callback.result.bound == "lower"


def test_searches_are_seeded_and_shown_where_they_are_only_named(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(LearnedEvaluator, "evaluate", lambda search, *_, **__: made.append(search) or EXACT)
    fit(tmp_path, [NashConvCallback(evaluator="learned:quick", seed=99)])
    fit(tmp_path, [NashConvCallback(evaluator="learned"), EnvStepProgressBar(total_env_steps=128)], bar=True)
    assert [search.seed for search in made] == [99, 12345]
    assert [search.progress for search in made] == [False, True]
    assert [search.budget for search in made] == [PRESETS["quick"], PRESETS["standard"]]


@pytest.mark.parametrize("fails", [False, True])
def test_playing_is_done_in_an_environment_of_its_own(tmp_path, monkeypatch, fails):
    def fail():
        raise RuntimeError("no response was found")

    made, closed, env_class = [], [], type(make_vector_env(ROCK, num_envs=1))
    replicate = env_class.replicate

    def spy(env, **arguments):
        made.append((replicate(env, **arguments), arguments))
        made[-1][0].close = lambda: closed.append(True)
        return made[-1][0]

    monkeypatch.setattr(env_class, "replicate", spy)
    searching = Searching(fail if fails else lambda: None)
    with pytest.raises(RuntimeError) if fails else nullcontext():
        fit(tmp_path, [NashConvCallback(evaluator=searching, seed=99)])
    assert made == [(searching.games[0], {"num_envs": 4, "seed": 99})]
    assert closed == [True]


def test_the_tree_of_a_game_is_walked_through_once(tmp_path, monkeypatch):
    walks, walk = [], openspiel._walk
    monkeypatch.setattr(openspiel, "_walk", lambda *args, **kwargs: walks.append(1) or walk(*args, **kwargs))
    fit(tmp_path, [NashConvCallback(every_env_steps=ROLLOUT, at_start=True)], game=KUHN)
    assert len(logged(tmp_path)) == 5
    assert len(walks) == 1


# Others that use it ---------------------------------------------------------------------------------------------------


class Falling(Searching):
    """Estimates one value after another."""

    def __init__(self, *values):
        super().__init__()
        self.values = list(values)

    def evaluate(self, profile, game, *, mode="stochastic"):
        return dataclasses.replace(EXACT, value=self.values.pop(0))


def test_checkpoints_keep_the_best(tmp_path):
    callback = NashConvCallback(every_env_steps=ROLLOUT, evaluator=Falling(3.0, 1.0, 2.0, 4.0))
    saver = EnvStepCheckpoint(directory=tmp_path / "c", every_env_steps=10**6, monitor="nashconv/value", mode="min")
    fit(tmp_path, [saver, callback])  # in any order: Lightning puts checkpoints last
    assert saver.best_score == 1.0
    assert torch.load(saver.best_model_path, weights_only=True)["marl_lightning"]["env_steps"] == 64


def test_the_final_value_counts_for_checkpoints(tmp_path):
    saver = EnvStepCheckpoint(directory=tmp_path / "c", every_env_steps=10**6, monitor="nashconv/value", mode="min")
    fit(tmp_path, [NashConvCallback(every_env_steps=96, evaluator=Falling(3.0, 1.0)), saver])
    assert torch.load(saver.best_model_path, weights_only=True)["marl_lightning"]["env_steps"] == 128


def test_early_stopping_uses_it(tmp_path):
    callback = NashConvCallback(every_env_steps=40, at_end=False, evaluator=Falling(3.0, 1.0, 2.0))
    stopping = EarlyStopping("nashconv/value", patience=1, strict=False)
    assert fit(tmp_path, [callback, stopping], env_steps=10**6).lightning_module.env_steps == 4 * ROLLOUT


def test_its_time_is_that_of_evaluations(tmp_path):
    throughput = ThroughputMonitor()
    callback = NashConvCallback(evaluator=Searching(during=lambda: time.sleep(0.3)))
    fit(tmp_path, [throughput, callback])
    assert callback.seconds >= 0.3
    assert throughput.summary()["evaluate_seconds"] == callback.seconds


@pytest.mark.parametrize(("seconds", "steps"), [(0.4, [64, 128]), (0.0, [])])
def test_whoever_watches_is_told_what_takes_so_long(tmp_path, monkeypatch, capsys, seconds, steps):
    monkeypatch.setattr(module_under_test, "_MOMENT", 0.2)
    bar, searching = EnvStepProgressBar(total_env_steps=128), Searching(during=lambda: time.sleep(seconds))
    fit(tmp_path, [bar, due(evaluator=searching)], bar=True)
    time.sleep(0.3)  # nothing is told when it is over
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("NashConv")]
    assert told == [f"NashConv of env step {step} by Searching takes a while" for step in steps]


def test_the_progress_bar_shows_it(tmp_path, capsys):
    fit(tmp_path, [EnvStepProgressBar(total_env_steps=128), due(evaluator=Searching())], bar=True)
    assert "NashConv 2.25, " in capsys.readouterr().err


# Snapshots ------------------------------------------------------------------------------------------------------------


def test_learned_responses_are_kept(tmp_path):
    responses = {"a": {"online": {"weight": torch.ones(2)}}}
    callback = due(evaluator=Searching(snapshots=responses), directory=tmp_path / "responses")
    fit(tmp_path, [callback])
    assert sorted(path.name for path in (tmp_path / "responses").iterdir()) == ["128.pt", "64.pt"]
    written = torch.load(tmp_path / "responses" / "64.pt", weights_only=True)
    assert written["env_steps"] == 64
    assert written["result"]["value"] == 2.25
    assert written["snapshots"]["a"]["online"]["weight"].tolist() == [1.0, 1.0]


def test_the_default_folder_is_that_of_the_logger(tmp_path):
    fit(tmp_path, [NashConvCallback(evaluator=Searching(snapshots={"a": {}}))])
    assert (tmp_path / "lightning_logs" / "version_0" / "nash_conv" / "128.pt").exists()


def test_what_is_computed_writes_nothing(tmp_path):
    fit(tmp_path, [NashConvCallback(directory=tmp_path / "responses")])
    assert not (tmp_path / "responses").exists()


def test_a_file_is_there_completely_or_not_at_all(tmp_path, monkeypatch):
    def half(state, path):
        Path(path).write_bytes(b"half")
        raise OSError("the disk is full")

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(OSError, match="the disk is full"):
        fit(tmp_path, [NashConvCallback(evaluator=Searching(snapshots={"a": {}}), directory=tmp_path / "responses")])
    assert not list((tmp_path / "responses").glob("*.pt"))


# Which policy ---------------------------------------------------------------------------------------------------------


def test_average_policies_are_evaluated_where_there_are_some(tmp_path):
    class Averaging(IPPO):
        @property
        def average_policy(self):
            return self.other.policy

        def build(self, spec):
            super().build(spec)
            self.other = IPPO(spec=spec, hidden_sizes=(4,), output_gain=5.0)

    current, average = NashConvCallback(), NashConvCallback(policy="average")
    fit(tmp_path, [current], make=on_policy(Averaging))
    trainer = fit(tmp_path, [average], make=on_policy(Averaging))
    expected = nash_conv(trainer.lightning_module.other.policy, trainer.datamodule.env).value
    assert average.result.value == expected > 2 * current.result.value


# Mistakes -------------------------------------------------------------------------------------------------------------


def refused(folder, callback, *, error, match, **options):
    """Checks that a training is refused before anything is written or played."""
    collected = []

    class Collects(Callback):
        def on_train_start(self, trainer, pl_module):
            collected.append(True)

    with pytest.raises(error, match=match):
        fit(folder, [callback, Collects()], **options)
    assert not collected
    assert [path for path in folder.rglob("*") if path.is_file()] == []


def test_games_without_exact_evaluation_are_refused_at_once(tmp_path):
    match = r"lbf/Foraging.* has no exact evaluation.*openspiel/<game> and matrix/<game>"
    refused(tmp_path, NashConvCallback(), error=ValueError, match=match, game="lbf/Foraging-5x5-2p-1f-v3")


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"policy": "average"}, ValueError, "IPPO has no average policy: set policy='current'.*NFSP"),
        ({"evaluator": "openspiel"}, ValueError, "cannot find a game of OpenSpiel in matrix/rock_paper_scissors"),
        ({"evaluator": LearnedEvaluator(agents=["agent_9"])}, ValueError, r"agents has \['agent_9'\]"),
        ({"evaluator": LearnedEvaluator(payoff="satisfaction")}, ValueError, "MonitorParallelEnv"),
    ],
)
def test_mistakes_are_found_at_once(tmp_path, options, error, match):
    refused(tmp_path, NashConvCallback(**options), error=error, match=match)


def test_games_that_are_too_large_are_refused_at_once(tmp_path):
    evaluator = OpenSpielEvaluator(max_information_states=5)
    match = r"too large for an exact evaluation.*max_information_states"
    refused(tmp_path, NashConvCallback(evaluator=evaluator), error=ValueError, match=match, game=KUHN)


def test_policies_without_probabilities_are_refused_at_once(tmp_path):
    refused(tmp_path, NashConvCallback(), error=TypeError, match="mean-field", make=MFQ)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"every_env_steps": 0}, "every_env_steps=0"),
        ({"at_end": False}, "there would be no evaluation: set every_env_steps, at_start or at_end"),
        ({"evaluator": "openspeil"}, "evaluator='openspeil': must be 'auto', 'matrix', .*; did you mean 'openspiel'?"),
        ({"evaluator": 3}, "evaluator=3: must be .* or an instance of Evaluator"),
        ({"policy": "last"}, "policy='last': must be 'current' or 'average'"),
        ({"mode": "gredy"}, "mode='gredy': must be 'stochastic' or 'greedy'; did you mean 'greedy'?"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_arguments_are_checked(options, match):
    with pytest.raises(ValueError, match=match.replace("?", r"\?")):
        NashConvCallback(**options)


def test_evaluators_are_objects_too():
    assert isinstance(NashConvCallback(evaluator=MatrixEvaluator()).evaluator, MatrixEvaluator)


# Interruption ---------------------------------------------------------------------------------------------------------


class TestInterruption:
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
    def saver(folder):
        return EnvStepCheckpoint(directory=folder, every_env_steps=10**6)

    @pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
    def test_a_search_ends_at_once_and_the_run_can_be_resumed_exactly(self, tmp_path, signum, code):
        expected = traces(fit(tmp_path / "whole"))
        ended = []

        def interrupted():
            try:
                os.kill(os.getpid(), signum)
                time.sleep(60)
            finally:
                ended.append(time.perf_counter())

        callback = due(evaluator=Searching(interrupted))
        start = time.perf_counter()
        with pytest.raises(TrainingInterrupted) as error:
            fit(tmp_path, [callback, self.saver(tmp_path / "c")])
        assert time.perf_counter() - start < 30
        assert (error.value.signum, error.value.code) == (signum, code)
        assert len(ended) == 1
        assert callback.result is None
        resumed = fit(
            tmp_path / "rest",
            [due(evaluator=Searching()), self.saver(tmp_path / "c")],
            ckpt_path=tmp_path / "c" / "interrupted.ckpt",
        )
        assert resumed.lightning_module.env_steps == 128
        assert traces(resumed) == expected
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    def test_learning_responses_is_interrupted_in_the_middle(self, tmp_path, monkeypatch):
        """Which a training inside of the training does not take for its own Ctrl-C."""
        expected = traces(fit(tmp_path / "whole"))
        search = LearnedEvaluator(preset="quick", hidden_sizes=(8,))
        steps, step = [], IQL.training_step

        def interrupted(module, *batch):
            steps.append(step(module, *batch))
            if len(steps) == 3:
                os.kill(os.getpid(), signal.SIGINT)

        monkeypatch.setattr(IQL, "training_step", interrupted)
        with pytest.raises(TrainingInterrupted):
            fit(tmp_path, [due(evaluator=search), self.saver(tmp_path / "c")])
        assert len(steps) == 3
        interrupted_at = tmp_path / "c" / "interrupted.ckpt"
        assert traces(fit(tmp_path / "rest", [self.saver(tmp_path / "c")], ckpt_path=interrupted_at)) == expected

    def test_a_second_ctrl_c_ends_the_cleaning_up_too(self, tmp_path):
        def interrupted():
            try:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(60)
            finally:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(60)

        start = time.perf_counter()
        with pytest.raises(SystemExit) as error:
            fit(tmp_path, [due(evaluator=Searching(interrupted)), self.saver(tmp_path / "c")])
        assert time.perf_counter() - start < 30
        assert error.value.code == 1  # Lightning's
        assert not (tmp_path / "c").exists()

    def test_without_checkpoints_it_is_an_ordinary_ctrl_c(self, tmp_path):
        with pytest.raises(SystemExit) as error:
            fit(tmp_path, [due(evaluator=Searching(lambda: os.kill(os.getpid(), signal.SIGINT)))])
        assert error.value.code == 1
        signal.signal(signal.SIGINT, signal.default_int_handler)  # Lightning left it ignored

    def test_an_evaluator_that_ends_itself_leaves_earlier_checkpoints(self, tmp_path):
        def give_up():
            raise KeyboardInterrupt

        searching = Searching()
        saver = EnvStepCheckpoint(directory=tmp_path / "c", every_env_steps=ROLLOUT)
        searching.during = lambda: give_up() if len(searching.games) == 2 else None
        with pytest.raises(SystemExit):
            fit(tmp_path, [NashConvCallback(every_env_steps=ROLLOUT, evaluator=searching), saver])
        checkpoint = torch.load(tmp_path / "c" / "last.ckpt", weights_only=True)
        assert checkpoint["marl_lightning"]["env_steps"] == ROLLOUT
        signal.signal(signal.SIGINT, signal.default_int_handler)  # Lightning left it ignored

    def test_a_signal_before_an_evaluation_leaves_it_out(self, tmp_path):
        class Early(Callback):
            def on_train_batch_end(self, trainer, pl_module, *_):
                if pl_module.env_steps == 64:
                    os.kill(os.getpid(), signal.SIGINT)

        searching = Searching()
        with pytest.raises(TrainingInterrupted):
            fit(tmp_path, [Early(), due(evaluator=searching), self.saver(tmp_path / "c")])
        assert searching.games == []

    def test_an_interrupted_last_evaluation_leaves_a_finished_training(self, tmp_path):
        callback = NashConvCallback(evaluator=Searching(lambda: os.kill(os.getpid(), signal.SIGINT)))
        trainer = fit(tmp_path, [callback, self.saver(tmp_path / "c")])
        assert callback.result is None
        assert trainer.lightning_module.env_steps == 128
        checkpoint = torch.load(tmp_path / "c" / "last.ckpt", weights_only=True)
        assert checkpoint["marl_lightning"]["env_steps"] == 128


def test_errors_put_random_states_back_too(tmp_path):
    class Sees(Callback):
        def on_exception(self, trainer, pl_module, exception):
            self.traces = traces(trainer)

    def broken():
        raise RuntimeError("no response was found")

    sees, expected = Sees(), traces(fit(tmp_path / "without", env_steps=2 * ROLLOUT))
    with pytest.raises(RuntimeError, match="no response was found"):
        fit(tmp_path / "with", [due(evaluator=Searching(broken)), sees])
    assert sees.traces == expected


# Several processes ----------------------------------------------------------------------------------------------------

TWO_PROCESSES = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
import lightning, torch
from lightning.pytorch.strategies import DDPStrategy
from test_nash_conv_callback import Searching
from marl_lightning.algorithms import IPPO
from marl_lightning.callbacks import NashConvCallback, StopAtEnvSteps
from marl_lightning.data import RolloutDataModule
from marl_lightning.envs import make_vector_env

def broken():
    raise RuntimeError("no response was found")

def run(*callbacks):
    lightning.seed_everything(0, verbose=False)
    env = make_vector_env("matrix/rock_paper_scissors", num_envs=4, seed=5, episode_length=3)
    module = IPPO(spec=env.spec, hidden_sizes=(8,), num_epochs=1)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=DDPStrategy(forward_sync_buffers=False), max_epochs=-1, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, default_root_dir=sys.argv[1],
        callbacks=[StopAtEnvSteps(192), *callbacks],
    )
    error = ""
    try:
        trainer.fit(module, datamodule=RolloutDataModule(env=env, rollout_length=8))
    except Exception as raised:
        error = str(raised)
    numbers = {{k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("nashconv/")}}
    return {{"weights": module.state_dict(), "metrics": numbers, "error": error, "rank": trainer.global_rank}}

torch.set_num_threads(1)
searching = Searching(lambda: time.sleep(0.5), snapshots={{"a": {{}}}})
reports = {{
    "without": run(),
    "exact": run(NashConvCallback(every_env_steps=64)),
    "search": run(NashConvCallback(every_env_steps=64, evaluator=searching, directory=sys.argv[1] + "/responses")),
    "broken": run(NashConvCallback(every_env_steps=64, evaluator=Searching(broken))),
    "refused": run(NashConvCallback(evaluator="openspiel")),
    "again": run(NashConvCallback(every_env_steps=64)),
    "calls": len(searching.games),
}}
torch.save(reports, sys.argv[1] + f"/rank{{reports['without']['rank']}}.pt")
"""


def test_the_first_of_two_processes_computes(tmp_path):
    """Both know the result and go on as if nothing was, and both raise if there is none."""
    script = tmp_path / "two.py"
    script.write_text(TWO_PROCESSES)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": "0"}
    processes = [
        subprocess.Popen(
            [sys.executable, script, tmp_path],
            env=common | {"LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]
    outputs = [process.communicate(timeout=240)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    first, second = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in (0, 1))
    for report in (first, second):
        for name, weights in report["without"]["weights"].items():
            for what in ("exact", "search", "again"):
                assert torch.equal(report[what]["weights"][name], weights), what
    assert [first[what]["error"] for what in ("without", "exact", "search", "again")] == [""] * 4
    assert (first["calls"], second["calls"]) == (3, 0)
    for what in ("exact", "search", "again"):
        assert first[what]["metrics"] == second[what]["metrics"] != {}
    assert first["search"]["metrics"]["nashconv/gain/b"] == 2.0
    assert sorted(path.name for path in (tmp_path / "responses").iterdir()) == ["128.pt", "192.pt", "64.pt"]
    assert first["broken"]["error"] == "no response was found"
    assert second["broken"]["error"] == "NashConv failed in the first process: RuntimeError: no response was found"
    assert first["refused"]["error"].startswith("cannot find a game of OpenSpiel in matrix/rock_paper_scissors")
    assert second["refused"]["error"].endswith(first["refused"]["error"])
