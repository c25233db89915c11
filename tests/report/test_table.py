from __future__ import annotations

import dataclasses
import io
import json

import pytest
from msgspec import structs

from headrace.report.model.summary import Summary, summarize
from headrace.report.model.verdict import References
from headrace.report.views.table import comparison_plain, comparison_table, run_plain, run_rows, run_table
from headrace.spec.events import LAUNCHER, Failed, NonFinite, RunEnded, Saved
from headrace.spec.plain import finite

HOSTILE = "[red]a-very-long-name-of-a-strategy-\x1b[31m-that-does-not-end"


def _render(table, width=80) -> list[str]:
    from rich.console import Console

    text = io.StringIO()
    Console(file=text, width=width, color_system=None).print(table)
    return [line.rstrip() for line in text.getvalue().splitlines()]


@pytest.fixture
def runs(tmp_path, make_run) -> list[Summary]:
    names = ("mirrored", "central_storage")
    return [summarize(make_run(tmp_path / name, name)) for name in names]


def test_a_comparison_shows_every_number_in_80_columns(runs):
    lines = _render(comparison_table(runs, References(100.0, {2: 150.0})))
    assert max(map(len, lines)) <= 80
    (row,) = [line for line in lines if line.startswith("mirrored")]
    # workers, accuracy, examples/s, ratios, kB moved as MB, compute, exchange, update, wait, peak MB
    assert " ".join(row.split()) == "mirrored 2 0.700 120 1.20 0.80 0 70.0 20.0 9.00 1.00 300"
    text = " ".join(" ".join(lines).split())
    for word in ("accuracy: of the last", "(100 ex/s)", "150 with 2", "one process, all 1 100 1.00 threads"):
        assert word in text, word


def test_strategies_that_need_not_equal_one_device_are_named(runs):
    lines = _render(comparison_table(runs, References(may_differ=(runs[1].label,))))
    assert max(map(len, lines)) <= 80
    said = "Need not equal one device, so their loss may differ from its: central_storage."
    assert said in " ".join(lines)
    plain = comparison_plain(runs, References(may_differ=(runs[1].label,)))
    assert [run["may_differ"] for run in plain["runs"]] == [False, True]
    assert "Need not equal" not in " ".join(_render(comparison_table(runs, References())))


def test_large_numbers_and_hostile_names_stay_in_80_columns(runs):
    big = []
    for run in runs:
        started = structs.replace(run.started, strategy=HOSTILE, workers=128)
        training = dataclasses.replace(run.training, examples_per_s=1.23456e7)
        cost = dataclasses.replace(run.cost, moved_bytes_per_step=3.2e10, peak_memory_bytes=88_000_000_000)
        times = dataclasses.replace(run.times, compute_s=61.2, exchange_s=12.3)
        big.append(dataclasses.replace(run, started=started, training=training, cost=cost, times=times))
    lines = _render(comparison_table(big, References(1e5, {128: 1.5e7})))
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    for cell in ("12.3M", "0.82", "32000", "88000", "61200", "12300", "128", " 123 "):
        assert cell in text
    assert "\x1b" not in text
    assert "[red]" in text


def test_a_run_that_failed_is_marked_and_explained(runs):
    failure = Failed(1, 2.0, 7, "ValueError: [bold]bad")
    outcome = dataclasses.replace(runs[0].outcome, status="failed", failure=failure, cause=failure.cause)
    lines = _render(comparison_table([dataclasses.replace(runs[0], outcome=outcome), runs[1]], References()))
    assert any(line.startswith("mirrored !") for line in lines)
    assert "! mirrored: failed after 10 steps: ValueError: [bold]bad" in " ".join(lines)


def test_a_comparison_without_numbers_shows_dashes(tmp_path, write_events, runs):
    bare = summarize(write_events(tmp_path / "bare", [runs[0].started]))
    lines = _render(comparison_table([bare], References()))
    (row,) = [line for line in lines if line.endswith("–")]
    assert row.split()[-11:] == ["2", *["–"] * 10]


