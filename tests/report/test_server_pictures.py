"""Pictures of servers: their words, and that nothing is told by colour alone."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from headrace.report.drawing.rows import Histogram, draw_histograms
from headrace.report.model.summary import summarize
from headrace.report.views.page import write_page
from headrace.report.views.server_pictures import server_pictures
from headrace.report.views.style import colours_of
from headrace.spec.events import Failed, ServerStats, ShardStats

XHTML = "{http://www.w3.org/1999/xhtml}"
SVG = "{http://www.w3.org/2000/svg}"
TITLES = [
    "How old are the parameters of a gradient?",
    "Does staleness grow?",
    "Who waited for whom?",
    "How busy are the servers?",
    "How much does each server move?",
    "Which shards move the most?",
    "Which shards' updates take the most time?",
]


def _words(svg: str) -> list[str]:
    return [element.text for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


@pytest.mark.each_value
@pytest.mark.slow
@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (4, 2), (16, 4)])
def test_every_picture_is_there_and_says_whose_it_is(tmp_path, make_served_run, workers, servers):
    drawn = {each.title: each for each in server_pictures([summarize(make_served_run(tmp_path, workers, servers))])}
    assert list(drawn) == TITLES
    everybody = {f"worker {worker}" for worker in range(workers)}
    everyone = {f"server {rank}" for rank in range(workers, workers + servers)}
    for title in ("How old are the parameters of a gradient?", "Who waited for whom?"):
        assert everybody <= set(_words(drawn[title].svg)), title
    for title in ("How busy are the servers?", "How much does each server move?"):
        assert everyone <= set(_words(drawn[title].svg)), title
    for title in ("Which shards move the most?", "Which shards' updates take the most time?"):
        assert {f"weight on {rank}" for rank in range(workers, workers + servers)} <= set(_words(drawn[title].svg))
    assert all(len(each.reading) > 40 for each in drawn.values())


@pytest.mark.slow
def test_numbers_stand_beside_the_bars(tmp_path, make_served_run):
    drawn = {each.title: _words(each.svg) for each in server_pictures([summarize(make_served_run(tmp_path, 4, 2))])}
    assert "mean 4.00, 99 % at most 6, largest 6" in drawn["How old are the parameters of a gradient?"]
    assert "answers of server 4: 0.30, 5: 0.60 s" in drawn["Who waited for whom?"]
    assert "busy 25 %, queue mean 1.50, longest 4" in drawn["How busy are the servers?"]
    assert "970 kB pushed, 970 kB pulled" in drawn["How much does each server move?"]
    assert "9.60 kB pushed, 9.60 kB pulled" in drawn["Which shards move the most?"]
    assert "240 × 0.800 ms" in drawn["Which shards' updates take the most time?"]


@pytest.mark.slow
def test_a_page_of_several_runs_has_a_table_and_fewer_rows(tmp_path, make_run, make_served_run):
    runs = [make_run(tmp_path / "mirrored"), *(make_served_run(tmp_path / f"ps{n}", n, 2) for n in (2, 16))]
    page = write_page(tmp_path / "page.html", [summarize(run) for run in runs]).read_text()
    root = ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>\n"))
    rows = [" ".join(" ".join(row.itertext()).split()) for row in root.iter(f"{XHTML}tr")]
    (row,) = [row for row in rows if row.startswith("ps16 (parameter_server) 2 ")]
    assert row == "ps16 (parameter_server) 2 20.0 15 30 30 0.2 % 25 % 16 11.6 MB 11.6 MB"
    assert not [row for row in rows if row.startswith("mirrored 2 0")]
    titles = [element.text for element in root.iter(f"{XHTML}h3")]
    assert [title for title in titles if title in TITLES] == TITLES
    (over_time,) = [each for each in root.iter(f"{XHTML}figure") if each[0].text == "Does staleness grow?"]
    key = [" ".join(item.itertext()) for item in over_time.iter(f"{XHTML}li")]
    assert key == ["ps2 (parameter_server)", "ps16 (parameter_server)"]
    words = [element.text for element in root.iter(f"{SVG}text")]
    assert words.count("ps16 (parameter_server), worker 3") == 1
    assert "ps16 (parameter_server), worker 4" not in words


@pytest.mark.slow
def test_servers_without_a_step_and_with_hostile_names_have_a_page(tmp_path, make_served_run, write_events):
    started = summarize(make_served_run(tmp_path / "a")).started
    hostile = "<script>alert(1)</script>$\\bad$ &amp; \x00"
    shards = (ShardStats(hostile, 40, 0, 0, 0, 0.0, 0, 0),)
    spoken = ServerStats(2, 3.0, 0.0, 0.0, 0, {"0": {}}, {}, {hostile: 1}, shards)
    run_dir = write_events(tmp_path / "b", [started, spoken, Failed(0, 3.1, 0, "ValueError: bad")])
    page = write_page(tmp_path / "page.html", [summarize(run_dir)]).read_text()
    root = ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>\n"))
    titles = [element.text for element in root.iter(f"{XHTML}h3")]
    assert titles == [
        "How busy are the servers?",
        "How much does each server move?",
        "Which shards move the most?",
        "Which shards' updates take the most time?",
    ]
    assert "no update" in [element.text for element in root.iter(f"{SVG}text")]
    assert "<script" not in page


@pytest.mark.slow
def test_runs_without_servers_have_no_such_picture(tmp_path, make_run):
    runs = [summarize(make_run(tmp_path / name, name)) for name in ("mirrored", "one_device")]
    assert server_pictures(runs) == ()
    page = write_page(tmp_path / "page.html", runs).read_text()
    assert "erver" not in page[page.index("<main>") :]


@pytest.mark.slow
@pytest.mark.parametrize(("largest", "columns"), [(0, 1), (5, 6), (47, 48), (48, 25), (1000, 48)])
def test_a_histogram_has_as_many_columns_as_can_be_seen(largest, columns):
    row = Histogram("worker 0", "a note", dict.fromkeys(range(largest + 1), 2), largest / 2, colours_of(["a"])["a"])
    svg = draw_histograms("T", [row], "staleness")
    assert {"worker 0", "a note", "staleness"} <= set(_words(svg))
    assert len(list(ElementTree.fromstring(svg).iter(f"{SVG}rect"))) == columns
