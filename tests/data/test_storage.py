"""Files here and elsewhere: S3 and HTTP of real servers on this machine, any other file system through fsspec."""

from __future__ import annotations

import functools
import http.server
import os
import pickle
import random
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from pyarrow import parquet

import headrace as hr
from data.readers import forked, tfrecord
from headrace.data.pipeline.source import Epoch
from headrace.data.sources import storage
from headrace.errors import DataError, UnfitMachine, UsageError

EPOCH = Epoch(0, 0)
RECORDS = [bytes([number]) * (number + 1) for number in range(20)]


def fill(folder: Path) -> None:
    """Writes what every place of this file holds."""
    for number in range(5):
        (folder / f"{number}.bin").write_bytes(bytes([number]) * 10)
    (folder / "a.tfrecord").write_bytes(tfrecord(RECORDS))
    parquet.write_table(pa.table({"x": np.arange(100)}), folder / "a.parquet", row_group_size=10)
    (folder / "a.txt").write_text("one\ntwo\n")
    (folder / "a.csv").write_text("x\n1\n2\n")


def check(address: str, **options: Any) -> None:
    """Makes sure that all of it is read, by copies of the sources, by threads, and by a fork."""
    files = hr.data.from_files(f"{address}/*.bin", **options).source
    records = hr.data.from_tfrecord(f"{address}/a.tfrecord", **options).source
    table = hr.data.from_parquet(f"{address}/a.parquet", **options).source
    text = hr.data.from_text(f"{address}/a.txt", **options).source
    rows = hr.data.from_csv(f"{address}/a.csv", **options).source
    files, records, table, text, rows = pickle.loads(pickle.dumps((files, records, table, text, rows)))
    assert len(files) == 5
    assert len({source.identity for source in (files, records, table, text, rows)}) == 5

    def read() -> None:
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(lambda at: files.example(at, EPOCH), range(5))) == [bytes([n]) * 10 for n in range(5)]
            assert list(pool.map(lambda at: records.example(at, EPOCH), range(20))) == RECORDS
            assert [int(row["x"]) for row in pool.map(lambda at: table.example(at, EPOCH), range(100))] == [*range(100)]
        assert [text.example(at, EPOCH) for at in range(2)] == ["one", "two"]
        assert [int(rows.example(at, EPOCH)["x"]) for at in range(2)] == [1, 2]

    read()
    assert forked(read) == 0


def identities(address: str, **options: Any) -> tuple[str, str]:
    """Returns those of two formats, without what the options say."""
    found = hr.data.from_files(f"{address}/*.bin", **options), hr.data.from_parquet(f"{address}/a.parquet", **options)
    assert not any(str(value) in each.source.identity for each in found for value in options.values())
    return found[0].source.identity, found[1].source.identity


def test_this_machine(tmp_path: Path) -> None:
    fill(tmp_path)
    check(str(tmp_path))
    before = identities(str(tmp_path))
    assert identities(str(tmp_path)) == before
    os.utime(tmp_path / "3.bin", ns=(0, 10**9))
    os.utime(tmp_path / "a.parquet", ns=(0, 10**9))
    after = identities(str(tmp_path))
    assert before[0] != after[0]
    assert before[1] != after[1]


def test_names_that_look_like_patterns_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "[1].bin").write_bytes(b"a")
    (tmp_path / "folder.bin").mkdir()
    (tmp_path / "folder.bin" / "b.bin").write_bytes(b"b")
    monkeypatch.chdir(tmp_path)
    source = hr.data.from_files("**/*.bin").source
    assert [source.key(index) for index in range(len(source))] == [
        f"{tmp_path}/[1].bin",
        f"{tmp_path}/folder.bin/b.bin",
    ]
    assert len(hr.data.from_files("[1].bin")) == 1
    for nothing in ("*.txt", "folder.bin", ["[1].bin", "*.txt"], []):
        with pytest.raises(DataError, match="no file is found"):
            hr.data.from_files(nothing)
    with pytest.raises(UsageError, match="lable: there is no such parameter"):
        hr.data.from_files("[1].bin", lable=str)
    with pytest.raises(UnfitMachine, match="nowhere:// cannot be read here"):
        hr.data.from_files("nowhere://a/b")


def test_many_files_are_open_one_after_the_other(tmp_path: Path) -> None:
    for number in range(200):
        (tmp_path / f"{number:03}").write_bytes(tfrecord([bytes([number])]))
    source = hr.data.from_tfrecord(str(tmp_path / "*")).source
    before = len(os.listdir("/proc/self/fd"))
    with ThreadPoolExecutor(8) as pool:
        read = list(pool.map(lambda index: source.example(index, EPOCH), range(200)))
    assert read == [bytes([number]) for number in range(200)]
    assert len(os.listdir("/proc/self/fd")) <= before + storage.OPEN


