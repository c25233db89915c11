"""Reading ahead: in order, within its budget, and to an end."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from headrace.data import InputPipeline, Loader, Source, from_arrays
from headrace.data.loading import batch_reader as running
from headrace.data.loading.prefetcher import MemoryBudget, Prefetcher
from headrace.data.loading.reader import ReadResult
from headrace.data.pipeline.source import Epoch
from headrace.errors import DataError

DEADLINE_S = 60.0


def ahead(
    read: Callable[[int], ReadResult],
    parts: Iterator[int],
    readers: int = 2,
    most: int | None = None,
    limit: int = 1 << 30,
) -> Prefetcher[int]:
    made = Prefetcher(parts, read, lambda _: 8, lambda part, found: None, lambda nbytes: None, most, limit)
    made.set_readers(readers)
    return made


def numbered(part: int) -> ReadResult:
    return ReadResult(torch.tensor([part]), 1, (), ())


def readers_alive() -> int:
    return sum(thread.name == "headrace-data" for thread in threading.enumerate())


class Gate:
    """Lets a reader through when the test says so."""

    def __init__(self) -> None:
        self.opened = {part: threading.Event() for part in range(100)}
        self.reached = {part: threading.Event() for part in range(100)}

    def read(self, part: int) -> ReadResult:
        self.reached[part].set()
        assert self.opened[part].wait(DEADLINE_S)
        return numbered(part)


def test_batches_come_in_order_whichever_is_first() -> None:
    gate = Gate()
    running = ahead(gate.read, iter(range(4)))
    running.fill()
    assert gate.reached[1].wait(DEADLINE_S)
    gate.opened[1].set()
    assert gate.reached[2].wait(DEADLINE_S)
    for part in (0, 2, 3):
        gate.opened[part].set()
    taken = []
    while (found := running.take()) is not None:
        taken.append((found[0], int(found[1].batch)))
    assert taken == [(part, part) for part in range(4)]
    running.close()
    assert readers_alive() == 0


def test_no_more_are_read_than_may_wait() -> None:
    begun = []

    def read(part: int) -> ReadResult:
        begun.append(part)
        return numbered(part)

    running = ahead(read, itertools.count(), readers=2, most=3)
    assert running.take() is not None
    running.settle()
    assert sorted(begun) == [0, 1, 2]
    running.set_readers(5)
    assert running.take() is not None
    running.settle()
    assert len(begun) == 4
    running.close()


def test_an_error_comes_where_its_batch_would() -> None:
    def read(part: int) -> ReadResult:
        if part == 2:
            raise DataError("example 2 cannot be had")
        return numbered(part)

    running = ahead(read, itertools.count())
    first, second = running.take(), running.take()
    assert first is not None
    assert second is not None
    assert (first[0], second[0]) == (0, 1)
    with pytest.raises(DataError, match="example 2"):
        running.take()
    running.close()
    assert readers_alive() == 0


def test_to_close_ends_the_readers_and_what_they_have_not_begun() -> None:
    gate = Gate()
    running = ahead(gate.read, iter(range(100)), readers=2, most=10)
    running.fill()
    assert gate.reached[1].wait(DEADLINE_S)
    closing = threading.Thread(target=running.close)
    closing.start()
    gate.opened[0].set()
    gate.opened[1].set()
    closing.join(DEADLINE_S)
    assert not closing.is_alive()
    assert readers_alive() == 0
    assert not gate.reached[2].is_set()


def test_a_loop_that_ends_early_leaves_no_thread() -> None:
    pipeline = from_arrays(torch.arange(1000)).map(lambda example: example, parallel=3)
    shares = Loader(pipeline, 0, 4, (1,), 0).rounds()
    assert len(list(islice(shares, 5))) == 5
    assert readers_alive() == 3
    shares.close()
    assert readers_alive() == 0


def test_a_budget_counts_what_is_held_and_lets_one_through() -> None:
    budget = MemoryBudget(100)
    assert budget.reserve(60)
    assert not budget.reserve(60)
    budget.add(-30)
    assert budget.reserve(60)
    budget.hand_over()
    budget.hand_over()
    # Both are held, and nothing is being read.
    assert budget.reserve(500)
    assert not budget.reserve(1)
    budget.add(-90)
    assert not budget.reserve(1)
    budget.hand_over()
    budget.add(-500)
    assert (budget.reserved, budget.most) == (0, 590)
    assert budget.reserve(None)
    assert not budget.reserve(None)


class Sized(Source):
    """Examples of very different sizes; counts the bytes of those that are alive.

    Args:
        sizes: of each, in bytes.
        told: whether it tells them beforehand.
    """

    def __init__(self, sizes: list[int], told: bool) -> None:
        self.sizes = sizes
        self.told = told
        self.alive = 0
        self.most = 0
        self.lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.sizes)

    def example(self, index: int, epoch: Epoch) -> Any:
        size = self.sizes[index]
        array = np.full(size, index % 251, dtype=np.uint8)
        self.count(size)
        weakref.finalize(array, self.count, -size)
        return array

    def count(self, size: int) -> None:
        with self.lock:
            self.alive += size
            self.most = max(self.most, self.alive)

    def collate(self, examples: Any) -> Any:
        batch = np.concatenate(examples)
        self.count(batch.nbytes)
        weakref.finalize(batch, self.count, -batch.nbytes)
        return torch.from_numpy(batch)

    def nbytes(self, index: int) -> int | None:
        return self.sizes[index] if self.told else None

    @property
    def identity(self) -> str:
        return ""


@pytest.mark.slow
@pytest.mark.parametrize("told", [True, False])
def test_batches_of_very_different_sizes_stay_within_the_memory_limit(told: bool) -> None:
    rng = np.random.default_rng(3)
    # From 1 kB to 20 MB, as many of each order of magnitude.
    sizes = [int(size) for size in 10 ** rng.uniform(3, 7.3, 400)]
    source = Sized(sizes, told)
    limit = 150 << 20
    pipeline = InputPipeline(source).shuffle().map(lambda example: example, parallel=4)
    pipeline = pipeline.prefetch(50, memory_limit=limit)
    seen = 0
    for share in islice(Loader(pipeline, 0, 4, (1,), 0).rounds(), 200):
        seen += share.batch.numel()
    del share
    gc.collect()
    assert seen == 2 * sum(sizes)
    # How far readers get ahead is the system's choice.
    assert limit / 4 < source.most < 1.1 * limit
    assert source.alive == 0


class Gated(Sized):
    """Keeps all but the first batch of four back until the number of readers has been decided."""

    def __init__(self, sizes: list[int], told: bool) -> None:
        super().__init__(sizes, told)
        self.decided = threading.Event()

    def example(self, index: int, epoch: Epoch) -> Any:
        assert index < 4 or self.decided.wait(DEADLINE_S)
        return super().example(index, epoch)


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("size", [1 << 10, 1 << 20])
def test_threads_share_their_memory_only_where_batches_are_large(
    told: bool, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned: list[int] = []
    source = Gated([1 << 10] * 4 + [size] * 36, told)
    decide = running.BatchReader._share_memory

    def share_memory(reader: Any, readers: int) -> None:
        decide(reader, readers)
        if readers == 2:
            source.decided.set()

    monkeypatch.setattr(running, "tune", lambda option, value: tuned.append(value))
    monkeypatch.setattr(running.BatchReader, "_share_memory", share_memory)
    pipeline = InputPipeline(source).map(lambda example: example, parallel=2)
    # Four examples of 1 kB and what they are made from: 12 kB; of 1 MB: 12 MB, more than half of a sixteenth.
    for _ in Loader(pipeline.prefetch(memory_limit=100 << 20), 0, 4, (1,), 0).rounds(0, 10):
        pass
    # Sizes that the source does not tell beforehand are judged by the first batch.
    assert bool(tuned) == (size == 1 << 20 and told)


MEMORY = """
import sys
import numpy as np, torch, headrace as hr

