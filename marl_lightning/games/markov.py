"""Tabular Markov games: values by linear equations, best responses by policy iteration or backward induction."""

from __future__ import annotations

import string
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from marl_lightning.games.profiles import Mode, check_mode, greedy_rows
from marl_lightning.games.result import NashConvResult

_ROUNDING = 1e-4
_IMPROVEMENT = 1e-10  # relative to the values; an action that is better by less is better by rounding only


@dataclass(frozen=True, kw_only=True, eq=False)
class MarkovGame:
    """A game of ``N`` players with ``S`` states that everybody sees (Shapley 1953, "Stochastic Games").

    Args:
        transitions: ``[S, n_1, ..., n_N, S]``, probability of the next state given the state and the joint action. An
            end of the game is a state that leads to itself and pays nothing.
        rewards: ``[N, S, n_1, ..., n_N]``, expected reward of each player.
        start: ``[S]``, probability of the first state.
        gamma: discount in [0, 1], less than 1 without a horizon.
        horizon: number of steps, or ``None`` for a game that goes on for ever.

    Raises:
        ValueError: if shapes do not fit, something is no distribution, or a number is out of range.
    """

    transitions: np.ndarray
    rewards: np.ndarray
    start: np.ndarray
    gamma: float = 1.0
    horizon: int | None = None

    def __post_init__(self) -> None:
        for name in ("transitions", "rewards", "start"):
            object.__setattr__(self, name, np.asarray(getattr(self, name), np.float64))
        shape = self.rewards.shape[1:]
        num_players = self.rewards.ndim - 2
        if num_players < 1 or len(self.rewards) != num_players:
            raise ValueError(f"rewards of N players have the shape [N, S, n_1, ..., n_N], got {self.rewards.shape}")
        if self.transitions.shape != (*shape, shape[0]):
            raise ValueError(f"transitions must have the shape {(*shape, shape[0])}, got {self.transitions.shape}")
        if self.start.shape != shape[:1]:
            raise ValueError(f"start must have the shape {shape[:1]}, got {self.start.shape}")
        if not np.isfinite(self.rewards).all():
            raise ValueError("rewards must be finite")
        for name in ("transitions", "start"):
            _check_distributions(getattr(self, name), name)
        if self.horizon is None and not 0 <= self.gamma < 1:
            raise ValueError(f"gamma must be in [0, 1) in a game without a horizon, got {self.gamma}")
        if self.horizon is not None and not (0 <= self.gamma <= 1 and self.horizon >= 1):
            raise ValueError(
                f"gamma must be in [0, 1] and horizon at least 1, got gamma={self.gamma}, horizon={self.horizon}"
            )

    @property
    def num_states(self) -> int:
        """``S``."""
        return len(self.start)

    @property
    def num_actions(self) -> tuple[int, ...]:
        """Number of actions of each player."""
        return self.rewards.shape[2:]


def on_policy_values(game: MarkovGame, profile: Sequence[np.ndarray]) -> np.ndarray:
    """Values of the profile, ``[N, S]`` float64: expected discounted returns from each state.

    Without a horizon they solve ``V_i = r_i + gamma P V_i``, where ``r_i`` and ``P`` are rewards and transitions under
    the profile; else they are those of the first step, found by backward induction.

    Args:
        game: the game.
        profile: for each player its policy ``[S, n_i]``, or ``[T, S, n_i]`` with a horizon of ``T``.

    Raises:
        ValueError: if the profile does not fit the game or is no distribution.
    """
    profile = _checked(game, profile)
    if game.horizon is None:
        rewards, transitions = _under(game, profile)
        return np.linalg.solve(np.eye(game.num_states) - game.gamma * transitions, rewards.T).T
    values = np.zeros((len(game.rewards), game.num_states))
    for now in _backwards(game, profile):
        rewards, transitions = _under(game, now)
        values = rewards + game.gamma * values @ transitions.T
    return values


def best_response(game: MarkovGame, profile: Sequence[np.ndarray], player: int) -> tuple[np.ndarray, np.ndarray]:
    """The best that a player can do while the others keep to the profile, which makes the game its Markov decision
    process: by policy iteration (Howard 1960), which ends with the exact optimum, or by backward induction.

    Args:
        game: the game.
        profile: see :func:`on_policy_values`. The others have no memory, so that neither need their best responder.
        player: number of the player, from 0; its own policy in the profile does not matter.

    Returns:
        Its values ``[S]`` float64 and its actions ``[S]``, or ``[T, S]`` with a horizon, int64.

    Raises:
        ValueError: as for :func:`on_policy_values`.
    """
    profile = _checked(game, profile)
    if game.horizon is None:
        return _policy_iteration(*_decision_process(game, profile, player), gamma=game.gamma)
    values, actions = np.zeros(game.num_states), []
    for now in _backwards(game, profile):
        rewards, transitions = _decision_process(game, now, player)
        action_values = rewards + game.gamma * transitions @ values
        values = action_values.max(-1)
        actions.append(action_values.argmax(-1))
    return values, np.stack(actions[::-1])


