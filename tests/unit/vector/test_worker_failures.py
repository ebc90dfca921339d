"""Whatever happens to a worker or its parent is told within seconds and leaves nothing behind."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from vector_games import BrokenGame, DiceGame
from vector_helpers import wait_until_ended, worker_pids

from marl_lightning.envs.vector.shared_memory import SharedMemoryVectorEnv

ACTIONS = {"team": torch.zeros(4, 2, dtype=torch.int64), "lone": torch.zeros(4, 1, 2)}


def broken_env(*, how, where, timeout=30.0, **kwargs):
    """Four instances with the seeds 10 to 13 in two workers."""
    factory = partial(BrokenGame, how=how, where=where, **kwargs)
    return SharedMemoryVectorEnv(factory=factory, num_envs=4, seed=10, num_workers=2, context="fork", timeout=timeout)


def told(error: BaseException) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


def use(**kwargs):
    """Makes an environment and steps it until it fails; returns the error, the seconds it took and the workers."""
    env, pids, start = None, [], time.monotonic()
    try:
        env = broken_env(**kwargs)
        pids = worker_pids(env)
        env.reset()
        start = time.monotonic()
        for _ in range(4):
            env.step(ACTIONS)
    except Exception as error:
        seconds = time.monotonic() - start
        if env is not None:
            with pytest.raises(RuntimeError, match="closed"):
                env.step(ACTIONS)
        return type(error), told(error), seconds, pids
    pytest.fail("nothing was raised")


@pytest.mark.parametrize(("where", "count"), [("reset", 1), ("step", 3)])
def test_raising_keeps_type_index_and_traceback(nothing_left, tmp_path, where, count):
    log = tmp_path / "closed"
    kind, text, seconds, pids = use(how="raise", where=where, count=count, seed=12, closed=str(log))
    assert kind is KeyError
    assert "broken on purpose" in text
    assert "raised by environment 2 of 4 (broken)" in text
    assert f'in {where}\n    self.meet("{where}")' in text
    assert seconds < 5
    assert wait_until_ended(pids, 0) == []
    assert log.read_text() == "closed\n" * 4


def test_raising_in_the_second_constructor_of_a_worker(nothing_left, tmp_path):
    log = tmp_path / "closed"
    kind, text, _, _ = use(how="raise", where="constructor", count=2, closed=str(log))
    assert kind is KeyError
    assert "raised by environment 1 of 4" in text or "raised by environment 3 of 4" in text
    assert "in __init__" in text
    assert log.read_text() == "closed\n" * 2  # the first game of each worker


@pytest.mark.parametrize(
    ("how", "words"),
    [("raise impolitely", "3 and 4"), ("raise unpicklably", "holds a lock"), ("exit", "SystemExit: 3")],
)
def test_errors_that_cannot_travel_are_told_as_text(nothing_left, how, words):
    kind, text, _, _ = use(how=how, where="step", count=2, seed=13)
    assert kind is RuntimeError
    assert words in text
    assert "in step" in text


@pytest.mark.parametrize("where", ["constructor", "reset", "step"])
def test_hanging_is_told_with_what_the_worker_was_doing(nothing_left, where):
    kind, text, seconds, pids = use(how="hang", where=where, seed=11, timeout=0.7)
    assert kind is RuntimeError
    assert "worker 0 did not answer within 0.7 s" in text
    assert "environments 0 to 1" in text if where == "constructor" else "used last is 1" in text
    assert "in hang_forever" in text
    assert seconds < 5
    assert wait_until_ended(pids, 0) == []


class SlowStart(DiceGame):
    def reset(self, *, seed=None):
        time.sleep(0.4)
        return super().reset(seed=seed)


def test_every_instance_has_time_of_its_own(nothing_left):
    # Four slow starts one after another take longer than the worker may be silent about one.
    with SharedMemoryVectorEnv(
        factory=SlowStart, num_envs=4, seed=0, num_workers=1, context="fork", timeout=1.0
    ) as env:
        start = time.monotonic()
        env.reset()
        assert time.monotonic() - start > 1.5


@pytest.mark.parametrize(
    ("how", "where", "words"),
    [
        ("kill", "constructor", "killed by SIGKILL (making the environments"),
        ("kill", "reset", "worker 1 was killed by SIGKILL (the environment that it used last is 3)"),
        ("kill", "step", "worker 1 was killed by SIGKILL (the environment that it used last is 3)"),
        ("crash", "step", "worker 1 was killed by SIGSEGV (the environment that it used last is 3)"),
    ],
)
def test_a_killed_worker_is_told(nothing_left, how, where, words):
    kind, text, seconds, pids = use(how=how, where=where, seed=13)
    assert kind is RuntimeError
    assert words in text
    assert seconds < 5
    assert wait_until_ended(pids, 0) == []


@pytest.fixture
def crash_handler():
    """Puts the handler for crashes back in place, which Python does not know if a library set it."""
    libc, handler = ctypes.CDLL(None), ctypes.create_string_buffer(512)
    assert libc.sigaction(signal.SIGSEGV, None, handler) == 0
    yield
    assert libc.sigaction(signal.SIGSEGV, handler, None) == 0


@pytest.mark.parametrize("replaced", ["nowhere", "in the parent", "by the game"])
def test_a_crash_comes_with_the_python_stack(nothing_left, crash_handler, replaced):
    """Also after something replaced the handler, as pygame does when it starts and when it ends."""
    if replaced == "in the parent":
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    text = use(how="crash", where="step", seed=13, without_handler=replaced == "by the game")[1]
    assert "in string_at" in text


def test_a_kill_has_no_python_stack(nothing_left):
    assert "in string_at" not in use(how="kill", where="step", seed=13)[1]


@pytest.mark.parametrize("call", ["step", "reset", "partial", "render", "state_dict"])
def test_a_worker_killed_while_idle_is_told_by_the_next_call(nothing_left, call):
    with broken_env(how="", where="") as env:
        env.reset()
        victim, other = worker_pids(env)
        os.kill(victim, signal.SIGKILL)
        env._workers[0].process.join(5)
        calls = {
            "step": lambda: env.step(ACTIONS),
            "reset": lambda: env.reset(seed=1),
            # Only the other worker is asked.
            "partial": lambda: env.reset(mask=np.array([False, False, False, True])),
            "render": lambda: env.render(0),
            "state_dict": env.state_dict,
        }
        with pytest.raises(RuntimeError, match="worker 0 was killed by SIGKILL"):
            calls[call]()
        assert wait_until_ended([other], 0) == []


@pytest.mark.parametrize("where", ["render", "state_dict"])
def test_errors_of_rare_calls_leave_the_environment_open(where):
    with broken_env(how="raise", where=where, seed=12) as env:
        env.reset()
        with pytest.raises(KeyError, match="broken on purpose"):
            env.render(2) if where == "render" else env.state_dict()
        env.step(ACTIONS)
        assert env.render(3).max() == 13
        assert len(env.state_dict()["envs"]) == 4


# ------------------------------------------------------------------------------------------------ the parent's troubles

SCRIPT_HEAD = """
import os, signal, sys, time
import torch
sys.path.insert(0, {folder!r})
from vector_games import BrokenGame, DiceGame, WitnessGame
from marl_lightning.envs.vector import worker
from marl_lightning.envs.vector.shared_memory import SharedMemoryVectorEnv

