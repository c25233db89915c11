"""Event files with numbers that no run writes: the report is made, or one line says what is wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import DataError
from headrace.report.model.summary import summarize
from headrace.report.views.page import write_page
from headrace.spec.events import (
    LAUNCHER,
    Event,
    InputStageStats,
    InputStats,
    NonFinite,
    ParametersAveraged,
    PipelineStepTimed,
    RowsMoved,
    RunStarted,
    Saved,
    SharesBalanced,
    StagePass,
)
from headrace.spec.plain import to_plain
from headrace.spec.plan import Plan, Role, StageCost

VALUES = (float("inf"), float("nan"), -1, 0, 10**18, 10**400, None, "", [], {})
PLAN = Plan(
    "pipeline", {}, tuple(Role(rank, "worker", "mill", "cpu", 1, 0, rank) for rank in (0, 1)), (1,), 8, (),
    (("a",), ("b",)), (StageCost(1, 0.1, 8, 8, 0), StageCost(1, 0.2, 8, 8, 8)),
)  # fmt: skip
STARTED = RunStarted(
    LAUNCHER, 0.0, "pipeline", 2, "cpu", 1, 16, 72, "2026-10-03T14:05:11+02:00", to_plain(PLAN), {"torch": "2.13.0"},
    resumed_step=4, resumed_leases=((5, 6),),
)  # fmt: skip
MORE: tuple[Event, ...] = (
    InputStats(0, 3.0, "threads", 2, 2.0, 0.1, 8, 64, 4, 100, 3, (InputStageStats("map", 0.5, 0.1),)),
    NonFinite(0, 1.2, 1, (0,), "skipped"),
    ParametersAveraged(0, 1.3, 2, 2, 2, "why", 0.1, 0.1, (1,), 1),
    *(PipelineStepTimed(rank, 1.4, 3, 1, (StagePass(rank, 0, False, 1.1, 1.3, 0.1),)) for rank in (0, 1)),
    RowsMoved(1, 1.5, 1, "t", 1, 5, 100, 3, 0.1),
    Saved(0, 1.6, 2, 100, 0.1, 0.2),
    SharesBalanced(0, 1.7, 2, (3, 5), (0.1, 0.2)),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the path to each value of a JSON document but its kind; of a list, to its first items."""
    if path and path != ("kind",):
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, each in items:
        yield from places(each, (*path, key))


def put(line: str, path: tuple[Any, ...], value: Any) -> str:
    """Returns the line with another value at a place."""
    document = json.loads(line)
    place = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return json.dumps(document)


def broken(run_dir: Path) -> Iterator[str]:
    """Puts each value at each place of the last event of each kind; yields what it has put, while it is there."""
    for file in sorted((run_dir / "events").iterdir()):
        whole = file.read_text()
        lines = whole.splitlines()
        last = {json.loads(line)["kind"]: number for number, line in enumerate(lines)}
        for kind, number in last.items():
            for path in places(json.loads(lines[number])):
                for value in VALUES:
                    changed = [*lines[:number], put(lines[number], path, value), *lines[number + 1 :]]
                    file.write_text("\n".join(changed) + "\n")
                    yield f"{kind} {path} = {value!r:.20}"
        file.write_text(whole)


def report(run_dir: Path) -> str:
    """Makes the page; returns what was refused, "" if nothing."""
    try:
        write_page(run_dir / "page.html", [summarize(run_dir)])
    except DataError as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.one
@pytest.mark.parametrize(("fixture", "extra"), [("make_run", (STARTED, *MORE)), ("make_served_run", MORE[:1])])
def test_a_report_is_made_or_refused(request, tmp_path, fixture: str, extra: Sequence[Event]) -> None:
    run_dir = request.getfixturevalue(fixture)(tmp_path / "run", extra=extra)
    wrong, made, refused = [], 0, 0
    for what in broken(run_dir):
        try:
            said = report(run_dir)
        except Exception as error:
            wrong.append(f"{what}: {error!r}")
            continue
        made, refused = made + (not said), refused + bool(said)
    assert not wrong, "\n".join(wrong)
    assert min(made, refused) > 100
