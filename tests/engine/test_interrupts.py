"""Ctrl-C: the run so far, with every event; at once, if pressed again."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest
import torch

import headrace as hr
from engine.conftest import until
from engine.victims import EXAMPLES, INPUTS, TARGETS, long_job, make_job
from headrace.engine.base import Engine, orderly_interrupts
from headrace.engine.local.engine import LocalEngine
from headrace.shared_memory.control_page import ControlPage
from headrace.spec.events import Event

ENGINES = ["processes", "threads"]


@pytest.fixture(params=ENGINES)
def any_engine(request: pytest.FixtureRequest, engine: LocalEngine) -> Engine:
    return engine if request.param == "processes" else hr.ThreadEngine()


def press(times: int, after: int = 3) -> tuple[list[Event], Callable[[Event], None]]:
    """Returns what was seen, and a callback that presses Ctrl-C at its `after`-th step."""
    seen: list[Event] = []

    def on_event(event: Event) -> None:
        seen.append(event)
        if sum(each.kind == "stepped" for each in seen) == after and event.kind == "stepped":
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)

    return seen, on_event


def terminate_a_child() -> None:
    """Forks a child, as user code may, and ends it as `multiprocessing.Process.terminate` does."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write_end, b"x")
        time.sleep(10)
        os._exit(0)
    os.read(read_end, 1)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    os.close(read_end)
    os.close(write_end)


def terminating(worker: hr.Worker) -> None:
    for batch in worker.batches():
        if worker.round == 2:
            terminate_a_child()
        worker.step(batch)


@pytest.mark.slow
@pytest.mark.parametrize("forks", ["a worker", "the launcher"])
def test_a_child_that_user_code_terminates_ends_alone(engine: LocalEngine, forks: str) -> None:
    seen, job = [], make_job()
    if forks == "a worker":
        run = hr.launch(terminating, job, hr.Mirrored(2), engine=engine)
    else:

        def on_event(event: Event) -> None:
            if event.kind == "stepped" and not seen:
                seen.append(event)
                terminate_a_child()

        run = hr.fit(job, hr.Mirrored(2), engine=engine, on_event=on_event)
        assert seen
    assert run.status == "ok"


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [hr.OneDevice(), hr.Mirrored(2), hr.CentralStorage(2)], ids=lambda s: s.name)
def test_one_ends_the_run_in_order(any_engine: Engine, strategy: hr.Strategy) -> None:
    seen, on_event = press(1)
    run = hr.fit(long_job(), strategy, engine=any_engine, on_event=on_event)
    assert run.interrupted
    assert run.status == "interrupted"
    assert torch.nn.functional.mse_loss(run.model(INPUTS), TARGETS) < torch.nn.functional.mse_loss(
        torch.zeros(EXAMPLES, 1), TARGETS
    )
    steps = {event.rank: event.steps for event in run.events if event.kind == "worker_ended"}  # type: ignore[attr-defined]
    assert len(steps) == run.plan.workers
    assert len(set(steps.values())) == 1, "all in the same round"
    assert seen[-1].kind == "run_ended"
    for rank in range(-1, run.plan.workers):
        assert [each for each in seen if each.rank == rank] == [each for each in run.events if each.rank == rank]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.slow
def test_two_end_it_at_once(any_engine: Engine) -> None:
    _, on_event = press(2)
    with pytest.raises(KeyboardInterrupt):
        hr.fit(long_job(), hr.Mirrored(2), engine=any_engine, on_event=on_event)
    assert until(lambda: not any(each.name.startswith("rank-") for each in threading.enumerate()), 30)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert hr.fit(make_job(), hr.Mirrored(2), engine=any_engine).status == "ok"


@pytest.mark.slow
def test_a_callback_that_raises_ends_the_run(any_engine: Engine) -> None:
    def on_event(event: Event) -> None:
        if event.kind == "stepped":
            raise ZeroDivisionError("in the callback")

    with pytest.raises(ZeroDivisionError, match="in the callback"):
        hr.fit(long_job(), hr.Mirrored(2), engine=any_engine, on_event=on_event)
    assert until(lambda: not any(each.name.startswith("rank-") for each in threading.enumerate()), 30)
    assert hr.fit(make_job(), hr.Mirrored(2), engine=any_engine).status == "ok"


@pytest.mark.slow
def test_from_a_thread_other_than_main(any_engine: Engine) -> None:
    runs = []
    thread = threading.Thread(target=lambda: runs.append(hr.fit(make_job(), hr.Mirrored(2), engine=any_engine)))
    thread.start()
    thread.join()
    assert [run.status for run in runs] == ["ok"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_users_own_handler_of_a_signal_stays(number: signal.Signals) -> None:
    page = ControlPage.create(1)
    came: list[int] = []
    before = signal.signal(number, lambda number, _: came.append(number))
    try:
        with orderly_interrupts(page) as interrupts:
            os.kill(os.getpid(), number)
    finally:
        signal.signal(number, before)
    assert (came, page.stop, interrupts.terminated) == ([number], 0, False)
    page.segment.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_handler_that_a_run_replaces_is_put_back(number: signal.Signals) -> None:
    page = ControlPage.create(1)
    default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    before = signal.signal(number, default)
    try:
        with orderly_interrupts(page):
            os.kill(os.getpid(), number)
        assert signal.getsignal(number) == default
    finally:
        signal.signal(number, before)
    assert page.stop == 1
    page.segment.close()