class OwnGame(WitnessGame):
    pass

def make(context, factory, **kwargs):
    env = SharedMemoryVectorEnv(factory=factory, num_envs=4, seed=0, num_workers=2, context=context, **kwargs)
    print(*(w.process.pid for w in env._workers), flush=True)
    env.reset()
    return env

actions = {{"team": torch.zeros(4, 2, dtype=torch.int64), "lone": torch.zeros(4, 1, 2)}}
"""

# Without a guard for the main module: workers must not run it again.
EXIT = """
env = make("spawn", lambda: OwnGame())
env.step(actions)
print(env.spec.name)
"""

CTRL_C = """
env = make("spawn", DiceGame)
calls = 0
print("ready", flush=True)
try:
    while True:
        env.step(actions)
        calls += 1
except KeyboardInterrupt:
    env.reset()
    for _ in range(100):
        env.step(actions)
    env.close()
    print("closed in order", flush=True)
"""

DEATH = """
worker._ORPHAN_GRACE = 0.2
envs = [make("spawn", DiceGame), make("fork", DiceGame)]
hanging = make("fork", lambda: BrokenGame(how="hang", where="step"))
hanging.step_async(actions)
print("ready", flush=True)
time.sleep(60)
"""


def start(tmp_path, body):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT_HEAD.format(folder=str(Path(__file__).parent)) + body)
    return subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def read_pids(process):
    """Returns the numbers in the lines before "ready"."""
    pids = []
    while (line := process.stdout.readline().strip()) != "ready":
        assert line, process.stderr.read()
        pids += map(int, line.split())
    return pids


def test_a_script_that_forgets_to_close_ends_well(tmp_path):
    process = start(tmp_path, EXIT)
    out, err = process.communicate(timeout=40)
    assert (process.returncode, err) == (0, "")
    pids, name = out.splitlines()
    assert name == "heavy=[] threads=['1', '1', '1'] main=False"
    assert wait_until_ended(map(int, pids.split()), 0) == []


def test_ctrl_c_reaches_the_parent_only(tmp_path):
    process = start(tmp_path, CTRL_C)
    pids = read_pids(process)
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, err, out.strip()) == (0, "", "closed in order")
    assert wait_until_ended(pids, 1) == []


def test_workers_end_when_their_parent_is_killed(tmp_path):
    process = start(tmp_path, DEATH)
    pids = read_pids(process)
    assert len(pids) == 6
    process.kill()
    assert wait_until_ended(pids, 8) == []
    process.communicate()
