"""Where the time of a training goes."""

from __future__ import annotations

import time
from collections import deque

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback

from marl_lightning.algorithms.base import MARLModule, log_metrics
from marl_lightning.callbacks.evaluation import EvaluationCallback
from marl_lightning.callbacks.nash_conv import NashConvCallback
from marl_lightning.callbacks.video import VideoCallback


class MovingRate:
    """Env steps per second over the last rollouts.

    Args:
        window: number of rollouts.
    """

    def __init__(self, *, window: int = 20):
        self._points: deque[tuple[float, int]] = deque(maxlen=window + 1)

    def add(self, env_steps: int) -> None:
        """Takes the reading of the clock now."""
        self._points.append((time.perf_counter(), env_steps))

    @property
    def value(self) -> float:
        """The rate, 0 before there are two readings."""
        if len(self._points) < 2:
            return 0.0
        (start, first), (end, last) = self._points[0], self._points[-1]
        return (last - first) / max(end - start, 1e-9)


class ThroughputMonitor(Callback):
    """Logs after every rollout where the wall time since the last one went, as ``time/...``.

    =================================  =================================================================================
    name                               meaning
    =================================  =================================================================================
    ``collect_seconds``                acting: policy and environment
    ``update_seconds``                 learning: ``training_step``
    ``evaluate_seconds``               evaluations, NashConv and videos
    ``other_seconds``                  the rest: checkpoints, loggers, Lightning
    ``env_steps_per_second``           over the last 20 rollouts
    ``env_steps_per_second_total``     since training was started or resumed
    =================================  =================================================================================

    Seconds are those of the first process, env steps those of all. Work that a GPU does later is counted where the CPU
    waits for it.
    """

    def __init__(self) -> None:
        self._trainer: Trainer | None = None
        self._rate = MovingRate()
        self._update_seconds = 0.0
        self._update_start = 0.0
        self._start: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._end: dict[str, float] | None = None

    def on_train_start(self, trainer: Trainer, pl_module: MARLModule) -> None:
        self._trainer = trainer
        self._rate.add(pl_module.env_steps)
        self._start = self._last = self._read(pl_module)
        self._end = None

    def on_train_batch_start(self, *_: object) -> None:
        self._update_start = time.perf_counter() - self._trainer.datamodule.collect_seconds

    def on_train_batch_end(self, *_: object) -> None:
        # A replay collects while the module is training: that time counts as collecting.
        self._update_seconds += time.perf_counter() - self._trainer.datamodule.collect_seconds - self._update_start

    def on_train_epoch_end(self, trainer: Trainer, pl_module: MARLModule) -> None:
        self._rate.add(pl_module.env_steps)
        now = self._read(pl_module)
        recent, total = _breakdown(self._last, now), _breakdown(self._start, now)
        self._last = now
        names = ("collect_seconds", "update_seconds", "evaluate_seconds", "other_seconds")
        metrics = {name: recent[name] for name in names}
        metrics["env_steps_per_second"] = self._rate.value
        metrics["env_steps_per_second_total"] = total["env_steps_per_second"]
        log_metrics(trainer, {f"time/{name}": value for name, value in metrics.items()}, pl_module.env_steps)

    def on_fit_end(self, trainer: Trainer, pl_module: MARLModule) -> None:
        self._end = self._read(pl_module)

    def on_exception(self, trainer: Trainer, pl_module: MARLModule, exception: BaseException) -> None:
        if self._start:
            self._end = self._read(pl_module)

    def summary(self) -> dict[str, float]:
        """Returns seconds (``total``, ``collect``, ``update``, ``evaluate``, ``other``), env steps and their rate.

        They count from the start of training, or from where it was resumed, to its end, or to now.

        Raises:
            RuntimeError: if training has not started yet.
        """
        if not self._start:
            raise RuntimeError("there is nothing to sum up before training has started")
        return _breakdown(self._start, self._end or self._read(self._trainer.lightning_module))

    def _read(self, pl_module: MARLModule) -> dict[str, float]:
        kinds = EvaluationCallback | NashConvCallback | VideoCallback
        evaluations = [callback for callback in self._trainer.callbacks if isinstance(callback, kinds)]
        return {
            "total_seconds": time.perf_counter(),
            "collect_seconds": self._trainer.datamodule.collect_seconds,
            "update_seconds": self._update_seconds,
            "evaluate_seconds": sum(callback.seconds for callback in evaluations),
            "env_steps": pl_module.env_steps,
        }


def _breakdown(start: dict[str, float], end: dict[str, float]) -> dict[str, float]:
    spent = {name: end[name] - start[name] for name in start}
    known = spent["collect_seconds"] + spent["update_seconds"] + spent["evaluate_seconds"]
    spent["other_seconds"] = max(0.0, spent["total_seconds"] - known)
    spent["env_steps_per_second"] = spent["env_steps"] / max(spent["total_seconds"], 1e-9)
    return spent
