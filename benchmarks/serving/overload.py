"""Ten times as many clients as the server holds requests; each asks again as soon as it is answered or refused."""

from __future__ import annotations

import http.client
import re
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from servers import Load, Request, binary_request, free_port, headrace_server, metrics, wrk

_HEALTH_MS, _RECOVERY_S, _GROWTH_MB, _LATE_GROWTH = 100, 1.0, 256, 1.1
_PROBE_S, _CONNECTING_S = 0.05, 2.0


@dataclass
class Probes:
    """What is seen from outside while the load runs.

    Attributes:
        health: seconds after the begin, and ms, of each request for health at the port of the probes, over a connection
            of its own.
        beside: the same at the port of the predictions.
        resident_mb: of the server.
        wrong: answers that are neither a prediction nor a 429 that says when to come again.
    """

    health: list[tuple[float, float]] = field(default_factory=list)
    beside: list[tuple[float, float]] = field(default_factory=list)
    resident_mb: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def overload(folder: Path, model: Path, seconds: float, clients: int) -> None:
    """Prints what was seen; raises SystemExit where a claim does not hold."""
    request = binary_request(folder)
    port = free_port()
    with headrace_server(model, "--health-port", str(port)) as (url, pid):
        infer = f"{url}/v2/models/model/infer"
        most = wrk(infer, request, 64, 4).rate
        before = resident_mb(pid)
        result: list[Load] = []
        load = threading.Thread(target=lambda: result.append(wrk(infer, request, clients, seconds)))
        load.start()
        seen, start = Probes(), time.monotonic()
        probes = [
            threading.Thread(target=_repeat, args=(load.is_alive, each))
            for each in (lambda: _health(f"http://127.0.0.1:{port}", start, seen.health),
                         lambda: _health(url, start, seen.beside), lambda: seen.resident_mb.append(resident_mb(pid)),
                         lambda: _predict(infer, request, seen))
        ]  # fmt: skip
        for probe in probes:
            probe.start()
        load.join()
        ended = time.monotonic()
        recovered = _recovered(infer, request, ended)
        for probe in probes:
            probe.join()
        codes = set(re.findall(r'headrace_serve_requests_total{code="(\d+)"', metrics(url)))
    _report(most, before, clients, seconds, result[0], seen, recovered, codes)


def _report(
    most: float,
    before: float,
    clients: int,
    seconds: float,
    load: Load,
    seen: Probes,
    recovered: float,
    codes: set[str],
) -> None:
    peak = max(seen.resident_mb)
    half = len(seen.resident_mb) // 2
    early, late = max(seen.resident_mb[:half]), max(seen.resident_mb[half:])
    answered = (load.answers - load.not_answered) / seconds
    print(f"64 clients: {most:.0f}/s. {clients} clients, {seconds:.0f} s: {answered:.0f}/s answered, "
          f"{load.not_answered / seconds:.0f}/s refused, {load.socket_errors} socket errors, {codes}")  # fmt: skip
    connecting, later = _told("health at its own port", seen.health)
    _told("health at the port of the predictions", seen.beside)
    print(f"memory: {before:.0f} MB before, {early:.0f} MB in the first half, {late:.0f} MB in the second")
    print(f"10 predictions without a refusal {recovered:.2f} s after the end")
    claims = {
        f"health within {_HEALTH_MS} ms once all are connected": later[-1] <= _HEALTH_MS,
        f"health within {_HEALTH_MS} ms while they connect": max(connecting) <= _HEALTH_MS,
        "predictions, or 429 with Retry-After, alone": not seen.wrong and codes <= {"200", "429"},
        "no connection fails": load.socket_errors == 0,
        f"memory grows by {_GROWTH_MB} MB at most, and not on and on": peak - before <= _GROWTH_MB
        and late <= early * _LATE_GROWTH,
        f"recovers within {_RECOVERY_S:.0f} s": recovered <= _RECOVERY_S,
    }
    for claim, holds in claims.items():
        print(f"{'holds ' if holds else 'MISSED'}  {claim}")
    if seen.wrong:
        print(seen.wrong[:3])
    if not all(claims.values()):
        raise SystemExit(1)


def _told(name: str, found: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Prints how long requests for health took; returns the ms while all connect, and those after that, sorted."""
    connecting = [ms for at, ms in found if at < _CONNECTING_S]
    later = sorted(ms for at, ms in found if at >= _CONNECTING_S)
    slow = later[int(0.99 * (len(later) - 1))]
    print(f"{name}: {max(connecting):.0f} ms at most while all connect at once, {_CONNECTING_S:.0f} s; then, "
          f"{len(later)} times: median {statistics.median(later):.1f} ms, 99 % {slow:.1f} ms, most "
          f"{later[-1]:.1f} ms")  # fmt: skip
    return connecting, later


def _repeat(going: Callable[[], bool], probe: Callable[[], None]) -> None:
    while going():
        probe()
        time.sleep(_PROBE_S)


def _health(url: str, start: float, found: list[tuple[float, float]]) -> None:
    began = time.monotonic()
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    connection.request("GET", "/v2/health/live")
    assert connection.getresponse().status == 200
    found.append((began - start, (time.monotonic() - began) * 1e3))
    connection.close()


def _predict(infer: str, request: Request, seen: Probes) -> int:
    parts = urlsplit(infer)
    connection = http.client.HTTPConnection(parts.netloc, timeout=30)
    headers = dict(line.split(": ") for line in request.header_lines())
    connection.request("POST", parts.path, request.body.read_bytes(), headers)
    reply = connection.getresponse()
    text = reply.read()
    if reply.status != 200 and not (reply.status == 429 and int(reply.headers["Retry-After"]) >= 1):
        seen.wrong.append(f"{reply.status} {reply.headers} {text[:200]!r}")
    connection.close()
    return reply.status


def _recovered(infer: str, request: Request, ended: float) -> float:
    """Returns the seconds until ten predictions in turn were not refused."""
    good = 0
    seen = Probes()
    while good < 10:
        good = good + 1 if _predict(infer, request, seen) == 200 else 0
        assert time.monotonic() - ended < 60, "the server does not recover"
    return time.monotonic() - ended


def resident_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 1e6
