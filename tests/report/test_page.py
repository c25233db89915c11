from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from msgspec import structs

from headrace.errors import UsageError
from headrace.report.drawing.curves import Curve, draw_curves
from headrace.report.drawing.rows import Bar, Mark, draw_bars
from headrace.report.model.summary import summarize
from headrace.report.model.verdict import References
from headrace.report.views.page import write_page
from headrace.report.views.style import colours_of, style_variables
from headrace.spec.events import LAUNCHER, Failed, Notice, RunEnded, Saved
from headrace.spec.job import JobSource

HOSTILE = "<script>alert('1')</script>$\\bad$ &amp; \x00 中 😀"
XHTML = "{http://www.w3.org/1999/xhtml}"
SVG = "{http://www.w3.org/2000/svg}"


def _parse(text: str) -> ElementTree.Element:
    head = "<!DOCTYPE html>\n"
    assert text.startswith(head)
    return ElementTree.fromstring(text.removeprefix(head))


def _words(root: ElementTree.Element) -> str:
    return " ".join(" ".join(root.itertext()).split())


@pytest.fixture(scope="module")
def references():
    return References(100.0, {2: 150.0}, 70.0)


@pytest.fixture
def compared(tmp_path, make_run, references):
    rows = (("one_device", 1), ("mirrored", 2), (HOSTILE, 2))
    failed = Failed(1, 3.35, 9, f"ValueError: {HOSTILE}", f"Traceback\n  {HOSTILE}")
    runs = [
        summarize(
            make_run(
                tmp_path / f"run{index}",
                strategy,
                workers=workers,
                status="failed" if strategy == HOSTILE else "ok",
                extra=[failed, Notice(0, 0.2, HOSTILE)] if strategy == HOSTILE else (),
            )
        )
        for index, (strategy, workers) in enumerate(rows)
    ]
    return write_page(tmp_path / "deep/er/report.html", runs, references).read_text()


@pytest.mark.slow
def test_the_page_is_well_formed_and_whole(compared):
    root = _parse(compared)
    titles = [element.text for element in root.iter(f"{XHTML}h3")]
    assert titles == [
        "Which loss falls first?",
        "How many examples a second?",
        "Where does a step's time go?",
        "What accuracy do evaluations find?",
        "Which loss falls with the fewest examples?",
        "What loss do evaluations find?",
        "Where does each worker's step go?",
        "How much memory does the largest process take?",
        "How much do parameters and optimizer state take?",
    ]
    for figure in root.iter(f"{XHTML}figure"):
        assert len(figure.findall(f"{SVG}svg")) == 1
        assert len(_words(figure.find(f"{XHTML}figcaption"))) > 40
        assert len(figure.find(f"{XHTML}p[@class='answer']").text) > 20
    rows = [_words(row) for row in root.iter(f"{XHTML}tr")]
    assert "run1 (mirrored) 2 × 1 0.700 120 1.20 0.80 1.00 kB 70.0 20.0 9.00 1.00 300 MB" in rows
    text = _words(root)
    for word in (
        "2026-10-03 14:05:11+02:00",
        "mill (cpu)",
        "torch 2.13.0",
        "run0 (one_device), run1 (mirrored), run2",
        ": the batch is split",
    ):
        assert word in text, word


def test_a_comparison_says_once_what_several_runs_say_and_names_those_that_may_differ(tmp_path, make_run):
    both = [Notice(-1, 0.2, "the loss is a mean over tokens")]
    runs = [summarize(make_run(tmp_path / name, name, extra=both)) for name in ("mirrored", "gossip")]
    path = write_page(tmp_path / "report.html", runs, References(may_differ=("gossip",)))
    text = _words(_parse(path.read_text()))
    assert text.count("the loss is a mean over tokens") == 1
    assert "mirrored, gossip: the loss is a mean over tokens" in text
    assert "Need not equal one device, so their loss may differ from its: gossip." in text
    assert "Need not equal" not in write_page(path, runs, References()).read_text()


