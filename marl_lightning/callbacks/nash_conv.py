"""NashConv during training: how far the policy is from equilibrium."""

from __future__ import annotations

import dataclasses
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from torch import distributed

from marl_lightning.algorithms.base import MARLModule, Policy, log_metrics
from marl_lightning.callbacks.checkpoint import EnvStepCheckpoint
from marl_lightning.callbacks.interrupt import SignalTrap
from marl_lightning.callbacks.sidecar import rng_state, set_rng_state
from marl_lightning.clock import EnvStepInterval
from marl_lightning.envs.base import VectorEnv
from marl_lightning.games import (
    MarkovEvaluator,
    MatrixEvaluator,
    NashConvResult,
    OpenSpielEvaluator,
    nash_conv,
)
from marl_lightning.games.evaluate import Evaluator, EvaluatorName, choose_evaluator
from marl_lightning.games.profiles import Mode
from marl_lightning.nn.mode import evaluation_mode
from marl_lightning.validation import NonNegativeInt, PositiveInt, checked

log = logging.getLogger(__name__)

PolicyName = Literal["current", "average"]
"""Which policy of a module is evaluated."""

_EXACT = (MatrixEvaluator, OpenSpielEvaluator, MarkovEvaluator)
_WAIT = timedelta(days=30)  # a search may take longer than processes usually wait for each other
_MOMENT = 2.0  # seconds after which somebody who watches wants to know what takes so long


