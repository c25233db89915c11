"""Metrics of torchmetrics: over several workers what torchmetrics computes of the whole evaluation set at once."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import (
    BinaryAUROC,
    BinaryF1Score,
    BinaryPrecision,
    MulticlassAUROC,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
    MulticlassPrecision,
    MulticlassRecall,
    MultilabelAUROC,
)
from torchmetrics.regression import PearsonCorrCoef, R2Score

import headrace as hr
from headrace.errors import UsageError
from headrace.strategies import Strategy

SGD = functools.partial(torch.optim.SGD, lr=0.5)
INPUTS = torch.randn(203, 6, generator=torch.Generator().manual_seed(0))
CLASSES = (INPUTS[:, 0] > 0.3).long() + (INPUTS[:, 3] > 0.5).long()
METRICS: dict[str, Metric] = {
    "f1": MulticlassF1Score(3),
    "auroc": MulticlassAUROC(3),
    "precision": MulticlassPrecision(3, average="weighted"),
    "binned": MulticlassAUROC(3, thresholds=20),
    "sum": MulticlassPrecision(3) + MulticlassRecall(3),
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
    run = hr.fit(job_of(METRICS), strategy, engine=hr.ThreadEngine(), device="cpu")
    predictions = run.model(INPUTS).softmax(1)
    for name, metric in METRICS.items():
        assert run.metrics[name] == pytest.approx(whole(metric, predictions, CLASSES), abs=1e-6), name
        assert not metric.update_called, "the job's own object"
    assert list(run.metrics) == ["loss", "accuracy", *METRICS]


@pytest.mark.slow
def test_processes_get_it_and_one_of_them_has_no_example() -> None:
    few = (INPUTS[:2], CLASSES[:2])
    run = hr.fit(job_of({"f1": METRICS["f1"]}, eval_data=few), hr.Mirrored(3), device="cpu")
    assert run.metrics["f1"] == pytest.approx(whole(METRICS["f1"], run.model(few[0]).softmax(1), few[1]), abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "targets", "outputs", "metric"),
    [
        (hr.tasks.binary(), (INPUTS[:, 0] > 0).long(), 1, BinaryAUROC()),
        (hr.tasks.binary("hinge"), (INPUTS[:, :1] > 0) * 2.0 - 1, 1, BinaryF1Score()),
        (hr.tasks.multilabel(2), (INPUTS[:, :2] > 0).float(), 2, MultilabelAUROC(2)),
        (hr.tasks.multiclass(2), nn.functional.one_hot((INPUTS[:, 0] > 0).long()).float(), 2, MulticlassF1Score(2)),
        (hr.tasks.regression(), INPUTS[:, 0], 1, R2Score()),
        (hr.tasks.regression(), INPUTS[:, 0], 1, PearsonCorrCoef()),
    ],
    ids=lambda value: getattr(value, "name", type(value).__name__) if isinstance(value, hr.tasks.Task) else None,
)
def test_it_gets_predictions_and_labels(task: Any, targets: Tensor, outputs: int, metric: Metric) -> None:
    job = job_of({"own": metric}, functools.partial(nn.Linear, 6, outputs), task, targets)
    run = hr.fit(job, hr.Mirrored(2), engine=hr.ThreadEngine(), device="cpu")
    predictions = task.activation(run.model(INPUTS))
    labels = targets.argmax(1) if "multiclass" in task.name else targets
    if predictions.shape != labels.shape and outputs == 1:
        predictions, labels = predictions.flatten(), labels.flatten()
    if "regression" not in task.name:
        labels = (labels > 0.5).long()
    assert run.metrics["own"] == pytest.approx(whole(metric, predictions, labels), abs=1e-5)


def test_without_a_task_it_gets_output_and_target() -> None:
    job = hr.Job(
        functools.partial(nn.Linear, 6, 1),
        SGD,
        (INPUTS, INPUTS[:, :1]),
        32,
        epochs=1,
        loss=nn.functional.mse_loss,
        metrics={"r2": R2Score()},
        eval_data=(INPUTS, INPUTS[:, :1]),
    )
    run = hr.fit(job, engine=hr.ThreadEngine(), device="cpu")
    assert run.metrics["r2"] == pytest.approx(whole(R2Score(), run.model(INPUTS), INPUTS[:, :1]), abs=1e-6)


class MeanOfMeans(Metric):
    """Its state is a mean over workers, whatever they have."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("mean", torch.tensor(0.0), dist_reduce_fx="mean")

    def update(self, predictions: Tensor, labels: Tensor) -> None:
        count = self.update_count
        self.mean = (self.mean * (count - 1) + predictions[:, 0].mean()) / count

    def compute(self) -> Tensor:
        return self.mean


