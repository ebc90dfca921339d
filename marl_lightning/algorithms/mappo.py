"""Multi-agent PPO with a central critic."""

from marl_lightning.algorithms.on_policy import OnPolicyActorCriticModule


class MAPPO(OnPolicyActorCriticModule):
    """MAPPO (Yu et al. 2022, "The Surprising Effectiveness of PPO in Cooperative Multi-Agent Games").

    The base class with its defaults: a critic that sees the global state, learned from a team reward.
    """
