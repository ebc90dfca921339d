"""``scripts/nash_conv.py``: its numbers, its files and its messages."""

from __future__ import annotations

import dataclasses
import json
import runpy
import shutil
import sys
from pathlib import Path

import hydra
import imageio.v3 as imageio
import pytest

from marl_lightning import plotting, train
from marl_lightning.configuration import config_dir
from marl_lightning.envs import make_vector_env
from marl_lightning.evaluation import load_checkpoint
from marl_lightning.games import NashConvResult, nash_conv

SCRIPT = Path(__file__).parents[2] / "scripts" / "nash_conv.py"
KUHN = ("+experiment=ippo_matrix", "env=openspiel", "env.vectorization=sync", "callbacks=nash_conv")
REPLAY = (
    "data.start_training=100",
    "data.training_frequency=50",
    "data.batch_size=4",
    "data.capacity=500",
    "algorithm.hidden_sizes=[8]",
)
SEARCH = (
    "evaluator=learned:quick",
    "learned.env_steps=64",
    "learned.select_episodes=20",
    "learned.report_episodes=600",
)
"""Settings of a search of a second, which finds next to nothing."""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def kuhn(compose, small, tmp_path) -> str:
    """The last checkpoint of a short training of IPPO on Kuhn poker, after which NashConv was computed."""
    pytest.importorskip("pyspiel")
    train(compose(*KUHN, *small))
    return str(tmp_path / "run" / "checkpoints" / "last.ckpt")


@pytest.fixture(scope="module")
def trained(small, tmp_path_factory) -> Path:
    """The run folder of a short training of IPPO on rock, paper, scissors."""
    folder = tmp_path_factory.mktemp("rock") / "run"
    overrides = ["+experiment=ippo_matrix", "env.scenario=rock_paper_scissors", *small, f"paths.output_dir={folder}"]
    with hydra.initialize_config_dir(str(config_dir()), version_base="1.3"):
        train(hydra.compose("train", overrides=overrides))
    return folder


@pytest.fixture
def rock(trained, tmp_path) -> str:
    """The last checkpoint of a copy of :func:`trained`."""
    shutil.copytree(trained, tmp_path / "run")
    return str(tmp_path / "run" / "checkpoints" / "last.ckpt")


@pytest.fixture
def iql(compose, small, tmp_path) -> str:
    """The last checkpoint of a short training of IQL on a matrix game."""
    small = [setting for setting in small if "num_epochs" not in setting]
    train(compose("+experiment=pr2_iql_matrix", "algorithm=iql", *small, *REPLAY))
    return str(tmp_path / "run" / "checkpoints" / "last.ckpt")


def report_of(folder: Path) -> dict:
    return json.loads((folder / "nash_conv.json").read_text())


def test_it_repeats_what_the_training_found(command, kuhn, tmp_path):
    outcome = command("nash_conv", f"checkpoint={kuhn}")
    assert outcome.code == 0, outcome.err
    first, *table, last = outcome.out.splitlines()
    assert first == "openspiel/kuhn_poker, current policy, stochastic"
    assert last == f"results in {tmp_path / 'run'}"
    report, summary = report_of(tmp_path / "run"), json.loads((tmp_path / "run" / "summary.json").read_text())
    assert report["bound"] == "exact"
    assert report["value"] == pytest.approx(summary["nashconv/value"], abs=1e-6)
    assert report["gains"]["player_1"] == pytest.approx(summary["nashconv/gain/player_1"], abs=1e-6)
    assert table[0].split() == ["agent", "on", "policy", "best", "response", "gain"]
    assert table[-1].split() == ["NashConv", f"{report['value']:.6f}", "(exact)"]
    assert report["env"]["name"] == "openspiel/kuhn_poker"
    assert "versions" in report
    assert imageio.imread(tmp_path / "run" / "nash_conv.png").ndim == 3


def test_results_can_be_written_elsewhere(command, rock, tmp_path):
    outcome = command("nash_conv", f"checkpoint={rock}", "output_dir=elsewhere", "mode=greedy", "evaluator=matrix")
    assert outcome.code == 0, outcome.err
    assert {path.name for path in (tmp_path / "elsewhere").iterdir()} == {"nash_conv.json", "nash_conv.png"}
    assert not (tmp_path / "run" / "nash_conv.json").exists()
    assert report_of(tmp_path / "elsewhere")["value"] == 2 * 25  # no pure equilibrium, in 25 repetitions


def test_responses_can_be_learned(command, rock, tmp_path):
    settings = [*SEARCH, "agents=[agent_1]", "seed=3", "+learned.hidden_sizes=[8]"]
    outcome = command("nash_conv", f"checkpoint={rock}", *settings)
    assert outcome.code == 0, outcome.err
    report = report_of(tmp_path / "run")
    assert report["bound"] == "lower"
    assert report["gains"].keys() == {"agent_1"}
    assert report["env_steps"] > 600 * 25  # at least what was played to report
    assert report["seed"] == 3


def test_value_based_policies_are_greedy(command, iql, tmp_path):
    outcome = command("nash_conv", f"checkpoint={iql}")
    assert outcome.code == 2
    assert outcome.err == "error: mode: the checkpoint does not say how much IQL explored, set mode=greedy\n"
    assert command("nash_conv", f"checkpoint={iql}", "mode=greedy").code == 0
    module, recipe = load_checkpoint(iql)
    env = make_vector_env(recipe["name"], num_envs=1, **recipe["kwargs"])
    assert report_of(tmp_path / "run")["value"] == nash_conv(module.policy, env, mode="greedy").value


