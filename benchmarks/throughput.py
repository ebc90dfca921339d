"""Throughput on this machine: simulator alone, acting alone, full training, and where the time of training goes.

Run ``python benchmarks/throughput.py [--json FILE] [--only NAME ...]``. All figures of one run belong together: quote
their ratios, since machines differ and are noisy. Simulator rates use one thread; training uses ``--threads``.

A case is one entry of :data:`SIMULATORS` or :data:`TRAININGS`.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from marl_lightning.runtime import bound_spinning, git_revision, keep_freed_memory, quiet_lightning, versions

bound_spinning()  # counts when torch is loaded, so it comes before all that imports it

import numpy as np
import torch
from lightning import LightningDataModule, Trainer, seed_everything
from numba import njit

from marl_lightning.algorithms import IPPO, IQL, MAPPO, QMIX, MARLModule
from marl_lightning.callbacks import EvaluationCallback, StopAtEnvSteps
from marl_lightning.data import ReplayDataModule, RolloutDataModule
from marl_lightning.data.collector import RolloutCollector
from marl_lightning.envs import VectorEnv, make_vector_env


@dataclass(frozen=True, kw_only=True)
class Simulator:
    """Random legal actions in an environment, with observations, state, masks and autoreset.

    Args:
        env: registered name.
        num_envs: number of instances.
        target: env steps per second on one core that are asked for.
        kwargs: of the environment.
    """

    env: str
    num_envs: int = 64
    target: float | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Training:
    """A whole training: collecting, updating, evaluating.

    Args:
        env: registered name.
        num_envs: number of instances.
        rollout_length: vector steps a rollout.
        make: builds the algorithm.
        rollouts: how many are timed, after those of the warm-up.
        warm_up: rollouts before them.
        replay: arguments of a :class:`ReplayDataModule` for methods that learn from one.
        target: env steps per second that are asked for.
    """

    env: str
    num_envs: int
    make: Callable[[], MARLModule]
    rollout_length: int = 128
    rollouts: int = 12
    warm_up: int = 2
    replay: dict[str, Any] | None = None
    target: float | None = None

    def make_data(self, env: VectorEnv) -> LightningDataModule:
        """Builds the data module."""
        if self.replay is None:
            return RolloutDataModule(env=env, rollout_length=self.rollout_length)
        return ReplayDataModule(env=env, rollout_length=self.rollout_length, **self.replay)


def feed_forward() -> MARLModule:
    """IPPO with two hidden layers of 64 tanh units in actor and critic."""
    return IPPO(hidden_sizes=(64, 64), activation="tanh", layer_norm=False, num_epochs=4, num_minibatches=4)


def recurrent(critic: str) -> MARLModule:
    """MAPPO with a layer and a GRU of 128 units in actor and critic, trained on chunks of 16 steps."""
    return MAPPO(
        hidden_sizes=(128,),
        activation="relu",
        layer_norm=False,
        recurrent=True,
        chunk_length=16,
        num_epochs=4,
        num_minibatches=4,
        critic=critic,
    )


def qmix() -> MARLModule:
    """QMIX as EPyMARL has it for foraging: layers of 128, mixing network of 32, hypernetworks of 64."""
    return QMIX(hidden_sizes=(128, 128), embedding_size=32, hypernet_size=64, learning_rate=3e-4)


def independent() -> MARLModule:
    """Recurrent IQL with a network of 64 units for each agent, as ``make_train`` has it by default."""
    return IQL(
        hidden_sizes=(64,),
        recurrent=True,
        share_parameters=False,
        team_reward=None,
        huber_delta=1.0,
        target_update_interval=40,
    )


ONE_THREAD = {"num_threads": 1}

SIMULATORS = {
    "smac_3m": Simulator(env="smac/3m", target=200_000, kwargs=ONE_THREAD),
    "smac_2s3z": Simulator(env="smac/2s3z", target=90_000, kwargs=ONE_THREAD),
    "smac_27m_vs_30m": Simulator(env="smac/27m_vs_30m", target=6_000, kwargs=ONE_THREAD),
    "mpe_simple_spread": Simulator(env="mpe/simple_spread_v3", target=1_500_000, kwargs=ONE_THREAD),
    "lbf_8x8-2p-2f": Simulator(env="lbf/Foraging-8x8-2p-2f-coop-v3", target=1_000_000, kwargs=ONE_THREAD),
    "matrix_climbing": Simulator(env="matrix/climbing"),
}

TRAININGS = {
    # One value an env step; with "agent_state" the critic is computed once an agent, as most libraries do it.
    "mappo_gru_3m": Training(env="smac/3m", num_envs=32, make=lambda: recurrent("state"), target=2_400),
    "mappo_gru_3m_agent_critic": Training(env="smac/3m", num_envs=32, make=lambda: recurrent("agent_state")),
    # Three agents, 18 observations, 5 actions.
    "ippo_ff_16": Training(env="mpe/simple_spread_v3", num_envs=16, make=feed_forward, rollouts=40, target=10_000),
    "ippo_ff_64": Training(env="mpe/simple_spread_v3", num_envs=64, make=feed_forward, rollouts=20, target=18_000),
    # One update of 32 episodes for every 50 env steps, which is an episode as long as nothing is learned.
    "qmix_lbf": Training(
        env="lbf/Foraging-8x8-2p-2f-coop-v3",
        num_envs=8,
        make=qmix,
        rollout_length=50,
        rollouts=75,
        warm_up=5,
        replay={"sample": "episodes", "batch_size": 32, "capacity": 250_000, "start_training": 1_600}
        | {"training_frequency": 50, "updates_per_batch": 8},
        target=1_500,
    ),
    # Four updates of 32 sequences of 25 steps, after 16 that rebuild the memory, for every rollout of 256 env steps.
    "iql_gru_unshared": Training(
        env="mpe/simple_spread_v3",
        num_envs=8,
        make=independent,
        rollout_length=32,
        rollouts=60,
        warm_up=8,
        replay={"sample": "sequences", "sequence_length": 25, "batch_size": 32, "capacity": 50_000}
        | {"start_training": 1_024, "training_frequency": 256, "num_updates": 4, "updates_per_batch": 4},
    ),
}


class Stopwatch:
    """Wall seconds by name; times spent in a nested span count for the inner one only."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self._since = time.perf_counter()

    def _switch(self) -> None:
        now = time.perf_counter()
        self.seconds[self._open[-1] if self._open else "other"] += now - self._since
        self._since = now

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        self._switch()
        self._open.append(name)
        try:
            yield
        finally:
            self._switch()
            self._open.pop()

    def reset(self) -> None:
        self._switch()
        self.seconds.clear()

    def wrap(self, owner: Any, method: str, name: str) -> None:
        """Times every call of ``owner.method``."""
        function = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.span(name):
                return function(*args, **kwargs)

        object.__setattr__(owner, method, timed)


