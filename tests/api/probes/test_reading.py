"""Examples that are others when they are read again, and batches that are not made of their examples one by one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, default_collate

import headrace as hr
from headrace.api.probes.finding import Scope
from headrace.api.probes.reading import probe_reading
from headrace.worker.session import objectives_of

_DRAWN = torch.Generator().manual_seed(3)
INPUTS, TARGETS = torch.randn(22, 4, generator=_DRAWN).double(), torch.randint(0, 3, (22,), generator=_DRAWN)


class Pairs(Dataset[Any]):
    """Examples of several lengths, times a factor."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return INPUTS[index][None].expand(1 + index % 3, 4) * self.factor(index), TARGETS[index]

    def factor(self, index: int) -> float:
        return 1.0


class Counted(Pairs):
    def __init__(self) -> None:
        self.reads = 0

    def factor(self, index: int) -> float:
        self.reads += 1
        return 1 + self.reads / 100


class Noisy(Pairs):
    def __init__(self, draw: Callable[[], float]) -> None:
        self.draw = draw

    def factor(self, index: int) -> float:
        return 1 + self.draw()


class Together(Pairs):
    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        examples = [(INPUTS[index][None], TARGETS[index]) for index in indices]
        mean = torch.stack([inputs for inputs, _ in examples]).mean(0)
        return [(inputs - mean, target) for inputs, target in examples]


class MeanOverTime(nn.Module):
    """Counts what is padded, if it is not told the lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3).double()

    def forward(self, inputs: Tensor, lengths: Tensor | None = None) -> Tensor:
        sums = self.layer(inputs).mul(inputs.abs().sum(-1, keepdim=True) > 0).sum(1)
        return sums / inputs.shape[1] if lengths is None else sums / lengths[:, None]


def padded(examples: list[Any]) -> dict[str, Tensor]:
    inputs, targets = zip(*examples, strict=True)
    lengths = torch.tensor([len(each) for each in inputs])
    return {"inputs": pad_sequence(inputs, batch_first=True), "lengths": lengths, "target": torch.stack(targets)}


def first(examples: list[Any]) -> Any:
    return default_collate([(inputs[:1], target) for inputs, target in examples])


def mixed(examples: list[Any]) -> Any:
    inputs, targets = first(examples)
    return inputs * 0.7 + inputs.flip(0) * 0.3, targets


def job(data: Any, inputs: Any = 0, target: Any = 1) -> hr.Job:
    return hr.Job(
        model=MeanOverTime,
        task=hr.tasks.multiclass(3),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        data=data,
        inputs=inputs,
        target=target,
        global_batch_size=8,
        epochs=1,
    )


def padding(data: Any, *inputs: str) -> hr.Job:
    return job(DataLoader(data, 8, collate_fn=padded), inputs, "target")


@pytest.mark.parametrize(
    ("given", "scope", "text"),
    [
        (padding(Pairs(), "inputs"), Scope.WORKERS, "is padded to the longest"),
        (job(DataLoader(Pairs(), 8, collate_fn=mixed)), Scope.WORKERS, "not made of its examples one by one"),
        (job(Together()), Scope.WORKERS, "not made of its examples one by one"),
        (padding(Counted(), "inputs"), Scope.STATE, "others when they are read again"),
        (padding(Noisy(np.random.RandomState(1).rand), "inputs"), Scope.STATE, "others when they are read again"),
        (padding(Noisy(np.random.rand), "inputs"), Scope.EQUALITY, "draws random numbers"),
        (padding(Pairs(), "inputs", "lengths"), None, ""),
        (job((INPUTS[:, None], TARGETS)), None, ""),
        (padding(Noisy(lambda: 0.5), "inputs", "lengths"), None, ""),
    ],
)
def test_what_reading_again_and_in_parts_finds(given: hr.Job, scope: Scope | None, text: str) -> None:
    module = MeanOverTime()
    findings = probe_reading(given, module, objectives_of(given, module, False)[0])
    assert [finding.scope for finding in findings] == ([scope] if scope else [])
    assert all(text in finding.line for finding in findings)


def test_slow_data_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.api.probes.reading._MOST_S", 0.0)
    data, module = Counted(), MeanOverTime()
    given = padding(data, "inputs")
    (finding,) = probe_reading(given, module, objectives_of(given, module, False)[0])
    assert (finding.scope, data.reads) == (Scope.EQUALITY, 8)
    assert "reading 8 examples takes" in finding.what


def test_a_data_set_begins_as_it_was_and_several_workers_say_that_it_changes() -> None:
    torch.manual_seed(0)
    model, counted = MeanOverTime(), Counted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = job(DataLoader(counted, 8, collate_fn=first))
    order = hr.data.from_arrays(torch.arange(22)).shuffle().batch(8)
    for (indices,) in hr.data.batches(order):
        inputs, targets = first([counted[index] for index in indices.tolist()])
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    counted.reads = 0
    run = hr.fit(given, "one_device", engine=hr.ThreadEngine())
    assert torch.allclose(run.model.layer.weight, model.layer.weight, rtol=0, atol=1e-12)
    counted.reads = 0
    events = hr.fit(given, hr.Mirrored(2), engine=hr.ThreadEngine()).events
    assert any("others when they are read again" in event.text for event in events if event.kind == "notice")
