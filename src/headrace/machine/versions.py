"""The versions of torch and Python that headrace's tests ran with, and what is said of others."""

from __future__ import annotations

import functools
import importlib.metadata
import re

from headrace.errors import UnfitMachine

TESTED_TORCH = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
"""The oldest is the least that headrace takes; `pyproject.toml` ends before the minor version after the newest."""

TESTED_PYTHON = ("3.11", "3.12", "3.13", "3.14")


def minor_of(version: str) -> tuple[int, int]:
    """Returns the first two numbers of a version: (2, 13) of "2.13.0a0+git1234"; those of 0.0 if it has none."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)


_NEWEST = minor_of(TESTED_TORCH[-1])
TORCH_REMEDY = f"pip install 'torch>={TESTED_TORCH[0].removesuffix('.0')},<{_NEWEST[0]}.{_NEWEST[1] + 1}'"


def untested(torch: str) -> str:
    """Returns one line about a torch newer than all that the tests ran with; "" for one that is not."""
    newest = TESTED_TORCH[-1]
    if minor_of(torch) <= minor_of(newest):
        return ""
    return f"torch {torch} is newer than {newest}, the newest that headrace's tests ran with"


def too_old(torch: str) -> str:
    """Returns what is wrong with a torch older than headrace takes, and the remedy; "" for one that is not."""
    oldest = TESTED_TORCH[0]
    if minor_of(torch) >= minor_of(oldest):
        return ""
    return f"torch {torch} is too old: {oldest} is the oldest that headrace takes: {TORCH_REMEDY}"


@functools.cache
def torch_version() -> str:
    """Returns the version of the installed torch, without importing it; "" if there is none."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""


def require_torch() -> None:
    """Raises an `UnfitMachine` if the installed torch is too old to be imported by headrace."""
    if (version := torch_version()) and (said := too_old(version)):
        raise UnfitMachine(said)


def notice_of_torch() -> tuple[str, ...]:
    """Returns a line about the installed torch, if the tests did not run with one as new."""
    said = untested(torch_version()) if torch_version() else ""
    return (said,) if said else ()
