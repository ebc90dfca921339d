"""The package's game beside ours, scripted players and small tools that the tests of level-based foraging share."""

from __future__ import annotations

import numpy as np
import torch

from marl_lightning.envs.adapters.lbf import LBFAdapter
from marl_lightning.envs.base import Observations, VectorStep
from marl_lightning.envs.native.lbf import LBFVectorEnv, kernel
from marl_lightning.envs.native.lbf.kernel import COLUMN, EAST, LEVEL, LOAD, NORTH, ROW, SOUTH, WEST
from marl_lightning.envs.native.lbf.layout import GROUP


def read_package(env) -> tuple[np.ndarray, np.ndarray]:
    """Returns players ``[P, 3]`` and foods ``[n, 3]`` (row, column, level) of a game of the package."""
    players = np.array([(*player.position, player.level) for player in env.players])
    rows, columns = np.nonzero(env.field)
    return players, np.stack([rows, columns, env.field[rows, columns]], axis=1)


def make_seeker(rng: np.random.Generator, *, noise: float):
    """Returns a policy that gathers all players at the first food and loads it, but does other things now and then.

    Sometimes all go to the food nearest to them instead, so that several foods are loaded at once, and sometimes a
    player acts at random, where the action need not be legal. It sees everything.
    """

    def act(players: np.ndarray, foods: np.ndarray) -> list[int]:
        actions = rng.integers(0, 6, len(players))
        together = rng.random() < 0.8
        for i, player in enumerate(players):
            if rng.random() < noise or len(foods) == 0:
                continue
            distances = np.abs(foods[:, :LEVEL] - player[:LEVEL]).sum(1)
            goal = 0 if together else distances.argmin()
            rows, columns = foods[goal, :LEVEL] - player[:LEVEL]
            if distances[goal] == 1:
                actions[i] = LOAD
            elif rng.random() < abs(rows) / (abs(rows) + abs(columns)):
                actions[i] = SOUTH if rows > 0 else NORTH
            else:
                actions[i] = EAST if columns > 0 else WEST
        return actions.tolist()

    return act


class Pair:
    """A game of the package and one of ours that plays along from the same starts.

    Attributes:
        counts: how often each thing happened that the comparison should cover.
    """

    def __init__(self, scenario: str, **options: object) -> None:
        adapter = LBFAdapter(scenario=scenario, **options)
        self.package = adapter._env
        self.adapter = adapter
        self.native = LBFVectorEnv(scenario=scenario, num_envs=1, **options)
        self.native.reset()
        self.counts = dict.fromkeys(("rewarded", "penalised", "shared_cell", "swap", "cleared", "timeout"), 0)

    def reset(self, seed: int | None = None) -> None:
        """Resets the package's game and copies its state into ours."""
        expected = self.adapter.reset(seed=seed)
        players, foods = read_package(self.package)
        state = self.native._state
        state.players[0] = players
        state.foods[0, :, LEVEL] = 0
        state.foods[0, : len(foods)] = foods
        state.spawned[0] = foods[:, LEVEL].sum()
        state.time[0] = 0
        kernel.observe_instances(state, self.native._constants, self.native._now)
        self.compare_observations(self.native._step.observations, [*expected.observation[GROUP]])

    def step(self, actions: list[int]) -> bool:
        """Makes a step in both games, compares everything, and returns whether the episode is over."""
        before, _ = read_package(self.package)
        observations, rewards, done, _, _ = self.package.step(actions)
        players, foods = read_package(self.package)
        step = self.native.step({GROUP: torch.tensor([actions])})
        cleared = len(foods) == 0
        assert step.terminated.tolist() == [cleared]
        assert step.truncated.tolist() == [done and not cleared]
        assert step.info["food_left"].tolist() == [len(foods)]
        np.testing.assert_array_equal(step.reward[GROUP][0].numpy(), np.array(rewards, np.float32))
        self.compare_observations(step.final if done else step.observations, observations)
        if not done:
            np.testing.assert_array_equal(self.native._state.players[0], players)
        self._count(before, players, np.array(rewards), cleared, done)
        return done

    def compare_observations(self, actual: Observations, observations) -> None:
        """Compares observations, legal actions and state of ours with those of the package."""
        np.testing.assert_array_equal(actual.observation[GROUP][0].numpy(), np.stack(observations))
        legal = [[action.value for action in self.package._valid_actions[p]] for p in self.package.players]
        assert [np.flatnonzero(mask).tolist() for mask in actual.action_mask[GROUP][0].numpy()] == legal
        assert actual.alive[GROUP].all()
        players, foods = read_package(self.package)
        if self.native.options.obs_instead_of_state:
            expected = np.concatenate([observation.ravel() for observation in observations])
        else:
            nothing = np.tile([-1, -1, 0], (self.native.layout.scenario.num_foods - len(foods), 1))
            expected = np.concatenate([foods, nothing, players]).ravel()
        np.testing.assert_array_equal(actual.state[0].numpy(), expected)

    def _count(self, before, players, rewards, cleared, done) -> None:
        old, new = [tuple(p) for p in before[:, :LEVEL]], [tuple(p) for p in players[:, :LEVEL]]
        self.counts["rewarded"] += bool((rewards > 0).any())
        self.counts["penalised"] += bool((rewards < 0).any())
        self.counts["shared_cell"] += len(set(new)) < len(new)
        self.counts["swap"] += any(
            old[i] == new[j] and old[j] == new[i] and old[i] != old[j] for i in range(len(old)) for j in range(i)
        )
        self.counts["cleared"] += cleared
        self.counts["timeout"] += done and not cleared


