"""A run from its claim of a directory to its last event: who runs it, and what its caller sees of it."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from time import monotonic
from typing import Any

from headrace.api.checks import JobInfo
from headrace.api.run_directory import ResumeRequest, begin_attempt
from headrace.checkpoint import CheckpointFolder
from headrace.engine.base import Engine, RunProgress
from headrace.engine.local.process import LAST_WORDS, log_path
from headrace.engine.signals import TERMINATED
from headrace.engine.torchrun.engine import LaunchedEngine
from headrace.errors import PeerLost, RunFailed, UsageError
from headrace.machine import can_paint, versions
from headrace.parameter_server.server.snapshots import SnapshotSet
from headrace.policies.roles import split
from headrace.report.model.events import LogTail, Tail
from headrace.report.model.servers import imbalances
from headrace.report.views.console import Console, DiskMonitor, replica_lines, stage_lines
from headrace.spec.events import LAUNCHER, Event, Notice, RunEnded, RunStarted, ServerStats
from headrace.spec.plain import from_plain, to_plain
from headrace.spec.plan import describe_processes
from headrace.worker.events import EventWriter
from headrace.worker.run_spec import SNAPSHOTS, AttemptInfo, ResumePoint, RunSpec

OnEvent = Callable[[Event], None]
"""Is called with every event of a run."""


def supervise(order: RunSpec, prepared: JobInfo, engine: Engine, going: ResumeRequest, on_event: OnEvent | None) -> str:
    """Runs an order; returns how it ended: "ok", "interrupted" or "terminated"."""
    if isinstance(engine, LaunchedEngine):
        return _together(order, prepared, engine, going, on_event)
    with begin_attempt(order, prepared, going) as (begun, notices):
        return _follow(begun, prepared, notices, engine, on_event)


def _together(
    order: RunSpec, prepared: JobInfo, engine: LaunchedEngine, going: ResumeRequest, on_event: OnEvent | None
) -> str:
    """Runs as one of the launcher's processes: rank 0 leads; those of one host write to one directory."""
    if engine.rank == 0:
        status = _lead(order, prepared, engine, going, on_event)
    else:
        told = json.loads(engine.agree(""))
        if "refused" in told:
            raise RunFailed(f"rank 0 refused to begin: {told['refused']}")
        begun = _joined(order, engine, told)
        seen = (begun.run_dir / told["mark"]).exists()
        _check_seen(order, engine, seen)
        with _diary(begun, prepared, engine, seen):
            status = engine.run(begun, lambda _: None)
        engine.agree("written")
        if begun.run_dir != order.run_dir:
            # Another rank's may be a temporary one, which goes when that rank does.
            shutil.copytree(begun.run_dir, order.run_dir, dirs_exist_ok=True)
    engine.agree("read")
    return status


def _joined(order: RunSpec, engine: LaunchedEngine, told: Mapping[str, Any]) -> RunSpec:
    """Returns the order as rank 0 has told it, with the directory and on the clock of this host."""
    resume = _resumption(told["resume"]) if told["resume"] else None
    run_dir, started = Path(told["run_dir"]), told["started"]
    if engine.leader != 0:
        run_dir, started = Path(engine.agree_at_home(str(order.run_dir))), monotonic() - told["passed_s"]
    return replace(order, run_dir=run_dir, resume=resume, started=started, attempt=AttemptInfo(told["began_s"]))


def _check_seen(order: RunSpec, engine: LaunchedEngine, seen: bool) -> None:
    if engine.all_agree(seen) or not (order.checkpoints or order.resume):
        return
    raise UsageError(
        f"{order.run_dir} is not the same directory on all hosts, and checkpoints are saved to one that all see; name "
        "a run_dir on a file system of all hosts, or save nothing (checkpoints=False, --checkpoint-every 0)"
    )


@contextmanager
def _diary(order: RunSpec, prepared: JobInfo, engine: LaunchedEngine, seen: bool) -> Iterator[None]:
    """Writes down begin and end of the run where a host has a directory of its own."""
    if seen or engine.rank != engine.leader:
        yield
        return
    journal = EventWriter(order.run_dir, LAUNCHER, order.started)
    status = "failed"
    try:
        journal.write(_started(order, prepared))
        yield
        status = "ok"
    finally:
        journal.write(RunEnded(LAUNCHER, journal.now(), status))
        journal.close()


def _resumption(told: Mapping[str, Any]) -> ResumePoint:
    snapshots = from_plain(SnapshotSet, told["snapshots"]) if told["snapshots"] else None
    return ResumePoint(Path(told["folder"]), told["step"], told["same"], told["reset_optimizer"], snapshots)


