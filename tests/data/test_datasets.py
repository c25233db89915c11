"""Real data: what it looks like, and where it comes from. None of these needs a network."""

from __future__ import annotations

import functools
import gzip
import hashlib
import http.server
import re
import socketserver
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.data import datasets, digits, fashion_mnist, fashion_mnist_or_digits
from headrace.errors import DataError, UnfitMachine


def idx(array: np.ndarray) -> bytes:
    lengths = np.array(array.shape, dtype=">u4").tobytes()
    return bytes((0, 0, 8, array.ndim)) + lengths + array.astype(np.uint8).tobytes()


FILES = {
    "train-images-idx3-ubyte": idx(np.arange(3 * 4 * 5).reshape(3, 4, 5) % 256),
    "train-labels-idx1-ubyte": idx(np.array([3, 0, 9])),
    "t10k-images-idx3-ubyte": idx(np.full((2, 4, 5), 255)),
    "t10k-labels-idx1-ubyte": idx(np.array([1, 2])),
}
DIGITS_TRAIN = [153, 146, 135, 154, 135, 145, 160, 129, 133, 147]
DIGESTS = {name: hashlib.sha256(content).hexdigest() for name, content in FILES.items()}


class Shop:
    """A fetcher that counts who asks."""

    def __init__(self, **changed: bytes) -> None:
        self.asked: list[Sequence[str]] = []
        self.changed = changed

    def __call__(self, folder: Path, names: Sequence[str]) -> None:
        self.asked.append(list(names))
        for name in names:
            packed = gzip.compress(FILES[name], mtime=0)
            (folder / f"{name}.gz").write_bytes(self.changed.get(name.partition("-")[0], packed))


def closed(folder: Path, names: Sequence[str]) -> None:
    raise UnfitMachine("closed today")


def test_files_become_images_and_labels(tmp_path: Path) -> None:
    data = fashion_mnist(tmp_path, fetchers=[("the shop", Shop())], digests=DIGESTS)
    images, labels = data.train
    assert (images.shape, images.dtype) == ((3, 1, 4, 5), torch.float32)
    assert torch.equal(images.flatten(), torch.arange(60) / 255)
    assert labels.tolist() == [3, 0, 9]
    assert labels.dtype == torch.int64
    assert data.test[0].unique().tolist() == [1.0]
    assert data.test[1].tolist() == [1, 2]


def test_the_first_place_that_has_the_files_is_asked_once_and_then_the_cache(tmp_path: Path) -> None:
    shop, unused = Shop(), Shop()
    fetchers: list[tuple[str, datasets.Fetcher]] = [("closed", closed), ("the shop", shop), ("another", unused)]
    for _ in range(2):
        fashion_mnist(tmp_path, fetchers=fetchers, digests=DIGESTS)
    assert shop.asked == [list(FILES)]
    assert unused.asked == []
    assert sorted(path.name for path in (tmp_path / "fashion-mnist").iterdir()) == sorted(FILES)
    (tmp_path / "fashion-mnist" / "t10k-labels-idx1-ubyte").unlink()
    fashion_mnist(tmp_path, fetchers=fetchers, digests=DIGESTS)
    assert shop.asked[1:] == [["t10k-labels-idx1-ubyte"]]


def test_a_wrong_digest_is_named_with_both_and_nothing_is_kept(tmp_path: Path) -> None:
    other = FILES["t10k-labels-idx1-ubyte"][:-1] + b"\x07"
    shop = Shop(t10k=gzip.compress(other, mtime=0))
    with pytest.raises(DataError) as caught:
        fashion_mnist(tmp_path, fetchers=(("the shop", shop), ("another", Shop())), digests=DIGESTS)
    message = str(caught.value)
    assert "t10k-images-idx3-ubyte.gz from the shop" in message
    assert hashlib.sha256(other).hexdigest() in message
    assert DIGESTS["t10k-images-idx3-ubyte"] in message
    assert list((tmp_path / "fashion-mnist").iterdir()) == []


