"""The keys of our data, in one place.

A rollout holds time-major steps, a TensorDict ``[T, E]``:

====================================  =====================  ==========================================================
key                                   shape                  meaning
====================================  =====================  ==========================================================
``(group, "observation")``            [T, E, A, *obs]        in the dtype of the environment
``(group, "action_mask")``            [T, E, A, n] bool      discrete groups only; a legal choice in every part
``(group, "alive")``                  [T, E, A] bool         may act, **before** the step
``(group, "action")``                 [T, E, A] int64        or [T, E, A, P] int64 with ``P`` parts,
                                                             or [T, E, A, d] float32, before squashing and scaling
``(group, "log_prob")``               [T, E, A]              of the action, as of collection time
``"state"``                           [T, E, S]              global state
``"is_first"``                        [T, E] bool            recurrent state is zeroed before this step
``("next", group, "reward")``         [T, E, A]              one reward an agent, always
``("next", "terminated")``            [T, E] bool            the game is over: no bootstrap
``("next", "truncated")``             [T, E] bool            the episode was cut: bootstrap from the true successor
====================================  =====================  ==========================================================

The true successor of step ``t`` is the observation of step ``t + 1``, except where an episode ended. On-policy data
therefore keeps successors once: ``Rollout.last`` holds those of the last step, ``Rollout.final`` the rows of truncated
episodes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from tensordict import TensorDict

OBSERVATION = "observation"
ACTION_MASK = "action_mask"
ALIVE = "alive"
ACTION = "action"
LOG_PROB = "log_prob"
REWARD = "reward"
STATE = "state"
IS_FIRST = "is_first"
NEXT = "next"
TERMINATED = "terminated"
TRUNCATED = "truncated"

RecurrentState = dict[str, torch.Tensor]
"""What a recurrent policy carries from step to step: named tensors with a leading axis ``E``; empty without memory."""


@dataclass(kw_only=True)
class Rollout:
    """``T`` vector steps collected with one policy.

    Attributes:
        steps: TensorDict ``[T, E]`` with the keys above.
        last: TensorDict ``[E]``, the decision point after the last step.
        final: TensorDict ``[n]``, the true last observations of the ``n`` episodes that were truncated (or, for a
            replay, of all that ended), with their position in ``"time"`` and ``"env"``.
        initial_state: recurrent state before the first step.
        chunk_state: recurrent state before steps ``0, L, 2L, ...``, each entry ``[T / L, E, ...]``.
        episodes: one array an episode statistic, with an entry for each episode that ended in this rollout.
        states: by name ``[T, E, ...]``, those entries of the recurrent state that were to be kept, after every step.
        info: by name ``[T, E]`` on the CPU, what the environment reported of every step.
    """

    steps: TensorDict
    last: TensorDict
    final: TensorDict
    initial_state: RecurrentState
    chunk_state: RecurrentState
    episodes: dict[str, np.ndarray]
    states: RecurrentState = field(default_factory=dict)
    info: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def env_steps(self) -> int:
        """Number of env steps in this rollout, of this process."""
        return self.steps.numel()

    def to(self, device: torch.device | str, **kwargs) -> Rollout:
        """Returns the rollout on ``device`` (itself if it is there already); Lightning calls this for every batch."""

        def move(state: RecurrentState) -> RecurrentState:
            return {name: tensor.to(device, **kwargs) for name, tensor in state.items()}

        return Rollout(
            steps=self.steps.to(device),
            last=self.last.to(device),
            final=self.final.to(device),
            initial_state=move(self.initial_state),
            chunk_state=move(self.chunk_state),
            episodes=self.episodes,
            states=move(self.states),
            info=self.info,
        )