@njit  # not cached: a cache that was written as a script cannot be read as a module
def draw_legal_actions(mask: np.ndarray, actions: np.ndarray) -> None:
    """Writes a uniformly random legal action of every agent; ``mask`` ``[E, A, n]``, ``actions`` ``[E, A]``."""
    num_envs, num_agents, num_actions = mask.shape
    for e in range(num_envs):
        for i in range(num_agents):
            legal = 0
            for action in range(num_actions):
                legal += mask[e, i, action]
            skip = np.random.randint(legal)  # noqa: NPY002 - numba compiles only the global generator
            for action in range(num_actions):
                if mask[e, i, action]:
                    if skip == 0:
                        actions[e, i] = action
                        break
                    skip -= 1


def measure_simulator(case: Simulator, seconds: float = 3.0) -> float:
    """Returns env steps per second; drawing the actions is compiled and counts."""
    env = make_vector_env(case.env, num_envs=case.num_envs, **case.kwargs)
    observations = env.reset(seed=0)
    (name,) = env.spec.groups
    mask = observations.action_mask[name].numpy()
    actions = torch.zeros(case.num_envs, env.spec.num_agents, dtype=torch.int64)
    array = actions.numpy()
    for _ in range(50):
        draw_legal_actions(mask, array)
        env.step({name: actions})
    steps, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        draw_legal_actions(mask, array)
        env.step({name: actions})
        steps += case.num_envs
    return steps / (time.perf_counter() - start)


def measure_acting(case: Training, seconds: float = 3.0) -> float:
    """Returns env steps per second of the acting loop, simulator included."""
    env = make_vector_env(case.env, num_envs=case.num_envs)
    module = case.make()
    module.use_spec(env.spec)
    chunk_length = module.chunk_length if case.replay is None else None
    collector = RolloutCollector(env=env, rollout_length=case.rollout_length, chunk_length=chunk_length)
    collector.collect(module.policy)
    steps, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        steps += collector.collect(module.policy).env_steps
    return steps / (time.perf_counter() - start)


class _StartClock(StopAtEnvSteps):
    """Restarts the stopwatch when the warm-up is over."""

    def __init__(self, *, env_steps: int, warm_up: int, watch: Stopwatch):
        super().__init__(env_steps=env_steps)
        self._warm_up: int | None = warm_up
        self._watch = watch
        self.started_at = 0

    def on_train_batch_end(self, trainer: Trainer, pl_module: MARLModule, *args: Any) -> None:
        if self._warm_up is not None and pl_module.env_steps >= self._warm_up:
            self._watch.reset()
            self.started_at, self._warm_up = pl_module.env_steps, None
        super().on_train_batch_end(trainer, pl_module, *args)


