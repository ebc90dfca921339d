"""What can be chosen in the robotic warehouse beside the name of the game, checked once."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

REWARD_TYPES = ("individual", "global", "two_stage")
"""Who is rewarded for what."""

OBSERVATION_TYPES = ("flattened", "image")
"""Kinds of observations. The package also has dictionaries, which no policy here can use."""

IMAGE_LAYERS = ("shelves", "requests", "agents", "agent_direction", "agent_load", "goals", "accessible")
"""Layers of images, in the order of the package's numbers."""


@dataclass(frozen=True, kw_only=True)
class RWAREOptions:
    """Everything that can be chosen beside the scenario. Names, meanings and defaults are those of rware.

    Args:
        sensor_range: how many cells far an agent sees in each direction.
        msg_bits: bits that every agent tells in every step to those that see it.
        request_queue_size: how many shelves are requested at a time; ``None`` leaves it to the scenario.
        max_inactivity_steps: env steps without a delivery after which an episode terminates; ``None`` or 0 for never.
        max_steps: env steps after which an episode is truncated; ``None`` or 0 for never.
        reward_type: ``"individual"`` gives 1 to the agent that delivers a requested shelf, ``"global"`` gives it to all
            agents, ``"two_stage"`` gives 0.5 for the delivery and 0.5 when the agent has put the shelf back.
        layout: a warehouse of your own in place of that of the scenario: a line for every row, ``x`` for shelves,
            ``.`` for ways and ``g`` for goals.
        observation_type: ``"flattened"`` or ``"image"``.
        image_observation_layers: some of :data:`IMAGE_LAYERS`.
        image_observation_directional: images are turned such that agents look up.
        normalised_coordinates: coordinates are divided such that they reach from 0 to 1.

    Raises:
        ValueError: if a number is out of range or a word is unknown.
    """

    sensor_range: int = 1
    msg_bits: int = 0
    request_queue_size: int | None = None
    max_inactivity_steps: int | None = None
    max_steps: int | None = 500
    reward_type: str = "individual"
    layout: str | None = None
    observation_type: str = "flattened"
    image_observation_layers: Sequence[str] = ("shelves", "requests", "agents", "goals", "accessible")
    image_observation_directional: bool = True
    normalised_coordinates: bool = False

    def __post_init__(self) -> None:
        # Sequences from configuration files become tuples, which can be compared and saved.
        object.__setattr__(self, "image_observation_layers", tuple(self.image_observation_layers))
        for name, least in (
            ("sensor_range", 1),
            ("msg_bits", 0),
            ("request_queue_size", 0),
            ("max_inactivity_steps", 0),
            ("max_steps", 0),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        for name in ("max_inactivity_steps", "max_steps"):
            object.__setattr__(self, name, getattr(self, name) or None)
        _check_word("reward_type", self.reward_type, REWARD_TYPES)
        _check_word("observation_type", self.observation_type, OBSERVATION_TYPES)
        if not self.image_observation_layers:
            raise ValueError("image_observation_layers must not be empty")
        for layer in self.image_observation_layers:
            _check_word("image_observation_layers", layer, IMAGE_LAYERS)


def read_options(options: dict[str, Any]) -> RWAREOptions:
    """Returns the options of these keyword arguments.

    Raises:
        TypeError: if one is unknown; names the nearest ones.
        ValueError: see :class:`RWAREOptions`.
    """
    known = [field.name for field in dataclasses.fields(RWAREOptions)]
    for name in options:
        if name not in known:
            raise TypeError(f"unknown option {name!r}{_hint(name, known)}; options are {', '.join(known)}")
    return RWAREOptions(**options)


def _check_word(option: str, word: str, words: Sequence[str]) -> None:
    if word not in words:
        raise ValueError(f"{option}: {word!r} is not one of {', '.join(words)}{_hint(str(word), words)}")


def _hint(word: str, words: Iterable[str]) -> str:
    nearest = difflib.get_close_matches(word, words, n=1)
    return f" (did you mean {nearest[0]!r}?)" if nearest else ""
