"""The frame of a page that needs nothing else, and the tables and figures in it; texts are escaped by the caller."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources

from headrace.report.format import clean
from headrace.report.views.style import Picture, style_variables


def document(title: str, body: Iterable[str]) -> str:
    """Returns the text of a page: the style sheet, light and dark, and the sections of `body`."""
    style = resources.files("headrace.report").joinpath("page.css").read_text(encoding="utf-8")
    return (
        "<!DOCTYPE html>\n"
        '<html lang="en" xmlns="http://www.w3.org/1999/xhtml">\n<head>\n<meta charset="utf-8"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        '<meta name="color-scheme" content="light dark"/>\n'
        f"<title>headrace: {html_text(title)}</title>\n<style>\n"
        f":root {{ color-scheme: light dark; {style_variables(dark=False)} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {style_variables(dark=True)} }} }}\n"
        f"{style}</style>\n</head>\n<body>\n<main>\n" + "\n".join(body) + "\n</main>\n</body>\n</html>\n"
    )


def html_text(text: str) -> str:
    """Returns text without control characters, escaped."""
    return escape(clean(text))


def scrolled_table(heads: Iterable[str], rows: Iterable[str], first: str = "run") -> str:
    """Returns a table of rows of `table_row`, which scrolls if it is too wide; a line end breaks a head."""
    head = "".join(f'<th scope="col">{html_text(name).replace(chr(10), "<br/>")}</th>' for name in heads)
    return (
        f'<div class="scroll"><table>\n<thead><tr><th scope="col">{first}</th>{head}</tr></thead>\n'
        f"<tbody>\n{chr(10).join(rows)}\n</tbody>\n</table></div>"
    )


def table_row(head: str, cells: Sequence[str], kind: str = "") -> str:
    """Returns a row; `kind` is a class of the style sheet."""
    of_kind = f' class="{kind}"' if kind else ""
    return f'<tr{of_kind}><th scope="row">{head}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'


def figures(title: str, drawn: Iterable[tuple[Picture, str]]) -> str:
    """Returns a section of pictures, each with its key."""
    shown = "\n".join(
        f"<figure>\n<h3>{html_text(each.title)}</h3>\n{of_key}{each.svg}\n"
        f"<figcaption>{html_text(each.reading)}</figcaption>\n</figure>"
        for each, of_key in drawn
    )
    return f'<section>\n<h2>{html_text(title)}</h2>\n<div class="pictures">\n{shown}\n</div>\n</section>'


def picture_key(items: Iterable[str]) -> str:
    """Returns what tells the colours of pictures apart."""
    return f'<ul class="key">{"".join(f"<li>{item}</li>" for item in items)}</ul>\n'
