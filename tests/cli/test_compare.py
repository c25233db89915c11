import json
from pathlib import Path

import pytest

from headrace.cli import run

Capture = pytest.CaptureFixture[str]


def test_a_table_a_verdict_and_where_the_page_lies(stage, job_file: Path, capsys: Capture) -> None:
    arguments = ["--strategies", "one_device,mirrored", "--workers", "2", "--run-dir", "runs/c"]
    assert run(["compare", "digits.py", *arguments]) == 0
    out, err = capsys.readouterr()
    assert stage.seen == ["engine begins", "compare", "engine ends"]
    assert [each.name for each in stage.chosen] == ["one_device", "mirrored"]
    assert stage.chosen[1].workers == 2
    assert out.splitlines()[-2:] == ["run dir: runs/c", "page: runs/c/report.html"]
    assert "central_storage" not in out
    assert max(len(line) for line in out.splitlines()) <= 80
    assert err == ""


def test_the_result_as_json(stage, job_file: Path, capsys: Capture) -> None:
    assert run(["compare", "digits.py", "--workers", "2", "--run-dir", "runs/c", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [each["strategy"] for each in result["runs"]] == ["one_device", "mirrored", "central_storage"]
    assert result["verdict"]
    assert result["page"] == "runs/c/report.html"


def test_a_directory_of_its_own(stage, job_file: Path) -> None:
    assert run(["compare", "digits.py"]) == 0
    assert stage.asked["run_dir"].name.startswith("compare-digits-2")


@pytest.mark.parametrize("names", ["one_device,mirored", "one_device,,mirrored", "mirrored,mirrored"])
def test_wrong_names_start_nothing(stage, job_file: Path, names: str, capsys: Capture) -> None:
    assert run(["compare", "digits.py", "--strategies", names]) == 2
    assert stage.seen == []
    assert "mirrored" in capsys.readouterr().err


def test_an_interrupted_comparison(stage, job_file: Path) -> None:
    stage.status = "interrupted"
    assert run(["compare", "digits.py"]) == 130
