"""One of the ranks: one_rank.py CODEC STEPS FOLDER trains. `struck` is a run in which rank 0 strikes a server."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor, nn

import headrace as hr
from headrace.spec.events import ServerStats

sys.path.insert(0, str(Path(__file__).parents[1]))
from rank_on_host import dense

BATCH = 64
SIZES = (1024, 1536, 1024, 10)
"""3.2 million parameters, 12.7 MB."""

SERVER = 2
TIMEOUT_S = 2.0


class Counter(nn.Module):
    """Each example adds 1 to its own parameter, whenever its gradient is applied."""

    def __init__(self) -> None:
        super().__init__()
        self.count = nn.Parameter(torch.zeros(BATCH))

    def forward(self, inputs: Tensor) -> Tensor:
        return -inputs @ self.count


def coded(codec: str, steps: int, folder: str) -> dict[str, float]:
    torch.manual_seed(0)
    job = hr.Job(
        model=functools.partial(dense, SIZES),
        loss=nn.functional.cross_entropy,
        optimizer=functools.partial(torch.optim.SGD, lr=0.01),
        data=(torch.randn(steps * BATCH, SIZES[0]), torch.randint(0, SIZES[-1], (steps * BATCH,))),
        global_batch_size=4 * BATCH,
        steps=steps // 4,
    )
    strategy = hr.ParameterServer(servers=2, push_codec=codec, pull_codec=codec)
    sent = Path("/sys/class/net/eth0/statistics/tx_bytes")
    before = int(sent.read_text())
    began: list[float] = []

    def train(worker: hr.Worker) -> None:
        for batch in worker.batches():
            began.append(perf_counter())
            worker.step(batch)

    run = hr.launch(train, job, strategy, run_dir=f"{folder}/run", checkpoints=False, timeout_s=60)
    if int(os.environ["RANK"]):
        return {}
    last = {event.rank: event.staleness for event in run.events if isinstance(event, ServerStats)}
    return {
        "rate": steps * BATCH / (perf_counter() - began[0]),
        "staleness": _mean([each for staleness in last.values() for each in staleness.values()]),
        "bytes": (int(sent.read_text()) - before) / steps,
    }


def struck(deed: str, steps: int, rank: int, folder: Path) -> dict[str, float]:
    """Trains while a server is killed ("kill") or cut off ("cut"); returns how long it took, and what is wrong."""
    torch.set_num_threads(1)
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    job = hr.Job(
        model=Counter,
        loss=lambda output, target: output.mean(),
        optimizer=functools.partial(torch.optim.SGD, lr=float(BATCH)),
        data=(torch.eye(BATCH), torch.zeros(BATCH)),
        global_batch_size=BATCH,
        steps=steps,
    )
    times: list[float] = []

    def train(worker: hr.Worker) -> None:
        for batch in worker.batches():
            worker.step(batch)
            if times and len(times) < 2:
                times.append(perf_counter())
            if rank == 0 and worker.round == steps // 2:
                _strike(deed, folder)
                times.append(perf_counter())

    strategy = hr.ParameterServer(backups=1, staleness_bound=0)
    run = hr.launch(train, job, strategy, run_dir=f"{folder}/run", checkpoints=False, timeout_s=TIMEOUT_S)
    if rank:
        return {}
    wrong = float((run.model.get_parameter("count").detach() - steps).abs().sum())
    return {"seconds": times[1] - times[0], "wrong": wrong}


def _strike(deed: str, folder: Path) -> None:
    if deed == "kill":
        os.kill(int((folder / f"pid-{SERVER}").read_text()), signal.SIGKILL)
    else:
        host = f"{os.environ.get('HEADRACE_HOSTS', 'headrace')}-{SERVER}"
        subprocess.run(["ip", "-n", host, "link", "set", "eth0", "down"], check=True)


def _mean(counts: list[Mapping[str, int]]) -> float:
    updates = sum(sum(each.values()) for each in counts)
    return sum(int(staleness) * count for each in counts for staleness, count in each.items()) / max(1, updates)


if __name__ == "__main__":
    torch.set_num_threads(1)
    way, count, place = sys.argv[1:]
    Path(place, f"{os.environ['RANK']}.json").write_text(json.dumps(coded(way, int(count), place)))
