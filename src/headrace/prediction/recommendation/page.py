"""The page of a recommendation: time, efficiency and money by number of devices, and all candidates."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from headrace.prediction.recommendation.offers import Offer
from headrace.prediction.recommendation.recommend import Recommendation
from headrace.report.drawing.curves import Curve, draw_curves
from headrace.report.format import duration, percent, plural, short
from headrace.report.views.document import (
    figures,
    html_text,
    line_swatch,
    page_header,
    picture_key,
    scrolled_table,
    table_row,
    write_document,
)
from headrace.report.views.style import Picture, colours_of

_MOST_CURVES = 6
_MOST_ROWS = 60
_UNITS = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))


def write_page(path: Path, found: Recommendation, sentences: list[str], command: Sequence[str] = ()) -> None:
    """Writes the page, with the lines of the command that runs the winner; makes its directory."""
    head = page_header("headrace recommend", found.winner.text, " ".join(sentences))
    lines = f"<pre>{html_text(chr(10).join(command))}</pre>" if command else ""
    write_document(path, "recommendation", [head, lines, _pictures(found), _others(found), _table(found)])


def _pictures(found: Recommendation) -> str:
    families = [offer.candidate.family for offer in found.best][:_MOST_CURVES]
    colours = colours_of(families)
    alone = found.alone or found.winner
    longest = max(offer.seconds for family in families for offer in found.curve[family])
    unit, unit_s = next((each for each in _UNITS if longest >= 2 * each[1]), _UNITS[-1])

    def bars(family: str, size: float) -> list[tuple[float, float, float]]:
        """Where the times of the winner's family are expected; those of all would cover each other."""
        offers = found.curve[family] if family == found.winner.candidate.family else ()
        ends = ((each.candidate.devices, each.expected_s) for each in offers)
        return [(devices, least / size, most / size) for devices, (least, most) in ends]

    def picture(
        title: str, label: str, value: Callable[[Offer], float], reading: str, banded_s: float = 0.0
    ) -> tuple[Picture, str]:
        curves = [
            Curve(
                [(offer.candidate.devices, value(offer)) for offer in found.curve[family]],
                colours[family],
                dots=True,
                name=family,
                bars=bars(family, banded_s) if banded_s else (),
            )
            for family in families
        ]
        swatches = (f"{line_swatch(colours[family], 2.2)}{html_text(family)}" for family in families)
        svg = draw_curves(title, curves, "devices", label, whole_x=True, from_zero=True)
        return Picture(title, svg, reading), picture_key(swatches)

    drawn = [
        picture(
            "Time by devices",
            unit,
            lambda offer: offer.seconds / unit_s,
            f"To {found.goal.examples:,} examples. Bars: {found.winner.prediction.band.where}.",
            unit_s,
        ),
        picture(
            "Efficiency by devices",
            "of 1",
            lambda offer: alone.seconds * alone.candidate.devices / offer.seconds / offer.candidate.devices,
            "The speed-up over one device with the same global batch, over the number of devices.",
        ),
    ]
    if found.winner.money:
        drawn.append(
            picture("Money by devices", "price", lambda offer: offer.money, "Of all hosts that are used, whole.")
        )
    return figures("The best of each family", drawn)


def _others(found: Recommendation) -> str:
    """Returns the best of the other families, and what was not tried or does not fit, with the reasons."""
    told = [(offer.text, found.why_not(offer)) for offer in found.best if offer.text != found.winner.text]
    told += [("", note) for note in found.notes]
    told += [(f"{family}, {plural(number, 'candidate')}", why) for family, why, number in found.misfits]
    items = "".join(f"<li>{f'<b>{_name(name)}</b>: ' if name else ''}{html_text(why)}</li>" for name, why in told)
    return f'<section>\n<h2>Why not the others</h2>\n<ul class="notices">{items}</ul>\n</section>' if told else ""


def _name(text: str) -> str:
    """Returns a strategy, which is broken between words if it must be."""
    return re.sub(r"([_(=])", r"\1<wbr/>", html_text(text))


def _table(found: Recommendation) -> str:
    priced = any(offer.money for offer in found.offers)
    heads = ("devices", "hosts", "time", *(["money"] if priced else []))
    rows = []
    for offer in found.offers[:_MOST_ROWS]:
        prediction = offer.prediction
        why = "" if offer.text == found.winner.text else found.why_not(offer)
        cells = (
            str(offer.candidate.devices),
            str(len(offer.hosts)),
            duration(offer.seconds),
            *([short(offer.money)] if priced else []),
            f'<div class="words end">{html_text(prediction.bottleneck)}</div>',
            percent(prediction.shares.get("network", 0.0)),
            short(prediction.memory_bytes / 1e9),
            f'<div class="words">{html_text(why)}</div>',
        )
        rows.append(table_row(_name(offer.text), cells, "best" if offer.text == found.winner.text else ""))
    rest = len(found.offers) - len(rows)
    more = f'<p class="quiet">and {rest} more</p>' if rest > 0 else ""
    if found.bounded:
        more += f'<p class="quiet">{len(found.bounded)} bounded, not simulated</p>'
    heads = (*heads, "bottleneck", "network", "memory [GB]", "why not")
    return f"<section>\n<h2>Candidates</h2>\n{scrolled_table(heads, rows, 'strategy')}{more}\n</section>"
