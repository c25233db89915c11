from __future__ import annotations

from datetime import datetime

import pytest
import torch
from msgspec.structs import replace

from headrace.report.model.events import read_events
from headrace.report.trackers.curves import EventCurves
from headrace.report.trackers.tensorboard import TensorBoard
from headrace.spec.events import (
    LAUNCHER,
    Evaluated,
    Lost,
    NonFinite,
    ParametersAveraged,
    PictureLogged,
    RunEnded,
    RunStarted,
    Saved,
    Stepped,
    WorkerEnded,
    WorkerStarted,
)
from headrace.worker.callbacks.picture import save


@pytest.mark.slow
def test_a_run_read_back_with_tensorboards_own_reader(tmp_path, make_run):
    run_dir = make_run(tmp_path / "mirrored")
    *begun, end = read_events(run_dir)
    with TensorBoard(tmp_path / "board") as board:
        for event in begun:
            board(event)
        board(Stepped(0, 2.7, 10, 2, 8, 0.25, 8.0, 0.0, 0.1, 0.0, 0.0))
        board(ParametersAveraged(0, 2.7, 10, 5, 8, "as asked for", 0.125, 0.01))
        board(end)
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
    told = [(read.Scalars(f"averaging/{name}")[0].step, read.Scalars(f"averaging/{name}")[0].value)
            for name in ("drift", "period")]  # fmt: skip
    assert told == [(10, 0.125), (10, 8.0)]
    assert [point.value for point in read.Scalars("seconds/exchange/rank-1")] == pytest.approx([0.04] * 5 + [0.02] * 5)


class _Writer:
    """Keeps the losses that TensorBoard is given."""

    def __init__(self, log_dir, purge_step):
        self.losses = []
        _Writer.last = self

    def add_scalar(self, tag, value, step, time_s):
        if tag == "loss":
            self.losses.append((step, value, time_s))

    def close(self):
        pass


@pytest.mark.slow
def test_rounds_of_workers_that_do_not_go_in_step_are_written_while_the_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter", _Writer)
    board = TensorBoard(tmp_path)

    def step(rank, time_s, number, loss):
        board(Stepped(rank, time_s, number, 0, 4, loss, 4.0, 0.0, 0.1, 0.0, 0.0))
        board.flush()

    board(RunStarted(LAUNCHER, 0.0, "parameter_server", 2, "cpu", 1, 8, 80, "1970-01-01T00:00:00+00:00", {}, {}))
    board.flush()
    losses = _Writer.last.losses
    # Worker 0 takes both portions of round 0, and one of each of 1 and 2; worker 1 is slow, and then takes one of 3.
    for time_s, number in enumerate((0, 0, 1, 2)):
        step(0, float(time_s), number, float(number + time_s))
    assert losses == [(0, 0.5, 1.0)]
    step(1, 5.0, 3, 9.0)
    assert losses == [(0, 0.5, 1.0), (1, 3.0, 2.0)]
    step(0, 6.0, 3, 7.0)
    assert losses == [(0, 0.5, 1.0), (1, 3.0, 2.0), (2, 5.0, 3.0), (3, 8.0, 6.0)]
    # A portion of round 1 that was given out again comes too late for the curve.
    step(1, 7.0, 1, 100.0)
    board.close()
    assert len(losses) == 4


@pytest.mark.parametrize("leaving", [WorkerEnded(1, 5.5, 5, 0, 0, 0, 0), Lost(LAUNCHER, 5.5, 1, 0, "killed", False)])
def test_where_a_worker_leaves_the_others_go_on_in_the_curve(leaving):
    def step(rank, number, loss):
        return Stepped(rank, float(number), number, 0, 4, loss, 4.0, 0.0, 0.1, 0.0, 0.0)

    both = [step(rank, number, 1.0 + 2 * rank) for number in range(5) for rank in (0, 1)]
    # The other one's last step is read after the end of the one that leaves.
    events = [*both, step(1, 5, 3.0), leaving, *(step(0, number, 1.0) for number in range(5, 8))]
    assert _losses(2, events) == [*((number, 2.0) for number in range(6)), (6, 1.0), (7, 1.0)]


