"""Requests of one model that arrive at about the same time are computed together."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from headrace.export.tensors import Array
from headrace.serving.settings import RequestError, ServeSettings

Compute = Callable[[Mapping[str, Array]], list[Array]]


@dataclass(frozen=True, slots=True)
class _Waiting:
    inputs: Mapping[str, Array]
    rows: int
    form: tuple[tuple[int, ...], ...]
    answer: asyncio.Future[list[Array]]
    came: float


class Batcher:
    """Collects requests until there are as many examples as may be expected, or the first has waited `max_wait_ms`.

    One thread computes. While it does, requests gather, and are computed next in any case. Where it has nothing to do,
    the first request waits for as many others as the last batch had, and no longer than that took to compute: clients
    that were answered together come again together. Requests that come one by one do not wait. A second batch waits for
    the thread as soon as it is full, so that the thread does not wait for the event loop.

    Args:
        compute: returns outputs for inputs, in one thread.
        together: whether examples of several requests may be computed together.
        computed: is told of each batch, in that thread: the number of examples, and seconds.
    """

    def __init__(
        self, compute: Compute, settings: ServeSettings, together: bool, computed: Callable[[int, float], None]
    ) -> None:
        self._compute = compute
        self._settings = settings
        self._most_rows = settings.max_batch if together else 1
        self._together = together
        self._wait_s = settings.max_wait_ms / 1000 if together else 0.0
        self._computed = computed
        self._queue: deque[_Waiting] = deque()
        self._rows = 0
        self._expected = self._most_rows
        self._computing: dict[asyncio.Future[list[list[Array]]], list[_Waiting]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="headrace-serve")
        self._loop = asyncio.get_running_loop()
        self._row_s = 0.0
        self._batch_s = math.inf

    def __len__(self) -> int:
        """The number of requests that wait."""
        return len(self._queue)

    def submit(self, inputs: Mapping[str, Array], rows: int) -> asyncio.Future[list[Array]]:
        """Returns the future outputs of a request.

        Raises:
            RequestError: 429, as many requests as may wait are waiting.
        """
        self.require_room()
        form = tuple(array.shape[1:] for array in inputs.values())
        waiting = _Waiting(inputs, rows, form, self._loop.create_future(), self._loop.time())
        self._queue.append(waiting)
        self._rows += rows
        self._start()
        return waiting.answer

    def require_room(self) -> None:
        """Raises RequestError 429 where as many requests as may wait are waiting; it says when to come again."""
        if len(self._queue) < self._settings.max_queue:
            return
        seconds = max(1, math.ceil(self._rows * self._row_s))
        raise RequestError(
            429, f"{len(self._queue)} requests wait already; come again in {seconds} s", {"Retry-After": str(seconds)}
        )

    async def close(self) -> None:
        """Answers what waits and is wanted, and ends the thread.

        Where all requests are cancelled, no batch begins; the one that is computed cannot be broken off.
        """
        while wanted := self._wanted():
            await asyncio.wait(wanted)
        self._queue.clear()
        self._rows = 0
        self._thread.shutdown(wait=False, cancel_futures=True)
        while self._computing:
            await asyncio.wait(list(self._computing))

    def _wanted(self) -> list[asyncio.Future[list[Array]]]:
        every = itertools.chain(self._queue, *self._computing.values())
        return [request.answer for request in every if not request.answer.done()]

    def _start(self) -> None:
        """Gives the thread what is due."""
        while self._queue and len(self._computing) < 2:
            if self._rows < self._most_rows:
                if self._computing:
                    return
                rest = self._queue[0].came + min(self._wait_s, self._batch_s) - self._loop.time()
                if rest > 0 and self._rows < self._expected:
                    if self._timer is None:
                        self._timer = self._loop.call_later(rest, self._waited)
                    return
            if batch := self._take():
                self._give(batch)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give(self, batch: list[_Waiting]) -> None:
        computing = self._loop.run_in_executor(self._thread, self._run, batch)
        self._computing[computing] = batch
        computing.add_done_callback(self._done)

    def _waited(self) -> None:
        self._timer = None
        self._start()

    def _take(self) -> list[_Waiting]:
        """Removes the first request, and those that fit into its batch, from the queue; drops cancelled ones."""
        batch: list[_Waiting] = []
        passed: list[_Waiting] = []
        rows = 0
        while self._queue and (not batch or (self._together and rows < self._most_rows)):
            request = self._queue.popleft()
            if request.answer.done():
                self._rows -= request.rows
            elif not batch or (request.form == batch[0].form and rows + request.rows <= self._most_rows):
                batch.append(request)
                rows += request.rows
            else:
                passed.append(request)
        self._queue.extendleft(reversed(passed))
        self._rows -= rows
        if batch:
            self._expected = min(rows, self._most_rows)
        return batch

    def _run(self, batch: Sequence[_Waiting]) -> list[list[Array]]:
        """Computes a batch; returns the outputs of each request."""
        began = time.perf_counter()
        rows = sum(request.rows for request in batch)
        if len(batch) == 1:
            results = [self._slices(batch[0])]
        else:
            names = batch[0].inputs
            outputs = self._compute({name: np.concatenate([one.inputs[name] for one in batch]) for name in names})
            ends = itertools.accumulate(one.rows for one in batch)
            results = [
                [output[end - one.rows : end] for output in outputs] for one, end in zip(batch, ends, strict=True)
            ]
        seconds = time.perf_counter() - began
        self._row_s, self._batch_s = seconds / rows, seconds
        self._computed(rows, seconds)
        return results

    def _slices(self, one: _Waiting) -> list[Array]:
        """Computes one request, in slices where it has more examples than a batch: memory stays bounded."""
        most = self._settings.max_batch
        if one.rows <= most or not self._together:
            return self._compute(one.inputs)
        # Fewer where it is cancelled meanwhile: the rest would not be sent.
        parts = [
            self._compute({name: array[start : start + most] for name, array in one.inputs.items()})
            for start in range(0, one.rows, most)
            if not one.answer.done()
        ]
        return [np.concatenate(outputs) for outputs in zip(*parts, strict=True)]

    def _done(self, computed: asyncio.Future[list[list[Array]]]) -> None:
        batch = self._computing.pop(computed)
        if computed.cancelled():
            return  # by `close`, which left no queue
        error = computed.exception()
        if error is None:
            for request, outputs in zip(batch, computed.result(), strict=True):
                if not request.answer.done():
                    request.answer.set_result(outputs)
        elif len(batch) == 1:
            if not batch[0].answer.done():
                batch[0].answer.set_exception(error)
        else:
            self._alone(batch)
        self._start()

    def _alone(self, batch: Sequence[_Waiting]) -> None:
        """Computes the requests of a batch that failed one by one: only the one that is wrong fails."""
        for request in batch:
            if not request.answer.done():
                self._give([request])
