"""Games in normal form: any number of players, in batches, and differentiable."""

from __future__ import annotations

import string
import time
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from marl_lightning.envs.base import MultiAgentEnv, VectorEnv
from marl_lightning.envs.native.matrix import MatrixVectorEnv
from marl_lightning.envs.wrappers.base import Wrapper, require_autoreset
from marl_lightning.games.profiles import Mode, ask, check_mode, check_policy, device_of, undisturbed
from marl_lightning.games.result import NashConvResult

if TYPE_CHECKING:
    from marl_lightning.algorithms.base import StochasticPolicy

_ROUNDING = 1e-4


def deviation_payoffs(payoffs: Tensor, profile: Sequence[Tensor]) -> list[Tensor]:
    """Payoffs of every action of every player while the others keep to the profile ::

        v_i(a) = sum over the actions b_j of all j != i of U_i(a, b) prod_{j != i} pi_j(b_j)

    Args:
        payoffs: ``U``, ``[N, n_1, ..., n_N]``; ``payoffs[i, a_1, ..., a_N]`` is what player ``i`` gets.
        profile: for each of the ``N`` players its strategy ``[..., n_i]``; leading axes are a batch and broadcast.

    Returns:
        For each player ``[..., n_i]``. Of a single player there is nobody else, and so no batch.

    Raises:
        ValueError: if the shapes do not fit.
    """
    _check_shapes(payoffs, profile)
    actions = string.ascii_letters[: len(profile)]
    values = []
    for player, payoff in enumerate(payoffs):
        others = [other for other in range(len(profile)) if other != player]
        terms = ",".join([actions, *(f"...{actions[other]}" for other in others)])
        batch = "..." if others else ""
        values.append(torch.einsum(f"{terms}->{batch}{actions[player]}", payoff, *(profile[j] for j in others)))
    return values


def expected_payoffs(payoffs: Tensor, profile: Sequence[Tensor]) -> Tensor:
    """Returns what every player gets on average, ``[..., N]``; arguments as for :func:`deviation_payoffs`."""
    return _means(profile, deviation_payoffs(payoffs, profile))


def deviation_gains(payoffs: Tensor, profile: Sequence[Tensor]) -> Tensor:
    """Returns what every player gains by its best response, ``[..., N]``, at least zero but for rounding ::

        gain_i = max_a v_i(a) - pi_i . v_i

    Arguments as for :func:`deviation_payoffs`. Where several actions are best, the gradient is split among them.
    """
    values = deviation_payoffs(payoffs, profile)
    return _stacked([value.amax(-1) for value in values]) - _means(profile, values)


def nash_conv(payoffs: Tensor, profile: Sequence[Tensor]) -> Tensor:
    """Returns the sum of :func:`deviation_gains` over players, ``[...]``."""
    return deviation_gains(payoffs, profile).sum(-1)


class MatrixEvaluator:
    """Exact NashConv of games in normal form; see :meth:`evaluate`."""

    def evaluate(
        self,
        profile: StochasticPolicy | Sequence[Any],
        game: Tensor | np.ndarray | VectorEnv,
        *,
        mode: Mode = "stochastic",
    ) -> NashConvResult:
        """Computes NashConv of a game that is given by its payoffs, or is one of the native matrix games.

        A native game is played ``T = spec.episode_limit`` times an episode, and payoffs are returns of episodes,
        without discount. Its observations never change, so that policies cannot react to each other: a best response
        is one in every repetition. A policy without memory therefore gains ``T`` times what it gains in one of them; of
        a recurrent one, which changes as time goes by, the gains of all repetitions are summed. Payoffs are those of
        the game itself, whatever wrappers make of its rewards.

        Args:
            profile: for payoffs, for each player its strategy ``[n_i]``; for a native game, a policy.
            game: payoffs ``[N, n_1, ..., n_N]``, or a ``MatrixVectorEnv``, also in wrappers, which is left untouched.
            mode: ``"greedy"`` puts all probability on the likeliest action.

        Raises:
            ValueError: if the game is no such game, the shapes do not fit, or strategies are no distributions.
            TypeError: if a policy cannot state probabilities.
        """
        started = time.perf_counter()
        check_mode(mode)
        if isinstance(game, VectorEnv | MultiAgentEnv):
            agents, payoffs = _agents_and_payoffs(game)
            strategies = _strategies_over_time(profile, game, mode)
        else:
            payoffs = torch.as_tensor(game, dtype=torch.float64)
            agents = tuple(f"player_{player}" for player in range(len(payoffs)))
            strategies = [strategy.unsqueeze(0) for strategy in _strategies(payoffs, profile, mode)]
        values = deviation_payoffs(payoffs, strategies)
        repetitions = len(strategies[0])
        return NashConvResult.exact(
            agents=agents,
            on_policy=_means(strategies, values).sum(0).tolist(),
            best_response_values=[float(value.amax(-1).sum()) for value in values],
            wall_seconds=time.perf_counter() - started,
            payoff_range=float(payoffs.max() - payoffs.min()) * repetitions,
        )


