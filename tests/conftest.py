"""What tests of all folders share."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import hydra
import pytest
import torch
from omegaconf import DictConfig

from marl_lightning.cli import cross_play_command, evaluate_command, nash_conv_command, train_command
from marl_lightning.configuration import config_dir

SMALL = (
    "env.num_envs=4",
    "data.rollout_length=16",
    "total_env_steps=200",
    "algorithm.num_epochs=1",
    "trainer.accelerator=cpu",
    "callbacks.evaluation.every_env_steps=100",
    "callbacks.evaluation.episodes=2",
)
"""Overrides that shorten any training to about a second."""


@dataclass(frozen=True)
class Outcome:
    """What a command line left: its exit code and what it printed."""

    code: int
    out: str
    err: str


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "slow" in config.getoption("markexpr", ""):
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="long version, selected by -m slow"))


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    # Tests run in parallel processes, on tensors that are too small for more.
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def small() -> tuple[str, ...]:
    """Overrides that shorten any training to about a second."""
    return SMALL


@pytest.fixture
def compose(tmp_path: Path) -> Callable[..., DictConfig]:
    """Returns a function that composes ``train.yaml`` with overrides, with ``tmp_path / "run"`` as the run folder."""

    def compose(*overrides: str) -> DictConfig:
        with hydra.initialize_config_dir(str(config_dir()), version_base="1.3"):
            return hydra.compose("train", overrides=[*overrides, f"paths.output_dir={tmp_path / 'run'}"])

    return compose


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Returns a function that runs a file of ``scripts/`` with arguments, in this process."""
    commands = {
        "train": train_command,
        "evaluate": evaluate_command,
        "cross_play": cross_play_command,
        "nash_conv": nash_conv_command,
    }

    def command(script: str, *arguments: str) -> Outcome:
        for variable in ("HYDRA_FULL_ERROR", "MARL_LIGHTNING_START"):
            monkeypatch.setenv(variable, "")
        monkeypatch.setattr(sys, "argv", [f"scripts/{script}.py", *arguments])
        capfd.readouterr()
        code = 0
        try:
            commands[script]()
        except SystemExit as stop:
            code = stop.code
        return Outcome(code, *capfd.readouterr())

    return command
