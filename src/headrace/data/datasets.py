"""Real data to begin with: images that fit into memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from headrace.data.loading.fetching import DIGESTS, Fetcher, digest_of, obtain
from headrace.data.pipeline.order import permutation
from headrace.errors import DataError, UnfitMachine

_DIGITS_TEST = 360
"""Of 1,797."""


@dataclass(frozen=True, eq=False)
class ImageData:
    """Images of ten classes, to train and to test on.

    Attributes:
        name: what it is, for display.
        train_images: `(examples, 1, height, width)` float32, 0 to 1.
        train_labels: `(examples,)` int64, 0 to 9.
        test_images, test_labels: the same, of other examples.
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
        cache_dir: where the files stay; None for `.cache/headrace` in the home folder.
        fetchers: where else to look than in the cache, in order; None for the places above.
        digests: file name to SHA-256 of its contents.

    Raises:
        UnfitMachine: the files can be had from nowhere, or the cache cannot be written.
        DataError: a file has another digest than it should.
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
    """Returns what a file in IDX format holds: two zeros, type, number of dims, each length, the bytes."""
    found = digest_of(path)
    if found != expected:
        raise DataError(
            f"{path} is damaged: its sha256 is {found}, expected {expected}; delete it and it is fetched again"
        )
    content = np.fromfile(path, dtype=np.uint8)
    dims = int(content[3])
    start = 4 + 4 * dims
    lengths = content[4:start].view(">u4").tolist()
    return torch.from_numpy(content[start:].reshape(lengths))


def _images(pixels: Tensor) -> Tensor:
    return pixels.unsqueeze(1).float().div_(255)


def digits() -> ImageData:
    """Returns scikit-learn's bundled digits: 1,437 and 360 images of handwritten digits, 8 x 8.

    Raises:
        UnfitMachine: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits  # slow to import, and an optional extra
    except ImportError as error:
        raise UnfitMachine(
            f'the digits come with scikit-learn, which is not there ({error}); pip install "headrace[data]"'
        ) from error
    bunch = load_digits()
    order = torch.from_numpy(permutation(len(bunch.target), seed=0, epoch=0))
    images = torch.from_numpy(bunch.images).float().div_(16).unsqueeze(1)[order]
    labels = torch.from_numpy(bunch.target).long()[order]
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
    """Returns Fashion-MNIST, or the digits, with a line that says so, where it can be had from nowhere.

    Args:
        cache_dir: as of `fashion_mnist`.
        warn: takes the line; None writes it to stderr.
        fetchers: as of `fashion_mnist`.

    Raises:
        UnfitMachine: neither can be had.
        DataError: a file has another digest than it should.
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
