"""Runs as one page that needs nothing else: no network, no script, light and dark."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from headrace.errors import UsageError
from headrace.report.drawing.curves import Curve, draw_curves
from headrace.report.format import MISSING, duration, fixed, plural, short, to_cells, to_heads, torn_text
from headrace.report.model.summary import Summary, brief_of
from headrace.report.model.training import CURVE_POINTS, STEP_PARTS, WARM_UP_STEPS, rank_of
from headrace.report.model.verdict import References, verdict
from headrace.report.views.document import (
    coded,
    definitions,
    embedded,
    fold,
    html_text,
    line_swatch,
    notices,
    page_header,
    picture_key,
    picture_list,
    scrolled_table,
    table_row,
    write_document,
)
from headrace.report.views.pictures import (
    AVERAGING,
    LEARNING,
    PIPELINE,
    SHARES,
    WORKERS,
    main_pictures,
    pictures,
    rate_marks,
)
from headrace.report.views.server_pictures import SERVER_GROUP
from headrace.report.views.server_subjects import SERVERS
from headrace.report.views.style import PARTS, Picture, RunStyle, run_styles
from headrace.report.views.subjects import BOTTLENECK, INPUT, INPUT_STAGE, PREDICTED, predicted_figures
from headrace.report.views.table import COLUMNS, ComparedRun, differing_line, ending, first_metric, run_rows

_OWN = (PIPELINE, SERVER_GROUP, AVERAGING, SHARES, WORKERS)
"""Groups of which one has the picture of a run's strategy."""

LOGGED, _MOST_NUMBERS, _MOST_RANKS = "Logged numbers", 12, 8
"""The fold of numbers that a run has logged itself, how many pictures it has, and how many curves of a run."""

_HOW = {
    "Examples a second": (
        f"Steady state: the first {WARM_UP_STEPS} steps of each worker (half of its steps, in a short run) and all "
        "evaluations are left out; then the examples of all workers over the time that passed."
    ),
    "× one": (
        "Over one process with all threads of the machine: what one has without any distribution. Below 1, "
        "distribution costs speed."
    ),
    "× ceiling": (
        "Over as many workers that train at the same time and exchange nothing, with the same memory allocator "
        "settings: what is left to lose to the exchange."
    ),
    "Moved a step": (
        "Bytes that workers sent, or wrote for others to read, and received, in one step of all workers together."
    ),
    "Time in a step": (
        "Means over the workers, from clocks around each part. On a GPU, kernels run on while the clock already "
        "counts the next part."
    ),
}


def write_page(path: Path | str, summaries: Sequence[Summary], references: References | None = None) -> Path:
    """Writes one run or a comparison as one HTML file and returns its path; makes its directory.

    Raises:
        UsageError: `summaries` is empty.
    """
    if not summaries:
        raise UsageError("a page needs at least one run, got none")
    title = _title(summaries)
    return write_document(Path(path), title, _page(title, summaries, references or References()))


def _title(summaries: Sequence[Summary]) -> str:
    """Returns the job that all runs are of, and how many they are; where they have several files, the runs' names."""
    jobs = {each.started.job.path if each.started.job else "" for each in summaries}
    file = Path(jobs.pop()) if len(jobs) == 1 else Path()
    # job.py says less than its folder.
    named = file.parent.name if file.stem == "job" else file.stem
    if len(summaries) > 1 and named:
        differ = len({each.strategy for each in summaries}) == len(summaries)
        return f"{named}: {len(summaries)} strategies" if differ else f"{named}: {plural(len(summaries), 'run')}"
    return ", ".join(each.name for each in summaries) if len(summaries) <= 4 else f"{len(summaries)} runs compared"


def page_fragment(summaries: Sequence[Summary], references: References | None = None) -> str:
    """Returns one run or a comparison as an element for another document: a table and the main pictures."""
    known = references or References()
    if len(summaries) > 1:
        above = [f"<p>{html_text(verdict(summaries, known))}</p>", _table(summaries, known)]
    else:
        above = [_run_list(summaries[0], known, without=("status",) if ending(summaries[0]) else ())]
    alerts = (f"<p><strong>{coded(ending(each))}</strong></p>" for each in summaries if ending(each))
    drawn = main_pictures(summaries, known)
    keys = _keys(summaries, known)
    shown = picture_list((each, keys[each.key]) for each in drawn)
    return embedded([*alerts, *above, shown])


