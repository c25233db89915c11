"""What several commands share: their options, what a shell completes, the run's directory and TensorBoard."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.combinations import refuse_idle
from headrace.devices import AUTO, DEVICES, EXAMPLE, one_each
from headrace.engine.base import Terminated
from headrace.errors import RunFailed, UnknownName, UsageError
from headrace.machine import disk
from headrace.spec.call import parse_call, split_calls
from headrace.spec.options import Checkpoints
from headrace.strategies.table import SHORT_NAMES, STRATEGIES

if TYPE_CHECKING:
    from headrace.report.trackers.tensorboard import TensorBoard


MOST_SECONDS = 1_000_000
"""The largest value of an option in seconds, over 11 days: an infinite time is none that a clock can wait for."""


class Distribution(StrEnum):
    """How ranks are numbered over hosts, by SLURM's names."""

    BLOCK = "block"
    CYCLIC = "cyclic"


def _known_device(name: str) -> str:
    if name not in (AUTO, *DEVICES):
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(map(repr, (AUTO, *DEVICES)))}.")
    return name


def _known_devices(text: str) -> str:
    for name in one_each(text) or (text,):
        _known_device(name.partition(":")[0])
    return text


def _directory(text: str) -> Path:
    # As a path it would be the working directory.
    if not text:
        raise typer.BadParameter("it is empty, as an unset shell variable is; name a directory, or leave it out.")
    return Path(text)


def option(name: str, help: str, **settings: Any) -> Any:
    return typer.Option(name, help=help, show_default=False, **settings)


def _device_option(more: str, known: Callable[[str], str], help: str) -> Any:
    """Returns --device, which takes names of the device table, and what `known` takes besides."""
    names = (AUTO, *DEVICES)
    return typer.Option(
        "--device",
        metavar=f"[{'|'.join(names)}]{more}",
        autocompletion=lambda incomplete: [name for name in names if name.startswith(incomplete)],
        callback=known,
        help=help,
    )


