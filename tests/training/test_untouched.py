"""What a trial changes in a user's objects is put back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headrace.modules import set_train_modes
from headrace.training.user_code.untouched import untouched


class Locked:
    """Its slots cannot be set again, as those of a conversion of the transformers library."""

    __slots__ = ("counts", "name")
    counts: list[int]
    name: str

    def __setattr__(self, name: str, value: Any) -> None:
        if name in type(self).__slots__ and getattr(self, name, None) is not None:
            raise ValueError(name)
        object.__setattr__(self, name, value)


@dataclass(frozen=True, slots=True)
class Frozen:
    counts: list[int]


def test_slots_that_cannot_be_set_are_put_back() -> None:
    locked, frozen = Locked(), Frozen([1])
    locked.counts, locked.name = [1], "first"
    with untouched(locked, frozen):
        locked.counts.append(2)
        object.__setattr__(locked, "name", "second")
        frozen.counts.append(2)
    assert (locked.counts, locked.name, frozen.counts) == ([1], "first", [1])


class Repacked(nn.Module):
    """Its first forward in eval mode packs the weight, as a layer of bitsandbytes does, and has no backward then."""

    support_avx512bf16_for_cpu = True

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(4, dtype=torch.uint8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training and self.support_avx512bf16_for_cpu:
            self.weight.data = self.weight.data.view(2, 2).half()
        return x * self.weight.sum()


def test_a_weight_of_another_form_is_put_back() -> None:
    model = Repacked().eval()
    with untouched(model):
        model(torch.ones(1))
        assert model.weight.shape == (2, 2)
    assert torch.equal(model.weight, torch.arange(4, dtype=torch.uint8))


def test_what_is_trained_repacks_no_weight() -> None:
    model = nn.Sequential(Repacked())
    set_train_modes(model)
    model.eval()(torch.ones(1))
    assert torch.equal(model[0].weight, torch.arange(4, dtype=torch.uint8))
