"""ArrayRecord: records by number, one and many, in threads and forks."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
from array_record.python.array_record_module import ArrayRecordWriter

import headrace as hr
from data.readers import forked
from headrace.data.pipeline.source import Epoch
from headrace.errors import DataError, UsageError

EPOCH = Epoch(0, 0)


def write(file: Path, records: list[bytes]) -> None:
    writer = ArrayRecordWriter(str(file), "group_size:4")
    for record in records:
        writer.write(record)
    writer.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "0.array_record", [b"%d" % number for number in range(10)])
    write(tmp_path / "1.array_record", [b"%d" % number for number in range(10, 13)])
    return tmp_path


def test_records_are_read_one_by_one_and_many_at_once(folder: Path) -> None:
    source = hr.data.from_array_record(str(folder / "*")).source
    copy = pickle.loads(pickle.dumps(source))
    assert len(copy) == 13
    assert [copy.example(index, EPOCH) for index in range(13)] == [b"%d" % number for number in range(13)]
    assert source.gather(torch.tensor([12, 0, 11, 0, 3]), EPOCH) == [b"12", b"0", b"11", b"0", b"3"]
    assert source.key(11) == f"{folder}/1.array_record, record 1"
    assert copy.identity == source.identity


def test_a_fork_reads_for_itself(folder: Path) -> None:
    pipeline = hr.data.from_array_record(str(folder / "*")).map(lambda record: torch.tensor(int(record)))
    pipeline.source.example(3, EPOCH)

    def read() -> None:
        assert [int(pipeline.source.example(index, EPOCH)) for index in range(13)] == list(range(13))

    assert forked(read) == 0


def test_what_is_damaged_or_truncated_is_named_and_can_be_skipped(folder: Path) -> None:
    file = folder / "0.array_record"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"/0\.array_record \([\d,]+ bytes\) is not a whole ArrayRecord file"):
        hr.data.from_array_record(str(file))
    damaged = bytearray(whole)
    damaged[110] ^= 255
    file.write_bytes(damaged)
    pipeline = hr.data.from_array_record(str(folder / "*"))
    with pytest.raises(DataError, match=r"record 0 cannot be read: .*mismatch"):
        pipeline.source.example(0, EPOCH)
    numbers = pipeline.map(lambda record: torch.tensor(int(record))).on_error("skip")
    share = next(hr.data.Loader(numbers, 0, 13, (1,), 0).sweep())
    assert share.batch.tolist() == list(range(4, 13))
    os.truncate(folder / "1.array_record", 1000)
    with pytest.raises(DataError, match="has 1,000 now"):
        pipeline.source.example(12, EPOCH)


def test_elsewhere_is_refused() -> None:
    with pytest.raises(UsageError, match="copy them here"):
        hr.data.from_array_record("s3://bucket/a")
