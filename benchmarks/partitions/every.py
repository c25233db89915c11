"""Cuts every set of pairs of hosts, in one direction or both, under several strategies. See README.md."""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, product
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

import headrace as hr
from headrace.errors import HeadraceError

sys.path.insert(0, str(Path(__file__).parents[1]))
from main import Edge, cut, mend
from on_hosts import MASTER, enter, hosts

TIMEOUT_S, SLACK_S = 2.0, 2.0
"""Each rank must end within the sum of the two, counted from the cut, or go on."""

ROUND_S, CUT_AT, ROUNDS = 0.1, 8, 60
HANGS_S = 90.0
BATCH, FEATURES = 12, 8
ONE_WAY, OTHER_WAY, BOTH = "ab", "ba", "both"


class Slow(nn.Linear):
    """A layer that takes its time."""

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            time.sleep(ROUND_S / 3)
        return super().forward(inputs)


def model() -> nn.Module:
    return nn.Sequential(*(Slow(FEATURES, FEATURES) for _ in range(4)))


STRATEGIES = {
    "mirrored": lambda _: hr.Mirrored(),
    "pipeline": lambda count: hr.Pipeline(stages=count, micro_batches=2),
    "servers": lambda count: hr.ParameterServer(count - 1),
    "servers in lock-step": lambda count: hr.ParameterServer(count - 1, staleness_bound=0),
    "servers with a backup": lambda count: hr.ParameterServer(count - 2, backups=1),
    "elastic": lambda _: hr.Mirrored(min_workers=1),
}


@dataclass
class Row:
    """How a run ended after a cut: verdict, seconds from the cut to the last end by itself, and what each rank said."""

    strategy: str
    cut: str
    verdict: str
    seconds: float
    said: dict[int, str]

    @property
    def is_bad(self) -> bool:
        return self.verdict.isupper()


def cuts(count: int, directions: bool) -> Iterator[tuple[str, tuple[Edge, ...]]]:
    """Yields every set of pairs of hosts, with a name; each pair cut in both directions, or in every way."""
    pairs = list(combinations(range(count), 2))
    ways = ("", BOTH, ONE_WAY, OTHER_WAY) if directions else ("", BOTH)
    for chosen in product(ways, repeat=len(pairs)):
        edges: list[Edge] = []
        names = []
        for (a, b), way in zip(pairs, chosen, strict=True):
            edges += [(a, b)] * (way in (BOTH, ONE_WAY)) + [(b, a)] * (way in (BOTH, OTHER_WAY))
            names += [f"{a}{ {BOTH: '|', ONE_WAY: '>', OTHER_WAY: '<'}[way] }{b}"] if way else []
        if edges:
            yield " ".join(names), tuple(edges)


def train(edges: tuple[Edge, ...], network: str, folder: Path, worker: hr.Worker) -> None:
    for batch in worker.batches():
        if worker.rank == 0 and worker.round >= CUT_AT and not (folder / "cut").exists():
            cut(edges, network)
            (folder / "cut").write_text(str(time.monotonic()))
        worker.step(batch)


