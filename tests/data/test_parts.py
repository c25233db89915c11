"""Batches of parts of their examples: the parts of the batch, or padded, or combined."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from headrace.data.pipeline.parts import COMBINES, PADS, differences

SEQUENCES = [torch.arange(1.0, length + 1) * (length + 1) for length in (2, 4, 1, 3)]


@dataclass
class Graphs:
    nodes: Tensor
    of: Tensor
    names: list[str]


def graphs(examples: list[Tensor]) -> Graphs:
    of = [torch.full((len(each),), place) for place, each in enumerate(examples)]
    return Graphs(torch.cat(examples), torch.cat(of), [str(len(each)) for each in examples])


def centred(examples: list[Tensor]) -> Tensor:
    values = torch.stack([each[0] for each in examples])
    return values - values.mean()


@pytest.mark.parametrize(
    ("collate", "wanted"),
    [
        (graphs, {}),
        (lambda given: {"items": list(given), "mask": torch.ones(3), "tokens": sum(map(len, given))}, {}),
        (lambda given: torch.stack([each[:1] for each in given], 1), {}),
        (lambda given: torch.stack([each[:1] for each in given[-3:]]) if len(given) > 1 else None, {}),
        (lambda given: pad_sequence(given, batch_first=True), {"batch": PADS}),
        (lambda given: (pad_sequence(given), len(given)), {"batch[0]": PADS}),
        (lambda given: pad_sequence(given, batch_first=True, padding_side="left"), {"batch": PADS}),
        (centred, {"batch": COMBINES}),
        (lambda given: {"longest": max(map(len, given))}, {"batch['longest']": COMBINES}),
        (lambda given: torch.stack([each[0] for each in given]).roll(1), {"batch": COMBINES}),
    ],
)
def test_what_parts_have_otherwise(collate: Callable[[list[Tensor]], Any], wanted: dict[str, str]) -> None:
    parts = [collate(SEQUENCES[:1]), collate(SEQUENCES[1:])]
    assert dict(differences(collate(SEQUENCES), parts)) == wanted
