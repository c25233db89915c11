"""What is installed, and what pyproject.toml allows, is not known to be vulnerable where headrace reaches it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from packaging.version import Version

import advisories
from advisories import Advisory, DatabaseUnreachedError, affected, allowed, database, installed, requirements

KNOWN = advisories.advisories()


def test_no_installed_version_has_a_known_advisory() -> None:
    versions = installed()
    assert {one.package for one in KNOWN} & set(versions) >= {"torch", "starlette", "orjson", "pillow", "pyarrow"}
    assert affected(KNOWN, versions) == []


def test_no_version_that_is_allowed_has_one_that_headrace_reaches() -> None:
    asked = requirements()
    assert any(line.startswith("torch>=2.11") for line in asked)
    assert allowed(KNOWN, asked) == []


def test_each_advisory_says_where_it_is_from() -> None:
    for one in KNOWN:
        assert one.id.startswith(("CVE-", "GHSA-", "PYSEC-")), one
        assert one.source.startswith("https://"), one
        assert Version(one.since) < Version(one.fixed), one
    assert len({one.id for one in KNOWN}) == len(KNOWN)


def planted(since: str = "1.5", unreached: str = "") -> list[Advisory]:
    return [Advisory("weir", "CVE-1", "2.0", "it leaks", "https://weir", KNOWN[0].read, since, unreached)]


@pytest.mark.parametrize(
    ("version", "count"), [("1.4.9", 0), ("1.5", 1), ("1.9+cpu", 1), ("2.0rc1", 1), ("2.0", 0), ("2.0+cpu", 0)]
)
def test_versions_from_the_first_affected_to_the_fix_are_found(version: str, count: int) -> None:
    found = affected(planted(), {"weir": Version(version), "other": Version("1.5")})
    assert len(found) == count
    assert all("weir 2.0 or newer is needed, see https://weir" in line for line in found)


@pytest.mark.parametrize(("asked", "count"), [("weir", 1), ("weir[all]>=1.6,<3", 1), ("weir>=2", 0), ("dam>=1.6", 0)])
def test_lower_bounds_below_the_fix_are_found(asked: str, count: int) -> None:
    assert len(allowed(planted(), [asked])) == count
    assert allowed(planted(unreached="headrace reads no such file"), [asked]) == []


def audit(folder: Path, code: str) -> str:
    """Returns a program that stands for Python with another pip-audit."""
    program = folder / "python"
    program.write_text(f"#!{sys.executable}\nimport sys\n{code}\n")
    program.chmod(0o755)
    return str(program)


def test_what_pip_audit_finds_is_told(tmp_path: Path) -> None:
    report = {
        "dependencies": [
            {"name": "weir", "version": "1.5", "vulns": [{"id": "CVE-1", "fix_versions": ["2.0"], "aliases": []}]},
            {"name": "dam", "version": "1.0", "vulns": []},
            {"name": "headrace", "skip_reason": "distribution marked as editable"},
        ],
        "fixes": [],
    }
    program = audit(tmp_path, f"print('''{json.dumps(report)}'''); sys.exit(1)")
    assert database(program) == ["weir 1.5 is installed: CVE-1, mended by 2.0"]


def test_a_database_that_is_not_reached_is_no_clean_report(tmp_path: Path) -> None:
    program = audit(tmp_path, "sys.exit('ERROR:pip_audit._cli:no route to the service')")
    with pytest.raises(DatabaseUnreachedError, match=r"ended with 1: ERROR:pip_audit._cli:no route to the service"):
        database(program)
