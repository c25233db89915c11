from __future__ import annotations

import pytest

from headrace.report.model.events import read_events
from headrace.report.trackers.mlflow import MLflow
from headrace.spec.events import LAUNCHER, Notice, RunEnded, RunStarted


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_run_read_back_with_mlflows_own_client(tmp_path, make_run):
    MlflowClient = pytest.importorskip("mlflow").MlflowClient
    tracker = MLflow(tmp_path / "mlruns", run_name="first")
    for event in read_events(make_run(tmp_path / "mirrored")):
        tracker(event)
    client = MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("headrace")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.status, run.info.run_name) == ("FINISHED", "first")
    assert {key: run.data.params[key] for key in ("strategy", "workers")} == {"strategy": "mirrored", "workers": "2"}
    loss = client.get_metric_history(run.info.run_id, "loss")
    # Step i: 10 - i on rank 0, one more on rank 1.
    assert [(point.step, point.value) for point in loss] == [(step, 10.5 - step) for step in range(10)]
    accuracy = client.get_metric_history(run.info.run_id, "evaluation/accuracy")
    assert [(point.step, point.value) for point in accuracy] == [(5, 0.6), (10, 0.7)]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_store_that_cannot_be_written_does_not_end_the_run(tmp_path):
    pytest.importorskip("mlflow")
    (tmp_path / "mlruns").write_text("a file where the store's folder would be")
    said = []
    with MLflow(tmp_path / "mlruns") as tracker:
        tracker.say = said.append
        tracker(RunStarted(LAUNCHER, 0.0, "mirrored", 2, "cpu", 1, 8, 80, "2026-10-03T14:05:11+02:00", {}, {}))
        tracker(Notice(LAUNCHER, 0.1, "x"))
        tracker(RunEnded(LAUNCHER, 1.0, "ok"))
    (line,) = said
    assert line.startswith("MLflow gets nothing more: ")
