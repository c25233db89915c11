from __future__ import annotations

import json
import struct
from collections.abc import Iterator

import pytest

from engine.conftest import until
from headrace.errors import UsageError
from headrace.report.model.events import read_events
from headrace.report.trackers.wandb import WandB

BLOCK = 32768
FULL, LAST = 1, 4


def records(content: bytes) -> Iterator[bytes]:
    """Yields the records of a LevelDB log, which W&B keeps behind 7 bytes of its own."""
    assert content.startswith(b":W&B")
    place, whole = 7, b""
    while place < len(content):
        left = BLOCK - place % BLOCK
        if left < 7:
            place += left
            continue
        length, kind = struct.unpack("<HB", content[place + 4 : place + 7])
        whole += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (FULL, LAST):
            yield whole
            whole = b""


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_run_read_back_from_the_file_that_would_be_synced(tmp_path, make_run):
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    tracker = WandB(tmp_path / "board", run_name="first")
    for event in read_events(make_run(tmp_path / "mirrored")):
        tracker(event)
    (file,) = (tmp_path / "board").glob("wandb/offline-run-*/*.wandb")

    def read():
        return [wandb_internal_pb2.Record.FromString(content) for content in records(file.read_bytes())]

    # A process of W&B's own writes it, and may do so after `finish` has returned.
    assert until(lambda: any(record.HasField("exit") for record in read()), 60)
    rows, config, name, code = [], {}, "", None
    for record in read():
        if record.HasField("history"):
            items = record.history.item
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
        if record.HasField("run"):
            name = record.run.display_name
            config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        if record.HasField("exit"):
            code = record.exit.exit_code
    assert (name, code, config["strategy"], config["workers"]) == ("first", 0, "mirrored", 2)
    # Step i: 10 - i on rank 0, one more on rank 1.
    assert [(row["step"], row["loss"]) for row in rows if "loss" in row] == [(i, 10.5 - i) for i in range(10)]
    accuracy = [(row["step"], row["evaluation/accuracy"]) for row in rows if "evaluation/accuracy" in row]
    assert accuracy == [(5, 0.6), (10, 0.7)]


def test_another_mode_is_refused():
    with pytest.raises(UsageError, match="mode is 'offline' or 'online', got 'cloud'"):
        WandB(mode="cloud")
