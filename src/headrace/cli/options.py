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
from headrace.cli.command import argument, option
from headrace.devices import AUTO, DEVICES, EXAMPLE, one_each
from headrace.engine.base import Terminated
from headrace.errors import RunFailed, UsageError
from headrace.machine import disk
from headrace.registry import is_place
from headrace.spec.call import parse_call, split_calls
from headrace.spec.options import Checkpoints
from headrace.strategies.table import SHORT_NAMES, STRATEGIES, unknown_strategy

if TYPE_CHECKING:
    from headrace.spec.events import Event


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


def strategy_names() -> tuple[str, ...]:
    """Returns all names of strategies, sorted; torch is not imported for them."""
    return tuple(sorted((*STRATEGIES, *SHORT_NAMES)))


def complete_strategy(incomplete: str) -> list[str]:
    """Returns the names that begin with `incomplete`."""
    return [name for name in strategy_names() if name.startswith(incomplete)]


JobFile = Annotated[
    Path,
    argument("JOB.py", "A Python file that defines `job` (a Job), or `job(lr=0.1, ...)`, a function that returns one."),
]
StrategyOption = Annotated[
    str,
    option(
        "--strategy NAME", "How it is distributed; mine.py:Name for one of your own.", autocompletion=complete_strategy
    ),
]
WorkersOption = Annotated[
    int | None,
    option("--workers", "How many processes compute. Default: what the launcher or the machine gives.", min=1),
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
        "--set KEY=VALUE",
        "A parameter of the file's `job(...)`, as a Python literal; or options.NAME of its Options, "
        "job.global_batch_size, job.metrics=mine.py:top5, data.parallel ...; may be given again.",
    ),
]
TimeoutOption = Annotated[
    float,
    option(
        "--timeout-s SECONDS",
        "Seconds without a sign of life after which a process counts as lost.",
        min=1,
        max=MOST_SECONDS,
    ),
]
CollectiveTimeoutOption = Annotated[
    float,
    option(
        "--collective-timeout-s SECONDS",
        "Seconds that collectives of accelerators wait for a rank that lives.",
        min=1,
        max=MOST_SECONDS,
    ),
]
SecretFileOption = Annotated[
    Path | None, option("--secret-file FILE", "The secret of a run on several hosts, a file of mode 600.")
]
RunDirOption = Annotated[
    Path | None,
    option("--run-dir DIR", "Where events, logs and models go. Default: a new folder under runs/.", parser=_directory),
]
CheckpointEveryOption = Annotated[
    str | None,
    option(
        "--checkpoint-every N|SECONDSs",
        "Save every N steps (100) or seconds (30s); 0 for never. Default: 600s, and at the end.",
    ),
]
SnapshotsEveryOption = Annotated[
    str | None,
    option(
        "--snapshots-every SECONDSs",
        "Snapshots of servers that have no backup: every so many seconds (5s); 0 for none. Default: 30s.",
    ),
]
ResumeOption = Annotated[bool, option("--resume", "Go on from the last checkpoint of --run-dir, under any strategy.")]
ResumeIfSavedOption = Annotated[
    bool, option("--resume-if-saved", "Go on as --resume does, or begin where nothing is saved.")
]
ResumeFromOption = Annotated[
    str | None, option("--resume-from DIR|URL", "Go on from another run's last checkpoint, or from one checkpoint.")
]
CopyToOption = Annotated[
    str | None, option("--copy-to URL", "Copy the last checkpoints there, too, s3://bucket/runs/a.")
]
ResetOptimizerOption = Annotated[
    bool, option("--reset-optimizer", "Leave the checkpoint's optimizer state behind; it may be another class.")
]
CheckOption = Annotated[bool, option("--check/--no-check", "Say before the start what would differ from one device.")]
EncryptOption = Annotated[
    bool,
    option(
        "--encrypt/--no-encrypt",
        "Encrypt gradients and activations between hosts; without only for a network that is trusted.",
    ),
]
ClusterOption = Annotated[
    Path | None, option("--cluster FILE", "The hosts and the links between them, see `headrace doctor --cluster`.")
]
RunClusterOption = Annotated[
    str | None,
    option(
        "--cluster FILE|ray://auto",
        "The hosts and the links between them; or a Ray cluster, on which the run is started.",
    ),
]
ServersOption = Annotated[
    int | None, option("--servers", "How many parameter servers, under a strategy that has some.", min=1)
]
SshOption = Annotated[str, option("--ssh COMMAND", "How other hosts are reached.")]
DistributionOption = Annotated[
    Distribution | None,
    option(
        "--distribution",
        "Ranks of a host follow each other (block) or are dealt out by turns (cyclic). Default: cyclic where "
        "the strategy has backups, which belong on other hosts than their servers.",
    ),
]
TensorBoardOption = Annotated[Path | None, option("--tensorboard DIR", "Write curves for TensorBoard there, too.")]
TrackerOption = Annotated[
    list[str] | None,
    option("--tracker NAME", "What takes its events, too: mine.py:Csv('a.csv'), mlflow; may be given again."),
]


def check_strategies(names: Sequence[str]) -> None:
    """Raises UnknownName for names of no strategy, before torch is imported; files are read later."""
    known = strategy_names()
    for call in map(parse_call, names):
        if call.name not in known and not is_place(call.name):
            raise unknown_strategy(call.name)


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
def listeners(log_dir: Path | None, names: Sequence[str] | None) -> Iterator[list[Callable[[Event], None]] | None]:
    """Yields what takes the events of each run: one that writes to a folder of its own in `log_dir`, and named ones.

    Raises:
        UsageError: one of the names is that of no tracker, or it cannot be made.
    """
    with contextlib.ExitStack() as stack:
        found: list[Callable[[Event], None]] = []
        if log_dir is not None:
            from headrace.report.trackers.tensorboard import TensorBoard

            found.append(stack.enter_context(TensorBoard(log_dir, per_run=True)))
        for name in names or ():
            # Lazily: they import torch, and files of the user's.
            from headrace.cli.commands.extending.named import TRACKERS, made
            from headrace.report.trackers.tracker import Tracker

            each = made("tracker", TRACKERS, name)
            if not callable(each):
                raise UsageError(f"--tracker {name} is {each!r:.60}, and must be a Tracker, or a function of one event")
            found.append(stack.enter_context(each) if isinstance(each, Tracker) else each)
        yield found or None
