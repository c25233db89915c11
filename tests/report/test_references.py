from __future__ import annotations

import dataclasses

import pytest

from headrace.report import References, summarize, verdict


@pytest.fixture
def run(tmp_path, make_run):
    """A run of 120 examples/s for two workers, 60 for one."""
    return lambda strategy, **options: summarize(make_run(tmp_path / strategy, strategy, **options))


def test_ratios(run):
    mirrored, one = run("mirrored"), run("one_device", workers=1)
    references = References(100.0, {1: 70.0, 2: 150.0})
    assert references.to_one_device(mirrored) == pytest.approx(1.2)
    assert references.to_ceiling(mirrored) == pytest.approx(0.8)
    assert references.to_ceiling(one) is None
    assert References(None, {}).to_one_device(mirrored) is None
    assert References(None, {3: 1.0}).to_ceiling(mirrored) is None


@pytest.mark.parametrize(
    ("one", "rate", "advice"),
    [
        (100.0, "mirrored 1.20 ×", "distribution pays here; mirrored is what to pick"),
        (117.0, "mirrored 1.03 ×", "as good as equal; one process is what to pick"),
        (125.0, "mirrored 0.96 ×", "as good as equal; one process is what to pick"),
        (150.0, "mirrored 0.80 ×", "does not pay here; one process is what to pick"),
    ],
)
def test_the_verdict_follows_the_ratio(run, one, rate, advice):
    sentence = verdict([run("one_device", workers=1), run("mirrored")], References(one, {}))
    assert rate in sentence
    assert advice in sentence
    assert "one_device" not in sentence


def test_the_verdict_without_anything_to_compare(run):
    assert "not known" in verdict([run("mirrored")], References(None, {}))
    assert "more than one worker" in verdict([run("one_device", workers=1)], References(60.0, {}))


def test_the_verdict_counts_no_run_that_failed(run):
    runs = [run("mirrored", status="failed"), run("central_storage")]
    sentence = verdict(runs, References(100.0, {}))
    assert "central_storage 1.20 ×" in sentence
    assert "mirrored 1.20" not in sentence
    assert "not finished: mirrored" in sentence


def test_the_verdict_warns_of_a_faster_run_that_learns_less(run):
    one, mirrored = run("one_device", workers=1), run("mirrored")
    (*_, last) = one.curves.evaluations
    better = dataclasses.replace(last, metrics={"loss": 0.25})
    one = dataclasses.replace(one, curves=dataclasses.replace(one.curves, evaluations=(better,)))
    assert "loss of 0.500 against 0.250" in verdict([one, mirrored], References(100.0, {}))
