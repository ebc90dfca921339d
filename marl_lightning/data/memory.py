"""How much memory there is, before something large is allocated."""

from __future__ import annotations

import os
from pathlib import Path


def free_memory() -> float:
    """Returns the bytes of main memory that this process may still take, endless where the system does not tell.

    That is what is available on the machine or left of the limit of a container or batch job (control groups,
    versions 1 and 2), whichever is less.
    """
    return min(_machine(), *(_control_group(folder) for folder in _control_groups()), float("inf"))


def _machine() -> float:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024.0 * int(line.split()[1])
    except OSError:
        pass
    try:
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):
        return float("inf")


def _control_groups(table: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> list[Path]:
    """Returns the folders of the control groups of this process and of all that contain them."""
    try:
        lines = table.read_text().splitlines()
    except OSError:
        return []
    folders = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "memory" if controllers else root
        inner = top / path.lstrip("/")
        # Inside a container the path may be that outside, which does not exist here.
        folders += [folder for folder in (inner, *inner.parents) if folder == top or top in folder.parents]
    return folders


def _control_group(folder: Path) -> float:
    """Returns what is left of the limit of one control group; files that were read do not count as used."""
    for limit_name, used_name in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            limit = (folder / limit_name).read_text().strip()
            used = int((folder / used_name).read_text())
            statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        if limit == "max":
            return float("inf")
        cache = int(statistics.get("total_inactive_file", statistics.get("inactive_file", 0)))
        return float(max(0, int(limit) - used + cache))
    return float("inf")
