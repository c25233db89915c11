"""The read mode: chosen by measuring, and tuned by whether training waits."""

from __future__ import annotations

import fcntl
import re
import threading
import time
from collections.abc import Callable
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.data import InputPipeline, Loader, as_pipeline, from_arrays
from headrace.data.loading import autotune
from headrace.data.loading.autotune import Autotuner, ReadMode, ReadModes
from headrace.data.loading.reader import CpuBudget

READ_S = 0.02


def select_columns(pipeline: InputPipeline, cores: int = 2, rounds: int = 20, until: str = "") -> tuple[str, list[str]]:
    """Returns how a loader that chooses says that it reads, and its lines; it reads what it would alone.

    It reads so many rounds, or until a line has the words `until`.
    """
    lines: list[str] = []
    loader = Loader(pipeline, 0, 4, (1,), 0, cpu_budget=CpuBudget(cores, 1, lines.append))
    shares = loader.rounds()
    found = [share.batch for share in takewhile(lambda _: not told(lines, until), islice(shares, rounds))]
    shares.close()
    alone = [share.batch for share in islice(Loader(pipeline, 0, 4, (1,), 0).sweep(alone=True), len(found))]
    # Alone it reads one epoch.
    assert len(alone) == min(len(found), -(-len(pipeline) // 4))
    assert until or len(found) == rounds
    assert all(map(torch.equal, found, alone))
    assert not [thread for thread in threading.enumerate() if thread.name == "headrace-data"]
    return lines[0].split(":")[1].strip() if lines else "", lines


def told(lines: list[str], words: str) -> bool:
    """Returns whether one of the lines has these words; without words, False."""
    return bool(words) and any(words in line for line in lines)


def busy(work: Callable[[], None]) -> InputPipeline:
    """Returns a pipeline whose every batch does some work once."""

    def fn(examples: list[Any]) -> list[Any]:
        work()
        return [example[0] * 3 for example in examples]

    return from_arrays(torch.arange(400)).shuffle().map(fn, batched=True)


@pytest.mark.slow
def test_what_lets_other_threads_run_is_read_by_threads() -> None:
    who, lines = select_columns(busy(lambda: time.sleep(READ_S)))
    assert who == "1 thread reads ahead (at most 2)"
    assert len(lines) == 1
    took = re.search(r": a batch takes ([\d.]+) ms", lines[0])
    assert took
    assert float(took[1]) >= 1000 * READ_S


@pytest.mark.slow
def test_what_holds_up_other_threads_is_read_by_processes() -> None:
    lock = threading.Lock()

    def work() -> None:
        # Each process has this lock to itself, as it has its interpreter's.
        with lock:
            time.sleep(READ_S)

    # How many rounds the two processes take to begin, and what is tried before, depends on what else the machine does.
    chosen = "2 processes read ahead (at most 2)"
    _, lines = select_columns(busy(work), rounds=1000, until=chosen)
    assert told(lines, chosen), lines
    assert "batches a second" in next(line for line in lines if chosen in line)


@pytest.mark.slow
def test_what_cannot_be_done_twice_at_a_time_is_read_by_one(tmp_path: Path) -> None:
    def work() -> None:
        with (tmp_path / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            # So long that a second reader has nothing to win from the time in which the first one is woken.
            time.sleep(5 * READ_S)

    _, lines = select_columns(busy(work), rounds=30)
    assert len(lines) == 1
    assert "1 thread reads ahead" in lines[0]


def test_what_takes_no_time_is_read_by_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    # On a busy machine even this may take more than the 0.3 ms that count as quick.
    monkeypatch.setattr(autotune, "QUICK_S", READ_S)
    who, _ = select_columns(from_arrays(torch.arange(400)).map(lambda example: example[0]))
    assert who == "the worker reads by itself"


def test_arrays_in_memory_are_not_even_measured() -> None:
    lines: list[str] = []
    loader = Loader(from_arrays(torch.arange(400)).shuffle(), 0, 4, (1,), 0, cpu_budget=CpuBudget(2, 1, lines.append))
    assert len(list(loader.sweep())) == 100
    assert lines == []


def test_a_data_set_of_the_users_own_is_read_by_the_worker_unless_told() -> None:
    examples = [(torch.tensor(float(number)), threading.get_ident()) for number in range(40)]

    def who(parallel: str | None) -> set[int]:
        pipeline = as_pipeline(examples)[0].map(lambda e: (e[0], threading.get_ident()), parallel=parallel)
        return {int(each) for share in Loader(pipeline, 0, 4, (1,), 0).sweep() for each in share.batch[1]}

    assert who(None) == {threading.get_ident()}
    assert threading.get_ident() not in who("threads")


@pytest.mark.slow
def test_one_core_or_another_thread_or_a_cache_in_memory_starts_no_processes() -> None:
    lock = threading.Lock()

    def work() -> None:
        with lock:
            time.sleep(READ_S)

    found = [
        select_columns(busy(work), cores=1, rounds=60)[1],
        select_columns(busy(work).cache("memory"), rounds=60)[1],
    ]
    thread = threading.Thread(target=lambda: found.append(select_columns(busy(work), rounds=60)[1]))
    thread.start()
    thread.join()
    assert len(found) == 3
    assert not [line for lines in found for line in lines if "process" in line]


@pytest.mark.slow
def test_a_short_data_set_is_read_whole_while_it_is_measured() -> None:
    for count in (1, 2, 5, 9, 14):
        pipeline = from_arrays(torch.arange(4 * count)).map(lambda e: time.sleep(0.001) or e[0])
        shares = Loader(pipeline, 0, 4, (1,), 0, cpu_budget=CpuBudget(2)).sweep()
        assert [int(share.batch[0]) for share in shares] == list(range(0, 4 * count, 4))


def test_no_more_than_the_memory_limit_is_read_to_measure() -> None:
    read: list[int] = []

    def fn(example: Any) -> Any:
        time.sleep(0.001)
        read.append(1)
        return torch.zeros(1000)

    pipeline = from_arrays(torch.arange(400)).map(fn).prefetch(memory_limit=10_000)
    shares = Loader(pipeline, 0, 1, (1,), 0, cpu_budget=CpuBudget(2)).rounds()
    next(shares)
    assert len(read) <= 3
    shares.close()


BY_ITSELF, ONE, TWO, PROCESSES = (
    ReadMode("inline"),
    ReadMode("threads", 1),
    ReadMode("threads", 2),
    ReadMode("processes", 2),
)


class Training:
    """Training that asks for batches, in virtual time.

    Args:
        compute_s: of a step, while it is read in that mode.
        read_s: of a batch, by one of those who read in that mode.
        modes: which there are.
        computing_s: that a batch takes at least.
    """

    def __init__(
        self,
        compute_s: Callable[[ReadMode], float],
        read_s: Callable[[ReadMode], float],
        modes: ReadModes,
        computing_s: float = 0.01,
    ) -> None:
        self.computing_s = computing_s
        self.told: list[ReadMode] = []
        self.tuner = Autotuner(modes.first(1.0), modes, lambda mode, *_: self.told.append(mode))
        self.compute_s = compute_s
        self.read_s = read_s
        self.now = self.waited_s = 0.0

    def run(self, batches: int) -> list[ReadMode]:
        """Returns how it was read at each batch."""
        history = []
        for _ in range(batches):
            mode = self.tuner.mode
            step, read = self.compute_s(mode), self.read_s(mode)
            waited = max(0.0, read / mode.readers - step) if mode.readers else read
            self.now += step + waited
            self.waited_s += waited
            history.append(self.tuner.update(self.now, self.waited_s, read, self.computing_s))
        return history


def threads(most: int) -> ReadModes:
    return ReadModes(("threads",), 1, most)


def test_readers_are_added_until_training_waits_no_more() -> None:
    training = Training(lambda mode: 0.010, lambda mode: 0.055, threads(16))
    history = training.run(300)
    assert history[-1].readers in (6, 9)
    # After a few seconds nothing is read beyond what is needed.
    assert history[150:] == [history[-1]] * 150


def test_a_reader_that_helps_nothing_is_taken_away_again() -> None:
    # Two cores: what a second reader reads, training loses.
    training = Training(lambda mode: 0.010 * mode.readers, lambda mode: 0.015 * mode.readers, threads(2))
    history = training.run(2000)
    assert history.count(TWO) < 0.15 * len(history)
    assert history[-1] == ONE
    assert training.told == []


def test_training_that_does_not_wait_gets_no_other_reader() -> None:
    training = Training(lambda mode: 0.010, lambda mode: 0.0102, ReadModes(("threads", "processes", "inline"), 1, 8))
    assert set(training.run(500)) == {ONE}


def test_training_that_begins_to_wait_gets_more_readers() -> None:
    slow = [0.005]
    training = Training(lambda mode: 0.010, lambda mode: slow[0], threads(4))
    assert set(training.run(200)) == {ONE}
    slow[0] = 0.019
    assert training.run(100)[-1].readers == 2


def test_what_holds_the_interpreter_gets_processes_when_threads_have_not_helped() -> None:
    modes = ReadModes(("threads", "processes", "inline"), 1, 2)
    # Two threads do one thing at a time, and training itself waits for them.
    training = Training(
        lambda mode: 0.001, lambda mode: 0.01 * (mode.readers if mode.parallel == "threads" else 1), modes
    )
    history = training.run(100)
    assert TWO in history
    assert history[-1] == PROCESSES
    assert training.told == [PROCESSES]
    assert training.run(2000).count(PROCESSES) > 1700


def test_a_mode_that_was_far_slower_once_is_tried_again_later() -> None:
    process_s = [0.04]

    def read_s(mode: ReadMode) -> float:
        return process_s[0] if mode.parallel == "processes" else 0.01 * max(1, mode.readers)

    training = Training(lambda mode: 0.001, read_s, ReadModes(("threads", "processes", "inline"), 1, 2))
    assert PROCESSES in training.run(100)
    process_s[0] = 0.01
    assert PROCESSES not in training.run(300)
    assert training.run(4000)[-1] == PROCESSES


def test_threads_that_scale_are_not_compared_with_processes() -> None:
    training = Training(lambda mode: 0.001, lambda mode: 0.01, ReadModes(("threads", "processes", "inline"), 1, 2))
    history = training.run(2000)
    assert set(history) == {ONE, TWO}
    assert history[40:] == [TWO] * 1960


def test_a_loader_that_cannot_be_faster_by_itself_does_not_try() -> None:
    modes = ReadModes(("threads", "inline"), 1, 1)
    assert set(Training(lambda mode: 0.001, lambda mode: 0.01, modes).run(2000)) == {ONE}
    # Where a thread holds training up, it reads by itself.
    held_up = Training(
        lambda mode: 0.002 + 0.01 * mode.readers, lambda mode: 0.013 if mode.readers else 0.002, modes, 0.002
    )
    assert held_up.run(400)[-1] == BY_ITSELF


def test_what_is_quick_is_read_by_the_worker_and_by_threads_when_it_is_so_no_more() -> None:
    modes = ReadModes(("threads", "processes", "inline"), 2, 4)
    assert modes.first(0.0001) == BY_ITSELF
    assert modes.first(0.01) == TWO
    assert modes.neighbors(BY_ITSELF, 50.0, 0.0001, 0.0001) == []
    assert modes.neighbors(BY_ITSELF, 50.0, 0.01, 0.01) == [TWO, ReadMode("processes", 2)]


def test_batches_read_before_the_tuner_began_are_not_counted() -> None:
    tuner = Autotuner(ONE, threads(4), skip_batches=100)
    # All of them come at once, which says nothing of how fast they are read.
    assert {tuner.update(1.0, 0.0, 0.1, 0.1) for _ in range(100)} == {ONE}
    for batch in range(1, 9):
        mode = tuner.update(1.0 + 0.1 * batch, 0.09 * batch, 0.1, 0.1)
    assert mode == TWO
