"""Runs a spec in its directory with an engine, writes the launcher's events, and shows its caller all events."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from time import monotonic
from typing import Any

from headrace.api.checks import JobInfo
from headrace.api.resume import ResumeRequest, begin_attempt
from headrace.checkpoint import CheckpointFolder
from headrace.checkpoint.copier import CheckpointCopier
from headrace.checkpoint.remote import RemoteFolder
from headrace.engine.base import LEFT, TERMINATED, Engine, RunProgress
from headrace.engine.torchrun.engine import LaunchedEngine
from headrace.engine.torchrun.group import LaunchedGroup
from headrace.engine.torchrun.store import first_failed
from headrace.errors import (
    CorruptCheckpoint,
    ForkServerLost,
    HeadraceError,
    LeftBehind,
    PeerLost,
    PeersApart,
    RunFailed,
    UnfitMachine,
    UsageError,
)
from headrace.machine import disk
from headrace.machine.identity import can_paint, versions
from headrace.parameter_server.server.snapshots import SnapshotSet
from headrace.policies.roles import split
from headrace.report.model.events import DiskMonitor, LogTail, Tail
from headrace.report.model.pipeline import replica_lines, stage_lines
from headrace.report.model.servers import imbalances
from headrace.report.trackers.listeners import Listeners
from headrace.report.views.live import Console
from headrace.report.views.notebook import notebook_display
from headrace.spec.events import LAUNCHER, Notice, RunEnded, RunStarted, Saved, ServerStats
from headrace.spec.plain import from_plain, to_plain
from headrace.spec.plan import describe_processes, device_kinds
from headrace.worker.events import EventWriter
from headrace.worker.run_spec import LAST_LOG_LINE, SNAPSHOTS, AttemptInfo, ResumePoint, RunSpec, log_path, model_path

_PATIENCE_S = 2.0
"""How long a copy of the last checkpoint may take until the user is told."""
_FOLLOW_EVERY_S = 0.2


def supervise(spec: RunSpec, info: JobInfo, engine: Engine, request: ResumeRequest, listeners: Listeners) -> str:
    """Runs to the end; returns "ok", "interrupted" or "terminated"."""
    if isinstance(engine, LaunchedEngine):
        leads = (engine.group.rank, engine.group.incarnation) == (0, 0)
        status = _lead(spec, info, engine, request, listeners) if leads else _join(spec, info, engine)
        engine.group.agree("read")
        return status
    with begin_attempt(spec, info, request) as (begun, notices):
        return _follow(begun, info, notices, engine, listeners)


def _join(spec: RunSpec, info: JobInfo, engine: LaunchedEngine) -> str:
    """Runs as one of the launcher's processes besides rank 0; those of one host write to one directory."""
    group = engine.group
    begin = json.loads(group.agree(""))
    if "refused" in begin:
        raise first_failed(group.hosts[0], begin["refused"])
    begun = _on_this_host(spec, group, begin)
    seen = group.incarnation > 0 or disk.exists(begun.run_dir / begin["mark"])
    _check_seen(spec, group, seen)
    if seen or group.rank != group.leader:
        with _Successor(begun, info, group) as successor:
            status = successor.status = engine.run(begun, successor.follow)
    else:
        with _begin_and_end(begun, info) as events:
            status = engine.run(begun, lambda _: None)
            events.status = status
    if status == LEFT:
        return status
    group.agree("written")
    if begun.run_dir != spec.run_dir:
        # Another rank's directory may be temporary, and is then deleted with that rank.
        _copy(begun.run_dir, spec.run_dir, group)
    return status


def _copy(source: Path, target: Path, group: LaunchedGroup) -> None:
    try:
        shutil.copytree(source, target, dirs_exist_ok=True)
    except OSError as error:
        (*_, why), *_ = error.args[0] if isinstance(error, shutil.Error) else [(error,)]
        raise UnfitMachine(
            f"rank {group.rank} on {group.hosts[group.rank]} cannot copy the run's files from {source} to {target}: "
            f"{why}; make room there, or give all ranks of a host one run_dir"
        ) from None


def _on_this_host(spec: RunSpec, group: LaunchedGroup, begin: Mapping[str, Any]) -> RunSpec:
    """Returns the spec as rank 0 begins it, with the directory and on the clock of this host."""
    resume = _resume_point(begin["resume"]) if begin["resume"] else None
    run_dir, started = Path(begin["run_dir"]), begin["started"]
    if group.leader != 0:
        run_dir, started = (
            Path(group.agree_on_host(str(spec.run_dir))),
            monotonic() - (group.passed_s or begin["passed_s"]),
        )
    return replace(spec, run_dir=run_dir, resume=resume, started=started, attempt=AttemptInfo(begin["began_s"]))


def _check_seen(spec: RunSpec, group: LaunchedGroup, seen: bool) -> None:
    blind = group.ranks_where(not seen)
    if not blind or not (spec.checkpoints or spec.resume):
        return
    if group.rank != 0:
        raise first_failed(group.hosts[0], UsageError.exit_code)
    names = ", ".join(dict.fromkeys(group.hosts[rank] for rank in blind))
    raise UsageError(
        f"{spec.run_dir} is not the same directory on {names} as on {group.hosts[0]}, and checkpoints are saved to one "
        "that all see; name a run_dir on a file system of all hosts, or save nothing (checkpoints=False, "
        "--checkpoint-every 0)"
    )


