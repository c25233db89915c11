"""What a lost worker had begun leaves no trace in the others, and who takes its place gets all of their state."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace as hr
from engine.conftest import below, fork_servers, until
from engine.counting import Counter, counting_job
from engine.elastic_loops import ROUND, job, lose_rank_1
from engine.test_elastic import Hand, check_counts
from headrace.engine.local.engine import LocalEngine
from headrace.errors import InfeasiblePlan, UsageError
from headrace.spec.events import Event, Notice, Stepped, WorkerStarted
from headrace.strategies import Strategy

pytestmark = pytest.mark.slow

PERIOD, SYNCED = 5, 5
"""Of workers that average, and their last synchronization before the round in which one is lost."""
assert SYNCED < ROUND < SYNCED + PERIOD


class Counting(torch.optim.Adam):
    """Counts its steps in an attribute and in its groups."""

    counted = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.counted += 1
        for group in self.param_groups:
            group["counted"] = group.get("counted", 0) + 1
            group["lr"] = 0.01 / (1 + 0.1 * self.counted + 0.1 * group["counted"])
        super().step(closure)


class Halves(nn.Module):
    """Draws random numbers and has running statistics in both sets."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3))
        self.last = nn.Sequential(nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.last(self.first(inputs))
        return output


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


DECAYS = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=3)
EVALUATED = (torch.ones(6, 4), torch.ones(6, 1))


def in_turns(rounds: int = 16, **changes: Any) -> hr.Job:
    """A job with two sets of parameters that take turns."""
    given: dict[str, Any] = {
        "model": Halves,
        "task": None,
        "optimizer": {
            "first": hr.ParameterSet(functools.partial(torch.optim.Adam, lr=0.01), rounds=2, schedule=DECAYS),
            "last": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        },
        "loss": {"first": loss, "last": loss},
        "options": hr.Options(ema_decay=0.9),
        **changes,
    }
    return job(rounds, **given)


def counted() -> hr.Job:
    options = hr.Options(ema_decay=0.9, schedule=DECAYS)
    return job(optimizer=functools.partial(Counting, lr=0.01), options=options, eval_data=EVALUATED)


def averaged() -> hr.Job:
    return job(options=hr.Options(schedule=DECAYS), eval_data=EVALUATED)


averaging = functools.partial(hr.ParameterAveraging, period=PERIOD)
KINDS: dict[str, tuple[Callable[[], hr.Job], Callable[..., Strategy]]] = {
    "mirrored": (job, hr.Mirrored),
    "mirrored in turns": (in_turns, hr.Mirrored),
    "storage": (counted, hr.CentralStorage),
    "storage in turns": (in_turns, hr.CentralStorage),
    "mean": (averaged, functools.partial(averaging, average_optimizer_state=True)),
    "nesterov": (averaged, functools.partial(averaging, outer="nesterov")),
    "elastic": (averaged, functools.partial(averaging, outer="elastic")),
}
FORWARD, SUM, UPDATE, HALF = "in forward", "while it sums", "in its update", "after half of its update"
# A mirror's update is done where it was lost; a part of the one copy is not.
LOSSES = {
    **{(kind, how): ROUND for kind in ("mirrored", "mirrored in turns") for how in (FORWARD, SUM)},
    **dict.fromkeys([("mirrored", UPDATE), ("mirrored in turns", UPDATE)], ROUND + 1),
    **dict.fromkeys([("storage", how) for how in (FORWARD, SUM, UPDATE, HALF)], ROUND),
    **dict.fromkeys([("storage in turns", how) for how in (FORWARD, SUM, UPDATE)], ROUND),
    **dict.fromkeys([(kind, how) for kind in ("mean", "nesterov", "elastic") for how in (FORWARD, HALF)], SYNCED),
}
"""The first round that begins without the lost worker."""


def trained(engine: LocalEngine, kind: str, how: str, first_without: int) -> dict[str, Tensor]:
    make_job, strategy = KINDS[kind]
    loop = functools.partial(lose_rank_1, how, first_without)
    run = hr.launch(loop, make_job(), strategy(3, min_workers=2), engine=engine)
    said = [event.text for event in run.events if isinstance(event, Notice)]
    assert f"round {first_without} begins with 2 workers: without rank 1" in said
    return dict(run.model.state_dict())


