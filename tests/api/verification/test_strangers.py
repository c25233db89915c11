"""A strategy of someone else's, of which headrace has no plain loop, is said to be that."""

from __future__ import annotations

import pytest

import headrace as hr
from headrace.testing.jobs import Case, dense
from strategies.test_declared_state import Anchored


@pytest.mark.slow
def test_nothing_is_said_of_pushes_where_there_are_no_servers() -> None:
    found = hr.verify(Case(dense).job(12), Anchored(2), engine=hr.ThreadEngine())
    assert "headrace has no plain loop of it; write one, and give it to headrace.testing.check_strategy" in str(found)
    assert "push" not in str(found)
