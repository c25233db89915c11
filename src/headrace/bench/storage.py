"""Reading files: large and small, in order and not, from the disk and from the page cache."""

from __future__ import annotations

import errno
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from headrace.bench.figures import Figure, Gap, MachineFigures, figure
from headrace.bench.settings import Effort
from headrace.errors import UnfitMachine
from headrace.machine.temporary import temporary_folder
from headrace.report.format import byte_count

_BLOCK, _PAGE, _SMALL_FILE = 1 << 20, 4096, 16 << 10
_READS = 2000
_REPEATS = 3
_LETS_GO_S = 0.5
DISK, CACHE = "disk", "RAM (page cache)"


def storage(effort: Effort, folder: Path, saved: MachineFigures) -> Iterator[Figure | Gap]:
    """Measures reads of files that are written into a folder of their own in `folder`, which is removed.

    Raises UnfitMachine if they do not fit or cannot be written.
    """
    done = [figure for row in _rows(effort) for column in (DISK, CACHE) if (figure := saved.at("storage", row, column))]
    if len(done) == 2 * len(_rows(effort)):
        yield from done
        return
    needed = effort.file_bytes + effort.files * _SMALL_FILE
    try:
        free = shutil.disk_usage(folder).free
        if free < 2 * needed:
            raise UnfitMachine(
                f"{folder} has {byte_count(free)} free, and the files to read are {byte_count(needed)}; name another "
                "folder with --folder, or leave storage out with --only"
            )
        with temporary_folder("headrace-bench-", folder) as inner:
            yield from _reads(effort, inner, saved)
    except OSError as error:
        raise UnfitMachine(f"files cannot be written or read in {folder}: {error}; use another --folder") from error


def _rows(effort: Effort) -> tuple[str, str, str, str]:
    files = f"{effort.files:,} files of {_SMALL_FILE >> 10} kB"
    large = f"{byte_count(effort.file_bytes)}, in order"
    return large, "4 kB pieces of it, at random", f"{files}, in order", f"{files}, at random"


def _reads(effort: Effort, folder: Path, saved: MachineFigures) -> Iterator[Figure | Gap]:
    large = folder / "large"
    _write(large, effort.file_bytes)
    small = [folder / f"{number:05d}" for number in range(effort.files)]
    for file in small:
        _write(file, _SMALL_FILE)
    mixed = random.Random(0).sample(small, len(small))
    reads: tuple[tuple[str, Sequence[Path], Callable[[], float]], ...] = (
        ("MB/s", [large], lambda: _in_order(large) / 1e6),
        ("reads/s", [large], lambda: _at_random(large, effort.cell_s)),
        ("files/s", small, lambda: _whole(small)),
        ("files/s", small, lambda: _whole(mixed)),
    )
    for row, (unit, files, read) in zip(_rows(effort), reads, strict=True):
        yield saved.at("storage", row, DISK) or _cold(row, unit, files, read)
        yield saved.at("storage", row, CACHE) or _warm(row, unit, files, read)


def _cold(row: str, unit: str, files: Sequence[Path], read: Callable[[], float]) -> Figure | Gap:
    rates: list[float] = []
    while len(rates) < _REPEATS and (rate := _evicted(files, read)) is not None:
        rates.append(rate)
    if rates:
        return figure("storage", row, DISK, unit, rates)
    return Gap("storage", row, DISK, "the page cache keeps what was written here")


def _warm(row: str, unit: str, files: Sequence[Path], read: Callable[[], float]) -> Figure:
    for file in files:
        _in_order(file)
    return figure("storage", row, CACHE, unit, [read() for _ in range(_REPEATS)])


def _write(file: Path, nbytes: int) -> None:
    with file.open("wb") as stream:
        for begin in range(0, nbytes, _BLOCK):
            # Random, since file systems may compress.
            stream.write(os.urandom(min(_BLOCK, nbytes - begin)))
        stream.flush()
        os.fsync(stream.fileno())


def _evicted(files: Sequence[Path], read: Callable[[], float]) -> float | None:
    """Returns the rate of a read without the page cache; None if the kernel does not let go of the files.

    On a busy machine it does so only after a moment, in which it still writes or counts their pages.
    """
    end = time.perf_counter() + _LETS_GO_S
    while True:
        for file in files:
            with file.open("rb") as stream:
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if not any(_is_cached(file) for file in (files[0], files[-1])):
            return read()
        if time.perf_counter() > end:
            return None
        time.sleep(0.02)


def _is_cached(file: Path) -> bool:
    with file.open("rb", buffering=0) as stream:
        try:
            return os.preadv(stream.fileno(), [bytearray(_PAGE)], 0, os.RWF_NOWAIT) > 0
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno == errno.EOPNOTSUPP:
                # Of such a file system it cannot be known.
                return True
            raise


def _in_order(file: Path) -> float:
    """Returns bytes a second."""
    block = bytearray(_BLOCK)
    began, read = time.perf_counter(), 0
    with file.open("rb", buffering=0) as stream:
        while count := stream.readinto(block):
            read += count
    return read / (time.perf_counter() - began)


def _at_random(file: Path, seconds: float) -> float:
    """Returns reads a second."""
    pages = file.stat().st_size // _PAGE
    places = random.Random(0).sample(range(pages), min(pages, _READS))
    with file.open("rb", buffering=0) as stream:
        descriptor = stream.fileno()
        # Otherwise the kernel reads more than is asked for.
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        began, done = time.perf_counter(), 0
        for place in places:
            os.pread(descriptor, _PAGE, place * _PAGE)
            done += 1
            if time.perf_counter() - began > seconds:
                break
        return done / (time.perf_counter() - began)


def _whole(files: Sequence[Path]) -> float:
    """Returns files a second."""
    began = time.perf_counter()
    for file in files:
        file.read_bytes()
    return len(files) / (time.perf_counter() - began)
