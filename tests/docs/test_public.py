"""docs/api.md has every public name once; stable names are called as in the last release, or the changelog says so."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from pathlib import Path

import pytest

from docs import public
from docs.pages import ROOT

CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
BEFORE = """
class Job:
    def __init__(self, model, epochs=1, *, seed=0): ...
    def run(self, steps): ...
    steps: int = 3
def fit(job, strategy="one_device", *, device="auto"): ...
def compare(job): ...
preset = dict(period=16)
"""


def planted(old: str, new: str, folder: Path) -> list[str]:
    """Returns the stubs of a small package before and after a change."""
    stubs = []
    for name, code in (("before", BEFORE), ("now", BEFORE.replace(old, new, 1))):
        (folder / name / "headrace").mkdir(parents=True)
        (folder / name / "headrace" / "__init__.py").write_text(code, encoding="utf-8")
        names = [f"headrace.{each}" for each in ("Job", "compare", "fit", "preset")]
        stubs.append(public.signatures(names, [], folder / name))
    return stubs


def test_the_page_has_every_public_name_once_and_no_other() -> None:
    listed, public_names = Counter(name for name, _, _ in public.rows()), public.public_names()
    assert sorted(name for name, count in listed.items() if count > 1) == [], "docs/api.md has these twice"
    assert sorted(public_names - set(listed)) == [], "docs/api.md lacks these: give each a row with its promise"
    absent = []
    for name in listed:
        try:
            public.value_of(name)
        except (AttributeError, ImportError):
            absent.append(name)
    assert absent == [], "docs/api.md has these, and the package does not"
    assert sorted(set(listed) - public_names) == [], "docs/api.md has these, which no __all__ lists and no page imports"


def test_every_row_has_a_promise_and_says_what_the_name_is() -> None:
    assert [name for name, promise, text in public.rows() if promise not in ("stable", "provisional") or not text] == []
    assert len(public.promised("stable")) > 50
    # The rows that the expression finds are all.
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert len(re.findall(r"^\| `headrace", page, re.MULTILINE)) == len(public.rows())


@pytest.mark.slow
def test_stable_names_keep_their_calls() -> None:
    _, before = public.recorded()
    stable = public.promised("stable")
    now = public.signatures(stable, public.promised("provisional"))
    left = public.unannounced(public.breaks(before, now), CHANGELOG)
    assert not left, "\n".join([*map(str, left), public.REMEDY])


def test_the_record_is_of_the_last_release() -> None:
    version, released = public.version_of(CHANGELOG)
    of = public.recorded()[0]
    assert of == version or not released, f"the record is of {of}: scripts/public-names records {version}"


@pytest.mark.parametrize(
    ("old", "new", "name", "what"),
    [
        (', *, device="auto"', "", "fit", "Parameter was removed (device)"),
        ('device="auto"', 'where="auto"', "fit", "Parameter was removed (device)"),
        ('"auto"', '"cpu"', "fit", "Parameter default was changed (device)"),
        ("def fit", "def train", "fit", "Public object was removed"),
        ("compare(job)", "compare(job, strategies)", "compare", "Parameter was added as required (strategies)"),
        ("epochs=1", "epochs", "Job.__init__", "Parameter is now required (epochs)"),
        ("model, epochs=1", "model, data=None, epochs=1", "Job.__init__", "Positional parameter was moved (epochs)"),
        ("epochs=1, *,", "*, epochs=1,", "Job.__init__", "Parameter kind was changed (epochs)"),
        ("def run", "def _run", "Job.run", "Public object was removed"),
        ("steps: int = 3", "", "Job.steps", "Public object was removed"),
        ("class Job", "class Work", "Job", "Public object was removed"),
        ("16", "8", "preset", "Value changed"),
        ("def compare(job): ...", "compare = fit(3)", "compare", "Public object points to a different kind of object"),
    ],
)
def test_a_call_that_breaks_is_found(old: str, new: str, name: str, what: str, tmp_path: Path) -> None:
    stubs = planted(old, new, tmp_path)
    assert list(public.breaks(stubs[0], stubs[0])) == []
    found = list(public.breaks(*stubs))
    assert (f"headrace.{name}", what) in [(each.name, each.what) for each in found]
    assert all(each.was != each.now for each in found)
    assert public.unannounced(found, CHANGELOG) == found
    line = f"- `headrace.{name.removesuffix('.__init__')}`: why\n"
    told = f"# Changelog\n\n## 0.2.0, unreleased\n\n### Breaking\n\n{line}"
    assert name not in [each.name for each in public.unannounced(found, told)]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('device="auto"', 'device="auto", check=True'),
        ("epochs=1, *, seed=0", "epochs=1, data=None, *, seed=0"),
        ("def compare", "def other(job): ...\ndef compare"),
        ("steps: int = 3", "steps: float = 3"),
    ],
)
def test_what_breaks_no_call_is_let_through(old: str, new: str, tmp_path: Path) -> None:
    assert list(public.breaks(*planted(old, new, tmp_path))) == []


@pytest.mark.slow
def test_breaks_in_the_package_itself_are_found(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "src" / "headrace", tmp_path / "headrace", ignore=shutil.ignore_patterns("__pycache__"))
    for file, old, new in (
        ("api/fit.py", "seconds: float | None = None,", ""),
        ("api/comparison.py", "retries: int", "attempts: int"),
        ("spec/options.py", "keep: int = 3", "keep: int = 4"),
        ("strategies/mirrored.py", "overlap: bool = True", "overlapped: bool = True"),
        ("data/__init__.py", "from headrace.data.pipeline.combined import interleave, mix", ""),
    ):
        code = (tmp_path / "headrace" / file).read_text(encoding="utf-8")
        assert old in code, (file, old)
        (tmp_path / "headrace" / file).write_text(code.replace(old, new, 1), encoding="utf-8")
    now = public.signatures(public.promised("stable"), public.promised("provisional"), tmp_path)
    found = {(each.name, each.what) for each in public.breaks(public.recorded()[1], now)}
    assert found == {
        ("headrace.fit", "Parameter was removed (seconds)"),
        ("headrace.compare", "Parameter was removed (retries)"),
        ("headrace.Checkpoints.__init__", "Parameter default was changed (keep)"),
        ("headrace.Mirrored.__init__", "Parameter was removed (overlap)"),
        ("headrace.Mirrored.overlap", "Public object was removed"),
        ("headrace.data.interleave", "Public object was removed"),
        ("headrace.data.mix", "Public object was removed"),
    }
