"""What holds for every test of a strategy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def _one_thread_a_worker() -> Iterator[None]:
    """The workers of these tests are threads already, and their models tiny."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1)], lr=0.1)  # the first optimizer of a process imports for a second
    yield
    torch.set_num_threads(before)
