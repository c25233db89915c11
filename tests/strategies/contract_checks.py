"""What a row of any kind of strategy proves, with 4 and 5 workers: checks that fail with a message that says why.

`test_contract_faults.py` has strategies with a fault that each of them must find.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import headrace as hr
from headrace.checkpoint import CheckpointFolder
from headrace.errors import NonFiniteLoss, UsageError
from headrace.spec.events import NonFinite
from headrace.strategies import Strategy
from headrace.strategies.refusals import refuse
from strategies import references
from strategies.contract_models import SYNC, Case, Convolutional, dense, images
from strategies.contract_runs import distance, outcome_of
from strategies.references import Reference, evaluated

DOUBLE = 1e-9
"""How far a run may be from its reference; see `contract_runs.distance`."""

MATRICES = frozenset({"muon", "muon-one-matrix", "muon-schedule", "adafactor"})
"""Variants whose optimizers look at whole matrices."""


@dataclass(frozen=True)
class Row:
    """A strategy.

    Attributes:
        make: number of workers to the strategy.
        reference: a plain loop that computes the same; one device where the strategy equals it.
        workers: the numbers to try.
        many: two numbers for the checks of this file: a ring of 4 or 5 is no complete graph, as one of 3 is.
        servers: how many ranks come after the workers.
        replicas: how many copies of the model so many workers hold.
        whole: whether every worker computes the whole model, and so any model; the others have tests of their own.
        refuses: variants that it cannot train, and says so.
        optimizer: the only one that it trains with; None where it takes any.
        model: the only one that it trains, of those of this file; None where it takes any.
    """

    make: Callable[[int], Strategy]
    reference: Reference = references.one_device
    workers: tuple[int, ...] = (1, 2, 3)
    many: tuple[int, int] = (4, 5)
    servers: int = 0
    replicas: Callable[[int], int] = int
    whole: bool = True
    refuses: frozenset[str] = frozenset()
    optimizer: Callable[..., object] | None = None
    model: Case | None = None

    def takes(self, job: hr.Job) -> hr.Job:
        """Returns the job, with an optimizer and a model that the strategy takes."""
        if self.model:
            own = self.model.job(len(job.data[0]))
            evaluated = None if job.eval_data is None else own.eval_data
            job = dataclasses.replace(job, model=own.model, data=own.data, eval_data=evaluated, loss=own.loss)
        return dataclasses.replace(job, optimizer=self.optimizer) if self.optimizer else job

    def ranks_of_the_last(self, workers: int) -> range:
        """Returns the ranks that hold the last replica."""
        return range(workers - workers // self.replicas(workers), workers)


MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAM = partial(torch.optim.Adam, lr=0.01)
BAD_ROUND = 1


def job_of(case: Case, **changes: object) -> hr.Job:
    """Returns a job of 9 rounds: 5 workers have 2 examples each of a batch of 10, and two have none of one of 3."""
    return dataclasses.replace(case.job(23), global_batch_size=10, **changes)  # type: ignore[arg-type]


def fit(job: hr.Job, row: Row, workers: int, folder: Path, loop: object = None, resume: bool = False) -> hr.Run:
    begin = hr.fit if loop is None else partial(hr.launch, loop)
    return begin(  # type: ignore[no-any-return]
        row.takes(job), row.make(workers), device="cpu", run_dir=folder, engine=hr.ThreadEngine(), resume=resume
    )


def check_reference(row: Row, workers: int, folder: Path) -> None:
    """Trains what the reference trains, and reports its losses, and the metrics of the model that it returns."""
    job = job_of(Case(dense, optimizer=MOMENTUM))
    run = fit(job, row, workers, folder)
    outcome, reference = outcome_of(run), row.reference(row.takes(job), workers)
    apart = distance(outcome.tensors, reference.tensors)
    if not apart <= DOUBLE:
        pytest.fail(_why(job, outcome.tensors, reference.tensors, workers, apart))
    assert outcome.losses == pytest.approx(reference.losses, rel=DOUBLE, abs=DOUBLE), (
        "the model is that of the reference, and the reported losses are not"
    )
    check_metrics(row, workers, folder / "metrics")


def check_metrics(row: Row, workers: int, folder: Path) -> None:
    """Reports the metrics of `run.model`, not of what some worker has."""
    if not row.make(workers).one_model:
        # Each worker has a model of its own, and the metrics are their means.
        return
    job = row.takes(job_of(Case(dense, optimizer=MOMENTUM), epochs=1))
    run = fit(job, row, workers, folder)
    own = evaluated(job, run.model)
    assert run.metrics == pytest.approx(own, rel=DOUBLE, abs=DOUBLE), (
        f"the run reports {dict(run.metrics)}, and run.model has {own}: another model was evaluated than is returned"
    )


def check_resume(row: Row, workers: int, folder: Path) -> None:
    """A run that ends after 2 epochs and resumes is, in every rank's state, one of 3 without an interruption."""
    if not row.make(workers).one_model:
        # There is no single state to save.
        return
    job = job_of(Case(dense, optimizer=ADAM))
    fit(dataclasses.replace(job, epochs=2), row, workers, folder / "resumed")
    resumed = fit(job, row, workers, folder / "resumed", resume=True)
    whole = fit(job, row, workers, folder / "whole")
    parts = [_saved(folder / name) for name in ("resumed", "whole")]
    assert parts[0].keys() == parts[1].keys(), "the resumed run has saved other pieces than the uninterrupted one"
    differ = [name for name, tensor in parts[0].items() if not torch.equal(tensor, parts[1][name])]
    if differ:
        pytest.fail(
            f"after save and resume {len(differ)} pieces of the ranks' state are not those of a run without "
            f"interruption, first {differ[0]}: a rank has lost its own parameters or its optimizer's state; own() "
            "returns what is one worker's alone"
        )
    assert distance(resumed.model.state_dict(), whole.model.state_dict()) == 0.0, "the model differs after a resume"


