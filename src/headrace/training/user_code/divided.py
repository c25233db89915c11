"""What a trial of a model that is divided is made of: ranks that are threads, and how far off their numbers may be."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from headrace.collectives.threads import ThreadCollective, ThreadGroup
from headrace.training.user_code.trial import largest_difference, largest_element

WORLD = 2
"""How many ranks a trial in threads has."""
TOLERANCE: Mapping[torch.dtype, float] = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Of the largest number; 0.1 for other types. Layers may compute in float32 inside a model in double precision."""
SMALL = 1e-3
"""Gradients that are smaller than this part of the largest one are compared with that part of it."""


def run_in_threads(run: Callable[[ThreadCollective], Exception | None]) -> None:
    """Runs all ranks side by side; one that returns an error ends the others' waits."""
    group = ThreadGroup(WORLD)

    def rank(number: int) -> None:
        if run(ThreadCollective(group, number)) is not None:
            group.abort(number)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(WORLD)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def weighed(output: Tensor, first: int = 0) -> Tensor:
    """Returns a sum with a weight an element; that of a part begins with the weight of the row `first`."""
    start = first * output[:1].numel() if first else 0
    place = torch.arange(start, start + output.numel(), device=output.device, dtype=torch.float32).view(output.shape)
    total = (output * torch.cos(place).to(output.dtype)).sum()
    return total.real if total.is_complex() else total


def distance(found: Tensor, right: Tensor, least: float = 0.0) -> float:
    """Returns the largest difference in multiples of what is allowed."""
    off = largest_difference(found, right)
    allowed = max(largest_element(right), least) * TOLERANCE.get(right.dtype, 0.1)
    return off / allowed if allowed else math.inf if off else 0.0
