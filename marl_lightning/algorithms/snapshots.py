"""What each agent has learned, taken out of a module and put into another one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from marl_lightning.algorithms.base import MARLModule
from marl_lightning.algorithms.nfsp import NFSP
from marl_lightning.algorithms.on_policy import OnPolicyActorCriticModule
from marl_lightning.algorithms.q_learning import QLearningModule

AgentState = dict[str, Any]
"""Weights by part, such as ``"online"`` and ``"target"``, and by name; and maybe ``"optimizer"``."""

_MOMENTS = ("exp_avg", "exp_avg_sq")


def snapshot(module: MARLModule, optimizer: torch.optim.Optimizer | None = None) -> dict[str, AgentState]:
    """Returns a copy of what every agent has learned; training goes on without changing it.

    Args:
        module: with agents that share nothing: of the Q-learning family (parts ``"online"`` and ``"target"``) or an
            actor-critic method (``"actor"`` and ``"critic"``). Its networks have been built.
        optimizer: the Adam that trains it. Then an agent that has been trained also has ``"optimizer"``: ``"step"``,
            ``"exp_avg"`` and ``"exp_avg_sq"``, the latter by part and name.

    Returns:
        By agent; tensors are on the CPU.

    Raises:
        ValueError: if agents share parameters or statistics, or there is a joint value.
    """
    states: dict[str, AgentState] = {}
    moments = {} if optimizer is None else optimizer.state
    for agent, tensors in _tensors_by_agent(module):
        state: AgentState = {}
        for part, name, tensor, row in tensors:
            state.setdefault(part, {})[name] = _copy(tensor[row])
        for part, name, tensor, row in () if _is_frozen(module, agent) else tensors:
            own = moments.get(tensor, {})
            if "exp_avg" in own:
                kept = state.setdefault("optimizer", {"step": 0, **{key: {} for key in _MOMENTS}})
                kept["step"] = int(own["step"])
                for key in _MOMENTS:
                    kept[key].setdefault(part, {})[name] = _copy(own[key][row])
        states[agent] = state
    return states


def load_snapshot(module: MARLModule, states: Mapping[str, AgentState]) -> None:
    """Gives all agents the weights of a :func:`snapshot`; a magnet starts from there.

    Args:
        module: its networks have been built.
        states: of all agents; what they say of optimisers is not used, see :func:`load_optimizer`.

    Raises:
        ValueError: listing all agents that are missing, unknown, or whose weights are of other names or shapes; nothing
            has been changed then. Or as for :func:`snapshot`.
    """
    expected = dict(_tensors_by_agent(module))
    problems = []
    if missing := [agent for agent in expected if agent not in states]:
        problems.append(f"missing agents: {', '.join(missing)}")
    if extra := [str(agent) for agent in states if agent not in expected]:
        problems.append(f"unknown agents: {', '.join(extra)}")
    for agent, tensors in expected.items():
        problems += [f"{agent}: {problem}" for problem in _misfits(tensors, states.get(agent))]
    if problems:
        lines = "\n".join(["the snapshot does not fit the agents of this module:", *problems])
        raise ValueError(lines)
    with torch.no_grad():
        for agent, tensors in expected.items():
            for part, name, tensor, row in tensors:
                tensor[row] = states[agent][part][name].to(tensor.device)
    if isinstance(module, OnPolicyActorCriticModule) and module.magnet is not None:
        module.magnet.restart(module.actors)


def load_optimizer(optimizer: torch.optim.Optimizer, module: MARLModule, states: Mapping[str, AgentState]) -> None:
    """Gives a new Adam the moments of a :func:`snapshot`.

    Adam counts the steps of all agents of a group together. So a group goes on where it was if its agents who learn
    have moments that are equally old, and starts anew otherwise.

    Args:
        optimizer: has not made a step yet.
        module: whose parameters it trains.
        states: a snapshot that fits the module.
    """
    agents = dict(_tensors_by_agent(module))
    for group in module.spec.groups.values():
        learners = [agent for agent in group.agents if not _is_frozen(module, agent)]
        steps = {states[agent].get("optimizer", {}).get("step") for agent in learners}
        if len(steps) != 1 or None in steps:
            continue
        step = steps.pop()
        for agent in learners:
            moments = states[agent]["optimizer"]
            for part, name, tensor, row in agents[agent]:
                if name not in moments["exp_avg"].get(part, {}):
                    continue
                own = optimizer.state[tensor]
                if not own:
                    own["step"] = torch.tensor(float(step), device=tensor.device)
                    own.update({key: torch.zeros_like(tensor) for key in _MOMENTS})
                for key in _MOMENTS:
                    own[key][row] = moments[key][part][name].to(tensor.device)


_Tensors = list[tuple[str, str, Tensor, Any]]


def _tensors_by_agent(module: MARLModule) -> Iterator[tuple[str, _Tensors]]:
    """Yields each agent with what is its own: part, name, the tensor that it is a row of, and which row."""
    parts = _parts(module)
    for group_name, group in module.spec.groups.items():
        alone = group.num_agents == 1
        if not alone:
            _check_separate(module)
        for i, agent in enumerate(group.agents):
            row = ... if alone else i
            yield (
                agent,
                [
                    (part, name, tensor, row)
                    for part, networks in parts.items()
                    for name, tensor in _state(networks[group_name]).items()
                ],
            )


def _state(network: nn.Module) -> dict[str, Tensor]:
    """Returns parameters, as the optimiser knows them, and buffers."""
    return network.state_dict(keep_vars=True)


def _parts(module: MARLModule) -> dict[str, Mapping[str, nn.Module]]:
    if module.spec is None:
        raise ValueError(f"{type(module).__name__} has no networks yet: give it a spec, or train it first")
    if isinstance(module, NFSP):
        raise ValueError("a snapshot would leave out the reservoirs that NFSP learns from: save a checkpoint instead")
    if isinstance(module, QLearningModule) and not module.is_joint:
        return {"online": module.networks, "target": module.target_networks}
    if isinstance(module, OnPolicyActorCriticModule) and not module.hparams.normalise_value:
        return {"actor": module.actors, "critic": module.critics}
    raise ValueError(
        f"what each agent of {type(module).__name__} has learned cannot be told apart, since agents share values or "
        "their statistics (normalise_value): save a checkpoint instead"
    )


def _check_separate(module: MARLModule) -> None:
    hp = module.hparams
    if hp.share_parameters or hp.layer_norm or hp.get("critic") == "state":
        raise ValueError(
            f"agents of {type(module).__name__} have weights in common: set share_parameters=False and "
            "layer_norm=False, and with a critic one that sees the agent's own observation, or save a checkpoint "
            "instead"
        )


def _is_frozen(module: MARLModule, agent: str) -> bool:
    frozen = getattr(module, "frozen", None)
    return frozen is not None and not frozen.learns[module.spec.agents.index(agent)]


def _misfits(tensors: _Tensors, state: AgentState | None) -> list[str]:
    if state is None:
        return []
    problems = []
    for part, name, tensor, row in tensors:
        value, shape = state.get(part, {}).get(name), tuple(tensor[row].shape)
        if value is None:
            problems.append(f"{part}.{name} is missing")
        elif tuple(value.shape) != shape:
            problems.append(f"{part}.{name} has the shape {tuple(value.shape)} instead of {shape}")
    known = {(part, name) for part, name, _, _ in tensors}
    for part, weights in state.items():
        if part != "optimizer":
            problems += [f"{part}.{name} is unknown" for name in weights if (part, name) not in known]
    return problems


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
