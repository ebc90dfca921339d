"""How far a profile of policies is from equilibrium: NashConv, and what it is made of.

Where things are: :mod:`.evaluate` has :func:`nash_conv`, the one entry; :mod:`.matrix`, :mod:`.openspiel` and
:mod:`.markov` compute it exactly for the games that allow it; :mod:`.learned` estimates it from below in any game;
:mod:`.intervals` says how sure an estimate is. Lightning is needed by :mod:`.learned` alone, which is imported when it
is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from marl_lightning.games.evaluate import Evaluator, choose_evaluator, nash_conv
from marl_lightning.games.markov import MarkovEvaluator, MarkovGame
from marl_lightning.games.matrix import MatrixEvaluator
from marl_lightning.games.openspiel import OpenSpielEvaluator
from marl_lightning.games.profiles import tabulate
from marl_lightning.games.result import NashConvResult

if TYPE_CHECKING:
    from marl_lightning.games.learned import LearnedEvaluator, approximate_nashconv_bernoulli_iql

__all__ = [
    "Evaluator",
    "LearnedEvaluator",
    "MarkovEvaluator",
    "MarkovGame",
    "MatrixEvaluator",
    "NashConvResult",
    "OpenSpielEvaluator",
    "approximate_nashconv_bernoulli_iql",
    "choose_evaluator",
    "nash_conv",
    "tabulate",
]

_LEARNED = ("LearnedEvaluator", "approximate_nashconv_bernoulli_iql")


def __getattr__(name: str) -> object:
    if name in _LEARNED:
        return getattr(importlib.import_module("marl_lightning.games.learned"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
