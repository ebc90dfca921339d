"""Two-player matrix games: repeated for a fixed number of steps, or played one after the other."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from gymnasium import spaces

from marl_lightning.envs.base import Observations
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

_TRICKY = [[0, 3], [1, 2]], [[3, 2], [0, 1]]  # of the row player and of the column player

_TWO_STEP = [[[0, 0], [0, 0]], [[7, 7], [7, 7]], [[0, 1], [1, 8]]]

REPEATED_GAMES = ("climbing", "penalty", "prisoners_dilemma", "matching_pennies", "rock_paper_scissors", "tricky")
GAMES = (*REPEATED_GAMES, "two_step")

_END = -1


def payoffs(game: str, *, k: float = 0.0) -> np.ndarray:
    """Returns the payoffs ``[A, n, n]`` float32 of a repeated game.

    ``[i, a, b]`` is the reward of agent ``i`` when ``(a, b)`` is played.

    ``climbing`` and ``penalty`` are common-payoff games (Claus and Boutilier, "The dynamics of reinforcement learning
    in cooperative multiagent systems", AAAI 1998). In ``prisoners_dilemma`` action 0 cooperates and 1 defects, with
    the values of Axelrod's tournament. ``matching_pennies`` (agent 0 wants to match) and ``rock_paper_scissors`` are
    zero-sum. ``tricky`` is neither common-payoff nor zero-sum, and has one equilibrium, in which both take either
    action equally often (Bowling and Veloso, "Multiagent learning using a variable learning rate", Artificial
    Intelligence 2002).

    Args:
        game: one of ``REPEATED_GAMES``.
        k: payoff of ``penalty`` for the joint actions (0, 2) and (2, 0), usually negative. No other game takes it.

    Raises:
        ValueError: if there is no such game, or ``k`` is given to a game without it.
    """
    _check_k(game, k)
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
        case "tricky":
            row, column = np.array(_TRICKY, np.float32)
        case _:
            raise ValueError(f"unknown repeated game {game!r}, choose one of {', '.join(REPEATED_GAMES)}")
    return np.stack([row, column])


def _check_k(game: str, k: float) -> None:
    if k != 0.0 and game != "penalty":
        raise ValueError(f"only the game 'penalty' has k, got k={k} for {game!r}")


class _Rules(NamedTuple):
    payoffs: np.ndarray
    """``[P, A, n, n]`` float32, the payoffs in every place; an episode begins in the first one."""
    following: np.ndarray
    """``[P, n, n]`` int64, the place where actions lead to, or ``_END``."""
    episode_limit: int
    """Steps after which an episode ends in any case."""


def _rules(game: str, *, episode_length: int | None, k: float) -> _Rules:
    if game not in GAMES:
        raise ValueError(f"unknown matrix game {game!r}, choose one of {', '.join(GAMES)}")
    if game == "two_step":
        _check_k(game, k)
        if episode_length not in (None, 2):
            raise ValueError(f"the game 'two_step' has 2 steps, got episode_length={episode_length}: leave it out")
        both = np.array(_TWO_STEP, np.float32)
        following = np.full((3, 2, 2), _END, np.int64)
        following[0] = [[1, 1], [2, 2]]
        return _Rules(payoffs=np.stack([both, both], 1), following=following, episode_limit=2)
    if episode_length is None:
        episode_length = 25
    if episode_length < 1:
        raise ValueError(f"episode_length must be at least 1, got {episode_length}")
    table = payoffs(game, k=k)
    return _Rules(
        payoffs=table[None], following=np.zeros((1, *table.shape[1:]), np.int64), episode_limit=episode_length
    )


class _State(NamedTuple):
    time: np.ndarray
    """``[E]`` int64, steps that were made in the current episode."""
    place: np.ndarray
    """``[E]`` int64, which of the matrices is played now; the only one of a repeated game is 0."""


class MatrixVectorEnv(NativeVectorEnv):
    """``num_envs`` instances of a matrix game. Nothing is random, so the seed changes nothing.

    The group ``"agents"`` has two agents. They both observe which matrix is played now, as zeros and a one, and the
    state is what both of them observe.

    A *repeated* game has one matrix, so that observations are the constant 1, as in EPyMARL. Its episodes end by
    truncation, never by termination, since every repetition is worth the same and agents cannot see the time that is
    left; bootstrapping keeps values independent of it.

    ``two_step`` has three (Rashid et al., "QMIX: monotonic value function factorisation for deep multi-agent
    reinforcement learning", ICML 2018, section 5). The first step pays nothing, and the action of ``agent_0`` alone
    chooses what is played in the second, which ends the episode: with 0 a matrix that pays 7 always, with 1 ``[[0, 1],
    [1, 8]]``. The reward is the team's, of which both agents are told. The best return is 8; a sum of values of single
    agents cannot represent it and settles for 7.

    Args:
        game: one of ``GAMES``.
        num_envs: number of instances.
        seed: kept for the contract of :class:`VectorEnv`.
        episode_length: repetitions of a repeated game in an episode; ``None`` takes 25. ``two_step`` has 2 steps.
        k: see :func:`payoffs`.

    Attributes:
        is_repeated: whether there is one matrix, with the payoffs of :func:`payoffs`.

    Raises:
        ValueError: if the game is unknown, a number is out of range, or the game does not have it.
    """

    _saved_fields = _State._fields

    def __init__(
        self, *, game: str, num_envs: int, seed: int = 0, episode_length: int | None = None, k: float = 0.0
    ) -> None:
        self._rules = _rules(game, episode_length=episode_length, k=k)
        places, _, num_actions, _ = self._rules.payoffs.shape
        self.is_repeated = places == 1
        self._one_hot = np.eye(places, dtype=np.float32)
        group = GroupSpec(
            agents=("agent_0", "agent_1"),
            observation_space=spaces.Box(1.0 if self.is_repeated else 0.0, 1.0, (places,), np.float32),
            action_space=spaces.Discrete(num_actions),
        )
        super().__init__(
            spec=EnvSpec(
                name=f"matrix/{game}",
                groups={_GROUP: group},
                state_size=2 * places,
                episode_limit=self._rules.episode_limit,
                shared_reward=game == "two_step",
                can_checkpoint=True,
                metadata={"backend": "embedded"},
            ),
            num_envs=num_envs,
            seed=seed,
            num_threads=1,
            arguments={"game": game, "episode_length": self._rules.episode_limit, "k": k},
        )
        self._state = _State(time=np.zeros(num_envs, np.int64), place=np.zeros(num_envs, np.int64))
        # The decision points of a repeated game never change, so that they are written once.
        for observations in (self._arrays.observations, self._arrays.final):
            observations.action_mask[_GROUP].fill(True)
            observations.alive[_GROUP].fill(True)
            self._write_places(observations)

    def _seed_instances(self, seed: int) -> None:
        """Nothing is random."""

    def _check_actions(self) -> None:
        now = self._arrays.observations
        check_legal(self.spec, self._action_arrays, action_mask=now.action_mask, alive=now.alive)

    def _step_instances(self, first: int, last: int) -> None:
        arrays, (time, place) = self._arrays, self._state
        row, column = self._action_arrays[_GROUP].T
        arrays.reward[_GROUP][:] = self._rules.payoffs[place, :, row, column]
        following = self._rules.following[place, row, column]
        time += 1
        np.equal(following, _END, out=arrays.terminated)
        np.greater(time >= self._rules.episode_limit, arrays.terminated, out=arrays.truncated)
        over = arrays.terminated | arrays.truncated
        time[over] = 0
        if not self.is_repeated:
            place[:] = np.where(arrays.terminated, place, following)
            self._write_places(arrays.final)
            place[over] = 0
            self._write_places(arrays.observations)

    def _reset_instances(self, mask: np.ndarray) -> None:
        self._state.time[mask] = 0
        self._state.place[mask] = 0
        self._observe_instances()

    def _observe_instances(self) -> None:
        self._write_places(self._arrays.observations)

    def _write_places(self, observations: Observations[np.ndarray]) -> None:
        seen = self._one_hot[self._state.place]
        observations.observation[_GROUP][:] = seen[:, None]
        observations.state[:] = np.tile(seen, 2)