class _LauncherEvents:
    """The launcher's events, and the status that the last one has."""

    def __init__(self, spec: RunSpec) -> None:
        self.writer = EventWriter(spec.run_dir, LAUNCHER, spec.started)
        self.status = "failed"

    def note(self, text: str) -> None:
        self.writer.write(Notice(LAUNCHER, self.writer.now(), text))


@contextmanager
def _begin_and_end(spec: RunSpec, info: JobInfo) -> Iterator[_LauncherEvents]:
    """Writes the first and the last event of the run."""
    events = _LauncherEvents(spec)
    try:
        events.writer.write(_started(spec, info))
        yield events
    except LeftBehind:
        # The others go on, and one of them writes how the run ends.
        events.status = LEFT
        raise
    finally:
        _write_end(events.writer, events.status)
        deleted = events.writer.is_deleted
        events.writer.close()
        if events.writer.problem:
            sys.stderr.write(
                f"headrace: {spec.run_dir} takes nothing more ({events.writer.problem}): the run's last events are "
                "lost, and its report is incomplete\n"
            )
    if deleted:
        model = model_path(spec.run_dir)
        kept = f"the trained model is in {model}" if disk.is_file(model) else "train again"
        raise RunFailed(
            f"{spec.run_dir} was deleted or moved while the run trained, and its events and checkpoints with it; {kept}"
        )


def _write_end(writer: EventWriter, status: str) -> None:
    """Writes the run's last event; not where this process leaves the run to the others."""
    if status != LEFT:
        writer.write(RunEnded(LAUNCHER, writer.now(), "interrupted" if status == TERMINATED else status))


def _resume_point(plain: Mapping[str, Any]) -> ResumePoint:
    snapshots = from_plain(SnapshotSet, plain["snapshots"]) if plain["snapshots"] else None
    return ResumePoint(Path(plain["folder"]), plain["step"], plain["same"], plain["reset_optimizer"], snapshots)


def _lead(spec: RunSpec, info: JobInfo, engine: LaunchedEngine, request: ResumeRequest, listeners: Listeners) -> str:
    group = engine.group
    with ExitStack() as stack:
        try:
            begun, notices = stack.enter_context(begin_attempt(spec, info, request))
        except BaseException as error:
            group.agree(json.dumps({"refused": error.exit_code if isinstance(error, HeadraceError) else 1}))
            raise
        resume = {**asdict(begun.resume), "folder": str(begun.resume.folder)} if begun.resume else None
        with tempfile.NamedTemporaryFile(dir=begun.run_dir, prefix="seen-") as mark:
            begin = {
                "run_dir": str(begun.run_dir),
                "mark": Path(mark.name).name,
                "started": begun.started,
                "passed_s": monotonic() - begun.started,
                "began_s": begun.attempt.began_s,
                "resume": resume,
            }
            group.agree(json.dumps(begin))
            _check_seen(begun, group, True)
        status = _follow(begun, info, notices, engine, listeners)
        group.agree("written")
        return status


def _follow(spec: RunSpec, info: JobInfo, notices: tuple[str, ...], engine: Engine, listeners: Listeners) -> str:
    tail = Tail(spec.run_dir, skip=listeners.skips, new_only=True)
    show = _console(spec, info)

    served: dict[int, ServerStats] = {}
    log = LogTail(log_path(spec.run_dir, 0), until=LAST_LOG_LINE, new_only=True)
    disk = DiskMonitor(spec.run_dir, show.line)
    copier = _copier(spec)

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
            if copier and isinstance(event, Saved):
                copier.wake()
            listeners(event)
        for line in listeners.lines():
            show.line(line)

    try:
        with _begin_and_end(spec, info) as events:
            plan = spec.plan
            for line in (_first_line(spec, info), *replica_lines(plan), *stage_lines(plan), *info.notices, *notices):
                events.note(line)
            with _copying(copier, events.note, follow) as follow_both:
                status = engine.run(spec, follow_both)
            events.status = status
            follow()
            for uneven in imbalances(plan, served):
                events.note(uneven)
        return status
    except (PeerLost, PeersApart, ForkServerLost) as lost:
        lost.remedy = _remedy(spec)
        raise
    finally:
        follow()
        for line in listeners.close():
            show.line(line)
        show.close()


def _copier(spec: RunSpec) -> CheckpointCopier | None:
    when = spec.checkpoints
    if when is None or when.copy_to is None:
        return None
    return CheckpointCopier(CheckpointFolder(spec.run_dir / "checkpoints"), RemoteFolder(when.copy_to), when.keep)


