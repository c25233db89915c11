"""Which strategy is recommended: none that is disturbed, at chance, or far above one device's loss."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from headrace.report.model.summary import Summary, summarize
from headrace.report.model.training import EvaluationPoint, LossPoint
from headrace.report.model.verdict import References, compared, verdict
from headrace.report.views.table import comparison_plain, comparison_table

Make = Callable[..., Summary]


@pytest.fixture
def run(tmp_path: Path, make_run: Callable[..., Path]) -> Make:
    """`run(strategy, rate, {epochs: loss, ...})`: a run whose loss began at 2.3."""

    def make(strategy: str, rate: float, losses: Mapping[float, float], workers: int = 2) -> Summary:
        summary = summarize(make_run(tmp_path / strategy, strategy, workers=workers))
        points = tuple(EvaluationPoint(0, epochs, epochs, {"loss": loss}, 0.1) for epochs, loss in losses.items())
        return dataclasses.replace(
            summary,
            training=dataclasses.replace(summary.training, examples_per_s=rate),
            curves=dataclasses.replace(summary.curves, evaluations=points, first_loss=2.3),
        )

    return make


def one_device(run: Make) -> Summary:
    return run("one_device", 100.0, {1: 1.3, 2: 0.3}, workers=1)


REFERENCES = References(100.0, {2: 200.0})


def test_the_fastest_to_a_loss_is_recommended_and_not_the_fastest(run: Make) -> None:
    steady = run("mirrored", 180.0, {1: 1.3, 2: 0.3})
    hasty = run("downpour", 190.0, {1: 2.1, 2: 0.45})
    sentence = verdict([one_device(run), steady, hasty], REFERENCES)
    assert sentence.startswith("downpour 1.90 ×, mirrored 1.80 × the examples/s")
    assert "distribution pays here; mirrored is what to pick for speed to a loss of 0.500" in sentence


def test_equal_losses_below_0_are_not_told_apart(run: Make) -> None:
    single = run("one_device", 100.0, {1: -1.3, 2: -2.0}, workers=1)
    sentence = verdict([single, run("mirrored", 180.0, {1: -1.3, 2: -2.0})], REFERENCES)
    assert "mirrored is what to pick for speed to a loss of" in sentence
    assert "though it ends at a loss" not in sentence


def test_the_speed_to_a_loss_is_told_where_it_is_not_that_of_the_examples(run: Make) -> None:
    as_usual = verdict([one_device(run), run("mirrored", 150.0, {1: 1.3, 2: 0.3})], REFERENCES)
    assert "mirrored is what to pick for speed to a loss of 0.500." in as_usual
    quick = verdict([one_device(run), run("averaging", 150.0, {1: 0.5, 2: 0.3})], REFERENCES)
    assert "averaging is what to pick for speed to a loss of 0.500, 2.70 × as fast to it" in quick


@pytest.mark.parametrize(
    ("last", "said"),
    [
        (2.29, "hasty is not recommended: it ends at chance, at a loss of 2.29 against 0.300; it began at 2.30"),
        (0.9, "hasty is not recommended: it ends far above one device, at a loss of 0.900 against 0.300"),
        (float("nan"), "hasty is not recommended: it ends at chance"),
    ],
)
def test_a_run_that_learns_less_is_named_and_not_recommended(run: Make, last: float, said: str) -> None:
    sentence = verdict([one_device(run), run("hasty", 190.0, {2: last})], REFERENCES)
    assert said in sentence
    assert "distribution does not pay here; one process is what to pick" in sentence


def test_without_evaluations_the_training_loss_counts(run: Make) -> None:
    def trained(summary: Summary, last: float) -> Summary:
        points = tuple(LossPoint(72 * at // 40, at, 2.3 + (last - 2.3) * at / 40) for at in range(1, 41))
        curves = dataclasses.replace(summary.curves, loss=points, evaluations=())
        return dataclasses.replace(summary, curves=curves)

    one, hasty = trained(one_device(run), 0.3), trained(run("hasty", 190.0, {}), 1.5)
    assert "hasty is not recommended: it ends far above one device" in verdict([one, hasty], REFERENCES)


def test_without_one_device_the_best_run_is_what_others_are_compared_to(run: Make) -> None:
    runs = [run("mirrored", 150.0, {1: 1.3, 2: 0.3}), run("hasty", 190.0, {1: 2.3, 2: 2.3})]
    sentence = verdict(runs, REFERENCES)
    assert "mirrored is what to pick" in sentence
    assert "hasty is not recommended: it ends at chance" in sentence


DOUBTS = {"mirrored": ("its rate varied by 43 %", "other programs kept 1.2 of 2 cores busy")}


def test_a_disturbed_run_is_marked_in_80_columns_and_not_recommended(run: Make) -> None:
    from rich.console import Console

    runs = [one_device(run), run("mirrored", 190.0, {2: 0.3}), run("central_storage", 120.0, {2: 0.3})]
    references = dataclasses.replace(REFERENCES, doubts=DOUBTS)
    sentence = verdict(runs, references)
    assert "central_storage is what to pick" in sentence
    assert "mirrored 1.90" not in sentence
    assert "disturbed, so not recommended: mirrored" in sentence
    text = io.StringIO()
    Console(file=text, width=80, color_system=None).print(comparison_table(runs, references))
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("mirrored ~") for line in lines)
    assert "~ mirrored: disturbed: its rate varied by 43 %; other programs" in " ".join(text.getvalue().split())
    plain = comparison_plain(runs, references)
    assert [each["disturbed"] for each in plain["runs"]] == [None, "; ".join(DOUBTS["mirrored"]), None]


def test_if_one_process_was_disturbed_nothing_is_recommended(run: Make) -> None:
    references = dataclasses.replace(REFERENCES, one_device_doubts=("7 % of the processor time was stolen",))
    sentence = verdict([run("mirrored", 190.0, {2: 0.3})], references)
    assert "not known: one process was disturbed (7 % of the processor time was stolen)" in sentence
    assert "pick" not in sentence


def test_the_rate_is_that_of_the_last_measurement(tmp_path: Path, make_run: Callable[..., Path]) -> None:
    make_run(tmp_path / "mirrored")
    make_run(tmp_path / "again-1-mirrored", workers=1)
    first = compared(tmp_path, "mirrored", REFERENCES)
    again = compared(tmp_path, "mirrored", References(measured_again={"mirrored": "again-1-mirrored"}))
    assert (first.label, again.label, again.workers) == ("mirrored", "mirrored", 2)
    assert again.examples_per_s == pytest.approx((first.examples_per_s or 0) / 2)
    assert again.metrics == first.metrics
