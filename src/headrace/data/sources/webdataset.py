"""WebDataset: tar files whose adjacent members of one name are an example; one scan of the headers finds them.

    000001.jpg  000001.json  000002.jpg  000002.json        two examples, each with "jpg", "json" and "__key__"

The headers are those of POSIX (pax, ustar) and GNU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.data.pipeline.pipeline import InputPipeline
from headrace.data.pipeline.source import Epoch
from headrace.data.sources.storage import FileSource, SourceFile, Window, find_files, map_files
from headrace.errors import DataError

_BLOCK = 512
_FILES = b"0\0" + b"7"
_PAX, _GNU_NAME, _GNU_SPARSE = b"x", b"L", b"S"


def from_webdataset(where: str | Sequence[str], **options: Any) -> InputPipeline:
    """Returns a pipeline over the examples of tar files in the form of WebDataset.

    An example is a dict: ending of a member's name to its content as bytes, and "__key__" to the name before the first
    dot. Adjacent members with one key are one example. Members without an ending, folders and links are left out.

    Headers are read when the pipeline is made, contents when they are asked for: in any order, not as a stream.

    Args:
        where: a pattern, "shards/*.tar" or "s3://bucket/*.tar", or several; not compressed.
        options: of the file system, as fsspec takes them.

    Raises:
        DataError: no file is found, one is no tar, is truncated or damaged, or an example has two members of one name.
        UnfitMachine: what that file system needs is not installed.

    Examples:
        >>> import io, tarfile
        >>> with tarfile.open("shard-0.tar", "w") as shard:
        ...     for name, content in (("a.txt", b"one"), ("a.cls", b"1")):
        ...         member = tarfile.TarInfo(name)
        ...         member.size = len(content)
        ...         shard.addfile(member, io.BytesIO(content))
        >>> hr.data.from_webdataset("shard-*.tar").source.example(0, hr.data.Epoch(0, 0))
        {'__key__': 'a', 'txt': b'one', 'cls': b'1'}
    """
    files = find_files(where, options)
    return InputPipeline(_Tars(files, map_files(_scan, files)))


@dataclass(frozen=True)
class _Tar:
    """The index of one tar.

    `members` has the offset and size of each member, `(members, 2)`, `endings` the number of its ending in `names`,
    `begins` the first member of each example and, last, the count, `(examples + 1,)`. `keys` are the examples' keys,
    encoded and concatenated, `ends` where each ends.
    """

    members: NDArray[np.int64]
    endings: NDArray[np.int64]
    names: tuple[str, ...]
    begins: NDArray[np.int64]
    keys: NDArray[np.uint8]
    ends: NDArray[np.int64]

    def key(self, example: int) -> str:
        """Returns the key of an example."""
        begin = int(self.ends[example - 1]) if example else 0
        return self.keys[begin : int(self.ends[example])].tobytes().decode(errors="surrogateescape")


def _scan(file: SourceFile) -> _Tar:
    members: list[tuple[int, int]] = []
    endings: list[int] = []
    names: dict[str, int] = {}
    begins: list[int] = []
    keys: list[bytes] = []
    for name, offset, size in _members(file):
        folder, _, last = name.rpartition("/")
        stem, dot, ending = last.partition(".")
        if not dot or not stem:
            continue
        key = (f"{folder}/{stem}" if folder else stem).encode(errors="surrogateescape")
        which = names.setdefault(ending.lower(), len(names))
        if not keys or key != keys[-1]:
            keys.append(key)
            begins.append(len(members))
        elif which in endings[begins[-1] :]:
            raise DataError(f"{file.name}: {name!r} occurs twice in a row; give each example its own name")
        members.append((offset, size))
        endings.append(which)
    return _Tar(
        np.array(members, dtype=np.int64).reshape(-1, 2),
        np.array(endings, dtype=np.int64),
        tuple(names),
        np.array([*begins, len(members)], dtype=np.int64),
        np.frombuffer(b"".join(keys), dtype=np.uint8),
        np.cumsum([len(key) for key in keys], dtype=np.int64),
    )


def _members(file: SourceFile) -> Iterator[tuple[str, int, int]]:
    """Yields name, offset and size of every regular file in a tar; a DataError if it is truncated or damaged."""
    window, place = Window(file), 0
    name: str | None = None
    longer: int | None = None
    while True:
        header = window.at(place, _BLOCK)
        if len(header) == _BLOCK and not any(header):
            return
        size = _checked(file, header, place)
        kind = header[156:157]
        if kind in (_PAX, _GNU_NAME):
            content = window.at(place + _BLOCK, max(0, size))
            if kind == _PAX:
                records = _pax(content, file, place)
                name, longer = records.get("path", name), int(records["size"]) if "size" in records else longer
            else:
                name = _text(content)
        else:
            if kind == _GNU_SPARSE:
                raise DataError(
                    f"{file.name}: the member at byte {place:,} is sparse, which cannot be read; write it whole"
                )
            size = size if longer is None else longer
            if kind in (b"0", b"\0", b"7"):
                yield name or _name(header), place + _BLOCK, size
            elif kind in b"123456":
                size = 0  # a link has no content, whatever its header says
            name = longer = None
        if size < 0:
            raise _damaged(file, place, f"it says that it takes {size:,} bytes")
        end = place + _BLOCK + size
        if end > file.length:
            raise DataError(
                f"{file.name} is truncated: the member at byte {place:,} ends at byte {end:,}, but the file at byte "
                f"{file.length:,}; write it again"
            )
        place = end + -size % _BLOCK


def _checked(file: SourceFile, header: bytes, place: int) -> int:
    """Returns the size in a header, after verifying its checksum."""
    if len(header) < _BLOCK:
        raise DataError(
            f"{file.name} is truncated or no tar: at byte {place:,} of {file.length:,} there is neither a whole member "
            "nor the block of zeros that ends a tar; write it again"
        )
    try:
        expected, size = _number(header[148:156]), _number(header[124:136])
    except ValueError as error:
        raise _damaged(file, place, str(error)) from error
    # The checksum field counts as spaces.
    summed = sum(header) - sum(header[148:156]) + 8 * ord(" ")
    if expected != summed:
        raise _damaged(file, place, f"the bytes of its header sum up to {summed}, and its checksum is {expected}")
    return size


def _damaged(file: SourceFile, place: int, why: str) -> DataError:
    packed = " (a compressed one must be unpacked)" if place == 0 else ""
    return DataError(f"{file.name} is damaged or no tar{packed}: at byte {place:,} there is no member: {why}")


def _number(field: bytes) -> int:
    if field[0] & 128:
        # GNU's form of numbers too large for the octal digits.
        return int.from_bytes(bytes([field[0] & 127]) + field[1:], "big")
    return int(field.strip(b" \0") or b"0", 8)


def _name(header: bytes) -> str:
    name = _text(header[:100])
    prefix = _text(header[345:500]) if header[257:263] == b"ustar\0" else ""
    return f"{prefix}/{name}" if prefix else name


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode(errors="surrogateescape")


def _pax(content: bytes, file: SourceFile, place: int) -> dict[str, str]:
    """Returns the records `length key=value\\n` of an extended header."""
    records: dict[str, str] = {}
    begin = 0
    try:
        # By offsets: to cut off each record would copy the rest of the header as often as it has records.
        while begin < len(content):
            space = content.index(b" ", begin)
            length = int(content[begin:space])
            end = begin + length
            if length < 4 or content[end - 1 : end] != b"\n":
                raise ValueError(f"a record of {length} bytes does not end where it says")
            key, _, value = content[space + 1 : end - 1].partition(b"=")
            records[key.decode()] = value.decode(errors="surrogateescape")
            begin = end
        int(records.get("size", "0"))
    except ValueError as error:
        raise _damaged(file, place, f"its extended header cannot be read: {error}") from error
    return records


class _Tars(FileSource):
    def __init__(self, files: Sequence[SourceFile], tars: Sequence[_Tar]) -> None:
        super().__init__("webdataset", files, [len(tar.ends) for tar in tars])
        self._tars = tuple(tars)

    def example(self, index: int, epoch: Epoch) -> Any:
        at, which = self._spans.find(index)
        tar = self._tars[at]
        first, stop = tar.begins[which : which + 2].tolist()
        example: dict[str, Any] = {"__key__": tar.key(which)}
        for ending, (offset, size) in zip(
            tar.endings[first:stop].tolist(), tar.members[first:stop].tolist(), strict=True
        ):
            example[tar.names[ending]] = self._files[at].read(offset, size)
        return example

    def key(self, index: int) -> str:
        at, which = self._spans.find(index)
        return f"{self._files[at].name}, {self._tars[at].key(which)}"

    def nbytes(self, index: int) -> int | None:
        at, which = self._spans.find(index)
        tar = self._tars[at]
        first, stop = tar.begins[which : which + 2].tolist()
        return int(tar.members[first:stop, 1].sum())
