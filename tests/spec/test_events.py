from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any, ClassVar, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct

from headrace.spec import events as event
from headrace.spec.events import LAUNCHER, Event, decode, encode
from headrace.spec.plain import FiniteFloat, Int64

COUNT = st.integers(0, 10**12)
SECONDS = st.floats(0, 1e9)
WORD = st.text(max_size=20)
COUNTS = st.dictionaries(WORD, COUNT, max_size=3)
STAMP = (st.integers(LAUNCHER, 1000), SECONDS)

SHARD = st.builds(event.ShardStats, WORD, *(COUNT,) * 4, SECONDS, *(COUNT,) * 2)
TABLE = st.builds(event.TableStats, WORD, *(COUNT,) * 3)
PASS = st.builds(event.StagePass, COUNT, COUNT, st.booleans(), SECONDS, SECONDS, SECONDS)
STAGE = st.builds(event.InputStageStats, WORD, SECONDS, SECONDS)
READS = st.builds(event.TableReads, WORD, *(COUNT,) * 4, st.booleans())
EVENTS = {
    "run_started": st.builds(
        event.RunStarted,
        *STAMP,
        *(WORD, COUNT, WORD, COUNT, COUNT, COUNT, WORD),
        st.dictionaries(WORD, st.integers() | st.lists(WORD, max_size=2), max_size=3),
        st.dictionaries(WORD, WORD, max_size=3),
    ),
    "worker_started": st.builds(event.WorkerStarted, *STAMP, WORD, COUNT, WORD, COUNT),
    "stepped": st.builds(
        event.Stepped,
        *(*STAMP, COUNT, COUNT, COUNT, st.none() | SECONDS, SECONDS, SECONDS, SECONDS, SECONDS, SECONDS),
        st.integers(-1, 99),
    ),
    "evaluated": st.builds(
        event.Evaluated, *STAMP, COUNT, COUNT, COUNT, st.dictionaries(WORD, SECONDS, max_size=3), SECONDS
    ),
    "averaged": st.builds(
        event.ParametersAveraged,
        *(*STAMP, COUNT, COUNT, COUNT, WORD, SECONDS, SECONDS),
        st.lists(COUNT, max_size=3).map(tuple),
    ),
    "passed": st.builds(event.PipelineStepTimed, *STAMP, COUNT, COUNT, st.lists(PASS, max_size=3).map(tuple)),
    "saved": st.builds(event.Saved, *STAMP, COUNT, COUNT, SECONDS, SECONDS),
    "balanced": st.builds(
        event.SharesBalanced, *STAMP, COUNT, st.lists(COUNT, max_size=3).map(tuple), st.lists(SECONDS).map(tuple)
    ),
    "non_finite": st.builds(event.NonFinite, *STAMP, COUNT, st.lists(COUNT, max_size=3).map(tuple), WORD),
    "values_logged": st.builds(event.ValuesLogged, *STAMP, COUNT, st.dictionaries(WORD, SECONDS, max_size=3)),
    "picture_logged": st.builds(event.PictureLogged, *STAMP, COUNT, WORD, WORD),
    "text_logged": st.builds(event.TextLogged, *STAMP, COUNT, WORD, WORD),
    "lost": st.builds(event.Lost, *STAMP, st.integers(0, 9), st.integers(0, 9), st.text(), st.booleans()),
    "notice": st.builds(event.Notice, *STAMP, st.text()),
    "failed": st.builds(event.Failed, *STAMP, COUNT, WORD, st.text()),
    "worker_ended": st.builds(event.WorkerEnded, *STAMP, COUNT, COUNT, COUNT, COUNT, COUNT),
    "backup_ready": st.builds(event.BackupReady, *STAMP, COUNT),
    "server_started": st.builds(event.ServerStarted, *STAMP, WORD, COUNT, COUNT, COUNT),
    "served": st.builds(
        event.ServerStats,
        *(*STAMP, SECONDS, SECONDS, COUNT, st.dictionaries(WORD, COUNTS, max_size=3)),
        *(st.dictionaries(WORD, SECONDS, max_size=3), COUNTS, st.lists(SHARD, max_size=2).map(tuple)),
    ),
    "fed": st.builds(
        event.InputStats,
        *(*STAMP, WORD, COUNT, SECONDS, SECONDS, *(COUNT,) * 5),
        st.lists(STAGE, max_size=3).map(tuple),
    ),
    "rows_asked": st.builds(
        event.RowsAsked, *STAMP, COUNT, st.lists(st.builds(event.HotRow, WORD, COUNT, COUNT), max_size=2).map(tuple)
    ),
    "rows_moved": st.builds(event.RowsMoved, *STAMP, COUNT, WORD, *(COUNT,) * 4, SECONDS),
    "rows_read": st.builds(event.RowsRead, *STAMP, st.lists(READS, max_size=2).map(tuple)),
    "pushes": st.builds(event.PushesApplied, *STAMP, *(st.lists(COUNT, max_size=3).map(tuple),) * 4),
    "rows": st.builds(event.RowsHeld, *STAMP, COUNT, st.lists(TABLE, max_size=2).map(tuple)),
    "snapshot_taken": st.builds(event.SnapshotTaken, *STAMP, COUNT, SECONDS),
    "server_ended": st.builds(event.ServerEnded, *STAMP, COUNT, COUNT, COUNT, COUNT),
    "run_ended": st.builds(event.RunEnded, *STAMP, WORD),
}


