"""Fixtures of several tests of parameter servers."""

from __future__ import annotations

import pytest

from transport.ways import WAYS


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    """How bytes go between clients and servers."""
    return str(request.param)
