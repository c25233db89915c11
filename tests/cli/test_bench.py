"""`headrace bench`: what is asked for, and the forms of the answer."""

from __future__ import annotations

import json
import shlex
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from headrace.bench import measuring
from headrace.bench.advice import JobFacts
from headrace.bench.figures import Figure, MachineFigures
from headrace.bench.settings import FULL, QUICK, Effort
from headrace.cli import run

Capture = pytest.CaptureFixture[str]
FOUND = MachineFigures("here", (Figure("training", "AlexNet", "CPU", 400.0, "ms"),), facts={"torch": "2"})


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[object]:
    """What `measure` was asked, in place of measuring."""
    seen: list[object] = []

    def measure(effort: Effort, folder: Path, only: tuple[str, ...], say: object, save: Path | None) -> MachineFigures:
        seen.extend([effort, folder, only, *([save] if save else [])])
        return FOUND

    monkeypatch.setattr(measuring, "measure", measure)
    monkeypatch.chdir(tmp_path)
    return seen


def test_what_is_asked_for(asked: list[object], capsys: Capture) -> None:
    assert run(["bench"]) == 0
    assert run(shlex.split("bench --quick --only matrix,storage --folder /tmp")) == 0
    assert run(shlex.split("bench --only matrix --save kept.json")) == 0
    assert asked[:6] == [FULL, Path(), measuring.GROUPS, QUICK, Path("/tmp"), ("matrix", "storage")]
    assert asked[6:] == [FULL, Path(), ("matrix",), Path("kept.json")]
    assert "AlexNet ms              400\n" in capsys.readouterr().out


def test_the_json_of_one_machine_is_compared_with_on_another(asked: list[object], capsys: Capture) -> None:
    assert run(["bench", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["advice"].startswith("Whether a GPU would help is not known")
    document["figures"][0] |= {"column": "GPU", "value": 4.0}
    Path("other.json").write_text(json.dumps(document))
    assert run(["bench", "--beside", "other.json", "--out", "pages/bench.html"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "The GPU of here (GPU) trains the networks above 100 times as fast" in said
    assert "trains the networks above 100 times" in Path("pages/bench.html").read_text()
    assert run(["bench", "--beside", "other.json", "--json"]) == 0
    assert "trains the networks above 100 times" in json.loads(capsys.readouterr().out)["advice"]


def test_what_cannot_be_meant(asked: list[object], tmp_path: Path, capsys: Capture) -> None:
    assert run(["bench", "--beside", "none.json"]) == 2
    assert "none.json cannot be read as figures of a machine" in capsys.readouterr().err
    assert asked == []
    (tmp_path / "file").touch()
    assert run(["bench", "--out", "file/page.html"]) == 3
    assert "the page file/page.html cannot be written" in capsys.readouterr().err


def test_a_job_is_measured_first_and_answered_for(
    asked: list[object], stage: Any, job_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def job_facts(job: Any, name: str, say: Any) -> JobFacts:
        say("the input alone")
        return JobFacts(name, 32, 0.1, 200, 1000, 1e6, gpu_step_s=0.01)

    module = types.ModuleType("headrace.api.model_profile")
    vars(module)["job_facts"] = job_facts
    monkeypatch.setitem(sys.modules, "headrace.api.model_profile", module)
    assert run(["bench", "digits.py", "--set", "lr=0.3"]) == 0
    out, err = capsys.readouterr()
    assert "A step of digits of 32 examples takes 100 ms on the processors" in " ".join(out.split())
    assert err == "the input alone\n"
    assert run(["bench", "digit.py"]) == 2
