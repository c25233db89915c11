"""What a report says of rows that move between servers."""

from __future__ import annotations

import json

from headrace.report.model.summary import summarize
from headrace.report.views.table import run_plain, run_rows
from headrace.spec.events import HotRow, RowsAsked, RowsMoved, RowsRead, TableReads


def test_loads_hot_rows_and_moves_are_shown(tmp_path, make_served_run):
    events = [
        RowsAsked(2, 2.0, 900, (HotRow("item", 7, 300),)),
        RowsAsked(3, 2.0, 100, ()),
        *(
            RowsMoved(2, 2.0 + 0.01 * number, number, "item", 1, 10, 1_000, 3, 0.001 * number)
            for number in range(1, 101)
        ),
        RowsAsked(2, 4.0, 520, (HotRow("item", 7, 150), HotRow("user", 1, 50))),
        RowsAsked(3, 4.0, 480, (HotRow("item", 9, 250),)),
    ]
    summary = summarize(make_served_run(tmp_path / "run", 2, 2, extra=events))
    rows = dict(run_rows(summary))
    assert rows["row load"] == (
        "rank 2 520, rank 3 480 pulled at the last look; most: 1.04 × the mean (at the first look 1.80)"
    )
    assert rows["hot rows"] == "item 9 (25 %), item 7 (15 %), user 1 (5.0 %)"
    assert rows["row moves"] == "100 of 1000 rows, 100 kB; on the way for 51.0 ms, 99 % at most 99.0 ms"
    assert summary.servers.row_moves.pauses_s[-1] == 0.1
    told = json.loads(json.dumps(run_plain(summary)))["servers"]["row_moves"]
    assert (told["asked"], told["moves"]) == ({"2": 520, "3": 480}, 100)


def test_what_workers_read_from_copies_is_shown(tmp_path, make_served_run):
    events = [
        RowsRead(0, 5.0, (TableReads("item", 900, 500, 300, 32_000), TableReads("user", 100, 0, 100, 0))),
        RowsRead(1, 5.0, (TableReads("item", 1000, 300, 600, 18_000),)),
    ]
    summary = summarize(make_served_run(tmp_path / "run", 2, 2, extra=events))
    rows = dict(run_rows(summary))
    assert rows["rows read"] == "2000; 40 % from copies of hot rows (50.0 kB not pulled), 50 % pulled a step early"
    told = json.loads(json.dumps(run_plain(summary)))["servers"]["row_reads"]
    assert told == {"asked": 2000, "copied": 800, "early": 1000, "saved_bytes": 50_000}


def test_runs_whose_rows_stay_say_nothing(tmp_path, make_served_run):
    summary = summarize(make_served_run(tmp_path / "run", 2, 2))
    assert summary.servers.row_moves is None
    assert summary.servers.row_reads is None
    assert "row load" not in dict(run_rows(summary))
