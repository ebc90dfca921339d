"""The package's game beside ours, scripted agents and small tools that the tests of the robotic warehouse share."""

from __future__ import annotations

from collections import deque
from unittest import mock

import numpy as np
import torch

from marl_lightning.envs.adapters.rware import RWAREAdapter
from marl_lightning.envs.base import Observations, Step, VectorStep
from marl_lightning.envs.native.hashing import integer, mix, stream_key
from marl_lightning.envs.native.rware import RWAREVectorEnv, kernel
from marl_lightning.envs.native.rware.kernel import (
    DELIVERED,
    DIRECTION,
    DOWN,
    FORWARD,
    LEFT,
    NEXT_REQUEST,
    NO_SHELF,
    RIGHT,
    SHELF,
    TOGGLE_LOAD,
    TURN_LEFT,
    TURN_RIGHT,
    UP,
    X,
    Y,
)
from marl_lightning.envs.native.rware.layout import GROUP

STEPS = {UP: (0, -1), DOWN: (0, 1), LEFT: (-1, 0), RIGHT: (1, 0)}


# -------- scripted agents


def distances(targets: list[tuple[int, int]], is_free: np.ndarray) -> np.ndarray:
    """Returns how many moves over free cells each cell ``[height, width]`` is from the nearest target, inf for none."""
    found = np.full(is_free.shape, np.inf)
    ready = deque(targets)
    for x, y in targets:
        found[y, x] = 0
    while ready:
        x, y = ready.popleft()
        for dx, dy in STEPS.values():
            column, row = x + dx, y + dy
            inside = 0 <= row < is_free.shape[0] and 0 <= column < is_free.shape[1]
            if inside and is_free[row, column] and found[row, column] == np.inf:
                found[row, column] = found[y, x] + 1
                ready.append((column, row))
    return found


def make_deliverer(rng: np.random.Generator, *, noise: float):
    """Returns a policy that fetches, delivers and puts back shelves, and now and then does otherwise.

    It sees everything of a game of the package, and cares about other agents only by chance.
    """

    def act(env) -> np.ndarray:
        actions = rng.integers(0, 5, len(env.agents))
        carried = [agent.carrying_shelf for agent in env.agents]
        standing = np.zeros(env.grid_size, bool)
        for shelf in env.shelfs:
            standing[shelf.y, shelf.x] = shelf not in carried
        for i, agent in enumerate(env.agents):
            if rng.random() < noise:
                continue
            if agent.carrying_shelf is None:
                targets = [(shelf.x, shelf.y) for shelf in env.request_queue if shelf not in carried]
                is_free = np.ones(env.grid_size, bool)
            elif agent.carrying_shelf in env.request_queue:
                targets, is_free = env.goals, ~standing
            else:
                targets = [(x, y) for y, x in np.argwhere((env.highways == 0) & ~standing)]
                is_free = ~standing
            if (agent.x, agent.y) in targets:
                actions[i] = TOGGLE_LOAD
            elif targets:
                actions[i] = _go(agent, distances(targets, is_free), rng)
        return actions

    return act


def _go(agent, far: np.ndarray, rng: np.random.Generator) -> int:
    """Returns an action that brings an agent closer to where ``far`` is 0."""
    ways = {
        direction: far[agent.y + dy, agent.x + dx]
        for direction, (dx, dy) in STEPS.items()
        if 0 <= agent.y + dy < far.shape[0] and 0 <= agent.x + dx < far.shape[1]
    }
    best = [direction for direction, distance in ways.items() if distance == min(ways.values())]
    return FORWARD if agent.dir.value in best else _turn(agent, best[0], rng)


def _turn(agent, direction: int, rng: np.random.Generator) -> int:
    """Returns an action that turns an agent, which looks elsewhere, to a direction."""
    clockwise = [UP, RIGHT, DOWN, LEFT]
    turns = (clockwise.index(direction) - clockwise.index(agent.dir.value)) % 4
    return {1: TURN_RIGHT, 2: rng.choice([TURN_LEFT, TURN_RIGHT]), 3: TURN_LEFT}[turns]


def make_circler(rng: np.random.Generator, *, noise: float):
    """Returns a policy with which agents go round and round in blocks of four cells, and now and then do otherwise."""
    ways = {(0, 0): RIGHT, (1, 0): DOWN, (1, 1): LEFT, (0, 1): UP}

    def act(env) -> np.ndarray:
        actions = rng.integers(0, 5, len(env.agents))
        for i, agent in enumerate(env.agents):
            if rng.random() > noise:
                way = ways[agent.x % 2, agent.y % 2]
                actions[i] = FORWARD if agent.dir.value == way else _turn(agent, way, rng)
        return actions

    return act


# -------- the package beside ours


