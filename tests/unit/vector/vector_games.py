"""Games for worker processes: without torch, so that workers start fast."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from marl_lightning.envs import EnvSpec, GroupSpec, MultiAgentEnv, Observations, Step

HEAVY = ("torch", "lightning", "pytorch_lightning", "numba", "tensordict", "pytest")


class DiceGame(MultiAgentEnv):
    """Everything is drawn from the seed: lengths, kinds of ends, deaths, masks, rewards, images.

    The team of two sees uint8 images and has discrete actions, the lone agent sees float64 vectors and has continuous
    actions. Rewards hold the actions, so that a wrong or late action is seen.
    """

    def __init__(self, *, name: str = "dice") -> None:
        image = spaces.Box(0, 255, (3, 5), np.uint8)
        vector = spaces.Box(-np.inf, np.inf, (2,), np.float64)
        self.spec = EnvSpec(
            name=name,
            groups={
                "team": GroupSpec(agents=("t0", "t1"), observation_space=image, action_space=spaces.Discrete(3)),
                "lone": GroupSpec(
                    agents=("l0",), observation_space=vector, action_space=spaces.Box(-1.0, 1.0, (2,), np.float32)
                ),
            },
            state_size=4,
            info_keys=("time", "luck"),
            can_checkpoint=True,
        )
        self.rng = np.random.default_rng()
        self.time, self.length, self.seed = 0, 0, -1

    def reset(self, *, seed: int | None = None) -> Observations[np.ndarray]:
        if seed is not None:
            self.rng, self.seed = np.random.default_rng(seed), seed
        self.time, self.length = 0, int(self.rng.integers(1, 6))
        return self.observe(dead=False)

    def step(self, actions: Mapping[str, np.ndarray]) -> Step[np.ndarray]:
        if self.time == self.length:
            raise RuntimeError("over")
        self.time += 1
        over, kind = self.time == self.length, self.rng.random()
        return Step(
            observations=self.observe(dead=self.rng.random() < 0.3),
            reward={
                "team": (actions["team"] + self.rng.random(2)).astype(np.float32),
                "lone": actions["lone"].sum(axis=-1) + np.float32(self.rng.random()),
            },
            terminated=bool(over and kind < 0.6),
            truncated=bool(over and kind >= 0.5),
            info={"time": float(self.time), "luck": self.rng.random()},
        )

    def observe(self, *, dead: bool) -> Observations[np.ndarray]:
        mask = self.rng.random((2, 3)) < 0.5
        mask[:, 0] = True
        if dead:
            mask[1] = [True, False, False]
        return Observations(
            observation={
                "team": self.rng.integers(0, 256, (2, 3, 5), np.uint8),
                "lone": self.rng.random((1, 2)),
            },
            action_mask={"team": mask},
            alive={"team": np.array([True, not dead]), "lone": np.array([True])},
            state=np.array([self.time, self.length, self.seed, self.rng.random()], np.float32),
        )

    def render(self) -> np.ndarray:
        return np.full((2, 2, 3), self.seed, np.uint8)

    def state_dict(self) -> dict[str, Any]:
        return {
            "numbers": [self.time, self.length, self.seed],
            "rng": json.dumps(self.rng.bit_generator.state),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.time, self.length, self.seed = state["numbers"]
        self.rng.bit_generator.state = json.loads(state["rng"])


class ImpoliteError(Exception):
    """Can be pickled but not rebuilt."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def hang_forever() -> None:
    while True:
        time.sleep(0.01)


def fail(how: str) -> None:
    """Does what a broken game may do."""
    if how == "raise":
        raise KeyError("broken on purpose")
    if how == "raise impolitely":
        raise ImpoliteError(3, 4)
    if how == "raise unpicklably":
        error = ValueError("holds a lock")
        error.lock = threading.Lock()
        raise error
    if how == "exit":
        sys.exit(3)
    if how == "hang":
        hang_forever()
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "crash":
        ctypes.string_at(0)


class BrokenGame(DiceGame):
    """Fails in the ``count``-th call of a method, counted over a process for the constructor.

    Args:
        how: see :func:`fail`.
        where: ``"constructor"``, ``"reset"``, ``"step"``, ``"render"`` or ``"state_dict"``.
        seed: only the instance with this seed fails; any without.
        closed: a file that gets a line for every game that is closed.
        without_handler: take the handler for crashes away.
    """

    made = 0

    def __init__(
        self,
        *,
        how: str,
        where: str,
        count: int = 1,
        seed: int | None = None,
        closed: str | None = None,
        without_handler: bool = False,
    ) -> None:
        super().__init__(name="broken")
        if without_handler:
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        self.how, self.where, self.count, self.chosen, self.closed = how, where, count, seed, closed
        BrokenGame.made += 1
        if where == "constructor" and BrokenGame.made == count:
            fail(how)

    def reset(self, *, seed: int | None = None) -> Observations[np.ndarray]:
        observations = super().reset(seed=seed)
        self.length = 1000
        self.meet("reset")
        return observations

    def step(self, actions: Mapping[str, np.ndarray]) -> Step[np.ndarray]:
        self.meet("step")
        return super().step(actions)

    def render(self) -> np.ndarray:
        self.meet("render")
        return super().render()

    def state_dict(self) -> dict[str, Any]:
        self.meet("state_dict")
        return super().state_dict()

    def meet(self, where: str) -> None:
        if where == self.where and self.chosen in (None, self.seed):
            self.count -= 1
            if self.count == 0:
                fail(self.how)

    def close(self) -> None:
        if self.closed is not None:
            with open(self.closed, "a") as file:
                file.write("closed\n")


class WitnessGame(DiceGame):
    """Tells about its process in its name: heavy modules, threads, whether the main module was imported."""

    def __init__(self) -> None:
        main = hasattr(sys.modules["__main__"], "__file__")
        heavy = [name for name in HEAVY if name in sys.modules]
        threads = [os.environ.get(name) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")]
        super().__init__(name=f"heavy={heavy} threads={threads} main={main}")


class OtherSpecGame(DiceGame):
    """Its spec differs from process to process."""

    def __init__(self) -> None:
        super().__init__(name=str(os.getpid()))
