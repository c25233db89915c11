"""How long a server has no backup after its loss, with a large model under a full rate of pushes. See README.md."""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import signal
import statistics
import time
from pathlib import Path

import torch
from torch import nn

import headrace as hr
from headrace.spec.events import BackupReady, Event, Lost, ServerStarted, Stepped

WORKERS = 2
WIDTH = 5000
LAYER_BYTES = 4 * WIDTH * WIDTH
STEPS = 6
"""Between a backup that is ready and the next kill, so that the rate is that of an undisturbed run again."""


class Killer:
    """Kills the primary whenever its backup is ready, and ends the run after the last kill."""

    def __init__(self, kills: int) -> None:
        self._left = kills
        self._pids: dict[int, int] = {}
        self._primary = WORKERS
        self._steps: int | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, ServerStarted):
            self._pids[event.rank] = event.pid
        elif isinstance(event, BackupReady):
            self._steps = 0
        elif isinstance(event, Stepped) and self._steps is not None:
            self._steps += 1
            if self._steps >= STEPS:
                self._steps = None
                self._kill()

    def _kill(self) -> None:
        if not self._left:
            os.kill(os.getpid(), signal.SIGINT)
            return
        self._left -= 1
        os.kill(self._pids[self._primary], signal.SIGKILL)
        self._primary = 2 * WORKERS + 1 - self._primary


def layers(count: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)))


def job(megabytes: int) -> hr.Job:
    """Returns a job that does little but push, until it is ended."""
    inputs = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(0))
    return hr.Job(
        model=functools.partial(layers, max(1, megabytes * 10**6 // LAYER_BYTES)),
        loss=nn.functional.mse_loss,
        optimizer=functools.partial(torch.optim.SGD, lr=1e-4, momentum=0.9),
        data=(inputs, inputs),
        global_batch_size=2 * WORKERS,
        epochs=1_000_000,
    )


def windows(transport: str, megabytes: int, kills: int) -> dict[str, object]:
    """Returns, of each kill, for how long the server had no backup, and for how long no worker made a step."""
    strategy = hr.ParameterServer(WORKERS, backups=1, transport=transport)
    run = hr.fit(job(megabytes), strategy, on_event=Killer(kills))
    steps = sorted(event.time_s for event in run.events if isinstance(event, Stepped))
    lost = sorted(event.time_s for event in run.events if isinstance(event, Lost))
    ready = sorted((event.time_s, event.unguarded_s) for event in run.events if isinstance(event, BackupReady))
    assert len(lost) == kills, f"{len(lost)} of {kills} kills were noticed"
    unguarded, pauses, calm = [], [], []
    for loss in lost:
        end, window = next(each for each in ready if each[0] > loss)
        unguarded.append(window)
        before = [step for step in steps if step < loss][-STEPS:]
        calm.append((before[-1] - before[0]) / (STEPS - 1))
        inside = [step for step in steps if loss <= step <= end]
        edges = [before[-1], *inside, next((step for step in steps if step > end), end)]
        pauses.append(max(after - one for one, after in itertools.pairwise(edges)))
    return {
        "megabytes": megabytes,
        "kills": kills,
        "unguarded_median_s": statistics.median(unguarded),
        "unguarded_longest_s": max(unguarded),
        "pause_median_s": statistics.median(pauses),
        "pause_longest_s": max(pauses),
        "step_s": statistics.median(calm),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--transport", choices=("shared_memory", "tcp"), action="append")
    given = parser.parse_args()
    # A shell lets what it starts in the background ignore the signal by which the run is ended.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    rows = {}
    for transport in given.transport or ("shared_memory", "tcp"):
        began = time.monotonic()
        rows[transport] = windows(transport, given.megabytes, given.kills)
        print(transport, json.dumps(rows[transport]), f"in {time.monotonic() - began:.0f} s", flush=True)
    results = Path(__file__).parent / "results"
    results.mkdir(exist_ok=True)
    (results / "window.json").write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
