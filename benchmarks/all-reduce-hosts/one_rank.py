"""All-reduces of 100 MB on one of several hosts: `one_rank.py WAY ROUNDS FOLDER`; writes seconds and bytes of each."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch

MEGABYTES = 100
_STATISTICS = Path("/sys/class/net/eth0/statistics/tx_bytes")


def gloo() -> Callable[[torch.Tensor], object]:
    torch.distributed.init_process_group("gloo")
    return torch.distributed.all_reduce


def ours() -> Callable[[torch.Tensor], object]:
    # Here, because gloo needs none of it.
    from headrace.engine.torchrun.engine import join_group

    return join_group(timeout_s=60.0).host.all_reduce


def main() -> None:
    way, rounds, folder = sys.argv[1:]
    torch.set_num_threads(1)
    all_reduce = {"gloo": gloo, "ours": ours}[way]()
    tensor = torch.ones(MEGABYTES * 1_000_000 // 4)
    # The first round connects, and lets TCP find its rate.
    all_reduce(tensor)
    world = int(os.environ["WORLD_SIZE"])
    sent, began = int(_STATISTICS.read_text()), perf_counter()
    for _ in range(int(rounds)):
        all_reduce(tensor.fill_(1.0))
    seconds = (perf_counter() - began) / int(rounds)
    assert bool((tensor == world).all())
    said = {"seconds": seconds, "bytes": (int(_STATISTICS.read_text()) - sent) / int(rounds)}
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(said))
    # Until the last round of every rank has left.
    all_reduce(torch.zeros(1))


main()
