"""Workers that are threads share one process: its generators, and what is patched while a model is traced."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import headrace as hr
from engine.victims import make_job
from headrace.engine import threads
from headrace.errors import UsageError


def slowly_built() -> torch.nn.Module:
    first = torch.nn.Linear(4, 8)
    time.sleep(0.05)
    return torch.nn.Sequential(first, torch.nn.Tanh(), torch.nn.Linear(8, 1))


def test_a_thread_seeds_nothing_while_another_builds_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0's parameters count."""
    work = threads.work

    def late(spec: Any, rank: int, *others: Any) -> None:
        if rank == 0:
            time.sleep(0.05)
        work(spec, rank, *others)

    monkeypatch.setattr(threads, "work", late)
    job = make_job(model=slowly_built, epochs=None, steps=1)
    two, one = (
        hr.fit(job, strategy, engine=hr.ThreadEngine(), check=False).model.state_dict()
        for strategy in (hr.ParameterServer(2, staleness_bound=0), hr.OneDevice())
    )
    torch.testing.assert_close(two, one, atol=1e-6, rtol=0.0)


def test_a_run_leaves_the_callers_random_numbers_as_they_were() -> None:
    before = torch.get_rng_state()
    hr.fit(make_job(epochs=None, steps=1), engine=hr.ThreadEngine(), check=False)
    assert torch.equal(torch.get_rng_state(), before)


def test_backups_are_refused_since_there_is_one_process() -> None:
    with pytest.raises(UsageError, match=r"parameter_server has backups.*ThreadEngine has one process; use backups=0"):
        hr.fit(make_job(), hr.ParameterServer(2, servers=2, backups=1), engine=hr.ThreadEngine())
