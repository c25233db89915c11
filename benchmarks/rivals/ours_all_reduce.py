"""all-reduce through shared memory: `ours_all_reduce.py WORKERS ELEMENTS [cpu]`; prints ms (or a share of a core)."""

from __future__ import annotations

import os
import sys
import time

import torch

from headrace.collectives.shared_memory import SharedMemoryGroup
from headrace.shared_memory.control_page import ControlPage
from headrace.shared_memory.segment import SharedSegment


def run(rank: int, workers: int, elements: int, segment: SharedSegment) -> None:
    torch.set_num_threads(1)
    group = SharedMemoryGroup(ControlPage(segment, workers), rank, lambda: None)
    tensor = torch.ones(elements)
    repeats = 2000 if elements < 1_000_000 else 10
    for _ in range(3):
        group.all_reduce(tensor)
    group.barrier()
    began = time.perf_counter()
    for _ in range(repeats):
        group.all_reduce(tensor)
    took = time.perf_counter() - began
    if rank == 0:
        print(1e3 * took / repeats, flush=True)
    group.barrier()


def wait_idle(rank: int, workers: int, segment: SharedSegment) -> None:
    """All ranks wait a second for the last one; prints the share of a core that waiting took."""
    torch.set_num_threads(1)
    group = SharedMemoryGroup(ControlPage(segment, workers), rank, lambda: None)
    for _ in range(3):
        group.barrier()
    if rank == workers - 1:
        time.sleep(2.0)
    before = time.process_time()
    group.barrier()
    if rank == 0:
        print((time.process_time() - before) / 2.0, flush=True)
    group.barrier()


if __name__ == "__main__":
    count, length = int(sys.argv[1]), int(sys.argv[2])
    page = SharedSegment.create(ControlPage.nbytes(count), "control")
    mine = 0
    children = []
    for other in range(1, count):
        pid = os.fork()
        if pid == 0:
            mine = other
            break
        children.append(pid)
    if "cpu" in sys.argv:
        wait_idle(mine, count, page)
    else:
        run(mine, count, length, page)
    if mine:
        os._exit(0)
    for pid in children:
        os.waitpid(pid, 0)
