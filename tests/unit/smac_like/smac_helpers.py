"""Scripted agents and small tools that the tests of the SMAC-like simulator share."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from marl_lightning.envs.base import Observations, VectorStep
from marl_lightning.envs.native.smac import SmacVectorEnv, kernel
from marl_lightning.envs.native.smac.env import GROUP
from marl_lightning.envs.native.smac.kernel import EAST, FIRST_ATTACK, NO_OP, STOP
from marl_lightning.envs.native.smac.layout import Layout

Policy = Callable[[np.ndarray, np.ndarray, Layout], np.ndarray]


def make_random_policy(seed: int = 0) -> Policy:
    """Uniformly random legal actions."""
    generator = np.random.default_rng(seed)

    def act(observation: np.ndarray, mask: np.ndarray, layout: Layout) -> np.ndarray:
        del observation, layout
        return np.where(mask, generator.random(mask.shape), -1.0).argmax(-1)

    return act


def _attack_or_advance(mask: np.ndarray, cost: np.ndarray) -> np.ndarray:
    """Attacks the legal target of least cost; without a target moves east, where the enemies come from."""
    attacks = mask[..., FIRST_ATTACK:]
    best = np.where(attacks, cost, np.inf).argmin(-1) + FIRST_ATTACK
    advance = np.where(mask[..., EAST], EAST, np.where(mask[..., NO_OP], NO_OP, STOP))
    return np.where(attacks.any(-1), best, advance)


def _enemy_blocks(observation: np.ndarray, layout: Layout) -> np.ndarray:
    first = layout.move_size
    blocks = observation[..., first : first + layout.num_enemies * layout.enemy_size]
    return blocks.reshape(*observation.shape[:-1], layout.num_enemies, layout.enemy_size)


def nearest_policy(observation: np.ndarray, mask: np.ndarray, layout: Layout) -> np.ndarray:
    """Attacks the nearest enemy in range."""
    return _attack_or_advance(mask, _enemy_blocks(observation, layout)[..., 1])


def focus_policy(observation: np.ndarray, mask: np.ndarray, layout: Layout) -> np.ndarray:
    """Attacks the weakest enemy in range, the first one of equals."""
    blocks = _enemy_blocks(observation, layout)
    return _attack_or_advance(mask, blocks[..., 4 : 5 + layout.enemy_shield].sum(-1).round(4))


def play(env: SmacVectorEnv, policy: Policy, *, episodes: int) -> dict[str, np.ndarray]:
    """Plays until every instance finished its share of ``episodes``.

    Returns:
        ``won``, ``return`` and ``length`` of the first ``episodes // num_envs`` episodes of every instance.
    """
    share = episodes // env.num_envs
    observations = env.reset()
    totals, lengths = np.zeros(env.num_envs), np.zeros(env.num_envs)
    finished: list[list[tuple[float, float, float]]] = [[] for _ in range(env.num_envs)]
    while min(len(episodes_of_one) for episodes_of_one in finished) < share:
        actions = policy(observations.observation[GROUP].numpy(), observations.action_mask[GROUP].numpy(), env.layout)
        step = env.step({GROUP: torch.from_numpy(actions)})
        totals += env.team_reward
        lengths += 1
        for e in np.flatnonzero((step.terminated | step.truncated).numpy()):
            finished[e].append((step.info["battle_won"][e].item(), totals[e], lengths[e]))
            totals[e] = lengths[e] = 0
    numbers = np.array([row for rows in finished for row in rows[:share]])
    return {"won": numbers[:, 0], "return": numbers[:, 1], "length": numbers[:, 2]}


def record(map_name: str, *, num_envs: int, steps: int, **options: object) -> dict[str, np.ndarray]:
    """Returns everything that ``steps`` random steps show, stacked over time."""
    env = SmacVectorEnv(map_name=map_name, num_envs=num_envs, **options)
    policy, observations, frames = make_random_policy(), env.reset(seed=3), []
    for _ in range(steps):
        actions = policy(observations.observation[GROUP].numpy(), observations.action_mask[GROUP].numpy(), env.layout)
        step = env.step({GROUP: torch.from_numpy(actions)})
        frame = {
            "observation": observations.observation[GROUP],
            "mask": observations.action_mask[GROUP],
            "alive": observations.alive[GROUP],
            "state": observations.state,
            "final_observation": step.final.observation[GROUP],
            "final_mask": step.final.action_mask[GROUP],
            "final_state": step.final.state,
            "reward": step.reward[GROUP],
            "terminated": step.terminated,
            "truncated": step.truncated,
            **step.info,
        }
        frames.append({name: tensor.numpy().copy() for name, tensor in frame.items()})
    return {name: np.stack([frame[name] for frame in frames]) for name in frames[0]}


class Battle:
    """One instance whose state tests set by hand.

    Args:
        map_name: the map.
        ticks: game loops of a step.
        **options: of the environment; the ``smaclite`` physics by default, since it has no randomness.
    """

    def __init__(self, map_name: str, *, ticks: int = 8, **options: object) -> None:
        self.env = SmacVectorEnv(map_name=map_name, num_envs=1, **{"physics": "smaclite", **options})
        self.env._constants = self.env._constants._replace(ticks=ticks)
        self.layout, self.constants, self.state = self.env.layout, self.env._constants, self.env._state
        self.env.reset()

    def only(self, *units: int) -> Battle:
        """Kills all other units."""
        for unit in range(self.state.x.shape[1]):
            if unit not in units:
                self.put(unit, health=0, shield=0)
        return self

    def put(self, unit: int, **fields: float) -> Battle:
        """Sets fields of the state of a unit."""
        for name, value in fields.items():
            getattr(self.state, name)[0, unit] = value
        return self

    def get(self, field: str, unit: int) -> float:
        """Returns a field of the state of a unit."""
        return getattr(self.state, field)[0, unit].item()

    def pacify(self) -> Battle:
        """Takes the enemies' orders away, so that they stand and do not shoot."""
        self.state.order[0, self.layout.num_agents :] = kernel.IDLE
        self.state.target[0, self.layout.num_agents :] = -1
        return self

    def observe(self) -> Observations:
        """Returns the decision point of the state as it is now."""
        kernel.observe_instances(self.state, self.constants, self.env._now)
        return self.env._step.observations

    def legal(self, agent: int) -> list[int]:
        """Returns the legal actions of an agent."""
        return np.flatnonzero(self.observe().action_mask[GROUP][0, agent].numpy()).tolist()

    def step(self, *actions: int) -> VectorStep:
        """Makes a step; missing actions are stop."""
        chosen = torch.full((1, self.layout.num_agents), STOP)
        chosen[0, : len(actions)] = torch.tensor(actions)
        return self.env.step({GROUP: chosen})
