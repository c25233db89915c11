"""The result of a command on stdout, its errors in one form, and the exit codes."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import typer

from headrace.engine.base import Terminated
from headrace.errors import HeadraceError, PeerLost, UnfitMachine, WorkerFailed, user_traceback
from headrace.machine import disk
from headrace.machine.identity import require_working_directory
from headrace.machine.limits import explained
from headrace.report.format import clean
from headrace.spec.plain import finite
from headrace.worker.run_spec import model_path

if TYPE_CHECKING:
    from rich.console import RenderableType

    from headrace.report.model.summary import Summary
    from headrace.report.model.verdict import References


_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENAMETOOLONG)
"""What a path leads to that a user names, and headrace cannot help."""


_UNIT = re.compile(r" (?=%|ms\b)")


class ExitCode(IntEnum):
    """The exit codes of headrace; `launch` exits with its script's own code."""

    OK = 0
    RUN_FAILED = 1
    USAGE = 2
    ENVIRONMENT = 3
    PEER_LOST = 4
    DATA = 5
    INTERRUPTED = 130
    TERMINATED = 143


def exit_code(error: HeadraceError) -> int:
    """Returns the exit code of the process; a worker's error keeps its own."""
    return error.worker_exit_code if isinstance(error, WorkerFailed) else error.exit_code


def error_document(error: BaseException, code: int) -> dict[str, Any]:
    """Returns the error as a JSON document."""
    facts: dict[str, Any] = {"type": type(error).__name__, "message": _message(error), "exit_code": code}
    if isinstance(error, WorkerFailed | PeerLost):
        facts |= {"rank": error.rank, "host": error.host, "cause": error.cause}
    notes = _notes(error)
    if notes:
        facts["notes"] = notes
    frames = _traceback(error)
    if frames:
        facts["traceback"] = frames
    return {"error": facts}


def write_error(stream: TextIO, error: BaseException) -> None:
    """Writes the message and the notes, and last the traceback of the user's own code if there is one."""
    lines = [f"error: {_message(error)}", *_notes(error)]
    frames = _traceback(error)
    if frames:
        lines += ["", frames]
    # A name in it may be of a file from elsewhere.
    print(clean("\n".join(lines)), file=stream, flush=True)


def _traceback(error: BaseException) -> str:
    if isinstance(error, WorkerFailed):
        return error.traceback.rstrip("\n")
    if isinstance(error, HeadraceError) and error.__cause__ is not None:
        return user_traceback(error.__cause__)
    return ""


def _notes(error: BaseException) -> list[str]:
    # A worker's traceback is a note in Python; here it is shown separately.
    worker_traceback = error.traceback.rstrip() if isinstance(error, WorkerFailed) else None
    return [note for note in getattr(error, "__notes__", ()) if note != worker_traceback]


