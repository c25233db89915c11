"""Loops of one's own: what they compute, and what happens where they part."""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import headrace as hr
from engine.victims import NOTICED_S
from headrace.engine.base import Engine
from headrace.engine.local.engine import LocalEngine
from headrace.errors import HeadraceError
from headrace.worker.loops.leased import LeasedLoop, _Phase


@pytest.fixture(params=["threads", "processes"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    if request.param == "threads":
        yield hr.ThreadEngine()
    else:
        with LocalEngine() as local:
            yield local


@pytest.fixture
def job() -> hr.Job:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(203, 20, generator=generator, dtype=torch.float64)
    return hr.Job(
        model=lambda: nn.Linear(20, 3).double(),
        task=hr.tasks.multiclass(3),
        optimizer=functools.partial(torch.optim.SGD, lr=0.3, momentum=0.9),
        data=(x, x[:, :3].argmax(1)),
        eval_data=(x, x[:, :3].argmax(1)),
        global_batch_size=32,
        epochs=1,
    )


@pytest.mark.slow
def test_the_verbs_one_by_one_are_a_step(job: hr.Job, engine: Engine) -> None:
    def train(worker: hr.Worker) -> None:
        for inputs, target in worker.batches():
            worker.backward(F.cross_entropy(worker.model(inputs), target))
            worker.update()
        worker.evaluate()

    run = hr.launch(train, job, hr.Mirrored(2), engine=engine)
    whole = hr.fit(job, hr.OneDevice(), engine=hr.ThreadEngine())
    assert run.metrics == pytest.approx(whole.metrics, abs=1e-9)
    for ours, theirs in zip(run.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [hr.Mirrored(2), hr.CentralStorage(3)], ids=["mirrored", "central_storage"])
def test_a_loop_that_ends_early_on_one_rank_is_named(job: hr.Job, engine: Engine, strategy: hr.Strategy) -> None:
    def early(worker: hr.Worker) -> None:
        for batch in worker.batches():
            worker.step(batch)
            if worker.rank == 0 and worker.round == 1:
                break

    with pytest.raises(HeadraceError, match="rank 0 ended after 2 rounds") as caught:
        hr.launch(early, job, strategy, engine=engine)
    assert "same rounds on every worker" in str(caught.value)


PIECES = {
    "pipeline": hr.Pipeline(2, 4),
    "three stages": hr.Pipeline(3, 4, "1f1b"),
    "tensor_parallel": hr.TensorParallel(2),
    "data x tensor": hr.Hybrid(hr.Mirrored(2), hr.TensorParallel(2)),
    "averaging x tensor": hr.Hybrid(hr.ParameterAveraging(2, period=3), hr.TensorParallel(2)),
    "data x pipeline": hr.Hybrid(hr.Mirrored(2), hr.Pipeline(2, 2)),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "how"), [*((name, "return") for name in PIECES), ("pipeline", "exit")])
def test_who_leaves_a_replica_that_several_hold_is_named_with_its_stage(
    job: hr.Job, engine: Engine, name: str, how: str, tmp_path: Path
) -> None:
    strategy, left = PIECES[name], tmp_path / "left"
    stages = next((each.stages for each in (strategy, *vars(strategy).values()) if isinstance(each, hr.Pipeline)), None)
    widths = (20, 8, 8, 3)
    job = dataclasses.replace(job, model=nn.Sequential(*(nn.Linear(*pair) for pair in pairwise(widths))).double())
    for leaver in (0, 1):

        def early(worker: hr.Worker, leaver: int = leaver) -> None:
            for batch in worker.batches():
                worker.step(batch)
                if worker.rank == leaver and worker.round == 1:
                    left.write_text(str(monotonic()))
                    if how == "exit":
                        sys.exit(0)
                    return

        with pytest.raises(HeadraceError, match=f"rank {leaver}") as caught:
            hr.launch(early, job, strategy, engine=engine)
        assert monotonic() - float(left.read_text()) < NOTICED_S
        message = str(caught.value)
        if how == "return":
            ended = re.search(rf"rank {leaver}( \(.*?\))? ended after 2 rounds", message)
            assert ended
            assert stages is None or f"stage {leaver} of {stages}" in ended[1]
        else:
            assert "SystemExit: 0" in message
            assert f"rank {leaver} (stage {leaver} of {stages}" in message


@pytest.mark.slow
def test_a_loop_may_end_early_on_all_ranks(job: hr.Job, engine: Engine) -> None:
    def short(worker: hr.Worker) -> None:
        for batch in worker.batches():
            worker.step(batch)
            if worker.round == 2:
                break

    run = hr.launch(short, job, hr.Mirrored(2), engine=engine)
    assert run.summary.steps == 3
    assert run.status == "ok"


def test_what_forward_moves_does_not_fall_behind_where_a_share_is_empty() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, 6, generator=generator, dtype=torch.float64)
    job = hr.Job(
        model=lambda: nn.utils.spectral_norm(nn.Linear(6, 3).double()),
        task=hr.tasks.multiclass(3),
        optimizer=functools.partial(torch.optim.SGD, lr=0.3),
        data=(x, x[:, :3].argmax(1)),
        global_batch_size=4,
        epochs=4,
    )
    one = hr.fit(job, hr.OneDevice(), engine=hr.ThreadEngine()).model.state_dict()
    two = hr.fit(job, hr.Mirrored(2), engine=hr.ThreadEngine()).model.state_dict()
    for name, value in one.items():
        assert torch.allclose(two[name], value, rtol=0, atol=1e-9), name


def test_a_worker_that_is_to_leave_asks_for_no_more_data() -> None:
    asked: list[str] = []
    for leave, expected in ((0, ["asked"]), (1, [])):
        session = SimpleNamespace(rank=1, page=SimpleNamespace(ranks=[None, SimpleNamespace(leave=leave)]))
        leases = SimpleNamespace(ask=lambda: asked.append("asked"))
        loop = SimpleNamespace(_phase=_Phase.WORKING, _leaving=False, _session=session, _leases=leases)
        LeasedLoop._ask(cast("LeasedLoop", loop))
        assert (asked, loop._leaving) == (expected, bool(leave))
        asked.clear()
