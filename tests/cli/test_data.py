"""`headrace data profile`: three rates, what each stage costs, a verdict."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import run
from headrace.report.model.inputs import InputSummary
from headrace.report.model.summary import Summary, summarize
from headrace.spec.events import Event, InputStageStats, InputStats, Stepped

Capture = pytest.CaptureFixture[str]

STAGES = (
    InputStageStats("source", 0.25, 0.125),
    InputStageStats(f"map({'very_' * 10}slow)", 2.0, 0.0),
    InputStageStats("batch", 0.25, 0.0),
)


def fed(rank: int = 0) -> InputStats:
    return InputStats(rank, 7.5, "threads", 2, 5.0, 3.0, 6, 6, 250, 24_000, 1, STAGES)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, events: Callable[..., dict[int, list[Event]]]) -> Any:
    """A profile that was measured; holds what was asked for."""
    from cli.conftest import write_run

    asked: dict[str, Any] = {}

    def summary(label: str, wait_s: float, rest_s: float, strategy: str, workers: int) -> Summary:
        told = events(strategy, workers)
        for rank in range(workers):
            steps = [
                Stepped(rank, 1.0 + step, step, 0, 4, 0.5, 4, wait_s, rest_s / 2, rest_s / 4, rest_s / 4)
                for step in range(6)
            ]
            told[rank] = [told[rank][0], *steps, fed(rank), told[rank][-1]]
        write_run(tmp_path / label, told)
        return summarize(tmp_path / label)

    def profile(job: Any, strategy: Any, **how: Any) -> Any:
        asked.update(how, strategy=strategy)
        how["say"]("the input alone")
        alone = fed()
        ceiling, together = (
            summary(label, wait_s, 0.4, strategy.name, getattr(strategy, "workers", 1))
            for label, wait_s in (("ceiling", 0.0), ("together", 0.6))
        )
        return types.SimpleNamespace(
            alone=alone,
            alone_per_s=50.0,
            ceiling=ceiling,
            together=together,
            bottleneck=together.bottleneck,
            stages=InputSummary({0: alone}),
        )

    module = types.ModuleType("headrace.api.profiling")
    vars(module)["profile"] = profile
    monkeypatch.setitem(sys.modules, "headrace.api.profiling", module)
    return asked


def test_what_it_says(stage: Any, asked: dict[str, Any], job_file: Path, capsys: Capture) -> None:
    assert run(["data", "profile", "digits.py", "--strategy", "mirrored", "--workers", "2", "--seconds", "2"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        "digits: mirrored, 2 workers, batches of 8",
        "",
        "                      examples/s",
        "the input alone             50.0   read by 2 threads",
        "the training alone          8.00   with batches that lie ready: the ceiling",
        "both together               8.00   100 % of the ceiling",
        "",
        "A second of a worker goes to: waiting for data 600 ms, compute 200 ms, exchange",
        "100 ms, update 100 ms.",
        "",
        "stage                                ms an example  of the input  of it waiting",
        "source                                        1.00          10 %           50 %",
        "map(very_very_very_very_very_very_…           8.00          80 %          0.0 %",
        "batch                                         1.00          10 %          0.0 %",
        "2 examples could not be had and were left out",
        "",
        "INPUT-BOUND: by map(very_very_very_very_very_very_very_very_very_very_slow),",
        "80 % of the input's cost; a worker waits for data 60 % of its time",
        "Try next: keep what does not change from epoch to epoch:",
        'data=hr.data.read_by(data, cache="memory")',
    ]
    assert max(map(len, out.splitlines())) <= 80
    assert err == "measuring the input alone\n"
    assert asked["seconds"] == 2
    assert asked["strategy"].workers == 2


def test_the_result_as_json(stage: Any, asked: dict[str, Any], job_file: Path, capsys: Capture) -> None:
    assert run(["data", "profile", "digits.py", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["job"], found["strategy"], found["workers"]) == ("digits", "one_device", 1)
    assert found["alone"]["examples_per_s"] == 50.0
    assert found["alone"]["stages"][1]["ms_per_example"] == pytest.approx(8.0)
    assert found["together"]["of_ceiling"] == pytest.approx(1.0)
    assert found["together"]["second"]["waiting for data"] == pytest.approx(0.6)
    assert found["together"]["waits"] == {"0": pytest.approx(0.6)}
    assert found["bottleneck"]["kind"] == "INPUT-BOUND"
    assert found["bottleneck"]["stage"] == STAGES[1].name


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["profile", "digits.py", "--workers", "2"], "try --strategy mirrored"),
        (["profile", "digits.py", "--strategy", "miror"], "did you mean 'mirrored'?"),
        (["profile", "digit.py"], "did you mean digits.py?"),
        (["show", "digits.py"], "profile"),
    ],
)
def test_what_cannot_be_meant(stage: Any, job_file: Path, arguments: list[str], said: str, capsys: Capture) -> None:
    assert run(["data", *arguments]) == 2
    assert said in capsys.readouterr().err


JOB = """
import torch
import headrace as hr

def steady(example, rng):
    return example + rng.random()

def noisy(example):
    return example + torch.rand(())

def job(noise=False):
    data = hr.data.from_arrays(torch.arange(100.0)).map(lambda example: example[0]).map(noisy if noise else steady)
    return hr.Job(model=dict, optimizer=dict, data=data, global_batch_size=8, loss=lambda o, t: None, epochs=1)
"""


def test_whether_examples_are_the_same_twice(stage: Any, job_file: Path, capsys: Capture) -> None:
    job_file.write_text(JOB)
    check = ["data", "profile", "digits.py", "--check-deterministic"]
    assert run(check) == 0
    assert capsys.readouterr().out.startswith("deterministic: 64 examples were read twice")
    assert run([*check, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"deterministic": True, "examples": 64}
    assert run([*check, "--set", "noise=True"]) == 5
    assert "map(noisy) is not deterministic: for example 0 " in capsys.readouterr().err
    assert stage.seen == []
