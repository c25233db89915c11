from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import UsageError
from headrace.policies.threads import threads_per_worker


@given(st.integers(1, 256), st.integers(1, 256))
def test_workers_fill_the_cores_and_no_more(cores: int, workers: int) -> None:
    threads = threads_per_worker(cores, workers)
    assert threads >= 1
    assert threads * workers <= max(cores, workers)
    assert (threads + 1) * workers > cores


@pytest.mark.parametrize(("cores", "workers"), [(0, 1), (1, 0)])
def test_nothing_cannot_be_shared(cores: int, workers: int) -> None:
    with pytest.raises(UsageError, match=f"got {cores} and {workers}"):
        threads_per_worker(cores, workers)
