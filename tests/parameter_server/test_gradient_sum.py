"""The sum of a lease's gradients: in place only where its memory is its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headrace.parameter_server.client.exchange import GradientAccumulator, GradientBuffer
from headrace.spec.model import ModelSpec, ParameterSpec

MODEL = ModelSpec((ParameterSpec("one", (3,)), ParameterSpec("other", (3,))))


def stored(*gradients: Tensor | None) -> GradientBuffer:
    buffer = GradientBuffer((), MODEL)
    buffer.store(gradients)
    return buffer


def test_the_gradients_of_steps_are_left_as_they_are_and_parameters_that_share_one_do_not_share_the_sum() -> None:
    shared, second, third = torch.full((3,), 1.0), torch.full((3,), 10.0), torch.full((3,), 100.0)
    total = stored(None, None)
    for gradients in ((shared, shared), (second, None), (third, third)):
        total.add(stored(*gradients))
    one, other = total.gradients
    assert one is not None
    assert other is not None
    assert one.tolist() == [111.0] * 3
    assert other.tolist() == [101.0] * 3
    assert [shared[0].item(), second[0].item(), third[0].item()] == [1.0, 10.0, 100.0]


def test_from_the_second_sum_on_no_new_memory_is_taken() -> None:
    total = stored(torch.ones(3), None)
    total.add(stored(torch.ones(3), None))
    place = total.present[0].data_ptr()
    total.add(stored(torch.ones(3), None), 0.5)
    assert total.present[0].data_ptr() == place
    assert total.present[0].tolist() == [2.5] * 3


def test_what_is_stored_anew_is_not_taken_for_a_sum() -> None:
    total = stored(torch.ones(3), None)
    total.add(stored(torch.ones(3), None))
    given = torch.ones(3)
    total.store((given, None))
    total.add(stored(torch.ones(3), None))
    assert given.tolist() == [1.0] * 3


@pytest.mark.parametrize("weighted", [False, True])
def test_a_sum_that_was_taken_is_not_changed_by_later_steps(weighted: bool) -> None:
    accumulated = GradientAccumulator((), MODEL, weighted)
    for value in (1.0, 2.0):
        accumulated.add(stored(torch.full((3,), value), None), 0.5)
    held = accumulated._sum.present[0]
    accumulated.take()
    for value in (5.0, 6.0, 7.0):
        accumulated.add(stored(torch.full((3,), value), None), 0.5)
    assert held.tolist() == [3.0] * 3