@contextmanager
def _copying(
    copier: CheckpointCopier | None, say: Callable[[str], object], follow: Callable[[RunProgress | None], None]
) -> Iterator[Callable[[RunProgress | None], None]]:
    """Yields what follows the run and its copier; at the end, also after an error, waits for the last copy."""
    if copier is None:
        yield follow
        return

    def follow_both(progress: RunProgress | None) -> None:
        follow(progress)
        for line in copier.lines():
            say(line)

    copier.start()
    try:
        yield follow_both
    finally:
        copier.finish()
        try:
            if not copier.wait(_PATIENCE_S):
                say("waits for the copy of the last checkpoint; Ctrl-C leaves it out, the checkpoint itself is saved")
                while not copier.wait(_FOLLOW_EVERY_S):
                    follow_both(None)
        except KeyboardInterrupt:
            say("the last checkpoint was not copied to its end; resume=True (--resume) copies it")
        follow_both(None)


class _Successor:
    """Shows the run on the rank that takes the place of rank 0, from then on, and writes the run's last event."""

    def __init__(self, spec: RunSpec, info: JobInfo, group: LaunchedGroup) -> None:
        self.status = "failed"
        self._spec, self._info, self._group = spec, info, group
        self._shown: tuple[Tail, Console] | None = None
        self._copier: CheckpointCopier | None = None
        self._closing = ExitStack()
        self._follow: Callable[[RunProgress | None], None] = self._show

    def __enter__(self) -> _Successor:
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        if not self._group.leads:
            return
        self._closing.close()
        with closing(EventWriter(self._spec.run_dir, LAUNCHER, self._spec.started)) as events:
            _write_end(events, LEFT if isinstance(error, LeftBehind) else self.status)
        if self._shown:
            self.follow(None)
            self._shown[1].close()

    def follow(self, progress: RunProgress | None) -> None:
        """Shows what is new, if this rank leads."""
        if not self._group.leads:
            return
        if self._shown is None:
            tail = Tail(self._spec.run_dir, skip=("stepped",), new_only=True)
            console = _console(self._spec, self._info)
            self._shown = tail, console
            console.line(f"rank {self._group.rank} leads from now on, because rank 0 was lost")
            self._copier = _copier(self._spec)
            self._follow = self._closing.enter_context(_copying(self._copier, console.line, self._show))
        self._follow(progress)

    def _show(self, progress: RunProgress | None) -> None:
        if self._shown is None:
            return
        tail, show = self._shown
        if progress:
            show.update(progress.step, progress.loss, progress.examples)
        for event in tail.read():
            show.event(event)
            if self._copier and isinstance(event, Saved):
                self._copier.wake()


def _console(spec: RunSpec, info: JobInfo) -> Console:
    plain, show_html = not can_paint(sys.stderr), notebook_display()
    return Console(spec.plan.strategy, _rounds(spec, info), plain, told=info.told, show_html=show_html)


def _remedy(spec: RunSpec) -> str:
    """Returns how to continue when a process of a run was lost; "" where nothing was saved."""
    try:
        if spec.checkpoints is None or not CheckpointFolder(spec.run_dir / "checkpoints").steps():
            return ""
    except (OSError, CorruptCheckpoint):
        # What is told is the loss of the process, and not also that the disk fails.
        return ""
    snapshots = spec.run_dir / SNAPSHOTS
    what = "the servers' last snapshots" if disk.is_folder(snapshots) else "the last checkpoint"
    return f"resume=True (--resume) goes on from {what}"


def _rounds(spec: RunSpec, info: JobInfo) -> int | None:
    """Returns how many rounds the run does; None where that is not known."""
    return None if spec.train is not None or spec.seconds is not None else spec.rounds_of(info.examples)


def _started(spec: RunSpec, info: JobInfo) -> RunStarted:
    role, resume = spec.plan.roles[0], spec.resume
    return RunStarted(
        rank=LAUNCHER,
        time_s=spec.attempt.began_s,
        strategy=spec.plan.strategy,
        workers=spec.plan.workers,
        device=", ".join(device_kinds(spec.plan)),
        threads=role.threads,
        global_batch_size=spec.job.global_batch_size,
        examples_per_epoch=info.examples,
        started_at=datetime.now().astimezone().isoformat(timespec="seconds"),
        plan=to_plain(spec.plan),
        versions=versions(),
        clock_s=spec.started,
        resumed_step=resume.done if resume else 0,
        resumed_leases=resume.snapshots.committed if resume and resume.snapshots else (),
        job=spec.job.source,
    )


def _first_line(spec: RunSpec, info: JobInfo) -> str:
    plan, role = spec.plan, spec.plan.roles[0]
    parts = split(spec.job.global_batch_size, plan.shares)
    batch = " + ".join(map(str, parts)) if len(parts) <= 8 else f"{len(parts)} x {parts[-1]}..{parts[0]}"
    devices = ", ".join(dict.fromkeys(role.device for role in plan.roles if role.computes))
    hosts = list(dict.fromkeys(role.host for role in plan.roles))
    where = hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts ({', '.join(hosts)})"
    return (
        f"{describe_processes(plan)} on {where}, {devices}, {role.threads} "
        f"thread{'s' * (role.threads > 1)} each; batch of {spec.job.global_batch_size} = {batch}; "
        f"{info.examples:,} examples"
    )