def read_package(adapter: RWAREAdapter) -> tuple[np.ndarray, np.ndarray]:
    """Returns columns, rows and directions of the agents (``[A, 3]``), and which shelves are requested (``[S]``)."""
    agents = [(agent.x, agent.y, agent.dir.value) for agent in adapter._env.agents]
    return np.array(agents), adapter._requested()


class HashedChoice:
    """Stands in for the generator of the package, and chooses the requests that ours does."""

    def __init__(self, seed: int, episode: int, time: int) -> None:
        self.key = stream_key(seed, episode, time, NEXT_REQUEST)
        self.count = 0

    def choice(self, candidates: list) -> object:
        chosen = candidates[integer(mix(self.key, self.count), len(candidates))]
        self.count += 1
        return chosen


class Pair:
    """A game of the package and one of ours that plays along from the same starts.

    Both request the same shelves after deliveries, as ours hashes them. Where the package has several longest paths to
    choose from, it is checked that it takes one of them, and then it has to take that of the lowest agents.

    Attributes:
        counts: how often each thing happened that the comparison should cover.
    """

    def __init__(self, scenario: str, **options: object) -> None:
        self.adapter = RWAREAdapter(scenario=scenario, **options)
        self.package = self.adapter._env
        self.native = RWAREVectorEnv(scenario=scenario, num_envs=1, **options)
        self.native.reset()
        events = (
            "delivered",
            "double",
            "returned",
            "tie",
            "circle",
            "swap",
            "followed",
            "blocked",
            "inactive",
            "timeout",
        )
        self.counts = dict.fromkeys(events, 0)

    def reset(self, seed: int | None = None) -> None:
        """Resets the package's game and copies its state into ours."""
        expected = self.adapter.reset(seed=seed)
        state = self.native._state
        for field in ("time", "inactive", "messages"):
            getattr(state, field)[0] = 0
        for i, agent in enumerate(self.package.agents):
            state.agents[0, i] = agent.x, agent.y, agent.dir.value, NO_SHELF, 0
        state.shelves[0] = [(shelf.x, shelf.y) for shelf in self.package.shelfs]
        state.requested[0] = self.adapter._requested()
        kernel.observe_instances(state, self.native._constants, self.native._now)
        self.compare_observations(self.native._step.observations, expected)

    def step(self, actions: np.ndarray) -> Step:
        """Makes a step in both games, compares everything, and returns the step of the package."""
        import networkx.algorithms as graphs

        state = self.native._state
        self.package._np_random, generator = (
            HashedChoice(*(int(array[0]) for array in (state.seed, state.episode, state.time))),
            self.package._np_random,
        )
        before = [(agent.x, agent.y) for agent in self.package.agents]
        wanted = actions.reshape(len(before), -1)[:, 0] == FORWARD
        find_cycle, longest_path = graphs.find_cycle, graphs.dag_longest_path
        with (
            mock.patch.object(graphs, "find_cycle", lambda graph: self._find_cycle(graph, find_cycle)),
            mock.patch.object(graphs, "dag_longest_path", lambda graph: self._find_path(graph, longest_path)),
        ):
            expected = self.adapter.step({GROUP: actions})
        self.package._np_random = generator
        actual = self.native.step({GROUP: torch.tensor(actions)[None]})
        over = expected.terminated or expected.truncated
        assert actual.terminated.tolist() == [expected.terminated]
        assert actual.truncated.tolist() == [expected.truncated]
        assert {key: value.item() for key, value in actual.info.items()} == expected.info
        np.testing.assert_array_equal(actual.reward[GROUP][0].numpy(), expected.reward[GROUP])
        assert expected.reward[GROUP].dtype == np.float32
        self.compare_observations(actual.final if over else actual.observations, expected.observations)
        if not over:
            self.compare_states()
        self._count(before, wanted, expected)
        return expected

    def compare_observations(self, actual: Observations, expected: Observations) -> None:
        """Compares a decision point of ours with one of the package."""
        for ours, theirs in (
            (actual.observation[GROUP], expected.observation[GROUP]),
            (actual.action_mask[GROUP], expected.action_mask[GROUP]),
            (actual.alive[GROUP], expected.alive[GROUP]),
            (actual.state, expected.state),
        ):
            np.testing.assert_array_equal(ours[0].numpy(), theirs)
            assert ours.numpy().dtype == theirs.dtype

    def compare_states(self) -> None:
        """Compares what observations do not tell: which shelf is which, and the grids."""
        state, package = self.native._state, self.package
        for i, agent in enumerate(package.agents):
            shelf = NO_SHELF if agent.carrying_shelf is None else agent.carrying_shelf.id - 1
            expected = [agent.x, agent.y, agent.dir.value, shelf, agent.has_delivered]
            assert state.agents[0, i].tolist() == expected
        assert state.shelves[0].tolist() == [[shelf.x, shelf.y] for shelf in package.shelfs]
        margin = self.native.options.sensor_range
        np.testing.assert_array_equal(state.grid[0], np.pad(package.grid, ((0, 0), (margin, margin), (margin, margin))))

    def _find_cycle(self, graph, find_cycle):
        cycle = find_cycle(graph)
        self.counts["swap"] += len(cycle) == 2
        self.counts["circle"] += len(cycle) > 2
        return cycle

    def _find_path(self, graph, longest_path):
        (end,) = (node for node in graph if graph.out_degree(node) == 0)

        def paths_to(node):
            return [[*path, node] for other in graph.pred[node] for path in paths_to(other)] or [[node]]

        paths = paths_to(end)
        longest = [path for path in paths if len(path) == max(map(len, paths))]
        chosen = longest_path(graph)
        assert chosen in longest
        self.counts["tie"] += len(longest) > 1
        return min(longest, key=lambda path: [self.package.grid[0, y, x] for x, y in reversed(path)])

    def _count(self, before, wanted, step) -> None:
        after = [(agent.x, agent.y) for agent in self.package.agents]
        moved = [old != new for old, new in zip(before, after, strict=True)]
        deliveries = step.info["deliveries"]
        self.counts["delivered"] += deliveries > 0
        self.counts["double"] += deliveries > 1
        self.counts["returned"] += self.adapter._layout.options.reward_type == "two_stage" and bool(
            sum(step.reward[GROUP]) > 0.5 * deliveries
        )
        self.counts["followed"] += any(m and cell in before for m, cell in zip(moved, after, strict=True))
        self.counts["blocked"] += any(w and not m for w, m in zip(wanted, moved, strict=True))
        self.counts["inactive"] += step.terminated
        self.counts["timeout"] += step.truncated


