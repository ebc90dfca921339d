"""The only clock, the number of env steps: intervals on it and schedules by it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from marl_lightning.validation import NonNegativeFloat, NonNegativeInt


class EnvStepInterval:
    """Fires when the clock *crosses* a multiple of ``every``; a rollout need not divide anything.

    A jump over several multiples fires once.

    Args:
        every: length of the interval in env steps.
    """

    def __init__(self, every: int):
        self.every = every
        self._last = 0

    def crossed(self, env_steps: int) -> bool:
        """Returns whether a multiple lies after the clock of the last call and not after ``env_steps``."""
        fires = env_steps // self.every > self._last // self.every
        self._last = env_steps
        return fires

    def state_dict(self) -> dict[str, int]:
        return {"last": self._last}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._last = state["last"]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A number that goes from ``start`` to ``end`` over ``anneal_env_steps`` env steps and stays there.

    Args:
        start: value at env step 0.
        end: value from ``anneal_env_steps`` on.
        anneal_env_steps: duration in env steps; 0 starts at the end.
        shape: ``"linear"``, or ``"exponential"``, which multiplies by the same factor in every step.

    Raises:
        ValueError: if an exponential schedule starts or ends at 0.
    """

    start: NonNegativeFloat = 1.0
    end: NonNegativeFloat = 0.05
    anneal_env_steps: NonNegativeInt = 50_000
    shape: Literal["linear", "exponential"] = "linear"

    def __post_init__(self) -> None:
        if self.shape == "exponential" and not (self.start > 0 and self.end > 0):
            raise ValueError(f"an exponential schedule never gets to 0: start={self.start}, end={self.end}")

    def __call__(self, env_steps: int) -> float:
        """Returns the value after a number of env steps."""
        if env_steps >= self.anneal_env_steps:
            return self.end
        progress = env_steps / self.anneal_env_steps
        if self.shape == "linear":
            return self.start + progress * (self.end - self.start)
        return self.start * (self.end / self.start) ** progress
