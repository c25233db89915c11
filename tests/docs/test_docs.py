"""The documentation is true: its code runs and prints what it shows, its links lead somewhere, no name is left out."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import headrace as hr
from docs.pages import ROOT, Block, blocks, pages, run_page, unmatched, write_files
from headrace import errors
from headrace.cli import COMMANDS, app
from headrace.spec import events
from headrace.strategies import STRATEGIES
from headrace.strategies.table import unknown_strategy

DOCS = ROOT / "docs"
# Its code is applied to a copy of the tree by test_add_a_strategy.py.
RECIPES = [DOCS / "guide" / "add-a-strategy.md"]
# The Spanish pages have the blocks of the English ones, as test_answers.py checks.
RUNNABLE = [
    page
    for page in pages()
    if page not in RECIPES
    and not page.is_relative_to(DOCS / "es")
    and any(it.language in ("python", "console") for it in blocks(page))
]
QUICK_ANSWERS = ("one-server-or-many", "twenty-machines", "what-micro-batches-do", "when-words-are-unevenly-frequent")
"""Their commands simulate, or ask a rule: a second or two. Other answers train."""
READ_FIRST = ("first-steps", "strategies", "jobs", "data", "plain-scripts", "2-two-workers")
"""What the usual run has of the guide and the tutorial."""
_LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)")
_PICTURE = re.compile(r"!\[[^\]]*\]\(([^)\s]+)\)|srcset=\"([^\"]+)\"|src=\"([^\"]+)\"")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def in_full_runs_only(page: Path) -> bool:
    chosen = {"answers": QUICK_ANSWERS, "guide": READ_FIRST, "tutorial": READ_FIRST, "ideas": ()}
    chosen["libraries"] = ("checkpoints",)
    return page.stem not in chosen.get(page.parent.name, (page.stem,))


@pytest.mark.each_value
@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=name_of(page), marks=[pytest.mark.full] * in_full_runs_only(page)) for page in RUNNABLE],
)
def test_the_code_of_a_page_runs_and_prints_what_it_shows(page: Path, tmp_path: Path) -> None:
    if page.parent.name == "tutorial":
        # A reader has the files of the parts before.
        for before in sorted(page.parent.glob("*.md")):
            if before < page:
                write_files(before, tmp_path)
    assert run_page(page, tmp_path) > 0


def test_every_guide_and_idea_shows_something_that_runs() -> None:
    folders = {page.parent.name for page in RUNNABLE}
    assert {"guide", "ideas"} <= folders
    silent = [page for folder in ("guide", "ideas") for page in (DOCS / folder).glob("*.md")]
    assert [name_of(page) for page in silent if page not in (*RUNNABLE, *RECIPES)] == []


@pytest.mark.parametrize("page", sorted((DOCS / "ideas").glob("*.md")), ids=name_of)
def test_an_idea_has_a_picture_and_a_command_that_shows_it(page: Path) -> None:
    there = blocks(page)
    # Text that does not follow code is drawn; what follows code is what that prints.
    drawn = [block for block in there if block.language == "text" and not block.follows]
    assert drawn or _PICTURE.search(page.read_text(encoding="utf-8"))
    assert any(block.language == "console" for block in there)


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = [target for target in _LINK.findall(text) if "://" not in target]
    targets += [target for found in _PICTURE.findall(text) for target in found if target and "://" not in target]
    broken = []
    for target in targets:
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert broken == []


def anchors(page: Path) -> set[str]:
    """Returns the names that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [page for page in pages() if page not in RECIPES], ids=name_of)
def test_what_a_page_names_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    strange = []
    for front, name in re.findall(r"\bhr\.((?:data|tasks|metrics)\.)?([A-Za-z_]\w*)", text):
        home = importlib.import_module(f"headrace.{front[:-1]}") if front else hr
        if name not in home.__all__:
            strange.append(f"hr.{front}{name}")
    assert strange == []
    prose = re.sub(r"```(?:console|python).*?```", "", text, flags=re.DOTALL)  # these run, and may fail on purpose
    paths = set(re.findall(r"(?<![\w/])((?:scripts|examples|docs|tests|benchmarks|src)/[\w./-]*\w)", prose))
    assert sorted(path for path in paths - {"examples/s"} if not (ROOT / path).exists()) == []


@functools.cache
def understood() -> Mapping[str, Any]:
    """Returns the commands by name; to make them takes longer than to ask one."""
    return get_command(app).commands


def commands() -> list[str]:
    """Returns the commands of ours that pages show and no test runs."""
    shown = [line for page in pages() for block in blocks(page) if block.language == "sh" for line in lines_of(block)]
    return sorted({line for line in shown if line.startswith("headrace ")})


