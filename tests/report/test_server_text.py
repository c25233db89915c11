"""Servers on a terminal of 80 columns."""

from __future__ import annotations

import io

import pytest

from headrace.report.format import to_cells, to_heads
from headrace.report.model.summary import summarize
from headrace.report.model.verdict import References
from headrace.report.views.server_subjects import SERVERS, server_line
from headrace.report.views.table import comparison_table, run_rows, run_table


def _render(table) -> list[str]:
    from rich.console import Console

    text = io.StringIO()
    Console(file=text, width=80, color_system=None).print(table)
    return [line.rstrip() for line in text.getvalue().splitlines()]


@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (4, 2), (16, 4)])
def test_every_size_fits(tmp_path, make_served_run, workers, servers):
    summary = summarize(make_served_run(tmp_path / "run", workers, servers))
    for table in (run_table(summary), comparison_table([summary], References(100.0))):
        assert max(map(len, _render(table))) <= 80


def test_one_run_as_text(tmp_path, make_served_run):
    rows = dict(run_rows(summarize(make_served_run(tmp_path / "run", 4, 2))))
    assert rows["processes"] == "4 workers and 2 servers on mill, weir (cpu), 1 thread each"
    assert rows["servers"] == "2, busy 25 % of the time (rank 4: 25 %); queue: mean 1.50, longest 4"
    assert rows["traffic"] == "2.90 MB pushed, 2.90 MB pulled; most: rank 5 1.33, shard weight 2.65 × the mean"
    assert rows["updates"] == "960 of shards, 290 ms in all; most: rank 5 1.33, shard weight 2.65 × the mean"
    assert rows["refused pushes"] == "0.6 % (4 late, 2 not finite)"
    assert rows["staleness"] == "mean 4.00, median 3, 99 % at most 6, largest 6"
    assert rows["worker 3"] == (
        "staleness mean 4.00, median 3, 99 % at most 6, largest 6; compute 3.0 s, exchange 3.0 s; answers 900 ms"
    )
    assert rows["parameters"].endswith("in all workers and servers together")
    assert "other workers" not in rows


def test_one_server_is_compared_with_none_and_many_workers_are_cut(tmp_path, make_served_run):
    rows = dict(run_rows(summarize(make_served_run(tmp_path / "run", 16, 1))))
    assert rows["traffic"] == "3.88 MB pushed, 3.88 MB pulled; most: shard weight 1.98 × the mean"
    assert rows["servers"].startswith("1, busy 25 % of the time; queue")
    assert rows["other workers"] == "8 more: see the page, or --json"
    assert "worker 7" in rows
    assert "worker 8" not in rows


def test_a_comparison_says_one_sentence_a_run_with_servers(tmp_path, make_run, make_served_run):
    runs = [summarize(make_run(tmp_path / "mirrored")), summarize(make_served_run(tmp_path / "async", 4, 2))]
    text = " ".join(" ".join(_render(comparison_table(runs, References()))).split())
    sentence = (
        "async (parameter_server): 2 servers, busy 25 %, longest queue 4; staleness mean 4.00, median 3, 99 % at most "
        "6, largest 6; refused pushes: 0.6 % (4 late, 2 not finite)."
    )
    assert sentence in text
    assert text.count("servers, busy") == 1
    without = " ".join(_render(comparison_table(runs[:1], References())))
    assert "server" not in without


def test_cells_stand_under_their_heads(tmp_path, make_served_run):
    cells = tuple(to_cells(SERVERS, summarize(make_served_run(tmp_path / "run", 4, 2)).servers))
    assert len(cells) == len(to_heads(SERVERS))
    assert cells == ("2", "4.00", "3", "6", "6", "0.6 %", "25 %", "4", "2.90 MB", "2.90 MB")


def test_nothing_refused_and_nothing_applied(tmp_path, make_served_run, write_events):
    run_dir = make_served_run(tmp_path / "run", 1, 1)
    file = run_dir / "events" / "rank-1.jsonl"
    began, *_ = file.read_text().splitlines(keepends=True)
    idle = '{"kind":"served","rank":1,"time_s":3.0,"busy_s":0.0,"queue_mean":0.0,"queue_longest":0,"staleness":{},'
    file.write_text(began + idle + '"waited_s":{},"refused":{},"shards":[]}\n')
    servers = summarize(run_dir).servers
    assert server_line(servers) == "1 server, busy 0.0 %, longest queue 0; staleness –; refused pushes: none"
    assert to_cells(SERVERS, servers)[1:6] == ["–", "–", "–", "–", "0"]
