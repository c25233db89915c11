"""The metrics of a job, computed with an exported file instead of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from headrace.batches import select_target
from headrace.data.given import as_pipeline
from headrace.data.loading.loader import Loader
from headrace.export.predictor import inputs_of
from headrace.metrics import weigh
from headrace.spec.job import Job
from headrace.worker.evaluations.accumulated import Accumulated, accumulates

Program = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
_BATCH = 32


def metrics_of(job: Job, model: torch.nn.Module, programs: Mapping[str, Program]) -> dict[str, dict[str, float]]:
    """Returns the job's metrics over its whole evaluation set, by the names of programs that take inputs by name.

    Of several sets it is the first. A program's output has gone through the task's activation, which is undone:
    metrics and losses take what the model returns.
    There are no metrics without an evaluation set, nor of a model that computes its loss itself.
    """
    if job.eval_data is None or not measurable(job):
        return {name: {} for name in programs}
    task = job.task
    loss = task.loss if task else job.loss
    # Losses of sets of parameters take the model itself, which a program is not.
    measures = {**({"loss": loss} if callable(loss) else {}), **(task.metrics if task else {}), **(job.metrics or {})}
    accumulated = {
        program: {name: Accumulated(name, metric, task) for name, metric in measures.items() if accumulates(metric)}
        for program in programs
    }
    means = {name: measure for name, measure in measures.items() if not accumulates(measure)}
    sums = {name: {measure: [0.0, 0.0] for measure in means} for name in programs}
    pipeline, _ = as_pipeline(job.eval_sets[""])
    loader = Loader(pipeline, job.seed, min(_BATCH, len(pipeline)), (1,), 0, ordered=True)
    for share in loader.sweep(alone=True):
        if not share.examples:
            continue
        tensors = inputs_of(job, model, share.batch).tensors
        target = select_target(share.batch, job.target)
        for name, program in programs.items():
            output = _raw(job, program(tensors))
            for accumulator in accumulated[name].values():
                accumulator.add(output, target)
            for measure, function in means.items():
                total, weight = weigh(function(output, target), share.examples, measure)
                sums[name][measure][0] += float(total)
                sums[name][measure][1] += float(weight)
    values = {}
    for name, totals in sums.items():
        measured = {measure: total / weight for measure, (total, weight) in totals.items() if weight}
        measured |= {measure: accumulator.value() for measure, accumulator in accumulated[name].items()}
        values[name] = {measure: measured[measure] for measure in measures if measure in measured}
    return values


def measurable(job: Job) -> bool:
    """Whether a program's outputs are all that the job's metrics need."""
    return job.task is None or not job.task.name.startswith("own_loss")


def _raw(job: Job, outputs: Mapping[str, Tensor]) -> Any:
    """Returns what the model returned before the activation; of a softmax up to a constant, which changes no metric."""
    if len(outputs) > 1:
        return tuple(outputs.values()) if all(name.startswith("output_") for name in outputs) else dict(outputs)
    (output,) = outputs.values()
    kind = job.task.name.partition("(")[0] if job.task else ""
    if kind in ("multiclass", "language_model"):
        return output.clamp(min=torch.finfo(output.dtype).tiny).log()
    if kind in ("binary", "multilabel"):
        return output.logit(eps=torch.finfo(output.dtype).eps)
    return output
