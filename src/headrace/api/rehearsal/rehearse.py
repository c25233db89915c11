"""rehearse: trains a job as many workers would, in one process and in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import torch

from headrace.api.checks import inspect_job
from headrace.api.fit import fit
from headrace.api.rehearsal.setup import RehearsalSetup
from headrace.api.run import Run
from headrace.api.run_directory import TemporaryRunDir
from headrace.engine.threads import ThreadEngine
from headrace.errors import HeadraceError, UsageError
from headrace.machine import disk
from headrace.prediction.assumptions import Assumptions
from headrace.prediction.rehearsal.recorded import Record, read_record
from headrace.spec.cluster import Cluster
from headrace.spec.events import LAUNCHER
from headrace.spec.job import Job
from headrace.spec.model import ModelSpec
from headrace.spec.options import check_options
from headrace.strategies import OneDevice, Strategy, made_again, resolve
from headrace.strategies.refusals import refuse
from headrace.worker.run_spec import events_path
from headrace.worker.state import random_states, restore_random_states


@dataclass(frozen=True)
class Rehearsal:
    """A rehearsal that has ended.

    Attributes:
        run: events, curves and the trained model, as of a real run; its times are virtual.
        seconds: how long it took here.
        virtual_s: how long the run would have taken.
        alone: the same job, trained by one process; None where it was not asked for.
        alone_s: how long one of the machines would take for it; 0 where that is not known.
        memory_bytes: for parameters, optimizer state and gradients of all workers.
        notes: what a reader must know.

    Examples:
        >>> found = hr.rehearse(job, hr.Downpour(workers=4), model=profile, alone=True)
        >>> found.run.plan.workers, found.alone.plan.workers
        (4, 1)
    """

    run: Run
    seconds: float
    virtual_s: float
    alone: Run | None
    alone_s: float
    memory_bytes: int
    notes: tuple[str, ...] = field(default=())


def rehearse(
    job: Job,
    strategy: Strategy | str | None = None,
    cluster: Cluster | Path | str | None = None,
    *,
    model: ModelSpec | Path | str | None = None,
    assumptions: Assumptions | None = None,
    from_run: Path | str | None = None,
    run_dir: Path | str | None = None,
    alone: bool = False,
    force: bool = False,
    say: Callable[[str], object] = lambda line: None,
) -> Rehearsal:
    """Trains a job in this process as the workers of a strategy would, in virtual time.

    Each step is computed with the parameters that its worker would have then, and applied in the order and with the
    staleness that the simulated timeline gives. So the loss curve of 64 workers, with a network and with stragglers, is
    seen before a machine is rented. Shards, optimizer, data leases and local steps are those of real runs.

    Args:
        strategy: with a number of workers: `hr.Downpour(workers=64)`; None for that of `from_run`.
        cluster: the machines, their file, or so many of a cloud's; None for one machine like this for each worker and
            server, 1 Gbit/s between them.
        model: a profile of the job's model (`hr.profile`) or its file; None to measure it here first.
        assumptions: as of `simulate`: seed, variation of computing times, stragglers.
        from_run: the directory of a real run, whose order of events is taken; then without cluster, model, assumptions
            and force. The result is the run's, bit for bit, on the same machine with the same versions.
        run_dir: where events and the model go; None for a directory that goes with the result.
        alone: also trains the job in one process, in `run_dir`/one_device, to compare with.
        force: uses a profile of another model or of other versions.
        say: is told what is done.

    Raises:
        UsageError: the strategy cannot be rehearsed, the profile is of something else, or the run has no record.
        InfeasiblePlan: there is too little memory here, or the cluster has too few machines; with the numbers.
        NonFiniteLoss, NonFiniteGradient, DataError: as of a real run.

    Examples:
        >>> hr.rehearse(job, hr.Downpour(workers=8), model=profile).virtual_s > 0
        True
    """
    try:
        info = inspect_job(job)
        check_options(info.job.options, "cpu")
        record = _recorded(from_run, cluster, model, assumptions, force)
        chosen = _chosen(strategy, record)
        refuse(chosen.refusals(), info.job.options)
        directory, keeper = _directory(run_dir)
        setup = RehearsalSetup(info, chosen, directory, force, assumptions or Assumptions(), say)
        began = perf_counter()
        with _own_generators():
            ended_s = setup.simulated(cluster, model) if record is None else setup.recorded(record)
        took_s = perf_counter() - began
        run = Run(info.job, setup.plan, directory, "ok", info.module, keeper)
        single = _in_one_process(job, directory / "one_device", say) if alone else None
        return Rehearsal(run, took_s, ended_s, single, setup.alone_s, setup.memory_bytes, setup.notes)
    except HeadraceError as error:
        # The caller's frames help a user, those of headrace do not.
        raise error.with_traceback(None) from error.__cause__


def _in_one_process(job: Job, run_dir: Path, say: Callable[[str], object]) -> Run:
    say("training in one process, to compare with")
    return fit(job, OneDevice(), device="cpu", run_dir=run_dir, checkpoints=False, engine=ThreadEngine())


def _chosen(strategy: Strategy | str | None, record: Record | None) -> Strategy:
    """Returns what is rehearsed; raises UsageError for what is not named, cannot be, or is not the record's."""
    if record is None:
        if strategy is None:
            raise UsageError("rehearse needs a strategy (--strategy), or a run whose order it takes (--from)")
        chosen = resolve(strategy)
    elif strategy is None:
        chosen = made_again(record.started.strategy, record.plan.options, record.plan.workers)
    else:
        chosen = resolve(strategy, record.plan.workers)
        if chosen.name != record.started.strategy:
            raise UsageError(f"the run was trained by {record.started.strategy}, not by {chosen.name}; leave it out")
    if reason := chosen.behave(1).not_rehearsed:
        raise UsageError(f"{chosen.name} cannot be rehearsed: {reason}")
    return chosen


def _recorded(
    from_run: Path | str | None,
    cluster: Cluster | Path | str | None,
    model: ModelSpec | Path | str | None,
    assumptions: Assumptions | None,
    force: bool,
) -> Record | None:
    """Returns the order of a real run; raises UsageError for what would change nothing beside it."""
    if from_run is None:
        return None
    given = {
        "cluster": cluster is not None,
        "model": model is not None,
        "assumptions (--assume, --seed)": assumptions is not None,
        "force": force,
    }
    if names := [name for name, is_given in given.items() if is_given]:
        raise UsageError(
            f"{', '.join(names)}: for a simulated order of events, and from_run (--from) takes that of a real run, "
            "with its times; leave one of them out"
        )
    return read_record(from_run)


@contextmanager
def _own_generators() -> Iterator[None]:
    """Leaves the caller's random numbers as they are: the workers' are drawn in this process."""
    device = torch.device("cpu")
    states = random_states(device)
    try:
        yield
    finally:
        restore_random_states(states, device)


def _directory(run_dir: Path | str | None) -> tuple[Path, TemporaryRunDir | None]:
    keeper = TemporaryRunDir() if run_dir is None else None
    directory = Path(run_dir).absolute() if run_dir is not None else Path(keeper.path if keeper else ".")
    if disk.exists(events_path(directory, LAUNCHER)):
        raise UsageError(f"{directory} holds a run already; name another run_dir, or delete it")
    directory.mkdir(parents=True, exist_ok=True)
    return directory, keeper
