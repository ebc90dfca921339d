"""Packages that only some families of games need."""

from __future__ import annotations

import importlib
from types import ModuleType


def require(module: str, *, extra: str) -> ModuleType:
    """Returns a module of an optional package.

    Args:
        module: name of the module, such as ``"pettingzoo.sisl"``.
        extra: the extra of this project that brings the package.

    Raises:
        ImportError: if the package is not installed; says how to install it. Other errors of the import are left alone.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ImportError(
            f'{module} needs a package that is missing ({error.name or package}): pip install "marl-lightning[{extra}]"'
        ) from error
