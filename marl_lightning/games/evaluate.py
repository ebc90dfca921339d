"""NashConv of any profile in any game that allows it: the one entry."""

from __future__ import annotations

from typing import Any, Literal, Protocol, get_args, runtime_checkable

import numpy as np
from torch import Tensor

from marl_lightning.games.markov import MarkovEvaluator, MarkovGame
from marl_lightning.games.matrix import MatrixEvaluator, is_matrix_env
from marl_lightning.games.openspiel import OpenSpielEvaluator, is_openspiel_env
from marl_lightning.games.profiles import Mode, check_mode
from marl_lightning.games.result import NashConvResult

EvaluatorName = Literal[
    "auto",
    "matrix",
    "openspiel",
    "markov",
    "learned",
    "learned:seed",
    "learned:quick",
    "learned:standard",
    "learned:thorough",
]


@runtime_checkable
class Evaluator(Protocol):
    """A way to compute or to estimate NashConv."""

    def evaluate(self, profile: Any, game: Any, *, mode: Mode = "stochastic") -> NashConvResult:
        """Returns NashConv of a profile in a game; neither is changed."""


def nash_conv(
    profile: Any, game: Any, evaluator: EvaluatorName | Evaluator = "auto", *, mode: Mode = "stochastic"
) -> NashConvResult:
    """Computes how much all agents together could gain by deviating alone, each for itself; zero at an equilibrium.

    ::

        env = make_vector_env("openspiel/leduc_poker", num_envs=1)
        print(nash_conv(module.policy, env).table())

    A policy in a native matrix game, which is repeated ``T`` times an episode with the same observation, gains ``T``
    times what it gains in one repetition if it has no memory; see :meth:`.matrix.MatrixEvaluator.evaluate`.

    Args:
        profile: a policy that plays all agents and, to be evaluated exactly, states the probabilities of their
            actions; or, where the game is given by tables, the strategies of its players.
        game: an environment with a game of OpenSpiel, a native matrix game, payoffs ``[N, n_1, ..., n_N]``, or a
            :class:`.markov.MarkovGame`; any vector environment if best responses are learned.
        evaluator: ``"matrix"``, ``"openspiel"`` or ``"markov"``; ``"auto"`` takes the one of these that fits.
            ``"learned"`` estimates NashConv from below by learning best responses, in any game, and takes a budget
            behind a colon: ``"learned:quick"``, see :class:`.learned.LearnedEvaluator`. Or an object: an evaluator with
            other settings, or one that is to remember the game.
        mode: evaluate the profile as it mixes (``"stochastic"``) or as it acts if it always takes the action that it
            prefers (``"greedy"``). A greedy profile is no equilibrium of a game that has none in pure strategies.

    Raises:
        ValueError: if the game cannot be evaluated exactly or is too large for it, or the profile does not fit it.
        TypeError: if the profile cannot state probabilities, or the evaluator is neither a name nor an evaluator.
    """
    check_mode(mode)
    if isinstance(evaluator, str):
        evaluator = choose_evaluator(evaluator, game)
    elif not callable(getattr(evaluator, "evaluate", None)):
        raise TypeError(f"evaluator must be a name or have a method evaluate, got {type(evaluator).__name__}")
    return evaluator.evaluate(profile, game, mode=mode)


def choose_evaluator(name: EvaluatorName, game: Any) -> Evaluator:
    """Returns the evaluator of a name, to be used again and again: for games of OpenSpiel this saves much time.

    Args:
        name: see :func:`nash_conv`.
        game: what ``"auto"`` chooses by.

    Raises:
        ValueError: if there is no such evaluator, or ``"auto"`` finds none.
    """
    match name:
        case "matrix":
            return MatrixEvaluator()
        case "openspiel":
            return OpenSpielEvaluator()
        case "markov":
            return MarkovEvaluator()
        case "auto":
            return _fitting(game)
    kind, _, preset = name.partition(":")
    if kind == "learned":
        from marl_lightning.games.learned import LearnedEvaluator  # it alone needs Lightning

        return LearnedEvaluator(preset=preset) if preset else LearnedEvaluator()
    raise ValueError(f"evaluator must be one of {', '.join(get_args(EvaluatorName))} or an object, got {name!r}")


def _fitting(game: Any) -> Evaluator:
    if isinstance(game, MarkovGame):
        return MarkovEvaluator()
    if isinstance(game, Tensor | np.ndarray) or is_matrix_env(game):
        return MatrixEvaluator()
    if is_openspiel_env(game):
        return OpenSpielEvaluator()
    name = game.spec.name if hasattr(game, "spec") else f"a {type(game).__name__}"
    raise ValueError(
        f"{name} has no exact evaluation. Those that have one: openspiel/<game> and matrix/<game>, made with "
        "make_vector_env or as an OpenSpielAdapter, payoffs [N, n_1, ..., n_N], and MarkovGame. For other environments "
        "set evaluator='learned', which learns best responses"
    )
