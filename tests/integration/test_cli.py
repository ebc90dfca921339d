"""The command line: its conveniences, its messages, and that mistakes leave nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from marl_lightning import train
from marl_lightning.cli import normalise

SCRIPTS = Path(__file__).parents[2] / "scripts"
MATRIX = "experiment=ippo_matrix"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def checkpoint(compose, small, tmp_path) -> Path:
    """The last checkpoint of a short training of MAPPO on 3m."""
    train(compose("+experiment=mappo_smac", *small))
    return tmp_path / "run" / "checkpoints" / "last.ckpt"


# Conveniences ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("+experiment=a", "+experiment=a"),
        ("experiment=a seed=1", "+experiment=a seed=1"),
        ("debug=default", "+debug=default"),
        ("seed=1,2 -m", "-m seed=1,2"),
        ("experiment=a -m seed=1,2", "-m +experiment=a seed=1,2"),
        ("seed=1 --multirun", "--multirun seed=1"),
        ("-m seed=1 -m", "-m seed=1"),
        ("env.experiment=1 experimental=2", "env.experiment=1 experimental=2"),
    ],
)
def test_normalise(arguments, expected):
    assert normalise(arguments.split()) == expected.split()
    assert normalise(expected.split()) == expected.split()


def test_a_run_ends_with_where_its_results_are(command, small, tmp_path):
    outcome = command("train", MATRIX, *small, "hydra.run.dir=run")
    assert outcome.code == 0
    plan, *_, last = outcome.out.splitlines()
    assert plan.startswith("environment   matrix/climbing")
    assert last.startswith("trained for 256 env steps | return ")
    assert last.endswith(f"results in {tmp_path / 'run'}")
    assert {path.name for path in (tmp_path / "run").iterdir()} >= {
        "checkpoints",
        "config.yaml",
        "metrics.csv",
        "summary.json",
    }


def test_the_plan_says_what_is_simulated(command, small):
    outcome = command("train", "experiment=mappo_smac", *small)
    (line,) = (line for line in outcome.out.splitlines() if line.startswith("environment"))
    assert "smac/3m" in line
    assert "backend embedded, physics sc2" in line
    assert "not StarCraft II" in line


@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_sweeps_work_wherever_the_flag_is(place, command, small, tmp_path):
    arguments = [MATRIX, *small, "seed=1,2", "hydra.sweep.dir=sweep"]
    arguments.insert({"first": 0, "middle": 1, "last": len(arguments)}[place], "-m")
    assert command("train", *arguments).code == 0
    assert [json.loads((tmp_path / "sweep" / job / "summary.json").read_text())["seed"] for job in "01"] == [1, 2]


# Mistakes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        ("env.map_name=4m", ["smac/4m"]),
        ("env=mpe env.scenario=simple_spred_v3", ["mpe/simple_spread_v3"]),
        ("env.family=smacc", ["smacc/3m"]),
        (
            "env=smacc",
            ["env=smacc: there is no such choice; did you mean 'smac'? Known: gymnasium, lbf, "],
        ),
        ("algorithm=mapo", ["algorithm=mapo", "did you mean 'mappo'?"]),
        ("experiment=mappo_smak", ["experiment=mappo_smak", "did you mean 'mappo_smac'?"]),
        ("env.backend=starcraft2", ["backend 'starcraft2'", "backend='embedded'"]),
        ("env.physics=sc3", ["physics 'sc3'", "'sc2'"]),
        ("env.num_envs=0", ["env.num_envs=0: must be greater than or equal to 1"]),
        ("data.rollout_length=-1", ["data.rollout_length=-1: must be greater than or equal to 1"]),
        ("total_env_steps=0", ["total_env_steps=0: must be greater than or equal to 1"]),
        ("algorithm.num_epochs=0", ["algorithm.num_epochs=0: must be greater than or equal to 1"]),
        ("algorithm.lr=1e-3", ["algorithm.lr: there is no such setting; did you mean 'learning_rate'?"]),
        ("+algorithm.lr=1e-3", ["algorithm.lr: there is no such setting; did you mean 'learning_rate'?"]),
        ("sed=3", ["sed: there is no such setting; did you mean 'seed'?"]),
        ("algorithm.gamma=high", ["algorithm.gamma='high': must be a valid number"]),
        ("algorithm.team_reward=null", ["algorithm: critic='state' gives one value"]),
        (
            "algorithm.num_minibatches=9000",
            ["algorithm.num_minibatches=9000: a rollout has only 8192 env steps (env.num_envs=64 x"],
        ),
        (
            "algorithm.recurrent=true algorithm.chunk_length=48",
            ["algorithm.chunk_length=48: must divide data.rollout_length=128"],
        ),
        ("trainer.gradient_clip_val=1", ["set algorithm.max_grad_norm instead"]),
        ("trainer.accumulate_grad_batches=2", ["set algorithm.num_minibatches instead"]),
        ("+trainer.max_epoch=3", ["trainer.max_epoch: there is no such setting; did you mean 'max_epochs'?"]),
        ("trainer.accelerator=cpu trainer.devices=1000", ["trainer.devices=1000: this machine has only"]),
        ("callbacks.evaluation.seed=-1", ["callbacks.evaluation.seed=-1: must be greater than or equal to 0"]),
        ("trainer.devices=0", ["trainer.devices=0: must be at least 1"]),
        ("trainer.accelerator=cpu trainer.devices=[1000]", ["this machine has only"]),
        ("trainer.num_nodes=0", ["trainer.num_nodes=0: must be at least 1"]),
        ("callbacks.evaluation.episode=3", ["callbacks.evaluation.episode", "did you mean 'episodes'?"]),
        ("hydra.run.dir=file/run", ["run folder", "file is a file, set hydra.run.dir"]),
        ("ckpt_path=nowhere.ckpt", ["nowhere.ckpt"]),
        ("ckpt_path=file", ["file cannot be read as a checkpoint"]),
        ("ckpt_path=foreign.ckpt", ["foreign.ckpt was not written by"]),
        ("seed=1,2", ["--multirun"]),
        ("algorithm.gamma=[", ["algorithm.gamma=["]),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(arguments, messages, command, tmp_path):
    (tmp_path / "file").write_text("not a checkpoint")
    torch.save({"state_dict": {}}, tmp_path / "foreign.ckpt")
    outcome = command("train", *arguments.split())
    assert outcome.code == 2
    assert outcome.err.count("\n") == 1
    assert outcome.err.startswith("error: ")
    for message in messages:
        assert message in outcome.err
    assert {path.name for path in tmp_path.iterdir()} == {"file", "foreign.ckpt"}


def test_all_mistakes_are_listed_at_once(command, tmp_path):
    mistakes = ("algorithm.lr=1", "env.num_envs=0", "algorithm.gamma=2", "+env.colision=none", "total_env_steps=0")
    outcome = command("train", *mistakes)
    assert outcome.code == 2
    first, *problems = outcome.err.splitlines()
    assert first == "error: 5 settings have to be changed:"
    assert {problem.strip().partition("=")[0].partition(":")[0] for problem in problems} == {
        "algorithm.lr",
        "env.num_envs",
        "algorithm.gamma",
        "env.colision",
        "total_env_steps",
    }
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("experiment=ippo_smac", "was written by a training with MAPPO, but algorithm is IPPO"),
        ("env.map_name=8m", "was written by a training in smac/3m, but env is smac/8m"),
        ("algorithm.hidden_sizes=[8]", "with networks of other shapes"),
    ],
)
def test_a_checkpoint_of_another_training_is_refused(arguments, message, command, checkpoint):
    outcome = command("train", f"ckpt_path={checkpoint}", arguments)
    assert outcome.code == 2
    assert message in outcome.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [("env.num_envs=3", "4 instances, this environment 3"), ("env.physics=smaclite", "'physics': ('sc2', 'smaclite')")],
)
def test_resuming_in_other_environments_is_one_line(arguments, message, command, checkpoint, small):
    settings = [setting for setting in small if not setting.startswith("env.num_envs")]
    outcome = command(
        "train", "experiment=mappo_smac", f"ckpt_path={checkpoint}", *settings, "env.num_envs=4", arguments
    )
    assert outcome.code == 2
    assert outcome.err.splitlines()[-1].startswith("error: ckpt_path: ")
    assert message in outcome.err


def test_a_mistake_in_a_sweep_leaves_no_folder_for_the_job(command, small, tmp_path):
    outcome = command("train", "-m", MATRIX, *small, "algorithm.gamma=0.9,2", "hydra.sweep.dir=sweep")
    assert outcome.code == 2
    assert "algorithm.gamma=2: must be less than or equal to 1" in outcome.err
    assert (tmp_path / "sweep" / "0" / "summary.json").exists()
    assert not (tmp_path / "sweep" / "1").exists()


@pytest.mark.parametrize("setting", ["trainer.accelerator=abacus", "trainer.strategy=luck", "trainer.devices=abc"])
def test_values_that_only_lightning_understands_are_one_line_too(setting, command, small, tmp_path):
    outcome = command("train", MATRIX, *small, setting, "hydra.run.dir=run")
    assert outcome.code == 2
    assert outcome.err.splitlines()[-1].startswith("error: trainer: ")
    assert not (tmp_path / "run").exists()


def test_errors_of_the_program_keep_their_traceback(command, small, monkeypatch):
    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("marl_lightning.algorithms.MAPPO.training_step", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        command("train", "experiment=mappo_smac", *small)


def test_a_loss_that_is_not_finite_is_one_line(command, small, monkeypatch):
    def broken(*_: object) -> None:
        raise FloatingPointError("policy_loss became NaN at env step 64")

    monkeypatch.setattr("marl_lightning.algorithms.MAPPO.training_step", broken)
    outcome = command("train", "experiment=mappo_smac", *small)
    assert outcome.code == 1
    assert outcome.err.splitlines()[-1] == "error: policy_loss became NaN at env step 64"
    assert "Traceback" not in outcome.err


# Evaluation -----------------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_evaluated_without_any_other_argument(command, checkpoint, tmp_path):
    outcome = command("evaluate", f"checkpoint={checkpoint}", "episodes=3", "video=true")
    assert outcome.code == 0
    assert outcome.out.splitlines()[-1] == f"results in {tmp_path / 'run'}"
    report = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert report["episodes"] == 3
    assert report["env"]["name"] == "smac/3m"
    assert report.keys() >= {"eval/return_mean", "eval/win_rate", "versions"}
    assert list((tmp_path / "run").glob("evaluation.[mg][pi][4f]"))


def test_an_evaluation_can_be_written_elsewhere(command, checkpoint, tmp_path):
    outcome = command("evaluate", f"checkpoint={checkpoint}", "episodes=2", "output=elsewhere")
    assert outcome.code == 0
    assert (tmp_path / "elsewhere" / "evaluation.json").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"run", "elsewhere"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "checkpoint: is required"),
        ("checkpoint=nowhere.ckpt", "nowhere.ckpt"),
        ("checkpoint=file", "file cannot be read as a checkpoint"),
        ("checkpoint=file episodes=0", "episodes=0: must be greater than or equal to 1"),
        ("checkpoint=file episods=10", "episods: there is no such setting; did you mean 'episodes'?"),
    ],
)
def test_a_mistake_in_an_evaluation_is_one_line(arguments, message, command, tmp_path):
    (tmp_path / "file").write_text("not a checkpoint")
    outcome = command("evaluate", *arguments.split())
    assert outcome.code == 2
    assert outcome.err.count("\n") == 1
    assert message in outcome.err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_an_evaluation_on_a_device_that_is_missing_is_one_line(command, checkpoint):
    outcome = command("evaluate", f"checkpoint={checkpoint}", "device=abacus")
    assert outcome.code == 2
    assert outcome.err.startswith("error: device=abacus: cannot be used here")


def test_a_video_of_a_game_without_pictures_is_one_line(command, compose, small, tmp_path):
    train(compose("+experiment=ippo_matrix", *small))
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    outcome = command("evaluate", f"checkpoint={last}", "episodes=1", "video=true")
    assert outcome.code == 2
    assert outcome.err.startswith("error: video: matrix/climbing cannot be rendered")


# Processes ------------------------------------------------------------------------------------------------------------


def start(*arguments: str) -> subprocess.Popen[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, SCRIPTS / "train.py", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not path.exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, f"{path} was not written"
        time.sleep(0.05)


def test_two_processes_share_one_run_folder(small, tmp_path):
    process = start("-m", MATRIX, *small, "trainer=ddp", "trainer.accelerator=cpu", "seed=5")
    output = process.communicate(timeout=180)[0]
    assert process.returncode == 0, output
    (summary,) = tmp_path.rglob("summary.json")
    assert json.loads(summary.read_text())["env_steps"] == 256
    (folder,) = (tmp_path / "logs" / "multirun").glob("*/*")
    assert len(list(folder.rglob("rank*.pt"))) >= 2
    assert OmegaConf.load(summary.with_name("config.yaml")).seed == 5


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_a_summary_and_a_checkpoint_to_resume_from(number, code, small, tmp_path, command):
    run = [MATRIX, *small, "total_env_steps=100_000_000", "callbacks.checkpoint.every_env_steps=64"]
    process = start(*run, "hydra.run.dir=run")
    wait_for(tmp_path / "run" / "checkpoints" / "last.ckpt", process)
    process.send_signal(number)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == code, output
    assert output.splitlines()[-1].startswith("interrupted at ")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["interrupted"] is True
    more = summary["env_steps"] + 64
    resumed = command("train", MATRIX, *small, f"total_env_steps={more}", "ckpt_path=run/checkpoints/interrupted.ckpt")
    assert resumed.out.splitlines()[-1].startswith(f"trained for {more:,} env steps")
