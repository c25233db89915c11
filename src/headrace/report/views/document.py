"""The frame of a page that needs nothing else, and the tables and figures in it; texts are escaped by the caller."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from pathlib import Path

from headrace.report.format import clean
from headrace.report.views.style import Picture, colour_sheet


def write_document(path: Path, title: str, body: Iterable[str]) -> Path:
    """Writes a page: the style sheet, light and dark, and the sections of `body`; makes its directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    style = resources.files("headrace.report").joinpath("page.css").read_text(encoding="utf-8")
    text = (
        "<!DOCTYPE html>\n"
        '<html lang="en" xmlns="http://www.w3.org/1999/xhtml">\n<head>\n<meta charset="utf-8"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        '<meta name="color-scheme" content="light dark"/>\n'
        f"<title>headrace: {html_text(title)}</title>\n<style>\n"
        f"{colour_sheet(':root', 'color-scheme: light dark; ')}"
        f"{style}</style>\n</head>\n<body>\n<main>\n" + "\n".join(body) + "\n</main>\n</body>\n</html>\n"
    )
    path.write_text(text, encoding="utf-8")
    return path


_CODE = re.compile("`([^`]+)`")


def page_header(
    eyebrow: str, heading: str, lede: str = "", facts: Iterable[tuple[str, str]] = (), mood: str = "lede"
) -> str:
    """Returns the head of a page: its name, a sentence of the class `mood`, and what is known at once."""
    pairs = "".join(f"<div>{_definition(*each)}</div>" for each in facts)
    return (
        f'<header>\n<p class="eyebrow">{eyebrow}</p>\n<h1>{html_text(heading)}</h1>\n'
        + (f'<p class="{mood}">{coded(lede)}</p>\n' if lede else "")
        + (f'<dl class="facts">{pairs}</dl>\n' if pairs else "")
        + "</header>"
    )


def definitions(kind: str, pairs: Iterable[tuple[str, str]]) -> str:
    """Returns names and what is said of them; `kind` is a class of the style sheet."""
    return f'<dl class="{kind}">{"".join(_definition(*each) for each in pairs)}</dl>'


def _definition(name: str, words: str) -> str:
    return f"<dt>{html_text(name)}</dt><dd>{html_text(words)}</dd>"


def notices(lines: Iterable[str]) -> str:
    """Returns a list of sentences."""
    return f'<ul class="notices">{"".join(f"<li>{html_text(line)}</li>" for line in lines)}</ul>'


_EMBEDDED = """
{ background: var(--paper); color: var(--ink); padding: 12px 16px; font-size: 14px; line-height: 1.5; }
p { margin: 0 0 10px; max-width: 80ch; overflow-wrap: anywhere; }
h3 { font-size: 14px; margin: 12px 0 4px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; background: none; }
th, td { padding: 3px 0 3px 14px; text-align: right; vertical-align: baseline; border: 0; }
th:first-child { text-align: left; padding-left: 0; font-weight: 600; }
thead th { color: var(--quiet); font-weight: 500; vertical-align: bottom; border-bottom: 1px solid var(--quiet); }
dl { display: grid; grid-template-columns: minmax(90px, max-content) 1fr; gap: 2px 20px; margin: 0 0 10px; }
dt, figcaption, .quiet { color: var(--quiet); font-weight: 400; }
dd { margin: 0; overflow-wrap: anywhere; }
.best { font-weight: 650; }
.swatch { display: inline-block; width: 26px; height: 10px; margin-right: 8px; }
.key { display: flex; flex-wrap: wrap; gap: 2px 20px; margin: 0 0 8px; padding: 0; list-style: none; font-size: 13px; }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(300px, 480px)); gap: 16px 32px; }
figure { margin: 0; min-width: 0; }
figure svg { display: block; width: 100%; height: auto; overflow: visible; }
figcaption { font-size: 12.5px; margin-top: 4px; }
.answer { font-size: 13.5px; }
.spot:hover { fill: var(--ink); }
"""
"""Rules for what is inside an element of another document: a line is a selector's list and its declarations."""


