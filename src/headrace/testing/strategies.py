"""The contract of strategies: checks that fail with a message that says which rule, and what usually is the cause.

from headrace.testing.strategies import StrategyContract, check_strategy

check_strategy(StrategyContract(MyStrategy, my_reference), workers=4, folder=tmp_path)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import headrace as hr
from headrace.checkpoint import CheckpointFolder
from headrace.errors import NonFiniteLoss, UsageError
from headrace.spec.events import NonFinite
from headrace.strategies import Strategy
from headrace.strategies.refusals import refuse
from headrace.testing import references
from headrace.testing.jobs import (
    ADAM,
    MOMENTUM,
    SYNC,
    Case,
    Convolutional,
    Partial,
    dense,
    heavy_classes,
    images,
)
from headrace.testing.references import Reference, distance, evaluated, outcome_of, rounds_from

DOUBLE = 1e-9
"""How far a run may be from its reference; see `references.distance`."""
ROUNDS, ROUNDS_AN_EPOCH = 11, 7
"""Multiples of none of 2, 3, 4 and 5, so that what is done every so many rounds is not done at the end as well."""


@dataclass(frozen=True)
class StrategyContract:
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
        period: of synchronizations, where a run that ends between two makes a last one, so that what goes on from
            there is no run without an interruption.
        leaves_out: checks that its reference cannot do, which it has tests of its own for.
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
    period: int = 1
    leaves_out: frozenset[str] = frozenset()

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


BAD_ROUND = 1


def job_of(case: Case, rounds: int = ROUNDS, **changes: object) -> hr.Job:
    """Returns a job of so many rounds an epoch, of 10 examples; of the last batch of 3 two of 5 workers have none."""
    changes = {"epochs": 1, **changes}
    return dataclasses.replace(case.job(10 * rounds - 7), global_batch_size=10, **changes)  # type: ignore[arg-type]


def fit(
    job: hr.Job, row: StrategyContract, workers: int, folder: Path, loop: object = None, resume: bool = False
) -> hr.Run:
    begin: Any = hr.fit if loop is None else partial(hr.launch, loop)  # type: ignore[arg-type]
    run: hr.Run = begin(
        row.takes(job), row.make(workers), device="cpu", run_dir=folder, engine=hr.ThreadEngine(), resume=resume
    )
    return run


def check_reference(row: StrategyContract, workers: int, folder: Path) -> None:
    """Trains what the reference trains, and reports its losses, and the metrics of the model that it returns."""
    _require_reference(row, workers, folder, Case(dense, optimizer=MOMENTUM), "a plain loss")
    check_metrics(row, workers, folder / "metrics")


def check_weighed(row: StrategyContract, workers: int, folder: Path) -> None:
    """A loss that is a `Mean`, whose shares weigh otherwise than by their examples, is that of the reference."""
    remedy = "a loss that weighs its examples (hr.Mean): give whole_model the local_shares where workers step alone"
    _require_reference(row, workers, folder, Case(dense, loss=heavy_classes, optimizer=MOMENTUM), remedy)


def check_partly_used(row: StrategyContract, workers: int, folder: Path) -> None:
    """Parameters that the loss depends on for some examples alone are trained as the reference does, also resumed."""
    case = Case(Partial, optimizer=MOMENTUM)
    _require_reference(row, workers, folder, case, "a model of which some batches use a part")
    require_resumes(row, workers, folder / "resumes", case)


def check_statistics(row: StrategyContract, workers: int, folder: Path) -> None:
    """BatchNorm's running statistics are the reference's, where they are each worker's own."""
    if _refusal(row.make(workers), SYNC):
        _require_reference(row, workers, folder, Case(Convolutional, images, optimizer=MOMENTUM), "BatchNorm")


def check_metrics(row: StrategyContract, workers: int, folder: Path) -> None:
    """Reports the metrics of `run.model`, not of what some worker has."""
    if not row.make(workers).one_model:
        # Each worker has a model of its own, and the metrics are their means.
        return
    job = row.takes(job_of(Case(dense, optimizer=MOMENTUM)))
    run = fit(job, row, workers, folder)
    own = evaluated(job, run.model)
    _require_close(
        dict(run.metrics),
        own,
        f"the run reports {dict(run.metrics)}, and run.model has {own}: another model was evaluated than is returned",
    )


