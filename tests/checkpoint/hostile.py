"""Checkpoints made to harm their reader: each kind is a function that spoils the newest of a sound folder."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import shutil
import socket
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from checkpoint.hostile_headers import HEADERS, LARGE_HEADERS

__all__ = ["KINDS", "STEP"]

STEP = 30
"""Of the checkpoint that is spoiled; 10 and 20 are sound."""
MANIFEST = "manifest.json"
RANK = "rank-1.safetensors"

Kind = Callable[[Path], None]
"""Is given the folder of the checkpoint."""


class _Shell:
    """Runs a command where it is unpickled."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch /tmp/headrace-was-here",)


def _zip() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(_Shell()))
    return buffer.getvalue()


def _torch() -> bytes:
    buffer = io.BytesIO()
    torch.save({"weight": torch.zeros(3)}, buffer)
    return buffer.getvalue()


DISGUISES = {
    "a pickle": pickle.dumps(_Shell()),
    "a pickle of protocol 0": pickle.dumps(_Shell(), 0),
    "a zip": _zip(),
    "a file of torch.save": _torch(),
    "gzip": b"\x1f\x8b\x08" + bytes(200),
    "an array of numpy": b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'fortran_order': False, 'shape': (1,), }",
    "a program": b"#!/bin/sh\ntouch /tmp/headrace-was-here\n",
    "nothing": b"",
    "zeros": bytes(4096),
}


def content_of(path: Path) -> dict[str, Any]:
    """Returns what the manifest says, without its digest."""
    content: dict[str, Any] = json.loads((path / MANIFEST).read_bytes())
    del content["digest"]
    return content