JobFile = Annotated[
    Path,
    typer.Argument(
        metavar="JOB.py",
        show_default=False,
        help="A Python file that defines `job` (a Job), or `job(lr=0.1, ...)`, a function that returns one.",
    ),
]
WorkersOption = Annotated[
    int | None,
    option("--workers", min=1, help="How many processes compute. Default: what the launcher or the machine gives."),
]
DeviceOption = Annotated[str, _device_option("", _known_device, "What tensors live on.")]
DevicesOption = Annotated[
    str,
    _device_option(
        " or DEVICE,DEVICE,...",
        _known_devices,
        f"What tensors live on; or the device of each worker, by rank: {','.join(EXAMPLE)}.",
    ),
]
SettingsOption = Annotated[
    list[str] | None,
    option(
        "--set",
        metavar="KEY=VALUE",
        help="A parameter of the file's `job(...)`, or options.NAME of its Options, as a Python literal; may be given "
        "again.",
    ),
]
TimeoutOption = Annotated[
    float,
    typer.Option(
        "--timeout-s",
        metavar="SECONDS",
        min=1,
        max=MOST_SECONDS,
        help="Seconds without a sign of life after which a process counts as lost.",
    ),
]
SecretFileOption = Annotated[
    Path | None,
    option("--secret-file", metavar="FILE", help="The secret of a run on several hosts, a file of mode 600."),
]
RunDirOption = Annotated[
    Path | None,
    option(
        "--run-dir",
        metavar="DIR",
        parser=_directory,
        help="Where events, logs and models go. Default: a new folder under runs/.",
    ),
]
CheckpointEveryOption = Annotated[
    str | None,
    option(
        "--checkpoint-every",
        metavar="N|SECONDSs",
        help="Save every N steps (100) or seconds (30s); 0 for never. Default: 600s, and at the end.",
    ),
]
SnapshotsEveryOption = Annotated[
    str | None,
    option(
        "--snapshots-every",
        metavar="SECONDSs",
        help="Snapshots of servers that have no backup: every so many seconds (5s); 0 for none. Default: 30s.",
    ),
]
KeepOption = Annotated[
    int | None,
    option("--keep", metavar="N", min=1, help="How many of the last checkpoints stay. Default: 3."),
]
ResumeOption = Annotated[
    bool, typer.Option("--resume", help="Go on from the last checkpoint of --run-dir, under any strategy.")
]
ResumeIfSavedOption = Annotated[
    bool, typer.Option("--resume-if-saved", help="Go on as --resume does, or begin where nothing is saved.")
]
ResumeFromOption = Annotated[
    str | None,
    option(
        "--resume-from", metavar="DIR|URL", help="Go on from another run's last checkpoint, or from one checkpoint."
    ),
]
CopyToOption = Annotated[
    str | None,
    option("--copy-to", metavar="URL", help="Copy the last checkpoints there, too, s3://bucket/runs/a."),
]
ResetOptimizerOption = Annotated[
    bool,
    typer.Option("--reset-optimizer", help="Leave the checkpoint's optimizer state behind; it may be another class."),
]
CheckOption = Annotated[
    bool,
    typer.Option("--check/--no-check", help="Say before the start what would differ from one device."),
]
EncryptOption = Annotated[
    bool,
    typer.Option(
        "--encrypt/--no-encrypt",
        help="Encrypt gradients and activations between hosts; without only for a network that is trusted.",
    ),
]
ClusterOption = Annotated[
    Path | None,
    option("--cluster", metavar="FILE", help="The hosts and the links between them, see `headrace doctor --cluster`."),
]
RunClusterOption = Annotated[
    str | None,
    option(
        "--cluster",
        metavar="FILE|ray://auto",
        help="The hosts and the links between them; or a Ray cluster, on which the run is started.",
    ),
]
ServersOption = Annotated[
    int | None, option("--servers", min=1, help="How many parameter servers, under a strategy that has some.")
]
SshOption = Annotated[str, typer.Option("--ssh", metavar="COMMAND", help="How other hosts are reached.")]
PythonOption = Annotated[str | None, option("--python", metavar="PATH", help="On all hosts. Default: this one.")]
DistributionOption = Annotated[
    Distribution | None,
    option(
        "--distribution",
        help="Ranks of a host follow each other (block) or are dealt out by turns (cyclic). Default: cyclic where "
        "the strategy has backups, which belong on other hosts than their servers.",
    ),
]
TensorBoardOption = Annotated[
    Path | None,
    option("--tensorboard", metavar="DIR", help="Write curves for TensorBoard there, too."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="The result, or the error, as one JSON document on stdout.")]


def help_option(examples: str) -> Any:
    """Returns the `--help` option of a command, whose text begins with `examples`."""

    def show(context: typer.Context, wanted: bool) -> None:
        if wanted and not context.resilient_parsing:
            typer.echo(f"Examples:\n{examples.strip(chr(10))}\n\n{context.get_help()}")
            raise typer.Exit

    return typer.Option("--help", "-h", is_eager=True, callback=show, help="Show this message and exit.")


def strategy_names() -> tuple[str, ...]:
    """Returns all names of strategies, sorted; torch is not imported for them."""
    return tuple(sorted((*STRATEGIES, *SHORT_NAMES)))


def check_strategies(names: Sequence[str]) -> None:
    """Raises UnknownName for names of no strategy, before torch is imported."""
    known = strategy_names()
    for call in map(parse_call, names):
        if call.name not in known:
            raise UnknownName("strategy", call.name, known)


