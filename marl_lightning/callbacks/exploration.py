"""How much a value-based policy explores, by env steps."""

from __future__ import annotations

from typing import Literal

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback

from marl_lightning.algorithms.base import MARLModule
from marl_lightning.clock import Schedule
from marl_lightning.validation import Fraction, NonNegativeInt, PositiveFloat, checked


class EpsilonSchedule(Callback):
    """Acts at random with a probability that falls by env steps; greedy otherwise, and in evaluations.

    Every instance and agent draws for itself, from the legal actions. There is nothing to save: the probability is a
    function of the env steps made.

    Args:
        start: probability at the beginning.
        end: probability from ``anneal_env_steps`` on.
        anneal_env_steps: duration in env steps, summed over all processes.
        shape: ``"linear"`` or ``"exponential"``.

    Raises:
        ValueError: if ``end`` is above ``start``, or an exponential schedule starts or ends at 0.
        TypeError: when training starts, if the algorithm does not explore in this way.
    """

    kind = "epsilon"

    @checked
    def __init__(
        self,
        *,
        start: Fraction = 1.0,
        end: Fraction = 0.05,
        anneal_env_steps: NonNegativeInt = 50_000,
        shape: Literal["linear", "exponential"] = "linear",
    ):
        if end > start:
            raise ValueError(f"exploration is to fall, but end={end} is above start={start}")
        self.schedule = Schedule(start=start, end=end, anneal_env_steps=anneal_env_steps, shape=shape)

    def on_fit_start(self, trainer: Trainer, pl_module: MARLModule) -> None:
        _give(self, pl_module)


class BoltzmannSchedule(Callback):
    """Acts by ``softmax(Q / temperature)`` over the legal actions, with a temperature that changes by env steps.

    Args:
        start: temperature at the beginning, in units of the values.
        end: temperature from ``anneal_env_steps`` on.
        anneal_env_steps: duration in env steps, summed over all processes.
        shape: ``"linear"`` or ``"exponential"``.

    Raises:
        TypeError: when training starts, if the algorithm does not explore in this way.
    """

    kind = "boltzmann"

    @checked
    def __init__(
        self,
        *,
        start: PositiveFloat = 1.0,
        end: PositiveFloat = 0.1,
        anneal_env_steps: NonNegativeInt = 50_000,
        shape: Literal["linear", "exponential"] = "exponential",
    ):
        self.schedule = Schedule(start=start, end=end, anneal_env_steps=anneal_env_steps, shape=shape)

    def on_fit_start(self, trainer: Trainer, pl_module: MARLModule) -> None:
        _give(self, pl_module)


def _give(callback: EpsilonSchedule | BoltzmannSchedule, pl_module: MARLModule) -> None:
    policy = pl_module.policy
    if not hasattr(policy, "schedule"):
        raise TypeError(f"{type(callback).__name__} does not apply to {type(pl_module).__name__}: remove the callback")
    policy.kind, policy.schedule = callback.kind, callback.schedule
