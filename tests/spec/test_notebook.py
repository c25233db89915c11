"""What a notebook shows of a job, a strategy and a plan."""

from __future__ import annotations

import functools
from xml.etree import ElementTree

import torch

import headrace as hr
from headrace.spec.notebook.table import in_few_words


def rows(value: object) -> dict[str, str]:
    """Returns the rows of the table that a notebook shows."""
    element = ElementTree.fromstring(value._repr_html_())  # type: ignore[attr-defined]
    return {row[0].text or "": row[1].text or "" for row in element.iter("tr")}


def build() -> torch.nn.Module:
    return torch.nn.Linear(4, 2)


def test_a_job_is_a_table_of_what_was_given() -> None:
    data = torch.zeros(8, 4), torch.zeros(8, dtype=torch.int64)
    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    job = hr.Job(build, optimizer, data, 4, hr.tasks.multiclass(2), epochs=1, options=hr.Options(clip_norm=1.0))
    shown = rows(job)
    assert shown["model"] == "build"
    assert shown["optimizer"] == "SGD(lr=0.1)"
    assert shown["data"] == "(8, 4) torch.float32, (8,) torch.int64"
    assert (shown["global_batch_size"], shown["epochs"], shown["options"]) == ("4", "1", "Options(clip_norm=1.0)")
    assert "seed" not in shown
    assert "0x" not in str(shown)


def test_a_strategy_is_a_table_of_its_options() -> None:
    assert rows(hr.Mirrored(workers=3)) == {"workers": "3"}
    assert rows(hr.Hybrid(hr.Mirrored(workers=2), hr.Pipeline(stages=2)))["outer"] == "Mirrored(workers=2)"


def test_texts_are_escaped_and_what_is_long_is_cut() -> None:
    assert rows(hr.Pipeline(stages=2, partition=[["<b>"], ["c"]]))["partition"] == "<b>, c"
    assert in_few_words(list(range(9))) == "0, 1, 2, 3 and 5 more"
    assert len(in_few_words("x" * 1000)) == 160
    assert in_few_words(lambda: 1).endswith("<lambda>")
