"""fit and launch: a job, a strategy, a run."""

from __future__ import annotations

import platform
import shutil
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from headrace.engine.claim import Claim, refuse_living
from headrace.engine.interrupts import TERMINATED
from headrace.engine.journal import Journal
from headrace.engine.launched import LaunchedEngine, launched_ranks
from headrace.engine.local import LocalEngine
from headrace.engine.machine import can_paint, detect
from headrace.engine.order import Engine, Order, Progress, Resumption
from headrace.engine.preparation import Prepared, prepare
from headrace.engine.process import LAST_WORDS, log_path
from headrace.engine.resumption import describe_run, find, resumption
from headrace.engine.worker import Worker
from headrace.errors import DataError, HeadraceError, InfeasiblePlan, UsageError
from headrace.policies.split import split
from headrace.report.events import LogTail, Tail
from headrace.report.show import Show
from headrace.run import Keeper, Run
from headrace.spec.checkpoints import Checkpoints
from headrace.spec.event import LAUNCHER, Event, Notice, RunEnded, RunStarted
from headrace.spec.job import Job
from headrace.spec.plain import to_plain
from headrace.spec.plan import Plan
from headrace.strategies import Strategy, resolve

__all__ = ["fit", "launch"]

OnEvent = Callable[[Event], None]

# A process shows itself four times a second.
_LEAST_TIMEOUT_S = 1.0


def fit(
    job: Job,
    strategy: str | Strategy = "one_device",
    *,
    device: str = "auto",
    run_dir: Path | str | None = None,
    on_event: OnEvent | None = None,
    timeout_s: float = 10.0,
    engine: Engine | None = None,
    seconds: float | None = None,
    checkpoints: Checkpoints | bool | None = None,
    resume: bool | Path | str = False,
    reset_optimizer: bool = False,
) -> Run:
    """Trains a job and returns the run.

    Args:
        job: what to train.
        strategy: how, by name ("mirrored") or as a value (`hr.Mirrored(workers=2)`).
        device: "auto" takes CUDA where there is one, else the CPU; or "cpu", "cuda".
        run_dir: where events, logs, checkpoints and the trained model go; None for a temporary directory that
            goes with the returned run.
        on_event: called in this process with every event, in the order of their writing.
        timeout_s: a process without a sign of life for this long counts as lost.
        engine: what runs the workers; None for local processes, or for the launcher's (torchrun) where there
            is one.
        seconds: ends the run in order after this time.
        checkpoints: when to save; None for `Checkpoints()` where there is a `run_dir`; True, False.
        resume: True goes on from the last checkpoint of `run_dir`; or from that of another run's directory, or
            from one checkpoint. The strategy and the number of workers may be others than the saver's.
        reset_optimizer: leaves the checkpoint's optimizer state and schedule behind; its class may be another.

    Raises:
        UsageError: the job, the strategy or the numbers do not fit together, or there is nothing to resume.
        CheckpointMismatch: the checkpoint is of another job.
        CorruptCheckpoint: there are checkpoints and all are damaged.
        DataError: there is no data, or it has the wrong form.
        UnfitMachine: the machine lacks something.
        RunFailed: a worker failed or was lost.
    """
    wish = _Wish(device, run_dir, on_event, timeout_s, engine, seconds, checkpoints, resume, reset_optimizer)
    return _told(job, None, strategy, wish)


def launch(
    train: Callable[[Worker], None],
    job: Job,
    strategy: str | Strategy = "one_device",
    *,
    device: str = "auto",
    run_dir: Path | str | None = None,
    on_event: OnEvent | None = None,
    timeout_s: float = 10.0,
    engine: Engine | None = None,
    checkpoints: Checkpoints | bool | None = None,
    resume: bool | Path | str = False,
    reset_optimizer: bool = False,
) -> Run:
    """Runs a training loop of one's own in every worker.

        def train(worker):
            for batch in worker.batches():
                loss = worker.step(batch)      # or: worker.backward(loss); worker.update()

    Args:
        train: the loop; it is called with a `Worker` in each worker. A resumed one begins with the first batch
            that the checkpoint has not seen.
        job, strategy, device, run_dir, on_event, timeout_s, engine, checkpoints, resume, reset_optimizer: as for
            `fit`, with the same errors.
    """
    wish = _Wish(device, run_dir, on_event, timeout_s, engine, None, checkpoints, resume, reset_optimizer)
    return _told(job, train, strategy, wish)


