"""What `fit` does besides in each of a launcher's processes: torchrun's, SLURM's, MPI's.

rank 0                           the others
locks the directory
agree(its begin, as JSON) ─────► agree("")          or "refused", with the exit code
ranks_where(False) ◄───────────► ranks_where(blind) who does not see the directory is an error
runs, and follows the events     runs
agree("written") ◄─────────────► agree("written")   all events are written
                                 copies the files, if its directory is another one
agree("read") ◄────────────────► agree("read")      nothing is read any more: a temporary directory may go
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import asdict, fields, replace
from pathlib import Path
from time import monotonic
from typing import Any

from headrace.api.checks import JobInfo
from headrace.api.resume import ResumeRequest, begin_attempt
from headrace.api.supervision import Follower, begin_and_end, copying, follow_run, write_end
from headrace.data.cache.fingerprint import fingerprint
from headrace.data.given import as_pipeline
from headrace.data.pipeline.order import visits
from headrace.data.pipeline.source import ArraySource
from headrace.engine.base import LEFT, Engine, RunProgress
from headrace.engine.torchrun.agreement import require_same
from headrace.engine.torchrun.elastic_workers.leader_file import find_leader
from headrace.engine.torchrun.engine import LaunchedEngine, join_group
from headrace.engine.torchrun.group import LaunchedGroup
from headrace.engine.torchrun.refusal import tell_uncaught
from headrace.engine.torchrun.store import first_failed, gather, join, of_first, total_of_hosts
from headrace.errors import HeadraceError, LeftBehind, UnfitMachine, UsageError
from headrace.machine import disk
from headrace.machine.identity import versions
from headrace.parameter_server.server.snapshots import SnapshotSet
from headrace.report.model.ending import ended_by
from headrace.report.trackers.listeners import Listeners
from headrace.spec.cluster import Cluster
from headrace.spec.events import LAUNCHER
from headrace.spec.job import Job
from headrace.spec.plain import from_plain
from headrace.strategies import Strategy
from headrace.strategies.started import require_started
from headrace.worker.attributes import SameBuild
from headrace.worker.events import EventWriter
from headrace.worker.run_spec import ResumePoint, RunSpec

_ADDRESS = re.compile(" at 0x[0-9a-f]+")
"""In the text of a function: another one in each process."""
_SUCCESSION_S = 3.0
"""How long it may take beyond the run's `timeout_s` until another rank has taken the place of rank 0."""


class Launched:
    """One of the `ranks` processes of a launcher, which all call the same in the same order."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._group: LaunchedGroup | None = None

    def begin(self, strategy: Strategy, run_dir: Path | None, timeout_s: float) -> None:
        """Finds who leads a run that is under way, which this process may come back to.

        Raises InfeasiblePlan where the strategy is for another number of processes.
        """
        tell_uncaught()
        require_started(strategy, self._ranks)
        if run_dir:
            find_leader(run_dir, timeout_s + _SUCCESSION_S)

    def joined(self, info: JobInfo, strategy: Strategy, cluster: Cluster, encrypt: bool) -> Cluster:
        """Returns the machines of all ranks; raises UsageError where these have not one job."""
        if self._ranks == 1:
            return cluster
        require_alike(info, strategy, encrypt)
        return join(cluster)

    def examples_of_hosts(self, job: Job, cluster: Cluster) -> int:
        """Returns how many examples an epoch visits, where each host lists its own."""
        pipeline, _ = as_pipeline(job.data)
        total = total_of_hosts(len(pipeline), cluster)
        return visits(total, job.global_batch_size, pipeline.batching.drop_last)

    def measured_once(self, measured: Callable[[], str]) -> str:
        """Returns what rank 0 has measured."""
        return of_first(measured) if self._ranks > 1 else measured()

    def engine(self, timeout_s: float, encrypt: bool) -> AbstractContextManager[Engine]:
        """Returns what runs this rank."""
        self._group = join_group(timeout_s, encrypt)
        return closing(LaunchedEngine(self._group))

    def supervise(
        self, spec: RunSpec, info: JobInfo, engine: Engine, request: ResumeRequest, listeners: Listeners
    ) -> str:
        """Runs to the end; returns "ok", "interrupted", "terminated" or "left"."""
        group = self._group
        assert group
        first = (group.rank, group.incarnation) == (0, 0)
        status = _lead(spec, info, engine, group, request, listeners) if first else _join(spec, info, engine, group)
        group.agree("read")
        return status


def _join(spec: RunSpec, info: JobInfo, engine: Engine, group: LaunchedGroup) -> str:
    """Runs as one of the launcher's processes besides rank 0; those of one host write to one directory."""
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
        with begin_and_end(begun, info) as events:
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
    attempt = replace(spec.attempt, began_s=begin["began_s"])
    return replace(spec, run_dir=run_dir, resume=resume, started=started, attempt=attempt)


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


