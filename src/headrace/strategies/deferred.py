"""Models of which each worker makes the parameters that it trains, as their constructor would make them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from headrace.collectives.base import ProcessGroup
from headrace.errors import UsageError
from headrace.machine.allocator import give_back
from headrace.training.deferred.parts import parts_of

if TYPE_CHECKING:
    from headrace.weights.reading import StoredValues


def require_same_parts(module: nn.Module, group: ProcessGroup) -> None:
    """Refuses a model that is made in parts, of which ranks would make different ones; all ranks call it."""
    if (parts := parts_of(module)) is None:
        return
    digests = group.gather_numbers([float(parts.digest)])
    if any(each != digests[0] for each in digests):
        raise UsageError(
            "the model's constructor does something else in each process, so that their parts are not of one model: "
            "let it draw from torch, numpy or random, which are seeded alike, or leave out deferred=True, and all "
            "workers get the first one's model"
        )


def make_own(
    module: nn.Module,
    device: torch.device,
    weights: StoredValues | None = None,
    names: Iterable[str] | None = None,
    read: bool = True,
) -> None:
    """Gives a rank's parameters their first values: makes those of a model in parts, then reads what files have.

    `names` are of those that it makes, None for all that have no memory; without `read` what is in files has memory and
    no values.
    """
    if parts := parts_of(module):
        stored = weights.tensors.keys() if weights else ()

        def make(name: str, empty: Tensor) -> Tensor:
            return torch.empty_like(empty, device=device) if name in stored else parts.value(name).to(device)

        parts.fill(module, [*parts.views] if names is None else names, make)
        # The C library would keep it between what stays.
        give_back()
    if weights and read:
        weights.read(module)
