"""What a loop of one's own gives to the verbs, and what is said of it or refused."""

from __future__ import annotations

import io
import re
import weakref
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import headrace as hr
from headrace.errors import UsageError, WorkerFailed
from headrace.spec.events import Notice
from worker.test_between_verbs import CARRIES, Loop, make_job


def backward_before(worker: hr.Worker) -> None:
    for x, _ in worker.batches():
        worker.model(x).square().mean().backward()
        worker.backward(worker.model(x).mean())
        worker.update()


@pytest.mark.parametrize("name", CARRIES)
def test_gradients_from_before_the_first_backward_are_refused(name: str) -> None:
    with pytest.raises((UsageError, WorkerFailed), match=r"'0.weight'.*: \.grad was there before worker\.backward"):
        hr.launch(backward_before, make_job(), CARRIES[name], engine=hr.ThreadEngine(), check=False)


def summed(worker: hr.Worker) -> None:
    for x, y in worker.batches():
        worker.backward(functional.mse_loss(worker.model(x), y, reduction="sum"))
        worker.update()


def contrasted(worker: hr.Worker) -> None:
    for x, _ in worker.batches():
        outputs = worker.model(x)
        worker.backward(functional.cross_entropy(outputs @ outputs.T, torch.arange(len(x))))
        worker.update()


def clipped(worker: hr.Worker) -> None:
    for x, y in worker.batches():
        worker.backward(functional.mse_loss(worker.model(x), y))
        nn.utils.clip_grad_norm_(worker.model.parameters(), 0.1)
        worker.update()


def of_a_part(worker: hr.Worker) -> None:
    for x, y in worker.batches():
        worker.step((x[:1], y[:1]))


def test_a_sum_is_refused_in_a_loop_of_shares() -> None:
    with pytest.raises(UsageError, match=r"the loss is a sum \(MseLossBackward0 with reduction='sum'.*hr.Mean"):
        hr.launch(summed, make_job(), hr.Mirrored(2), engine=hr.ThreadEngine(), check=False)
    hr.launch(summed, make_job(), hr.OneDevice(), engine=hr.ThreadEngine(), check=False)


def weakened_where_large(worker: hr.Worker) -> None:
    for x, y in worker.batches():
        loss = functional.mse_loss(worker.model(x), y)
        worker.backward(loss * 0.1 if loss.item() > 12 else loss)
        worker.update()


def over_their_mean(worker: hr.Worker) -> None:
    for x, y in worker.batches():
        loss = functional.mse_loss(worker.model(x), y)
        worker.backward(loss / loss.detach())
        worker.update()


def once_more_where_large(worker: hr.Worker) -> None:
    for x, y in worker.batches():
        loss = functional.mse_loss(worker.model(x), y)
        worker.backward(loss)
        if loss > 12:
            worker.backward(worker.model(x).square().mean())
        worker.update()


def flooded(worker: hr.Worker) -> None:
    for x, y in worker.batches():
        worker.backward((functional.mse_loss(worker.model(x), y) - 12).abs() + 12)
        worker.update()


def sharpness_aware(worker: hr.Worker) -> None:
    parameters = list(worker.model.parameters())
    for x, y in worker.batches():
        gradients = torch.autograd.grad(functional.mse_loss(worker.model(x), y), parameters)
        held = [each.detach().clone() for each in parameters]
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.add_(gradient.sign(), alpha=0.01)
        worker.backward(functional.mse_loss(worker.model(x), y))
        with torch.no_grad():
            for parameter, value in zip(parameters, held, strict=True):
                parameter.copy_(value)
        worker.update()


def by_the_rules(worker: hr.Worker) -> None:
    """Reads its losses, has a schedule of its own, and divides by its examples."""
    for x, y in worker.batches():
        loss = (worker.model(x) - y).square().sum() / len(x) * min(1, (worker.round + 1) / 3)
        print(f"{loss.item():.3f}", file=io.StringIO())
        worker.backward(loss + 0.1 * sum(each.square().sum() for each in worker.model.parameters()))
        worker.update()


MIRRORED, CENTRAL, TENSORS = hr.Mirrored(2), hr.CentralStorage(2), hr.TensorParallel(2)
SERVED = hr.ParameterServer(2, staleness_bound=0)
OTHERWISE = "are not made alike"


@pytest.mark.parametrize(
    ("loop", "line", "strategy"),
    [
        (contrasted, "depends on other examples of its share", MIRRORED),
        (clipped, "the loop writes to gradients", MIRRORED),
        (weakened_where_large, rf"{OTHERWISE}.*: on rank 0 .*MulBackward0 \[0.1\].*\(round 2\)", CENTRAL),
        (weakened_where_large, OTHERWISE, SERVED),
        (over_their_mean, OTHERWISE, hr.Mirrored(2, min_workers=1)),
        (once_more_where_large, OTHERWISE, MIRRORED),
        (flooded, r"a limit is put to the loss \(AbsBackward0\)", MIRRORED),
        (sharpness_aware, "parameters that the loop has changed otherwise on each", MIRRORED),
        (sharpness_aware, "the loop writes to parameters, of which each worker has parts", TENSORS),
        *((by_the_rules, "", each) for each in (hr.Mirrored(3), SERVED, TENSORS)),
        (of_a_part, "worker.step got 1 of the examples, and this worker's share has", MIRRORED),
    ],
)
def test_what_a_share_makes_otherwise_is_said(loop: Any, line: str, strategy: hr.Strategy) -> None:
    for chosen in (hr.OneDevice(), strategy):
        run = hr.launch(loop, make_job(), chosen, engine=hr.ThreadEngine(), check=False)
        said = [event.text for event in run.events if event.kind == "notice"]
        found = [text for text in said if re.search(line or f"share|{OTHERWISE}|the loop", text)]
        assert bool(found) == (chosen is strategy and bool(line)), said


