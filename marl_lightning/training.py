"""Training as a configuration says: ``train(cfg)`` builds, fits, and leaves a run folder that explains itself."""

from __future__ import annotations

import inspect
import json
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning import LightningDataModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, Checkpoint, ProgressBar
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from omegaconf import DictConfig, OmegaConf
from torch.nn.parallel import DistributedDataParallel

from marl_lightning.algorithms import MARLModule
from marl_lightning.callbacks import ResumeError, StopAtEnvSteps, ThroughputMonitor, TrainingInterrupted
from marl_lightning.configuration import (
    ConfigurationError,
    available_devices,
    build,
    build_env,
    num_devices,
    validate,
)
from marl_lightning.data import ReplayDataModule
from marl_lightning.envs import EnvSpec
from marl_lightning.runtime import git_revision, keep_freed_memory, quiet_lightning, versions

__all__ = ["ConfigurationError", "TrainingResult", "build_env", "train", "validate"]

_FINAL_EVALUATION = ("eval/return_mean", "eval/win_rate")
# What a shell reports for a process that ended by the signal.
_INTERRUPTED, _TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """What :func:`train` leaves in memory and on disk.

    Attributes:
        trainer: the Trainer after ``fit``.
        module: the trained algorithm.
        datamodule: the data module; its environment is closed.
        metrics: the latest value of every metric, evaluations included.
        summary: contents of ``summary.json``.
        output_dir: the run folder, with ``config.yaml``, ``metrics.csv``, ``checkpoints/`` and ``summary.json``.
    """

    trainer: Trainer
    module: MARLModule
    datamodule: LightningDataModule
    metrics: dict[str, float]
    summary: dict[str, Any]
    output_dir: Path


