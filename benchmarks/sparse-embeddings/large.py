"""A table that no single process may hold: memory of servers and workers while it is saved. See README.md."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep

import torch
from torch import Tensor, nn

import headrace as hr
from headrace.spec.events import Event, Saved, ServerStarted, WorkerStarted

WIDTH, BATCH, LOOK_S = 64, 200_000, 0.02


class Model(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.item = nn.Embedding(rows, WIDTH, sparse=True)
        # Each server needs a parameter of its own.
        self.tower = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)), nn.Linear(WIDTH, 1))

    def forward(self, ids: Tensor) -> Tensor:
        output: Tensor = self.tower(self.item(ids))
        return output.squeeze(1)


class Memory:
    """Looks at the memory of the run's processes; `before` and `most` are bytes by role while checkpoints are saved.

    Only memory of the process itself counts: pages of files, which the system takes back when it needs them, do not.
    """

    def __init__(self) -> None:
        self.pids: dict[tuple[str, int], int] = {}
        self.looks: list[tuple[float, dict[tuple[str, int], int]]] = []
        self.saved: list[tuple[float, Saved]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __call__(self, event: Event) -> None:
        if isinstance(event, ServerStarted | WorkerStarted):
            self.pids["server" if isinstance(event, ServerStarted) else "worker", event.rank] = event.pid
        elif isinstance(event, Saved):
            self.saved.append((monotonic(), event))

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def during_saves(self) -> Iterator[tuple[str, int, int]]:
        """Yields role, bytes before and most bytes during the last save."""
        at, saved = self.saved[-1]
        began = at - saved.write_s - saved.stall_s - 0.1
        before = [held for when, held in self.looks if when <= began][-1]
        during = [held for when, held in self.looks if began <= when <= at]
        for key, held in before.items():
            yield key[0], held, max(look.get(key, 0) for look in during)

    def _look(self) -> None:
        while not self._over.is_set():
            found = {key: own for key, pid in dict(self.pids).items() if (own := _own_bytes(pid))}
            self.looks.append((monotonic(), found))
            sleep(LOOK_S)


def _own_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        # It has ended.
        return 0
    fields = dict(line.split(":", 1) for line in lines)
    return sum(int(fields[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem") if name in fields)


def main(rows: int, servers: int, others: int, run_dir: Path) -> dict[str, object]:
    ids = torch.randperm(rows, generator=torch.Generator().manual_seed(0))
    job = hr.Job(
        model=functools.partial(Model, rows),
        optimizer=functools.partial(hr.RowwiseAdagrad, lr=0.1),
        data=(ids, torch.randn(rows)),
        epochs=1,
        loss=nn.functional.mse_loss,
        global_batch_size=min(BATCH, rows // 4),
    )
    found: dict[str, object] = {"rows": rows, "table_bytes": rows * (WIDTH + 1) * 4}
    for count, epochs in ((servers, 1), (others, 2)):
        job = dataclasses.replace(job, epochs=epochs)
        strategy = hr.ParameterServer(workers=2, servers=count, staleness_bound=0)
        with Memory() as memory:
            run = hr.fit(job, strategy, device="cpu", run_dir=run_dir, resume=epochs > 1, on_event=memory, check=False)
        _, saved = memory.saved[-1]
        own: dict[str, object] = {"saved_bytes": saved.bytes, "stall_s": saved.stall_s, "write_s": saved.write_s}
        for role in ("server", "worker"):
            pairs = [(before, most) for name, before, most in memory.during_saves() if name == role]
            own[role] = {
                "largest_before_bytes": max(before for before, _ in pairs),
                "largest_growth_bytes": max(most - before for before, most in pairs),
                "largest_growth": max(most / before - 1 for before, most in pairs),
            }
        (held,) = run.summary.cost.rows
        found[f"{count} servers"] = {**own, "rows_held": held.held}
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=4_600_000, help="of 260 bytes with the optimizer's state")
    parser.add_argument("--servers", type=int, default=8)
    parser.add_argument("--then", type=int, default=4, help="servers that go on from the checkpoint")
    parser.add_argument("--run-dir", type=Path, required=True, help="a new folder, with room for the table four times")
    options = parser.parse_args()
    figures = main(options.rows, options.servers, options.then, options.run_dir)
    shutil.rmtree(options.run_dir)
    print(json.dumps(figures, indent=2))
    (Path(__file__).parent / "results").mkdir(exist_ok=True)
    (Path(__file__).parent / "results" / "large.json").write_text(json.dumps(figures, indent=2) + "\n")
