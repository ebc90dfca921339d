"""Shapley Q-learning."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from marl_lightning.algorithms.q_learning import QLearningModule, best_actions, join, values_of
from marl_lightning.envs.spec import EnvSpec
from marl_lightning.nn.mixers import ShapleyMixer
from marl_lightning.validation import PositiveInt, extends


class SHAQ(QLearningModule):
    """SHAQ (Wang et al. 2022): agents' values are their shares, by Shapley, of the team's value.

    ::

        loss = (r + gamma (1 - terminated) sum_i max_a Q_i(s', a) - sum_i delta_i(s, u) Q_i(s, u_i))^2

    where ``delta`` is 1 for an agent's best action and learned for others, see
    :class:`~marl_lightning.nn.mixers.ShapleyMixer`. The paper gives the mixer a learning rate of its own, for each map;
    here all parameters have the same.

    Args:
        num_samples: permutations by which ``delta`` is estimated.
        embedding_size: width of the mixing network.
        hypernet_size: hidden width of the networks that make its weights from the state; ``None`` makes them linear.
        **inherited: see :class:`~marl_lightning.algorithms.q_learning.QLearningModule`.
    """

    is_joint = True

    @extends(QLearningModule.__init__)
    def __init__(
        self,
        *,
        num_samples: PositiveInt = 10,
        embedding_size: PositiveInt = 32,
        hypernet_size: PositiveInt | None = 64,
    ) -> None: ...

    def build_mixer(self, spec: EnvSpec) -> ShapleyMixer:
        return ShapleyMixer(
            state_size=spec.state_size,
            num_samples=self.hparams.num_samples,
            embedding_size=self.hparams.embedding_size,
            hypernet_size=self.hparams.hypernet_size,
        )

    def mix(
        self,
        mixer: nn.Module | None,
        *,
        value: Mapping[str, Tensor],
        action: Mapping[str, Tensor],
        action_mask: Mapping[str, Tensor],
        state: Tensor,
    ) -> Tensor:
        chosen = values_of(value, action)
        if mixer is self.target_mixer:  # the successor: its actions are the best ones, though not by the same network
            return chosen.sum(-1, keepdim=True)
        best = best_actions(value, action_mask)
        is_best = join({name: action[name] == best[name] for name in best})
        return mixer(chosen, is_best, state)
