"""A run that is killed at a random moment and goes on ends bit for bit where it would have ended.

A trial kills a random worker (in one of twenty, and where runs go on without a worker, the launcher with all that it
has started) with SIGKILL at a random moment of a run, lets the run go on, kills it again, up to four times (ten where
kills are counted, `--kills`), and compares what is left in the end (the digests of the last checkpoint's files, the
model's file, the metrics) with the uninterrupted run.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from cases import NOT_COMPILED, ROUNDS, STRATEGIES, VARIANTS, make_job
from kills import Plan, kill_launcher, struck

import headrace as hr
from headrace.checkpoint import CheckpointFolder
from headrace.engine.local.engine import LocalEngine
from headrace.errors import HeadraceError, PeerLost, UsageError
from headrace.report.trackers.listeners import OnEvent
from headrace.spec.events import RunStarted

KINDS = ("cnn", "lstm")
CHECKPOINTS = hr.Checkpoints(every_steps=3, every_s=None, keep=2)
LONGEST_S = 300.0
USUAL_STRATEGIES = [*STRATEGIES][:6]


def left_by(run_dir: Path, metrics: dict[str, float]) -> tuple[Any, ...]:
    """Returns all that must be equal."""
    checkpoint, wrong = CheckpointFolder(run_dir / "checkpoints").latest()
    assert checkpoint is not None
    files = {record.name: record.sha256 for record in checkpoint.manifest.files}
    return checkpoint.step, files, len(wrong), (run_dir / "model.safetensors").read_bytes(), metrics


@dataclass
class Row:
    """What came of the trials of one variant of the job under one strategy.

    Attributes:
        refused: why the strategy does not take the job at all; "" where it does.
        trials: that were made.
        equal: trials that ended where the uninterrupted run ends.
        wrong: what was not so.
        kills: how many workers or launchers were killed in all; how many of them launchers.
        from_steps: how often a run went on from each step; 0 where there was no checkpoint yet and it began anew.
    """

    strategy: str
    kind: str
    refused: str = ""
    trials: int = 0
    equal: int = 0
    wrong: list[str] = field(default_factory=list)
    kills: int = 0
    launchers: int = 0
    from_steps: dict[int, int] = field(default_factory=dict)


def train(
    engine: LocalEngine | None, kind: str, strategy: str, run_dir: Path, on_event: OnEvent | None = None
) -> hr.Run:
    """Trains, from the last checkpoint on if there is one; a run that has none begins anew."""
    fit = functools.partial(hr.fit, make_job(strategy, kind), STRATEGIES[strategy], run_dir=run_dir, engine=engine,
                            checkpoints=CHECKPOINTS, on_event=on_event, device="cpu")  # fmt: skip
    try:
        return fit(resume=run_dir.exists())
    except UsageError as error:
        if "nothing to resume" not in str(error):
            raise
        shutil.rmtree(run_dir)
        return fit()


def trial(engine: LocalEngine, row: Row, whole: tuple[Any, ...], length_s: float, plan: Plan, folder: Path) -> str:
    """Breaks one run off, again and again, and lets it end; returns what is wrong, "" if nothing."""
    run_dir = folder / "run"
    for _ in range(plan.launchers(row.strategy)):
        command = [sys.executable, __file__, "--one", row.kind, row.strategy, str(run_dir)]
        kill_launcher(command, run_dir, plan.dice.uniform(0, 0.5 * length_s))
        row.kills += 1
        row.launchers += 1
    kills, wanted, was_late = 0, plan.workers(row.strategy), False
    while kills < wanted:
        began, moment = time.monotonic(), plan.moment(length_s, was_late)
        try:
            with struck(plan.dice, moment):
                train(engine, row.kind, row.strategy, run_dir, moment.see)
            if kills:
                break
            # It was faster than its killer, who gets another; the first run also started the processes' server.
            length_s, was_late = min(length_s, time.monotonic() - began), True
            shutil.rmtree(run_dir)
        except PeerLost:
            kills += 1
    row.kills += kills
    run = train(engine, row.kind, row.strategy, run_dir)
    for event in run.events:
        if isinstance(event, RunStarted):
            row.from_steps[event.resumed_step] = row.from_steps.get(event.resumed_step, 0) + 1
    return differences(left_by(run_dir, run.metrics), whole)


def differences(ours: tuple[Any, ...], theirs: tuple[Any, ...]) -> str:
    """Returns what differs between two ends of a run, "" if nothing."""
    names = ("step", "files of the last checkpoint", "damaged ones", "model.safetensors", "metrics")
    return ", ".join(name for name, one, other in zip(names, ours, theirs, strict=True) if one != other)


class Campaign:
    """The trials of all rows on one engine, by turns."""

    def __init__(self, engine: LocalEngine, place: Path, plan: Plan) -> None:
        self._engine, self._place, self._plan = engine, place, plan
        self._whole: dict[tuple[str, str], tuple[tuple[Any, ...], float]] = {}

    def once(self, row: Row) -> None:
        """Does one trial; before the first one of a row, the run without interruption."""
        if row.refused:
            return
        with tempfile.TemporaryDirectory(dir=self._place) as folder:
            with longest(LONGEST_S):
                whole, length_s = self._known(row, Path(folder))
            if row.refused or not whole:
                return
            with longest(LONGEST_S + 2 * self._plan.most_kills * length_s):
                wrong, error = "", ""
                try:
                    wrong = trial(self._engine, row, whole, length_s, self._plan, Path(folder))
                except HeadraceError as failed:
                    error = f"{type(failed).__name__}: {failed}"
            if wrong:
                # What two runs in a row do not give alike, no resumed run can.
                again, _ = self._uninterrupted(row, Path(folder) / "again")
                wrong += f" (two runs without interruption: {differences(again, whole) or 'equal'})"
        row.trials += 1
        row.equal += not (wrong or error)
        if wrong or error:
            row.wrong.append(f"trial {row.trials}: {wrong or error}")

    def _known(self, row: Row, folder: Path) -> tuple[tuple[Any, ...], float]:
        key = (row.strategy, row.kind)
        if key not in self._whole:
            try:
                self._whole[key] = self._uninterrupted(row, folder / "whole")
            except UsageError as error:
                row.refused = str(error)
                return (), 0.0
            except HeadraceError as error:
                row.trials += 1
                row.wrong.append(f"without interruption: {error}")
                return (), 0.0
        return self._whole[key]

    def _uninterrupted(self, row: Row, run_dir: Path) -> tuple[tuple[Any, ...], float]:
        """Returns what a run without interruption leaves, and how long it takes."""
        began = time.monotonic()
        run = train(self._engine, row.kind, row.strategy, run_dir)
        return left_by(run_dir, run.metrics), time.monotonic() - began


@contextmanager
def longest(seconds: float) -> Iterator[None]:
    """Raises TimeoutError if something takes longer: no run hangs unnoticed."""

    def late(*_: object) -> None:
        raise TimeoutError(f"a trial has taken longer than {seconds:g} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(int(seconds))
    try:
        yield
    finally:
        signal.alarm(0)


def campaign(rows: list[Row], plan: Plan, until: float) -> None:
    """Does trials by turns in a random order, as long as there is time, until each row has had enough."""
    with LocalEngine() as engine, tempfile.TemporaryDirectory() as place:
        trying, number = Campaign(engine, Path(place), plan), 0
        while still := [row for row in rows if not is_done(row, plan)]:
            number += 1
            for done, row in enumerate(plan.dice.sample(still, len(still))):
                if time.monotonic() > until:
                    return
                trying.once(row)
                print(f"\rpass {number}, row {done + 1} of {len(still)}", end="", file=sys.stderr)
    print(file=sys.stderr)


def is_done(row: Row, plan: Plan) -> bool:
    if plan.kills:  # one that was wrong needs a look, no further trials
        return bool(row.refused or row.wrong) or row.kills >= plan.kills
    return bool(row.refused) or row.trials >= plan.trials


def rows_so_far(path: Path, pairs: Sequence[tuple[str, str]]) -> list[Row]:
    """Returns the rows of a file of results, and a new one for each other pair of a strategy and a job."""
    before = [Row(**row) for row in json.loads(path.read_text())["rows"]] if path.exists() else []
    for row in before:
        row.from_steps = {int(step): count for step, count in row.from_steps.items()}
    known = {(row.strategy, row.kind) for row in before}
    new = [Row(*pair, refused=NOT_COMPILED.get(pair, "")) for pair in pairs if pair not in known]
    return before + new


def resumed_between(row: Row) -> dict[int, int]:
    """Returns how often a run went on from each step that is neither its begin nor its end."""
    return {step: count for step, count in row.from_steps.items() if 0 < step < ROUNDS}


def report(rows: Sequence[Row]) -> None:
    """Prints the rows that are no refusals, their sums by strategy, and what was wrong."""
    print(f"{'strategy':30}{'job':18}{'equal':>14}{'kills':>8}{'of launchers':>14}{'went on from':>14}")
    for row in rows:
        if not row.trials:
            continue
        between = resumed_between(row)
        print(f"{row.strategy:30}{row.kind:18}{row.equal:6} of {row.trials:<4}{row.kills:8}{row.launchers:14}"
              f"{sum(between.values()):7} x {len(between)} steps")  # fmt: skip
    print(f"\n{'strategy':30}{'jobs':>8}{'equal':>14}{'kills':>8}{'least':>8}{'resumed between':>18}")
    for name in dict.fromkeys(row.strategy for row in rows):
        own = [row for row in rows if row.strategy == name and row.trials]
        if own:
            between_all = sum(sum(resumed_between(row).values()) for row in own)
            print(f"{name:30}{len(own):8}{sum(row.equal for row in own):6} of {sum(row.trials for row in own):<4}"
                  f"{sum(row.kills for row in own):8}{min(row.kills for row in own):8}{between_all:18}")  # fmt: skip
    print(f"refused: {sum(bool(row.refused) for row in rows)}; equal {sum(row.equal for row in rows)} of "
          f"{sum(row.trials for row in rows)}, {sum(row.kills for row in rows)} kills")  # fmt: skip
    for row in rows:
        for wrong in row.wrong:
            print(f"{row.kind} under {row.strategy}: {wrong}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=100, help="of each model under each strategy")
    parser.add_argument("--kills", type=int, default=0, help="of each, instead of a number of trials")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the victims")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=USUAL_STRATEGIES, metavar="NAME")
    parser.add_argument("--jobs", nargs="+", choices=VARIANTS, default=[*KINDS], metavar="NAME")
    parser.add_argument("--all", action="store_true", help="every strategy with every job")
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which no further trial begins")
    parser.add_argument("--name", default="resume", help="of the file of results, whose trials count")
    parser.add_argument("--without", nargs="+", choices=(*VARIANTS, *STRATEGIES), default=[], metavar="NAME",
                        help="jobs and strategies that are left out")  # fmt: skip
    parser.add_argument("--one", nargs=3, metavar=("JOB", "STRATEGY", "RUN_DIR"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.environ["CI"] = "true"  # no moving bars
    if arguments.one:
        kind, strategy, run_dir = arguments.one
        train(None, kind, strategy, Path(run_dir))
        return 0
    began = time.monotonic()
    strategies, jobs = (STRATEGIES, VARIANTS) if arguments.all else (arguments.strategies, arguments.jobs)
    path = Path(__file__).parent / "results" / f"{arguments.name}.json"
    pairs = [(one, kind) for one in strategies for kind in jobs if not {one, kind} & set(arguments.without)]
    rows = rows_so_far(path, pairs)
    chosen = [row for row in rows if (row.strategy, row.kind) in set(pairs)]
    try:
        dice = random.Random(f"{arguments.seed} {sum(row.trials for row in rows)}")
        campaign(chosen, Plan(arguments.trials, arguments.kills, dice), began + 60 * arguments.minutes)
    finally:
        report(chosen)
        path.parent.mkdir(exist_ok=True)
        document = {
            "arguments": {
                "trials": arguments.trials,
                "kills": arguments.kills,
                "seed": arguments.seed,
                "all": arguments.all,
            },
            "torch": torch.__version__,
            "seconds": time.monotonic() - began,
            "rows": [asdict(row) for row in rows],
        }
        path.write_text(json.dumps(document, indent=1) + "\n")
    return int(any(row.wrong for row in chosen))


if __name__ == "__main__":
    sys.exit(main())
