"""Algorithms as LightningModules."""

from marl_lightning.algorithms.base import MARLModule, Policy
from marl_lightning.algorithms.dcg import DCG, DCGS
from marl_lightning.algorithms.dqn import DQN
from marl_lightning.algorithms.ippo import IPPO
from marl_lightning.algorithms.iql import IQL
from marl_lightning.algorithms.mappo import MAPPO
from marl_lightning.algorithms.mfq import MFQ
from marl_lightning.algorithms.nfsp import NFSP
from marl_lightning.algorithms.on_policy import OnPolicyActorCriticModule
from marl_lightning.algorithms.pqn_vdn import PQNVDN
from marl_lightning.algorithms.pr2_iql import PR2IQL
from marl_lightning.algorithms.q_learning import QLearningModule
from marl_lightning.algorithms.qatten import QATTEN
from marl_lightning.algorithms.qmix import QMIX
from marl_lightning.algorithms.qplex import QPLEX
from marl_lightning.algorithms.qtran import QTRAN
from marl_lightning.algorithms.shaq import SHAQ
from marl_lightning.algorithms.vdn import VDN
from marl_lightning.algorithms.wqmix import CWQMIX, OWQMIX

__all__ = [
    "CWQMIX",
    "DCG",
    "DCGS",
    "DQN",
    "IPPO",
    "IQL",
    "MAPPO",
    "MFQ",
    "NFSP",
    "OWQMIX",
    "PQNVDN",
    "PR2IQL",
    "QATTEN",
    "QMIX",
    "QPLEX",
    "QTRAN",
    "SHAQ",
    "VDN",
    "MARLModule",
    "OnPolicyActorCriticModule",
    "Policy",
    "QLearningModule",
]
