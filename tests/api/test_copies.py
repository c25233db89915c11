"""Checkpoints that are copied elsewhere while a run trains, and runs that go on from them."""

from __future__ import annotations

import shutil
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

import headrace as hr
from checkpoint.services import Breakable, files_at, local_files, spoil
from engine.lasting import lasting_job
from headrace.api import launched, supervision
from headrace.checkpoint.remote import RemoteFolder
from headrace.errors import CheckpointMismatch, CorruptCheckpoint, UnfitMachine, UsageError
from headrace.spec.events import Notice

URL = "memory://runs/a"
STEPS = 9
OFTEN = hr.Checkpoints(every_steps=4, every_s=None, keep=2, copy_to=URL)


@pytest.fixture(autouse=True)
def _empty_memory() -> Iterator[None]:
    yield
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def job(steps: int = STEPS, **changes: Any) -> hr.Job:
    return lasting_job("plain", **{"steps": steps, "epochs": None, **changes})


def fit(run_dir: Path | None, steps: int = STEPS, **asked: Any) -> hr.Run:
    trained = asked.pop("job", None) or job(steps)
    return hr.fit(trained, run_dir=run_dir, engine=hr.ThreadEngine(), **{"checkpoints": OFTEN} | asked)


def notices(run: hr.Run) -> list[str]:
    return [event.text for event in run.events if isinstance(event, Notice)]


def same(one: hr.Run, other: hr.Run) -> bool:
    ours, theirs = one.model.state_dict(), other.model.state_dict()
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_run_goes_on_from_its_copies_bit_for_bit(tmp_path: Path) -> None:
    first = fit(tmp_path / "a", steps=6)
    assert "the checkpoint of step 6 is at memory://runs/a, too" in notices(first)
    copies = files_at(URL)
    assert copies.items() <= local_files(tmp_path / "a" / "checkpoints").items()
    assert "step-00000006/manifest.json" in copies
    shutil.rmtree(tmp_path / "a")

    whole = fit(tmp_path / "whole", checkpoints=False)
    other_machine = fit(tmp_path / "b", resume=URL)
    assert "fetched the checkpoint of step 6 from memory://runs/a" in notices(other_machine)
    assert other_machine.summary.started.resumed_step == 6
    assert same(whole, other_machine)
    assert RemoteFolder(URL).steps()[-1] == STEPS
    one = fit(tmp_path / "c", resume=f"{URL}/step-00000009", steps=10, checkpoints=False)
    assert one.summary.started.resumed_step == STEPS


@pytest.mark.parametrize("resume", [True, "if_saved"])
def test_a_machine_without_the_directory_goes_on_from_copy_to(tmp_path: Path, resume: bool | str) -> None:
    asked = {"resume": "if_saved"}
    fit(tmp_path / "a", steps=6, **asked)
    shutil.rmtree(tmp_path / "a")
    run = fit(tmp_path / "a", resume=resume)
    assert run.summary.started.resumed_step == 6
    # Its own come first.
    again = fit(tmp_path / "a", steps=12, resume=resume)
    assert again.summary.started.resumed_step == STEPS
    assert again.summary.outcome.attempts == 2
    assert not any("fetched" in line and "step 9" in line for line in notices(again))


@pytest.mark.parametrize("how", ["half", "bit"])
def test_a_damaged_copy_is_left_out_with_a_line(tmp_path: Path, how: str) -> None:
    run_dir = tmp_path / "a"
    fit(run_dir, steps=8)
    fit(run_dir, resume=True)
    assert RemoteFolder(URL).steps() == (8, 9)
    spoil(URL, 9, how)
    run = fit(tmp_path / "b", resume=URL, steps=10)
    assert run.summary.started.resumed_step == 8
    (line,) = [line for line in notices(run) if "left out" in line]
    assert line.startswith("damaged, left out: memory://runs/a/step-00000009: ")
    spoil(URL, 10, how)
    with pytest.raises(CorruptCheckpoint, match="memory://runs/a/step-00000010"):
        fit(tmp_path / "c", resume=f"{URL}/step-00000010")


