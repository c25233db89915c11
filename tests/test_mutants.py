"""The table of planted faults is true: each can be planted, and names a test that there is."""

from __future__ import annotations

import pytest

from mutants import ROOT, Mutant, mutants

MUTANTS = mutants()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.what)
def test_a_fault_can_be_planted_and_its_test_is_there(mutant: Mutant) -> None:
    text = (ROOT / "src" / "headrace" / mutant.file).read_text(encoding="utf-8")
    assert text.count(mutant.old) == 1
    assert mutant.new != mutant.old
    file, *names = mutant.tests.split("::")
    assert f"def {names[-1].partition('[')[0]}(" in (ROOT / file).read_text(encoding="utf-8")


def test_no_fault_is_there_twice() -> None:
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS}) == len(MUTANTS)
    assert len({mutant.what for mutant in MUTANTS}) == len(MUTANTS)