@pytest.mark.parametrize("kind", sorted(EVENTS))
@given(data=st.data())
def test_an_event_is_one_line_and_comes_back(kind: str, data: st.DataObject) -> None:
    made: Event = data.draw(EVENTS[kind])
    line = encode(made)
    assert made.kind == kind
    assert "\n" not in line
    assert decode(line) == made


def test_every_kind_of_event_is_tried_above() -> None:
    values = [getattr(event, name) for name in event.__all__]
    kinds = {kind for kind in values if isinstance(kind, type) and issubclass(kind, Event)} - {Event}
    assert {kind.__struct_config__.tag for kind in kinds} == set(EVENTS)


def fields(kind: Any) -> Iterator[tuple[str, Any]]:
    """Yields the name and the type of a class's fields, and of those of the classes in them."""
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if get_origin(hint) is not ClassVar:
            yield name, hint
            for inner in get_args(hint):
                if isinstance(inner, type) and issubclass(inner, Struct):
                    yield from fields(inner)


def leaves(hint: Any) -> Iterator[Any]:
    """Yields the types without arguments that a type is made of."""
    if hint in (FiniteFloat, Int64) or not get_args(hint):
        yield hint
    else:
        for argument in get_args(hint):
            yield from leaves(argument)


@pytest.mark.parametrize("kind", Event.__subclasses__())
def test_no_number_is_too_large_and_times_are_finite(kind: type[Event]) -> None:
    for name, hint in fields(kind):
        found = set(leaves(hint))
        assert int not in found, name
        assert float not in found or not (name == "seconds" or name.endswith("_s")), name


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_survives(loss: float) -> None:
    step = event.Stepped(0, 1.0, 2, 0, 8, loss, 8.0, 0.0, 0.0, 0.0, 0.0)
    evaluated = event.Evaluated(0, 1.0, 2, 0, 8, {"loss": loss}, 0.1)
    assert '"loss":' + json.dumps(loss) in encode(step)
    for made in (step, evaluated):
        assert repr(decode(encode(made))) == repr(made)


def test_text_is_kept_whole() -> None:
    made = event.Notice(0, 1.0, 'ü \U0001f600 \u2028 \x00 \x7f \udc80 "null" \n')
    assert decode(encode(made)) == made
    assert decode(encode(made).encode()) == made
    assert decode(encode(event.Notice(0, 1.0, "ü null"))) == event.Notice(0, 1.0, "ü null")


def test_numbers_of_numpy_are_written_and_others_refused() -> None:
    made = event.ValuesLogged(0, 1.0, 2, MappingProxyType({"a": np.float64(0.5)}))
    assert decode(encode(made)) == event.ValuesLogged(0, 1.0, 2, {"a": 0.5})
    with pytest.raises(TypeError, match="complex has no JSON form"):
        encode(event.ValuesLogged(0, 1.0, 2, {"a": 1j}))  # type: ignore[dict-item]


def test_a_failure_is_shown_in_one_line() -> None:
    failed = event.Failed(1, 2.0, 3, "ValueError: a", "Traceback\n  b", 3)
    assert repr(failed) == "Failed(rank=1, time_s=2.0, step=3, cause='ValueError: a', exit_code=3, remedy='')"


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{",
        "[]",
        "3",
        "{}",
        '{"kind": "dream", "rank": 0, "time_s": 0}',
        '{"kind": "notice", "rank": 0, "time_s": 0}',
        '{"kind": "notice", "rank": "0", "time_s": 0, "text": "a"}',
        '{"kind": "notice", "rank": 0, "time_s": 0, "text": "a", "more": 1}',
        '{"kind": 3, "rank": 0, "time_s": 0, "text": "a"}',
        b'{"kind": "notice", "rank": 0, "time_s": 0, "text": "\xff"}',
        '{"kind": "run_started", "plan": ' + "[" * 10**6,
        '{"kind": "run_started", "plan": ' + '{"a":' * 10**6,
    ],
)
def test_another_line_is_no_event(line: str | bytes) -> None:
    with pytest.raises(ValueError, match="not an event") as refused:
        decode(line)
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize(
    ("part", "told"),
    [
        ('"rank": true', "Expected `int`, got `bool` - at `$.rank`"),
        ('"rank": 0.0', "Expected `int`, got `float` - at `$.rank`"),
        (f'"rank": {2**63}', "Expected `int` <= 9223372036854775807 - at `$.rank`"),
        (f'"rank": {10**400}', "Expected `int` <= 9223372036854775807 - at `$.rank`"),
        (f'"time_s": {10**400}', "Number out of range - at `$.time_s`"),
        ('"time_s": 1e999', "Number out of range - at `$.time_s`"),
        ('"time_s": NaN', "Expected `float` >= -1.7976931348623157e+308 - at `$.time_s`"),
        ('"time_s": Infinity', "Expected `float` <= 1.7976931348623157e+308 - at `$.time_s`"),
        ('"waited_s": {"0": NaN}', "Expected `float` >= -1.7976931348623157e+308 - at `$.waited_s[...]`"),
        ('"staleness": {"0": {"1": true}}', "Expected `int`, got `bool` - at `$.staleness[...][...]`"),
        ('"shards": [{"name": 1}]', "Expected `str`, got `int` - at `$.shards[0].name`"),
        ('"shards": [{"more": 1}]', "Object contains unknown field `more` - at `$.shards[0]`"),
        ('"more": NaN', "Object contains unknown field `more`"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(part: str, told: str) -> None:
    line = encode(event.ServerStats(2, 1.0, 0.5, 0.0, 3, {"0": {"1": 2}}, {"0": 0.25}, {}, ()))
    with pytest.raises(ValueError, match=re.escape(f"({told})")):
        decode(f"{line[:-1]}, {part}}}")
