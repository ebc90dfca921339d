"""Every file of configs/ composes, says what its class says, and works."""

from __future__ import annotations

import csv
import dataclasses
import inspect
import json
import math
from importlib.util import find_spec
from pathlib import Path

import lightning
import pytest
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

from marl_lightning import algorithms
from marl_lightning.algorithms import QLearningModule
from marl_lightning.configuration import ConfigurationError, config_dir, validate
from marl_lightning.envs.native.matrix import MatrixVectorEnv
from marl_lightning.envs.native.smac.env import SmacVectorEnv
from marl_lightning.envs.native.smac.options import SmacOptions
from marl_lightning.training import build_trainer, train

EXTRAS = {"tensorboard": "tensorboard", "wandb": "wandb"}


def names(group: str) -> list[str]:
    return sorted(path.stem for path in (config_dir() / group).glob("*.yaml"))


def defaults(function) -> dict[str, object]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is not p.VAR_KEYWORD}


def uses_replay(cfg: DictConfig) -> bool:
    return issubclass(get_object(cfg.algorithm._target_), QLearningModule)


REPLAY = (
    "data.start_training=100",
    "data.training_frequency=50",
    "data.num_updates=2",
    "data.batch_size=4",
    "data.capacity=5000",
    "algorithm.log_every_env_steps=64",
)
"""Overrides that shorten trainings from a replay, besides those of all trainings but for their epochs."""


def as_yaml(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize("name", names("algorithm"))
def test_algorithm_files_list_every_argument_at_its_default(name):
    node = OmegaConf.to_container(OmegaConf.load(config_dir() / "algorithm" / f"{name}.yaml"))
    expected = defaults(get_object(node.pop("_target_")))
    del expected["spec"]
    assert node == {key: as_yaml(value) for key, value in expected.items()}


def test_every_algorithm_has_a_file():
    exported = {name for name in algorithms.__all__ if name.isupper()}
    targets = {OmegaConf.load(config_dir() / "algorithm" / f"{name}.yaml")._target_ for name in names("algorithm")}
    assert {target.rpartition(".")[2] for target in targets} == exported


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("smac", defaults(SmacVectorEnv) | {f.name: f.default for f in dataclasses.fields(SmacOptions)}),
        ("matrix", defaults(MatrixVectorEnv)),
    ],
)
def test_env_files_list_every_argument_at_its_default(name, expected):
    node = OmegaConf.to_container(OmegaConf.load(config_dir() / "env" / f"{name}.yaml"))
    chosen = ("family", "map_name", "scenario", "num_envs", "game", "seed")
    assert {k: v for k, v in node.items() if k not in chosen} == {k: v for k, v in expected.items() if k not in chosen}


@pytest.mark.parametrize("name", names("data"))
def test_data_files_list_every_argument_at_its_default(name):
    node = OmegaConf.to_container(OmegaConf.load(config_dir() / "data" / f"{name}.yaml"))
    expected = defaults(get_object(node.pop("_target_")))
    del expected["env"]
    assert node == expected


@pytest.mark.parametrize("name", names("callbacks"))
def test_callback_files_list_every_argument(name, compose):
    for node in OmegaConf.to_container(compose(f"callbacks={name}").callbacks).values():
        assert node.keys() == {"_target_", *inspect.signature(get_object(node["_target_"])).parameters}


def test_trainer_file_uses_names_of_lightning():
    node = OmegaConf.to_container(OmegaConf.load(config_dir() / "trainer" / "default.yaml"))
    assert node.keys() - {"_target_"} <= inspect.signature(lightning.Trainer).parameters.keys()


@pytest.mark.parametrize("group", ["env", "algorithm", "trainer", "callbacks"])
def test_every_choice_is_valid(group, compose, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)  # trainer=gpu is valid where there are some
    for name in names(group):
        overrides = [f"{group}={name}"]
        if group == "algorithm" and uses_replay(compose(*overrides)):
            overrides.append("data=replay")
        if name == "nash_conv":  # not in every game
            overrides.append("env=matrix")
        validate(compose(*overrides))


def test_an_algorithm_that_does_not_fit_the_data_is_explained(compose):
    with pytest.raises(ConfigurationError, match=r"IQL learns from a ReplayDataModule, choose data=replay"):
        validate(compose("algorithm=iql"))
    with pytest.raises(ConfigurationError, match=r"MAPPO learns from a RolloutDataModule, choose data=rollout"):
        validate(compose("data=replay"))


def test_what_a_package_refuses_is_told_in_one_line(compose):
    pytest.importorskip("magent2")
    with pytest.raises(ConfigurationError, match=r"^env: AssertionError: size of map must be at least 12$"):
        validate(compose("env=magent2", "env.scenario=battle_v4", "env.map_size=5"))


@pytest.mark.parametrize("name", names("logger"))
def test_every_logger_is_built(name, compose):
    if name in EXTRAS:
        pytest.importorskip(EXTRAS[name])
    trainer = build_trainer(compose(f"logger={name}", "trainer.accelerator=cpu"), callbacks=[])
    kinds = {type(logger).__name__.removesuffix("Logger").lower() for logger in trainer.loggers}
    assert kinds == {"csv", name}


