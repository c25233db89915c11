"""Pictures are PNG files that another library reads back, pixel by pixel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from headrace.errors import UsageError
from headrace.worker.callbacks.picture import save

DRAWS = np.random.default_rng(0)
NAN = np.array([[np.nan, -1.0, 0.5, 2.0, np.inf]])


def read(path: Path) -> Any:
    """Returns the pixels in the order red, green, blue, alpha."""
    pixels = cv2.imread(str(path), cv2.IMREAD_UNCHANGED)
    return pixels if pixels.ndim == 2 else pixels[:, :, [2, 1, 0, 3][: pixels.shape[2]]]


@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (3, 7, 3), (5, 2, 4), (300, 500, 3), (1, 70_000)], ids=str)
def test_bytes_are_read_back(shape: tuple[int, ...], tmp_path: Path) -> None:
    pixels = DRAWS.integers(0, 256, shape, dtype=np.uint8)
    save(pixels, tmp_path / "a.png")
    assert np.array_equal(read(tmp_path / "a.png"), pixels)
    save(torch.from_numpy(pixels), tmp_path / "tensor.png")
    assert (tmp_path / "tensor.png").read_bytes() == (tmp_path / "a.png").read_bytes()


@pytest.mark.parametrize(
    "pixels",
    [
        torch.tensor([[0.0, 0.5, 1.0]], requires_grad=True),
        torch.tensor([[0.0, 0.5, 1.0]], dtype=torch.bfloat16),
        np.array([[0.0, 0.5, 1.0]], dtype=np.float16),
        np.asfortranarray([[0.0, 0.5, 1.0]]),
    ],
    ids=lambda pixels: str(pixels.dtype),
)
def test_floats_go_from_0_to_1(pixels: Any, tmp_path: Path) -> None:
    save(pixels, tmp_path / "a.png")
    assert read(tmp_path / "a.png").tolist() == [[0, 127, 255]]


def test_numbers_outside_are_cut(tmp_path: Path) -> None:
    save(NAN, tmp_path / "a.png")
    assert read(tmp_path / "a.png").tolist() == [[0, 0, 127, 255, 255]]
    save(np.eye(2, dtype=bool), tmp_path / "mask.png")
    assert read(tmp_path / "mask.png").tolist() == [[255, 0], [0, 255]]


def test_columns_of_another_array_are_copied_in_order(tmp_path: Path) -> None:
    whole = DRAWS.integers(0, 256, (6, 8, 3), dtype=np.uint8)
    save(whole[::2, ::-1], tmp_path / "a.png")
    assert np.array_equal(read(tmp_path / "a.png"), whole[::2, ::-1])


@pytest.mark.parametrize(
    ("picture", "form"),
    [
        (np.zeros((2, 2, 2)), r"ndarray of shape \(2, 2, 2\)"),
        (np.zeros((0, 4)), r"ndarray of shape \(0, 4\)"),
        (np.zeros((4, 0, 3)), r"ndarray of shape \(4, 0, 3\)"),
        (torch.zeros(2, 2, dtype=torch.complex64), r"Tensor of shape \(2, 2\) and dtype complex64"),
        (torch.zeros(2, 3, dtype=torch.int64), r"Tensor of shape \(2, 3\) and dtype int64"),
        (np.zeros((2, 3), dtype=np.int8), r"ndarray of shape \(2, 3\) and dtype int8"),
        (np.array([["a", "b"]]), r"ndarray of shape \(1, 2\) and dtype <U1"),
        (b"\x89PNG\r\n\x1a\n", "bytes"),
        (b"GIF89a", "bytes"),
        ([[0.0]], "list"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_is_no_picture_is_refused(picture: Any, form: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rf"log_picture takes .*, got {form}"):
        save(picture, tmp_path / "a.png")
    assert list(tmp_path.iterdir()) == []