def checkpoints_of(
    every: str | None, keep: int | None = None, snapshots: str | None = None, copy_to: str | None = None
) -> Checkpoints | None:
    """Returns the meaning of "100" (steps), "30s" (seconds), "0" (never) or None (the default) between checkpoints.

    `snapshots` is the time between two snapshots of a server, "5s", or "0" for none; `copy_to` is a URL.

    Raises:
        UsageError: a value has another form.
    """
    chosen = Checkpoints(keep=Checkpoints.keep if keep is None else keep, copy_to=copy_to)
    if every is not None:
        in_seconds = every.endswith("s")
        try:
            number = _seconds(every.removesuffix("s")) if in_seconds else int(every)
        except ValueError:
            raise UsageError(f"--checkpoint-every takes steps (100) or seconds (30s), got {every!r}") from None
        if number == 0:
            idle = {"--copy-to": copy_to, "--keep": keep, "--snapshots-every": snapshots}
            refuse_idle(
                {name: value is not None for name, value in idle.items()},
                "--checkpoint-every 0 saves nothing; leave one of them out",
            )
            return None
        chosen = replace(
            chosen, every_s=number if in_seconds else None, every_steps=None if in_seconds else int(number)
        )
    if snapshots is None:
        return chosen
    try:
        seconds = _seconds(snapshots.removesuffix("s"))
    except ValueError:
        seconds = -1.0
    if seconds < 0 or (seconds and not snapshots.endswith("s")):
        raise UsageError(f"--snapshots-every takes seconds (5s), or 0 for none; got {snapshots!r}")
    return replace(chosen, snapshots_every_s=seconds or None)


def _seconds(text: str) -> float:
    """Returns a number of seconds; raises ValueError for another text, and for "nan" and "inf"."""
    seconds = float(text)
    if not math.isfinite(seconds):
        raise ValueError(text)
    return seconds


def split_names(text: str) -> tuple[str, ...]:
    """Returns the strategies, with their options, of a list like "one_device,downpour(push_every=2)"."""
    names = tuple(split_calls(text))
    if not all(names):
        raise UsageError(f"--strategies takes names with commas between them, got {text!r}")
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"--strategies names {name!r} {names.count(name)} times; once is enough")
    return names


def complete_strategy(incomplete: str) -> list[str]:
    """Returns the names that begin with `incomplete`."""
    return [name for name in strategy_names() if name.startswith(incomplete)]


def complete_strategies(incomplete: str) -> list[str]:
    """Returns the lists with one more name: for "one_device,mir" "one_device,mirrored"."""
    before, comma, last = incomplete.rpartition(",")
    taken = before.split(",")
    return [f"{before}{comma}{name}" for name in complete_strategy(last) if name not in taken]


def job_name(path: Path) -> str:
    """Returns the file's name, or that of its folder for a file job.py."""
    resolved = path.resolve()
    return resolved.parent.name if resolved.stem == "job" and resolved.parent.name else resolved.stem


def default_run_dir(name: str, now: datetime | None = None) -> Path:
    """Returns a new `runs/<name>-<time>` in the working directory, with a number if it exists."""
    stamp = (now or datetime.now()).strftime("%Y%m%d-%H%M%S")
    first = Path("runs") / f"{name}-{stamp}"
    paths = (first.with_name(f"{first.name}-{number}") for number in itertools.count(2))
    return next(path for path in itertools.chain([first], paths) if not disk.exists(path))


@contextlib.contextmanager
def saying_where(run_dir: Path) -> Iterator[None]:
    """Adds to a failure where its events and logs are, and to a termination how to resume."""
    try:
        yield
    except RunFailed as error:
        if disk.is_folder(run_dir):
            error.add_note(f"events and logs: {run_dir}")
        raise
    except Terminated as error:
        if disk.is_folder(run_dir / "checkpoints"):
            error.add_note(f"to go on: --run-dir {run_dir} --resume")
        raise


@contextlib.contextmanager
def tensorboards(log_dir: Path | None) -> Iterator[TensorBoard | None]:
    """Yields what writes the events of each run to a folder of its own in `log_dir`, or None."""
    if log_dir is None:
        yield None
        return
    from headrace.report.trackers.tensorboard import TensorBoard

    with TensorBoard(log_dir, per_run=True) as board:
        yield board
