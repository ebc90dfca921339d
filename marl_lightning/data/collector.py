"""The acting loop: a policy and a vector environment make a rollout."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from tensordict import TensorDict
from torch import Tensor

from marl_lightning.data import schema
from marl_lightning.data.episodes import EpisodeStatistics
from marl_lightning.data.schema import RecurrentState, Rollout
from marl_lightning.envs.base import Observations, VectorEnv, VectorStep
from marl_lightning.envs.wrappers.base import require_autoreset

if TYPE_CHECKING:
    from marl_lightning.algorithms.base import Policy


@dataclass(slots=True)
class _StepViews:
    """One time index of every leaf of a rollout, made once so that the loop does no indexing.

    Attributes:
        observations: what the policy sees.
        is_first: starts of episodes.
        before: the leaves of ``observations`` and ``is_first``, in the order of ``_leaves_before``.
        after: all other leaves, in the order of ``_leaves_after``.
    """

    observations: Observations[Tensor]
    is_first: Tensor
    before: list[Tensor]
    after: list[Tensor]


class RolloutCollector:
    """Steps a vector environment with a policy and keeps what must survive between rollouts.

    The leaves of a rollout are allocated once, on ``device``, and filled anew by every :meth:`collect`.

    Args:
        env: the environment; it is reset with ``seed`` before the first step.
        rollout_length: vector steps a rollout, ``T``.
        chunk_length: recurrent states are kept at every ``L``-th step, ``L`` dividing ``T``; ``None`` keeps the first.
        seed: of the environment and of the policy's randomness.
        device: of the policy and the data.
        keep_final: the episodes whose true last observations are kept: the truncated ones, whose value is
            bootstrapped, or all that ended.
        keep_states: names of entries of the recurrent state that are kept as of after every step.

    Raises:
        ValueError: if chunks do not fill a rollout, or the environment does not reset its instances itself.
    """

    def __init__(
        self,
        *,
        env: VectorEnv,
        rollout_length: int,
        chunk_length: int | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
        keep_final: Literal["truncated", "ended"] = "truncated",
        keep_states: Collection[str] = (),
    ):
        require_autoreset(env, "training")
        self.env = env
        self._keep_final = keep_final
        self._keep_states = tuple(keep_states)
        self.rollout_length = rollout_length
        self.chunk_length = chunk_length or rollout_length
        if rollout_length % self.chunk_length:
            raise ValueError(f"chunk_length={chunk_length} must divide rollout_length={rollout_length}")
        self.state: RecurrentState | None = None
        self._groups = tuple(env.spec.groups)
        self._discrete_groups = tuple(name for name, group in env.spec.groups.items() if group.is_discrete)
        self._device = torch.device(device)
        self._generator = torch.Generator(self._device).manual_seed(seed)
        self._episodes = EpisodeStatistics(spec=env.spec, num_envs=env.num_envs)
        self._observations = env.reset(seed=seed)
        self._is_first = torch.ones(env.num_envs, dtype=torch.bool)
        self._allocate()

    def _allocate(self) -> None:
        spec, shape, device = self.env.spec, (self.rollout_length, self.env.num_envs), self._device

        def empty(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(*shape, *size, dtype=dtype, device=device)

        following: dict[str, Any] = {
            schema.TERMINATED: empty(dtype=torch.bool),
            schema.TRUNCATED: empty(dtype=torch.bool),
        }
        leaves: dict[str, Any] = {
            schema.STATE: empty(spec.state_size),
            schema.IS_FIRST: empty(dtype=torch.bool),
            schema.NEXT: following,
        }
        for name, group in spec.groups.items():
            agents, observation = group.num_agents, self._observations.observation[name]
            action_dtype = torch.int64 if group.is_discrete else torch.float32
            leaves[name] = {
                schema.OBSERVATION: empty(*observation.shape[1:], dtype=observation.dtype),
                schema.ALIVE: empty(agents, dtype=torch.bool),
                schema.ACTION: empty(agents, *group.action_shape, dtype=action_dtype),
                schema.LOG_PROB: empty(agents),
            }
            if group.is_discrete:
                leaves[name][schema.ACTION_MASK] = empty(agents, group.action_size, dtype=torch.bool)
            following[name] = {schema.REWARD: empty(agents)}
        self._leaves = leaves
        self._info = {key: torch.zeros(shape) for key in spec.info_keys}
        self._views = [self._view(t) for t in range(self.rollout_length)]

    def _view(self, t: int) -> _StepViews:
        groups, leaves, following = self.env.spec.groups, self._leaves, self._leaves[schema.NEXT]

        def per_group(key: str) -> dict[str, Tensor]:
            return {name: leaves[name][key][t] for name in groups if key in leaves[name]}

        observations = Observations(
            observation=per_group(schema.OBSERVATION),
            action_mask=per_group(schema.ACTION_MASK),
            alive=per_group(schema.ALIVE),
            state=leaves[schema.STATE][t],
        )
        is_first = leaves[schema.IS_FIRST][t]
        outcome = VectorStep(
            observations=observations,
            reward={name: following[name][schema.REWARD][t] for name in groups},
            terminated=following[schema.TERMINATED][t],
            truncated=following[schema.TRUNCATED][t],
            final=observations,
            info={key: values[t] for key, values in self._info.items()},
        )
        return _StepViews(
            observations=observations,
            is_first=is_first,
            before=self._leaves_before(observations, is_first),
            after=self._leaves_after(per_group(schema.ACTION), per_group(schema.LOG_PROB), outcome),
        )

    # Lists are made name by name, since an environment may hold its groups in any order.

    def _leaves_before(self, observations: Observations[Tensor], is_first: Tensor) -> list[Tensor]:
        return [
            *(observations.observation[name] for name in self._groups),
            *(observations.action_mask[name] for name in self._discrete_groups),
            *(observations.alive[name] for name in self._groups),
            observations.state,
            is_first,
        ]

    def _leaves_after(
        self, actions: Mapping[str, Tensor], log_probs: Mapping[str, Tensor], step: VectorStep[Tensor]
    ) -> list[Tensor]:
        return [
            *(actions[name] for name in self._groups),
            *(log_probs[name] for name in self._groups),
            *(step.reward[name] for name in self._groups),
            step.terminated,
            step.truncated,
            *(step.info[key] for key in self._info),
        ]

    @torch.no_grad()
    def collect(self, policy: Policy) -> Rollout:
        """Makes ``T`` vector steps. The rollout's tensors are overwritten by the next call."""
        state = policy.initial_state(self.env.num_envs) if self.state is None else self.state
        initial_state, chunk_states, final = state, [], []
        states: dict[str, list[Tensor]] = {key: [] for key in self._keep_states}
        for t, view in enumerate(self._views):
            _copy(self._leaves_before(self._observations, self._is_first), view.before)
            if t % self.chunk_length == 0:
                chunk_states.append(state)
            actions, log_probs, state = policy.act(view.observations, state, view.is_first, generator=self._generator)
            for key, kept in states.items():
                kept.append(state[key])
            step = self.env.step({name: a.to("cpu") for name, a in policy.env_actions(actions).items()})
            _copy(self._leaves_after(actions, log_probs, step), view.after)
            self._is_first = step.terminated | step.truncated
            if self._keep_final == "ended":
                if self._is_first.any():
                    final.append(_final_rows(t, step.final, self._is_first))
            elif step.truncated.any():
                final.append(_final_rows(t, step.final, step.truncated & ~step.terminated))
            self._observations = step.observations
        self.state = state
        return Rollout(
            steps=TensorDict(self._leaves, batch_size=(self.rollout_length, self.env.num_envs), device=self._device),
            last=_as_tensordict(self._observations).clone().to(self._device),
            final=self._concatenate(final),
            initial_state=initial_state,
            chunk_state={key: torch.stack([s[key] for s in chunk_states]) for key in state},
            episodes=self._finished_episodes(),
            states={key: torch.stack(kept) for key, kept in states.items()},
            info=self._info,
        )

    def _concatenate(self, final: list[TensorDict]) -> TensorDict:
        if not final:
            nothing = torch.zeros(self.env.num_envs, dtype=torch.bool)
            final = [_final_rows(0, self._observations, nothing)]
        return torch.cat(final).to(self._device)

    def _finished_episodes(self) -> dict[str, Any]:
        following = self._leaves[schema.NEXT]
        reward = {name: following[name][schema.REWARD].numpy(force=True) for name in self.env.spec.groups}
        done = (following[schema.TERMINATED] | following[schema.TRUNCATED]).numpy(force=True)
        return self._episodes.update(reward, done, {key: value.numpy() for key, value in self._info.items()})

    def state_dict(self) -> dict[str, Any]:
        """Returns all that :meth:`load_state_dict` needs to continue exactly, if the environment can be saved."""
        return {
            "env": self.env.state_dict() if self.env.spec.can_checkpoint else None,
            "generator": self._generator.get_state(),
            "episodes": self._episodes.state_dict(),
            "is_first": self._is_first.clone(),
            "recurrent": None if self.state is None else {key: value.cpu() for key, value in self.state.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores :meth:`state_dict`. An environment that could not be saved starts new episodes with a new seed."""
        self._generator.set_state(state["generator"])
        if state["env"] is None:  # with its old seed, it would play the first episodes of the run again
            seed = torch.randint(2**31, (1,), generator=self._generator, device=self._device).item()
            self._observations = self.env.reset(seed=seed)
            return
        self._observations = self.env.load_state_dict(state["env"])
        self._is_first = state["is_first"].clone()
        self._episodes.load_state_dict(state["episodes"])
        recurrent = state["recurrent"]
        self.state = None if recurrent is None else {key: value.to(self._device) for key, value in recurrent.items()}


def _copy(source: list[Tensor], target: list[Tensor]) -> None:
    """Copies tensor after tensor in one call, asynchronously to a GPU."""
    torch._foreach_copy_(target, source, non_blocking=True)


def _as_tensordict(observations: Observations[Tensor]) -> TensorDict:
    data: dict[str, Any] = {schema.STATE: observations.state}
    for name, observation in observations.observation.items():
        data[name] = {schema.OBSERVATION: observation, schema.ALIVE: observations.alive[name]}
        if name in observations.action_mask:
            data[name][schema.ACTION_MASK] = observations.action_mask[name]
    return TensorDict(data, batch_size=observations.state.shape[:1])


def _final_rows(t: int, final: Observations[Tensor], rows: Tensor) -> TensorDict:
    env = rows.nonzero().squeeze(-1)
    data = _as_tensordict(final)[env]
    return data.update({"time": torch.full_like(env, t), "env": env})
