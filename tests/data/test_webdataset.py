"""Tars of WebDataset: what tarfile writes is read, whatever its form; what is damaged is named."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import headrace as hr
from headrace.data.pipeline.source import Epoch
from headrace.errors import DataError

EPOCH = Epoch(0, 0)


def write(file: Path, members: list[tuple[str, bytes]], form: int = tarfile.PAX_FORMAT) -> None:
    with tarfile.open(file, "w", format=form) as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def examples(pattern: Path) -> list[Any]:
    source = hr.data.from_webdataset(str(pattern)).source
    return [source.example(index, EPOCH) for index in range(len(source))]


NAMES = st.text("abcäé日-_ ", min_size=1, max_size=120).map(str.strip).filter(bool)
CONTENTS = st.dictionaries(st.sampled_from(["jpg", "json", "seg.png", "cls"]), st.binary(max_size=1500), min_size=1)


@pytest.mark.slow
@given(
    st.lists(st.tuples(NAMES, CONTENTS), min_size=1, max_size=6, unique_by=lambda each: each[0]),
    st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]),
    st.booleans(),
)
def test_examples_come_back_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, wanted: list[tuple[str, dict[str, bytes]]], form: int, inside: bool
) -> None:
    file = tmp_path_factory.mktemp("tars") / "a.tar"
    folder = "some/folder/" if inside else ""
    write(file, [(f"{folder}{key}.{end}", content) for key, parts in wanted for end, content in parts.items()], form)
    assert examples(file) == [{"__key__": f"{folder}{key}", **parts} for key, parts in wanted]


def test_what_is_no_file_is_left_out_and_old_forms_are_read(tmp_path: Path) -> None:
    file = tmp_path / "a.tar"
    with tarfile.open(file, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, kind in (("folder.d", tarfile.DIRTYPE), ("link.jpg", tarfile.SYMTYPE)):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "elsewhere"
            tar.addfile(member)
        for name in ("README", ".hidden", "x" * 90 + "/" + "y" * 90 + ".TXT"):
            member = tarfile.TarInfo(name)
            member.size = 3
            tar.addfile(member, io.BytesIO(b"abc"))
    assert examples(file) == [{"__key__": "x" * 90 + "/" + "y" * 90, "txt": b"abc"}]


def test_sizes_that_octal_digits_cannot_tell(tmp_path: Path) -> None:
    member = tarfile.TarInfo("a.bin")
    member.size = 5
    header = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    header[124:136] = b"\x80" + (5).to_bytes(11, "big")
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    (tmp_path / "a.tar").write_bytes(bytes(header) + b"hello".ljust(512, b"\0") + bytes(1024))
    assert examples(tmp_path / "a.tar") == [{"__key__": "a", "bin": b"hello"}]


@pytest.mark.parametrize("extended", [None, "-1536", "many"])
def test_sizes_that_are_none_are_refused(tmp_path: Path, extended: str | None) -> None:
    member = tarfile.TarInfo("a.bin")
    if extended:
        member.pax_headers = {"size": extended}
        content = member.tobuf(tarfile.PAX_FORMAT)
    else:
        header = bytearray(member.tobuf(tarfile.USTAR_FORMAT))
        header[124:136] = b"-1000".ljust(12, b"\0")
        header[148:156] = b" " * 8
        header[148:156] = b"%06o\0 " % sum(header)
        content = bytes(header)
    (tmp_path / "a.tar").write_bytes(content + bytes(1024))
    with pytest.raises(
        DataError, match=r"damaged .* (it says that it takes -|extended header cannot be read: invalid literal)"
    ):
        examples(tmp_path / "a.tar")


def test_keys_name_the_tar_and_the_example(tmp_path: Path) -> None:
    write(tmp_path / "1.tar", [("a.x", b"1"), ("a.y", b"22"), ("b.x", b"3")])
    write(tmp_path / "2.tar", [("a.x", b"4")])
    source = hr.data.from_webdataset(str(tmp_path / "*.tar")).source
    assert [source.key(index) for index in range(3)] == [
        f"{tmp_path}/1.tar, a",
        f"{tmp_path}/1.tar, b",
        f"{tmp_path}/2.tar, a",
    ]
    assert [source.nbytes(index) for index in range(3)] == [3, 1, 1]


@pytest.mark.parametrize(("left", "said"), [(512 + 100, "ends at byte 1,536, but"), (1536, "neither a whole member")])
def test_a_truncated_tar_is_named(tmp_path: Path, left: int, said: str) -> None:
    file = tmp_path / "a.tar"
    write(file, [("a.x", b"1" * 1024), ("b.x", b"2")])
    file.write_bytes(file.read_bytes()[:left])
    with pytest.raises(DataError, match=rf"/a\.tar is truncated.*{said}"):
        hr.data.from_webdataset(str(file))


def test_a_damaged_tar_and_one_that_is_none(tmp_path: Path) -> None:
    file = tmp_path / "a.tar"
    write(file, [("a.x", b"1"), ("b.x", b"2")])
    content = bytearray(file.read_bytes())
    content[1024 + 3] ^= 1
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"damaged or no tar: at byte 1,024 .* sum up to"):
        hr.data.from_webdataset(str(file))
    file.write_bytes(b"\x1f\x8b" + b"x" * 1000)
    with pytest.raises(DataError, match="a compressed one must be unpacked"):
        hr.data.from_webdataset(str(file))
    file.write_bytes(bytes(1024))
    with pytest.raises(DataError, match="0 examples"):
        hr.data.from_webdataset(str(file))


def test_two_members_of_one_name_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.tar", [("a.x", b"1"), ("a.x", b"2")])
    with pytest.raises(DataError, match=r"'a\.x' occurs twice in a row"):
        hr.data.from_webdataset(str(tmp_path / "a.tar"))


@given(st.integers(0, 3000), st.binary(max_size=600))
def test_hostile_tars_are_refused_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, place: int, noise: bytes
) -> None:
    file = tmp_path_factory.mktemp("hostile") / "a.tar"
    write(file, [("é" * 100 + ".x", b"1" * 100), ("b.x", b"2")])
    content = bytearray(file.read_bytes())
    content[place : place + len(noise)] = noise
    file.write_bytes(content)
    try:
        found = examples(file)
    except DataError:
        return
    assert all("__key__" in example for example in found)
