"""Runs a spec in its directory with an engine, writes the launcher's events, and shows its caller all events."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from headrace.api.checks import JobInfo
from headrace.api.resume import ResumeRequest, begin_attempt
from headrace.checkpoint import CheckpointFolder
from headrace.checkpoint.copier import CheckpointCopier
from headrace.checkpoint.remote import RemoteFolder
from headrace.engine.base import LEFT, TERMINATED, Engine, RunProgress
from headrace.errors import LeftBehind, RunFailed
from headrace.machine import disk
from headrace.machine.disk import takes_no_more, unless
from headrace.machine.identity import can_paint, versions
from headrace.machine.resources import cores
from headrace.policies.roles import split
from headrace.report.model.ending import ended_by, ended_by_signal
from headrace.report.model.events import DiskMonitor, LogTail, Tail
from headrace.report.model.pipeline import replica_lines, stage_lines
from headrace.report.model.servers import imbalances
from headrace.report.trackers.listeners import Listeners
from headrace.report.views.live import Console
from headrace.report.views.notebook import notebook_display
from headrace.spec.events import ENDS_EARLY, LAUNCHER, Notice, RunEnded, RunStarted, Saved, ServerStats
from headrace.spec.parameter_sets import ParameterSet
from headrace.spec.plain import to_plain
from headrace.spec.plan import describe_processes, device_kinds
from headrace.worker.events import EventWriter
from headrace.worker.run_spec import LAST_LOG_LINE, RunSpec, log_path, model_path

_PATIENCE_S = 2.0
"""How long a copy of the last checkpoint may take until the user is told."""
_FOLLOW_EVERY_S = 0.2
_RESERVE_BYTES = 1 << 14


def supervise(spec: RunSpec, info: JobInfo, engine: Engine, request: ResumeRequest, listeners: Listeners) -> str:
    """Runs to the end; returns "ok", "interrupted" or "terminated"."""
    with begin_attempt(spec, info, request) as (begun, notices):
        return follow_run(begun, info, notices, engine, listeners)


class _LauncherEvents:
    """The launcher's events, and what the last one says: `status`, and cause and remedy, `why`."""

    def __init__(self, spec: RunSpec) -> None:
        self.writer = EventWriter(spec.run_dir, LAUNCHER, spec.started)
        self.status = "failed"
        self.why = ("", "")

    def note(self, text: str) -> None:
        self.writer.write(Notice(LAUNCHER, self.writer.now(), text))


@contextmanager
def begin_and_end(spec: RunSpec, info: JobInfo) -> Iterator[_LauncherEvents]:
    """Writes the first and the last event of the run."""
    events = _LauncherEvents(spec)
    reserve = _reserved(spec.run_dir)
    try:
        events.writer.write(_started(spec, info))
        yield events
    except LeftBehind:
        # The others go on, and one of them writes how the run ends.
        events.status = LEFT
        raise
    except BaseException as error:
        events.why = ended_by(error, spec.run_dir, command_line())
        raise
    finally:
        with unless(takes_no_more):
            # Another file may be in the place of the run's directory.
            if disk.is_file(reserve):
                reserve.unlink(missing_ok=True)
        write_end(spec, events.writer, events.status, events.why)
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


def _reserved(run_dir: Path) -> Path:
    """Takes a little room on the disk, for the run's last event where others have filled the rest."""
    path = run_dir / "events" / "reserve"
    with unless(takes_no_more):
        path.write_bytes(bytes(_RESERVE_BYTES))
    return path


def write_end(spec: RunSpec, writer: EventWriter, status: str, why: tuple[str, str] = ("", "")) -> None:
    """Writes the run's last event; not where this process leaves the run to the others."""
    if status in ("interrupted", TERMINATED):
        status, why = "interrupted", ended_by_signal(status == TERMINATED, why[0], spec.run_dir, command_line())
    if status != LEFT:
        writer.write(RunEnded(LAUNCHER, writer.now(), status, *why))


