"""One engine for all, and a look at what processes leave behind."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from engine.ranks import until
from headrace.engine.local.engine import LocalEngine
from headrace.engine.local.fork_server import ForkServer
from warm.programs import real


@pytest.fixture(scope="session")
def engine() -> Iterator[LocalEngine]:
    # The tests may be run with unbuffered output; headrace's workers must do without.
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONUNBUFFERED", raising=False)
        engine = LocalEngine()
    with engine:
        yield engine


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    fork_server = ForkServer()
    yield fork_server
    fork_server.close()


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def state(pid: int) -> str:
    """The state of a process as /proc shows it: "S", "T", "Z", ...; "" if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def ended(pid: int) -> bool:
    """Whether a process has ended with all its threads: the first one may be "Z" while others hold its files."""
    try:
        threads = [path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    except (FileNotFoundError, ProcessLookupError):
        return not Path(f"/proc/{pid}").exists()
    return set(threads) <= {"Z"}


def below(pid: int) -> list[int]:
    """All processes that a process has started, and theirs; those of warm programs too."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue  # it ended meanwhile
    found: list[int] = []
    generation = {pid, real(pid)}
    while generation:
        generation = {child for child, parent in parents.items() if parent in generation}
        generation |= {real(child) for child in generation}
        found += sorted(generation)
    return found


def new_fork_server(others: Collection[int]) -> int:
    """Returns the fork server that has just been started besides others."""
    # A process that has just been started has no command line for a moment.
    assert until(lambda: bool(set(fork_servers()) - set(others)), 10)
    (found,) = set(fork_servers()) - set(others)
    return found


def fork_servers() -> list[int]:
    """The fork_servers of this process."""
    return [real(pid) for pid in below(os.getpid())
            if b"headrace.engine.local.fork_server_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
            and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1] == str(os.getpid())]  # fmt: skip
