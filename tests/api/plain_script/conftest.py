"""Tests of scripts in threads of the tests' process, which a script has to itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headrace import internals


@pytest.fixture(autouse=True)
def _no_hooks_are_left() -> Iterator[None]:
    """Takes away the hooks of all optimizers that a script's process keeps to its end."""
    before = dict(internals.global_pre_hooks)
    yield
    internals.global_pre_hooks.clear()
    internals.global_pre_hooks.update(before)
