"""What the tests of vector environments share."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
from vector_helpers import children, shared_blocks


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Checks that a test leaves no process, no file descriptor and no shared block."""
    # What other tests left is not looked at: neither counted as freed here, nor searched for garbage, which is slow.
    gc.freeze()

    def held() -> tuple[set[int], int, int]:
        return children(), len(os.listdir("/proc/self/fd")), shared_blocks()

    before = held()
    yield
    gc.collect()
    gc.unfreeze()
    assert held() == before
