"""A collate function may leave out examples: what it makes of the others counts, in every weight."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

import headrace as hr
from headrace.data.pipeline.collator import counted
from headrace.errors import DataError

_EXAMPLE = torch.zeros(3), torch.zeros(1)


def _whole(examples: Any) -> list[Any]:
    return [example for example in examples if example is not None]


def _pictures(examples: Any) -> tuple[Any, ...]:
    return tuple(zip(*_whole(examples), strict=True))


def _by_time(examples: Any) -> tuple[Tensor, Tensor]:
    inputs, targets = zip(*_whole(examples), strict=True)
    return torch.stack(inputs, 1), torch.stack(targets)


def _two_views(examples: Any) -> Tensor:
    return torch.cat([torch.stack([each[0] for each in _whole(examples)])] * 2)


@pytest.mark.parametrize(
    "collate",
    [lambda given: default_collate(_whole(given)), _pictures, _by_time, _two_views],
    ids=lambda each: each.__name__,
)
@pytest.mark.parametrize("broken", [0, 1, 3])
def test_the_examples_that_are_left_are_counted(collate: Any, broken: int) -> None:
    batch, count, said = counted(collate, [None] * broken + [_EXAMPLE] * 4)
    assert (count, said) == (4, "")
    assert batch is not None


def test_examples_that_are_left_out_without_being_none_are_counted() -> None:
    assert counted(lambda given: torch.stack(given[1:]), [torch.zeros(3)] * 4)[1:] == (3, "")
    assert counted(lambda given: None, [torch.zeros(3)] * 4) == (None, 0, "")


def test_the_batch_may_be_the_second_dim() -> None:
    tokens = torch.zeros(3, 8, 5), torch.zeros(3, 8)
    assert counted(lambda given: tokens, [torch.zeros(3)] * 8)[1:] == (8, "")
    assert counted(lambda given: tokens, [None] + [torch.zeros(3)] * 8)[1:] == (8, "")


def test_what_cannot_be_told_is_said() -> None:
    graph = {"nodes": torch.zeros(9), "edges": torch.zeros(2, 5)}
    _, count, said = counted(lambda given: graph, [None, *[_EXAMPLE] * 3])
    assert count == 4
    assert "lengths 2, 9, so how many it left out cannot be told" in said


def test_a_function_that_fails_is_named_with_the_remedy() -> None:
    with pytest.raises(DataError, match=r"cannot make a batch of 2 examples: IndexError: .* let it return None"):
        counted(lambda given: default_collate([]), [_EXAMPLE, _EXAMPLE])


class _Broken(Dataset[Any]):
    """24 examples, of which a third is None, the first two and a whole global batch among them."""

    def __init__(self, broken: frozenset[int]) -> None:
        rng = torch.Generator().manual_seed(1)
        self.inputs, self.targets = (torch.randn(24, width, generator=rng).double() for width in (4, 1))
        self.broken = broken

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return None if index in self.broken else (self.inputs[index], self.targets[index])


def _net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)).double()


_SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def _by_hand(dataset: _Broken) -> torch.nn.Module:
    torch.manual_seed(0)
    model = _net()
    optimizer = _SGD(model.parameters())
    order = hr.data.from_torch(list(range(24))).shuffle().batch(8)
    for epoch in range(2):
        for indices in hr.data.batches(order, epoch=epoch):
            whole = [index for index in indices.tolist() if index not in dataset.broken]
            if whole:
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(dataset.inputs[whole]), dataset.targets[whole]).backward()
                optimizer.step()
    return model


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        (hr.OneDevice(), {"accumulate": 2}),
        (hr.Mirrored(workers=2), {}),
        (hr.ParameterServer(workers=2, staleness_bound=0), {}),
        (hr.Pipeline(stages=2, micro_batches=2), {}),
    ],
    ids=lambda each: getattr(each, "name", None),
)
@pytest.mark.parametrize("filtered", [False, True])
def test_weights_go_by_the_examples_that_are_left(strategy: Any, options: dict[str, Any], filtered: bool) -> None:
    # Of the second, a worker or all workers have no example in some rounds.
    for broken in (frozenset({0, 1, 4, 9, 14, 19}), frozenset(range(24)) - {2, 3, 7, 20}):
        dataset = _Broken(broken)
        data: Any = DataLoader(dataset, batch_size=8, collate_fn=lambda given: default_collate(_whole(given)))
        if filtered:
            data = hr.data.from_torch(dataset).shuffle().filter(lambda example: example is not None)
        job = hr.Job(
            model=_net, task=hr.tasks.regression(), optimizer=_SGD, data=data, global_batch_size=8, epochs=2,
            options=hr.Options(**options),
        )  # fmt: skip
        run = hr.fit(job, strategy, engine=hr.ThreadEngine())
        for name, parameter in _by_hand(dataset).named_parameters():
            torch.testing.assert_close(dict(run.model.named_parameters())[name], parameter, rtol=0, atol=1e-12)
