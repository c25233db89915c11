"""The readers of files that a user gives, and of requests to a server: each raises where a promise is broken.

The promise: what is not sound is refused by the error that the reader's documentation names, and by no other one.
"""

from __future__ import annotations

import atexit
import os
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from functools import cache
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import cv2
import orjson
import torch

from data.readers import masked
from headrace.cli.jobfile import _DATA, _OPTIONS, _WAYS, _set, _values
from headrace.data import (
    DecodeImage,
    InputPipeline,
    ParseExample,
    from_csv,
    from_parquet,
    from_tfrecord,
    from_webdataset,
    read_by,
)
from headrace.data.pipeline.source import Epoch
from headrace.errors import DataError, UsageError
from headrace.export.signature import TensorForm
from headrace.report.model.summary import summarize
from headrace.report.views.page import page_fragment
from headrace.serving.protocols.open_inference import read_request
from headrace.serving.protocols.tensorflow_rest import read_predict
from headrace.serving.settings import RequestError
from headrace.spec.cluster import Cluster
from headrace.spec.events import decode, encode
from headrace.spec.options import Options
from headrace.watch.state import WatchedRun

__all__ = ["GIVEN", "INPUTS", "folder"]

MOST_READ = 64
"""Examples of a file."""
MOST_HOSTS = 100
"""Of a cluster that is written and read again."""

GIVEN = "FUZZ_FOLDER"
"""The variable that names a folder: what fuzzes ends without a word, and the process above it removes the folder."""

_NUMBERS = count()


@cache
def folder() -> Path:
    """Returns the folder in memory for files: the one that it was given, or one of this process, gone when it ends."""
    if given := os.environ.get(GIVEN):
        return Path(given)
    own = TemporaryDirectory(prefix="headrace-fuzz-", dir="/dev/shm")
    atexit.register(own.cleanup)
    return Path(own.name)


def _written(data: bytes, ending: str) -> str:
    # Under another name each time: files that were read are kept open by name and time.
    path = f"{folder()}/{next(_NUMBERS)}.{ending}"
    with open(path, "wb", buffering=0) as file:
        file.write(data)
    return path


def _examples(make: Callable[[str], InputPipeline], data: bytes, ending: str) -> list[Any]:
    """Returns the first examples of a file that are sound, [] where the file is not."""
    path, found = _written(data, ending), []
    try:
        with suppress(DataError):
            pipeline = make(path)
            for index in range(min(len(pipeline), MOST_READ)):
                assert pipeline.source.key(index)
                with suppress(DataError):
                    found.append(pipeline.source.example(index, Epoch(0, 0)))
                    size = pipeline.source.nbytes(index)
                    assert size is None or size >= 0
    finally:
        os.unlink(path)
    return found


_PARSE = ParseExample({"b": bytes, "s": (str, None), "i": (int, None), "f": (float, (2,))})


def read_tfrecords(data: bytes) -> None:
    """A TFRecord file: as it is if it begins with 0, else records of which the checksums are made right."""
    content = data[1:]
    if data[:1] != b"\0":
        content = b"".join(_record(each) for each in content.split(b"\xff\xff")[:MOST_READ])
    for record in _examples(from_tfrecord, content, "tfrecord"):
        with suppress(DataError):
            _PARSE(record)


def _record(content: bytes) -> bytes:
    length = struct.pack("<Q", len(content))
    return length + masked(length) + content + masked(content)


def read_tars(data: bytes) -> None:
    """A tar file, of which the headers' checksums are made right where it begins with 1."""
    content = bytearray(data[1:])
    if data[:1] == b"\1":
        for begin in range(0, len(content) - 511, 512):
            head = content[begin : begin + 512]
            if any(head[:148]):
                head[148:156] = b" " * 8
                content[begin + 148 : begin + 156] = b"%06o\0 " % sum(head)
    for example in _examples(from_webdataset, bytes(content), "tar"):
        assert isinstance(example.pop("__key__"), str)
        assert all(isinstance(each, bytes) for each in example.values())