@dataclass(frozen=True)
class _Wish:
    """What the caller said beside job and strategy."""

    device: str
    run_dir: Path | str | None
    on_event: OnEvent | None
    timeout_s: float
    engine: Engine | None
    seconds: float | None
    checkpoints: Checkpoints | bool | None
    resume: bool | Path | str
    reset_optimizer: bool


def _told(job: Job, train: Callable[[Worker], None] | None, strategy: str | Strategy, wish: _Wish) -> Run:
    try:
        return _run(job, train, strategy, wish)
    except HeadraceError as error:
        # The caller's frames are worth reading, ours are not.
        raise error.with_traceback(None) from error.__cause__


def _run(job: Job, train: Callable[[Worker], None] | None, strategy: str | Strategy, wish: _Wish) -> Run:
    timeout_s = wish.timeout_s
    if not (isinstance(timeout_s, int | float) and timeout_s >= _LEAST_TIMEOUT_S):
        raise UsageError(f"timeout_s must be a number of at least {_LEAST_TIMEOUT_S:.0f}, got {timeout_s!r}")
    if train is not None and not callable(train):
        raise UsageError(f"train must be a function that takes a worker, got {type(train).__name__}")
    # Now, because building the user's model may change the working directory.
    wanted = None if wish.run_dir is None else Path(wish.run_dir).absolute()
    chosen = resolve(strategy)
    ranks = launched_ranks() if wish.engine is None else None
    cluster = detect(wish.device, ranks)
    prepared = prepare(job)
    plan = chosen.plan(prepared.model, cluster)
    _check_split(job, prepared, plan)
    checkpoints = _checkpoints(job, chosen, wish)
    keeper = Keeper() if wanted is None else None
    directory = wanted or Path(keeper.path if keeper else ".")
    description = describe_run(job, prepared, plan) if checkpoints or wish.resume else {}
    resume = None
    if wish.resume:
        resume, notices = _resume(prepared, description, directory, wish)
        prepared = replace(prepared, notices=(*prepared.notices, *notices))
    own = None if wish.engine else (LaunchedEngine(timeout_s) if ranks else LocalEngine())
    running = own or wish.engine
    assert running is not None
    order = Order(
        job,
        train,
        chosen,
        plan,
        prepared.model,
        prepared.weighed,
        directory,
        monotonic(),
        timeout_s,
        wish.seconds,
        checkpoints,
        resume,
        description,
    )
    try:
        if isinstance(running, LaunchedEngine):
            status = _supervise_together(order, prepared, running, wish.on_event)
        else:
            status = _supervise(order, prepared, running, wish.on_event)
    finally:
        if own:
            own.close()
    if status == TERMINATED:
        # Whoever sent it wants this process to end, and now all is saved.
        signal.raise_signal(signal.SIGTERM)
    return Run(job, plan, directory, status, prepared.module, keeper)


def _checkpoints(job: Job, strategy: Strategy, wish: _Wish) -> Checkpoints | None:
    wanted = wish.checkpoints
    if wanted is None:
        wanted = wish.run_dir is not None and strategy.synchronous
    chosen = (Checkpoints() if wanted else None) if isinstance(wanted, bool) else wanted
    if chosen is not None and not isinstance(chosen, Checkpoints):
        raise UsageError(f"checkpoints must be hr.Checkpoints(...), True or False, got {wanted!r:.60}")
    if chosen and not strategy.synchronous:
        raise UsageError(f"{strategy.name} trains several models, so there is no one state to save; checkpoints=False")
    if job.options.on_nonfinite == "rollback" and chosen is None:
        raise UsageError(
            "on_nonfinite='rollback' needs checkpoints to roll back to; give a run_dir, or "
            "checkpoints=hr.Checkpoints(every_steps=100)"
        )
    return chosen


def _resume(
    prepared: Prepared, description: Mapping[str, Any], directory: Path, wish: _Wish
) -> tuple[Resumption, tuple[str, ...]]:
    if wish.run_dir is None:
        raise UsageError("resume needs the run_dir of the run that goes on")
    refuse_living(directory)
    checkpoint, wrong = find(directory, True if isinstance(wish.resume, bool) else wish.resume)
    notices = (
        *(f"damaged, left out: {error.path}: {error.reason}" for error in wrong),
        f"goes on from {checkpoint.path}",
    )
    return resumption(checkpoint, description, prepared, wish.reset_optimizer), notices


