"""What all wrappers share: one rule on arrays ``[E, ...]``, and how it is applied to either kind of environment.

A wrapper is written once, for numpy arrays with a leading axis of instances. Around a :class:`VectorEnv` these are the
memory of its tensors; around one instance they have a leading axis of length 1. Nothing here imports torch, so that
worker processes can wrap their instances.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Generic, TypeVar

import numpy as np

from marl_lightning.envs.base import Array, MultiAgentEnv, Observations, Step, VectorEnv, VectorStep
from marl_lightning.envs.spec import EnvSpec
from marl_lightning.envs.vector.layout import build_observations

Rows = slice | np.ndarray
"""Which instances are meant: :data:`ALL` or ``[E]`` bool."""

ALL = slice(None)

T = TypeVar("T")


@dataclass(slots=True)
class Batch:
    """A step of ``E`` instances, as a wrapper sees it.

    Attributes:
        source: what the environment inside gave.
        result: what the wrapper returns; arrays that it does not change are those of ``source``.
        alive: per group ``[E, A]`` bool, as before the step.
        stepped: ``[E]`` bool, instances that made a step. Without autoreset, those that ended earlier stand still.
        autoreset: whether instances that ended are at the start of their next episode already.
    """

    source: VectorStep[np.ndarray]
    result: VectorStep[np.ndarray]
    alive: dict[str, np.ndarray]
    stepped: np.ndarray
    autoreset: bool

    def ended(self) -> np.ndarray:
        """Returns ``[E]`` bool, the instances whose episode ended in this step."""
        return (self.result.terminated | self.result.truncated) & self.stepped


@dataclass(slots=True)
class OwnArrays(Generic[Array]):
    """The arrays of what a wrapper changes; empty dictionaries and ``None`` for what it does not."""

    observations: Observations[Array]
    final: Observations[Array]
    reward: dict[str, Array]
    truncated: Array | None
    info: dict[str, Array]

    def fill_observations(self, source: Observations[Array]) -> Observations[Array]:
        """Returns the own observations, together with what is unchanged in ``source``."""
        return _filled_up(self.observations, source)

    def fill_step(self, source: VectorStep[Array], observations: Observations[Array]) -> VectorStep[Array]:
        """Returns ``observations`` and the other own arrays, together with what is unchanged in ``source``."""
        return VectorStep(
            observations=observations,
            reward=self.reward or source.reward,
            terminated=source.terminated,
            truncated=source.truncated if self.truncated is None else self.truncated,
            final=_filled_up(self.final, source.final),
            info={**source.info, **self.info},
        )

    def map(self, function: Callable[[Array], T]) -> OwnArrays[T]:
        """Applies ``function`` to every array."""

        def dictionary(arrays: Mapping[str, Array]) -> dict[str, T]:
            return {name: function(array) for name, array in arrays.items()}

        def observations(own: Observations[Array]) -> Observations[T]:
            return Observations(
                observation=dictionary(own.observation),
                action_mask=dictionary(own.action_mask),
                alive=dictionary(own.alive),
                state=None if own.state is None else function(own.state),
            )

        return OwnArrays(
            observations=observations(self.observations),
            final=observations(self.final),
            reward=dictionary(self.reward),
            truncated=None if self.truncated is None else function(self.truncated),
            info=dictionary(self.info),
        )


class Wrapper:
    """Base of all wrappers: an environment that changes what another one returns.

    ``SomeWrapper(env, ...)`` is an environment of the same kind as ``env``, one instance or a vector environment: as
    ``pathlib.Path(...)`` is a ``PosixPath``, it is an object of a subclass of ``SomeWrapper`` that is a
    :class:`MultiAgentEnv` or a :class:`VectorEnv` as well. It takes ownership of ``env``: closing it closes both.

    Attributes that a wrapper does not have are those of the environment inside, except names with a leading
    underscore.

    A subclass hands the changed spec and the names of what it changes to this constructor, and overrides some of the
    methods that begin with ``_on`` or ``_memory``.

    Args:
        env: the environment to wrap.
        spec: description of what the wrapper returns.
        changes: what it changes: any of ``"observation"``, ``"state"``, ``"reward"`` and ``"truncated"``. It gets
            arrays of its own for these, and for new names in ``spec.info_keys``.

    Attributes:
        env: the environment inside.
        spec: description of what the wrapper returns. Its metadata names all wrappers, the innermost first.

    Raises:
        TypeError: if ``env`` is not an environment of this library.
    """

    env: MultiAgentEnv | VectorEnv
    spec: EnvSpec

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Without it, help() and inspect would show the signature of __new__.
        if "__init__" in vars(cls):
            cls.__signature__ = _signature_without_self(cls)

    def __new__(cls, env: MultiAgentEnv | VectorEnv, **arguments: Any) -> Wrapper:
        if not isinstance(env, MultiAgentEnv | VectorEnv):
            raise TypeError(
                f"{cls.__name__} wraps a MultiAgentEnv or a VectorEnv, got {type(env).__name__}; "
                "make_env and make_vector_env return such environments"
            )
        wrapper = object.__new__(_variant(cls, vector=isinstance(env, VectorEnv)))
        wrapper._arguments = arguments  # those that replicate and the recipe repeat
        return wrapper

    def __init__(self, env: MultiAgentEnv | VectorEnv, *, spec: EnvSpec, changes: Collection[str] = ()) -> None:
        self.env = env
        names = [env.spec.metadata["wrappers"]] if "wrappers" in env.spec.metadata else []
        metadata = {**spec.metadata, "wrappers": " + ".join([*names, type(self).__name__])}
        self.spec = replace(spec, metadata=metadata)
        self._own = self._own_arrays(frozenset(changes))
        # Who was alive before the step: an environment may overwrite what it returned.
        self._alive = {
            name: np.zeros((self._num_instances(), group.num_agents), np.bool_) for name, group in spec.groups.items()
        }

    # What a wrapper does ---------------------------------------------------------------------------------------------

    def _on_reset(self, source: Observations[np.ndarray], result: Observations[np.ndarray], rows: Rows) -> None:
        """Episodes begin in ``rows``: writes these rows of ``result`` and no others."""

    def _on_step(self, batch: Batch) -> None:
        """A step was made: writes what the wrapper changes into ``batch.result``.

        Rows of instances that did not step keep their values, and their reward is 0.
        """

    def _memory(self) -> dict[str, np.ndarray]:
        """Returns the arrays, by name, that the next steps depend on. They are saved, and written to when loading."""
        own = self._own.observations
        memory = {f"observation.{name}": array for name, array in own.observation.items()}
        if own.state is not None:
            memory["state"] = own.state
        return memory

    def _before_load(self) -> None:
        """The arrays of :meth:`_memory` are about to be overwritten."""

    def _follow(self, leader: Wrapper) -> None:
        """This wrapper was made by ``leader.replicate``, for evaluation say."""

    # Attributes ------------------------------------------------------------------------------------------------------

    @property
    def unwrapped(self) -> MultiAgentEnv | VectorEnv:
        """The environment inside all wrappers."""
        return self.env.unwrapped if isinstance(self.env, Wrapper) else self.env

    def has_wrapper_attr(self, name: str) -> bool:
        """Returns whether this wrapper or anything inside has the public attribute ``name``."""
        try:
            self.get_wrapper_attr(name)
        except AttributeError:
            return False
        return True

    def get_wrapper_attr(self, name: str) -> Any:
        """Returns the public attribute ``name`` of the outermost layer that has it; else ``AttributeError``."""
        if name.startswith("_"):
            raise AttributeError(f"{name!r} is private to a wrapper or an environment")
        return getattr(self, name)

    def set_wrapper_attr(self, name: str, value: Any) -> None:
        """Sets the public attribute ``name`` of the outermost layer that has it; else ``AttributeError``."""
        if name.startswith("_"):
            raise AttributeError(f"{name!r} is private to a wrapper or an environment")
        for layer in (*layers(self), self.unwrapped):
            if name in vars(layer) or hasattr(type(layer), name):
                setattr(layer, name, value)
                return
        raise AttributeError(f"neither a wrapper nor {type(self.unwrapped).__name__} has the attribute {name!r}")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "env":  # before env is set, looking into it would never end
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.env, name)

    # For both kinds of environments ----------------------------------------------------------------------------------

    def _own_arrays(self, changes: frozenset[str]) -> OwnArrays[np.ndarray]:
        spec, make, num_envs = self.spec, self._zeros, self._num_instances()
        groups = spec.groups.items()

        def own_observations() -> Observations:
            return Observations(
                observation={
                    name: make((num_envs, group.num_agents, *group.observation_shape), group.observation_space.dtype)
                    for name, group in (groups if "observation" in changes else ())
                },
                action_mask={},
                alive={},
                state=make((num_envs, spec.state_size), np.float32) if "state" in changes else None,
            )

        flags = "truncated" in changes
        return OwnArrays(
            observations=own_observations(),
            # Who ends episodes has to say where they ended.
            final=build_observations(spec, num_envs, make) if flags else own_observations(),
            reward={
                name: make((num_envs, group.num_agents), np.float32)
                for name, group in (groups if "reward" in changes else ())
            },
            truncated=make((num_envs,), np.bool_) if flags else None,
            info={key: make((num_envs,), np.float32) for key in spec.info_keys if key not in self.env.spec.info_keys},
        )

    def _load(self, saved: Mapping[str, Any]) -> None:
        self._before_load()
        memory = self._memory()
        if saved.keys() != memory.keys():
            raise ValueError(f"{type(self).__name__} keeps {sorted(memory)}, but the saved state has {sorted(saved)}")
        for name, array in memory.items():
            value = np.asarray(saved[name], array.dtype)
            if value.shape != array.shape:
                raise ValueError(
                    f"{name} of {type(self).__name__} has shape {array.shape}, but the saved one has {value.shape}"
                )
            array[...] = value


class WrappedEnv(MultiAgentEnv):
    """The part of a wrapper that makes it a :class:`MultiAgentEnv`."""

    _over = False

    def reset(self, *, seed: int | None = None) -> Observations[np.ndarray]:
        """See :meth:`MultiAgentEnv.reset`."""
        inside = self.env.reset(seed=seed)
        source = _lifted(inside)
        result = self._own.fill_observations(source)
        self._on_reset(source, result, ALL)
        self._over = False
        return self._returned(inside, result)

    def step(self, actions: Mapping[str, np.ndarray]) -> Step[np.ndarray]:
        """See :meth:`MultiAgentEnv.step`."""
        if self._over:  # a wrapper may end an episode that goes on inside
            raise RuntimeError("the episode is over: call reset before step")
        inside = self.env.step(actions)
        observations = _lifted(inside.observations)
        source = VectorStep(
            observations=observations,
            reward=_lifted_values(inside.reward),
            terminated=np.array([inside.terminated]),
            truncated=np.array([inside.truncated]),
            final=observations,
            info={key: np.array([value], np.float32) for key, value in inside.info.items()},
        )
        result = self._own.fill_step(source, self._own.fill_observations(observations))
        self._on_step(
            Batch(source=source, result=result, alive=self._alive, stepped=np.ones(1, np.bool_), autoreset=False)
        )
        terminated, truncated = bool(result.terminated[0]), bool(result.truncated[0])
        self._over = terminated or truncated
        return Step(
            observations=self._returned(inside.observations, result.observations),
            reward={name: reward[0].copy() for name, reward in result.reward.items()},
            terminated=terminated,
            truncated=truncated,
            info={**inside.info, **{key: float(value[0]) for key, value in self._own.info.items()}},
        )

    def render(self) -> np.ndarray:
        """See :meth:`MultiAgentEnv.render`."""
        return self.env.render()

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`MultiAgentEnv.state_dict`."""
        inside = self.env.state_dict()
        memory = {name: array.tolist() for name, array in {**self._memory(), **self._alive_memory()}.items()}
        return {"env": inside, "wrapper": memory, "over": self._over}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :meth:`MultiAgentEnv.load_state_dict`. Raises ``ValueError`` if the wrappers differ."""
        self.env.load_state_dict(state["env"])
        memory = dict(state["wrapper"])
        for name, array in self._alive_memory().items():
            array[...] = memory.pop(name)
        self._load(memory)
        self._over = state["over"]

    def close(self) -> None:
        """See :meth:`MultiAgentEnv.close`."""
        self.env.close()

    def _num_instances(self) -> int:
        return 1

    @staticmethod
    def _zeros(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return np.zeros(shape, dtype)

    def _alive_memory(self) -> dict[str, np.ndarray]:
        return {f"alive.{name}": array for name, array in self._alive.items()}

    def _returned(self, inside: Observations[np.ndarray], result: Observations[np.ndarray]) -> Observations[np.ndarray]:
        """Returns arrays for the caller, copies where they are the wrapper's own, and remembers who is alive."""
        for name, alive in inside.alive.items():
            self._alive[name][0] = alive
        own = self._own.observations
        return Observations(
            observation={name: array[0].copy() for name, array in own.observation.items()} or inside.observation,
            action_mask=inside.action_mask,
            alive=inside.alive,
            state=inside.state if own.state is None else result.state[0].copy(),
        )