# -------- ours alone


class Floor:
    """One instance in a map of your own, whose state tests set by hand.

    Args:
        layout: the map, see :class:`~marl_lightning.envs.native.rware.options.RWAREOptions`.
        agents: column, row and direction of each.
        requests: numbers of the shelves that are requested; shelves are numbered row by row.
        **options: of the environment.
    """

    def __init__(self, layout: str, *, agents: list, requests: tuple[int, ...] = (), **options: object) -> None:
        name = f"rware-tiny-{len(agents)}ag-v2"
        self.env = RWAREVectorEnv(scenario=name, num_envs=1, layout=layout, request_queue_size=len(requests), **options)
        self.env.reset()
        self.state = self.env._state
        self.state.agents[0, :, : DIRECTION + 1] = agents
        self.state.requested[0] = False
        self.state.requested[0, list(requests)] = True
        self.observe()

    def give(self, agent: int, shelf: int, *, delivered: bool = False) -> None:
        """Lets an agent carry a shelf."""
        self.state.agents[0, agent, [SHELF, DELIVERED]] = shelf, delivered
        self.state.shelves[0, shelf] = self.state.agents[0, agent, [X, Y]]
        self.observe()

    def observe(self) -> Observations:
        """Returns the decision point of the state as it is now."""
        kernel.observe_instances(self.state, self.env._constants, self.env._now)
        return self.env._step.observations

    def step(self, *actions: int) -> VectorStep:
        """Makes a step."""
        return self.env.step({GROUP: torch.tensor([actions])})

    def cells(self) -> list[tuple[int, int]]:
        """Returns columns and rows of the agents."""
        return [(x, y) for x, y in self.state.agents[0, :, [X, Y]].T.tolist()]


def random_actions(rng: np.random.Generator, env: RWAREVectorEnv) -> torch.Tensor:
    """Draws uniformly among the actions."""
    parts = env.spec.groups[GROUP].action_parts
    actions = torch.from_numpy(rng.integers(0, parts, (env.num_envs, env.layout.num_agents, len(parts))))
    return actions if len(parts) > 1 else actions[..., 0]


def record(scenario: str, *, num_envs: int, steps: int, **options: object) -> dict[str, np.ndarray]:
    """Returns everything that ``steps`` random steps show, stacked over time."""
    env = RWAREVectorEnv(scenario=scenario, num_envs=num_envs, **options)
    rng, observations, frames = np.random.default_rng(0), env.reset(seed=3), []
    for _ in range(steps):
        frame = {
            "observation": observations.observation[GROUP].numpy().copy(),
            "state": observations.state.numpy().copy(),
        }
        step = env.step({GROUP: random_actions(rng, env)})
        frame |= {
            "final_observation": step.final.observation[GROUP].numpy().copy(),
            "final_state": step.final.state.numpy().copy(),
            "reward": step.reward[GROUP].numpy().copy(),
            "terminated": step.terminated.numpy().copy(),
            "truncated": step.truncated.numpy().copy(),
            "deliveries": step.info["deliveries"].numpy().copy(),
        }
        frames.append(frame)
    return {name: np.stack([frame[name] for frame in frames]) for name in frames[0]}
