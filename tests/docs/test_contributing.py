"""CONTRIBUTING.md, SECURITY.md and the page of the architecture name files that exist, and what they say is so."""

from __future__ import annotations

import functools
import re
import sys
import threading
from types import FrameType

import pytest
import torch
from torch import nn

import headrace as hr
from docs.pages import ROOT
from house_size import CORE

_PATH = re.compile(r"`((?:\.ci|benchmarks|docs|examples|scripts|src|tests)/[^`\s]*)`")
SOURCE = ROOT / "src" / "headrace"
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
_FILE = re.compile(r"`([a-z_0-9]+/[\w/.]*)`")
_STEP = re.compile(r"^\d+\. `([\w/]+\.py)` \(`(\w+)`\)", re.MULTILINE)
"""A numbered line that begins with a file of the package and a function in it."""
_PART = re.compile(r"^\| [\w ]+ \| (`[^|]*`) \| ([\d,]+) \|$", re.MULTILINE)


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "SECURITY.md"])
def test_every_path_on_the_page_exists(page: str) -> None:
    paths = _PATH.findall((ROOT / page).read_text(encoding="utf-8"))
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_every_file_of_the_architecture_exists() -> None:
    paths = _FILE.findall(ARCHITECTURE)
    assert len(paths) > 100
    assert [path for path in paths if not (SOURCE / path).exists() and not (ROOT / path).exists()] == []


def test_the_core_has_no_more_lines_than_the_page_says() -> None:
    shown = 0
    for files, most in _PART.findall(ARCHITECTURE):
        lines = sum((SOURCE / name).read_text(encoding="utf-8").count("\n") for name in re.findall(r"`([^`]+)`", files))
        assert lines <= int(most.replace(",", "")), files
        shown += int(most.replace(",", ""))
    assert f"| all | | {shown:,} |" in ARCHITECTURE
    assert shown <= CORE


@pytest.mark.slow
def test_a_batch_goes_the_way_that_the_page_says() -> None:
    digits = hr.data.digits()
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    model = functools.partial(nn.Sequential, nn.Flatten(), nn.Linear(64, 10))
    job = hr.Job(
        model=model, task=hr.tasks.multiclass(10), optimizer=sgd, data=digits.train, global_batch_size=64, steps=2
    )
    begin = ARCHITECTURE.index("## The way of a batch")
    way = _STEP.findall(ARCHITECTURE, begin, ARCHITECTURE.index("## The way of a push"))
    assert len(way) == 12
    entered: dict[tuple[str, str], None] = {}

    def note(frame: FrameType, event: str, argument: object) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(f"{SOURCE}/"):
            entered.setdefault((path[len(str(SOURCE)) + 1 :], frame.f_code.co_name))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        hr.fit(job, hr.Mirrored(workers=2), engine=hr.ThreadEngine())
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    assert [step for step in entered if step in way] == way
