"""Files of the version before msgspec read and wrote them: `written_before/` was written by it.

`kinds.jsonl` has each kind of event with odd values, `runs.jsonl` what runs of five strategies wrote, `values.json` a
plan, a profile, a prediction, figures of a machine, a signature and a cluster.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.bench.figures import MachineFigures
from headrace.export.signature import Signature
from headrace.report.predicted import PredictedRun
from headrace.spec.cluster import Cluster
from headrace.spec.events import Event, Notice, RunStarted, Stepped, decode, encode
from headrace.spec.model import ModelSpec
from headrace.spec.plain import from_plain, to_plain
from headrace.spec.plan import Plan

FILES = Path(__file__).parent / "written_before"
LINES = [line for name in ("kinds", "runs") for line in (FILES / f"{name}.jsonl").read_bytes().splitlines()]
VALUES = json.loads((FILES / "values.json").read_text())
GOES_WITHOUT_SAYING = {"lease": -1, "pulled": [], "turn": ""}
"""Of a step, what is not written any more."""


def test_each_event_is_read_and_written_again_with_the_same_values() -> None:
    for line in LINES:
        event = decode(line)
        plain = json.loads(line)
        if isinstance(event, Stepped):
            plain = {name: value for name, value in plain.items() if GOES_WITHOUT_SAYING.get(name, ...) != value}
        again = json.loads(encode(event))
        # What later versions have added says nothing here.
        assert not any(value for name, value in again.items() if name not in plain)
        # As text, in which NaN is NaN, and 1 is not 1.0.
        assert json.dumps({name: value for name, value in again.items() if name in plain}) == json.dumps(plain)
        assert encode(decode(encode(event))) == encode(event)


def test_every_kind_of_event_is_among_them() -> None:
    assert {type(decode(line)) for line in LINES} == set(Event.__subclasses__())


def test_half_a_surrogate_pair_is_read() -> None:
    assert any(isinstance(event, Notice) and event.text.endswith("\udc80") for event in map(decode, LINES))


@pytest.mark.parametrize("kind", [Plan, ModelSpec, PredictedRun, MachineFigures, Signature, Cluster])
def test_each_value_is_read_and_written_again(kind: type) -> None:
    plain = VALUES[kind.__name__]
    again = to_plain(from_plain(kind, plain))
    # What later versions have added says nothing here.
    assert not any(value for name, value in again.items() if name not in plain)
    assert json.dumps({name: value for name, value in again.items() if name in plain}) == json.dumps(plain)


def test_the_plans_of_runs_are_read() -> None:
    started = [event for event in map(decode, LINES) if isinstance(event, RunStarted) and "roles" in event.plan]
    assert {event.strategy for event in started} == {
        *("one_device", "mirrored", "parameter_server", "pipeline", "parameter_averaging")
    }
    for event in started:
        assert from_plain(Plan, event.plan).workers == event.workers
