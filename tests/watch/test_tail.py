"""Event files that grow, are cut, replaced, half written, of another version, or long."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from headrace.report.model.summary import summarize
from headrace.spec.events import LAUNCHER, Notice, RunEnded, Stepped, encode
from headrace.watch import tail
from headrace.watch.state import WatchedRun
from headrace.watch.tail import RunTail
from watch.made import NAN, Page, begun, read, read_lines, started, steps, write


def lines(*events: object) -> list[bytes]:
    return [encode(each).encode() for each in events]  # type: ignore[arg-type]


def test_lines_become_arrays_and_events() -> None:
    found = read_lines(lines(begun(3), *steps(3, [7, 8])), 0.5)
    assert [type(each).__name__ for each in found.events] == ["WorkerStarted"]
    assert found.steps is not None
    assert found.steps.rank.tolist() == [3, 3]
    assert found.steps.step.tolist() == [7, 8]
    assert found.steps.began_s == pytest.approx([1.0, 1.1])
    assert found.steps.spent_s[0] == pytest.approx([0.05, 0.03, 0.01, 0.01])
    # A process that has just started has no step before.
    assert math.isnan(found.steps.before_s[0])
    assert found.steps.before_s[1] == pytest.approx(1.1)
    assert found.last_s == pytest.approx(1.2)


def test_the_step_before_is_known_where_lines_follow_each_other() -> None:
    found = read_lines(lines(*steps(0, [1])), 0.5)
    assert found.steps is not None
    assert found.steps.before_s.tolist() == [0.5]
    again = read_lines(lines(*steps(0, [1]), begun(0)), 0.5)
    assert math.isnan(again.last_s)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b'{"kind":"future","rank":0,"time_s":1.0}', "future"),
        (b'{"kind":"notice","rank":0,"time_s":1.0,"text":"a","more":1}', "unknown field `more`"),
        (b"\xff\xfe", "decode"),
        (b"", "Expecting value"),
        (b"[1, 2]", "not an event"),
        (b'{"kind":"stepped","rank":0}', "not an event"),
        (b'{"kind":"notice","rank":0,"time_s":NaN,"text":"a"}', "Expected `float` >= -1.79"),
        (b'{"kind":"notice","rank":0,"time_s":1e300,"text":"a"}', "out of range"),
        (
            b'{"kind":"saved","rank":0,"time_s":1.0,"step":%d,"bytes":1,"stall_s":0.0,"write_s":0.0}' % 10**30,
            "`$.step`",
        ),
        (
            b'{"kind":"served","rank":2,"time_s":1.0,"busy_s":0.1,"queue_mean":0.0,"queue_longest":0,'
            b'"staleness":{"0":{"<b>":1}},"waited_s":{},"refused":{},"shards":[]}',
            "out of range",
        ),
    ],
)
def test_a_line_that_is_no_event_is_told_and_the_others_count(line: bytes, told: str) -> None:
    found = read_lines([*lines(*steps(0, [1])), line, *lines(*steps(0, [2]))], NAN)
    assert found.steps is not None
    assert len(found.steps) == 2
    assert len(found.bad) == 1
    assert told in found.bad[0]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("time_s", "1e12"),
        ("step", "-1"),
        ("rank", "1e20"),
        ("wait_s", "-0.5"),
        ("compute_s", "Infinity"),
        ("examples", '"<b>"'),
    ],
)
def test_a_step_whose_numbers_cannot_be_added_up_is_left_out(field: str, value: str) -> None:
    plain = encode(steps(0, [1])[0])
    begin = plain.index(f'"{field}":') + len(field) + 3
    end = plain.index(",", begin)
    found = read_lines([f"{plain[:begin]}{value}{plain[end:]}".encode(), *lines(*steps(0, [2]))], NAN)
    assert found.steps is not None
    assert found.steps.step.tolist() == [2]
    assert len(found.bad) == 1


def test_a_loss_that_is_not_finite_is_no_bad_line() -> None:
    lost = Stepped(0, 1.0, 0, 0, 8, NAN, 8.0, 0.0, 0.1, 0.0, 0.0)
    none = Stepped(0, 1.0, 0, 0, 0, None, 0.0, 0.0, 0.1, 0.0, 0.0)
    found = read_lines(lines(lost, none), NAN)
    assert found.bad == []
    assert found.steps is not None
    assert all(map(math.isnan, found.steps.loss))


def test_half_a_line_waits_until_it_is_whole(tmp_path: Path) -> None:
    write(tmp_path, started())
    following = RunTail(tmp_path)
    assert len(following.poll().events) == 1
    text = encode(Notice(LAUNCHER, 1.0, "näher")).encode() + b"\n"
    file = tmp_path / "events" / "launcher.jsonl"
    for cut in (text[:30], text[30:-1]):
        with file.open("ab") as stream:
            stream.write(cut)
        assert following.poll().events == ()
    assert following.complaints() == []
    os.utime(file, (1, 1))
    old = RunTail(tmp_path)
    old.poll()
    assert old.complaints() == [f"launcher.jsonl ends in half a line of {len(text) - 1} B, which is left out"]
    with file.open("ab") as stream:
        stream.write(b"\n")
    (event,) = following.poll().events
    assert isinstance(event, Notice)
    assert event.text == "näher"
    assert following.complaints() == []


def test_a_directory_that_does_not_exist_yet_is_waited_for(tmp_path: Path) -> None:
    following = RunTail(tmp_path / "a")
    assert following.poll().events == ()
    assert following.grown_s() is None
    write(tmp_path / "a", started())
    assert len(following.poll().events) == 1


@pytest.mark.parametrize("how", ["shorter", "replaced", "removed"])
def test_a_file_that_is_cut_or_replaced_makes_the_run_be_read_anew(how: str, tmp_path: Path) -> None:
    write(tmp_path, started(), *steps(0, range(5)), *steps(1, range(5)))
    run = read(WatchedRun(tmp_path))
    page = Page(run)
    assert page.update()["run"]["examples"] == 80
    file = tmp_path / "events" / "rank-1.jsonl"
    kept = b"".join(file.read_bytes().splitlines(keepends=True)[:2])
    if how == "shorter":
        os.truncate(file, len(kept))
    elif how == "replaced":
        (tmp_path / "other").write_bytes(kept + kept)
        (tmp_path / "other").rename(file)
    else:
        file.unlink()
    known = Page(read(run)).update()
    assert known == page.update()
    assert known["run"]["examples"] == {"shorter": 56, "replaced": 72, "removed": 40}[how]
    assert known["complaints"] == [
        f"rank-1.jsonl {'became' if how == 'shorter' else 'was'} {how}: the run was read anew"
    ]


def test_what_is_wrong_with_files_is_on_the_page(tmp_path: Path) -> None:
    write(tmp_path, started(), *steps(0, range(3)))
    with (tmp_path / "events" / "rank-0.jsonl").open("a") as file:
        file.write('{"kind":"<script>","rank":0}\nx\x00\n')
    known = Page(read(WatchedRun(tmp_path))).update()
    (line,) = known["complaints"]
    assert line.startswith("rank-0.jsonl: 2 lines cannot be read, the first: not an event")
    assert "<script>" in line
    assert known["run"]["step"] == 3


@pytest.mark.slow
def test_a_long_history_is_read_in_samples_first_and_as_a_whole_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail, "_PREVIEW", 300_000)
    monkeypatch.setattr(tail, "_WINDOWS", 200)
    monkeypatch.setattr(tail, "_BLOCK", 20_000)
    monkeypatch.setattr(tail, "_HISTORY_A_POLL_S", 0.0)
    numbers = range(2000)
    write(
        tmp_path, started(), begun(0), *steps(0, numbers), begun(1), *steps(1, numbers), RunEnded(LAUNCHER, 300.0, "ok")
    )
    run = WatchedRun(tmp_path)
    news = run.poll()
    run.apply(news)
    assert not news.more
    assert news.steps is not None
    assert 300 < len(news.steps) < 1500
    page = Page(run)
    early = page.update()
    assert early["run"]["missing"] > 0.5
    assert early["run"]["step"] == 2000
    assert early["run"]["status"] == "ok"
    # Of a history that is not known as a whole, examples and rates are what the samples tell.
    assert early["loss"]["examples"][-1] == 16 * 2000
    inside = [rate for rate in early["rates"]["rate"][10:-10] if rate]
    assert inside == pytest.approx([160.0] * len(inside), rel=0.05)
    monkeypatch.setattr(tail, "_HISTORY_A_POLL_S", 60.0)
    read(run)
    late = page.update()
    assert late["run"]["missing"] == 0
    assert late["run"]["examples"] == 16 * 2000
    monkeypatch.setattr(tail, "_PREVIEW", 1 << 30)
    whole = Page(read(WatchedRun(tmp_path))).update()
    assert late["loss"]["examples"] == whole["loss"]["examples"]
    assert late["loss"]["losses"][""] == pytest.approx(whole["loss"]["losses"][""], rel=1e-5)
    assert late["rates"]["rate"] == pytest.approx(whole["rates"]["rate"], rel=1e-3)
    assert summarize(tmp_path).training.examples == late["run"]["examples"]


def test_a_line_without_an_end_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail, "_BLOCK", 1000)
    write(tmp_path, started(), *steps(0, [0]))
    with (tmp_path / "events" / "rank-0.jsonl").open("ab") as file:
        file.write(b"\0" * 2500 + b"\n")
    write(tmp_path, *steps(0, [1]))
    known = Page(read(WatchedRun(tmp_path))).update()
    assert known["run"]["examples"] == 16
    assert known["complaints"][0].startswith("rank-0.jsonl: 3 lines cannot be read")
