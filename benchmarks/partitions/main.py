"""Cuts the network of three elastic workers in every way, and counts what each half has done. See README.md."""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import headrace as hr
from headrace.errors import HeadraceError

sys.path.insert(0, str(Path(__file__).parents[1]))
from on_hosts import hosts, run_all_forked

NODES, EXAMPLES, BATCH, EPOCHS = 3, 96, 16, 10
TIMEOUT_S = 2.0
NOWHERE = "02:00:00:00:00:ff"
"""The address of no network card: packets to it are lost."""

Edge = tuple[int, int]


class Counter(nn.Module):
    """Each example adds 1 to its own parameter, whenever a step with it is done."""

    def __init__(self) -> None:
        super().__init__()
        self.count = nn.Parameter(torch.zeros(EXAMPLES, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        return -inputs @ self.count


def mean(output: Tensor, _: Tensor) -> Tensor:
    return output.mean()


def ways() -> Iterator[tuple[str, tuple[Edge, ...]]]:
    """Yields every way to cut: a name, and the directions in which nothing goes any more."""
    for edge in permutations(range(NODES), 2):
        yield f"{edge[0]} to {edge[1]}", (edge,)
    for a, b in combinations(range(NODES), 2):
        yield f"{a} and {b}", ((a, b), (b, a))
    for node in range(NODES):
        others = [other for other in range(NODES) if other != node]
        outgoing, incoming = ([(node, other) for other in others], [(other, node) for other in others])
        yield f"all from {node}", tuple(outgoing)
        yield f"all to {node}", tuple(incoming)
        yield f"{node} alone", (*outgoing, *incoming)


def cut(edges: tuple[Edge, ...], network: str) -> None:
    """Loses every packet in these directions from now on."""
    for source, target in edges:
        command = ["ip", "-n", f"{network}-{source}", "neigh", "replace", f"10.97.0.{target + 1}"]
        subprocess.run([*command, "lladdr", NOWHERE, "dev", "eth0", "nud", "permanent"], check=True)


def mend(network: str, nodes: int = NODES) -> None:
    """Lets all packets through again."""
    for node in range(nodes):
        subprocess.run(["ip", "-n", f"{network}-{node}", "neigh", "flush", "dev", "eth0"], check=False)
        for other in range(nodes):
            command = ["ip", "-n", f"{network}-{node}", "neigh", "del", f"10.97.0.{other + 1}", "dev", "eth0"]
            subprocess.run(command, check=False, capture_output=True)


def train(edges: tuple[Edge, ...], in_round: int, by: int, network: str, worker: hr.Worker) -> None:
    for batch in worker.batches():
        if worker.rank == by and worker.round == in_round and not worker._session.is_replacement:
            cut(edges, network)
        worker.step(batch)


def one_rank(edges: tuple[Edge, ...], in_round: int, by: int, rank: int, folder: Path) -> dict[str, Any]:
    """Trains; returns how this rank has ended, the rounds that it has done, and its model."""
    os.chdir(folder)
    torch.set_num_threads(1)
    data = (torch.eye(EXAMPLES, dtype=torch.float64), torch.zeros(EXAMPLES))
    optimizer = functools.partial(torch.optim.SGD, lr=float(BATCH))
    job = hr.Job(Counter, loss=mean, optimizer=optimizer, data=data, global_batch_size=BATCH, epochs=EPOCHS)
    network = os.environ.get("HEADRACE_HOSTS", "headrace")
    act = functools.partial(train, edges, in_round, by, network)
    said: dict[str, Any] = {"off": -1.0, "model": "", "error": ""}
    try:
        run = hr.launch(act, job, hr.Mirrored(min_workers=1), timeout_s=TIMEOUT_S, run_dir="run")
        count = run.model.count
        assert isinstance(count, Tensor)
        said["off"] = (count - EPOCHS).abs().max().item()
        said["model"] = hashlib.sha256(count.detach().numpy().tobytes()).hexdigest()
    except HeadraceError as error:
        said["error"] = f"{type(error).__name__}: {error}"
    return said


def steps_of(folder: Path, rank: int) -> list[int]:
    """Returns the rounds that a rank has done, as its events tell."""
    path = folder / f"run/events/rank-{rank}.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [event["step"] for event in events if event["kind"] == "stepped"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cuts", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    draw, every = random.Random(given.seed), list(ways())
    rows, halves, twice, stuck = [], 0, 0, 0
    hosts("up", str(NODES))
    try:
        for number in range(given.cuts):
            name, edges = every[number % len(every)]
            in_round, by = draw.randrange(3, 50), draw.randrange(NODES)
            row = one_cut(name, edges, in_round, by)
            mend(os.environ.get("HEADRACE_HOSTS", "headrace"))
            rows.append(row)
            halves += row["halves"] > 1
            twice += row["twice"]
            stuck += row["halves"] == 0
            print(json.dumps(row), flush=True)
    finally:
        hosts("down")
    print(f"{given.cuts} cuts: two halves went on {halves} times, a step was done twice {twice} times, "
          f"none went on {stuck} times")  # fmt: skip
    out = Path(__file__).parent / "results" / "partitions.json"
    out.write_text(json.dumps({"cuts": given.cuts, "two_halves": halves, "twice": twice, "none": stuck, "rows": rows}))


def one_cut(name: str, edges: tuple[Edge, ...], in_round: int, by: int) -> dict[str, Any]:
    def act(rank: int, folder: Path) -> dict[str, Any]:
        said = one_rank(edges, in_round, by, rank, folder)
        return {**said, "steps": steps_of(folder, rank), "views": views_of(folder)}

    said = run_all_forked(act, on=range(NODES))
    done = [rank for rank, each in enumerate(said) if each["model"]]
    models = {said[rank]["model"] for rank in done}
    off = max((float(said[rank]["off"]) for rank in done), default=0.0)
    # What a rank that was left behind has done, the others must count as done.
    changes = [int(text) for rank in done for text in said[rank]["views"]]
    left = [rank for rank in range(NODES) if rank not in done]
    kept = [said[rank]["steps"] for rank in left]
    beyond = [max(steps) for steps in kept if steps and changes and max(steps) >= max(changes)]
    return {
        "cut": name,
        "round": in_round,
        "by": by,
        "went_on": done,
        "halves": len(models),
        "twice": int(off > 1e-9 or bool(beyond)),
        "errors": {rank: said[rank]["error"] for rank in left},
    }


def views_of(folder: Path) -> list[str]:
    """Returns the rounds with which views have begun."""
    text = "".join(path.read_text() for path in folder.glob("run/events/*.jsonl"))
    return re.findall(r"round (\d+) begins with", text)


if __name__ == "__main__":
    main()
