"""Strikes every role of every strategy over hosts with every fault, and says how the run ended. See README.md."""

from __future__ import annotations

import argparse
import atexit
import errno
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).parents[1]))
from on_hosts import MASTER, enter, hosts
from one_rank import train

SETTLED = 20
"""Steps of rank 0 before a fault."""

FROZEN_S, DOWN_S = 6.0, 8.0
"""Three and four times the run's `timeout_s`."""

BEGINS_S, ENDS_S = 240.0, 60.0
"""How long a run may take until the fault, and from then on."""

EXACT = 1e-6
DISK_BYTES = 4_000_000
NAMED = 110
"""Characters of an error that a row shows."""


@dataclass(frozen=True)
class Trial:
    """A role of a strategy: where its ranks are, which of them is struck, None for the disk of all."""

    strategy: str
    on: tuple[int, ...]
    role: str
    victim: int | None


@dataclass
class Row:
    """How a run ended: the verdict, and what each rank said."""

    strategy: str
    role: str
    fault: str
    verdict: str
    seconds: float
    said: dict[int, str]

    def line(self) -> str:
        return f"| {self.strategy} | {self.role} | {self.fault} | {self.verdict} |"

    @property
    def is_bad(self) -> bool:
        """Whether the first word of the verdict is in capitals."""
        return self.verdict.split()[0].strip(":").isupper()


TRIALS = (
    Trial("Mirrored", (0, 1, 2), "rank 0", 0),
    Trial("Mirrored", (0, 1, 2), "another worker", 1),
    Trial("Mirrored", (0, 1, 2), "all", None),
    # It is for one host.
    Trial("CentralStorage", (0, 0, 0), "rank 0, owner of the storage", 0),
    Trial("CentralStorage", (0, 0, 0), "another worker", 1),
    Trial("CentralStorage", (0, 0, 0), "all", None),
    Trial("ParameterAveraging", (0, 1, 2), "rank 0", 0),
    Trial("ParameterAveraging", (0, 1, 2), "another worker", 1),
    Trial("ParameterAveraging", (0, 1, 2), "all", None),
    Trial("ParameterServer", (0, 1, 2, 3, 4), "rank 0", 0),
    Trial("ParameterServer", (0, 1, 2, 3, 4), "another worker", 1),
    Trial("ParameterServer", (0, 1, 2, 3, 4), "server", 3),
    Trial("ParameterServer", (0, 1, 2, 3, 4), "backup", 4),
    Trial("ParameterServer", (0, 1, 2, 3, 4), "all", None),
    Trial("Pipeline", (0, 1, 2), "rank 0", 0),
    Trial("Pipeline", (0, 1, 2), "middle stage", 1),
    Trial("Pipeline", (0, 1, 2), "last stage", 2),
    Trial("Pipeline", (0, 1, 2), "all", None),
)
NO_LINK = "cut from rank 2 alone"
FAULTS = ("kill -9", "SIGSTOP, SIGCONT", "link down", "link down and up", NO_LINK, "full disk")
NOWHERE = "02:00:00:00:00:ff"
"""The address of no network card: packets to it are lost."""


