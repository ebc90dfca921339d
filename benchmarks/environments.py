"""Speed of environments: native games against their packages, and what vector environments cost and gain.

Run ``python benchmarks/environments.py [--json FILE] [--seconds S]``. All figures of one run belong together: quote
their ratios, since machines differ and are noisy. Two figures tell how far to trust them:

* *obtained cores* is the work of as many busy processes as there are workers, relative to that of one. It is the most
  that these workers can gain over one process at that moment; on a machine with other work it is far below their
  number.
* *share of the limit* is the rate relative to the in-process loop times the obtained cores.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from gymnasium import Env, spaces
from gymnasium.vector import AsyncVectorEnv

from marl_lightning.envs import (
    EnvSpec,
    GroupSpec,
    MultiAgentEnv,
    Observations,
    Step,
    VectorEnv,
    make_env,
    make_vector_env,
)
from marl_lightning.envs.vector.shared_memory import SharedMemoryVectorEnv
from marl_lightning.envs.vector.sync import SyncVectorEnv

PLUMBING_TARGET = 150.0  # microseconds a vector step of 16 instances that do nothing
SHARE_TARGET = 0.8  # of the limit, at 16 instances
SIZES = (8, 16)


class IdleGame(MultiAgentEnv):
    """Three agents whose steps return what has been there before, so that all time is spent around them."""

    def __init__(self) -> None:
        group = GroupSpec(
            agents=("a", "b", "c"),
            observation_space=spaces.Box(-np.inf, np.inf, (18,), np.float32),
            action_space=spaces.Discrete(5),
        )
        self.spec = EnvSpec(name="benchmark/idle", groups={"agent": group}, state_size=54)
        self._observations = Observations(
            observation={"agent": np.zeros((3, 18), np.float32)},
            action_mask={"agent": np.ones((3, 5), np.bool_)},
            alive={"agent": np.ones(3, np.bool_)},
            state=np.zeros(54, np.float32),
        )
        self._step = Step(
            observations=self._observations,
            reward={"agent": np.zeros(3, np.float32)},
            terminated=False,
            truncated=False,
            info={},
        )

    def reset(self, *, seed: int | None = None) -> Observations[np.ndarray]:
        return self._observations

    def step(self, actions: Mapping[str, np.ndarray]) -> Step[np.ndarray]:
        return self._step


PACKAGE_GAMES = {
    "simple_spread": "mpe/simple_spread_v3",
    "LBF 10x10-3p-3f": "lbf/Foraging-2s-10x10-3p-3f-coop-v3",
}
"""Games of packages, of three agents each, whose first action is always legal."""

NATIVE_GAMES = {
    "lbf/Foraging-8x8-2p-2f-coop-v3": 1_000_000,
    "mpe/simple_spread_v3": 1_500_000,
    "rware/rware-tiny-4ag-v2": 300_000,
}
"""Games that are played by their package too, with the env steps per second that 64 instances should reach."""

SINGLE_TARGET = 100_000  # env steps per second of one instance of a native game


def package_game(name: str) -> MultiAgentEnv:
    """Returns an instance of the package's own version."""
    return make_env(name, backend="package")


