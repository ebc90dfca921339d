"""Independent PPO."""

from marl_lightning.algorithms.base import with_defaults
from marl_lightning.algorithms.on_policy import OnPolicyActorCriticModule


class IPPO(OnPolicyActorCriticModule):
    """IPPO (de Witt et al. 2020, "Is Independent Learning All You Need in the StarCraft Multi-Agent Challenge?").

    Each agent learns from its own reward with a critic that sees its own observation. That critic also learns what
    being dead is worth, since a shared reward goes on after an agent's death.
    """

    __init__ = with_defaults(
        OnPolicyActorCriticModule.__init__, critic="observation", team_reward=None, value_active_masks=False
    )
