"""The server: who may ask, what it answers, and what a stream tells."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson
import pytest

from headrace.errors import UsageError
from headrace.report.model import glance
from headrace.spec.events import LAUNCHER, RunEnded
from headrace.watch import application
from headrace.watch.application import Access, WatchServer
from headrace.watch.runs import RunWatcher
from watch.made import begun, started, steps, write
from web.servers import http_scope

STATIC = (
    "/",
    "/page.css",
    "/colours.css",
    "/main.js",
    "/chart.js",
    "/lanes.js",
    "/panels.js",
    "/stream.js",
    "/icon.svg",
)


class Asked:
    """One request to a server in this process, whose answer may go on."""

    def __init__(self, server: WatchServer, path: str, headers: Mapping[str, str] | None = None) -> None:
        self._sent: asyncio.Queue[Any] = asyncio.Queue()
        scope = http_scope("GET", path, {"host": "localhost:8010", **(headers or {})})
        self._task = asyncio.ensure_future(server(scope, self._receive, self._sent.put))

    async def _receive(self) -> Any:
        return await asyncio.Event().wait()

    async def start(self) -> tuple[int, dict[str, str]]:
        head = await self._sent.get()
        return head["status"], {name.decode().lower(): value.decode() for name, value in head["headers"]}

    async def body(self) -> bytes:
        """Returns the next part of the body."""
        return bytes((await self._sent.get())["body"])

    async def message(self) -> Any:
        data = await self.body()
        assert data.startswith(b"data: ")
        assert data.endswith(b"\n\n")
        return orjson.loads(data[6:])

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])


async def status_of(server: WatchServer, path: str, headers: Mapping[str, str] | None = None) -> tuple[int, bytes]:
    asked = Asked(server, path, headers)
    status, _ = await asked.start()
    body = await asked.body()
    await asked.close()
    return status, body


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A directory with a run, and a comparison of two runs."""
    for name in ("a", "compare/mirrored", "compare/<b>x"):
        write(tmp_path / "runs" / name, started(), begun(0), *steps(0, range(10)))
    write(tmp_path / "runs" / "a", RunEnded(LAUNCHER, 9.0, "ok"))
    (tmp_path / "runs" / "empty").mkdir()
    return tmp_path / "runs"


def test_runs_are_found_below_directories(runs: Path, tmp_path: Path) -> None:
    assert set(RunWatcher([runs]).found) == {"runs/a", "runs/compare/mirrored", "runs/compare/<b>x"}
    assert set(RunWatcher([runs / "a"]).found) == {"a"}
    assert set(RunWatcher([runs / "a", runs / "compare"]).found) == {"a", "compare/mirrored", "compare/<b>x"}
    row = RunWatcher([runs]).rows["runs/a"]
    assert (row["strategy"], row["status"], row["step"], row["workers"]) == ("mirrored", "ok", 10, 2)
    for nothing in (runs / "empty", tmp_path / "gone"):
        with pytest.raises(UsageError, match=r"holds no run.*or --wait for a run that has not begun"):
            RunWatcher([nothing])
    assert RunWatcher([tmp_path / "gone"], expected=True).found == {"gone": tmp_path / "gone"}


def test_names_that_are_not_utf_8_are_told_apart(tmp_path: Path) -> None:
    for name in (b"\xfe", b"\xff"):
        write(tmp_path / "runs" / os.fsdecode(name), started())
    found = list(RunWatcher([tmp_path / "runs"]).found)
    assert sorted(found) == ["runs/\\udcfe", "runs/\\udcff"]
    # A page is told of them in JSON.
    orjson.dumps(found)


def test_of_too_many_runs_the_newest_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.watch.runs._MOST_RUNS", 3)
    for number in range(5):
        write(tmp_path / f"run-{number}", started())
        os.utime(tmp_path / f"run-{number}" / "events", (number, number))
    found = RunWatcher([tmp_path]).found
    assert [path.name for path in found.values()] == ["run-4", "run-3", "run-2"]


def test_each_run_is_found_once_however_many_links_lead_round(runs: Path) -> None:
    """Two levels of a hundred links that lead back would be ten thousand directories every two seconds."""
    for number in range(100):
        (runs / f"round-{number}").symlink_to(runs)
        (runs / "compare" / f"a-{number}").symlink_to(runs / "a")
    seen: list[Path] = []
    look = glance._is_run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(glance, "_is_run", lambda path: seen.append(path) or look(path))
        found = RunWatcher([runs]).found
    assert sorted(path.resolve() for path in found.values()) == sorted(
        runs / name for name in ("a", "compare/mirrored", "compare/<b>x")
    )
    assert len(seen) < 50


