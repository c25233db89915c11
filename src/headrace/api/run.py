"""What a run leaves to its caller."""

from __future__ import annotations

import copy
import shutil
import tempfile
import weakref
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from headrace.errors import RunFailed
from headrace.report.model.events import read_events
from headrace.report.model.summary import Summary, summarize
from headrace.report.views.page import write_page
from headrace.spec.events import Event
from headrace.spec.job import Job
from headrace.spec.plan import Plan
from headrace.training.whole_model import call


class TemporaryRunDir:
    """A temporary directory that goes with its holder.

    Without the warning of `tempfile.TemporaryDirectory`: a run is not closed, only forgotten.
    """

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="headrace-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


@dataclass(frozen=True)
class Run:
    """One training that has ended. Everything is read from the files of its directory.

    Attributes:
        job: what was trained.
        plan: who did what.
        run_dir: events, logs, `model.safetensors`.
        status: "ok", or "interrupted" where the user ended it early.
        template: the job's model before training.
    """

    job: Job = field(repr=False)
    plan: Plan = field(repr=False)
    run_dir: Path
    status: str
    template: nn.Module = field(repr=False)
    # Goes with the run that was given no directory of its own.
    _keeper: TemporaryRunDir | None = field(default=None, repr=False)

    @property
    def interrupted(self) -> bool:
        """Whether the user ended it early."""
        return self.status == "interrupted"

    @cached_property
    def model(self) -> nn.Module:
        """The trained model, in evaluation mode, on the CPU.

        Raises:
            RunFailed: no model was saved.
        """
        path = self.run_dir / "model.safetensors"
        if not path.is_file():
            raise RunFailed(f"there is no {path}: the run ended before a model was saved")
        module = copy.deepcopy(self.template)
        module.load_state_dict(load_file(path))
        return module.eval()

    @cached_property
    def summary(self) -> Summary:
        """What the events say, in numbers."""
        return summarize(self.run_dir)

    @property
    def metrics(self) -> dict[str, float]:
        """The last evaluation; {} if there was none."""
        evaluations = self.summary.curves.evaluations
        return dict(evaluations[-1].metrics) if evaluations else {}

    @property
    def throughput(self) -> float | None:
        """Examples a second of all workers, without warm-up and evaluations; None for a run too short to say."""
        return self.summary.training.examples_per_s

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """Every event of every process, by time."""
        return read_events(self.run_dir)

    def predict(self, batch: Any) -> Any:
        """Returns predictions for a batch in the form that the data has: the task's activation of the output."""
        with torch.no_grad():
            output = call(self.model, batch, self.job.inputs)
        return self.job.task.activation(output) if self.job.task else output

    def report(self, path: Path | str | None = None) -> Path:
        """Writes the page of this run; returns where."""
        return write_page(path or self.run_dir / "report.html", [self.summary])