def embedded(body: Iterable[str]) -> str:
    """Returns an element for another document, as a notebook's: its style sheet changes nothing around it."""
    rules = []
    for line in _EMBEDDED.strip().splitlines():
        selectors, _, declarations = line.partition("{")
        scoped = ", ".join(f".headrace {each.strip()}".strip() for each in selectors.split(","))
        rules.append(f"{scoped} {{{declarations}")
    return (
        f'<div class="headrace">\n<style>\n{colour_sheet(".headrace")}'
        + "\n".join([*rules, "</style>", *body])
        + "\n</div>"
    )


def html_text(text: str) -> str:
    """Returns text without control characters, escaped."""
    return escape(clean(text))


def coded(text: str) -> str:
    """Returns text as `html_text` does; what stands between backticks is code."""
    return _CODE.sub(r"<code>\1</code>", html_text(text))


def scrolled_table(heads: Iterable[str], rows: Iterable[str], first: str = "run") -> str:
    """Returns a table of rows of `table_row`, which scrolls if it is too wide; a line end breaks a head."""
    head = "".join(f'<th scope="col">{html_text(name).replace(chr(10), "<br/>")}</th>' for name in heads)
    label = f"Table by {first}" if first else "Table"
    return (
        f'<div class="scroll" tabindex="0" role="group" aria-label="{label}"><table>\n'
        f'<thead><tr><th scope="col">{first}</th>{head}</tr></thead>\n'
        f"<tbody>\n{chr(10).join(rows)}\n</tbody>\n</table></div>"
    )


def table_row(head: str, cells: Sequence[str], kind: str = "") -> str:
    """Returns a row; `kind` is a class of the style sheet."""
    of_kind = f' class="{kind}"' if kind else ""
    return f'<tr{of_kind}><th scope="row">{head}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'


def figures(title: str, drawn: Iterable[tuple[Picture, str]]) -> str:
    """Returns a section of pictures, each with its key."""
    return f"<section>\n<h2>{html_text(title)}</h2>\n{picture_list(drawn)}\n</section>"


def picture_list(drawn: Iterable[tuple[Picture, str]]) -> str:
    """Returns pictures side by side, each below its question, its answer and its key."""
    shown = "\n".join(
        f"<figure>\n<h3>{html_text(each.title)}</h3>\n{_answer(each)}{of_key}{each.svg}\n{_reading(each)}\n</figure>"
        for each, of_key in drawn
    )
    return f'<div class="pictures">\n{shown}\n</div>'


def _answer(picture: Picture) -> str:
    return f'<p class="answer">{html_text(picture.answer)}</p>\n' if picture.answer else ""


def _reading(picture: Picture) -> str:
    """Returns how to read a picture: folded where its answer is above it."""
    reading = html_text(picture.reading)
    if not picture.answer:
        return f"<figcaption>{reading}</figcaption>"
    return f"<figcaption><details><summary>How to read it</summary><p>{reading}</p></details></figcaption>"


def fold(title: str, said: str, body: str) -> str:
    """Returns a section that is folded until it is asked for; `said` stands beside its title."""
    beside = f' <span class="quiet">{html_text(said)}</span>' if said else ""
    return (
        f'<details class="fold">\n<summary><h2>{html_text(title)}</h2>{beside}</summary>\n'
        f'<div class="inside">\n{body}\n</div>\n</details>'
    )


def line_swatch(colour: str, width: float, dashes: Sequence[float] = ()) -> str:
    """Returns a piece of a line, as drawn in the pictures."""
    lengths = " ".join(f"{length * width / 1.4:g}" for length in dashes)
    pattern = f' stroke-dasharray="{lengths}"' if dashes else ""
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" class="swatch" viewBox="0 0 26 10" aria-hidden="true">'
        f'<line x1="0" y1="5" x2="26" y2="5" stroke-width="{width:g}"{pattern} '
        f'style="stroke: var(--{colour})"/></svg>'
    )


def picture_key(items: Iterable[str]) -> str:
    """Returns what tells the colours of pictures apart."""
    return f'<ul class="key">{"".join(f"<li>{item}</li>" for item in items)}</ul>\n'