def check_left_out_step(row: Row, workers: int, folder: Path) -> None:
    """A worker that leaves out a step, where others wait for it, ends the run and is named."""
    last = row.ranks_of_the_last(workers)
    loop = partial(_leave_out, last.start)
    job = job_of(Case(dense, optimizer=MOMENTUM), eval_data=None)
    if not row.make(workers).one_model or workers + row.servers == 1:
        fit(job, row, workers, folder, loop)
        return
    try:
        fit(job, row, workers, folder, loop)
    except UsageError as error:
        said = str(error)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    else:
        said = "nothing"
    if f"the loop on rank {last.start} went on without worker.step()" not in said:
        pytest.fail(
            f"rank {last.start} left out a step, and the run said: {said}. A strategy whose workers exchange something "
            "in every round has lock_step = True"
        )


def check_nonfinite(row: Row, workers: int, folder: Path) -> None:
    """A loss that is NaN on the last replica ends the run and names it; with "skip" the run goes on without harm."""
    last = row.ranks_of_the_last(workers)
    loop = partial(_poison, last.start, range(BAD_ROUND, BAD_ROUND + 1))
    job = job_of(Case(dense, optimizer=MOMENTUM), eval_data=None)
    with pytest.raises(NonFiniteLoss) as raised:
        # Also later: where data is leased, a share may be empty, and has no NaN.
        fit(job, row, workers, folder / "raise", partial(_poison, last.start, range(BAD_ROUND, 1_000)))
    assert raised.value.rank in last, f"NaN was on ranks {list(last)}, and the error names rank {raised.value.rank}"
    assert math.isnan(raised.value.loss), f"the loss was NaN, and the error says {raised.value.loss}"
    skips = dataclasses.replace(job, options=hr.Options(on_nonfinite="skip"))
    if refusal := _refusal(row.make(workers), skips.options):
        assert "on_nonfinite" in refusal, f"'skip' is refused, and the message does not name on_nonfinite: {refusal}"
        return
    run = fit(skips, row, workers, folder / "skip", loop)
    assert all(tensor.isfinite().all() for tensor in run.model.state_dict().values()), "NaN has reached the model"
    told = [event for event in run.events if isinstance(event, NonFinite)]
    assert told, "a round was skipped, and no event says so"
    assert {(event.step, event.action) for event in told} == {(BAD_ROUND, "skip")}
    named = {rank for event in told for rank in event.ranks}
    assert named <= set(last), f"NaN was on ranks {list(last)}, and the events name {sorted(named)}"