def train(cfg: DictConfig) -> TrainingResult:
    """Trains as the configuration ``configs/train.yaml`` describes.

    Args:
        cfg: the composed configuration, without Hydra's own node.

    Raises:
        ConfigurationError: if something has to be changed, before anything is written.
        SystemExit: after an interrupt (code 130) or SIGTERM (code 143). The summary has been written, and says so.
        FloatingPointError: if a loss became NaN or infinite.
    """
    validate(cfg)
    keep_freed_memory()
    quiet_lightning()
    if cfg.num_threads is not None:
        torch.set_num_threads(cfg.num_threads)
    seed_everything(cfg.seed, verbose=False)
    # The cores are shared out among the processes of this machine; torchrun sets it, Lightning's own launcher does not.
    os.environ.setdefault("LOCAL_WORLD_SIZE", str(_local_processes(cfg.trainer)))
    env = build_env(cfg.env, cfg.seed)
    module = build(cfg.algorithm, spec=env.spec)
    datamodule = build(cfg.data, env=env)
    throughput = ThroughputMonitor()
    trainer = build_trainer(cfg, callbacks=[StopAtEnvSteps(cfg.total_env_steps), throughput])
    output_dir = Path(cfg.paths.output_dir)
    if trainer.is_global_zero:
        _open_run_folder(output_dir, cfg)
        print(_plan(cfg, module, datamodule, trainer), flush=True)

    start = time.perf_counter()
    exit_code = _fit(trainer, module, datamodule, ckpt_path=cfg.ckpt_path)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    summary = _summary(
        cfg=cfg,
        spec=env.spec,
        module=module,
        metrics=metrics,
        throughput=throughput,
        wall_seconds=time.perf_counter() - start,
        interrupted=exit_code is not None,
    )
    if trainer.is_global_zero:
        (output_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        print(_last_line(output_dir, summary), flush=True)
    if exit_code is not None:
        raise SystemExit(exit_code)
    return TrainingResult(
        trainer=trainer,
        module=module,
        datamodule=datamodule,
        metrics=metrics,
        summary=summary,
        output_dir=output_dir,
    )


def build_trainer(cfg: DictConfig, *, callbacks: list[Callback]) -> Trainer:
    """Makes the Trainer with the callbacks and loggers of the configuration, after the given callbacks."""
    try:
        loggers = [build(node) for node in _present(cfg.logger)]
    except ImportError as error:  # of a logger whose package is an extra
        raise ConfigurationError([f"logger: {error}"]) from error
    callbacks = [*callbacks, *(build(node) for node in _present(cfg.callbacks))]
    settings = {**cfg.trainer, "strategy": _strategy(cfg.trainer)}
    if settings.get("enable_progress_bar") is False:  # Lightning refuses a bar that was made all the same
        callbacks = [callback for callback in callbacks if not isinstance(callback, ProgressBar)]
    if settings.get("enable_checkpointing") is None:  # Lightning would add checkpoints of its own, one a rollout
        settings["enable_checkpointing"] = any(isinstance(callback, Checkpoint) for callback in callbacks)
    try:
        return build(settings, callbacks=callbacks, logger=loggers or False)
    except (ValueError, TypeError, MisconfigurationException) as error:  # values that only Lightning understands
        raise ConfigurationError([f"trainer: {' '.join(str(error).split())}"]) from error


def _fit(
    trainer: Trainer, module: MARLModule, datamodule: LightningDataModule, *, ckpt_path: str | None
) -> int | str | None:
    """Trains, and returns the exit code if a signal ended it early, else ``None``."""
    try:
        trainer.fit(module, datamodule=datamodule, ckpt_path=ckpt_path)
    except TrainingInterrupted as stop:
        return stop.code
    except SIGTERMException:
        return _TERMINATED
    except (KeyboardInterrupt, SystemExit):  # Lightning turns the former into the latter
        return _INTERRUPTED
    except ResumeError as error:
        raise ConfigurationError([f"ckpt_path: {error}"]) from error
    return None


def _present(nodes: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    return [node for node in (nodes or {}).values() if node is not None]


def _strategy(trainer: Mapping[str, Any]) -> str | Strategy:
    """Returns the strategy to use: several processes must not overwrite each other's buffers.

    Running statistics are buffers. They are reduced over the processes when they change; DDP would also broadcast
    those of rank 0 at each training step.
    """
    strategy = trainer.get("strategy", "auto")
    several = _local_processes(trainer) > 1 or trainer.get("num_nodes", 1) > 1
    if strategy == "ddp" or (strategy == "auto" and several):
        known = inspect.signature(DistributedDataParallel).parameters
        option = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"  # torch < 2.13
        return DDPStrategy(**{option: False})
    return strategy


def _local_processes(trainer: Mapping[str, Any]) -> int:
    """Returns the number of processes on this machine."""
    return num_devices(trainer.get("devices"), available_devices(trainer.get("accelerator")) or 1) or 1


def _open_run_folder(folder: Path, cfg: DictConfig) -> None:
    """Makes the folder and writes the resolved configuration. Files of an earlier run there get a number instead."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.yaml", "metrics.csv", "summary.json"):
        path = folder / name
        if path.exists():
            number = next(n for n in range(1, 10**6) if not path.with_stem(f"{path.stem}-{n}").exists())
            path.rename(path.with_stem(f"{path.stem}-{number}"))
    OmegaConf.save(cfg, folder / "config.yaml", resolve=True)


def _plan(cfg: DictConfig, module: MARLModule, datamodule: LightningDataModule, trainer: Trainer) -> str:
    spec, world_size = datamodule.spec, trainer.world_size
    parameters = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    env_steps = cfg.env.num_envs * cfg.data.rollout_length * world_size
    if isinstance(datamodule, ReplayDataModule):
        updates = f"{cfg.data.num_updates} updates every {cfg.data.training_frequency:,} env steps"
        updates += f" after {cfg.data.start_training:,}, from the last {cfg.data.capacity:,}"
    else:
        updates = f"then {cfg.algorithm.get('num_epochs', 1) * cfg.algorithm.get('num_minibatches', 1)} updates"
    facts = ", ".join(value if key == "note" else f"{key} {value}" for key, value in spec.metadata.items())
    processes = f" x {world_size} processes" if world_size > 1 else ""
    return "\n".join(
        [
            f"environment   {spec.name} ({facts})",
            f"algorithm     {type(module).__name__}, {parameters:,} parameters, {spec.num_agents} agents, "
            f"on {trainer.strategy.root_device.type}",
            f"rollout       {cfg.env.num_envs} envs x {cfg.data.rollout_length} steps{processes}"
            f" = {env_steps:,} env steps, {updates}",
            f"total         {cfg.total_env_steps:,} env steps, seed {cfg.seed}, run folder {cfg.paths.output_dir}",
        ]
    )


def _summary(
    *,
    cfg: DictConfig,
    spec: EnvSpec,
    module: MARLModule,
    metrics: Mapping[str, float],
    throughput: ThroughputMonitor,
    wall_seconds: float,
    interrupted: bool,
) -> dict[str, Any]:
    try:
        seconds = throughput.summary()
    except RuntimeError:  # interrupted before training started
        seconds = {}
    return {
        "env": spec.name,
        **{key: spec.metadata.get(key) for key in ("backend", "physics")},
        "algorithm": type(module).__name__,
        "seed": cfg.seed,
        **seconds,
        "env_steps": module.env_steps,
        "updates": module.updates,
        "wall_seconds": wall_seconds,
        **dict.fromkeys(_FINAL_EVALUATION),
        **{key: value for key, value in metrics.items() if key.startswith(("eval/", "nashconv/"))},
        "interrupted": interrupted,
        "versions": versions(),
        "git_revision": git_revision(),
    }


def _last_line(folder: Path, summary: Mapping[str, Any]) -> str:
    words = ["interrupted at" if summary["interrupted"] else "trained for", f"{summary['env_steps']:,} env steps"]
    for key, name in zip(_FINAL_EVALUATION, ("return", "win rate"), strict=True):
        if summary[key] is not None:
            words.append(f"| {name} {summary[key]:.3g}")
    return f"{' '.join(words)} | results in {folder}"
