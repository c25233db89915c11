"""What a run may go on from: the newest sound checkpoint of the same job, and what differs where it is another."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch

from headrace.checkpoint import Checkpoint, CheckpointFolder
from headrace.engine.order import Resumption
from headrace.engine.preparation import Prepared
from headrace.engine.snapshot import parameters_and_buffers
from headrace.errors import CheckpointMismatch, CorruptCheckpoint, UsageError
from headrace.replica.optimizer import build
from headrace.replica.schedule import group_settings
from headrace.spec.job import Job
from headrace.spec.plain import to_plain
from headrace.spec.plan import Plan

__all__ = ["describe_run", "find", "resumption"]

_CHECKPOINT = re.compile("step-[0-9]{8,18}")


def describe_run(job: Job, prepared: Prepared, plan: Plan) -> dict[str, Any]:
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
            "accumulate": job.options.accumulate,
            "precision": job.options.precision,
            "ema_decay": job.options.ema_decay,
            "optimizer": {
                "class": f"{type(optimizer).__module__}.{type(optimizer).__qualname__}",
                "groups": group_settings(optimizer),
            },
        },
        "versions": {"headrace": version("headrace"), "torch": torch.__version__, "python": platform.python_version()},
    }


def find(run_dir: Path, resume: Path | str | Literal[True]) -> tuple[Checkpoint, tuple[CorruptCheckpoint, ...]]:
    """Returns the newest sound checkpoint, and what is wrong with the newer ones.

    Args:
        run_dir: of this run.
        resume: True for its own checkpoints; or another run's directory, or one checkpoint.

    Raises:
        UsageError: there is none.
        CorruptCheckpoint: there are some, and none is sound.
    """
    where = run_dir if resume is True else Path(resume)
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
    checkpoint: Checkpoint, description: Mapping[str, Any], prepared: Prepared, reset_optimizer: bool
) -> Resumption:
    """Returns how to go on from a checkpoint.

    Raises:
        CheckpointMismatch: it is of another job; says what differs.
    """
    saved, now = checkpoint.description, description
    differences = [*_model_differences(checkpoint, prepared), *_job_differences(saved["job"], now["job"])]
    if not reset_optimizer:
        differences += _optimizer_differences(saved["job"]["optimizer"], now["job"]["optimizer"])
    if differences:
        raise CheckpointMismatch(checkpoint.path, tuple(differences))
    same = all(saved[key] == now[key] for key in ("strategy", "workers", "options"))
    return Resumption(checkpoint.path.parent, checkpoint.step, same, reset_optimizer)


def _model_differences(checkpoint: Checkpoint, prepared: Prepared) -> Iterator[str]:
    now = {
        name: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in parameters_and_buffers(prepared.module)
    }
    saved = {name: spec for name, spec in checkpoint.shapes(0).items() if name.startswith(("parameter/", "buffer/"))}
    for name in sorted({*now, *saved}):
        if now.get(name) != saved.get(name):
            words = name.replace("/", " ")
            yield f"{words} is {_shape(saved.get(name))} in the checkpoint, {_shape(now.get(name))} in the job"


def _shape(spec: tuple[tuple[int, ...], str] | None) -> str:
    return "missing" if spec is None else f"{spec[1]} {list(spec[0])}"


def _job_differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for key in now:
        if key != "optimizer" and saved.get(key) != now[key]:
            yield f"{key} was {saved.get(key)}, is {now[key]}"


def _optimizer_differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    if saved["class"] != now["class"]:
        yield f"the optimizer was {saved['class']}, is {now['class']} (reset_optimizer=True leaves its state behind)"
        return
    if [group["names"] for group in saved["groups"]] != [group["names"] for group in now["groups"]]:
        yield "the optimizer's groups hold other parameters (reset_optimizer=True leaves its state behind)"
        return
    for number, (before, after) in enumerate(zip(saved["groups"], now["groups"], strict=True)):
        for key in after["options"]:
            old, new = before["options"].get(key), after["options"][key]
            if old != new:
                yield (
                    f"{key} of the optimizer's group {number} was {_readable(old)}, is {_readable(new)} "
                    "(reset_optimizer=True takes the new one)"
                )


def _readable(value: Any) -> str:
    """Returns what `group_settings` has made fit for JSON as the user wrote it, more or less."""
    if isinstance(value, list):
        return f"[{', '.join(map(_readable, value))}]"
    return _readable(*value.values()) if isinstance(value, dict) and len(value) == 1 else str(value)
