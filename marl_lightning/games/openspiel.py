"""Games of OpenSpiel: all information states are filled in batched forwards, and OpenSpiel computes the rest."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from marl_lightning.envs.adapters.openspiel import GROUP, OpenSpielAdapter
from marl_lightning.envs.adapters.packages import require
from marl_lightning.envs.base import MultiAgentEnv, Observations, VectorEnv
from marl_lightning.envs.registry import make_env
from marl_lightning.envs.wrappers import (
    AggregateReward,
    ClipReward,
    NormalizeReward,
    OpponentPoolEnv,
    RecordEpisodeStatistics,
    TransformReward,
    layers,
)
from marl_lightning.envs.wrappers.base import Wrapper
from marl_lightning.games.profiles import Mode, ask, check_mode, check_policy, device_of, undisturbed
from marl_lightning.games.result import NashConvResult

if TYPE_CHECKING:
    import pyspiel

    from marl_lightning.algorithms.base import StochasticPolicy
    from marl_lightning.data.schema import RecurrentState

_CHUNK = 8192  # histories that a policy is asked about at once
_HISTORIES_PER_STATE = 10  # a walk ends after this many times as many histories as information states are allowed
_TOLERANCE = 1e-5  # what the same probabilities, computed in different places of a batch, may differ by
_SAME_OBSERVATIONS = (
    RecordEpisodeStatistics,
    AggregateReward,
    ClipReward,
    NormalizeReward,
    TransformReward,
    OpponentPoolEnv,  # who is not alive there still sees
)


class OpenSpielEvaluator:
    """Exact NashConv of games of OpenSpiel; see :meth:`evaluate`.

    The last game is remembered: evaluating further profiles in it saves the walk through its tree.

    Args:
        max_information_states: games with more are refused.

    Raises:
        ValueError: if the number is less than 1.
    """

    def __init__(self, *, max_information_states: int = 50_000) -> None:
        if max_information_states < 1:
            raise ValueError(f"max_information_states must be at least 1, got {max_information_states}")
        self._limit = max_information_states
        self._tree: _Tree | None = None

    def evaluate(
        self, profile: StochasticPolicy, game: OpenSpielAdapter | VectorEnv, *, mode: Mode = "stochastic"
    ) -> NashConvResult:
        """Computes NashConv of a policy that plays all players.

        The policy is asked at every decision point of every history, with what the environment shows to all players
        there. A policy with memory is taken along each history from its beginning, through the turns of others too. In
        the end, what it does must follow from the information state of the player whose turn it is: everything else is
        no strategy of the game, and an error.

        Payoffs are the returns of the game itself, without discount, whatever wrappers make of its rewards. Best
        responses and values are OpenSpiel's, in compiled code. Simultaneous moves are taken one after another, unseen.

        Args:
            profile: a policy with the group ``"player"``.
            game: an ``OpenSpielAdapter``, or a vector environment that ``make_vector_env("openspiel/<game>", ...)``
                made. It is left untouched. Wrappers may change rewards, but nothing that the policy sees.
            mode: ``"greedy"`` puts all probability on the action that the policy prefers.

        Raises:
            ValueError: if the game has more information states than allowed or none at all, draws inside, or is none of
                OpenSpiel; if wrappers change observations; if the profile was made for another game, or what it does
                depends on more than the information state.
            TypeError: if the policy cannot state probabilities.
        """
        started = time.perf_counter()
        check_mode(mode)
        check_policy(profile)
        env = _find_adapter(game)
        key = (str(env.game), env.observation_kind)
        if self._tree is None or self._tree.key != key:
            self._tree = _walk(env, key=key, limit=self._limit)
        tree = self._tree
        policy = tree.as_policy(_fill(profile, tree, mode))
        root = tree.game.new_initial_state()
        num_players = tree.game.num_players()
        payoff_range = tree.game.max_utility() - tree.game.min_utility()
        return NashConvResult.exact(
            agents=env.spec.agents,
            on_policy=require("pyspiel", extra="openspiel").expected_returns(root, policy, -1, True),
            best_response_values=[tree.best_response_value(player, policy, root) for player in range(num_players)],
            wall_seconds=time.perf_counter() - started,
            payoff_range=payoff_range if math.isfinite(payoff_range) else None,
        )


def is_openspiel_env(game: Any) -> bool:
    """Whether :class:`OpenSpielEvaluator` can find a game of OpenSpiel in an environment."""
    inside = _inside(game)
    recipe = getattr(inside, "recipe", None) or {}
    return isinstance(inside, OpenSpielAdapter) or recipe.get("name", "").startswith("openspiel/")


class _Level(NamedTuple):
    """The ``n`` histories of a game that reach a decision after equally many env steps."""

    parents: np.ndarray
    """``[n]``, which history of the level before goes on here."""
    shown: np.ndarray
    """``[n, A]``, which of the views of the tree each player has."""
    rows: np.ndarray
    """``[m]``, the histories of the ``m`` decisions: one a history, or one for each player that moves."""
    players: np.ndarray
    """``[m]``, who decides."""
    states: np.ndarray
    """``[m]``, in which information state."""


@dataclass(kw_only=True, eq=False)
class _Tree:
    """All decisions of a game.

    Attributes:
        key: what the tree is of.
        env: shows the game to the policy.
        game: the same in turns.
        levels: by number of env steps.
        observations: ``[V, *obs]``, all different views that a player can have together with ``masks``.
        masks: ``[V, n]`` bool.
        information_states: names of the information states, in the order of their numbers.
        legal: legal actions by information state.
    """

    key: Any
    env: OpenSpielAdapter
    game: pyspiel.Game
    levels: list[_Level]
    observations: Tensor
    masks: Tensor
    information_states: list[str]
    legal: list[list[int]]
    _responders: dict[int, pyspiel.TabularBestResponse] = field(default_factory=dict)

    def show(self, shown: np.ndarray) -> Observations[Tensor]:
        """Returns what the environment shows where the players have the views ``[n, A]``."""
        observation = self.observations[shown]
        return Observations(
            observation={GROUP: observation},
            action_mask={GROUP: self.masks[shown]},
            alive={GROUP: torch.ones(shown.shape, dtype=torch.bool)},
            state=observation.flatten(1),
        )

    def as_policy(self, table: np.ndarray) -> pyspiel.TabularPolicy:
        """Returns probabilities ``[information states, actions]`` as a policy of OpenSpiel."""
        rows = zip(self.information_states, self.legal, table.tolist(), strict=True)
        return require("pyspiel", extra="openspiel").TabularPolicy(
            {name: [(action, row[action]) for action in legal] for name, legal, row in rows}
        )

    def best_response_value(self, player: int, policy: pyspiel.TabularPolicy, root: pyspiel.State) -> float:
        """Returns what the player gets at best against a policy."""
        if player in self._responders:
            self._responders[player].set_policy(policy)
        else:  # takes longer, since it walks through the game
            pyspiel = require("pyspiel", extra="openspiel")
            self._responders[player] = pyspiel.TabularBestResponse(self.game, player, policy)
        return self._responders[player].value_from_state(root)


def _fill(policy: StochasticPolicy, tree: _Tree, mode: Mode) -> np.ndarray:
    """Returns the probabilities of a policy, ``[information states, actions of the game]`` float64."""
    num_actions = tree.game.num_distinct_actions()
    decisions = []
    with undisturbed(policy):
        state = policy.initial_state(len(tree.levels[0].shown))
        for depth, level in enumerate(tree.levels):
            if depth:
                parents = torch.from_numpy(level.parents).to(device_of(policy))
                state = {name: value[parents] for name, value in state.items()}
            stated, state = _ask_in_chunks(policy, tree, level, state, is_first=depth == 0, mode=mode)
            decisions.append(stated[level.rows, level.players, :num_actions].numpy())
    stated, states = np.concatenate(decisions), np.concatenate([level.states for level in tree.levels])
    _, first = np.unique(states, return_index=True)  # every information state has a decision
    table = stated[first]
    differences = np.abs(stated - table[states]).max(-1)
    if differences.max() > _TOLERANCE:
        worst = int(differences.argmax())
        _refuse(tree, int(first[states[worst]]), worst, float(differences[worst]))
    return table


def _ask_in_chunks(
    policy: StochasticPolicy, tree: _Tree, level: _Level, state: RecurrentState, *, is_first: bool, mode: Mode
) -> tuple[Tensor, RecurrentState]:
    """Returns the probabilities ``[n, A, actions]`` of the histories of a level, and their next recurrent states."""
    probabilities, states = [], []
    for begin in range(0, len(level.shown), _CHUNK):
        chunk = slice(begin, begin + _CHUNK)
        stated, next_state = ask(
            policy,
            tree.show(level.shown[chunk]),
            {name: value[chunk] for name, value in state.items()},
            torch.full((len(level.shown[chunk]),), is_first),
            spec=tree.env.spec,
            mode=mode,
        )
        probabilities.append(stated[GROUP])
        states.append(next_state)
    return torch.cat(probabilities), {name: torch.cat([part[name] for part in states]) for name in states[0]}


def _refuse(tree: _Tree, one: int, other: int, difference: float) -> None:
    """Raises ``ValueError`` that says why two decisions in the same information state are not the same.

    Args:
        tree: the game.
        one: number of a decision, counted through all levels.
        other: number of the other one.
        difference: between the probabilities of an action.
    """
    place, player, views = _seen_at(tree, one)
    _, _, other_views = _seen_at(tree, other)
    what = (
        f"player {player} does not act by what it knows: in the information state {tree.information_states[place]!r} "
        f"the probability of an action differs by {difference:.2g} between two histories, "
    )
    if views == other_views:
        raise ValueError(
            what + "in which it has seen the same. The policy must see the opponents, through shared inputs or memory; "
            "evaluate one whose agents act on their own observations"
        )
    raise ValueError(
        what + "because the environment showed them to the player in different ways. "
        "Evaluate a policy without memory that sees information states (observation='information_state')"
    )


def _seen_at(tree: _Tree, decision: int) -> tuple[int, int, list[int]]:
    """Returns information state, player, and the views that the player had up to a decision, the last one first."""
    depth = 0
    while decision >= len(tree.levels[depth].rows):
        decision -= len(tree.levels[depth].rows)
        depth += 1
    level = tree.levels[depth]
    row, player = int(level.rows[decision]), int(level.players[decision])
    views = []
    for earlier in reversed(tree.levels[: depth + 1]):
        views.append(int(earlier.shown[row, player]))
        row = int(earlier.parents[row])
    return int(level.states[decision]), player, views


class _Position(NamedTuple):
    """A history that has reached a decision."""

    state: pyspiel.State
    turns: pyspiel.State
    """The same in the game in turns; the very same object in a game that is played in turns anyway."""
    parent: int


def _walk(env: OpenSpielAdapter, *, key: Any, limit: int) -> _Tree:
    """Goes through all histories of a game, one env step after another.

    Raises:
        ValueError: if the game is too large, or not such that it could be evaluated exactly.
    """
    pyspiel = require("pyspiel", extra="openspiel")
    kind = env.game.get_type()
    if kind.chance_mode == pyspiel.GameType.ChanceMode.SAMPLED_STOCHASTIC:
        raise ValueError(f"{env.game} draws inside, so that chance has no probabilities: it has no exact evaluation")
    if not kind.provides_information_state_string:
        raise ValueError(f"{env.game} does not say what players know (no information states): no exact evaluation")
    simultaneous = kind.dynamics == pyspiel.GameType.Dynamics.SIMULTANEOUS
    game = pyspiel.convert_to_turn_based(env.game) if simultaneous else env.game
    counts = _Counts(game=env.game, limit=limit)
    views: dict[bytes, int] = {}
    observations, masks, levels = [], [], []
    root = env.game.new_initial_state()
    positions = _decisions(root, game.new_initial_state() if simultaneous else root, parent=0)
    while True:
        frontier, shown, rows, players, states = [], [], [], [], []
        for position in positions:
            seen = env.observe(position.state)
            for observation, mask in zip(seen.observation[GROUP], seen.action_mask[GROUP], strict=True):
                view = observation.tobytes() + mask.tobytes()
                if view not in views:
                    views[view] = len(views)
                    observations.append(observation)
                    masks.append(mask)
                shown.append(views[view])
            for player, name, legal in _movers(position):
                rows.append(len(frontier))
                players.append(player)
                states.append(counts.add(player, name, legal))
            frontier.append(position)
            counts.add_history()
        if not frontier:
            break
        levels.append(
            _Level(
                parents=np.array([position.parent for position in frontier]),
                shown=np.array(shown).reshape(len(frontier), -1),
                rows=np.array(rows),
                players=np.array(players),
                states=np.array(states),
            )
        )
        positions = _after(frontier)
    return _Tree(
        key=key,
        env=env,
        game=game,
        levels=levels,
        observations=torch.from_numpy(np.stack(observations)),
        masks=torch.from_numpy(np.stack(masks)),
        information_states=list(counts.numbers),
        legal=counts.legal,
    )


class _Counts:
    """Numbers the information states of a game and ends a walk that takes too long.

    Args:
        game: for messages.
        limit: information states allowed.
    """

    def __init__(self, *, game: pyspiel.Game, limit: int) -> None:
        self.numbers: dict[str, int] = {}
        self.legal: list[list[int]] = []
        self._owners: list[int] = []
        self._game = game
        self._limit = limit
        self._histories = 0

    def add(self, player: int, name: str, legal: list[int]) -> int:
        """Returns the number of an information state, in which the player may take the legal actions."""
        number = self.numbers.setdefault(name, len(self.numbers))
        if number == len(self.legal):
            self.legal.append(legal)
            self._owners.append(player)
            if number == self._limit:
                self._stop()
        elif self._owners[number] != player:
            raise ValueError(
                f"{self._game} calls an information state of two players {name!r}, so that policies cannot tell them "
                "apart: it has no exact evaluation"
            )
        return number

    def add_history(self) -> None:
        """Counts a history."""
        self._histories += 1
        if self._histories > _HISTORIES_PER_STATE * self._limit:
            self._stop()

    def _stop(self) -> None:
        raise ValueError(
            f"{self._game} is too large for an exact evaluation: stopped at {len(self.numbers):,} information states "
            f"in {self._histories:,} histories, with max_information_states={self._limit:,}. Raise the limit with "
            "evaluator=OpenSpielEvaluator(max_information_states=...), or use an evaluator that learns best responses"
        )


def _decisions(state: pyspiel.State, turns: pyspiel.State, parent: int) -> Iterator[_Position]:
    """Yields what chance makes of a history: the next decisions, and nothing where the game is over."""
    if state.is_terminal():
        return
    if not state.is_chance_node():
        yield _Position(state, turns, parent)
        return
    for outcome, _ in state.chance_outcomes():
        child = state.child(outcome)
        yield from _decisions(child, child if turns is state else turns.child(outcome), parent)


def _after(frontier: list[_Position]) -> Iterator[_Position]:
    """Yields the decisions that come one env step after those of the frontier."""
    for parent, (state, turns, _) in enumerate(frontier):
        if not state.is_simultaneous_node():
            for action in state.legal_actions():
                child = state.child(action)
                yield from _decisions(child, child if turns is state else turns.child(action), parent)
            continue
        choices = [state.legal_actions(player) for player in range(state.num_players())]
        # Who has nothing to decide takes action 0, which the game in turns leaves out.
        for joint in itertools.product(*(actions or [0] for actions in choices)):
            child, turns_child = state.clone(), turns.clone()
            child.apply_actions(list(joint))
            for action, legal in zip(joint, choices, strict=True):
                if legal:
                    turns_child.apply_action(action)
            yield from _decisions(child, turns_child, parent)


def _movers(position: _Position) -> Iterator[tuple[int, str, list[int]]]:
    """Yields player, information state and legal actions of those who decide."""
    turns = position.turns
    if not position.state.is_simultaneous_node():
        player = turns.current_player()
        yield player, turns.information_state_string(player), turns.legal_actions()
        return
    turns = turns.clone()
    for player in range(position.state.num_players()):
        if position.state.legal_actions(player):
            legal = turns.legal_actions()
            yield player, turns.information_state_string(player), legal
            turns.apply_action(legal[0])  # the others do not see it


def _inside(game: Any) -> Any:
    return game.unwrapped if isinstance(game, Wrapper) else game


def _find_adapter(game: OpenSpielAdapter | VectorEnv | MultiAgentEnv) -> OpenSpielAdapter:
    """Returns an adapter of the game that an environment plays."""
    if not is_openspiel_env(game):
        name = game.spec.name if hasattr(game, "spec") else type(game).__name__
        raise ValueError(
            f"cannot find a game of OpenSpiel in {name}: give an OpenSpielAdapter, or a vector environment that "
            "make_vector_env('openspiel/<game>', ...) made"
        )
    refused = [type(layer).__name__ for layer in layers(game) if not isinstance(layer, _SAME_OBSERVATIONS)]
    if refused:
        raise ValueError(
            f"{', '.join(refused)} may change what the policy sees, which cannot be followed through the tree of the "
            "game: exact evaluation allows wrappers of rewards only"
        )
    inside = _inside(game)
    if isinstance(inside, OpenSpielAdapter):
        return inside
    arguments = {key: value for key, value in inside.recipe["kwargs"].items() if key != "vectorization"}
    return make_env(inside.recipe["name"], **arguments)