def test_where_a_worker_joins_its_losses_count_once():
    def steps(number):
        joined = [WorkerStarted(2, 4.9, "mill", 102, "cpu", 1)] if number == 5 else []
        ranks = range(3 if number >= 5 else 2)
        return [
            *joined,
            *(Stepped(rank, float(number), number, 0, 4, 3.0 * rank, 4.0, 0.0, 0.1, 0.0, 0.0) for rank in ranks),
        ]

    events = [event for number in range(10) for event in steps(number)]
    assert _losses(2, events) == [(number, 1.5 if number < 5 else 3.0) for number in range(10)]


def _losses(workers, events):
    started = RunStarted(LAUNCHER, 0.0, "mirrored", workers, "cpu", 1, 8, 80, "1970-01-01T00:00:00+00:00", {}, {})
    curves = EventCurves(started)
    return [(each.step, each.value) for event in events for each in curves.take(event) if each.tag == "loss"]


def _started(time_s, started_at, resumed_step=0):
    return RunStarted(LAUNCHER, time_s, "one_device", 1, "cpu", 1, 8, 80, started_at, {}, {}, resumed_step=resumed_step)


@pytest.mark.slow
def test_a_resumed_run_goes_on_in_the_same_curves(tmp_path):
    first = [Stepped(0, 1.0 + step, step, 0, 8, 10.0 + step, 8.0, 0.0, 0.1, 0.0, 0.0) for step in range(6)]
    done_at = [Evaluated(0, 5.0, step, 1, 5, {"loss": float(step)}, 0.1) for step in (4, 6)]
    again = [Stepped(0, 20.0 + step, step, 0, 8, 20.0 + step, 8.0, 0.0, 0.1, 0.0, 0.0) for step in range(4, 8)]
    for events in (
        [_started(0.0, "2026-10-03T14:00:00+00:00"), *first, Saved(0, 4.5, 4, 500, 0.25, 0.1), *done_at],
        # In another process, as it is when the first was killed.
        [_started(20.0, "2026-10-03T15:00:00+00:00", 4), *again, NonFinite(0, 30.0, 8, (), "skip")],
    ):
        with TensorBoard(tmp_path / "board") as board:
            for event in events:
                board(event)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(tmp_path / "board"))
    read.Reload()
    loss = {point.step: point for point in read.Scalars("loss")}
    assert {step: point.value for step, point in loss.items()} == {
        **{step: 10.0 + step for step in range(4)},
        **{step: 20.0 + step for step in range(4, 8)},
    }
    began = datetime.fromisoformat("2026-10-03T15:00:00+00:00").timestamp()
    assert loss[4].wall_time == pytest.approx(began + 4.0)
    assert [point.step for point in read.Scalars("evaluation/loss")] == [4]
    assert [(point.step, point.value) for point in read.Scalars("checkpoints/stall_s")] == [(4, 0.25)]
    assert "not finite/text_summary" in read.Tags()["tensors"]


def test_each_run_may_have_a_folder_of_its_own(tmp_path):
    with TensorBoard(tmp_path, per_run=True) as board:
        for strategy in ("one_device", "mirrored"):
            board(replace(_started(0.0, "2026-10-03T14:00:00+00:00"), strategy=strategy))
            board(Evaluated(0, 1.0, 4, 1, 5, {"accuracy": 0.5}, 0.1))
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["mirrored-1", "one_device-1"]
    for folder in tmp_path.iterdir():
        (file,) = folder.glob("events.out.tfevents.*")
        assert b"evaluation/accuracy" in file.read_bytes()


@pytest.mark.slow
def test_pictures_are_the_bytes_of_their_files(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    save(torch.rand(3, 5, 4), tmp_path / "a.png")
    save(torch.rand(2, 7), tmp_path / "b.png")
    with TensorBoard(tmp_path / "board") as board:
        board(RunStarted(LAUNCHER, 0.0, "mirrored", 2, "cpu", 1, 8, 80, "2026-10-03T14:05:11+02:00", {}, {}))
        board(PictureLogged(0, 0.5, 4, "colour", str(tmp_path / "a.png")))
        board(PictureLogged(0, 0.5, 6, "grey", str(tmp_path / "b.png")))
        board(RunEnded(LAUNCHER, 2.0, "ok"))
        assert not board.failed
    read = EventAccumulator(str(tmp_path / "board"))
    read.Reload()
    for name, file, step, height, width in (("colour", "a.png", 4, 3, 5), ("grey", "b.png", 6, 2, 7)):
        (image,) = read.Images(name)
        assert (image.step, image.height, image.width) == (step, height, width)
        assert image.encoded_image_string == (tmp_path / file).read_bytes()
