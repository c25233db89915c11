"""What was predicted of a run stands beside what was measured: as text, as JSON, and on its page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.errors import UsageError
from headrace.report.model.summary import summarize
from headrace.report.predicted import PredictedRun
from headrace.report.views.page import write_page
from headrace.report.views.table import run_plain, run_rows

PREDICTED = PredictedRun(200.0, 0.1, 0.06, 0.03, 0.009, 2000.0, 150_000_000)


def test_a_run_without_a_prediction_says_nothing_of_one(make_run, tmp_path: Path) -> None:
    summary = summarize(make_run(tmp_path / "run"))
    assert "predicted" not in dict(run_rows(summary))
    assert run_plain(summary)["prediction"] is None


def test_predicted_beside_measured(make_run, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    PREDICTED.save(folder)
    summary = summarize(folder)
    measured = summary.examples_per_s
    assert measured
    found = {each["name"]: each for each in run_plain(summary)["prediction"]}
    assert found["examples/s"] == {"name": "examples/s", "predicted": 200.0, "measured": measured}
    assert found["moved a step"]["measured"] == summary.cost.moved_bytes_per_step
    # These workers have not written what their runtime took.
    assert "memory of training" not in found
    error = f"{100 * (200 / measured - 1):+.1f} %"
    assert dict(run_rows(summary))["predicted"].startswith(f"examples/s 200 ({error}), step 100 ms")
    page = write_page(tmp_path / "page.html", [summary]).read_text()
    assert "Predicted and measured" in page
    assert error in page


def test_a_damaged_prediction_is_named(make_run, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    (folder / "prediction.json").write_text(json.dumps({"examples_per_s": 1.0}))
    with pytest.raises(UsageError, match=r"prediction\.json cannot be read as a prediction"):
        summarize(folder)
