"""What is said of a loader's first batches: they are padded or combined, and reading changes the data set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from api.plain_script.plain_runs import on_ranks
from headrace.api.plain_script.meeting import Meeting
from headrace.api.plain_script.shares import ShareLoader

NUMBERS = TensorDataset(torch.arange(22))


class Counted(Dataset[Any]):
    def __init__(self) -> None:
        self.reads = 0

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return torch.ones(1 + index % 3)

    def __len__(self) -> int:
        return 24


class Together(Dataset[Any]):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        values = torch.tensor(indices).double()
        return list(values - values.mean())

    def __len__(self) -> int:
        return 24


class Buffered(Dataset[Any]):
    def __init__(self) -> None:
        self.buffer, self.counts = torch.zeros(2), {"none": 0}

    def __getitem__(self, index: int) -> Any:
        return self.buffer.fill_(index)

    def __len__(self) -> int:
        return 24


class CountedByName(Buffered):
    def __getitem__(self, index: int) -> Any:
        self.counts["none"] += 1
        return torch.ones(2)


class CountedByIndex(Buffered):
    def __getitem__(self, index: int) -> Any:
        self.counts[str(index)] = self.counts.get(str(index), 0) + 1
        return torch.ones(2) * self.counts[str(index)]


def centred(examples: list[Any]) -> Any:
    values = torch.stack([number for (number,) in examples]).double()
    return values - values.mean()


@pytest.mark.parametrize(
    ("loader", "line"),
    [
        (lambda: DataLoader(Counted(), 8, collate_fn=lambda given: torch.stack([each[0] for each in given])), "reads"),
        (lambda: DataLoader([torch.ones(1 + n % 3) for n in range(9)], 9, collate_fn=pad_sequence), "is padded"),
        (lambda: DataLoader(NUMBERS, 8, collate_fn=centred, num_workers=1), "not made of its examples one by one"),
        (lambda: DataLoader(NUMBERS, 8, collate_fn=lambda given: torch.stack([number for (number,) in given])), ""),
        (lambda: DataLoader(Together(), 8), "read together are others"),
        (lambda: DataLoader(Buffered(), 8, num_workers=1), "read together are others"),
        (lambda: DataLoader(CountedByName(), 24), "reading changes 'counts.none'"),
        (lambda: DataLoader(CountedByIndex(), 24), "read together are others"),
        (lambda: DataLoader(Subset(NUMBERS, range(20)), 8, collate_fn=lambda given: torch.stack(sum(given, ()))), ""),
    ],
)
def test_data_that_are_others_on_each_rank_are_said(loader: Callable[[], Any], line: str) -> None:
    def read(meeting: Meeting) -> list[str]:
        lines: list[str] = []
        meeting.say = lines.append  # type: ignore[method-assign]
        data = loader()
        # Ranks are threads here: a draw of one from torch's global generator would look like the other's.
        data.generator = torch.Generator()
        for _ in ShareLoader(data, meeting):
            assert isinstance(_, Tensor)
        return [each for each in dict.fromkeys(lines) if "no backward pass" not in each]

    lines, none = on_ranks(read)
    assert none == []
    assert isinstance(lines, list)
    assert len(lines) == bool(line)
    assert all(line in each for each in lines)
