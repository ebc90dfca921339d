"""Evaluation mode for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluation_mode(policy: object) -> Iterator[None]:
    """Puts an ``nn.Module`` into evaluation mode and gives every submodule its own mode back; leaves others alone."""
    modules = list(policy.modules()) if isinstance(policy, nn.Module) else []
    training = [module.training for module in modules]
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module, was_training in zip(modules, training, strict=True):
            module.training = was_training
