"""The list of tests about faults holds them all, and what failed is read from what pytest has said."""

from __future__ import annotations

import json
from pathlib import Path

from fault_suite.files import FILES, STRIKES
from fault_suite.main import failed, tally

TESTS = Path(__file__).parents[1]


def test_every_file_is_there_once() -> None:
    assert list(FILES) == sorted(set(FILES))
    assert [name for name in FILES if not (TESTS.parent / name).is_file()] == []


def test_no_test_that_strikes_a_process_is_left_out() -> None:
    places = [
        path for room in ("engine", "parameter_server", "collectives") for path in (TESTS / room).glob("test_*.py")
    ]
    strikes = {
        str(path.relative_to(TESTS.parent)) for path in places if any(word in path.read_text() for word in STRIKES)
    }
    assert len(strikes) > 20
    assert strikes - set(FILES) == set()


def test_what_failed_is_read_from_the_summary() -> None:
    said = """
FAILED tests/engine/test_hosts.py::test_a[cut - one way] - AssertionError: it took 3 s
FAILED tests/engine/test_hosts.py::test_b
ERROR tests/engine/test_hosts.py::test_c - OSError
PASSED tests/engine/test_hosts.py::test_d
"""
    assert failed(said) == [f"tests/engine/test_hosts.py::test_{name}" for name in ("a[cut - one way]", "b", "c")]


def test_repetitions_are_added_up(tmp_path: Path) -> None:
    path = tmp_path / "fault_suite.jsonl"
    row = {"date": "2026-11-26", "number": 3, "seconds": 900.0, "code": 0, "failures": [], "all": True}
    rows = [row, row | {"code": 1, "failures": ["a::b"]}, row | {"code": 1, "all": False}]
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    assert tally(path).splitlines() == [
        "fault_suite.jsonl: 2 repetitions, 0.50 hours, 1 with a failure",
        "  2026-11-26, repetition 3: a::b",
    ]
