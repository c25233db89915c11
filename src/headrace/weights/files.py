"""The tensors in a folder of safetensors files, on this machine or at a URL: their names, forms and places.

    folder/model.safetensors                       one file
    folder/model.safetensors.index.json            or several: {"weight_map": {"layer.weight": "part-1.safetensors"}}

Only headers are read here. A header is JSON, as any program writes it: `headrace.checkpoint.header` reads those of
checkpoints, which have one form.
"""

from __future__ import annotations

import glob
import json
import math
import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, TypeVar

from torch import Tensor

from headrace.checkpoint.header import BYTES, NAMES, PREFIX
from headrace.data.sources.storage import Remote, SourceFile, find_files, map_files
from headrace.errors import DataError

INDEX = "model.safetensors.index.json"
ENDING = ".safetensors"
_MOST_HEADER_BYTES = 100 << 20
"""As the safetensors library."""
_SHOWN, _MOST_SHOWN = 3, 100
"""Names, and characters of what is malformed."""
_WHOLE = "model.safetensors"
_OTHER_FORMS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack")
_POINTER = b"version "
"""What a file begins with that git's LFS has in the place of a large one."""
WORDS = {dtype: word for word, dtype in NAMES.items()}
"""The format's name of each of torch's types."""
T = TypeVar("T", int, Tensor)
_REMEDY = "copy it again"


