"""Anonymous memory that several processes see, and the page that is in it."""

from __future__ import annotations

import ctypes
import errno
import gc
import itertools
import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from belongings import descriptors
from headrace.errors import UnfitMachine
from headrace.machine.limits import explained
from headrace.shared_memory import segment as module
from headrace.shared_memory.control_page import ControlPage, RankRecord
from headrace.shared_memory.mapping import LARGE_PAGE_BYTES, mapped, use_large_pages
from headrace.shared_memory.segment import SharedSegment

NOBODY = 65534


def test_a_segment_is_zeroed_and_seen_by_everybody_who_opens_it() -> None:
    own = SharedSegment.create(1_000, "test")
    assert own.tensor().tolist() == [0] * 1_000
    other = SharedSegment.open(os.getpid(), own.descriptor, 1_000)
    own.tensor(torch.int32, start=8, count=3).copy_(torch.tensor([1, 2, 3]))
    assert other.tensor(torch.int32, start=8, count=3).tolist() == [1, 2, 3]
    own.close()
    own.close()
    assert other.tensor(torch.int32, start=12, count=1).item() == 2
    other.close()


def test_a_segment_has_no_name() -> None:
    own = SharedSegment.create(4_096, "test")
    assert os.fstat(own.descriptor).st_nlink == 0
    assert os.readlink(f"/proc/self/fd/{own.descriptor}").startswith("/memfd:headrace-test")
    assert "memfd:headrace-test" in Path("/proc/self/maps").read_text()
    own.close()


def test_a_segment_is_its_owners_alone() -> None:
    own = SharedSegment.create(4_096, "test")
    assert stat.S_IMODE(os.fstat(own.descriptor).st_mode) == 0o600
    assert not os.get_inheritable(own.descriptor)
    own.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_cannot_open_a_segment() -> None:
    own = SharedSegment.create(4_096, "test")
    path = f"/proc/{os.getpid()}/fd/{own.descriptor}"
    reading = ["head", "-c", "1", path]
    assert subprocess.run(reading, capture_output=True, check=False).returncode == 0
    denied = subprocess.run(reading, capture_output=True, check=False, user=NOBODY, group=NOBODY, extra_groups=[])
    assert denied.returncode != 0
    assert b"Permission denied" in denied.stderr
    own.close()


def test_more_than_the_machine_has_left_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "spare_memory_bytes", lambda: 4_095)
    before = descriptors()
    with pytest.raises(UnfitMachine, match=r"rank-1 segment needs 4,096 bytes .* has 4,095 left; use fewer workers"):
        SharedSegment.create(4_096, "rank-1")
    assert descriptors() <= before
    monkeypatch.setattr(module, "spare_memory_bytes", lambda: 4_096)
    SharedSegment.create(4_096, "rank-1").close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOMEM])
