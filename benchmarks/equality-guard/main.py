"""What the guard against copies that drift apart costs: its time beside that of the steps, mlp, 2 mirrors.

python benchmarks/equality-guard/main.py [--runs 5] [--results FILE]

Each run trains 3 epochs of 60,000 examples, with an evaluation at the end of each, and a save. A run
without the comparisons alternates with it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from harness import machine
from workloads import MODELS

import headrace as hr

EXAMPLES, EVALUATED, BATCH = 60_000, 10_000, 128


def train(compares: bool, worker: hr.Worker) -> None:
    """The usual loop, which adds up the guard's time."""
    guard: Any = worker._control.guard
    whole, inside, spent, deep = guard.compare, guard.after_round, [0.0], [0]

    def timed(act: Any, *given: Any, **named: Any) -> None:
        began, outer = perf_counter(), deep[0] == 0
        deep[0] += 1
        try:
            if compares:
                act(*given, **named)
        finally:
            deep[0] -= 1
            if outer:
                spent[0] += perf_counter() - began

    guard.compare, guard.after_round = partial(timed, whole), partial(timed, inside)
    began = perf_counter()
    for batch in worker.batches():
        worker.step(batch)
        if worker.evaluation_due:
            worker.evaluate()
    if worker.rank == 0:
        print(json.dumps({"all": perf_counter() - began, "guard": spent[0]}), flush=True)


def seconds(compares: bool, folder: Path) -> dict[str, float]:
    """Returns the seconds of a run and of the guard in it."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand(EXAMPLES, 784, generator=generator)
    target = torch.randint(10, (EXAMPLES,), generator=generator)
    job = hr.Job(
        model=MODELS["mlp"][0],
        task=hr.tasks.multiclass(10),
        optimizer=partial(torch.optim.SGD, lr=0.01),
        data=(inputs, target),
        eval_data=(inputs[:EVALUATED], target[:EVALUATED]),
        global_batch_size=BATCH,
        epochs=3,
    )
    hr.launch(partial(train, compares), job, hr.Mirrored(workers=2), run_dir=folder)
    said: dict[str, float] = json.loads((folder / "logs" / "rank-0.log").read_text(encoding="utf-8").splitlines()[-1])
    return said


def main() -> None:
    """Prints the share of the guard."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--results", type=Path)
    given = parser.parse_args()
    rows = []
    for number in range(given.runs):
        with tempfile.TemporaryDirectory() as folder:
            rows.append({str(on): seconds(on, Path(folder) / str(on)) for on in (True, False)})
        print(number, rows[-1], flush=True)
    share = statistics.median(row["True"]["guard"] / row["True"]["all"] for row in rows)
    ratio = statistics.median(row["True"]["all"] / row["False"]["all"] for row in rows)
    print(f"the guard takes {100 * share:.3f} % of a run; with it / without it {ratio:.4f}")
    if given.results:
        figures = {"share": share, "ratio": ratio, "runs": rows}
        given.results.write_text(json.dumps({"machine": machine(), **figures}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
