"""Follows the event files of one run: what grows is read at once; a long history first in samples, then as a whole."""

from __future__ import annotations

import math
import os
import time
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from headrace.report.format import byte_count, clean, plural
from headrace.spec.events import Event
from headrace.watch.steps import LineReader, Steps

_BLOCK = 4 << 20
"""Bytes that are read at a time; no event is that long."""
_PREVIEW = 32 << 20
"""Bytes of a run's history, all files together, that are read before the rest of it."""
_WINDOWS, _ALL_WINDOWS = 256, 8192
"""The most places of a long file from which the preview is taken, and of all files together."""
_GROWTH_A_POLL_S = 1.0
_PREVIEW_A_POLL_S = 0.3
_HISTORY_A_POLL_S = 0.05
_HALF_LINE_S = 5.0
"""A file whose last line has not been completed for so long is named."""
_MOST_TEXT = 160
_LAUNCHER = "launcher.jsonl"


@dataclass
class _File:
    """One event file.

    Attributes:
        identity: device and inode.
        offset: behind the last complete line that has been read, of what was written since the file was first seen.
        size: seen last.
        grown_s: when it grew, on the monotonic clock.
        edges: by offset, the end of the last step before it.
        gaps: parts of its history, from line to line, that have not been read yet.
        bad: how many lines are no events.
    """

    path: Path
    identity: tuple[int, int]
    offset: int
    size: int
    grown_s: float
    edges: dict[int, float] = field(default_factory=dict)
    gaps: list[tuple[int, int]] = field(default_factory=list)
    bad: int = 0
    first_bad: str = ""


@dataclass(frozen=True)
class News:
    """What one look at a run's files has found.

    Attributes:
        anew: whether a file was cut or replaced, so that all that was read before counts no more.
        more: whether there is history that can be read at once.
    """

    steps: Steps | None
    events: tuple[Event, ...]
    anew: bool
    more: bool


