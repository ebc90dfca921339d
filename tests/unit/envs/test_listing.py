"""``python -m marl_lightning.envs``."""

import subprocess
import sys

from marl_lightning.envs.__main__ import lines
from marl_lightning.envs.registry import registered_families


def test_names_with_groups_and_kinds_of_actions():
    listed = "\n".join(lines(["matrix/climbing", "mpe/simple_tag_v3", "gymnasium/Pendulum-v1"]))
    assert "matrix/climbing  [native] agents: 2 agents, observation" in listed
    assert "3 actions" in listed
    assert "[native] adversary: 3 agents, observation (16,) float32, 5 actions; agent: 1 agent" in listed
    assert "continuous actions (1,)" in listed
    assert "at most 200 steps" in listed
    assert 'pip install "marl-lightning[mpe]"' in listed


def test_patterns_and_names_only():
    listed = list(lines(["lbf/*-8x8-2p-2f-coop-v3"], details=False))
    assert listed[1:] == ["  lbf/Foraging-2s-8x8-2p-2f-coop-v3", "  lbf/Foraging-8x8-2p-2f-coop-v3"]


def test_packages_that_are_missing(monkeypatch):
    families = registered_families()
    for module in ("smac", "smacv2"):
        monkeypatch.setitem(sys.modules, module, None)
    listed = list(lines(["starcraft2/*"]))
    assert "starcraft2" in families
    assert listed[0].startswith("starcraft2: not installed; ")


def test_command():
    def run(*arguments):
        command = [sys.executable, "-m", "marl_lightning.envs", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    result = run("--names", "matrix/*")
    assert result.returncode == 0
    assert "  matrix/climbing\n" in result.stdout
    wrong = run("--names", "matricks/*")
    assert wrong.returncode == 1
    assert "no environment matches matricks/*" in wrong.stderr