def read_tables(data: bytes) -> None:
    """A CSV file."""
    _examples(from_csv, data, "csv")


def read_parquet(data: bytes) -> None:
    """A Parquet file."""
    _examples(from_parquet, data, "parquet")


_DECODE = DecodeImage(4, 4)


def read_images(data: bytes) -> None:
    """An image."""
    with suppress(DataError):
        assert _DECODE(data).shape == (4, 4, 3)


def read_events(data: bytes) -> None:
    """An event file of a run: for reports, and for a browser."""
    for line in data.split(b"\n"):
        with suppress(ValueError):
            event = decode(line)
            again = decode(encode(event))
            assert again == event or encode(again) == encode(event)
    events = folder() / "events"
    events.mkdir(exist_ok=True)
    file = events / "rank-0.jsonl"
    file.unlink(missing_ok=True)
    file.write_bytes(data)
    with suppress(DataError):
        page_fragment([summarize(folder())])
    run = WatchedRun(folder())
    run.apply(run.poll())
    orjson.dumps([run.row(), run.curves(-1), run.details(-1)], option=orjson.OPT_SERIALIZE_NUMPY)


def read_clusters(data: bytes) -> None:
    """A file that describes a cluster."""
    path = _written(data, "toml")
    try:
        cluster = Cluster.load(path)
    except UsageError:
        return
    finally:
        os.unlink(path)
    if len(cluster.hosts) > MOST_HOSTS:  # a short file can describe so many that their text has megabytes
        return
    path = _written(cluster.toml().encode(), "toml")
    try:
        assert Cluster.load(path).toml() == cluster.toml()
    finally:
        os.unlink(path)


def _job(lr: float = 0.1, depth: int = 2, name: str = "a", wide: bool = False, extra: Any = None) -> None:
    """Has parameters of every type that --set knows."""


def read_settings(data: bytes) -> None:
    """What --set gives a job or its options, a line each."""
    settings = data.decode(errors="replace").split("\n")[:8]
    with suppress(UsageError):
        values = _values(Path("job.py"), _job, settings)
        assert not {"lr", "depth", "name", "wide", "extra"} < values.keys()
        assert isinstance(values.get("lr", 0.1), float | bool | None)
    ours = [each for each in settings if each.startswith(_OPTIONS)]
    with suppress(UsageError):
        replace(Options(), **_set(ours, _OPTIONS, [field.name for field in fields(Options)], "Options", Options()))
    ways = [each for each in settings if each.startswith(_DATA)]
    with suppress(UsageError):
        read_by((torch.zeros(4, 2), torch.zeros(4)), **_set(ways, _DATA, _WAYS, "reading the data"))


_FORMS = (TensorForm("x", "float32", (-1, 3)), TensorForm("user", "int64", (-1,)), TensorForm("on", "bool", (-1, 2)))


def read_requests(data: bytes) -> None:
    """A request for predictions: the length of its JSON (0 for none), one byte for the model, and the body."""
    length, kind, body = int.from_bytes(data[:2], "little"), data[2:3], data[3:]
    forms = _FORMS[:1] if kind < b"\x40" else _FORMS
    with suppress(RequestError):
        request = read_request(body, str(length) if length else None, forms, _FORMS[1:], {})
        assert [each.shape[1:] for each in request.inputs.values()] == [form.shape[1:] for form in forms]
    with suppress(RequestError):
        inputs, _ = read_predict(body, forms)
        assert [each.shape[1:] for each in inputs.values()] == [form.shape[1:] for form in forms]


INPUTS: Mapping[str, Callable[[bytes], None]] = {
    "clusters": read_clusters,
    "events": read_events,
    "images": read_images,
    "parquet": read_parquet,
    "requests": read_requests,
    "settings": read_settings,
    "tables": read_tables,
    "tars": read_tars,
    "tfrecords": read_tfrecords,
}
"""By the name of their corpus."""

cv2.setNumThreads(0)
# Nine of ten executions would write a line, which took nine tenths of the time.
cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)
