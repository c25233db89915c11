"""The ways between workers and servers that strategies choose: shared memory or TCP, all bits or fewer."""

from __future__ import annotations

import functools
from functools import cache

import pytest
import torch
from torch import nn

import headrace as hr
from headrace.errors import UnknownName
from headrace.spec.events import ServerStats
from headrace.transport.remote_client import RemoteClientTransport

THREADS = hr.ThreadEngine()
GENERATOR = torch.Generator().manual_seed(0)
INPUTS = torch.randn(50, 4, dtype=torch.float64, generator=GENERATOR)
CLASSES = torch.randint(4, (50,), generator=GENERATOR)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 4)).double()


def train(strategy: hr.Strategy, **changes: object) -> hr.Run:
    plain = {
        "model": model,
        "task": hr.tasks.multiclass(4),
        "optimizer": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        "data": hr.data.from_arrays(INPUTS, CLASSES).shuffle(),
        "global_batch_size": 12,
        "epochs": 3,
    }
    return hr.fit(hr.Job(**{**plain, **changes}), strategy, engine=THREADS)  # type: ignore[arg-type]


def distance(one: hr.Run, other: hr.Run) -> float:
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    return max(float((mine - its).abs().max()) for mine, its in pairs if mine.requires_grad)


@cache
def on_one_device() -> hr.Run:
    return train(hr.OneDevice())


def moved(run: hr.Run) -> tuple[int, int]:
    """Bytes that were pushed, and pulled."""
    last = {event.rank: event for event in run.events if isinstance(event, ServerStats)}
    shards = [shard for event in last.values() for shard in event.shards]
    return sum(shard.pushed_bytes for shard in shards), sum(shard.pulled_bytes for shard in shards)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize(("workers", "servers"), [(3, 1), (2, 2)])
def test_a_model_of_more_pushes_than_may_be_on_their_way(workers: int, servers: int) -> None:
    def wide() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 100_000), nn.Tanh(), nn.Linear(100_000, 4)).double()

    strategy = hr.ParameterServer(workers, servers, staleness_bound=0, transport="tcp")
    # Every worker waits for answers in the middle of its push, and they depend on the others' pushes.
    run, alone = (train(each, model=wide, epochs=1) for each in (strategy, hr.OneDevice()))
    assert distance(run, alone) <= 1e-9
    last = {event.rank: event for event in run.events if isinstance(event, ServerStats)}
    assert min(len(event.shards) for event in last.values()) > RemoteClientTransport.window


@torch.no_grad()
@pytest.mark.parametrize("transport", ["shared_memory", "tcp"])
@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (2, 2)])
def test_the_numbers_are_the_same_on_either(transport: str, workers: int, servers: int) -> None:
    run = train(hr.ParameterServer(workers, servers, staleness_bound=0, transport=transport))
    assert distance(run, on_one_device()) <= (0.0 if workers == 1 else 1e-9)


@torch.no_grad()
@pytest.mark.parametrize("transport", ["shared_memory", "tcp"])
@pytest.mark.parametrize(
    ("push", "pull", "far", "less"),
    [("bf16", "plain", 1e-2, (4, 1)), ("int8", "plain", 1e-2, (7, 1)), ("plain", "bf16", 1e-2, (1, 4)),
     ("int8", "bf16", 1e-2, (7, 4)), ("plain", "int8", 3e-2, (1, 7))],
)  # fmt: skip
def test_fewer_bits_cost_little_and_save_much(
    transport: str, push: str, pull: str, far: float, less: tuple[int, int]
) -> None:
    lock_step = functools.partial(hr.ParameterServer, 2, staleness_bound=0, transport=transport)
    plain, run = train(lock_step()), train(lock_step(push_codec=push, pull_codec=pull))
    assert 0 < distance(run, plain) < far
    pushed, pulled = moved(run)
    assert moved(plain)[0] / pushed >= less[0]
    assert moved(plain)[1] / pulled >= less[1]


@pytest.mark.parametrize("transport", ["shared_memory", "tcp"])
@pytest.mark.parametrize("kind", [hr.ParameterServer, hr.Downpour])
def test_workers_that_have_fetched_other_roundings_are_evaluated_alike(
    kind: type[hr.ParameterServer], transport: str
) -> None:
    evaluated = {"eval_data": hr.data.from_arrays(INPUTS, CLASSES), "options": hr.Options(ema_decay=0.9)}
    # A worker that holds other values than another one ends the run.
    run = train(kind(3, pull_codec="int8", transport=transport), **evaluated)
    assert run.metrics["loss"] > 0


@torch.no_grad()
@pytest.mark.parametrize("codec", ["bf16", "int8"])
@pytest.mark.parametrize("transport", ["shared_memory", "tcp"])
@pytest.mark.parametrize("strategy", [hr.ParameterServer, hr.Downpour])
def test_the_model_that_is_left_has_all_bits(strategy: type[hr.ParameterServer], transport: str, codec: str) -> None:
    """Where workers meet, they have what the servers have, and not each what a codec makes of it."""
    none = functools.partial(torch.optim.SGD, lr=0.0)
    options = hr.Options(ema_decay=0.9) if strategy is hr.ParameterServer else hr.Options()
    coded = strategy(3, servers=2, transport=transport, pull_codec=codec)
    run, alone = (train(each, optimizer=none, options=options) for each in (coded, hr.OneDevice()))
    assert distance(run, alone) <= (1e-15 if options.ema_decay else 0.0)
    moving = train(coded, options=options, eval_data=(INPUTS, CLASSES))
    assert moving.metrics


@torch.no_grad()
@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_a_gradient_that_is_not_finite_is_refused_in_fewer_bits_too(codec: str) -> None:
    inputs = INPUTS.clone()
    inputs[7] = float("nan")
    data = hr.data.from_arrays(inputs, CLASSES)
    run = train(hr.ParameterServer(2, push_codec=codec), data=data, options=hr.Options(on_nonfinite="skip"))
    assert all(bool(parameter.isfinite().all()) for parameter in run.model.parameters())
    last = [event for event in run.events if isinstance(event, ServerStats)][-1]
    assert last.refused == {"not_finite": 3 * 4}, "one push an epoch, on each of four shards"


@pytest.mark.parametrize("strategy", [hr.ParameterServer, hr.Downpour])
def test_ways_that_do_not_exist_are_refused(strategy: type[hr.ParameterServer]) -> None:
    with pytest.raises(UnknownName, match="did you mean 'tcp'"):
        strategy(transport="tpc")
    with pytest.raises(UnknownName, match="did you mean 'int8'"):
        strategy(push_codec="int")
    with pytest.raises(UnknownName, match="known: bf16, int8, plain"):
        strategy(pull_codec="zip")