class Follower:
    """Shows a run, tells its listeners of events and copies its checkpoints, as often as it is called.

    Attributes:
        console: what shows it.
        served: what each server has told last.
        early: why the run ends before all its rounds are done; "" where it does not.
        copier: of its checkpoints; None where none are copied.
    """

    def __init__(self, spec: RunSpec, info: JobInfo, listeners: Listeners) -> None:
        plain, show_html = not can_paint(sys.stderr), notebook_display()
        rounds = None if spec.train is not None or spec.seconds is not None else spec.rounds_of(info.examples)
        self.console = Console(
            spec.plan.strategy, rounds, plain, told=info.told, show_html=show_html, epochs=spec.job.epochs or 0
        )
        self.served: dict[int, ServerStats] = {}
        self.early = ""
        self._listeners = listeners
        self._tail = Tail(spec.run_dir, skip=listeners.skips, new_only=True)
        self._log = LogTail(log_path(spec.run_dir, 0), until=LAST_LOG_LINE, new_only=True)
        self._disk = DiskMonitor(spec.run_dir, self.console.line)
        self._stops = False
        self.copier = _copier_of(spec)

    def __call__(self, progress: RunProgress | None = None) -> None:
        if progress:
            self.console.update(progress.step, progress.loss, progress.examples)
        self._disk.check()
        for line in self._log.read():
            self.console.line(line)
        for event in self._tail.read():
            self.console.event(event)
            if isinstance(event, ServerStats):
                self.served[event.rank] = event
            if isinstance(event, Notice) and event.text.startswith(ENDS_EARLY):
                self.early = event.text
            if self.copier and isinstance(event, Saved):
                self.copier.wake()
            self._listeners(event)
        for line in self._listeners.lines():
            self.console.line(line)
        if progress and progress.stops and not self._stops:
            self._stops = True
            self.console.event(Notice(LAUNCHER, 0.0, "ends after this round; Ctrl-C once more ends it at once"))

    def close(self) -> None:
        """Shows the rest."""
        self()
        for line in self._listeners.close():
            self.console.line(line)
        self.console.close()


def follow_run(spec: RunSpec, info: JobInfo, notices: tuple[str, ...], engine: Engine, listeners: Listeners) -> str:
    follower = Follower(spec, info, listeners)
    try:
        with begin_and_end(spec, info) as events:
            plan = spec.plan
            for line in (_first_line(spec, info), *replica_lines(plan), *stage_lines(plan), *info.notices, *notices):
                events.note(line)
            with copying(follower.copier, events.note, follower) as follow:
                status = engine.run(spec, follow)
            events.status = status
            follower()
            events.why = (follower.early, "")
            for uneven in imbalances(plan, follower.served):
                events.note(uneven)
        return status
    finally:
        follower.close()


def _copier_of(spec: RunSpec) -> CheckpointCopier | None:
    when = spec.checkpoints
    if when is None or when.copy_to is None:
        return None
    return CheckpointCopier(CheckpointFolder(spec.run_dir / "checkpoints"), RemoteFolder(when.copy_to), when.keep)


@contextmanager
def copying(
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
        rounds=spec.rounds_of(info.examples),
        cores=cores(),
        command=command_line(),
        model=f"{type(info.module).__name__}, {sum(each.elements for each in info.model.parameters):,} parameters",
        optimizer=_optimizer_text(spec.job.optimizer),
    )


def command_line() -> str:
    """Returns what was typed, as far as this process knows."""
    program, *rest = sys.argv or [""]
    own = Path(program).name in ("headrace", "__main__.py")
    words = ["headrace", *rest] if own else ["python", program, *rest]
    return shlex.join(words) if program else ""


def _optimizer_text(optimizer: object) -> str:
    """Returns "SGD(lr=0.1, momentum=0.9)"; of sets of parameters each with its name."""
    if isinstance(optimizer, Mapping):
        return "; ".join(f"{name}: {_optimizer_text(each)}" for name, each in optimizer.items())
    if isinstance(optimizer, ParameterSet):
        return _optimizer_text(optimizer.optimizer)
    function = getattr(optimizer, "func", optimizer)
    values = ", ".join(f"{name}={value!r:.40}" for name, value in getattr(optimizer, "keywords", {}).items())
    return f"{getattr(function, '__name__', type(function).__name__)}({values})"


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