def test_files_that_vanish_grow_or_shrink_are_named_and_can_be_skipped(tmp_path: Path) -> None:
    fill(tmp_path)
    pipeline = hr.data.from_files(str(tmp_path / "*.bin"))
    (tmp_path / "1.bin").unlink()
    (tmp_path / "2.bin").write_bytes(b"12")
    (tmp_path / "3.bin").write_bytes(b"x" * 1000)
    for index, said in ((1, "1.bin cannot be read: No such"), (2, "10 bytes .* has 2 now"), (3, "has 1,000 now")):
        with pytest.raises(DataError, match=said):
            pipeline.source.example(index, EPOCH)
    numbers = pipeline.map(lambda content: torch.tensor(list(content))).on_error("skip")
    share = next(hr.data.Loader(numbers, 0, 5, (1,), 0).sweep())
    assert share.batch[:, 0].tolist() == [0, 4]


@pytest.mark.parametrize(
    ("package", "read"),
    [
        ("pyarrow", hr.data.from_csv),
        ("datasets", hr.data.from_hugging_face),
        ("fsspec", lambda file: hr.data.from_files(f"file://{file}")),
    ],
)
def test_a_package_that_is_not_installed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, read: Callable[[str], Any]
) -> None:
    (tmp_path / "a").write_bytes(tfrecord([b"a"]))
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UnfitMachine, match="pip install"):
        read(str(tmp_path / "a"))


class Distant(MemoryFileSystem):  # type: ignore[misc]
    """Stands for HDFS, whose client needs Java: a file system that only fsspec's interface is known of."""

    protocol = "distant"
    store: dict[str, Any] = {}  # noqa: RUF012  (fsspec keeps all there is in the class)
    pseudo_dirs = [""]  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        stripped: str = super()._strip_protocol(path.replace("distant://", "memory://"))
        return stripped


@pytest.fixture
def distant(tmp_path: Path) -> Iterator[str]:
    fsspec.register_implementation("distant", Distant, clobber=True)
    fill(tmp_path)
    system = fsspec.filesystem("distant")
    system.put(str(tmp_path), "/data", recursive=True)
    yield "distant://data"
    system.rm("/data", recursive=True)


def test_any_file_system_of_fsspec(distant: str) -> None:
    check(distant)
    system = fsspec.filesystem("distant")
    source = hr.data.from_tfrecord(f"{distant}/a.tfrecord").source
    system.pipe("/data/a.tfrecord", tfrecord(RECORDS)[:100])
    with pytest.raises(DataError, match=r"/data/a\.tfrecord had 530 bytes when it was found, and of the"):
        source.example(19, EPOCH)
    system.rm("/data/a.tfrecord")
    with pytest.raises(DataError, match=r"/data/a\.tfrecord cannot be read"):
        source.example(0, EPOCH)
    with pytest.raises(DataError, match="no file is found by"):
        hr.data.from_files(f"{distant}/*.nothing")


class Ranges(http.server.SimpleHTTPRequestHandler):
    """Serves files, and parts of them as RFC 9110, section 14, says."""

    ranges = True

    def do_GET(self) -> None:
        asked = self.headers.get("Range")
        file = Path(self.translate_path(self.path))
        if not asked or not self.ranges or not file.is_file():
            super().do_GET()
            return
        first, _, last = asked.removeprefix("bytes=").partition("-")
        content = file.read_bytes()
        part = content[int(first) : int(last) + 1 if last else None]
        self.send_response(206)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("Content-Range", f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}")
        self.end_headers()
        self.wfile.write(part)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class WithoutRanges(Ranges):
    ranges = False


