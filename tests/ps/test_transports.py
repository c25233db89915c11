"""A server and its clients do not know which way their bytes go."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from comm.ways import WAYS, open_link, open_port
from headrace.policies.staleness import Anytime, Each
from headrace.ps.applier import Applier
from headrace.ps.client import Client, Connection
from headrace.ps.form import Form, Piece
from headrace.ps.server import Server
from headrace.ps.shard import Shard
from headrace.spec.model import ParameterSpec

STEPS = 20
FORMS = (Form([Piece("weight", 0, (2, 7)), Piece("bias", 0, (3,))]), Form([Piece("weight", 14, (7,))]))
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


def train(way: str) -> Tensor:
    """Returns the parameters after every step."""
    stop = threading.Event()
    servers = []
    for form in FORMS:
        machines = [Shard(range(1), Anytime(), Each()) for _ in form.pieces]
        servers.append(Server(open_port(way, form.slots, form.slots), form, Applier(form, SGD, SPECS), machines))

    def serve(server: Server) -> None:
        while not stop.is_set():
            server.turn(0.01)

    threads = [threading.Thread(target=serve, args=(server,)) for server in servers]
    for thread in threads:
        thread.start()
    try:
        return learn(way, [server.address for server in servers])
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        for server in servers:
            server.close()


def learn(way: str, addresses: Sequence[str]) -> Tensor:
    model = zeros()
    connections = [
        Connection(open_link(way, address, form.slots, form.slots), form, places)
        for address, form, places in zip(addresses, FORMS, pieces_of(model.weight.data, model.bias.data), strict=True)
    ]
    client = Client(connections, worker=0)
    seen = []
    client.pull()
    for lease, (inputs, targets) in enumerate(batches()):
        model.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        assert model.weight.grad is not None
        assert model.bias.grad is not None
        assert client.push(pieces_of(model.weight.grad, model.bias.grad), lease, pull=True) is None
        seen.append(torch.cat([model.weight.data.flatten(), model.bias.data]))
    client.close()
    return torch.stack(seen)


@pytest.mark.slow
def test_training_gives_the_same_numbers_either_way() -> None:
    local, remote = (train(way) for way in WAYS)
    model = zeros()
    optimizer = SGD(model.parameters())
    alone = []
    for inputs, targets in batches():
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        alone.append(torch.cat([model.weight.data.flatten(), model.bias.data]))
    assert torch.equal(local, remote)
    torch.testing.assert_close(local, torch.stack(alone))
    assert local[-1].abs().min() > 0
