"""What a Lightning checkpoint leaves out: the exact state of every process.

Lightning keeps the ``state_dict`` of the first process only. Environments, carries and random generators differ between
processes, so each writes a file of its own into a folder beside the checkpoint.
"""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer

from marl_lightning.algorithms.base import MARLModule


class ResumeError(ValueError):
    """What a checkpoint says of the processes does not fit the training that is to go on from it."""


def rng_state(device: torch.device) -> dict[str, Any]:
    """Returns the global random states of torch, numpy and Python, and of ``device`` if it is a GPU, as plain types."""
    name, keys, position, has_gauss, cached_gauss = np.random.get_state(legacy=True)  # noqa: NPY002
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "numpy": [name, keys.tolist(), position, has_gauss, cached_gauss],
        "python": random.getstate(),
    }


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Restores :func:`rng_state`."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, np.uint32), *rest))  # noqa: NPY002
    random.setstate(state["python"])


def write_sidecar(folder: Path, trainer: Trainer, pl_module: MARLModule) -> None:
    """Writes the state of this process into ``folder``. Not a collective."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {
        "env_steps": pl_module.env_steps,
        "local": trainer.datamodule.local_state_dict(),
        "module": pl_module.local_state_dict(),
        "rng": rng_state(trainer.strategy.root_device),
    }
    torch.save(state, _file(folder, trainer.global_rank))


def restore_sidecar(folder: Path, trainer: Trainer, pl_module: MARLModule) -> None:
    """Restores the state of this process from ``folder``, the random states last. Not a collective.

    Raises:
        ResumeError: if it was written by another number of processes, in other environments, belongs to another
            checkpoint, or cannot be read.
    """
    written_by = len(list(folder.glob("rank*.pt")))
    if written_by != trainer.world_size:
        raise ResumeError(
            f"{folder} holds the state of {written_by} processes, but there are {trainer.world_size}: resume with as "
            f"many devices, or move the folder away to resume with new episodes and other random numbers"
        )
    try:
        state = torch.load(_file(folder, trainer.global_rank), map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise ResumeError(
            f"{folder} is damaged: move it away to resume with new episodes and other random numbers"
        ) from error
    if state["env_steps"] != pl_module.env_steps:
        raise ResumeError(
            f"{folder} belongs to another checkpoint (env step {state['env_steps']} instead of {pl_module.env_steps}): "
            "put the right folder beside the checkpoint, or move this one away"
        )
    try:
        trainer.datamodule.load_local_state_dict(state["local"])
        pl_module.load_local_state_dict(state.get("module", {}))
    except (ValueError, RuntimeError, KeyError) as error:
        raise ResumeError(
            f"{folder} does not fit the environments of this training ({error}): resume with the same settings, or "
            "move the folder away to resume with new episodes and other random numbers"
        ) from error
    set_rng_state(state["rng"], trainer.strategy.root_device)


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.pt"