def check_options(row: Row, workers: int, folder: Path) -> None:
    """Averaged weights, rollback and synchronised BatchNorm are those of the reference, or refused before the start."""
    for name, case in OPTIONS.items():
        strategy, job = row.make(workers), job_of(case)
        value = {"average": "ema_decay", "rollback": "on_nonfinite", "batch-norm": "batch_norm"}[name]
        loop = partial(_poison, row.ranks_of_the_last(workers).start, range(4, 5)) if name == "rollback" else None
        refusal = _refusal(strategy, job.options)
        if refusal:
            assert value in refusal, f"{name} is refused, and the message does not name {value}: {refusal}"
            continue
        outcome = outcome_of(fit(job, row, workers, folder / name, loop))
        if loop:
            one = Row(lambda workers: hr.OneDevice(), model=row.model)
            reference = outcome_of(fit(job, one, 1, folder / "one", partial(_poison, 0, range(4, 5))))
        else:
            reference = row.reference(row.takes(job), workers)
        apart = distance(outcome.tensors, reference.tensors)
        assert apart <= DOUBLE, f"{value} is taken, and the run is {apart:.2g} from its reference; refuse it in check()"


OPTIONS = {
    "average": Case(dense, optimizer=MOMENTUM, options=hr.Options(ema_decay=0.7)),
    "rollback": Case(dense, optimizer=MOMENTUM, options=hr.Options(on_nonfinite="rollback")),
    "batch-norm": Case(Convolutional, images, optimizer=MOMENTUM, options=SYNC),
}

Check = Callable[[Row, int, Path], None]
CHECKS: Mapping[str, Check] = {
    "left-out-step": check_left_out_step,
    "nonfinite": check_nonfinite,
    "options": check_options,
    "reference": check_reference,
    "resume": check_resume,
}


def _refusal(strategy: Strategy, options: hr.Options) -> str:
    try:
        refuse(strategy.refusals(), options)
    except UsageError as error:
        return str(error)
    return ""


def _leave_out(rank: int, worker: hr.Worker) -> None:
    for number, batch in enumerate(worker.batches()):
        if worker.rank != rank or number != BAD_ROUND:
            worker.step(batch)


def _poison(first: int, rounds: range, worker: hr.Worker) -> None:
    for number, (inputs, target) in enumerate(worker.batches()):
        bad = worker.rank >= first and number in rounds
        worker.step((inputs * math.nan if bad else inputs, target))


def _saved(folder: Path) -> dict[str, Tensor]:
    """Returns every rank's part of the last checkpoint, without the states of random generators."""
    checkpoints = CheckpointFolder(folder / "checkpoints")
    last = checkpoints.open(checkpoints.steps()[-1])
    return {
        f"rank {rank}: {name}": tensor
        for rank in last.ranks
        for name, tensor in last.read(rank).items()
        if not name.startswith("random/")
    }


def _why(job: hr.Job, ours: Mapping[str, Tensor], reference: Mapping[str, Tensor], workers: int, apart: float) -> str:
    """Says how a model differs from its reference, and what usually is the cause."""
    model = job.model
    assert isinstance(model, nn.Module)
    start = model.state_dict()
    alone = references.unconnected(job, workers).tensors
    way, whole = (
        sum(float((tensors[name] - start[name]).square().sum()) for name in start) ** 0.5
        for tensors in (ours, reference)
    )
    share = way / whole
    if not way:
        cause = "the model has not moved: no worker makes a step"
    elif distance(ours, alone) <= DOUBLE or _is_mean_of_lone_workers(job, ours, workers):
        cause = "it is what workers train that never exchange anything"
    elif workers > 1 and share < 1.5 / workers:
        cause = f"it has moved {share:.2f} times as far: its steps are divided by the number of workers"
    else:
        cause = f"it has moved {share:.2f} times as far, another way"
    return f"{workers} workers end {apart:.2g} from their reference, of at most {DOUBLE:g}: {cause}"


def _is_mean_of_lone_workers(job: hr.Job, ours: Mapping[str, Tensor], workers: int) -> bool:
    copies = references.Copies(job, workers)
    for _, shares in copies.rounds():
        for worker, share in enumerate(shares):
            copies.step(worker, share)
    return distance(ours, references.mean_of(copies.models).state_dict()) <= DOUBLE
