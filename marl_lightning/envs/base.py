"""The two environment contracts: one instance in numpy, and many instances in tensors.

Both keep ``terminated`` and ``truncated`` apart, report the true successor of every step, and describe agents that
cannot act by ``alive=False`` together with exactly one legal action. Nothing here imports torch at run time, so that
worker processes of a vector environment stay light.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

import numpy as np

from marl_lightning.envs.spec import EnvSpec

if TYPE_CHECKING:
    from torch import Tensor

Array = TypeVar("Array", bound="np.ndarray | Tensor")


@dataclass(slots=True)
class Observations(Generic[Array]):
    """What is known at a decision point. Leading axes are ``[]`` for one instance, ``[E]`` for a vector environment.

    Attributes:
        observation: per group ``[..., A, *observation_shape]`` in the dtype of the observation space.
        action_mask: per discrete group ``[..., A, n]`` bool, True where legal; every row has a legal action, and an
            agent that is not alive has exactly one. Of actions in several parts, one part after another, and the same
            holds in every part.
        alive: per group ``[..., A]`` bool, whether the agent may act now.
        state: ``[..., S]`` float32 global state.
    """

    observation: dict[str, Array]
    action_mask: dict[str, Array]
    alive: dict[str, Array]
    state: Array


@dataclass(slots=True)
class Step(Generic[Array]):
    """Outcome of one step of one instance.

    Attributes:
        observations: the true successor, also when the episode ended.
        reward: per group ``[A]`` float32, one reward an agent; see ``EnvSpec.shared_reward`` for the dead.
        terminated: the game is over; nothing may be bootstrapped.
        truncated: the episode was cut (time limit); values are bootstrapped from ``observations``.
        info: one number per name in ``EnvSpec.info_keys``.
    """

    observations: Observations[Array]
    reward: dict[str, Array]
    terminated: bool
    truncated: bool
    info: dict[str, float]


@dataclass(slots=True)
class VectorStep(Generic[Array]):
    """Outcome of one step of all ``E`` instances. Instances that ended have been reset already.

    Attributes:
        observations: the next decision point; rows of ended instances belong to their new episode.
        reward: per group ``[E, A]`` float32, one reward an agent; see ``EnvSpec.shared_reward`` for the dead.
        terminated: ``[E]`` bool, the game is over; nothing may be bootstrapped.
        truncated: ``[E]`` bool, the episode was cut; never merged with ``terminated``. Both may be True only if the
            game ended on its very last step, and then termination counts.
        final: the true successor of the instances that ended in this step; other rows are unspecified, since their
            successor is ``observations``.
        info: per name in ``EnvSpec.info_keys`` ``[E]`` float32, as of the step that was made.
    """

    observations: Observations[Array]
    reward: dict[str, Array]
    terminated: Array
    truncated: Array
    final: Observations[Array]
    info: dict[str, Array]


class MultiAgentEnv(ABC):
    """One instance of a multi-agent game in numpy. To be subclassed by adapters; see :class:`VectorEnv` for many.

    A subclass sets ``spec`` and implements ``reset`` and ``step``. It does not reset itself: stepping after the end of
    an episode raises ``RuntimeError``. Arrays that it returns belong to the caller.
    """

    spec: EnvSpec

    @abstractmethod
    def reset(self, *, seed: int | None = None) -> Observations[np.ndarray]:
        """Starts an episode. With a seed, this and all later episodes are determined by it and the actions."""

    @abstractmethod
    def step(self, actions: Mapping[str, np.ndarray]) -> Step[np.ndarray]:
        """Makes one env step.

        Args:
            actions: per group ``[A]`` int64 for discrete actions, ``[A, P]`` int64 for those in several parts, or
                ``[A, d]`` float32 for continuous ones. Actions of agents that are not alive are ignored.

        Raises:
            ValueError: if an action is not legal.
            RuntimeError: if the episode is over.
        """

    def render(self) -> np.ndarray:
        """Returns the current picture as uint8 ``[H, W, 3]``; ``NotImplementedError`` if the game has none."""
        raise NotImplementedError(f"{self.spec.name} cannot be rendered")

    def state_dict(self) -> dict[str, Any]:
        """Returns all that ``load_state_dict`` needs to continue exactly; only if ``spec.can_checkpoint``."""
        raise NotImplementedError(f"{self.spec.name} cannot be saved (spec.can_checkpoint is False)")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what ``state_dict`` returned. The current observations are restored with it."""
        raise NotImplementedError(f"{self.spec.name} cannot be restored (spec.can_checkpoint is False)")

    def close(self) -> None:  # noqa: B027 - most games hold nothing
        """Frees what the game holds. May be called repeatedly."""


