"""What it costs to write a step's event and to read it: headrace, and ways without msgspec, in one process in turn."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import orjson
from harness import alternate, ratio, report

from headrace.spec.events import Stepped, decode, encode
from headrace.watch.steps import LineReader
from headrace.worker.events import EventWriter

COUNT = 20_000
VALUES = (0, 12.3456789, 12345, 3, 64, 0.12345678901234567, 64.0, 0.0001234, 0.0123456, 0.0023456, 0.0012345)


@dataclass(frozen=True)
class Plain:
    """A step as a dataclass."""

    rank: int
    time_s: float
    step: int
    epoch: int
    examples: int
    loss: float | None
    weight: float
    wait_s: float
    compute_s: float
    exchange_s: float
    update_s: float


def asdict_and_json(event: Plain) -> str:
    return json.dumps({"kind": "stepped", **asdict(event)}, separators=(",", ":"))


def by_hand(event: Plain) -> str:
    """A format of fixed text, which knows the fields of this one kind."""
    return (
        f'{{"kind":"stepped","rank":{event.rank},"time_s":{event.time_s:.7f},"step":{event.step},'
        f'"epoch":{event.epoch},"examples":{event.examples},"loss":{event.loss!r},"weight":{event.weight!r},'
        f'"wait_s":{event.wait_s:.7f},"compute_s":{event.compute_s:.7f},"exchange_s":{event.exchange_s:.7f},'
        f'"update_s":{event.update_s:.7f}}}'
    )


def json_and_constructor(line: bytes) -> Plain:
    plain = json.loads(line)
    plain.pop("kind")
    return Plain(**plain)


def split(line: bytes) -> tuple[int, float]:
    """The step and the time alone, of a line whose first fields are known."""
    _, _, time_s, step, _ = line.split(b",", 4)
    return int(step.removeprefix(b'"step":')), float(time_s.removeprefix(b'"time_s":'))


def each(work: Callable[[object], object], what: object) -> float:
    """Returns us of processor time a step."""
    began = time.thread_time()
    for _ in range(COUNT):
        work(what)
    return 1e6 * (time.thread_time() - began) / COUNT


def written(folder: Path) -> float:
    """Returns us a step of what a worker calls, with the writing."""
    writer = EventWriter(folder, 0, time.monotonic())
    began = time.thread_time()
    for step in range(COUNT):
        writer.stepped(step, *VALUES[3:7], -1, *VALUES[7:])
    writer.close()
    return 1e6 * (time.thread_time() - began) / COUNT


def arrays(line: bytes) -> float:
    """Returns us a step of what `headrace watch` reads."""
    reader = LineReader()
    began = time.thread_time()
    reader.read([line] * COUNT, "rank-0.jsonl")
    reader.steps()
    return 1e6 * (time.thread_time() - began) / COUNT


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    event, plain = Stepped(*VALUES), Plain(*VALUES)
    line = encode(event).encode()
    assert json.loads(asdict_and_json(plain)) == json.loads(by_hand(plain)) == json.loads(line)
    assert decode(line) == event
    assert json_and_constructor(line) == plain
    with tempfile.TemporaryDirectory() as folder:
        figures = alternate(
            {
                "encode": partial(each, encode, event),
                "asdict, json.dumps": partial(each, asdict_and_json, plain),
                "text by hand": partial(each, by_hand, plain),
                "EventWriter.stepped": partial(written, Path(folder)),
                "decode": partial(each, decode, line),
                "json.loads, constructor": partial(each, json_and_constructor, line),
                "orjson.loads": partial(each, orjson.loads, line),
                "split": partial(each, split, line),
                "LineReader": partial(arrays, line),
            },
            arguments.rounds,
        )
    ratios = {
        f"{ours} / {theirs}": ratio(figures, ours, theirs)
        for ours, rivals in (
            ("encode", ("asdict, json.dumps", "text by hand")),
            ("decode", ("json.loads, constructor", "orjson.loads", "split")),
        )
        for theirs in rivals
    }
    report(Path(__file__).parent, "events", "us a step", figures, ratios)
