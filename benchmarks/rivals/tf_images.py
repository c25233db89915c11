"""tf.data with AUTOTUNE: `tf_images.py SECONDS`; prints images/s.

Needs an environment of its own, with `tensorflow-cpu==2.21.0 pillow scikit-learn`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from input_workloads import BATCH, SIDE, photographs

WARM_UP_S = 1.0


if __name__ == "__main__":
    import tensorflow as tf

    def load(file: Any) -> Any:
        """Returns a photograph."""
        image = tf.image.resize(tf.io.decode_jpeg(tf.io.read_file(file), 3), (SIDE, SIDE))
        return tf.cast(image, tf.uint8)

    seconds = float(sys.argv[1])
    data = tf.data.Dataset.from_tensor_slices(photographs()).shuffle(2000).repeat()
    data = data.map(load, num_parallel_calls=tf.data.AUTOTUNE).batch(BATCH["images"]).prefetch(tf.data.AUTOTUNE)
    images, began = 0, 0.0
    for batch in data:
        now = time.perf_counter()
        began = began or now + WARM_UP_S
        images += len(batch) * (now > began)
        if now > began + seconds:
            break
    print(images / seconds)