class VectorEnv(ABC):
    """``E`` instances of one game, stepped together, with same-step autoreset and partial resets.

    ``step`` and ``reset`` return the *same* objects with the *same* tensors every time, filled anew: copy what must
    outlive the next call. This lets a native game write its results without any allocation.

    Attributes:
        spec: description of one instance.
        num_envs: number of instances, ``E``.
        seed: instance ``i`` is seeded with ``seed + i``.
        recipe: arguments of ``make_vector_env`` that rebuild this environment (``name`` and keyword arguments), or
            ``None`` if it was built from objects that cannot be written to a checkpoint.
    """

    spec: EnvSpec
    num_envs: int
    seed: int
    recipe: dict[str, Any] | None = None

    @abstractmethod
    def reset(self, *, seed: int | None = None, mask: np.ndarray | None = None) -> Observations[Tensor]:
        """Starts new episodes.

        Args:
            seed: reseeds instance ``i`` with ``seed + i`` and sets ``self.seed``; ``None`` continues its own stream of
                episodes. Only without ``mask``.
            mask: ``[E]`` bool, the instances to reset; ``None`` resets all. Others are left untouched.

        Raises:
            ValueError: if the mask has a wrong shape or dtype, or is combined with a seed.
        """

    @abstractmethod
    def step(self, actions: Mapping[str, Tensor]) -> VectorStep[Tensor]:
        """Makes one vector step and resets the instances that ended.

        Args:
            actions: per group ``[E, A]`` or ``[E, A, P]`` int64, or ``[E, A, d]`` float32. Actions of agents that are
                not alive are ignored.

        Raises:
            RuntimeError: before the first ``reset``.
        """

    @abstractmethod
    def replicate(self, *, num_envs: int, seed: int) -> VectorEnv:
        """Returns a new, independent vector environment of the same game, for evaluation say."""

    def render(self, index: int) -> np.ndarray:
        """Returns the picture of instance ``index`` as uint8 ``[H, W, 3]``.

        After an episode ended, it shows the first picture of the next one.
        """
        raise NotImplementedError(f"{self.spec.name} cannot be rendered")

    def state_dict(self) -> dict[str, Any]:
        """Returns copies of all that ``load_state_dict`` needs to continue exactly; only if ``spec.can_checkpoint``.

        Holds only tensors, numbers, strings and containers of them, so that it can be loaded safely.
        """
        raise NotImplementedError(f"{self.spec.name} cannot be saved (spec.can_checkpoint is False)")

    def load_state_dict(self, state: Mapping[str, Any]) -> Observations[Tensor]:
        """Restores what ``state_dict`` returned and returns the restored decision point."""
        raise NotImplementedError(f"{self.spec.name} cannot be restored (spec.can_checkpoint is False)")

    def close(self) -> None:  # noqa: B027 - most games hold nothing
        """Frees what the games hold. May be called repeatedly."""

    def __reduce__(self) -> NoReturn:
        # A copy would look whole, but its arrays and tensors would no longer share memory: it would stand still.
        raise TypeError(
            "a vector environment can be neither copied nor pickled: use replicate(), and trainer.strategy='ddp' "
            "instead of strategies that spawn processes"
        )

    def __enter__(self) -> VectorEnv:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
