"""The games of OpenSpiel (package open-spiel), with the handles that equilibrium computations need."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from gymnasium import spaces

from marl_lightning.envs.adapters.packages import require
from marl_lightning.envs.base import MultiAgentEnv, Observations, Step
from marl_lightning.envs.spec import EnvSpec, GroupSpec
from marl_lightning.envs.validation import action_arrays, check_legal

if TYPE_CHECKING:
    import pyspiel

GROUP = "player"

ObservationKind = Literal["information_state", "observation"]

_WITHOUT_SHAPE = ("crossword",)  # says that it has a tensor, but fails when asked for its shape

# The package's games in Python are known to it only once they were imported, which any user of its Python algorithms
# does. They can be made then, but are not listed, so that the list does not depend on what else was imported.
_IN_PYTHON = ("python_", "chat_game")


def scenarios() -> tuple[str, ...]:
    """Returns the names of the games that can be played without parameters and are described by tensors.

    Those that OpenSpiel has in Python, such as ``"python_kuhn_poker"``, are left out.

    Raises:
        ImportError: if open-spiel is not installed.
    """
    pyspiel = _require_pyspiel()
    return tuple(
        game.short_name
        for game in pyspiel.registered_games()
        if game.default_loadable
        and game.dynamics != pyspiel.GameType.Dynamics.MEAN_FIELD
        and (game.provides_information_state_tensor or game.provides_observation_tensor)
        and game.short_name not in _WITHOUT_SHAPE
        and not game.short_name.startswith(_IN_PYTHON)
    )


def make(scenario: str, *, observation: ObservationKind | None = None, **parameters: Any) -> OpenSpielAdapter:
    """Makes one instance, see :class:`OpenSpielAdapter`."""
    return OpenSpielAdapter(scenario=scenario, observation=observation, **parameters)


class OpenSpielAdapter(MultiAgentEnv):
    """A game of OpenSpiel. All players are the group ``"player"`` and have the actions of the whole game.

    **Turns.** If players take turns, an env step is the decision of one of them. Everybody has one action more than in
    the game, the last one, which does nothing: it is legal exactly when it is not the player's turn, and then nothing
    else is. In games with simultaneous moves an env step is one of everybody; where a player has nothing to decide, its
    only legal action is 0.

    **Chance.** Between decisions, outcomes are drawn from a generator of this environment. Games that draw inside the
    package get their ``rng_seed`` from it, a new one for every episode, and cannot be saved; all others can.

    **Observations** are the tensors of the package, float32: those of the information state, which holds all that the
    player has seen so far, if the game has them; else those of the current observation. The state is the concatenated
    observations. Rewards are those of the package since the last decision. An episode terminates at the end of the game
    and is never truncated.

    Attributes:
        observation_kind: ``"information_state"`` or ``"observation"``, what the players see.
        game: the ``pyspiel.Game``; for games that draw inside the package, that of the running episode.
        state: the ``pyspiel.State`` of the running episode, ``None`` before the first reset. It is at a decision or at
            the end, never at chance. Clone it before you change it.

    Args:
        scenario: name of a game, such as ``"kuhn_poker"``, also with parameters: ``"kuhn_poker(players=3)"``. Games
            that contain games are possible, such as ``"repeated_game(stage_game=matrix_pd(),num_repetitions=10)"``.
        observation: ``"information_state"`` or ``"observation"``; ``None`` takes the first that the game has.
        **parameters: more parameters of the game.

    Raises:
        ImportError: if open-spiel is not installed.
        ValueError: if there is no such game or parameter, a value is refused, a parameter is given twice, or the game
            is a mean-field game or lacks the tensor.
    """

    def __init__(self, *, scenario: str, observation: ObservationKind | None = None, **parameters: Any) -> None:
        self._pyspiel = _require_pyspiel()
        self._name, self._parameters = self._parse(scenario, parameters)
        self.game: pyspiel.Game = self._load_game()
        kind = self.game.get_type()
        if kind.dynamics == self._pyspiel.GameType.Dynamics.MEAN_FIELD:
            raise ValueError(
                f"{self._name} is a mean-field game, whose players are no agents: it cannot be played here"
            )
        self.observation_kind: ObservationKind = _choose_observation(kind, observation)
        in_turn = kind.dynamics == self._pyspiel.GameType.Dynamics.SEQUENTIAL
        num_actions = self.game.num_distinct_actions()
        self._idle = num_actions if in_turn else 0  # the only legal action of those who have nothing to decide
        self._draws_inside = kind.chance_mode == self._pyspiel.GameType.ChanceMode.SAMPLED_STOCHASTIC
        if self._draws_inside and "rng_seed" in self._parameters:
            raise ValueError("rng_seed follows from the seed of the environment: leave it out")

        shape = getattr(self.game, f"{self.observation_kind}_tensor_shape")()
        group = GroupSpec(
            agents=tuple(f"player_{player}" for player in range(self.game.num_players())),
            observation_space=spaces.Box(-np.inf, np.inf, tuple(shape), np.float32),
            action_space=spaces.Discrete(num_actions + in_turn),
        )
        self.spec = EnvSpec(
            name=f"openspiel/{scenario}",
            groups={GROUP: group},
            state_size=group.num_agents * group.observation_size,
            can_checkpoint=not self._draws_inside,
            metadata={"backend": "open_spiel", "game": str(self.game)},
        )
        self.state: pyspiel.State | None = None
        self._rng = np.random.default_rng()
        self._action_mask = np.zeros((group.num_agents, group.action_size), np.bool_)

    def information_state_string(self, player: int) -> str:
        """Returns what the player numbered from 0 knows, as OpenSpiel's tabular policies name it.

        Raises:
            RuntimeError: if no episode has begun, or the game has no such strings.
        """
        if self.state is None:
            raise RuntimeError("no episode has begun: call reset first")
        return self.state.information_state_string(player)

    def reset(self, *, seed: int | None = None) -> Observations[np.ndarray]:
        """See :meth:`MultiAgentEnv.reset`."""
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        if self._draws_inside:
            self.game = self._load_game(rng_seed=int(self._rng.integers(2**31 - 1)))
        self.state = self.game.new_initial_state()
        self._draw_outcomes()
        return self._observe()

    def step(self, actions: Mapping[str, np.ndarray]) -> Step[np.ndarray]:
        """See :meth:`MultiAgentEnv.step`."""
        state = self.state
        if state is None or state.is_terminal():
            raise RuntimeError("the episode is over or has not begun: call reset before step")
        arrays = action_arrays(self.spec, actions, ())
        alive = np.ones(self.spec.num_agents, np.bool_)
        check_legal(self.spec, arrays, action_mask={GROUP: self._action_mask}, alive={GROUP: alive})
        if state.is_simultaneous_node():
            state.apply_actions(arrays[GROUP].tolist())
        else:
            state.apply_action(int(arrays[GROUP][state.current_player()]))
        self._draw_outcomes()
        return Step(
            observations=self._observe(),
            reward={GROUP: np.array(state.rewards(), np.float32)},
            terminated=state.is_terminal(),
            truncated=False,
            info={},
        )

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`MultiAgentEnv.state_dict`."""
        if not self.spec.can_checkpoint:
            return super().state_dict()
        return {
            "state": None if self.state is None else self.state.serialize(),
            "rng": json.dumps(self._rng.bit_generator.state),  # its integers are too long for a tensor
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :meth:`MultiAgentEnv.load_state_dict`."""
        if not self.spec.can_checkpoint:
            super().load_state_dict(state)  # raises
        self._rng.bit_generator.state = json.loads(state["rng"])
        self.state = None if state["state"] is None else self.game.deserialize_state(state["state"])
        if self.state is not None:
            self._observe()

    def _observe(self) -> Observations[np.ndarray]:
        observations = self.observe(self.state)
        self._action_mask = observations.action_mask[GROUP].copy()  # the caller may write into what it gets
        return observations

    def _draw_outcomes(self) -> None:
        """Lets chance play until somebody has to decide."""
        while self.state.is_chance_node():
            self.state.apply_action(_draw(self.state.chance_outcomes(), self._rng))

    def observe(self, state: pyspiel.State) -> Observations[np.ndarray]:
        """Returns what the players see at a decision or at the end of the game; the running episode is left alone."""
        group = self.spec.groups[GROUP]
        over = state.is_terminal()
        observation = np.zeros((group.num_agents, *group.observation_shape), np.float32)
        mask = np.zeros((group.num_agents, group.action_size), np.bool_)
        tensor = getattr(state, f"{self.observation_kind}_tensor")
        for player in range(group.num_agents):
            legal = [] if over else state.legal_actions(player)
            mask[player, legal or self._idle] = True
            if not over:
                observation[player] = np.reshape(tensor(player), group.observation_shape)
        return Observations(
            observation={GROUP: observation},
            action_mask={GROUP: mask},
            alive={GROUP: np.full(group.num_agents, not over)},
            state=observation.flatten(),
        )

    def _load_game(self, **more: Any) -> pyspiel.Game:
        try:
            return self._pyspiel.load_game(self._name, {**self._parameters, **more})
        except self._pyspiel.SpielError as error:
            raise ValueError(f"OpenSpiel refuses the parameters of {self._name}: {error}") from error

    def _parse(self, scenario: str, parameters: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Returns the name of the game and all of its parameters."""
        try:
            named = self._pyspiel.game_parameters_from_string(scenario)
        except self._pyspiel.SpielError as error:
            raise ValueError(f"cannot read the parameters in {scenario!r}: {error}") from error
        name = named.pop("name", scenario)
        kinds = {kind.short_name: kind for kind in self._pyspiel.registered_games()}
        if name not in kinds:
            nearest = difflib.get_close_matches(name, kinds, n=3)
            hint = f"; did you mean {' or '.join(nearest)}?" if nearest else ""
            raise ValueError(f"OpenSpiel has no game {name!r}{hint}")
        if twice := named.keys() & parameters.keys():
            raise ValueError(f"parameters given twice, in the name and as arguments: {', '.join(sorted(twice))}")
        known = kinds[name].parameter_specification
        merged = {**named, **parameters}
        if unknown := merged.keys() - known.keys():
            names = ", ".join(sorted(known)) or "none"
            raise ValueError(f"{name} has no parameter {', '.join(sorted(unknown))}; it has: {names}")
        # OpenSpiel refuses whole numbers where the default has a fraction.
        return name, {
            key: float(value) if isinstance(known[key], float) and type(value) is int else value
            for key, value in merged.items()
        }


def _require_pyspiel() -> Any:
    return require("pyspiel", extra="openspiel")


def _choose_observation(kind: pyspiel.GameType, wanted: ObservationKind | None) -> ObservationKind:
    provided = {
        "information_state": kind.provides_information_state_tensor,
        "observation": kind.provides_observation_tensor,
    }
    possible = [name for name, is_provided in provided.items() if is_provided]
    if wanted is None and possible:
        return possible[0]
    if wanted not in possible:
        raise ValueError(
            f"{kind.short_name} has no {wanted or 'information_state or observation'} tensor; "
            f"observation must be one of: {', '.join(possible) or 'none, it cannot be played here'}"
        )
    return wanted


def _draw(outcomes: list[tuple[int, float]], rng: np.random.Generator) -> int:
    """Draws one of the outcomes, given with their probabilities."""
    left = rng.random()
    for outcome, probability in outcomes:
        left -= probability
        if left < 0:
            return outcome
    # Rounding may leave a rest.
    return max(outcomes, key=lambda pair: pair[1])[0]
