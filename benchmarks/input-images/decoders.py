"""Processor time of one thread to decode, cut and resize a photograph, by decoder. See README.md.

    decoders.py [--rounds 7] [--turbojpeg libturbojpeg.so.0]

`--turbojpeg`, a library of version 3 or later, adds its own interface, which can decode a piece of a photograph
alone; with `pip install PyTurboJPEG` that binding, too.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import io
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image

import headrace as hr

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import alternate, ratio, report
from input_workloads import SIDE, photographs

COUNT = 100
OURS = "headrace"
Pixels = NDArray[np.uint8]
Decode = Callable[[bytes], Pixels]


def middle(rows: int, columns: int) -> tuple[int, int, int]:
    """Returns top, left and length of the square in the middle."""
    length = min(rows, columns)
    return (rows - length) // 2, (columns - length) // 2, length


def resized(square: Pixels) -> Pixels:
    """Returns the square in the size that is wanted, as `DecodeImage` resizes."""
    how = cv2.INTER_AREA if len(square) > 2 * SIDE else cv2.INTER_LINEAR
    return cv2.resize(square, (SIDE, SIDE), interpolation=how)  # type: ignore[return-value]


def cut(image: Pixels) -> Pixels:
    """Returns the middle of an image, resized."""
    top, left, length = middle(*image.shape[:2])
    return resized(image[top : top + length, left : left + length])


def by_pillow(content: bytes) -> Pixels:
    """Decodes by Pillow, to a smaller size where that is still large enough."""
    with Image.open(io.BytesIO(content)) as image:
        image.draft("RGB", (SIDE, SIDE))
        return cut(np.asarray(image))


class Region(ctypes.Structure):
    """A `tjregion`."""

    _fields_ = [(name, ctypes.c_int) for name in ("x", "y", "w", "h")]


class TurboJpeg:
    """libjpeg-turbo's own interface, version 3: decodes a photograph, or the iMCUs of its middle."""

    _SUBSAMPLING, _WIDTH, _HEIGHT, _FAST_UPSAMPLE, _FAST_DCT = 4, 5, 6, 9, 10
    _BLOCKS = (8, 16, 16, 8, 8, 32, 8)
    """Width of an iMCU by kind of subsampling."""

    def __init__(self, path: str) -> None:
        self._library = library = ctypes.CDLL(path)
        library.tj3Init.restype = ctypes.c_void_p
        self._handle = ctypes.c_void_p(library.tj3Init(1))
        for option in (self._FAST_UPSAMPLE, self._FAST_DCT):
            library.tj3Set(self._handle, option, 1)
        self._memory = np.empty(1 << 24, np.uint8)

    def decode(self, content: bytes, middle_alone: bool) -> Pixels:
        """Returns the middle of a photograph, resized."""
        library, handle, size = self._library, self._handle, ctypes.c_size_t(len(content))
        self._require(library.tj3DecompressHeader(handle, content, size))
        columns, rows = (library.tj3Get(handle, each) for each in (self._WIDTH, self._HEIGHT))
        top, left, length = middle(rows, columns)
        x = left // (block := self._BLOCKS[library.tj3Get(handle, self._SUBSAMPLING)]) * block
        region = Region(x, top, left + length - x, length) if middle_alone else Region(0, 0, columns, rows)
        self._require(library.tj3SetCroppingRegion(handle, region if middle_alone else Region()))
        image = self._memory[: region.h * region.w * 3].reshape(region.h, region.w, 3)
        out = image.ctypes.data_as(ctypes.c_void_p)
        self._require(library.tj3Decompress8(handle, content, size, out, 0, 0))
        return resized(image[:, left - x :]) if middle_alone else cut(image)

    def _require(self, failed: int) -> None:
        if failed:
            self._library.tj3GetErrorStr.restype = ctypes.c_char_p
            raise RuntimeError(self._library.tj3GetErrorStr(self._handle).decode())


def decoders(turbojpeg: str | None) -> dict[str, Decode]:
    """Returns the contestants that are installed."""
    simple = partial(simplejpeg.decode_jpeg, colorspace="RGB", fastdct=True, fastupsample=True)
    found: dict[str, Decode] = {
        OURS: hr.data.DecodeImage(SIDE, SIDE),
        "simplejpeg, new memory each": lambda content: cut(simple(content)),
        "OpenCV": lambda content: cut(
            cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR_RGB)  # type: ignore[arg-type]
        ),
        "Pillow, draft": by_pillow,
    }
    if importlib.util.find_spec("turbojpeg") and turbojpeg:
        from turbojpeg import TJFLAG_FASTDCT, TJFLAG_FASTUPSAMPLE, TJPF_RGB, TurboJPEG

        wrapped: Any = TurboJPEG(turbojpeg)
        flags = TJFLAG_FASTDCT | TJFLAG_FASTUPSAMPLE
        found["PyTurboJPEG"] = lambda content: cut(wrapped.decode(content, pixel_format=TJPF_RGB, flags=flags))
    if turbojpeg:
        own = TurboJpeg(turbojpeg)
        found["libjpeg-turbo 3"] = partial(own.decode, middle_alone=False)
        found["libjpeg-turbo 3, the middle alone"] = partial(own.decode, middle_alone=True)
    return found


def milliseconds(decode: Decode, contents: list[bytes]) -> float:
    """Returns the processor time of this thread for a photograph."""
    decode(contents[0])
    began = time.process_time()
    for content in contents:
        decode(content)
    return 1e3 * (time.process_time() - began) / len(contents)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--turbojpeg", help="a libturbojpeg of version 3 or later")
    arguments = parser.parse_args()
    cv2.setNumThreads(0)
    contents = [Path(file).read_bytes() for file in photographs()[:COUNT]]
    found = decoders(arguments.turbojpeg)
    expected = found[OURS](contents[0]).astype(int)
    for name, decode in found.items():
        apart = float(np.abs(decode(contents[0]).astype(int) - expected).mean())
        print(f"{name}: {apart:.2f} of 255 steps from {OURS}, the mean over a photograph's pixels", file=sys.stderr)
    figures = alternate(
        {name: partial(milliseconds, decode, contents) for name, decode in found.items()}, arguments.rounds
    )
    ratios = {f"{name} / {OURS}": ratio(figures, name, OURS) for name in found if name != OURS}
    report(Path(__file__).parent, "decoders", "ms of one thread", figures, ratios)


if __name__ == "__main__":
    main()
