"""Throws bytes at the readers of foreign bytes, led by which branches they reach (Atheris, libFuzzer).

    scripts/fuzz frames 10000000
    scripts/fuzz coverage

`run` keeps what reached something new in the reader's corpus, and adds a line to results/fuzz.jsonl. `coverage` reads
every corpus once and says which of the readers' branches that reached. Needs `pip install atheris coverage`.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from datetime import date
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
CORPUS = TESTS / "fuzz" / "corpus"
SCRATCH = TESTS.parent / ".cache" / "fuzz"
RESULTS = TESTS / "fuzz" / "results" / "fuzz.jsonl"
INPUTS = ("clusters", "events", "images", "parquet", "requests", "settings", "tables", "tars", "tfrecords")
NAMES = ("frames", "handshakes", "headers", "logs", "manifests", "messages", "snapshots")
READ = (
    "headrace.transport.frames",
    "headrace.transport.base",
    "headrace.parameter_server.wire",
)
READ += (
    "headrace.checkpoint.manifest",
    "headrace.checkpoint.header",
    "headrace.parameter_server.replication.log",
    "headrace.parameter_server.server.snapshots",
)
READ += ("headrace.parameter_server.core.leases", "headrace.spec.plain")

LIBRARIES = ("images", "parquet", "tables")
"""Readers whose branches are those of libraries in C++, which Atheris does not see: they get noise in sound files."""
READ_INPUTS = (
    *("headrace.cli.jobfile", "headrace.data.sources.records", "headrace.data.sources.webdataset"),
    *("headrace.data.sources.tables", "headrace.data.sources.arrow", "headrace.data.transforms"),
    *("headrace.export.tensors", "headrace.report.model.events", "headrace.serving.protocols.http"),
    *("headrace.serving.protocols.open_inference", "headrace.serving.protocols.tensorflow_rest"),
    *("headrace.spec.files.clusters", "headrace.spec.files.tables", "headrace.spec.plain", "headrace.spec.events.run"),
    *("headrace.watch.records", "headrace.watch.state", "headrace.watch.steps", "tomllib._parser"),
)

READING = {
    "headrace.transport.frames": ("kind_of", "expect_number", "Reassembler"),
    "headrace.transport.base": ("match", "_describe"),
    "headrace.parameter_server.wire": ("decode", "difference", "_compare", "_words"),
    "headrace.parameter_server.replication.log": ("pushed_by", "parse_entry", "unpack"),
    "headrace.parameter_server.server.snapshots": ("unpack", "_refuse"),
    "headrace.parameter_server.core.leases": ("numbers_in",),
    "headrace.spec.plain": ("from_plain", "_check"),
    "headrace.checkpoint.manifest": ("decode", "_record", "_in_order", "_integer", "_object", "_text", "rank"),
    "headrace.checkpoint.header": ("length", "parse", "_entry", "end"),
}
"""The functions and classes that read; the rest of those modules writes."""

LONGEST_BYTES = 4096
MOST_S = 0.5
"""Of processor time, for one piece of bytes."""
MOST_IMAGE_S = 10.0
"""Of an image: a few hundred bytes may be 2^28 pixels of one colour."""
MOST_KEPT = 16 << 20
MEASURED_EVERY = 1000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb in ("run", "inside"):
        parsed = verbs.add_parser(verb)
        parsed.add_argument("reader", choices=(*NAMES, *INPUTS))
        parsed.add_argument("--executions", type=int, default=10_000_000)
        parsed.add_argument("--seed", type=int, default=1)
        parsed.add_argument("--seconds", type=int, default=0, help="of fuzzing, at most; 0 for any")
    verbs.add_parser("coverage")
    arguments = parser.parse_args()
    sys.path.insert(0, str(TESTS))
    if arguments.verb == "coverage":
        return measure()
    if arguments.verb == "run" and arguments.reader in LIBRARIES:
        return noise(arguments.reader, arguments.executions, arguments.seed, arguments.seconds)
    if arguments.verb == "run":
        return run(arguments.reader, arguments.executions, arguments.seed, arguments.seconds)
    return inside(arguments.reader, arguments.executions, arguments.seed, arguments.seconds)


def run(reader: str, executions: int, seed: int, seconds: int) -> int:
    """Fuzzes in a process of its own, because the fuzzer ends the one that it is in."""
    from fuzz.input_seeds import input_seeds
    from fuzz.inputs import GIVEN
    from fuzz.seeds import seeds

    folder = corpus(reader)
    folder.mkdir(parents=True, exist_ok=True)
    for number, content in enumerate(
        each for each in (input_seeds if reader in INPUTS else seeds)(reader) if len(each) <= LONGEST_BYTES
    ):
        (folder / f"seed-{number:02d}").write_bytes(content)
    began = time.monotonic()
    command = [sys.executable, __file__, "inside", reader, "--executions", str(executions), "--seed", str(seed)]
    command += ["--seconds", str(seconds)]
    with tempfile.TemporaryDirectory(prefix="headrace-fuzz-", dir="/dev/shm") as files:
        env = {**os.environ, GIVEN: files}
        ended = subprocess.run(command, env=env, stderr=subprocess.PIPE, text=True, check=False)
    _write_result(reader, int(_stat(ended.stderr, "number_of_executed_units")), began, seed, ended.returncode)
    if ended.returncode:
        print(ended.stderr[-4000:], file=sys.stderr)
    return ended.returncode


def noise(reader: str, executions: int, seed: int, seconds: int) -> int:
    """Gives a reader sound files of which a part is noise; what it raises ends it, after the input was printed."""
    from fuzz.input_seeds import input_seeds
    from fuzz.inputs import INPUTS as readers

    began, chance, seeds = time.monotonic(), random.Random(seed), [b"", *input_seeds(reader)]
    count = 0
    while count < executions and not 0 < seconds < time.monotonic() - began:
        sound = chance.choice(seeds)
        first, stop = sorted((chance.randint(0, len(sound)), chance.randint(0, len(sound))))
        content = sound[:first] + chance.randbytes(chance.randint(0, 8)) + sound[chance.choice((first, stop)) :]
        took = time.thread_time()
        try:
            readers[reader](content)
            took = time.thread_time() - took
            assert took < MOST_IMAGE_S, f"{took:.2f} s"
        except Exception:
            print(f"{reader}: {content!r}", file=sys.stderr)
            _write_result(reader, count, began, seed, 1)
            raise
        count += 1
    _write_result(reader, count, began, seed, 0)
    return 0


def _write_result(reader: str, executions: int, began: float, seed: int, code: int) -> None:
    line = {"date": date.today().isoformat(), "reader": reader, "executions": executions}
    line |= {"seconds": round(time.monotonic() - began, 1), "seed": seed, "exit": code}
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(json.dumps(line))


def corpus(reader: str) -> Path:
    """Returns the folder of what has reached something new; that of files and requests is not kept."""
    return (SCRATCH if reader in INPUTS else CORPUS) / reader


def _stat(text: str, name: str) -> str:
    return next((line.split()[-1] for line in text.splitlines() if name in line), "0")


def inside(reader: str, executions: int, seed: int, seconds: int) -> int:
    """Never comes back."""
    import atheris

    read: Callable[[bytes], None]
    if reader in INPUTS:
        with atheris.instrument_imports(include=list(READ_INPUTS)):
            from fuzz.inputs import INPUTS as readers
        read = readers[reader]
    else:
        with atheris.instrument_imports(include=list(READ)):
            from fuzz.readers import READERS
        read = READERS[reader]
    count = 0

    def once(data: bytes) -> None:
        nonlocal count
        count += 1
        measured = count % MEASURED_EVERY == 0
        if measured:
            tracemalloc.start()
        began = time.thread_time()
        read(data)
        took = time.thread_time() - began
        if measured:
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert peak < MOST_KEPT, f"{len(data)} bytes took {peak:,} bytes of memory"
        assert took < (MOST_IMAGE_S if reader == "images" else MOST_S), f"{len(data)} bytes took {took:.2f} s"

    folder = corpus(reader)
    options = [f"-runs={executions}", f"-seed={seed}", f"-max_len={LONGEST_BYTES}", "-print_final_stats=1"]
    options += [f"-max_total_time={seconds}"]
    options += ["-timeout=20", "-rss_limit_mb=2048", f"-artifact_prefix={folder.parent}/crash-{reader}-", str(folder)]
    atheris.Setup([sys.argv[0], *options], once)
    atheris.Fuzz()
    return 1


def measure() -> int:
    """Says how many branches of the readers the corpora reach; fails below 95 %."""
    import coverage

    os.chdir(TESTS.parent)
    files = {module: TESTS.parent / "src" / f"{module.replace('.', '/')}.py" for module in READ}
    measured = coverage.Coverage(branch=True, include=[str(file) for file in files.values()], data_file=None)
    with measured.collect():
        from fuzz.readers import READERS
        from fuzz.seeds import seeds

        for name, read in READERS.items():
            pieces = [*seeds(name), *(path.read_bytes() for path in sorted((CORPUS / name).glob("*")))]
            for content in pieces:
                read(content)
            print(f"{name}: {len(pieces)} pieces of bytes")
    reached = there = 0
    for module, file in files.items():
        lines = reading_lines(file, READING[module])
        stats = measured._analyze(str(file)).branch_stats()
        own = {line: pair for line, pair in stats.items() if line in lines}
        taken, every = sum(pair[1] for pair in own.values()), sum(pair[0] for pair in own.values())
        print(
            f"{module}: {taken} of {every} branches", [line for line, pair in own.items() if pair[0] != pair[1]] or ""
        )
        reached, there = reached + taken, there + every
    print(f"{reached} of {there} branches, {reached / there:.1%}")
    return int(reached < 0.95 * there)


def reading_lines(file: Path, names: tuple[str, ...]) -> set[int]:
    """Returns the lines of some functions and classes."""
    tree = ast.parse(file.read_text())
    defined = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    found = [node for node in defined if node.name in names]
    assert {node.name for node in found} == set(names)
    return {line for node in found for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


if __name__ == "__main__":
    sys.exit(main())
