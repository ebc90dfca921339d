"""Progress in env steps."""

from __future__ import annotations

import sys
import time
from datetime import timedelta

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ProgressBar
from tqdm import tqdm

from marl_lightning.algorithms.base import MARLModule
from marl_lightning.callbacks.throughput import MovingRate
from marl_lightning.validation import NonNegativeFloat, PositiveInt, checked

_PLAIN_SECONDS = 10.0
_SHOWN = {
    "train/return": ("return", ".2f"),
    "train/win_rate": ("win rate", ".0%"),
    "eval/return_mean": ("eval return", ".2f"),
    "eval/win_rate": ("eval win rate", ".0%"),
    "nashconv/value": ("NashConv", ".3g"),
}


class EnvStepProgressBar(ProgressBar):
    """A bar on stderr that counts env steps and shows returns, win rates, env steps per second and the time left.

    Where stderr is not a terminal, a line is printed every ten seconds instead. Only the first process shows anything.

    Args:
        total_env_steps: the budget.
        refresh_seconds: shortest time between two drawings of the bar.
    """

    @checked
    def __init__(self, *, total_env_steps: PositiveInt, refresh_seconds: NonNegativeFloat = 0.5):
        super().__init__()
        self.total_env_steps = total_env_steps
        self.refresh_seconds = refresh_seconds
        self._enabled = True
        self._bar: tqdm | None = None
        self._rate = MovingRate()
        self._shown_at = 0.0

    def enable(self) -> None:
        """See :class:`lightning.pytorch.callbacks.ProgressBar`."""
        self._enabled = True

    def disable(self) -> None:
        """See :class:`lightning.pytorch.callbacks.ProgressBar`."""
        self._enabled = False

    def print(self, *args: object, sep: str = " ") -> None:
        """Prints above the bar."""
        tqdm.write(sep.join(map(str, args)), file=sys.stderr)

    def on_train_start(self, trainer: Trainer, pl_module: MARLModule) -> None:
        self._rate.add(pl_module.env_steps)
        self._shown_at = time.perf_counter()
        if self._enabled and sys.stderr.isatty():
            self._bar = tqdm(
                total=self.total_env_steps,
                initial=pl_module.env_steps,
                unit_scale=True,
                dynamic_ncols=True,
                bar_format="{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} env steps{postfix}",
                file=sys.stderr,
            )

    def on_train_epoch_end(self, trainer: Trainer, pl_module: MARLModule) -> None:
        self._rate.add(pl_module.env_steps)
        pause = _PLAIN_SECONDS if self._bar is None else self.refresh_seconds
        if time.perf_counter() - self._shown_at >= pause:
            self._show(trainer, pl_module)

    def on_fit_end(self, trainer: Trainer, pl_module: MARLModule) -> None:
        self._show(trainer, pl_module)
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: MARLModule, exception: BaseException) -> None:
        self._close()

    def status(self, trainer: Trainer, pl_module: MARLModule) -> str:
        """Returns the text beside the bar."""
        metrics = trainer.callback_metrics
        parts = [f"{label} {float(metrics[name]):{form}}" for name, (label, form) in _SHOWN.items() if name in metrics]
        rate = self._rate.value
        if rate:
            left = max(0, self.total_env_steps - pl_module.env_steps) / rate
            parts += [f"{tqdm.format_sizeof(rate)} env steps/s", f"{timedelta(seconds=round(left))} left"]
        return ", ".join(parts)

    def _show(self, trainer: Trainer, pl_module: MARLModule) -> None:
        if not self._enabled:
            return
        self._shown_at = time.perf_counter()
        status = self.status(trainer, pl_module)
        if self._bar is None:
            print(f"{pl_module.env_steps:,} of {self.total_env_steps:,} env steps, {status}", file=sys.stderr)
        else:
            self._bar.n = pl_module.env_steps
            self._bar.set_postfix_str(status, refresh=False)
            self._bar.refresh()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