def _numbers(summaries: Sequence[Summary]) -> list[Picture]:
    """Returns a picture of each number that runs have logged, with a curve for each rank of a run."""
    drawn = []
    reading = f"As a callback, the strategy or the loop has logged it, of at most {_MOST_RANKS} ranks of a run."
    names = dict.fromkeys(rank_of(curve)[0] for each in summaries for curve in each.numbers)
    for name in list(names)[:_MOST_NUMBERS]:
        curves = []
        for run, style in zip(summaries, run_styles(summaries), strict=True):
            ranks = [curve for curve in run.numbers if rank_of(curve)[0] == name][:_MOST_RANKS]
            for place, curve in enumerate(ranks):
                colour = f"series-{place}" if len(summaries) == 1 else style.colour
                of = [run.name] * (len(summaries) > 1) + [rank_of(curve)[1]] * (len(ranks) > 1)
                points = run.numbers[curve][:: -(-len(run.numbers[curve]) // CURVE_POINTS)]
                curves.append(Curve(points, colour, style.dashes, name=" ".join(of)))
        last = ", ".join(f"{each.name} {short(each.points[-1][1])}".strip() for each in curves)
        title = f"How does {name} go?"
        drawn.append(
            Picture(title, draw_curves(title, curves, "rounds", name), reading, "runs", f"Last: {last}.", LOGGED)
        )
    return drawn


def _page(title: str, summaries: Sequence[Summary], references: References) -> list[str]:
    """Returns what answers most questions, and below it the rest, folded."""
    drawn = [*pictures(summaries, references), *_numbers(summaries)]
    keys = _keys(summaries, references)
    tables = {SERVER_GROUP: _servers(summaries), "Input": _inputs(summaries)}
    groups: dict[str, list[Picture]] = {each.group: [] for each in drawn if each.group}
    groups |= {group: groups.get(group, []) for group, table in tables.items() if table}
    for each in drawn:
        if each.group:
            groups[each.group].append(each)
    first, alone = [each for each in drawn if not each.group], len(summaries) == 1
    if alone:
        # The picture of the strategy's own is one of the first four.
        own = next((groups[group].pop(0) for group in _OWN if groups.get(group)), None)
        more, first = first[3:], [*first[:3], *([own] if own else first[3:4])]
        groups[LEARNING] = [*(more if own else more[1:]), *groups.get(LEARNING, [])]
        groups = {group: found for group, found in groups.items() if found or tables.get(group)}
    folded = _all_figures(summaries[0], references) if alone else []
    folded += [_fold(group, tables.get(group, ""), found, keys) for group, found in groups.items()]
    folded += [_notices(summaries, references), fold("How the numbers are made", "", definitions("how", _HOW.items()))]
    return [
        _header(title, summaries, references),
        *(_alert(each) for each in summaries if each.status != "ok" and (len(summaries) > 1 or _traceback(each))),
        *([] if alone else [_runs(summaries, references)]),
        _figures(first, keys),
        f'<section class="folds">\n{chr(10).join(folded)}\n</section>',
    ]


def _fold(title: str, table: str, drawn: Sequence[Picture], keys: Mapping[str, str]) -> str:
    said = next((each.answer for each in drawn if each.answer), "")
    shown = picture_list((each, keys[each.key]) for each in drawn) if drawn else ""
    return fold(title, said, f"{table}\n{shown}" if table and shown else table or shown)


def _header(title: str, summaries: Sequence[Summary], references: References) -> str:
    first = summaries[0].started
    lede = verdict(summaries, references) if len(summaries) > 1 else brief_of(summaries[0]).headline
    hosts = dict.fromkeys(host for each in summaries for host in each.outcome.hosts)
    batches = dict.fromkeys(str(each.started.global_batch_size) for each in summaries)
    sets = dict.fromkeys(f"{each.started.examples_per_epoch:,} examples" for each in summaries)
    if len(summaries) == 1:
        ended = summaries[0].outcome.words and summaries[0].status
        mood = {"failed": "lede alert", "unfinished": "lede alert", "interrupted": "lede alert asked"}.get(
            ended, "lede"
        )
        return page_header("headrace", title, lede, brief_of(summaries[0]).tiles, mood)
    facts = (
        ("started", first.started_at.replace("T", " ", 1)),
        (
            "machine",
            f"{', '.join(hosts) or MISSING} ({', '.join(dict.fromkeys(each.started.device for each in summaries))})",
        ),
        ("training set", ", ".join(sets)),
        ("global batch", ", ".join(batches)),
        ("versions", ", ".join(f"{name} {version}" for name, version in first.versions.items())),
    )
    return page_header("headrace", title, lede, facts)


def _alert(summary: Summary) -> str:
    trace = _traceback(summary)
    shown = f"<pre>{html_text(trace)}</pre>" if trace else ""
    return f'<section class="alert"><p>{html_text(ending(summary))}</p>{shown}</section>'


def _traceback(summary: Summary) -> str:
    return summary.outcome.failure.traceback if summary.outcome.failure else ""


def _runs(summaries: Sequence[Summary], references: References) -> str:
    differ = differing_line(summaries, references)
    below = f'\n<p class="quiet">{html_text(differ)}</p>' if differ else ""
    return f"<section>\n<h2>Side by side</h2>\n{_table(summaries, references)}{below}\n</section>"


def _all_figures(summary: Summary, references: References) -> list[str]:
    """Returns what is known of one run, and what it was started with, each folded."""
    started = summary.started
    facts = (
        ("command", started.command),
        ("model", started.model),
        ("optimizer", started.optimizer),
        ("job", started.job.path if started.job else ""),
        ("settings", ", ".join(started.job.settings) if started.job else ""),
        ("started", started.started_at.replace("T", " ", 1)),
        ("machine", f"{', '.join(summary.outcome.hosts) or MISSING} ({started.device})"),
        ("cores", str(started.cores or MISSING)),
        ("training set", f"{started.examples_per_epoch:,} examples"),
        ("global batch", str(started.global_batch_size)),
        ("versions", ", ".join(f"{name} {version}" for name, version in started.versions.items())),
    )
    said = "; ".join(filter(None, (started.model, started.optimizer)))
    return [
        fold("All figures", _speed(summary), _run_list(summary, references) + _predicted(summary)),
        fold("Configuration", said, definitions("run", [each for each in facts if each[1]])),
    ]


def _speed(summary: Summary) -> str:
    return summary.bottleneck.line if summary.bottleneck else ""


def _run_list(summary: Summary, references: References, without: Sequence[str] = ()) -> str:
    """Returns what is known of one run, as names and values."""
    rows = [(name, value) for name, value in run_rows(summary) if name not in ("run", "notice", "predicted", *without)]
    against = references.to_one_device(summary)
    if against is not None:
        rows.append(("× one process", f"{fixed(against)} of one process with all threads"))
    return definitions("run", rows)


def _predicted(summary: Summary) -> str:
    """Returns what was predicted beside what was measured; nothing where no prediction is known."""
    rows = [
        table_row(html_text(each.name), list(map(html_text, to_cells(PREDICTED, each))))
        for each in predicted_figures(summary)
    ]
    table = scrolled_table(to_heads(PREDICTED), rows, "figure")
    return f"\n<section>\n<h2>Predicted and measured</h2>\n{table}\n</section>" if rows else ""


def _table(summaries: Sequence[Summary], references: References) -> str:
    metric = first_metric(summaries)
    fastest = max((each.examples_per_s or 0.0 for each in summaries if each.status == "ok"), default=0.0)
    heads = to_heads(COLUMNS)
    rate = heads.index("examples/s")
    rows = []
    for each, style in zip(summaries, run_styles(summaries), strict=True):
        cells = [html_text(cell) for cell in to_cells(COLUMNS, ComparedRun(each, references, metric))]
        if each.examples_per_s == fastest and each.status == "ok":
            cells[rate] = f'<span class="best">{cells[rate]}</span>'
        marked = each.status if each.status != "ok" else "disturbed" if references.disturbed(each) else ""
        status = f" ({html_text(marked)})" if marked else ""
        rows.append(table_row(f"{_swatch(style)}{html_text(each.name)}{status}", cells))
    if references.one_device_examples_per_s and not any(each.strategy == "one_device" for each in summaries):
        cells = ["", "", short(references.one_device_examples_per_s), "1.00", *[""] * 7]
        rows.append(table_row("one process, all threads", cells, "quiet"))
    return scrolled_table([metric if head == "metric" and metric else head for head in heads], rows)


def _rows(summaries: Sequence[Summary], heads: Sequence[str], cells: Callable[..., list[str]]) -> str:
    """Returns a table with a row for each run for which `cells` returns some; nothing where it returns none."""
    found = [(each, style, cells(each)) for each, style in zip(summaries, run_styles(summaries), strict=True)]
    rows = [
        table_row(_swatch(style) + html_text(each.name), list(map(html_text, row)))
        for each, style, row in found
        if any(row)
    ]
    return scrolled_table(heads, rows) if rows else ""


def _servers(summaries: Sequence[Summary]) -> str:
    if len(summaries) == 1:
        return ""
    return _rows(summaries, to_heads(SERVERS), lambda each: to_cells(SERVERS, each.servers))


def _inputs(summaries: Sequence[Summary]) -> str:
    if len(summaries) == 1:
        return _stages(summaries[0])

    def cells(summary: Summary) -> list[str]:
        return [*to_cells(BOTTLENECK, summary.bottleneck), *to_cells(INPUT, summary.inputs)]

    return _rows(summaries, [*to_heads(BOTTLENECK), *to_heads(INPUT)], cells)


def _stages(summary: Summary) -> str:
    """Returns what each stage of one run's input cost, and how long each worker waited for it."""
    inputs = summary.inputs
    if inputs is None:
        return ""
    rows = [table_row(html_text(stage.name), to_cells(INPUT_STAGE, (inputs, stage))) for stage in inputs.stages]
    waits = (
        f"rank {rank} waited {duration(each.waited_s)} of {duration(each.seconds)} for data"
        for rank, each in inputs.by_rank.items()
    )
    return f"{scrolled_table(to_heads(INPUT_STAGE), rows, 'stage')}\n{notices(waits)}"


def _swatch(style: RunStyle) -> str:
    return line_swatch(style.colour, style.width * 1.4, style.dashes)


def _figures(drawn: Sequence[Picture], keys: Mapping[str, str]) -> str:
    if not drawn:
        nothing = '<p class="quiet">No step was finished: there is nothing to draw.</p>'
        return f"<section><h2>Pictures</h2>{nothing}</section>"
    shown = picture_list((each, keys[each.key]) for each in drawn)
    return f'<section class="asked">\n<h2 class="unseen">Pictures</h2>\n{shown}\n</section>'


def _keys(summaries: Sequence[Summary], references: References) -> Mapping[str, str]:
    """Returns what tells the colours of a picture apart, by `Picture.key`."""
    marks = rate_marks(summaries, references)
    lines = (
        picture_key(f"{line_swatch('ink', 2.8, dashes)}{html_text(words)}" for dashes, words in marks) if marks else ""
    )
    styled = list(zip(summaries, run_styles(summaries), strict=True))
    return {
        "runs": _runs_key(styled),
        "served": _runs_key([(run, style) for run, style in styled if run.servers is not None]),
        "averaged": _runs_key([(run, style) for run, style in styled if run.averaging is not None]),
        "parts": picture_key(
            f'<span class="box" style="background: var(--{colour})"></span>{STEP_PARTS[part]}'
            for part, colour in PARTS.items()
        ),
        "marks": lines,
        "": "",
    }


def _runs_key(styled: Sequence[tuple[Summary, RunStyle]]) -> str:
    if len(styled) < 2:
        return ""
    return picture_key(f"{_swatch(style)}{html_text(each.name)}" for each, style in styled)


def _notices(summaries: Sequence[Summary], references: References) -> str:
    said: dict[str, list[str]] = {}
    for each in summaries:
        for notice in each.outcome.notices:
            said.setdefault(notice, []).append(each.name)
    # What is said of the job is the same under several strategies.
    lines = [f"{', '.join(names)}: {notice}" if len(summaries) > 1 else notice for notice, names in said.items()]
    lines += [f"{each.name}: disturbed: {why}" for each in summaries if (why := references.disturbed(each))]
    lines += [f"{each.name}: {torn_text(each.outcome.torn_lines)}" for each in summaries if each.outcome.torn_lines]
    return fold("Notices", lines[0], notices(lines)) if lines else ""
