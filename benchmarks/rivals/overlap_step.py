"""One way to exchange in a step of two workers: `overlap_step.py mlp|cnn WAY SECONDS`; prints ms a step.

WAY: compute (no exchange), after (shared memory, when backward is over), thread (shared memory, in a thread beside the
next step's compute: the most that any overlap could hide), gloo-after, gloo-overlap (buckets during backward).
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from workloads import EXAMPLES_A_WORKER, MODELS, examples

from headrace.collectives.accelerators.torch_distributed import TorchDistributed
from headrace.collectives.base import ProcessGroup
from headrace.collectives.shared_memory import SharedMemoryGroup
from headrace.modules import describe
from headrace.shared_memory.control_page import ControlPage
from headrace.shared_memory.segment import SharedSegment
from headrace.training.reduction import BucketReduction, CollectiveReduction, Reduction, SharedMemoryReduction

WORKERS = 2


def make_reduction(way: str, module: nn.Module, host: ProcessGroup, store: str) -> Reduction:
    """Returns what sums the gradients."""
    trainable = describe(module).trainable
    if not way.startswith("gloo"):
        return SharedMemoryReduction(trainable, host)
    wire = TorchDistributed(torch.distributed.FileStore(store, WORKERS), host.rank, WORKERS, "cpu", 60.0)
    if way == "gloo-overlap":
        return BucketReduction(trainable, host, wire, module, torch.device("cpu"))
    return CollectiveReduction(trainable, host, wire, torch.device("cpu"))


def run(rank: int, workload: str, way: str, seconds: float, page: SharedSegment, store: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = MODELS[workload][0]()
    parameters = list(module.parameters())
    host = SharedMemoryGroup(ControlPage(page, WORKERS), rank, lambda: None)
    reduction = make_reduction(way, module, host, store)
    loss = nn.CrossEntropyLoss()
    x, y = examples(workload, EXAMPLES_A_WORKER)

    def exchange() -> None:
        host.barrier()
        reduction.reduce()
        host.barrier()

    def step() -> None:
        beside = threading.Thread(target=exchange) if way == "thread" else None
        if beside:
            beside.start()
        gradients = torch.autograd.grad(loss(module(x), y), parameters, allow_unused=True)
        if beside:
            beside.join()
        reduction.sink.store(gradients)
        if way in ("after", "gloo-after", "gloo-overlap"):
            exchange()

    for _ in range(5):
        step()
    host.barrier()
    began = time.perf_counter()
    steps = 0
    while host.sum([float(time.perf_counter() - began < seconds)])[0] == WORKERS:
        for _ in range(10):
            step()
        steps += 10
    if rank == 0:
        print(1e3 * (time.perf_counter() - began) / steps, flush=True)
    host.barrier()


if __name__ == "__main__":
    name, how, length = sys.argv[1], sys.argv[2], float(sys.argv[3])
    segment = SharedSegment.create(ControlPage.nbytes(WORKERS), "control")
    with tempfile.TemporaryDirectory() as folder:
        child = os.fork()
        run(int(child == 0), name, how, length, segment, f"{folder}/store")
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
    sys.stdout.flush()
    os._exit(0)
