"""What a script asks of its processes: barrier, gather, sums and means."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import headrace as hr
from api.plain_script.plain_runs import on_ranks, said
from headrace.api.plain_script.meeting import Meeting
from headrace.api.plain_script.processes import ScriptProcesses
from headrace.errors import UsageError


def test_alone_the_processes_are_one() -> None:
    here = hr.processes()
    assert (here.rank, here.world, here.is_first) == (0, 1, True)
    here.barrier()
    assert (here.gather("a"), here.sum(2), here.mean(3.0, 4)) == (["a"], 2.0, 3.0)


def test_processes_count_together() -> None:
    def act(meeting: Meeting) -> tuple[Any, ...]:
        here = ScriptProcesses(meeting.rank, meeting.world, lambda: meeting)
        here.barrier()
        mean = here.mean(float(here.rank), 2 * here.rank + 1), here.mean(float("nan"), 0)
        return here.is_first, here.gather({"rank": [here.rank]}), here.sum(torch.tensor(1.5)), *mean  # type: ignore[arg-type]

    first, second = on_ranks(act)
    assert first == (True, [{"rank": [0]}, {"rank": [1]}], 3.0, 0.75, 0.0)
    assert second == (False, *first[1:])  # type: ignore[index]


def test_what_one_rank_alone_gathers_is_named() -> None:
    def act(meeting: Meeting) -> None:
        here = ScriptProcesses(meeting.rank, meeting.world, lambda: meeting)
        here.barrier() if here.is_first else here.sum(1)

    assert "rank 1 is at gather(), sum() or mean() of hr.processes()" in said(on_ranks(act))
    with pytest.raises(UsageError, match=r"use value.item\(\) or value.tolist\(\)"):
        ScriptProcesses(0, 2, Meeting).gather(torch.ones(2))  # type: ignore[arg-type]
