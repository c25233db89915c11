"""Digests: equal where tensors are, and different by one bit."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from headrace.collectives.digest import digests, ranks_apart
from headrace.collectives.threads import ThreadCollective, ThreadGroup


def test_equal_tensors_have_equal_digests_in_any_order_of_memory() -> None:
    tensor = torch.randn(4, 3, 5, 2)
    assert digests([tensor]) == digests([tensor.to(memory_format=torch.channels_last)])
    assert digests([tensor[:, 1]]) == digests([tensor[:, 1].clone()])
    assert digests([torch.eye(3).to_sparse()]) == digests([torch.eye(3)])


def test_one_bit_changes_a_digest() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.bool):
        tensor = torch.zeros(33, dtype=dtype)
        changed = tensor.clone()
        changed.view(torch.uint8)[7] = 1
        assert digests([tensor]) != digests([changed])
    weight = torch.ones(3)
    assert digests([weight]) != digests([torch.nextafter(weight, 2 * weight)])


def test_the_first_tensor_that_differs_is_named_with_its_rank() -> None:
    def compare(rank: int, tensors: list[Tensor]) -> tuple[int, int] | None:
        return ranks_apart(digests(tensors), ThreadCollective(group, rank))

    same, other = torch.ones(2), torch.zeros(2)
    for of_ranks, expected in (
        ([[same, same, same]] * 3, None),
        ([[same, same, same], [same, same, other], [same, other, same]], (1, 2)),
        ([[same, other, same], [same, same, same], [same, same, same]], (1, 1)),
        ([[], [], []], None),
    ):
        group = ThreadGroup(3)
        with ThreadPoolExecutor(3) as threads:
            assert list(threads.map(compare, range(3), of_ranks)) == [expected] * 3
