"""Intervals on the only clock, the number of env steps."""

from __future__ import annotations


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
