"""The end of training."""

from __future__ import annotations

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback

from marl_lightning.algorithms.base import MARLModule


class StopAtEnvSteps(Callback):
    """Ends training with the first rollout that reaches ``env_steps``, summed over all processes.

    Use it with ``Trainer(max_epochs=-1)``. A run that is resumed past its end makes no further rollout.

    Args:
        env_steps: the budget.

    Raises:
        ValueError: if the budget is less than 1.
    """

    def __init__(self, env_steps: int):
        if env_steps < 1:
            raise ValueError(f"env_steps must be at least 1, got {env_steps}")
        self.env_steps = env_steps

    def on_train_start(self, trainer: Trainer, pl_module: MARLModule) -> None:
        self._check(trainer, pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: MARLModule, *_: object) -> None:
        self._check(trainer, pl_module)

    def _check(self, trainer: Trainer, pl_module: MARLModule) -> None:
        if pl_module.env_steps >= self.env_steps:
            trainer.should_stop = True
