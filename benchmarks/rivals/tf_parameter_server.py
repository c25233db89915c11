"""TensorFlow's ParameterServerStrategy: `tf_parameter_server.py WORKERS mlp|cnn SECONDS`; prints examples/s.

One server, asynchronous, one thread a process. Needs an environment of its own, with `tensorflow-cpu==2.21.0`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
import time
from typing import Any

EXAMPLES_A_WORKER = 64
WARM_UP = 20
AT_ONCE = 20
"""Steps that are scheduled together, before the clock is looked at."""


def free_ports(count: int) -> list[int]:
    """Returns free ports."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def load() -> Any:
    """Imports TensorFlow, quiet and with one thread."""
    os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="-1")
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    return tf


def model_of(tf: Any, workload: str) -> tuple[Any, tuple[int, ...]]:
    """Returns the model that `headrace.models` has by that name, and the shape of an example."""
    layers = tf.keras.layers
    if workload == "mlp":
        shape: tuple[int, ...] = (784,)
        parts = [layers.Dense(2048, "relu"), layers.Dense(2048, "relu"), layers.Dense(10)]
    else:
        shape = (32, 32, 3)
        convolutions = [
            layers.Conv2D(filters, 3, strides, padding="same", activation="relu")
            for filters, strides in ((32, 1), (64, 2), (128, 2))
        ]
        parts = [*convolutions, layers.Flatten(), layers.Dense(256, "relu"), layers.Dense(10)]
    return tf.keras.Sequential([layers.Input(shape), *parts]), shape


def serve(cluster: dict[str, list[str]], job: str, index: int) -> None:
    """Is a worker or a server."""
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})
    tf = load()
    one_thread = tf.compat.v1.ConfigProto(intra_op_parallelism_threads=1)
    specification = tf.train.ClusterSpec(cluster)
    tf.distribute.Server(specification, job_name=job, task_index=index, protocol="grpc", config=one_thread).join()


def measure(cluster: dict[str, list[str]], workload: str, seconds: float) -> float:
    """Is the chief, who hands out the steps."""
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": "chief", "index": 0}})
    tf = load()
    strategy = tf.distribute.ParameterServerStrategy(tf.distribute.cluster_resolver.TFConfigClusterResolver())
    with strategy.scope():
        model, shape = model_of(tf, workload)
        optimizer = tf.keras.optimizers.SGD(0.01)
        optimizer.build(model.trainable_variables)
        criterion = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)

    def batches() -> Any:
        inputs = tf.random.normal((EXAMPLES_A_WORKER, *shape))
        classes = tf.random.uniform((EXAMPLES_A_WORKER,), 0, 10, tf.int32)
        return tf.data.Dataset.from_tensors((inputs, classes)).repeat()

    iterator = iter(coordinator.create_per_worker_dataset(batches))

    @tf.function
    def step(batch_iterator: Any) -> Any:
        def replica_step(batch: Any) -> Any:
            inputs, classes = batch
            with tf.GradientTape() as tape:
                loss = criterion(classes, model(inputs, training=True))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        return strategy.run(replica_step, args=(next(batch_iterator),))

    def run(steps: int) -> None:
        for _ in range(steps):
            coordinator.schedule(step, args=(iterator,))
        coordinator.join()

    run(WARM_UP)
    began, steps = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        run(AT_ONCE)
        steps += AT_ONCE
    return steps * EXAMPLES_A_WORKER / (time.perf_counter() - began)


if __name__ == "__main__":
    workers = int(sys.argv[1])
    chief, server, *others = [f"127.0.0.1:{port}" for port in free_ports(2 + workers)]
    members = {"chief": [chief], "ps": [server], "worker": others}
    context = multiprocessing.get_context("spawn")
    roles = [("ps", 0), *(("worker", index) for index in range(workers))]
    processes = [context.Process(target=serve, args=(members, *role), daemon=True) for role in roles]
    for process in processes:
        process.start()
    print(measure(members, sys.argv[2], float(sys.argv[3])), flush=True)
    for process in processes:
        process.kill()
    # TensorFlow waits for servers that are gone.
    os._exit(0)
