"""What users see of their input: events, what was left out, and their own errors with the example's key."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from torch import Tensor, nn

import headrace as hr
from engine import victims
from engine.victims import EXAMPLES, INPUTS, TARGETS, make_job
from headrace.api.run import Run
from headrace.engine.local.engine import LocalEngine
from headrace.errors import WorkerFailed
from headrace.report.model.events import read_events
from headrace.spec.events import Event, Failed, InputStats, Notice, WorkerEnded

pytestmark = pytest.mark.slow

Example = tuple[Tensor, Tensor]


def pipeline(parallel: str) -> hr.data.Pipeline:
    """Its last example makes trouble; the launcher looks at the first ones alone."""

    def troubled(example: Example) -> Example:
        if example[0].equal(INPUTS[-1]):
            raise ValueError("no good")
        return example

    return hr.data.from_arrays(INPUTS, TARGETS).shuffle().map(troubled, parallel=parallel)


def of_rank(run: Run, kind: type[Event], rank: int) -> list[Event]:
    return [event for event in run.events if isinstance(event, kind) and event.rank == rank]


@pytest.mark.parametrize("parallel", ["inline", "threads"])
def test_an_error_comes_back_with_the_examples_key_and_the_users_traceback(
    engine: LocalEngine, tmp_path: Path, parallel: str
) -> None:
    with pytest.raises(WorkerFailed) as caught:
        hr.fit(make_job(data=pipeline(parallel)), engine=engine, run_dir=tmp_path)
    message = str(caught.value)
    assert f"example {EXAMPLES - 1} cannot be had: map(troubled) raised ValueError: no good" in message
    failed = [event for event in read_events(tmp_path) if isinstance(event, Failed)]
    frames = [line.split(", in ")[-1] for line in failed[0].traceback.splitlines() if line.startswith("  File ")]
    assert frames == ["troubled"]
    assert failed[0].traceback.splitlines()[-1] == "ValueError: no good"
    assert failed[0].exit_code == 5


@pytest.mark.parametrize("parallel", ["inline", "threads"])
def test_what_is_left_out_is_counted_and_said(engine: LocalEngine, parallel: str) -> None:
    data = pipeline(parallel).on_error("skip")
    run = hr.fit(make_job(data=data, epochs=3), hr.Mirrored(2), engine=engine)
    last = [of_rank(run, InputStats, rank)[-1] for rank in range(2)]
    assert all(isinstance(event, InputStats) for event in last)
    assert sum(event.skipped for event in last) == 3  # type: ignore[attr-defined]
    assert sum(event.examples for event in last) == 3 * (EXAMPLES - 1)  # type: ignore[attr-defined]
    said = [event.text for event in run.events if isinstance(event, Notice) and event.rank >= 0]
    assert any(f": example {EXAMPLES - 1}: map(troubled) raised ValueError: no good" in line for line in said)
    counts = [re.search(r"has left out (\d+) example", line) for line in said]
    assert sum(int(found[1]) for found in counts if found) == 3


def test_too_many_end_the_run(engine: LocalEngine) -> None:
    with pytest.raises(WorkerFailed, match=r"1 example of epoch 0 could not be had.*most=0"):
        hr.fit(make_job(data=pipeline("inline").on_error("skip", most=0)), engine=engine)


def test_every_worker_says_how_it_was_fed_and_says_it_before_its_end(engine: LocalEngine) -> None:
    def slow(example: Example) -> Example:
        time.sleep(0.002)
        return example

    data = hr.data.from_arrays(INPUTS, TARGETS).map(slow, parallel="inline")
    run = hr.fit(make_job(data=data, epochs=20), hr.Mirrored(2), engine=engine)
    for rank in range(2):
        told = of_rank(run, InputStats, rank)
        # Reading alone takes 1.28 s, and it speaks about once a second.
        assert len(told) >= 2
        last = told[-1]
        assert isinstance(last, InputStats)
        assert (last.parallel, last.readers, last.batches, last.examples) == ("inline", 1, 160, 640)
        assert [stage.name for stage in last.stages] == ["source", "map(slow)", "batch"]
        assert last.stages[1].busy_s >= 640 * 0.002
        own = [event for event in run.events if event.rank == rank]
        assert isinstance(own[-1], WorkerEnded)
    bottleneck = run.summary.bottleneck
    assert bottleneck is not None
    assert (bottleneck.kind, bottleneck.stage) == ("INPUT-BOUND", "map(slow)")


def test_one_slow_input_is_a_straggler(engine: LocalEngine) -> None:
    def slow(example: Example) -> Example:
        if victims.rank() == 1:
            time.sleep(0.005)
        return example

    data = hr.data.from_arrays(INPUTS, TARGETS).map(slow, parallel="inline")
    bottleneck = hr.fit(make_job(data=data, epochs=5), hr.Mirrored(2), engine=engine).summary.bottleneck
    assert bottleneck is not None
    assert (bottleneck.kind, bottleneck.stage, bottleneck.rank) == ("STRAGGLER", "map(slow)", 1)


def test_one_slow_computer_is_a_straggler(engine: LocalEngine) -> None:
    class Slow(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            if victims.rank() == 1:
                time.sleep(0.02)
            return super().forward(inputs)

    job = make_job(model=lambda: Slow(4, 1), epochs=5)
    bottleneck = hr.fit(job, hr.Mirrored(2), engine=engine).summary.bottleneck
    assert bottleneck is not None
    assert (bottleneck.kind, bottleneck.stage, bottleneck.rank) == ("STRAGGLER", None, 1)