def is_matrix_env(game: Any) -> bool:
    """Whether this is a native game that repeats one matrix, also in wrappers."""
    inside = _unwrapped(game) if isinstance(game, VectorEnv) else None
    return isinstance(inside, MatrixVectorEnv) and inside.is_repeated


def _means(profile: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    return _stacked([(strategy * value).sum(-1) for strategy, value in zip(profile, values, strict=True)])


def _stacked(by_player: Sequence[Tensor]) -> Tensor:
    """Returns ``[..., N]`` of one tensor a player, whose axes broadcast."""
    return torch.stack(torch.broadcast_tensors(*by_player), -1)


def _check_shapes(payoffs: Tensor, profile: Sequence[Tensor]) -> None:
    num_players = payoffs.ndim - 1
    if num_players < 1 or len(payoffs) != num_players:
        raise ValueError(
            f"payoffs of N players have the shape [N, n_1, ..., n_N], got {list(payoffs.shape)}, with {num_players} "
            f"axes of actions for {len(payoffs) if payoffs.ndim else 0} players"
        )
    sizes, found = list(payoffs.shape[1:]), [strategy.shape[-1] for strategy in profile]
    if sizes != found:
        raise ValueError(f"the players have {sizes} actions, but their strategies are for {found}")


def _strategies(payoffs: Tensor, profile: Sequence[Any], mode: Mode) -> list[Tensor]:
    """Returns the strategies ``[n_i]`` float64 of a profile after checking them."""
    if callable(getattr(profile, "action_probabilities", None)):
        raise TypeError("payoffs show a policy nothing to act on: give the strategy of each player, [n_i]")
    strategies = [torch.as_tensor(strategy, dtype=torch.float64) for strategy in profile]
    for player, strategy in enumerate(strategies):
        if strategy.ndim != 1 or not ((strategy >= 0).all() and abs(float(strategy.sum()) - 1) <= _ROUNDING):
            raise ValueError(f"the strategy of player {player} must be one distribution over its actions: {strategy}")
    _check_shapes(payoffs, strategies)
    if mode == "greedy":
        return [functional.one_hot(strategy.argmax(), len(strategy)).double() for strategy in strategies]
    return strategies


def _unwrapped(env: VectorEnv) -> VectorEnv:
    return env.unwrapped if isinstance(env, Wrapper) else env


def _agents_and_payoffs(env: VectorEnv | MultiAgentEnv) -> tuple[tuple[str, ...], Tensor]:
    """Returns the names of the players and the payoffs, found by playing every joint action once."""
    if not is_matrix_env(env):
        raise ValueError(
            f"{env.spec.name} is no native game that repeats one matrix: make one with "
            "make_vector_env('matrix/<game>', num_envs=1)"
        )
    game = _unwrapped(env)
    ((name, group),) = game.spec.groups.items()
    sizes = (group.action_size,) * group.num_agents
    joint = torch.cartesian_prod(*(torch.arange(size) for size in sizes))
    with game.replicate(num_envs=prod(sizes), seed=0) as copy:
        copy.reset()
        reward = copy.step({name: joint}).reward[name].double()
    return group.agents, reward.T.reshape(group.num_agents, *sizes)


def _strategies_over_time(policy: StochasticPolicy, env: VectorEnv, mode: Mode) -> list[Tensor]:
    """Returns for each player its strategies ``[T, n]`` in an episode, which do not depend on what is played."""
    check_policy(policy)
    require_autoreset(env, "this evaluation")
    ((name, group),) = env.spec.groups.items()
    device = device_of(policy)
    strategies = []
    with undisturbed(policy), env.replicate(num_envs=1, seed=0) as copy:
        observations, state = copy.reset(), policy.initial_state(1)
        is_first, over = torch.ones(1, dtype=torch.bool, device=device), False
        while not over:
            stated, state = ask(policy, observations, state, is_first, spec=env.spec, mode=mode)
            strategies.append(stated[name][0])
            step = copy.step({name: torch.zeros(1, group.num_agents, dtype=torch.long)})
            observations, over = step.observations, bool(step.terminated | step.truncated)
            is_first = torch.zeros_like(is_first)
    return list(torch.stack(strategies, 1))
