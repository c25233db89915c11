"""The options that several commands share, and what a shell completes for them."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.errors import UnknownName, UsageError
from headrace.spec.call import parse_call, split_calls
from headrace.spec.options import Checkpoints


class Device(StrEnum):
    """What tensors live on."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


JobFile = Annotated[
    Path,
    typer.Argument(
        metavar="JOB.py",
        show_default=False,
        help="A Python file that defines `job` (a Job), or `job(lr=0.1, ...)`, a function that returns one.",
    ),
]
"""The file that defines the job."""
WorkersOption = Annotated[
    int | None,
    typer.Option(
        "--workers",
        min=1,
        show_default=False,
        help="How many processes compute. Default: what the launcher or the machine gives.",
    ),
]
"""A number of workers."""
DeviceOption = Annotated[Device, typer.Option("--device", help="What tensors live on.")]
"""A device."""
SettingsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        show_default=False,
        help="A parameter of the file's `job(...)`, as a Python literal; may be given again.",
    ),
]
"""Parameters of the file's `job(...)`."""
TimeoutOption = Annotated[
    float,
    typer.Option(
        "--timeout-s",
        metavar="SECONDS",
        min=0.1,
        help="Seconds without a sign of life after which a process counts as lost.",
    ),
]
"""A deadline for silent processes."""
RunDirOption = Annotated[
    Path | None,
    typer.Option(
        "--run-dir",
        metavar="DIR",
        show_default=False,
        help="Where events, logs and models go. Default: a new folder under runs/.",
    ),
]
"""The directory of a run."""
CheckpointEveryOption = Annotated[
    str | None,
    typer.Option(
        "--checkpoint-every",
        metavar="N|SECONDSs",
        show_default=False,
        help="Save every N steps (100) or seconds (30s); 0 for never. Default: 600s, and at the end.",
    ),
]
"""An interval between checkpoints."""
SnapshotsEveryOption = Annotated[
    str | None,
    typer.Option(
        "--snapshots-every",
        metavar="SECONDSs",
        show_default=False,
        help="Snapshots of servers that have no backup: every so many seconds (5s); 0 for none. Default: 30s.",
    ),
]
"""An interval between snapshots."""
KeepOption = Annotated[int, typer.Option("--keep", metavar="N", min=1, help="How many of the last checkpoints stay.")]
"""A number of checkpoints."""
ResumeOption = Annotated[
    bool, typer.Option("--resume", help="Go on from the last checkpoint of --run-dir, under any strategy.")
]
"""Whether to go on."""
ResumeFromOption = Annotated[
    Path | None,
    typer.Option(
        "--resume-from",
        metavar="DIR",
        show_default=False,
        help="Go on from another run's last checkpoint, or from one checkpoint.",
    ),
]
"""Where to go on from."""
ResetOptimizerOption = Annotated[
    bool,
    typer.Option("--reset-optimizer", help="Leave the checkpoint's optimizer state behind; it may be another class."),
]
"""Whether to begin with a fresh optimizer."""
TensorBoardOption = Annotated[
    Path | None,
    typer.Option("--tensorboard", metavar="DIR", show_default=False, help="Write curves for TensorBoard there, too."),
]
"""A directory for TensorBoard."""
JsonOption = Annotated[bool, typer.Option("--json", help="The result, or the error, as one JSON document on stdout.")]
"""Text or JSON."""


def help_option(examples: str) -> Any:
    """Returns the `--help` option of a command, whose text begins with `examples`."""

    def show(context: typer.Context, wanted: bool) -> None:
        if wanted and not context.resilient_parsing:
            typer.echo(f"Examples:\n{examples.strip(chr(10))}\n\n{context.get_help()}")
            raise typer.Exit

    return typer.Option("--help", "-h", is_eager=True, callback=show, help="Show this message and exit.")


def strategy_names() -> tuple[str, ...]:
    """Returns the keys of `headrace.strategies.STRATEGIES` and `SHORT_NAMES`, sorted; of none that is no literal dict.

    They are read from the source, because importing them would import torch, which takes longer than a shell
    waits for a completion.
    """
    found = importlib.util.find_spec("headrace.strategies")
    if found is None or found.origin is None:
        return ()
    names: list[str] = []
    for node in ast.parse(Path(found.origin).read_text(encoding="utf-8")).body:
        match node:
            case (
                ast.AnnAssign(target=ast.Name(id="STRATEGIES" | "SHORT_NAMES"), value=ast.Dict(keys=keys))
                | ast.Assign(targets=[ast.Name(id="STRATEGIES" | "SHORT_NAMES")], value=ast.Dict(keys=keys))
            ):
                values = [key.value for key in keys if isinstance(key, ast.Constant)]
                names += [value for value in values if isinstance(value, str)]
    return tuple(sorted(names))


def check_strategies(names: Sequence[str]) -> None:
    """Refuses unknown names at once, before torch is imported.

    Raises:
        UnknownName: no strategy is called so.
    """
    known = strategy_names()
    for call in map(parse_call, names):
        if known and call.name not in known:
            raise UnknownName("strategy", call.name, known)


def checkpoints_of(every: str | None, keep: int, snapshots: str | None = None) -> Checkpoints | None:
    """Returns what "100" (steps), "30s" (seconds) or "0" (never) means; the usual for None.

    Args:
        every: between two checkpoints.
        keep: how many of them.
        snapshots: "5s" between two snapshots of a server, or "0".

    Raises:
        UsageError: it means nothing.
    """
    chosen = _checkpoints_of(every, keep)
    if chosen is None or snapshots is None:
        return chosen
    seconds = snapshots.removesuffix("s")
    try:
        number = float(seconds)
    except ValueError:
        number = -1.0
    if number < 0 or (number and seconds == snapshots):
        raise UsageError(f"--snapshots-every takes seconds (5s), or 0 for none; got {snapshots!r}")
    return replace(chosen, snapshots_every_s=number or None)


def _checkpoints_of(every: str | None, keep: int) -> Checkpoints | None:
    if every is None:
        return Checkpoints(keep=keep)
    seconds = every.removesuffix("s")
    try:
        number = float(seconds) if seconds != every else int(every)
    except ValueError:
        raise UsageError(f"--checkpoint-every takes steps (100) or seconds (30s), got {every!r}") from None
    if number == 0:
        return None
    if seconds != every:
        return Checkpoints(every_s=number, keep=keep)
    return Checkpoints(every_steps=int(number), every_s=None, keep=keep)


def split_names(text: str) -> tuple[str, ...]:
    """Returns the names, with their options, of a list like "one_device,downpour(push_every=2)".

    Raises:
        UsageError: no name, an empty one, or one given twice.
    """
    names = tuple(split_calls(text))
    if not all(names):
        raise UsageError(f"--strategies takes names with commas between them, got {text!r}")
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"--strategies names {name!r} {names.count(name)} times; once is enough")
    return names


def complete_strategy(incomplete: str) -> list[str]:
    """Returns the names that begin so."""
    return [name for name in strategy_names() if name.startswith(incomplete)]


def complete_strategies(incomplete: str) -> list[str]:
    """Returns the lists that go on with one more name, for "one_device,mir" "one_device,mirrored"."""
    before, comma, last = incomplete.rpartition(",")
    taken = before.split(",")
    return [f"{before}{comma}{name}" for name in complete_strategy(last) if name not in taken]