@pytest.mark.slow
def test_the_page_needs_nothing_and_runs_nothing(compared):
    addresses = set(re.findall(r"https?://[^\"'<> )]*", compared))
    assert addresses <= {
        "http://www.w3.org/1999/xhtml",
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    root = _parse(compared)
    tags = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert not tags & {"script", "link", "img", "iframe", "object", "image", "foreignObject"}
    attributes = {name.rpartition("}")[2] for element in root.iter() for name in element.attrib}
    assert not {name for name in attributes if name.startswith("on")} | (attributes & {"src", "action"})
    for element in root.iter():
        for name, value in element.attrib.items():
            assert name.rpartition("}")[2] != "href" or value.startswith("#")
    assert "@import" not in compared


@pytest.mark.slow
def test_hostile_names_are_words_alone(compared):
    assert "<script" not in compared
    text = _words(_parse(compared))
    shown = HOSTILE.replace("\x00", "\ufffd")
    assert f"run2 ({shown})" in text
    assert f"says rank 1: ValueError: {shown}" in text


def test_the_title_of_a_comparison_is_its_job(tmp_path, make_run):
    def title(strategies, paths):
        runs = []
        for index, (strategy, path) in enumerate(zip(strategies, paths, strict=True)):
            run = summarize(make_run(tmp_path / f"{index}", strategy))
            runs.append(replace(run, started=structs.replace(run.started, job=JobSource(path) if path else None)))
        return _parse(write_page(tmp_path / "page.html", runs).read_text()).find(f".//{XHTML}h1").text

    assert title(["one_device", "mirrored"], ["/a/digits/job.py"] * 2) == "digits: 2 strategies"
    assert title(["mirrored", "mirrored"], ["/a/faces.py"] * 2) == "faces: 2 runs"
    assert title(["one_device", "mirrored"], ["/a/b.py", "/a/c.py"]) == "0 (one_device), 1 (mirrored)"
    assert title(["one_device", "mirrored"], [""] * 2) == "0 (one_device), 1 (mirrored)"


@pytest.mark.slow
def test_values_show_under_the_pointer(compared):
    root = _parse(compared)
    for figure in root.iter(f"{XHTML}figure"):
        assert len(list(figure.find(f"{SVG}svg").iter(f"{SVG}title"))) > 1
    told = [element.text for element in root.iter(f"{SVG}title")]
    assert "run1 (mirrored), 2 workers: 120 examples/s" in told
    assert "run1 (mirrored): compute 70 ms a step" in told
    assert "run1 (mirrored): 0.700 at 2 epochs" in told


@pytest.mark.slow
def test_what_is_not_asked_first_is_folded(compared):
    root = _parse(compared)
    titles = [
        _words(fold.find(f"{XHTML}summary/{XHTML}h2")) for fold in root.iter(f"{XHTML}details") if fold.get("class")
    ]
    assert titles == ["More about learning", "Each worker", "Memory", "Notices", "How the numbers are made"]
    assert not [fold for fold in root.iter(f"{XHTML}details") if "open" in fold.attrib]


@pytest.mark.slow
def test_every_colour_follows_the_style_sheet(compared):
    body = compared[compared.index("<main>") :]
    assert not re.search(r"#[0-9a-f]{6}", body)
    used = set(re.findall(r"var\(--([a-z0-9-]+)\)", compared))
    light, dark = re.findall(r":root \{([^}]*)\}", compared)
    for sheet in (light, dark):
        assert used <= set(re.findall(r"--([a-z0-9-]+):", sheet))


@pytest.mark.slow
def test_the_same_runs_give_the_same_page(tmp_path, make_run, references):
    runs = [summarize(make_run(tmp_path / name, name)) for name in ("mirrored", "central_storage")]
    pages = [write_page(tmp_path / f"{index}.html", runs, references).read_bytes() for index in range(2)]
    assert pages[0] == pages[1]


@pytest.mark.slow
def test_one_run_has_a_page_of_its_own(tmp_path, make_run):
    page = write_page(tmp_path / "report.html", [summarize(make_run(tmp_path / "mirrored"))]).read_text()
    root = _parse(page)
    text = _words(root)
    assert "examples/s 120 in steady state" in text
    assert "Does the loss fall? The loss fell: from 10.5 to 1.50 in 144 examples." in text
    assert root.find(f".//{XHTML}table") is None


@pytest.mark.slow
def test_a_resumed_run_has_a_page_without_the_failure_before(tmp_path, make_run, write_events):
    failed = [Saved(0, 2.5, 7, 4000, 0.01, 0.1), Failed(1, 3.35, 9, "ValueError: bad", "Traceback\n  bad")]
    run_dir = make_run(tmp_path / "mirrored", status="failed", extra=failed)
    started = summarize(run_dir).started
    write_events(run_dir, [structs.replace(started, time_s=4.0, resumed_step=7), RunEnded(LAUNCHER, 5.0, "ok")])
    text = _words(_parse(write_page(tmp_path / "report.html", [summarize(run_dir)]).read_text()))
    assert "attempts 2, resumed at step 7" in text
    assert "checkpoints 1, the last at step 7" in text
    assert "ValueError" not in text


@pytest.mark.slow
def test_a_run_without_a_step_has_a_page(tmp_path, make_run, write_events):
    started = summarize(make_run(tmp_path / "a")).started
    events = [started, Failed(LAUNCHER, 1.0, 0, "rank 1 was killed"), RunEnded(LAUNCHER, 1.1, "failed")]
    page = write_page(tmp_path / "b.html", [summarize(write_events(tmp_path / "b", events))]).read_text()
    text = _words(_parse(page))
    assert "nothing to draw" in text
    assert "Failed after 0 epochs, 0 steps in 0 ms: at step 0, says the launcher: rank 1 was killed." in text


def test_a_page_of_nothing_is_refused(tmp_path):
    with pytest.raises(UsageError, match="at least one run"):
        write_page(tmp_path / "report.html", [])


@pytest.mark.slow
def test_a_picture_holds_its_words_and_numbers_as_text():
    colours = colours_of(["mirrored"])
    svg = draw_bars("T", [Bar("mirrored", "12 ms", [(3.0, colours["mirrored"])], [Mark(4.0)], True)], "ms")
    root = ElementTree.fromstring(svg)
    words = [element.text for element in root.iter(f"{SVG}text")]
    assert {"mirrored", "12 ms", "ms", "3.00"} <= set(words)
    assert root.get("aria-label") == "T"
    curve = draw_curves("U", [Curve([(1.0, 2.0)], colours["mirrored"], dots=True)], "x", "y_$a$", log=True)
    assert "y_$a$" in [element.text for element in ElementTree.fromstring(curve).iter(f"{SVG}text")]


def test_strategies_keep_their_colours():
    alone = colours_of(["mirrored"])["mirrored"]
    together = colours_of(["one_device", "zeta", "mirrored", "alpha"])
    assert together["mirrored"] == alone
    assert len(set(together.values())) == 4
    assert all(f"--{colour}:" in style_variables(dark=False) for colour in together.values())


@pytest.mark.usefixtures("real_python")
@pytest.mark.slow
def test_importing_the_room_imports_nothing_slow():
    slow = ("torch", "matplotlib", "rich", "numpy", "tensorboard")
    views = "headrace.report.views.page, headrace.report.views.live, headrace.report.trackers.tensorboard"
    code = f"import sys, {views}; print([name for name in {slow} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_an_event_file_that_is_cut_is_on_the_page(tmp_path, make_run):
    run_dir = make_run(tmp_path / "a")
    file = run_dir / "events" / "rank-1.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    page = write_page(tmp_path / "a.html", [summarize(run_dir)]).read_text(encoding="utf-8")
    assert "1 event file ends in half a line: what that process did after it is not known" in page
