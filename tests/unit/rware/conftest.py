"""Long versions of tests run only if asked for: ``-m slow``."""

from pathlib import Path

import pytest


def pytest_collection_modifyitems(config, items):
    if "slow" in config.option.markexpr:
        return
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="long version, selected by -m slow"))
