"""The examples with Optuna and Ray Tune run with the real packages, and end the worse trials early."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from warm.programs import PYTHON

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def said_by(example: str, folder: Path) -> str:
    """Returns the last line of what an example prints itself; its files stay in a folder."""
    environment = {**os.environ, "HOME": str(folder), "PYTHONPATH": str(EXAMPLES.parent / "src")}
    command = [PYTHON, EXAMPLES / example]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    return next(line for line in reversed(done.stdout.splitlines()) if "; the best has " in line)


@pytest.mark.slow
@pytest.mark.full
def test_optuna_ends_trials_that_are_worse_than_the_median(tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="pip install optuna")
    said = re.fullmatch(
        r"(\d+) of 12 trials ended early; the best has {.*}: (\d\.\d+)", said_by("tune_optuna.py", tmp_path)
    )
    assert said
    assert 0 < int(said[1]) < 12
    assert float(said[2]) < 0.3


@pytest.mark.slow
@pytest.mark.full
def test_ray_tune_ends_trials_after_the_first_rung(tmp_path: Path) -> None:
    pytest.importorskip("ray.tune", reason="pip install 'ray[tune]'")
    said = re.fullmatch(r"epochs of the trials: \[(.*)\]; the best has {.*}: \d\.\d+", said_by("tune_ray.py", tmp_path))
    assert said
    lengths = [int(each) for each in said[1].split(", ")]
    assert len(lengths) == 6
    assert lengths[0] < lengths[-1] == 4