@dataclass(frozen=True)
class Extent:
    """Elements that follow each other in a file, from one of its bytes on."""

    file: SourceFile
    begin: int
    elements: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in files: its torch type and shape, and the extents of its flattened elements.

    `run` makes it a slice: of all runs of so many elements those of a rank, of which there are `world`.
    """

    dtype: str
    shape: tuple[int, ...]
    extents: tuple[Extent, ...]
    run: int = 0
    rank: int = 0
    world: int = 1

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(extent.elements for extent in self.extents))

    def parts(self, start: int, elements: int) -> Iterator[Extent]:
        """Yields where elements of the whole tensor are that follow each other."""
        size = BYTES[WORDS[self.dtype]]
        at = bisect_right(self._ends, start)
        while elements:
            extent = self.extents[at]
            inside = start - (self._ends[at] - extent.elements)
            count = min(elements, extent.elements - inside)
            yield Extent(extent.file, extent.begin + inside * size, count)
            start, elements, at = start + count, elements - count, at + 1

    def place(self, element: T) -> T:
        """Returns which element of the tensor an element of a slice is, or which each of several is."""
        return element // self.run * (self.run * self.world) + element % self.run + self.run * self.rank


def names_of(names: Sequence[str]) -> str:
    """Returns the first of some names, and how many more there are."""
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + more


def find_tensors(where: str | os.PathLike[str]) -> dict[str, StoredTensor]:
    """Returns the tensors of a folder, or of one file, by name.

    Raises:
        DataError: there is none; a file is missing, cut off or malformed, or has not what the index says of it.
    """
    place = absolute(where)
    if place.endswith(ENDING):
        return _joined(_one(place), place)
    listed = _index(place)
    files = _files(place, sorted({*listed.values()}) or [_WHOLE])
    if not listed:
        return _joined(files, place)
    by_name = {_base(file): file for file in files}
    if missing := sorted({file for file in listed.values() if file not in by_name}):
        lost = [name for name, file in listed.items() if file in missing]
        raise DataError(
            f"{place} has no {names_of(missing)}, where {len(lost):,} of {len(listed):,} tensors of its {INDEX} are: "
            f"{names_of(lost)}; copy the missing files there"
        )
    found = _joined([by_name[file] for file in sorted({*listed.values()})], place)
    if lost := [
        name for name, file in listed.items() if name not in found or _base(found[name].extents[0].file) != file
    ]:
        raise DataError(
            f"the {INDEX} of {place} has {len(lost):,} tensors that are not in the files that it names: "
            f"{names_of(lost)}; {_REMEDY}"
        )
    return found


def absolute(where: str | os.PathLike[str]) -> str:
    """Returns the place of files on this machine from its root; that of a URL as it is."""
    place = os.fspath(where)
    return place.rstrip("/") if "://" in place else os.path.abspath(os.path.expanduser(place))


def _one(place: str) -> list[SourceFile]:
    try:
        return find_files(_pattern(place), {})
    except DataError as error:
        instead = _instead(place) if "://" in place else "; the file does not exist"
        raise DataError(f"weights={place!r} cannot be found{instead}") from error


def _files(place: str, names: Sequence[str]) -> list[SourceFile]:
    """Returns the files of a folder; where a server lists no folders, those of the names that are there."""
    try:
        return find_files(f"{_pattern(place)}/*{ENDING}", {})
    except DataError as error:
        found: list[SourceFile] = []
        for name in names if "://" in place else ():
            with suppress(DataError):
                found += find_files(f"{place}/{name}", {})
        if not found:
            wanted = "" if names == [_WHOLE] else f"; {INDEX} there names {names_of(names)}"
            raise DataError(f"weights={place!r}: there is no file *{ENDING} there{wanted}{_instead(place)}") from error
        return found


def _instead(place: str) -> str:
    """Says what is in the place of the files."""
    if "://" in place:
        system, path = Remote(place, {}).open()
        try:
            system.info(path)
        except Exception as error:  # clients of file systems have their own errors
            # That it is not there is what they say of any answer, of which the cause tells more.
            alone = isinstance(error, FileNotFoundError) and error.__cause__ is None
            return "; its server has nothing there" if alone else f"; its server: {error.__cause__ or repr(error)}"
        return ""
    if not os.path.isdir(place):
        return "; it is a file of another form" if os.path.exists(place) else "; the folder does not exist"
    names = sorted(os.listdir(place))
    if lost := [name for name in names if name.endswith(ENDING)]:
        return f"; links lead to no file: {names_of(lost)}"
    if other := [name for name in names if name.endswith(_OTHER_FORMS)]:
        return (
            f", only {names_of(other)}; build the model, load them into it, and save it: model.save_pretrained(folder) "
            "of transformers, or safetensors.torch.save_model(model, file)"
        )
    return ""


def _pattern(place: str) -> str:
    return place if "://" in place else glob.escape(place)


def _base(file: SourceFile) -> str:
    return file.name.rpartition("/")[2]


def _index(place: str) -> dict[str, str]:
    """Returns the file of each tensor; {} if there is no index."""
    try:
        (file,) = find_files(f"{_pattern(place)}/{INDEX}", {})
    except DataError:
        return {}
    try:
        listed = json.loads(file.read(), object_pairs_hook=_once)["weight_map"]
        return {str(name): str(other) for name, other in listed.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{file.name} is no index of safetensors files: {error!r}; {_REMEDY}") from error


def _joined(files: Sequence[SourceFile], place: str) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    for tensors in map_files(_tensors, files):
        if twice := [name for name in tensors if name in found]:
            one, other = (_base(each[twice[0]].extents[0].file) for each in (found, tensors))
            raise DataError(
                f"{one} and {other} of {place} both have {names_of(twice)}; name one file, or add an {INDEX}"
            )
        found |= tensors
    return found


def _tensors(file: SourceFile) -> dict[str, StoredTensor]:
    """Returns the tensors of a file, of which no two overlap and all are in it."""
    if file.length < PREFIX:
        raise DataError(f"{file.name} has {file.length} bytes, and is no safetensors file; {_REMEDY}")
    count = int.from_bytes(front := file.read(0, PREFIX), "little")
    if front == _POINTER:
        raise DataError(f"{file.name} is a pointer of git's LFS, not the file; run `git lfs pull` there")
    if count > min(_MOST_HEADER_BYTES, file.length - PREFIX):
        raise DataError(
            f"{file.name}: its header would have {count:,} bytes, and the file has {file.length:,}: it is cut off, or "
            f"no safetensors file; {_REMEDY}"
        )
    try:
        header = json.loads(file.read(PREFIX, count), object_pairs_hook=_once)
        places = {name: _place(name, fields) for name, fields in header.items() if name != "__metadata__"}
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise DataError(f"{file.name}: its header is malformed: {str(error) or repr(error)}; {_REMEDY}") from error
    data, last = file.length - PREFIX - count, 0
    if lost := [name for name, (_, _, _, end) in places.items() if end > data]:
        raise DataError(
            f"{file.name} is cut off: its header is of {max(each[3] for each in places.values()):,} bytes of tensors, "
            f"and {data:,} are there; {len(lost):,} of {len(places):,} tensors are not whole: {names_of(lost)}; "
            f"{_REMEDY}"
        )
    for name, (_, _, begin, end) in sorted(places.items(), key=lambda item: item[1][2:]):
        if begin < last:
            raise DataError(f"{file.name}: its tensor {name!r} begins inside another, at byte {begin:,}; {_REMEDY}")
        if begin > last:
            break
        last = end
    if last < data:
        raise DataError(
            f"{file.name}: of its {data:,} bytes of tensors, those from byte {last:,} on are not in its header, which "
            f"the format does not allow; {_REMEDY}"
        )
    first = PREFIX + count
    return {
        name: StoredTensor(dtype, shape, (Extent(file, first + begin, math.prod(shape)),))
        for name, (dtype, shape, begin, _) in places.items()
    }


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name in it occurs twice")
    return found


def _place(name: str, fields: Mapping[str, Any]) -> tuple[str, tuple[int, ...], int, int]:
    """Returns type, shape, begin and end of a tensor, which fit together."""
    try:
        dtype, shape, (begin, end) = fields["dtype"], tuple(fields["shape"]), fields["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{name!r} has {str(fields)[:_MOST_SHOWN]}") from error
    if dtype not in BYTES:
        raise ValueError(f"{name!r} has the type {dtype!r}, which is unknown")
    if not all(type(each) is int and each >= 0 for each in (*shape, begin, end)):
        raise ValueError(f"{name!r} has shape {list(shape)}, bytes {begin} to {end}")
    if end - begin != math.prod(shape) * BYTES[dtype]:
        raise ValueError(f"{name!r} is {dtype} of shape {list(shape)} in bytes {begin} to {end}")
    return NAMES[dtype], shape, begin, end
