"""The command line; all its commands are in `COMMANDS`."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NoReturn

import typer

from headrace.cli.command import help_option, option
from headrace.cli.commands.bench import bench
from headrace.cli.commands.data import data
from headrace.cli.commands.doctor import doctor
from headrace.cli.commands.extending.new import new
from headrace.cli.commands.launch import OPTIONS as LAUNCH_OPTIONS
from headrace.cli.commands.launch import launch, separated
from headrace.cli.commands.launch_files import launch_files
from headrace.cli.commands.profile import calibrate, plan, profile
from headrace.cli.commands.recommend import recommend
from headrace.cli.commands.report import report
from headrace.cli.commands.running.runs import ps, stop
from headrace.cli.commands.saved.checkpoint import checkpoint
from headrace.cli.commands.saved.evaluate import evaluate
from headrace.cli.commands.saved.export import export
from headrace.cli.commands.saved.predict import predict
from headrace.cli.commands.saved.serve import serve
from headrace.cli.commands.simulate import rehearse, simulate
from headrace.cli.commands.train import compare, train
from headrace.cli.commands.verification.adopt import OPTIONS as ADOPT_OPTIONS
from headrace.cli.commands.verification.adopt import adopt
from headrace.cli.commands.verification.verify import verify
from headrace.cli.commands.watch import watch
from headrace.cli.commands.workers import workers
from headrace.cli.output import ExitCode, error_document, write_document
from headrace.engine.base import Terminated, answer_with, terminate
from headrace.machine.limits import explained

__all__ = ["COMMANDS", "app", "main", "run"]

_EXAMPLES = """
  headrace doctor
  headrace bench --quick
  headrace plan job.py
  headrace profile job.py
  headrace train job.py --strategy mirrored --workers 2
  headrace compare job.py --strategies one_device,mirrored --workers 2
  headrace verify job.py --strategy mirrored --workers 2
  headrace report runs/a
  headrace watch runs/a
  headrace ps
  headrace stop runs/a
  headrace simulate model.toml --cluster cluster.toml --strategy mirrored
  headrace recommend job.py --cluster cluster.toml
  headrace rehearse job.py --strategy downpour --workers 64
  headrace data profile job.py
  headrace checkpoint list runs/a
  headrace evaluate runs/a
  headrace export runs/a -o model
  headrace predict runs/a photo.png
  headrace serve model
  headrace launch script.py --workers 2
  headrace adopt script.py
  headrace launch-files slurm job.py --workers 8 --hosts 2
  headrace workers add 2 runs/a
  headrace new strategy slow_mo
"""

COMMANDS: dict[str, Callable[..., None]] = {
    "train": train,
    "compare": compare,
    "verify": verify,
    "report": report,
    "watch": watch,
    "ps": ps,
    "stop": stop,
    "simulate": simulate,
    "recommend": recommend,
    "rehearse": rehearse,
    "plan": plan,
    "data": data,
    "checkpoint": checkpoint,
    "evaluate": evaluate,
    "export": export,
    "predict": predict,
    "serve": serve,
    "launch": launch,
    "adopt": adopt,
    "launch-files": launch_files,
    "workers": workers,
    "profile": profile,
    "calibrate": calibrate,
    "bench": bench,
    "doctor": doctor,
    "new": new,
}
"""Every command by its name, in the order of `--help`."""

_SETTINGS: dict[str, dict[str, Any]] = {
    # Options that headrace does not know belong to the script.
    "launch": {"ignore_unknown_options": True},
    "adopt": {"ignore_unknown_options": True},
}

# The root of its usage errors, for which typer has no public name.
_TyperError: Any = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="headrace",
    add_help_option=False,
    # Plain help: rich would take longer to import than everything else together.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
"""The typer application; `run` and `main` give it its errors' form."""


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"headrace {version('headrace')}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _headrace(
    context: typer.Context,
    version: Annotated[
        bool, option("--version", "Show the version and exit.", is_eager=True, callback=_show_version)
    ] = False,
    show_help: Annotated[bool, help_option(_EXAMPLES)] = False,
) -> None:
    """Train one PyTorch model on many devices: write the model once, name a strategy."""
    if context.invoked_subcommand is None:
        typer.echo(f"Examples:\n{_EXAMPLES.strip(chr(10))}\n\n{context.get_help()}")


for _name, _command in COMMANDS.items():
    app.command(_name, add_help_option=False, context_settings=_SETTINGS.get(_name))(_command)


def run(arguments: Sequence[str]) -> int:
    """Runs a command line and returns its exit code."""
    try:
        words = _with_script(arguments)
        code = typer.main.get_command(app).main(words, prog_name="headrace", standalone_mode=False)
    except Terminated:
        # Between commands' bodies, which take it with a message.
        return ExitCode.TERMINATED
    except _TyperError as error:
        # The suggestion in its message is typer's.
        message = error.format_message()
        if "--json" in arguments:
            facts = {"type": "UsageError", "message": message, "exit_code": ExitCode.USAGE}
            write_document(sys.stdout, {"error": facts})
        where = "headrace" if error.ctx is None else error.ctx.command_path
        typer.echo(f"error: {message}\nsee: {where} --help", err=True)
        return ExitCode.USAGE
    except (OSError, RuntimeError) as error:
        if (problem := explained(error)) is error:
            raise
        typer.echo(f"error: {problem}", err=True)
        return ExitCode.ENVIRONMENT
    return code if isinstance(code, int) else 0


def _with_script(arguments: Sequence[str]) -> list[str]:
    options = {"launch": LAUNCH_OPTIONS, "adopt": ADOPT_OPTIONS}
    if not arguments or arguments[0] not in options:
        return list(arguments)
    try:
        return [arguments[0], *separated(arguments[1:], arguments[0], options[arguments[0]])]
    except ValueError as error:
        raise _TyperError(str(error)) from error


def _open_streams() -> None:
    """Opens what the caller has closed of the three standard streams, lest a socket gets its number."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115  (until the end)


def main() -> NoReturn:
    """The console script: runs `sys.argv` and exits."""
    _open_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # What the locale has no character for is replaced, as Python has it on stderr.
        sys.stdout.reconfigure(errors="replace")
    # So that processes and segments are given back before this one ends.
    signal.signal(signal.SIGTERM, terminate)
    if "--json" in sys.argv:
        answer_with(json.dumps(error_document(Terminated(), ExitCode.TERMINATED), indent=2).encode() + b"\n")
    code = run(sys.argv[1:])
    # Where stdout takes no more, an error was shown, and the interpreter shall add none.
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(code)
