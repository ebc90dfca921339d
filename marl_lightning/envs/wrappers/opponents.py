"""Environments in which a policy plays some of the agents."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from marl_lightning.envs.base import Observations, VectorEnv, VectorStep
from marl_lightning.envs.spec import EnvSpec
from marl_lightning.envs.validation import action_arrays
from marl_lightning.envs.vector.buffers import allocate_step, as_tensors, map_observations
from marl_lightning.envs.wrappers.base import require_autoreset
from marl_lightning.envs.wrappers.episode import RETURN
from marl_lightning.nn.mode import evaluation_mode


class ActingPolicy(Protocol):
    """What is needed of a policy; see :class:`~marl_lightning.algorithms.base.Policy`."""

    def initial_state(self, num_envs: int) -> dict[str, Tensor]: ...

    def act(
        self,
        observations: Observations[Tensor],
        state: dict[str, Tensor],
        is_first: Tensor,
        *,
        deterministic: bool = False,
        generator: torch.Generator | None = None,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]: ...

    def env_actions(self, actions: Mapping[str, Tensor]) -> dict[str, Tensor]: ...


class Opponents(VectorEnv):
    """The game of a few agents, all others being a part of it: a policy plays them, and does not learn.

    Outside there are only the remaining agents, in the order that they had, and the groups that still have some. What
    they see, earn and may do is unchanged, but the global state is what they see, one observation after another: who
    learns to respond to the others must not know more than the agent whose place it takes. ::

        env = make_vector_env("smac/3m", num_envs=32, seed=0)
        env = Opponents(env, module.policy, agents="marine_0")  # the other marines are played by the policy

    The policy is asked for the actions of all agents, with what all of them see, and those that it chooses for the
    remaining agents are dropped. What its agents remember of each other is therefore what they would have seen, which
    is right for policies whose memory holds observations. A memory of actions, ``"previous/<group>"`` of
    :class:`~marl_lightning.algorithms.mfq.MeanFieldPolicy`, is told what was really done. Of policies that choose the
    actions of all agents together, the others act as if the remaining agents had not deviated.

    The policy acts in evaluation mode and without gradients, on its device, with the parameters that it has at the
    time of each step. Its randomness is a generator of this environment, which is seeded with the environment; so equal
    seeds give equal episodes.

    ``info`` is that of the game, without the mean returns of
    :class:`~marl_lightning.envs.wrappers.episode.RecordEpisodeStatistics`, which count all agents: wrap this
    environment if you want them. Wrappers with running statistics belong around it too.

    Args:
        env: the game with all agents, on the CPU; this environment owns it and closes it.
        policy: plays all agents of ``env``, as :class:`~marl_lightning.algorithms.base.Policy`.
        agents: name or names of those that remain.
        deterministic: the policy takes the actions that it prefers, instead of samples.

    Attributes:
        env: the game with all agents.
        policy: as given.
        agents: those that remain, in the order of ``spec.agents``.
        deterministic: as given.

    Raises:
        TypeError: if the policy cannot act.
        ValueError: if there is no agent of such a name, none remains, or the environment does not reset its instances.
            When stepping, if the policy was made for other agents.
    """

    def __init__(
        self, env: VectorEnv, policy: ActingPolicy, *, agents: str | Collection[str], deterministic: bool = False
    ) -> None:
        require_autoreset(env, "Opponents")
        check_acting(policy)
        self.env = env
        self.policy = policy
        self.deterministic = deterministic
        self.spec = _remaining_spec(env.spec, {agents} if isinstance(agents, str) else set(agents))
        self.agents = self.spec.agents
        self._kept = {
            name: torch.tensor([env.spec.groups[name].agents.index(agent) for agent in group.agents])
            for name, group in self.spec.groups.items()
        }
        self._step = as_tensors(allocate_step(self.spec, env.num_envs))
        self._device = _device_of(policy)
        self._generator = torch.Generator(self._device)
        self._everything: Observations[Tensor] | None = None  # the decision point of all agents
        self._memory: dict[str, Tensor] = {}
        self._is_first = torch.ones(env.num_envs, dtype=torch.bool)

    @property
    def num_envs(self) -> int:
        return self.env.num_envs

    @property
    def seed(self) -> int:
        return self.env.seed

    def reset(self, *, seed: int | None = None, mask: np.ndarray | None = None) -> Observations[Tensor]:
        """See :meth:`VectorEnv.reset`. A seed is that of the policy's randomness too."""
        first = self._everything is None
        self._everything = self.env.reset(seed=seed, mask=mask)
        if self._everything.state.device.type != "cpu":
            raise ValueError(f"Opponents needs an environment on the CPU, got one on {self._everything.state.device}")
        if first or seed is not None:
            self._generator.manual_seed(self.env.seed)
            self._memory = self.policy.initial_state(self.num_envs)
        self._is_first[...] = True if mask is None else self._is_first | torch.from_numpy(mask)
        self._keep(self._everything, self._step.observations)
        return self._step.observations

    def step(self, actions: Mapping[str, Tensor]) -> VectorStep[Tensor]:
        """See :meth:`VectorEnv.step`."""
        if self._everything is None:
            raise RuntimeError("call reset before step")
        action_arrays(self.spec, {name: action.cpu() for name, action in actions.items()}, (self.num_envs,))
        joint, self._memory = joint_actions(
            self.policy,
            self._everything,
            self._memory,
            self._is_first,
            spec=self.env.spec,
            deterministic=self.deterministic,
            generator=self._generator,
        )
        for name, kept in self._kept.items():
            joint[name].index_copy_(1, kept, actions[name].to(joint[name]))
        self._remember_actions(joint)
        inside = self.env.step(joint)
        torch.logical_or(inside.terminated, inside.truncated, out=self._is_first)
        self._everything = inside.observations
        step = self._step
        self._keep(inside.observations, step.observations)
        if self._is_first.any():
            self._keep(inside.final, step.final)
        for name, kept in self._kept.items():
            torch.index_select(inside.reward[name], 1, kept, out=step.reward[name])
        step.terminated.copy_(inside.terminated)
        step.truncated.copy_(inside.truncated)
        for key, value in step.info.items():
            value.copy_(inside.info[key])
        return step

    def replicate(self, *, num_envs: int, seed: int) -> Opponents:
        """See :meth:`VectorEnv.replicate`. The new environment asks the same policy."""
        inside = self.env.replicate(num_envs=num_envs, seed=seed)
        return Opponents(inside, self.policy, agents=self.agents, deterministic=self.deterministic)

    def render(self, index: int) -> np.ndarray:
        """See :meth:`VectorEnv.render`."""
        return self.env.render(index)

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`VectorEnv.state_dict`. The parameters of the policy are not a part of it."""
        return {
            "env": self.env.state_dict(),
            "agents": list(self.agents),
            "started": self._everything is not None,
            "generator": self._generator.get_state(),
            "memory": {key: value.to("cpu", copy=True) for key, value in self._memory.items()},
            "is_first": self._is_first.clone(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> Observations[Tensor]:
        """See :meth:`VectorEnv.load_state_dict`. Raises ``ValueError`` if other agents remain here."""
        if list(state["agents"]) != list(self.agents):
            raise ValueError(
                f"the state is of an environment of {list(state['agents'])}, but in this one {list(self.agents)} remain"
            )
        observations = self.env.load_state_dict(state["env"])
        self._generator.set_state(state["generator"])
        self._memory = {key: value.to(self._device, copy=True) for key, value in state["memory"].items()}
        self._is_first.copy_(state["is_first"])
        self._everything = observations if state["started"] else None
        if state["started"]:
            self._keep(observations, self._step.observations)
        return self._step.observations

    def close(self) -> None:
        """See :meth:`VectorEnv.close`."""
        self.env.close()

    def _remember_actions(self, joint: Mapping[str, Tensor]) -> None:
        """Corrects a memory of actions, one-hot and zero for the dead, where the policy was not obeyed."""
        for name, kept in self._kept.items():
            key = f"previous/{name}"
            if key in self._memory:
                taken = nn.functional.one_hot(joint[name][:, kept], self.spec.groups[name].action_size)
                taken = taken * self._everything.alive[name][:, kept].unsqueeze(-1)
                kept, memory = kept.to(self._device), self._memory[key]
                self._memory = self._memory | {key: memory.index_copy(1, kept, taken.to(memory))}

    def _keep(self, source: Observations[Tensor], target: Observations[Tensor]) -> None:
        """Writes what the remaining agents see."""
        seen = []
        for name, kept in self._kept.items():
            torch.index_select(source.observation[name], 1, kept, out=target.observation[name])
            torch.index_select(source.alive[name], 1, kept, out=target.alive[name])
            if name in target.action_mask:
                torch.index_select(source.action_mask[name], 1, kept, out=target.action_mask[name])
            seen.append(target.observation[name].flatten(1))
        torch.cat([part.float() for part in seen], 1, out=target.state)


@torch.no_grad()
def joint_actions(
    policy: ActingPolicy,
    observations: Observations[Tensor],
    memory: dict[str, Tensor],
    is_first: Tensor,
    *,
    spec: EnvSpec,
    deterministic: bool,
    generator: torch.Generator,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns what a policy makes all agents do, as the environment takes it, and what it remembers.

    Args:
        policy: asked in evaluation mode, on its device.
        observations: ``E`` decision points on the CPU.
        memory: recurrent state of the policy, on its device.
        is_first: ``[E]`` bool.
        spec: of the environment.
        deterministic: take the actions that the policy prefers.
        generator: of its randomness, on its device.

    Returns:
        Actions by group in new tensors on the CPU, and the next recurrent state.

    Raises:
        ValueError: if the policy was made for other agents.
    """
    device, joint = _device_of(policy), {}
    try:
        with evaluation_mode(policy):
            actions, _, memory = policy.act(
                map_observations(lambda tensor: tensor.to(device), observations),
                memory,
                is_first.to(device, copy=True),
                deterministic=deterministic,
                generator=generator,
            )
            chosen = policy.env_actions(actions)
        for name, group in spec.groups.items():
            dtype = torch.int64 if group.is_discrete else torch.float32
            joint[name] = torch.empty(len(is_first), group.num_agents, *group.action_shape, dtype=dtype)
            joint[name].copy_(chosen[name])
    except (KeyError, RuntimeError) as error:
        raise ValueError(
            f"the policy cannot act in {spec.name}, whose agents are {', '.join(spec.agents)}; was it made for another "
            f"game? ({type(error).__name__}: {error})"
        ) from error
    return joint, memory


