"""Requests are computed together, each gets its own rows, and one that is wrong does not spoil the others."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import numpy as np
import pytest

from headrace.export.tensors import Array
from headrace.serving.batcher import Batcher
from headrace.serving.settings import RequestError, ServeSettings

Talk = Callable[[Batcher], Awaitable[Any]]


class Doubling:
    """Doubles, in `seconds`; it waits while `gate` is closed, and refuses negative numbers."""

    seconds = 0.0

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.began = threading.Event()
        self.sizes: list[int] = []

    def __call__(self, inputs: Mapping[str, Array]) -> list[Array]:
        self.began.set()
        assert self.gate.wait(30)
        time.sleep(self.seconds)
        self.sizes.append(len(inputs["x"]))
        if (inputs["x"] < 0).any():
            raise ValueError("negative")
        return [inputs["x"] * 2]


def rows(*values: float) -> dict[str, Array]:
    return {"x": np.array(values, np.float32)}


def run(doubling: Doubling, talk: Talk, together: bool = True, **settings: Any) -> Any:
    async def whole() -> Any:
        batcher = Batcher(doubling, ServeSettings(**settings), together, lambda rows, seconds: None)
        found = await talk(batcher)
        await batcher.close()
        return found

    return asyncio.run(whole())


def test_those_that_come_together_are_computed_together_in_their_order() -> None:
    doubling = Doubling()

    async def talk(batcher: Batcher) -> list[Any]:
        return await asyncio.gather(*(batcher.submit(rows(n, n + 0.5), 2) for n in range(5)))

    found = run(doubling, talk, max_batch=4, max_wait_ms=50)
    assert [each[0].tolist() for each in found] == [[2 * n, 2 * n + 1] for n in range(5)]
    assert doubling.sizes == [4, 4, 2]


def test_while_one_batch_is_computed_the_next_grows() -> None:
    doubling = Doubling()
    doubling.gate.clear()

    async def talk(batcher: Batcher) -> None:
        answers = [batcher.submit(rows(n), 1) for n in range(7)]
        # The first is computed alone, since nothing waits without a `max_wait_ms`; the last three fill no batch.
        assert len(batcher) == 3
        doubling.gate.set()
        await asyncio.gather(*answers)

    run(doubling, talk, max_batch=3, max_wait_ms=0)
    assert doubling.sizes == [1, 3, 3]


def test_the_first_of_a_batch_waits_no_longer_than_it_may() -> None:
    async def talk(batcher: Batcher) -> float:
        began = asyncio.get_running_loop().time()
        await batcher.submit(rows(1), 1)
        return asyncio.get_running_loop().time() - began

    assert run(Doubling(), talk, max_batch=100, max_wait_ms=60) >= 0.06


def test_requests_that_come_one_by_one_do_not_wait() -> None:
    async def talk(batcher: Batcher) -> list[float]:
        seconds = []
        for n in range(3):
            began = asyncio.get_running_loop().time()
            await batcher.submit(rows(n), 1)
            seconds.append(asyncio.get_running_loop().time() - began)
        return seconds

    first, *others = run(Doubling(), talk, max_batch=100, max_wait_ms=400)
    assert first >= 0.4
    assert max(others) < 0.3


def test_after_a_batch_of_many_the_next_waits_for_as_many() -> None:
    doubling = Doubling()
    doubling.seconds = 0.5

    async def talk(batcher: Batcher) -> None:
        for _ in range(2):
            first = batcher.submit(rows(1), 1)
            await asyncio.sleep(0.02)
            assert not first.done()
            others = [batcher.submit(rows(n), 1) for n in range(3)]
            await asyncio.wait_for(asyncio.gather(first, *others), 5)
            assert doubling.sizes[-1] == 4

    run(doubling, talk, max_batch=4, max_wait_ms=20_000)
    doubling.sizes.clear()
    doubling.seconds = 0.0

    async def fewer(batcher: Batcher) -> None:
        await asyncio.gather(*(batcher.submit(rows(n), 1) for n in range(3)))
        # Three came together: the next three are computed when the third has come, long before the time is over.
        began = asyncio.get_running_loop().time()
        await asyncio.gather(*(batcher.submit(rows(n), 1) for n in range(3)))
        assert asyncio.get_running_loop().time() - began < 0.3

    run(doubling, fewer, max_batch=100, max_wait_ms=400)
    assert doubling.sizes == [3, 3]


def test_none_waits_longer_than_the_last_batch_took() -> None:
    doubling = Doubling()

    async def talk(batcher: Batcher) -> None:
        await asyncio.gather(*(batcher.submit(rows(n), 1) for n in range(4)))
        # Three do not come again.
        await asyncio.wait_for(batcher.submit(rows(9), 1), 5)

    run(doubling, talk, max_batch=4, max_wait_ms=20_000)
    assert doubling.sizes == [4, 1]


def test_other_lengths_are_computed_apart() -> None:
    doubling = Doubling()

    async def talk(batcher: Batcher) -> list[Any]:
        wide = [{"x": np.ones((1, width), np.float32)} for width in (2, 3, 2)]
        return await asyncio.gather(*(batcher.submit(each, 1) for each in wide))

    assert [each[0].shape for each in run(doubling, talk, max_wait_ms=20)] == [(1, 2), (1, 3), (1, 2)]
    assert doubling.sizes == [2, 1]


def test_a_request_of_many_examples_is_computed_in_slices() -> None:
    doubling = Doubling()

    async def talk(batcher: Batcher) -> Any:
        return await batcher.submit(rows(*range(10)), 10)

    assert run(doubling, talk, max_batch=4)[0].tolist() == [2 * n for n in range(10)]
    assert doubling.sizes == [4, 4, 2]


def test_a_model_of_one_size_computes_requests_alone() -> None:
    doubling = Doubling()

    async def talk(batcher: Batcher) -> Any:
        return await asyncio.gather(*(batcher.submit(rows(n, n), 1) for n in range(3)))

    run(doubling, talk, together=False)
    assert doubling.sizes == [2, 2, 2]


def test_only_the_request_that_is_wrong_fails() -> None:
    async def talk(batcher: Batcher) -> list[Any]:
        answers = [batcher.submit(rows(n), 1) for n in (1, -1, 2)]
        return await asyncio.gather(*answers, return_exceptions=True)

    first, wrong, last = run(Doubling(), talk, max_wait_ms=20)
    assert isinstance(wrong, ValueError)
    assert (first[0].item(), last[0].item()) == (2, 4)


def test_a_full_queue_says_when_to_come_again() -> None:
    doubling = Doubling()
    doubling.gate.clear()

    async def talk(batcher: Batcher) -> None:
        answers = [batcher.submit(rows(n), 1) for n in range(4)]
        assert len(batcher) == 2
        with pytest.raises(RequestError, match="2 requests wait already; come again in 1 s") as refused:
            batcher.submit(rows(9), 1)
        assert (refused.value.status, refused.value.headers) == (429, {"Retry-After": "1"})
        doubling.gate.set()
        await asyncio.gather(*answers)
        await batcher.submit(rows(9), 1)

    run(doubling, talk, max_batch=1, max_queue=2, max_wait_ms=0)


def test_close_answers_what_waits() -> None:
    doubling = Doubling()
    doubling.gate.clear()

    async def talk(batcher: Batcher) -> list[Any]:
        answers = [batcher.submit(rows(n), 1) for n in range(5)]
        closing = asyncio.create_task(batcher.close())
        await asyncio.sleep(0)
        assert not closing.done()
        doubling.gate.set()
        await closing
        assert all(each.done() for each in answers)
        return await asyncio.gather(*answers)

    assert [each[0].item() for each in run(doubling, talk, max_batch=2)] == [0, 2, 4, 6, 8]


def test_close_computes_nothing_more_for_requests_that_are_cancelled() -> None:
    doubling = Doubling()
    doubling.gate.clear()

    async def talk(batcher: Batcher) -> None:
        # One is computed, another waits for the thread, the others for their turn.
        for answer in [batcher.submit(rows(n), 1) for n in range(20)]:
            answer.cancel()
        await asyncio.to_thread(doubling.began.wait, 30)
        closing = asyncio.create_task(batcher.close())
        await asyncio.sleep(0)
        doubling.gate.set()
        await asyncio.wait_for(closing, 30)

    run(doubling, talk, max_batch=1)
    assert doubling.sizes == [1]


def test_cancelled_requests_are_left_out_of_batches() -> None:
    doubling = Doubling()
    doubling.gate.clear()

    async def talk(batcher: Batcher) -> list[float]:
        answers = [batcher.submit(rows(n), 1) for n in range(9)]
        cancelled = [answers.pop(place) for place in (8, 6, 4)]
        for answer in cancelled:
            answer.cancel()
        closing = asyncio.create_task(batcher.close())
        await asyncio.sleep(0)
        doubling.gate.set()
        await closing
        return [(await answer)[0].item() for answer in answers]

    # Two batches had been taken when the requests were cancelled.
    assert run(doubling, talk, max_batch=2, max_wait_ms=0) == [0, 2, 4, 6, 10, 14]
    assert sum(doubling.sizes) == 6


def test_a_large_request_that_is_cancelled_is_not_computed_to_its_end() -> None:
    doubling = Doubling()
    doubling.gate.clear()

    async def talk(batcher: Batcher) -> None:
        answer = batcher.submit(rows(*range(10)), 10)
        await asyncio.to_thread(doubling.began.wait, 30)
        answer.cancel()
        doubling.gate.set()

    run(doubling, talk, max_batch=4)
    assert doubling.sizes == [4]
