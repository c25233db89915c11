"""The arguments of `fit` and `launch`, and what they ask for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.api.resume import IF_SAVED, ResumeRequest
from headrace.engine.base import Engine
from headrace.errors import UsageError
from headrace.report.trackers.listeners import OnEvent
from headrace.spec.cluster import Cluster
from headrace.spec.job import Job
from headrace.spec.options import Checkpoints, is_url
from headrace.strategies import Strategy
from headrace.worker.callbacks.callback import Callback
from headrace.worker.worker import Worker

# A process has four heartbeats a second.
_LEAST_TIMEOUT_S = 1.0


@dataclass(frozen=True)
class FitArguments:
    """The caller's arguments beside job and strategy; `told` are notices that another run has shown."""

    device: str | Sequence[str]
    run_dir: Path | str | None
    on_event: OnEvent | Sequence[OnEvent] | None
    timeout_s: float
    engine: Engine | None
    seconds: float | None
    checkpoints: Checkpoints | bool | None
    resume: bool | Path | str = False
    reset_optimizer: bool = False
    check: bool = True
    cluster: Cluster | Path | str | None = None
    encrypt: bool = True
    callbacks: Sequence[Callback] = ()
    collective_timeout_s: float = 600.0
    told: frozenset[str] = frozenset()


def check_arguments(train: Callable[[Worker], None] | None, arguments: FitArguments) -> None:
    """Raises UsageError where one is of the wrong kind."""
    for name, given in (("timeout_s", arguments.timeout_s), ("collective_timeout_s", arguments.collective_timeout_s)):
        if not (isinstance(given, int | float) and _LEAST_TIMEOUT_S <= given < float("inf")):
            raise UsageError(f"{name} must be a number of at least {_LEAST_TIMEOUT_S:.0f}, got {given!r}")
    if train is not None and not callable(train):
        raise UsageError(f"train must be a function that takes a worker, got {type(train).__name__}")
    if not isinstance(arguments.engine, Engine | None):
        raise UsageError(f"engine must be hr.ThreadEngine(), another engine or None, got {arguments.engine!r:.60}")
    if not isinstance(arguments.run_dir, str | Path | None):
        raise UsageError(f"run_dir must be the path of a directory, or None, got {arguments.run_dir!r:.60}")
    if arguments.run_dir == "":
        raise UsageError("run_dir is empty, as an unset shell variable is; name a directory, or leave it out")


def callbacks_of(job: Job, arguments: FitArguments) -> tuple[Callback, ...]:
    """Returns the callbacks of the job and of the call; raises UsageError where one is none."""
    every: list[Callback] = []
    for given in (getattr(job, "callbacks", ()), arguments.callbacks):
        if not isinstance(given, Sequence):
            raise UsageError(f"callbacks must be a list of hr.Callback objects, got {given!r:.60}")
        every += given
    if wrong := [each for each in every if not isinstance(each, Callback)]:
        raise UsageError(f"callbacks are objects of subclasses of hr.Callback, got {wrong[0]!r:.60}")
    return tuple(every)


def resume_request(arguments: FitArguments) -> ResumeRequest:
    """Returns from where the run is to go on; raises UsageError."""
    resume = arguments.resume
    if not isinstance(resume, bool | str | Path):
        raise UsageError(
            f"resume is True, '{IF_SAVED}', a run's directory, one checkpoint or a URL of such, got {resume!r:.60}"
        )
    if resume and arguments.run_dir is None:
        raise UsageError("resume needs the run_dir of the run that goes on")
    if arguments.reset_optimizer and not resume:
        raise UsageError("reset_optimizer (--reset-optimizer) is for a run that goes on; say from what by resume")
    if resume == IF_SAVED:
        return ResumeRequest(True, arguments.reset_optimizer, or_begin=True)
    if isinstance(resume, str) and is_url(resume):
        return ResumeRequest(resume, arguments.reset_optimizer)
    return ResumeRequest(resume if isinstance(resume, bool) else Path(resume).absolute(), arguments.reset_optimizer)


def checkpoints_of(job: Job, strategy: Strategy, arguments: FitArguments) -> Checkpoints | None:
    """Returns when the run is to save, None for never; raises UsageError."""
    wanted = arguments.checkpoints
    if wanted is None:
        wanted = arguments.run_dir is not None and strategy.one_model
    chosen = (Checkpoints() if wanted else None) if isinstance(wanted, bool) else wanted
    if chosen is not None and not isinstance(chosen, Checkpoints):
        raise UsageError(f"checkpoints must be hr.Checkpoints(...), True or False, got {wanted!r:.60}")
    if chosen and not strategy.one_model:
        raise UsageError(
            f"{strategy.name} trains several models, so there is no single state to save: checkpoints=False"
        )
    if arguments.resume == IF_SAVED and chosen is None:
        raise UsageError("resume='if_saved' (--resume-if-saved) goes on from checkpoints, and this run saves none")
    if job.options.on_nonfinite == "rollback" and chosen is None:
        raise UsageError(
            "on_nonfinite='rollback' needs checkpoints to roll back to; give a run_dir, or "
            "checkpoints=hr.Checkpoints(every_steps=100)"
        )
    return chosen
