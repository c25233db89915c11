"""What each job is slow by, and what may be said of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """A run, its verdict, and whether something can be done.

    Attributes:
        name: of the row.
        job: of `job.py`.
        kind: how the verdict begins; one of several.
        said: what it says.
        arguments: of `headrace train` besides.
        ill: whether the remedy must make it faster.
    """

    name: str
    job: str
    kind: tuple[str, ...]
    said: str = ""
    arguments: tuple[str, ...] = ()
    ill: bool = True


def two(strategy: str, workers: int = 2) -> tuple[str, ...]:
    return ("--strategy", strategy, "--workers", str(workers))


def few(strategy: str) -> tuple[str, ...]:
    return (*two(strategy), "--set", "batch=4")


def pipeline(options: str) -> tuple[str, ...]:
    return (*two(f"pipeline(2, {options})"), "--set", "batch=256", "--set", "epochs=8")


INPUT, EXCHANGE, COMPUTE = ("INPUT-BOUND",), ("EXCHANGE",), ("COMPUTE-BOUND",)
CROWDED, SHARED = ("TURN", "EXCHANGE", "COMPUTE", "STRAGGLER"), "share 2 cores"
CASES = (
    Case("a map that waits", "waits", INPUT, "map(waits)"),
    Case("a map that waits, one thread", "waits_in_a_thread", INPUT, "map(waits)"),
    Case("a map in Python", "burns", INPUT, "map(burns)"),
    Case("a map in Python, two workers", "burns_ahead", INPUT, "map(burns)", two("mirrored")),
    Case("a map that draws", "augments", INPUT, "map(augments)"),
    Case("a Dataset that decodes", "photographs", INPUT, "source"),
    Case("a Dataset that is far away", "far_away", INPUT, "source"),
    Case("a DataLoader with one worker", "loader", INPUT, "source"),
    Case("one worker's slow disk", "uneven_input", ("STRAGGLER",), "its input costs", two("mirrored")),
    Case("one slow worker", "straggler", ("STRAGGLER",), "computes", (*two("mirrored"), "--set", "epochs=20")),
    Case("a large table, downpour", "table", EXCHANGE, "exchange", few("downpour")),
    Case(
        "a large table, averaged through a server",
        "table",
        EXCHANGE,
        "exchange",
        few("parameter_averaging(period=1, via='server')"),
    ),
    Case("a large table, one server", "table", EXCHANGE, "exchange", few("parameter_server")),
    Case("an average each round", "table", EXCHANGE, "exchange", few("parameter_averaging(period=1)")),
    Case("four workers on two cores", "compute", CROWDED, SHARED, two("mirrored", 4)),
    Case("two servers beside two workers", "compute", CROWDED, SHARED, two("parameter_server(servers=2)")),
    Case("a pipeline of two micro-batches", "stages", ("BUBBLE",), "schedule's own", pipeline("micro_batches=2")),
    Case("a pipeline cut badly", "stages", ("IMBALANCE",), "longest", pipeline("micro_batches=8, partition=[4, 14]")),
    Case(
        "four stages on two cores",
        "stages",
        ("TRANSFER", "IMBALANCE", "BUBBLE"),
        "2 cores",
        two("pipeline(4, micro_batches=8)", 4),
    ),
    Case("convolutions, one device", "compute", COMPUTE, "computes", ill=False),
    Case("convolutions, mirrored", "compute", COMPUTE, "computes", two("mirrored"), ill=False),
    Case("a pipeline of 16 micro-batches", "stages", COMPUTE, "", pipeline("micro_batches=16"), ill=False),
)
