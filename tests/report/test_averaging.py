"""The meetings of workers that average, in words, as JSON values and on the page."""

from __future__ import annotations

from headrace.report import References, comparison_table, run_plain, summarize, write_page
from headrace.report.views.table import run_rows
from headrace.spec.events import ParametersAveraged, RunEnded, RunStarted
from report.test_server_words import _render

BECAUSE = "the exchange takes 3.1% of the time, at most 5% is allowed"
MEETINGS = (
    ParametersAveraged(0, 1.2, 2, 2, 4, "as asked for", 0.02, 0.004),
    ParametersAveraged(0, 2.2, 6, 4, 4, "as asked for", 0.06, 0.006),
    ParametersAveraged(0, 3.0, 10, 4, 8, BECAUSE, 0.04, 0.005, (1,)),
)


def test_a_run_without_meetings_says_nothing_of_them(tmp_path, make_run):
    summary = summarize(make_run(tmp_path / "run"))
    assert summary.averaging is None
    assert run_plain(summary)["averaging"] is None
    assert "averaging" not in dict(run_rows(summary))
    assert "Drift when workers meet" not in write_page(tmp_path / "page.html", [summary]).read_text()


def test_the_meetings_of_one_run_in_words_and_pictures(tmp_path, make_run):
    summary = summarize(make_run(tmp_path / "run", "parameter_averaging", extra=MEETINGS))
    rows = dict(run_rows(summary))
    assert rows["averaging"] == "3 meetings, one in 3.33 rounds, 5.00 ms each; the last period is 8 rounds"
    assert rows["period because"] == BECAUSE
    assert rows["drift"] == "mean 0.04, largest 0.06 of the parameters' norm, after 6 rounds"
    assert rows["left out"] == "rank 1 1 ×: parameters that were not finite; they went on from the others' mean"
    page = write_page(tmp_path / "page.html", [summary]).read_text()
    assert "Drift when workers meet" in page
    assert "Rounds between meetings" in page
    plain = run_plain(summary)["averaging"]
    assert plain["left_out"] == {"1": 1}
    assert [meeting["step"] for meeting in plain["meetings"]] == [2, 6, 10]


def test_a_period_that_does_not_change_has_no_picture(tmp_path, make_run):
    summary = summarize(make_run(tmp_path / "run", "parameter_averaging", extra=MEETINGS[:2]))
    page = write_page(tmp_path / "page.html", [summary]).read_text()
    assert "Drift when workers meet" in page
    assert "Rounds between meetings" not in page


def test_a_comparison_says_one_sentence(tmp_path, make_run):
    runs = [
        summarize(make_run(tmp_path / "mirrored")),
        summarize(make_run(tmp_path / "mean", "parameter_averaging", extra=MEETINGS)),
    ]
    lines = _render(comparison_table(runs, References()))
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    sentence = f"3 meetings, one in 3.33 rounds, the last period 8 rounds ({BECAUSE}); drift mean 0.04, largest 0.06."
    assert f"mean (parameter_averaging): {sentence}" in text
    assert text.count("meetings, one in") == 1


def test_what_was_done_again_counts_once(tmp_path, make_run, write_events):
    run_dir = make_run(tmp_path / "run", "parameter_averaging", status="interrupted", extra=MEETINGS)
    first = summarize(run_dir).started
    again = RunStarted(-1, 4.0, *(getattr(first, name) for name in RunStarted.__match_args__[2:11]), resumed_step=6)
    last = ParametersAveraged(0, 5.0, 9, 3, 3, "as asked for", 0.01, 0.004)
    write_events(run_dir, [again, last, RunEnded(-1, 6.0, "ok")])
    meetings = summarize(run_dir).averaging.meetings
    assert [(meeting.step, meeting.time_s) for meeting in meetings] == [(2, 1.2), (6, 2.2), (9, 5.0)]