def _remaining_spec(spec: EnvSpec, agents: set[str]) -> EnvSpec:
    if unknown := sorted(agents - set(spec.agents)):
        raise ValueError(f"agents has {unknown}, but the agents of {spec.name} are {list(spec.agents)}")
    if not agents:
        raise ValueError(f"agents is empty: name those of {list(spec.agents)} that are to remain")
    groups = {}
    for name, group in spec.groups.items():
        if remaining := tuple(agent for agent in group.agents if agent in agents):
            groups[name] = replace(group, agents=remaining)
    return replace(
        spec,
        groups=groups,
        state_size=sum(group.num_agents * group.observation_size for group in groups.values()),
        info_keys=tuple(key for key in spec.info_keys if key.partition("/")[0] != RETURN),
    )


def check_acting(policy: Any) -> None:
    """Raises ``TypeError`` if an object is no policy that can act."""
    if not all(callable(getattr(policy, name, None)) for name in ("act", "initial_state", "env_actions")):
        hint = "give its attribute policy" if hasattr(policy, "policy") else "give a policy"
        raise TypeError(f"a {type(policy).__name__} cannot act (act, initial_state, env_actions): {hint}")


def _device_of(policy: object) -> torch.device:
    parameter = next(policy.parameters(), None) if isinstance(policy, nn.Module) else None
    return torch.device("cpu") if parameter is None else parameter.device
