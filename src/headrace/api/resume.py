"""One attempt at a run in its directory: new, or resumed from the newest sound checkpoint of the same job."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from headrace.api.checks import JobInfo
from headrace.api.run_directory import RunDirLock, refuse_living
from headrace.checkpoint import Checkpoint, CheckpointFolder
from headrace.checkpoint.folder import step_of
from headrace.checkpoint.remote import RemoteFolder
from headrace.errors import CheckpointMismatch, CorruptCheckpoint, HeadraceError, UnfitMachine, UsageError
from headrace.machine import disk
from headrace.machine.identity import versions
from headrace.modules import parameters_and_buffers, parts_of
from headrace.spec.job import Job
from headrace.spec.options import is_url
from headrace.spec.parameter_sets import one_optimizer
from headrace.spec.plain import to_plain
from headrace.spec.plan import Plan
from headrace.training.optimizer import build
from headrace.training.update import group_settings, make
from headrace.trees import plain
from headrace.worker.attributes import SameBuild
from headrace.worker.run_spec import SNAPSHOTS, ResumePoint, RunSpec
from headrace.worker.session import alone
from headrace.worker.state import making_sense

if TYPE_CHECKING:
    from headrace.parameter_server.server.snapshots import SnapshotSet

IF_SAVED = "if_saved"
"""Resumes where the run's directory holds a checkpoint, and begins where it does not."""

_LEFT_BEHIND = " (reset_optimizer=True leaves its state behind)"
_NEW_ONE = " (reset_optimizer=True takes the new one)"
_COPIED_TO = "copied-to"
"""The file in a run's directory that names the URLs to which it has copied."""
_CHECKPOINT = re.compile("step-[0-9]{8,18}")


def describe_run(job: Job, info: JobInfo, plan: Plan) -> dict[str, Any]:
    """Returns the description of a run that each of its checkpoints contains, as JSON values.

    Raises a `UsageError` if they could not hold the optimizer's state.
    """
    if unsaved := info.model.optimizer.unsaved:
        raise UsageError(unsaved)
    tables = [f"{table.name}: {table.rows} x {table.width} of {table.dtype}" for table in info.model.tables]
    return {
        "strategy": plan.strategy,
        "workers": plan.workers,
        "options": dict(plan.options),
        # Without its segments: the ranks' files show the owners, and a large model has many segments.
        "plan": to_plain(replace(plan, segments=())),
        "job": {
            "seed": job.seed,
            "global_batch_size": job.global_batch_size,
            "examples": info.examples,
            **({"sparse_embeddings": tables} if tables else {}),
            **_updates(job, info),
        },
        "training": {
            field.name: to_plain(getattr(job.options, field.name))
            for field in fields(job.options)
            if field.name != "schedule"
        },
        "versions": dict(versions()),
    }


def _updates(job: Job, info: JobInfo) -> dict[str, Any]:
    """Returns how the parameters are updated; where sets take turns, how each is, in the order of the turns."""
    if info.sets:
        parts = parts_of(info.module, info.sets)
        own = {name: _update(alone(job, name), part) for name, part in parts.items()}
        turns = [{"set": name, "rounds": each.rounds} for name, each in job.sets.items()]
        return {
            "turns": turns,
            "optimizer": {name: each["optimizer"] for name, each in own.items()},
            "schedule": {name: each["schedule"] for name, each in own.items()},
        }
    return _update(job, info.module)


def _update(job: Job, module: nn.Module) -> dict[str, Any]:
    optimizer = build(one_optimizer(job.optimizer, "a set of parameters"), module.named_parameters())
    groups = group_settings(optimizer)
    # After the groups: it changes them.
    return {"optimizer": {"class": _class(optimizer), "groups": groups}, "schedule": _schedule(job, optimizer)}


