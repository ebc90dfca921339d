"""Cross-play: policies of different trainings against each other."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from marl_lightning.algorithms.base import MARLModule, Policy
from marl_lightning.algorithms.mixed import MixedPolicy
from marl_lightning.algorithms.q_learning import QLearningModule
from marl_lightning.envs.base import VectorEnv
from marl_lightning.envs.registry import make_vector_env
from marl_lightning.envs.spec import EnvSpec
from marl_lightning.envs.wrappers import running_statistics
from marl_lightning.evaluation import evaluate, load_checkpoint
from marl_lightning.games.elo import elo_ratings
from marl_lightning.games.intervals import normal_interval


@dataclass(frozen=True, kw_only=True)
class CrossPlayResult:
    """How policies do against each other; entry ``[i, j]`` is about policy ``i``, who plays against ``j``.

    Attributes:
        names: of the policies, in the order of rows and columns.
        returns: ``[n, n]``, mean over episodes, and over the agents that ``i`` played, of their undiscounted returns.
        standard_errors: ``[n, n]``, of ``returns``.
        intervals: ``[n, n, 2]``, 95 % intervals of ``returns``.
        win_rates: ``[n, n]``, share of the episodes in which the mean return of the agents of ``i`` was above that of
            the agents of ``j``; a draw is half of one.
        episodes: played for each way to seat ``i`` and ``j``.
        seats: what ``i`` played, one entry for each of these ways: names of agents, joined by commas.
    """

    names: tuple[str, ...]
    returns: np.ndarray
    standard_errors: np.ndarray
    intervals: np.ndarray
    win_rates: np.ndarray
    episodes: int
    seats: tuple[str, ...]

    @property
    def elo(self) -> np.ndarray:
        """``[n]``, ratings with a mean of 0 from the win rates, see :func:`~marl_lightning.games.elo.elo_ratings`."""
        games = self.episodes * len(self.seats)
        return elo_ratings(games * (self.win_rates + 1 - self.win_rates.T))

    def table(self) -> str:
        """Returns mean returns with their standard errors, and ratings, as plain text."""
        numbers = [f"{place}" for place in range(len(self.names))]
        legend = [f"[{number}] {name}" for number, name in zip(numbers, self.names, strict=True)]
        width = max(len(line) for line in legend)
        cells = [
            [f"{mean:.3f} ± {error:.3f}" for mean, error in zip(*pair, strict=True)]
            for pair in zip(self.returns, self.standard_errors, strict=True)
        ]
        column = max(len(cell) for row in cells for cell in row)
        head = f"{'':<{width}}  " + "  ".join(f"{f'[{number}]':>{column}}" for number in numbers) + f"  {'Elo':>6}"
        lines = [
            f"{line:<{width}}  " + "  ".join(f"{cell:>{column}}" for cell in row) + f"  {rating:>6.0f}"
            for line, row, rating in zip(legend, cells, self.elo, strict=True)
        ]
        return "\n".join([head, *lines])

    def as_dict(self) -> dict[str, Any]:
        """Returns everything as it can be written as JSON."""
        return {
            "names": list(self.names),
            "episodes": self.episodes,
            "seats": list(self.seats),
            "returns": self.returns.tolist(),
            "standard_errors": self.standard_errors.tolist(),
            "intervals": self.intervals.tolist(),
            "win_rates": self.win_rates.tolist(),
            "elo": self.elo.tolist(),
        }

    def write_csv(self, path: str | Path) -> Path:
        """Writes a line for each pair and returns the path; the folder must be there."""
        path = Path(path)
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("row", "column", "return_mean", "standard_error", "ci_low", "ci_high", "win_rate"))
            for i, row in enumerate(self.names):
                for j, column in enumerate(self.names):
                    numbers = (self.returns, self.standard_errors, *np.moveaxis(self.intervals, -1, 0), self.win_rates)
                    writer.writerow((row, column, *(float(values[i, j]) for values in numbers)))
        return path


def cross_play(
    policies: Mapping[str, Policy],
    env: VectorEnv,
    *,
    episodes: int,
    seed: int = 0,
    deterministic: bool = False,
    symmetric: bool = False,
) -> CrossPlayResult:
    """Lets every policy play every other one, and itself.

    A game of two sides has two agents, or two groups of agents: the row plays the first side and the column the second
    one. In all other games the row plays one agent, each in turn, and the column all others; the results are means over
    these. Whoever plays, the environment is reset with the same seed (common random numbers), so that entries may be
    compared with less noise than their standard errors say.

    Args:
        policies: by name; policies for the whole game, see :class:`~marl_lightning.algorithms.mixed.MixedPolicy`. Of
            each only what its agents do counts.
        env: the game; it is reset, and stays open.
        episodes: for each way to seat two policies, at least 2.
        seed: see :func:`~marl_lightning.evaluation.evaluate`.
        deterministic: let all policies take the mode of their distributions instead of samples.
        symmetric: in a game of two sides, let the row play the second side too, and take means over both.

    Raises:
        ValueError: if there are fewer than two policies or episodes, or the game has only one agent.
    """
    if len(policies) < 2:
        raise ValueError(f"cross-play needs at least 2 policies, got {len(policies)}")
    if episodes < 2:
        raise ValueError(f"episodes must be at least 2, since a standard error needs them, got {episodes}")
    agents = env.spec.agents
    seats = _seats(env.spec, symmetric=symmetric)
    returns = np.zeros((len(policies), len(policies), len(seats), episodes))
    won = np.zeros_like(returns)
    for i, row in enumerate(policies.values()):
        for j, column in enumerate(policies.values()):
            for k, seat in enumerate(seats):
                mixed = MixedPolicy(policies={a: row if a in seat else column for a in agents}, spec=env.spec)
                played = evaluate(mixed, env, episodes=episodes, deterministic=deterministic, seed=seed).agent_returns
                own = np.mean([played[agent] for agent in seat], axis=0)
                theirs = np.mean([played[agent] for agent in agents if agent not in seat], axis=0)
                returns[i, j, k] = own
                won[i, j, k] = 0.5 * (np.sign(own - theirs) + 1)
    by_episode = returns.mean(2)  # those of different seats have the same seed, so that they are not independent
    return CrossPlayResult(
        names=tuple(policies),
        returns=by_episode.mean(-1),
        standard_errors=by_episode.std(-1, ddof=1) / np.sqrt(episodes),
        intervals=np.array([[normal_interval(entry) for entry in row] for row in by_episode]),
        win_rates=won.mean((2, 3)),
        episodes=episodes,
        seats=tuple(",".join(seat) for seat in seats),
    )


def _seats(spec: EnvSpec, *, symmetric: bool) -> list[tuple[str, ...]]:
    """Returns what a row plays: the agents of a side, or one agent after the other."""
    if spec.num_agents < 2:
        raise ValueError(f"cross-play needs a game of several agents, but {spec.name} has one")
    groups = [group.agents for group in spec.groups.values()]
    sides = groups if len(groups) == 2 else [(agent,) for agent in spec.agents]
    return sides if symmetric or len(sides) > 2 else sides[:1]


def load_players(
    paths: Sequence[str], *, device: torch.device | str = "cpu"
) -> tuple[dict[str, Policy], dict[str, Any]]:
    """Loads the policies of checkpoints that were trained in the same environment.

    Of a method that learns an average policy, such as NFSP, it is that one; value-based policies do not explore.

    Args:
        paths: ``.ckpt`` files.
        device: where to put them.

    Returns:
        The policies, named by as much of the end of their paths as tells them apart; and the recipe of the environment,
        arguments of ``make_vector_env``.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: if there are fewer than two or one is given twice, if they belong to different environments, or to
            one that cannot be named or that has running statistics; or as
            :func:`~marl_lightning.evaluation.load_checkpoint` does.
    """
    if len(paths) < 2:
        raise ValueError(f"cross-play needs at least 2 checkpoints, got {len(paths)}: [a.ckpt,b.ckpt]")
    names = short_names(paths)
    loaded = [load_checkpoint(path, device=device) for path in paths]
    recipe = loaded[0][1]
    if any(other != recipe for _, other in loaded):
        lines = [f"{path} in {_described(other)}" for path, (_, other) in zip(paths, loaded, strict=True)]
        raise ValueError("the checkpoints were trained in different environments:\n    " + "\n    ".join(lines))
    with make_vector_env(recipe["name"], num_envs=1, seed=0, **recipe["kwargs"]) as env:
        if kept := list(running_statistics(env)):
            raise ValueError(
                f"each checkpoint has running statistics of its own ({', '.join(kept)}), of which one environment "
                "cannot have several: train without NormalizeObservation and NormalizeReward"
            )
        _seats(env.spec, symmetric=False)
    return {name: _player(module) for name, (module, _) in zip(names, loaded, strict=True)}, recipe


def _player(module: MARLModule) -> Policy:
    if hasattr(module, "average_policy"):
        return module.average_policy
    if isinstance(module, QLearningModule):
        module.policy.rate = 0.0
    return module.policy


def _described(recipe: Mapping[str, Any]) -> str:
    settings = ", ".join(f"{key}={value}" for key, value in recipe["kwargs"].items())
    return f"{recipe['name']} ({settings})" if settings else recipe["name"]


def short_names(paths: Sequence[str]) -> list[str]:
    """Returns the ends of paths, without suffix and folders named ``checkpoints``, so long that all are different.

    Raises:
        ValueError: if two are the same file.
    """
    if len({Path(path).resolve() for path in paths}) < len(paths):
        raise ValueError(f"a checkpoint is given twice in {', '.join(map(str, paths))}")
    parts = [[part for part in Path(path).resolve().with_suffix("").parts if part != "checkpoints"] for path in paths]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-length:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]
