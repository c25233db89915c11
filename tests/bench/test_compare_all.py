"""The comparison of all strategies: none is left out, cells are stored and taken up again, pages are made of them."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from headrace.spec.call import parse_call
from headrace.strategies import SHORT_NAMES, STRATEGIES, resolve

FOLDER = Path(__file__).parents[2] / "benchmarks" / "compare-all"
MODULES = ("table", "tasks", "cell", "store", "figures", "pictures", "writing", "main")


@pytest.fixture(scope="module")
def parts() -> Iterator[SimpleNamespace]:
    """The benchmark's modules, whose names are short, for these tests alone."""
    examples = FOLDER.parents[1] / "examples"
    with pytest.MonkeyPatch.context() as patch:
        for folder in (FOLDER, FOLDER.parent, examples / "char_lstm", examples / "large_lm"):
            patch.syspath_prepend(folder)
        made: dict[str, ModuleType] = {}
        try:
            for name in MODULES:
                made[name] = importlib.import_module(name)
            yield SimpleNamespace(**made)
        finally:
            for name in (*MODULES, "predicted", "harness", "stdlib_text", "llama"):
                sys.modules.pop(name, None)


def cell(parts: SimpleNamespace, row: str = "mirrored", **values: object) -> object:
    workers = values.pop("workers", 2)
    return parts.cell.Cell("lstm", row, workers, 1, 0.02, parts.cell.text_of(row, workers), "rehearsed", **values)


def test_every_strategy_has_a_row_or_a_reason(parts: SimpleNamespace) -> None:
    texts = [parts.cell.text_of(row, 4) for row in parts.table.ROWS]
    named = {parse_call(text).name for text in texts}
    assert named | set(parts.table.ELSEWHERE) == {*STRATEGIES, *SHORT_NAMES}
    assert not named & set(parts.table.ELSEWHERE)


def test_every_row_can_be_made_with_each_of_its_numbers(parts: SimpleNamespace) -> None:
    for name, row in parts.table.ROWS.items():
        for workers in row.workers:
            assert resolve(parts.cell.text_of(name, workers), workers).name in STRATEGIES


def test_pictures_have_a_colour_for_each_row(parts: SimpleNamespace) -> None:
    assert set(parts.table.DRAWN) <= set(parts.table.ROWS)
    assert len(parts.table.DRAWN) <= 8


def test_a_cell_is_the_same_when_it_is_trained_again_and_equals_one_device(parts: SimpleNamespace) -> None:
    asked = parts.cell.Asked("lstm", "mirrored", 2, 1, 0.02, rounds=20)
    first = parts.cell.train(asked)
    assert first == parts.cell.train(asked)
    alone = parts.cell.train(dataclasses.replace(asked, row="one device", workers=1))
    assert first.kind == alone.kind == "rehearsed"
    assert first.losses == pytest.approx(alone.losses, abs=1e-4)
    assert first.examples == [20 * parts.tasks.TASKS["lstm"].batch]
    assert first.megabytes[0] > alone.megabytes[0] == 0
    assert first.seconds[0] > 0


def test_a_refusal_is_kept_in_its_own_words(parts: SimpleNamespace) -> None:
    refused = parts.cell.train(parts.cell.Asked("lstm", "expert parallel", 2, 1, 0.02, rounds=20))
    assert refused.kind == "refused"
    assert "has no experts" in refused.why


def test_an_interrupted_command_goes_on(parts: SimpleNamespace, tmp_path: Path) -> None:
    store = parts.store.Store(tmp_path)
    asked = parts.cell.Asked("lstm", "mirrored", 2, 1, 0.02)
    assert not store.has(asked)
    store.add(cell(parts, losses=[2.0]))
    with (tmp_path / "lstm.jsonl").open("a") as file:
        file.write('{"task": "lstm", "row"')  # the command was killed here
    again = parts.store.Store(tmp_path)
    assert again.has(asked)
    assert not again.has(dataclasses.replace(asked, workers=4))
    again.add(cell(parts, workers=4, losses=[2.0]))
    assert parts.store.Store(tmp_path).has(dataclasses.replace(asked, workers=4))


def test_a_strategy_that_was_changed_in_the_table_is_trained_again(parts: SimpleNamespace, tmp_path: Path) -> None:
    parts.store.Store(tmp_path).add(dataclasses.replace(cell(parts), text="mirrored(overlap=False)"))
    assert not parts.store.Store(tmp_path).has(parts.cell.Asked("lstm", "mirrored", 2, 1, 0.02))


def test_the_next_learning_rate_is_tried_where_the_best_has_none_beyond(parts: SimpleNamespace, tmp_path: Path) -> None:
    store, middle = parts.store.Store(tmp_path), parts.tasks.TASKS["lstm"].rate

    def asked() -> list[float]:
        every = [each for each in parts.main.tuning(store) if (each.task, each.row) == ("lstm", "unconnected")]
        return [each.rate / middle for each in every if not store.has(each)]

    def tried(factor: float, loss: float) -> None:
        known = cell(parts, "unconnected", workers=parts.table.TUNING_WORKERS, losses=[loss])
        store.add(dataclasses.replace(known, seed=parts.table.TUNING_SEED, rate=middle * factor))

    assert asked() == pytest.approx([1 / 3, 1, 3])
    for factor, loss in ((1 / 3, 3.0), (1, 2.0), (3, 1.5)):
        tried(factor, loss)
    assert asked() == pytest.approx([9])
    tried(9, 1.9)
    assert asked() == []
    tried(9, 1.4)
    assert asked() == pytest.approx([27])
    tried(27, 1.3)
    assert asked() == []  # five are enough


def test_a_target_is_reached_on_the_line_between_two_evaluations(parts: SimpleNamespace, tmp_path: Path) -> None:
    store = parts.store.Store(tmp_path)
    tuned = cell(parts, "one device", workers=1, losses=[1.0])
    store.add(dataclasses.replace(tuned, seed=parts.table.TUNING_SEED))
    places = {"examples": [0, 50, 100], "seconds": [0.0, 1.0, 3.0], "megabytes": [0.0, 0.0, 0.0]}
    store.add(cell(parts, "one device", workers=1, losses=[4.0, 3.0, 1.0], **places))
    store.add(cell(parts, losses=[4.0, 2.0, 2.0], **places))
    store.add(cell(parts, workers=4, losses=[4.0, 3.5, 2.9], **places))
    figures = parts.figures.Figures(store)
    assert figures.target("lstm") == pytest.approx(2.6)  # at 60 of 100 examples
    reached = figures.reaches("lstm", "mirrored", 2, lambda each: each.seconds)
    assert reached == pytest.approx(0.7)
    assert str(figures.reaches("lstm", "mirrored", 4, lambda each: each.seconds)) == "nan"
    assert figures.gap("lstm", "mirrored", 2) == pytest.approx(1.0)


def test_the_pages_are_made_of_the_stored_cells(parts: SimpleNamespace) -> None:
    store, results = parts.store.Store(FOLDER / "results"), FOLDER / "results"
    figures = parts.figures.Figures(store)
    text = (FOLDER / "text.md").read_text(encoding="utf-8")
    assert (FOLDER / "README.md").read_text(encoding="utf-8") == parts.writing.filled(text, figures, results)
    assert (FOLDER / "tables.md").read_text(encoding="utf-8") == parts.writing.tables(figures)
    assert json.loads((results / "about.json").read_text())["unigram_entropy"] > 3
