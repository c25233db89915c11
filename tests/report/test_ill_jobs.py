"""Jobs that are slow on purpose: the verdict names why, and its remedy, typed, is faster. The benchmark has more."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from docs.pages import ROOT
from headrace.cli import run

JOB = ROOT / "benchmarks" / "verdicts" / "job.py"


def reported(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command of `headrace train`, and returns what its report says."""
    for arguments in ([*shlex.split(command)[1:], "--run-dir", str(folder)], ["report", str(folder), "--json"]):
        capsys.readouterr()
        with pytest.MonkeyPatch.context() as patch:
            # What a run says of its command.
            patch.setattr(sys, "argv", ["headrace", *arguments])
            assert run(arguments) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "options", "kind", "said", "setting"),
    [
        ("waits", "", "INPUT-BOUND", "map(waits)", "--set data.parallel=4"),
        pytest.param("burns", "", "INPUT-BOUND", "map(burns)", "--set data.cache=memory", marks=pytest.mark.full),
        pytest.param("far_away", "", "INPUT-BOUND", "source", "--set data.parallel=4", marks=pytest.mark.full),
        (
            "straggler",
            "--strategy mirrored --workers 2",
            "STRAGGLER",
            "as long as the others",
            "balance='",
        ),
    ],
)
def test_the_verdict_is_right_and_its_remedy_is_faster(
    case: str, options: str, kind: str, said: str, setting: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = reported(f"headrace train {JOB} --set case={case} {options}", tmp_path / "ill", capsys)
    bottleneck = found["bottleneck"]
    assert bottleneck["kind"] == kind
    assert said in bottleneck["because"]
    assert setting.partition("'")[0] in bottleneck["command"]
    assert bottleneck["command"] in bottleneck["remedy"]
    better = reported(bottleneck["command"], tmp_path / "better", capsys)
    # By several times, whatever else the machine does.
    assert better["examples_per_s"] > 1.5 * found["examples_per_s"]
