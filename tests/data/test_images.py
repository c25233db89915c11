"""Photographs, decoded into the batch."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import headrace as hr
from headrace.data import DecodeImage
from headrace.data.loading.loader import Loader
from headrace.errors import DataError, UsageError


def photograph(height: int, width: int, kind: str = "JPEG") -> bytes:
    """A ramp from black to white, left to right, that any decoder gives back closely."""
    ramp = np.broadcast_to(np.linspace(0, 255, width).astype(np.uint8)[None, :, None], (height, width, 3))
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(ramp)).save(buffer, kind, **({"quality": 95} if kind == "JPEG" else {}))
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize(("height", "width"), [(40, 60), (60, 40), (32, 32), (200, 90)])
def test_the_middle_is_resized(kind: str, height: int, width: int) -> None:
    image = DecodeImage(16, 16)(photograph(height, width, kind)).astype(int)
    assert image.shape == (16, 16, 3)
    side = min(height, width)
    left = (width - side) / 2
    centres = left + (np.arange(16) + 0.5) * side / 16 - 0.5
    assert np.abs(image - (centres * 255 / (width - 1))[None, :, None]).max() < 8


def test_what_is_no_image_is_named(tmp_path: Path) -> None:
    whole = photograph(30, 30)
    for name, content in {"a": whole, "b": whole[:100], "c": b"no image"}.items():
        (tmp_path / f"{name}.jpg").write_bytes(content)
    pipeline = hr.data.from_files(str(tmp_path / "*.jpg")).map(DecodeImage(8, 8))
    with pytest.raises(DataError, match=r"b.jpg cannot be had: map\(.*100 bytes are not a whole JPEG"):
        next(Loader(pipeline, 0, 3, (1,), 0).sweep())
    share = next(Loader(pipeline.on_error("skip"), 0, 3, (1,), 0).sweep())
    assert (share.examples, share.of, tuple(share.batch.shape)) == (1, 3, (1, 8, 8, 3))
    assert share.batch[0].numpy().tolist() == DecodeImage(8, 8)(whole).tolist()
    with pytest.raises(UsageError, match="width must be a whole number"):
        DecodeImage(8, 0)


@pytest.mark.parametrize("parallel", ["inline", "threads"])
def test_a_field_of_an_example_is_written_into_the_batch(tmp_path: Path, parallel: str) -> None:
    for number in range(7):
        (tmp_path / f"{number}.jpg").write_bytes(photograph(20 + number, 30))
    files = hr.data.from_files(str(tmp_path / "*.jpg"), label=lambda name: int(Path(name).stem))
    pipeline = files.shuffle().map(DecodeImage(10, 12), field=0, parallel=parallel)
    shares = list(Loader(pipeline, 3, 4, (1,), 0).sweep())
    assert [share.examples for share in shares] == [4, 3]
    decode = DecodeImage(10, 12)
    seen = []
    for share in shares:
        images, labels = share.batch
        for image, label in zip(images, labels.tolist(), strict=True):
            assert image.numpy().tolist() == decode((tmp_path / f"{label}.jpg").read_bytes()).tolist()
            seen.append(label)
    assert sorted(seen) == list(range(7))
