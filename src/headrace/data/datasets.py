"""Small image data sets that fit into memory, and downloading Fashion-MNIST."""

from __future__ import annotations

import gzip
import hashlib
import http.client
import importlib.util
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from headrace.data.pipeline.order import permutation
from headrace.errors import DataError, UnfitMachine
from headrace.machine import disk
from headrace.machine.extras import remedy
from headrace.machine.temporary import temporary_folder

Fetcher = Callable[[Path, Sequence[str]], None]
"""Puts `<name>.gz` for every name into a folder, or raises `UnfitMachine` with the reason in a few words."""

DIGESTS: Mapping[str, str] = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
"""SHA-256 of each unpacked file: Debian compressed the same contents again, so the archives' digests differ."""

_ORIGIN = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
_PACKAGE = "dataset-fashion-mnist"
_INSTALLED = Path("usr/share/datasets/fashion-mnist")
_LISTS = Path("/var/lib/apt/lists")
_DOWNLOAD_S = 300.0
_UPDATE_S = 120.0
_SILENCE_S = 15.0
"""Timeout of a server's answer."""
_CHUNK = 1 << 20


def obtain(
    cache: Path, fetchers: Sequence[tuple[str, Fetcher]] | None = None, digests: Mapping[str, str] = DIGESTS
) -> None:
    """Downloads and unpacks the files that `cache` lacks, from the first fetcher that has them.

    A DataError if a fetched file has another digest; UnfitMachine if no fetcher has the files.
    """
    missing = [name for name in digests if not disk.exists(cache / name)]
    if not missing:
        return
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with temporary_folder("fetching-", cache) as folder:
            where = _fetch(folder, missing, FETCHERS if fetchers is None else fetchers)
            for name in missing:
                _unpack(folder / f"{name}.gz", digests[name], where)
            for name in missing:
                os.replace(folder / name, cache / name)
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
    raise UnfitMachine(f"Fashion-MNIST cannot be obtained ({'; '.join(reasons)})")


def _unpack(packed: Path, expected: str, where: str) -> None:
    target = packed.with_suffix("")
    try:
        with gzip.open(packed) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, _CHUNK)
        digest = digest_of(target)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        digest = f"none, as it cannot be unpacked ({error})"
    if digest != expected:
        raise DataError(
            f"{packed.name} from {where} is not the file it should be and is not used: its contents' sha256 is "
            f"{digest}, expected {expected}; try again, or find out what changes the download"
        )


def digest_of(path: Path) -> str:
    """Returns the SHA-256 of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def from_installed(folder: Path, names: Sequence[str], root: Path = Path("/")) -> None:
    """Copies the files of Debian's package if it is installed."""
    for name in names:
        packed = root / _INSTALLED / f"{name}.gz"
        if not disk.exists(packed):
            raise UnfitMachine("not installed")
        shutil.copyfile(packed, folder / packed.name)


def from_debian(folder: Path, names: Sequence[str]) -> None:
    """Downloads Debian's package and unpacks it; needs no root."""
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise UnfitMachine("no apt-get on this machine")
    if os.access(_LISTS, os.W_OK):
        try:
            _run(folder, _UPDATE_S, "apt-cache", "show", _PACKAGE)
        except UnfitMachine:
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


def _run(folder: Path, limit_s: float, *command: str) -> None:
    """Runs a command in a folder without output; UnfitMachine with its last line if it fails or takes too long."""
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
    except OSError as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(error, urllib.error.HTTPError):
            error.close()  # the connection, which the error holds
        raise UnfitMachine(f"{address}: {reason}") from error
    except (http.client.HTTPException, ValueError) as error:
        # A captive portal answers in the server's place, some with no status line, or with a redirect to no address.
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise UnfitMachine(f"{address}: the answer is not sound HTTP ({said:.100})") from error


FETCHERS: tuple[tuple[str, Fetcher], ...] = (
    ("the installed package", from_installed),
    ("Debian's package", from_debian),
    ("the original address", from_origin),
)
"""Where to look, in this order."""

_DIGITS_TEST = 360
_DIGITS_FILE = "datasets/data/digits.csv.gz"
"""In the package."""
"""Of 1,797."""


@dataclass(frozen=True, eq=False)
class ImageData:
    """Images of ten classes for training and testing.

    Attributes:
        name: for display.
        train_images: `(examples, 1, height, width)` float32, 0 to 1.
        train_labels: `(examples,)` int64, 0 to 9.
        test_images, test_labels: the same for testing.

    Examples:
        >>> images = hr.data.digits()
        >>> images.test[0].shape, images.test[1].shape
        (torch.Size([360, 1, 8, 8]), torch.Size([360]))
    """

    name: str
    train_images: Tensor = field(repr=False)
    train_labels: Tensor = field(repr=False)
    test_images: Tensor = field(repr=False)
    test_labels: Tensor = field(repr=False)

    @property
    def train(self) -> tuple[Tensor, Tensor]:
        """Images and labels to train on, as `Job.data` takes them."""
        return self.train_images, self.train_labels

    @property
    def test(self) -> tuple[Tensor, Tensor]:
        """Images and labels to evaluate on, as `Job.eval_data` takes them."""
        return self.test_images, self.test_labels