def layers(env: MultiAgentEnv | VectorEnv) -> Iterator[Wrapper]:
    """Yields the wrappers around an environment, the outermost first."""
    while isinstance(env, Wrapper):
        yield env
        env = env.env


def autoresets(env: VectorEnv) -> bool:
    """Returns whether instances that ended are reset in the same step, as training needs it."""
    return getattr(env.unwrapped if isinstance(env, Wrapper) else env, "_autoreset", True)


def require_autoreset(env: VectorEnv, what: str) -> None:
    """Raises ``ValueError`` if instances that ended stand still, which ``what`` would take for more episodes."""
    if not autoresets(env):
        raise ValueError(f"{what} needs an environment that resets its instances: make it with autoreset=True")


def copy_rows(target: Observations[np.ndarray], source: Observations[np.ndarray], rows: np.ndarray) -> None:
    """Copies the rows ``[E]`` bool of every array."""
    for kind in ("observation", "action_mask", "alive"):
        arrays = getattr(source, kind)
        for name, array in getattr(target, kind).items():
            array[rows] = arrays[name][rows]
    target.state[rows] = source.state[rows]


@cache
def _variant(cls: type[Wrapper], *, vector: bool) -> type[Wrapper]:
    """Returns the subclass of a wrapper that is an environment of one kind."""
    if issubclass(cls, MultiAgentEnv | VectorEnv):
        return cls
    if vector:
        from marl_lightning.envs.wrappers.vector import WrappedVectorEnv as Kind
    else:
        Kind = WrappedEnv  # noqa: N806
    return type(cls.__name__, (cls, Kind), {"__module__": cls.__module__, "__doc__": cls.__doc__})


def _signature_without_self(cls: type) -> Any:
    signature = inspect.signature(cls.__init__)
    return signature.replace(parameters=list(signature.parameters.values())[1:], return_annotation=signature.empty)


def _filled_up(own: Observations[Array], source: Observations[Array]) -> Observations[Array]:
    return Observations(
        observation=own.observation or source.observation,
        action_mask=own.action_mask or source.action_mask,
        alive=own.alive or source.alive,
        state=source.state if own.state is None else own.state,
    )


def _lifted(observations: Observations[np.ndarray]) -> Observations[np.ndarray]:
    """Returns views with a leading axis of length 1."""
    return Observations(
        observation=_lifted_values(observations.observation),
        action_mask=_lifted_values(observations.action_mask),
        alive=_lifted_values(observations.alive),
        state=observations.state[None],
    )


def _lifted_values(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: array[None] for name, array in arrays.items()}
