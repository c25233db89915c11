"""What a command says: its result on stdout and nothing else there, its errors in one form."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TextIO

import typer

from headrace.cli.errors import ExitCode, error_document, exit_code, write_error
from headrace.engine.termination import Terminated
from headrace.errors import HeadraceError

if TYPE_CHECKING:
    from rich.console import RenderableType


class Answer:
    """Where a command's result goes.

    Args:
        stream: the real stdout.
        as_json: whether the result is one JSON document, or text.
    """

    def __init__(self, stream: TextIO, as_json: bool) -> None:
        self.as_json = as_json
        self._stream = stream

    def document(self, document: Mapping[str, Any]) -> None:
        """Prints the result as JSON."""
        write_document(self._stream, document)

    def show(self, table: RenderableType) -> None:
        """Prints a table, or text that is broken into lines, as wide as the terminal is (80 without one)."""
        # Lazily: `--help` need not wait for rich.
        from rich.console import Console

        Console(file=self._stream, markup=False, highlight=False).print(table)

    def text(self, text: str) -> None:
        """Prints the result for people."""
        print(text, file=self._stream, flush=True)


def write_document(stream: TextIO, document: Mapping[str, Any]) -> None:
    """Writes one JSON document. NaN and infinities, which JSON lacks, become null."""
    print(json.dumps(_finite(document), indent=2, allow_nan=False), file=stream, flush=True)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


@contextlib.contextmanager
def answering(as_json: bool) -> Iterator[Answer]:
    """Runs a command's body; errors become messages and exit codes.

    Meanwhile what user code prints goes to stderr, so that stdout carries the result alone.

    Raises:
        typer.Exit: the body failed; carries the exit code.
    """
    answer = Answer(sys.stdout, as_json)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield answer
    except HeadraceError as error:
        _fail(answer, error, exit_code(error))
    except KeyboardInterrupt as error:
        _fail(answer, error, ExitCode.INTERRUPTED)
    except Terminated as error:
        _fail(answer, error, ExitCode.TERMINATED)
    except Exception as error:
        # typer ends a command with exceptions of its own; anything else is a defect of headrace, whose
        # traceback is wanted.
        if as_json and not isinstance(error, typer.Exit | typer.Abort):
            answer.document(error_document(error, ExitCode.RUN_FAILED))
        raise


def _fail(answer: Answer, error: BaseException, code: int) -> None:
    if answer.as_json:
        answer.document(error_document(error, code))
    write_error(sys.stderr, error)
    raise typer.Exit(code) from None
