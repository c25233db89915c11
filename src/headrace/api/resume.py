"""What a run may go on from: the newest sound checkpoint of the same job, and what differs where it is another."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

import torch

from headrace.api.checks import JobInfo
from headrace.checkpoint import Checkpoint, CheckpointFolder
from headrace.errors import CheckpointMismatch, CorruptCheckpoint, UsageError
from headrace.machine import versions
from headrace.spec.job import Job
from headrace.spec.plain import to_plain
from headrace.spec.plan import Plan
from headrace.training.compute import parameters_and_buffers
from headrace.training.optimizer import build
from headrace.training.update import group_settings, make, plain
from headrace.worker.run_spec import ResumePoint
from headrace.worker.state import making_sense

_LEFT_BEHIND = " (reset_optimizer=True leaves its state behind)"
_NEW_ONE = " (reset_optimizer=True takes the new one)"
_CHECKPOINT = re.compile("step-[0-9]{8,18}")


def describe_run(job: Job, prepared: JobInfo, plan: Plan) -> dict[str, Any]:
    """Returns what every checkpoint of a run says of it, as JSON values."""
    optimizer = build(job.optimizer, prepared.module.named_parameters())
    return {
        "strategy": plan.strategy,
        "workers": plan.workers,
        "options": dict(plan.options),
        # Without its segments: who owned what is seen in who saved what, and a large model has many.
        "plan": to_plain(replace(plan, segments=())),
        "job": {
            "seed": job.seed,
            "global_batch_size": job.global_batch_size,
            "examples": prepared.examples,
            "optimizer": {"class": _class(optimizer), "groups": group_settings(optimizer)},
            # After the groups: it changes them.
            "schedule": _schedule(job, optimizer),
        },
        "training": {
            field.name: to_plain(getattr(job.options, field.name))
            for field in fields(job.options)
            if field.name != "schedule"
        },
        "versions": dict(versions()),
    }


def find(run_dir: Path, resume: Path | str | Literal[True]) -> tuple[Checkpoint, tuple[CorruptCheckpoint, ...]]:
    """Returns the newest sound checkpoint, and what is wrong with the newer ones.

    Args:
        resume: True for its own checkpoints; or another run's directory, or one checkpoint.

    Raises:
        UsageError: there is none.
        CorruptCheckpoint: there are some, and none is sound.
    """
    where = run_dir if resume is True else Path(resume)
    if not where.exists():
        raise UsageError(
            f"there is nothing to resume from: {where} does not exist; begin without resume, or name another"
        )
    if _CHECKPOINT.fullmatch(where.name) and not (where / "checkpoints").exists():
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
        "or name the run_dir that has one"
    )


def resumption(
    checkpoint: Checkpoint, description: Mapping[str, Any], prepared: JobInfo, reset_optimizer: bool
) -> tuple[ResumePoint, tuple[str, ...]]:
    """Returns how to go on from a checkpoint, and what the user has changed that may be changed.

    Raises:
        CheckpointMismatch: it is of another job; says what differs.
        CorruptCheckpoint: what it says of its job is not what a run says.
    """
    saved, now = checkpoint.description, description
    with making_sense(checkpoint.path):
        differences = [*_model_differences(checkpoint, prepared), *_job_differences(saved["job"], now["job"])]
        if not reset_optimizer:
            differences += _optimizer_differences(saved["job"]["optimizer"], now["job"]["optimizer"])
            differences += _schedule_differences(saved["job"]["schedule"], now["job"]["schedule"])
        changes = tuple(_differences("", saved["training"], now["training"]))
        same = all(saved[key] == now[key] for key in ("strategy", "workers", "options"))
    if differences:
        raise CheckpointMismatch(checkpoint.path, tuple(differences))
    return ResumePoint(checkpoint.path.parent, checkpoint.step, same, reset_optimizer), changes


def _class(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def _schedule(job: Job, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    if job.options.schedule is None:
        return None
    scheduler = make(job.options.schedule, optimizer)
    state = {key: plain(value, "the schedule's state") for key, value in scheduler.state_dict().items()}
    return {"class": _class(scheduler), "state": state, "every": job.options.schedule_every}


def _model_differences(checkpoint: Checkpoint, prepared: JobInfo) -> Iterator[str]:
    now = {
        name: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in parameters_and_buffers(prepared.module)
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


def _job_differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    wanted = {key: value for key, value in now.items() if key not in ("optimizer", "schedule")}
    yield from _differences("", saved, wanted)


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
    """Returns what `group_settings` has made fit for JSON as the user wrote it, more or less."""
    if isinstance(value, list):
        return f"[{', '.join(map(_readable, value))}]"
    return _readable(*value.values()) if isinstance(value, dict) and len(value) == 1 else str(value)
