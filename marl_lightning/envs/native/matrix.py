"""Two-player matrix games, repeated for a fixed number of steps."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from gymnasium import spaces

from marl_lightning.envs.native.vector import NativeVectorEnv
from marl_lightning.envs.spec import EnvSpec, GroupSpec
from marl_lightning.envs.validation import check_legal

_GROUP = "agents"

# Payoffs of the row player; a zero-sum game gives the column player the negative, a symmetric one the transpose.
_CLIMBING = [[11, -30, 0], [-30, 7, 6], [0, 0, 5]]
_PENALTY = [[10, 0, 0], [0, 2, 0], [0, 0, 10]]
_PRISONERS_DILEMMA = [[3, 0], [5, 1]]
_MATCHING_PENNIES = [[1, -1], [-1, 1]]
_ROCK_PAPER_SCISSORS = [[0, -1, 1], [1, 0, -1], [-1, 1, 0]]

GAMES = ("climbing", "penalty", "prisoners_dilemma", "matching_pennies", "rock_paper_scissors")


def payoffs(game: str, *, k: float = 0.0) -> np.ndarray:
    """Returns the payoffs ``[A, n, n]`` float32; ``[i, a, b]`` is the reward of agent ``i`` when ``(a, b)`` is played.

    ``climbing`` and ``penalty`` are common-payoff games (Claus and Boutilier, "The dynamics of reinforcement learning
    in cooperative multiagent systems", AAAI 1998). In ``prisoners_dilemma`` action 0 cooperates and 1 defects, with
    the values of Axelrod's tournament. ``matching_pennies`` (agent 0 wants to match) and ``rock_paper_scissors`` are
    zero-sum.

    Args:
        game: one of ``GAMES``.
        k: payoff of ``penalty`` for the joint actions (0, 2) and (2, 0), usually negative. No other game takes it.

    Raises:
        ValueError: if there is no such game, or ``k`` is given to a game without it.
    """
    if k != 0.0 and game != "penalty":
        raise ValueError(f"only the game 'penalty' has k, got k={k} for {game!r}")
    match game:
        case "climbing":
            row = column = np.array(_CLIMBING, np.float32)
        case "penalty":
            row = column = np.array(_PENALTY, np.float32)
            row[0, 2] = row[2, 0] = k
        case "prisoners_dilemma":
            row = np.array(_PRISONERS_DILEMMA, np.float32)
            column = row.T
        case "matching_pennies":
            row = np.array(_MATCHING_PENNIES, np.float32)
            column = -row
        case "rock_paper_scissors":
            row = np.array(_ROCK_PAPER_SCISSORS, np.float32)
            column = -row
        case _:
            raise ValueError(f"unknown matrix game {game!r}, choose one of {', '.join(GAMES)}")
    return np.stack([row, column])


class _State(NamedTuple):
    time: np.ndarray
    """``[E]`` int64, repetitions that were played in the current episode."""


class MatrixVectorEnv(NativeVectorEnv):
    """``num_envs`` instances of a matrix game, repeated ``episode_length`` times an episode.

    The group ``"agents"`` has two agents. Observations are the constant 1, shape ``(1,)``, and the state is both of
    them: the games have no memory, as in EPyMARL. An episode ends by truncation, never by termination, since every
    repetition is worth the same and agents cannot see the time that is left; bootstrapping keeps values independent
    of it. Nothing is random, so the seed changes nothing.

    Args:
        game: one of ``GAMES``.
        num_envs: number of instances.
        seed: kept for the contract of :class:`VectorEnv`.
        episode_length: repetitions of the game in an episode.
        k: see :func:`payoffs`.

    Raises:
        ValueError: if the game is unknown or a number is out of range.
    """

    _saved_fields = _State._fields

    def __init__(self, *, game: str, num_envs: int, seed: int = 0, episode_length: int = 25, k: float = 0.0) -> None:
        if episode_length < 1:
            raise ValueError(f"episode_length must be at least 1, got {episode_length}")
        self._payoffs = payoffs(game, k=k)
        self._episode_length = episode_length
        group = GroupSpec(
            agents=("agent_0", "agent_1"),
            observation_space=spaces.Box(1.0, 1.0, (1,), np.float32),
            action_space=spaces.Discrete(self._payoffs.shape[1]),
        )
        super().__init__(
            spec=EnvSpec(
                name=f"matrix/{game}",
                groups={_GROUP: group},
                state_size=2,
                episode_limit=episode_length,
                can_checkpoint=True,
                metadata={"backend": "embedded"},
            ),
            num_envs=num_envs,
            seed=seed,
            num_threads=1,
            arguments={"game": game, "episode_length": episode_length, "k": k},
        )
        self._state = _State(time=np.zeros(num_envs, np.int64))
        # Decision points never change, so that they are written once.
        for observations in (self._arrays.observations, self._arrays.final):
            observations.observation[_GROUP].fill(1.0)
            observations.action_mask[_GROUP].fill(True)
            observations.alive[_GROUP].fill(True)
            observations.state.fill(1.0)

    def _seed_instances(self, seed: int) -> None:
        """Nothing is random."""

    def _check_actions(self) -> None:
        now = self._arrays.observations
        check_legal(self.spec, self._action_arrays, action_mask=now.action_mask, alive=now.alive)

    def _step_instances(self, first: int, last: int) -> None:
        arrays, time = self._arrays, self._state.time
        row, column = self._action_arrays[_GROUP].T
        arrays.reward[_GROUP][:] = self._payoffs[:, row, column].T
        time += 1
        np.greater_equal(time, self._episode_length, out=arrays.truncated)
        time[arrays.truncated] = 0

    def _reset_instances(self, mask: np.ndarray) -> None:
        self._state.time[mask] = 0

    def _observe_instances(self) -> None:
        """Decision points never change."""
