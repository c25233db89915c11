"""`headrace checkpoint`: list, verify and show the checkpoints of a run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from enum import StrEnum
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.command import argument, command
from headrace.cli.output import Answer, ExitCode, wrapped
from headrace.errors import CorruptCheckpoint, UnfitMachine, UsageError
from headrace.machine import disk
from headrace.report.format import MISSING, byte_count, clean

if TYPE_CHECKING:
    from headrace.checkpoint import Checkpoint, CheckpointFolder

_EXAMPLES = """
  headrace checkpoint list runs/a
  headrace checkpoint verify runs/a
  headrace checkpoint show runs/a/checkpoints/step-00000120
  headrace checkpoint show runs/a --json | jq '.tensors[0]'
"""

_ONE = re.compile(r"step-([0-9]{8,18})")
_SHOWN = 16
"""Tensors on a screen."""


class _Action(StrEnum):
    """What to do with checkpoints."""

    LIST = "list"
    VERIFY = "verify"
    SHOW = "show"


@command(_EXAMPLES)
def checkpoint(
    answer: Answer,
    action: Annotated[
        _Action,
        argument(
            "list|verify|show",
            "All of them, after a look at manifests and sizes; whether every byte is as it was saved; "
            "what is in one, the newest if PATH has several.",
        ),
    ],
    path: Annotated[Path, argument("PATH", "A run directory, its folder checkpoints, or one checkpoint.")],
) -> None:
    """List, verify or show checkpoints.

    Where verify finds one that is not as it was saved, it names the file and what is wrong, and the exit code is 5.
    """
    sound = True
    with _reading(path):
        folder, steps = _found(path)
        match action:
            case _Action.LIST:
                rows = [_look(folder, step) for step in steps]
                heads = ("step", "size", "strategy", "workers", "saved", "manifest, sizes")
                keys = ("step", "bytes", "strategy", "workers", "saved_at", "wrong")
                cells = [[_cell(key, row[key]) for key in keys] for row in rows]
                answer.give(
                    {"folder": str(folder.path), "checkpoints": rows}, _columns([heads, *cells], right=(0, 1, 3))
                )
            case _Action.VERIFY:
                sound = _verify(answer, folder, steps)
            case _Action.SHOW:
                _show(answer, _newest(folder, steps))
    if not sound:
        raise typer.Exit(ExitCode.DATA)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UnfitMachine(
            f"{error.filename or path} cannot be read: {error.strerror}; ask for it as the user who wrote it"
        ) from error


def _found(path: Path) -> tuple[CheckpointFolder, tuple[int, ...]]:
    """Returns the folder of checkpoints and its steps, ascending; raises UsageError where there is none."""
    # Lazily: `--help` need not wait for it.
    from headrace.checkpoint import CheckpointFolder

    if not disk.is_folder(path):
        raise UsageError(f"{path} is no directory; give a run directory, its checkpoints, or one of them")
    if path.is_symlink() or path.name in ("", ".."):
        # Inside, links are not followed.
        path = path.resolve()
    if one := _ONE.fullmatch(path.name):
        return CheckpointFolder(path.parent), (int(one[1]),)
    place = path / "checkpoints" if disk.is_folder(path / "checkpoints") else path
    folder = CheckpointFolder(place)
    steps = folder.steps()
    if not steps:
        raise UsageError(
            f"{place} holds no checkpoint, that is, no folder step-<number>; a run saves where it has a run directory, "
            "at its end, and every 10 minutes or as --checkpoint-every says"
        )
    return folder, steps


def _look(folder: CheckpointFolder, step: int) -> dict[str, Any]:
    """Returns a checkpoint's description, without reading its tensors."""
    row: dict[str, Any] = dict.fromkeys(("bytes", "strategy", "workers", "saved_at", "wrong"))
    try:
        saved = folder.open(step)
    except CorruptCheckpoint as error:
        return {"step": step, **row, "wrong": f"{Path(error.path).name}: {error.reason}"}
    facts = {key: saved.description.get(key) for key in ("strategy", "workers", "saved_at")}
    return {"step": step, **row, **facts, "bytes": _size(saved)}


def _cell(key: str, value: Any) -> str:
    match key:
        case "wrong":
            return _word(value or "ok", 200)
        case "bytes":
            return byte_count(value)
        case "saved_at":
            return _word(value)[:19].replace("T", " ")
    return _word(value)


def _verify(answer: Answer, folder: CheckpointFolder, steps: Sequence[int]) -> bool:
    """Reads all checkpoints, prints what is wrong with each, and returns whether all are sound."""
    rows: list[dict[str, Any]] = []
    for step in steps:
        row: dict[str, Any] = {"step": step, "sound": True, "path": None, "reason": None}
        try:
            saved = folder.open(step)
            saved.verify()
            line = f"sound, {byte_count(_size(saved))}"
        except CorruptCheckpoint as error:
            row |= {"sound": False, "path": str(error.path), "reason": error.reason}
            line = f"damaged: {error.path}: {error.reason}"
        rows.append(row)
        if not answer.as_json:
            answer.text(f"step {step}: {clean(line)}")
    sound = [row["step"] for row in rows if row["sound"]]
    if answer.as_json:
        answer.document({"folder": str(folder.path), "sound": len(sound) == len(rows), "checkpoints": rows})
    elif len(sound) < len(rows) and len(rows) > 1:
        rest = f"resuming goes on from step {sound[-1]}" if sound else "there is nothing to resume from"
        answer.text(f"{len(rows) - len(sound)} of {len(rows)} damaged; {rest}")
    return len(sound) == len(rows)


