"""Profiles and games for best responses that are learned."""

import numpy as np
import torch
from game_policies import kuhn_equilibrium

from marl_lightning.envs import SyncVectorEnv, make_env, make_vector_env
from marl_lightning.envs.monitors import MonitorParallelEnv, eventually

SMALL = {
    "preset": "quick",
    "env_steps": 800,
    "checkpoints": 1,
    "select_episodes": 128,
    "report_episodes": 500,
    "hidden_sizes": (16,),
    "learning_rate": 0.01,
}
"""A search in matching pennies that takes half a second."""

HEADS = [[0.9, 0.1], [0.9, 0.1]]
"""Both show heads too often. Each player can get 0.8; the first gets 0.64, the second -0.64: NashConv is 1.6."""


class Mixed:
    """Agent ``i`` of the only group draws from ``strategies[i]``, whatever it sees; greedily, the likeliest."""

    def __init__(self, strategies):
        self.strategies = torch.tensor(strategies, dtype=torch.float32)
        self.calls = 0

    def initial_state(self, num_envs):
        return {}

    def act(self, observations, state, is_first, *, deterministic=False, generator=None):
        self.calls += 1
        num_envs, (agents, actions) = len(is_first), self.strategies.shape
        rows = self.strategies.expand(num_envs, agents, actions).flatten(0, 1)
        drawn = rows.argmax(-1) if deterministic else torch.multinomial(rows, 1, generator=generator)
        return {"agents": drawn.view(num_envs, agents)}, {}, state

    def env_actions(self, actions):
        return dict(actions)


class KuhnTable:
    """Plays Kuhn poker by a table, see :class:`game_policies.KuhnPoker`, many hands at once."""

    def __init__(self, bets):
        self.bets = torch.zeros(3, 3, 3, 3)  # card, and what was done in each of three moves: nothing, pass, bet
        for known, bet in bets.items():
            moves = ["pb".index(move) + 1 for move in known[1:]] + [0] * (4 - len(known))
            self.bets[(int(known[0]), *moves)] = bet

    def initial_state(self, num_envs):
        return {}

    def act(self, observations, state, is_first, *, deterministic=False, generator=None):
        seen, mask = observations.observation["player"], observations.action_mask["player"]
        moves = seen[..., 5:].unflatten(-1, (3, 2))
        moves = moves.any(-1) * (moves.argmax(-1) + 1)
        bet = self.bets[(seen[..., 2:5].argmax(-1), *moves.unbind(-1))]
        draw = 0.5 if deterministic else torch.rand(bet.shape, generator=generator)
        action = torch.where(mask[..., -1], mask.shape[-1] - 1, (draw < bet).long())
        return {"player": action}, {}, state

    def env_actions(self, actions):
        return dict(actions)


def uniform_kuhn() -> KuhnTable:
    return KuhnTable(dict.fromkeys(kuhn_equilibrium(0).bets, 0.5))


def pennies(num_envs=1, **kwargs):
    """The first player wins 1 from the second if both show the same, and loses 1 otherwise; once an episode."""
    return make_vector_env("matrix/matching_pennies", num_envs=num_envs, **({"episode_length": 1} | kwargs))


def watched_pennies(num_envs=1):
    """The task of the first player is to show something else than the second one, whose task is to show the same:
    both fulfil them when they are paid -1."""

    def label(context):
        same = context.actions["agents"][0] == context.actions["agents"][1]
        return {
            "agent_0": frozenset() if same else frozenset({"done"}),
            "agent_1": frozenset({"done"}) if same else frozenset(),
        }

    def make():
        tasks = {"agent_0": eventually("done"), "agent_1": eventually("done")}
        game = make_env("matrix/matching_pennies", episode_length=1)
        return MonitorParallelEnv(game, tasks, label, reward="env")

    return SyncVectorEnv(factory=make, num_envs=num_envs, seed=0)


def python_numpy_torch_states():
    """Everything global that is random."""
    import random

    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002


class Interrupting(Mixed):
    """Raises in one of its actions."""

    def __init__(self, error, call):
        super().__init__([[0.5, 0.5, 0], [0.5, 0.5, 0]])
        self.error, self.call = error, call

    def act(self, observations, state, is_first, *, deterministic=False, generator=None):
        actions, _, state = super().act(observations, state, is_first, deterministic=deterministic, generator=generator)
        if self.calls == self.call:
            raise self.error
        return {"red": actions["agents"], "blue": torch.zeros(len(is_first), 1, 2)}, {}, state
