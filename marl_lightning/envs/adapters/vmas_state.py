"""What changes in a VMAS game: tensors, numbers, links between objects, and the generators that it draws from.

VMAS can begin an episode in all instances together or in a single one, but not in some of them, and it cannot save a
game. Both need all that changes, which scenarios keep wherever they like: as attributes of themselves, of the world, of
its entities, of sensors and controllers, in lists and dictionaries. The functions here look at every such place.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from vmas.simulator.environment import Environment

_Members = dict[Any, Any] | list[Any] | tuple[Any, ...]
_NUMBERS = bool | int | float | str
_PACKAGES = ("vmas.", "torch.distributions.")
_SCENARIO = ""  # name of the module of a scenario, which VMAS runs as a file
_PICTURES = "vmas.simulator.rendering"
_WINDOW = frozenset({"viewer", "text_lines", "headless", "visible_display"})  # of rendering: no part of the game
_INDEX = "#"
_COLOR = "_color"  # one for all instances; of shape [3], also where there are three of them


class _Copy(NamedTuple):
    value: Any  # the object itself
    rows: Tensor | None = None  # copy of a tensor with one row for each instance
    version: int = 0  # tells whether such a tensor was written to


class GameCopy:
    """What a game holds when this is made, of which a part can be put back later.

    Args:
        env: the game.
    """

    def __init__(self, env: Environment) -> None:
        self._env = env
        self._copies = {place: self._copy(place, value) for place, (_, _, value) in _places(env).items()}

    def put_back(self, rows: Tensor) -> None:
        """Puts back some instances, and what all instances share.

        Shared are the numbers and tensors that a scenario has once for all instances, and links to entities, such as
        the landmark that is the goal of an agent.

        Args:
            rows: ``[E]`` bool, which rows of the tensors that have one for each instance.
        """
        entities = _entity_paths(self._env)
        mixed: dict[tuple[int, int], Tensor] = {}  # a tensor that is kept in two places stays one
        for place, (members, key, now) in _places(self._env).items():
            old = self._copies.get(place)
            if old is None:
                continue
            if old.rows is not None:
                changed = now is not old.value or now._version != old.version
                if changed and isinstance(now, Tensor) and (now.shape, now.dtype) == (old.rows.shape, old.rows.dtype):
                    pair = (id(old.value), id(now))
                    if pair not in mixed:
                        mixed[pair] = torch.where(rows.view(-1, *[1] * (now.dim() - 1)), old.rows, now)
                    members[key] = mixed[pair]
            elif now is not old.value and (
                isinstance(old.value, _NUMBERS | Enum | Tensor) or id(old.value) in entities
            ):
                members[key] = old.value

    def _copy(self, place: str, value: Any) -> _Copy:
        has_rows = isinstance(value, Tensor) and value.dim() > 0 and len(value) == self._env.num_envs
        if not has_rows or place.endswith(f".{_COLOR}"):
            return _Copy(value=value)
        return _Copy(value=value, rows=value.clone(), version=value._version)


def save_game(env: Environment) -> dict[str, Any]:
    """Returns copies of all that :func:`load_game` needs, as tensors, numbers and strings in lists and dictionaries."""
    entities = _entity_paths(env)
    places = _places(env)
    tensors = {id(value): value for _, _, value in places.values() if isinstance(value, Tensor)}
    index = {key: position for position, key in enumerate(tensors)}
    state: dict[str, Any] = {"tensor": {}, "number": {}, "entity": {}}
    for place, (_, _, value) in places.items():
        if isinstance(value, Tensor):
            state["tensor"][place] = index[id(value)]
        elif value is None or type(value) in (bool, int, float, str):
            state["number"][place] = value
        elif id(value) in entities:
            state["entity"][place] = entities[id(value)]
    return {**state, "tensors": [tensor.to("cpu", copy=True) for tensor in tensors.values()]}


def load_game(env: Environment, state: Mapping[str, Any]) -> None:
    """Restores what :func:`save_game` returned from a game that was made with equal arguments."""
    tensors = [tensor.to(env.device, copy=True) for tensor in state["tensors"]]
    entities = dict(zip(_entity_paths(env).values(), [*env.world.agents, *env.world.landmarks], strict=True))
    parents = dict(_containers(env))
    names = {path: dict(_named_keys(members)) for path, members in parents.items()}
    for kind, look_up in (("tensor", tensors.__getitem__), ("number", lambda value: value), ("entity", entities.get)):
        for place, value in state[kind].items():
            path, _, name = place.rpartition(".")
            if path not in parents:
                raise ValueError(f"the state does not fit: this game has no {path}")
            # Members may be missing that the game adds while it is played. Those with a name are added here; those of a
            # dictionary whose keys are objects are caches of the step in which they were made.
            if name in names[path] or not name.startswith(_INDEX):
                parents[path][names[path].get(name, name)] = look_up(value)


def _places(env: Environment) -> dict[str, tuple[_Members, Any, Any]]:
    """Returns for the path of every member the container that it is in, its key there, and the member itself."""
    return {
        f"{path}.{name}": (members, key, members[key])
        for path, members in _containers(env)
        if not isinstance(members, tuple)  # cannot be written to
        for name, key in _named_keys(members)
        if name not in _WINDOW
    }


def _containers(env: Environment) -> Iterator[tuple[str, _Members]]:
    """Yields the path and the members of every object, list and dictionary of the game, each once.

    Entities come first, so that their paths do not depend on the links to them.
    """
    queue = deque([("agents", env.world.agents), ("landmarks", env.world.landmarks), ("env", env)])
    seen = {id(value) for _, value in queue}
    while queue:
        path, value = queue.popleft()
        members = value if isinstance(value, dict | list | tuple) else vars(value)
        yield path, members
        for name, key in _named_keys(members):
            member = members[key]
            if _has_members(type(member)) and id(member) not in seen:
                seen.add(id(member))
                queue.append((f"{path}.{name}", member))


def _named_keys(members: _Members) -> list[tuple[str, Any]]:
    """Returns what keys are called in paths, and the keys; those that are no strings are called by their position."""
    if not isinstance(members, dict):
        return [(str(index), index) for index in range(len(members))]
    return [(key if type(key) is str else f"{_INDEX}{index}", key) for index, key in enumerate(members)]


@cache
def _has_members(kind: type) -> bool:
    """Whether to look into objects of this type: containers and all that belongs to the game."""
    if issubclass(kind, dict | list | tuple):
        return True
    module = kind.__module__
    of_the_game = module == _SCENARIO or (module.startswith(_PACKAGES) and module != _PICTURES)
    return of_the_game and kind.__dictoffset__ != 0 and not issubclass(kind, Enum | type)


def _entity_paths(env: Environment) -> dict[int, str]:
    """Returns the path of every entity by its ``id``, agents first."""
    lists = {"agents": env.world.agents, "landmarks": env.world.landmarks}
    return {id(entity): f"{name}.{index}" for name, entities in lists.items() for index, entity in enumerate(entities)}


class RandomStreams:
    """The states of all generators that a game draws from: torch, with the one of its device, numpy and Python.

    VMAS keeps a single set of them for all games of a process, does not restore the process's own after an error, and
    forgets those of GPUs. Here a game has its own, and those of the process stay as they are.

    Args:
        device: where the game draws.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._states: tuple[Any, ...] = ()
        self.seed(0)

    def seed(self, seed: int) -> None:
        """Seeds all of them; on the CPU, the game then draws what ``vmas.make_env(seed=seed)`` would."""
        self._states = (
            torch.Generator().manual_seed(seed).get_state(),
            np.random.RandomState(seed % 2**32).get_state(),
            random.Random(seed).getstate(),
            torch.Generator(self._device).manual_seed(seed).get_state() if self._device.type == "cuda" else None,
        )

    @contextmanager
    def installed(self) -> Iterator[None]:
        """While it lasts, everything draws from these generators, VMAS too. Cannot be nested."""
        from vmas.simulator.environment import Environment

        of_vmas = list(Environment.vmas_random_state)
        of_process = self._read_generators()
        Environment.vmas_random_state[:] = self._states[:3]
        self._write_generators(self._states)
        try:
            yield
        finally:
            self._states = self._read_generators()
            self._write_generators(of_process)
            Environment.vmas_random_state[:] = of_vmas

    def _read_generators(self) -> tuple[Any, ...]:
        of_device = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
        return torch.get_rng_state(), np.random.get_state(), random.getstate(), of_device  # noqa: NPY002

    def _write_generators(self, states: tuple[Any, ...]) -> None:
        of_torch, of_numpy, of_python, of_device = states
        torch.set_rng_state(of_torch)
        np.random.set_state(of_numpy)  # noqa: NPY002
        random.setstate(of_python)
        if of_device is not None:
            torch.cuda.set_rng_state(of_device, self._device)

    def state_dict(self) -> dict[str, Any]:
        """Returns the states as tensors and numbers."""
        of_torch, (_, keys, *of_numpy), (version, words, gauss), of_device = self._states
        return {
            "torch": of_torch.clone(),
            "numpy": [torch.from_numpy(keys.astype(np.int64)), *of_numpy],
            "python": [version, torch.tensor(words), gauss],
            "device": None if of_device is None else of_device.clone(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned; on another device, its own generator is left as it is."""
        keys, *of_numpy = state["numpy"]
        version, words, gauss = state["python"]
        of_device = self._states[3]
        if of_device is not None and state["device"] is not None:
            of_device = state["device"].clone()
        self._states = (
            state["torch"].clone(),
            ("MT19937", keys.numpy().astype(np.uint32), *of_numpy),
            (version, tuple(words.tolist()), gauss),
            of_device,
        )