def _newest(folder: CheckpointFolder, steps: Sequence[int]) -> Checkpoint:
    """Returns the newest checkpoint with sound manifest and sizes; raises CorruptCheckpoint where none is."""
    for step in reversed(steps[1:]):
        try:
            return folder.open(step)
        except CorruptCheckpoint as error:
            typer.echo(f"{error.path}: {error.reason}; going on to an older one", err=True)
    return folder.open(steps[0])


def _show(answer: Answer, saved: Checkpoint) -> None:
    tensors = _tensors(saved)
    description = _readable(saved.description)
    if answer.as_json:
        files = [asdict(record) for record in saved.manifest.files]
        facts = {"path": str(saved.path), "step": saved.step, "bytes": _size(saved), "files": files}
        answer.document({**facts, "description": description, "tensors": tensors})
        return
    answer.text(f"checkpoint  {clean(str(saved.path))}")
    for name, words in _facts(saved, description):
        for line in wrapped(words, f"{name:<12}", " " * 12):
            answer.text(line)
    rows = [
        (row["name"], " × ".join(map(str, row["shape"])) or "scalar", row["dtype"], byte_count(row["bytes"]))
        for row in tensors[:_SHOWN]
    ]
    answer.text("\n" + _columns([("tensors, largest first", "shape", "type", "size"), *rows], right=(3,)))
    if rest := tensors[_SHOWN:]:
        answer.text(f"... and {len(rest)} more, {byte_count(sum(tensor['bytes'] for tensor in rest))}; --json has all")


def _tensors(saved: Checkpoint) -> list[dict[str, Any]]:
    """Returns names, shapes, types and sizes, the largest first."""
    from headrace.checkpoint.header import BYTES, NAMES

    element = {**{NAMES[code]: size for code, size in BYTES.items()}, "complex128": 16}
    several = len(saved.ranks) > 1
    tensors = [
        {
            # What a rank has of its own is called alike in every rank's file.
            "name": f"{name} (rank {rank})" if several and rank else name,
            "rank": rank,
            "shape": list(shape),
            "dtype": dtype,
            "bytes": prod(shape) * element[dtype],
        }
        for rank in saved.ranks
        for name, (shape, dtype) in saved.shapes(rank).items()
    ]
    return sorted(tensors, key=lambda tensor: -int(str(tensor["bytes"])))


def _facts(saved: Checkpoint, description: Any) -> list[tuple[str, str]]:
    """Returns names and values as text."""
    count = len(saved.manifest.files)
    versions, job, plan = (_items(_of(description, key)) for key in ("versions", "job", "plan"))
    rows = [
        ("step", f"{saved.step}, epoch {_word(_of(description, 'epoch'))}"),
        ("saved", f"{_cell('saved_at', _of(description, 'saved_at'))} by {versions or MISSING}"),
        ("size", f"{byte_count(_size(saved))} in {count} file{'s' * (count != 1)}"),
        ("strategy", f"{_word(_of(description, 'strategy'))}, workers: {_word(_of(description, 'workers'))}"),
        ("job", job),
        ("plan", plan),
        ("optimizer", _optimizer(description)),
    ]
    return [(name, clean(words)) for name, words in rows if words]


def _optimizer(description: Any) -> str:
    """Returns the class and the learning rates, "torch.optim.sgd.SGD, lr 0.1 for 12 parameters"."""
    name = _of(description, "job", "optimizer", "class")
    # The settings are those of the step; the job's are those of the begin.
    groups = _of(description, "settings", "groups") or _of(description, "job", "optimizer", "groups")
    counts: dict[str, int] = {}
    for group in groups if isinstance(groups, list) else ():
        rate = _word(_of(group, "options", "lr"))
        parameters = _of(group, "parameters")
        counts[rate] = counts.get(rate, 0) + (parameters if isinstance(parameters, int) else 0)
    rates = [f"lr {rate} for {count} parameter{'s' * (count != 1)}" for rate, count in counts.items()]
    return ", ".join([_word(name, 80), *rates[:_SHOWN]]) if name or rates else ""


def _of(value: Any, *keys: str) -> Any:
    """Returns the value at a path of keys; None without one."""
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _items(value: Any) -> str:
    """Returns the plain values of a mapping as text, "seed 0, global_batch_size 64"."""
    if not isinstance(value, Mapping):
        return ""
    return ", ".join(
        f"{_word(key)} {_word(item)}" for key, item in value.items() if isinstance(item, str | int | float)
    )


def _readable(value: Any) -> Any:
    """Returns a description with numbers and lists in place of their encoding, {"float": "0.1"}."""
    match value:
        case {"float": str(number), **rest} if not rest:
            with suppress(ValueError):
                return float(number)
        case {"tensor": inner, "dtype": str()}:
            return _readable(inner)
        case {"tuple": list(inner), **rest} | {"list": list(inner), **rest} if not rest:
            return [_readable(item) for item in inner]
        case {"dict": list(pairs), **rest} | {"counter": list(pairs), **rest} if not rest:
            if all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
                return {str(_readable(key)): _readable(item) for key, item in pairs}
        case list():
            return [_readable(item) for item in value]
        case Mapping():
            return {key: _readable(item) for key, item in value.items()}
    return value


def _word(value: Any, most: int = 40) -> str:
    text = MISSING if value is None else clean(str(value)).replace("\n", " ")
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _size(saved: Checkpoint) -> int:
    return sum(record.bytes for record in saved.manifest.files)


def _columns(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Returns rows with aligned columns; not as rich's table, which takes as long to import as everything else."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if at in right else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
