"""How far a run is, for Ray's dashboard and what scrapes it (Prometheus)."""

from __future__ import annotations

from ray.util.metrics import Gauge

from headrace.engine.base import RunProgress
from headrace.worker.run_spec import RunSpec

_TAGS = ("run", "strategy")


class RunGauges:
    """Steps, examples and the loss of one run, as gauges of Ray's metrics with the run's directory and strategy."""

    def __init__(self, spec: RunSpec) -> None:
        tags = {"run": spec.run_dir.name, "strategy": spec.plan.strategy}
        self._step = Gauge("headrace_step", "Steps that are done.", _TAGS)
        self._examples = Gauge("headrace_examples", "Examples that all workers have done.", _TAGS)
        self._loss = Gauge("headrace_loss", "The last loss of the first worker that has one.", _TAGS)
        for gauge in (self._step, self._examples, self._loss):
            gauge.set_default_tags(tags)

    def show(self, progress: RunProgress) -> None:
        """Sets the gauges."""
        self._step.set(progress.step)
        self._examples.set(progress.examples)
        self._loss.set(progress.loss)