def _supervise_together(order: Order, prepared: Prepared, engine: LaunchedEngine, on_event: OnEvent | None) -> str:
    """Runs as one of the launcher's processes: rank 0 leads, all write to its directory."""
    shared = Path(engine.agree(str(order.run_dir)))
    together = replace(order, run_dir=shared)
    leads = engine.rank == 0
    status = _supervise(together, prepared, engine, on_event) if leads else engine.run(together, lambda _: None)
    engine.agree("written")
    if shared != order.run_dir:
        # Rank 0's may be a temporary one, which goes when rank 0 does.
        shutil.copytree(shared, order.run_dir, dirs_exist_ok=True)
    engine.agree("read")
    return status


def _supervise(order: Order, prepared: Prepared, engine: Engine, on_event: OnEvent | None) -> str:
    continues = order.resume is not None and order.resume.folder.parent == order.run_dir
    claim = Claim(order.run_dir, continues, _checkpoint_bytes(prepared) if order.checkpoints else 0)
    try:
        began = order.started - claim.attempt_s
        held = replace(order, started=began, attempt_s=claim.attempt_s, lock=claim.lock)
        return _follow(held, prepared, engine, on_event)
    finally:
        claim.close()


def _checkpoint_bytes(prepared: Prepared) -> int:
    """Returns about how much: the weights, and as much again for what an optimizer keeps."""
    return 2 * sum(parameter.bytes for parameter in prepared.model.parameters)


def _follow(order: Order, prepared: Prepared, engine: Engine, on_event: OnEvent | None) -> str:
    journal = Journal(order.run_dir, LAUNCHER, order.started)
    # Whoever wants no steps need not pay for reading them.
    tail = Tail(order.run_dir, skip=() if on_event else ("stepped",), new_only=True)
    show = Show(order.plan.strategy, _rounds(order, prepared), plain=not can_paint(sys.stderr))

    log = LogTail(log_path(order.run_dir, 0), until=LAST_WORDS, new_only=True)

    def follow(progress: Progress | None = None) -> None:
        if progress:
            show.update(progress.step, progress.loss, progress.examples)
        for line in log.read():
            show.line(line)
        for event in tail.read():
            show.event(event)
            if on_event:
                on_event(event)

    status = "failed"
    try:
        journal.write(_started(order, prepared))
        for line in (_first_line(order, prepared), *prepared.notices):
            journal.write(Notice(LAUNCHER, journal.now(), line))
        status = engine.run(order, follow)
        return status
    finally:
        journal.write(RunEnded(LAUNCHER, journal.now(), "interrupted" if status == TERMINATED else status))
        journal.close()
        follow()
        show.close()


def _rounds(order: Order, prepared: Prepared) -> int | None:
    job = order.job
    if order.train is not None or order.seconds is not None:
        return None
    return job.steps or (job.epochs or 0) * -(-prepared.examples // job.global_batch_size)


def _started(order: Order, prepared: Prepared) -> RunStarted:
    role = order.plan.roles[0]
    return RunStarted(
        rank=LAUNCHER,
        time_s=order.attempt_s,
        strategy=order.plan.strategy,
        workers=order.plan.workers,
        device=role.device.partition(":")[0],
        threads=role.threads,
        global_batch_size=order.job.global_batch_size,
        examples_per_epoch=prepared.examples,
        started_at=datetime.now().astimezone().isoformat(timespec="seconds"),
        plan=to_plain(order.plan),
        versions={"headrace": version("headrace"), "torch": torch.__version__, "python": platform.python_version()},
        clock_s=order.started,
        resumed_step=order.resume.step if order.resume else 0,
    )


def _first_line(order: Order, prepared: Prepared) -> str:
    plan, role = order.plan, order.plan.roles[0]
    parts = split(order.job.global_batch_size, plan.shares)
    batch = " + ".join(map(str, parts)) if len(parts) <= 8 else f"{len(parts)} x {parts[-1]}..{parts[0]}"
    devices = ", ".join(dict.fromkeys(role.device for role in plan.roles))
    return (
        f"{plan.workers} worker{'s' * (plan.workers > 1)} on {role.host}, {devices}, {role.threads} "
        f"thread{'s' * (role.threads > 1)} each; batch of {order.job.global_batch_size} = {batch}; "
        f"{prepared.examples:,} examples"
    )


def _check_split(job: Job, prepared: Prepared, plan: Plan) -> None:
    if job.global_batch_size < plan.workers:
        raise InfeasiblePlan(
            f"a global batch of {job.global_batch_size} cannot be split among {plan.workers} workers; "
            f"use global_batch_size={plan.workers} or more, or fewer workers"
        )
    if prepared.examples < plan.workers:
        raise DataError(f"{prepared.examples} examples are fewer than {plan.workers} workers; use fewer workers")
