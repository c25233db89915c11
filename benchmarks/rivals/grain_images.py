"""Grain: `grain_images.py THREADS SECONDS`, 0 threads for two processes; prints images/s.

Needs an environment of its own, with `grain==0.2.18 simplejpeg pillow scikit-learn`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from input_workloads import BATCH, SIDE, photographs

WARM_UP_S = 0.5


def load(file: str) -> np.ndarray[Any, Any]:
    """Returns the middle of a photograph."""
    import simplejpeg
    from PIL import Image

    content = Path(file).read_bytes()
    image = Image.fromarray(simplejpeg.decode_jpeg(content, fastdct=True, fastupsample=True))
    width, height = image.size
    side = min(width, height)
    x, y = (width - side) // 2, (height - side) // 2
    return np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BILINEAR, box=(x, y, x + side, y + side)))


if __name__ == "__main__":
    import grain

    threads, seconds = int(sys.argv[1]), float(sys.argv[2])
    data = grain.MapDataset.source(photographs()).shuffle(seed=0).map(load).repeat()
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=64 if threads else 0)
    batches = data.to_iter_dataset(options).batch(BATCH["images"])
    if not threads:
        batches = batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=2))
    images, began = 0, 0.0
    for batch in batches:
        now = time.perf_counter()
        began = began or now + WARM_UP_S
        images += len(batch) * (now > began)
        if now > began + seconds:
            break
    print(images / seconds)