class Field:
    """One instance whose state tests set by hand.

    Args:
        players: row, column and level of each.
        foods: row, column and level of each, sorted by cell.
        size: rows and columns.
        coop: whether the scenario is a cooperative one.
        **options: of the environment.
    """

    def __init__(self, *, players: list, foods: list, size: int = 8, coop: bool = False, **options: object) -> None:
        name = f"Foraging-{size}x{size}-{len(players)}p-{len(foods)}f{'-coop' * coop}-v3"
        self.env = LBFVectorEnv(scenario=name, num_envs=1, **options)
        self.env.reset()
        self.state = self.env._state
        self.state.players[0] = players
        self.state.foods[0] = foods
        self.state.spawned[0] = np.array(foods)[:, LEVEL].sum()

    def observe(self) -> Observations:
        """Returns the decision point of the state as it is now."""
        kernel.observe_instances(self.state, self.env._constants, self.env._now)
        return self.env._step.observations

    def legal(self, player: int) -> list[int]:
        """Returns the legal actions of a player."""
        return np.flatnonzero(self.observe().action_mask[GROUP][0, player].numpy()).tolist()

    def step(self, *actions: int) -> VectorStep:
        """Makes a step."""
        return self.env.step({GROUP: torch.tensor([actions])})

    def cells(self) -> list[tuple[int, int]]:
        """Returns where the players are."""
        return [(row, column) for row, column in self.state.players[0, :, [ROW, COLUMN]].T.tolist()]


def random_actions(rng: np.random.Generator, observations: Observations) -> torch.Tensor:
    """Draws uniformly among the legal actions."""
    mask = observations.action_mask[GROUP].numpy()
    return torch.from_numpy(np.where(mask, rng.random(mask.shape), -1.0).argmax(-1))


def record(scenario: str, *, num_envs: int, steps: int, **options: object) -> dict[str, np.ndarray]:
    """Returns everything that ``steps`` random steps show, stacked over time."""
    env = LBFVectorEnv(scenario=scenario, num_envs=num_envs, **options)
    rng, observations, frames = np.random.default_rng(0), env.reset(seed=3), []
    for _ in range(steps):
        frame = {
            "observation": observations.observation[GROUP].numpy().copy(),
            "mask": observations.action_mask[GROUP].numpy().copy(),
            "state": observations.state.numpy().copy(),
        }
        step = env.step({GROUP: random_actions(rng, observations)})
        frame |= {
            "final_observation": step.final.observation[GROUP].numpy().copy(),
            "final_mask": step.final.action_mask[GROUP].numpy().copy(),
            "final_state": step.final.state.numpy().copy(),
            "reward": step.reward[GROUP].numpy().copy(),
            "terminated": step.terminated.numpy().copy(),
            "truncated": step.truncated.numpy().copy(),
            "food_left": step.info["food_left"].numpy().copy(),
        }
        frames.append(frame)
    return {name: np.stack([frame[name] for frame in frames]) for name in frames[0]}
