import json

import pytest

from headrace.cli import run
from headrace.cli.checks import Check, Verdict, examine, worst

Capture = pytest.CaptureFixture[str]

OK = Check("python", Verdict.OK, "3.11.7")
WARNING = Check("cores", Verdict.WARNING, "1 usable of 1", "give more cores")
PROBLEM = Check("torch", Verdict.PROBLEM, "not installed", "pip install torch==2.13.0")


def say(monkeypatch: pytest.MonkeyPatch, *checks: Check) -> None:
    import sys

    monkeypatch.setattr(sys.modules["headrace.cli.commands.doctor"], "examine", lambda: list(checks))


@pytest.mark.parametrize(("checks", "code"), [((OK,), 0), ((OK, WARNING), 0), ((WARNING, PROBLEM, OK), 3)])
def test_only_a_problem_fails(checks: tuple[Check, ...], code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, *checks)
    assert run(["doctor"]) == code


def test_a_line_has_a_verdict_and_a_remedy(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    say(monkeypatch, OK, PROBLEM)
    run(["doctor"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["ok", "python", "3.11.7"],
        ["problem", "torch", "not", "installed"],
        ["->", "pip", "install", "torch==2.13.0"],
    ]


def test_as_json(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    say(monkeypatch, OK, WARNING)
    run(["doctor", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert result["verdict"] == "warning"
    assert result["checks"][1] == {
        "name": "cores",
        "verdict": "warning",
        "found": "1 usable of 1",
        "remedy": "give more cores",
    }


def test_the_worst_counts() -> None:
    assert worst([]) is Verdict.OK
    assert worst([OK, PROBLEM, WARNING]) is Verdict.PROBLEM
    assert worst([WARNING, OK]) is Verdict.WARNING


@pytest.mark.slow
def test_this_machine() -> None:
    found = {check.name: check for check in examine()}
    assert {"python", "torch", "accelerators", "numpy", "cores", "memory", "shared memory", "disk"} <= set(found)
    assert found["torch"].verdict is Verdict.OK
    assert all(check.remedy for check in found.values() if check.verdict is not Verdict.OK)
    assert [check for check in found.values() if check.verdict is Verdict.PROBLEM] == []
