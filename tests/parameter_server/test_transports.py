"""A server and its clients do not know which way their bytes go."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from headrace.parameter_server.client.client import Client, ServerConnection
from headrace.parameter_server.core.events import Reason
from headrace.parameter_server.core.shard import Shard
from headrace.parameter_server.server.optimizer import ShardOptimizer
from headrace.parameter_server.server.server import Server
from headrace.parameter_server.wire import ShardLayout, ShardSpec
from headrace.policies.staleness import EveryPush, Unbounded
from headrace.spec.model import ParameterSpec
from transport.ways import WAYS, open_link, open_port

STEPS = 20
FORMS = (
    ShardLayout([ShardSpec("weight", 0, (2, 7)), ShardSpec("bias", 0, (3,))]),
    ShardLayout([ShardSpec("weight", 14, (7,))]),
)
"""Two servers: the second has the last row of the weight."""

SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
SPECS = [ParameterSpec("weight", (3, 7)), ParameterSpec("bias", (3,))]


def batches() -> list[tuple[Tensor, Tensor]]:
    chance = torch.Generator().manual_seed(0)
    return [(torch.randn(5, 7, generator=chance), torch.randn(5, 3, generator=chance)) for _ in range(STEPS)]


def zeros() -> nn.Linear:
    model = nn.Linear(7, 3)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model


def pieces_of(weight: Tensor, bias: Tensor) -> list[list[Tensor]]:
    return [[weight[:2], bias], [weight[2]]]


@contextmanager
def serving(way: str, factory: Callable[..., torch.optim.Optimizer] = SGD) -> Iterator[list[Server]]:
    """Lets servers serve, each in a thread."""
    stop = threading.Event()
    servers = []
    for layout in FORMS:
        machines = [Shard(range(1), Unbounded(), EveryPush()) for _ in layout.pieces]
        servers.append(
            Server(open_port(way, layout.slots, layout.slots), layout, ShardOptimizer(layout, factory, SPECS), machines)
        )

    def serve(server: Server) -> None:
        while not stop.is_set():
            server.turn(0.01)

    threads = [threading.Thread(target=serve, args=(server,)) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield servers
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        for server in servers:
            server.close()


@contextmanager
def joined(way: str, servers: Sequence[Server], model: nn.Linear) -> Iterator[Client]:
    """Joins as worker 0, with a model whose parameters are its copy."""
    places = pieces_of(model.weight.data, model.bias.data)
    connections = [
        ServerConnection(open_link(way, server.address, layout.slots, layout.slots), layout, own)
        for server, layout, own in zip(servers, FORMS, places, strict=True)
    ]
    client = Client(connections, worker=0)
    try:
        yield client
    finally:
        client.close()


def gradients_of(model: nn.Linear, inputs: Tensor, targets: Tensor) -> list[list[Tensor]]:
    model.zero_grad()
    nn.functional.mse_loss(model(inputs), targets).backward()
    assert model.weight.grad is not None
    assert model.bias.grad is not None
    return pieces_of(model.weight.grad, model.bias.grad)


def parameters_of(model: nn.Linear) -> Tensor:
    return torch.cat([model.weight.data.flatten(), model.bias.data])


def train(way: str, factory: Callable[..., torch.optim.Optimizer] = SGD) -> Tensor:
    """Returns the parameters after every step."""
    model, seen = zeros(), []
    with serving(way, factory) as servers, joined(way, servers, model) as client:
        client.pull()
        for lease, batch in enumerate(batches()):
            assert client.push(gradients_of(model, *batch), lease, pull=True) is None
            seen.append(parameters_of(model))
    return torch.stack(seen)


def train_alone(factory: Callable[..., torch.optim.Optimizer]) -> Tensor:
    model = zeros()
    optimizer, seen = factory(model.parameters()), []
    for batch in batches():
        gradients_of(model, *batch)
        optimizer.step()
        seen.append(parameters_of(model))
    return torch.stack(seen)


@pytest.mark.parametrize(
    "options",
    [{}, {"weight_decay": 0.1}, {"maximize": True}, {"momentum": 0.5, "nesterov": True}, {"fused": True}],
    ids=str,
)
def test_every_kind_of_sgd_is_that_of_one_device(options: dict[str, Any]) -> None:
    # The plainest takes a shorter way through the server.
    factory = partial(torch.optim.SGD, lr=0.05, **options)
    assert torch.equal(train("local", factory), train_alone(factory))


def test_hooks_of_the_optimizer_are_called_on_the_servers() -> None:
    called: list[int] = []
    model = zeros()
    with serving("local", partial(torch.optim.SGD, lr=0.05)) as servers, joined("local", servers, model) as client:
        for server in servers:
            server._optimizer._updater.optimizer.register_step_pre_hook(lambda *_: called.append(1))
        client.pull()
        client.push(gradients_of(model, *batches()[0]), 0)
    assert len(called) == len(FORMS)


def test_hooks_of_all_optimizers_are_called_on_the_servers() -> None:
    called: list[int] = []
    model = zeros()
    hook = register_optimizer_step_post_hook(lambda *_: called.append(1))
    try:
        with serving("local", partial(torch.optim.SGD, lr=0.05)) as servers, joined("local", servers, model) as client:
            client.pull()
            client.push(gradients_of(model, *batches()[0]), 0)
    finally:
        hook.remove()
    assert len(called) == len(FORMS)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused_counted_and_told(way: str, bad: float) -> None:
    model = zeros()
    with serving(way) as servers, joined(way, servers, model) as client:
        client.pull()
        first, second = batches()[:2]
        assert client.push(gradients_of(model, *first), 0, pull=True) is None
        before = parameters_of(model)
        gradients = gradients_of(model, *second)
        gradients[1][0][3] = bad
        assert client.push(gradients, 1, pull=True) == Reason.NOT_FINITE
        assert torch.equal(parameters_of(model), before), "no shard has taken its part"
        assert client.push(gradients_of(model, *second), 2, pull=True) is None
        assert not torch.equal(parameters_of(model), before)
        refused = [server.counters.event(0, 0.0).refused for server in servers]
    assert refused == [{"not_finite": len(layout)} for layout in FORMS]
