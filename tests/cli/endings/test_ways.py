"""Ways for a training to end: the terminal, watch, the report, a notebook and the run itself say the same of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cli.endings.job import ENDS
from cli.endings.places import Places, places_of
from cli.endings.running import JOB, SOON_S, running
from cli.endings.ways import OTHERS, QUICK, Way
from engine.conftest import until
from headrace.machine.disk import is_left
from headrace.report.model.ending import LOCK

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _ended_processes_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, and not where nothing was written for a while."""
    monkeypatch.setattr("headrace.watch.state._QUIET_S", 0.0)


def command(folder: Path, way: Way) -> list[str | Path]:
    if way.script:
        return ["python", JOB.with_name("script.py"), folder / "run"]
    settings = ["--set", f"end={way.end}", "--set", f"folder={folder}"] if way.end else []
    return ["headrace", "train", JOB, "--run-dir", folder / "run", *way.options, *settings]


def ended(folder: Path, way: Way) -> Places:
    """Trains, and returns what is said of it."""
    way.files(folder)
    with running(folder, command(folder, way), way.before) as run:
        way.deed(run)
        assert run.end() == way.code, run.said()
    # The workers of a command that was killed see so, and end.
    assert until(lambda: is_left(run.run_dir / LOCK), SOON_S)
    return places_of(run.run_dir, run.said() if way.speaks else None)


def check(way: Way, found: Places) -> None:
    """Checks that all places say what ended the run, what to do, and what is odd."""
    outcome, watched = found.run.summary.outcome, found.watched
    assert (outcome.status, watched["status"]) == (way.status, way.status)
    assert (found.run.cause, found.run.remedy) == (outcome.cause, outcome.remedy)
    assert re.search(way.cause or "^$", found.run.cause), found.run.cause
    assert re.search(way.remedy or "^$", found.run.remedy), found.run.remedy
    assert watched["words"] == outcome.words
    found.check(found.run.cause)
    found.check(found.run.remedy)
    ends = [each["text"] for each in watched["marks"] if each["text"].startswith("ended: ")]
    assert ends == ([f"ended: {way.status}: {outcome.words}"] if outcome.words else [])
    if way.remark:
        said = re.search(way.remark, found.watched["headline"])
        assert said, found.watched["headline"]
        found.check(said[0])


@pytest.mark.every
@pytest.mark.parametrize("name", QUICK)
def test_all_places_say_it_in_the_same_words(tmp_path: Path, name: str) -> None:
    check(QUICK[name], ended(tmp_path, QUICK[name]))


@pytest.mark.full
@pytest.mark.parametrize("name", OTHERS)
def test_so_they_do_of_others(tmp_path: Path, name: str) -> None:
    check(OTHERS[name], ended(tmp_path, OTHERS[name]))


def test_every_failure_has_a_remedy() -> None:
    every = QUICK | OTHERS
    assert len(every) >= 24
    assert [name for name, way in every.items() if way.status != "ok" and not (way.cause and way.remedy)] == []
    assert {way.end for way in every.values()} - {""} == set(ENDS)
