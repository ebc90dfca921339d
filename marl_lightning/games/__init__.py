"""How far a profile of policies is from equilibrium: NashConv, and what it is made of. Lightning is not needed.

Where things are: :mod:`.evaluate` has :func:`nash_conv`, the one entry; :mod:`.matrix`, :mod:`.openspiel` and
:mod:`.markov` compute it exactly for the games that allow it; :mod:`.intervals` says how sure an estimate is.
"""

from marl_lightning.games.evaluate import Evaluator, choose_evaluator, nash_conv
from marl_lightning.games.markov import MarkovEvaluator, MarkovGame
from marl_lightning.games.matrix import MatrixEvaluator
from marl_lightning.games.openspiel import OpenSpielEvaluator
from marl_lightning.games.profiles import tabulate
from marl_lightning.games.result import NashConvResult

__all__ = [
    "Evaluator",
    "MarkovEvaluator",
    "MarkovGame",
    "MatrixEvaluator",
    "NashConvResult",
    "OpenSpielEvaluator",
    "choose_evaluator",
    "nash_conv",
    "tabulate",
]