@pytest.fixture(params=[Ranges, WithoutRanges])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, bool]]:
    fill(tmp_path)
    handler = functools.partial(request.param, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as served:
        thread = threading.Thread(target=served.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{served.server_port}", request.param.ranges
        finally:
            served.shutdown()
            thread.join()


@pytest.mark.slow
def test_http(server: tuple[str, bool], tmp_path: Path) -> None:
    address, ranges = server
    if ranges:
        check(address)
        (tmp_path / "3.bin").unlink()
        source = hr.data.from_files([f"{address}/2.bin", f"{address}/4.bin"]).source
        (tmp_path / "4.bin").write_bytes(b"12345")
        with pytest.raises(DataError, match=r"4\.bin had 10 bytes .* 5 are there now"):
            source.example(1, EPOCH)
        with pytest.raises(DataError, match=r"3\.bin"):
            hr.data.from_files(f"{address}/3.bin")
    else:
        assert hr.data.from_files(f"{address}/3.bin").source.example(0, EPOCH) == bytes([3]) * 10
        with pytest.raises(DataError, match="knows no ranges"):
            hr.data.from_text(f"{address}/a.txt").source.example(0, EPOCH)


@pytest.mark.slow
def test_a_server_that_is_gone_is_an_error_of_the_data(tmp_path: Path) -> None:
    fill(tmp_path)
    handler = functools.partial(Ranges, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as served:
        thread = threading.Thread(target=served.serve_forever)
        thread.start()
        address = f"http://127.0.0.1:{served.server_port}"
        try:
            sources = [
                hr.data.from_files(f"{address}/3.bin").source,
                hr.data.from_parquet(f"{address}/a.parquet").source,
            ]
        finally:
            served.shutdown()
            thread.join()
    for source in sources:
        with pytest.raises(DataError, match=address):
            source.example(0, EPOCH)
    with pytest.raises(DataError, match=f"{address}/3.bin' .or its server cannot be reached"):
        hr.data.from_files(f"{address}/3.bin")


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, dict[str, Any]]]:
    from moto.server import ThreadedMotoServer

    monkeypatch.delenv("AWS_PROFILE", raising=False)
    fill(tmp_path)
    served = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    served.start()
    try:
        host, port = served.get_host_and_port()
        # What it holds is kept for as long as this process lives.
        urllib.request.urlopen(f"http://{host}:{port}/moto-api/reset", data=b"").close()
        options = {"endpoint_url": f"http://{host}:{port}", "key": "someone", "secret": "nobody"}
        system = fsspec.filesystem("s3", **options)
        system.mkdir("bucket")
        system.put(str(tmp_path), "bucket/data", recursive=True)
        yield "s3://bucket/data", options
    finally:
        served.stop()


@pytest.mark.slow
def test_s3(bucket: tuple[str, dict[str, Any]]) -> None:
    address, options = bucket
    check(address, **options)
    before = identities(address, **options)
    system = fsspec.filesystem("s3", **options)
    system.invalidate_cache()
    assert identities(address, **options) == before
    system.pipe("bucket/data/3.bin", b"x" * 10)
    system.invalidate_cache()
    assert identities(address, **options)[0] != before[0]
    source = hr.data.from_files(f"{address}/*.bin", **options).source
    system.rm("bucket/data/1.bin")
    with pytest.raises(DataError, match=r"bucket/data/1\.bin cannot be read"):
        source.example(1, EPOCH)


@pytest.mark.slow
def test_workers_read_from_s3_for_themselves(bucket: tuple[str, dict[str, Any]]) -> None:
    address, options = bucket
    generator = np.random.default_rng(0)
    inputs = generator.standard_normal((60, 5)).astype(np.float32)
    target = (inputs.sum(1) > 0).astype(np.int64)
    records = [row.tobytes() + bytes([label]) for row, label in zip(inputs, target.tolist(), strict=True)]
    fsspec.filesystem("s3", **options).pipe("bucket/data/train.tfrecord", tfrecord(records))

    def parse(record: bytes) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor(np.frombuffer(record[:20], np.float32)), torch.tensor(record[20], dtype=torch.int64)

    def weights(data: hr.data.Pipeline) -> torch.Tensor:
        job = hr.Job(
            model=lambda: torch.nn.Linear(5, 2),
            task=hr.tasks.multiclass(2),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            data=data.shuffle(),
            global_batch_size=16,
            epochs=2,
        )
        model: Any = hr.fit(job, hr.Mirrored(workers=2)).model
        return model.weight.detach()

    arrays = hr.data.from_arrays(torch.tensor(inputs), torch.tensor(target))
    remote = hr.data.from_tfrecord(f"{address}/train.tfrecord", **options).map(parse)
    assert torch.equal(weights(remote), weights(arrays))


def test_a_bounded_cache_that_threads_thrash_keeps_as_much_as_before() -> None:
    cache: storage.BoundedCache[int] = storage.BoundedCache(3)

    def make() -> int:
        # Lets another thread run.
        time.sleep(0)
        return 1

    def thrash(seed: int) -> None:
        drawn = random.Random(seed)
        for _ in range(4000):
            cache.get(drawn.randrange(6), make)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(thrash, range(8)))
    finally:
        sys.setswitchinterval(interval)
    for key in range(3):
        cache.get(key, lambda: 1)
    assert [cache.get(key, lambda: 0) for key in range(3)] == [1, 1, 1], "all three are kept"
