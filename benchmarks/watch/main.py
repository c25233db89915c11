"""`headrace watch`: what following growing event files takes, how far behind it is, how fast it opens old ones."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import harness

from headrace.spec.events import LAUNCHER, RunStarted, WorkerStarted, encode

HERE = Path(__file__).resolve().parent
PROGRAM = "from headrace.cli import main; main()"
FLUSH_S = 0.25
"""As often as workers write their events."""
WARM_UP_S = 5.0


def begin(run_dir: Path, workers: int) -> None:
    (run_dir / "events").mkdir(parents=True)
    versions = {"headrace": "0.1.0"}
    started = RunStarted(
        LAUNCHER, 0.0, "mirrored", workers, "cpu", 1, 8 * workers, 10_000, "2026-01-01T00:00:00", {}, versions
    )
    (run_dir / "events" / "launcher.jsonl").write_text(encode(started) + "\n")
    for rank in range(workers):
        line = encode(WorkerStarted(rank, 0.0, "host", rank, "cpu", 1))
        (run_dir / "events" / f"rank-{rank}.jsonl").write_text(line + "\n")


def line(rank: int, step: int, time_s: float, seconds: float) -> str:
    """A step as `EventWriter.stepped` writes it."""
    return (
        f'{{"kind":"stepped","rank":{rank},"time_s":{time_s:.6f},"step":{step},"epoch":0,"examples":8,'
        f'"loss":{2.5 / (1 + step / 1000) + 0.01 * rank!r},"weight":8.0,"wait_s":{0.1 * seconds:.7f},'
        f'"compute_s":{0.5 * seconds:.7f},"exchange_s":{0.3 * seconds:.7f},"update_s":{0.1 * seconds:.7f}}}\n'
    )


class Growing:
    """Writes the events of all workers, in a thread, a few times a second; the last of each time happens then."""

    def __init__(self, run_dir: Path, workers: int, rate: float) -> None:
        self._files = [(run_dir / "events" / f"rank-{rank}.jsonl").open("a") for rank in range(workers)]
        self._rate = rate
        self.began = time.monotonic()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._write)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()
        for file in self._files:
            file.close()

    def _write(self) -> None:
        done = 0
        while not self._stopped.wait(FLUSH_S):
            now = time.monotonic() - self.began
            count = round(now * self._rate) - done
            for rank, file in enumerate(self._files):
                times = (now - (count - 1 - index) / self._rate for index in range(count))
                file.write("".join(line(rank, done + n, max(0.0, at), 1 / self._rate) for n, at in enumerate(times)))
                file.flush()
            done += count


@contextmanager
def watching(run_dir: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-c", PROGRAM, "watch", str(run_dir), "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        text = ""
        while not text.endswith("}\n"):
            text += process.stdout.readline()
        yield process, json.loads(text)["url"]
        process.terminate()


def messages(url: str) -> Iterator[dict[str, Any]]:
    with urllib.request.urlopen(f"{url}/stream") as reply:
        for each in reply:
            if each.startswith(b"data: "):
                yield json.loads(each[6:])


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1000


def follow(workers: int, rate: float, seconds: float) -> dict[str, list[float]]:
    """Follows files that grow, with one page open."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        begin(run_dir, workers)
        growing = Growing(run_dir, workers, rate)
        try:
            with watching(run_dir) as (process, url):
                lags: list[float] = []
                seen, count, size, before, opened = 0.0, 0, 0, (0.0, 0.0), time.monotonic()
                for message in messages(url):
                    now = time.monotonic()
                    if not before[0] and now > opened + WARM_UP_S:
                        before = now, cpu_s(process.pid)
                    until = message.get("detail", {}).get("run", {}).get("until_s", 0.0)
                    if before[0] and until > seen:
                        lags.append(now - growing.began - until)
                        count, size = count + 1, size + len(json.dumps(message))
                    seen = max(seen, until)
                    if now > opened + WARM_UP_S + seconds:
                        break
                passed = time.monotonic() - before[0]
                share = 100 * (cpu_s(process.pid) - before[1]) / passed
                figures = {
                    "% of a core": share,
                    "peak memory, MB": peak_mb(process.pid),
                    "behind, mean, s": sum(lags) / len(lags),
                    "behind, most, s": max(lags),
                    "messages a second": count / passed,
                    "kB a second to the page": size / passed / 1000,
                }
        finally:
            growing.stop()
    return {name: [value] for name, value in figures.items()}


def open_old(workers: int, rate: float, hours: float) -> dict[str, list[float]]:
    """Opens the run of some hours."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        begin(run_dir, workers)
        count = round(hours * 3600 * rate)
        for rank in range(workers):
            with (run_dir / "events" / f"rank-{rank}.jsonl").open("a") as file:
                file.writelines(line(rank, step, (step + 1) / rate, 1 / rate) for step in range(count))
        size = sum(file.stat().st_size for file in (run_dir / "events").iterdir())
        began = time.monotonic()
        with watching(run_dir) as (process, url):
            with urllib.request.urlopen(url) as reply:
                reply.read()
            figures = {"events, millions": count * workers / 1e6, "GB": size / 1e9}
            figures["page there, s"] = time.monotonic() - began
            for message in messages(url):
                run = message.get("detail", {}).get("run", {})
                if "whole curves, s" not in figures and run.get("step") == count:
                    figures["whole curves, s"] = time.monotonic() - began
                if run.get("step") == count and run["missing"] == 0:
                    break
            figures["all events read, s"] = time.monotonic() - began
            figures["peak memory, MB"] = peak_mb(process.pid)
    return {name: [value] for name, value in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["follow", "open"])
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--rate", type=float, help="events a second and worker; 50, or 2 to open")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--hours", type=float, default=8.0)
    parser.add_argument("--keep", action="store_true", help="write the figures to results/")
    chosen = parser.parse_args()
    if chosen.what == "follow":
        figures = follow(chosen.workers, chosen.rate or 50.0, chosen.seconds)
    else:
        figures = open_old(chosen.workers, chosen.rate or 2.0, chosen.hours)
    if chosen.keep:
        harness.report(HERE, chosen.what, "see the rows", figures, {})
    else:
        print("\n".join(f"{name:28}{values[0]:12.4g}" for name, values in figures.items()))


if __name__ == "__main__":
    main()