@pytest.fixture(scope="module")
def left(engine: LocalEngine) -> Callable[[str, int], dict[str, Tensor]]:
    """What the others end with where the worker has left on purpose."""
    return functools.cache(lambda kind, first_without: trained(engine, kind, "on purpose", first_without))


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        pytest.param(*case, marks=pytest.mark.full if first_without == SYNCED and case[1] == HALF else ())
        for case, first_without in LOSSES.items()
    ],
)
def test_the_others_end_as_if_the_lost_worker_had_left_on_purpose(
    engine: LocalEngine, left: Callable[[str, int], dict[str, Tensor]], kind: str, how: str
) -> None:
    first_without = LOSSES[kind, how]
    wanted, found = left(kind, first_without), trained(engine, kind, how, first_without)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    "strategy",
    [
        hr.CentralStorage(3, min_workers=1, max_workers=3),
        *(hr.ParameterAveraging(3, period=period, min_workers=1, max_workers=3) for period in (1, 4)),
    ],
    ids=["storage", "averaging", "averaging of 4"],
)
def test_two_of_three_are_lost_at_once_and_replaced_and_every_epoch_is_complete(
    engine: LocalEngine, strategy: Strategy, tmp_path: Path
) -> None:
    done, saves = tmp_path / "done", hr.Checkpoints(every_steps=7, every_s=None)
    hand = Hand({30: (0, signal.SIGKILL), 31: (1, signal.SIGKILL), 200: (2, 0)}, done=done)
    counting = counting_job(40, model=functools.partial(Counter, done))
    run = hr.fit(counting, strategy, engine=engine, on_event=hand, run_dir=tmp_path / "run", checkpoints=saves)
    check_counts(run, 40)
    assert sorted(lost.lost for lost in hand.lost) == [0, 1]
    assert sum(isinstance(event, WorkerStarted) for event in run.events) == 5, "both have come back"
    assert [below(server) for server in fork_servers()] == [[]] * len(fork_servers())
    if isinstance(strategy, hr.CentralStorage):
        more = hr.fit(
            counting_job(42), hr.Mirrored(2), engine=engine, run_dir=tmp_path / "more", resume=tmp_path / "run"
        )
        check_counts(more, 42)


class Plain(nn.Module):
    """Draws nothing, so that N workers are one. From the 100th on, a batch takes half a second until a file exists."""

    def __init__(self, awaited: Path) -> None:
        super().__init__()
        self.first, self.last = nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Linear(8, 1)
        self._awaited, self._calls = awaited, 0

    def forward(self, inputs: Tensor) -> Tensor:
        self._calls += 1
        if self._calls > 100:
            until(self._awaited.exists, 0.5)
        output: Tensor = self.last(self.first(inputs))
        return output


class Returned:
    """Kills rank 1, and makes a file when the process in its place has stepped."""

    def __init__(self, done: Path) -> None:
        self._hand, self._done = Hand({30: (1, signal.SIGKILL)}), done
        self._starts = 0

    def __call__(self, event: Event) -> None:
        self._hand(event)
        self._starts += isinstance(event, WorkerStarted) and event.rank == 1
        if self._starts == 2 and isinstance(event, Stepped) and event.rank == 1:
            self._done.touch()


@pytest.mark.parametrize("kind", [hr.Mirrored, hr.CentralStorage])
def test_a_worker_that_comes_back_takes_the_state_of_all_sets(
    engine: LocalEngine, kind: Callable[..., Strategy], tmp_path: Path
) -> None:
    done = tmp_path / "done"
    wanted = in_turns(300, model=functools.partial(Plain, done), options=hr.Options())
    run = hr.fit(wanted, kind(2, min_workers=1, max_workers=2), engine=engine, on_event=Returned(done))
    assert done.exists()
    ranks = {event.rank for event in run.events if isinstance(event, Stepped) and event.step == 299}
    assert ranks == {0, 1}
    alone = hr.fit(wanted, engine=hr.ThreadEngine()).model.state_dict()
    for name, each in run.model.state_dict().items():
        torch.testing.assert_close(each, alone[name], rtol=1e-3, atol=1e-4)


def test_an_optimizer_that_needs_whole_parameters_is_refused_where_each_worker_updates_a_part(
    engine: LocalEngine,
) -> None:
    adafactor = functools.partial(torch.optim.Adafactor, lr=0.01)
    with pytest.raises(InfeasiblePlan, match="the job's optimizer needs whole parameters"):
        hr.fit(job(optimizer=adafactor), hr.CentralStorage(2, min_workers=1), engine=engine)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: hr.CentralStorage(min_workers=1, balance="speed"), "lets them come and go; give one of them"),
        (lambda: hr.LocalSGD(2, min_workers=3), "min_workers=3 is more than workers=2"),
        (lambda: hr.LocalSGD(2, min_workers=1, via="server"), "leave min_workers out, or use via='all_reduce'"),
        (lambda: hr.Hybrid(hr.LocalSGD(2, min_workers=1), hr.Pipeline(stages=2)), "the ranks of a replica cannot"),
        (lambda: hr.Hybrid(hr.Mirrored(2, min_workers=1), hr.Pipeline(stages=2)), "the ranks of a replica cannot"),
    ],
)
def test_what_does_not_fit_workers_that_come_and_go_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()
