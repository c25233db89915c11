"""What of an extra is lacking."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from headrace.machine.extras import Lack, absent, lacks

WANTED = Requirement("unheard-of>=2")


def test_a_module_that_another_package_brings_is_not_lacking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "unheard_of.py").write_text("")
    assert lacks([WANTED]) == (Lack("unheard-of>=2", None),)
    monkeypatch.syspath_prepend(tmp_path)
    assert lacks([WANTED]) == ()


def test_a_folder_of_its_name_is_no_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As "wandb" or "tensorboard" beside a job, which hold the files of runs."""
    (tmp_path / "unheard_of").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert lacks([WANTED]) == (Lack("unheard-of>=2", None),)
    assert absent("unheard-of", "pytest") == ["unheard-of"]
    assert "unheard_of" not in sys.modules
