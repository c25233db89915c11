"""A served model and its clients, against plain loops."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from headrace.errors import PeerLost, Replaced, ServerRefused, UnknownName, UsageError
from headrace.parameter_server import ModelClient, serve_model
from headrace.parameter_server.core.events import Reason

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def make(width: int = 4) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1)).double()
    model[0].bias.requires_grad_(False)
    return model


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(12, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return inputs, inputs.sum(1, keepdim=True)


def backward(model: nn.Module, step: int, part: slice) -> int:
    inputs, targets = (each[part] for each in batch(step))
    model.zero_grad()
    nn.functional.mse_loss(model(inputs), targets).backward()
    return len(inputs)


@contextmanager
def served(model: nn.Module, **options: Any) -> Iterator[str]:
    """Serves a model in a thread; yields the address, and ends the server."""
    addresses: queue.SimpleQueue[str | BaseException] = queue.SimpleQueue()

    def serve() -> None:
        try:
            serve_model(model, SGD, ready=addresses.put, **options)
        except BaseException as error:
            addresses.put(error)

    thread = threading.Thread(target=serve)
    thread.start()
    address = addresses.get(timeout=20)
    if isinstance(address, BaseException):
        thread.join()
        raise address
    try:
        yield address
    finally:
        with ModelClient(make(), address, observes=True, push_codec=options.get("push_codec", "plain")) as client:
            client.end_server()
        thread.join()


def in_threads(*acts: Callable[[], object]) -> None:
    threads = [threading.Thread(target=act) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def distance(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("transport", ["shared_memory", "tcp"])
@pytest.mark.parametrize("workers", [1, 3])
def test_clients_are_one_loop_over_the_whole_batches(workers: int, transport: str) -> None:
    model, alone = make(), make()
    optimizer = SGD(alone.parameters())
    for step in range(10):
        backward(alone, step, slice(0, 12))
        optimizer.step()
    with served(model, workers=workers, transport=transport) as address:
        cuts = [0, 1, 5, 12] if workers == 3 else [0, 12]

        def work(worker: int) -> None:
            with ModelClient(copies[worker], address, worker) as client:
                for step in range(10):
                    count = backward(copies[worker], step, slice(cuts[worker], cuts[worker + 1]))
                    refused.append(client.push(weight=count))

        refused: list[Reason | None] = []
        # Not in the threads, which share torch's random numbers.
        copies = [make() for _ in range(workers)]
        in_threads(*(functools.partial(work, worker) for worker in range(workers)))
    assert distance(model, alone) < 1e-12
    assert refused == [None] * 10 * workers
    assert [distance(copy, model) for copy in copies] == [0.0] * workers


def test_each_push_is_a_step_where_no_worker_waits() -> None:
    model, alone = make(), make()
    optimizer = SGD(alone.parameters())
    with served(model, workers=2, staleness_bound=None) as address, ExitStack() as stack:
        owns = [make(), make()]
        clients = [stack.enter_context(ModelClient(own, address, worker)) for worker, own in enumerate(owns)]
        for step in range(6):
            # By turns: the other's parameters are one update old.
            backward(owns[step % 2], step, slice(0, 12))
            stale = [parameter.grad for parameter in owns[step % 2].parameters()]
            assert clients[step % 2].push() is None
            for parameter, gradient in zip(alone.parameters(), stale, strict=True):
                parameter.grad = gradient
            optimizer.step()
        assert clients[0].moved_bytes > 0
    assert distance(model, alone) < 1e-12


def test_a_worker_that_leaves_is_not_waited_for() -> None:
    with served(make(), workers=2) as address:
        own = make()
        with ModelClient(own, address, 0) as client:
            with ModelClient(make(), address, 1):
                pass
            backward(own, 0, slice(0, 12))
            assert client.push() is None


def test_what_does_not_count_is_said() -> None:
    with served(make(), workers=1) as address:
        own = make()
        with ModelClient(own, address) as client:
            before = [parameter.detach().clone() for parameter in own.parameters()]
            backward(own, 0, slice(0, 12))
            own[2].weight.grad[0, 0] = float("nan")
            assert client.push() is Reason.NOT_FINITE
            assert all(torch.equal(a, b) for a, b in zip(own.parameters(), before, strict=True))
        with pytest.raises(ConnectionError, match="build the same model on both"):
            ModelClient(make(width=5), address)
        other = make()
        other[0].weight = nn.Parameter(torch.zeros(3, 4, dtype=torch.float64))
        with pytest.raises(ServerRefused, match=r"shard 0 is .*3, 4.* in the worker, .*4, 3.* on the server"):
            ModelClient(other, address)


def test_of_two_with_one_number_the_later_goes_on() -> None:
    with served(make(), workers=1) as address, ModelClient(make(), address) as first:
        own = make()
        with ModelClient(own, address) as second:
            with pytest.raises(Replaced):
                first.pull()
            backward(own, 0, slice(0, 12))
            assert second.push() is None


@pytest.mark.parametrize(("worker", "place"), [(1, "{}"), (-1, "{}"), (0, "nowhere")])
def test_a_worker_that_the_server_does_not_have_is_refused(worker: int, place: str) -> None:
    with served(make(), workers=1) as address, pytest.raises(UsageError, match=f"worker={worker} of .* is none"):
        ModelClient(make(), place.format(address), worker)


def test_a_codec_is_that_of_both() -> None:
    given = served(make(), workers=1, push_codec="bf16")
    with given as address, pytest.raises(ConnectionError, match="and compression"):
        ModelClient(make(), address)


def test_a_server_that_has_ended_is_lost() -> None:
    with served(make(), workers=1) as address:
        client = ModelClient(make(), address, patience_s=0.2)
    with pytest.raises(PeerLost):
        client.pull()
    client.close()


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"workers": 0}, UsageError, "workers=0"),
        ({"workers": 1, "staleness_bound": -1}, UsageError, "staleness_bound=-1"),
        ({"workers": 1, "transport": "udp"}, UsageError, "'udp' is none; use 'shared_memory' or 'tcp'"),
        ({"workers": 1, "push_codec": "int3"}, UnknownName, "int3"),
    ],
)
def test_what_is_none_is_refused(options: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words), served(make(), **options):
        pass


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Linear(2, 2, device="meta"), "weight is on meta"),
        (nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last), "weight .* not contiguous"),
        (nn.ReLU(), "no parameter that is trained"),
    ],
)
def test_a_model_that_cannot_be_served_is_refused(model: nn.Module, words: str) -> None:
    with pytest.raises(UsageError, match=words), served(model, workers=1):
        pass
