"""`headrace adopt`: a training script as a job that is proved against it, or with the two lines of `hr.setup`."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from headrace.cli.command import argument, command, option
from headrace.cli.commands.launch import is_job, stdout_for_results
from headrace.cli.commands.verification.verify import of_script
from headrace.cli.engines import refuse_launcher
from headrace.cli.jobfile import check_file, load_job
from headrace.cli.options import MOST_SECONDS
from headrace.cli.output import Answer, say, writing
from headrace.engine.base import end_with, leave_alone
from headrace.errors import HeadraceError, JobError, RunFailed, UnknownName, UsageError
from headrace.machine import disk
from headrace.machine.temporary import temporary_folder

if TYPE_CHECKING:
    from headrace.api.adoption.facts import Facts

_EXAMPLES = """
  headrace adopt train.py
  headrace adopt train.py --epochs 3          # the script gets --epochs
  headrace adopt --output jobs/train.py train.py
  headrace adopt --workers 3 --json train.py
"""
OPTIONS = frozenset(("--output", "--workers", "--steps", "--limit", "--json"))
"""Of `headrace adopt`."""
_PARALLEL = {
    *(
        "DistributedDataParallel",
        "DDP",
        "DataParallel",
        "FullyShardedDataParallel",
        "fully_shard",
        "init_process_group",
    ),
    *("spawn", "start_processes", "Process", "Accelerator", "Fabric"),
}
"""What makes a script one of several processes already."""
_OURS = {"hr.setup", "hr.fit", "hr.launch", "headrace.setup", "headrace.fit", "headrace.launch"}


@command(_EXAMPLES, "reading the script")
def adopt(
    answer: Answer,
    script: Annotated[Path, argument("SCRIPT.py", "A training script for one device.")],
    arguments: Annotated[list[str] | None, argument("ARGUMENTS", "What the script finds in sys.argv.")] = None,
    output: Annotated[Path | None, option("--output FILE", "Default: SCRIPT_job.py or SCRIPT_setup.py.")] = None,
    workers: Annotated[int, option("--workers N", "How many processes the proof has.", min=2)] = 2,
    steps: Annotated[int, option("--steps N", "How many of the script's steps are seen.", min=2)] = 12,
    limit: Annotated[
        float, option("--limit SECONDS", "How long the script may take for them.", min=1, max=MOST_SECONDS)
    ] = 300.0,
) -> None:
    """Make a job of a training script, and prove it.

    The script runs until it has made --steps. What its loop does becomes a job, whose steps must be those of the
    script bit for bit, and whose several workers must train as one. A script that is no job gets the two lines of
    `hr.setup`, which are proved, too; where nothing is proved nothing is written. The script stays as it is.
    """
    refuse_launcher("adopt")
    if str(script).startswith("-"):
        raise UnknownName("option of headrace adopt", str(script).partition("=")[0], OPTIONS)
    check_file(script, "script")
    path = _path(script, output, "job")
    given = list(arguments or ())
    _refuse_parallel(script)
    from headrace.api.adoption.facts import read_facts
    from headrace.api.adoption.loop import Unfit

    with stdout_for_results(answer.as_json), temporary_folder() as folder:
        say(f"{script.name}: {steps} steps of it, alone")
        _run_alone(script, given, folder, steps, limit)
        facts = read_facts(folder)
        if facts.problem:
            raise JobError(f"{script}: {facts.problem}")
        reason, left = "", tuple[str, ...]()
        try:
            left = _as_job(script, path, facts, folder, workers)
            form = "job"
        except Unfit as error:
            reason, form, path = str(error), "setup", _path(script, output, "setup")
            say(f"not a job: {reason}")
            _with_setup(script, path, facts, given, workers)
    values = {"form": form, "file": str(path), "reason": reason, "steps": facts.steps, "left_out": list(left)}
    answer.give(values, "\n".join(_lines(script, path, facts, form, reason, left, workers)))


def _lines(
    script: Path, path: Path, facts: Facts, form: str, reason: str, left: Sequence[str], workers: int
) -> list[str]:
    if form == "setup":
        return [
            f"{path}: {script.name} with hr.setup, since it is no job:",
            f"  {reason}",
            f"proved: {workers} processes train what the script trains alone",
            f"next: headrace launch {path} --workers {workers}",
        ]
    return [
        f"{path}: the job of {script.name}",
        f"proved: {facts.steps} steps of the script, bit for bit; {workers} workers train as one",
        *(["a job has no place for these lines:", *left] if left else []),
        f"next: headrace train {path} --strategy mirrored --workers {workers}",
    ]


def _path(script: Path, output: Path | None, form: str) -> Path:
    path = output or script.with_name(f"{script.stem}_{form}.py")
    if disk.exists(path):
        raise UsageError(f"{path} exists; delete it, or give --output another name")
    return path


def _refuse_parallel(script: Path) -> None:
    try:
        tree = ast.parse(script.read_text(encoding="utf-8"))
    except SyntaxError as error:
        raise JobError(f"{script}, line {error.lineno}: {error.msg}; a script must be Python") from error
    if is_job(script):
        raise UsageError(f"{script} defines a job: train it by `headrace train {script}`")
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        text = ast.unparse(node.func)
        if text in _OURS:
            raise UsageError(f"{script}, line {node.lineno}: {text} is called, so it is one of headrace already")
        if text.rpartition(".")[2] in _PARALLEL:
            raise UsageError(
                f"{script}, line {node.lineno}: {text}(...) makes the script one of several processes already; take it "
                "out, so that it trains on one device"
            )


def _run_alone(script: Path, arguments: Sequence[str], folder: Path, steps: int, limit: float) -> None:
    from headrace.api.adoption import dry_run

    said = folder / "output.txt"
    command = [sys.executable, "-m", dry_run.__name__, str(folder), str(steps), str(script), *arguments]
    with said.open("w") as stream:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT)
        end_with(process.pid)
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired as error:
            raise JobError(
                f"{script} has not made {steps} steps in {limit:g} s; give fewer --steps, or a longer --limit"
            ) from error
        finally:
            process.kill()
            leave_alone(process.pid)
            process.wait()
    if code:
        last = "\n".join(said.read_text(errors="replace").splitlines()[-12:])
        raise JobError(f"{script} itself ended with exit code {code} before it had made {steps} steps:\n{last}")


def _as_job(script: Path, path: Path, facts: Facts, folder: Path, workers: int) -> tuple[str, ...]:
    from headrace.api.adoption.job_file import write_job
    from headrace.api.adoption.loop import Unfit
    from headrace.api.adoption.proof import prove
    from headrace.api.verification.verify import verify
    from headrace.strategies import resolve

    made = write_job(script.name, script.read_text(encoding="utf-8"), facts)
    with _drafted(path, made.text) as draft:
        try:
            job = load_job(draft)
            prove(job, facts, folder)
            say(f"a job with its steps; now {workers} workers")
            found = verify(job, resolve("mirrored", workers), run_dir=folder / "run", say=lambda _: None)
        except Unfit:
            raise
        except Exception as error:
            # The script's own code fails where a job tries it, as on a batch of one example.
            raise Unfit(f"as a job it fails: {error}") from error
        if not found.equal:
            raise Unfit(f"{workers} workers would train something else: {found.cause}")
    return made.left_out


@contextmanager
def _drafted(path: Path, text: str) -> Iterator[Path]:
    """Has a file of another name until the body ends well: what is not proved never has the name that is asked for."""
    draft = path.with_name(f"{path.stem}_unproved.py")
    with writing("the file", path, "--output"):
        draft.write_text(text, encoding="utf-8")
    try:
        yield draft
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _with_setup(script: Path, path: Path, facts: Facts, arguments: Sequence[str], workers: int) -> None:
    from headrace.api.adoption.loop import Unfit
    from headrace.api.adoption.two_lines import write_setup

    source = script.read_text(encoding="utf-8")
    failures = []
    for summed in (False, True):
        try:
            text = write_setup(source, facts, summed)
        except Unfit as error:
            raise JobError(f"{script} is no job, and has no place for hr.setup: {error}") from error
        say(f"with hr.setup{', the loss taken for a sum' * summed}: {workers} processes")
        try:
            with _drafted(path, text) as draft:
                if not of_script(draft, arguments, workers, min(6, facts.steps)).equal:
                    raise RunFailed("its processes would train something else than the script alone")
            return
        except HeadraceError as error:
            failures.append(str(error))
    raise JobError(
        f"{script} is no job, and hr.setup alone does not carry it: {failures[0]}; docs/guide/plain-scripts.md says "
        "what a loop asks of its processes"
    )