def find(run_dir: Path, resume: Path | str | Literal[True]) -> tuple[Checkpoint, tuple[CorruptCheckpoint, ...]]:
    """Returns the newest sound checkpoint, and what is wrong with the newer ones.

    Args:
        resume: True for its own checkpoints; or another run's directory, or one checkpoint.

    Raises:
        UsageError: there is none.
        CorruptCheckpoint: there are some, and none is sound.
    """
    where = run_dir if resume is True else Path(resume)
    if not disk.exists(where):
        raise UsageError(
            f"there is nothing to resume from: {where} does not exist; begin without resume, or name another"
        )
    if not disk.is_folder(where):
        raise UsageError(
            f"there is nothing to resume from: {where} is a file; name a run_dir, or the folder of one checkpoint, "
            "step-00000060"
        )
    if _CHECKPOINT.fullmatch(where.name) and not disk.exists(where / "checkpoints"):
        checkpoint = CheckpointFolder(where.parent).open(int(where.name.removeprefix("step-")))
        checkpoint.verify()
        return checkpoint, ()
    found, wrong = CheckpointFolder(where / "checkpoints").latest()
    if found is not None:
        return found, wrong
    if wrong:
        raise wrong[0]
    raise UsageError(
        f"there is nothing to resume from: {where / 'checkpoints'} holds no checkpoint; begin without resume, "
        "or name the run_dir that has one, or one checkpoint's folder by the name that it was saved with, step-00000060"
    )


def resumption(
    checkpoint: Checkpoint, description: Mapping[str, Any], info: JobInfo, reset_optimizer: bool
) -> tuple[ResumePoint, tuple[str, ...]]:
    """Returns how to resume from a checkpoint, and the differences from the saved job that are allowed.

    Raises:
        CheckpointMismatch: it is of another job.
        CorruptCheckpoint: its description is not that of a run.
    """
    saved, now = checkpoint.description, description
    with making_sense(checkpoint.path):
        job = {key: value for key, value in now["job"].items() if key not in ("optimizer", "schedule", "turns")}
        differences = [*_model_differences(checkpoint, info), *_differences("", saved["job"], job)]
        turns, turns_now = saved["job"].get("turns"), now["job"].get("turns")
        if turns != turns_now and not reset_optimizer:
            before, after = _turns_text(turns), _turns_text(turns_now)
            differences.append(f"sets of parameters that took turns were {before}, are {after}{_LEFT_BEHIND}")
        elif not reset_optimizer:
            for old, new in zip(_each_update(saved["job"]), _each_update(now["job"]), strict=True):
                differences += _optimizer_differences(old["optimizer"], new["optimizer"])
                differences += _schedule_differences(old["schedule"], new["schedule"])
        changes = tuple(_differences("", saved["training"], now["training"]))
        same = all(saved[key] == now[key] for key in ("strategy", "workers", "options"))
    if differences:
        raise CheckpointMismatch(checkpoint.path, tuple(differences))
    return ResumePoint(checkpoint.path.parent, checkpoint.step, same, reset_optimizer), changes


@dataclass(frozen=True)
class ResumeRequest:
    """Where a run resumes from: True is its own last checkpoint; or another run's, one checkpoint, or a URL.

    Attributes:
        or_begin: begins, in the same directory, where there is none.
    """

    resume: bool | Path | str = False
    reset_optimizer: bool = False
    or_begin: bool = False


@contextmanager
def begin_attempt(spec: RunSpec, info: JobInfo, request: ResumeRequest) -> Iterator[tuple[RunSpec, tuple[str, ...]]]:
    """Locks the run's directory; yields the spec as this attempt runs it, and lines for the user.

    Raises:
        UsageError: the directory holds a run already, or one that lives; there is nothing to resume.
        CheckpointMismatch, CorruptCheckpoint: what there is cannot be resumed.
        UnfitMachine: the directory cannot be written to, or the copies' service fails.
    """
    own = CheckpointFolder(spec.run_dir / "checkpoints")
    copy_to = spec.checkpoints.copy_to if spec.checkpoints else None
    copies = RemoteFolder(copy_to) if copy_to else None
    source = _source(own, request, copies)
    begins = request.or_begin and source is None and not own.steps()
    # The weights, and about as much again for an optimizer's state.
    needed_bytes = 2 * info.model.parameter_bytes if spec.checkpoints else 0
    resume, notices = None, tuple[str, ...]()
    with ExitStack() as stack:
        if source:
            # Locked first, because it is written to.
            continues = request.resume is True
            locked = stack.enter_context(closing(RunDirLock(spec.run_dir, continues, needed_bytes)))
            resume, notices = _fetch(spec, info, request, own, source)
        else:
            if request.resume and not begins:
                refuse_living(spec.run_dir)
                resume, notices = _resume(spec, info, request)
            # An attempt that has ended before its first save is one of this run's, too.
            continues = begins or (resume is not None and resume.folder.parent.resolve() == spec.run_dir.resolve())
            locked = stack.enter_context(closing(RunDirLock(spec.run_dir, continues, needed_bytes)))
        if copies:
            _claim(copies, spec.run_dir, came_from=source.folder.url if source else None)
        if continues:
            # A run that is already at its end saves no checkpoint, which would do it.
            own.clear()
            from headrace.parameter_server.server.snapshots import forget

            forget(spec.run_dir / SNAPSHOTS, resume.snapshots.names if resume and resume.snapshots else ())
        began = spec.started - locked.attempt_s
        attempt = replace(spec.attempt, began_s=locked.attempt_s, lock=locked.lock)
        yield replace(spec, resume=resume, started=began, attempt=attempt), notices


