"""How a command is declared: its arguments and options, and what all commands have."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_args, get_type_hints

import typer

from headrace.cli.output import answering, say_at_once


def argument(metavar: str, help: str, **settings: Any) -> Any:
    """Declares an argument of a command; `settings` are of `typer.Argument`."""
    return typer.Argument(metavar=metavar, help=help, **settings)


def option(form: str, help: str, **settings: Any) -> Any:
    """Declares an option of a command.

    Args:
        form: its names, and its value as help shows it: "--out -o FILE.json".
        settings: of `typer.Option`.
    """
    words = form.split()
    metavar = next((word for word in words if not word.startswith("-")), None)
    return typer.Option(*(word for word in words if word.startswith("-")), metavar=metavar, help=help, **settings)


JsonOption = Annotated[bool, option("--json", "The result, or the error, as one JSON document on stdout.")]


def help_option(examples: str) -> Any:
    """Returns the `--help` option of a command, whose text begins with `examples`."""

    def show(context: typer.Context, wanted: bool) -> None:
        if wanted and not context.resilient_parsing:
            typer.echo(f"Examples:\n{examples.strip(chr(10))}\n\n{context.get_help()}")
            raise typer.Exit

    return option("--help -h", "Show this message and exit.", is_eager=True, callback=show)


def command(examples: str, doing: str = "") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a command of a function: it has the function's parameters but `answer`, and --json and --help.

    The function is called in `answering`, with the `Answer` as its first argument. Someone at a terminal is told what
    it is `doing` before it imports torch.
    """

    def declare(body: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(body, include_extras=True)
        taken = {name: parameter for name, parameter in inspect.signature(body).parameters.items() if name != "answer"}
        # The first name of an option is where typer has the default of others.
        options = {name: get_args(hints[name])[1].default for name in taken}

        @functools.wraps(body)
        def run(as_json: bool, show_help: bool, **values: Any) -> None:
            given = {options[name]: value not in (taken[name].default, []) for name, value in values.items()}
            with answering(as_json, given) as answer:
                if doing and not as_json:
                    say_at_once(doing)
                body(answer, **values)

        parameters = [
            *(parameter.replace(annotation=hints[name]) for name, parameter in taken.items()),
            _flag("as_json", JsonOption),
            _flag("show_help", Annotated[bool, help_option(examples)]),
        ]
        # typer reads both.
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        vars(run)["__signature__"] = inspect.Signature(parameters)
        return run

    return declare


def _flag(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=False, annotation=annotation)
