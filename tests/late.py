"""Libraries that take seconds to import, in tests that few of a run's processes get."""

from __future__ import annotations

import importlib
from typing import Any


class Late:
    """A module that is imported when a test first uses it, and not by each process that collects the tests."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):
            # Pytest asks each object of a file for these.
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)
