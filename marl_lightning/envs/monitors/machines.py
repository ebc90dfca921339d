"""Reward machines (Toro Icarte et al. 2018, 2022) and builders of the monitors of usual temporal tasks."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from marl_lightning.envs.monitors.guards import Guard, parse_guard

_MAX_PROPOSITIONS = 16  # of one state: every combination of them is checked


class MonitorStep(NamedTuple):
    """What a monitor says to a label.

    Attributes:
        state: the next state.
        reward: for this step.
        terminal: nothing can change any more.
        verdict: the task is done (True), has failed (False), or neither yet (``None``).
    """

    state: Hashable
    reward: float
    terminal: bool
    verdict: bool | None


@runtime_checkable
class Monitor(Protocol):
    """A deterministic finite automaton that reads labels, sets of the propositions that are true after a step.

    Attributes:
        states: all states, ``initial`` among them. Terminal states lead to themselves with reward 0.
        initial: where every episode starts.
        undecided_is: whether a task that is undecided when the episode ends counts as satisfied.
    """

    states: Sequence[Hashable]
    initial: Hashable
    undecided_is: bool

    def step(self, state: Hashable, label: frozenset[str]) -> MonitorStep:
        """Returns what follows on ``state`` when the propositions of ``label`` are true. Changes nothing."""


@dataclass(frozen=True)
class Edge:
    """A transition of a reward machine: from ``source`` to ``target`` under ``guard``, worth ``reward``."""

    source: Hashable
    guard: Guard
    target: Hashable
    reward: float


@dataclass(frozen=True)
class RewardMachine:
    """A monitor whose transitions have guards and rewards; see :meth:`from_edges`."""

    states: tuple[Hashable, ...]
    initial: Hashable
    accepting: frozenset[Hashable]
    rejecting: frozenset[Hashable]
    edges: tuple[Edge, ...]
    on_missing: Literal["stay", "reject"] | None = None
    undecided_is: bool = False
    _by_source: dict[Hashable, tuple[Edge, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_source = {state: tuple(e for e in self.edges if e.source == state) for state in self.states}
        object.__setattr__(self, "_by_source", by_source)

    @classmethod
    def from_edges(
        cls,
        edges: Iterable[tuple[Hashable, str, Hashable, float]],
        *,
        initial: Hashable | None = None,
        accepting: Collection[Hashable] = (),
        rejecting: Collection[Hashable] = (),
        on_missing: Literal["stay", "reject"] | None = None,
        undecided_is: bool = False,
    ) -> RewardMachine:
        """Builds a machine and checks it.

        Example::

            RewardMachine.from_edges(
                [("start", "coffee", "carrying", 0.0), ("carrying", "office", "done", 1.0)],
                accepting=["done"],
                on_missing="stay",
            )

        Args:
            edges: source, guard (see :func:`~marl_lightning.envs.monitors.guards.parse_guard`), target and reward.
            initial: where episodes start; by default the source of the first edge.
            accepting: states in which the task is done. They are terminal.
            rejecting: states in which it has failed. They are terminal.
            on_missing: what happens where no guard holds: ``"stay"`` with reward 0, or ``"reject"``, which leads to the
                only rejecting state, made if there is none. ``None`` demands that there is always a guard that holds.
            undecided_is: see :class:`Monitor`.

        Raises:
            ValueError: if there are no edges, two guards of a state hold together, no guard holds and ``on_missing``
                is not given, a terminal state has edges, or a state cannot be reached.
        """
        parsed = tuple(
            Edge(source, parse_guard(guard), target, float(reward)) for source, guard, target, reward in edges
        )
        if not parsed:
            raise ValueError("a reward machine needs at least one edge")
        initial = parsed[0].source if initial is None else initial
        rejecting = tuple(rejecting)
        if on_missing == "reject" and not rejecting:
            rejecting = ("rejected",)
        if on_missing == "reject" and len(rejecting) > 1:
            raise ValueError(f'on_missing="reject" needs one rejecting state, got {list(rejecting)}')
        ends = itertools.chain.from_iterable((edge.source, edge.target) for edge in parsed)
        machine = cls(
            states=tuple(dict.fromkeys([initial, *ends, *accepting, *rejecting])),
            initial=initial,
            accepting=frozenset(accepting),
            rejecting=frozenset(rejecting),
            edges=parsed,
            on_missing=on_missing,
            undecided_is=undecided_is,
        )
        machine._check()
        return machine

    @property
    def propositions(self) -> frozenset[str]:
        """The propositions that the guards mention."""
        return frozenset().union(*(edge.guard.propositions for edge in self.edges))

    def is_terminal(self, state: Hashable) -> bool:
        """Whether nothing can change any more."""
        return state in self.accepting or state in self.rejecting

    def step(self, state: Hashable, label: Set[str]) -> MonitorStep:
        """See :meth:`Monitor.step`. Raises ``ValueError`` for a state that the machine does not have."""
        if state not in self._by_source:
            raise ValueError(f"the machine has no state {state!r}, only {list(self.states)}")
        if self.is_terminal(state):
            return self._arrive(state, 0.0)
        for edge in self._by_source[state]:
            if edge.guard.holds(label):
                return self._arrive(edge.target, edge.reward)
        return self._arrive(state if self.on_missing == "stay" else next(iter(self.rejecting)), 0.0)

    def transitions(self, state: Hashable) -> Iterator[MonitorStep]:
        """Yields what can follow on ``state``, for every combination of the propositions that matter there."""
        names = sorted(frozenset().union(*(edge.guard.propositions for edge in self._by_source[state])))
        for truth in itertools.product((False, True), repeat=len(names)):
            yield self.step(state, {name for name, true in zip(names, truth, strict=True) if true})

    def _arrive(self, state: Hashable, reward: float) -> MonitorStep:
        verdict = True if state in self.accepting else False if state in self.rejecting else None
        return MonitorStep(state, reward, verdict is not None, verdict)

    def _check(self) -> None:
        if both := self.accepting & self.rejecting:
            raise ValueError(f"states cannot be accepting and rejecting: {sorted(map(str, both))}")
        for state, edges in self._by_source.items():
            if self.is_terminal(state):
                if edges:
                    raise ValueError(f"state {state!r} is terminal and cannot have edges")
                continue
            self._check_guards(state, edges)
        reached, frontier = {self.initial}, [self.initial]
        while frontier:
            new = {step.state for step in self.transitions(frontier.pop())} - reached
            reached |= new
            frontier += new
        if lost := [state for state in self.states if state not in reached]:
            raise ValueError(f"states {lost} cannot be reached from {self.initial!r}: remove them or mend the guards")

    def _check_guards(self, state: Hashable, edges: Sequence[Edge]) -> None:
        names = sorted(frozenset().union(*(edge.guard.propositions for edge in edges)))
        if len(names) > _MAX_PROPOSITIONS:
            raise ValueError(
                f"state {state!r} uses {len(names)} propositions, at most {_MAX_PROPOSITIONS} can be checked"
            )
        for truth in itertools.product((False, True), repeat=len(names)):
            label = {name for name, true in zip(names, truth, strict=True) if true}
            targets = [edge.target for edge in edges if edge.guard.holds(label)]
            if len(targets) > 1:
                raise ValueError(f"state {state!r} is not deterministic: {sorted(label)} leads to {targets}")
            if not targets and self.on_missing is None:
                raise ValueError(
                    f"state {state!r} does not say what follows on {sorted(label)}: add an edge, or set on_missing to "
                    "'stay' or 'reject'"
                )


@dataclass(frozen=True)
class PotentialShaping:
    """Adds ``gamma * potential(next) - potential(state)`` to rewards, which keeps optimal policies (Ng et al. 1999).

    The potential of a state is its optimal value in the machine alone, as if labels could be chosen (Toro Icarte et al.
    2022, section 4.3); it is 0 in terminal states.

    Args:
        gamma: discount of the learner, in [0, 1); 1 only for machines whose rewards cannot be repeated.
    """

    gamma: float

    def __post_init__(self) -> None:
        if not 0 <= self.gamma < 1:
            raise ValueError(f"gamma must be in [0, 1), got {self.gamma}")

    def potentials(self, machine: RewardMachine) -> dict[Hashable, float]:
        """Returns the potential of every state, by value iteration."""
        moves = {
            state: [] if machine.is_terminal(state) else [(s.reward, s.state) for s in machine.transitions(state)]
            for state in machine.states
        }
        values = dict.fromkeys(machine.states, 0.0)
        change = 1.0
        while change > 1e-10:
            new = {
                state: max((reward + self.gamma * values[target] for reward, target in following), default=0.0)
                for state, following in moves.items()
            }
            change = max(abs(new[state] - values[state]) for state in values)
            values = new
        return values


def eventually(guard: str, *, reward: float = 1.0) -> RewardMachine:
    """Returns the monitor of "``guard`` holds at some time", which gives ``reward`` then."""
    return RewardMachine.from_edges([("waiting", guard, "done", reward)], accepting=["done"], on_missing="stay")


def always(guard: str, *, penalty: float = 0.0) -> RewardMachine:
    """Returns the monitor of "``guard`` holds after every step", which takes ``penalty`` once it does not.

    An episode that ends without a violation satisfies it.
    """
    edges = [("holding", f"!({guard})", "violated", -penalty)]
    return RewardMachine.from_edges(edges, rejecting=["violated"], on_missing="stay", undecided_is=True)


def until(first: str, then: str, *, reward: float = 1.0) -> RewardMachine:
    """Returns the monitor of "``first`` holds after every step until ``then`` does, which it does at some time"."""
    edges = [
        ("waiting", then, "done", reward),
        ("waiting", f"!({then}) & !({first})", "violated", 0.0),
    ]
    return RewardMachine.from_edges(edges, accepting=["done"], rejecting=["violated"], on_missing="stay")


def sequence(*guards: str, reward: float = 1.0) -> RewardMachine:
    """Returns the monitor of "the guards hold at some times, in this order", which gives ``reward`` with the last.

    One step moves on by one guard only.
    """
    if not guards:
        raise ValueError("a sequence needs at least one guard")
    last = len(guards) - 1
    edges = [(i, guard, i + 1, reward if i == last else 0.0) for i, guard in enumerate(guards)]
    return RewardMachine.from_edges(edges, accepting=[len(guards)], on_missing="stay")