@pytest.mark.parametrize("content", [b"<html>log in</html>", gzip.compress(b"x" * 999, mtime=0)[:-9], b""])
def test_what_cannot_be_unpacked_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte.gz from the shop .* expected"):
        fashion_mnist(tmp_path, fetchers=[("the shop", Shop(train=content))], digests=DIGESTS)


def test_a_damaged_cache_is_not_used(tmp_path: Path) -> None:
    fashion_mnist(tmp_path, fetchers=[("the shop", Shop())], digests=DIGESTS)
    file = tmp_path / "fashion-mnist" / "train-labels-idx1-ubyte"
    file.write_bytes(file.read_bytes() + b"!")
    with pytest.raises(DataError, match=r"train-labels-idx1-ubyte is damaged: .*; delete it and it is fetched"):
        fashion_mnist(tmp_path, fetchers=[("the shop", Shop())], digests=DIGESTS)


@pytest.mark.slow
def test_where_nothing_is_reachable_one_line_says_so_and_digits_take_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fetchers: list[tuple[str, datasets.Fetcher]] = [("Debian's package", closed), ("the original address", closed)]
    with pytest.raises(
        UnfitMachine, match=r"Fashion-MNIST cannot be obtained \(Debian's package: closed today; the original"
    ):
        fashion_mnist(tmp_path, fetchers=fetchers)
    lines: list[str] = []
    data = fashion_mnist_or_digits(tmp_path, warn=lines.append, fetchers=fetchers)
    assert data.name == "digits"
    assert len(lines) == 1
    assert "going on with scikit-learn's digits" in lines[0]
    assert fashion_mnist_or_digits(tmp_path, fetchers=fetchers).name == "digits"
    out, err = capsys.readouterr()
    assert (out, err) == ("", lines[0] + "\n")


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UnfitMachine, match=r"file/fashion-mnist cannot be used as a cache .* another cache_dir"):
        fashion_mnist(tmp_path / "file", fetchers=[("the shop", Shop())], digests=DIGESTS)


@pytest.mark.slow
def test_digits_have_a_fixed_split_without_overlap() -> None:
    data = digits()
    assert data.train_images.shape == (1437, 1, 8, 8)
    assert data.test_images.shape == (360, 1, 8, 8)
    assert 0 <= float(data.train_images.min()) < float(data.train_images.max()) == 1
    assert data.train_labels.bincount().tolist() == DIGITS_TRAIN
    assert torch.equal(digits().test_images, data.test_images)
    everything = torch.cat([data.train_images, data.test_images]).flatten(1)
    assert len(everything.unique(dim=0)) == 1797


def test_the_default_places_are_debian_and_the_authors() -> None:
    assert [fetch for _, fetch in datasets.FETCHERS] == [
        datasets.from_installed,
        datasets.from_debian,
        datasets.from_origin,
    ]
    assert datasets.DIGESTS.keys() == FILES.keys()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """A web server on the loopback device that has two of the files."""
    for name in list(FILES)[:2]:
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(FILES[name], mtime=0))

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments, directory=str(tmp_path))  # type: ignore[arg-type]

        def log_message(self, *arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}"
        listening.shutdown()
        thread.join()