sizes = [int(size) for size in 10 ** np.random.default_rng(3).uniform(3, 7.3, 400)]
if sys.argv[3] == "the small first":
    sizes.sort()

class Sized(hr.data.Source):
    identity = ""
    def __len__(self): return len(sizes)
    def example(self, index, epoch): return np.full(sizes[index], index % 251, dtype=np.uint8)
    def collate(self, examples): return torch.from_numpy(np.concatenate(examples))
    def nbytes(self, index): return sizes[index]

def memory(name):
    line, = (line for line in open("/proc/self/status") if line.startswith(name))
    return 1024 * int(line.split()[1])

pipeline = hr.data.Pipeline(Sized()).map(lambda example: example, parallel=int(sys.argv[1]))
if sys.argv[3] == "shuffled":
    pipeline = pipeline.shuffle()
loader = hr.data.Loader(pipeline.prefetch(50, memory_limit=int(sys.argv[2])), 0, 4, (1,), 0)
open("/proc/self/clear_refs", "w").write("5")
before, of_files = memory("VmRSS"), memory("RssFile")
for share in loader.rounds(0, 200): pass
# Which pages of libraries are resident, the system decides, megabytes at a time.
print(memory("VmHWM") - before - (memory("RssFile") - of_files))
"""


@pytest.mark.one
@pytest.mark.usefixtures("real_python")
@pytest.mark.slow
@pytest.mark.parametrize("order", ["shuffled", "the small first"])
def test_the_process_stays_within_the_memory_limit_too(order: str) -> None:
    limit = 200 << 20
    command = [sys.executable, "-c", MEMORY, "4", str(limit), order]
    # Freed at once: how much of what is free malloc keeps, an environment may say.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 20)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True, env=environment)
    assert limit / 4 < int(done.stdout) < 1.1 * limit


@pytest.mark.slow
@pytest.mark.usefixtures("real_python")
def test_an_interpreter_ends_in_the_middle_of_a_loop() -> None:
    code = (
        "import torch, headrace as hr\n"
        "numbers = hr.data.from_arrays(torch.arange(1000))\n"
        "for way in ('threads', 'processes'):\n"
        "    pipeline = numbers.map(lambda e: e, parallel=way)\n"
        "    globals()[way] = hr.data.Loader(pipeline, 0, 4, (1,), 0).rounds()\n"
        "    print(len(next(globals()[way]).batch[0]))\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "4\n4\n", "")


@pytest.mark.slow
def test_a_fork_that_ends_in_the_middle_of_a_loop_ends_no_reader_of_its_parent() -> None:
    code = (
        "import os, sys, torch, headrace as hr\n"
        "pipeline = hr.data.from_arrays(torch.arange(100)).map(lambda e: e, parallel='processes')\n"
        "shares = hr.data.Loader(pipeline, 0, 4, (1,), 0).rounds(0, 25)\n"
        "next(shares)\n"
        "if not (pid := os.fork()):\n"
        "    sys.exit()\n"
        "assert os.waitpid(pid, 0)[1] == 0\n"
        "print(len(list(shares)))\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "24\n", "")


def test_who_reads_says_nothing_to_the_order() -> None:
    def noisy(example: Any, rng: np.random.Generator) -> Any:
        return example[0] + rng.random(), os.getpid()

    data = from_arrays(torch.zeros(50)).shuffle()
    found = {}
    for way in ("inline", 3, "processes"):
        shares = Loader(data.map(noisy, parallel=way), 1, 8, (1, 1), 1).rounds(3)
        batches = [share.batch for share in islice(shares, 12)]
        shares.close()
        found[way] = [values.tolist() for values, _ in batches]
        readers = {int(pid) for _, pids in batches for pid in pids}
        assert (os.getpid() in readers) == (way != "processes")
    assert found["inline"] == found[3] == found["processes"]
