"""Where the files of Fashion-MNIST come from, and the proof that they are the right ones."""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from headrace.errors import DataError, UnfitMachine

Fetcher = Callable[[Path, Sequence[str]], None]
"""Puts `<name>.gz` for every name into a folder, or raises `UnfitMachine` with the reason in a few words."""

DIGESTS: Mapping[str, str] = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
"""SHA-256 of each file, unpacked: Debian has packed the same contents anew, so the archives' digests differ."""

_ORIGIN = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
_PACKAGE = "dataset-fashion-mnist"
_INSTALLED = Path("usr/share/datasets/fashion-mnist")
_LISTS = Path("/var/lib/apt/lists")
_DOWNLOAD_S = 300.0
_UPDATE_S = 120.0
_SILENCE_S = 15.0
"""Longest silence of a server."""
_CHUNK = 1 << 20


def obtain(
    cache: Path,
    fetchers: Sequence[tuple[str, Fetcher]] | None = None,
    digests: Mapping[str, str] = DIGESTS,
) -> None:
    """Makes sure that the unpacked files lie in `cache`; fetches those that do not.

    Args:
        cache: a folder; made where it is not there.
        fetchers: where to look, in order, each with its name for messages; None for `FETCHERS`.
        digests: file name to SHA-256.

    Raises:
        DataError: a fetched file has another digest; it is not used.
        UnfitMachine: the files can be had from nowhere, or the cache cannot be written.
    """
    missing = [name for name in digests if not (cache / name).exists()]
    if not missing:
        return
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix="fetching-") as folder:
            where = _fetch(Path(folder), missing, FETCHERS if fetchers is None else fetchers)
            for name in missing:
                _unpack(Path(folder) / f"{name}.gz", digests[name], where)
            for name in missing:
                os.replace(Path(folder) / name, cache / name)
    except OSError as error:
        raise UnfitMachine(f"{cache} cannot be used as a cache ({error}); give another cache_dir") from error


def _fetch(folder: Path, names: Sequence[str], fetchers: Sequence[tuple[str, Fetcher]]) -> str:
    """Returns the name of the fetcher that had the files."""
    reasons = []
    for where, fetch in fetchers:
        try:
            fetch(folder, names)
        except UnfitMachine as reason:
            reasons.append(f"{where}: {reason}")
        else:
            return where
    raise UnfitMachine(f"Fashion-MNIST can be had from nowhere ({'; '.join(reasons)})")


def _unpack(packed: Path, expected: str, where: str) -> None:
    target = packed.with_suffix("")
    try:
        with gzip.open(packed) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, _CHUNK)
        found = digest_of(target)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        found = f"none, as it cannot be unpacked ({error})"
    if found != expected:
        raise DataError(
            f"{packed.name} from {where} is not the file it should be and is not used: its contents' sha256 is "
            f"{found}, expected {expected}; try again, or find out who changes what is downloaded"
        )


def digest_of(path: Path) -> str:
    """Returns the SHA-256 of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def from_installed(folder: Path, names: Sequence[str], root: Path = Path("/")) -> None:
    """Takes the files of Debian's package where it is installed."""
    for name in names:
        packed = root / _INSTALLED / f"{name}.gz"
        if not packed.exists():
            raise UnfitMachine("not installed")
        shutil.copyfile(packed, folder / packed.name)


def from_debian(folder: Path, names: Sequence[str]) -> None:
    """Downloads Debian's package and unpacks it; needs no root."""
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise UnfitMachine("no apt-get on this machine")
    if os.access(_LISTS, os.W_OK) and not _knows_package(folder):
        _run(folder, _UPDATE_S, *_apt("update"))
    _run(folder, _DOWNLOAD_S, *_apt("download", _PACKAGE))
    packages = sorted(folder.glob(f"{_PACKAGE}_*.deb"))
    if not packages:
        raise UnfitMachine("apt-get left no package")
    _run(folder, _DOWNLOAD_S, "dpkg-deb", "-x", str(packages[0]), "unpacked")
    from_installed(folder, names, folder / "unpacked")


def _apt(*arguments: str) -> tuple[str, ...]:
    limits = (f"-oAcquire::{scheme}::Timeout={_SILENCE_S:.0f}" for scheme in ("http", "https"))
    return ("apt-get", "-qq", "-oAcquire::Retries=0", *limits, *arguments)


def _knows_package(folder: Path) -> bool:
    try:
        _run(folder, _UPDATE_S, "apt-cache", "show", _PACKAGE)
    except UnfitMachine:
        return False
    return True


def _run(folder: Path, limit_s: float, *command: str) -> None:
    """Runs a command in a folder, without a word.

    Raises:
        UnfitMachine: it cannot be run, fails or takes too long; with its last line.
    """
    try:
        done = subprocess.run(
            command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit_s
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnfitMachine(f"{command[0]}: {error}") from error
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise UnfitMachine(f"{command[0]}: {said}")


def from_origin(folder: Path, names: Sequence[str], address: str = _ORIGIN) -> None:
    """Downloads the files from the authors' address."""
    for name in names:
        _download(f"{address}/{name}.gz", folder / f"{name}.gz")


def _download(address: str, target: Path) -> None:
    deadline = time.monotonic() + _DOWNLOAD_S
    try:
        with urllib.request.urlopen(address, timeout=_SILENCE_S) as response, target.open("wb") as sink:
            while chunk := response.read(_CHUNK):
                sink.write(chunk)
                if time.monotonic() > deadline:
                    raise UnfitMachine(f"{address} took more than {_DOWNLOAD_S:.0f} s")
    except urllib.error.URLError as error:
        raise UnfitMachine(f"{address}: {error.reason}") from error
    except OSError as error:
        raise UnfitMachine(f"{address}: {error}") from error


FETCHERS: tuple[tuple[str, Fetcher], ...] = (
    ("the installed package", from_installed),
    ("Debian's package", from_debian),
    ("the original address", from_origin),
)
"""Where to look, in this order."""
