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
"""


class ExtensionKind(StrEnum):
    """What can be begun."""

    STRATEGY = "strategy"
    SCHEDULE = "schedule"
    CODEC = "codec"
    SOURCE = "source"
    TRACKER = "tracker"


_NEXT = {
    ExtensionKind.STRATEGY: 'headrace train job.py --strategy "{place}(workers=2)"',
    ExtensionKind.SCHEDULE: "headrace train job.py --strategy \"pipeline(stages=2, schedule='{place}')\"",
    ExtensionKind.CODEC: "headrace train job.py --strategy \"parameter_server(push_codec='{place}')\" --workers 2",
    ExtensionKind.SOURCE: "from {module} import {name}  # in a job file: hr.Job(data=hr.data.Pipeline({name}()), ...)",
    ExtensionKind.TRACKER: "from {module} import {name}  # hr.fit(job, on_event={name}('numbers.jsonl'))",
}


@command(_EXAMPLES)
def new(
    answer: Answer,
    kind: Annotated[ExtensionKind, argument("KIND", "strategy, schedule, codec, source or tracker.")],
    name: Annotated[str, argument("NAME", "Of the file; the class is named for it: slow_mo, SlowMo.")],
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
    place = f"{folder / name}.py:{words['Name']}"
    test = f"python -m pytest {folder / f'test_{name}.py'}"
    use = _NEXT[kind].format(place=place, module=name, name=words["Name"])
    written = [str(file) for file in files]
    answer.give(
        {"files": written, "test": test, "use": use}, "\n".join([*(f"wrote {file}" for file in written), test, use])
    )
