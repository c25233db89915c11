"""What fuzzing of files and requests begins with: sound ones of every format, with all that they may have."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Iterator, Mapping

import cv2
import numpy as np
import pyarrow as pa
import simplejpeg
from pyarrow import parquet

from data.readers import tfrecord
from headrace.spec.cluster import Cluster, Host, Link
from headrace.spec.events import (
    LAUNCHER,
    Evaluated,
    Notice,
    ParametersAveraged,
    RowsMoved,
    RunEnded,
    Saved,
    SharesBalanced,
    encode,
)
from watch.made import begun, started, steps

__all__ = ["input_seeds"]


def input_seeds(name: str) -> list[bytes]:
    """Returns the seeds of a reader."""
    return list(_SEEDS[name]())


def _clusters() -> Iterator[bytes]:
    one = Host("a", cores=4, memory_bytes=8 << 30)
    two = Host("b", cores=2, memory_bytes=4 << 30, accelerators=("cuda:0",), device_flops=1e12, address="10.0.0.2")
    yield Cluster((one,)).toml().encode()
    yield Cluster((one, two), None, "cuda", 1e8, 1e-4, (Link("a", "b", 1e7, 1e-3, "uplink"),)).toml().encode()
    yield b'[[hosts]]\nname = "a"\ncores = 2\nmemory_gb = 8\ncount = 3\naccelerators = 2\nspeed = 0.5\n'
    yield b'[[hosts]]\nname="a"\ncores=1\nmemory_gb=1\n[[links]]\nbetween=["a","b"]\nmbit_per_s=10\n'


def _events() -> Iterator[bytes]:
    every = [
        started(),
        begun(0),
        *steps(0, range(3)),
        Evaluated(0, 1.2, 2, 0, 9, {"loss": 0.5}, 0.1),
        Saved(0, 1.3, 2, 100, 0.1, 0.2),
        ParametersAveraged(0, 1.3, 2, 2, 2, "why", 0.1, 0.1, (1,), 1),
        RowsMoved(2, 1.5, 1, "t", 1, 5, 100, 3, 0.1),
        SharesBalanced(0, 1.6, 2, (3, 5), (0.1, 0.2)),
        Notice(LAUNCHER, 1.0, "a"),
        RunEnded(LAUNCHER, 2.0, "completed"),
    ]
    lines = [encode(event).encode() for event in every]
    yield b"\n".join(lines) + b"\n"
    for line in lines:
        yield line + b"\n"
    yield lines[0] + b"\n" + lines[2][:40]


def _images() -> Iterator[bytes]:
    image = np.arange(8 * 9 * 3, dtype=np.uint8).reshape(8, 9, 3)
    yield simplejpeg.encode_jpeg(image)
    yield simplejpeg.encode_jpeg(np.ascontiguousarray(image[:, :, :1]), colorspace="GRAY")
    for ending in (".png", ".bmp", ".webp", ".tiff", ".ppm"):
        yield cv2.imencode(ending, image)[1].tobytes()


def _parquet() -> Iterator[bytes]:
    plain = pa.table({"a": pa.array([1, 2, 3], pa.int32())})
    mixed = pa.table({"x": [1.5, None], "s": ["a", "b"], "l": [[1, 2], [3, 4]]})
    for table in (plain, mixed):
        out = io.BytesIO()
        parquet.write_table(
            table, out, row_group_size=2, write_statistics=False, store_schema=False, compression="none"
        )
        yield out.getvalue()


def _requests() -> Iterator[bytes]:
    x = {"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [0, 1.5, -2]}
    user = {"name": "user", "datatype": "INT64", "shape": [1], "data": [7]}
    on = {"name": "on", "datatype": "BOOL", "shape": [1, 2], "data": [True, False]}
    for model, document in (
        (b"\0", {"id": "a", "inputs": [x], "outputs": [{"name": "user", "parameters": {"binary_data": True}}]}),
        (b"\xff", {"inputs": [x, user, on], "parameters": {"binary_data_output": True}}),
        (b"\0", {"instances": [[1, 2, 3]]}),
        (b"\0", {"inputs": [[1, 2, 3]], "signature_name": "serving_default"}),
        (b"\xff", {"instances": [{"x": [1, 2, 3], "user": 1, "on": [True, False]}]}),
    ):
        yield b"\0\0" + model + json.dumps(document).encode()
    text = json.dumps({"inputs": [{**x, "data": None, "parameters": {"binary_data_size": 12}}]}).encode()
    yield len(text).to_bytes(2, "little") + b"\0" + text + bytes(12)


def _settings() -> Iterator[bytes]:
    yield b"lr=0.5\ndepth=3\nname=b\nwide=True\nextra=[1, {'a': (2, None)}]"
    yield b"lr=1\nname='quoted'\nwide=no"
    yield b"options.batch_size=8\nepochs=2\noptions.seed=1\nclip_norm=1e3"
    yield b"batch_size=-1\n=\nlr"


def _tables() -> Iterator[bytes]:
    yield b"a,b,c\n1,2.5,x\n3,,y\n"
    yield b'a,"b ""c"""\n2020-01-01,true\n2020-01-02,false\n'
    yield b"a\r\n1\r\n\r\n2\r\n"
    yield "ä,b\nö,1e400\n".encode()


def _tars() -> Iterator[bytes]:
    for form in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=form) as tar:
            for name in ("0.jpg", f"{'f' * 90}/{'n' * (40 if form != tarfile.USTAR_FORMAT else 9)}.txt"):
                member = tarfile.TarInfo(name)
                member.size = 3
                tar.addfile(member, io.BytesIO(b"abc"))
        # The end of a tar may be two blocks alone.
        content = out.getvalue().rstrip(b"\0")
        whole = content + bytes(-len(content) % 512 + 512)
        yield b"\0" + whole
        yield b"\1" + whole


def _tfrecords() -> Iterator[bytes]:
    example = bytes.fromhex("0a2d0a0c0a0162120712050a03616263")  # features, an entry, "b", a list of bytes
    yield b"\0" + tfrecord([b"", b"abc", example])
    yield b"\1" + b"\xff\xff".join([b"abc", example, b""])
    values = b"\x0a\x3a" + b"".join(
        [
            b"\x0a\x0c\x0a\x01b\x12\x07\x0a\x05\x0a\x03abc",
            b"\x0a\x0a\x0a\x01s\x12\x05\x0a\x03\x0a\x01a",
            b"\x0a\x0c\x0a\x01i\x12\x07\x1a\x05\x0a\x03\x01\x96\x01",
            b"\x0a\x12\x0a\x01f\x12\x0d\x12\x0b\x0a\x08" + bytes(8),
        ]
    )
    yield b"\1" + values


_SEEDS: Mapping[str, Callable[[], Iterator[bytes]]] = {
    "clusters": _clusters,
    "events": _events,
    "images": _images,
    "parquet": _parquet,
    "requests": _requests,
    "settings": _settings,
    "tables": _tables,
    "tars": _tars,
    "tfrecords": _tfrecords,
}
