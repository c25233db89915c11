"""Tests of scripts in threads of the tests' process, which a script has to itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from headrace import internals


@pytest.fixture(autouse=True)
def _no_hooks_are_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Takes away the hooks and functions of torch that a script's process keeps to its end."""
    before = dict(internals.global_pre_hooks)
    for name in ("backward", "grad"):
        monkeypatch.setattr(torch.autograd, name, getattr(torch.autograd, name))
    yield
    internals.global_pre_hooks.clear()
    internals.global_pre_hooks.update(before)
