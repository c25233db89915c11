"""Ten thousand hostile connections to a server: what they cost it in memory, and a worker beside them in throughput."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import socket
import statistics
import sys
import time
from contextlib import suppress
from datetime import date
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from headrace.transport.base import Slots
from headrace.transport.remote_client import RemoteClientTransport
from headrace.transport.remote_server import RemoteServerTransport
from transport.outside import greeting

SECRET = b"of the run that is attacked....."
SLOTS = Slots([4 << 20])
KINDS = {
    "silent": b"",
    "half a greeting": greeting()[:20],
    "a greeting": greeting(),
    "the head of 2^62 bytes": greeting() + b"\6" + (1 << 62).to_bytes(8, "big"),
    "a part of 128 kB": greeting() + b"\6" + (1 << 17).to_bytes(8, "big") + bytes(100_000),
    "noise": bytes(range(255, -1, -1)) * 8,
}
_BEHIND = 50
RESULTS = Path(__file__).parent / "results" / "connections.json"


def serve(told: Connection, over: Event) -> None:
    """A port that answers every push with a pull."""
    port = RemoteServerTransport(SLOTS, SLOTS, secret=SECRET)
    told.send(port.address)
    while not over.is_set():
        for mail in port.receive(0.05):
            if mail.message:
                port.release(mail.peer, [0])
                port.send(mail.peer, b"answer", [0])
    port.close()


def stand_in(told: Connection, over: Event) -> None:
    """A stand-in for the server that accepts connections and ends them, so that attacking costs the same."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        listener.settimeout(0.05)
        told.send(f"tcp://127.0.0.1:{listener.getsockname()[1]}")
        while not over.is_set():
            with suppress(TimeoutError):
                listener.accept()[0].close()


def work(address: str, rounds: multiprocessing.sharedctypes.Synchronized[int], over: Event) -> None:
    """A genuine link that pushes and pulls."""
    link = RemoteClientTransport(address, SLOTS, SLOTS, secret=SECRET)
    while not over.is_set():
        link.send(b"push", [0])
        while link.receive(1.0) is None:
            continue
        rounds.value += 1
    link.close()


def attack(orders: Connection, count: int, rate: float) -> None:
    """Opens so many connections to a given address, waits for none, and holds them until it gets another address."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    said = list(KINDS.values())
    while address := orders.recv():
        host, _, number = address.removeprefix("tcp://").rpartition(":")
        made, began = [], time.monotonic()
        for index in range(count):
            each = socket.socket()
            each.setblocking(False)
            each.connect_ex((host, int(number)))
            made.append(each)
            # By now it may have come through.
            earlier = max(0, index - _BEHIND)
            with suppress(OSError):
                made[earlier].send(said[earlier % len(said)])
            ahead = index / rate - (time.monotonic() - began)
            if ahead > 0.002:
                time.sleep(ahead)
        orders.send((len(made), time.monotonic() - began))
        orders.recv()
        for each in made:
            each.close()
        orders.send("closed")


def resident(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("a process without memory")


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--rate", type=float, default=2_000.0, help="connections a second")
    parser.add_argument("--stand-s", type=float, default=3.0, help="how long they stand")
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    over, rounds = spawn.Event(), spawn.Value("q", 0)
    pipes = [spawn.Pipe() for _ in range(3)]
    server = spawn.Process(target=serve, args=(pipes[0][1], over))
    other = spawn.Process(target=stand_in, args=(pipes[1][1], over))
    server.start(), other.start()
    addresses = {"server": pipes[0][0].recv(), "stand-in": pipes[1][0].recv()}
    worker = spawn.Process(target=work, args=(addresses["server"], rounds, over))
    attacker = spawn.Process(target=attack, args=(pipes[2][1], arguments.connections, arguments.rate))
    worker.start(), attacker.start()
    pid, orders = server.pid, pipes[2][0]
    assert pid is not None
    while rounds.value < 50:
        time.sleep(0.05)
    base, quiet_descriptors = resident(pid), descriptors(pid)
    figures: dict[str, list[float]] = {f"{whom} {when}": [] for whom in addresses for when in ("opening", "standing")}
    peaks: dict[str, list[int]] = {whom: [] for whom in addresses}
    held, opened = 0, []
    for _ in range(arguments.turns):
        for whom, address in addresses.items():
            peak = 0

            def watch(until_s: float | None, when: str, whom: str = whom) -> None:
                nonlocal peak, held
                began, before = time.monotonic(), rounds.value
                while not orders.poll(0.01) if until_s is None else time.monotonic() - began < until_s:
                    peak = max(peak, resident(pid))
                    held = max(held, descriptors(pid))
                    time.sleep(0.01)
                figures[f"{whom} {when}"].append((rounds.value - before) / (time.monotonic() - began))

            orders.send(address)
            watch(None, "opening")
            opened.append(orders.recv()[0])
            watch(arguments.stand_s, "standing")
            orders.send("close")
            orders.recv()
            peaks[whom].append(peak - base)
    over.set()
    orders.send("")
    for process in (worker, attacker, server, other):
        process.join()
    medians = {name: statistics.median(values) for name, values in figures.items()}
    document = {
        "date": date.today().isoformat(),
        "arguments": vars(arguments),
        "opened": opened,
        "resident before": base,
        "descriptors before": quiet_descriptors,
        "descriptors at most": held,
        "more resident at most": peaks,
        "round trips of 4 MiB a second": figures,
        "median": medians,
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(document, indent=1) + "\n")
    most = {whom: max(values) / 2**20 for whom, values in peaks.items()}
    print(f"memory: {most['server']:.1f} MiB more at most ({most['stand-in']:.1f} undisturbed)")
    print(f"descriptors: {quiet_descriptors} before, {held} at most")
    for when in ("opening", "standing"):
        ours, theirs = medians[f"server {when}"], medians[f"stand-in {when}"]
        print(f"{when}: {ours:.1f} round trips a second, {theirs:.1f} undisturbed: {ours / theirs:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
