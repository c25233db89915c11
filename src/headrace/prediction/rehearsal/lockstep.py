"""Workers that exchange among themselves, as threads that take turns: what each runs is what a real worker runs.

Their numbers do not depend on how long anything takes. So they train first, and get their virtual times afterwards.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from msgspec.structs import replace
from torch import Tensor

from headrace.collectives.threads import ThreadCollective, ThreadGroup, Turns
from headrace.errors import HeadraceError, PeerLost, WorkerFailed
from headrace.machine.resources import peak_resident_bytes
from headrace.prediction.simulation.timeline import Timeline
from headrace.prediction.virtual_events import VirtualEvents
from headrace.report.model.events import read_log
from headrace.shared_memory.control_page import ControlPage
from headrace.shared_memory.ends import FinishedRanks
from headrace.spec.events import (
    Evaluated,
    Event,
    InputStats,
    ParametersAveraged,
    Stepped,
    WorkerEnded,
    WorkerStarted,
)
from headrace.worker.main import work
from headrace.worker.run_spec import RunSpec


@dataclass(frozen=True)
class VirtualStep:
    """When a step ends, and what its parts take, seconds."""

    ended_s: float
    compute_s: float
    exchange_s: float
    update_s: float


Times = Mapping[tuple[int, int], VirtualStep]
"""Of a worker's step."""


def times_of(timeline: Timeline) -> Times:
    """Returns the times of a simulated run."""
    return {(worker, step): VirtualStep(*times) for worker, step, *times in timeline.rows()}


def times_recorded(steps: Sequence[Sequence[Stepped]]) -> Times:
    """Returns the times of a real run."""
    return {
        (each.rank, each.step): VirtualStep(each.time_s, each.compute_s, each.exchange_s, each.update_s)
        for own in steps
        for each in own
    }


def train_in_turns(run: RunSpec) -> None:
    """Runs all workers to the end, one at a time; their events and the model are in the run's directory.

    Raises:
        WorkerFailed: a worker raised.
        NonFiniteLoss, NonFiniteGradient, DataError: as of a real run.
    """
    world = run.plan.workers
    states: dict[int, Tensor] = {}

    def swap(stops: int, goes_on: int) -> None:
        """Gives each worker its own random numbers."""
        states[stops] = torch.get_rng_state()
        if goes_on in states:
            torch.set_rng_state(states[goes_on])

    turns = Turns(world, swap)
    page = ControlPage.create(world)
    group = ThreadGroup(world, FinishedRanks([record.heartbeat for record in page.ranks]), turns)
    errors: dict[int, BaseException] = {}

    def body(rank: int) -> None:
        turns.begin(rank)
        try:
            work(run, rank, ThreadCollective(group, rank), page)
        except BaseException as error:  # raised by the caller below
            errors.setdefault(rank, error)
            group.abort(rank)
        finally:
            turns.end()

    threads = [threading.Thread(target=body, args=(rank,), name=f"worker-{rank}", daemon=True) for rank in range(world)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException:
        page.stop = 1
        group.abort(0)
        raise
    finally:
        page.segment.close()
    for rank, error in errors.items():  # the first explains the others
        if isinstance(error, PeerLost):
            continue
        if isinstance(error, HeadraceError):
            raise error
        raise WorkerFailed(rank, run.plan.roles[rank].host, f"{type(error).__name__}: {error}") from error


def rehearse_in_turns(run: RunSpec, events: VirtualEvents, times: Times, evaluation_s: float) -> float:
    """Trains, and adds the workers' events with virtual times; returns when the run ends.

    An evaluation takes `evaluation_s`, and all that follows is so much later.
    """
    train_in_turns(run)
    every = [event for event in read_log(run.run_dir).events if event.rank >= 0]
    evaluated = sorted(event.step for event in every if isinstance(event, Evaluated))
    last = 0.0
    for rank in range(run.plan.workers):
        own = [event for event in every if event.rank == rank]
        for event in _retimed(own, times, evaluated, evaluation_s):
            events.write(event)
            last = max(last, event.time_s)
    events.end(last, peak_resident_bytes())
    return last


def _retimed(own: Sequence[Event], times: Times, evaluated: Sequence[int], evaluation_s: float) -> Iterator[Event]:
    now_s = 0.0
    for event in own:
        if isinstance(event, Stepped):
            # Evaluations before this step.
            later = evaluation_s * sum(step <= event.step for step in evaluated)
            known = times[event.rank, event.step]
            now_s = known.ended_s + later
            yield replace(
                event,
                time_s=now_s,
                wait_s=0.0,
                compute_s=known.compute_s,
                exchange_s=known.exchange_s,
                update_s=known.update_s,
            )
        elif isinstance(event, Evaluated):
            now_s += evaluation_s
            yield replace(event, time_s=now_s, seconds=evaluation_s)
        elif isinstance(event, ParametersAveraged):
            exchange_s = times[event.rank, event.step - 1].exchange_s
            yield replace(event, time_s=now_s, exchange_s=exchange_s)
        elif not isinstance(event, WorkerStarted | WorkerEnded | InputStats):
            # How fast data was read is of this machine.
            yield replace(event, time_s=now_s)
