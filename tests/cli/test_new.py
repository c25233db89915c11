"""`headrace new` writes files that run, and their tests pass."""

from __future__ import annotations

import inspect
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.cli import app, run
from headrace.cli.commands.extending.new import ExtensionKind
from headrace.testing import CHECKS


def begin(kind: str, folder: Path) -> str:
    done = CliRunner().invoke(app, ["new", kind, f"my_{kind}", "--folder", str(folder)])
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.slow
@pytest.mark.each_value
@pytest.mark.parametrize("kind", sorted({*ExtensionKind} - {ExtensionKind.STRATEGY}))
def test_what_is_begun_passes_its_tests(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = begin(kind, tmp_path)
    assert f"wrote {tmp_path}/my_{kind}.py" in said
    assert f"python -m pytest {tmp_path}/test_my_{kind}.py" in said
    monkeypatch.syspath_prepend(str(tmp_path))
    found = runpy.run_path(str(tmp_path / f"test_my_{kind}.py"))
    for name, test in found.items():
        if name.startswith("test_"):
            test(*([tmp_path] if inspect.signature(test).parameters else []))


@pytest.mark.slow
@pytest.mark.parametrize("check", sorted(CHECKS))
def test_a_strategy_that_is_begun_keeps_the_contract(
    check: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin("strategy", tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    test = runpy.run_path(str(tmp_path / "test_my_strategy.py"))["test_the_contract"]
    test(check, tmp_path / "runs")


def test_nothing_is_written_over_and_names_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "my_strategy.py:MyStrategy(workers=2)" in begin("strategy", tmp_path)
    assert run(["new", "strategy", "my_strategy", "--folder", str(tmp_path)]) == 2
    assert "test_my_strategy.py exists; give another name" in " ".join(capsys.readouterr().err.split())
    for name in ("My-Own", "class", "MyOwn", "../own"):
        assert run(["new", "codec", name, "--folder", str(tmp_path)]) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert "cannot be a file's name; use small letters, digits and _" in said
    assert CliRunner().invoke(app, ["new", "optimizer", "my_own"]).exit_code == 2
    assert len([*tmp_path.iterdir()]) == 2


@pytest.mark.slow
def test_what_is_begun_is_formatted_and_typed(tmp_path: Path) -> None:
    for kind in ExtensionKind:
        begin(kind, tmp_path / kind)
    for command in (["check", "-q"], ["format", "-q", "--check"]):
        subprocess.run([Path(sys.executable).parent / "ruff", *command, str(tmp_path)], check=True)