def _resume_point(plain: Mapping[str, Any]) -> ResumePoint:
    snapshots = from_plain(SnapshotSet, plain["snapshots"]) if plain["snapshots"] else None
    return ResumePoint(Path(plain["folder"]), plain["step"], plain["same"], plain["reset_optimizer"], snapshots)


def _lead(
    spec: RunSpec, info: JobInfo, engine: Engine, group: LaunchedGroup, request: ResumeRequest, listeners: Listeners
) -> str:
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
        status = follow_run(begun, info, notices, engine, listeners)
        group.agree("written")
        return status


class _Successor:
    """Shows the run on the rank that takes the place of rank 0, from then on, and writes the run's last event."""

    def __init__(self, spec: RunSpec, info: JobInfo, group: LaunchedGroup) -> None:
        self.status = "failed"
        self._spec, self._info, self._group = spec, info, group
        self._follower: Follower | None = None
        self._closing = ExitStack()

    def __enter__(self) -> _Successor:
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        if not self._group.leads:
            return
        self._closing.close()
        with closing(EventWriter(self._spec.run_dir, LAUNCHER, self._spec.started)) as events:
            why = ended_by(error, self._spec.run_dir) if error else ("", "")
            write_end(self._spec, events, LEFT if isinstance(error, LeftBehind) else self.status, why)
        if self._follower:
            self._follower.close()

    def follow(self, progress: RunProgress | None) -> None:
        """Shows what is new, if this rank leads."""
        if not self._group.leads:
            return
        if self._follower is None:
            self._follower = Follower(self._spec, self._info, Listeners(None))
            say = self._follower.console.line
            say(f"rank {self._group.rank} leads from now on, because rank 0 was lost")
            self._follow = self._closing.enter_context(copying(self._follower.copier, say, self._follower))
        self._follow(progress)


def require_alike(info: JobInfo, strategy: Strategy, encrypt: bool) -> None:
    """Compares the facts of all ranks, and gives the model the attributes of rank 0's; all ranks call it together.

    Raises:
        UsageError: some rank has other facts than rank 0.
        JobError: an attribute cannot be replaced.
    """
    require_same(facts_of(info, strategy, encrypt))
    build = info.job.model
    if isinstance(build, SameBuild):
        text = build.text()
        if len(set(gather(fingerprint(text)))) > 1:
            build.take(of_first(lambda: text), info.module)


def facts_of(info: JobInfo, strategy: Strategy, encrypt: bool) -> Mapping[str, str]:
    """Returns what must be the same on all ranks, by name; of the data a few rows, because all would take long."""
    job = info.job
    parameters = [(each.name, each.shape, each.dtype) for each in info.model.parameters]
    facts = {
        **versions(),
        "strategy": _text(strategy),
        "encrypt": str(encrypt),
        "global_batch_size": str(job.global_batch_size),
        "epochs": str(job.epochs),
        "steps": str(job.steps),
        "seed": str(job.seed),
        **{f"Options({field.name})": _text(getattr(job.options, field.name)) for field in fields(job.options)},
        "the model": f"{len(parameters)} parameters with digest {fingerprint(parameters)[:12]}",
    }
    pipeline, _ = as_pipeline(job.data)
    if pipeline.hosts is None:
        source = pipeline.source
        sample = f", some with digest {source.sample_digest()[:12]}" if isinstance(source, ArraySource) else ""
        facts["the data"] = f"{info.examples:,} examples{sample}"
    return facts


def _text(value: object) -> str:
    return _ADDRESS.sub("", repr(value))
