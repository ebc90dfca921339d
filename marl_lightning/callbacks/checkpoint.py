"""Checkpoints by env steps that resume exactly and survive being killed."""

from __future__ import annotations

import math
import os
import shutil
import signal
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from marl_lightning.algorithms.base import MARLModule
from marl_lightning.callbacks.interrupt import SignalTrap, TrainingInterrupted
from marl_lightning.callbacks.sidecar import restore_sidecar, write_sidecar
from marl_lightning.clock import EnvStepInterval
from marl_lightning.validation import PositiveInt, checked

_PARTIAL = ".partial"
_BEST, _LAST, _INTERRUPTED = "best", "last", "interrupted"


class EnvStepCheckpoint(Checkpoint):
    """Saves every so many env steps, after a whole rollout has been learned from.

    ======================================  ============================================================================
    file                                    meaning
    ======================================  ============================================================================
    ``step_<env_steps>.ckpt``               Lightning's checkpoint; the newest ``keep_last`` are kept
    ``step_<env_steps>.state/rank<r>.pt``   what each process needs besides to go on exactly: environment, carries,
                                            random states
    ``last.ckpt``                           the newest checkpoint, also at the end of training
    ``best.ckpt``                           the one with the best ``monitor``, saved when that was measured
    ``interrupted.ckpt``                    written after SIGINT (Ctrl-C) or SIGTERM; gone with the next checkpoint
    ======================================  ============================================================================

    A run that is resumed with ``trainer.fit(..., ckpt_path=...)`` from any of them repeats the uninterrupted one bit
    for bit; a warning says so where that is impossible. The last three are copies (hard links where possible) and say
    inside which ``.state`` folder is theirs, so move or copy a folder as a whole. To evaluate, a ``.ckpt`` is enough.

    Being killed at any moment leaves the earlier checkpoints as they were. Everything is written under names ending in
    ``.partial``; once all processes are done the ``.state`` folder is renamed, then the ``.ckpt``, which makes it
    visible, then copies are replaced, and at last old ones are deleted, each ``.ckpt`` before its ``.state``. No
    ``step_...`` is ever overwritten: a name that is taken gets ``-v1`` and so on.

    After a signal the current rollout is finished, ``interrupted.ckpt`` is written, and ``fit`` raises
    :class:`~marl_lightning.callbacks.TrainingInterrupted`. A second Ctrl-C interrupts at once and, like any other
    exception, saves nothing: parameters in the middle of an update, or NaN, would not be worth it.

    Args:
        directory: where to write; by default ``checkpoints`` in the folder of the logger.
        every_env_steps: interval in env steps.
        keep_last: number of ``step_...`` checkpoints that are kept.
        monitor: metric in ``trainer.callback_metrics`` that decides on ``best.ckpt``, such as ``"eval/return_mean"``.
            It is looked at after every rollout, and a better value is saved at once.
        mode: whether the best value is the largest or the smallest.
        save_last: keep ``last.ckpt``.

    Attributes:
        best_score: best value of ``monitor`` so far.
    """

    @checked
    def __init__(
        self,
        *,
        directory: str | Path | None = None,
        every_env_steps: PositiveInt,
        keep_last: PositiveInt = 3,
        monitor: str | None = None,
        mode: Literal["min", "max"] = "max",
        save_last: bool = True,
    ):
        self.directory = directory
        self.keep_last = keep_last
        self.monitor = monitor
        self.mode = mode
        self.save_last = save_last
        self.best_score: float | None = None
        self._interval = EnvStepInterval(every_env_steps)
        self._trap = SignalTrap()
        self._folder = Path()
        self._steps: list[str] = []  # names of the step checkpoints that are kept, oldest first
        self._copies: dict[str, str] = {}  # which step checkpoint each of best, last and interrupted is a copy of
        self._saved_at: int | None = None
        self._writing: str | None = None  # name of the checkpoint that is being written by this callback
        self._resumed_from: str | None = None

    @property
    def best_model_path(self) -> str:
        """Path of ``best.ckpt``, empty if there is none; this is where ``trainer.test(ckpt_path="best")`` looks."""
        path = self._folder / f"{_BEST}.ckpt"
        return str(path) if path.exists() else ""

    @property
    def is_stopping(self) -> bool:
        """Whether this process has received a signal, so that training ends after the rollout that is going on."""
        return bool(self._trap.received)

    # Lightning ------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: MARLModule, stage: str) -> None:
        self._resumed_from = None
        log_dir = trainer.log_dir  # a collective: all processes have to ask
        self._folder = Path(self.directory or Path(log_dir or trainer.default_root_dir) / "checkpoints")

    def on_train_start(self, trainer: Trainer, pl_module: MARLModule) -> None:
        if trainer.ckpt_path is not None:
            self._restore(trainer, pl_module)
        if trainer.is_global_zero:
            for leftover in self._folder.glob(f"*{_PARTIAL}"):
                _delete(leftover)
        self._trap.install()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: MARLModule) -> None:
        signum = self._agreed_signal(trainer)
        if trainer.should_stop and not signum:
            return  # saved in on_train_end, when the last evaluation is known
        improved = self._improved(trainer)
        due = self._interval.crossed(pl_module.env_steps)
        if due or improved or signum:
            self._save(trainer, pl_module, improved=improved, interrupted=bool(signum))
        if signum:
            path, name = self._folder / f"{_INTERRUPTED}.ckpt", signal.Signals(signum).name
            rank_zero_info(f"stopped by {name} at env step {pl_module.env_steps}, to be resumed from {path}")
            # Lightning kills the first process when another one fails, so that only the first may report it.
            raise TrainingInterrupted(signum, code=128 + signum if trainer.is_global_zero else 0)

    def on_train_end(self, trainer: Trainer, pl_module: MARLModule) -> None:
        improved = self._improved(trainer)
        if improved or not self._is_saved(trainer, pl_module):
            self._save(trainer, pl_module, improved=improved, interrupted=False)
        if self.monitor is not None and self.best_score is None:
            known = ", ".join(sorted(trainer.callback_metrics)) or "nothing"
            rank_zero_warn(f"there is no best.ckpt, since {self.monitor!r} never had a value; there was {known}")
        self._trap.remove()

    def on_exception(self, trainer: Trainer, pl_module: MARLModule, exception: BaseException) -> None:
        self._trap.remove()

    def state_dict(self) -> dict[str, Any]:
        return {
            # Checkpoints that others write have no sidecar.
            "sidecar": self._writing,
            "interval": self._interval.state_dict(),
            "steps": list(self._steps),
            "copies": dict(self._copies),
            "saved_at": self._saved_at,
            "best_score": self.best_score,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._resumed_from = state["sidecar"]
        self._interval.load_state_dict(state["interval"])
        self._steps = state["steps"]
        self._copies = state["copies"]
        self._saved_at = state["saved_at"]
        self.best_score = state["best_score"]

    # Decisions, the same in all processes ---------------------------------------------------------------------------

    def _agreed_signal(self, trainer: Trainer) -> int:
        """Returns the number of a signal that any process has received, or 0. A collective."""
        # Lightning may have caught a SIGTERM before this callback took over.
        received = self._trap.received or (signal.SIGTERM if trainer.received_sigterm else 0)
        if trainer.world_size == 1:
            return int(received)
        everyone = torch.tensor(int(received), device=trainer.strategy.root_device)
        return int(trainer.strategy.reduce(everyone, reduce_op="max"))

    def _improved(self, trainer: Trainer) -> bool:
        """Takes in the monitored value and returns whether it is better than all before. A collective."""
        if self.monitor is None:
            return False
        score = trainer.strategy.broadcast(float(trainer.callback_metrics.get(self.monitor, math.nan)))
        sign = 1 if self.mode == "max" else -1
        best = -math.inf if self.best_score is None else sign * self.best_score
        if not sign * score > best:  # an old value is not better than itself, and NaN than nothing
            return False
        self.best_score = score
        return True

    def _is_saved(self, trainer: Trainer, pl_module: MARLModule) -> bool:
        """Returns whether there is a checkpoint of this env step already. A collective."""
        saved = self._saved_at == pl_module.env_steps and (self._folder / f"{self._steps[-1]}.ckpt").exists()
        return trainer.strategy.broadcast(saved)

    # Files ----------------------------------------------------------------------------------------------------------

    def _save(self, trainer: Trainer, pl_module: MARLModule, *, improved: bool, interrupted: bool) -> None:
        name = trainer.strategy.broadcast(self._free_name(pl_module.env_steps))
        before = {*self._steps, *self._copies.values()}
        copies = [_BEST] * improved + [_LAST] * self.save_last + [_INTERRUPTED] * interrupted
        # What the checkpoint says about its folder has to be right once it is complete.
        self._saved_at = pl_module.env_steps
        self._steps = [*self._steps, name][-self.keep_last :]
        self._copies.pop(_INTERRUPTED, None)
        self._copies |= dict.fromkeys(copies, name)

        write_sidecar(self._folder / f"{name}.state{_PARTIAL}", trainer, pl_module)
        self._writing = name
        try:
            # Ends in a barrier, after which all sidecars are complete.
            trainer.save_checkpoint(self._folder / f"{name}.ckpt{_PARTIAL}", weights_only=False)
        finally:
            self._writing = None
        if trainer.is_global_zero:
            for suffix in (".state", ".ckpt"):
                (self._folder / f"{name}{suffix}{_PARTIAL}").rename(self._folder / f"{name}{suffix}")
            for copy in copies:
                self._replace_copy(self._folder / f"{copy}.ckpt", self._folder / f"{name}.ckpt")
            self._delete_unneeded(before)

    def _free_name(self, env_steps: int) -> str:
        name, version = f"step_{env_steps}", 0
        while any((self._folder / f"{name}{suffix}").exists() for suffix in (".ckpt", ".state")):
            version += 1
            name = f"step_{env_steps}-v{version}"
        return name

    @staticmethod
    def _replace_copy(copy: Path, original: Path) -> None:
        partial = copy.with_name(copy.name + _PARTIAL)
        try:
            os.link(original, partial)
        except OSError:  # not every file system has hard links
            shutil.copyfile(original, partial)
        partial.replace(copy)

    def _delete_unneeded(self, names: set[str]) -> None:
        if _INTERRUPTED not in self._copies:
            _delete(self._folder / f"{_INTERRUPTED}.ckpt")
        for name in names.difference(self._steps):
            _delete(self._folder / f"{name}.ckpt")
            if name not in self._copies.values():
                _delete(self._folder / f"{name}.state")

    def _restore(self, trainer: Trainer, pl_module: MARLModule) -> None:
        path = Path(trainer.ckpt_path)
        folder = path.parent / f"{self._resumed_from}.state"
        if self._resumed_from is None or not folder.is_dir():
            missing = "was not written by EnvStepCheckpoint" if self._resumed_from is None else f"misses {folder}"
            rank_zero_warn(
                f"resume is not exact: {path} {missing}, so all episodes start anew and random numbers differ"
            )
            return
        restore_sidecar(folder, trainer, pl_module)
        if not trainer.datamodule.local_state_is_exact:
            rank_zero_warn(
                f"resume is not exact: {trainer.datamodule.spec.name} cannot be saved, so all episodes start anew"
            )


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
