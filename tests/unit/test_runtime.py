"""The process that a training runs in."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

from marl_lightning import runtime


def test_freed_memory_is_kept_where_the_c_library_is_glibc():
    assert runtime.keep_freed_memory() is (platform.libc_ver()[0] == "glibc")


def test_versions_name_what_decides_the_numbers():
    found = runtime.versions()
    assert found["python"] == platform.python_version()
    assert found.keys() >= {"marl_lightning", "torch", "lightning", "torchrl", "tensordict", "numba", "numpy"}


def test_there_is_no_revision_outside_a_checkout(monkeypatch, tmp_path):
    monkeypatch.setattr(runtime, "__file__", str(tmp_path / "marl_lightning" / "runtime.py"))
    assert runtime.git_revision() is None


def test_the_revision_tells_whether_files_were_changed(monkeypatch, tmp_path):
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=test", "-c", "user.email=test@example.org")
        subprocess.run(["git", "-C", tmp_path, *identity, *arguments], check=True, capture_output=True)

    (tmp_path / "file").write_text("a")
    git("init")
    git("add", "file")
    git("commit", "--message", "first")
    monkeypatch.setattr(runtime, "__file__", str(tmp_path / "marl_lightning" / "runtime.py"))
    clean = runtime.git_revision()
    assert len(clean) == 40
    (tmp_path / "file").write_text("b")
    assert runtime.git_revision() == f"{clean}-dirty"


def test_environments_do_not_import_torch():
    code = "import sys, marl_lightning.envs.base; sys.exit('torch' in sys.modules or 'lightning' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent)


def test_the_command_line_bounds_the_spinning_of_idle_threads():
    """The variable must be there before torch is, and a choice made outside must stay."""
    code = (
        "import os, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'torch': print(os.environ.get('GOMP_SPINCOUNT'))\n"
        "sys.meta_path.insert(0, Finder())\n"
        "import marl_lightning.cli"
    )
    environment = {
        name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    }
    for given, expected in (({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None")):
        run = [sys.executable, "-c", code]
        result = subprocess.run(run, env=environment | given, capture_output=True, text=True, check=True)
        assert result.stdout.split()[0] == expected
