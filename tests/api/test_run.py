"""What a run leaves to its caller, all of it read from the files of its directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import headrace as hr
from engine.victims import EXAMPLES, INPUTS, TARGETS, make_job
from headrace.api.run import Run
from headrace.api.run_directory import TemporaryRunDir
from headrace.errors import RunFailed

CLASSES = (INPUTS.sum(1) > 0).long()


class Normed(nn.Sequential):
    """Asks for the version of what it loads, as some models of torchvision do."""

    _version = 2

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *others: Any) -> None:
        assert metadata["version"] == 2
        super()._load_from_state_dict(state, prefix, metadata, *others)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    job = make_job(model=Normed, task=hr.tasks.multiclass(2), data=(INPUTS, CLASSES), eval_data=(INPUTS, CLASSES),
                   epochs=3)  # fmt: skip
    return hr.fit(job, hr.Mirrored(2), engine=hr.ThreadEngine(), run_dir=tmp_path_factory.mktemp("run"))


def test_the_model_is_ready_for_use(run: Run) -> None:
    assert type(run.model) is Normed
    assert not run.model.training
    assert {tensor.device.type for tensor in run.model.state_dict().values()} == {"cpu"}
    assert run.model is run.model


def test_the_model_is_the_one_that_was_evaluated(run: Run) -> None:
    right = (run.model(INPUTS).argmax(1) == CLASSES).double().mean()
    assert run.metrics["accuracy"] == pytest.approx(float(right))
    loss = nn.functional.cross_entropy(run.model(INPUTS), CLASSES)
    assert run.metrics["loss"] == pytest.approx(loss.item())


def test_the_template_stays_as_it_was_before_training(run: Run) -> None:
    torch.manual_seed(run.job.seed)
    torch.testing.assert_close(run.template.state_dict(), Normed().state_dict())
    assert not torch.equal(run.template[0].weight, run.model[0].weight)  # type: ignore[index, arg-type]


def test_predictions_are_the_tasks(run: Run) -> None:
    predicted = run.predict((INPUTS, CLASSES))
    torch.testing.assert_close(predicted, run.model(INPUTS).softmax(1))
    assert not predicted.requires_grad


def test_predictions_without_a_task_are_the_output() -> None:
    loss = nn.MSELoss()
    run = hr.fit(make_job(task=None, loss=loss), engine=hr.ThreadEngine())
    torch.testing.assert_close(run.predict((INPUTS, TARGETS)), run.model(INPUTS))


def test_numbers_come_from_the_events(run: Run) -> None:
    assert run.throughput is not None
    assert run.throughput > 0
    assert (run.summary.training.steps, run.summary.training.examples) == (3 * 8, 3 * EXAMPLES)
    assert run.summary.outcome.status == run.status == "ok"
    assert not run.interrupted
    assert [event.time_s for event in run.events] == sorted(event.time_s for event in run.events)


@pytest.mark.slow
def test_the_page(run: Run, tmp_path: Path) -> None:
    assert run.report() == run.run_dir / "report.html"
    assert run.report(tmp_path / "page.html") == tmp_path / "page.html"
    assert "mirrored" in (tmp_path / "page.html").read_text()


def test_no_evaluation_no_metrics() -> None:
    assert hr.fit(make_job(), engine=hr.ThreadEngine()).metrics == {}


def test_a_run_without_a_model(run: Run, tmp_path: Path) -> None:
    empty = Run(run.job, run.plan, tmp_path, "ok", run.template)
    with pytest.raises(RunFailed, match=f"there is no {tmp_path}/model.safetensors: the run ended before"):
        _ = empty.model


def test_it_shows_itself_in_a_line(run: Run) -> None:
    assert repr(run) == f"Run(run_dir={run.run_dir!r}, status='ok')"


def test_a_keeper_keeps_as_long_as_it_is_kept(recwarn: pytest.WarningsRecorder) -> None:
    keeper = TemporaryRunDir()
    path = keeper.path
    (path / "file").write_text("")
    del keeper
    assert not path.exists()
    assert not recwarn.list
