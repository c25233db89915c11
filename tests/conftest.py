"""What holds for every test."""

from __future__ import annotations

import signal
from collections import Counter

import pytest
from hypothesis import settings

# A shell lets what it starts in the background ignore Ctrl-C, and the tests of it would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples on every run, and no deadline: neighbours on a busy machine are not the test's fault.
settings.register_profile("headrace", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("headrace")

LONGEST = (
    "test_elastic.py",
    "test_compile.py",
    "test_audit.py",
    "test_add_a_strategy.py",
    "test_docs.py",
    "test_contract.py",
)
"""Files of minutes, of which none must be the last."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Lets long files begin first, so that whoever runs several at a time is done with all at about the same time."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: (item.path.name not in LONGEST, -slow[item.path], item.path))
