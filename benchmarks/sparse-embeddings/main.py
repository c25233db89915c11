"""A step with 2,000 rows of a table of 1 M x 64: rows from servers, the dense table from servers, and TorchRec."""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

import headrace as hr
from headrace.spec.events import ServerStats, Stepped

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import alternate, ratio, report, rival

ROWS, WIDTH, BATCH, EPOCH = 1_000_000, 64, 2_000, 10
WORKERS = 2


class Model(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.item = nn.Embedding(ROWS, WIDTH, sparse=sparse)
        self.tower = nn.Linear(WIDTH, 1)

    def forward(self, ids: Tensor) -> Tensor:
        output: Tensor = self.tower(self.item(ids))
        return output.squeeze(1)


class Tower(nn.Module):
    """As much to compute as to read."""

    def __init__(self) -> None:
        super().__init__()
        self.item = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.tower = nn.Sequential(nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, ids: Tensor) -> Tensor:
        output: Tensor = self.tower(self.item(ids))
        return output.squeeze(1)


def near_ms(rows: hr.RowOptions, epochs: int, pulled: dict[str, float], name: str) -> float:
    """Returns the time of a step of both workers, which do not wait for each other, with ids like Zipf(1.1).

    `pulled` gets the kB of rows that a worker's step has pulled.
    """
    chance = torch.Generator().manual_seed(0)
    shares = torch.arange(1, ROWS + 1, dtype=torch.float64) ** -1.1
    ids = torch.multinomial(shares, EPOCH * WORKERS * BATCH, replacement=True, generator=chance)
    job = hr.Job(
        model=Tower,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        data=(ids, torch.randn(len(ids))),
        loss=nn.functional.mse_loss,
        global_batch_size=WORKERS * BATCH,
        epochs=epochs,
    )
    run = hr.fit(job, hr.ParameterServer(workers=WORKERS, rows=rows), device="cpu", check=False)
    # After an epoch rows are made, and what is hot is known.
    times = sorted(event.time_s for event in run.events if isinstance(event, Stepped))[WORKERS * EPOCH :]
    last = next(event for event in reversed(run.events) if isinstance(event, ServerStats))
    own = next(shard for shard in last.shards if shard.name == "rows of item")
    pulled[f"kB of rows pulled in a worker's step, {name}"] = own.pulled_bytes / 1e3 / (epochs * EPOCH * WORKERS)
    return 1e3 * WORKERS * (times[-1] - times[0]) / (len(times) - 1)


NEAR = {
    "rows pulled by forward": hr.RowOptions(),
    "rows pulled a step early": hr.RowOptions(prefetch=True),
    "with copies of 5,000 hot rows": hr.RowOptions(hot=5_000),
    "both": hr.RowOptions(prefetch=True, hot=5_000),
}


def step_ms(sparse: bool, epochs: int, moved: dict[str, float] | None = None) -> float:
    """Returns the median time of a step of both workers, each with 2,000 distinct rows, after the first epoch."""
    ids = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))[: EPOCH * WORKERS * BATCH]
    job = hr.Job(
        model=functools.partial(Model, sparse),
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        data=(ids, torch.randn(len(ids))),
        loss=nn.functional.mse_loss,
        global_batch_size=WORKERS * BATCH,
        epochs=epochs,
    )
    run = hr.fit(job, hr.ParameterServer(workers=WORKERS, staleness_bound=0), device="cpu", check=False)
    times = sorted(event.time_s for event in run.events if isinstance(event, Stepped) and event.rank == 0)
    later = times[EPOCH if sparse else 1 :]
    if moved is not None:
        last = next(event for event in reversed(run.events) if isinstance(event, ServerStats))
        rows = next(shard for shard in last.shards if shard.name == "rows of item")
        touched = epochs * EPOCH * WORKERS * BATCH * WIDTH * 4
        moved |= {"to the servers": rows.pushed_bytes / touched, "to the workers": rows.pulled_bytes / touched}
    return 1e3 * statistics.median(b - a for a, b in pairwise(later))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--torchrec", default="", help="a folder with torchrec and fbgemm-gpu-cpu, to compare with these"
    )
    parser.add_argument("--near", action="store_true", help="compare ways to read rows, without a staleness bound")
    parser.add_argument("--epochs", type=int, default=20, help="of 10 steps, with --near")
    options = parser.parse_args()
    if options.near:
        pulled: dict[str, float] = {}
        ways = {name: functools.partial(near_ms, rows, options.epochs, pulled, name) for name, rows in NEAR.items()}
        figures = alternate(ways, options.rounds)
        first, *others = ways
        ratios = {f"{first} / {each}": ratio(figures, first, each) for each in others}
        report(Path(__file__).parent, "near", "ms", figures, {**ratios, **pulled})
        sys.exit()
    moved: dict[str, float] = {}
    rows = {"rows from a server": functools.partial(step_ms, True, 6, moved)}
    if options.torchrec:
        ways = {f"TorchRec on gloo, {way}": (options.torchrec, way) for way in ("row_wise", "table_wise")}
        name = "against-torchrec"
        other = {each: functools.partial(rival, "torchrec_rows", *told) for each, told in ways.items()}
    else:
        name, other = "sparse-embeddings", {"the dense table from a server": functools.partial(step_ms, False, 1)}
    figures = alternate({**rows, **other}, options.rounds)
    ratios = {f"{each} / rows": ratio(figures, each, "rows from a server") for each in other}
    ratios |= {f"bytes {way} / touched rows": factor for way, factor in moved.items()}
    report(Path(__file__).parent, name, "ms", figures, ratios)
