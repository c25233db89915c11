"""What is said where the disk is full, by a tracker, and of a run whose command is refused; the remedy, when typed."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
from pathlib import Path

import pytest

from api.test_resume import damage
from cli.endings.places import closed, places_of
from cli.endings.running import JOB, Running, running
from cli.endings.ways import OFTEN, PAIR, kills, saved
from headrace.report.model.events import read_events
from headrace.spec.events import RunStarted
from storm.disks import Disk
from storm.schedule import Fault
from watch.browser import CHROMIUM, browser

pytestmark = pytest.mark.slow
FULL = Fault("full disk", 0, 0)
CHARTS = (
    "[...document.querySelectorAll('.chart > svg')].filter((each) => each.clientWidth && each.querySelector('.axis'))"
)
BORDER = "getComputedStyle(document.querySelector('#headline')).borderLeftColor"
RED = """(() => {
  const made = document.createElement("i");
  made.style.color = "var(--bad)";
  document.querySelector("p").append(made);
  return getComputedStyle(made).color;
})()"""
"""The colour of failures, as the browser writes it."""


def starts(run: Running) -> list[RunStarted]:
    return [each for each in read_events(run.run_dir) if isinstance(each, RunStarted)]


def killed(folder: Path, *options: str | Path) -> Running:
    """Trains until a worker is killed after a checkpoint."""
    command = ["headrace", "train", JOB, "--run-dir", folder / "run", *PAIR, *OFTEN, *options]
    with running(folder, command) as run:
        saved(kills(1))(run)
        assert run.end() == 4, run.said()
    return run


def test_the_remedy_can_be_typed(tmp_path: Path) -> None:
    run = killed(tmp_path)
    (typed,) = re.findall("`(headrace .*?)`", places_of(run.run_dir, run.said()).run.remedy)
    with running(tmp_path, shlex.split(typed)) as again:
        again.wait_for(lambda: len(starts(again)) == 2)
        again.wait_for_steps(0, count=starts(again)[1].resumed_step + 10)
        again.signal(signal.SIGINT)
        assert again.end() == 130, again.said()
    assert starts(again)[1].resumed_step > 0
    found = places_of(run.run_dir, again.said())
    assert (found.run.cause, found.run.remedy) == ("Ctrl-C (SIGINT)", f"`{typed}` goes on from the last checkpoint")
    found.check(found.run.summary.outcome.words)


@pytest.mark.full
def test_a_tracker_gets_cause_and_remedy(tmp_path: Path) -> None:
    run = killed(tmp_path, "--tensorboard", tmp_path / "board")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (folder,) = {each.parent for each in (tmp_path / "board").rglob("events.*")}
    board = EventAccumulator(str(folder))
    board.Reload()
    (told,) = board.Tensors("ended/text_summary")
    words = places_of(run.run_dir, run.said()).run.summary.outcome.words
    assert told.tensor_proto.string_val[0].decode() == f"failed: {words}"


@pytest.mark.full
def test_what_is_refused_leaves_the_words_of_the_run(tmp_path: Path) -> None:
    """A second command in a run's directory, and one that finds its checkpoints damaged."""
    command = ["headrace", "train", JOB, "--run-dir", tmp_path / "run"]
    second = tmp_path / "second"
    second.mkdir()
    with running(tmp_path, command) as run:
        run.wait_for_steps(0)
        with running(second, [*command, "--resume"]) as refused:
            assert refused.end() == 2
        assert "is in use by a run that lives" in refused.said()
        run.signal(signal.SIGINT)
        assert run.end() == 130, run.said()
    words = places_of(run.run_dir, run.said()).run.summary.outcome.words
    for checkpoint in (run.run_dir / "checkpoints").iterdir():
        damage(checkpoint)
    with running(second, [*command, "--resume"]) as refused:
        assert refused.end() == 5
    assert "restore it from a copy" in refused.said()
    assert places_of(run.run_dir, run.said()).run.summary.outcome.words == words


@pytest.mark.full
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_full_disk(tmp_path: Path) -> None:
    """It is full before anything was saved; the run ends with its model elsewhere, and with its last event."""
    disk = Disk(tmp_path / "disk", 2 << 20)
    run_dir = disk.folder / "run"
    settings = ["--set", "end=holds", "--set", f"folder={tmp_path}", "--set", "epochs=2"]
    try:
        with running(tmp_path, ["headrace", "train", JOB, "--run-dir", run_dir, *settings], run_dir=run_dir) as run:
            run.wait_for(run.held.exists)
            disk.fail(FULL)
            run.held.unlink()
            assert run.end() == 3, run.said()
        (disk.folder / "ballast").unlink()
        found = places_of(run_dir, run.said())
        assert "No space left on device" in found.run.cause
        assert found.run.status == "failed"
        found.check(found.run.cause)
        found.check(found.run.remedy)
        shutil.rmtree(Path(found.run.remedy.removeprefix("it is kept in ")).parent)
    finally:
        disk.close()


@pytest.mark.full
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_events_that_find_no_room(tmp_path: Path) -> None:
    """The model is saved, and what was lost of the events is said."""
    (tmp_path / "run").mkdir()
    disk = Disk(tmp_path / "run" / "events", 1 << 20)
    settings = ["--set", "end=holds", "--set", f"folder={tmp_path}", "--set", "epochs=2"]
    try:
        with running(tmp_path, ["headrace", "train", JOB, "--run-dir", tmp_path / "run", *settings]) as run:
            run.wait_for(run.held.exists)
            disk.fail(FULL)
            run.held.unlink()
            assert run.end() == 0, run.said()
        found = places_of(run.run_dir, run.said())
        assert (run.run_dir / "model.safetensors").is_file()
        assert (found.run.status, found.run.summary.outcome.words) == ("ok", "")
        lost = f"the disk of {run.run_dir} did not take the last events of rank 0"
        assert [name for name, text in found.texts.items() if closed(lost) in closed(text)] == ["report", "terminal"]
    finally:
        disk.close()


@pytest.mark.full
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_a_page_shows_it_first_and_in_each_chart(tmp_path: Path, width: int, dark: bool) -> None:
    run = killed(tmp_path)
    words = places_of(run.run_dir, run.said()).run.summary.outcome.words
    with running(tmp_path, ["headrace", "watch", run.run_dir, "--port", "0"]) as watch, browser(tmp_path) as tab:
        watch.wait_for(lambda: "http://" in watch.said())
        (address,) = re.findall(r"http://\S+", watch.said())
        tab.open(address, width, dark)
        told = tab.until("document.querySelector('#headline.alert')?.innerText")
        assert closed(words) in closed(told)
        assert tab.value(BORDER) == tab.value(RED)
        below = "document.querySelector('#headline').getBoundingClientRect().top"
        assert 0 < tab.value(below) < 200
        tab.value("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        tab.until(f"{CHARTS}.length > 1 && {CHARTS}.every((each) => each.querySelector('.mark title'))")
        tab.until("document.querySelector('#lanes-canvas canvas').getAttribute('aria-label')?.includes('was lost')")
        assert tab.errors == []
        tab.open(run.run_dir.joinpath("page.html").as_uri(), width, dark)
        assert closed(words) in closed(tab.value("document.querySelector('h1 + .lede.alert').innerText"))
        assert tab.value(BORDER.replace("#headline", ".lede")) == tab.value(RED)
        watch.signal(signal.SIGINT)
