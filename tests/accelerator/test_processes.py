"""Scripts for Accelerate in two processes: their numbers are those of Accelerate."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from accelerator.in_processes import run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("accelerate") is None, reason="compares with accelerate"),
]


def test_the_numbers_are_those_of_accelerate(tmp_path: Path) -> None:
    theirs, ours = (run(library, tmp_path, "many_loops.py") for library in ("accelerate", "headrace"))
    assert len(theirs) == len(ours) == 2, (tmp_path / "headrace-0.txt").read_text()
    for their, our in zip(theirs, ours, strict=True):
        assert their.pop("gathered") == our.pop("gathered")
        assert their.keys() == our.keys()
        for name, values in their.items():
            assert len(values) > 40, name
            assert our[name] == pytest.approx(values, rel=1e-12, abs=1e-12), name