def fashion_mnist(
    cache_dir: str | Path | None = None,
    *,
    fetchers: Sequence[tuple[str, Fetcher]] | None = None,
    digests: Mapping[str, str] = DIGESTS,
) -> ImageData:
    """Returns Fashion-MNIST: 60,000 and 10,000 images of clothes, 28 x 28.

    Xiao, Rasul, Vollgraf, "Fashion-MNIST: a novel image dataset for benchmarking machine learning algorithms",
    2017. The files come from the cache, from Debian's package `dataset-fashion-mnist` (31 MB, no root needed)
    or from the authors' address, the first that has them; they are checked each time and cost 55 MB of disk.

    Args:
        cache_dir: of the files; None for `.cache/headrace` in the home folder.
        fetchers: to use in order for files that are not in the cache; None for the places above.
        digests: file name to SHA-256 of its contents.

    Raises:
        UnfitMachine: no source has the files, or the cache cannot be written.
        DataError: a file has another digest than it should.

    Examples:
        >>> hr.data.fashion_mnist().train_images.shape
        torch.Size([60000, 1, 28, 28])
    """
    root = Path.home() / ".cache" / "headrace" if cache_dir is None else Path(cache_dir)
    folder = root / "fashion-mnist"
    obtain(folder, fetchers, digests)
    files = {name: _read(folder / name, digest) for name, digest in digests.items()}
    return ImageData(
        name="Fashion-MNIST",
        train_images=_images(files["train-images-idx3-ubyte"]),
        train_labels=files["train-labels-idx1-ubyte"].long(),
        test_images=_images(files["t10k-images-idx3-ubyte"]),
        test_labels=files["t10k-labels-idx1-ubyte"].long(),
    )


def _read(path: Path, expected: str) -> Tensor:
    """Reads a file in IDX format: two zeros, type, number of dims, the lengths, the bytes."""
    digest = digest_of(path)
    if digest != expected:
        raise DataError(
            f"{path} is damaged: its sha256 is {digest}, expected {expected}; delete it and it is fetched again"
        )
    content = np.fromfile(path, dtype=np.uint8)
    start = 4 + 4 * int(content[3])
    lengths = content[4:start].view(">u4").tolist()
    return torch.from_numpy(content[start:].reshape(lengths))


def _images(pixels: Tensor) -> Tensor:
    return pixels.unsqueeze(1).float().div_(255)


def digits() -> ImageData:
    """Returns scikit-learn's bundled digits: 1,437 and 360 images of handwritten digits, 8 x 8.

    Raises:
        UnfitMachine: scikit-learn is not installed.

    Examples:
        >>> hr.data.digits().train_images.shape
        torch.Size([1437, 1, 8, 8])
    """
    # Not through scikit-learn, which imports scipy and pandas for it, and takes longer to do so than torch.
    package = importlib.util.find_spec("sklearn")
    file = Path(package.origin).parent / _DIGITS_FILE if package and package.origin else None
    if file is None or not disk.is_file(file):
        raise UnfitMachine(
            "the digits come with scikit-learn, which is not installed, or without its data sets: " + remedy("data")
        )
    with gzip.open(file, "rt") as lines:
        table = torch.from_numpy(np.loadtxt(lines, np.int64, delimiter=","))
    order = torch.from_numpy(permutation(len(table), seed=0, epoch=0))
    images = table[:, :-1].reshape(-1, 8, 8).float().div_(16).unsqueeze(1)[order]
    labels = table[:, -1][order]
    return ImageData(
        name="digits",
        train_images=images[_DIGITS_TEST:],
        train_labels=labels[_DIGITS_TEST:],
        test_images=images[:_DIGITS_TEST],
        test_labels=labels[:_DIGITS_TEST],
    )


def fashion_mnist_or_digits(
    cache_dir: str | Path | None = None,
    warn: Callable[[str], object] | None = None,
    *,
    fetchers: Sequence[tuple[str, Fetcher]] | None = None,
) -> ImageData:
    """Returns Fashion-MNIST or, with a warning, the digits if no source has it.

    Args:
        cache_dir: as of `fashion_mnist`.
        warn: takes the warning; None writes it to stderr.
        fetchers: as of `fashion_mnist`.

    Raises:
        UnfitMachine: neither can be obtained.
        DataError: a file has another digest than it should.

    Examples:
        >>> hr.data.fashion_mnist_or_digits("cache", warn=lambda line: None, fetchers=[]).name
        'digits'
    """
    try:
        return fashion_mnist(cache_dir, fetchers=fetchers)
    except UnfitMachine as reason:
        line = f"{reason}; going on with scikit-learn's digits (8 x 8) instead"
        if warn is None:
            sys.stderr.write(line + "\n")
        else:
            warn(line)
        return digits()