def _message(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        # How the run has ended, where there was one.
        return str(error) or "interrupted (SIGINT)"
    if isinstance(error, Terminated):
        return "terminated (SIGTERM)"
    return str(error)


class Answer:
    """Writes a command's result to `stream`, as one JSON document or as text.

    `given` says of each option of the command whether it has another value than its default.

    Raises:
        UnfitMachine: the stream takes no more. A closed pipe stays an OSError, at which typer ends the command.
    """

    def __init__(self, stream: TextIO, as_json: bool, given: Mapping[str, bool]) -> None:
        self.as_json = as_json
        self._given = given
        self._stream = stream
        self._fails = False

    def given(self, *options: str) -> dict[str, bool]:
        """Returns whether each of these options has another value than its default."""
        return {name: self._given[name] for name in options}

    @property
    def stream(self) -> TextIO:
        """Where a script's own output goes: the document, where one is asked for, stands alone on stdout."""
        return sys.stderr if self.as_json else self._stream

    def document(self, document: Mapping[str, Any]) -> None:
        """Prints the result as JSON."""
        with self._writing():
            write_document(self._stream, document)

    def failure(self, error: BaseException, code: int) -> None:
        """Prints the error as JSON, if JSON was asked for and the stream has taken all so far."""
        if self.as_json and not self._fails:
            # The error is told on stderr, too, and decides the exit code.
            with contextlib.suppress(UnfitMachine):
                self.document(error_document(error, code))

    def give(self, document: Mapping[str, Any], text: str) -> None:
        """Prints the result in the form that was asked for."""
        if self.as_json:
            self.document(document)
        else:
            self.text(text)

    def show(self, table: RenderableType) -> None:
        """Prints a table or wrapped text as wide as the terminal (80 columns without one)."""
        # Lazily: `--help` need not wait for rich.
        from rich.console import Console

        with self._writing():
            Console(file=self._stream, markup=False, highlight=False).print(table)

    def text(self, text: str) -> None:
        """Prints text."""
        with self._writing():
            print(text, file=self._stream, flush=True)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._fails = True
            if error.errno == errno.EPIPE:
                raise
            raise UnfitMachine(f"the result cannot be written to stdout: {error.strerror}; make room there") from None


def write_document(stream: TextIO, document: Mapping[str, Any]) -> None:
    """Writes one JSON document. NaN and infinities, which JSON lacks, become null."""
    print(json.dumps(finite(document), indent=2, allow_nan=False), file=stream, flush=True)


@contextlib.contextmanager
def answering(as_json: bool, given: Mapping[str, bool] | None = None) -> Iterator[Answer]:
    """Runs a command's body, and turns its errors into messages and a `typer.Exit` with the exit code.

    `given` says of each option whether it has another value than its default.
    Meanwhile the output of user code goes to stderr, so that stdout has only the result.
    """
    answer = Answer(sys.stdout, as_json, given or {})
    try:
        require_working_directory()
        with contextlib.redirect_stdout(sys.stderr):
            yield answer
    except HeadraceError as error:
        _fail(answer, _told(error, exit_code(error)), exit_code(error))
    except KeyboardInterrupt as error:
        _fail(answer, error, ExitCode.INTERRUPTED)
    except Terminated as error:
        _fail(answer, error, ExitCode.TERMINATED)
    except Exception as error:
        # typer ends a command with exceptions of its own; anything else is a defect of headrace, whose
        # traceback is wanted, unless the machine refuses something.
        if isinstance(error, typer.Exit | typer.Abort):
            raise
        if isinstance(refused := _explained(error), HeadraceError):
            _fail(answer, _told(refused, exit_code(refused)), exit_code(refused))
        _told(error, ExitCode.RUN_FAILED)
        answer.failure(error, ExitCode.RUN_FAILED)
        raise


def _explained(error: Exception) -> BaseException:
    """Returns an error for what the machine refuses, as a file that this user may not read; else the same."""
    if not (isinstance(error, OSError) and error.filename is not None and error.errno in _REFUSED):
        return explained(error)
    refused = UnfitMachine(f"{error.filename}: {error.strerror}; ask as a user who may, or name another place")
    # For the user's own frames, if it comes from those.
    refused.__cause__ = error
    return refused


def _told(error: BaseException, code: int) -> BaseException:
    """Tells a launcher's other processes before a run; returns the error that this one shows."""
    if "RANK" not in os.environ:
        return error
    # Lazily: only a launcher's processes need it.
    from headrace.engine.torchrun.refusal import tell

    return tell(error, code)


def _fail(answer: Answer, error: BaseException, code: int) -> None:
    answer.failure(error, code)
    write_error(sys.stderr, error)
    raise typer.Exit(code) from None


@contextlib.contextmanager
def writing(what: str, path: Path, option: str) -> Iterator[None]:
    """Raises UnfitMachine where a file cannot be written whose place an option names."""
    try:
        yield
    except OSError as error:
        raise UnfitMachine(
            f"{what} {path} cannot be written: {error.strerror}; name another place with {option}"
        ) from error


def say(line: str) -> None:
    """Tells on stderr how far a command is."""
    typer.echo(line, err=True)


def say_at_once(doing: str) -> None:
    """Tells someone at a terminal what begins, before torch is imported."""
    if sys.stderr.isatty():
        say(f"headrace: {doing} ...")


def wrapped(text: str, first: str = "", later: str = "") -> list[str]:
    """Returns lines of at most 80 columns, the first and the later ones indented by these texts."""
    # A number stays with its unit.
    held = _UNIT.sub("\N{NO-BREAK SPACE}", clean(text))
    lines = textwrap.wrap(held, 80, initial_indent=first, subsequent_indent=later, break_on_hyphens=False)
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


def cut(name: str, width: int) -> str:
    """Returns a name for a column of a width, which ends with a space."""
    return name if len(name) < width else f"{name[: width - 2]}…"


def show_run(
    answer: Answer, summary: Summary, run_dir: Path, page: Path | None = None, short: str | None = None
) -> None:
    """Prints the summary of a run and where its files are; a short one with what to type next, if that is given."""
    # Lazily, as below: `--help` need not wait for reports.
    from headrace.report.views.table import run_plain, run_table, short_table

    model = model_path(run_dir)
    places = {"run_dir": run_dir, "model": model if disk.is_file(model) else None, "page": page}
    if answer.as_json:
        answer.document({**run_plain(summary), **_paths(places)})
        return
    answer.show(run_table(summary) if short is None else short_table(summary))
    answer.text(_lines(places) if short is None else _lines({"model": places["model"]}))
    if short is not None:
        answer.text(f"next: {short}")


def show_comparison(
    answer: Answer, summaries: Sequence[Summary], references: References, run_dir: Path, page: Path
) -> None:
    """Prints one row a run, whether distribution paid, and where the page is."""
    from headrace.report.model.verdict import verdict
    from headrace.report.views.table import comparison_plain, comparison_table

    places = {"run_dir": run_dir, "page": page}
    if answer.as_json:
        answer.document({**comparison_plain(summaries, references), **_paths(places)})
    else:
        answer.show(comparison_table(summaries, references))
        answer.text("")
        answer.show(verdict(summaries, references))
        answer.text("\n" + _lines(places))


def _paths(places: Mapping[str, Path | None]) -> dict[str, str | None]:
    return {name: None if path is None else str(path) for name, path in places.items()}


def _lines(places: Mapping[str, Path | None]) -> str:
    # Not in a table: a path that is broken into lines cannot be copied.
    return "\n".join(f"{name.replace('_', ' ')}: {path}" for name, path in places.items() if path is not None)