def _lead(
    order: RunSpec, prepared: JobInfo, engine: LaunchedEngine, going: ResumeRequest, on_event: OnEvent | None
) -> str:
    with ExitStack() as stack:
        try:
            begun, notices = stack.enter_context(begin_attempt(order, prepared, going))
        except BaseException as error:
            engine.agree(json.dumps({"refused": str(error)}))
            raise
        resume = {**asdict(begun.resume), "folder": str(begun.resume.folder)} if begun.resume else None
        with tempfile.NamedTemporaryFile(dir=begun.run_dir, prefix="seen-") as mark:
            told = {
                "run_dir": str(begun.run_dir),
                "mark": Path(mark.name).name,
                "started": begun.started,
                "passed_s": monotonic() - begun.started,
                "began_s": begun.attempt.began_s,
                "resume": resume,
            }
            engine.agree(json.dumps(told))
            _check_seen(begun, engine, True)
        status = _follow(begun, prepared, notices, engine, on_event)
        engine.agree("written")
        return status


def _follow(
    order: RunSpec, prepared: JobInfo, notices: tuple[str, ...], engine: Engine, on_event: OnEvent | None
) -> str:
    journal = EventWriter(order.run_dir, LAUNCHER, order.started)
    # Without a callback steps are not read, which costs less.
    tail = Tail(order.run_dir, skip=() if on_event else ("stepped",), new_only=True)
    show = Console(order.plan.strategy, _rounds(order, prepared), plain=not can_paint(sys.stderr))

    served: dict[int, ServerStats] = {}
    log = LogTail(log_path(order.run_dir, 0), until=LAST_WORDS, new_only=True)
    disk = DiskMonitor(order.run_dir, show.line)

    def follow(progress: RunProgress | None = None) -> None:
        if progress:
            show.update(progress.step, progress.loss, progress.examples)
        disk.check()
        for line in log.read():
            show.line(line)
        for event in tail.read():
            show.event(event)
            if isinstance(event, ServerStats):
                served[event.rank] = event
            if on_event:
                on_event(event)

    status = "failed"
    try:
        journal.write(_started(order, prepared))
        for line in (
            _first_line(order, prepared),
            *replica_lines(order.plan),
            *stage_lines(order.plan),
            *prepared.notices,
            *notices,
        ):
            journal.write(Notice(LAUNCHER, journal.now(), line))
        status = engine.run(order, follow)
        follow()
        for uneven in imbalances(order.plan, served):
            journal.write(Notice(LAUNCHER, journal.now(), uneven))
        return status
    except PeerLost as lost:
        lost.remedy = _way_on(order)
        raise
    finally:
        journal.write(RunEnded(LAUNCHER, journal.now(), "interrupted" if status == TERMINATED else status))
        journal.close()
        follow()
        show.close()


def _way_on(order: RunSpec) -> str:
    """Returns what to do when a process of a run was lost."""
    if order.checkpoints is None or not CheckpointFolder(order.run_dir / "checkpoints").steps():
        return ""
    snapshots = order.run_dir / SNAPSHOTS
    what = "the servers' last snapshots" if snapshots.is_dir() else "the last checkpoint"
    return f"resume=True (--resume) goes on from {what}"


def _rounds(order: RunSpec, prepared: JobInfo) -> int | None:
    job = order.job
    if order.train is not None or order.seconds is not None:
        return None
    return job.steps or (job.epochs or 0) * -(-prepared.examples // job.global_batch_size)


def _started(order: RunSpec, prepared: JobInfo) -> RunStarted:
    role, resume = order.plan.roles[0], order.resume
    return RunStarted(
        rank=LAUNCHER,
        time_s=order.attempt.began_s,
        strategy=order.plan.strategy,
        workers=order.plan.workers,
        device=role.device.partition(":")[0],
        threads=role.threads,
        global_batch_size=order.job.global_batch_size,
        examples_per_epoch=prepared.examples,
        started_at=datetime.now().astimezone().isoformat(timespec="seconds"),
        plan=to_plain(order.plan),
        versions=versions(),
        clock_s=order.started,
        resumed_step=resume.done if resume else 0,
        resumed_leases=resume.snapshots.committed if resume and resume.snapshots else (),
    )


def _first_line(order: RunSpec, prepared: JobInfo) -> str:
    plan, role = order.plan, order.plan.roles[0]
    parts = split(order.job.global_batch_size, plan.shares)
    batch = " + ".join(map(str, parts)) if len(parts) <= 8 else f"{len(parts)} x {parts[-1]}..{parts[0]}"
    devices = ", ".join(dict.fromkeys(role.device for role in plan.roles if role.computes))
    hosts = list(dict.fromkeys(role.host for role in plan.roles))
    where = hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts ({', '.join(hosts)})"
    return (
        f"{describe_processes(plan)} on {where}, {devices}, {role.threads} "
        f"thread{'s' * (role.threads > 1)} each; batch of {order.job.global_batch_size} = {batch}; "
        f"{prepared.examples:,} examples"
    )
