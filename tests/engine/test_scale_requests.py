"""A request to change the workers of a run ends no run, whatever its disk does."""

from __future__ import annotations

import errno
import os
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import headrace as hr
from headrace.collectives.views.hosts import HostViews
from headrace.engine.local import scaling
from headrace.engine.local.scaling import ScaleRequests, ask_for_states
from headrace.engine.torchrun.elastic_workers.leader import ViewLeader
from headrace.errors import UsageError
from headrace.policies.views import Member, MemberView
from headrace.shared_memory.control_page import ControlPage
from headrace.spec.cluster import Cluster, Host
from headrace.spec.model import ModelSpec, ParameterSpec
from headrace.worker.run_spec import RunSpec


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO], ids=lambda number: errno.errorcode[number])
def test_a_disk_that_takes_no_answer_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    requests = ScaleRequests(tmp_path)
    (tmp_path / "staffing").mkdir()
    wish = tmp_path / "staffing" / "a.wish"
    wish.write_text("2")
    changes: list[int] = []

    def change(count: int) -> str:
        changes.append(count)
        return "3 workers from now on"

    def fail(path: Path, text: str) -> None:
        raise OSError(number, os.strerror(number), str(path))

    with monkeypatch.context() as full:
        full.setattr(scaling, "_write", fail)
        requests.look(change, list)
    assert (changes, wish.exists()) == ([2], False)
    wish.write_text("1")
    requests.look(change, list)
    assert changes == [2, 1]
    assert "3 workers from now on" in wish.with_suffix(".answer").read_text()


@pytest.mark.timeout(20)
def test_what_is_no_file_is_no_request(tmp_path: Path) -> None:
    """To open a named pipe would wait for its writer."""
    folder = tmp_path / "staffing"
    folder.mkdir()
    (folder / "left").mkdir()
    requests = ScaleRequests(tmp_path)
    os.mkfifo(folder / "a.wish")
    (folder / "b.wish").mkdir()
    (folder / "c.wish").write_text("1")
    changes: list[int] = []
    requests.look(lambda count: str(changes.append(count)), list)
    assert changes == [1]


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The operations that another user's files forbid, as they would where these tests do not run as root."""
    forbidden: set[str] = set()

    def guard(kind: type, name: str) -> None:
        do = getattr(kind, name)

        def ask(path: Path, *given: object, **named: object) -> object:
            if name in forbidden and "staffing" in path.parts:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return do(path, *given, **named)

        monkeypatch.setattr(kind, name, ask)

    for name in ("open", "unlink", "write_text"):
        guard(Path, name)
    return forbidden


@pytest.mark.parametrize("operation", ["open", "unlink", "write_text"])
def test_a_request_of_another_user_ends_no_run_and_is_done_once_at_most(
    tmp_path: Path, foreign: set[str], operation: str
) -> None:
    requests = ScaleRequests(tmp_path)
    (tmp_path / "staffing").mkdir()
    theirs, own = (tmp_path / "staffing" / f"{name}.wish" for name in "ab")
    theirs.write_text("2")
    changes: list[int] = []

    def change(count: int) -> str:
        changes.append(count)
        return "done"

    foreign.add(operation)
    for _ in range(3):
        requests.look(change, list)
    # What cannot be removed is not done: it would be done again.
    expected = [2] if operation == "write_text" else []
    assert changes == expected
    foreign.clear()
    own.write_text("1")
    for _ in range(2):
        requests.look(change, list)
    assert changes == [*expected, 1]
    assert own.with_suffix(".answer").exists()


def test_what_another_user_has_left_does_not_keep_a_run_from_starting(tmp_path: Path, foreign: set[str]) -> None:
    (tmp_path / "staffing").mkdir()
    for name in ("a.wish", "b.answer"):
        (tmp_path / "staffing" / name).write_text("2")
    foreign.add("unlink")
    requests = ScaleRequests(tmp_path)
    foreign.clear()
    changes: list[int] = []
    requests.look(lambda count: changes.append(count) or "done", list)  # type: ignore[func-returns-value]
    assert changes == []


def test_a_request_that_is_withdrawn_while_it_is_read_is_not_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = ScaleRequests(tmp_path)
    (tmp_path / "staffing").mkdir()
    begin = Path.open
    for early in (True, False):
        wish = tmp_path / "staffing" / "a.wish"
        wish.write_text("2")

        def withdraw(path: Path, early: bool = early, **named: Any) -> Any:
            if early:
                path.unlink()
            file = begin(path, **named)
            path.unlink()
            return file

        with monkeypatch.context() as patch:
            patch.setattr(Path, "open", withdraw)
            requests.look(lambda count: pytest.fail("it was done"), list)
        assert not wish.exists()


def test_who_asks_in_vain_is_told_and_leaves_nothing(tmp_path: Path, foreign: set[str]) -> None:
    with pytest.raises(UsageError, match="none of this user is running there"):
        ask_for_states(tmp_path, 0.1)
    assert list(tmp_path.iterdir()) == []
    foreign.add("write_text")
    with pytest.raises(UsageError, match=r"Permission denied.*: ask as the user of the run"):
        ask_for_states(tmp_path, 0.1)


class Views:
    """Of three workers, of which the first one leads."""

    me = (0, 0)
    view = MemberView(1, ((0, 0), (1, 2), (2, 0)))
    seen = frozenset(view.members)
    in_order = False

    def __init__(self) -> None:
        self.asked: list[Member] = []
        self.let_leave = self.asked.extend


def test_a_worker_is_asked_to_leave_once(tmp_path: Path) -> None:
    plan = hr.Mirrored(3, min_workers=1).plan(
        ModelSpec((ParameterSpec("weight", (8,)),)), Cluster((Host("a", 2, 1 << 30, ranks=(0, 1, 2)),), ranks=3)
    )
    spec = cast("RunSpec", SimpleNamespace(plan=plan, run_dir=tmp_path, started=0.0, timeout_s=60.0))
    page = ControlPage.create(3)
    views = Views()
    with closing(ViewLeader(spec, page, cast("HostViews", views), "run", "", "", None, None)) as leader:
        assert leader._change(-1) == "2 workers from now on: rank 2 leaves after the present round"
        assert [each.state for each in leader._states()] == ["trains", "trains", "leaves"]
        assert leader._change(-1) == "1 worker from now on: rank 1 leaves after the present round"
        with pytest.raises(UsageError, match="1 workers and -1 are 0; a run has 1 to 3"):
            leader._change(-1)
    assert views.asked == [(2, 0), (1, 2)]
