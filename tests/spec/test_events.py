from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.spec import events as event
from headrace.spec.events import LAUNCHER, Event, decode, encode

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
    assert {kind.kind for kind in kinds} == set(EVENTS)


def test_a_loss_that_is_no_number_survives() -> None:
    line = encode(event.Stepped(0, 1.0, 2, 0, 8, float("nan"), 8.0, 0.0, 0.0, 0.0, 0.0))
    back = decode(line)
    assert isinstance(back, event.Stepped)
    assert back.loss != back.loss


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
    ],
)
def test_another_line_is_no_event(line: str) -> None:
    with pytest.raises(ValueError, match=r"not an event|Expecting"):
        decode(line)
