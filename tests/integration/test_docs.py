"""Everything that the pages of ``docs/`` tell to type works."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

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
    outcome = command("train", *shlex.split(arguments), *small)
    assert outcome.code == 0, outcome.err


def test_every_command_is_known():
    known = ("python -m marl_lightning.envs", "python scripts/train.py")
    given = [line for page in PAGES for block in blocks(page, "bash") for line in block.splitlines()]
    assert [line for line in given if not line.startswith(known)] == []
