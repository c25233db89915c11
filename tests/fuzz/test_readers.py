"""What fuzzing has found is read by every run of the tests; the rules of the readers would notice a fault."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from time import thread_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzz import readers
from fuzz.main import CORPUS, MOST_KEPT, MOST_S, NAMES
from fuzz.readers import READERS
from fuzz.seeds import seeds
from headrace.checkpoint import manifest
from headrace.parameter_server import wire
from headrace.parameter_server.wire import Kind, Message
from headrace.transport.frames import Reassembler

HERE = Path(__file__).resolve().parent

every_reader = pytest.mark.parametrize("name", NAMES)


def read(name: str, content: bytes) -> None:
    """Reads, within the time and the memory that any piece of bytes may take."""
    tracemalloc.start()
    began = thread_time()
    try:
        READERS[name](content)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MOST_KEPT
    assert thread_time() - began < MOST_S


@pytest.mark.each_value
@pytest.mark.slow
@every_reader
def test_the_corpus_is_read(name: str) -> None:
    corpus = sorted((CORPUS / name).iterdir())
    assert len(corpus) >= 20
    for path in corpus:
        read(name, path.read_bytes())


def test_every_reader_is_fuzzed() -> None:
    assert set(READERS) == set(NAMES)


@every_reader
@settings(max_examples=200)
@given(data=st.data())
def test_noise_is_read(name: str, data: st.DataObject) -> None:
    """Noise, and sound bytes of which a part is noise."""
    sound = data.draw(st.sampled_from([b"", *seeds(name)]))
    at = data.draw(st.integers(0, len(sound)))
    noise = data.draw(st.binary(max_size=40))
    READERS[name](sound[:at] + noise + sound[data.draw(st.integers(at, len(sound))) :])


@pytest.mark.parametrize("length", [10_000, 1_000_000])
@pytest.mark.parametrize("piece", [b"[", b'{"a":', b"0", b'"', b"\xff", b"\\u0000", b" "])
@every_reader
def test_much_of_the_same_is_read(name: str, piece: bytes, length: int) -> None:
    read(name, piece * (length // len(piece)))


def test_a_reader_that_lets_too_much_in_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "_LAST_LEASE", 1 << 60)
    content = wire.encode(Message(Kind.PUSH, lease=1 << 50))
    with pytest.raises(AssertionError):
        readers.read_messages(content)


def test_a_reader_that_keeps_too_much_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "BLOB_BYTES", 10_000)
    kept = readers.BLOB_BYTES
    monkeypatch.setattr(Reassembler, "_extend_blob", lambda self, start, content: self._blob.extend(bytes(2 * kept)))
    (content,) = [each for each in seeds("frames") if each.count(b"blob") == 1 and b"message" in each]
    with pytest.raises(AssertionError):
        readers.read_frames(content)


def test_a_reader_that_raises_something_else_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def integer(text: str) -> int:
        raise KeyError(text)

    content = manifest.encode(manifest.Manifest(3, (), {}))
    monkeypatch.setattr(manifest, "_integer", integer)
    with pytest.raises(KeyError):
        readers.read_manifests(content)
