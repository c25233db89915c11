"""fit and launch: a job, a strategy, a run."""

from __future__ import annotations

import platform
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from time import monotonic

import torch

from headrace.engine.journal import Journal, events_path
from headrace.engine.launched import LaunchedEngine, launched_ranks
from headrace.engine.local import LocalEngine
from headrace.engine.machine import can_paint, detect
from headrace.engine.order import Engine, Order, Progress
from headrace.engine.preparation import Prepared, prepare
from headrace.engine.process import LAST_WORDS, log_path
from headrace.engine.worker import Worker
from headrace.errors import DataError, HeadraceError, InfeasiblePlan, UnfitMachine, UsageError
from headrace.policies.split import split
from headrace.report.events import LogTail, Tail
from headrace.report.show import Show
from headrace.run import Keeper, Run
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
) -> Run:
    """Trains a job and returns the run.

    Args:
        job: what to train.
        strategy: how, by name ("mirrored") or as a value (`hr.Mirrored(workers=2)`).
        device: "auto" takes CUDA where there is one, else the CPU; or "cpu", "cuda".
        run_dir: where events, logs and the trained model go; None for a temporary directory that goes with
            the returned run.
        on_event: called in this process with every event, in the order of their writing.
        timeout_s: a process without a sign of life for this long counts as lost.
        engine: what runs the workers; None for local processes, or for the launcher's (torchrun) where there
            is one.
        seconds: ends the run in order after this time.

    Raises:
        UsageError: the job, the strategy or the numbers do not fit together.
        DataError: there is no data, or it has the wrong form.
        UnfitMachine: the machine lacks something.
        RunFailed: a worker failed or was lost.
    """
    try:
        return _run(job, None, strategy, device, run_dir, on_event, timeout_s, engine, seconds)
    except HeadraceError as error:
        # The caller's frames are worth reading, ours are not.
        raise error.with_traceback(None) from error.__cause__


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
) -> Run:
    """Runs a training loop of one's own in every worker.

        def train(worker):
            for batch in worker.batches():
                loss = worker.step(batch)      # or: worker.backward(loss); worker.update()

    Args:
        train: the loop; it is called with a `Worker` in each worker.
        job, strategy, device, run_dir, on_event, timeout_s, engine: as for `fit`, with the same errors.
    """
    try:
        return _run(job, train, strategy, device, run_dir, on_event, timeout_s, engine, None)
    except HeadraceError as error:
        raise error.with_traceback(None) from error.__cause__


def _run(
    job: Job,
    train: Callable[[Worker], None] | None,
    strategy: str | Strategy,
    device: str,
    run_dir: Path | str | None,
    on_event: OnEvent | None,
    timeout_s: float,
    engine: Engine | None,
    seconds: float | None,
) -> Run:
    if not (isinstance(timeout_s, int | float) and timeout_s >= _LEAST_TIMEOUT_S):
        raise UsageError(f"timeout_s must be a number of at least {_LEAST_TIMEOUT_S:.0f}, got {timeout_s!r}")
    if train is not None and not callable(train):
        raise UsageError(f"train must be a function that takes a worker, got {type(train).__name__}")
    # Now, because building the user's model may change the working directory.
    wanted = None if run_dir is None else Path(run_dir).absolute()
    chosen = resolve(strategy)
    ranks = launched_ranks() if engine is None else None
    cluster = detect(device, ranks)
    prepared = prepare(job)
    plan = chosen.plan(prepared.model, cluster)
    _check_split(job, prepared, plan)
    own = None if engine else (LaunchedEngine(timeout_s) if ranks else LocalEngine())
    running = own or engine
    assert running is not None
    keeper = Keeper() if wanted is None else None
    directory = wanted or Path(keeper.path if keeper else ".")
    order = Order(
        job, train, chosen, plan, prepared.model, prepared.weighed, directory, monotonic(), timeout_s, seconds
    )
    try:
        if isinstance(running, LaunchedEngine):
            status = _supervise_together(order, prepared, running, on_event)
        else:
            status = _supervise(order, prepared, running, on_event)
    finally:
        if own:
            own.close()
    return Run(job, plan, directory, status, prepared.module, keeper)


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
    _claim(order.run_dir)
    journal = Journal(order.run_dir, LAUNCHER, order.started)
    # Whoever wants no steps need not pay for reading them.
    tail = Tail(order.run_dir, skip=() if on_event else ("stepped",))
    show = Show(order.plan.strategy, _rounds(order, prepared), plain=not can_paint(sys.stderr))

    log = LogTail(log_path(order.run_dir, 0), until=LAST_WORDS)

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
        journal.write(RunEnded(LAUNCHER, journal.now(), status))
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
        time_s=0.0,
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


def _claim(directory: Path) -> None:
    """Makes the run's directory, and refuses one that holds a run already."""
    if events_path(directory, LAUNCHER).exists():
        raise UsageError(f"{directory} holds a run already; name another run_dir, or delete it")
    try:
        events_path(directory, LAUNCHER).parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise UnfitMachine(f"cannot write to the run directory {directory}: {error.strerror}; name another") from error
