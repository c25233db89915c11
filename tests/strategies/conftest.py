"""What holds for every test of a strategy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from headrace.training import gradients
from headrace.training.gradients import DirectGradients

# Imports torch's compiler. Where that is first imported while a model is traced for a pipeline, which wraps `len`, it
# takes the wrapped one for Python's, and compiles no more in that process.
torch.compiler.reset()


@pytest.fixture(autouse=True, scope="module")
def _one_thread_a_worker() -> Iterator[None]:
    """The workers of these tests are threads already, and their models tiny."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1)], lr=0.1)  # the first optimizer of a process imports for a second
    yield
    torch.set_num_threads(before)


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Lets backward write the gradients of linear layers of any size to their places; says of each whether it did."""
    places: list[bool] = []
    take = DirectGradients.take

    def taken(own: DirectGradients, index: int) -> Tensor | None:
        place = take(own, index)
        places.append(place is not None)
        return place

    monkeypatch.setattr(gradients, "_FEWEST_ELEMENTS", 1)
    monkeypatch.setattr(DirectGradients, "take", taken)
    return places