def test_pipes_and_devices_in_a_run_are_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "a" / "events").mkdir(parents=True)
    os.mkfifo(tmp_path / "a" / "events" / "launcher.jsonl")
    (tmp_path / "a" / "events" / "rank-0.jsonl").symlink_to("/dev/zero")

    async def check() -> None:
        watcher = RunWatcher([tmp_path])
        assert watcher.rows[f"{tmp_path.name}/a"]["status"] == "no run yet"
        async with watcher.looking_at([f"{tmp_path.name}/a"]) as found:
            assert found[f"{tmp_path.name}/a"].poll().events == ()

    asyncio.run(check())


def test_the_page_and_its_files_name_no_other_server(runs: Path) -> None:
    async def check() -> None:
        server = WatchServer(RunWatcher([runs]), Access("t" * 20))
        for path in STATIC:
            asked = Asked(server, path)
            status, headers = await asked.start()
            body = (await asked.body()).decode()
            await asked.close()
            assert status == 200, path
            assert "default-src 'none'" in headers["content-security-policy"]
            assert "unsafe" not in headers["content-security-policy"]
            assert headers["x-content-type-options"] == "nosniff"
            assert "://" not in body.replace("http://www.w3.org/2000/svg", ""), path
            assert "innerHTML" not in body
            assert "insertAdjacentHTML" not in body
        assert (await status_of(server, "/secret", {"authorization": f"Bearer {'t' * 20}"}))[0] == 404

    asyncio.run(check())


def test_who_may_look(runs: Path) -> None:
    async def check() -> None:
        server = WatchServer(RunWatcher([runs]), Access("t" * 20))
        assert (await status_of(server, "/stream"))[0] == 401
        assert (await status_of(server, "/stream", {"authorization": "Bearer é"}))[0] == 401
        assert (await status_of(server, "/stream", {"authorization": f"Bearer {'t' * 20}"}))[0] == 200
        assert (await status_of(server, "/", {"host": "evil.example"}))[0] == 403
        assert (await status_of(server, "/", {"host": "127.0.0.1:80"}))[0] == 200
        anywhere = WatchServer(RunWatcher([runs]), Access(any_host=True))
        assert (await status_of(anywhere, "/", {"host": "evil.example"}))[0] == 200
        status, body = await status_of(anywhere, "/stream?run=%3Cscript%3E")
        assert status == 404
        assert orjson.loads(body) == {"error": "there is no run '<script>'"}

    asyncio.run(check())


def test_a_stream_tells_all_and_then_what_has_changed(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(application, "_PAUSE_S", 0.0)

    async def check() -> None:
        watcher = RunWatcher([runs])
        following = asyncio.create_task(watcher.follow())
        asked = Asked(WatchServer(watcher, Access()), "/stream?run=runs/compare/mirrored&run=runs/a")
        status, headers = await asked.start()
        assert (status, headers["content-type"].partition(";")[0]) == (200, "text/event-stream")
        first = await asked.message()
        assert set(first["order"]) == set(watcher.found)
        losses: dict[str, Any] = {}
        while set(losses) != {"runs/a", "runs/compare/mirrored"}:
            message = await asked.message()
            losses |= {name: each["loss"] for name, each in message["shown"].items() if "loss" in each}
            if "detail" in message:
                assert message["detail"]["name"] == "runs/compare/mirrored"
        assert losses["runs/a"]["examples"][-1] == 80
        write(runs / "compare" / "mirrored", *steps(0, range(10, 12), 2.0))
        message = {"shown": {}}
        while "loss" not in message["shown"].get("runs/compare/mirrored", {}):
            message = await asked.message()
        assert list(message["shown"]) == ["runs/compare/mirrored"]
        assert message["shown"]["runs/compare/mirrored"]["loss"]["first"] == 10
        assert message["detail"]["run"]["step"] == 12
        assert message["rows"]["runs/compare/mirrored"]["step"] == 12
        await watcher.close()
        parts = [await asked.body() for _ in range(2)]
        while not parts[-1].startswith(b"event: end"):
            parts.append(await asked.body())
        following.cancel()
        await asked.close()

    asyncio.run(check())


def test_too_many_pages_are_refused(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(application, "_STREAMS", 1)

    async def check() -> None:
        server = WatchServer(RunWatcher([runs]), Access())
        asked = Asked(server, "/stream")
        await asked.start()
        await asked.message()
        assert (await status_of(server, "/stream"))[0] == 503
        await asked.close()
        assert (await status_of(server, "/stream"))[0] == 200

    asyncio.run(check())


def test_runs_that_nobody_looks_at_are_given_up(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.watch.runs._KEPT", 1)

    async def check() -> None:
        watcher = RunWatcher([runs])
        kept = []
        for name in ("runs/a", "runs/compare/mirrored"):
            async with watcher.looking_at([name]) as found:
                kept.append(found[name])
        async with watcher.looking_at(["runs/compare/mirrored"]) as found:
            assert found["runs/compare/mirrored"] is kept[1]
        async with watcher.looking_at(["runs/a"]) as found:
            assert found["runs/a"] is not kept[0]

    asyncio.run(check())
