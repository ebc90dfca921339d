"""Looks at processes and memory of this machine."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from marl_lightning.envs.vector.shared_memory import SharedMemoryVectorEnv


def is_running(pid: int) -> bool:
    """Whether the process exists and is not only waiting to be noticed by its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_ended(pids: Iterable[int], seconds: float) -> list[int]:
    """Returns the processes that are still running after so many seconds."""
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def worker_pids(env: SharedMemoryVectorEnv) -> list[int]:
    return [worker.process.pid for worker in env._workers]


def shared_blocks() -> int:
    """Number of shared blocks that this process maps."""
    return Path("/proc/self/maps").read_text().count("memfd:marl_lightning")


def children() -> set[int]:
    """The processes that this one has started and that are running, without multiprocessing's own servers."""
    servers = ("resource_tracker", "forkserver")
    found = set()
    for task in Path("/proc/self/task").iterdir():
        for pid in map(int, (task / "children").read_text().split()):
            try:
                command = Path(f"/proc/{pid}/cmdline").read_text()
            except FileNotFoundError:
                continue
            if is_running(pid) and not any(server in command for server in servers):
                found.add(pid)
    return found