def test_memory_that_the_system_refuses_is_an_error_here(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(*_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    before = descriptors()
    with pytest.raises(UnfitMachine, match=rf"needs 4,096 bytes .*\({os.strerror(number)}\).*limit on this container"):
        SharedSegment.create(4_096, "test")
    assert descriptors() <= before


def test_a_limit_of_file_sizes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    monkeypatch.setattr(os, "ftruncate", refuse)
    before = descriptors()
    with pytest.raises(UnfitMachine, match=r"test segment needs 4,096 bytes.*RLIMIT_FSIZE.*ulimit -f unlimited"):
        SharedSegment.create(4_096, "test")
    assert descriptors() <= before


def test_another_error_of_the_system_is_not_about_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.EINVAL, "no")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    before = descriptors()
    with pytest.raises(OSError, match="no"):
        SharedSegment.create(4_096, "test")
    assert descriptors() <= before


def test_a_segment_that_is_not_there_is_refused_with_its_process() -> None:
    own = SharedSegment.create(4_096, "test")
    gone = own.descriptor
    own.close()
    with pytest.raises(UnfitMachine, match=rf"process {os.getpid()} \(/proc/{os.getpid()}/fd/{gone}: .*one user"):
        SharedSegment.open(os.getpid(), gone, 4_096)


def test_a_segment_that_cannot_be_mapped_leaves_no_descriptor() -> None:
    own = SharedSegment.create(4_096, "test")
    before = descriptors()
    with pytest.raises(OSError, match="Cannot allocate memory"):
        SharedSegment.open(os.getpid(), own.descriptor, 1 << 62)
    assert descriptors() == before
    own.close()


def pages(ranks: int) -> tuple[ControlPage, ControlPage]:
    """Returns two processes' views of one page."""
    segment = SharedSegment.create(ControlPage.nbytes(ranks), "control")
    opened = SharedSegment.open(os.getpid(), segment.descriptor, segment.nbytes)
    return ControlPage(segment, ranks), ControlPage(opened, ranks)


def fill(record: Any, values: Iterator[int]) -> None:
    """Gives every number in a record, also in the records and arrays in it, the next value."""
    array = isinstance(record, ctypes.Array)
    names: Any = range(len(record)) if array else [field[0] for field in record._fields_]
    get, put = (type(record).__getitem__, type(record).__setitem__) if array else (getattr, setattr)
    for name in names:
        value = get(record, name)
        if isinstance(value, int | float):
            put(record, name, next(values))
        elif not isinstance(value, bytes):
            fill(value, values)


def read(record: object) -> object:
    if isinstance(record, ctypes.Array):
        return [read(value) for value in record]
    if isinstance(record, ctypes.Structure):
        return {field[0]: read(getattr(record, field[0])) for field in record._fields_}
    return record


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_fields_of_a_control_page_do_not_overlap(ranks: int) -> None:
    page, other = pages(ranks)
    page.abort, page.stop, page.stop_after, page.save_after, page.rate_after = 901, 902, 903, 904, 905
    for record in page.ranks:
        fill(record, itertools.cycle(range(1, 252)))
    for record in other.ranks:
        expected = RankRecord()
        fill(expected, itertools.cycle(range(1, 252)))
        assert read(record) == read(expected)
    assert (other.abort, other.stop, other.stop_after, other.save_after, other.rate_after) == (901, 902, 903, 904, 905)


@pytest.mark.parametrize("ranks", [1, 4])
def test_every_counter_has_a_cache_line_and_its_address(ranks: int) -> None:
    page, _ = pages(ranks)
    addresses = [record.address_of("barrier_counter") for record in page.ranks]
    assert len({address // 64 for address in addresses}) == ranks
    assert all(address % 4 == 0 for address in addresses)
    for rank, record in enumerate(page.ranks):
        record.barrier_counter, record.elastic_counter = rank + 1, rank + 101
        assert ctypes.c_int32.from_address(addresses[rank]).value == rank + 1
        assert ctypes.c_int32.from_address(record.address_of("elastic_counter")).value == rank + 101


def test_what_different_processes_write_lies_on_different_cache_lines() -> None:
    page, _ = pages(2)
    starts = [
        ctypes.addressof(record) + getattr(RankRecord, name).offset
        for record in page.ranks
        for name in ("barrier_counter", "heartbeat", "segment_offer", "saved", "restarts", "address", "numbers")
    ]
    assert all(start % 64 == 0 for start in starts)
    assert len(set(starts)) == len(starts)


def test_a_lasting_segment_begins_where_large_pages_do_and_keeps_what_is_in_it() -> None:
    nbytes = 2 * LARGE_PAGE_BYTES + 4_097
    own = SharedSegment.create(nbytes, "test", lasting=True)
    other = SharedSegment.open(os.getpid(), own.descriptor, nbytes)
    for segment in (own, other):
        assert segment.tensor().data_ptr() % LARGE_PAGE_BYTES == 0
    own.tensor()[-1] = 7
    own.tensor(torch.int32, count=2).fill_(3)
    use_large_pages(own.memory)
    assert other.tensor()[-1] == 7
    assert other.tensor(torch.int32, count=3).tolist() == [3, 3, 0]
    own.close()
    other.close()


def test_the_mapping_ends_with_the_last_tensor() -> None:
    own = SharedSegment.create(3 * LARGE_PAGE_BYTES, "mapped", lasting=True)
    view = own.tensor()[5:8]
    own.close()
    del own
    gc.collect()
    assert view.tolist() == [0, 0, 0]
    assert "memfd:headrace-mapped" in Path("/proc/self/maps").read_text()
    del view
    gc.collect()
    assert "memfd:headrace-mapped" not in Path("/proc/self/maps").read_text()


def test_what_cannot_be_mapped_is_an_error_of_the_system() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        mapped(-1, 3 * LARGE_PAGE_BYTES)
    assert not use_large_pages(memoryview(bytearray(100)))


def test_too_many_files_is_no_matter_of_users_and_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), "/proc/1/fd/3")

    monkeypatch.setattr("headrace.shared_memory.segment.os.open", refuse)
    with pytest.raises(OSError, match="Too many open files") as failed:
        SharedSegment.open(1, 3, 8)
    assert "ulimit -n" in str(explained(failed.value))
