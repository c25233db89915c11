"""Compares what headrace depends on with known advisories: those of advisories.toml, and a database's by pip-audit.

A line for each version that an advisory is about; the exit code is 1 if there is one.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "tests" / "advisories.toml"
DATABASE_S = 120.0


@dataclass(frozen=True)
class Advisory:
    """Which versions of a package are affected: from `since` up to, not with, `fixed`."""

    package: str
    id: str
    fixed: str
    what: str
    source: str
    read: date
    since: str = "0"
    unreached: str = ""

    def concerns(self, version: Version) -> bool:
        """Whether a version is affected; a local build, 2.13.0+cpu, is as its version."""
        return Version(self.since) <= Version(version.public) < Version(self.fixed)

    def __str__(self) -> str:
        return f"{self.id} ({self.what}): {self.package} {self.fixed} or newer is needed, see {self.source}"


class DatabaseUnreachedError(Exception):
    """pip-audit is not there, or reaches no database."""


def advisories() -> list[Advisory]:
    """Returns the list."""
    return [Advisory(**row) for row in tomllib.loads(LIST.read_text(encoding="utf-8"))["advisory"]]


def installed() -> dict[str, Version]:
    """Returns the versions of all installed packages."""
    return {_plain(one.metadata["Name"]): Version(one.version) for one in distributions()}


def affected(known: Sequence[Advisory], versions: Mapping[str, Version]) -> list[str]:
    """Returns a line for each installed version that an advisory is about."""
    return [
        f"{one.package} {version} is installed: {one}"
        for one in known
        if (version := versions.get(one.package)) is not None and one.concerns(version)
    ]


def allowed(known: Sequence[Advisory], requirements: Sequence[str]) -> list[str]:
    """Returns a line for each requirement whose lower bound is older than the fix of what headrace reaches."""
    found = []
    for text in requirements:
        needed = Requirement(text)
        bounds = [Version(each.version) for each in needed.specifier if each.operator in (">=", "==")]
        lowest = max(bounds, default=Version("0"))
        found += [
            f"pyproject.toml allows {text}: {one}"
            for one in known
            if one.package == _plain(needed.name) and not one.unreached and lowest < Version(one.fixed)
        ]
    return found


def requirements() -> list[str]:
    """Returns what pyproject.toml asks for, in all extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [*project["dependencies"], *(each for extra in project["optional-dependencies"].values() for each in extra)]


def database(python: str = sys.executable) -> list[str]:
    """Returns what pip-audit finds in this environment.

    Raises:
        DatabaseUnreachedError: it is not installed, or answers with something else than a report.
    """
    if find_spec("pip_audit") is None and python == sys.executable:
        raise DatabaseUnreachedError("pip-audit is not installed here")
    command = [python, "-m", "pip_audit", "--format=json", "--progress-spinner=off", "--skip-editable", "--local"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DATABASE_S, check=False)
        return list(_findings(json.loads(done.stdout)["dependencies"]))
    except subprocess.TimeoutExpired:
        raise DatabaseUnreachedError(f"pip-audit has not ended after {DATABASE_S:.0f} s") from None
    except (ValueError, KeyError, TypeError):
        last = (done.stderr.strip() or "it says nothing").splitlines()[-1]
        raise DatabaseUnreachedError(f"pip-audit ended with {done.returncode}: {last:.200}") from None


def _findings(packages: Sequence[Mapping[str, object]]) -> Iterator[str]:
    for package in packages:
        found = package.get("vulns", [])
        assert isinstance(found, list)
        for one in found:
            fixed = ", ".join(one["fix_versions"]) or "no version"
            yield f"{package['name']} {package['version']} is installed: {one['id']}, mended by {fixed}"


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> int:
    """Prints what was found; returns 1 if anything was."""
    known = advisories()
    lines = affected(known, installed()) + allowed(known, requirements())
    newest = max(one.read for one in known)
    told = f"{len(known)} advisories of a list of {newest}"
    try:
        lines += database()
        told += ", and pip-audit's database"
    except DatabaseUnreachedError as error:
        told += f"; no database: {error}"
    for line in lines:
        print(line)
    print(f"advisories: {len(lines)} found ({told})")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
