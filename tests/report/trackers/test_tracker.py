"""Trackers, and who is told: what a slow or failing service does to a run, and which rounds reach it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from headrace.errors import UnfitMachine, UsageError
from headrace.report.model.events import Tail
from headrace.report.trackers.curves import Tracked, TrackedPicture, TrackedText
from headrace.report.trackers.listeners import Listeners, RoundSampler
from headrace.report.trackers.tracker import Tracker
from headrace.spec.events import LAUNCHER, Event, Notice, PictureLogged, RunEnded, RunStarted, Stepped, encode


class Kept(Tracker):
    """Keeps what it is given; `trouble` is raised, or waited for."""

    def __init__(
        self, trouble: Exception | threading.Event | None = None, every_s: float = 0.0, patience_s: float = 30.0
    ) -> None:
        super().__init__("Kept", every_s, patience_s)
        self.trouble = trouble
        self.entries: list[Tracked] = []
        self.calls: list[str] = []

    def begin(self, started: RunStarted) -> None:
        self.calls.append("begin")

    def write(self, entries: Sequence[Tracked]) -> None:
        if isinstance(self.trouble, Exception):
            raise self.trouble
        if self.trouble is not None:
            self.trouble.wait()
        self.entries += entries

    def end(self, status: str) -> None:
        self.calls.append(f"end {status}")

    def texts(self) -> list[str]:
        return [each.text for each in self.entries if isinstance(each, TrackedText)]

    def steps(self, tag: str) -> list[int]:
        return [each.step for each in self.entries if each.tag == tag]


def started() -> RunStarted:
    return RunStarted(LAUNCHER, 0.0, "mirrored", 2, "cpu", 1, 8, 80, "2026-10-03T14:05:11+02:00", {}, {})


def note(text: str) -> Notice:
    return Notice(LAUNCHER, 0.5, text)


def step(rank: int, number: int, time_s: float) -> Stepped:
    return Stepped(rank, time_s, number, 0, 4, float(number), 4.0, 0.0, 0.1, 0.0, 0.0)


def tell(listener: Tracker | Listeners, *events: Event) -> None:
    for event in events:
        listener(event)


def test_at_the_end_of_a_run_all_is_written_and_closed() -> None:
    tracker = Kept()
    tell(tracker, note("before any run"), started(), note("a"), step(0, 0, 1.0), RunEnded(LAUNCHER, 2.0, "ok"))
    # The round that only one of two workers has done is written, too.
    assert (tracker.texts(), tracker.steps("loss"), tracker.calls) == (["a"], [0], ["begin", "end ok"])
    tell(tracker, started(), note("b"))
    tracker.close()
    tracker.close()
    assert (tracker.texts(), tracker.calls) == (["a", "b"], ["begin", "end ok", "begin", "end "])


@pytest.mark.parametrize(
    ("trouble", "cause"),
    [
        (RuntimeError("no route to the service\nand a page of details"), "RuntimeError: no route to the service"),
        (UnfitMachine("pip install 'headrace[kept]'"), "pip install 'headrace[kept]'"),
    ],
)
def test_a_service_that_fails_is_told_once_and_gets_nothing_more(trouble: Exception, cause: str) -> None:
    tracker = Kept(trouble)
    listeners = Listeners([tracker])
    tell(listeners, started(), note("a"))
    tracker.flush()
    tell(listeners, note("b"), RunEnded(LAUNCHER, 2.0, "ok"), started(), note("c"))
    line = f"Kept gets nothing more: {cause}; training goes on without it"
    assert [*listeners.close(), *listeners.close()] == [line]
    assert tracker.calls == ["begin"]


def test_a_service_that_does_not_answer_keeps_a_run_no_longer_than_its_patience() -> None:
    answers = threading.Event()
    tracker = Kept(answers, patience_s=0.01)
    said: list[str] = []
    tracker.say = said.append
    tell(tracker, started(), note("a"), RunEnded(LAUNCHER, 2.0, "ok"))
    assert said == ["Kept gets nothing more: it has not answered for 0.01 s; training goes on without it"]
    answers.set()
    tracker.close()
    assert tracker.calls == ["begin"]


def test_pictures_that_lie_on_another_host_are_missed_once(tmp_path: Path) -> None:
    (tmp_path / "here.png").touch()
    tracker = Kept()
    said: list[str] = []
    tracker.say = said.append
    pictures = [PictureLogged(0, 0.5, 1, "weights", str(tmp_path / name)) for name in ("a.png", "here.png", "b.png")]
    tell(tracker, started(), *pictures, RunEnded(LAUNCHER, 2.0, "ok"))
    assert [Path(each.path).name for each in tracker.entries if isinstance(each, TrackedPicture)] == ["here.png"]
    assert said == ["Kept gets no pictures: they are in the run's directory on rank 0's host"]


def test_alone_a_tracker_says_it_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    tell(Kept(OSError("gone")), started(), note("a"), RunEnded(LAUNCHER, 2.0, "ok"))
    assert capsys.readouterr().err == "headrace: Kept gets nothing more: OSError: gone; training goes on without it\n"


def test_several_listeners_hear_everything_in_their_order() -> None:
    heard: list[tuple[str, Event]] = []
    tracker = Kept()
    listeners = Listeners([lambda event: heard.append(("a", event)), tracker, lambda event: heard.append(("b", event))])
    tell(listeners, started(), note("x"), RunEnded(LAUNCHER, 2.0, "ok"))
    assert [(who, event.kind) for who, event in heard[:3]] == [
        ("a", "run_started"),
        ("b", "run_started"),
        ("a", "notice"),
    ]
    assert (len(heard), tracker.texts()) == (6, ["x"])
    assert Listeners(None).skips == ("stepped",)
    assert Listeners(heard.append).skips == ()  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", ["print", [print, 3], 3])
def test_what_cannot_be_called_is_refused(wrong: object) -> None:
    with pytest.raises(UsageError, match="on_event must be a function of one event"):
        Listeners(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("every_s", [-1, True, "1", float("inf")])
def test_seconds_that_make_no_sense_are_refused(every_s: object) -> None:
    with pytest.raises(UsageError, match="every_s must be a number of seconds of at least 0"):
        Kept(every_s=every_s)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_fast_run_gives_some_rounds_of_all_workers_and_a_slow_one_all(tmp_path) -> None:
    for period_s, least, most in ((0.001, 10, 30), (0.3, 2000, 2000)):
        folder = tmp_path / f"{period_s}" / "events"
        folder.mkdir(parents=True)
        thinned, whole = Kept(every_s=0.1), Kept()
        listeners = Listeners([thinned])
        tail = Tail(folder.parent, skip=listeners.skips)
        tell(listeners, started())
        # Files are read at odd moments, and rank 1 is up to 40 rounds behind.
        behind = itertools.cycle((0, 40, 3))
        done = [0, 0]
        for until in range(100, 2001, 100):
            for rank, lag in ((0, 0), (1, next(behind) if until < 2000 else 0)):
                with (folder / f"rank-{rank}.jsonl").open("a") as file:
                    for number in range(done[rank], until - lag):
                        file.write(encode(step(rank, number, number * period_s + 0.01 * rank)) + "\n")
                        whole(step(rank, number, number * period_s))
                done[rank] = until - lag
            tell(listeners, *tail.read())
        assert not list(listeners.close())
        chosen = thinned.steps("loss")
        assert least <= len(chosen) <= most
        assert chosen == thinned.steps("seconds/compute/rank-0") == thinned.steps("seconds/compute/rank-1")
        whole.close()


def test_with_a_function_beside_it_a_tracker_gets_the_same_rounds() -> None:
    heard: list[Event] = []
    tracker = Kept(every_s=0.1)
    listeners = Listeners([tracker, heard.append])
    tell(listeners, started())
    for number in range(1000):
        listeners(step(0, number, number * 0.001))
    assert not list(listeners.close())
    assert len(heard) == 1001
    assert 9 <= len(tracker.steps("seconds/compute/rank-0")) <= 12


def test_the_first_round_is_chosen_and_old_ones_are_forgotten() -> None:
    sampler = RoundSampler(0.0)
    assert all(sampler.see(number, float(number)) for number in range(7, 3000))
    assert sampler.see(2999, 3000.0)
    assert not sampler.see(7, 3000.0)


def test_a_round_is_chosen_before_any_worker_has_told_of_it() -> None:
    sampler = RoundSampler(1.0)
    for number in range(11):
        sampler.see(number, 0.0)
    # A worker that is behind makes it due, and the other is in round 11 now.
    assert not sampler.see(3, 2.0)
    assert not sampler.see(4, 2.0)
    assert sampler.see(11, 2.0)