def test_average_policies_are_evaluated_where_there_are_some(command, rock):
    outcome = command("nash_conv", f"checkpoint={rock}", "policy=average")
    assert outcome.code == 2
    assert outcome.err.startswith("error: policy: IPPO has no average policy: set policy='current'")


def test_without_matplotlib_there_is_no_picture(command, rock, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    outcome = command("nash_conv", f"checkpoint={rock}")
    assert outcome.code == 0
    assert 'there is no picture: pictures need matplotlib: pip install "marl-lightning[plot]"' in outcome.out
    assert (tmp_path / "run" / "nash_conv.json").exists()


def test_games_without_exact_evaluation_are_explained(command, compose, small, tmp_path):
    train(compose("+experiment=mappo_smac", *small))
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    before = {path.name for path in (tmp_path / "run").iterdir()}
    outcome = command("nash_conv", f"checkpoint={last}")
    assert outcome.code == 2
    assert outcome.err.count("\n") == 1
    assert outcome.err.startswith("error: evaluator=auto: smac/3m has no exact evaluation.")
    assert "evaluator='learned'" in outcome.err
    assert {path.name for path in (tmp_path / "run").iterdir()} == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("experiment=mappo_smac", "smac/3m has no exact evaluation."),
        ("experiment=ippo_matrix callbacks.nash_conv.policy=average", "IPPO has no average policy"),
        ("experiment=mappo_mpe callbacks.nash_conv.evaluator=learned env.continuous_actions=true", "learner='iql'"),
    ],
)
def test_a_training_that_cannot_be_evaluated_is_refused_in_one_line(arguments, message, command, small, tmp_path):
    outcome = command("train", *arguments.split(), "callbacks=nash_conv", *small)
    assert outcome.code == 2
    assert outcome.err.count("\n") == 1
    assert outcome.err.startswith(f"error: callbacks.nash_conv: {message}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        ("", ["checkpoint: is required"]),
        ("checkpoint=nowhere.ckpt", ["nowhere.ckpt"]),
        ("checkpoint=file", ["file cannot be read as a checkpoint"]),
        ("checkpoint=file evaluator=openspeil", ["evaluator='openspeil'", "did you mean 'openspiel'?"]),
        ("checkpoint=file mode=gredy", ["mode='gredy'", "did you mean 'greedy'?"]),
        ("checkpoint=file evaluater=auto", ["evaluater: there is no such setting; did you mean 'evaluator'?"]),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(arguments, messages, command, tmp_path):
    (tmp_path / "file").write_text("not a checkpoint")
    outcome = command("nash_conv", *arguments.split())
    assert outcome.code == 2
    assert outcome.err.count("\n") == 1
    for message in messages:
        assert message in outcome.err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("evaluator=openspiel", "evaluator=openspiel: cannot find a game of OpenSpiel in matrix/rock_paper_scissors"),
        ("agents=[player_0]", "agents: has a meaning only with evaluator=learned"),
        ("learned.env_steps=100", "learned.env_steps: has a meaning only with evaluator=learned"),
        ("evaluator=learned learned.env_steps=0", "learned.env_steps=0: must be greater than or equal to 1"),
        (
            "evaluator=learned +learned.env_step=9",
            "learned.env_step: there is no such setting; did you mean 'env_steps'",
        ),
        ("evaluator=learned learned.report_episodes=1", "learned: report_episodes=1 are too few for an interval"),
        ("evaluator=learned agents=[player_9]", "evaluator=learned: agents has ['player_9'], but the agents of"),
        ("device=abacus", "device=abacus: cannot be used here"),
    ],
)
def test_settings_that_do_not_fit_are_one_line(arguments, message, command, rock, tmp_path):
    outcome = command("nash_conv", f"checkpoint={rock}", *arguments.split())
    assert outcome.code == 2
    assert outcome.err.count("\n") == 1
    assert outcome.err.startswith(f"error: {message}")
    assert not (tmp_path / "run" / "nash_conv.json").exists()


def test_the_script_runs(rock, tmp_path, monkeypatch, capfd):
    for variable in ("HYDRA_FULL_ERROR", "MARL_LIGHTNING_START"):
        monkeypatch.setenv(variable, "")
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), f"checkpoint={rock}"])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    assert capfd.readouterr().out.splitlines()[-1] == f"results in {tmp_path / 'run'}"


def test_the_picture_shows_gains_and_where_they_may_lie(tmp_path, monkeypatch):
    figures, figure = [], plotting._figure
    monkeypatch.setattr(plotting, "_figure", lambda **size: figures.append(figure(**size)) or figures[-1])
    exact = NashConvResult.exact(
        agents=("a", "b"), on_policy=(0.0, 1.0), best_response_values=(0.5, 3.0), wall_seconds=0.0
    )
    estimate = dataclasses.replace(exact, bound="lower", gain_intervals={"a": (0.25, 0.75), "b": (1.5, 2.5)})
    for name, result in (("exact", exact), ("estimate", estimate)):
        assert imageio.imread(plotting.plot_gains(result, tmp_path / f"{name}.png", title="game")).ndim == 3
    (of_exact,), (of_estimate,) = (drawn.axes for drawn in figures)
    assert [bar.get_height() for bar in of_exact.patches] == [0.5, 2.0]
    assert [label.get_text() for label in of_exact.get_xticklabels()] == ["a", "b"]
    intervals = [[list(line.get_ydata()) for line in axes.lines[:-1]] for axes in (of_exact, of_estimate)]
    assert intervals == [[], [[0.25, 0.75], [1.5, 2.5]]]
    assert (of_exact.get_title(), of_estimate.get_title()) == ("game NashConv = 2.5", "game NashConv \u2265 2.5")