def test_a_service_that_fails_does_not_end_the_run(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        service = Breakable(patch)

        def cut(event: object) -> None:
            service.left = 0

        run = fit(tmp_path / "a", on_event=cut)
    assert run.status == "ok"
    told = [line for line in notices(run) if "memory://" in line]
    assert told[-1].startswith("THE LAST CHECKPOINT IS NOT AT memory://runs/a: memory://runs/a cannot be written: the ")
    # One line when it began, whatever number of checkpoints it concerned, unless none was tried before the end.
    assert len(told) <= 2
    assert RemoteFolder(URL).steps() == ()
    again = fit(tmp_path / "a", resume=True)
    assert notices(again)[-1] == f"the checkpoint of step {STEPS} is at memory://runs/a, too"
    assert RemoteFolder(URL).steps() == (STEPS,)


def test_a_service_that_cannot_be_reached_is_told_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Breakable(monkeypatch)
    service.left = 0
    for asked in ({}, {"resume": URL}, {"resume": "if_saved"}):
        with pytest.raises(UnfitMachine, match="memory://runs/a cannot be listed: the service is down; check"):
            fit(tmp_path / "a", **asked)
    service.left = 1
    with pytest.raises(UnfitMachine, match="memory://runs/a cannot be written: the service is down"):
        fit(tmp_path / "b")


def test_another_runs_copies_are_not_touched(tmp_path: Path) -> None:
    fit(tmp_path / "a", steps=6)
    before = files_at(URL)
    elsewhere = {"checkpoints": hr.Checkpoints(copy_to="memory://runs/b")}
    with pytest.raises(
        UsageError, match=r"memory://runs/a holds checkpoints of another run, the last of step 6; .*--copy-to"
    ):
        fit(tmp_path / "b")
    fit(tmp_path / "c", **elsewhere)
    with pytest.raises(UsageError, match="holds checkpoints of another run"):
        fit(tmp_path / "c", resume=True)
    with pytest.raises(UsageError, match=r"a holds a run already; .* resume=True"):
        fit(tmp_path / "a", resume=URL)
    assert files_at(URL) == before


def test_a_copy_of_another_job_is_refused_and_nothing_of_it_stays(tmp_path: Path) -> None:
    fit(tmp_path / "a", steps=6)
    other = job(seed=1)
    with pytest.raises(CheckpointMismatch, match="seed was 0, is 1"):
        fit(tmp_path / "b", job=other, resume=URL)
    assert not list((tmp_path / "b" / "checkpoints").iterdir())
    assert fit(tmp_path / "b", job=other, checkpoints=False).summary.started.resumed_step == 0


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="copy_to must be a URL, for example 's3://bucket/runs/a', got 'runs/a'"):
        hr.Checkpoints(copy_to="runs/a")
    with pytest.raises(UsageError, match="there is no checkpoint at memory://runs/a"):
        fit(tmp_path / "a", resume=URL)
    with pytest.raises(UsageError, match="there is no checkpoint of step 7 at memory://runs/a"):
        fit(tmp_path / "a", resume=f"{URL}/step-00000007")
    with pytest.raises(UsageError, match="resume needs the run_dir"):
        fit(None, resume=URL)


class _Stalled:
    """A copier whose service does not answer; the user interrupts the second time that it is waited for."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def start(self) -> None:
        self.done.append("start")

    def finish(self) -> None:
        self.done.append("finish")

    def wait(self, timeout_s: float) -> bool:
        self.done.append("wait")
        if self.done.count("wait") > 1:
            raise KeyboardInterrupt
        return False

    def lines(self) -> list[str]:
        return []


def test_an_interrupted_wait_for_the_last_copy_ends_the_run_in_order() -> None:
    copier: Any = _Stalled()
    said: list[str] = []
    with supervision.copying(copier, said.append, lambda _: None) as follow:
        follow(None)
    assert copier.done == ["start", "finish", "wait", "wait"]
    assert [line.partition(";")[0] for line in said] == [
        "waits for the copy of the last checkpoint",
        "the last checkpoint was not copied to its end",
    ]


def test_the_rank_that_takes_the_place_of_rank_0_copies_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    follow = supervision.follow_run

    def keeping(spec: Any, info: Any, *rest: Any) -> str:
        seen.append((spec, info))
        return follow(spec, info, *rest)

    monkeypatch.setattr(supervision, "follow_run", keeping)
    fit(tmp_path / "a")
    MemoryFileSystem.store.clear()
    group = types.SimpleNamespace(leads=False, rank=1)
    with launched._Successor(*seen[0], group) as successor:
        successor.follow(None)
        assert RemoteFolder(URL).steps() == ()
        group.leads = True
        successor.follow(None)
        successor.status = "ok"
    assert RemoteFolder(URL).steps() == (STEPS,)
