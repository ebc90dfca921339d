"""Two-player matrix games, repeated for a fixed number of steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from marl_lightning.envs.base import Observations, VectorEnv, VectorStep
from marl_lightning.envs.spec import EnvSpec, GroupSpec
from marl_lightning.envs.validation import action_arrays, check_legal, check_num_envs, check_reset
from marl_lightning.envs.vector.buffers import allocate_step, as_tensors

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


class MatrixVectorEnv(VectorEnv):
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

    def __init__(self, *, game: str, num_envs: int, seed: int = 0, episode_length: int = 25, k: float = 0.0) -> None:
        check_num_envs(num_envs)
        if episode_length < 1:
            raise ValueError(f"episode_length must be at least 1, got {episode_length}")
        self.num_envs = num_envs
        self.seed = seed
        self._arguments = {"game": game, "episode_length": episode_length, "k": k}
        self._payoffs = payoffs(game, k=k)
        self._episode_length = episode_length
        self.spec = EnvSpec(
            name=f"matrix/{game}",
            groups={
                _GROUP: GroupSpec(
                    agents=("agent_0", "agent_1"),
                    observation_space=spaces.Box(1.0, 1.0, (1,), np.float32),
                    action_space=spaces.Discrete(self._payoffs.shape[1]),
                )
            },
            state_size=2,
            episode_limit=episode_length,
            can_checkpoint=True,
            metadata={"backend": "native"},
        )
        self._arrays = allocate_step(self.spec, num_envs)
        # Decision points never change, so that they are written once.
        for observations in (self._arrays.observations, self._arrays.final):
            observations.observation[_GROUP].fill(1.0)
            observations.action_mask[_GROUP].fill(True)
            observations.alive[_GROUP].fill(True)
            observations.state.fill(1.0)
        self._tensors = as_tensors(self._arrays)
        self._time = np.zeros(num_envs, np.int64)  # repetitions that were played in the current episode
        self._started = False

    def reset(self, *, seed: int | None = None, mask: np.ndarray | None = None) -> Observations[Tensor]:
        """See :meth:`VectorEnv.reset`. Raises ``RuntimeError`` if the very first reset is a partial one."""
        check_reset(self.num_envs, seed=seed, mask=mask)
        if mask is not None and not self._started:
            raise RuntimeError("the first reset must be without a mask")
        if seed is not None:
            self.seed = seed
        self._time[... if mask is None else mask] = 0
        self._started = True
        return self._tensors.observations

    def step(self, actions: Mapping[str, Tensor]) -> VectorStep[Tensor]:
        """See :meth:`VectorEnv.step`. Raises ``ValueError`` if an action has a wrong shape or is not legal."""
        if not self._started:
            raise RuntimeError("call reset before step")
        arrays, actions = self._arrays, action_arrays(self.spec, actions, (self.num_envs,))
        current = arrays.observations
        check_legal(self.spec, actions, action_mask=current.action_mask, alive=current.alive)
        row, column = actions[_GROUP].T
        arrays.reward[_GROUP][:] = self._payoffs[:, row, column].T
        self._time += 1
        np.greater_equal(self._time, self._episode_length, out=arrays.truncated)
        self._time[arrays.truncated] = 0
        return self._tensors

    def replicate(self, *, num_envs: int, seed: int) -> MatrixVectorEnv:
        """See :meth:`VectorEnv.replicate`."""
        other = MatrixVectorEnv(num_envs=num_envs, seed=seed, **self._arguments)
        other.recipe = self.recipe
        return other

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`VectorEnv.state_dict`."""
        return {"seed": self.seed, "started": self._started, "time": torch.from_numpy(self._time.copy())}

    def load_state_dict(self, state: Mapping[str, Any]) -> Observations[Tensor]:
        """See :meth:`VectorEnv.load_state_dict`. Raises ``ValueError`` if the number of instances differs."""
        if len(state["time"]) != self.num_envs:
            raise ValueError(f"the state holds {len(state['time'])} instances, this environment {self.num_envs}")
        self._time[:] = state["time"].numpy()
        self.seed, self._started = state["seed"], state["started"]
        return self._tensors.observations
