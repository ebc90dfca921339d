"""Everything that the README tells to type works, with small numbers."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from marl_lightning import train
from marl_lightning.plotting import plot_command

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
SHORT = {"num_envs=64": "num_envs=4", "rollout_length=64": "rollout_length=16", "1_000_000": "128", "50_000": "64"}
"""Numbers of the Python examples, and what they become here."""


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def commands(start: str) -> list[str]:
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    return [line.removeprefix(start).strip() for line in lines if line.startswith(start)]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def checkpoint(compose, small, tmp_path) -> Path:
    """The last checkpoint of a short run of the default experiment."""
    train(compose("+experiment=mappo_smac", *small))
    return tmp_path / "run" / "checkpoints" / "last.ckpt"


def test_every_command_is_known():
    known = ("make", "python3 -m venv", "source", "pip install", "pytest", "python scripts/", "python benchmarks/")
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    assert [line for line in lines if not line.startswith(known)] == []


def run_shortened(code: str, numbers: dict[str, str]) -> dict[str, Any]:
    """Returns the names that an example leaves, run with other numbers."""
    for number, small in numbers.items():
        assert number in code
        code = code.replace(number, small)
    names: dict[str, Any] = {}
    exec(code, names)
    return names


@pytest.mark.parametrize("code", [code for code in blocks("python") if "Trainer(" in code], ids=["rollouts", "replay"])
def test_the_examples_with_a_trainer_train(code):
    assert run_shortened(code, SHORT)["model"].env_steps >= 128


def test_the_example_of_make_train_trains():
    pytest.importorskip("mpe2")
    (code,) = (code for code in blocks("python") if "make_train" in code)
    names = run_shortened(code, {'"NUM_ENVS": 8': '"NUM_ENVS": 2', "100_000": "200", "2_000": "50"})
    first, second = names["out"], names["more"]
    assert first["metrics"]["completed_episodes"].tolist() == [2, 2, 2, 2]
    for agent in first["agent_ids"]:
        before, after = (out["train_states"][agent]["online"] for out in (first, second))
        assert all(torch.equal(before[name], after[name]) for name in before) == (agent != "agent_0")


@pytest.mark.parametrize("arguments", commands("python scripts/train.py"))
def test_training_commands_train(arguments, command, small, tmp_path, request):
    if "mpe" in arguments:
        pytest.importorskip("mpe2")
    if "ckpt_path" in arguments:
        last = request.getfixturevalue("checkpoint")
        arguments = re.sub(r"ckpt_path=\S+", f"ckpt_path={last}", arguments)
    given = [each for each in shlex.split(arguments) if not each.startswith("total_env_steps")]
    one_process = ("trainer=default", "trainer.devices=1", "trainer.strategy=auto")
    outcome = command("train", *given, *small, *one_process)
    assert outcome.code == 0, outcome.err
    assert list((tmp_path / "logs").rglob("summary.json"))


@pytest.mark.parametrize("arguments", commands("python scripts/evaluate.py"))
def test_evaluation_commands_evaluate(arguments, command, checkpoint):
    assert re.search(r"checkpoint=\S+/checkpoints/best.ckpt", arguments)
    given = re.sub(r"checkpoint=\S+", f"checkpoint={checkpoint}", arguments).replace("episodes=100", "episodes=2")
    outcome = command("evaluate", *shlex.split(given))
    assert outcome.code == 0, outcome.err


@pytest.mark.parametrize("arguments", commands("python scripts/plot.py"))
def test_plot_commands_plot(arguments, checkpoint):
    folder, *rest = shlex.split(arguments)
    assert folder == "logs/train"
    plot_command([str(checkpoint.parents[1]), *rest])
    assert (checkpoint.parents[1] / "eval_win_rate.png").exists()


@pytest.mark.parametrize("arguments", commands("python benchmarks/throughput.py"))
def test_benchmark_commands_measure(arguments, monkeypatch, tmp_path, capsys):
    benchmark = runpy.run_path(str(ROOT / "benchmarks" / "throughput.py"))
    given = [sys.executable, *shlex.split(arguments), "--only", "matrix_climbing"]
    monkeypatch.setattr(sys, "argv", given)
    threads = torch.get_num_threads()
    benchmark["main"]()
    torch.set_num_threads(threads)
    assert "matrix_climbing" in capsys.readouterr().out
    assert json.loads((tmp_path / "throughput.json").read_text())["simulator"]["matrix_climbing"] > 0


@pytest.mark.parametrize("target", [*commands("make"), "lint"])
def test_make_does_its_own_set_up(target, tmp_path):
    listed = ["make", "--dry-run", "--directory", str(ROOT), target, f"VENV={tmp_path / 'venv'}"]
    # Tests may have been started by make, whose variables would make this a part of that run.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    plan = subprocess.run(listed, env=environment, capture_output=True, text=True, check=True).stdout
    steps = [line for line in plan.splitlines() if not line.startswith("make:")]
    assert "-m venv" in steps[0]
    assert "pip install" in steps[1]
    assert '-c constraints.txt -e ".[dev]"' in steps[1]
    does = {"train": "scripts/train.py +experiment=mappo_smac", "test": "-m pytest", "lint": "ruff check"}
    assert does[target] in plan


def test_the_packages_that_are_needed_are_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(p for extra in project["optional-dependencies"].values() for p in extra)]
    names = {re.split(r"[\[<>=]", package)[0] for package in wanted} - {"marl-lightning", "wandb"}
    pinned = {line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert {name.lower() for name in names} - pinned == set()


def test_the_folder_map_names_what_exists():
    table = README.partition("## Folders")[2]
    for path in re.findall(r"^\| `([^`]+)`", table, flags=re.MULTILINE):
        assert (ROOT / path).exists(), path


def test_contributing_names_what_exists():
    paths = re.findall(r"`((?:marl_lightning|configs|tests)/[\w/.]+)`", (ROOT / "CONTRIBUTING.md").read_text())
    assert paths
    for path in paths:
        assert (ROOT / path).exists(), path
