"""A loop that decodes photographs with our decoder and does nothing else: `bare_images.py SECONDS`; prints images/s."""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

import numpy as np

import headrace as hr

sys.path.insert(0, str(Path(__file__).parents[1]))
from input_workloads import BATCH, SIDE, photographs

WARM_UP_S = 0.5


def main(seconds: float) -> None:
    decode = hr.data.DecodeImage(SIDE, SIDE)
    files = photographs()
    random.shuffle(files)
    size = BATCH["images"]
    began, images, place = time.perf_counter() + WARM_UP_S, 0, 0
    while (passed := time.perf_counter() - began) < seconds:
        batch = np.empty((size, SIDE, SIDE, 3), dtype=np.uint8)
        for image in batch:
            decode.into(Path(files[place % len(files)]).read_bytes(), image)
            place += 1
        images += size * (passed > 0)
    print(images / passed)


if __name__ == "__main__":
    main(float(sys.argv[1]))