@pytest.mark.skipif(find_spec("wandb") is not None, reason="wandb is installed")
def test_a_logger_without_its_package_is_explained(compose):
    with pytest.raises(ConfigurationError, match=r"logger: .*wandb"):
        build_trainer(compose("logger=wandb", "trainer.accelerator=cpu"), callbacks=[])


def test_without_loggers_and_callbacks_there_are_none_of_lightnings_own(compose):
    trainer = build_trainer(compose("callbacks=none", "logger.csv=null", "trainer.accelerator=cpu"), callbacks=[])
    assert trainer.loggers == []
    assert trainer.checkpoint_callbacks == []


def test_an_interpolation_that_leads_nowhere_is_explained(compose):
    with pytest.raises(ConfigurationError, match="nowhere"):
        validate(compose("data.rollout_length=${nowhere}"))


@pytest.mark.parametrize("name", names("experiment"))
def test_every_experiment_trains(name, compose, small, tmp_path):
    if "mpe" in name:
        pytest.importorskip("mpe2")
    steps = {64, 128, 192, 256}
    if uses_replay(compose(f"+experiment={name}")):
        steps = set()  # several collections go into one batch
        small = [*(override for override in small if "num_epochs" not in override), *REPLAY]
    result = train(compose(f"+experiment={name}", *small))
    folder = tmp_path / "run"
    assert result.output_dir == folder
    assert result.summary == json.loads((folder / "summary.json").read_text())
    assert result.module.env_steps == result.summary["env_steps"] >= 256
    with (folder / "metrics.csv").open() as file:
        assert {int(row["step"]) for row in csv.DictReader(file)} >= {*steps, result.module.env_steps}
    assert {path.name for path in (folder / "checkpoints").glob("*.ckpt")} >= {"last.ckpt", "best.ckpt"}


@pytest.mark.parametrize("algorithm", ["mappo", "ippo"])
@pytest.mark.parametrize("game", ["lbf", "rware", "mpe", "mamujoco", "magent2", "vmas", "tictactoe"])
def test_games_of_every_kind_train_for_a_while(game, algorithm, compose):
    """Sparse rewards, several parts, continuous actions, two groups, batches of a package, turns."""
    (name,) = (each for each in names("experiment") if each in (f"mappo_{game}", f"ippo_{game}"))
    overrides = [
        f"+experiment={name}",
        f"algorithm={algorithm}",
        "algorithm.num_epochs=1",
        "env.num_envs=8",
        "data.rollout_length=32",
        "total_env_steps=2000",
        "trainer.accelerator=cpu",
        "callbacks.evaluation.at_end=false",
        "callbacks.checkpoint.monitor=null",
    ]
    if game == "magent2":
        overrides.append("env.with_state=true")
    result = train(compose(*overrides))
    assert result.module.env_steps == 2048
    assert all(math.isfinite(value) for value in result.metrics.values())


def test_debug_shortens_an_experiment(compose):
    cfg = compose("+experiment=mappo_smac", "+debug=default")
    assert cfg.total_env_steps == 2_000
    assert cfg.trainer.detect_anomaly


def test_the_summary_explains_the_run(compose, small, tmp_path):
    summary = train(compose("+experiment=mappo_smac", *small)).summary
    assert summary.keys() >= {
        "env_steps",
        "updates",
        "wall_seconds",
        "env_steps_per_second",
        "collect_seconds",
        "update_seconds",
        "evaluate_seconds",
        "eval/return_mean",
        "eval/win_rate",
        "git_revision",
    }
    assert (summary["backend"], summary["physics"], summary["seed"]) == ("embedded", "sc2", 1)
    assert summary["interrupted"] is False
    assert summary["updates"] == 4 * 2  # rollouts x minibatches
    packages = {"python", "torch", "lightning", "torchrl", "tensordict", "numba", "numpy", "marl_lightning"}
    assert summary["versions"].keys() == packages


def test_the_written_configuration_repeats_the_run(compose, small, tmp_path):
    first = train(compose("+experiment=ippo_matrix", *small))
    written = OmegaConf.load(tmp_path / "run" / "config.yaml")
    written.paths.output_dir = written.callbacks.checkpoint.directory = str(tmp_path / "again")
    written.logger.csv.save_dir = written.trainer.default_root_dir = str(tmp_path / "again")
    second = train(written)
    for name, tensor in first.module.state_dict().items():
        assert tensor.equal(second.module.state_dict()[name]), name


def test_files_of_an_earlier_run_in_the_folder_are_kept(compose, small, tmp_path):
    for seed in (1, 2, 3):
        train(compose("+experiment=ippo_matrix", *small, f"seed={seed}"))
    folder = tmp_path / "run"
    assert [OmegaConf.load(folder / f"config{n}.yaml").seed for n in ("-1", "-2", "")] == [1, 2, 3]
    assert len(list(folder.glob("metrics*.csv"))) == len(list(folder.glob("summary*.json"))) == 3


def test_training_resumes_from_a_checkpoint(compose, small, tmp_path):
    train(compose("+experiment=ippo_matrix", *small))
    last: Path = tmp_path / "run" / "checkpoints" / "last.ckpt"
    result = train(compose("+experiment=ippo_matrix", *small, "total_env_steps=400", f"ckpt_path={last}"))
    assert result.module.env_steps == 448