def losses_of_other_weights(worker: hr.Worker) -> None:
    for x, _ in worker.batches():
        worker.backward(hr.Mean(worker.model(x).sum(), 3.0))
        worker.backward(hr.Mean(worker.model(x).sum(), 5.0))


def no_update(worker: hr.Worker) -> None:
    for x, _ in worker.batches():
        worker.backward(worker.model(x).mean())


def step_after_backward(worker: hr.Worker) -> None:
    for batch in worker.batches():
        worker.backward(worker.model(batch[0]).mean())
        worker.step(batch)


def outside(worker: hr.Worker) -> None:
    worker.backward(worker.model(torch.ones(1, 4, dtype=torch.float64)).sum())


def after_the_last(worker: hr.Worker) -> None:
    for batch in worker.batches():
        worker.step(batch)
    worker.step(batch)


@pytest.mark.parametrize(
    ("loop", "message"),
    [
        (losses_of_other_weights, "the losses of a round weigh 3 and 5"),
        (no_update, r"went on without worker.update\(\) after worker.backward\(loss\) in round 0"),
        (step_after_backward, r"worker.step\(batch\) after worker.backward\(loss\)"),
        (outside, r"a step outside of `for batch in worker.batches\(\)`"),
        (after_the_last, r"a step outside of `for batch in worker.batches\(\)`"),
    ],
)
@pytest.mark.parametrize("strategy", [hr.OneDevice(), hr.Mirrored(2)], ids=["one_device", "mirrored"])
def test_verbs_out_of_order_are_refused(loop: Loop, message: str, strategy: hr.Strategy) -> None:
    with pytest.raises(UsageError, match=message):
        hr.launch(loop, make_job(), strategy, engine=hr.ThreadEngine(), check=False)


def stepping(worker: hr.Worker) -> None:
    for batch in worker.batches():
        worker.step(batch)


def test_a_step_lets_go_of_its_output() -> None:
    left: list[bool] = []

    def kept(places: list[weakref.ref[torch.Tensor]], module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        places.append(weakref.ref(output))

    def looking(worker: hr.Worker) -> None:
        places: list[weakref.ref[torch.Tensor]] = []
        worker.model.register_forward_hook(partial(kept, places))
        for batch in worker.batches():
            worker.step(batch)
            left.append(places[-1]() is not None)

    hr.launch(looking, make_job(), hr.Mirrored(2), engine=hr.ThreadEngine(), check=False)
    assert left
    assert not any(left)


def test_an_autocast_that_keeps_parameters_of_earlier_rounds_is_refused() -> None:
    def around(worker: hr.Worker, cached: bool) -> None:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
            stepping(worker)

    hr.launch(partial(around, cached=False), make_job(), "mirrored", engine=hr.ThreadEngine(), check=False)
    with pytest.raises(UsageError, match=r"torch\.autocast open from one round into the next"):
        hr.launch(partial(around, cached=True), make_job(), "mirrored", engine=hr.ThreadEngine(), check=False)


@pytest.mark.parametrize("train", [None, stepping])
@pytest.mark.parametrize(
    "strategy",
    [hr.FullySharded(2), hr.TensorParallel(2), hr.Pipeline(2), hr.Hybrid(hr.Mirrored(2), hr.Pipeline(2))],
    ids=lambda strategy: strategy.name,
)
def test_nothing_is_said_of_loops_that_write_nothing(strategy: hr.Strategy, train: Any) -> None:
    arguments = {"strategy": strategy, "engine": hr.ThreadEngine(), "check": False}
    run = hr.launch(train, make_job(), **arguments) if train else hr.fit(make_job(), **arguments)
    assert not any("the loop" in event.text for event in run.events if isinstance(event, Notice))


@pytest.mark.parametrize(
    ("strategy", "said"), [(hr.ParameterServer(2, staleness_bound=0), True), (hr.Mirrored(2), False)]
)
def test_that_each_worker_clips_its_own_gradient_is_said(strategy: hr.Strategy, said: bool) -> None:
    job = replace(make_job(), options=hr.Options(clip_norm=0.1))
    run = hr.fit(job, strategy, engine=hr.ThreadEngine(), device="cpu")
    lines = [event.text for event in run.events if isinstance(event, Notice)]
    assert any(line.startswith("clip_norm: each worker clips the gradient of its own share") for line in lines) == said


def test_a_mean_times_the_length_of_its_share_is_said() -> None:
    def by_length(worker: hr.Worker) -> None:
        for x, y in worker.batches():
            worker.backward(torch.nn.functional.mse_loss(worker.model(x), y) * len(x))
            worker.update()

    run = hr.launch(by_length, make_job(), hr.Mirrored(2), engine=hr.ThreadEngine(), check=False)
    lines = [event.text for event in run.events if isinstance(event, Notice)]
    assert any("a factor that follows their number" in line for line in lines)
