"""Metrics of torchmetrics: over several workers what torchmetrics computes of the whole evaluation set at once."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import headrace as hr
from headrace.errors import UsageError
from headrace.strategies import Strategy
from late import Late

if TYPE_CHECKING:
    from torchmetrics import Metric

tm, own = Late("torchmetrics"), Late("worker.own_metrics")

SGD = functools.partial(torch.optim.SGD, lr=0.5)
INPUTS = torch.randn(203, 6, generator=torch.Generator().manual_seed(0))
CLASSES = (INPUTS[:, 0] > 0.3).long() + (INPUTS[:, 3] > 0.5).long()


@functools.cache
def metrics() -> dict[str, Metric]:
    return {
        "f1": tm.classification.MulticlassF1Score(3),
        "auroc": tm.classification.MulticlassAUROC(3),
        "precision": tm.classification.MulticlassPrecision(3, average="weighted"),
        "binned": tm.classification.MulticlassAUROC(3, thresholds=20),
        "sum": tm.classification.MulticlassPrecision(3) + tm.classification.MulticlassRecall(3),
    }


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def job_of(metrics: Any, model: Any = layers, task: Any = None, targets: Tensor = CLASSES, **more: Any) -> hr.Job:
    data = (INPUTS, targets)
    settings: dict[str, Any] = {"task": task or hr.tasks.multiclass(3), "eval_data": data, "epochs": 1, **more}
    return hr.Job(model, SGD, data, 32, metrics=metrics, **settings)


def whole(metric: Metric, predictions: Tensor, labels: Tensor) -> float:
    copy = metric.clone()
    copy.update(predictions.detach(), labels)
    return float(copy.compute())


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        hr.OneDevice(),
        hr.Mirrored(3),
        hr.ParameterServer(2),
        hr.Pipeline(2, micro_batches=1),
        hr.Hybrid(hr.Mirrored(2), hr.Pipeline(2, micro_batches=1)),
        hr.FullySharded(2),
        hr.ParameterAveraging(2),
    ],
    ids=lambda strategy: type(strategy).__name__,
)
def test_on_several_workers_it_is_that_of_the_whole_set(strategy: Strategy) -> None:
    run = hr.fit(job_of(metrics()), strategy, engine=hr.ThreadEngine(), device="cpu")
    predictions = run.model(INPUTS).softmax(1)
    for name, metric in metrics().items():
        assert run.metrics[name] == pytest.approx(whole(metric, predictions, CLASSES), abs=1e-6), name
        assert not metric.update_called, "the job's own object"
    assert list(run.metrics) == ["loss", "accuracy", *metrics()]


@pytest.mark.slow
def test_processes_get_it_and_one_of_them_has_no_example() -> None:
    few, f1 = (INPUTS[:2], CLASSES[:2]), metrics()["f1"]
    run = hr.fit(job_of({"f1": f1}, eval_data=few), hr.Mirrored(3), device="cpu")
    assert run.metrics["f1"] == pytest.approx(whole(f1, run.model(few[0]).softmax(1), few[1]), abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "targets", "outputs", "metric"),
    [
        (hr.tasks.binary(), (INPUTS[:, 0] > 0).long(), 1, lambda: tm.classification.BinaryAUROC()),
        (hr.tasks.binary("hinge"), (INPUTS[:, :1] > 0) * 2.0 - 1, 1, lambda: tm.classification.BinaryF1Score()),
        (hr.tasks.multilabel(2), (INPUTS[:, :2] > 0).float(), 2, lambda: tm.classification.MultilabelAUROC(2)),
        (
            hr.tasks.multiclass(2),
            nn.functional.one_hot((INPUTS[:, 0] > 0).long()).float(),
            2,
            lambda: tm.classification.MulticlassF1Score(2),
        ),
        (hr.tasks.regression(), INPUTS[:, 0], 1, lambda: tm.regression.R2Score()),
        (hr.tasks.regression(), INPUTS[:, 0], 1, lambda: tm.regression.PearsonCorrCoef()),
    ],
    ids=lambda value: getattr(value, "name", type(value).__name__) if isinstance(value, hr.tasks.Task) else None,
)
def test_it_gets_predictions_and_labels(task: Any, targets: Tensor, outputs: int, metric: Callable[[], Metric]) -> None:
    job = job_of({"own": metric()}, functools.partial(nn.Linear, 6, outputs), task, targets)
    run = hr.fit(job, hr.Mirrored(2), engine=hr.ThreadEngine(), device="cpu")
    predictions = task.activation(run.model(INPUTS))
    labels = targets.argmax(1) if "multiclass" in task.name else targets
    if predictions.shape != labels.shape and outputs == 1:
        predictions, labels = predictions.flatten(), labels.flatten()
    if "regression" not in task.name:
        labels = (labels > 0.5).long()
    assert run.metrics["own"] == pytest.approx(whole(metric(), predictions, labels), abs=1e-5)


def test_without_a_task_it_gets_output_and_target() -> None:
    job = hr.Job(
        functools.partial(nn.Linear, 6, 1),
        SGD,
        (INPUTS, INPUTS[:, :1]),
        32,
        epochs=1,
        loss=nn.functional.mse_loss,
        metrics={"r2": tm.regression.R2Score()},
        eval_data=(INPUTS, INPUTS[:, :1]),
    )
    run = hr.fit(job, engine=hr.ThreadEngine(), device="cpu")
    assert run.metrics["r2"] == pytest.approx(
        whole(tm.regression.R2Score(), run.model(INPUTS), INPUTS[:, :1]), abs=1e-6
    )


TASK = dataclasses.replace(hr.tasks.multiclass(3), name="mine", scores_and_labels=None)


@pytest.mark.parametrize("reduce", ["max", "min"])
def test_extremes_are_no_means(reduce: str) -> None:
    run = hr.fit(job_of({"own": own.Extremes(reduce)}), hr.Mirrored(2), engine=hr.ThreadEngine(), device="cpu")
    expected = getattr(torch, reduce)(run.model(INPUTS).softmax(1)) * 1e6
    assert run.metrics["own"] == pytest.approx(float(expected.detach()), rel=1e-6)


@pytest.mark.parametrize(
    ("metric", "task", "said"),
    [
        (
            lambda: tm.MetricCollection([tm.classification.MulticlassF1Score(3)]),
            None,
            r"'own' is a MetricCollection, .*: metrics=dict\(collection",
        ),
        (
            lambda: tm.classification.MulticlassF1Score(4),
            None,
            "the metric 'own' cannot be computed on data: ValueError: .*number of classes",
        ),
        (
            lambda: tm.classification.BinaryF1Score(),
            None,
            "the metric 'own' cannot be computed on data: .*shape",
        ),
        (
            lambda: tm.classification.BinaryPrecision(),
            TASK,
            "'own' is of torchmetrics, and the task mine has no predictions and labels",
        ),
        (
            lambda: tm.classification.MulticlassConfusionMatrix(3),
            None,
            r"'own' gives a tensor of shape \(3, 3\), and an evaluation has one num",
        ),
        (
            lambda: tm.classification.MulticlassF1Score(3, average=None),
            None,
            r"'own' gives a tensor of shape \(3,\)",
        ),
        (
            lambda: tm.classification.MulticlassF1Score(3, sync_on_compute=False),
            None,
            "'own' does not exchange its states; leave out sync_on",
        ),
        (
            lambda: own.MeanOfMeans(),
            None,
            "'own' averages states of workers: its states must be sums",
        ),
        (
            lambda: own.Listed(),
            None,
            "'own' keeps a list that workers cannot exchange",
        ),
        (
            lambda: own.OfFirst(),
            None,
            "'own' is .* of 3 examples, and .* where two workers have parts of them: its states must be",
        ),
    ],
)
def test_what_would_be_another_number_is_refused_before_the_start(
    metric: Callable[[], Metric], task: Any, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        hr.fit(job_of({"own": metric()}, task=task), hr.Mirrored(2), engine=hr.ThreadEngine(), device="cpu")
