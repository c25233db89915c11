"""Under overload refusals are spaced out; predictions and health go on, and a defect is told in the usual form."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from headrace.serving.application import Refusals
from headrace.serving.catalog import LoadedVersion
from headrace.serving.protocols.http import BodyBudget, read_body
from headrace.serving.settings import RequestError
from serving.folders import Client, listening, scaled, serving


def test_refusals_leave_at_a_bounded_rate_and_none_is_held_longer_than_it_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held: list[float] = []

    async def hold(seconds: float) -> None:
        held.append(seconds)

    async def talk() -> None:
        refusals = Refusals(a_second=100, at_once=5, most_s=0.3)
        loop = asyncio.get_running_loop()
        with monkeypatch.context() as patch:
            patch.setattr(asyncio, "sleep", hold)
            patch.setattr(loop, "time", lambda: 50.0)
            for _ in range(60):
                await refusals.turn()
            patch.setattr(loop, "time", lambda: 51.0)
            await refusals.turn()

    asyncio.run(talk())
    # Five leave together, the next ones 10 ms apart, and nobody waits longer than 0.3 s; after a pause none waits.
    assert held == pytest.approx([*(0.01 * (n + 1) for n in range(30)), *[0.3] * 25])


def test_clients_that_ask_again_at_once_leave_health_and_others_their_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is held up, so that the queue stays full: of 100 clients that repeat, few refusals a second leave."""
    gate = threading.Event()

    async def talk() -> None:
        async with serving(scaled(tmp_path / "a", 2.0), max_queue=2, max_batch=1) as client:
            version = client.server.catalog.models["m"].newest()
            monkeypatch.setattr(version._batcher, "_compute", lambda inputs: gate.wait(30) and [inputs["x"] * 2])
            waiting = [asyncio.create_task(client.infer([[1, 2, 3]])) for _ in range(4)]
            await asyncio.sleep(0.05)
            refused: list[Any] = []

            async def repeat(client: Client) -> None:
                while True:
                    refused.append(await client.infer([[1, 2, 3]]))

            loop = asyncio.get_running_loop()
            repeating = [asyncio.create_task(repeat(client)) for _ in range(200)]
            began = loop.time()
            while loop.time() - began < 0.5:
                assert (await client.ask("/v2/health/live")).status == 200
                await asyncio.sleep(0.01)
            took = loop.time() - began
            for each in repeating:
                each.cancel()
            assert {each.status for each in refused} == {429}
            assert all(int(each.headers["retry-after"]) >= 1 for each in refused)
            assert 64 < len(refused) <= 64 + 500 * took + 1
            gate.set()
            assert [each.status for each in await asyncio.gather(*waiting)] == [200] * 4

    asyncio.run(talk())


def test_a_defect_is_told_as_json_and_its_traceback_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(*_: Any) -> None:
        raise ZeroDivisionError("a secret of the server")

    monkeypatch.setattr(LoadedVersion, "predict", broken)
    with listening(scaled(tmp_path / "a", 2.0)) as address, closing(http.client.HTTPConnection(address)) as connection:
        connection.request("POST", "/v1/models/m:predict", json.dumps({"instances": [[1, 2, 3]]}))
        reply = connection.getresponse()
        assert reply.status == 500
        assert json.load(reply) == {"error": "internal error; the log of the server has it"}
    assert "a secret of the server" in caplog.text


def test_a_client_that_sends_too_much_reads_the_answer(tmp_path: Path) -> None:
    """The connection is not reset while it sends: 3 MB are more than the buffers of a socket hold."""
    folder = scaled(tmp_path / "a", 2.0)
    with (
        listening(folder, max_body_bytes=1_000_000) as address,
        closing(http.client.HTTPConnection(address, timeout=30)) as connection,
    ):
        for content in (b"x" * 3_000_000, (b"x" * 100_000 for _ in range(30))):
            connection.request("POST", "/v2/models/m/infer", content, encode_chunked=True)
            reply = connection.getresponse()
            assert (reply.status, json.load(reply)) == (413, {"error": "a request has at most 1,000,000 bytes"})
            connection.close()


def test_bodies_of_all_requests_together_have_a_limit() -> None:
    async def talk() -> None:
        budget = BodyBudget(most_one=100, most_all=150)
        scope: dict[str, Any] = {"headers": []}

        def sender(*parts: bytes, ends: bool = True) -> Any:
            messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
            messages[-1]["more_body"] = not ends

            async def receive() -> Any:
                return messages.pop(0) if messages else await asyncio.Event().wait()

            return receive

        unfinished = asyncio.create_task(read_body(scope, sender(b"x" * 60, b"x" * 30, ends=False), budget))
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="requests of too many bytes wait already") as refused:
            await read_body(scope, sender(b"y" * 50, b"y" * 11), budget)
        assert refused.value.status == 429
        assert await read_body(scope, sender(b"y" * 50, b"y" * 10), budget) == b"y" * 60
        budget.give_back(60)
        unfinished.cancel()
        await asyncio.wait([unfinished])
        # What a broken off request held is free again.
        assert len(await read_body(scope, sender(b"y" * 100), budget)) == 100

    asyncio.run(talk())
