"""The engine of a command's run: processes of this machine, a Ray cluster, or what a launcher has started."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.combinations import refuse_idle
from headrace.cli.jobfile import load_job
from headrace.engine.schedulers.environment import adopt
from headrace.errors import UsageError

if TYPE_CHECKING:
    from headrace.engine.base import Engine
    from headrace.spec.job import Job


def launched_rank() -> int | None:
    """Returns this process's rank if torchrun, SLURM, MPI or Kubernetes has started it with others; else None."""
    adopt()
    if "WORLD_SIZE" not in os.environ or "RANK" not in os.environ:
        return None
    return int(os.environ["RANK"])


def launched_world() -> int:
    """Returns how many processes a launcher has started; 1 without one."""
    return 1 if launched_rank() is None else int(os.environ["WORLD_SIZE"])


@contextlib.contextmanager
def own_engine(
    secret_file: Path | None = None, job_file: Path | None = None, ray: Engine | None = None
) -> Iterator[Engine | None]:
    """Yields an engine of local processes, or `ray`; None under a launcher, whose processes are the workers.

    Those compare their versions and job files, before the job is read.
    """
    if launched_rank() is not None:
        if secret_file is not None:
            os.environ["HEADRACE_SECRET_FILE"] = str(secret_file.absolute())
        if launched_world() > 1:
            # Lazily: they import torch.
            from headrace.engine.torchrun.agreement import require_same
            from headrace.machine.identity import versions

            digest = hashlib.sha256(job_file.read_bytes()).hexdigest()[:12] if job_file else "none"
            require_same({**versions(), "the job file's digest": digest})
        yield None
        return
    refuse_idle(
        {"--secret-file": secret_file is not None},
        "for processes that a launcher starts on several hosts; those of one host make their own secret; leave it out",
    )
    if ray:
        with contextlib.closing(ray):
            yield ray
        return
    # Lazily: `--help` need not wait for the engine.
    from headrace.engine.local.engine import LocalEngine

    with LocalEngine(forks=True) as engine:
        yield engine


@contextlib.contextmanager
def job_on_engine(path: Path, settings: Sequence[str] | None) -> Iterator[tuple[Job, Engine | None]]:
    """Yields the job of a file, and the engine that runs it.

    In this order: the engine forks this process, which must not have run the file before.
    """
    with own_engine() as engine:
        yield load_job(path, settings or ()), engine


def refuse_launcher(command: str) -> None:
    """Raises UsageError for a command that starts its own processes, where a launcher has started this one."""
    if launched_rank() is not None:
        raise UsageError(f"headrace {command} starts its own processes; run it without torchrun or another launcher")
