"""onnxruntime-web, which runs the model in a browser: where it comes from, and which of its files a page needs.

It has 14 MB and is not a Python package: headrace does not contain it. npm fetches it once, unless the user names a
copy.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from headrace.errors import UnfitMachine, UsageError
from headrace.machine import disk
from headrace.machine.temporary import temporary_folder

NAME, VERSION = "onnxruntime-web", "1.30.0"
INTEGRITY = "q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJmg8pZClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ=="
"""SHA-512 of that version's archive, as npm's package-lock.json writes it."""
FILES = ("ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm")
"""Of the package's folder dist/, what computes on the processor; the others are for graphics cards."""

PAGE = ("index.html", "page.css", "page.js", "panel.js", "tensors.js")

_ARCHIVE = f"{NAME}-{VERSION}.tgz"
_MOST_BYTES = 64 << 20
_FETCH_S = 300.0
_REMEDY = (
    f"run `npm pack {NAME}@{VERSION}` on a machine that has npm and a network, and name the file that it writes: "
    f"--onnxruntime-web {_ARCHIVE}"
)


@dataclass(frozen=True)
class WebRuntime:
    """The files of one version, by name."""

    version: str
    files: Mapping[str, bytes]


def find_runtime(given: Path | None = None, cache: Path | None = None) -> WebRuntime:
    """Returns onnxruntime-web: a user's copy, the one in the cache, or one that npm fetches into it.

    Args:
        given: an archive that `npm pack` wrote, or an installed package: node_modules/onnxruntime-web.
        cache: of the archive; None for `.cache/headrace` in the home folder.

    Raises:
        UsageError: `given` is neither.
        UnfitMachine: there is no copy, and npm cannot fetch one.
    """
    if given is not None:
        if disk.is_folder(given):
            return _runtime(given, lambda name: (given / name).read_bytes())
        return _read_archive(given)
    cache = cache or Path.home() / ".cache" / "headrace"
    path = cache / _ARCHIVE
    if not disk.is_file(path) or not _is_known(path):
        _fetch(path)
    return _read_archive(path)


def _fetch(path: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise UnfitMachine(f"--target browser needs {NAME}, and there is no npm to fetch it; {_REMEDY}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary_folder("fetching-", path.parent) as folder:
            command = [npm, "pack", f"{NAME}@{VERSION}", "--pack-destination", str(folder)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_FETCH_S, cwd=folder)
            made = folder / _ARCHIVE
            if done.returncode or not disk.is_file(made):
                last = (done.stderr.strip() or "it says nothing").splitlines()[-1]
                raise UnfitMachine(f"npm could not fetch {NAME} {VERSION}: {last:.200}; {_REMEDY}")
            if not _is_known(made):
                raise UnfitMachine(f"what npm fetched as {NAME} {VERSION} has another digest; {_REMEDY}")
            os.replace(made, path)
    except subprocess.TimeoutExpired:
        raise UnfitMachine(f"npm did not fetch {NAME} {VERSION} in {_FETCH_S:.0f} s; {_REMEDY}") from None
    except OSError as error:
        raise UnfitMachine(f"{path} cannot be written: {error.strerror or error}; {_REMEDY}") from error


def _is_known(path: Path) -> bool:
    hashed = hashlib.sha512(path.read_bytes()).digest()
    return base64.b64encode(hashed).decode() == INTEGRITY


def _read_archive(path: Path) -> WebRuntime:
    try:
        with tarfile.open(path, "r:gz") as archive:

            def read(name: str) -> bytes:
                # By name and size, into memory: nothing is unpacked, and links lead nowhere.
                member = archive.getmember(f"package/{name}")
                content = archive.extractfile(member) if member.isfile() and member.size <= _MOST_BYTES else None
                if content is None:
                    raise KeyError(name)
                return content.read()

            return _runtime(path, read)
    except (OSError, EOFError, tarfile.TarError) as error:
        raise UsageError(f"{path} cannot be read as the archive of {NAME}: {error}; {_REMEDY}") from error


def _runtime(path: Path, read: Callable[[str], bytes]) -> WebRuntime:
    try:
        about = json.loads(read("package.json"))
        contents = {name: read(f"dist/{name}") for name in FILES}
    except (KeyError, FileNotFoundError, ValueError) as error:
        raise UsageError(f"{path} is not a whole {NAME}: {error!s:.200}; {_REMEDY}") from error
    name, version = (about.get("name"), about.get("version")) if isinstance(about, dict) else (None, None)
    if name != NAME:
        raise UsageError(f"{path} is {name!s:.60}, not {NAME}; {_REMEDY}")
    return WebRuntime(str(version), contents)


def write_page(place: Path, runtime: WebRuntime) -> None:
    """Writes what a page needs beside the model into its folder: the page itself and onnxruntime-web."""
    page = files("headrace.export.browser") / "page"
    for name in PAGE:
        (place / name).write_bytes((page / name).read_bytes())
    for name, content in runtime.files.items():
        (place / name).write_bytes(content)
