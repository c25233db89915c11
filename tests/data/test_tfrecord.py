"""TFRecord and tf.train.Example: what was written is read, and what is damaged is named."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given
from hypothesis import strategies as st

import headrace as hr
from data.readers import masked, tfrecord
from headrace.data.pipeline.source import Epoch
from headrace.errors import DataError, UsageError

EPOCH = Epoch(0, 0)


def test_the_checksum_is_the_one_that_tensorflow_writes() -> None:
    # The head of a record of 24 bytes, as a file of TensorFlow's has it (TensorBoard's first record).
    assert masked(struct.pack("<Q", 24)) == bytes.fromhex("a37f4b22")


@pytest.mark.slow
@given(st.lists(st.lists(st.binary(max_size=300), min_size=1, max_size=8), min_size=1, max_size=3))
def test_records_of_any_length_are_read_in_any_order(tmp_path_factory: pytest.TempPathFactory, files: Any) -> None:
    folder = tmp_path_factory.mktemp("records")
    for number, records in enumerate(files):
        (folder / f"{number}.tfrecord").write_bytes(tfrecord(records))
    source = hr.data.from_tfrecord(str(folder / "*.tfrecord")).source
    flat = [record for records in files for record in records]
    assert len(source) == len(flat)
    for index in reversed(range(len(flat))):
        assert source.example(index, EPOCH) == flat[index]
        assert source.nbytes(index) == len(flat[index])
    assert source.key(len(flat) - 1) == f"{folder}/{len(files) - 1}.tfrecord, record {len(files[-1]) - 1}"


def test_records_longer_than_what_is_read_at_once(tmp_path: Path) -> None:
    records = [bytes([number]) * (200_000 * number) for number in range(4)]
    (tmp_path / "a").write_bytes(tfrecord(records))
    source = hr.data.from_tfrecord(str(tmp_path / "a")).source
    assert [source.example(index, EPOCH) for index in range(4)] == records


@pytest.mark.parametrize("cut", [1, 5, 17, 35])
def test_a_truncated_file_is_named_with_its_bytes(tmp_path: Path, cut: int) -> None:
    whole = tfrecord([b"a" * 20, b"b" * 20])
    (tmp_path / "a").write_bytes(whole[:-cut])
    with pytest.raises(DataError, match=rf"/a is truncated: record 1 begins at byte 36 .* at byte {72 - cut};"):
        hr.data.from_tfrecord(str(tmp_path / "a"))


def test_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"neither this nor that, but long enough")
    with pytest.raises(DataError, match="length of record 0, at byte 0, has a wrong checksum"):
        hr.data.from_tfrecord(str(tmp_path / "a"))
    (tmp_path / "b").write_bytes(b"\x1f\x8b" + bytes(30))
    with pytest.raises(DataError, match="compressed"):
        hr.data.from_tfrecord(str(tmp_path / "b"))
    (tmp_path / "c").write_bytes(b"")
    with pytest.raises(DataError, match="0 examples"):
        hr.data.from_tfrecord(str(tmp_path / "c"))


def test_damaged_content_is_found_when_it_is_read_and_can_be_skipped(tmp_path: Path) -> None:
    whole = bytearray(tfrecord([b"aaaa", b"bbbb", b"cccc"]))
    whole[20 + 13] ^= 1
    (tmp_path / "a").write_bytes(whole)
    pipeline = hr.data.from_tfrecord(str(tmp_path / "a"))
    assert pipeline.source.example(0, EPOCH) == b"aaaa"
    with pytest.raises(DataError, match="/a, record 1 has a wrong checksum: its 4 bytes"):
        pipeline.source.example(1, EPOCH)
    numbers = pipeline.map(lambda record: torch.tensor(record[0])).on_error("skip")
    share = next(hr.data.Loader(numbers, 0, 3, (1,), 0).sweep())
    assert share.batch.tolist() == [97, 99]
    assert share.examples == 2


def test_a_file_that_is_cut_while_it_is_read(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(tfrecord([b"aaaa", b"bbbb"]))
    source = hr.data.from_tfrecord(str(file)).source
    assert source.example(0, EPOCH) == b"aaaa"
    with file.open("r+b") as opened:
        opened.truncate(34)
    with pytest.raises(DataError, match="had 40 bytes when it was found, and of the 8 from byte 32 on 2 are there now"):
        source.example(1, EPOCH)


def example_class() -> Any:
    """Returns protobuf's own class for `tf.train.Example`, as TensorFlow's feature.proto defines it."""
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="tf", syntax="proto3")
    field = descriptor_pb2.FieldDescriptorProto
    for name, kind in (
        ("BytesList", field.TYPE_BYTES),
        ("FloatList", field.TYPE_FLOAT),
        ("Int64List", field.TYPE_INT64),
    ):
        message = file.message_type.add(name=name)
        message.field.add(name="value", number=1, type=kind, label=field.LABEL_REPEATED)
    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    for number, name in enumerate(("BytesList", "FloatList", "Int64List"), start=1):
        snake = {"BytesList": "bytes_list", "FloatList": "float_list", "Int64List": "int64_list"}[name]
        feature.field.add(
            name=snake, number=number, type=field.TYPE_MESSAGE, type_name=f".tf.{name}", label=1, oneof_index=0
        )
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=field.TYPE_STRING, label=1)
    entry.field.add(name="value", number=2, type=field.TYPE_MESSAGE, type_name=".tf.Feature", label=1)
    features.field.add(
        name="feature", number=1, type=field.TYPE_MESSAGE, type_name=".tf.Features.FeatureEntry", label=3
    )
    example = file.message_type.add(name="Example")
    example.field.add(name="features", number=1, type=field.TYPE_MESSAGE, type_name=".tf.Features", label=1)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tf.Example"))


EXAMPLE = example_class()
INTS = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20)
FLOATS = st.lists(st.floats(width=32, allow_nan=False), max_size=20)


def encoded(**features: Any) -> bytes:
    example = EXAMPLE()
    for name, values in features.items():
        feature = example.features.feature[name]
        kind = type(values[0]) if values else int
        if kind is bytes:
            feature.bytes_list.value.extend(values)
        elif kind is float:
            feature.float_list.value.extend(values)
        else:
            feature.int64_list.value.extend(values)
    content: bytes = example.SerializeToString()
    return content


@pytest.mark.slow
@given(INTS, FLOATS.filter(bool), st.lists(st.binary(max_size=50), min_size=1, max_size=4))
def test_examples_are_read_as_protobuf_writes_them(ints: list[int], floats: list[float], pieces: list[bytes]) -> None:
    parse = hr.data.ParseExample({"i": (int, None), "f": (float, (len(floats), 1)), "b": (bytes, None)})
    example = parse(encoded(i=ints, f=floats, b=pieces, more=[1]))
    assert example["i"].tolist() == ints
    assert example["i"].dtype == torch.int64
    assert example["f"].tolist() == [[value] for value in floats]
    assert example["f"].dtype == torch.float32
    assert example["b"] == pieces
    assert set(example) == {"i", "f", "b"}


def test_single_values_have_no_dim() -> None:
    example = hr.data.ParseExample({"label": int, "name": str})(encoded(label=[-3], name=["grün".encode()]))
    assert example["label"].shape == ()
    assert example["label"].item() == -3
    assert example["name"] == "grün"


def test_numbers_that_are_not_packed_are_read_too() -> None:
    # field 3 (Int64List) of 4 bytes: field 1, varint 5; field 1, varint 7
    feature = b"\x1a\x04\x08\x05\x08\x07"
    entry = b"\x0a\x01i\x12" + bytes([len(feature)]) + feature
    features = b"\x0a" + bytes([len(entry)]) + entry
    record = b"\x0a" + bytes([len(features)]) + features
    assert EXAMPLE.FromString(record).features.feature["i"].int64_list.value == [5, 7]
    assert hr.data.ParseExample({"i": (int, (2,))})(record)["i"].tolist() == [5, 7]


def test_what_is_not_there_is_said() -> None:
    record = encoded(label=[1, 2], name=[b"\xff"])
    with pytest.raises(DataError, match="no feature 'image'; it has label, name"):
        hr.data.ParseExample({"image": bytes})(record)
    with pytest.raises(DataError, match="'label' holds int values, not float"):
        hr.data.ParseExample({"label": float})(record)
    with pytest.raises(DataError, match="'label' has 2 values, and 1 are asked for"):
        hr.data.ParseExample({"label": int})(record)
    with pytest.raises(DataError, match="'name' is not UTF-8"):
        hr.data.ParseExample({"name": str})(record)
    with pytest.raises(UsageError, match="must be bytes, str, int or float"):
        hr.data.ParseExample({"label": "int"})


@given(st.binary(max_size=60), st.integers(0, 200))
def test_hostile_records_are_refused_and_nothing_else(noise: bytes, place: int) -> None:
    record = bytearray(encoded(i=[1, 300, 2**40], f=[1.0, 2.0], b=[b"abc"]))
    record[place % len(record) : place % len(record) + 1] = noise
    parse = hr.data.ParseExample({"i": (int, None), "f": (float, None), "b": (bytes, None)})
    try:
        example = parse(bytes(record))
    except DataError:
        return
    assert set(example) == {"i", "f", "b"}
