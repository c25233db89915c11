"""Photographs into the batch's own memory."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import DataError, UnfitMachine, UsageError

_JPEG = b"\xff\xd8\xff"
_own = threading.local()


class DecodeImage:
    """Decodes an image and resizes its middle, straight into the batch. A transform for `Pipeline.map`.

    The largest piece of the middle that has the wanted ratio is resized, by the mean of the pixels where it is
    made smaller. JPEG is decoded by simplejpeg, all else by OpenCV; both let other threads run meanwhile.

    Args:
        height, width: of the result, in pixels.
        fast: whether JPEG is decoded with the faster transform, which may differ by a few of 255 steps.

    Attributes:
        shape: of a result, `(height, width, 3)`, in the order red, green, blue.
        dtype: uint8.

    Raises:
        UsageError: a length is below 1.
        UnfitMachine: simplejpeg or OpenCV is not installed.
    """

    def __init__(self, height: int, width: int, *, fast: bool = True) -> None:
        for name, value in (("height", height), ("width", width)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UsageError(f"{name} must be a whole number of at least 1, got {value!r}")
        self.shape = (height, width, 3)
        self.dtype = np.dtype(np.uint8)
        self._fast = fast
        _, cv2 = _libraries()
        # Its own threads would take the cores of those that call it.
        cv2.setNumThreads(0)

    def __call__(self, content: Any) -> NDArray[np.uint8]:
        """Returns the image, `(height, width, 3)` uint8.

        Args:
            content: of the file, as bytes.

        Raises:
            DataError: it is no image.
        """
        out = np.empty(self.shape, dtype=np.uint8)
        self.into(content, out)
        return out

    def into(self, content: Any, out: NDArray[Any]) -> None:
        """Writes the image to `out`, `(height, width, 3)` uint8."""
        image = self._decode(content)
        height, width, _ = self.shape
        rows, columns, _ = image.shape
        # The largest piece with the wanted ratio.
        tall = min(rows, max(1, round(columns * height / width)))
        wide = min(columns, max(1, round(rows * width / height)))
        top, left = (rows - tall) // 2, (columns - wide) // 2
        piece = image[top : top + tall, left : left + wide]
        _, cv2 = _libraries()
        how = cv2.INTER_AREA if tall > 2 * height else cv2.INTER_LINEAR
        cv2.resize(piece, (width, height), dst=out, interpolation=how)

    def _decode(self, content: Any) -> NDArray[np.uint8]:
        simplejpeg, cv2 = _libraries()
        if bytes(content[:3]) == _JPEG:
            try:
                rows, columns, _, _ = simplejpeg.decode_jpeg_header(content)
                return _checked(
                    simplejpeg.decode_jpeg(
                        content,
                        colorspace="RGB",
                        fastdct=self._fast,
                        fastupsample=self._fast,
                        buffer=_scratch(rows * columns * 3),
                    )
                )
            except ValueError as error:
                raise DataError(f"{len(content):,} bytes are no whole JPEG: {error}") from error
        image = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR_RGB)
        if image is None:
            raise DataError(f"{len(content):,} bytes are no image that OpenCV can read")
        return _checked(image)


def _scratch(nbytes: int) -> NDArray[np.uint8]:
    """Returns memory of this thread, for one image at a time: fresh memory would be faulted in page by page."""
    held: NDArray[np.uint8] | None = getattr(_own, "scratch", None)
    if held is None or len(held) < nbytes:
        held = _own.scratch = np.empty(nbytes, dtype=np.uint8)
    return held


def _checked(image: Any) -> NDArray[np.uint8]:
    assert isinstance(image, np.ndarray)
    return image


def _libraries() -> tuple[Any, Any]:
    try:
        import cv2
        import simplejpeg
    except ImportError as error:
        raise UnfitMachine(f'images need simplejpeg and OpenCV ({error}); pip install "headrace[data]"') from error
    return simplejpeg, cv2
