"""Processor time to decode, cut and resize a picture, decoded whole or to a fraction of its size. See README.md.

It needs `pip install simplejpeg opencv-python-headless` beside headrace.
"""

from __future__ import annotations

import statistics
import time

import cv2
import numpy as np
import simplejpeg

COUNT, TURNS = 40, 7
SIDES = (224, 160, 96)


def pictures() -> list[bytes]:
    """Returns synthetic pictures of 375x500: smooth colours with noise."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(COUNT):
        smooth = cv2.resize(
            rng.integers(0, 256, (24, 32, 3), dtype=np.uint8), (500, 375), interpolation=cv2.INTER_CUBIC
        )
        noisy = np.clip(smooth.astype(int) + rng.integers(-12, 13, smooth.shape), 0, 255).astype(np.uint8)
        found.append(simplejpeg.encode_jpeg(noisy, quality=90, colorsubsampling="420"))
    return found


def prepare(picture: bytes, side: int, factor: int | None) -> int:
    """Makes a square of a picture; returns the height that it was decoded to. `factor` is the least, None for whole."""
    least = {} if factor is None else {"min_height": side, "min_width": side, "min_factor": factor}
    decoded = simplejpeg.decode_jpeg(picture, colorspace="RGB", fastdct=True, fastupsample=True, **least)
    height, width, _ = decoded.shape
    length = min(height, width)
    top, left = (height - length) // 2, (width - length) // 2
    square = decoded[top : top + length, left : left + length]
    cv2.resize(square, (side, side), interpolation=cv2.INTER_LINEAR)
    return int(height)


def main() -> None:
    cv2.setNumThreads(0)
    chosen = pictures()
    ways = {"whole": None, "least eighths that suffice": 1, "at least halved": 2}
    for side in SIDES:
        taken: dict[str, list[float]] = {name: [] for name in ways}
        heights = {name: prepare(chosen[0], side, factor) for name, factor in ways.items()}
        for _ in range(TURNS):
            for name, factor in ways.items():
                began = time.process_time()
                for picture in chosen:
                    prepare(picture, side, factor)
                taken[name].append(1e3 * (time.process_time() - began) / COUNT)
        for name, each in taken.items():
            print(f"{side:4} {name:28}{heights[name]:5} rows {statistics.median(each):8.3f} ms")


if __name__ == "__main__":
    main()
