"""What a server does with what is pushed, and what it keeps of each worker."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from headrace.parameter_server.server.optimizer import Remedies
from headrace.parameter_server.wire import ShardLayout, ShardSpec
from headrace.policies.staleness import AllMembers
from parameter_server.stands import WIDTH, Stand, standing


def test_a_worker_without_a_gradient_is_as_far_from_the_mean_as_that_is_from_zero() -> None:
    with standing("local", workers=2, combination=AllMembers(), measures=True) as stand, ThreadPoolExecutor() as pool:
        clients = [stand.client(worker)[0] for worker in range(2)]
        pushed = [torch.full((WIDTH,), 2.0), None]
        rounds = [
            pool.submit(client.push, [[gradient]], lease, share=0.5)
            for lease, (client, gradient) in enumerate(zip(clients, pushed, strict=True))
        ]
        assert [each.result() for each in rounds] == [None, None]
        # Of a mean of ones.
        assert [client.apart for client in clients] == [WIDTH**0.5] * 2


def copies(stand: Stand) -> list[int]:
    """Returns of which workers a server has parameters, and then of which it has encoding errors of replies."""
    _, tensors = stand.server._optimizer.all_state()
    sent = [int(name.split("/")[1]) for name in tensors if name.startswith("sent/")]
    return sent + [int(name.split("/")[2]) for name in stand.layout.residuals if name.startswith("residual/pull/")]


@pytest.mark.parametrize("leaves", [True, False], ids=["leaves", "is lost"])
def test_of_a_worker_that_has_gone_a_server_keeps_no_copy_of_the_parameters(leaves: bool) -> None:
    layout = ShardLayout([ShardSpec("weight", 0, (WIDTH,))], pull_codec="int8")
    with standing("local", workers=2, layout=layout, remedies=Remedies(compensation=0.1)) as stand:
        clients = [stand.client(worker)[0] for worker in range(2)]
        for client in clients:
            client.pull()
        assert copies(stand) == [0, 1, 0, 1]
        stand.cut(0)
        clients[0].pull()
        assert copies(stand) == [0, 1, 0, 1], "it has come back"
        if leaves:
            clients[1].close()
            clients[0].pull()
        else:
            stand.between(lambda: stand.server.lose(1, 1))
        assert copies(stand) == [0, 0]