def measure_training(case: Training) -> dict[str, float]:
    """Returns the rate of a whole training with one evaluation, and the share of each kind of work in its time."""
    seed_everything(0, verbose=False)
    env: VectorEnv = make_vector_env(case.env, num_envs=case.num_envs)
    rollout_steps = case.num_envs * case.rollout_length
    total = rollout_steps * (case.rollouts + case.warm_up)
    module, datamodule, watch = case.make(), case.make_data(env), Stopwatch()
    module.use_spec(env.spec)
    clock = _StartClock(env_steps=total, warm_up=case.warm_up * rollout_steps, watch=watch)
    evaluation = EvaluationCallback(every_env_steps=total // 2 + 1, episodes=32, at_end=False)
    trainer = Trainer(
        max_epochs=-1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[evaluation, clock],
    )
    watch.wrap(env, "step", "simulator")
    watch.wrap(module.policy, "act", "network (acting)")
    if case.replay is None:
        watch.wrap(module, "prepare_rollout", "network (values)")
    else:
        watch.wrap(datamodule, "sample", "other (sampling)")
        watch.wrap(module, "update_targets", "network (targets)")
    watch.wrap(module, "loss", "network (loss)")
    watch.wrap(module, "optimise", "optimiser (backward, clip, step)")
    watch.wrap(evaluation, "on_train_epoch_end", "evaluation")
    watch.wrap(datamodule, "collect", "other (collecting)")
    watch.wrap(module, "training_step", "other (updating)")
    trainer.fit(module, datamodule=datamodule)
    with watch.span("other"):
        pass
    seconds = dict(watch.seconds)
    whole, env_steps = sum(seconds.values()), module.env_steps - clock.started_at
    shares = {name: value / whole for name, value in sorted(seconds.items(), key=lambda item: -item[1])}
    result = {"env_steps_per_second": env_steps / whole, "shares": shares}
    if case.replay is not None:
        updates = env_steps / case.replay["training_frequency"] * case.replay.get("num_updates", 1)
        result["sampling_milliseconds_per_update"] = 1000 * seconds["other (sampling)"] / updates
    return result


def cpu_name() -> str:
    """Returns the processor's name where the system tells it."""
    try:
        with open("/proc/cpuinfo") as info:
            return next(line.split(":")[1].strip() for line in info if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def line(name: str, rate: float, target: float | None) -> str:
    """Returns a row of the table."""
    verdict = "" if target is None else f"   target {target:>9,.0f}   {rate / target:5.2f} x"
    return f"{name:<28} {rate:>12,.0f} env steps/s{verdict}"


def main() -> None:
    """Measures the cases asked for and prints them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", help="also write the figures to this file")
    parser.add_argument("--only", nargs="*", default=[], help="names of cases; all without")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="torch threads of acting and training")
    arguments = parser.parse_args()
    logging.getLogger("lightning").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    quiet_lightning()
    keep_freed_memory()
    torch.set_num_threads(arguments.threads)

    def chosen(cases: dict[str, Any]) -> dict[str, Any]:
        return {name: case for name, case in cases.items() if not arguments.only or name in arguments.only}

    machine = {"cpu": cpu_name(), "cores": os.cpu_count(), "threads": arguments.threads}
    report: dict[str, Any] = {"machine": machine, "versions": versions(), "git_revision": git_revision()}
    print(f"{machine['cpu']}, {machine['cores']} cores, torch threads {arguments.threads}\n\nsimulator, one thread")
    report["simulator"] = {}
    for name, case in chosen(SIMULATORS).items():
        report["simulator"][name] = rate = measure_simulator(case)
        print(line(name, rate, case.target), flush=True)
    print("\nacting: policy and simulator")
    report["acting"] = {}
    for name, case in chosen(TRAININGS).items():
        report["acting"][name] = rate = measure_acting(case)
        print(line(name, rate, None), flush=True)
    print("\ntraining")
    report["training"] = {}
    for name, case in chosen(TRAININGS).items():
        report["training"][name] = result = measure_training(case)
        print(line(name, result["env_steps_per_second"], case.target))
        outside = sum(share for part, share in result["shares"].items() if part.startswith("other"))
        print("".join(f"    {share:6.1%}  {part}\n" for part, share in result["shares"].items()), end="")
        print(f"    {outside:6.1%}  outside simulator, network, optimiser and evaluation")
        if "sampling_milliseconds_per_update" in result:
            print(f"    {result['sampling_milliseconds_per_update']:6.2f} ms of sampling an update")
        print(flush=True)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(report, file, indent=2)


if __name__ == "__main__":
    main()
