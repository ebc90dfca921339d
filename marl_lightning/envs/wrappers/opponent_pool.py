"""Games in which frozen policies play some agents of some episodes, as if these agents were not alive."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from marl_lightning.envs.base import MultiAgentEnv, Observations, VectorEnv, VectorStep
from marl_lightning.envs.vector.buffers import map_observations
from marl_lightning.envs.wrappers.base import Batch, OwnArrays, Rows, Wrapper, require_autoreset

if TYPE_CHECKING:
    from marl_lightning.algorithms.base import Policy

NOBODY = -1
"""In place of an agent or an opponent: the episode is not against the pool."""

_FREE = -1


@dataclass(frozen=True, kw_only=True)
class PoolEntry:
    """A frozen policy that can be played against.

    Attributes:
        number: its name, which no other entry ever has.
        weights: its ``state_dict``, on the CPU.
    """

    number: int
    weights: Mapping[str, Tensor]


class OpponentPoolEnv(Wrapper):
    """Plays a part of the episodes against frozen policies, so that nothing is learned from what these do.

    At the start of every episode in every instance it is drawn whether the episode is against the pool, which one agent
    is the learner then, and which policy plays all others. In the other episodes everybody learns. **From outside, the
    agents that the pool plays are not alive**, from the first decision point of the episode to its true last one, and
    their first action is their only legal one; so no method, replay or statistic that follows the contract of
    :class:`~marl_lightning.envs.base.Observations` takes them into account. What is chosen for them outside is replaced
    inside. They keep their observations and, unlike agents that are really dead, their rewards, so that returns of
    episodes stay those of the game.

    The policies that new episodes are against are drawn by :meth:`renew`, ``active_opponents`` at a time, and the next
    ones only after the episodes against those before them have ended: at most twice as many act in a step, each for all
    of its instances at once. A policy keeps its recurrent state over an episode and draws from a generator of this
    environment.

    ``spec``, ``recipe`` and :meth:`replicate` are those of the environment inside, so that evaluations are not against
    the pool.

    Args:
        env: vector environment of several agents that resets its instances itself.
        pool_probability: of an episode against the pool, in [0, 1].
        active_opponents: policies that new episodes are against at a time, at least 1.
        learner: the agent that learns in episodes against the pool; ``None`` draws any.

    Raises:
        TypeError: if it is not a vector environment.
        ValueError: if there is only one agent or no such agent, or instances are not reset.
    """

    def __init__(
        self,
        env: VectorEnv,
        *,
        pool_probability: float = 0.5,
        active_opponents: int = 2,
        learner: str | None = None,
    ) -> None:
        if isinstance(env, MultiAgentEnv):
            raise TypeError("OpponentPoolEnv wraps a vector environment: make one with make_vector_env")
        require_autoreset(env, "a pool of opponents")
        agents = env.spec.agents
        if len(agents) < 2:
            raise ValueError(f"{env.spec.name} has one agent, {agents[0]}: a pool of opponents needs a game of several")
        if learner is not None and learner not in agents:
            raise ValueError(f"learner={learner!r} is no agent of {env.spec.name}: it has {', '.join(agents)}")
        super().__init__(env, spec=env.spec)
        self.spec = env.spec
        self.pool_probability = pool_probability
        self.active_opponents = active_opponents
        self._fixed_learner = None if learner is None else agents.index(learner)
        starts = np.cumsum([0, *(group.num_agents for group in env.spec.groups.values())])
        self._indices = {
            name: start + np.arange(group.num_agents)
            for start, (name, group) in zip(starts, env.spec.groups.items(), strict=False)
        }
        self._idle = {  # the only legal action of who looks dead: the first one, of every part
            name: np.isin(np.arange(group.action_size), group.action_offsets)
            for name, group in env.spec.groups.items()
            if group.is_discrete
        }
        num_envs = env.num_envs
        # Of the running episodes.
        self._learner = np.full(num_envs, NOBODY)
        self._opponent = np.full(num_envs, NOBODY)
        self._away = {  # who is played by the pool
            name: np.zeros((num_envs, group.num_agents), np.bool_) for name, group in env.spec.groups.items()
        }
        self._is_first = np.ones(num_envs, np.bool_)
        self._returns = np.zeros((2, num_envs))  # of the learner; mean over its opponents
        self._state: dict[str, Tensor] = {}
        # Places of two generations of opponents, one after the other. An opponent may be drawn several times.
        self._numbers = np.full(2 * active_opponents, _FREE)
        self._drawn = np.zeros(0, np.int64)
        self._results: dict[int, tuple[int, float]] = {}
        self._policies: list[nn.Module] = []
        self._deterministic = False
        self._device = torch.device("cpu")
        self._draws, self._noise = torch.Generator(), torch.Generator()
        self._seed_generators(env.seed)

    # The pool --------------------------------------------------------------------------------------------------------

    def use(self, policy: Policy, *, deterministic: bool) -> None:
        """Takes copies of a policy to act with; what they are to do comes with the entries of :meth:`renew`.

        Args:
            policy: a module.
            deterministic: whether opponents take the mode of their distributions instead of samples.
        """
        self._policies = [copy.deepcopy(policy).requires_grad_(False).eval() for _ in self._numbers]
        self._state = policy.initial_state(self.num_envs)
        self._deterministic = deterministic
        self._device = next((parameter.device for parameter in policy.parameters()), self._device)
        self._noise = torch.Generator(self._device)
        self._seed_generators(self.env.seed)

    def renew(self, entries: Sequence[PoolEntry], weights: Tensor) -> None:
        """Draws the opponents of the episodes that begin from now on, with replacement.

        Nothing changes while episodes still go on against the opponents before the present ones.

        Args:
            entries: to draw from, at least one.
            weights: ``[len(entries)]``, not negative, proportional to the probabilities.
        """
        count = self.active_opponents
        start = count if self._drawn.size and self._drawn[0] < count else 0
        places = np.arange(start, start + count)
        if np.isin(self._opponent, places).any():
            return
        chosen = torch.multinomial(weights, count, replacement=True, generator=self._draws).tolist()
        self._drawn = np.array([start + chosen.index(index) for index in chosen])
        self._numbers[places] = _FREE
        for place in np.unique(self._drawn):
            entry = entries[chosen[place - start]]
            self._numbers[place] = entry.number
            self._policies[place].load_state_dict(entry.weights)

    def take_results(self) -> dict[int, tuple[int, float]]:
        """Returns, by number of the entry, the episodes that have ended since the last call and those won by learners.

        A draw is half an episode won. The learner's return is compared with the mean of those of its opponents.
        """
        results, self._results = self._results, {}
        return results

    # Playing ---------------------------------------------------------------------------------------------------------

    def reset(self, *, seed: int | None = None, mask: np.ndarray | None = None) -> Observations[Tensor]:
        """See :meth:`VectorEnv.reset`. Episodes that are broken off have no result."""
        if seed is not None:
            self._seed_generators(seed)
        return super().reset(seed=seed, mask=mask)

    def step(self, actions: Mapping[str, Tensor]) -> VectorStep[Tensor]:
        """See :meth:`VectorEnv.step`."""
        return super().step(self._with_opponents(actions))

    def step_async(self, actions: Mapping[str, Tensor]) -> None:
        """See :class:`~marl_lightning.envs.vector.shared_memory.SharedMemoryVectorEnv`."""
        super().step_async(self._with_opponents(actions))

    @property
    def recipe(self) -> dict[str, Any] | None:
        """That of the environment inside; see :class:`VectorEnv`."""
        return self.env.recipe

    def replicate(self, *, num_envs: int, seed: int) -> VectorEnv:
        """Returns another environment like the one inside; see :meth:`VectorEnv.replicate`."""
        return self.env.replicate(num_envs=num_envs, seed=seed)

    @torch.no_grad()
    def _with_opponents(self, actions: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the actions with those of the opponents in place of what was chosen for the agents they play."""
        played = dict(actions)
        for place in np.unique(self._opponent[self._opponent != NOBODY]):
            rows = np.flatnonzero(self._opponent == place)
            for name, theirs in self._act(self._policies[place], torch.from_numpy(rows)).items():
                if played[name] is actions[name]:
                    played[name] = actions[name].clone()
                env, agent = np.nonzero(self._away[name][rows])
                played[name].numpy()[rows[env], agent] = theirs.numpy()[env, agent]
        return played

    def _act(self, policy: Policy, rows: Tensor) -> dict[str, Tensor]:
        """Returns by group the actions ``[R, A]`` of all agents in some instances; their recurrent state goes on."""
        device = self._device
        state_rows = rows.to(device)
        actions, _, state = policy.act(
            map_observations(lambda array: torch.from_numpy(array)[rows].to(device), self._source),
            {key: value[state_rows] for key, value in self._state.items()},
            torch.from_numpy(self._is_first)[rows].to(device),
            deterministic=self._deterministic,
            generator=self._noise,
        )
        for key, value in state.items():
            self._state[key][state_rows] = value
        return {name: action.to("cpu") for name, action in policy.env_actions(actions).items()}

    def _draw(self, rows: np.ndarray) -> None:
        """Episodes begin in instances ``[n]``: draws who plays."""
        count = len(rows)
        against = torch.rand(count, generator=self._draws).numpy() < self.pool_probability
        learner = torch.randint(self.spec.num_agents, (count,), generator=self._draws).numpy()
        opponent = torch.randint(self.active_opponents, (count,), generator=self._draws).numpy()
        if self._fixed_learner is not None:
            learner = np.full(count, self._fixed_learner)
        against &= self._drawn.size > 0
        self._learner[rows] = np.where(against, learner, NOBODY)
        self._opponent[rows] = self._drawn[opponent] if self._drawn.size else NOBODY
        self._opponent[rows[~against]] = NOBODY
        self._send_away(rows)
        self._is_first[rows] = True
        self._returns[:, rows] = 0.0

    def _send_away(self, rows: Rows) -> None:
        """Tells from the learners who is played by the pool."""
        learner = self._learner[rows, None]
        for name, away in self._away.items():
            away[rows] = (learner != NOBODY) & (self._indices[name] != learner)

    def _on_reset(self, source: Observations[np.ndarray], result: Observations[np.ndarray], rows: Rows) -> None:
        self._draw(np.arange(self.num_envs)[rows])
        self._show(source, result)

    def _on_step(self, batch: Batch) -> None:
        source, result = batch.source, batch.result
        ended = np.flatnonzero(batch.ended())
        self._count(source.reward)
        self._is_first[:] = False
        if len(ended):
            self._show(source.final, result.final)
            self._record(ended)
            self._draw(ended)
        self._show(source.observations, result.observations)

    def _show(self, source: Observations[np.ndarray], result: Observations[np.ndarray]) -> None:
        """Makes the agents that the pool plays look as if they were not alive."""
        for name, away in self._away.items():
            np.greater(source.alive[name], away, out=result.alive[name])
            if name in self._idle:
                mask = result.action_mask[name]
                np.copyto(mask, source.action_mask[name])
                mask[away] = self._idle[name]

    def _count(self, reward: Mapping[str, np.ndarray]) -> None:
        for name, values in reward.items():
            theirs = (values * self._away[name]).sum(1, dtype=np.float64)
            self._returns[0] += values.sum(1, dtype=np.float64) - theirs
            self._returns[1] += theirs / (self.spec.num_agents - 1)

    def _record(self, ended: np.ndarray) -> None:
        """Keeps the results of the instances ``[n]`` that ended and were against the pool."""
        against = ended[self._opponent[ended] != NOBODY]
        numbers = self._numbers[self._opponent[against]]
        own, theirs = self._returns[:, against]
        won = 0.5 * (np.sign(own - theirs) + 1)
        for number in np.unique(numbers).tolist():
            episodes, wins = self._results.get(number, (0, 0.0))
            those = numbers == number
            self._results[number] = (episodes + int(those.sum()), wins + float(won[those].sum()))

    # Saving ----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`VectorEnv.state_dict`. Holds the opponents that play too, which may have left the pool."""
        weights = {str(place): self._policies[place].state_dict() for place in np.flatnonzero(self._numbers != _FREE)}
        opponents = {
            "drawn": torch.from_numpy(self._drawn).clone(),
            "weights": {place: on_cpu(tensors) for place, tensors in weights.items()},
            "state": on_cpu(self._state),
            "results": dict(self._results),
            "draws": self._draws.get_state(),
            "noise": self._noise.get_state(),
        }
        return {**super().state_dict(), "opponents": opponents}

    def load_state_dict(self, state: Mapping[str, Any]) -> Observations[Tensor]:
        """See :meth:`VectorEnv.load_state_dict`. Comes after :meth:`use`."""
        observations = super().load_state_dict(state)
        opponents = state["opponents"]
        self._drawn = opponents["drawn"].numpy().copy()
        for place, weights in opponents["weights"].items():
            self._policies[int(place)].load_state_dict(weights)
        self._state = {key: value.to(self._device, copy=True) for key, value in opponents["state"].items()}
        self._results = dict(opponents["results"])
        self._draws.set_state(opponents["draws"])
        self._noise.set_state(opponents["noise"])
        self._send_away(slice(None))
        self._show(self._source, self._result)
        return observations

    def _memory(self) -> dict[str, np.ndarray]:
        return {
            "learner": self._learner,
            "opponent": self._opponent,
            "is_first": self._is_first,
            "returns": self._returns,
            "numbers": self._numbers,
        }

    def _own_arrays(self, changes: frozenset[str]) -> OwnArrays[np.ndarray]:
        own = super()._own_arrays(changes)
        for observations in (own.observations, own.final):
            for name, group in self.spec.groups.items():
                shape = (self._num_instances(), group.num_agents)
                observations.alive[name] = self._zeros(shape, np.bool_)
                if group.is_discrete:
                    observations.action_mask[name] = self._zeros((*shape, group.action_size), np.bool_)
        return own

    def _seed_generators(self, seed: int) -> None:
        """Seeds both generators, apart from each other and from those that others make of the same seed."""
        first, second = np.random.SeedSequence((seed, 0x9001)).generate_state(2, np.uint64)
        self._draws.manual_seed(int(first >> 1))
        self._noise.manual_seed(int(second >> 1))


def on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns copies on the CPU."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
