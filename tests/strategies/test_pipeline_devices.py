"""Pipelines whose stages exchange by the devices' own send and receive are one device, and wait for nobody for ever."""

from __future__ import annotations

from functools import partial

import pytest
from torch import Tensor

import headrace as hr
from headrace.pipeline.schedules import SCHEDULES
from pipeline.rendezvous import Devices, Meeting
from strategies.contract_models import Case
from strategies.contract_runs import distance, drive
from strategies.test_pipeline import CASES, DEEP, HOW, ROUNDS, in_stages, job, merged, on_one_device


def between(case: Case, stages: int, micro_batches: int, **options: object) -> tuple[dict[str, Tensor], Meeting]:
    """Returns what comes of a pipeline on devices, and what these have exchanged."""
    strategy = partial(hr.Pipeline, stages, micro_batches, **options)  # type: ignore[arg-type]
    meeting = Meeting(stages)
    ranks = drive(job(case), strategy(), stages, 0, ROUNDS, wired=Devices(meeting))
    assert not any(meeting.running), "all that has been sent was received"
    return merged(ranks), meeting


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("micro_batches", [1, 4, 8])
@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_every_schedule_is_one_device(schedule: str, micro_batches: int, stages: int) -> None:
    """The model has values that go past stages, and the last batch three examples."""
    chunks = 1 if schedule == "interleaved" and stages > 3 else 2
    found, meeting = between(DEEP, stages, micro_batches, schedule=schedule, chunks=chunks)
    assert distance(found, on_one_device(DEEP)) <= 1e-9
    assert distance(found, in_stages(DEEP, stages, micro_batches, schedule=schedule, chunks=chunks)) == 0.0
    assert meeting.nbytes > 0


@pytest.mark.parametrize("how", HOW, ids=lambda how: "-".join(how.values()))
@pytest.mark.parametrize("case", sorted(CASES))
def test_what_there_is_to_sum_and_to_weigh_is_that_of_one_device(case: str, how: dict[str, object]) -> None:
    found, _ = between(CASES[case], 2, 4, **how)
    assert distance(found, on_one_device(CASES[case])) <= 1e-9
