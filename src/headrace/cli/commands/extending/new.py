"""`headrace new`: a small file that runs, with its test, to begin an extension with."""

from __future__ import annotations

import keyword
from enum import StrEnum
from importlib import resources
from pathlib import Path
from string import Template
from typing import Annotated

from headrace.cli.command import argument, command, option
from headrace.cli.output import Answer
from headrace.errors import UsageError
from headrace.machine import disk

_EXAMPLES = """
  headrace new strategy slow_mo
  headrace new schedule one_by_one --folder research
  headrace new metric top_two
"""


class ExtensionKind(StrEnum):
    """What can be begun."""

    STRATEGY = "strategy"
    SCHEDULE = "schedule"
    CODEC = "codec"
    SOURCE = "source"
    TRACKER = "tracker"
    OUTER_STEP = "outer_step"
    RULE = "rule"
    MEAN = "mean"
    METRIC = "metric"
    CALLBACK = "callback"


_NEXT = {
    ExtensionKind.STRATEGY: 'headrace train job.py --strategy "{place}(workers=2)"',
    ExtensionKind.SCHEDULE: "headrace train job.py --strategy \"pipeline(stages=2, schedule='{place}')\"",
    ExtensionKind.CODEC: "headrace train job.py --strategy \"parameter_server(push_codec='{place}')\" --workers 2",
    ExtensionKind.SOURCE: "headrace train job.py --set job.data={place}",
    ExtensionKind.TRACKER: "headrace train job.py --tracker \"{place}('numbers.jsonl')\"",
    ExtensionKind.OUTER_STEP: "headrace train job.py --strategy \"parameter_averaging(outer='{place}')\" --workers 2",
    ExtensionKind.RULE: "headrace train job.py --strategy \"aggregated(by='{place}')\" --workers 2",
    ExtensionKind.MEAN: "headrace train job.py --strategy \"parameter_averaging(mean='{place}')\" --workers 3",
    ExtensionKind.METRIC: "headrace train job.py --set job.metrics={place}",
    ExtensionKind.CALLBACK: "headrace train job.py --set job.callbacks={place}",
}


@command(_EXAMPLES)
def new(
    answer: Answer,
    kind: Annotated[ExtensionKind, argument("KIND", f"What it is: {', '.join(ExtensionKind)}.", show_choices=False)],
    name: Annotated[str, argument("NAME", "Of the file; what it defines is named for it: slow_mo, SlowMo.")],
    folder: Annotated[Path, option("--folder DIR", "Where to.")] = Path(),
) -> None:
    """Write a small extension that runs, with its test."""
    if not name.isidentifier() or name != name.lower() or keyword.iskeyword(name):
        raise UsageError(f"{name!r} cannot be a file's name; use small letters, digits and _, such as slow_mo")
    words = {"name": name, "Name": "".join(part.capitalize() for part in name.split("_"))}
    files = {folder / f"{name}.py": f"{kind}.txt", folder / f"test_{name}.py": f"test_{kind}.txt"}
    if there := [str(file) for file in files if disk.is_file(file)]:
        raise UsageError(f"{' and '.join(there)} exists; give another name, or --folder")
    folder.mkdir(parents=True, exist_ok=True)
    for file, template in files.items():
        text = resources.files(__package__).joinpath("templates", template).read_text(encoding="utf-8")
        file.write_text(Template(text).substitute(words), encoding="utf-8")
    place = f"{folder / name}.py:{words['name' if kind is ExtensionKind.METRIC else 'Name']}"
    test = f"python -m pytest {folder / f'test_{name}.py'}"
    use = _NEXT[kind].format(place=place)
    written = [str(file) for file in files]
    answer.give(
        {"files": written, "test": test, "use": use}, "\n".join([*(f"wrote {file}" for file in written), test, use])
    )
