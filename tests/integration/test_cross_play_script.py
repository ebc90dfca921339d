"""``scripts/cross_play.py``: checkpoints against each other."""

from __future__ import annotations

import csv
import json
import runpy
import sys
from pathlib import Path

import imageio.v3 as imageio
import pytest
import torch

from marl_lightning.algorithms import IQL
from marl_lightning.envs import make_vector_env
from marl_lightning.evaluation import evaluate_checkpoint
from marl_lightning.games.cross_play import load_players

SCRIPT = Path(__file__).parents[2] / "scripts" / "cross_play.py"


def write(path: Path, *, game: str = "matrix/prisoners_dilemma", seed: int = 0, statistics=None, **options) -> Path:
    """Writes a checkpoint of IQL as a training does."""
    kwargs = {"wrappers": ["NormalizeObservation"]} if statistics else {}
    with make_vector_env(game, num_envs=1, **kwargs, **options) as env:
        torch.manual_seed(seed)
        settings = {"hidden_sizes": (8,), "team_reward": None}
        module = IQL(spec=env.spec, **settings)
        recipe = env.recipe
    with torch.no_grad():  # the first agent defects, the second cooperates; or the other way round
        for network in module.networks.values():
            network.head.bias.copy_(torch.tensor([1.0, -1.0] if seed else [-1.0, 1.0]))
            network.head.weight.zero_()
    path.parent.mkdir(parents=True, exist_ok=True)
    own = {"algorithm": "marl_lightning.algorithms.iql.IQL", "env": recipe, "env_steps": 0, "updates": 0}
    torch.save({"state_dict": module.state_dict(), "hyper_parameters": settings, "marl_lightning": own}, path)
    return path


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def pair(tmp_path) -> tuple[Path, Path]:
    """A policy that always defects, which is action 1, and one that never does."""
    return (
        write(tmp_path / "hawk" / "checkpoints" / "last.ckpt", seed=0),
        write(tmp_path / "dove" / "checkpoints" / "last.ckpt", seed=1),
    )


def test_checkpoints_play_each_other(command, pair, tmp_path):
    outcome = command("cross_play", f"checkpoints=[{pair[0]},{pair[1]}]", "episodes=10", "num_envs=4", "output_dir=x")
    assert outcome.code == 0, outcome.err
    first, head, hawk, dove, last = outcome.out.splitlines()
    assert first == "mean return of the row, who plays agent_0, in matrix/prisoners_dilemma"
    assert head.split() == ["[0]", "[1]", "Elo"]
    assert hawk.startswith("[0] hawk/last")
    assert dove.startswith("[1] dove/last")
    assert last == "results in x"

    report = json.loads((tmp_path / "x" / "cross_play.json").read_text())
    assert report["names"] == ["hawk/last", "dove/last"]
    assert report["win_rates"] == [[0.5, 1.0], [0.0, 0.5]]
    assert report["returns"][1][0] < report["returns"][0][0] < report["returns"][1][1] < report["returns"][0][1]
    assert (report["env"]["name"], report["episodes"]) == ("matrix/prisoners_dilemma", 10)
    for i, path in enumerate(pair):
        assert report["returns"][i][i] == pytest.approx(evaluate_checkpoint(path, episodes=2).returns.mean())
    with (tmp_path / "x" / "cross_play.csv").open() as file:
        assert [float(row["return_mean"]) for row in csv.DictReader(file)] == [
            value for row in report["returns"] for value in row
        ]
    assert imageio.imread(tmp_path / "x" / "cross_play.png").ndim == 3


def test_value_based_policies_do_not_explore(pair):
    """A policy that was just loaded would explore all the time."""
    players, _ = load_players([str(path) for path in pair])
    with make_vector_env("matrix/prisoners_dilemma", num_envs=50) as env:
        observations, first = env.reset(), torch.ones(50, dtype=torch.bool)
        chosen = [
            policy.act(observations, {}, first, generator=torch.Generator().manual_seed(0))[0]["agents"]
            for policy in players.values()
        ]
    assert (chosen[0] == 1).all()
    assert (chosen[1] == 0).all()


def test_the_script_is_this_command(pair, monkeypatch, capsys):
    arguments = [f"checkpoints=[{pair[0]},{pair[1]}]", "episodes=2", "symmetric=true"]
    monkeypatch.setenv("MARL_LIGHTNING_START", "")
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    assert "who plays agent_0 or agent_1" in capsys.readouterr().out
    assert {path.name for path in Path("cross_play").iterdir()} == {
        "cross_play.csv", "cross_play.json", "cross_play.png"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        ("", ["error: checkpoints: is required"]),
        ("checkpoints=[{hawk}]", ["checkpoints: cross-play needs at least 2 checkpoints, got 1"]),
        ("checkpoints=[{hawk},{hawk}]", ["checkpoints: a checkpoint is given twice"]),
        ("checkpoints=[{hawk},lost.ckpt]", ["checkpoints: there is no checkpoint lost.ckpt"]),
        ("checkpoints=[{hawk},{dove}] episodes=1", ["episodes=1: must be greater than or equal to 2"]),
        ("checkpoints=[{hawk},{dove}] epsodes=3", ["epsodes: there is no such setting; did you mean 'episodes'?"]),
        ("checkpoints=[{hawk},{dove}] device=abacus", ["device=abacus: cannot be used here"]),
        (
            "checkpoints=[{hawk},{dove},{other}]",
            [
                "checkpoints: the checkpoints were trained in different environments:",
                "hawk/checkpoints/last.ckpt in matrix/prisoners_dilemma",
                "other.ckpt in matrix/matching_pennies",
            ],
        ),
        (
            "checkpoints=[{short},{hawk}]",
            ["last.ckpt in matrix/prisoners_dilemma\n", "short.ckpt in matrix/prisoners_dilemma (episode_length=3)"],
        ),
        ("checkpoints=[{normalised},{again}]", ["running statistics of its own (0.NormalizeObservation.agents"]),
    ],
)  # fmt: skip
def test_mistakes_are_explained_and_leave_nothing_behind(arguments, messages, command, pair, tmp_path):
    files = {"hawk": pair[0], "dove": pair[1]}
    if "{other}" in arguments:
        files["other"] = write(tmp_path / "other.ckpt", game="matrix/matching_pennies")
    if "{short}" in arguments:
        files["short"] = write(tmp_path / "short.ckpt", episode_length=3)
    if "{normalised}" in arguments:
        files |= {name: write(tmp_path / f"{name}.ckpt", statistics=True) for name in ("normalised", "again")}
    outcome = command("cross_play", *arguments.format(**files).split())
    assert outcome.code == 2
    for message in messages:
        assert message in outcome.err
    assert not (tmp_path / "cross_play").exists()
