"""compare: every strategy, two references, one table, one page."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import headrace as hr
from engine.victims import Faulty, fail, long_job, make_job
from headrace.api import comparison, profiling
from headrace.engine.base import Engine
from headrace.errors import UsageError, WorkerFailed
from headrace.policies.measurement import Measurement
from headrace.report.model.summary import summarize
from headrace.spec.events import Event

THREADS = hr.ThreadEngine()


@pytest.fixture(autouse=True)
def _brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """References that are measured for a moment; and no progress of theirs is kept."""
    monkeypatch.setattr(comparison, "_MEASURE_S", 0.1)
    monkeypatch.setattr(profiling, "_LOOK_S", 0.01)


def compare(
    strategies: Any, run_dir: Path | None = None, engine: Engine = THREADS, retries: int = 0, **changes: Any
) -> hr.Comparison:
    job = make_job(**{"epochs": 30, **changes})
    return hr.compare(job, strategies, engine=engine, run_dir=run_dir, retries=retries)


@pytest.mark.slow
def test_every_strategy_trains_the_job(tmp_path: Path) -> None:
    result = compare(["one_device", hr.Mirrored(2), hr.CentralStorage(2), hr.Mirrored(3)], tmp_path)
    assert [run.plan.strategy for run in result.runs] == ["one_device", "mirrored", "central_storage", "mirrored"]
    assert [run.run_dir.name for run in result.runs] == ["one_device", "mirrored", "central_storage", "mirrored-2"]
    assert [summary.outcome.status for summary in result.summaries] == ["ok"] * 4
    assert result.references.one_device_examples_per_s == result.runs[0].throughput
    assert sorted(result.references.ceiling_examples_per_s) == [2, 3]
    assert result.run_dir == tmp_path
    assert result.page == tmp_path / "report.html"
    assert result.page.stat().st_size > 10_000
    document = json.loads((tmp_path / "comparison.json").read_text())
    assert len(document["runs"]) == 4


@pytest.mark.slow
def test_one_process_is_measured_where_it_was_not_asked_for(tmp_path: Path) -> None:
    result = compare([hr.Mirrored(2)], tmp_path)
    assert (tmp_path / "reference-one-device").is_dir()
    assert (result.references.one_device_examples_per_s or 0) > 0


@pytest.mark.slow
def test_a_doubtful_run_is_measured_again_and_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []

    def planted(run: Callable[[], hr.Run], average: float | None = None) -> tuple[hr.Run, Measurement]:
        result = run()
        found.append(result.run_dir.name)
        workers = result.plan.workers
        return result, Measurement(100.0 * workers, workers, spread=0.5 if "mirrored" in found[-1] else 0.1)

    monkeypatch.setattr(comparison, "measured", planted)
    result = compare(["one_device", hr.Mirrored(2)], tmp_path, retries=2)
    assert found == ["one_device", "mirrored", "reference-2-unconnected", "again-1-mirrored", "again-2-mirrored"]
    assert result.references.doubts == {"mirrored": ("its rate varied by 50 %",)}
    assert result.references.measured_again == {"mirrored": "again-2-mirrored"}
    assert "disturbed, so not recommended: mirrored" in str(result).replace("\n", " ")
    document = json.loads((tmp_path / "comparison.json").read_text())
    assert document["references"]["doubts"] == {"mirrored": ["its rate varied by 50 %"]}


@pytest.mark.slow
def test_references_repeat_no_lines_and_what_may_differ_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(output, target, reduction="sum")

    changes = {"loss": loss, "task": None, "epochs": 2}
    result = compare([hr.Mirrored(2), hr.LocalSGD(2)], tmp_path, **changes)
    said = {path.name: " ".join(summarize(path).outcome.notices) for path in tmp_path.iterdir() if path.is_dir()}
    assert {name for name, notices in said.items() if "hr.Mean" in notices} == {"mirrored", "parameter_averaging"}
    assert result.references.may_differ == ("parameter_averaging",)
    assert "may differ" in str(result)
    # Shown once, although both runs have it on record.
    assert capfd.readouterr().err.count("hr.Mean") == 1


def test_a_directory_that_holds_a_comparison(tmp_path: Path) -> None:
    (tmp_path / "comparison.json").write_text("{}")
    with pytest.raises(UsageError, match="holds a comparison already; name another run_dir, or delete it"):
        compare(["one_device"], tmp_path)


def test_a_directory_that_holds_a_run(tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "launcher.jsonl").touch()
    with pytest.raises(UsageError, match="holds a run already; name another run_dir, or delete it"):
        compare(["one_device"], tmp_path)


def test_nothing_to_compare() -> None:
    with pytest.raises(UsageError, match="nothing to compare: name at least one strategy"):
        compare([])
    with pytest.raises(UsageError, match="retries must be a whole number of at least 0, got -1"):
        compare(["one_device"], retries=-1)


def test_the_first_error_ends_it(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match="planted"):
        compare(["one_device", hr.Mirrored(2)], tmp_path, model=lambda: Faulty(fail, None))
    assert sorted(os.listdir(tmp_path)) == ["one_device"]


@pytest.mark.slow
def test_an_interrupt_ends_it_with_what_there_is(tmp_path: Path) -> None:
    def press(event: Event) -> None:
        if event.kind == "stepped" and event.rank == 1 and event.step == 5:  # type: ignore[attr-defined]
            os.kill(os.getpid(), signal.SIGINT)

    job = long_job(eval_data=None)
    result = hr.compare(job, [hr.Mirrored(2), hr.CentralStorage(2)], engine=THREADS, run_dir=tmp_path, on_event=press)
    assert [run.status for run in result.runs] == ["interrupted"]
    assert result.page.is_file()


@pytest.mark.slow
def test_without_a_directory_it_goes_when_it_is_forgotten() -> None:
    result = compare(["one_device"])
    folder = result.run_dir
    assert (folder / "comparison.json").is_file()
    del result
    assert not folder.exists()


def test_rates_are_measured_without_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[hr.Job] = []
    monkeypatch.setattr(comparison, "measured", lambda run: (run(), Measurement(100.0, 1, 0.1)))
    job = make_job(eval_data=make_job().data, options=hr.Options(early_stopping=hr.EarlyStopping(patience=1)))
    session = comparison._Session(job, lambda strategy, label, job, seconds: jobs.append(job), 0)
    session._measure(hr.OneDevice(), "again")
    assert [(each.eval_data, each.options.early_stopping) for each in jobs] == [(None, None)]
