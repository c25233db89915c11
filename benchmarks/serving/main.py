"""How fast exported models are served, and what happens under too much load; see README.md."""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import alternate, ratio, report
from overload import overload
from servers import (
    HEADRACE,
    Load,
    alone,
    batch_size,
    binary_request,
    bytes_request,
    headrace_server,
    json_request,
    other_server,
    workspace,
    wrk,
)
from steady import steady

HERE = Path(__file__).parent
CLIENTS = 64


def infer(url: str, model: str) -> str:
    return f"{url}/v2/models/{model}/infer"


def throughput(folder: Path, model: Path, rounds: int, seconds: float, rivals: list[str]) -> None:
    """Single examples of 64 clients, beside onnxruntime alone, one at a time, and rivals."""
    binary, plain = binary_request(folder), json_request(folder)
    sizes: list[float] = []

    def ours(*options: str, as_json: bool = False) -> float:
        with headrace_server(model, *options) as (url, _):
            path = f"{url}/v1/models/model:predict" if as_json else infer(url, "model")
            wrk(path, plain if as_json else binary, CLIENTS, 2)
            load = wrk(path, plain if as_json else binary, CLIENTS, seconds)
            assert not load.not_answered + load.socket_errors, load
            if not options and not as_json:
                sizes.append(batch_size(url))
        return load.rate

    def beside() -> float:
        return alone(model / "model.onnx", round(sizes[-1]), seconds)[0]

    contestants = {
        "headrace serve": ours,
        "onnxruntime alone, same batch": beside,
        "headrace serve, one thread computes": lambda: ours("--threads", "1"),
        "headrace serve, one at a time": lambda: ours("--max-batch", "1", "--max-wait-ms", "0"),
        "headrace serve, JSON": lambda: ours(as_json=True),
    }
    for rival in rivals:
        name, _, python = rival.partition("=")
        contestants[name] = lambda name=name, python=python: _rival(name, python, model, folder, seconds)
    figures = alternate(contestants, rounds)
    ratios = {f"headrace serve / {name}": ratio(figures, "headrace serve", name) for name in list(figures)[1:]}
    print(f"examples computed together: {statistics.median(sizes):.1f}")
    report(HERE, "throughput", "examples/s", figures, ratios)


def _rival(name: str, python: str, model: Path, folder: Path, seconds: float) -> float:
    """Returns what a rival answers with batches of its own: Ray Serve to bytes, BentoML to JSON."""
    port = 8765
    request = json_request(folder, "images") if name == "bentoml" else bytes_request(folder)
    script = HERE / "rivals" / f"{name}_server.py"
    url = f"http://127.0.0.1:{port}/predict"
    with other_server([python, script, str(model / "model.onnx"), str(port)], url):
        wrk(url, request, CLIENTS, 3)
        load = wrk(url, request, CLIENTS, seconds)
        assert not load.not_answered + load.socket_errors, load
    return load.rate


def latency(folder: Path, model: Path, rounds: int, seconds: float) -> None:
    """At half of what the server can do, beside one inference."""
    binary = binary_request(folder)
    rows: dict[str, list[float]] = {"one inference": [], "median": [], "99th percentile": []}
    for _ in range(rounds):
        rows["one inference"].append(alone(model / "model.onnx", 1, 3)[1])
        with headrace_server(model) as (url, _):
            most = wrk(infer(url, "model"), binary, CLIENTS, 4).rate
            found = steady(infer(url, "model"), binary, most / 2, seconds)
        rows["median"].append(statistics.median(found))
        rows["99th percentile"].append(found[int(0.99 * len(found))])
        print(f"{len(found)} requests at {most / 2:.0f}/s: {[f'{each[-1]:.2f}' for each in rows.values()]} ms")
    report(HERE, "latency", "ms", rows, {"99th percentile / median": ratio(rows, "99th percentile", "median")})


def switch(folder: Path, model: Path, seconds: float) -> None:
    """New versions come under load; every request is answered."""
    binary, versions = binary_request(folder), folder / "model"
    shutil.copytree(model, versions / "1")
    total, failed = 0, 0
    with headrace_server(versions) as (url, _):
        result: list[Load] = []
        load = threading.Thread(target=lambda: result.append(wrk(infer(url, "model"), binary, CLIENTS, seconds)))
        load.start()
        number = 1
        while load.is_alive():
            number += 1
            shutil.copytree(model, folder / "next")
            (folder / "next").rename(versions / str(number))
            load.join(4)
        (found,) = result
        total, failed = found.answers, found.not_answered + found.socket_errors
        with urllib.request.urlopen(f"{url}/v2/models/model") as reply:
            print(reply.read().decode()[:80])
    print(f"{number - 1} new versions under load: {failed} of {total:,} requests failed")


def cold(folder: Path, model: Path, rounds: int) -> None:
    """From the command to the first answer."""
    binary = binary_request(folder)
    headers = dict(line.split(": ") for line in binary.header_lines())
    seconds = []
    for _ in range(rounds):
        began = time.monotonic()
        command = [HEADRACE, "serve", model, "--port", "8766"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            while True:
                try:
                    request = urllib.request.Request(
                        infer("http://127.0.0.1:8766", "model"), binary.body.read_bytes(), headers
                    )
                    with urllib.request.urlopen(request, timeout=5) as reply:
                        assert reply.status == 200
                    break
                except OSError:
                    time.sleep(0.005)
            seconds.append(time.monotonic() - began)
            process.terminate()
    report(HERE, "cold", "s", {"command to first answer": seconds}, {})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["throughput", "latency", "switch", "overload", "cold"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6)
    parser.add_argument("--clients", type=int, default=3200, help="overload: 10 x (256 + 2 x 32) by default")
    parser.add_argument("--rival", action="append", default=[], metavar="NAME=PYTHON", help="bentoml or ray_serve")
    chosen = parser.parse_args()
    with workspace() as (folder, kept):
        # Its name in the addresses.
        model = kept
        if chosen.what == "throughput":
            throughput(folder, model, chosen.rounds, chosen.seconds, chosen.rival)
        elif chosen.what == "latency":
            latency(folder, model, chosen.rounds, chosen.seconds)
        elif chosen.what == "switch":
            switch(folder, model, chosen.seconds)
        elif chosen.what == "overload":
            overload(folder, model, chosen.seconds, chosen.clients)
        else:
            cold(folder, model, chosen.rounds)
