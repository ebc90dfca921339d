"""The policy that a learning policy is held close to, so that self-play settles instead of going round in circles."""

from __future__ import annotations

from typing import Literal

from torch import nn

from marl_lightning.algorithms.actor_critic import ActorPolicy, initial_states
from marl_lightning.algorithms.q_learning import frozen_copy, move_towards
from marl_lightning.clock import Schedule
from marl_lightning.data import schema
from marl_lightning.data.schema import RecurrentState, Rollout
from marl_lightning.nn.heads import GaussianHead

MagnetKind = Literal["none", "uniform", "periodic", "ema"]


class Magnet(nn.Module):
    """Magnet of magnetic mirror descent (Sokota et al. 2023, "A Unified Approach to Reinforcement Learning, Quantal
    Response Equilibria, and Two-Player Zero-Sum Games").

    At every decision, agents maximise what they expect to gain less a penalty::

        E_pi[A(a)] - coefficient * KL(pi || rho)

    With a uniform ``rho`` the last policies, not only their average, come close to a quantal response equilibrium; the
    smaller the coefficient, the closer that is to a Nash equilibrium. With a ``rho`` that follows the policy from time
    to time, it is an equilibrium of a sequence of such games that the policies come close to.

    Args:
        actors: the networks that learn; the magnet starts as a copy of them.
        kind: ``"uniform"`` over the legal actions; ``"periodic"``, what the policy was some env steps ago; ``"ema"``, a
            policy whose weights follow those that are learned.
        coefficient: of the penalty by env steps, in units of reward.
        refresh_env_steps: interval at which a periodic one becomes a copy of the learning policy.
        rate: how far the weights of ``"ema"`` move towards those that are learned after every rollout.

    Raises:
        ValueError: if a uniform one is asked for where actions are not discrete.
    """

    def __init__(
        self,
        *,
        actors: ActorPolicy,
        kind: MagnetKind,
        coefficient: Schedule,
        refresh_env_steps: int | None,
        rate: float | None,
    ):
        super().__init__()
        self.kind, self.coefficient = kind, coefficient
        self.refresh_env_steps, self.rate = refresh_env_steps, rate
        self.networks = None if kind == "uniform" else frozen_copy(actors)
        for name, actor in actors.items():
            if kind == "uniform" and isinstance(actor.head, GaussianHead):
                raise ValueError(
                    f"magnet='uniform' needs discrete actions, but those of {name!r} are continuous: "
                    "set magnet to 'periodic' or 'ema'"
                )

    def prepare_rollout(self, rollout: Rollout, state: RecurrentState, actors: ActorPolicy) -> RecurrentState:
        """Adds ``(group, "magnet")``, the distribution ``rho`` as the heads of the actors state it.

        Returns:
            ``state`` with the magnet's own recurrent states after the last step.
        """
        steps, state = rollout.steps, dict(state)
        if self.networks is None:
            for name, actor in actors.items():
                steps[name, "magnet"] = actor.head.uniform(steps[name, schema.ACTION_MASK])
            return state
        rows = {name: actor.num_agents for name, actor in self.networks.items()}
        before = initial_states("magnet", self.networks, rows, steps.shape[1]) | state
        for name, actor in self.networks.items():
            key, inputs = f"magnet/{name}", actor.inputs(steps[name, schema.OBSERVATION])
            features, states = actor(inputs, before.get(key), steps[schema.IS_FIRST])
            steps[name, "magnet"] = actor.head.distribution(features, steps[name].get(schema.ACTION_MASK, None))
            if key in before:
                state[key] = states[-1]
        return state

    def follow(self, actors: ActorPolicy, *, before: int, now: int) -> None:
        """Moves after a rollout, during which the number of env steps went from ``before`` to ``now``."""
        if self.kind == "periodic" and now // self.refresh_env_steps > before // self.refresh_env_steps:
            self.restart(actors)
        elif self.kind == "ema":
            move_towards(self.networks, actors, rate=self.rate)

    def restart(self, actors: ActorPolicy) -> None:
        """Becomes a copy of the learning policy, unless it is uniform."""
        if self.networks is not None:
            move_towards(self.networks, actors, rate=1.0)


def check_magnet(
    *,
    magnet: MagnetKind,
    coefficient: float | None,
    coefficient_end: float | None,
    anneal_env_steps: int | None,
    refresh_env_steps: int | None,
    rate: float | None,
) -> None:
    """Raises ``ValueError`` if a setting of the magnet is lacking or has no meaning."""
    needed = {
        "magnet_coefficient": (coefficient, magnet != "none"),
        "magnet_refresh_env_steps": (refresh_env_steps, magnet == "periodic"),
        "magnet_rate": (rate, magnet == "ema"),
    }
    for name, (value, is_needed) in needed.items():
        if is_needed and value is None:
            raise ValueError(f"magnet={magnet!r} needs {name}: set it")
        if value is not None and not is_needed:
            raise ValueError(f"{name}={value} has no meaning with magnet={magnet!r}: leave it out")
    if (coefficient_end is None) != (anneal_env_steps is None) or (coefficient_end is not None and magnet == "none"):
        raise ValueError(
            f"magnet_coefficient_end={coefficient_end} and magnet_anneal_env_steps={anneal_env_steps} say together "
            "how magnet_coefficient changes: set all three, and magnet, or leave these two out"
        )
