"""One worker on a GPU and one on the CPU: the same numbers as on one device, or the same learning."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

import headrace as hr
from headrace.spec.events import SharesBalanced, Stepped, WorkerStarted
from headrace.strategies import Strategy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]

BOTH = ("cuda:0", "cpu")
PLAIN = functools.partial(torch.optim.SGD, lr=0.05)


def make() -> nn.Module:
    """A small convolutional network with BatchNorm, in double precision."""
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 2)).double()


def dense() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 2)).double()


def job(model: Callable[[], nn.Module] = dense, epochs: int = 3, **options: object) -> hr.Job:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(150, 1, 8, 8, generator=generator, dtype=torch.float64)
    y = (x.sum((1, 2, 3)) > 0).long()
    return hr.Job(
        model=model,
        task=hr.tasks.multiclass(2),
        optimizer=PLAIN,
        data=(x, y),
        eval_data=(x, y),
        global_batch_size=32,
        epochs=epochs,
        options=hr.Options(**options),  # type: ignore[arg-type]
    )


def largest_difference(a: nn.Module, b: nn.Module) -> float:
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return max(float((x.double() - y.double()).abs().max()) for x, y in pairs)


def devices_of(run: hr.Run) -> dict[int, str]:
    return {event.rank: event.device for event in run.events if isinstance(event, WorkerStarted)}


@pytest.mark.parametrize(
    ("strategy", "devices", "trained"),
    [
        (hr.Mirrored(), BOTH, job(make, batch_norm="sync", clip_norm=1.0)),
        (hr.Mirrored(), ("cpu", "cuda:0"), job()),
        (hr.Mirrored(), ("cuda:0", "cuda:0"), job()),
        (hr.Mirrored(balance="speed"), BOTH, job(epochs=8)),
        (hr.ParameterServer(staleness_bound=0), BOTH, job()),
        (hr.ParameterAveraging(period=1), BOTH, job()),
    ],
    ids=["mirrored", "from the CPU", "two on one", "balanced", "parameter server", "averaging"],
)
def test_it_equals_one_device(strategy: Strategy, devices: Sequence[str], trained: hr.Job) -> None:
    one = hr.fit(trained, hr.OneDevice(), device="cpu")
    run = hr.fit(trained, strategy, device=devices)
    assert devices_of(run) == dict(enumerate(devices))
    assert largest_difference(run.model, one.model) < 1e-9
    assert run.metrics == pytest.approx(one.metrics, abs=1e-9)


@pytest.mark.parametrize(
    "make_strategy", [functools.partial(hr.DiLoCo, period=4), functools.partial(hr.EASGD, period=4)]
)
def test_averaging_is_that_of_workers_on_cpus(make_strategy: Callable[[int], Strategy]) -> None:
    here = hr.fit(job(), make_strategy(2), device="cpu")
    assert largest_difference(hr.fit(job(), make_strategy(2), device=BOTH).model, here.model) < 1e-9


@pytest.mark.parametrize(
    "strategy", [hr.ParameterServer(), hr.Downpour(fetch_every=2, push_every=2)], ids=lambda it: it.name
)
def test_both_train_one_model_asynchronously(strategy: Strategy) -> None:
    run = hr.fit(job(epochs=20), strategy, device=BOTH)
    assert {event.rank for event in run.events if isinstance(event, Stepped) and event.examples} == {0, 1}
    assert run.metrics["accuracy"] > 0.8


def test_the_slower_device_gets_fewer_examples() -> None:
    """The larger the share, the more the GPU is ahead; what it has at the end is more than half."""
    run = hr.fit(job(wide_model, epochs=20), hr.Mirrored(balance="speed"), device=BOTH)
    shares = [event.sizes for event in run.events if isinstance(event, SharesBalanced)]
    assert shares
    assert shares[-1][0] > shares[-1][1] >= 1


def wide_model() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 4096), nn.Tanh(), nn.Linear(4096, 4096), nn.Linear(4096, 2)
    ).double()
