"""What a tracker costs a step: the same training with each of them, and without any."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
from harness import alternate, difference, report
from overhead_job import make_data, make_model

import headrace as hr
from headrace.engine.local.engine import LocalEngine
from headrace.report.trackers.tracker import Tracker
from headrace.spec.events import Event, Stepped
from headrace.strategies import Strategy

TRACKERS: dict[str, tuple[str, Callable[[Path], Tracker]]] = {
    "TensorBoard": ("tensorboard", hr.TensorBoard),
    "MLflow": ("mlflow", hr.MLflow),
    "Weights & Biases": ("wandb", hr.WandB),
}
STRATEGIES: dict[str, Strategy] = {"one_device": hr.OneDevice(threads=1), "mirrored": hr.Mirrored(workers=2)}


class ThreadTime:
    """The processor time of a tracker's thread in the second half of a run."""

    def __init__(self, tracker: Tracker, after_s: float) -> None:
        self._tracker = tracker
        self._after_s = after_s
        self.began: float | None = None

    def __call__(self, event: Event) -> None:
        if self.began is None and event.time_s > self._after_s:
            self.began = self.now()

    def now(self) -> float:
        thread = self._tracker._thread
        assert thread is not None
        assert thread.ident is not None
        return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def train(strategy: str, tracker: str, seconds: float, engine: LocalEngine, thread: dict[str, list[float]]) -> float:
    """Returns us a step: the mean over the second half of the run, when every tracker has been imported and opened.

    Adds to `thread` the processor time of the tracker's thread a step, us.
    """
    job = hr.Job(
        model=partial(make_model, "tiny"),
        task=hr.tasks.multiclass(10),
        optimizer=functools.partial(torch.optim.SGD, lr=0.01),
        data=hr.data.from_arrays(*make_data("tiny")).shuffle(),
        global_batch_size=64,
        steps=10**7,
    )
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        sinks = [stack.enter_context(TRACKERS[tracker][1](Path(folder) / "tracker"))] if tracker else []
        clocks = [ThreadTime(sink, seconds / 2) for sink in sinks]
        run = hr.fit(
            job, STRATEGIES[strategy], run_dir=Path(folder) / "run", on_event=[*sinks, *clocks], seconds=seconds,
            engine=engine, checkpoints=False,
        )  # fmt: skip
        times = [event.time_s for event in run.events if isinstance(event, Stepped) and event.rank == 0]
        if any(sink.failed for sink in sinks):
            raise SystemExit(f"{tracker} failed, see above: nothing was measured")
        for clock in clocks:
            assert clock.began is not None
            steps = sum(each > seconds / 2 for each in times)
            thread.setdefault(f"{strategy}, {tracker}", []).append(1e6 * (clock.now() - clock.began) / steps)
    half = times[len(times) // 2 :]
    return 1e6 * (half[-1] - half[0]) / (len(half) - 1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=12.0, help="of each run")
    parser.add_argument("--strategies", nargs="*", default=list(STRATEGIES), choices=list(STRATEGIES))
    arguments = parser.parse_args()
    installed = [name for name, (package, _) in TRACKERS.items() if importlib.util.find_spec(package)]
    thread: dict[str, list[float]] = {}
    with LocalEngine() as engine:
        contestants = {
            f"{strategy}, {tracker or 'no tracker'}": partial(
                train, strategy, tracker, arguments.seconds, engine, thread
            )
            for strategy in arguments.strategies
            for tracker in ("", *installed)
        }
        figures = alternate(contestants, arguments.rounds)
    extra = {
        f"{strategy}, {tracker} more": difference(figures, f"{strategy}, {tracker}", f"{strategy}, no tracker")
        for strategy in arguments.strategies
        for tracker in installed
    }
    extra |= {f"{name}, its thread alone": median(times) for name, times in thread.items()}
    report(Path(__file__).parent, "event-sinks", "us a step", figures, extra)