class Ranks:
    """The processes of one run, with what a fault needs."""

    def __init__(self, trial: Trial, fault: str, folder: Path, network: str) -> None:
        self.trial, self.folder, self._network = trial, folder, network
        # The disk of one host is full where each has its own; then there can be no checkpoints.
        shared = fault != "full disk" or trial.victim is None
        self.run_dirs = [folder / ("disk-0" if shared else f"disk-{rank}") / "run" for rank in range(len(trial.on))]
        told = {**MASTER, "HEADRACE_SECRET": secrets.token_hex(32), "WORLD_SIZE": str(len(trial.on)), "CI": "true"}
        self.pids = []
        self.codes: dict[int, int] = {}
        for rank, host in enumerate(trial.on):
            pid = os.fork()
            if pid == 0:
                os.environ.update(told, RANK=str(rank), HEADRACE_HOST=f"host-{host}")
                self._be(rank, host, shared)
            self.pids.append(pid)

    def _be(self, rank: int, host: int, saves: bool) -> NoReturn:
        code = 1
        try:
            log = os.open(self.folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            for descriptor in (1, 2):
                os.dup2(log, descriptor)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            enter(host)
            said = train(self.trial.strategy, self.run_dirs[rank], saves)
            (self.folder / f"{rank}.part").write_text(json.dumps(said))
            (self.folder / f"{rank}.part").rename(self.out(rank))
            # What a process does at its end, without what this one has begun before.
            atexit._run_exitfuncs()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def ended(self, rank: int) -> bool:
        """Returns whether a rank's process has ended."""
        if rank not in self.codes:
            pid, status = os.waitpid(self.pids[rank], os.WNOHANG)
            if pid:
                self.codes[rank] = os.waitstatus_to_exitcode(status)
        return rank in self.codes

    def end(self) -> None:
        """Ends all that have not ended."""
        for rank, pid in enumerate(self.pids):
            if not self.ended(rank):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

    def begun(self) -> bool:
        """Returns whether they have trained for a while, and backups hold what their servers have."""
        path = self.run_dirs[0] / "events/rank-0.jsonl"
        if not path.exists() or path.read_text().count('"stepped"') < SETTLED:
            return False
        launcher = self.run_dirs[0] / "events/launcher.jsonl"
        return self.trial.strategy != "ParameterServer" or (
            launcher.exists() and '"backup_ready"' in launcher.read_text()
        )

    def link(self, state: str) -> None:
        assert self.trial.victim is not None
        namespace = f"{self._network}-{self.trial.on[self.trial.victim]}"
        subprocess.run(["ip", "-n", namespace, "link", "set", "eth0", state], check=True)

    def cut(self) -> None:
        """Loses every packet between the victim and rank 2, silently."""
        assert self.trial.victim is not None
        for source, target in permutations((self.trial.on[self.trial.victim], self.trial.on[2])):
            way = f"neigh replace 10.97.0.{target + 1} lladdr {NOWHERE} dev eth0 nud permanent"
            subprocess.run(["ip", "-n", f"{self._network}-{source}", *way.split()], check=True)

    def mend(self) -> None:
        """Brings the network back."""
        for host in set(self.trial.on):
            subprocess.run(["ip", "-n", f"{self._network}-{host}", "link", "set", "eth0", "up"], check=True)
            subprocess.run(
                ["ip", "-n", f"{self._network}-{host}", "neigh", "flush", "dev", "eth0", "nud", "permanent"], check=True
            )

    def signal(self, number: int) -> None:
        assert self.trial.victim is not None
        if not self.ended(self.trial.victim):
            os.kill(self.pids[self.trial.victim], number)

    def fill_disk(self) -> None:
        """Leaves not one byte on the disk of the victim, or on that of all."""
        target = self.run_dirs[self.trial.victim or 0].parent / "filled"
        with target.open("wb", buffering=0) as file:
            for size in (65536, 4096, 1):
                try:
                    while True:
                        file.write(bytes(size))
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise

    def how(self, rank: int) -> dict[str, Any]:
        """Returns how a rank that has ended did so."""
        if self.out(rank).exists():
            return dict(json.loads(self.out(rank).read_text()))
        log = (self.folder / f"{rank}.log").read_text().strip().splitlines()
        return {"raw": f"exit code {self.codes.get(rank)}: {log[-1] if log else ''}"}

    def out(self, rank: int) -> Path:
        """Returns where a rank says how it ended."""
        return self.folder / f"{rank}.json"


@contextmanager
def small_disk(place: Path) -> Iterator[None]:
    """Mounts a disk of a few megabytes."""
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(place)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def trials() -> Iterator[tuple[Trial, str]]:
    """Yields every row: a role, and what strikes it."""
    for trial in TRIALS:
        for fault in FAULTS:
            # Processes of one host need no link; a disk that all share has no role.
            has_no_link = len(set(trial.on)) == 1 and fault in ("link down", "link down and up", NO_LINK)
            if has_no_link or (trial.victim is None and fault != "full disk"):
                continue
            if fault != NO_LINK or trial.victim == 1:
                yield trial, fault


def named(trial: Trial, fault: str) -> tuple[str, str, str]:
    return trial.strategy, trial.role, fault


def run_trial(trial: Trial, fault: str, network: str) -> Row:
    """Runs one job, strikes, and waits for its end."""
    with ExitStack() as stack:
        # Not a TemporaryDirectory, which every fork of this process would delete at its end.
        folder = Path(tempfile.mkdtemp())
        stack.callback(shutil.rmtree, folder)
        for rank in range(len(trial.on)):
            stack.enter_context(small_disk(folder / f"disk-{rank}"))
        began, every = time.monotonic(), range(len(trial.on))
        ranks = Ranks(trial, fault, folder, network)
        try:
            while not ranks.begun():
                if any(map(ranks.ended, every)) or time.monotonic() - began > BEGINS_S:
                    shown = {rank: describe(ranks.how(rank)) for rank in every}
                    return Row(trial.strategy, trial.role, fault, "NOT BEGUN", time.monotonic() - began, shown)
                time.sleep(0.05)
            struck = time.monotonic()
            for after_s, act in deeds(ranks, fault):
                time.sleep(max(0.0, struck + after_s - time.monotonic()))
                act()
            while time.monotonic() - struck < ENDS_S and not all(map(ranks.ended, every)):
                time.sleep(0.05)
            said = {rank: ranks.how(rank) if ranks.ended(rank) else {"hung": True} for rank in every}
            seconds = time.monotonic() - struck
        finally:
            ranks.end()
            ranks.mend()
            if logs := os.environ.get("KEEP_LOGS"):
                keep_logs(folder, Path(logs, f"{trial.strategy} {trial.role} {fault}".replace(" ", "-")))
        shown = {rank: describe(how) for rank, how in said.items()}
        return Row(trial.strategy, trial.role, fault, verdict(trial, fault, said), seconds, shown)


def deeds(ranks: Ranks, fault: str) -> Sequence[tuple[float, Callable[[], None]]]:
    """Returns what to do, and how many seconds after the first of it."""
    return {
        "kill -9": [(0.0, partial(ranks.signal, signal.SIGKILL))],
        "SIGSTOP, SIGCONT": [
            (0.0, partial(ranks.signal, signal.SIGSTOP)),
            (FROZEN_S, partial(ranks.signal, signal.SIGCONT)),
        ],
        "link down": [(0.0, partial(ranks.link, "down"))],
        "link down and up": [(0.0, partial(ranks.link, "down")), (DOWN_S, partial(ranks.link, "up"))],
        NO_LINK: [(0.0, ranks.cut)],
        "full disk": [(0.0, ranks.fill_disk)],
    }[fault]


def verdict(trial: Trial, fault: str, said: dict[int, dict[str, Any]]) -> str:
    """Says what came of a run, in capitals what is wrong."""
    struck = struck_rank(trial, fault, said)
    survivors = [rank for rank in said if rank != struck]
    if hung := [rank for rank, how in said.items() if "hung" in how]:
        return f"HUNG: rank {', '.join(map(str, hung))}"
    if wrong := [rank for rank, how in said.items() if how.get("off", 0.0) > EXACT]:
        return f"WRONG RESULT on rank {', '.join(map(str, wrong))}: off by {said[wrong[0]]['off']:g}"
    if raw := [rank for rank in said if "raw" in said[rank] and (rank in survivors or fault != "kill -9")]:
        return f"NO ERROR OF HEADRACE on rank {raw[0]}: {said[raw[0]]['raw']}"
    then = "" if struck is None else after(said[struck])
    ended = [rank for rank in survivors if "error" in said[rank]]
    if not ended:
        return f"goes on{then}"
    if len(ended) < len(survivors):
        return f"SOME END: rank {', '.join(map(str, ended))}: {said[ended[0]]['error'][:NAMED]}"
    if nameless := [rank for rank in ended if not names(trial, fault, said[rank]["error"])]:
        return f"NAMELESS on rank {nameless[0]}: {said[nameless[0]]['error'][:NAMED]}"
    return f"ends, and every rank names it{then}"


def struck_rank(trial: Trial, fault: str, said: dict[int, dict[str, Any]]) -> int | None:
    """Returns the rank that may end in another way than the others; None where none may."""
    if fault == NO_LINK:
        # Either of the two may be left behind.
        alone = [rank for rank in (trial.victim, 2) if rank is not None and "error" in said[rank]]
        return alone[0] if len(alone) == 1 else None
    return trial.victim


def names(trial: Trial, fault: str, error: str) -> bool:
    """Returns whether an error says which rank failed, and on which host; where all fail, any of them."""
    ranks = range(len(trial.on)) if trial.victim is None else (trial.victim, 2) if fault == NO_LINK else [trial.victim]
    return any(f"rank {rank} " in error and f"host-{trial.on[rank]}" in error for rank in ranks)


def after(victim: dict[str, Any]) -> str:
    """Returns what the struck process did, if it outlived the fault."""
    if "error" in victim:
        return f"; the struck one ends: {victim['error'].partition(':')[0]}"
    return "" if "raw" in victim else "; the struck one, too"


def describe(how: dict[str, Any]) -> str:
    if "hung" in how:
        return "had not ended"
    return str(how.get("error") or how.get("raw") or f"{how['status']}, off by {how['off']:g}")


def keep_logs(folder: Path, place: Path) -> None:
    place.mkdir(parents=True, exist_ok=True)
    for path in [*folder.glob("*.log"), *folder.glob("disk-*/run/events/*.jsonl")]:
        (place / f"{path.parent.parent.parent.name}-{path.name}").write_bytes(path.read_bytes())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="words that a row's strategy, role or fault must contain")
    given = parser.parse_args()
    network = os.environ.get("HEADRACE_HOSTS", "headrace")
    rows, wanted = [], [each for each in trials() if all(word in " ".join(named(*each)) for word in given.only)]
    hosts("up", "5")
    try:
        for trial, fault in wanted:
            rows.append(run_trial(trial, fault, network))
            keep(rows[-1])
            print(rows[-1].line(), f"{rows[-1].seconds:.0f} s", flush=True)
            if rows[-1].is_bad:
                print(json.dumps(rows[-1].said, indent=1), flush=True)
    finally:
        hosts("down")
    print(f"{len(rows)} rows, {sum(row.is_bad for row in rows)} of them bad")
    return int(any(row.is_bad for row in rows))


def keep(row: Row) -> None:
    """Writes a row to the results, in place of an earlier one of the same trial."""
    path = Path(__file__).parent / "results" / "host-faults.json"
    path.parent.mkdir(exist_ok=True)
    rows = {}
    for each in json.loads(path.read_text()) if path.exists() else []:
        rows[each["strategy"], each["role"], each["fault"]] = each
    rows[row.strategy, row.role, row.fault] = asdict(row)
    places = {named(*each): place for place, each in enumerate(trials())}
    path.write_text(json.dumps([rows[each] for each in sorted(rows, key=places.__getitem__)], indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
