"""The process that a training runs in: its memory, and what it was made of."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import subprocess
import warnings
from importlib import metadata
from pathlib import Path

_PACKAGES = ("torch", "lightning", "torchrl", "tensordict", "numba", "numpy")

# Parameters of glibc's mallopt, as in malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_MIB = 2**20


def bound_spinning() -> None:
    """Lets idle OpenMP threads spin only for some microseconds before they sleep. Call it before torch is imported.

    torch splits every larger operation over its threads and waits for the slowest. GNU's OpenMP spins for about a
    millisecond meanwhile; if other busy processes need the cores, the thread that is waited for does not get to run,
    and a training beside several of them was measured to be ten times slower. Sleeping at once
    (``OMP_WAIT_POLICY=PASSIVE``) costs half of the speed on an idle machine, this bound under a tenth. Choices made
    outside, through either variable, stay.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def keep_freed_memory() -> bool:
    """Makes the C library keep freed memory for reuse, where it is glibc. To be called when a process starts.

    By default glibc takes larger blocks from the kernel and gives them back when they are freed. Every temporary
    tensor of a minibatch then lies in fresh pages, and the page faults of touching them for the first time cost more
    than the arithmetic of a small network. Now blocks up to 32 MiB (the most that glibc allows) come from the heap,
    which grows by 64 MiB at a time and is never trimmed.

    Returns:
        Whether it was done.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    settings = {_M_MMAP_THRESHOLD: 32 * _MIB, _M_TRIM_THRESHOLD: 2**31 - 1, _M_TOP_PAD: 64 * _MIB}
    done = [mallopt(parameter, value) for parameter, value in settings.items()]
    return all(done)


def quiet_lightning() -> None:
    """Hides messages of Lightning and TorchRL that advertise other products or do not apply to our trainings."""
    logging.getLogger("torchrl").setLevel(logging.WARNING)  # tells of every storage that is made
    rank_zero = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    rank_zero.addFilter(_is_worth_saying)
    # Files of an earlier run in the same folder are renamed before the logger could delete them.
    warnings.filterwarnings("ignore", message=".*Experiment logs directory .* exists and is not empty")
    # Calls inside Lightning that newer versions of torch are going to remove.
    warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.. is deprecated")
    warnings.filterwarnings("ignore", message=".*torch.distributed.nn.functional.all_gather is deprecated")


def _is_worth_saying(record: logging.LogRecord) -> bool:
    """Returns False for advertisements, and for what is repeated before each of many short trainings."""
    message = record.getMessage()
    return "💡" not in message and not message.startswith(("GPU available: ", "TPU available: "))


def versions() -> dict[str, str]:
    """Returns the versions of Python, this package and what decides its numbers."""
    found = {"python": platform.python_version(), "marl_lightning": metadata.version("marl-lightning")}
    return found | {name: metadata.version(name) for name in _PACKAGES}


def git_revision() -> str | None:
    """Returns the commit of this checkout, with ``-dirty`` if files were changed; ``None`` outside a checkout."""
    checkout = Path(__file__).parents[1]
    if not (checkout / ".git").exists():
        return None
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):  # no git, or no commit yet
        return None