def test_the_original_address_gives_files_or_a_reason(server: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("fetched")
    names = list(FILES)
    datasets.from_origin(folder, names[:2], server)
    assert gzip.decompress((folder / f"{names[1]}.gz").read_bytes()) == FILES[names[1]]
    with pytest.raises(UnfitMachine, match=rf"{names[2]}.gz: File not found"):
        datasets.from_origin(folder, names[2:], server)
    with pytest.raises(UnfitMachine, match="Connection refused"):
        datasets.from_origin(folder, names[:1], "http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"<html>Please\r\nlog in</html>", r"BadStatusLine: <html>Please"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nlog in\r\n", "IncompleteRead"),
        (b"HTTP/1.1 302 Found\r\nLocation: http://[portal\r\n\r\n", "ValueError: "),
    ],
)
def test_behind_a_captive_portal_one_line_says_what_answered(tmp_path: Path, answer: bytes, said: str) -> None:
    class Portal(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while self.rfile.readline().strip():
                pass
            self.wfile.write(answer)

    with socketserver.TCPServer(("127.0.0.1", 0), Portal) as portal:
        thread = threading.Thread(target=portal.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        origin = functools.partial(datasets.from_origin, address=f"http://127.0.0.1:{portal.server_address[1]}")
        lines: list[str] = []
        try:
            found = fashion_mnist_or_digits(tmp_path, warn=lines.append, fetchers=[("the address", origin)])
        finally:
            portal.shutdown()
            thread.join()
    assert found.name == "digits"
    (line,) = lines
    assert re.search(rf"ubyte.gz: the answer is not sound HTTP \({said}", line), line
    assert "\n" not in line


def commands(folder: Path, monkeypatch: pytest.MonkeyPatch, scripts: dict[str, str]) -> Path:
    """Puts shell scripts in place of Debian's commands; returns where they note how they were called."""
    calls = folder / "calls"
    calls.touch()
    for name, body in scripts.items():
        script = folder / name
        script.write_text(f'#!/bin/sh\necho {name} "$@" >> {calls}\n{body}\n')
        script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return calls


def test_debian_gives_the_files_without_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bin_, work = tmp_path / "bin", tmp_path / "work"
    bin_.mkdir()
    work.mkdir()
    where = "unpacked/usr/share/datasets/fashion-mnist"
    calls = commands(
        bin_,
        monkeypatch,
        {
            "apt-cache": "exit 100",
            "apt-get": 'case "$*" in *download*) touch dataset-fashion-mnist_1_all.deb;; esac',
            "dpkg-deb": f"mkdir -p {where} && echo content > {where}/a.gz",
        },
    )
    monkeypatch.setattr(datasets, "_LISTS", tmp_path)
    datasets.from_debian(work, ["a"])
    assert (work / "a.gz").read_text() == "content\n"
    called = [line.split()[0] + " " + line.split()[-1] for line in calls.read_text().splitlines()]
    assert called[:3] == [
        "apt-cache dataset-fashion-mnist",
        "apt-get update",
        "apt-get dataset-fashion-mnist",
    ]
    monkeypatch.setattr(datasets, "_LISTS", tmp_path / "not-there")
    calls.write_text("")
    datasets.from_debian(work, ["a"])
    assert "update" not in calls.read_text(), "without the right to write its lists"


def test_debian_says_why_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "_LISTS", tmp_path / "not-there")
    commands(
        tmp_path, monkeypatch, {"apt-get": "echo W: hm >&2; echo E: no such package >&2; exit 100", "dpkg-deb": ""}
    )
    with pytest.raises(UnfitMachine, match=r"^apt-get: E: no such package$"):
        datasets.from_debian(tmp_path, ["a"])
    commands(tmp_path, monkeypatch, {"apt-get": ""})
    with pytest.raises(UnfitMachine, match="apt-get left no package"):
        datasets.from_debian(tmp_path, ["a"])
    commands(tmp_path, monkeypatch, {"apt-get": "exec sleep 60"})
    monkeypatch.setattr(datasets, "_DOWNLOAD_S", 0.05)
    with pytest.raises(UnfitMachine, match=r"timed out after 0.05 seconds") as caught:
        datasets.from_debian(tmp_path, ["a"])
    assert isinstance(caught.value.__cause__, subprocess.TimeoutExpired)
    monkeypatch.setenv("PATH", str(tmp_path / "not-there"))
    with pytest.raises(UnfitMachine, match="no apt-get on this machine"):
        datasets.from_debian(tmp_path, ["a"])
