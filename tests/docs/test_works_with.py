"""The table of what works with what is made of what strategies refuse."""

from __future__ import annotations

from pathlib import Path

from headrace.strategies import STRATEGIES
from headrace.strategies.strategy import Strategy

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "options.md"
FLAGS = {
    "sparse embeddings": "sparse_tables",
    "sets in turn": "turns",
    "LBFGS": "closures",
    "mixed devices": "mixes_devices",
}


def table() -> list[str]:
    kinds: dict[str, Strategy] = {name: kind() for name, kind in STRATEGIES.items() if name != "hybrid"}
    refused = {name: {(each.option, each.value) for each in kind.refusals()} for name, kind in kinds.items()}
    # "skip" is refused where every value of on_nonfinite but the default is.
    asked = sorted(set().union(*refused.values()), key=str)
    heads = [option if value is None else f"{option}={value!r}" for option, value in asked]
    rows = ["| | " + " | ".join(f"`{head}`" for head in heads) + " | " + " | ".join(FLAGS) + " |"]
    rows.append("|---|" + ":-:|" * (len(heads) + len(FLAGS)))
    for name, kind in kinds.items():
        cells = [
            "no" if (option, value) in refused[name] or (option, None) in refused[name] else "yes"
            for option, value in asked
        ]
        cells += ["yes" if getattr(kind, flag) else "no" for flag in FLAGS.values()]
        rows.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return rows


def test_the_table_of_what_works_with_what_is_that_of_the_code() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    begin = lines.index("## What works with what")
    shown = [line for line in lines[begin:] if line.startswith("|")]
    assert shown == table(), "\n".join(table())
