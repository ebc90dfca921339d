"""What an equilibrium computation found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from marl_lightning.games.intervals import Interval


@dataclass(frozen=True, kw_only=True)
class NashConvResult:
    """NashConv of a profile ``pi`` (Lanctot et al. 2017, "A Unified Game-Theoretic Approach to Multiagent Reinforcement
    Learning", section 2): the sum over agents of what each could gain by deviating alone ::

        NashConv(pi) = sum_i gain_i,    gain_i = max_{pi'_i} u_i(pi'_i, pi_{-i}) - u_i(pi)

    It is zero exactly at a Nash equilibrium. Payoffs ``u_i`` are expected returns, unless an evaluator is told
    otherwise. If only some agents were asked for, there are only these, and the value is the sum over them.

    Attributes:
        value: NashConv, or an estimate of a lower bound of it: the sum of ``gains``. It may be below zero, slightly by
            rounding, or by the chance that is in an estimate; see ``clipped``.
        gains: by agent, what it gains by its best response. An estimate may be negative, see ``value``.
        on_policy: by agent, its payoff if nobody deviates.
        best_response_values: by agent, the payoff of its best response.
        bound: ``"exact"``; or ``"lower"``, if the responses were found by learning and may not be the best.
        interval: where ``value`` may lie, the value itself twice if it is exact.
        episodes: episodes that were played to estimate the payoffs, 0 if they were computed.
        snapshots: by agent, the parameters of the response that was found; empty if it was computed.
        wall_seconds: what it took.
        env_steps: env steps that were made to learn and to estimate; they are no steps of training.
        payoff_range: difference between the largest and the smallest payoff that an agent can get, ``None`` if unknown.
        gain_intervals: by agent, where its gain may lie; empty if it is exact, as the following ones.
        on_policy_intervals: by agent, where its payoff may lie if nobody deviates.
        best_response_intervals: by agent, where the payoff of its response may lie.
    """

    value: float
    gains: dict[str, float]
    on_policy: dict[str, float]
    best_response_values: dict[str, float]
    bound: Literal["exact", "lower"]
    interval: tuple[float, float]
    episodes: int = 0
    snapshots: Mapping[str, Any] = field(default_factory=dict)
    wall_seconds: float = 0.0
    env_steps: int = 0
    payoff_range: float | None = None
    gain_intervals: Mapping[str, Interval] = field(default_factory=dict)
    on_policy_intervals: Mapping[str, Interval] = field(default_factory=dict)
    best_response_intervals: Mapping[str, Interval] = field(default_factory=dict)

    @classmethod
    def exact(
        cls,
        *,
        agents: Sequence[str],
        on_policy: Sequence[float],
        best_response_values: Sequence[float],
        wall_seconds: float,
        payoff_range: float | None = None,
    ) -> NashConvResult:
        """Returns the result of a computation, from payoffs in the order of ``agents``."""
        now = {agent: float(value) for agent, value in zip(agents, on_policy, strict=True)}
        best = {agent: float(value) for agent, value in zip(agents, best_response_values, strict=True)}
        gains = {agent: best[agent] - now[agent] for agent in agents}
        value = sum(gains.values())
        return cls(
            value=value,
            gains=gains,
            on_policy=now,
            best_response_values=best,
            bound="exact",
            interval=(value, value),
            wall_seconds=wall_seconds,
            payoff_range=payoff_range,
        )

    @property
    def clipped(self) -> float:
        """The sum of the gains that are positive: not to deviate is a choice too, so that no true gain is negative.

        Of estimates this is biased upwards, which ``value`` is not.
        """
        return sum(max(0.0, gain) for gain in self.gains.values())

    @property
    def normalised(self) -> float | None:
        """The value divided by the range of payoffs, to compare games; ``None`` if there is no range."""
        return self.value / self.payoff_range if self.payoff_range else None

    def as_dict(self) -> dict[str, Any]:
        """Returns everything that can be written as JSON: all but the snapshots."""
        return {
            "value": self.value,
            "clipped": self.clipped,
            "bound": self.bound,
            "interval": list(self.interval),
            "normalised": self.normalised,
            "gains": dict(self.gains),
            "on_policy": dict(self.on_policy),
            "best_response_values": dict(self.best_response_values),
            "gain_intervals": _as_lists(self.gain_intervals),
            "on_policy_intervals": _as_lists(self.on_policy_intervals),
            "best_response_intervals": _as_lists(self.best_response_intervals),
            "payoff_range": self.payoff_range,
            "episodes": self.episodes,
            "env_steps": self.env_steps,
            "wall_seconds": self.wall_seconds,
        }

    def table(self) -> str:
        """Returns a line for each agent and one for the sum, as plain text."""
        width = max(len("NashConv"), *(len(agent) for agent in self.gains))
        lines = [f"{'agent':<{width}}  {'on policy':>12}  {'best response':>13}  {'gain':>12}"]
        lines += [
            f"{agent:<{width}}  {_shown(self.on_policy[agent]):>12}  {_shown(self.best_response_values[agent]):>13}  "
            f"{_shown(gain):>12}"
            for agent, gain in self.gains.items()
        ]
        lines.append(f"{'NashConv':<{width}}  {'':>12}  {'':>13}  {_shown(self.value):>12}  {self._remark()}")
        return "\n".join(lines)

    def _remark(self) -> str:
        if self.bound == "exact":
            return "(exact)"
        low, high = self.interval
        return f"(lower bound, in [{_shown(low)}, {_shown(high)}], {self.episodes} episodes)"


def _as_lists(intervals: Mapping[str, Interval]) -> dict[str, list[float]]:
    return {agent: list(interval) for agent, interval in intervals.items()}


def _shown(value: float) -> str:
    """Returns six decimals; what is zero but for rounding has no sign."""
    return f"{0.0 if abs(value) < 5e-7 else value:.6f}"
