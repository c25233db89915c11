"""The page of a recommendation: time, efficiency and money by number of devices, and all candidates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from headrace.prediction.recommendation.offers import Offer
from headrace.prediction.recommendation.recommend import Recommendation
from headrace.report.format import duration, percent, short
from headrace.report.views.document import document, figures, html_text, picture_key, scrolled_table, table_row
from headrace.report.views.drawing import Curve, draw_curves
from headrace.report.views.style import STAND_INS, Picture, colours_of

_MOST_CURVES = 6
_MOST_ROWS = 60


def write_page(path: Path, found: Recommendation, sentences: list[str]) -> None:
    """Writes the page; makes its directory."""
    lede = " ".join(sentences)
    head = (
        '<header>\n<p class="eyebrow">headrace recommend</p>\n'
        f'<h1>{html_text(found.winner.text)}</h1>\n<p class="lede">{html_text(lede)}</p>\n</header>'
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(document("recommendation", [head, _pictures(found), _table(found)]), encoding="utf-8")


def _pictures(found: Recommendation) -> str:
    families = [offer.candidate.family for offer in found.best][:_MOST_CURVES]
    colours = colours_of(families)
    alone = found.alone or found.winner

    def picture(title: str, label: str, value: Callable[[Offer], float], reading: str) -> tuple[Picture, str]:
        curves = [
            Curve(
                [(offer.candidate.devices, value(offer)) for offer in found.curve[family]],
                colours[family],
                dots=True,
            )
            for family in families
        ]
        swatches = (f"{_swatch(STAND_INS[colours[family]])}{html_text(family)}" for family in families)
        svg = draw_curves(title, curves, "devices", label, whole_x=True, from_zero=True)
        return Picture(title, svg, reading), picture_key(swatches)

    drawn = [
        picture("Time by devices", "hours", lambda offer: offer.seconds / 3600, "To the goal."),
        picture(
            "Efficiency by devices",
            "of 1",
            lambda offer: alone.seconds * alone.candidate.devices / offer.seconds / offer.candidate.devices,
            "The speed-up over one device with the same global batch, a device.",
        ),
    ]
    if found.winner.money:
        drawn.append(
            picture("Money by devices", "price", lambda offer: offer.money, "Of all hosts that are used, whole.")
        )
    return figures("The best of each family", drawn)


def _swatch(colour: str) -> str:
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" class="swatch" viewBox="0 0 26 10" aria-hidden="true">'
        f'<line x1="0" y1="5" x2="26" y2="5" stroke-width="2.2" style="stroke: var(--{colour})"/></svg>'
    )


def _table(found: Recommendation) -> str:
    heads = ("devices", "hosts", "time", "money", "bottleneck", "network", "memory [GB]", "why not")
    rows = []
    for offer in found.offers[:_MOST_ROWS]:
        prediction = offer.prediction
        cells = (
            str(offer.candidate.devices),
            str(len(offer.hosts)),
            duration(offer.seconds),
            short(offer.money),
            html_text(prediction.bottleneck),
            percent(prediction.shares.get("network", 0.0)),
            short(prediction.memory_bytes / 1e9),
            "" if offer.text == found.winner.text else html_text(found.why_not(offer)),
        )
        rows.append(table_row(html_text(offer.text), cells))
    rest = len(found.offers) - len(rows)
    more = f'<p class="quiet">and {rest} more</p>' if rest > 0 else ""
    if found.bounded:
        more += f'<p class="quiet">{len(found.bounded)} bounded, not simulated</p>'
    return f"<section>\n<h2>Candidates</h2>\n{scrolled_table(heads, rows, 'strategy')}{more}\n</section>"
