import json
from pathlib import Path

import pytest

from headrace.cli import run
from headrace.report.model.summary import summarize
from headrace.report.model.verdict import References
from headrace.report.views.table import comparison_plain

Capture = pytest.CaptureFixture[str]
pytestmark = pytest.mark.slow


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_page_and_the_summary(here: Path, make_run, capsys: Capture) -> None:
    make_run(here / "a", strategy="mirrored")
    assert run(["report", "a"]) == 0
    out = capsys.readouterr().out
    assert "accuracy 0.875" in out
    assert out.splitlines()[-1] == "page: a/report.html"
    assert "<svg" in (here / "a" / "report.html").read_text()


def test_elsewhere_and_as_json(here: Path, make_run, capsys: Capture) -> None:
    make_run(here / "a", status="failed")
    assert run(["report", "a", "--out", "pages/x.html", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["status"], result["page"]) == ("failed", "pages/x.html")
    assert (here / "pages" / "x.html").is_file()


def test_a_comparison(here: Path, make_run, capsys: Capture) -> None:
    labels = ("one_device", "mirrored")
    for label in labels:
        make_run(here / "c" / label, strategy=label)
    make_run(here / "c" / "again-1-mirrored", strategy="mirrored")
    references = References(
        one_device_examples_per_s=5.0,
        ceiling_examples_per_s={2: 9.0},
        doubts={"mirrored": ("its rate varied by 43 %",)},
        measured_again={"mirrored": "again-1-mirrored"},
        may_differ=("mirrored",),
    )
    document = comparison_plain([summarize(here / "c" / label) for label in labels], references)
    (here / "c" / "comparison.json").write_text(json.dumps(document))
    assert run(["report", "c", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [each["label"] for each in result["runs"]] == list(labels)
    assert result["references"] == json.loads(json.dumps(document["references"]))
    assert [each["disturbed"] for each in result["runs"]] == [None, "its rate varied by 43 %"]
    assert [each["may_differ"] for each in result["runs"]] == [False, True]
    assert "disturbed, so not recommended: mirrored" in result["verdict"]
    assert "one_device" in (here / "c" / "report.html").read_text()


def test_a_damaged_comparison(here: Path, capsys: Capture) -> None:
    (here / "comparison.json").write_text('{"runs": []}')
    assert run(["report", "."]) == 5
    assert "is no comparison" in capsys.readouterr().err


def test_no_run_there(here: Path, capsys: Capture) -> None:
    assert run(["report", "nowhere"]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_a_page_that_cannot_be_written(here: Path, make_run, capsys: Capture) -> None:
    make_run(here / "a")
    assert run(["report", "a", "--out", "a/events"]) == 3
    assert "the page a/events cannot be written: Is a directory" in capsys.readouterr().err
