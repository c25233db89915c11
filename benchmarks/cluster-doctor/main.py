"""`headrace doctor` on four hosts: how exactly it measures links, and whether it finds what is wrong."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from delay import ADDRESSES, delayed_link
from on_hosts import HOSTS, MASTER, hosts

from headrace.spec.cluster import Cluster

HERE = Path(__file__).parent
COUNT = 4
# Others may have hosts here, too.
SPACE = os.environ.setdefault("HEADRACE_HOSTS", "doctor")
Found = tuple[Cluster, list[str], float]


def doctor(
    change: Callable[[int, Path, dict[str, str]], None] = lambda host, folder, environment: None,
    count: int = COUNT,
    first: str = MASTER["MASTER_ADDR"],
) -> Found:
    """Returns what was measured, what is said to be wrong, and how long it took.

    A host's folder may be changed; `first` is the address of the first host.
    """
    secret = secrets.token_hex(32)
    with tempfile.TemporaryDirectory() as top:
        ranks = []
        start = time.perf_counter()
        for rank in range(count):
            folder = Path(top, str(rank))
            folder.mkdir()
            shutil.copy(HERE.parents[1] / "examples" / "digits" / "job.py", folder)
            environment = {
                **os.environ,
                **MASTER,
                "MASTER_ADDR": first,
                "RANK": str(rank),
                "WORLD_SIZE": str(count),
                "HEADRACE_SECRET": secret,
            }
            change(rank, folder, environment)
            command = [str(HOSTS), "exec", str(rank), sys.executable, "-c", "from headrace.cli import main; main()"]
            command += ["doctor", "job.py", "--json"]
            ranks.append(subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE))
        said = [rank.communicate()[0] for rank in ranks]
        took = time.perf_counter() - start
        document: dict[str, Any] = json.loads(said[0])
        wrong = [check["found"] for check in document["checks"] if check["verdict"] != "ok"]
        return Cluster.load(Path(top, "0", "cluster.measured.toml")), wrong, took


def limit(device: str, rate: str, *inside: str) -> None:
    """Limits one direction."""
    tbf = ["tc", "qdisc", "replace", "dev", device, "root", "tbf", "rate", rate, "burst", "128kb", "latency", "100ms"]
    subprocess.run([*inside, *tbf], check=True)


def exactness(rate: int) -> dict[str, float]:
    """Returns the errors of all links whose rate is known, and the seconds that it took."""
    hosts("up", str(COUNT), "--rate", f"{rate}mbit")
    cluster, wrong, took = doctor()
    errors = [abs(link.bytes_per_s * 8 / 1e6 / rate - 1) for link in cluster.links]
    return {
        "links": len(errors),
        "median": statistics.median(errors),
        "worst": max(errors),
        "s": took,
        "wrong": len(wrong),
    }


def latency(ms: float) -> dict[str, float]:
    """Returns the larger error of both directions of a link with a known delay."""
    hosts("up", "2")
    with delayed_link((f"{SPACE}-0", f"{SPACE}-1"), ms / 1e3):
        cluster, _, took = doctor(count=2, first=ADDRESSES[0])
    return {"worst": max(abs(link.latency_s * 1e3 / ms - 1) for link in cluster.links), "s": took}


def slow_link() -> list[str]:
    """Host 2 sends a quarter of what the others do."""
    hosts("up", str(COUNT), "--rate", "200mbit")
    limit("eth0", "50mbit", "ip", "netns", "exec", f"{SPACE}-2")
    return doctor()[1]


def shared_switch() -> list[str]:
    """Hosts 2 and 3 are behind a switch whose link to the others carries what one host does."""
    hosts("up", str(COUNT), "--rate", "200mbit")
    subprocess.run(["ip", "link", "add", "switch", "type", "bridge"], check=True)
    subprocess.run(["ip", "link", "add", "trunk0", "type", "veth", "peer", "name", "trunk1"], check=True)
    try:
        places = {"trunk0": SPACE, "trunk1": "switch", f"{SPACE}-2": "switch", f"{SPACE}-3": "switch"}
        for device, bridge in places.items():
            subprocess.run(["ip", "link", "set", device, "master", bridge, "up"], check=True)
        subprocess.run(["ip", "link", "set", "switch", "up"], check=True)
        limit("trunk0", "200mbit")
        limit("trunk1", "200mbit")
        return doctor()[1]
    finally:
        subprocess.run(["ip", "link", "delete", "trunk0"], check=True)
        subprocess.run(["ip", "link", "delete", "switch"], check=True)


def other_job() -> list[str]:
    """Host 1 has another job file."""

    def change(host: int, folder: Path, environment: dict[str, str]) -> None:
        if host == 1:
            (folder / "job.py").write_text((folder / "job.py").read_text() + "\n")

    hosts("up", str(COUNT), "--rate", "200mbit")
    return doctor(change)[1]


def other_version() -> list[str]:
    """Host 3 has another version of torch."""

    def change(host: int, folder: Path, environment: dict[str, str]) -> None:
        if host == 3:
            (folder / "sitecustomize.py").write_text("import torch\ntorch.__version__ = '2.12.0'\n")
            environment["PYTHONPATH"] = f"{folder}:{environment.get('PYTHONPATH', '')}"

    hosts("up", str(COUNT), "--rate", "200mbit")
    return doctor(change)[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    results: dict[str, Any] = {}
    try:
        for rate in (20, 100, 200, 1000):
            results[f"{rate} Mbit/s"] = [exactness(rate) for _ in range(rounds)]
            print(rate, results[f"{rate} Mbit/s"], flush=True)
        for ms in (1, 5, 20):
            results[f"{ms} ms"] = [latency(ms) for _ in range(rounds)]
            print(f"{ms} ms", results[f"{ms} ms"], flush=True)
        for case in (slow_link, shared_switch, other_job, other_version):
            results[case.__name__] = [case() for _ in range(rounds)]
            print(case.__name__, results[case.__name__], flush=True)
        results["load"] = os.getloadavg()[1]
    finally:
        hosts("down")
    (HERE / "results" / "cluster-doctor.json").write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