def sealed(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a manifest whose digest fits, whatever it says."""

    def text(value: object) -> str:
        return json.dumps(value, sort_keys=True, separators=(",", ":")) + "\n"

    digest = hashlib.sha256(text(content).encode()).hexdigest()
    (path / MANIFEST).write_text(text({**content, "digest": digest}))


def forged(data: bytes, path: Path) -> None:
    """Writes a rank's file, and a manifest that vouches for it."""
    (path / RANK).write_bytes(data)
    content = content_of(path)
    content["files"][1] |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    sealed(path, content)


def forged_large(make: Callable[[], bytes], path: Path) -> None:
    forged(make(), path)


def said(path: Path, **fields: object) -> None:
    """Changes the manifest's fields; ... takes one away."""
    content = {**content_of(path), **fields}
    sealed(path, {name: value for name, value in content.items() if value is not ...})


def of_a_file(path: Path, **fields: object) -> None:
    """Changes what the manifest says of a file."""
    content = content_of(path)
    content["files"][1] = {name: value for name, value in {**content["files"][1], **fields}.items() if value is not ...}
    sealed(path, content)


def written(data: bytes, path: Path) -> None:
    (path / MANIFEST).write_bytes(data)


def edited(old: bytes, new: bytes, path: Path) -> None:
    data = (path / MANIFEST).read_bytes()
    assert old in data
    (path / MANIFEST).write_bytes(data.replace(old, new, 1))


def linked(name: str, target: str, path: Path) -> None:
    """Puts a symbolic link in a file's place; "{copy}" is a sound copy outside of the folder."""
    copy = path.parent.parent / "copy"
    shutil.copy(path / name, copy)
    (path / name).unlink()
    (path / name).symlink_to(target.format(copy=copy, name=name))


def hard_linked(name: str, path: Path) -> None:
    os.link(path / name, path.parent.parent / "another name")


def instead(make: Callable[[Path], object], name: str, path: Path) -> None:
    """Makes something else in a file's place."""
    (path / name).unlink()
    make(path / name)


def moved(name: str, new: str, path: Path) -> None:
    (path / name).rename(path / new)


def folder_instead(make: Callable[[Path], object], path: Path) -> None:
    """Makes something else in the checkpoint's place."""
    shutil.rmtree(path)
    make(path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        here = os.getcwd()
        os.chdir(path.parent)  # a socket's path is short
        try:
            bound.bind(path.name)
        finally:
            os.chdir(here)


def _swapped(path: Path) -> None:
    other = path.with_name("step-00000020")
    path.rename(path.with_name("aside"))
    other.rename(path)
    path.with_name("aside").rename(other)
    shutil.rmtree(other)


def _resized(bytes_: int, path: Path) -> None:
    os.truncate(path / RANK, (path / RANK).stat().st_size + bytes_)


def _crossed(path: Path) -> None:
    one, other = path / "rank-0.safetensors", path / RANK
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


NAMES = [
    "/etc/passwd", "../step-00000020/rank-1.safetensors", "rank-1.safetensors/../rank-1.safetensors",
    "./rank-1.safetensors", "rank-01.safetensors", "RANK-1.safetensors", "rank-1.SAFETENSORS", "rank-1.safetensors\0",
    "rank-1.safetensors\n", "manifest.json", "", ".", "..", "rank--1.safetensors", "rank-+1.safetensors",
    "rank-1234567890.safetensors", "rank-\u0661.safetensors", "rank-1.safetensors.pkl", "rank-1", "x" * 100_000,
    "rank-0.safetensors",
]  # fmt: skip
"""Of files, that a manifest must not say."""

MANIFESTS = {
    "white space": b" \n",
    "null": b"null\n",
    "a number": b"1\n",
    "a text": b'"headrace checkpoint"\n',
    "a list": b"[]\n",
    "an empty object": b"{}\n",
    "2 MiB of spaces": b" " * (2 << 20),
    "1 MiB of lists": b"[" + b"[]," * 349_000 + b"[]]",
    "1 MiB of objects": b"[" + b'{"":0},' * 149_000 + b"{}]",
    "deep lists": b"[" * 500_000 + b"]" * 500_000,
    "deep objects": b'{"a":' * 150_000 + b"1" + b"}" * 150_000,
    "an open list": b"[" * 1_000_000,
    "UTF-16": '{"a":1}'.encode("utf-16"),
    "a byte order mark": b"\xef\xbb\xbf{}",
    "not UTF-8": b'{"\xff":1}\n',
    "an integer of a million digits": b"9" * 1_000_000,
    "YAML": b"format: headrace checkpoint\n",
    "XML": b'<!DOCTYPE a [<!ENTITY b "c">]><a>&b;</a>',
}

EDITS = {
    "pretty": (b":", b": "),
    "no end of line": (b"}\n", b"}"),
    "more behind": (b"}\n", b"}\n{}\n"),
    "a key twice": (b'"version":1', b'"version":1,"version":1'),
    "a step twice": (b'"step":30', b'"step":20,"step":30'),
    "NaN": (b'"description":{', b'"description":{"a":NaN,'),
    "infinity": (b'"description":{', b'"description":{"a":1e999,'),
    "a comment": (b'"step"', b'/**/"step"'),
    "a float that is no shortest": (b'"description":{', b'"description":{"a":1.50,'),
    "an escape that need not be": (b'"step"', b'"\\u0073tep"'),
    "a huge integer": (b'"step":30', b'"step":3' + b"0" * 5000),
    "minus zero": (b'"description":{', b'"description":{"a":-0,'),
    "a flipped bit": (b'"step":30', b'"step":31'),
}

INSTEAD: dict[str, Callable[[Path], object]] = {
    "a FIFO": os.mkfifo,
    "a folder": Path.mkdir,
    "a socket": _socket,
    "nothing": Path.absolute,
}

KINDS: dict[str, Kind] = {
    **{f"header: {name}": partial(forged, data) for name, data in HEADERS.items()},
    **{f"header: {name}": partial(forged_large, make) for name, make in LARGE_HEADERS.items()},
    **{f"file: {name}": partial(forged, data) for name, data in DISGUISES.items()},
    **{f"manifest: {name}": partial(written, data) for name, data in {**DISGUISES, **MANIFESTS}.items()},
    **{f"manifest: {name}": partial(edited, *change) for name, change in EDITS.items()},
    **{f"name: {name[:40]!r}": partial(of_a_file, name=name) for name in NAMES},
    **{f"name: {value!r}": partial(of_a_file, name=value) for value in (None, 1, True, ["a"])},
    **{f"version: {value!r}": partial(said, version=value)
       for value in (..., None, 0, 2, -1, "1", 1.0, True, [1], {}, 10**30)},
    **{f"format: {value!r}": partial(said, format=value) for value in (..., None, "", "safetensors", 1, ["a"])},
    **{f"step: {value!r}": partial(said, step=value) for value in (..., None, -30, 20, "30", 30.0, True, [30], 10**30)},
    **{f"files: {value!r}": partial(said, files=value) for value in (..., None, {}, "a", 1, [1], [[]], [None], [{}])},
    **{f"description: {value!r}": partial(said, description=value) for value in (..., None, [], "a", 1)},
    **{f"size: {value!r}": partial(of_a_file, bytes=value)
       for value in (..., None, -1, True, 1.5, "9", 0, 10**30, 2**64, [])},
    **{f"digest: {value!r}"[:60]: partial(of_a_file, sha256=value)
       for value in (..., None, "", "0" * 63, "A" * 64, "g" * 64, "0" * 64, 0, [], "\u0660" * 64)},
    "another field": partial(said, extra=1),
    "another field of a file": partial(of_a_file, extra=1),
    "100,000 files": lambda path: said(path, files=[{"a": 1}] * 100_000),
    "files in another order": lambda path: said(path, files=content_of(path)["files"][::-1]),
    "a deep description": lambda path: said(path, description=_deep(100)),
    **{f"a link to {target}, {name}": partial(linked, name, target)
       for name in (MANIFEST, RANK)
       for target in ("{copy}", "../../copy", "/etc/passwd", "/dev/zero", "/proc/self/mem", "nowhere", "{name}")},
    **{f"two names, {name}": partial(hard_linked, name) for name in (MANIFEST, RANK)},
    **{f"{what}, {name}": partial(instead, make, name)
       for name in (MANIFEST, RANK)
       for what, make in INSTEAD.items()},
    **{f"renamed {old} to {new}": partial(moved, old, new)
       for old, new in ((MANIFEST, "Manifest.json"), (RANK, "RANK-1.safetensors"), (RANK, "rank-2.safetensors"))},
    "a file in its place": partial(folder_instead, Path.touch),
    "a FIFO in its place": partial(folder_instead, os.mkfifo),
    "an empty folder": partial(folder_instead, Path.mkdir),
    "a link to another checkpoint": partial(folder_instead, lambda path: path.symlink_to("step-00000020")),
    "a link to a folder elsewhere": partial(folder_instead, lambda path: path.symlink_to("/etc")),
    "another checkpoint's folder": _swapped,
    "ranks exchanged": _crossed,
    "a byte more": partial(_resized, 1),
    "a byte less": partial(_resized, -1),
    "a terabyte of holes": partial(_resized, 1 << 40),
}  # fmt: skip
"""All of them, by name."""


def _deep(depth: int) -> dict[str, Any]:
    return {"a": _deep(depth - 1)} if depth else {}
