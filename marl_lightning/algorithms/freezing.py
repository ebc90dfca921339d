"""Agents that act but do not learn, beside agents that do."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from marl_lightning.envs.spec import EnvSpec

OpponentMode = Literal["greedy", "softmax", "epsilon"]


class FrozenAgents(nn.Module):
    """Which agents do not learn, of networks that have weights for every agent along their first axis.

    Groups of which nobody learns are not optimised at all. In the others, the agents lie in the same tensors: gradients
    and moments of those that are frozen are kept at zero, so that an optimiser step of Adam leaves their weights as
    they are, bit for bit.

    Args:
        spec: the environment.
        trainable: names of the agents that learn.

    Raises:
        ValueError: if there is no agent of such a name, or none that learns.
    """

    def __init__(self, *, spec: EnvSpec, trainable: Collection[str]):
        super().__init__()
        if unknown := [agent for agent in trainable if agent not in spec.agents]:
            raise ValueError(f"trainable_agents has {unknown}, but the agents of {spec.name} are {list(spec.agents)}")
        if not trainable:
            raise ValueError(f"trainable_agents is empty: name some of {list(spec.agents)}, or leave it out")
        self._groups = tuple(spec.groups)
        for name, group in spec.groups.items():
            frozen = torch.tensor([agent not in trainable for agent in group.agents])
            self.register_buffer(f"of_{name}", frozen, persistent=False)
        learns = torch.tensor([float(agent in trainable) for agent in spec.agents])
        self.register_buffer("learns", learns, persistent=False)
        self._whole = {name for name in self._groups if bool(self.of(name).all())}
        self._partial = [name for name in self._groups if name not in self._whole and bool(self.of(name).any())]

    def of(self, group: str) -> Tensor:
        """Returns which agents of a group are frozen, ``[A]`` bool."""
        return getattr(self, f"of_{group}")

    def learns_in(self, group: str) -> bool:
        """Returns whether somebody of a group learns."""
        return group not in self._whole

    def check_separate(
        self, *, share_parameters: bool, layer_norm: bool, normalise_value: bool, shared_critic: bool
    ) -> None:
        """Raises ``ValueError`` if the weights or statistics of some frozen agents are those of learning ones too.

        Args:
            share_parameters: the setting of an actor-critic method, as the following ones.
            layer_norm: its scale and shift are those of all agents.
            normalise_value: its statistics are those of all agents.
            shared_critic: whether there is one value for all agents of a group.
        """
        changes = {
            "share_parameters=False": share_parameters,
            "layer_norm=False": layer_norm,
            "normalise_value=False": normalise_value,
            "critic='observation' or 'agent_state'": shared_critic,
        }
        if self._partial and any(changes.values()):
            raise ValueError(
                f"trainable_agents singles out agents of {', '.join(map(repr, self._partial))}, which have weights or "
                f"statistics in common: set {', '.join(change for change, due in changes.items() if due)}"
            )

    def stop_learning(self, networks: Mapping[str, nn.Module]) -> None:
        """Takes the networks of groups of which nobody learns out of what is optimised."""
        for name in self._whole:
            networks[name].requires_grad_(False)

    @torch.no_grad()
    def clear_gradients(self, networks: Mapping[str, nn.Module]) -> None:
        """Sets the gradients of frozen agents to zero, whatever they were."""
        for name in self._partial:
            for parameter in networks[name].parameters():
                if parameter.grad is not None:
                    parameter.grad[self.of(name)] = 0.0

    @torch.no_grad()
    def clear_moments(self, networks: Mapping[str, nn.Module], optimizer: torch.optim.Optimizer) -> None:
        """Sets to zero what the optimiser remembers of frozen agents, who may have learned before."""
        for name in self._partial:
            for parameter in networks[name].parameters():
                for value in optimizer.state.get(parameter, {}).values():
                    if isinstance(value, Tensor) and value.shape == parameter.shape:
                        value[self.of(name)] = 0.0

    @contextmanager
    def kept(self, networks: Mapping[str, nn.Module]) -> Iterator[None]:
        """Undoes what happens to the weights and buffers of frozen agents meanwhile."""
        rows = [(name, ...) for name in self._whole] + [(name, self.of(name)) for name in self._partial]
        saved = [
            (tensor, frozen, tensor[frozen].clone())
            for name, frozen in rows
            for tensor in networks[name].state_dict().values()
        ]
        yield
        for tensor, frozen, values in saved:
            tensor[frozen] = values


@dataclass(frozen=True, kw_only=True)
class Opponents:
    """How frozen agents act while others learn.

    Attributes:
        frozen: who they are.
        mode: ``"greedy"``; ``"softmax"`` of the values over a temperature; ``"epsilon"``, greedy but for a part of the
            actions, which are drawn uniformly. Only legal actions are chosen.
        rate: the temperature or that part; ``None`` if greedy.
    """

    frozen: FrozenAgents
    mode: OpponentMode
    rate: float | None

    @property
    def exploration(self) -> dict[str, Any]:
        """How they act, as the arguments ``kind`` and ``rate`` of an exploration."""
        if self.mode == "greedy":
            return {"kind": "epsilon", "rate": 0.0}
        return {"kind": "boltzmann" if self.mode == "softmax" else "epsilon", "rate": self.rate}


def check_opponents(
    *, trainable_agents: Collection[str] | None, mode: OpponentMode, rate: float | None, share_parameters: bool
) -> None:
    """Raises ``ValueError`` if settings of freezing exclude each other or lack one."""
    if trainable_agents is None:
        if mode != "greedy" or rate is not None:
            raise ValueError(
                "opponent_mode and opponent_rate are those of agents that do not learn: set trainable_agents, or "
                "leave them out"
            )
        return
    if share_parameters:
        raise ValueError(
            "trainable_agents cannot single out agents that have one network in common: set share_parameters=False, or "
            "leave trainable_agents out"
        )
    if mode == "greedy" and rate is not None:
        raise ValueError(f"opponent_rate={rate} has no meaning with opponent_mode='greedy': leave it out")
    if mode == "epsilon" and not (rate is not None and 0 <= rate <= 1):
        raise ValueError(f"opponent_mode='epsilon' needs a probability from 0 to 1 as opponent_rate, got {rate}")
    if mode == "softmax" and not (rate is not None and rate > 0):
        raise ValueError(f"opponent_mode='softmax' needs a temperature above 0 as opponent_rate, got {rate}")
