"""verify tells a difference from rounding; what cannot be compared with the plain loop is compared with one device."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

import headrace as hr
from api.verification.test_verify import job, verified
from headrace.strategies import Strategy


def test_rounding_in_single_precision_is_no_difference() -> None:
    """Without a gradient but rounding's, Adam makes whole steps; double precision tells."""

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            hidden: Tensor = self.before(x)
            return hidden - hidden.mean(1, keepdim=True) + 1e3 * hidden.mean() - 1e3 * hidden.mean().detach()

    found = verified(job(model=Flat, optimizer=partial(torch.optim.Adam, lr=0.1)), hr.Mirrored(workers=2))
    assert found.precision in ("single", "double")
    assert found.equal, str(found)


def rounded(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.float(), target)


def test_a_loss_in_single_precision_may_be_rounded_in_a_double_model() -> None:
    found = verified(job(task=None, loss=rounded), hr.Mirrored(workers=2), double=True)
    assert found.equal, str(found)
    largest = {row.what: row.largest or 0.0 for row in found.rows}
    assert max(largest["losses"], largest["evaluation in the run"]) < 1e-6


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(20, 4, sparse=True), nn.Linear(4, 3)
        nn.init.normal_(self.table.weight, std=0.1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.table((x[:, 0].abs() * 6).long().clamp(max=19)))
        return output


@pytest.mark.parametrize(
    "strategy",
    [hr.Mirrored(2), hr.ParameterServer(workers=2, servers=2, staleness_bound=0)],
    ids=lambda each: each.name,
)
def test_sparse_embeddings_are_compared_with_one_device(strategy: Strategy) -> None:
    found = verified(job(model=Rows, optimizer=partial(torch.optim.Adagrad, lr=0.1)), strategy, double=True)
    assert found.equal, str(found)
    assert found.reference == "a run under one_device"
