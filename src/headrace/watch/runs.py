"""Finds runs below directories, follows those that someone looks at, and glances at the others."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from headrace.errors import UsageError
from headrace.machine import disk
from headrace.report.format import clean
from headrace.report.model.ending import LOCK
from headrace.report.model.glance import DEPTH, glanced, runs_below
from headrace.watch.state import WatchedRun

_POLL_S = 0.2
_LOOK_S = 2.0
_MOST_RUNS = 1000
_KEPT = 8
"""Runs that no page shows any more and that stay in memory."""


class RunWatcher:
    """All runs below some directories.

    Args:
        expected: whether a directory need not hold a run yet.

    Attributes:
        found: the runs' directories by their names, the newest first.
        rows: what is known of each, by name.
        changed: set when something changes; then there is another one.
        closing: whether the server is about to end.

    Raises:
        UsageError: a directory holds no run, and none is expected.
    """

    def __init__(self, paths: Sequence[Path], expected: bool = False) -> None:
        self._paths = tuple(path.resolve() for path in paths)
        self._expected = expected
        self.found: dict[str, Path] = {}
        self.rows: dict[str, dict[str, Any]] = {}
        self.closing = False
        self._runs: dict[str, WatchedRun] = {}
        self._looked_at: Counter[str] = Counter()
        self._glanced: dict[str, tuple[int, ...]] = {}
        self.changed = asyncio.Event()
        self._polling = asyncio.Lock()
        for path in () if expected else paths:
            if not runs_below(path):
                raise UsageError(
                    f"{path} holds no run: there is no events/*.jsonl in it, nor up to {DEPTH} folders below; give "
                    "the run_dir of a run, a directory of runs, or --wait for a run that has not begun"
                )
        self._take(*self._survey())

    async def follow(self) -> None:
        """Reads what the runs write, until it is cancelled."""
        loop = asyncio.get_running_loop()
        looked = -_LOOK_S
        while True:
            began = loop.time()
            if began - looked >= _LOOK_S:
                looked = began
                self._take(*await asyncio.to_thread(self._survey))
            if not await self._poll():
                await asyncio.sleep(max(0.0, began + _POLL_S - loop.time()))

    async def close(self) -> None:
        """Reads what has been written last, and ends all that wait for changes."""
        await self._poll()
        self.closing = True
        self._tell()

    @asynccontextmanager
    async def looking_at(self, names: Sequence[str]) -> AsyncIterator[dict[str, WatchedRun]]:
        """Yields these runs, which are followed meanwhile."""
        self._looked_at.update(names)
        try:
            for name in names:
                # The last that was asked for is the last to be given up.
                self._runs[name] = self._runs.pop(name) if name in self._runs else WatchedRun(self.found[name])
            yield {name: self._runs[name] for name in names}
        finally:
            self._looked_at.subtract(names)
            idle = [name for name in self._runs if self._looked_at[name] <= 0]
            for name in idle[: max(0, len(idle) - _KEPT)]:
                del self._runs[name]

    async def _poll(self) -> bool:
        """Takes what is new; returns whether there is more that can be read at once."""
        more = changed = False
        async with self._polling:
            for name, run in list(self._runs.items()):
                if self._looked_at[name] > 0:
                    news = await asyncio.to_thread(run.poll)
                    more |= news.more
                    if run.apply(news):
                        changed = True
                        self.rows[name] = run.row()
        if changed:
            self._tell()
        return more

    def _tell(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def _survey(self) -> tuple[dict[str, Path], dict[str, dict[str, Any]]]:
        """Returns the runs that there are, and the rows of those that have changed and that no page shows."""
        found: dict[str, Path] = {}
        for path in self._paths:
            for run_dir in runs_below(path) or ([path] if self._expected else []):
                name = _text(run_dir.relative_to(path.parent))
                found[_text(run_dir) if name in found else name] = run_dir
        order = sorted(found, key=lambda name: -_modified(found[name] / "events"))[:_MOST_RUNS]
        rows = {}
        for name in order:
            launcher, first = (found[name] / "events" / f"{stem}.jsonl" for stem in ("launcher", "rank-0"))
            sizes = (_size(launcher), _size(first), disk.is_left(found[name] / LOCK))
            if self._looked_at[name] <= 0 and self._glanced.get(name) != sizes:
                self._glanced[name] = sizes
                rows[name] = glanced(found[name])
        return {name: found[name] for name in order}, rows

    def _take(self, found: dict[str, Path], rows: dict[str, dict[str, Any]]) -> None:
        if rows or list(found) != list(self.found):
            self.found = found
            self.rows = {name: row for name, row in (self.rows | rows).items() if name in found}
            self._tell()


async def wait_for(changed: asyncio.Event, timeout_s: float) -> None:
    """Returns when an event is set, or after a time."""
    try:
        async with asyncio.timeout(timeout_s):
            await changed.wait()
    except TimeoutError:
        return


def _text(path: Path) -> str:
    """Returns a path as text; bytes that are not UTF-8 stand as escapes, so that paths stay different."""
    return clean(str(path).encode("utf-8", "backslashreplace").decode("utf-8"))


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
