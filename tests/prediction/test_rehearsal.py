"""What a rehearsal writes, and which of its steps take over what was fetched; nothing is trained here."""

from __future__ import annotations

from pathlib import Path

import headrace as hr
from headrace.prediction.rehearsal.simulated import OrderRecorder
from headrace.prediction.virtual_events import VirtualEvents
from headrace.spec.cluster import Cluster, Host
from headrace.spec.events import LAUNCHER, decode
from headrace.spec.model import ModelSpec, ParameterSpec
from headrace.worker.run_spec import events_path


def test_events_are_written_in_the_order_of_their_times(tmp_path: Path) -> None:
    model = ModelSpec((ParameterSpec("weight", (8,)),))
    plan = hr.OneDevice().plan(model, Cluster((Host("a", 2, 1 << 30),)))
    events = VirtualEvents(plan, model, 8, 64, 0.0)
    for time_s in (3.0, 1.0, 2.0):
        events.note(LAUNCHER, time_s, f"at {time_s}")
    events.save(tmp_path)
    told = [decode(line) for line in events_path(tmp_path, LAUNCHER).read_text().splitlines()]
    assert [each.time_s for each in told] == [0.0, 1.0, 2.0, 3.0]


def test_a_step_takes_over_what_is_there_when_it_begins() -> None:
    recorder = OrderRecorder(1, 4)
    recorder.begins(0, 7, now_s=10.0, step_s=1.0)
    recorder.pulls(0, now_s=10.2, there_s=11.5)
    # The second step has begun at 11, the third begins at 12.
    assert recorder.leases[0][0].fetches == {0: 0, 2: 1}
