from __future__ import annotations

import sys
from datetime import datetime

import pytest

from headrace.errors import UnfitMachine
from headrace.report import TensorBoard, read_events
from headrace.spec.event import Stepped


@pytest.mark.slow
def test_a_run_read_back_with_tensorboards_own_reader(tmp_path, make_run):
    run_dir = make_run(tmp_path / "mirrored")
    with TensorBoard(tmp_path / "board") as board:
        for event in read_events(run_dir):
            board(event)
        board(Stepped(0, 2.7, 10, 2, 8, 0.25, 8.0, 0.0, 0.1, 0.0, 0.0))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(tmp_path / "board"))
    read.Reload()
    loss = read.Scalars("loss")
    assert [point.step for point in loss] == list(range(11))
    # Step i: 10 - i on rank 0, one more on rank 1; the last step was reported by rank 0 alone.
    assert [point.value for point in loss] == [10.5 - step for step in range(10)] + [0.25]
    began = datetime.fromisoformat("2026-10-03T14:05:11+02:00").timestamp()
    assert loss[0].wall_time == pytest.approx(began + 1.1)
    assert [(point.step, round(point.value, 6)) for point in read.Scalars("evaluation/accuracy")] == [
        (5, 0.6),
        (10, 0.7),
    ]
    assert [point.value for point in read.Scalars("seconds/exchange/rank-1")] == pytest.approx([0.04] * 5 + [0.02] * 5)


def test_without_tensorboard_the_remedy_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UnfitMachine, match=r"pip install headrace\[tensorboard\]"):
        TensorBoard(tmp_path)