class Listed(Metric):
    """Its state is a list that is not joined."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("values", [], dist_reduce_fx=None)

    def update(self, predictions: Tensor, labels: Tensor) -> None:
        self.values.append(predictions.mean())

    def compute(self) -> Tensor:
        return torch.stack(self.values).mean()


class OfFirst(Metric):
    """Its state depends on what is a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("largest", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, predictions: Tensor, labels: Tensor) -> None:
        self.largest = self.largest + predictions.max() / len(predictions)

    def compute(self) -> Tensor:
        return self.largest


TASK = dataclasses.replace(hr.tasks.multiclass(3), name="mine", scores_and_labels=None)


class Extremes(Metric):
    """Its state is infinite at first, and then large: no mean."""

    def __init__(self, reduce: str) -> None:
        super().__init__()
        self.add_state("best", torch.tensor(-math.inf if reduce == "max" else math.inf), dist_reduce_fx=reduce)
        self._reduce = getattr(torch, reduce)

    def update(self, predictions: Tensor, labels: Tensor) -> None:
        self.best = self._reduce(torch.stack([self.best, self._reduce(predictions) * 1e6]))

    def compute(self) -> Tensor:
        return self.best


@pytest.mark.parametrize("reduce", ["max", "min"])
def test_extremes_are_no_means(reduce: str) -> None:
    run = hr.fit(job_of({"own": Extremes(reduce)}), hr.Mirrored(2), engine=hr.ThreadEngine(), device="cpu")
    expected = getattr(torch, reduce)(run.model(INPUTS).softmax(1)) * 1e6
    assert run.metrics["own"] == pytest.approx(float(expected.detach()), rel=1e-6)


@pytest.mark.parametrize(
    ("metric", "task", "said"),
    [
        (MetricCollection([MulticlassF1Score(3)]), None, r"'own' is a MetricCollection, .*: metrics=dict\(collection"),
        (MulticlassF1Score(4), None, "the metric 'own' cannot be computed on data: ValueError: .*number of classes"),
        (BinaryF1Score(), None, "the metric 'own' cannot be computed on data: .*shape"),
        (BinaryPrecision(), TASK, "'own' is of torchmetrics, and the task mine has no predictions and labels"),
        (MulticlassConfusionMatrix(3), None, r"'own' gives a tensor of shape \(3, 3\), and an evaluation has one num"),
        (MulticlassF1Score(3, average=None), None, r"'own' gives a tensor of shape \(3,\)"),
        (MulticlassF1Score(3, sync_on_compute=False), None, "'own' does not exchange its states; leave out sync_on"),
        (MeanOfMeans(), None, "'own' averages states of workers: its states must be sums"),
        (Listed(), None, "'own' keeps a list that workers cannot exchange"),
        (OfFirst(), None, "'own' is .* of 3 examples, and .* where two workers have parts of them: its states must be"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Metric) else None,
)
def test_what_would_be_another_number_is_refused_before_the_start(metric: Metric, task: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        hr.fit(job_of({"own": metric}, task=task), hr.Mirrored(2), engine=hr.ThreadEngine(), device="cpu")