def one_rank(strategy: str, count: int, edges: tuple[Edge, ...], folder: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    inputs = torch.randn(4 * BATCH, FEATURES, generator=torch.Generator().manual_seed(0))
    job = hr.Job(
        model, loss=nn.functional.mse_loss, optimizer=functools.partial(torch.optim.SGD, lr=0.01),
        data=(inputs, inputs.flip(0)), global_batch_size=BATCH, steps=ROUNDS,
    )  # fmt: skip
    act = functools.partial(train, edges, os.environ.get("HEADRACE_HOSTS", "headrace"), folder)
    error = ""
    try:
        hr.launch(act, job, STRATEGIES[strategy](count), timeout_s=TIMEOUT_S, run_dir=folder / "run",
                  checkpoints=False, check=False)  # fmt: skip
    except HeadraceError as failed:
        error = f"{type(failed).__name__}: {failed}"
    return {"error": error, "at": time.monotonic()}


def be_rank(rank: int, strategy: str, count: int, edges: tuple[Edge, ...], folder: Path) -> NoReturn:
    code = 1
    try:
        log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        enter(rank)
        (folder / f"{rank}.part").write_text(json.dumps(one_rank(strategy, count, edges, folder)))
        (folder / f"{rank}.part").rename(folder / f"{rank}.json")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def run(strategy: str, count: int, name: str, edges: tuple[Edge, ...], network: str) -> Row:
    """Runs one job, whose rank 0 cuts, and waits for its end."""
    told = {**MASTER, "HEADRACE_SECRET": "0123456789abcdef" * 4, "WORLD_SIZE": str(count), "CI": "true"}
    with tempfile.TemporaryDirectory() as where:
        folder, pids = Path(where), []
        for rank in range(count):
            pid = os.fork()
            if pid == 0:
                os.environ.update(told, RANK=str(rank), HEADRACE_HOST=f"host-{rank}")
                be_rank(rank, strategy, count, edges, folder)
            pids.append(pid)
        left, give_up = set(pids), time.monotonic() + 60 + HANGS_S
        try:
            while left and time.monotonic() < give_up:
                left -= {pid for pid in left if os.waitpid(pid, os.WNOHANG)[0]}
                time.sleep(0.02)
                if (folder / "cut").exists():
                    give_up = min(give_up, float((folder / "cut").read_text() or "inf") + HANGS_S)
        finally:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            mend(network, count)
        return judged(strategy, name, edges, count, folder)


def judged(strategy: str, name: str, edges: Sequence[Edge], count: int, folder: Path) -> Row:
    """Says how a run ended, in capitals what is wrong."""
    said, late = {}, 0.0
    struck = float((folder / "cut").read_text()) if (folder / "cut").exists() else 0.0
    for rank in range(count):
        path = folder / f"{rank}.json"
        found = json.loads(path.read_text()) if path.exists() else None
        log = (folder / f"{rank}.log").read_text().strip().splitlines() if (folder / f"{rank}.log").exists() else []
        said[rank] = (
            "HUNG or no error of headrace: " + " / ".join(log[-3:])
            if found is None
            else found["error"] and f"{found['at'] - struck:.1f} s: {found['error']}"
        )
        if found and found["error"]:
            late = max(late, found["at"] - struck)
    if not struck:
        return Row(strategy, name, "NOT BEGUN", 0.0, said)
    ended = [rank for rank in said if said[rank]]
    named = {rank for edge in edges for rank in edge}
    verdict = f"rank {', '.join(str(rank) for rank in range(count) if rank not in ended)} goes on"
    if any(text.startswith("HUNG") for text in said.values()):
        verdict = "HUNG"
    elif late > TIMEOUT_S + SLACK_S:
        verdict = "LATE"
    elif any(not any(f"rank {rank} " in said[each] for rank in named) for each in ended):
        verdict = "NAMELESS"
    elif len(ended) == count:
        verdict = "ends"
    return Row(strategy, name, verdict, late, said)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=3, choices=(3, 4))
    parser.add_argument("--directions", action="store_true", help="each pair also in one direction alone")
    parser.add_argument("--only", nargs="*", default=list(STRATEGIES), choices=list(STRATEGIES))
    parser.add_argument("--loud", action="store_true", help="shows what each rank said")
    parser.add_argument("--sample", type=int, default=0, help="so many cuts, drawn by a seed; 0 for all")
    given = parser.parse_args()
    network = os.environ.get("HEADRACE_HOSTS", "headrace")
    every = list(cuts(given.hosts, given.directions))
    if given.sample:
        every = random.Random(given.sample).sample(every, min(given.sample, len(every)))
    rows = []
    hosts("up", str(given.hosts))
    try:
        for strategy in given.only:
            for name, edges in every:
                rows.append(run(strategy, given.hosts, name, edges, network))
                print(f"{strategy:22} {name:14} {rows[-1].verdict:24} {rows[-1].seconds:4.1f} s", flush=True)
                if rows[-1].is_bad or given.loud:
                    print(json.dumps(rows[-1].said, indent=1), flush=True)
    finally:
        hosts("down")
    bad = sum(row.is_bad for row in rows)
    print(f"{len(rows)} partitions, {bad} bad")
    way = "-directions" if given.directions else ""
    out = Path(__file__).parent / "results" / f"every-{given.hosts}{way}.json"
    out.write_text(json.dumps({"timeout_s": TIMEOUT_S, "bad": bad, "rows": [asdict(row) for row in rows]}, indent=1))
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
