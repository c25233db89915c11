"""Event files that someone has changed: whatever stands in a line, the page is told something that it can show."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.spec.events import (
    LAUNCHER,
    BackupReady,
    Evaluated,
    Event,
    Failed,
    Lost,
    NonFinite,
    Notice,
    ParametersAveraged,
    RowsHeld,
    RowsMoved,
    RunEnded,
    Saved,
    ServerEnded,
    ServerStarted,
    SharesBalanced,
    SnapshotTaken,
    TableStats,
    WorkerEnded,
    encode,
)
from headrace.watch.state import WatchedRun
from watch.made import Page, begun, read, started, steps
from watch.test_state import EVIL, served

EVENTS: tuple[Event, ...] = (
    started(),
    begun(0),
    *steps(0, range(3)),
    Evaluated(0, 1.2, 2, 0, 9, {"loss": 0.5}, 0.1),
    Saved(0, 1.3, 2, 100, 0.1, 0.2),
    ParametersAveraged(0, 1.3, 2, 2, 2, "why", 0.1, 0.1, (1,), 1),
    served(1.4, 100, {"0": 3}, 0.1),
    served(2.4, 200, {"0": 5}, 0.2),
    RowsHeld(2, 1.5, 2, (TableStats("t", 5, 10, 1),)),
    RowsMoved(2, 1.5, 1, "t", 1, 5, 100, 3, 0.1),
    SnapshotTaken(2, 1.5, 100, 0.1),
    ServerStarted(2, 0.5, "weir", 9, 1, 40),
    Notice(LAUNCHER, 1.0, "a"),
    NonFinite(0, 1.6, 2, (0, 1), "skip"),
    SharesBalanced(0, 1.6, 2, (3, 5), (0.1, 0.2)),
    Failed(0, 1.7, 2, "cause", "trace"),
    Lost(LAUNCHER, 1.8, 0, 0, "killed", True, "mill"),
    BackupReady(LAUNCHER, 1.8, 3),
    WorkerEnded(0, 1.9, 3, 5, 100, 40, 80),
    ServerEnded(2, 1.9, 1, 100, 40, 0),
    RunEnded(LAUNCHER, 2.0, "ok"),
    started(3.0, resumed=1),
)

NUMBERS = (0, -1, 1, 2**31, 2**63, 10**400, -(10**30), 0.5, -0.5, 1e300, -1e300, math.nan, math.inf)
TEXTS = ("", EVIL, "\ud800", "\x00\x1b[2J", "x" * 5000, "-1", "1e5", "٣")
_NUMBERS, _TEXTS = st.sampled_from(NUMBERS), st.sampled_from(TEXTS)
_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), _NUMBERS, _TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(_TEXTS, inner, max_size=3)),
    max_leaves=4,
)


def changed(plain: Any, draw: st.DrawFn) -> Any:
    """Returns a JSON value of which one part is another one."""
    if isinstance(plain, dict) and plain and draw(st.integers(0, 9)):
        key = draw(st.sampled_from(sorted(plain)))
        return {**plain, key: changed(plain[key], draw)}
    if isinstance(plain, list) and plain and draw(st.integers(0, 3)):
        return [changed(plain[0], draw), *plain[1:]]
    return draw(_VALUES)


@st.composite
def lines(draw: st.DrawFn) -> list[str]:
    made = [json.loads(encode(event)) for event in EVENTS]
    for _ in range(draw(st.integers(1, 4))):
        index = draw(st.integers(0, len(made) - 1))
        kind = made[index].get("kind") if isinstance(made[index], dict) else None
        made[index] = changed(made[index], draw)
        if isinstance(made[index], dict) and kind:
            made[index] = {"kind": kind, **{name: value for name, value in made[index].items() if name != "kind"}}
    return [json.dumps(each, separators=(",", ":")) for each in made]


def shown(written: Iterable[str]) -> Page:
    """Reads a run of these lines; what a page is told of it must be JSON without control characters."""
    with tempfile.TemporaryDirectory() as folder:
        events = Path(folder) / "events"
        events.mkdir()
        (events / "rank-0.jsonl").write_text("\n".join(written) + "\n")
        run = read(WatchedRun(Path(folder)))
        page = Page(run)
        text = json.dumps([page.update(), run.row()], ensure_ascii=False)
        assert "\x1b" not in text
        text.encode()
        return page


@pytest.mark.slow
@settings(max_examples=50)
@given(lines())
def test_whatever_stands_in_a_line_the_page_is_told_what_it_can_show(written: list[str]) -> None:
    shown(written)


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.kind)
def test_any_value_of_any_field_is_shown_or_refused(event: Event) -> None:
    plain = json.loads(encode(event))
    values = (*NUMBERS, *TEXTS, None, [], {}, [None], {"a": 1}, {"1": {"1": 10**30}}, {"1": {"x": 1}})
    others = [encode(each) for each in EVENTS]
    written = [
        json.dumps({"kind": event.kind, **plain, field: value}, separators=(",", ":"))
        for field in plain
        if field != "kind"
        for value in values
    ]
    known = shown([*others, *written]).known
    (complaint,) = known["complaints"]
    assert complaint.startswith("rank-0.jsonl: ")


@pytest.mark.parametrize(
    "line", ["[" * 100_000, '{"kind":' * 50_000, "1" * 5000, '"' + "\\ud800" * 9 + '"', "{}", "null"]
)
def test_lines_that_are_other_json_are_refused(line: str) -> None:
    known = shown([encode(started()), line, encode(steps(0, [1])[0])]).known
    assert known["complaints"][0].startswith("rank-0.jsonl: 1 line cannot be read, the first: ")
    assert known["run"]["examples"] == 8
