"""What profiles of policies say, asked and checked in one place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from marl_lightning.envs.base import Observations
from marl_lightning.envs.spec import EnvSpec
from marl_lightning.envs.vector.buffers import map_observations
from marl_lightning.nn.mode import evaluation_mode

if TYPE_CHECKING:
    from marl_lightning.algorithms.base import StochasticPolicy
    from marl_lightning.data.schema import RecurrentState

Mode = Literal["stochastic", "greedy"]
"""Whether a policy mixes as it says, or always takes the action that it prefers."""

_ROUNDING = 1e-4  # what probabilities in float32 may miss to 1


def check_mode(mode: str) -> None:
    """Raises ``ValueError`` if there is no such mode."""
    if mode not in get_args(Mode):
        raise ValueError(f"mode must be 'stochastic' or 'greedy', got {mode!r}")


def check_policy(profile: Any) -> None:
    """Raises ``TypeError`` if the profile is not a policy that can state the probabilities of its actions."""
    if callable(getattr(profile, "action_probabilities", None)) and callable(getattr(profile, "initial_state", None)):
        return
    hint = "give its attribute policy" if hasattr(profile, "policy") else "give a StochasticPolicy"
    raise TypeError(
        f"a {type(profile).__name__} cannot state the probabilities of its actions (action_probabilities): {hint}"
    )


def device_of(policy: object) -> torch.device:
    """Returns where a policy computes: where its first parameter is, or else the CPU."""
    parameter = next(policy.parameters(), None) if isinstance(policy, nn.Module) else None
    return torch.device("cpu") if parameter is None else parameter.device


@contextmanager
def undisturbed(policy: object) -> Iterator[None]:
    """Policies are asked in evaluation mode and without gradients, and are as before afterwards."""
    with evaluation_mode(policy), torch.no_grad():
        yield


def ask(
    policy: StochasticPolicy,
    observations: Observations[Tensor],
    state: RecurrentState,
    is_first: Tensor,
    *,
    spec: EnvSpec,
    mode: Mode,
) -> tuple[dict[str, Tensor], RecurrentState]:
    """Returns the distributions of a policy after checking them.

    Args:
        policy: asked on the device that it is on.
        observations: ``E`` decision points, on any device.
        state: recurrent state of the policy, on its device.
        is_first: ``[E]`` bool.
        spec: of the environment that the decision points are from.
        mode: ``"greedy"`` asks for all probability on one action.

    Returns:
        Per group ``[E, A, n]`` float64 on the CPU, rows of which sum to 1 but for rounding in float64; and the next
        recurrent state.

    Raises:
        ValueError: if the policy was made for other groups, agents, observations or actions, or what it states are no
            probabilities of legal actions.
        TypeError: if the policy has no probabilities to state.
    """
    device = device_of(policy)
    try:
        stated, next_state = policy.action_probabilities(
            map_observations(lambda tensor: tensor.to(device), observations),
            state,
            is_first.to(device),
            deterministic=mode == "greedy",
        )
    except (KeyError, RuntimeError) as error:
        raise ValueError(
            f"the profile cannot act in {spec.name}, whose agents are {_described(spec)}; was it made for another "
            f"game? ({type(error).__name__}: {error})"
        ) from error
    shapes = {name: (len(is_first), group.num_agents, group.action_size) for name, group in spec.groups.items()}
    found = {name: tuple(tensor.shape) for name, tensor in stated.items()}
    if found != shapes:
        raise ValueError(f"the profile states probabilities of shapes {found}, but {spec.name} needs {shapes}")
    result = {}
    for name, tensor in stated.items():
        probability, mask = tensor.double().cpu(), observations.action_mask[name].cpu()
        total = probability.sum(-1, keepdim=True)
        # Written so that NaN fails too.
        if not ((probability >= 0).all() and ((total - 1).abs() <= _ROUNDING).all()):
            raise ValueError(f"what the profile states for {name!r} are no probabilities: they must sum to 1")
        if probability[~mask].any():
            raise ValueError(f"the profile gives illegal actions of {name!r} a probability: it must be exactly 0")
        result[name] = probability / total
    return result, next_state


def tabulate(
    policy: StochasticPolicy, observations: Observations[Tensor], *, spec: EnvSpec, mode: Mode = "stochastic"
) -> list[np.ndarray]:
    """Returns what a policy does in each state of a Markov game, as :class:`.markov.MarkovEvaluator` takes it.

    Args:
        policy: without memory.
        observations: what the agents see in the ``S`` states, one row for each state.
        spec: of the environment that shows this.
        mode: see :data:`Mode`.

    Returns:
        For each agent, in the order of ``spec.agents``, probabilities ``[S, n]`` float64.

    Raises:
        ValueError: if the policy has memory, so that a state does not determine what it does; or as for :func:`ask`.
        TypeError: if it cannot state probabilities.
    """
    check_mode(mode)
    check_policy(policy)
    num_states = len(observations.state)
    with undisturbed(policy):
        if memory := policy.initial_state(num_states):
            raise ValueError(
                f"a policy with memory ({', '.join(memory)}) is not determined by the state of a Markov game, so that "
                "no best response to it is: use one without recurrent networks"
            )
        stated, _ = ask(policy, observations, {}, torch.ones(num_states, dtype=torch.bool), spec=spec, mode=mode)
    return [stated[name][:, index].numpy() for name, group in spec.groups.items() for index in range(group.num_agents)]


def greedy_rows(probabilities: np.ndarray) -> np.ndarray:
    """Returns distributions ``[..., n]`` with all probability on the first of the likeliest actions."""
    return np.eye(probabilities.shape[-1])[probabilities.argmax(-1)]


def _described(spec: EnvSpec) -> str:
    return "; ".join(
        f"{', '.join(group.agents)} with observations {group.observation_shape} and {group.action_size} actions"
        for group in spec.groups.values()
    )
