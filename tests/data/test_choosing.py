"""Who reads: chosen by measuring, and tuned by whether training waits."""

from __future__ import annotations

import fcntl
import threading
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.data import Loader, Pipeline, as_pipeline, from_arrays
from headrace.data.choosing import Tuner
from headrace.data.running import Means

READ_S = 0.08


def chosen(pipeline: Pipeline, cores: int = 2, rounds: int = 20) -> tuple[str, list[str]]:
    """Returns how a loader that chooses says that it reads, and its lines; it reads what it would alone."""
    lines: list[str] = []
    loader = Loader(pipeline, 0, 4, (1,), 0, means=Means(cores, 1, lines.append))
    shares = loader.rounds()
    found = [share.batch for share in islice(shares, rounds)]
    shares.close()
    alone = [share.batch for share in islice(Loader(pipeline, 0, 4, (1,), 0).sweep(alone=True), rounds)]
    assert len(found) == len(alone) == rounds
    assert all(map(torch.equal, found, alone))
    assert not [thread for thread in threading.enumerate() if thread.name == "headrace-data"]
    return lines[0].split(":")[1].strip() if lines else "", lines


def busy(work: Callable[[], None]) -> Pipeline:
    """Returns a pipeline whose every batch does some work once."""

    def fn(examples: list[Any]) -> list[Any]:
        work()
        return [example[0] * 3 for example in examples]

    return from_arrays(torch.arange(400)).shuffle().map(fn, batched=True)


@pytest.mark.slow
def test_what_lets_other_threads_run_is_read_by_threads() -> None:
    who, lines = chosen(busy(lambda: time.sleep(READ_S)))
    assert who == "1 thread reads ahead (at most 2)"
    assert len(lines) == 1
    assert ": a batch takes 8" in lines[0]


@pytest.mark.slow
def test_what_holds_up_other_threads_is_read_by_processes() -> None:
    lock = threading.Lock()

    def work() -> None:
        # Each process has this lock to itself, as it has its interpreter's.
        with lock:
            time.sleep(READ_S)

    who, lines = chosen(busy(work))
    assert who == "1 process reads ahead (at most 2)"
    assert "two threads together" in lines[0]
    assert "two processes" in lines[0]


@pytest.mark.slow
def test_who_was_measured_while_others_disturbed_is_measured_again(tmp_path: Path) -> None:
    lines: list[str] = []

    def work() -> None:
        with (tmp_path / "lock").open("w") as file:
            if not lines:
                # Until the loader has chosen, nothing is done twice at a time.
                fcntl.flock(file, fcntl.LOCK_EX)
            time.sleep(READ_S / 4)

    shares = Loader(busy(work), 0, 4, (1,), 0, means=Means(2, 1, lines.append)).rounds()
    deadline = time.monotonic() + 30
    while len(lines) < 2 and time.monotonic() < deadline:
        next(shares)
    shares.close()
    assert "the worker reads by itself" in lines[0]
    assert "1 thread reads ahead" in lines[1]


@pytest.mark.slow
def test_what_cannot_be_done_twice_at_a_time_is_read_by_the_worker(tmp_path: Path) -> None:
    def work() -> None:
        with (tmp_path / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            time.sleep(READ_S)

    assert chosen(busy(work))[0] == "the worker reads by itself"


def test_what_takes_no_time_is_read_by_the_worker() -> None:
    who, _ = chosen(from_arrays(torch.arange(400)).map(lambda example: example[0]))
    assert who == "the worker reads by itself"


def test_arrays_in_memory_are_not_even_measured() -> None:
    lines: list[str] = []
    loader = Loader(from_arrays(torch.arange(400)).shuffle(), 0, 4, (1,), 0, means=Means(2, 1, lines.append))
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

    assert chosen(busy(work), cores=1)[0] == "the worker reads by itself"
    _, lines = chosen(busy(work).cache("memory"))
    assert "processes" not in lines[0]
    found = []
    thread = threading.Thread(target=lambda: found.append(chosen(busy(work))[0]))
    thread.start()
    thread.join()
    assert found == ["the worker reads by itself"]


@pytest.mark.slow
def test_a_short_data_set_is_read_whole_while_it_is_measured() -> None:
    for count in (1, 2, 5, 9, 14):
        pipeline = from_arrays(torch.arange(4 * count)).map(lambda e: time.sleep(0.001) or e[0])
        shares = Loader(pipeline, 0, 4, (1,), 0, means=Means(2)).sweep()
        assert [int(share.batch[0]) for share in shares] == list(range(0, 4 * count, 4))


def test_no_more_than_the_memory_limit_is_read_to_measure() -> None:
    read: list[int] = []

    def fn(example: Any) -> Any:
        time.sleep(0.001)
        read.append(1)
        return torch.zeros(1000)

    pipeline = from_arrays(torch.arange(400)).map(fn).prefetch(memory_limit=10_000)
    shares = Loader(pipeline, 0, 1, (1,), 0, means=Means(2)).rounds()
    next(shares)
    assert len(read) <= 3
    shares.close()


class Training:
    """Training that asks for batches, in virtual time.

    Args:
        compute_s: of a step, with so many readers.
        read_s: of a batch, by one of so many readers.
    """

    def __init__(self, compute_s: Callable[[int], float], read_s: Callable[[int], float], most: int) -> None:
        self.tuner = Tuner(1, most)
        self.compute_s = compute_s
        self.read_s = read_s
        self.now = self.waited_s = 0.0

    def run(self, batches: int) -> list[int]:
        """Returns how many readers there were at each batch."""
        history = []
        for _ in range(batches):
            readers = self.tuner.readers
            step = self.compute_s(readers)
            waited = max(0.0, self.read_s(readers) / readers - step)
            self.now += step + waited
            self.waited_s += waited
            history.append(self.tuner.look(self.now, self.waited_s))
        return history


def test_readers_are_added_until_training_waits_no_more() -> None:
    training = Training(lambda readers: 0.010, lambda readers: 0.055, most=16)
    history = training.run(300)
    assert history[-1] in (6, 9)
    # Nobody reads more than is needed by the time when a few seconds have passed.
    assert history[150:] == [history[-1]] * 150


def test_a_reader_that_helps_nothing_is_taken_away_again() -> None:
    # Two cores: what a second reader reads, training loses.
    training = Training(lambda readers: 0.010 * readers, lambda readers: 0.015 * readers, most=2)
    history = training.run(2000)
    assert history.count(2) < 0.15 * len(history)
    assert history[-1] == 1


def test_training_that_does_not_wait_gets_no_reader_more() -> None:
    training = Training(lambda readers: 0.010, lambda readers: 0.0102, most=8)
    assert set(training.run(500)) == {1}


def test_training_that_begins_to_wait_gets_more_readers() -> None:
    slow = [0.005]
    training = Training(lambda readers: 0.010, lambda readers: slow[0], most=4)
    assert set(training.run(200)) == {1}
    slow[0] = 0.019
    assert training.run(100)[-1] == 2


def test_what_was_read_before_is_passed_over() -> None:
    tuner = Tuner(1, 4, passed_over=100)
    # All of them come at once, which says nothing of how fast they are read.
    assert {tuner.look(1.0, 0.0) for _ in range(100)} == {1}
    for batch in range(1, 9):
        readers = tuner.look(1.0 + 0.1 * batch, 0.09 * batch)
    assert readers == 2
