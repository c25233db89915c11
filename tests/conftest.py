"""What holds for every test."""

from __future__ import annotations

import functools
import gc
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Collection, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from cover import kept
from headrace.machine.versions import minor_of
from mutants import mutants
from warm.programs import PYTHON, join, launch, programs

# A shell lets what it starts in the background ignore Ctrl-C, and the tests of it would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Several tests at a time are more threads than cores: one that spins while it waits for another keeps that one waiting.
# To be set before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# The same examples on every run, and no deadline: neighbours on a busy machine are not the test's fault.
settings.register_profile("headrace", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("headrace")


@pytest.fixture(autouse=True, scope="module")
def _no_waiting_for_the_disk(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a test writes must outlive processes, not a power cut; to wait for that takes longer than a small run.

    Checkpoints' own tests, and all workers that are processes, do wait.
    """
    with pytest.MonkeyPatch.context() as patch:
        if "checkpoint" not in request.path.parts:
            patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(autouse=True, scope="module")
def _environment_as_it_was() -> Iterator[None]:
    """A command that ran in this process has set the variables of its workers, such as how malloc keeps memory."""
    before = dict(os.environ)
    yield
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(autouse=True, scope="session")
def _programs_begin_warm(request: pytest.FixtureRequest) -> Iterator[None]:
    """Python programs that tests and engines start are forked from one that has imported torch: seconds for each.

    Quick tests start none, so a selection of quick tests alone does without.
    """
    with pytest.MonkeyPatch.context() as patch:
        slow = any(item.get_closest_marker("slow") for item in request.session.items)
        if slow and not request.config.getoption("--cold"):
            patch.setattr(sys, "executable", str(programs() / "python"))
        yield


@pytest.fixture
def real_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that look at the processes themselves, or at what has been imported."""
    monkeypatch.setattr(sys, "executable", PYTHON)


def _name_no_test() -> None:
    os.environ["PYTEST_CURRENT_TEST"] = "one of headrace's"


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup() -> None:
    """Lets all tests have one environment, as a program has, and so share the processes that runs are started from.

    pytest puts each test's name into the environment. Where that has changed, the next run starts another fork server,
    which imports again what this process has imported: of transformers alone that is seconds for each test.
    """
    _name_no_test()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call() -> None:
    """As for fixtures: pytest names the test once more before it calls it."""
    _name_no_test()


LONGEST = (
    "test_mixed_devices.py",
    "test_add_a_strategy.py",
    "test_compile.py",
    "test_clock_jumps.py",
    "test_audit.py",
    "test_elastic.py",
    "test_docs.py",
    "test_contract.py",
)
"""Files with a test of half a minute, not to be begun last, and then files of minutes, which processes share."""


FULL_HISTORIES, HISTORIES = 1000, 150
"""Random histories a regime: planted faults are found within 60."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="all cases, not pairwise covers; all histories, all compilers")
    parser.addoption(
        "--cold", action="store_true", help="programs begin as a user's do: on machines with other packages"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Tells test files, which read it while they are imported."""
    full = config.getoption("--full")
    os.environ.setdefault("HEADRACE_HISTORIES", str(FULL_HISTORIES if full else HISTORIES))
    if folder := getattr(config, "workerinput", {}).get(_WARM):
        join(Path(folder))
    # Collecting allocates objects by the million and frees few: a third of its time would be garbage collection.
    gc.disable()


_WARM = "headrace_programs"


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Gives each of pytest-xdist's processes the same warm programs; these import torch while the tests are collected.

    Args:
        node: xdist's WorkerController.
    """
    if node.config.option.markexpr != "not slow" and not node.config.option.cold:
        node.workerinput[_WARM] = str(launch())


_LIBRARIES = os.environ.get("LD_LIBRARY_PATH")


def pytest_collection_finish() -> None:
    """Leaves what was collected out of later garbage collections, and the environment as it was.

    OpenCV extends LD_LIBRARY_PATH when it is imported. A program that is started with another one than the warm process
    cannot begin warm.
    """
    gc.freeze()
    gc.enable()
    if _LIBRARIES is None:
        os.environ.pop("LD_LIBRARY_PATH", None)
    else:
        os.environ["LD_LIBRARY_PATH"] = _LIBRARIES


MANY_MODULES = 50
_imported = len(sys.modules)


def pytest_runtest_logfinish() -> None:
    """Leaves out what tests have imported, too: of the compiler alone that is a hundred thousand objects."""
    global _imported
    if len(sys.modules) > _imported + MANY_MODULES:
        _imported = len(sys.modules)
        gc.collect()
        gc.freeze()


MARKS = ("every", "one", "pairwise", "each_value", "slow")
"""What says which cases of a test are kept, the strongest first."""


@functools.cache
def finders() -> Collection[str]:
    """Returns the tests that find the planted faults."""
    return {mutant.tests.partition("[")[0] for mutant in mutants()}


def mark_of(name: str, own: Collection[str]) -> str:
    """Returns which of `MARKS` counts for a test; without any, `every` if it finds a planted fault, else "".

    Args:
        name: without its case.
        own: names of all marks that it has.
    """
    finds = name in finders()
    mark = next((mark for mark in MARKS if mark in own), "every" if finds else "")
    # Of slow ones most start processes: seconds of a core for each case.
    return "each_value" if finds and mark == "slow" else mark


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps a cover of the parameters of each test marked so, and no test marked `full`.

    Of slow tests the first of each file stays, and those that find a fault.
    """
    groups: dict[tuple[str, str, str], list[pytest.Function]] = {}
    first: dict[Path, str] = {}
    gone: set[int] = set()
    for item in items:
        own, name = {mark.name for mark in item.iter_markers()}, item.nodeid.partition("[")[0]
        if "full" in own:
            gone.add(id(item))
            continue
        if isinstance(item, pytest.Function) and "callspec" in vars(item):
            groups.setdefault((mark_of(name, own), str(item.path), item.originalname), []).append(item)
        if "slow" in own and name not in finders() and name != first.setdefault(item.path, name):
            gone.add(id(item))
    for (mark, _, name), group in groups.items():
        cases = [{name: repr(value) for name, value in item.callspec.params.items()} for item in group]
        stay = set(kept(mark, name, cases))
        gone |= {id(item) for index, item in enumerate(group) if index not in stay}
    if gone:
        config.hook.pytest_deselected(items=[item for item in items if id(item) in gone])
        items[:] = [item for item in items if id(item) not in gone]


NEEDS = {
    (2, 13): (
        "fully_sharded sums gradients that only some ranks have",
        re.compile(
            r"fully_sharded|\[sharded |-sharded replicas|alike\[divided|replicas_that_are_divided|imported_once_before"
        ),
    ),
    (2, 12): (
        "a thread compiles",
        re.compile(r"test_contract.*tpu|test_options.*tpu|test_state.*tpu|test_tpu|test_compile"),
    ),
}
"""What needs a newer torch: the first that has it, why, and the ids of tests."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Lets long files begin first, so that tests that run side by side end at about the same time."""
    if not config.getoption("--full"):
        leave_out(config, items)
    for least, (why, pattern) in NEEDS.items():
        if minor_of(version("torch")) < least:
            for item in items:
                if pattern.search(item.nodeid) and "an_older_torch_is_refused" not in item.nodeid:
                    item.add_marker(pytest.mark.skip(reason=f"{why}: needs torch {least[0]}.{least[1]}"))
    effort: Counter[Path] = Counter()
    for item in items:
        effort[item.path] += 10 if item.get_closest_marker("slow") else 1
    place = {name: index for index, name in enumerate(LONGEST)}
    items.sort(key=lambda item: (place.get(item.path.name, len(place)), -effort[item.path], item.path))
