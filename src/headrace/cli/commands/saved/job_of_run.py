"""The job of a run that has ended, for commands that need it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.jobfile import check_file, load_job
from headrace.errors import UsageError

if TYPE_CHECKING:
    from headrace.spec.job import Job


def job_of_run(run: Path, job_file: Path | None, settings: Sequence[str] | None, otherwise: str) -> Job:
    """Returns the job that a run names, or that of `job_file`; `settings` come before those of the run.

    Args:
        otherwise: what to do in a program whose job comes from no file.
    """
    # Lazily: it imports torch.
    from headrace.api.exporting import source_of

    source = source_of(run)
    path = job_file or (Path(source.path) if source else None)
    if path is None:
        raise UsageError(
            f"the job of {run} comes from a program, not from a file: name a file that defines it by --job, or "
            f"{otherwise}"
        )
    check_file(path, "job file")
    run_settings = source.settings if source and not job_file else ()
    given = {_key(setting) for setting in settings or ()}
    return load_job(path, [*(setting for setting in run_settings if _key(setting) not in given), *(settings or ())])


def _key(setting: str) -> str:
    return setting.partition("=")[0].strip()