class NashConvCallback(Callback):
    """Computes NashConv of the policy now and then (:func:`marl_lightning.games.nash_conv`) and logs it.

    ====================================  ==============================================================================
    name                                  meaning
    ====================================  ==============================================================================
    ``nashconv/value``                    sum of the gains, 0 at a Nash equilibrium
    ``nashconv/ci_low``, ``.../ci_high``  where it may lie, the value itself twice if it is exact
    ``nashconv/normalised``               the value divided by the range of payoffs, where that is known
    ``nashconv/gain/<agent>``             what the agent gains by its best response
    ``nashconv/on_policy/<agent>``        its payoff if nobody deviates
    ``nashconv/best_response/<agent>``    its payoff if it alone deviates
    ``nashconv/is_exact``                 1 if computed; 0 if estimated from below, by responses that were learned
    ``nashconv/env_steps``                env steps of the search, which are none of the training
    ``nashconv/seconds``                  what it took
    ====================================  ==============================================================================

    These are in ``trainer.callback_metrics`` too, for ``EnvStepCheckpoint(monitor="nashconv/value", mode="min")`` and,
    later in the list of callbacks, ``EarlyStopping("nashconv/value", strict=False)``, whose patience counts rollouts.

    It leaves no trace: a run with and without it ends with the same weights, bit for bit. Of several processes the
    first computes while the others wait; all know the result, or raise if there is none. Whether the policy and the
    game can be evaluated exactly is tried once before training starts, which also remembers the tree of the game.

    A signal ends an evaluation at once. There is no result then, and the training stops as at any other moment: with
    :class:`~marl_lightning.callbacks.EnvStepCheckpoint`, after saving.

    Where a game has no equilibrium in pure strategies, such as rock, paper, scissors or poker, ``mode="greedy"`` never
    gets to 0, whatever was learned: a greedy profile is pure. With ``"stochastic"`` value-based policies are evaluated
    as they explore at this moment.

    Args:
        every_env_steps: interval in env steps; ``None`` evaluates at the ends only, as the following say.
        at_start: evaluate before the first rollout of a new run too.
        at_end: evaluate the final policy too.
        evaluator: a name, or an object that is used for all evaluations, see :func:`marl_lightning.games.nash_conv`.
        policy: ``"current"``, the one that acts; or ``"average"``, that of a method that learns one, such as NFSP.
        mode: ``"stochastic"`` or ``"greedy"``.
        seed: of the search of an evaluator that is given by name, and of the environment that an evaluator plays in,
            apart from those of training.
        directory: where learned best responses are written as ``<env_steps>.pt``; by default ``nash_conv`` in the
            folder of the logger.

    Attributes:
        result: of the last evaluation, ``None`` before the first. Only the first process has its ``snapshots``.
        seconds: wall time spent so far.

    Raises:
        ValueError: if it would never evaluate; or when training starts, if the game cannot be evaluated in this way or
            there is no such policy.
        TypeError: when training starts, if the policy cannot state the probabilities of its actions.
    """

    @checked
    def __init__(
        self,
        *,
        every_env_steps: PositiveInt | None = None,
        at_start: bool = False,
        at_end: bool = True,
        evaluator: EvaluatorName | Evaluator = "auto",
        policy: PolicyName = "current",
        mode: Mode = "stochastic",
        seed: NonNegativeInt = 12345,
        directory: str | Path | None = None,
    ):
        if every_env_steps is None and not (at_start or at_end):
            raise ValueError("there would be no evaluation: set every_env_steps, at_start or at_end")
        self.at_start = at_start
        self.at_end = at_end
        self.evaluator = evaluator
        self.policy = policy
        self.mode = mode
        self.seed = seed
        self.directory = directory
        self.result: NashConvResult | None = None
        self.seconds = 0.0
        self._interval = None if every_env_steps is None else EnvStepInterval(every_env_steps)
        self._evaluated_at: int | None = None
        self._evaluator: Evaluator | None = None
        self._folder = Path()
        self._group: distributed.ProcessGroup | None = None

    # Lightning ------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: MARLModule, stage: str) -> None:
        log_dir = trainer.log_dir  # a collective: all processes have to ask
        self._folder = Path(self.directory or Path(log_dir or trainer.default_root_dir) / "nash_conv")
        if stage == "fit" and trainer.world_size > 1:
            self._group = distributed.new_group(backend="gloo", timeout=_WAIT)

    def on_fit_start(self, trainer: Trainer, pl_module: MARLModule) -> None:
        self._on_first_process(trainer, lambda: self._prepare(trainer, pl_module))

    def on_train_start(self, trainer: Trainer, pl_module: MARLModule) -> None:
        if self.at_start and pl_module.env_steps == 0:
            self._evaluate(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: MARLModule) -> None:
        if self._interval is not None and self._interval.crossed(pl_module.env_steps):
            self._evaluate(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: MARLModule) -> None:
        if self.at_end and self._evaluated_at != pl_module.env_steps:
            self._evaluate(trainer, pl_module)

    def teardown(self, trainer: Trainer, pl_module: MARLModule, stage: str) -> None:
        if self._group is not None:
            distributed.destroy_process_group(self._group)
            self._group = None

    def state_dict(self) -> dict[str, Any]:
        interval = None if self._interval is None else self._interval.state_dict()
        return {"interval": interval, "evaluated_at": self._evaluated_at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._interval is not None and state["interval"] is not None:
            self._interval.load_state_dict(state["interval"])
        self._evaluated_at = state["evaluated_at"]

    # Evaluation -----------------------------------------------------------------------------------------------------

    def check(self, module: MARLModule, env: VectorEnv) -> Evaluator:
        """Returns what evaluates; raises, without evaluating, if the game or the algorithm does not fit.

        Args:
            module: its networks have been built.
            env: of the training.
        """
        policy = choose_policy(module, self.policy)
        evaluator = choose_evaluator(self.evaluator, env) if isinstance(self.evaluator, str) else self.evaluator
        if hasattr(evaluator, "check"):
            evaluator.check(policy, env)
        return evaluator

    def _prepare(self, trainer: Trainer, pl_module: MARLModule) -> None:
        """Raises whatever can be known to be wrong without a search."""
        env = trainer.datamodule.env
        self._evaluator = self.check(pl_module, env)
        if isinstance(self._evaluator, _EXACT):
            with _no_trace(trainer, pl_module):
                nash_conv(choose_policy(pl_module, self.policy), env, self._evaluator, mode=self.mode)
        elif isinstance(self.evaluator, str):  # it learns, and was made here
            self._evaluator.seed = self.seed
            self._evaluator.progress = trainer.progress_bar_callback is not None

    def _evaluate(self, trainer: Trainer, pl_module: MARLModule) -> None:
        start = time.perf_counter()
        stopper = _Stopper()
        result = self._on_first_process(trainer, lambda: self._compute(trainer, pl_module, stopper))
        if result is not None:
            self.result = result
            self._evaluated_at = pl_module.env_steps
            log_metrics(trainer, metrics(result), pl_module.env_steps)
        self.seconds += time.perf_counter() - start
        if stopper.received:  # for whom it was meant, now that no other process waits and the handlers are as before
            signal.raise_signal(stopper.received)

    def _compute(self, trainer: Trainer, pl_module: MARLModule, stopper: _Stopper) -> NashConvResult | None:
        """Returns the result, ``None`` if a signal came before or meanwhile."""
        if _is_stopping(trainer):
            return None
        policy = choose_policy(pl_module, self.policy)
        doing = f"NashConv of env step {pl_module.env_steps:,} by {type(self._evaluator).__name__}"
        told = _told(trainer, f"{doing} takes a while")
        with _no_trace(trainer, pl_module), self._game(trainer) as game, told:
            try:
                stopper.install()
                result = nash_conv(policy, game, self._evaluator, mode=self.mode)
            except _Stopped:
                log.warning("%s was interrupted: it has no result", doing)
                return None
            finally:
                stopper.remove()
        if result.snapshots:
            self._write(result, pl_module.env_steps)
        return result

    @contextmanager
    def _game(self, trainer: Trainer) -> Iterator[VectorEnv]:
        """The environment of the training for who only looks at it, or another one to play in."""
        env = trainer.datamodule.env
        if isinstance(self._evaluator, _EXACT):
            yield env
            return
        with env.replicate(num_envs=env.num_envs, seed=self.seed) as replica:
            yield replica

    def _on_first_process(self, trainer: Trainer, task: Callable[[], NashConvResult | None]) -> NashConvResult | None:
        """Returns what a task returns in the first process, and raises if it does, in all of them. A collective."""
        if self._group is None:
            return task()
        result, failure = None, None
        if trainer.is_global_zero:
            try:
                result = task()
            except BaseException as error:
                failure = error
        news = [
            None if result is None else dataclasses.replace(result, snapshots={}),
            None if failure is None else f"{type(failure).__name__}: {failure}",
        ]
        distributed.broadcast_object_list(news, src=0, group=self._group)
        if failure is not None:
            raise failure
        if news[1] is not None:
            raise RuntimeError(f"NashConv failed in the first process: {news[1]}")
        return result if trainer.is_global_zero else news[0]

    def _write(self, result: NashConvResult, env_steps: int) -> None:
        """Writes the responses that were found, so that a file is there completely or not at all."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{env_steps}.pt"
        partial = path.with_name(path.name + ".partial")
        torch.save({"env_steps": env_steps, "result": result.as_dict(), "snapshots": dict(result.snapshots)}, partial)
        partial.replace(path)


def choose_policy(module: MARLModule, name: PolicyName) -> Policy:
    """Returns the policy of a module that is to be evaluated.

    Args:
        module: its networks have been built.
        name: ``"current"`` or ``"average"``.

    Raises:
        ValueError: if the method has no average policy.
    """
    if name == "current":
        return module.policy
    if not hasattr(module, "average_policy"):
        raise ValueError(
            f"{type(module).__name__} has no average policy: set policy='current', or train with a method that learns "
            "one, such as NFSP"
        )
    return module.average_policy


def metrics(result: NashConvResult) -> dict[str, float]:
    """Returns the numbers to log, see :class:`NashConvCallback`."""
    low, high = result.interval
    numbers = {
        "value": result.value,
        "ci_low": low,
        "ci_high": high,
        "is_exact": float(result.bound == "exact"),
        "env_steps": float(result.env_steps),
        "seconds": result.wall_seconds,
    }
    if result.normalised is not None:
        numbers["normalised"] = result.normalised
    for name, values in (
        ("gain", result.gains),
        ("on_policy", result.on_policy),
        ("best_response", result.best_response_values),
    ):
        numbers |= {f"{name}/{agent}": value for agent, value in values.items()}
    return {f"nashconv/{name}": value for name, value in numbers.items()}


class _Stopped(BaseException):
    """Ends an evaluation at a signal. Nobody on the way takes it for an error, or for a Ctrl-C of his own."""


class _Stopper(SignalTrap):
    """Ends what is going on at the first signal; at a second Ctrl-C also what is done to end it."""

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if not self.received:
            self.received = signum
            raise _Stopped
        if signum == signal.SIGINT:
            raise KeyboardInterrupt


def _is_stopping(trainer: Trainer) -> bool:
    """Whether the training is about to be stopped by a signal that has come already."""
    return trainer.received_sigterm or any(
        isinstance(callback, EnvStepCheckpoint) and callback.is_stopping for callback in trainer.checkpoint_callbacks
    )


@contextmanager
def _told(trainer: Trainer, text: str) -> Iterator[None]:
    """Prints a line above the progress bar if what goes on takes longer than a moment."""
    bar = trainer.progress_bar_callback
    if bar is None:
        yield
        return
    timer = threading.Timer(_MOMENT, bar.print, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def _no_trace(trainer: Trainer, pl_module: MARLModule) -> Iterator[None]:
    """Puts back modes and global random states, also after errors. Evaluators do so themselves if they are careful."""
    device = trainer.strategy.root_device
    state = rng_state(device)
    try:
        with evaluation_mode(pl_module):
            yield
    finally:
        set_rng_state(state, device)
