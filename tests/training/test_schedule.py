"""Learning rates on their way through a run, over the whole optimizer and over one of pieces."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers

from headrace.errors import UsageError
from headrace.spec.options import Options
from headrace.spec.plan import Segment
from headrace.training.optimizer import build, build_over
from headrace.training.update import Schedule
from headrace.trees import plain
from strategies.contract_options import SCHEDULES


def named() -> list[tuple[str, nn.Parameter]]:
    return [(name, nn.Parameter(torch.ones(4))) for name in ("a", "b", "c")]


def grouped(parameters: Any) -> torch.optim.Optimizer:
    """Three groups of one."""
    rates = iter((0.1, 0.2, 0.3))
    groups = [{"params": [pair], "lr": next(rates)} for pair in parameters]
    return torch.optim.SGD(groups, momentum=0.9)


def of(optimizer: torch.optim.Optimizer, key: str = "lr") -> list[float]:
    return [float(group[key]) for group in optimizer.param_groups]


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_an_owner_of_pieces_has_the_rates_of_all_groups(name: str) -> None:
    options = Options(schedule=SCHEDULES[name])
    whole = build(grouped, named())
    owned = [(Segment("c", 0, 2, 0), torch.ones(2)), (Segment("a", 3, 4, 0), torch.ones(1))]
    owner, _ = build_over(grouped, named(), owned)
    ours, theirs = Schedule(options, owner, 1), Schedule(options, whole, 1)
    for round_ in range(8):
        for key in ("lr", "momentum"):
            assert of(owner, key) == of(whole, key)
        ours.advance(round_)
        theirs.advance(round_)
    assert ours.settings() == theirs.settings()


def test_a_rank_that_owns_nothing_follows_too() -> None:
    owner, _ = build_over(grouped, named(), [])
    schedule = Schedule(Options(schedule=SCHEDULES["step"]), owner, 1)
    for round_ in range(4):
        with schedule.warmed(round_):
            owner.step()
        schedule.advance(round_)
    assert of(owner) == [0.025, 0.05, pytest.approx(0.075)]


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_its_state_survives_json_in_the_middle_of_a_run(name: str) -> None:
    options = Options(schedule=SCHEDULES[name], warmup=2)

    def begun(rounds: int) -> tuple[Schedule, torch.optim.Optimizer]:
        optimizer = build(grouped, named())
        schedule = Schedule(options, optimizer, 1)
        for round_ in range(rounds):
            schedule.advance(round_)
        return schedule, optimizer

    for middle in range(1, 9):
        first, reference = begun(middle)
        second, optimizer = begun(0)
        second.load(json.loads(json.dumps(first.settings())))
        for round_ in range(middle, 10):
            assert of(optimizer) == of(reference)
            assert of(optimizer, "momentum") == of(reference, "momentum")
            first.advance(round_)
            second.advance(round_)


def test_epochs_are_counted_in_rounds() -> None:
    optimizer = build(grouped, named())
    schedule = Schedule(Options(schedule=SCHEDULES["exponential"], schedule_every="epoch"), optimizer, 3)
    rates = []
    for round_ in range(7):
        schedule.advance(round_)
        rates.append(round(of(optimizer)[0], 6))
    assert rates == [0.1, 0.1, 0.08, 0.08, 0.08, 0.064, 0.064]


def test_warm_up_is_a_share_of_what_the_schedule_gives() -> None:
    optimizer = build(grouped, named())
    schedule = Schedule(Options(schedule=SCHEDULES["exponential"], warmup=4), optimizer, 1)
    rates = []
    for round_ in range(6):
        with schedule.warmed(round_):
            rates.append(of(optimizer)[0] / (0.1 * 0.8**round_))
        schedule.advance(round_)
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])


def test_a_rate_that_is_a_tensor_stays_one() -> None:
    rate = torch.tensor(0.1)
    optimizer = build(partial(torch.optim.Adam, lr=rate), named())
    schedule = Schedule(Options(schedule=SCHEDULES["exponential"], warmup=2), optimizer, 1)
    with schedule.warmed(0):
        assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.05)
    schedule.advance(0)
    (group,) = json.loads(json.dumps(schedule.settings()))["groups"]
    assert isinstance(optimizer.param_groups[0]["lr"], Tensor)
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.08)
    assert "lr" in group["options"]


def test_going_on_without_an_update_gives_no_warning() -> None:
    optimizer = build(grouped, named())
    schedule = Schedule(Options(schedule=SCHEDULES["step"]), optimizer, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule.advance(0)
        schedule.advance(1)


def test_options_that_a_checkpoint_cannot_hold_are_the_factorys() -> None:
    optimizer = build(grouped, named())
    for group in optimizer.param_groups:
        group["filter"] = len
    schedule = Schedule(Options(), optimizer, 1)
    settings = schedule.settings()
    assert all("filter" not in group["options"] for group in settings["groups"])
    optimizer.param_groups[0]["lr"] = 5.0
    schedule.load(settings)
    assert of(optimizer) == [0.1, 0.2, 0.3]
    assert optimizer.param_groups[0]["filter"] is len


@pytest.mark.parametrize(
    "value", [None, True, 3, 0.1, float("inf"), "a", [1, (2.0, "b")], {1: {"c": []}}, Counter([4, 4])]
)
def test_a_plain_value_comes_back_as_it_was(value: Any) -> None:
    class Kept(schedulers.LambdaLR):
        pass

    def schedule(optimizer: torch.optim.Optimizer) -> schedulers.LRScheduler:
        made = Kept(optimizer, lambda _: 1.0)
        made.kept = value if first else None  # type: ignore[attr-defined]
        return made

    first = True
    optimizer = build(grouped, named())
    settings = json.loads(json.dumps(Schedule(Options(schedule=schedule), optimizer, 1).settings()))
    first = False
    schedule_ = Schedule(Options(schedule=schedule), optimizer, 1)
    schedule_.load(settings)
    kept = schedule_._scheduler.kept  # type: ignore[union-attr]
    assert kept == value
    assert type(kept) is type(value)


def test_what_is_no_plain_value_is_named() -> None:
    with pytest.raises(UsageError, match="the schedule's state holds a function, which a checkpoint cannot keep"):
        plain({"a": [lambda: 0]}, "the schedule's state")


def test_a_schedule_wants_one_value_a_group() -> None:
    with pytest.raises(ValueError, match="Expected 3 lr_lambdas"):
        Schedule(Options(schedule=partial(schedulers.LambdaLR, lr_lambda=[abs])), build(grouped, named()), 1)
