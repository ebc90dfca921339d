"""Everything that the pages of ``docs/`` tell to type works."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from marl_lightning import train
from marl_lightning.envs.__main__ import lines

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(DOCS.glob("*.md"))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def commands(start: str) -> list[str]:
    given = [line for page in PAGES for block in blocks(page, "bash") for line in block.splitlines()]
    return [line.removeprefix(start).strip() for line in given if line.startswith(start)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_blocks_run_one_after_another(page, capsys):
    names: dict[str, object] = {}
    expected = []
    for code in blocks(page, "python"):
        exec(compile(code, str(page), "exec"), names)
        expected += re.findall(r"^print\(.*\)  # (.*)$", code, flags=re.MULTILINE)
    assert capsys.readouterr().out.splitlines() == expected


@pytest.mark.parametrize("arguments", commands("python -m marl_lightning.envs"))
def test_listing_commands_list(arguments):
    assert len(list(lines(shlex.split(arguments)))) > 5


@pytest.mark.parametrize("arguments", commands("python scripts/train.py"))
def test_training_commands_train(arguments, command, small, tmp_path):
    for_all = [setting for setting in small if "num_epochs" not in setting]
    outcome = command("train", *shlex.split(arguments), *for_all)
    assert outcome.code == 0, outcome.err


@pytest.fixture
def checkpoint(compose, small, tmp_path) -> Path:
    """The last checkpoint of a short run on poker."""
    train(compose("+experiment=ippo_kuhn", *small))
    return tmp_path / "run" / "checkpoints" / "last.ckpt"


def test_equilibrium_commands_tell_of_checkpoints(checkpoint, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    short = [f"learned.{name}=200" for name in ("env_steps", "select_episodes", "report_episodes")]
    given = commands("python scripts/nash_conv.py")
    assert len(given) == 2
    for arguments in given:
        arguments = arguments.replace("outputs/run/checkpoints/last.ckpt", str(checkpoint))
        outcome = command("nash_conv", *shlex.split(arguments), *(short if "learned" in arguments else ()))
        assert outcome.code == 0, outcome.err
        assert "NashConv" in outcome.out
    for name in ("a.ckpt", "b.ckpt"):
        shutil.copy(checkpoint, tmp_path / name)
    (arguments,) = commands("python scripts/cross_play.py")
    outcome = command("cross_play", *shlex.split(arguments.replace("1000", "10")))
    assert outcome.code == 0, outcome.err
    assert "Elo" in outcome.out


def test_every_command_is_known():
    scripts = ("train", "nash_conv", "cross_play")
    known = ("python -m marl_lightning.envs", *(f"python scripts/{script}.py" for script in scripts))
    given = [line for page in PAGES for block in blocks(page, "bash") for line in block.splitlines()]
    assert [line for line in given if not line.startswith(known)] == []
