"""The order of weights in memory is settled before the run: asked for, or measured."""

from __future__ import annotations

import functools
import re
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace as hr
from headrace.errors import JobError, UsageError
from headrace.spec.events import Notice

IMAGES = torch.randn(32, 3, 6, 6, generator=torch.Generator().manual_seed(1)), torch.arange(32) % 2


class Biased(nn.Module):
    """A model that takes longer where its input lies in one of the orders."""

    def __init__(self, slow_last: bool, seconds: float = 0.004) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 2, 3)
        self.slow_last, self.seconds = slow_last, seconds

    def forward(self, images: Tensor) -> Tensor:
        if images.is_contiguous(memory_format=torch.channels_last) == self.slow_last:
            until = time.thread_time() + self.seconds
            while time.thread_time() < until:
                pass
        return self.layer(images).mean((2, 3))  # type: ignore[no-any-return]


def viewed() -> nn.Module:
    class Viewed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.out = nn.Conv2d(3, 2, 3), nn.Linear(32, 2)

        def forward(self, images: Tensor) -> Any:
            found = self.layer(images)
            return self.out(found.view(len(found), -1))

    return Viewed()


def dense() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(108, 2))


def job(model: Any, order: str = "auto", **changes: Any) -> hr.Job:
    made = hr.Job(
        model,
        task=hr.tasks.multiclass(2),
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        data=IMAGES,
        global_batch_size=16,
        steps=1,
        options=hr.Options(memory_format=order),
    )
    return replace(made, **changes)


def settled(asked: hr.Job, strategy: Any = hr.OneDevice(threads=1)) -> tuple[str, list[str]]:  # noqa: B008
    """Returns the order that a run has settled for, and what it says of it."""
    run = hr.fit(asked, strategy, engine=hr.ThreadEngine())
    said = [event.text for event in run.events if isinstance(event, Notice)]
    return run.job.options.memory_format, [line for line in said if "memory_format" in line]


def test_the_faster_order_is_taken_and_both_times_are_said() -> None:
    order, (line,) = settled(job(functools.partial(Biased, slow_last=False)))
    assert order == "channels_last"
    found = re.fullmatch(r"memory_format: channels_last, ([\d.]+) ms a step against ([\d.]+)", line)
    assert found
    assert float(found[1]) + 2 < float(found[2])


@pytest.mark.parametrize("strategy", [hr.OneDevice(threads=1), hr.Mirrored(2)], ids=lambda each: each.name)
def test_the_models_own_order_stays_where_it_is_faster(strategy: hr.Strategy) -> None:
    order, (line,) = settled(job(functools.partial(Biased, slow_last=True)), strategy)
    assert order == "preserve"
    assert re.fullmatch(r"memory_format: the model's own, [\d.]+ ms a step against [\d.]+ in channels_last", line)


def test_all_workers_train_in_the_order_that_was_chosen() -> None:
    def checked(worker: hr.Worker) -> None:
        for batch in worker.batches():
            worker.step(batch)
        assert not worker.model.get_parameter("layer.weight").is_contiguous()

    asked = job(functools.partial(Biased, slow_last=False))
    assert hr.launch(checked, asked, hr.Mirrored(2), engine=hr.ThreadEngine()).status == "ok"


def test_a_slow_model_is_measured_with_fewer_examples_and_soon() -> None:
    class Slow(Biased):  # each example takes 30 ms, so that a share of 16 would take half a second
        def forward(self, images: Tensor) -> Tensor:
            self.seconds = 0.03 * len(images)
            return super().forward(images)

    began = time.thread_time()
    order, (line,) = settled(job(functools.partial(Slow, slow_last=False)))
    assert order == "channels_last"
    assert line.endswith((", measured with 3 of 16 examples", ", measured with 2 of 16 examples"))
    # In the order that is slow: a step of two examples twice, then four of three. The run itself is in other threads.
    assert time.thread_time() - began < 2.0


def test_a_model_that_fails_in_the_other_order_keeps_its_own() -> None:
    order, (line,) = settled(job(viewed))
    assert order == "preserve"
    assert line.startswith("memory_format: the model's own; a step to measure failed: RuntimeError: view size is not")
    with pytest.raises(JobError, match=r"trained with memory_format='channels_last': RuntimeError: view .*use flatten"):
        settled(job(viewed, "channels_last"))


def test_a_model_without_such_weights() -> None:
    order, lines = settled(job(dense))
    assert order == "preserve"
    assert lines == [
        "memory_format: the model's own; it orders weights of 4 dims, those of convolutions over two dims, and the "
        "model has none"
    ]
    with pytest.raises(UsageError, match="and the model has none; or leave memory_format out"):
        settled(job(dense, "channels_last"))


def test_a_strategy_that_does_not_keep_the_order() -> None:
    order, (line,) = settled(job(functools.partial(Biased, slow_last=False)), hr.ParameterServer(1))
    assert order == "preserve"
    assert line.startswith("memory_format: the model's own; parameter_server does not keep that order; use one_device")


def test_sets_of_parameters_that_take_turns() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = Biased(slow_last=False), Biased(slow_last=True, seconds=0.001)

        def forward(self, images: Tensor) -> Any:
            return self.one(images) + self.other(images)

    def loss(name: str) -> Any:
        # Parts of the model are called without its forward, so that the loss itself puts inputs in order.
        return lambda model, batch: getattr(model, name)(as_last(batch[0], model)).square().mean()

    def as_last(images: Tensor, model: Any) -> Tensor:
        last = model.one.layer.weight.is_contiguous(memory_format=torch.channels_last)
        return images.contiguous(memory_format=torch.channels_last) if last else images

    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    asked = hr.Job(
        Two,
        loss={"one": loss("one"), "other": loss("other")},
        optimizer={"one": sgd, "other": sgd},
        data=IMAGES,
        global_batch_size=16,
        steps=2,
        inputs=lambda batch: batch[0],
        options=hr.Options(memory_format="auto"),
    )
    order, (line,) = settled(asked, hr.Mirrored(2))
    # The steps of both sets count, of 4 ms and of 1 ms.
    assert order == "channels_last"
    assert line.startswith("memory_format: channels_last, ")


def test_measuring_leaves_the_model_and_random_numbers_as_they_were() -> None:
    class Dropping(Biased):
        def __init__(self) -> None:
            super().__init__(slow_last=True)
            self.norm, self.drop = nn.BatchNorm2d(3), nn.Dropout(0.5)

        def forward(self, images: Tensor) -> Tensor:
            return super().forward(self.drop(self.norm(images)))

    measured, plain = (hr.fit(job(Dropping, order), engine=hr.ThreadEngine()) for order in ("auto", "preserve"))
    assert measured.job.options.memory_format == "preserve"
    for one, other in zip(measured.model.state_dict().values(), plain.model.state_dict().values(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_format": "nhwc"}, "memory_format is 'preserve' or 'channels_last' or 'auto', got 'nhwc'"),
        ({"memory_format": "auto", "compile": True}, "memory_format='auto' with compile=True: .* use 'channels_last'"),
    ],
)
def test_values_that_it_cannot_have(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        hr.Options(**options)