def test_one_run_as_text(runs):
    lines = _render(run_table(runs[0]))
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    for words in (
        "steps 10 of 16 examples, 2 epochs",
        "examples/s 120 in steady state",
        "evaluation loss 0.500, accuracy 0.700 after 2 epochs",
        "mean step 120 ms: compute 70.0 (58 %), exchange 20.0 (17 %), update 9.00 (7.5 %)",
        "between steps 20.0 (17 %)",
        "moved a step 1.00 kB by all workers",
        "peak memory 300 MB in the largest process",
        "2 workers on mill (cpu), 1 thread each",
        "notice the batch is split",
    ):
        assert words in text, words


def test_one_epoch_is_not_several(runs):
    point = dataclasses.replace(runs[0].curves.evaluations[-1], epochs=1.0)
    curves = dataclasses.replace(runs[0].curves, evaluations=(point,))
    training = dataclasses.replace(runs[0].training, epochs=1.0)
    once = dataclasses.replace(runs[0], curves=curves, training=training)
    text = " ".join(" ".join(_render(run_table(once))).split())
    assert "of 16 examples, 1 epoch training time" in text
    assert "accuracy 0.700 after 1 epoch mean step" in text


def test_the_json_values_are_json_and_exact(runs):
    plain = comparison_plain(runs, References(100.0, {2: 150.0}))
    assert json.loads(json.dumps(plain, allow_nan=False)) == finite(plain)
    first = plain["runs"][0]
    assert first["ratio_to_one_device"] == pytest.approx(1.2)
    assert first["ratio_to_ceiling"] == pytest.approx(0.8)
    assert first["metrics"] == {"loss": 0.5, "accuracy": 0.7}
    assert first["step_seconds_by_rank"]["1"]["exchange"] == pytest.approx(0.02)
    assert plain["references"]["ceiling_examples_per_s"] == {"2": 150.0}
    assert "distribution pays" in plain["verdict"]


def test_what_is_not_finite_is_null(runs):
    (*_, last) = runs[0].curves.evaluations
    curves = dataclasses.replace(
        runs[0].curves, evaluations=(dataclasses.replace(last, metrics={"loss": float("nan")}),)
    )
    assert run_plain(dataclasses.replace(runs[0], curves=curves))["metrics"] == {"loss": None}


def test_a_run_says_of_checkpoints_and_attempts_only_where_there_are_some(tmp_path, make_run, write_events, runs):
    names = ("attempts", "resumed", "checkpoints", "not finite")
    assert not [name for name, _ in run_rows(runs[0]) if name in names]
    plain = run_plain(runs[0])
    assert [plain[key] for key in ("attempts", "resumed_step", "saves", "non_finite")] == [1, 0, None, None]
    skipped = [NonFinite(0, 1.7, step, (1,), action) for step, action in ((6, "skip"), (7, "rollback"))]
    # The stall ends at 1.4 s, and lasts 11 ms of 1.1 s of training.
    saves = [Saved(0, 1.5, 3, 40, 0.011, 0.1), Saved(0, 3.35, 10, 84_000_000, 0.031, 0.1)]
    run_dir = make_run(tmp_path / "saved", status="failed", extra=[*saves, *skipped])
    rows = dict(run_rows(summarize(run_dir)))
    assert rows["checkpoints"] == (
        "2, the last at step 10, 84.0 MB; training stood still: mean 21.0 ms, longest 31.0 ms, 1.0 % of its time"
    )
    assert rows["not finite"] == "2 rounds left out, 1 of them with a rollback"
    again = structs.replace(runs[0].started, time_s=4.0, resumed_step=10)
    resumed = summarize(write_events(run_dir, [again, RunEnded(LAUNCHER, 5.0, "ok")]))
    rows = dict(run_rows(resumed))
    assert (rows["status"], rows["attempts"]) == ("ok", "2, resumed at step 10")
    plain = run_plain(resumed)
    assert (plain["attempts"], plain["resumed_step"], plain["non_finite"]["rolled_back"]) == (2, 10, 1)
    assert plain["saves"]["bytes"] == 84_000_000
    other = summarize(write_events(tmp_path / "other", [structs.replace(again, time_s=0.0)]))
    assert dict(run_rows(other))["resumed"] == "at step 10, which another run had reached"
