"""The answers: one command and one picture a page, the same in both languages, and pictures drawn of what is shown."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from docs.pages import ROOT, blocks

ENGLISH, SPANISH = ROOT / "docs" / "answers", ROOT / "docs" / "es" / "answers"
NAMES = sorted(page.stem for page in ENGLISH.glob("*.md") if page.stem != "index")
_PICTURE = re.compile(r"!\[([^\]]+)\]\(([^)\s]+)\)")
_DEEPER = re.compile(r"\]\(((?:\.\./)+(?:ideas|guide)/[^)\s]+)\)")


@pytest.fixture(scope="module")
def drawing() -> Iterator[ModuleType]:
    """The script that draws, as a module."""
    given = importlib.util.spec_from_file_location("draw", ENGLISH / "images" / "draw.py")
    assert given is not None
    assert given.loader is not None
    module = importlib.util.module_from_spec(given)
    with pytest.MonkeyPatch.context() as patch:
        # A dataclass looks for the module that it is in.
        patch.setitem(sys.modules, "draw", module)
        given.loader.exec_module(module)
        yield module


def test_every_answer_is_there_in_both_languages() -> None:
    assert len(NAMES) > 5
    assert sorted(page.stem for page in SPANISH.glob("*.md")) == sorted([*NAMES, "index"])


@pytest.mark.parametrize("name", NAMES)
def test_a_page_and_its_twin_show_the_same(name: str) -> None:
    english, spanish = ENGLISH / f"{name}.md", SPANISH / f"{name}.md"
    shown = [(block.language, block.text, block.measured) for block in blocks(english)]
    assert shown == [(block.language, block.text, block.measured) for block in blocks(spanish)]
    assert [text.count("\n$ ") for language, text, _ in shown if language == "console"] == [0]
    assert all(text.startswith("$ ") for language, text, _ in shown if language == "console")
    for page, picture in ((english, f"images/{name}.svg"), (spanish, f"../../answers/images/{name}.es.svg")):
        text = page.read_text(encoding="utf-8")
        assert re.match(r"# .+\?", text)
        assert [target for _, target in _PICTURE.findall(text)] == [picture]
        assert _DEEPER.search(text)


@pytest.mark.parametrize("folder", [ENGLISH, SPANISH], ids=["en", "es"])
@pytest.mark.parametrize("name", NAMES)
def test_an_answer_comes_first_then_its_picture_then_how_to_measure_it(name: str, folder: Path) -> None:
    text = (folder / f"{name}.md").read_text(encoding="utf-8")
    picture, folded, end = (text.index(words) for words in ("\n![", "\n<details markdown>\n", "\n</details>\n"))
    assert len(text[:picture].split()) > 20
    assert picture < folded
    assert "```" not in text[:folded] + text[end:]


@pytest.mark.parametrize("name", [*NAMES, "index"])
def test_the_figures_in_the_text_of_a_page_and_its_twin_are_the_same(name: str) -> None:
    spanish = figures(SPANISH / f"{name}.md").translate(str.maketrans(".,", ",."))
    assert sorted(figures(ENGLISH / f"{name}.md").split()) == sorted(spanish.split())


def figures(page: Path) -> str:
    """Returns the numbers of a page's text, without code and the targets of links."""
    text = re.sub(r"^```.*?^```$|`[^`]*`|\]\([^)]*\)", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    return " ".join(re.findall(r"\d+(?:[.,]\d+)*", text))


@pytest.mark.parametrize("folder", [ENGLISH, SPANISH], ids=["en", "es"])
def test_the_index_has_every_question_as_its_page_asks_it(folder: Path) -> None:
    index = (folder / "index.md").read_text(encoding="utf-8")
    titles = {name: (folder / f"{name}.md").read_text(encoding="utf-8").splitlines()[0][2:] for name in NAMES}
    assert [name for name, title in titles.items() if f"- [{title}]({name}.md)" not in index] == []


def test_each_of_twenty_questions_leads_to_the_answer_that_measures_it() -> None:
    asked = []
    for folder in (ENGLISH.parent, SPANISH.parent):
        text = (folder / "quiz.md").read_text(encoding="utf-8")
        found = re.findall(r"<summary>(\d+)\. .+\?</summary>\n\n.+\n?\[.+\]\(answers/(.+)\.md\)\n\n</details>", text)
        assert [int(number) for number, _ in found] == list(range(1, 21))
        asked.append([name for _, name in found])
    assert asked[0] == asked[1]
    assert set(asked[0]) <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_pictures_are_what_the_script_draws_of_the_page(name: str, drawing: ModuleType) -> None:
    for language in drawing.LANGUAGES:
        file = ENGLISH / "images" / drawing.file_of(name, language)
        assert file.read_text(encoding="utf-8") == drawing.draw(name, language), (
            f"run docs/answers/images/draw.py {name}"
        )


@pytest.mark.parametrize("name", NAMES)
def test_no_text_of_a_picture_is_outside_of_it(name: str, drawing: ModuleType) -> None:
    for language in drawing.LANGUAGES:
        picture = ElementTree.fromstring(drawing.draw(name, language))
        width = float(picture.get("width", "0"))
        texts = list(picture.iter("{http://www.w3.org/2000/svg}text"))
        assert len(texts) > 3
        for text in texts:
            length = drawing.LETTER * len(text.text or "")
            left = (
                float(text.get("x", "0"))
                - length * {"start": 0.0, "middle": 0.5, "end": 1.0}[text.get("text-anchor", "")]
            )
            assert -1 <= left <= left + length <= width + 1, text.text


@pytest.mark.slow
def test_what_was_measured_again_stands_in_both_pages(tmp_path: Path) -> None:
    name, wrong = "what-micro-batches-do", "an old figure"
    shutil.copytree(ENGLISH, tmp_path / "docs" / "answers")
    shutil.copytree(SPANISH, tmp_path / "docs" / "es" / "answers")
    pages = [tmp_path / page.relative_to(ROOT) / f"{name}.md" for page in (ENGLISH, SPANISH)]
    for page in pages:
        page.write_text(re.sub(r"^ 8 micro-batches.*$", wrong, page.read_text(), flags=re.MULTILINE))
        assert wrong in page.read_text()
    subprocess.run([sys.executable, tmp_path / "docs" / "answers" / "measure.py", name], timeout=60, check=True)
    for page in pages:
        assert page.read_text() == (ROOT / page.relative_to(tmp_path)).read_text()


def test_a_picture_of_lines_that_are_not_there_is_an_error(drawing: ModuleType) -> None:
    given = {"kind": "bars", "title": ["a", "b"], "rows": "^(?P<label>b): (?P<value>.+)"}
    with pytest.raises(ValueError, match=r"no line of what page\.md shows"):
        drawing._panel("page", given, "a: 1\n", "en")


@pytest.mark.parametrize(
    ("top", "marks"), [(1.0, [0, 0.2, 0.4, 0.6, 0.8, 1]), (0.26, [0, 0.1, 0.2, 0.3]), (18, [0, 5, 10, 15, 20])]
)
def test_ticks_are_round_numbers_that_reach_the_top(top: float, marks: list[float], drawing: ModuleType) -> None:
    assert drawing.ticks(top) == pytest.approx(marks)
