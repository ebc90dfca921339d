"""What every algorithm shares: counters, one way to optimise, buffered metrics, what a checkpoint says of itself."""

from __future__ import annotations

import functools
import inspect
import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.strategies import ParallelStrategy
from tensordict import TensorDict
from torch import Tensor, nn

from marl_lightning.data.schema import RecurrentState
from marl_lightning.envs.base import Observations
from marl_lightning.envs.spec import EnvSpec
from marl_lightning.envs.wrappers import load_statistics, statistics_state_dict


def with_defaults(init: Callable[..., None], **defaults: Any) -> Callable[..., None]:
    """Returns a constructor like ``init`` with other defaults, for members of a family that differ by nothing else."""
    signature = inspect.signature(init)
    parameters = [
        parameter.replace(default=defaults.get(name, parameter.default))
        for name, parameter in signature.parameters.items()
    ]

    @functools.wraps(init)
    def wrapper(self: Any, **arguments: Any) -> None:
        init(self, **(defaults | arguments))

    wrapper.__signature__ = signature.replace(parameters=parameters)
    return wrapper


class Policy(Protocol):
    """Acts; knows nothing of learning. What collectors and evaluations need of a module."""

    def initial_state(self, num_envs: int) -> RecurrentState:
        """Returns the recurrent state at the start of an episode, for ``num_envs`` instances."""

    def act(
        self,
        observations: Observations[Tensor],
        state: RecurrentState,
        is_first: Tensor,
        *,
        deterministic: bool = False,
        generator: torch.Generator | None = None,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], RecurrentState]:
        """Chooses an action for every agent.

        Args:
            observations: decision points of ``E`` instances, on the device of the policy.
            state: recurrent state of the instances, as returned by the last call.
            is_first: ``[E]`` bool, instances at the start of an episode; their state is zeroed first.
            deterministic: take the mode of the distribution instead of a sample.
            generator: source of randomness, on the device of the policy.

        Returns:
            Per group the actions (``[E, A]`` or, in several parts, ``[E, A, P]`` int64, or ``[E, A, d]`` float32), per
            group their log-probabilities
            ``[E, A]``, and the next recurrent state.
        """

    def env_actions(self, actions: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Maps the actions of ``act`` to those that the environment takes (squashing, clipping and scaling)."""


class StochasticPolicy(Policy, Protocol):
    """A policy for discrete actions that says how probable each is: what equilibrium computations need."""

    def action_probabilities(
        self,
        observations: Observations[Tensor],
        state: RecurrentState,
        is_first: Tensor,
        *,
        deterministic: bool = False,
    ) -> tuple[dict[str, Tensor], RecurrentState]:
        """Returns the distributions that ``act`` draws from, instead of drawing.

        Args:
            observations: as for ``act``.
            state: as for ``act``.
            is_first: as for ``act``.
            deterministic: all probability is on the action that ``act`` takes then.

        Returns:
            Per group ``[E, A, n]``, exactly 0 for illegal actions, and the next recurrent state.

        Raises:
            TypeError: if actions are not Discrete, or the policy has no such distributions.
        """


class MARLModule(LightningModule):
    """Base of all algorithms.

    Networks are built from the environment's spec: given to the constructor or found in ``trainer.datamodule``.

    Attributes:
        learns_from: the kind of data module that it needs.
        spec: the environment's spec, ``None`` until it is known.
        env_steps: env steps whose data has been learned from, summed over all processes: the only clock.
        updates: optimiser steps made.
    """

    learns_from: type = object

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.spec: EnvSpec | None = None
        self.env_steps = 0
        self.updates = 0
        self._metrics: dict[str, list[Tensor]] = {}

    def use_spec(self, spec: EnvSpec) -> None:
        """Builds the networks for an environment; called once, by the constructor or by ``setup``."""
        self.spec = spec
        self.build(spec)

    @abstractmethod
    def build(self, spec: EnvSpec) -> None:
        """Creates the networks for an environment."""

    @property
    @abstractmethod
    def policy(self) -> Policy:
        """The acting policy; it uses the parameters that are being learned."""

    # Lightning ------------------------------------------------------------------------------------------------------

    def configure_callbacks(self) -> list:
        """Adds no callbacks: this is the one hook before Lightning's own refusal, which does not name our settings."""
        if self.trainer.gradient_clip_val or self.trainer.accumulate_grad_batches != 1:
            raise ValueError(
                "trainer.gradient_clip_val and trainer.accumulate_grad_batches do not apply here: "
                "set algorithm.max_grad_norm and algorithm.num_minibatches instead"
            )
        if self.trainer.precision.startswith("16"):
            raise ValueError(
                f"trainer.precision={self.trainer.precision} scales gradients before they could be clipped: "
                "use bf16-mixed or 32-true"
            )
        return []

    def setup(self, stage: str) -> None:
        if stage == "fit" and not isinstance(self.trainer.datamodule, self.learns_from):
            raise TypeError(
                f"{type(self).__name__} learns from a {self.learns_from.__name__}, got "
                f"{type(self.trainer.datamodule).__name__}"
            )
        if self.spec is None:
            self.use_spec(self.trainer.datamodule.spec)
        elif stage == "fit" and (found := self.trainer.datamodule.spec).groups != self.spec.groups:
            raise ValueError(f"the module was built for {self.spec.name}, which does not fit the data of {found.name}")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        datamodule = getattr(self._trainer, "datamodule", None)
        checkpoint["marl_lightning"] = {
            "algorithm": f"{type(self).__module__}.{type(self).__qualname__}",
            "env": getattr(datamodule, "recipe", None),
            "env_steps": self.env_steps,
            "updates": self.updates,
            "statistics": statistics_state_dict(datamodule.env) if hasattr(datamodule, "env") else {},
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        own = checkpoint["marl_lightning"]
        self.env_steps, self.updates = own["env_steps"], own["updates"]
        datamodule = getattr(self._trainer, "datamodule", None)
        if hasattr(datamodule, "env"):
            load_statistics(datamodule.env, own.get("statistics", {}))

    def local_state_dict(self) -> dict[str, Any]:
        """Returns what this process alone knows, which ``state_dict`` leaves out: for exact resuming only."""
        return {}

    def load_local_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores :meth:`local_state_dict`, once the trainer and its data module are there."""

    # Learning -------------------------------------------------------------------------------------------------------

    def advance(self, env_steps: int) -> None:
        """Counts env steps that this process has made; every process makes the same number."""
        self.env_steps += env_steps * (self.trainer.world_size if self._trainer is not None else 1)

    def optimise(
        self,
        loss: Tensor,
        optimizer: torch.optim.Optimizer,
        parameters: Iterable[nn.Parameter],
        *,
        max_grad_norm: float | None = None,
    ) -> Tensor:
        """Makes one optimiser step: backward, mean of the gradients over processes, clip, step, count.

        The gradients are averaged here, in one flat reduction, and not by DistributedDataParallel: so several
        optimisers, parameters that a loss does not touch, and any number of backward passes a step all work.

        Args:
            loss: scalar.
            optimizer: steps ``parameters``.
            parameters: the parameters of this step; gradients of others are left alone.
            max_grad_norm: the gradient is scaled down to this norm, ``None`` leaves it.

        Returns:
            The norm of the gradient before clipping.
        """
        parameters = list(parameters)
        optimizer.zero_grad(set_to_none=True)
        strategy = self.trainer.strategy if self._trainer is not None else None
        if isinstance(strategy, ParallelStrategy) and strategy.world_size > 1:
            with strategy.block_backward_sync():
                self.manual_backward(loss)
            self._average_gradients(parameters, strategy)
        elif strategy is not None:
            self.manual_backward(loss)
        else:
            loss.backward()
        norm = self.clip_gradient(parameters, float("inf") if max_grad_norm is None else max_grad_norm)
        optimizer.step()
        self.updates += 1
        return norm

    def clip_gradient(self, parameters: list[nn.Parameter], limit: float) -> Tensor:
        """Scales the gradient of the parameters down to a norm of at most ``limit`` and returns the norm before."""
        return nn.utils.clip_grad_norm_(parameters, limit)

    @staticmethod
    def _average_gradients(parameters: list[nn.Parameter], strategy: ParallelStrategy) -> None:
        for parameter in parameters:
            if parameter.grad is None:  # every process must send the same shape
                parameter.grad = torch.zeros_like(parameter)
        flat = torch.cat([parameter.grad.flatten() for parameter in parameters])
        flat = strategy.reduce(flat, reduce_op="mean")
        offset = 0
        for parameter in parameters:
            parameter.grad.copy_(flat[offset : offset + parameter.numel()].view_as(parameter))
            offset += parameter.numel()

    def reduce_sum(self, tensor: Tensor) -> Tensor:
        """Returns the sum of ``tensor`` over all processes."""
        if self._trainer is None or self.trainer.world_size == 1:
            return tensor
        return self.trainer.strategy.reduce(tensor, reduce_op="sum")

    # Metrics --------------------------------------------------------------------------------------------------------

    def record(self, metrics: Mapping[str, Tensor]) -> None:
        """Remembers scalars of an update without looking at their values, which would wait for the device."""
        for name, value in metrics.items():
            self._metrics.setdefault(name, []).append(value.detach())

    def flush_metrics(self, extra: Mapping[str, float] | None = None) -> dict[str, float]:
        """Averages what was recorded, hands it to the loggers at x = env steps, and returns it.

        ``extra`` are numbers that are there already. All are put into ``trainer.callback_metrics`` too, where
        checkpoints and early stopping look.
        """
        means = {name: torch.stack(values).float().mean() for name, values in self._metrics.items()}
        self._metrics.clear()
        values = torch.stack(list(means.values())).tolist() if means else []
        metrics = dict(zip(means, values, strict=True)) | dict(extra or {})
        if self._trainer is not None:
            log_metrics(self.trainer, metrics, self.env_steps)
        return metrics


def check_finite(metrics: Mapping[str, float], *, env_steps: int, steps: TensorDict | None = None) -> None:
    """Raises ``FloatingPointError`` naming what is NaN or infinite; ``steps``, the data, are looked at first."""
    broken = [name for name, value in metrics.items() if not math.isfinite(value)]
    if not broken:
        return
    leaves = () if steps is None else steps.flatten_keys("/").items()
    data = [name for name, leaf in leaves if leaf.is_floating_point() and not leaf.isfinite().all()]
    cause = f"; the data holds NaN or inf in {', '.join(data)}" if data else ""
    raise FloatingPointError(
        f"{', '.join(broken)} became NaN or infinite at env step {env_steps}{cause}. "
        "Lower algorithm.learning_rate or algorithm.max_grad_norm, or check the environment; "
        "checkpoints written before this one are untouched."
    )


def log_metrics(trainer: Trainer, metrics: Mapping[str, float], env_steps: int) -> None:
    """Hands numbers to all loggers at x = env steps, and to ``trainer.callback_metrics``.

    Lightning's own ``self.log`` costs about as much as an update of a small network and counts optimiser steps.
    """
    trainer.callback_metrics.update({name: torch.tensor(value) for name, value in metrics.items()})
    if trainer.is_global_zero:
        for logger in trainer.loggers:
            logger.log_metrics(dict(metrics), step=env_steps)