class GymnasiumGame(Env):
    """A game with gymnasium's interface, observations stacked, for gymnasium's own vector environments."""

    def __init__(self, name: str) -> None:
        self._env = package_game(name)
        ((self._group, group),) = self._env.spec.groups.items()
        self.observation_space = spaces.Box(-np.inf, np.inf, (group.num_agents, *group.observation_shape), np.float32)
        self.action_space = spaces.MultiDiscrete([group.action_size] * group.num_agents)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        return self._env.reset(seed=seed).observation[self._group], {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        step = self._env.step({self._group: action})
        reward = float(step.reward[self._group].sum())
        return step.observations.observation[self._group], reward, step.terminated, step.truncated, {}


def _count(seconds: float, *_: Any) -> int:
    """Returns how much arithmetic this process gets done."""
    end, rounds = time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        sum(range(1000))
        rounds += 1
    return rounds


def obtained_cores(processes: int, seconds: float) -> float:
    """Returns the work of this many busy processes relative to that of one."""
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        pool.map(partial(_count, 0.05), range(processes))  # they have all started
        alone = _count(seconds)
        together = sum(pool.map(partial(_count, seconds), range(processes), chunksize=1))
    return together / alone


def time_steps(step: Callable[[], object], seconds: float) -> dict[str, float]:
    """Returns seconds a call: the mean, and the quarter and the middle of the sorted single times.

    Other work on the machine delays some calls very much, which the mean shows and the others hide.
    """
    times, end = [], time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        step()
        times.append(time.perf_counter() - start)
    quarter, median, _ = statistics.quantiles(times, n=4)
    return {"mean": statistics.fmean(times), "median": median, "quarter": quarter}


def time_vector_env(env: VectorEnv, seconds: float) -> dict[str, float]:
    """Returns seconds a vector step with fixed legal actions; closes the environment."""
    with env:
        env.reset()
        actions = fixed_actions(env)
        for _ in range(30):
            env.step(actions)
        return time_steps(lambda: env.step(actions), seconds)


def fixed_actions(env: VectorEnv) -> dict[str, torch.Tensor]:
    """Returns actions that are always legal: different ones in games without illegal ones, else the first."""
    everything_is_legal = all(mask.all() for mask in env.reset().action_mask.values())
    actions = {}
    for name, group in env.spec.groups.items():
        shape = (env.num_envs, group.num_agents)
        actions[name] = torch.zeros(shape, dtype=torch.int64)
        if everything_is_legal:
            actions[name] = torch.arange(actions[name].numel()).reshape(shape) % group.action_size
    return actions


def time_gymnasium(name: str, num_envs: int, seconds: float) -> dict[str, float]:
    """Returns seconds a vector step of gymnasium's AsyncVectorEnv, which has a process for every instance."""
    env = AsyncVectorEnv([partial(GymnasiumGame, name)] * num_envs, shared_memory=True, context="spawn")
    try:
        env.reset(seed=0)
        with SyncVectorEnv(factory=partial(package_game, name), num_envs=num_envs, seed=0) as alike:
            (actions,) = (tensor.numpy() for tensor in fixed_actions(alike).values())
        for _ in range(30):
            env.step(actions)
        return time_steps(lambda: env.step(actions), seconds)
    finally:
        env.close()


def measure_plumbing(num_workers: int, seconds: float) -> dict[str, Any]:
    """Measures and prints the seconds a vector step of instances that do nothing."""
    print(f"\ncost of a vector step of instances that do nothing, {num_workers} workers: mean, median, quarter")
    report = {}
    for num_envs in SIZES:
        for kind, make in (("sync", SyncVectorEnv), ("shared_memory", partial(_shared, num_workers))):
            times = time_vector_env(make(factory=IdleGame, num_envs=num_envs, seed=0), seconds)
            report[f"{kind}_{num_envs}"] = times
            target = f"   target {PLUMBING_TARGET:.0f}" if (kind, num_envs) == ("shared_memory", 16) else ""
            figures = " ".join(f"{times[name] * 1e6:>6.0f}" for name in ("mean", "median", "quarter"))
            print(f"  {kind:<16}{num_envs:>3} instances {figures} us{target}", flush=True)
    return report


def measure_rates(num_workers: int, seconds: float) -> dict[str, Any]:
    """Measures and prints env steps per second on games of packages."""
    return {
        title: {str(num_envs): _measure_rate(title, name, num_envs, num_workers, seconds) for num_envs in SIZES}
        for title, name in PACKAGE_GAMES.items()
    }


def _measure_rate(title: str, name: str, num_envs: int, num_workers: int, seconds: float) -> dict[str, Any]:
    factory = partial(package_game, name)
    cores = obtained_cores(num_workers, seconds / 4)
    times = {
        "sync": time_vector_env(SyncVectorEnv(factory=factory, num_envs=num_envs, seed=0), seconds),
        "shared_memory": time_vector_env(_shared(num_workers, factory=factory, num_envs=num_envs, seed=0), seconds),
        "gymnasium_async": time_gymnasium(name, num_envs, seconds),
    }
    cores = (cores + obtained_cores(num_workers, seconds / 4)) / 2  # before and after
    rates = {kind: num_envs / seconds_a_step["mean"] for kind, seconds_a_step in times.items()}
    limit = cores * rates["sync"]
    print(f"\n{title} of its package, {num_envs} instances: {cores:.2f} obtained cores, limit {limit:,.0f} env steps/s")
    for kind, rate in rates.items():
        target = f"   target {SHARE_TARGET:.0%}" if (kind, num_envs) == ("shared_memory", 16) else ""
        print(f"  {kind:<16} {rate:>8,.0f} env steps/s {rate / limit:>5.0%} of the limit{target}", flush=True)
    return {"obtained_cores": cores, "limit": limit, "env_steps_per_second": rates}


def measure_native(seconds: float) -> dict[str, Any]:
    """Measures and prints env steps per second, with one thread, of native games and of one instance of a package."""
    print("\nnative games, one thread, against one instance of their package: env steps per second")
    report = {}
    for name, target in NATIVE_GAMES.items():
        rates = {}
        for num_envs in (1, 8, 64, 1024):
            env = make_vector_env(name, num_envs=num_envs, num_threads=1)
            rates[str(num_envs)] = num_envs / time_vector_env(env, seconds)["mean"]
        package = SyncVectorEnv(factory=partial(package_game, name), num_envs=1, seed=0)
        rates["package"] = 1 / time_vector_env(package, seconds)["mean"]
        figures = ", ".join(f"{rate:,.0f} ({number})" for number, rate in rates.items())
        print(f"  {name}: {figures}; {rates['64'] / rates['package']:,.0f} times", flush=True)
        print(f"    targets {SINGLE_TARGET:,} (1), {target:,} (64)", flush=True)
        report[name] = rates
    return report


def _shared(num_workers: int, **kwargs: Any) -> SharedMemoryVectorEnv:
    return SharedMemoryVectorEnv(num_workers=num_workers, **kwargs)


def main() -> None:
    """Measures everything and prints it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", help="also write the figures to this file")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--workers", type=int, default=2, help="processes of the shared-memory environment")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} cores, load average {load:.1f}")
    report = {
        "cores": os.cpu_count(),
        "load_average": load,
        "workers": arguments.workers,
        "plumbing_seconds": measure_plumbing(arguments.workers, arguments.seconds),
        "rates": measure_rates(arguments.workers, arguments.seconds),
        "native": measure_native(arguments.seconds),
    }
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(report, file, indent=2)


if __name__ == "__main__":
    main()
