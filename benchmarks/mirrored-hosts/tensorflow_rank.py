"""One rank of TensorFlow's MultiWorkerMirroredStrategy: tensorflow_rank.py RANKS_A_HOST STEPS FOLDER.

The model and the batch are those of `one_rank.py`. Needs an environment of its own, with `tensorflow-cpu==2.21.0`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

BATCH = 128
"""Examples of a step, on all hosts together."""
LAYERS = (1536, 1024, 512)
_STATISTICS = Path("/sys/class/net/eth0/statistics/tx_bytes")


def load(rank: int, world: int, each: int) -> Any:
    """Imports TensorFlow with one thread, as a worker of the cluster."""
    addresses = [f"10.97.0.{1 + index // each}:{6100 + index}" for index in range(world)]
    task = {"type": "worker", "index": rank}
    os.environ.update(
        TF_CPP_MIN_LOG_LEVEL="3",
        CUDA_VISIBLE_DEVICES="-1",
        TF_CONFIG=json.dumps({"cluster": {"worker": addresses}, "task": task}),
    )
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    return tf


def main() -> None:
    each, steps, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    tf = load(rank, world, each)
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.RING
    )
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    layers = tf.keras.layers
    with strategy.scope():
        model = tf.keras.Sequential(
            [layers.Input((784,)), *(layers.Dense(width, "relu") for width in LAYERS), layers.Dense(1000)]
        )
        optimizer = tf.keras.optimizers.SGD(0.01)
        optimizer.build(model.trainable_variables)
        criterion = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    own = BATCH // world

    def values(_: Any) -> Any:
        return tf.random.normal((own, 784)), tf.random.uniform((own,), 0, 1000, tf.int32)

    batch = strategy.experimental_distribute_values_from_function(values)

    @tf.function
    def step(given: Any) -> Any:
        def replica_step(examples: Any) -> Any:
            inputs, classes = examples
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(criterion(classes, model(inputs, training=True))) / BATCH
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        return strategy.run(replica_step, args=(given,))

    step(batch)
    sent, began = int(_STATISTICS.read_text()), time.perf_counter()
    for _ in range(steps - 1):
        # Its value is read, so that the step has ended.
        float(strategy.reduce("SUM", step(batch), axis=None))
    said = {
        "seconds": (time.perf_counter() - began) / (steps - 1),
        "bytes": (int(_STATISTICS.read_text()) - sent) / (steps - 1),
    }
    (folder / f"{rank}.json").write_text(json.dumps(said))
    # TensorFlow waits for workers that are gone.
    time.sleep(1)
    os._exit(0)


main()