class RunTail:
    """Follows the event files of a run, whose directory need not exist yet."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "events"
        self._files: dict[str, _File] = {}
        self._preview: deque[tuple[_File, int, int]] = deque()
        self._said: list[str] = []
        self._refused: dict[str, str] = {}
        self._cut: Counter[str] = Counter()
        self._again = False

    def poll(self) -> News:
        """Returns what was written since the last call, and a part of the history that has not been read yet."""
        found, anew = self._look()
        reader = LineReader()
        began = time.monotonic()
        more = False
        for file in found:
            while self._grow(file, reader):
                # All starts of a run are known before its steps: they say which count.
                late = file.path.name != _LAUNCHER and time.monotonic() - began > _GROWTH_A_POLL_S
                if more := late:
                    break
        while self._preview and time.monotonic() - began < _PREVIEW_A_POLL_S:
            self._window(*self._preview.popleft(), reader)
        more |= bool(self._preview)
        while not more and (next_ := self._earliest_gap()) and time.monotonic() - began < _HISTORY_A_POLL_S:
            self._first_of_gap(next_, reader)
        steps = reader.steps()
        for name, bad in reader.bad.items():
            file = self._files[name]
            file.first_bad = file.first_bad or clean(bad[0])[:_MOST_TEXT]
            file.bad += len(bad)
        return News(steps, tuple(reader.events), anew, more)

    def begin_anew(self) -> None:
        """Has the next `poll` read all files from their begin."""
        self._again = True

    @property
    def missing(self) -> float:
        """The part of the files' bytes that has not been read yet."""
        left = sum(stop - start for file in self._files.values() for start, stop in file.gaps)
        total = sum(file.size for file in self._files.values())
        return left / total if total else 0.0

    def grown_s(self) -> float | None:
        """Returns when a file was last seen to have grown, on the monotonic clock; None without one."""
        return max((each.grown_s for each in self._files.values()), default=None)

    def complaints(self) -> list[str]:
        """Returns what is wrong with the files, one line each."""
        lines = [*self._said, *(f"{name} cannot be read: {why}" for name, why in sorted(self._refused.items()))]
        for name, file in sorted(self._files.items()):
            if file.bad:
                lines.append(f"{name}: {plural(file.bad, 'line')} cannot be read, the first: {file.first_bad}")
            if file.offset < file.size and time.monotonic() - file.grown_s > _HALF_LINE_S:
                lines.append(f"{name} ends in half a line of {byte_count(file.size - file.offset)}, which is left out")
        return lines

    def _look(self) -> tuple[list[_File], bool]:
        """Returns the files, the launcher's first, and whether one was cut or replaced since the last look."""
        stats = self._stats()
        if stats is None:
            return [], False
        changes = [each for name, file in self._files.items() if (each := _change(file, stats.get(name)))]
        if changes:
            self._cut.update(changes)
            times = (f"{what}{f' {count} times' if count > 1 else ''}" for what, count in self._cut.most_common(3))
            self._said = [f"{'; '.join(times)}: the run was read anew"]
        anew, self._again = self._again or bool(changes), False
        if anew:
            self._files = {}
            self._preview.clear()
        first = not self._files
        for name, stat in stats.items():
            if (file := self._files.get(name)) is None:
                file = _File(self._folder / name, (stat.st_dev, stat.st_ino), 0, 0, 0.0)
                self._files[name] = file
                # When it grew before it was seen, its own time tells alone.
                file.grown_s = time.monotonic() - max(0.0, time.time() - stat.st_mtime)
            elif stat.st_size > file.size:
                file.grown_s = time.monotonic()
            file.size = stat.st_size
        if first:
            self._plan()
        order = sorted(self._files.values(), key=lambda file: (file.path.name != _LAUNCHER, file.path.name))
        return order, anew

    def _stats(self) -> dict[str, os.stat_result] | None:
        """Returns what is known of each file; None where the directory cannot be read at the moment."""
        found = {}
        try:
            with os.scandir(self._folder) as entries:
                for each in entries:
                    if each.name.endswith(".jsonl") and each.is_file():
                        # A file that goes away meanwhile is missed at the next look.
                        with suppress(FileNotFoundError):
                            found[each.name] = each.stat()
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except OSError as error:
            self._refused[self._folder.name] = error.strerror or str(error)
            return None
        self._refused.pop(self._folder.name, None)
        return found

    def _plan(self) -> None:
        """Divides the files that are there at first into what is read soon and what is read later."""
        each = _PREVIEW // max(1, len(self._files))
        count = max(1, min(_WINDOWS, _ALL_WINDOWS // max(1, len(self._files))))
        width = each // count
        for name, file in self._files.items():
            if file.size <= each or name == _LAUNCHER:
                continue
            file.offset = self._last_line_end(file)
            file.gaps = [(0, file.offset)]
            starts = [file.offset * index // count for index in range(count - 1)]
            self._preview += [(file, start, width) for start in starts]
            self._preview.append((file, max(0, file.offset - width), width))
        # By time, so that all curves are whole early; in one file from its begin to its end.
        self._preview = deque(sorted(self._preview, key=lambda it: it[1] / it[0].size))

    def _earliest_gap(self) -> _File | None:
        gaps = (file for file in self._files.values() if file.gaps)
        return min(gaps, key=lambda file: file.gaps[0][0] / file.size, default=None)

    def _grow(self, file: _File, reader: LineReader) -> bool:
        """Reads the next lines that have been written to a file; returns whether there were any."""
        if file.offset >= file.size:
            return False
        block = self._read(file, file.offset, min(_BLOCK, file.size - file.offset))
        end = block.rfind(b"\n") + 1
        if not end:
            if len(block) < _BLOCK:
                return False
            end = len(block)
        self._lines(file, file.offset, block[:end], reader)
        file.offset += end
        return True

    def _window(self, file: _File, start: int, count: int, reader: LineReader) -> None:
        """Reads the whole lines of a range, and takes them out of the last gap; ranges come in their order."""
        block = self._read(file, start, count)
        begin = block.find(b"\n") + 1 if start else 0
        first, stop = file.gaps.pop() if file.gaps else (0, 0)
        begin = max(begin, first - start)
        end = min(block.rfind(b"\n") + 1, stop - start)
        if end <= begin:
            file.gaps += [(first, stop)] * (first < stop)
            return
        parts = [(first, start + begin), (start + end, stop)]
        file.gaps += [part for part in parts if part[0] < part[1]]
        self._lines(file, start + begin, block[begin:end], reader)

    def _first_of_gap(self, file: _File, reader: LineReader) -> None:
        """Reads the first lines of a file's first gap."""
        start, stop = file.gaps[0]
        block = self._read(file, start, min(_BLOCK, stop - start))
        end = block.rfind(b"\n") + 1 or len(block)
        file.gaps[:1] = [(start + end, stop)] * (0 < end < stop - start)
        self._lines(file, start, block[:end], reader)

    def _lines(self, file: _File, start: int, block: bytes, reader: LineReader) -> None:
        lines = block.split(b"\n")
        if not lines[-1]:
            lines.pop()
        before_s = file.edges.pop(start, math.nan)
        file.edges[start + len(block)] = reader.read(lines, file.path.name, before_s)

    def _read(self, file: _File, start: int, count: int) -> bytes:
        name = file.path.name
        try:
            with file.path.open("rb", buffering=0) as stream:
                block = os.pread(stream.fileno(), count, start)
        except FileNotFoundError:
            return b""  # The next look finds that it is gone.
        except OSError as error:
            self._refused[name] = error.strerror or str(error)
            return b""
        self._refused.pop(name, None)
        return block

    def _last_line_end(self, file: _File) -> int:
        """Returns the offset behind the last complete line of a long file."""
        stop = file.size
        while stop:
            start = max(0, stop - _BLOCK)
            if (end := self._read(file, start, stop - start).rfind(b"\n") + 1) > 0:
                return start + end
            stop = start
        return 0


def _change(file: _File, now: os.stat_result | None) -> str:
    """Returns what has happened to a file but growth; "" if nothing has."""
    name = file.path.name
    if now is None:
        return f"{name} was removed"
    if (now.st_dev, now.st_ino) != file.identity:
        return f"{name} was replaced"
    return f"{name} became shorter" if now.st_size < file.size else ""
