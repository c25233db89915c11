"""How workers were fed, from events; in words, cells and JSON."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import pytest

from headrace.report.format import to_cells, to_heads
from headrace.report.model.bottleneck import Bottleneck, bottleneck_of
from headrace.report.model.inputs import (
    InputSummary,
    blocked_s,
    busy_s,
    cost_s,
    inputs_of,
    occupancy,
)
from headrace.report.model.summary import summarize
from headrace.report.model.training import StepTimes
from headrace.report.model.verdict import References
from headrace.report.views.page import write_page
from headrace.report.views.subjects import BOTTLENECK, INPUT
from headrace.report.views.table import comparison_plain, comparison_table, run_plain, run_rows, run_table
from headrace.spec.events import Event, InputStageStats, InputStats
from headrace.strategies.mirrored import Mirrored
from headrace.strategies.resolving import resolve


def fed(rank: int, time_s: float, batches: int, parallel: str = "threads") -> InputStats:
    """Of each batch: 8 examples, 0.02 s in the source, half of it waiting, 0.07 s in the transform, 0.01 s to batch."""
    stages = (("source", 0.02, 0.01), ("map(decode)", 0.07, 0.0), ("batch", 0.01, 0.0))
    return InputStats(
        rank=rank,
        time_s=time_s,
        parallel=parallel,
        readers=2,
        seconds=0.1 * batches,
        waited_s=0.025 * batches,
        ready=batches // 2,
        batches=batches,
        examples=8 * batches,
        bytes=8000 * batches,
        skipped=batches // 4,
        stages=tuple(InputStageStats(name, busy * batches, waiting * batches) for name, busy, waiting in stages),
    )


def of(*events: Event, attempts: int = 1) -> InputSummary:
    begun = [dataclasses.make_dataclass("Attempt", ["events"])(events) for _ in range(attempts)]
    found = inputs_of(begun)  # type: ignore[arg-type]
    assert found is not None
    return found


def test_the_last_event_of_a_worker_counts() -> None:
    inputs = of(fed(1, 1.0, 4), fed(0, 1.0, 4), fed(1, 2.0, 10), fed(0, 2.0, 8))
    assert list(inputs.by_rank) == [0, 1]
    assert [each.batches for each in inputs.by_rank.values()] == [8, 10]
    assert inputs.examples == 144
    assert inputs.skipped == 4
    assert [stage.name for stage in inputs.stages] == ["source", "map(decode)", "batch"]
    assert inputs.busiest.name == "map(decode)"
    assert inputs.busiest.busy_s == pytest.approx(0.07 * 18)


def test_a_worker_that_alone_computes_is_named() -> None:
    idle, busy = StepTimes(0.0, 0.0, 0.1, 0.0, 0.0), StepTimes(0.0, 0.1, 0.0, 0.0, 0.0)
    found = bottleneck_of({0: idle, 1: busy}, of(fed(0, 1.0, 4)))
    assert found is not None
    assert (found.kind, found.rank) == ("STRAGGLER", 1)
    assert found.because == "rank 1 computes for all others, who wait for it"


def test_attempts_and_replacements_of_a_lost_worker_add_up() -> None:
    assert of(fed(0, 1.0, 4), attempts=2).by_rank[0].batches == 8
    assert of(fed(0, 1.0, 4), fed(0, 2.0, 6), fed(0, 3.0, 1), fed(0, 4.0, 3)).by_rank[0].batches == 9


def test_what_is_neither_busy_nor_free() -> None:
    each = of(fed(0, 1.0, 10)).by_rank[0]
    assert busy_s(each) == pytest.approx(1.0)
    # Two readers for a second.
    assert blocked_s(each) == pytest.approx(1.0)
    assert occupancy(each) == 0.5
    assert cost_s(each) == pytest.approx(0.00625)
    assert blocked_s(fed(0, 1.0, 10, parallel="inline")) == 0.0


def test_without_input_events_there_is_no_summary() -> None:
    assert inputs_of([]) is None


@pytest.fixture
def run_dir(tmp_path: Path, make_run) -> Path:  # type: ignore[no-untyped-def]
    """A run whose steps take 0.1 s and wait 1 ms."""
    return make_run(tmp_path / "run", extra=[fed(rank, 3.2, 10) for rank in range(2)])


def test_a_run_as_text(run_dir: Path) -> None:
    rows = dict(run_rows(summarize(run_dir)))
    assert rows["input"] == "2 threads, 12.5 ms and 1.00 kB an example: source 20 %, map(decode) 70 %, batch 10 %"
    assert rows["input queue"] == "0.50 batches ready when asked; readers blocked 50 % of their time"
    assert rows["left out"] == "4 examples that could not be had"
    assert rows["bottleneck"].startswith("COMPUTE-BOUND: ")
    assert rows["try next"].startswith("nothing of the input")


def test_it_fits_a_terminal(run_dir: Path) -> None:
    from rich.console import Console

    summary = summarize(run_dir)
    for table in (run_table(summary), comparison_table([summary, summary], References(100.0))):
        text = io.StringIO()
        Console(file=text, width=80, color_system=None).print(table)
        assert max(map(len, text.getvalue().splitlines())) <= 80
        assert "COMPUTE-BOUND" in text.getvalue()


def test_a_run_as_json(run_dir: Path) -> None:
    plain = json.loads(json.dumps(run_plain(summarize(run_dir)), allow_nan=False))
    assert plain["bottleneck"]["kind"] == "COMPUTE-BOUND"
    assert plain["bottleneck"]["stage"] is None
    assert [stage["name"] for stage in plain["input"]["stages"]] == ["source", "map(decode)", "batch"]
    assert plain["input"]["stages"][1]["ms_per_example"] == pytest.approx(8.75)
    assert plain["input"]["by_rank"]["1"]["blocked_s"] == pytest.approx(1.0)
    assert plain["input"]["by_rank"]["0"]["skipped"] == 2
    assert comparison_plain([summarize(run_dir)], References())["runs"][0]["bottleneck"] == plain["bottleneck"]


def test_a_run_that_says_nothing_of_its_input(tmp_path: Path, make_run) -> None:  # type: ignore[no-untyped-def]
    summary = summarize(make_run(tmp_path / "old"))
    assert summary.inputs is None
    assert summary.bottleneck is None
    assert run_plain(summary)["input"] is None
    assert not {"input", "bottleneck"} & dict(run_rows(summary)).keys()


def test_the_page_has_it(run_dir: Path, tmp_path: Path) -> None:
    summary = summarize(run_dir)
    one = write_page(tmp_path / "one.html", [summary]).read_text()
    assert "<h2>Input</h2>" in one
    assert "rank 1 waited 250 ms of 1.0 s for data" in one
    assert '<th scope="row">map(decode)</th><td>8.75</td><td>70 %</td><td>0.0 %</td>' in one
    two = write_page(tmp_path / "two.html", [summary, summary]).read_text()
    assert "<h2>Input</h2>" in two
    assert two.count("<td>COMPUTE-BOUND</td>") == 2


def test_one_row_of_a_comparison(run_dir: Path) -> None:
    summary = summarize(run_dir)
    assert summary.inputs is not None
    cells = (*to_cells(BOTTLENECK, summary.bottleneck), *to_cells(INPUT, summary.inputs))
    assert cells == ("COMPUTE-BOUND", "2 threads", "12.5", "map(decode) 70 %", "0.50", "4")
    assert len(cells) == len([*to_heads(BOTTLENECK), *to_heads(INPUT)])


def step(wait: float = 0.0, compute: float = 0.0, exchange: float = 0.0) -> StepTimes:
    return StepTimes(wait, compute, exchange, 0.01, 0.0)


def reader_of(
    source: float = 0.1, decode: float = 0.6, batch: float = 0.1, waiting: float = 0.0, parallel: str = "threads"
) -> InputStats:
    """Of 100 examples, by 2 readers."""
    stages = (
        InputStageStats("source", source, waiting),
        InputStageStats("map(decode)", decode, waiting),
        InputStageStats("batch", batch, 0),
    )
    readers = 1 if parallel == "inline" else 2
    return InputStats(0, 1.0, parallel, readers, 1.0, 0.5, 0, 10, 100, 1000, 0, stages)


def found(*workers: tuple[StepTimes, InputStats]) -> Bottleneck:
    bottleneck = bottleneck_of(
        {rank: times for rank, (times, _) in enumerate(workers)},
        InputSummary({rank: work for rank, (_, work) in enumerate(workers)}),
    )
    assert bottleneck is not None
    return bottleneck


def test_who_waits_for_data_is_bound_by_the_dearest_stage() -> None:
    bottleneck = found((step(wait=0.7, compute=0.29), reader_of()))
    assert bottleneck.kind == "INPUT-BOUND"
    assert bottleneck.stage == "map(decode)"
    assert bottleneck.rank is None
    assert bottleneck.share == pytest.approx(0.7)
    assert bottleneck.line == (
        "INPUT-BOUND: by map(decode), 75 % of the input's cost; a worker waits for data 70 % of its time"
    )


def test_little_waiting_is_no_bound() -> None:
    bottleneck = found((step(wait=0.05, compute=0.94), reader_of()))
    assert bottleneck.kind == "COMPUTE-BOUND"
    assert bottleneck.stage is None
    assert bottleneck.because == "95 % of a step computes, 5.0 % waits for data"


def test_of_equal_inputs_one_comes_last_and_the_others_wait_for_it_in_the_exchange() -> None:
    bottleneck = found((step(0.0, 0.1, 0.89), reader_of()), (step(0.8, 0.1, 0.09), reader_of()))
    assert (bottleneck.kind, bottleneck.stage, bottleneck.rank) == ("INPUT-BOUND", "map(decode)", None)


def test_a_worker_whose_input_is_dearer_is_a_straggler() -> None:
    bottleneck = found(
        (step(0.0, 0.1, 0.89), reader_of()),
        (step(0.8, 0.1, 0.09), reader_of(source=2.3)),
        (step(0, 0.1, 0.89), reader_of()),
    )
    assert (bottleneck.kind, bottleneck.stage, bottleneck.rank) == ("STRAGGLER", "source", 1)
    assert "rank 1 waits for data 80 % of its time; its input costs 3.75 × the others', most of it source" in (
        bottleneck.because
    )


def test_a_worker_that_computes_longer_is_a_straggler() -> None:
    bottleneck = found(*((step(0.0, compute, 1 - compute), reader_of()) for compute in (0.3, 0.9, 0.3)))
    assert (bottleneck.kind, bottleneck.stage, bottleneck.rank) == ("STRAGGLER", None, 1)
    assert "rank 1 computes 3.00 × as long as the others" in bottleneck.because
    named = bottleneck.remedy.rpartition(": ")[2]
    assert resolve(named, 3) == Mirrored(workers=3, balance="speed")


def test_the_exchange() -> None:
    bottleneck = found((step(0.0, 0.3, 0.7), reader_of()), (step(0.0, 0.3, 0.7), reader_of()))
    assert bottleneck.kind == "EXCHANGE-BOUND"
    assert bottleneck.share == pytest.approx(0.7 / 1.01)


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (reader_of(parallel="inline"), 'read_by(data, cache="memory")'),
        (
            reader_of(waiting=0.5, parallel="inline"),
            "4 threads that read, since reading waits: data=",
        ),
        (reader_of(waiting=0.5), 'read_by(data, cache="memory")'),
        (reader_of(source=2.0), 'read_by(data, cache="memory")'),
        (reader_of(batch=2.0), "smaller tensors"),
        (reader_of(batch=2.0, parallel="inline"), 'parallel="processes"'),
    ],
)
def test_what_to_try_next_follows_from_where_the_time_goes(work: InputStats, said: str) -> None:
    assert said in found((step(wait=0.5, compute=0.4), work)).remedy


def test_without_a_step_there_is_no_bottleneck() -> None:
    assert bottleneck_of({}, InputSummary({0: reader_of()})) is None
