"""One cell: a strategy on a task, with a number of workers, a seed and a learning rate."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import mean

import torch
from table import ROWS
from tasks import TASKS

import headrace as hr
from headrace.errors import HeadraceError, InfeasiblePlan, JobError, NonFiniteGradient, NonFiniteLoss, UsageError
from headrace.report.model.events import read_log
from headrace.spec.cluster import Cluster, Host
from headrace.spec.events import Evaluated, WorkerEnded
from headrace.spec.model import ModelSpec
from headrace.strategies import resolve

HERE = Path(__file__).resolve().parent
GIGABIT = 125e6
"""Bytes a second."""
SPREAD = 0.05
"""Of a step's computing time, over its mean."""
# Each worker and each server has a machine, and one thread of it; workers of one host have one machine together.
MACHINES = Cluster(
    tuple(Host(f"machine-{number}", cores=16, memory_bytes=1 << 36, threads=1) for number in range(24)),
    link_bytes_per_s=10 * GIGABIT,
)


@dataclass(frozen=True)
class Asked:
    """What a cell is of; `rounds` is None for those of the task."""

    task: str
    row: str
    workers: int
    seed: int
    rate: float
    rounds: int | None = None


@dataclass
class Cell:
    """What came out.

    Attributes:
        text: the strategy's, on the command line.
        kind: "rehearsed" in virtual time; "trained" by threads, with simulated seconds; "diverged"; "refused".
        why: of a refusal, or of what ended it, in headrace's words.
        examples, losses, accuracies: at each evaluation.
        seconds: of training, without evaluations, virtual; [] where `no_seconds` says why.
        megabytes: that a worker has sent and received.
        one_host: whether all workers are on one host.
        equal: whether the strategy promises the numbers of one device.
    """

    task: str
    row: str
    workers: int
    seed: int
    rate: float
    text: str
    kind: str = "refused"
    why: str = ""
    examples: list[int] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)
    accuracies: list[float] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)
    no_seconds: str = ""
    megabytes: list[float] = dataclasses.field(default_factory=list)
    one_host: bool = False
    equal: bool = False


def text_of(row: str, workers: int) -> str:
    """Returns a row's strategy as on the command line."""
    return ROWS[row].text.format(half=workers // 2)


@cache
def profile_of(task: str) -> ModelSpec:
    """Returns the profile that was measured once."""
    return ModelSpec.load(HERE / "profiles" / f"{task}.json")


def train(asked: Asked) -> Cell:
    """Trains one cell, in this process, with one thread."""
    torch.set_num_threads(1)
    text = text_of(asked.row, asked.workers)
    cell = Cell(asked.task, asked.row, asked.workers, asked.seed, asked.rate, text)
    profile_of(asked.task)  # without it nothing is refused, but all fail
    job = TASKS[asked.task].job(asked.seed, asked.rate, ROWS[asked.row].job, asked.rounds)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        directory = Path(folder) / "run"
        try:
            strategy = resolve(text, asked.workers)
            cell.equal, cell.one_host = strategy.equals_one_device, strategy.processes().one_host
            _run(cell, job, strategy, directory)
        except (NonFiniteLoss, NonFiniteGradient) as error:
            cell.kind, cell.why = "diverged", str(error)
        except (InfeasiblePlan, JobError, UsageError) as error:
            cell.kind, cell.why = "refused", str(error)
    return cell


def _run(cell: Cell, job: hr.Job, strategy: hr.Strategy, directory: Path) -> None:
    assumptions = hr.Assumptions(seed=cell.seed)
    if not strategy.behave(cell.workers).not_rehearsed:
        hr.rehearse(
            job, strategy, MACHINES, model=profile_of(cell.task), assumptions=assumptions, run_dir=directory, force=True
        )
        kind = "rehearsed"
    else:
        kind = "trained"
        hr.fit(job, strategy, engine=hr.ThreadEngine(), device="cpu", checkpoints=False, run_dir=directory)
    events = read_log(directory).events
    evaluated = [event for event in events if isinstance(event, Evaluated)]
    cell.examples = [event.step * job.global_batch_size for event in evaluated]
    cell.losses = [event.metrics["loss"] for event in evaluated]
    cell.accuracies = [event.metrics["accuracy"] for event in evaluated]
    ended = [event for event in events if isinstance(event, WorkerEnded)]
    moved = mean(event.moved_bytes / max(1, event.steps) for event in ended)
    if kind == "rehearsed":
        # An evaluation is no part of training.
        paused = [sum(event.seconds for event in evaluated[: place + 1]) for place in range(len(evaluated))]
        cell.seconds = [event.time_s - pause for event, pause in zip(evaluated, paused, strict=True)]
    else:
        try:
            predicted = hr.simulate(
                profile_of(cell.task), MACHINES, strategy, global_batch_size=job.global_batch_size,
                assumptions=assumptions, force=True,
            )  # fmt: skip
            cell.seconds = [predicted.step_s * event.step for event in evaluated]
            moved = predicted.moved_bytes
        except HeadraceError as error:
            cell.no_seconds = str(error)
    cell.megabytes = [moved * event.step / 1e6 for event in evaluated]
    cell.kind = kind