@dataclass(frozen=True)
class _Source:
    """Copies of checkpoints elsewhere, or one of them."""

    folder: RemoteFolder
    step: int | None = None


def _source(own: CheckpointFolder, request: ResumeRequest, copies: RemoteFolder | None) -> _Source | None:
    """Returns where checkpoints are fetched from: a URL that was asked for, or the run's own copies."""
    if isinstance(request.resume, str) and is_url(request.resume):
        url, _, last = request.resume.rstrip("/").rpartition("/")
        step = step_of(last)
        return _Source(RemoteFolder(request.resume)) if step is None else _Source(RemoteFolder(url), step)
    if copies is None or request.resume is not True or own.steps() or not copies.steps():
        return None
    return _Source(copies)


def _fetch(
    spec: RunSpec, info: JobInfo, request: ResumeRequest, own: CheckpointFolder, source: _Source
) -> tuple[ResumePoint, tuple[str, ...]]:
    """Brings a checkpoint into the run's directory, and returns how to resume from it."""
    try:
        step, wrong = source.folder.receive(own, source.step)
    except OSError as error:
        raise UnfitMachine(
            f"cannot write the checkpoint from {source.folder.url} to {own.path}: {error.strerror}; make room there, "
            "or name another run_dir"
        ) from error
    try:
        resume, notices = _resume(spec, info, replace(request, resume=True))
    except HeadraceError:
        # The next attempt in this directory may be another job's.
        own.discard(step)
        raise
    return resume, (*_left_out(wrong), f"fetched the checkpoint of step {step} from {source.folder.url}", *notices)


def _claim(copies: RemoteFolder, run_dir: Path, came_from: str | None) -> None:
    """Sees to it that a run deletes its own copies alone, and that it can write there."""
    mark = run_dir / _COPIED_TO
    claimed = mark.read_text(encoding="utf-8").splitlines() if disk.exists(mark) else []
    if copies.url in claimed:
        return
    steps = () if copies.url == came_from else copies.steps()
    if steps:
        raise UsageError(
            f"{copies.url} holds checkpoints of another run, the last of step {steps[-1]}; name another copy_to "
            f"(--copy-to), or go on from them by resume={copies.url!r} (--resume-from)"
        )
    copies.require_writable()
    mark.write_text("".join(f"{url}\n" for url in (*claimed, copies.url)), encoding="utf-8")


def _resume(spec: RunSpec, info: JobInfo, request: ResumeRequest) -> tuple[ResumePoint, tuple[str, ...]]:
    checkpoint, wrong = find(spec.run_dir, True if isinstance(request.resume, bool) else request.resume)
    resume, changes = resumption(checkpoint, spec.description, info, request.reset_optimizer)
    rounds = spec.rounds_of(info.examples)
    if isinstance(spec.job.model, SameBuild) and (drawn := checkpoint.description.get("drawn")):
        with making_sense(checkpoint.path):
            spec.job.model.take(drawn, info.module)
    kept, damaged = _snapshots(spec, request, resume, rounds)
    resume = replace(resume, snapshots=kept)
    notices = [*_left_out((*wrong, *damaged)), f"goes on from {checkpoint.path}"]
    if kept:
        leases = sum(stop - first for first, stop in kept.committed)
        notices.append(
            f"the servers go on from snapshots: {kept.done} rounds and {leases} portions of the next ones are done"
        )
    notices += [f"since it was saved: {change}" for change in changes]
    if checkpoint.step >= rounds:
        notices.append(f"the checkpoint has {checkpoint.step} rounds and the job {rounds}: nothing is left to do")
    return resume, tuple(notices)