def lines_of(block: Block) -> list[str]:
    return block.text.replace("\\\n", " ").splitlines()


@pytest.mark.parametrize("line", commands())
def test_a_command_that_is_not_run_is_understood(line: str) -> None:
    _, name, *arguments = shlex.split(line, comments=True)
    understood()[name].make_context(name, arguments)


def test_every_page_can_be_reached_from_the_index() -> None:
    reached, left = set(), [DOCS / "index.md"]
    while left:
        index = left.pop()
        links = {(index.parent / link.partition("#")[0]).resolve() for link in _LINK.findall(index.read_text())}
        left += [page for page in links - reached if page.name == "index.md"]
        reached |= {index, *links}
    assert [name_of(page) for page in DOCS.rglob("*.md") if page not in reached] == []


def documented_names() -> list[str]:
    names = [f"hr.{name}" for name in hr.__all__]
    for front in ("data", "metrics", "tasks"):
        names += [f"hr.{front}.{name}" for name in importlib.import_module(f"headrace.{front}").__all__]
    return names


@pytest.mark.parametrize("name", documented_names())
def test_every_public_name_is_in_the_reference(name: str) -> None:
    assert f"`{name}" in (DOCS / "reference.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("page", "kind"), [("jobs", hr.Job), ("jobs", hr.Options), ("events-and-reports", hr.Run), ("own-loop", hr.Worker)]
)
def test_every_public_attribute_is_explained(page: str, kind: type) -> None:
    text = (DOCS / "guide" / f"{page}.md").read_text(encoding="utf-8")
    names = {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
    names |= {name for name, _ in inspect.getmembers(kind) if not name.startswith("_")}
    names |= set(inspect.signature(kind).parameters) if kind is hr.Job else set()
    words = set(re.findall(r"\w+", " ".join(re.findall(r"`[^`\n]+`", text))))
    assert sorted(name for name in names if not name.startswith("_") and name not in words) == []


def test_every_event_is_explained() -> None:
    text = (DOCS / "guide" / "events-and-reports.md").read_text(encoding="utf-8")
    kinds = [kind for kind in vars(events).values() if inspect.isclass(kind) and issubclass(kind, events.Event)]
    tags = {str(kind.__struct_config__.tag) for kind in kinds if kind is not events.Event}
    assert len(tags) > 20
    assert sorted(tag for tag in tags if f"`{tag}`" not in text) == []


def test_every_strategy_is_explained() -> None:
    text = (DOCS / "guide" / "strategies.md").read_text(encoding="utf-8")
    assert [name for name in STRATEGIES if f"`{name}`" not in text] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_of_a_command_is_explained(command: str) -> None:
    shown = CliRunner().invoke(app, [command, "--help"], prog_name="headrace").stdout
    text = (DOCS / "guide" / "command-line.md").read_text(encoding="utf-8")
    section = text.partition(f"## headrace {command}\n")[2].partition("\n## ")[0]
    options = set(re.findall(r"^  (?:-h, )?(--[\w-]+)", shown, re.MULTILINE)) - {"--help", "--json"}
    assert section
    assert "--help" in shown
    assert sorted(option for option in options if option not in section) == []


@pytest.mark.parametrize(
    ("shown", "printed", "missing"),
    [
        ("loss 0.178 after 5 steps", "begin\nloss  0.18 after 5 steps\n", None),
        ("loss 0.178 after 5 steps", "loss 0.2 after 5 steps", "loss 0.178 after 5 steps"),
        ("it took 3.0 ms, 1.5 x", "it took 17 ms, 0.9 x", None),
        ("0.5 ... 0.5", "0.5 and 7 and 0.51", None),
        ("loss 0.178 after 5 steps", "loss 0.178 after 7 steps", "loss 0.178 after 5 steps"),
        ("run ... steps", "run one: 3 steps", None),
        ("accuracy 0.9", "loss 0.9", "accuracy 0.9"),
        ("b\na", "a\nb", "a"),
    ],
)
def test_shown_lines_are_compared_with_printed_ones(shown: str, printed: str, missing: str | None) -> None:
    assert unmatched(shown.splitlines(), printed) == missing


@pytest.mark.parametrize(
    ("shown", "printed", "missing"),
    [
        ("1,234 files: 5 MB", "99 files: 0.7~ MB", None),
        ("-0.3 s: 4 steps", "+1.5 s: 12 steps", None),
        ("4 files", "4 steps", "4 files"),
        ("4 files", "4 files more", "4 files"),
    ],
)
def test_a_measured_block_is_compared_without_its_numbers(shown: str, printed: str, missing: str | None) -> None:
    assert unmatched([shown], printed, measured=True) == missing


def test_a_block_is_measured_if_the_line_above_says_so(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- measured -->\n```console\n$ a\n```\n\n<!-- measured -->\n\n```console\n$ b\n```\n")
    assert [block.measured for block in blocks(page)] == [True, False]


def test_the_pictures_are_what_the_scripts_draw(tmp_path: Path) -> None:
    for name in ("draw_verbs", "draw_choose"):
        script = (DOCS / "images" / f"{name}.py").read_text(encoding="utf-8")
        (tmp_path / f"{name}.py").write_text(script, encoding="utf-8")
        subprocess.run([sys.executable, tmp_path / f"{name}.py"], timeout=60, check=True)
        for ground in ("light", "dark"):
            file = f"{name.removeprefix('draw_')}-{ground}.svg"
            assert (tmp_path / file).read_text() == (DOCS / "images" / file).read_text()


def test_the_gallery_has_every_picture_with_the_commands_that_make_it() -> None:
    given = importlib.util.spec_from_file_location("shoot", DOCS / "images" / "shoot.py")
    assert given is not None
    assert given.loader is not None
    shoot = importlib.util.module_from_spec(given)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "shoot", shoot)  # a dataclass looks for the module that it is in
        given.loader.exec_module(shoot)
    sections = (DOCS / "gallery.md").read_text(encoding="utf-8").split("\n## ")[1:]
    shown = {re.findall(r'src="images/(\w+)-light.png"', text)[0]: text.replace("\\\n    ", "") for text in sections}
    assert list(shown) == list(shoot.SHOTS)
    for name, shot in shoot.SHOTS.items():
        assert f'srcset="images/{name}-dark.png"' in shown[name]
        assert [line for line in shot.command.split(" && ") if f"\n{line}\n" not in shown[name]] == []
    pictures = [file for name in shoot.SHOTS for file in (DOCS / "images").glob(f"{name}-*.png")]
    assert len(pictures) == 2 * len(shoot.SHOTS)
    assert sum(file.stat().st_size for file in pictures) < 1_500_000


def test_the_table_of_errors_is_the_tree_of_the_code() -> None:
    shown = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (\d) \| (.+) \|$", shown, re.MULTILINE)
    tree = re.findall(r"^[ │├└─]+── (\w+) +(.+)$", errors.__doc__ or "", re.MULTILINE)
    codes = {name: getattr(errors, name).exit_code for name in errors.__all__ if name != "HeadraceError"}
    assert sorted(name for name, _ in tree) == sorted(codes)
    told = [(name, re.search(r": exit code (\d)$", text), re.sub(r": exit code \d$", "", text)) for name, text in tree]
    assert [(name, int(code[1]), codes[name]) for name, code, _ in told if code and int(code[1]) != codes[name]] == []
    assert rows == [(name, str(codes[name]), text) for name, _, text in told]


@functools.cache
def texts_of_the_code() -> list[str]:
    """Returns the texts of src/headrace, without docstrings; what a text is formatted with is a NUL."""
    found = []
    for file in (ROOT / "src" / "headrace").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
        left_out = {node.value for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(it.value) if isinstance(it, ast.Constant) else "\0" for it in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in left_out:
                found.append(node.value)
    return found


def said(quoted: str) -> bool:
    """Whether a text of the code has these words, where each `...` stands for what it is formatted with, or more."""
    words = re.compile(".*\0.*".join(re.escape(part.strip()) for part in quoted.split("...")), re.DOTALL)
    return any(words.search(text) for text in texts_of_the_code())


def test_what_the_page_says_that_errors_say_is_what_they_say() -> None:
    shown = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    table = shown.partition("| it says |")[2].partition("\n\n")[0]
    quoted = [row.split(" | ")[0].removeprefix("| ") for row in table.splitlines()[2:]]
    assert len(quoted) > 20
    assert [words for words in quoted if not said(words)] == []
    assert not said("the loss is ... on worker ...")


def test_names_of_other_systems_stand_where_a_search_finds_them() -> None:
    shown = (DOCS / "coming-from.md").read_text(encoding="utf-8")
    told = {
        name: ours
        for names, ours in re.findall(r"^\| (`.*`) \| `(\w+)` \|$", shown, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", names)
    }
    for name, ours in told.items():
        assert f"`{name}` is `{ours}` here" in str(unknown_strategy(name))
    assert {"MirroredStrategy", "zero", "fsdp", "ddp"} <= set(told)
    assert "FAQ" in (DOCS / "answers" / "index.md").read_text(encoding="utf-8")
