"""Self-play against frozen past selves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from marl_lightning.algorithms.base import MARLModule, log_metrics
from marl_lightning.algorithms.mfq import MFQ
from marl_lightning.algorithms.on_policy import OnPolicyActorCriticModule
from marl_lightning.algorithms.pr2_iql import PR2IQL
from marl_lightning.algorithms.q_learning import QLearningModule
from marl_lightning.clock import EnvStepInterval
from marl_lightning.data import ReplayDataModule, RolloutDataModule
from marl_lightning.envs.spec import EnvSpec
from marl_lightning.envs.wrappers.opponent_pool import OpponentPoolEnv, PoolEntry, on_cpu
from marl_lightning.validation import Fraction, NonNegativeFloat, PositiveInt, checked

Sampling = Literal["latest", "uniform", "prioritised"]
"""Which members of a pool are played against, see :class:`OpponentPoolCallback`."""


@dataclass(frozen=True, kw_only=True)
class PoolMember(PoolEntry):
    """A past self.

    Attributes:
        number: how many were added before it.
        weights: the ``state_dict`` of the policy, on the CPU.
        env_steps: of the training, when it was added.
        episodes: that ended against it, in all processes.
        wins: of learners among them; a draw is half a win.
    """

    env_steps: int
    episodes: int = 0
    wins: float = 0.0

    @property
    def win_rate(self) -> float:
        """Share of the episodes that learners won, in [0, 1]; 0.5 before the first."""
        return self.wins / self.episodes if self.episodes else 0.5


class OpponentPoolCallback(Callback):
    """Lets agents learn against frozen past selves too, and not only against each other as they are now.

    A part of the episodes, drawn at their start in each instance, is against the pool: one agent learns, and a past
    self plays all others. Nothing is learned from what these do, see
    :class:`~marl_lightning.envs.wrappers.opponent_pool.OpponentPoolEnv`, which is put around the environment of the
    data module. As long as the pool is empty, all episodes are self-play. Evaluations are never against the pool.

    Members are deep copies of the policy that do not change any more. They act by chance as they did in training;
    value-based ones act greedily. The pool is saved with the checkpoint. Of several processes each plays against
    members that it draws itself, and all have the same pool and count the episodes of all.

    ===================  ===========================================================================================
    ``sampling``         the probability of a member
    ===================  ===========================================================================================
    ``"latest"``         1 for the newest
    ``"uniform"``        the same for all (fictitious self-play, Heinrich et al. 2015)
    ``"prioritised"``    proportional to ``(1 - p)^power`` with the win rate ``p`` of learners against it (prioritised
                         fictitious self-play, Vinyals et al. 2019), see :func:`prioritised_weights`
    ===================  ===========================================================================================

    It logs ``pool/size``, the number of members, and ``pool/win_rate``, the share of the episodes against the pool that
    learners won since the last time, whenever a member is added.

    Args:
        every_env_steps: interval in env steps at which the policy is added to the pool.
        capacity: members that are kept; the oldest leaves first.
        pool_probability: of an episode against the pool.
        sampling: see above.
        power: see above; only with ``"prioritised"``.
        active_opponents: members that new episodes of a process are against at a time; others are drawn after each
            rollout, once the episodes against those before have ended. More of them cost more time in every step.
        learner: the agent that learns in episodes against the pool; ``None`` draws any, every time.

    Attributes:
        members: the pool, the oldest first.

    Raises:
        TypeError: when training starts, if the algorithm learns a joint value or from what others do, or the data
            module does not play.
        ValueError: when training starts, if agents learn from a reward that they share, or learn what it is worth to be
            dead, or there is no such learner.
    """

    @checked
    def __init__(
        self,
        *,
        every_env_steps: PositiveInt,
        capacity: PositiveInt = 10,
        pool_probability: Fraction = 0.5,
        sampling: Sampling = "uniform",
        power: NonNegativeFloat = 2.0,
        active_opponents: PositiveInt = 2,
        learner: str | None = None,
    ):
        self.capacity = capacity
        self.pool_probability = pool_probability
        self.sampling = sampling
        self.power = power
        self.active_opponents = active_opponents
        self.learner = learner
        self.members: list[PoolMember] = []
        self._interval = EnvStepInterval(every_env_steps)
        self._added = 0
        self._episodes, self._wins = 0, 0.0  # since the last member was added
        self._env: OpponentPoolEnv | None = None

    def table(self) -> str:
        """Returns a line for each member, as plain text: when it was added, and how learners fare against it."""
        lines = [f"{'member':>6}  {'env steps':>12}  {'episodes':>10}  {'win rate':>8}"]
        lines += [
            f"{member.number:>6}  {member.env_steps:>12,}  {member.episodes:>10,}  {member.win_rate:>8.3f}"
            for member in self.members
        ]
        return "\n".join(lines)

    def weights(self) -> Tensor:
        """Returns what the probabilities of the members are proportional to, float64 ``[n]``."""
        if self.sampling == "latest":
            weights = torch.zeros(len(self.members), dtype=torch.float64)
            weights[-1] = 1.0
            return weights
        if self.sampling == "uniform":
            return torch.ones(len(self.members), dtype=torch.float64)
        rates = torch.tensor([member.win_rate for member in self.members], dtype=torch.float64)
        return prioritised_weights(rates, power=self.power)

    # Lightning ------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: MARLModule, stage: str) -> None:
        if stage != "fit":
            return
        data = trainer.datamodule
        if not isinstance(data, RolloutDataModule | ReplayDataModule):
            raise TypeError(f"a pool of opponents needs a data module that plays, got {type(data).__name__}")
        check_individual(pl_module, data.spec)
        if data.env is not self._env:
            self._env = data.env = OpponentPoolEnv(
                data.env,
                pool_probability=self.pool_probability,
                active_opponents=self.active_opponents,
                learner=self.learner,
            )

    def on_train_start(self, trainer: Trainer, pl_module: MARLModule) -> None:
        if trainer.datamodule.collector.env is not self._env:
            raise ValueError("the data module has played without the pool already: give the trainer a new one")
        self._env.use(pl_module.policy, deterministic=isinstance(pl_module, QLearningModule))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: MARLModule) -> None:
        self._count(pl_module)
        if self._interval.crossed(pl_module.env_steps):
            self._add(pl_module.policy, pl_module.env_steps)
            metrics = {"pool/size": float(len(self.members))}
            if self._episodes:
                metrics["pool/win_rate"] = self._wins / self._episodes
            log_metrics(trainer, metrics, pl_module.env_steps)
            self._episodes, self._wins = 0, 0.0
        if self.members:
            self._env.renew(self.members, self.weights())

    def state_dict(self) -> dict[str, Any]:
        return {
            "interval": self._interval.state_dict(),
            "added": self._added,
            "episodes": self._episodes,
            "wins": self._wins,
            "members": [{**vars(member), "weights": dict(member.weights)} for member in self.members],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._interval.load_state_dict(state["interval"])
        self._added = state["added"]
        self._episodes, self._wins = state["episodes"], state["wins"]
        self.members = [PoolMember(**member) for member in state["members"]]

    # The pool -------------------------------------------------------------------------------------------------------

    def _add(self, policy: nn.Module, env_steps: int) -> None:
        member = PoolMember(number=self._added, weights=on_cpu(policy.state_dict()), env_steps=env_steps)
        self.members = [*self.members, member][-self.capacity :]
        self._added += 1

    def _count(self, pl_module: MARLModule) -> None:
        """Takes in the episodes that have ended. A collective, once there are members."""
        results = self._env.take_results()
        if not self.members:
            return
        own = torch.tensor([results.get(member.number, (0, 0.0)) for member in self.members])
        everyone = pl_module.reduce_sum(own.to(pl_module.device)).tolist()
        self.members = [
            replace(member, episodes=member.episodes + int(episodes), wins=member.wins + wins)
            for member, (episodes, wins) in zip(self.members, everyone, strict=True)
        ]
        self._episodes += int(sum(episodes for episodes, _ in everyone))
        self._wins += sum(wins for _, wins in everyone)


def prioritised_weights(win_rates: Tensor, *, power: float) -> Tensor:
    """Weights of prioritised fictitious self-play (Vinyals et al. 2019, "Grandmaster level in StarCraft II using
    multi-agent reinforcement learning", methods), which prefer opponents that are hard to beat ::

        w_j = (1 - p_j)^power

    Args:
        win_rates: ``[n]``, shares ``p_j`` of the episodes that were won against each of them, in [0, 1].
        power: how strongly; 0 is uniform.

    Returns:
        ``[n]``, equal weights if all of them are always beaten.
    """
    weights = (1 - win_rates) ** power
    return weights if weights.sum() > 0 else torch.ones_like(weights)


def check_individual(module: MARLModule, spec: EnvSpec) -> None:
    """Raises what :class:`OpponentPoolCallback` says if what is learned is not an agent's own affair."""
    name = type(module).__name__
    individual = isinstance(module, OnPolicyActorCriticModule | QLearningModule) and not isinstance(
        module, MFQ | PR2IQL
    )
    if not individual or getattr(module, "is_joint", False):
        raise TypeError(
            f"{name} learns a joint value or from what the other agents do, so that some of them cannot be opponents: "
            "use a method in which every agent learns from its own actions, such as IPPO or IQL"
        )
    if spec.shared_reward:
        raise ValueError(f"the agents of {spec.name} share their reward, so that there are no opponents among them")
    if spec.num_agents > 1 and module.hparams.team_reward is not None:
        raise ValueError(
            f"team_reward={module.hparams.team_reward!r} makes one reward of those of opponents: set "
            "algorithm.team_reward=null, and with an actor-critic method algorithm.critic to 'observation' or "
            "'agent_state'"
        )
    if module.hparams.get("value_active_masks") is False:
        raise ValueError(
            "value_active_masks=False learns from agents that are not alive, which those of the pool look like: set "
            "algorithm.value_active_masks=true"
        )
