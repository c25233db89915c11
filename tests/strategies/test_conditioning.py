"""How far rounding moves a row of the contract: processors sum in other orders."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

from headrace.testing.strategies import MOMENTUM, job_of
from strategies.contract_models import Case, dense
from strategies.contract_runs import distance
from strategies.test_contract import KINDS

MOVED, MOST_MAGNIFIED = 1e-12, 20.0
"""How far the parameters of a row are moved, relatively, and how many times as far it may end."""


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_no_row_magnifies_rounding(kind: str) -> None:
    """Processors round sums differently: of a row that magnifies that, `DOUBLE` would say nothing."""
    row = KINDS[kind]
    job = row.takes(job_of(Case(dense, optimizer=MOMENTUM), rounds=3, epochs=3))
    assert isinstance(job.model, torch.nn.Module)
    moved = copy.deepcopy(job.model)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(5)
        for parameter in moved.parameters():
            parameter.mul_(1 + MOVED * torch.randn_like(parameter))
    here, there = (row.reference(dataclasses.replace(job, model=model), row.many[0]) for model in (job.model, moved))
    assert 0 < distance(here.tensors, there.tensors) <= MOST_MAGNIFIED * MOVED
