"""Figures of a machine: their file, their tables and page, and what they say of a GPU."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.bench.advice import JobFacts, answer, gpu_gains
from headrace.bench.figures import Figure, Gap, MachineFigures, OtherWork, figure
from headrace.bench.page import write_page
from headrace.bench.text import lines
from headrace.errors import UsageError
from headrace.spec.plain import to_plain

PUBLISHED = Path(__file__).parents[2] / "benchmarks" / "hardware" / "cnn-benchmarks.json"


def trained(row: str, column: str, value: float) -> Figure:
    return Figure("training", row, column, value, "ms", 0.1)


HERE = MachineFigures(
    "here",
    (
        Figure("matrix", "float32, 256 x 256", "CPU, 1 thread", 90.6, "GFLOP/s", 0.3),
        Figure("matrix", "float32, 256 x 256", "CPU, 2 threads", 171.2, "GFLOP/s"),
        trained("AlexNet", "CPU", 500.0),
        trained("AlexNet", "CPU, compiled", 400.0),
        trained("VGG-16", "CPU", 9000.0),
    ),
    (Gap("matrix", "", "GPU", "no CUDA device here"), Gap("training", "", "GPU", "no CUDA device here")),
    facts={"processor": "a fast one"},
)
JOB = JobFacts("digits", examples=32, step_s=0.1, operations=200, batch_bytes=1000, input_per_s=1e6)


def test_median_and_distance_of_the_quartiles() -> None:
    found = figure("matrix", "row", "column", "GB/s", [1.0, 2.0, 3.0, 4.0, 100.0])
    assert (found.value, found.spread) == (3.0, pytest.approx(2 / 3))
    assert figure("matrix", "row", "column", "GB/s", [5.0]).spread == 0.0


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "here.json"
    file.write_text(json.dumps(HERE.plain()))
    assert MachineFigures.load(file) == HERE
    nan = HERE.plain() | {"figures": [{**to_plain(HERE.figures[0]), "value": math.nan}]}
    for text in ("[]", "{", '{"name": "a", "figures": [{"part": 1}]}', json.dumps(nan)):
        file.write_text(text)
        with pytest.raises(UsageError, match=r"here\.json cannot be read as figures of a machine"):
            MachineFigures.load(file)


def test_tables_fit_and_say_what_is_missing() -> None:
    busy = replace(HERE, others=(OtherWork("matrix", 100.0, 21.0, 2.0), OtherWork("training", 10.0, 0.1, 0.0)))
    shown = list(lines(busy, "The answer.", MachineFigures.load(PUBLISHED)))
    assert max(map(len, shown)) <= 80
    text = "\n".join(shown)
    assert re.search(r"float32, 256 x 256 GFLOP/s +90\.6~ +171$", text, re.MULTILINE)
    assert re.search(r"AlexNet ms +500 +400$", text, re.MULTILINE)
    assert text.count("GPU: no CUDA device here") == 2
    assert "other programs at most 23 % of the processors' time (Matrix product)" in " ".join(shown)
    assert (
        "Not idle: others had more than 5.0 % of the processors' time. Matrix product: other programs 21 %, the "
        in (" ".join(shown))
    )
    assert "Not idle" not in "\n".join(lines(replace(busy, others=busy.others[1:]), ""))
    assert "Beside: jcjohnson/cnn-benchmarks" in text
    assert text.endswith("The answer.")


def test_no_text_of_a_file_commands_the_terminal() -> None:
    bad = "\x1b[2J"
    cells = (Figure("matrix", f"row{bad}", f"CPU{bad}", 90.6, f"GB/s{bad}"),)
    gaps = (Gap("matrix", f"gap{bad}", "CPU", f"why{bad}"),)
    other = MachineFigures(f"there{bad}", cells, gaps, source=f"a page{bad}", facts={f"a{bad}": f"b{bad}"})
    shown = "\n".join(lines(other, f"The answer{bad}.", other))
    assert "\x1b" not in shown
    assert shown.count("row\ufffd[2J GB/s\ufffd[2J") == 2


@pytest.mark.slow
def test_the_page_has_tables_bars_and_the_reasons(tmp_path: Path) -> None:
    write_page(tmp_path / "a" / "bench.html", HERE, "It <helps>.", MachineFigures.load(PUBLISHED))
    page = (tmp_path / "a" / "bench.html").read_text()
    assert "It &lt;helps&gt;." in page
    assert "GPU: no CUDA device here" in page
    assert "<td>90.6 ± 15 %</td>" in page
    # One picture of the products of a type, one for each network that was measured here.
    assert page.count("<figure>") == 3
    assert "<h3>float32, GFLOP/s</h3>" in page
    assert "256 x 256: CPU, 2 threads" in page
    assert "Shorter is better. The other colour: published" in page
    assert "GTX 1080 Ti, cuDNN" in page
    assert "http-equiv" not in page


def test_the_published_table_is_whole() -> None:
    published = MachineFigures.load(PUBLISHED)
    assert published.parts() == ["inference", "training"]
    assert len(published.rows("training")) == 10
    forward = published.at("inference", "ResNet-50", "Pascal Titan X, cuDNN")
    both = published.at("training", "ResNet-50", "Pascal Titan X, cuDNN")
    assert forward
    assert both
    assert 2.5 < both.value / forward.value < 3.5


def test_the_best_columns_are_compared() -> None:
    there = MachineFigures("there", (trained("AlexNet", "slow GPU", 20.0), trained("AlexNet", "quick GPU", 8.0)))
    assert gpu_gains(HERE, there) == {("AlexNet", "quick GPU"): 50.0}
    assert gpu_gains(HERE, HERE) == {}


WITH_GPU = replace(HERE, figures=(*HERE.figures, trained("AlexNet", "GPU", 8.0), trained("VGG-16", "GPU", 90.0)))


@pytest.mark.parametrize(
    ("machine", "job", "says"),
    [
        (HERE, None, "is not known: this machine has none"),
        (WITH_GPU, None, "This machine's GPU trains the networks above 50 to 100 times as fast"),
        (WITH_GPU, JOB, "up to 50 times as fast, and starting its operations is what limits"),
        (WITH_GPU, replace(JOB, operations=20), "So a GPU would help: up to 100 times as fast, if it gains what"),
        (WITH_GPU, replace(JOB, operations=9000), "at most 1.1 times as fast, held up by starting its short"),
        (WITH_GPU, replace(JOB, batch_bytes=10**9), "at most 1.0 times as fast, held up by starting its short"),
        (WITH_GPU, replace(JOB, input_per_s=400), "at most 1.2 times as fast, held up by its input"),
        (WITH_GPU, replace(JOB, gpu_step_s=0.005), "5.00 ms on the GPU, 20 times as fast, and its input is quick"),
        (HERE, replace(JOB, gpu_step_s=0.005, input_per_s=1600), "input gives 1600 examples/s, enough for 5.0 times."),
        (WITH_GPU, replace(JOB, input_per_s=3200), "up to 10 times as fast, and its input is what limits"),
    ],
)
def test_whether_a_gpu_would_help(machine: MachineFigures, job: JobFacts | None, says: str) -> None:
    assert says in answer(machine, None, job)


def test_figures_of_another_machine_stand_in_for_a_gpu() -> None:
    said = answer(HERE, MachineFigures.load(PUBLISHED))
    assert "The GPU of jcjohnson/cnn-benchmarks (GTX 1080 Ti, cuDNN) trains the networks above 29 to 70 times" in said
