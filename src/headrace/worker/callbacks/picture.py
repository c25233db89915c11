"""Pictures of callbacks as PNG files."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headrace.errors import UsageError

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_COLOUR_TYPES = {1: 0, 3: 2, 4: 6}
"""PNG's numbers of grey, RGB and RGBA, by channels."""


def save(picture: Any, path: Path) -> None:
    """Writes a figure of matplotlib, the bytes of a PNG file, or an array of pixels."""
    savefig = getattr(picture, "savefig", None)
    if callable(savefig):
        savefig(path)
    elif isinstance(picture, bytes) and picture.startswith(_SIGNATURE) and picture[12:16] == b"IHDR":
        path.write_bytes(picture)
    else:
        path.write_bytes(_encode(_pixels(picture)))


def _pixels(picture: Any) -> NDArray[np.uint8]:
    """Returns `(height, width, channels)`; floats go from 0 to 1, those outside are cut, and NaN is 0."""
    if isinstance(picture, Tensor):
        # As double, because NumPy has no bfloat16.
        cpu = picture.detach().cpu()
        pixels = (cpu.double() if cpu.is_floating_point() else cpu).numpy()
    else:
        pixels = picture
    if not isinstance(pixels, np.ndarray) or not _is_picture(pixels):
        form = f" of shape {pixels.shape} and dtype {pixels.dtype}" if isinstance(pixels, np.ndarray) else ""
        raise UsageError(
            "log_picture takes a figure of matplotlib, the bytes of a PNG file, or bytes (uint8), booleans or floats "
            f"of height x width or height x width x 3 or 4, got {type(picture).__name__}{form}"
        )
    if pixels.dtype != np.uint8:
        pixels = (np.nan_to_num(pixels.astype(np.float64)).clip(0.0, 1.0) * 255).astype(np.uint8)
    return pixels[:, :, None] if pixels.ndim == 2 else pixels


def _is_picture(pixels: NDArray[Any]) -> bool:
    fits = pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] in (3, 4))
    # Of other integers it is not known whether they go to 1 or to 255.
    return fits and pixels.size > 0 and (pixels.dtype.kind in "bf" or pixels.dtype == np.uint8)


def _encode(pixels: NDArray[np.uint8]) -> bytes:
    height, width, channels = pixels.shape
    # Each row begins with the number of its filter: 0, none.
    rows = np.pad(pixels.reshape(height, width * channels), ((0, 0), (1, 0)))
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOUR_TYPES[channels], 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes())), (b"IEND", b""))
    return _SIGNATURE + b"".join(
        struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in chunks
    )
