"""Tensors without values: their memory is counted as it would be taken, and none is touched."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from headrace import internals
from headrace.errors import JobError
from headrace.machine.resources import resident_bytes
from headrace.prediction.memory.hollow import HollowMemory

MB = 1 << 20


def test_what_lives_is_counted_and_what_is_gone_is_not() -> None:
    with HollowMemory() as memory:
        first = torch.empty(MB)
        second = first * 2
        assert memory.peak_bytes == 8 * MB
        assert second[10:].view(-1).data_ptr() == second[10:].data_ptr()
        del first
        third = second + 1
        assert sum(memory.living().values()) == 8 * MB
        memory.restart()
        del second
        third.add_(1)
        assert memory.peak_bytes == 4 * MB


def test_what_comes_to_an_address_is_not_what_was_there() -> None:
    with HollowMemory() as memory:
        kept, gone = torch.empty(MB), torch.empty(MB)
        held = memory.at([internals.storage_address(each.untyped_storage()) for each in (kept, gone)])
        assert len(held) == 2
        assert all(each.lives for each in held)
        del gone
        others = [torch.empty(MB) for _ in range(64)]
        assert [each.lives for each in held].count(True) == 1
        others += [kept]
        assert memory.at([internals.storage_address(each.untyped_storage()) for each in others]) & held == {
            each for each in held if each.lives
        }


def test_no_page_of_it_is_touched() -> None:
    before = resident_bytes()
    with HollowMemory() as memory:
        model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(8)))
        model(torch.randn(64, 4096)).sum().backward()
    assert memory.peak_bytes > 1024 * MB
    assert resident_bytes() - before < 256 * MB


def test_a_linear_layer_by_hand() -> None:
    with HollowMemory() as memory:
        layer = nn.Linear(1000, 500, bias=False)
        inputs = torch.randn(100, 1000)
        output = layer(inputs)
        memory.restart()
        output.sum().backward()
        # weight, inputs, output, its gradient (one number expanded, then made whole by the product), weight's gradient.
        assert memory.peak_bytes == 4 * (500_000 + 100_000 + 50_000 + 500_000) + 2 * 4


def test_small_whole_numbers_are_computed() -> None:
    with HollowMemory():
        places = torch.arange(5)
        assert [int(each) for each in places] == [0, 1, 2, 3, 4]
        assert int(torch.tensor([3, 4]).sum()) == 7


def test_all_of_shared_memory_counts_while_it_is_mapped() -> None:
    with HollowMemory() as memory:
        region = memory.share(8 * MB)
        assert sum(memory.living().values()) == 8 * MB
        assert memory.is_shared(region.untyped_storage()._cdata)
        memory.restart()
        torch.ones(1)
        assert memory.peak_bytes == 8 * MB + 4
        del region
        assert memory.living() == {}


def test_what_depends_on_values_is_refused_by_name() -> None:
    def chosen(values: Tensor) -> Tensor:
        return values[values > 0]

    with HollowMemory(), pytest.raises(JobError, match=r"what memory aten\.(nonzero|index)\S* takes is not known"):
        chosen(torch.randn(10))
