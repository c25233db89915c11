"""Files and requests of any content: noise, and what was found, by fuzzing or by looking for it."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from time import thread_time

import cv2
import numpy as np
import pytest
import simplejpeg
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuzz.input_seeds import input_seeds
from fuzz.inputs import INPUTS, read_images, read_tars
from fuzz.main import INPUTS as NAMES
from fuzz.main import MOST_KEPT, MOST_S
from headrace.cli.jobfile import _values
from headrace.data import DecodeImage, from_csv, from_parquet
from headrace.errors import DataError, UsageError
from headrace.spec.cluster import Cluster

every_reader = pytest.mark.parametrize("name", NAMES)

HOST = '[[hosts]]\nname = "a"\ncores = 1\nmemory_gb = 1\n'


def test_every_reader_is_fuzzed() -> None:
    assert set(INPUTS) == set(NAMES)


@pytest.mark.each_value
@pytest.mark.slow
@every_reader
def test_sound_files_are_read_in_little_memory(name: str) -> None:
    INPUTS[name](input_seeds(name)[0])
    tracemalloc.start()
    try:
        for content in input_seeds(name):
            INPUTS[name](content)
        assert tracemalloc.get_traced_memory()[1] < MOST_KEPT
    finally:
        tracemalloc.stop()


@pytest.mark.slow
@every_reader
@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_noise_is_read(name: str, data: st.DataObject) -> None:
    sound = data.draw(st.sampled_from([b"", *input_seeds(name)]))
    at = data.draw(st.integers(0, len(sound)))
    noise = data.draw(st.binary(max_size=40))
    INPUTS[name](sound[:at] + noise + sound[data.draw(st.integers(at, len(sound))) :])


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (HOST + "count = 1000000000", r"hosts\[0\].count must be a whole number of at most 100,000"),
        (HOST + "accelerators = 1000000000", "accelerators is 1000000000, and no host has more than 1024"),
        (HOST + f"speed = 1{'0' * 400}", r"hosts\[0\].speed must be a number of at least 0"),
        (HOST + f"speed = 1{'0' * 5000}", "cannot be read as a cluster's file: Exceeds the limit"),
        ("a = " + "[" * 5000, "cannot be read as a cluster's file: maximum recursion depth"),
    ],
)
def test_a_cluster_that_no_machine_can_hold_is_refused(content: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(content)
    with pytest.raises(UsageError, match=why):
        Cluster.load(path)


def _job(rate: float = 0.1, name: str = "a") -> None: ...


def test_settings_that_python_cannot_parse_are_text_or_refused() -> None:
    assert _values(Path("job.py"), _job, ["name=" + "-" * 100_000 + "1"]) == {"name": "-" * 100_000 + "1"}
    assert _values(Path("job.py"), _job, ["name=" + "~" * 3000 + "1"]) == {"name": "~" * 3000 + "1"}
    with pytest.raises(UsageError, match="--set rate: give a number below 1e308, got one of 401 digits"):
        _values(Path("job.py"), _job, ["rate=1" + "0" * 400])


def test_an_image_that_says_it_is_enormous_takes_no_memory() -> None:
    image = bytearray(simplejpeg.encode_jpeg(np.zeros((8, 8, 3), np.uint8)))
    frame = image.index(b"\xff\xc0")
    image[frame + 5 : frame + 9] = b"\xff\xdc\xff\xdc"
    with pytest.raises(DataError, match="65500 x 65500 pixels, more than 268,435,456"):
        DecodeImage(4, 4)(bytes(image))
    with pytest.raises(DataError, match="0 bytes are not an image that OpenCV reads"):
        DecodeImage(4, 4)(b"")
    png = bytearray(cv2.imencode(".png", np.zeros((8, 8, 3), np.uint8))[1].tobytes())
    png[16:24] = b"\0\0\xff\xdc" * 2
    with pytest.raises(DataError, match="65500 x 65500 pixels"):
        DecodeImage(4, 4)(bytes(png))
    read_images(bytes(image))


def test_a_table_whose_columns_cannot_be_named_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes(b"a,b\xed\n1,2\n")
    with pytest.raises(DataError, match=r"table.csv cannot be read as CSV: 'utf-8' codec can't decode byte 0xed"):
        from_csv(str(path))
    path.write_bytes(b"a,b,a\n1,2,3\n")
    with pytest.raises(DataError, match=r"table.csv has 2 columns of the name 'a'; give each its own"):
        from_csv(str(path))
    assert len(from_csv(str(path), ["b"])) == 1


def test_a_parquet_file_with_less_than_no_rows_is_refused(tmp_path: Path) -> None:
    content = input_seeds("parquet")[0]
    # The last count of its row groups, of 1 row: the number's sign is its last bit.
    at = content.rindex(b"\x16\x02")
    path = tmp_path / "table.parquet"
    path.write_bytes(content[:at] + b"\x16\x03" + content[at + 2 :])
    with pytest.raises(DataError, match=r"table.parquet is damaged: its row group 1 says that it has -2 rows"):
        from_parquet(str(path))


def test_a_long_extended_header_of_a_tar_is_read_in_linear_time() -> None:
    records = b"6 a=b\n" * 200_000
    sound = input_seeds("tars")[-1][1:]
    (begin,) = [at for at in range(0, len(sound), 512) if sound[at + 156 : at + 157] == b"x"]
    head = bytearray(sound[begin : begin + 512])
    head[124:136] = b"%011o\0" % len(records)
    began = thread_time()
    read_tars(b"\1" + bytes(head) + records + bytes(-len(records) % 512))
    assert thread_time() - began < MOST_S * 4
