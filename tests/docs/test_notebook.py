"""The notebook of first steps: its cells run in order, and what each shows is a table or a number."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from docs.pages import ROOT

NOTEBOOK = ROOT / "examples" / "first_steps.ipynb"


def cells() -> list[str]:
    """Returns the code of the notebook's cells."""
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return ["".join(each["source"]) for each in notebook["cells"] if each["cell_type"] == "code"]


def run(code: str, names: dict[str, Any]) -> object:
    """Runs a cell; returns the value of its last expression, as a notebook shows it."""
    *body, last = ast.parse(code).body
    exec(compile(ast.Module(body if isinstance(last, ast.Expr) else [*body, last], []), "cell", "exec"), names)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names) if isinstance(last, ast.Expr) else None


@pytest.mark.slow
def test_the_cells_run_and_show_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    shown = [run(code, names) for code in cells()]
    tables = [each._repr_html_() for each in shown if hasattr(each, "_repr_html_")]
    assert len(tables) == 5
    assert all("<table" in each or "<dl" in each for each in tables)
    assert tuple(shown[-1]) == (2, 10)  # type: ignore[arg-type]
    alone, pair = capsys.readouterr().out.split()[:2]
    assert alone == pair
    assert not [each for each in json.loads(NOTEBOOK.read_text())["cells"] if each.get("outputs")]
