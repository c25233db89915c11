"""The manifest of a checkpoint: its step, its files with their digests, and the caller's description.

`manifest.json` has only one form: it must be, byte for byte, what `encode` makes of what `decode` finds in it, with a
digest of the rest. So no flipped bit goes unnoticed.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import Any

from headrace.errors import UsageError

NAME = "manifest.json"
FORMAT = "headrace checkpoint"
VERSION = 1
MOST_BYTES = 1 << 20
"""Longest manifest that is written or read; reading takes up to 40 times its length in memory."""

_MOST_DEEP = 32
_MOST_DIGITS = 40
"""Of an integer, with its sign: 128 bits, as in random states."""
_FILE = re.compile(r"rank-(0|[1-9][0-9]{0,8})\.safetensors")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_FIELDS = ("description", "digest", "files", "format", "step", "version")


@dataclass(frozen=True)
class FileRecord:
    """One file of a checkpoint: its name, "rank-<n>.safetensors", its size, and its SHA-256 in hexadecimal."""

    name: str
    bytes: int
    sha256: str

    @property
    def rank(self) -> int:
        """The rank of the file; a ValueError if it has another name."""
        match = _FILE.fullmatch(self.name)
        if match is None:
            raise ValueError(f"{self.name[:100]!r} is not the name of a rank's file, rank-<n>.safetensors")
        return int(match[1])


@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint: its step, one file for each rank that saved something, and JSON values."""

    step: int
    files: tuple[FileRecord, ...]
    description: Mapping[str, Any]


def file_name(rank: int) -> str:
    """Returns the name of a rank's file."""
    return f"rank-{rank}.safetensors"


def encode(manifest: Manifest) -> bytes:
    """Returns the content of `manifest.json`; a UsageError if the description is not JSON values, or too long."""
    try:
        files = sorted(manifest.files, key=attrgetter("rank"))
        if len({record.rank for record in files}) < len(files):
            raise ValueError(f"a rank has two files among those of ranks {[record.rank for record in files[:20]]}")
        content = {
            "format": FORMAT,
            "version": VERSION,
            "step": manifest.step,
            "files": [asdict(record) for record in files],
            "description": _plain(manifest.description, "description"),
        }
    except ValueError as error:
        raise UsageError(f"this cannot be a checkpoint's manifest: {error}") from None
    data = _text({**content, "digest": hashlib.sha256(_text(content)).hexdigest()})
    if len(data) > MOST_BYTES:
        raise UsageError(
            f"the checkpoint's description makes a manifest of {len(data):,} bytes, "
            f"at most {MOST_BYTES:,} are allowed; save what is large as tensors"
        )
    return data


def decode(data: bytes) -> Manifest:
    """Returns the manifest that `encode` wrote; a ValueError for anything else."""
    if len(data) > MOST_BYTES:
        raise ValueError(f"it has {len(data):,} bytes, at most {MOST_BYTES:,} are allowed")
    try:
        content = json.loads(data.decode("ascii"), parse_int=_integer, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"it is not the manifest of a {FORMAT}")
    version = content.get("version")
    if type(version) is not int or version != VERSION:
        raise ValueError(
            f"it is of version {str(version)[:20]}, this headrace reads version {VERSION}; "
            "use the headrace that wrote it"
        )
    if sorted(content) != sorted(_FIELDS):
        raise ValueError(f"its fields are not {', '.join(_FIELDS)}")
    step, files, description = content["step"], content["files"], content["description"]
    if type(step) is not int or step < 0 or not isinstance(files, list) or not isinstance(description, dict):
        raise ValueError("its step, files or description is of the wrong type")
    manifest = Manifest(step, tuple(map(_record, files)), description)
    if encode(manifest) != data:
        raise ValueError("its own digest does not fit, or it is not written as headrace writes it")
    return manifest


def _text(content: Mapping[str, Any]) -> bytes:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False, check_circular=False)
    return f"{text}\n".encode("ascii")


def _record(value: object) -> FileRecord:
    if not isinstance(value, dict) or sorted(value) != ["bytes", "name", "sha256"]:
        raise ValueError("a file's fields are not bytes, name, sha256")
    name, size, digest = value["name"], value["bytes"], value["sha256"]
    if not isinstance(name, str) or type(size) is not int or not isinstance(digest, str):
        raise ValueError("a file's name, bytes or sha256 is of the wrong type")
    if size < 0 or not _DIGEST.fullmatch(digest):
        raise ValueError(f"the size or digest of {name[:100]!r} is none")
    return FileRecord(name, size, digest)


def _plain(value: object, where: str, depth: int = 0) -> Any:
    """Returns JSON values as Python's own types; a ValueError for anything else."""
    if depth > _MOST_DEEP:
        raise ValueError(f"{where[:200]} is nested deeper than {_MOST_DEEP}")
    if isinstance(value, Mapping):
        odd = [key for key in value if not isinstance(key, str)]
        if odd:
            raise ValueError(f"{where[:200]} has the key {odd[0]!r}, which is no text")
        return {str(key): _plain(item, f"{where}.{key}", depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, where, depth + 1) for item in value]
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return _integer(str(int(value)))
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    raise ValueError(f"{where[:200]} is {str(value)[:50]} ({type(value).__name__}), which is no JSON value")


def _integer(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"an integer of {len(text)} digits, at most {_MOST_DIGITS} are allowed")
    return int(text)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("a key stands in it twice")
    return content
