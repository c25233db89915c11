"""Every strategy on three tasks, with 1 to 8 workers: accuracy by examples, by seconds, by bytes. See README.md."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
from cell import SPREAD, Asked, Cell, text_of, train  # noqa: E402
from harness import machine  # noqa: E402
from predicted import simulate_all  # noqa: E402
from store import Store  # noqa: E402
from table import MOST_RATES, RATE_STEP, RATES_AT_FIRST, ROWS, SEEDS, TUNING_SEED, TUNING_WORKERS, rows_of  # noqa: E402
from tasks import TASKS, images, unigram_entropy  # noqa: E402
from writing import write  # noqa: E402

import headrace as hr  # noqa: E402

RESULTS = HERE / "results"
QUICK_ROUNDS = 40


def tuning(store: Store) -> Iterator[Asked]:
    """Yields the cells that choose learning rates: of one device, and of what does not equal it.

    Where the best of those that are stored is the least or the greatest, the next one is tried, too.
    """
    for task in TASKS:
        for name in rows_of(task):
            row = ROWS[name]
            workers = min(row.workers, key=lambda count: abs(count - TUNING_WORKERS))
            equal = hr.strategies.resolve(text_of(name, workers), workers).equals_one_device
            if equal and name != "one device":
                continue
            rates = [TASKS[task].rate * row.factor_of(task) * RATE_STEP**place for place in (-1, 0, 1)]
            tried, best = store.rates(task, name), store.best_rate(task, name)
            if best is not None and RATES_AT_FIRST <= len(tried) < MOST_RATES:
                rates += [best / RATE_STEP] * (best == tried[0]) + [best * RATE_STEP] * (best == tried[-1])
            for rate in rates if row.job != "lbfgs" else rates[1:2]:
                yield Asked(task, name, workers, TUNING_SEED, rate)


def reported(store: Store) -> Iterator[Asked]:
    """Yields the cells of the tables, each with the learning rate of its row.

    What equals one device has its rate, and one seed: the others would say the same.
    """
    for task in TASKS:
        for name in rows_of(task):
            tuned = store.best_rate(task, name)
            rate = store.best_rate(task, "one device") if tuned is None else tuned
            if rate is not None:
                seeds = SEEDS if tuned is not None else SEEDS[:1]
                yield from (Asked(task, name, workers, seed, rate) for workers in ROWS[name].workers for seed in seeds)


def run(asked: Iterable[Asked], store: Store, only: str) -> bool:
    """Trains the cells that are not stored yet, two at a time, and stores each; returns whether there were some."""
    pattern = "/".join((*only.split("/"), "*", "*", "*")[:3])
    missing = [
        each for each in asked
        if fnmatch(f"{each.task}/{each.row}/{each.workers}", pattern) and not store.has(each)
    ]  # fmt: skip
    processes = min(2, len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(train, each) for each in missing]
        try:
            for number, future in enumerate(as_completed(futures), 1):
                cell = future.result()
                store.add(cell)
                print(f"{number:5} of {len(missing)}  {line(cell)}", flush=True)
        except BaseException:
            # Else Ctrl-C would wait for all that are left.
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return bool(missing)


def line(cell: Cell) -> str:
    """Returns a cell in one line."""
    head = f"{cell.task:8} {cell.row:26} {cell.workers} workers, seed {cell.seed}, lr {cell.rate:<8.4g}"
    if not cell.losses:
        return f"{head} {cell.kind}: {cell.why[:60]}"
    end = f"{cell.seconds[-1]:.3g} s" if cell.seconds else "no seconds"
    return f"{head} loss {cell.losses[-1]:.3f}, {end}, {cell.megabytes[-1]:.3g} MB"


def quick(only: str) -> None:
    """Trains every row once, shortly, with two workers on characters, and stores nothing."""
    task = only.partition("/")[0] if only else "lstm"
    asked = [
        Asked(task, name, min(2, max(ROWS[name].workers)), SEEDS[0], TASKS[task].rate * ROWS[name].factor_of(task),
              QUICK_ROUNDS)
        for name in rows_of(task)
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        run(asked, Store(Path(folder)), only or "*")


def measure() -> None:
    """Measures the profile of each model, by which seconds are computed.

    How much steps vary is of this machine and its other work, and so is how workers beside each other slow down: the
    first is assumed (`SPREAD`), and the second left out, since each worker has a machine of its own.
    """
    for name, task in TASKS.items():
        sizes = sorted({max(1, task.batch // parts) for parts in (1, 2, 4, 8)})
        found = hr.profile(task.job(0, task.rate), threads=1, batch_sizes=sizes, seconds=0.3, say=print)
        assert found.compute is not None
        found = replace(found, compute=replace(found.compute, spread=SPREAD, crowd=1, crowding=1.0))
        (HERE / "profiles").mkdir(exist_ok=True)
        found.save(HERE / "profiles" / f"{name}.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cells by task/row/workers, with * and ?: 'cnn/local*/8'")
    parser.add_argument("--quick", action="store_true", help="each row once, with few rounds; nothing is stored")
    parser.add_argument("--write", action="store_true", help="writes text and pictures of what is stored, and no more")
    parser.add_argument("--profile", action="store_true", help="measures the profiles again, on an idle machine")
    arguments = parser.parse_args()
    if arguments.profile:
        return measure()
    if arguments.quick:
        return quick(arguments.only)
    store = Store(RESULTS)
    if not arguments.write:
        images()  # fetched once, before processes would each do it
        while run(tuning(store), store, arguments.only or "*"):
            pass  # until the best rate of each row has tried ones on both sides, or enough were tried
        run(reported(store), store, arguments.only or "*")
        store.sort()
        (RESULTS / "simulated.json").write_text(json.dumps(simulate_all(), indent=1) + "\n")
        about = {**machine(), "unigram_entropy": unigram_entropy()}
        (RESULTS / "about.json").write_text(json.dumps(about, indent=1) + "\n")
    write(HERE, store)
    return None


if __name__ == "__main__":
    main()