def check_resume(row: StrategyContract, workers: int, folder: Path) -> None:
    """A run that is resumed twice is, in every rank's state, one without an interruption."""
    require_resumes(row, workers, folder, Case(dense, optimizer=ADAM))


def _require_reference(row: StrategyContract, workers: int, folder: Path, case: Case, what: str) -> None:
    job = job_of(case)
    run = fit(job, row, workers, folder)
    outcome, reference = outcome_of(run), row.reference(row.takes(job), workers)
    apart = distance(outcome.tensors, reference.tensors)
    if not apart <= DOUBLE:
        raise AssertionError(f"with {what}, {_why(job, outcome.tensors, reference.tensors, workers, apart)}")
    said = f"with {what}, the model is that of the reference, and the reported losses are not"
    _require_close(outcome.losses, reference.losses, said)


def require_resumes(row: StrategyContract, workers: int, folder: Path, case: Case) -> None:
    """A run of such a job that is resumed twice is, in every rank's state, one without an interruption."""
    if not row.make(workers).one_model:
        # There is no single state to save.
        return
    job = job_of(case, -(-ROUNDS_AN_EPOCH // row.period) * row.period, epochs=3)
    for epochs in (1, 2, 3):
        resumed = fit(dataclasses.replace(job, epochs=epochs), row, workers, folder / "resumed", resume=epochs > 1)
    whole = fit(job, row, workers, folder / "whole")
    parts = [_saved(folder / name) for name in ("resumed", "whole")]
    if parts[0].keys() != parts[1].keys():
        other = sorted(parts[0].keys() ^ parts[1].keys())
        raise AssertionError(
            f"the resumed run has saved other pieces than the uninterrupted one: {', '.join(other):.200}"
        )
    differ = [name for name, tensor in parts[0].items() if not torch.equal(tensor, parts[1][name])]
    if differ:
        raise AssertionError(
            f"after two resumes {len(differ)} pieces of the ranks' state are not those of a run without "
            f"interruption, first {differ[0]}: a rank has lost its own parameters or its optimizer's state, or state "
            "of the strategy is not saved, or not loaded; own() returns what is one worker's alone, kept() or state() "
            "what all have, and load() reads both"
        )
    if distance(resumed.model.state_dict(), whole.model.state_dict()):
        raise AssertionError(
            "the model differs after two resumes though all saved pieces are equal: the strategy has state that it "
            "does not save"
        )


def check_left_out_step(row: StrategyContract, workers: int, folder: Path) -> None:
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
        raise AssertionError(
            f"rank {last.start} left out a step, and the run said: {said}. A strategy whose workers exchange something "
            "in every round has lock_step = True"
        )


def check_nonfinite(row: StrategyContract, workers: int, folder: Path) -> None:
    """A loss that is NaN on the last replica ends the run and names it; with "skip" the run goes on without harm."""
    last = row.ranks_of_the_last(workers)
    loop = partial(_poison, last.start, range(BAD_ROUND, BAD_ROUND + 1))
    job = job_of(Case(dense, optimizer=MOMENTUM), eval_data=None)
    try:
        # Also later: where data is leased, a share may be empty, and has no NaN.
        fit(job, row, workers, folder / "raise", partial(_poison, last.start, range(BAD_ROUND, 1_000)))
    except NonFiniteLoss as error:
        raised = error
    else:
        raise AssertionError(f"a loss was NaN on ranks {list(last)}, and the run went on")
    if raised.rank not in last:
        raise AssertionError(f"NaN was on ranks {list(last)}, and the error names rank {raised.rank}")
    if not math.isnan(raised.loss):
        raise AssertionError(f"the loss was NaN, and the error says {raised.loss}")
    skips = dataclasses.replace(job, options=hr.Options(on_nonfinite="skip"))
    if refusal := _refusal(row.make(workers), skips.options):
        _require("on_nonfinite" in refusal, f"'skip' is refused, and the message does not name on_nonfinite: {refusal}")
        return
    run = fit(skips, row, workers, folder / "skip", loop)
    _require(all(bool(each.isfinite().all()) for each in run.model.state_dict().values()), "NaN has reached the model")
    told = [event for event in run.events if isinstance(event, NonFinite)]
    _require(bool(told), "a round was skipped, and no event says so")
    did = {(event.step, event.action) for event in told}
    _require(did == {(BAD_ROUND, "skip")}, f"round {BAD_ROUND} was skipped, and the events say {did}")
    named = {rank for event in told for rank in event.ranks}
    _require(named <= set(last), f"NaN was on ranks {list(last)}, and the events name {sorted(named)}")


def check_options(row: StrategyContract, workers: int, folder: Path) -> None:
    """Averaged weights, rollback and synchronised BatchNorm are those of the reference, or refused before the start."""
    for name, case in OPTIONS.items():
        strategy, job = row.make(workers), job_of(case)
        value = {"average": "ema_decay", "rollback": "on_nonfinite", "batch-norm": "batch_norm"}[name]
        last = row.ranks_of_the_last(workers).start
        loop = partial(_poison, last, range(_ROLLED_BACK - 1, _ROLLED_BACK)) if name == "rollback" else None
        refusal = _refusal(strategy, job.options)
        if refusal:
            _require(value in refusal, f"{name} is refused, and the message does not name {value}: {refusal}")
            continue
        outcome = outcome_of(fit(job, row, workers, folder / name, loop))
        # The state of the only checkpoint, that of the begin, goes on with the data behind the bad round.
        with rounds_from(_ROLLED_BACK if loop else 0):
            reference = row.reference(row.takes(job), workers)
        apart = distance(outcome.tensors, reference.tensors)
        said = f"{value} is taken, and the run is {apart:.2g} from its reference; refuse it in refusals()"
        _require(apart <= DOUBLE, said)


_ROLLED_BACK = 5
OPTIONS = {
    "average": Case(dense, optimizer=MOMENTUM, options=hr.Options(ema_decay=0.7)),
    "rollback": Case(dense, optimizer=MOMENTUM, options=hr.Options(on_nonfinite="rollback")),
    "batch-norm": Case(Convolutional, images, optimizer=MOMENTUM, options=SYNC),
}

Check = Callable[[StrategyContract, int, Path], None]
CHECKS: Mapping[str, Check] = {
    "left-out-step": check_left_out_step,
    "nonfinite": check_nonfinite,
    "options": check_options,
    "partly-used": check_partly_used,
    "reference": check_reference,
    "resume": check_resume,
    "statistics": check_statistics,
    "weighed": check_weighed,
}
"""The checks by name."""


def check_strategy(row: StrategyContract, workers: int, folder: Path, checks: Sequence[str] = ()) -> None:
    """Runs all checks of a strategy, or some by name.

    Raises:
        AssertionError: a rule that it does not keep, and what usually is the cause.
        UsageError: it saves state that it has not declared.
    """
    for name in checks or sorted(CHECKS.keys() - row.leaves_out):
        CHECKS[name](row, workers, folder / name)


def _require(holds: bool, said: str) -> None:
    if not holds:
        raise AssertionError(said)


def _require_close(ours: object, theirs: object, said: str) -> None:
    """Numbers, or lists or dicts of such, that differ by no more than rounding; NaN is near nothing."""
    one, other = (list(each.values()) if isinstance(each, dict) else list(each) for each in (ours, theirs))  # type: ignore[call-overload]
    same = not isinstance(ours, dict) or ours.keys() == theirs.keys()  # type: ignore[attr-defined]
    near = len(one) == len(other) and all(
        abs(a - b) <= DOUBLE * max(1.0, abs(b)) for a, b in zip(one, other, strict=True)
    )
    _require(same and near, f"{said}: {ours!r:.200}, and {theirs!r:.200}")


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
    copies = references.WorkerCopies(job, workers)
    for _, shares in copies.rounds():
        for worker, share in enumerate(shares):
            copies.step(worker, share)
    return distance(ours, references.mean_of(copies.models).state_dict()) <= DOUBLE