def _left_out(wrong: Iterable[CorruptCheckpoint]) -> list[str]:
    return [f"damaged, left out: {error.path}: {error.reason}" for error in wrong]


def _snapshots(
    spec: RunSpec, request: ResumeRequest, resume: ResumePoint, rounds: int
) -> tuple[SnapshotSet | None, tuple[CorruptCheckpoint, ...]]:
    """Returns the servers' snapshots to go on from, if they are newer than the checkpoint, and which are damaged."""
    one = not isinstance(request.resume, bool) and resume.folder.parent.resolve() != Path(request.resume).resolve()
    if one or spec.snapshots_every_s is None or not resume.same or resume.reset_optimizer:
        return None, ()
    from headrace.parameter_server.server.snapshots import newest_of

    found, damaged = newest_of(spec.plan, resume.snapshots_folder)
    if found is None or (found.done, bool(found.committed)) <= (resume.step, False) or found.until > rounds:
        return None, damaged
    if found.done > resume.step and spec.job.options.early_stopping is not None:
        # The results of the evaluations between the two are not known.
        return None, damaged
    return found, damaged


def _class(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def _schedule(job: Job, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    if job.options.schedule is None:
        return None
    scheduler = make(job.options.schedule, optimizer)
    state = {key: plain(value, "the schedule's state") for key, value in scheduler.state_dict().items()}
    return {"class": _class(scheduler), "state": state, "every": job.options.schedule_every}


def _model_differences(checkpoint: Checkpoint, info: JobInfo) -> Iterator[str]:
    now = {
        name: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in parameters_and_buffers(info.module)
    }
    saved = {
        name: spec
        for rank in checkpoint.ranks
        for name, spec in checkpoint.shapes(rank).items()
        if name.startswith(("parameter/", "buffer/"))
    }
    for name in sorted({*now, *saved}):
        if now.get(name) != saved.get(name):
            words = name.replace("/", " ")
            yield f"{words} is {_shape(saved.get(name))} in the checkpoint, {_shape(now.get(name))} in the job"


def _shape(spec: tuple[tuple[int, ...], str] | None) -> str:
    return "missing" if spec is None else f"{spec[1]} {list(spec[0])}"


def _differences(of: str, saved: Mapping[str, Any], now: Mapping[str, Any], remedy: str = "") -> Iterator[str]:
    for key, new in now.items():
        old = saved.get(key)
        if old != new:
            yield f"{key}{of} was {_readable(old)}, is {_readable(new)}{remedy}"


def _schedule_differences(saved: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> Iterator[str]:
    before, after = (None if schedule is None else schedule["class"] for schedule in (saved, now))
    if before != after:
        yield f"the schedule was {before}, is {after}{_LEFT_BEHIND}"
    elif saved and now:
        state = {**saved["state"], "every": saved["every"]}
        yield from _differences(" of the schedule", state, {**now["state"], "every": now["every"]}, _NEW_ONE)


def _turns_text(turns: Sequence[Mapping[str, Any]] | None) -> str:
    return ", ".join(f"{each['set']} ({each['rounds']})" for each in turns) if turns else "none"


def _each_update(job: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns optimizer and schedule, of each set of parameters where they take turns."""
    if "turns" not in job:
        return [job]
    names = [each["set"] for each in job["turns"]]
    return [{"optimizer": job["optimizer"][name], "schedule": job["schedule"][name]} for name in names]


def _optimizer_differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    if saved["class"] != now["class"]:
        yield f"the optimizer was {saved['class']}, is {now['class']}{_LEFT_BEHIND}"
        return
    if [group["names"] for group in saved["groups"]] != [group["names"] for group in now["groups"]]:
        yield f"the optimizer's groups hold other parameters{_LEFT_BEHIND}"
        return
    for number, (before, after) in enumerate(zip(saved["groups"], now["groups"], strict=True)):
        group = f" of the optimizer's group {number}"
        yield from _differences(group, before["options"], after["options"], _NEW_ONE)


def _readable(value: Any) -> str:
    """Returns a JSON value of `group_settings` approximately as the user wrote it."""
    if isinstance(value, list):
        return f"[{', '.join(map(_readable, value))}]"
    return _readable(*value.values()) if isinstance(value, dict) and len(value) == 1 else str(value)