class MarkovEvaluator:
    """Exact NashConv of tabular Markov games; see :meth:`evaluate`."""

    def evaluate(self, profile: Sequence[np.ndarray], game: MarkovGame, *, mode: Mode = "stochastic") -> NashConvResult:
        """Computes NashConv from the distribution of first states.

        Args:
            profile: for each player its policy ``[S, n_i]``, or ``[T, S, n_i]`` with a horizon; :func:`.tabulate`
                makes it of a policy without memory.
            game: the game.
            mode: ``"greedy"`` puts all probability on the likeliest action.

        Raises:
            TypeError: if the profile is a policy and not a table, or the game is no :class:`MarkovGame`.
            ValueError: if the profile does not fit the game or is no distribution.
        """
        started = time.perf_counter()
        check_mode(mode)
        if not isinstance(game, MarkovGame):
            raise TypeError(f"evaluator='markov' computes with tables: give a MarkovGame, not a {type(game).__name__}")
        profile = _checked(game, profile)
        if mode == "greedy":
            profile = [greedy_rows(policy) for policy in profile]
        num_players = len(game.rewards)
        return NashConvResult.exact(
            agents=[f"player_{player}" for player in range(num_players)],
            on_policy=on_policy_values(game, profile) @ game.start,
            best_response_values=[
                best_response(game, profile, player)[0] @ game.start for player in range(num_players)
            ],
            wall_seconds=time.perf_counter() - started,
            payoff_range=_payoff_range(game),
        )


def _policy_iteration(rewards: np.ndarray, transitions: np.ndarray, *, gamma: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns optimal values and actions ``[S]`` for rewards ``[S, n]`` and transitions ``[S, n, S]``."""
    states = np.arange(len(rewards))
    actions = rewards.argmax(-1)
    while True:
        values = np.linalg.solve(np.eye(len(rewards)) - gamma * transitions[states, actions], rewards[states, actions])
        action_values = rewards + gamma * transitions @ values
        tolerance = _IMPROVEMENT * max(1.0, np.abs(values).max())
        better = action_values.max(-1) > action_values[states, actions] + tolerance
        if not better.any():
            return values, actions
        actions = np.where(better, action_values.argmax(-1), actions)


def _under(game: MarkovGame, profile: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Returns rewards ``[N, S]`` and transitions ``[S, S]`` if everybody keeps to policies ``[S, n_i]``."""
    actions, terms = _letters(profile)
    rewards = np.einsum(f"YX{actions},{terms}->YX", game.rewards, *profile, optimize=True)
    transitions = np.einsum(f"X{actions}Z,{terms}->XZ", game.transitions, *profile, optimize=True)
    return rewards, transitions


def _decision_process(game: MarkovGame, profile: Sequence[np.ndarray], player: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns rewards ``[S, n]`` and transitions ``[S, n, S]`` of a player if the others keep to policies."""
    # Every action of its own counts in full.
    profile = [np.ones_like(policy) if other == player else policy for other, policy in enumerate(profile)]
    actions, terms = _letters(profile)
    own = actions[player]
    rewards = np.einsum(f"X{actions},{terms}->X{own}", game.rewards[player], *profile, optimize=True)
    transitions = np.einsum(f"X{actions}Z,{terms}->X{own}Z", game.transitions, *profile, optimize=True)
    return rewards, transitions


def _letters(profile: Sequence[np.ndarray]) -> tuple[str, str]:
    """Returns a letter for the actions of each player, and what einsum calls their policies."""
    actions = string.ascii_lowercase[: len(profile)]
    return actions, ",".join(f"X{action}" for action in actions)


def _backwards(game: MarkovGame, profile: Sequence[np.ndarray]) -> Iterator[list[np.ndarray]]:
    """Yields the policies ``[S, n_i]`` of every step, the last step first."""
    for step in reversed(range(game.horizon)):
        yield [policy[step] if policy.ndim == 3 else policy for policy in profile]


def _checked(game: MarkovGame, profile: Sequence[Any]) -> list[np.ndarray]:
    if callable(getattr(profile, "action_probabilities", None)):
        raise TypeError(
            "a Markov game takes tables of probabilities [S, n_i]: make them with tabulate(policy, observations, "
            "spec=...), which a policy with memory cannot be made of"
        )
    policies = [np.asarray(policy, np.float64) for policy in profile]
    if len(policies) != len(game.num_actions):
        raise ValueError(f"the game has {len(game.num_actions)} players, the profile {len(policies)}")
    for player, (policy, actions) in enumerate(zip(policies, game.num_actions, strict=True)):
        allowed = [(game.num_states, actions)]
        if game.horizon is not None:
            allowed.append((game.horizon, *allowed[0]))
        if policy.shape not in allowed:
            shapes = " or ".join(map(str, allowed))
            raise ValueError(f"the policy of player {player} must have the shape {shapes}, got {policy.shape}")
        _check_distributions(policy, f"the policy of player {player}")
    return policies


def _check_distributions(rows: np.ndarray, name: str) -> None:
    # Written so that NaN fails too.
    if not ((rows >= 0).all() and (np.abs(rows.sum(-1) - 1) <= _ROUNDING).all()):
        raise ValueError(f"{name} must hold probabilities that sum to 1 over the last axis")


def _payoff_range(game: MarkovGame) -> float:
    """Returns what lies between the largest and the smallest return that rewards of this size could add up to."""
    steps = np.inf if game.horizon is None else game.horizon
    weight = steps if game.gamma == 1 else (1 - game.gamma**steps) / (1 - game.gamma)
    return float(np.ptp(game.rewards) * weight)
